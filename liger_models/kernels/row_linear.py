"""A linear layer for a single row, as in a step of decoding, which takes as long as reading the weight.

::

    y = x @ Wᵀ + b                        sums in fp32, one cast at the end
    p = act(gate) · up                    of a packed gate and up projection, cast as in `gated_act`

Each program multiplies a few rows of W with x and adds up the products, so that no part of a sum goes through memory.
Kernels for matrix units use only two thirds of the memory's bandwidth where W has few rows.
"""

import torch
from torch import Tensor

from .batch_invariance import is_batch_invariant
from .checks import check, check_floating
from .dispatch import LIBRARY, TRITON_DTYPES, on_device_of, tl, triton, use_triton
from .gated_act import _activation

ROWS = 4
COLUMNS = 1024
NUM_WARPS = 2
"""Rows and columns of W that a program reads in a step, and its warps. On an H200, for the projections of Llama 3.2 1B,
3B and Llama 3 8B, this is within 6 % of the best of 26 shapes, and 1.01 to 1.4 times as fast as cuBLAS."""


def row_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `row_linear` computes, in plain torch."""
    return torch.nn.functional.linear(x, weight, bias)


@triton.jit
def store_row(
    y, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store a program's ROWS sums of a row, with the bias, and the products of gates and ups if there is an ACT."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row, y, mask=row < N)
    if ACT != "":
        gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS // 2, 2]))
        a, _ = _activation(gate, ACT)
        result = tl.program_id(0).to(tl.int64) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        product = a.to(product_ptr.dtype.element_ty).to(tl.float32) * up
        tl.store(product_ptr + result, product.to(product_ptr.dtype.element_ty), mask=2 * result < N)


@triton.jit
def _row_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, N, K, weight_n,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        inside = start + column < K
        at = row[:, None] * weight_n + (start + column)[None, :]
        mask = (row < N)[:, None] & inside[None, :]
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + row, mask=row < N, other=0.0)
    store_row(y, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)


def takes_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `row_linear_forward` takes these: a single row, and tensors of one dtype as they are in memory.

    Never within `batch_invariant`: several rows would get other bits.
    """
    return (
        x.numel() == weight.shape[1] > 0
        and not is_batch_invariant()
        and x.dtype == weight.dtype
        and x.dtype in TRITON_DTYPES
        and (bias is None or bias.dtype == x.dtype)
        and weight.stride(1) == 1
        and use_triton(x)
    )


def row_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "", scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel: ``(y [..., N], act(gate) · up [..., N / 2])``; the second is empty without an activation.

    ``scales`` [N] in fp32 are factors of the rows of a weight in float8.
    """
    N, K = weight.shape
    y = x.new_empty(*x.shape[:-1], N)
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    columns = min(max(triton.next_power_of_2(K), 32), COLUMNS)
    with on_device_of(x):
        _row_linear_kernel[(triton.cdiv(N, ROWS),)](
            x.contiguous(), weight, scales, None if bias is None else bias.contiguous(), y, product, N, K,
            weight.stride(0), HAS_SCALE=scales is not None, HAS_BIAS=bias is not None, ACT=act, ROWS=ROWS,
            COLUMNS=columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    return y, product


LIBRARY.define("row_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(LIBRARY, "row_linear", "CompositeExplicitAutograd")
def _row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return row_linear_forward(x, weight, bias)[0]


@torch.library.register_fake("liger_models::row_linear", lib=LIBRARY)
def _row_linear_fake(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weightᵀ + bias`` of a single row, without a backward.

    Args:
        x: [..., K], one row: all other dimensions are 1; float32, float16 or bfloat16.
        weight: [N, K] in the dtype of x; the elements of a row are neighbours in memory.
        bias: [N] in the dtype of x.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: the shapes do not fit together, x has several rows, or weight is stored by columns.
        TypeError: the tensors are not floating-point or differ in dtype.
    """
    op = "row_linear"
    check_floating(op, x=x, weight=weight, bias=bias)
    if not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        raise TypeError(f"{op}: x, weight and bias must have one dtype, got {x.dtype} and {weight.dtype}. Cast them.")
    check(
        weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == x.numel() == weight.shape[1],
        f"{op}: x must be one row of the width of weight, got {list(x.shape)} and {list(weight.shape)}.",
    )
    check(
        bias is None or bias.shape == weight.shape[:1],
        f"{op}: bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}.",
    )
    check(
        weight.stride(1) == 1,
        f"{op}: weight must be stored by rows, got strides {weight.stride()}. Make it contiguous.",
    )
    if not use_triton(x):
        return row_linear_reference(x, weight, bias)
    out: Tensor = torch.ops.liger_models.row_linear(x, weight, bias)
    return out
