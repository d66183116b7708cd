"""Multiplies a few rows by one matrix per head, for the absorbed projections of latent attention.

A row x has one part x_h for each of H heads. The first K columns of each part are multiplied by the head's own matrix
W_h [N, K]. The last R columns of each part are rotated, as in `kernels.rope.rope`::

    y_h = [W_h · x_h[:K], rotate(x_h[K:])]        sums in fp32, one cast at the end

In a decoding step, the op multiplies the queries by the transposed projections from latents to keys, and rotates the
last R columns of the queries. In the same step, attention returns sums of latents, and a second call with R = 0
multiplies these sums by the projections from latents to values.

The matrices are parts of one weight. Either the rows or the columns of the matrices are contiguous, so the kernel takes
the strides of the matrices as arguments. A program loads its whole part of a matrix before the previous kernel ends
(see `overlap`). If x has a single row, the row is multiplied elementwise. With 2 to `MOST_ROWS` rows, the kernel uses
matrix units.

Source: https://arxiv.org/abs/2405.04434.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import TRITON_DTYPES, on_device_of, tl, triton, use_triton
from liger_models.kernels.matmul.row_linear import MOST_ROWS, are_few
from liger_models.kernels.overlap import end_previous, overlap, start_next
from liger_models.kernels.rope.rope import (
    check_even,
    check_tables,
    load_angles,
    load_heads,
    rope_reference,
    rotate,
    store_heads,
    tables,
)
from liger_models.kernels.tiles import cdiv, dot_tile, next_power_of_2

ELEMENTS, MOST_COLUMNS = 8192, 1024
"""A program of four warps loads about `ELEMENTS` elements of a matrix. `head_linear` supports
matrices of up to `MOST_COLUMNS` columns."""


def head_linear_reference(
    x: Tensor, weight: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Compute `head_linear` in plain PyTorch."""
    K = weight.shape[2]
    first, rest = x.split([K, x.shape[3] - K], -1)
    y = torch.einsum("bthk,hok->btho", first, weight)
    if cos is not None and sin is not None:
        rest = rope_reference(rest, cos, sin, interleaved)
    return torch.cat([y, rest], -1)


@triton.jit
def _head_linear_kernel(
    x_ptr, weight_ptr, y_ptr, cos_ptr, sin_ptr, M, T, weight_h, weight_n, weight_k, table_b, table_t,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of a head's matrix by up to ROWS rows of x.

    If there are columns to rotate, the last program of a head computes no products, and rotates these columns instead.
    """
    start_next(OVERLAPS)
    head = tl.program_id(1)
    x_ptr += head * (K + R)
    y_ptr += head * (N + R)
    row = tl.arange(0, ROWS)
    if tl.program_id(0) < tl.cdiv(N, BLOCK_N):
        # The weight [BLOCK_N, BLOCK_K] is loaded before the previous kernel ends, because no kernel writes to weights.
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        at = weight_ptr + head.to(tl.int64) * weight_h + n[:, None] * weight_n + k[None, :] * weight_k
        weight = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
        end_previous(OVERLAPS)
        if ROWS == 1:
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
            y = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
            tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
        else:
            mask = (k < K)[:, None] & (row < M)[None, :]
            x = tl.load(x_ptr + row[None, :] * (H * (K + R)) + k[:, None], mask=mask, other=0.0)
            y = tl.dot(weight, x, input_precision="ieee").to(y_ptr.dtype.element_ty)  # [BLOCK_N, ROWS]
            mask = (n < N)[:, None] & (row < M)[None, :]
            tl.store(y_ptr + row[None, :] * (H * (N + R)) + n[:, None], y, mask=mask)
    elif R > 0:
        end_previous(OVERLAPS)
        token = tl.minimum(row, M - 1)[:, None]  # rows beyond the last row use the last row's angles
        cos, sin = load_angles(cos_ptr, sin_ptr, token // T, token % T, table_b, table_t, HALF, BLOCK, False)
        inside = (row < M)[:, None]
        x1, x2 = load_heads(x_ptr + row[:, None] * (H * (K + R)) + K, inside, R, HALF, BLOCK, INTERLEAVED)
        y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, inside, HALF, BLOCK)
        store_heads(y_ptr + row[:, None] * (H * (N + R)) + N, inside, y1, y2, R, HALF, BLOCK, INTERLEAVED)


def takes_heads(x: Tensor, weight: Tensor) -> bool:
    """Return whether `head_linear` supports rows x [B, T, ...] and a weight with H matrices [N, K].

    `head_linear` supports a single row, or up to `MOST_ROWS` rows in half precision. x must have the dtype of the
    weight, and gradients must be disabled. Inside `batch_invariant`, the result is False.
    """
    return (
        not torch.is_grad_enabled()
        and are_few(x.flatten(2), MOST_ROWS)
        and x.dtype == weight.dtype
        and x.dtype in TRITON_DTYPES
        and weight.shape[2] <= MOST_COLUMNS
        and use_triton(x)
    )


def _head_linear(x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    x = x.contiguous()
    (B, T, H, width), (_, N, K) = x.shape, weight.shape
    R, M = width - K, B * T
    y = x.new_empty(B, T, H, N + R)
    half = 0 if cos is None else cos.shape[-1]
    cos, sin, table_b, table_t = tables(cos, sin, x)
    block_k = dot_tile(K)
    block_n = min(max(ELEMENTS // block_k, 16), dot_tile(N))
    with on_device_of(x):
        _head_linear_kernel[(cdiv(N, block_n) + (R > 0), H)](
            x, weight, y, cos, sin, M, T, *weight.stride(), table_b, table_t, H=H, N=N, K=K, R=R, HALF=half,
            INTERLEAVED=interleaved, ROWS=1 if M == 1 else max(next_power_of_2(M), 8), BLOCK_N=block_n,
            BLOCK_K=block_k, BLOCK=max(next_power_of_2(R // 2), 1), **overlap(x), num_warps=4,
        )  # fmt: skip
    return y


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:3], weight.shape[1] + x.shape[3] - weight.shape[2])


FORWARD = define_op("head_linear", _head_linear, _fake)


def head_linear(
    x: Tensor, weight: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Multiply the first K columns of each head by the head's matrix, and rotate the other columns.

    The op has no backward.

    Args:
        x: [B, T, H, K + R], float32, float16 or bfloat16, where R is even. In float32, B · T must be 1; in half
            precision, at most `MOST_ROWS`.
        weight: [H, N, K] in the dtype of x, with any strides. K is at most `MOST_COLUMNS`.
        cos, sin: [1 or B, T, at most R / 2], the tables of the rotation; None to copy the other columns.
        interleaved: as in `rope`.

    Returns:
        [B, T, H, N + R] in the dtype of x.

    Raises:
        ValueError: the shapes do not match, or there are too many rows or columns.
        TypeError: the tensors are not floating-point or differ in dtype.
    """
    op = "head_linear"
    check_floating(op, x=x, weight=weight)
    if x.dtype != weight.dtype:
        raise TypeError(f"{op}: x and weight must have one dtype, got {x.dtype} and {weight.dtype}. Cast them.")
    if not (x.dim() == 4 and weight.dim() == 3 and len(weight) == x.shape[2] and weight.shape[2] <= x.shape[3]):
        raise ValueError(
            f"{op}: x must be [B, T, H, K + R] and weight [H, N, K], got {list(x.shape)} and {list(weight.shape)}."
        )
    check_even(op, x.shape[3] - weight.shape[2])
    if cos is not None and sin is not None:
        check_tables(op, x, cos, sin, x.shape[3] - weight.shape[2])
    if not use_triton(x):
        return head_linear_reference(x, weight, cos, sin, interleaved=interleaved)
    most = 1 if x.dtype == torch.float32 else MOST_ROWS
    if not (0 < x.shape[:2].numel() <= most and weight.shape[2] <= MOST_COLUMNS):
        raise ValueError(
            f"{op}: x must have 1 to {most} rows and weight at most {MOST_COLUMNS} columns, got {list(x.shape)} and "
            f"{list(weight.shape)}. Use torch.einsum."
        )
    return FORWARD(x, weight, cos, sin, interleaved)
