"""A batch-invariant linear layer: a row's result is bitwise identical in every batch.

::

    y = x @ Wᵀ + b                        sums in fp32, one cast at the end

Libraries choose the kernel, the tile shape and the splitting of sums according to the number of rows. A row in a batch
of 8 and the same row in a batch of 4096 therefore get results that differ in their last bits. In this layer, one kernel
with a fixed tile shape computes every result. The same instructions compute an element of y in every batch: they add
the products in one accumulator, in the order of the columns of x. A tile with too few rows is padded. The
implementation in plain PyTorch copies each row and multiplies it separately.

The backward uses ordinary matrix products, so gradients do depend on the batch::

    dx = dy @ W,   dW = dyᵀ @ x,   db = Σ_rows dy

x and W are saved for the backward. The layer is a single op on every device, even where it runs in plain PyTorch. If
autograd differentiated the product of each row separately, the weight gradient of each row would be rounded before it
is added to the sum.

Source: https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import fitting_stages, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv, contiguous_rows, dot_precision


class Tile(NamedTuple):
    """Shape and launch options of a program.

    Attributes:
        rows: number of rows of x.
        outputs: number of rows of W.
        columns: number of columns of x and W per step.
        warps: number of warps.
        stages: number of pipeline stages.
    """

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int


TILES = {2: Tile(128, 128, 64, 8, 4), 4: Tile(64, 64, 32, 4, 3)}
"""Maps the size of an element in bytes to the tile. The tile must not depend on anything else, such as the number of
rows."""

GROUPED_TILES = 8
"""Number of row tiles in a group. The programs of a group have adjacent indices and run at about the same time, so that
they share the weight in the L2 cache."""


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to a copy of each row [C] of x [..., C], one row at a time, and return the results [..., O].

    On a CPU, even the result of an elementwise function depends on the element's position: if the last few elements do
    not fill a vector register, other instructions compute them.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return function(x.new_zeros(x.shape[-1])).new_empty(*x.shape[:-1], 0)
    return torch.stack([function(row.clone()) for row in rows]).view(*x.shape[:-1], -1)


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the forward of `invariant_linear` in plain PyTorch. If the inputs are fp64, so are all computations."""
    if not (x.numel() and len(weight)):
        return F.linear(x, weight, bias)
    return each_row(lambda row: F.linear(row[None], weight, bias)[0], x)


@triton.jit(do_not_specialize=["N"])
def _invariant_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, N, M, K, x_n, weight_m, y_n,
    HAS_BIAS: tl.constexpr, WHOLE_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n, tiles_m = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    # Tiles are visited in groups of GROUP row tiles, so that programs that run at the same time share rows of x and W
    # in the cache.
    group = tl.program_id(0) // (GROUP * tiles_m)
    height = tl.minimum(tiles_n - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * tiles_m)
    row = ((group * GROUP + place % height) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    output = ((place // height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    x_ptr += row[:, None] * x_n + column[None, :]
    weight_ptr += output[None, :] * weight_m + column[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        x_inside, weight_inside = (row < N)[:, None], (output < M)[None, :]
        # The last step may be partial. The masked elements are 0, so they do not change the result.
        if not WHOLE_K:
            x_inside = x_inside & (start + column < K)[None, :]
            weight_inside = weight_inside & (start + column < K)[:, None]
        x = tl.load(x_ptr + start, mask=x_inside, other=0.0)
        weight = tl.load(weight_ptr + start, mask=weight_inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < M, other=0.0).to(tl.float32)[None, :]
    inside = (row < N)[:, None] & (output < M)[None, :]
    tl.store(y_ptr + row[:, None] * y_n + output[None, :], total.to(y_ptr.dtype.element_ty), mask=inside)


def write_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weightᵀ + bias`` for rows x [N, C] to out [N, O]. The last dimension of out must be contiguous."""
    if not use_triton(x):
        out.copy_(invariant_linear_reference(x, weight, bias))
        return
    x, weight = contiguous_rows(x), contiguous_rows(weight)
    (N, K), M = x.shape, len(weight)
    # The tile depends only on the dtype, never on the number of rows. This fixes the order of every sum.
    tile = TILES[x.itemsize]
    stage_bytes = (tile.rows + tile.outputs) * tile.columns * x.itemsize
    if N and M:
        with on_device_of(x):
            _invariant_linear_kernel[(cdiv(N, tile.rows) * cdiv(M, tile.outputs),)](
                x, weight, weight if bias is None else bias.contiguous(), out, N, M, K,
                x.stride(0), weight.stride(0), out.stride(0), HAS_BIAS=bias is not None,
                WHOLE_K=K % tile.columns == 0, PRECISION=dot_precision(x), GROUP=GROUPED_TILES, BLOCK_N=tile.rows,
                BLOCK_M=tile.outputs, BLOCK_K=tile.columns, num_warps=tile.warps,
                num_stages=fitting_stages(x, tile.stages, stage_bytes),
            )  # fmt: skip


def _invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty(len(rows), len(weight))
    write_invariant_linear(rows, weight, bias, y)
    return y.view(*x.shape[:-1], len(weight))


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, ...]:
    x = x.reshape(-1, x.shape[-1])
    rows = dy.reshape(len(x), len(weight))
    d_weight = rows.t() @ x if need_weight else None
    return dy @ weight if need_x else None, d_weight, rows.sum(0) if need_bias else None


FORWARD = define_op(
    "invariant_linear", _invariant_linear, lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    backward=_backward, gradients="x weight bias",
)  # fmt: skip


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` such that each row of the result depends only on the same row of x, bit for bit.

    Args:
        x: [..., C], float32, float16 or bfloat16.
        weight: [O, C] in the dtype of x.
        bias: [O] in the dtype of x, or None.

    Returns:
        [..., O] in the dtype of x. Gradients are not batch-invariant.

    Raises:
        ValueError: the shapes do not match.
        TypeError: the tensors are not floating-point or differ in dtype.
    """
    op = "invariant_linear"
    check_floating(op, x=x, weight=weight, bias=bias)
    if not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        raise TypeError(
            f"{op}: x, weight and bias must have one dtype, got {x.dtype} and {weight.dtype}. Cast them; autocast "
            "can't be used here."
        )
    if not (weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1] > 0):
        raise ValueError(f"{op}: x must be [..., C] and weight [O, C], got {list(x.shape)} and {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}.")
    return FORWARD(x, weight, bias)
