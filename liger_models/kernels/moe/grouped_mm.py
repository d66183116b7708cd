"""Grouped matrix products: the rows of each expert are multiplied by the matrix of this expert.

Rows are sorted by expert, and expert e has the rows from ends[e − 1] to ends[e] − 1. There are three operations, whose
sums are over the rows j of expert e. The sums are 0 for an expert without rows::

    product       out_j = rows_j · W_e             for every row j of e
    outer         out_e = Σ_j left_j ⊗ right_j
    sum           out_e = Σ_j w_j · rows_j         in fp32, with or without weights w

If PyTorch's grouped_mm is a single kernel (see `library_runs`), `grouped_mm` and `grouped_outer` run this kernel.
Otherwise, these two functions run the Triton kernels below. In both cases, the host does not wait for the device. The
reference implementation consists of two registered ops, which compilers do not trace. These ops loop over the experts
in plain PyTorch, and the host waits for the number of rows of each expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import cuda_capability, on_device_of, tl, triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.invariant_linear import invariant_linear
from liger_models.kernels.tiles import cdiv, dot_precision, next_power_of_2

PRODUCT_BLOCKS = {2: (128, 128, 64), 4: (64, 64, 32)}
PRODUCT_WARPS = {2: 8, 4: 4}
PRODUCT_STAGES = 3
SUM_BLOCK = (32, 128)
"""Options of the Triton kernels. `PRODUCT_BLOCKS` and `PRODUCT_WARPS` map the size of an element in bytes to the tile
shape (both dimensions of the result, then the dimension that is summed) and to the number of warps. `PRODUCT_STAGES` is
the number of pipeline stages. With 16-bit dtypes, a program takes 96 KB of shared memory, which Ampere, Ada and Hopper
GPUs all have. `SUM_BLOCK` is the number of rows and the number of columns that a program of `grouped_sum` reads at a
time."""


def _row_counts(ends: Tensor) -> list[int]:
    """Return the number of rows of each expert. The host waits for the device."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


def _grouped_product_loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = zip(rows.split(_row_counts(ends)), weight.unbind(), strict=True)
    if is_batch_invariant():
        return torch.cat([invariant_linear(part, matrix.t()) for part, matrix in parts])
    return torch.cat([part @ matrix for part, matrix in parts])


def _grouped_outer_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    counts = _row_counts(ends)
    return torch.stack([a.t() @ b for a, b in zip(left.split(counts), right.split(counts), strict=True)])


def _grouped_backward(
    d_product: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, need_rows: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    d_rows = GROUPED_PRODUCT(d_product, weight.transpose(1, 2), ends) if need_rows else None
    return d_rows, GROUPED_OUTER(rows, d_product, ends) if need_weight else None


def _outer_backward(
    d_outer: Tensor, left: Tensor, right: Tensor, ends: Tensor, need_left: bool, need_right: bool
) -> tuple[Tensor | None, Tensor | None]:
    d_left = GROUPED_PRODUCT(right, d_outer.transpose(1, 2), ends) if need_left else None
    return d_left, GROUPED_PRODUCT(left, d_outer, ends) if need_right else None


GROUPED_OUTER = define_op(
    "grouped_outer", _grouped_outer_loop,
    lambda left, right, ends: left.new_empty(ends.shape[0], left.shape[1], right.shape[1]),
    backward=_outer_backward, gradients="left right",
)  # fmt: skip
GROUPED_PRODUCT = define_op(
    "grouped_product", _grouped_product_loop,
    lambda rows, weight, ends: rows.new_empty(rows.shape[0], weight.shape[2]),
    backward=_grouped_backward, gradients="rows weight",
)  # fmt: skip


@triton.jit
def _rows_of_tile(tile, ends_ptr, X, BLOCK_X: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the expert to which a tile's rows belong, the first row of the tile, and the end of the expert's rows.

    If the tile has no rows, the returned expert index is X or larger.
    """
    lanes = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + lanes, mask=lanes < X, other=0)
    starts = tl.load(ends_ptr + lanes - 1, mask=(lanes > 0) & (lanes < X), other=0)
    tiles = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS  # number of tiles of each expert
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
        # A tile [BLOCK_ROWS, BLOCK_OUT] belongs to one expert. Rows beyond ``end`` belong to the next expert and are
        # masked.
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
    # If the expert has no rows, the zeros in `total` are stored.
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
    # Rows are sorted by expert, and this expert has the rows from first to end − 1.
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


_library_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the public name exists since PyTorch 2.10


def library_runs(gate_up_weight: Tensor, down_weight: Tensor) -> bool:
    """Return whether PyTorch's grouped_mm computes the products with ``gate_up_weight`` [X, 2 F, C] and with
    ``down_weight`` [X, C, F].

    PyTorch's grouped_mm is used only where it is a single CUTLASS kernel, so that the host does not wait for the
    device. This is the case in bf16 on Hopper, for fewer than 1024 experts, if the rows of the experts' matrices
    consist of whole 16-byte vectors. Each expert may have any number of rows. With other dtypes, shapes or GPUs,
    grouped_mm may loop over the experts, and the host would then wait for the device. On Blackwell, grouped_mm is not
    used because it returns a nonzero weight gradient for an expert without rows (pytorch#172439). Inside
    `batch_invariant`, the Triton kernel runs, because its tile shape is the same for any number of rows.
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
    """Return the tile shape and the constants of the Triton kernels for grouped products.

    fp32 is multiplied as TF32 only if the user has enabled TF32 for matrix products.
    """
    size = rows.element_size()
    return PRODUCT_BLOCKS[size], {
        "PRECISION": dot_precision(rows),
        "num_warps": PRODUCT_WARPS[size],
        "num_stages": PRODUCT_STAGES,
    }


def most_tiles(S: int, X: int, block_rows: int) -> int:
    """Return an upper bound on the number of tiles for S rows and X experts.

    The bound is the number of full tiles, plus one partial tile for each expert that has rows.
    """
    return S // block_rows + min(S, X)


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, library: bool) -> Tensor:
    """Multiply each expert's rows by the expert's matrix: [S, in], [X, in, out] -> [S, out].

    ``weight`` may be a transposed view. ``library`` is the result of `library_runs`.
    """
    if library:
        product: Tensor = _library_mm(rows, weight, offs=ends)
        return product
    S, X, width = rows.shape[0], weight.shape[0], weight.shape[2]
    out = torch.empty(S, width, dtype=rows.dtype, device=rows.device)
    (block_rows, block_out, block_in), constants = _tile(rows)
    with on_device_of(rows):
        _product_kernel[(most_tiles(S, X, block_rows) * cdiv(width, block_out),)](
            rows, weight, ends, out, X, weight.shape[1], width, *weight.stride(),
            BLOCK_X=max(next_power_of_2(X), 2), BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, BLOCK_IN=block_in,
            **constants,
        )  # fmt: skip
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor, library: bool) -> Tensor:
    """For each expert, sum the outer products of the expert's rows of ``left`` and ``right``.

    The shapes are [S, left], [S, right] -> [X, left, right]. ``library`` is the result of `library_runs`.
    """
    if library:
        sums: Tensor = _library_mm(left.t(), right, offs=ends)
        return sums
    X, height, width = ends.shape[0], left.shape[1], right.shape[1]
    out = torch.empty(X, height, width, dtype=left.dtype, device=left.device)
    (block_left, block_right, block_rows), constants = _tile(left)
    with on_device_of(left):
        _outer_kernel[(X * cdiv(height, block_left) * cdiv(width, block_right),)](
            left, right, ends, out, height, width,
            BLOCK_LEFT=block_left, BLOCK_RIGHT=block_right, BLOCK_ROWS=block_rows, **constants,
        )  # fmt: skip
    return out


def grouped_sum(
    rows: Tensor, ends: Tensor, dtype: torch.dtype, weights: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Sum each expert's rows in fp32, [S, W] -> [X, W], and round the sums once to ``dtype``.

    With ``weights`` [N, K], row j is multiplied by the weight of copy order[j], where ``order`` [S] int32 is from
    `sort_by_expert`.
    """
    X, W = ends.shape[0], rows.shape[1]
    out = torch.empty(X, W, dtype=dtype, device=rows.device)
    block_rows, block_columns = SUM_BLOCK
    with on_device_of(rows):
        _sum_kernel[(X, cdiv(W, block_columns))](
            rows, ends, rows if weights is None else weights, ends if order is None else order, out, W,
            WEIGHTED=weights is not None, BLOCK_ROWS=block_rows, BLOCK_W=block_columns,
        )  # fmt: skip
    return out
