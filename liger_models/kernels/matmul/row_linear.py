"""A linear layer for few rows, as in a step of decoding; it takes about as long as reading the weight.

::

    y = x @ Wᵀ + b                        sums in fp32, one cast at the end
    y = x @ Wᵀ + b + (x @ Aᵀ) @ Bᵀ        with a low-rank term (LoRA), whose first product is also cast
    p = act(gate) · up                    of a packed gate and up projection, cast as in `gated_act`

Each program multiplies a few rows of W with x and adds up the products, so that no part of a sum goes through memory. A
single row needs no matrix units. Library kernels reach only two thirds of the memory bandwidth if W has few rows.

Products of 2 to `MOST_ROWS` rows use matrix units. Where W has too few rows for all multiprocessors, programs divide
its columns, and a second kernel adds their sums.

The single-row kernel computes x @ Aᵀ in one launch, with a program for each rank and row. On Hopper and later GPUs the
kernel for y of a single row starts at the same time, and waits for x @ Aᵀ only after its own sums (`overlap`).
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY
from liger_models.kernels.activation.gated_act import _activation
from liger_models.kernels.dispatch import (
    TRITON_DTYPES,
    fitting_stages,
    num_programs,
    on_device_of,
    tl,
    triton,
    use_triton,
)
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.overlap import await_previous, can_overlap, end_previous, overlap, start_next

ROWS = 4
COLUMNS = 1024
NUM_WARPS = 2
STAGES = 3
"""Rows and columns of W that a program reads in a step, its warps, and the steps in flight. The first step of a dense W
is read while the kernel before ends, and added last; for codes this is slower. On an H200, for the projections of Llama
3.2 1B, 3B and Llama 3 8B, this is within 1 % of the best of 32 shapes."""

LOW_COLUMNS, LOW_COLUMNS_PER_WARP = 16384, 1024
"""Columns of A that a program reads at once (nearly always the whole row), and columns per warp."""

MOST_ROWS = 16
"""Up to so many rows have kernels of their own. On an H200, for the projections of Llama 3.2 3B, 16 rows take 0.95 of
cuBLAS's time, with the activation in it; 64 rows would take as long."""

TILE_ROWS, TILE_COLUMNS = 64, 128
TILE_WARPS = 4
TILE_STAGES = 4
"""Rows and columns of W that a program for several rows of x reads in a step, its warps, and the steps in flight. The
columns are divided among as many programs as give each multiprocessor one. On an H200, for the projections of Llama 3.2
3B and Llama 3 8B, this is within 4 % of the best of 35 shapes."""

SUM_ROWS, SUM_WARPS = 32, 4
"""Rows of sums in parts that a program adds, and its warps."""

MOST_RANKS = 256
"""A kernel adds low-rank terms of at most so many ranks; a program holds its rows of B meanwhile."""

MIN_RANKS = 16
"""The least width of a tile of B, as matrix units want it."""

LowRank = tuple[Tensor, Tensor]
"""A [R, C] and B [O, R] of the term ``(x @ Aᵀ) @ Bᵀ`` that a linear layer adds to its product; B holds any factor."""


def low_rank_pair(A: Tensor | None, B: Tensor | None) -> LowRank | None:
    """The two tensors as a pair; None if one of them is None."""
    return None if A is None or B is None else (A, B)


def row_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`row_linear` in plain torch."""
    return torch.nn.functional.linear(x, weight, bias)


@triton.jit
def load_B(B_ptr, row, N, R, RANKS: tl.constexpr):
    """Load rows of B, with zeros beyond rank R."""
    rank = tl.arange(0, RANKS)
    mask = (row < N)[:, None] & (rank < R)[None, :]
    return tl.load(B_ptr + row.to(tl.int64)[:, None] * R + rank[None, :], mask=mask, other=0.0)


@triton.jit
def low_rank_row(B, low_ptr, R, RANKS: tl.constexpr, LOW: tl.constexpr):
    """The low-rank term of a single row of x, for rows of B [ROWS, RANKS]."""
    if LOW == "awaited":
        end_previous(True)
    rank = tl.arange(0, RANKS)
    low = tl.load(low_ptr + rank, mask=rank < R, other=0.0)
    return tl.sum(B.to(tl.float32) * low.to(tl.float32)[None, :], 1)


@triton.jit
def store_row(
    y, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store a program's ROWS sums of a row plus bias, and with an ACT the gated products."""
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
def store_rows(
    y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`store_row` for sums [ROWS, COLUMNS], whose columns are the M rows of the result, plus the low-rank term."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    if RANKS:
        rank = tl.arange(0, RANKS)
        mask = (rank < R)[:, None] & (column < M)[None, :]
        low = tl.load(low_ptr + column[None, :] * R + rank[:, None], mask=mask, other=0.0)
        y = tl.dot(load_B(B_ptr, row, N, R, RANKS), low, y, input_precision="ieee")
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    y = y.to(y_ptr.dtype.element_ty)
    mask = (row < N)[:, None] & (column < M)[None, :]
    tl.store(y_ptr + column[None, :] * N + row[:, None], y, mask=mask)
    if ACT != "":
        # Rows 2f and 2f + 1 are gate f and up f: [ROWS, COLUMNS] becomes two tensors [ROWS / 2, COLUMNS].
        pairs = tl.permute(tl.reshape(y.to(tl.float32), [ROWS // 2, 2, COLUMNS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        a, _ = _activation(gate, ACT)
        result = tl.program_id(0).to(tl.int64) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        product = (a.to(product_ptr.dtype.element_ty).to(tl.float32) * up).to(product_ptr.dtype.element_ty)
        mask = (2 * result < N)[:, None] & (column < M)[None, :]
        tl.store(product_ptr + column[None, :] * (N // 2) + result[:, None], product, mask=mask)


@triton.jit
def _row_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, N, K, R, weight_n,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr, LOW: tl.constexpr,
    OVERLAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute ROWS results of one row of x, the second index of the program."""
    if LOW != "made":
        start_next(OVERLAPS)
    x_ptr += tl.program_id(1).to(tl.int64) * K
    y_ptr += tl.program_id(1).to(tl.int64) * N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    known = (row < N)[:, None]
    at = weight_ptr + row[:, None] * weight_n + column[None, :]
    if RANKS:
        B = load_B(B_ptr, row, N, R, RANKS)
    # The first step of a dense W is read before the previous kernel ends: no kernel of the step writes weights.
    if not HAS_SCALE:
        first = tl.load(at, mask=known & (column < K)[None, :], other=0.0, eviction_policy="evict_first")
    if LOW != "awaited":
        end_previous(OVERLAPS)
    if LOW == "made":  # what the next kernel reads besides is complete now
        start_next(True)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0 if HAS_SCALE else COLUMNS, K, COLUMNS, num_stages=STAGES):
        inside = start + column < K
        weight = tl.load(at + start, mask=known & inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    # x is complete now, and the first step is added last.
    if not HAS_SCALE:
        x = tl.load(x_ptr + column, mask=column < K, other=0.0)
        total += first.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + row, mask=row < N, other=0.0)
    if RANKS:
        y += low_rank_row(B, low_ptr, R, RANKS, LOW)
    store_row(y, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)


@triton.jit
def _rows_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, sums_ptr, M, N, K, R, weight_n, share,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS results for up to COLUMNS rows of x; with several PARTS, sums over a share of the columns of W."""
    start_next(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, lane = tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, K)
    weights = weight_ptr + row.to(tl.int64)[:, None] * weight_n + lane[None, :]
    rows = x_ptr + column[None, :] * K + lane[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row, mask=row < N, other=0.0)[:, None]
    for start in range(first, end, BLOCK):
        inside = start + lane < end
        mask = (row < N)[:, None] & inside[None, :]
        weight = tl.load(weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(rows + start, mask=inside[:, None] & (column < M)[None, :], other=0.0)
        if HAS_SCALE:
            # By way of float32: without it the conversion takes instructions of a sixteenth of the rate. A product that
            # is scaled ends within its step. Otherwise Triton 3.6 and 3.7 let it go on on Hopper, where it still reads
            # registers that the conversion of the next step writes.
            total += tl.dot(weight.to(tl.float32).to(x.dtype), x) * scale
        else:
            total = tl.dot(weight, x, total)
    # A program with all columns stores results; otherwise its sums go to memory, for `_add_rows_kernel`.
    if PARTS == 1:
        store_rows(total, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)
    else:
        at = (tl.program_id(1) * N + row)[:, None] * COLUMNS + column[None, :]
        tl.store(sums_ptr + at, total, mask=(row < N)[:, None])


@triton.jit
def _add_rows_kernel(
    sums_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    RANKS: tl.constexpr, OVERLAPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the sums of all PARTS in order, and store the results."""
    await_previous(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * N * COLUMNS + at, mask=(row < N)[:, None], other=0.0)
    store_rows(total, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


def are_few(x: Tensor, most: int) -> bool:
    """Whether x [..., K] has one row, or up to ``most`` rows in half precision, outside `batch_invariant`."""
    rows = x.numel() // max(x.shape[-1], 1)
    return (rows == 1 or (1 < rows <= most and x.dtype != torch.float32)) and not is_batch_invariant()


def takes_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `row_linear_forward` can multiply: few rows, one dtype, and a weight stored by rows.

    Several rows must be in half precision. The result is False within `batch_invariant`, where rows must keep their
    bits.
    """
    return (
        are_few(x, MOST_ROWS)
        and x.dtype == weight.dtype
        and x.dtype in TRITON_DTYPES
        and (bias is None or bias.dtype == x.dtype)
        and weight.stride(1) == 1
        and use_triton(x)
    )


def takes_low_rank(x: Tensor, low_rank: LowRank | None) -> bool:
    """Whether the kernels for few rows can add this low-rank term to their sums; True without a term."""
    return low_rank is None or (len(low_rank[0]) <= MOST_RANKS and {matrix.dtype for matrix in low_rank} == {x.dtype})


def low_rank_arguments(x: Tensor, low_rank: LowRank | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Launch the kernel for ``x @ Aᵀ`` of contiguous rows x [..., K].

    The next launch must be the kernel for y. With a single row, everything that it reads before it waits must be
    complete.

    Returns:
        The arguments ``(x @ Aᵀ, B, R)`` of the kernel for y, and its constants and options. Only the kernel for a
        single row has the constant LOW. The kernel for several rows does not start early, because its programs would be
        unevenly distributed over the multiprocessors.
    """
    overlaps, one = overlap(x), x.numel() == x.shape[-1]
    constants = {"LOW": "", **overlaps} if one else {"OVERLAPS": overlaps["OVERLAPS"]}
    if low_rank is None:
        return (None, None, 0), {"RANKS": 0, **constants}
    A, B = (matrix.contiguous() for matrix in low_rank)
    R, K = A.shape
    low, columns = x.new_empty(x.numel() // K, R), min(max(triton.next_power_of_2(K), 32), LOW_COLUMNS)
    beside = one and can_overlap(x.device)  # several rows are faster in turn
    with on_device_of(x):
        _row_linear_kernel[(R, len(low))](
            x, A, None, None, low, None, None, None, R, K, 0, K, HAS_SCALE=False, HAS_BIAS=False, ACT="", RANKS=0,
            LOW="made" if beside else "", **overlaps, ROWS=1, COLUMNS=columns, STAGES=1,
            num_warps=max(columns // LOW_COLUMNS_PER_WARP, 1),
        )  # fmt: skip
    constants["RANKS"] = max(triton.next_power_of_2(R), MIN_RANKS)
    return (low, B, R), constants | ({"LOW": "awaited", "launch_pdl": True} if beside else {})


def row_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str = "",
    scales: Tensor | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel for ``(y [..., N], act(gate) · up [..., N / 2])``; the second is empty without an activation.

    ``scales`` [N] in fp32 are the factors of the rows of a float8 weight. ``low_rank`` has the dtype of x.
    """
    (N, K), x = weight.shape, x.contiguous()
    M, y = x.numel() // K, x.new_empty(*x.shape[:-1], N)
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    bias = None if bias is None else bias.contiguous()
    (low, B, R), constants = low_rank_arguments(x, low_rank)
    constants |= {"HAS_BIAS": bias is not None, "ACT": act}
    ends = bias, y, product, low, B
    with on_device_of(x):
        if M == 1:
            # One row is multiplied elementwise and needs no matrix units.
            columns = min(max(triton.next_power_of_2(K), 32), COLUMNS)
            _row_linear_kernel[(triton.cdiv(N, ROWS),)](
                x, weight, scales, *ends, N, K, R, weight.stride(0), HAS_SCALE=scales is not None, ROWS=ROWS,
                COLUMNS=columns, STAGES=STAGES, **constants, num_warps=NUM_WARPS,
            )  # fmt: skip
            return y, product
        tiles, columns = triton.cdiv(N, TILE_ROWS), max(triton.next_power_of_2(M), 8)
        # Few rows of W make few tiles. K is split over more programs to keep the device busy; their sums are added.
        parts = max(min(triton.cdiv(num_programs(x, 1), tiles), K // (2 * TILE_COLUMNS)), 1)
        share = triton.cdiv(triton.cdiv(K, parts), TILE_COLUMNS) * TILE_COLUMNS
        sums = None if parts == 1 else torch.empty(parts, N, columns, dtype=torch.float32, device=x.device)
        constants |= {"PARTS": parts, "COLUMNS": columns}
        stage = TILE_COLUMNS * (TILE_ROWS * weight.itemsize + columns * x.itemsize)
        _rows_linear_kernel[(tiles, parts)](
            x, weight, scales, *ends, sums, M, N, K, R, weight.stride(0), share, HAS_SCALE=scales is not None,
            ROWS=TILE_ROWS, BLOCK=TILE_COLUMNS, **constants, num_warps=TILE_WARPS,
            num_stages=fitting_stages(x, TILE_STAGES, stage),
        )  # fmt: skip
        if parts > 1:
            constants |= overlap(x)
            _add_rows_kernel[(triton.cdiv(N, SUM_ROWS),)](
                sums, *ends, M, N, R, ROWS=SUM_ROWS, **constants, num_warps=SUM_WARPS
            )
    return y, product


LIBRARY.define("row_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(LIBRARY, "row_linear", "CompositeExplicitAutograd")
def _row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return row_linear_forward(x, weight, bias)[0]


@torch.library.register_fake("liger_models::row_linear", lib=LIBRARY)
def _row_linear_fake(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weightᵀ + bias`` of few rows, without a backward.

    Args:
        x: [..., K], up to 16 rows in float16 or bfloat16, or one in float32.
        weight: [N, K] in the dtype of x, with contiguous rows.
        bias: [N] in the dtype of x.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: the shapes do not fit together, x has too many rows, or weight is stored by columns.
        TypeError: the tensors are not floating-point or differ in dtype.
    """
    op = "row_linear"
    check_floating(op, x=x, weight=weight, bias=bias)
    if not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        raise TypeError(f"{op}: x, weight and bias must have one dtype, got {x.dtype} and {weight.dtype}. Cast them.")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x must have rows of the width of weight, got {list(x.shape)} and {list(weight.shape)}."
        )
    most = 1 if x.dtype == torch.float32 else MOST_ROWS
    if not 0 < x.shape[:-1].numel() <= most:
        raise ValueError(
            f"{op}: x must have 1 to {most} rows in {x.dtype}, got {list(x.shape)}. Use torch.nn.functional.linear."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}.")
    if weight.stride(1) != 1:
        raise ValueError(f"{op}: weight must be stored by rows, got strides {weight.stride()}. Make it contiguous.")
    if not use_triton(x):
        return row_linear_reference(x, weight, bias)
    out: Tensor = torch.ops.liger_models.row_linear(x, weight, bias)
    return out


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, or `row_linear` for few rows without gradients, if the weight is an ordinary tensor."""
    plain = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    if plain or type(weight) not in (Tensor, torch.nn.Parameter) or not takes_row(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    return row_linear(x, weight, bias)
