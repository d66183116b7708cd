"""Grouped matrix products: the rows of each expert times the matrix of the same expert.

Rows are sorted by expert; expert e owns the rows from ends[e − 1] to ends[e]::

    product       out_j = rows_j · W_e             for every row j of e
    outer         out_e = Σ_j left_j ⊗ right_j     over the rows j of e; 0 for an expert without rows
    sum           out_e = Σ_j w_j · rows_j         likewise, in fp32, with or without weights

`grouped_mm` and `grouped_outer` run PyTorch's grouped_mm where it is one kernel (`library_runs`), and the Triton
kernels below elsewhere; neither waits for the device. The reference is a pair of registered ops, which loop over the
experts in plain torch and wait for the row counts. As ops they are opaque to compilers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import cuda_capability, on_device_of, tl, triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.invariant_linear import invariant_linear
from liger_models.kernels.tiles import dot_precision

PRODUCT_BLOCKS = {2: (128, 128, 64), 4: (64, 64, 32)}
PRODUCT_WARPS = {2: 8, 4: 4}
PRODUCT_STAGES = 3
SUM_BLOCK = (32, 128)
"""Tile (two dimensions of the result, then the summed one), warps and pipeline stages of the Triton kernels, by element
size. 16-bit types take 96 KB of shared memory, which Ampere, Ada and Hopper all have. ``SUM_BLOCK``: rows and columns
that a program of `grouped_sum` reads at a time."""

LIBRARY.define("grouped_product(Tensor rows, Tensor weight, Tensor ends) -> Tensor")
LIBRARY.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")


def _row_counts(ends: Tensor) -> list[int]:
    """How many rows each expert has; the host waits for the device."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


@torch.library.impl(LIBRARY, "grouped_product", "CompositeExplicitAutograd")
def _grouped_product_loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = zip(rows.split(_row_counts(ends)), weight.unbind(), strict=True)
    if is_batch_invariant():
        return torch.cat([invariant_linear(part, matrix.t()) for part, matrix in parts])
    return torch.cat([part @ matrix for part, matrix in parts])


@torch.library.impl(LIBRARY, "grouped_outer", "CompositeExplicitAutograd")
def _grouped_outer_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    counts = _row_counts(ends)
    return torch.stack([a.t() @ b for a, b in zip(left.split(counts), right.split(counts), strict=True)])


@torch.library.register_fake("liger_models::grouped_product", lib=LIBRARY)
def _grouped_product_fake(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.register_fake("liger_models::grouped_outer", lib=LIBRARY)
def _grouped_outer_fake(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _grouped_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx, d_product):
    rows, weight, ends = ctx.saved_tensors
    need_rows, need_weight, _ = ctx.needs_input_grad
    ops = torch.ops.liger_models
    d_rows = ops.grouped_product(d_product, weight.transpose(1, 2), ends) if need_rows else None
    return d_rows, ops.grouped_outer(rows, d_product, ends) if need_weight else None, None


register_autograd("grouped_product", _grouped_backward, _grouped_setup)


@triton.jit
def _rows_of_tile(tile, ends_ptr, X, BLOCK_X: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The expert of a tile's rows (X or more for none), the tile's first row, and the end of the expert's rows."""
    lanes = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + lanes, mask=lanes < X, other=0)
    starts = tl.load(ends_ptr + lanes - 1, mask=(lanes > 0) & (lanes < X), other=0)
    tiles = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS  # each expert has as many tiles as its rows need
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(lanes == expert, starts, 0), 0)
    first += (tile - tl.sum(tl.where(lanes < expert, tiles, 0), 0)) * BLOCK_ROWS
    return expert, first, tl.sum(tl.where(lanes == expert, ends, 0), 0)


@triton.jit
def _product_kernel(
    rows_ptr, weight_ptr, ends_ptr, out_ptr, X, IN, OUT, stride_x, stride_in, stride_out, PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    tiles_out = tl.cdiv(OUT, BLOCK_OUT)
    expert, first, end = _rows_of_tile(tl.program_id(0) // tiles_out, ends_ptr, X, BLOCK_X, BLOCK_ROWS)
    if expert < X:
        # A tile [BLOCK_ROWS, BLOCK_OUT] of one expert; rows beyond its end belong to the next expert and are masked.
        rows = first + tl.arange(0, BLOCK_ROWS)
        columns = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        row_starts = rows_ptr + rows.to(tl.int64)[:, None] * IN
        column_starts = weight_ptr + expert.to(tl.int64) * stride_x + columns.to(tl.int64)[None, :] * stride_out
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in range(0, IN, BLOCK_IN):
            i = start + tl.arange(0, BLOCK_IN)
            a = tl.load(row_starts + i[None, :], mask=(rows < end)[:, None] & (i < IN)[None, :], other=0.0)
            b = tl.load(
                column_starts + i.to(tl.int64)[:, None] * stride_in,
                mask=(i < IN)[:, None] & (columns < OUT)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * OUT + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(rows < end)[:, None] & (columns < OUT)[None, :],
        )


@triton.jit
def _outer_kernel(
    left_ptr, right_ptr, ends_ptr, out_ptr, LEFT, RIGHT, PRECISION: tl.constexpr,
    BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    tiles_right = tl.cdiv(RIGHT, BLOCK_RIGHT)
    tiles = tl.cdiv(LEFT, BLOCK_LEFT) * tiles_right
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = (tile // tiles_right) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    o = (tile % tiles_right) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    # An expert without rows stores the zeros of `total`.
    total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
    for start in range(first, end, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = rows < end
        a = tl.load(left_ptr + rows[None, :] * LEFT + m[:, None], mask=inside[None, :] & (m < LEFT)[:, None], other=0.0)
        b = tl.load(
            right_ptr + rows[:, None] * RIGHT + o[None, :], mask=inside[:, None] & (o < RIGHT)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(
        out_ptr + (expert.to(tl.int64) * LEFT + m.to(tl.int64)[:, None]) * RIGHT + o[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(m < LEFT)[:, None] & (o < RIGHT)[None, :],
    )


@triton.jit
def _sum_kernel(
    rows_ptr, ends_ptr, weights_ptr, order_ptr, out_ptr, W, WEIGHTED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    # Rows are sorted by expert; this expert has the rows from first to end − 1.
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([BLOCK_ROWS, BLOCK_W], tl.float32)
    for start in range(first, end, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (rows < end)[:, None] & (columns < W)[None, :]
        values = tl.load(rows_ptr + rows[:, None] * W + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            copies = tl.load(order_ptr + rows, mask=rows < end, other=0)
            values *= tl.load(weights_ptr + copies, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        total += values
    result = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert.to(tl.int64) * W + columns, result, mask=columns < W)


_library_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10


def library_runs(gate_up_weight: Tensor, down_weight: Tensor) -> bool:
    """Whether grouped products of contiguous weights [X, 2 F, C] and [X, C, F] run in PyTorch's grouped_mm.

    They do where grouped_mm is one CUTLASS kernel that does not wait for the device: in bf16 on Hopper, with rows of
    whole 16-byte vectors, fewer than 1024 experts, and any number of rows per expert. On Blackwell the weight gradient
    of an expert without rows is not zero (pytorch#172439). Everywhere else grouped_mm loops over the experts and waits.
    Within `batch_invariant` the Triton kernel runs, which has the same tile for any number of rows.
    """
    return (
        cuda_capability(gate_up_weight.device)[0] == 9
        and not is_batch_invariant()
        and gate_up_weight.dtype == torch.bfloat16
        and gate_up_weight.shape[0] < 1024
        and down_weight.shape[1] % 8 == 0
        and down_weight.shape[2] % 8 == 0
        and gate_up_weight.data_ptr() % 16 == 0
        and down_weight.data_ptr() % 16 == 0
    )


def _tile(rows: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Tile and constants of the Triton grouped products. fp32 runs as TF32 only if the user enabled TF32 for mm."""
    size = rows.element_size()
    return PRODUCT_BLOCKS[size], {
        "PRECISION": dot_precision(rows),
        "num_warps": PRODUCT_WARPS[size],
        "num_stages": PRODUCT_STAGES,
    }


def most_tiles(S: int, X: int, block_rows: int) -> int:
    """Upper bound of the tiles for S rows of X experts: the full tiles, and a partial one per expert with rows."""
    return S // block_rows + min(S, X)


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, library: bool) -> Tensor:
    """Multiply each expert's rows with its matrix (possibly a transposed view): [S, in], [X, in, out] -> [S, out]."""
    if library:
        product: Tensor = _library_mm(rows, weight, offs=ends)
        return product
    S, X, width = rows.shape[0], weight.shape[0], weight.shape[2]
    out = torch.empty(S, width, dtype=rows.dtype, device=rows.device)
    (block_rows, block_out, block_in), constants = _tile(rows)
    with on_device_of(rows):
        _product_kernel[(most_tiles(S, X, block_rows) * triton.cdiv(width, block_out),)](
            rows, weight, ends, out, X, weight.shape[1], width, *weight.stride(),
            BLOCK_X=max(triton.next_power_of_2(X), 2), BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, BLOCK_IN=block_in,
            **constants,
        )  # fmt: skip
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor, library: bool) -> Tensor:
    """Sum over each expert's rows of their outer products: [S, left], [S, right] -> [X, left, right]."""
    if library:
        sums: Tensor = _library_mm(left.t(), right, offs=ends)
        return sums
    X, height, width = ends.shape[0], left.shape[1], right.shape[1]
    out = torch.empty(X, height, width, dtype=left.dtype, device=left.device)
    (block_left, block_right, block_rows), constants = _tile(left)
    with on_device_of(left):
        _outer_kernel[(X * triton.cdiv(height, block_left) * triton.cdiv(width, block_right),)](
            left, right, ends, out, height, width,
            BLOCK_LEFT=block_left, BLOCK_RIGHT=block_right, BLOCK_ROWS=block_rows, **constants,
        )  # fmt: skip
    return out


def grouped_sum(
    rows: Tensor, ends: Tensor, dtype: torch.dtype, weights: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Sum over each expert's rows, in fp32: [S, W] -> [X, W], rounded once to ``dtype``.

    With ``weights`` [N, K] row j counts weights[order[j]] times; ``order`` [S] int32 is from `sort_by_expert`.
    """
    X, W = ends.shape[0], rows.shape[1]
    out = torch.empty(X, W, dtype=dtype, device=rows.device)
    block_rows, block_columns = SUM_BLOCK
    with on_device_of(rows):
        _sum_kernel[(X, triton.cdiv(W, block_columns))](
            rows, ends, rows if weights is None else weights, ends if order is None else order, out, W,
            WEIGHTED=weights is not None, BLOCK_ROWS=block_rows, BLOCK_W=block_columns,
        )  # fmt: skip
    return out
