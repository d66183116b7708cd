"""A linear layer for inputs with few rows, as in a decoding step. The layer takes about as long as reading the weight.

::

    y = x @ Wᵀ + b                        sums in fp32, one cast at the end
    y = x @ Wᵀ + b + (x @ Aᵀ) @ Bᵀ        with a low-rank term (LoRA), whose first product is also cast
    p = act(gate) · up                    of a packed gate and up projection, cast as in `gated_act`
    z = x @ Wᵀ                            in fp32, for x and W of any dtypes (routers)

If x has a single row, each program multiplies a few rows of W elementwise by x and sums the products. No partial sum
goes through memory, and no matrix units are needed. For comparison, if W has few rows, library kernels reach only two
thirds of the memory bandwidth.

If x has 2 to `MOST_ROWS` rows, the kernel uses matrix units. If W has too few rows to occupy all multiprocessors, the
columns of W are split among several programs, and a second kernel adds the programs' sums. If W is small, however,
launching a second kernel would take longer than reading W. For a small W and up to `MOST_SMALL_ROWS` rows of x, a
single kernel with smaller tiles therefore computes all sums.

Even if x has several rows, the kernel for a single row computes x @ Aᵀ and z, with a separate program for each element
of the result. If x has a single row, the kernel for y runs at the same time as the kernel for x @ Aᵀ, on Hopper and
later GPUs. The kernel for y waits for x @ Aᵀ only after it has computed its own sums (see `overlap`).
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
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
from liger_models.kernels.matmul.wide_linear import wide_linear_reference
from liger_models.kernels.overlap import await_previous, can_overlap, end_previous, overlap, start_next
from liger_models.kernels.tiles import cdiv, dot_tile, next_power_of_2

ROWS = 4
COLUMNS = 1024
NUM_WARPS = 2
STAGES = 3
"""If x has a single row, a program reads `ROWS` rows and `COLUMNS` columns of W per step. The program has `NUM_WARPS`
warps and `STAGES` steps in flight. For a dense W, the data of the first step are loaded before the previous kernel has
ended, and are multiplied last. For a float8 W, loading the first step early would be slower. On an H200, for the
projections of Llama 3.2 1B and 3B and of Llama 3 8B, the kernel's time with these numbers is within 1 % of the best of
32 choices."""

LOW_COLUMNS, LOW_COLUMNS_PER_WARP = 16384, 1024
"""For x @ Aᵀ and z, a program reads up to `LOW_COLUMNS` columns of a row of A or W at once, and has one warp for every
`LOW_COLUMNS_PER_WARP` of these columns. A whole row is nearly always read at once."""

MOST_ROWS = 16
"""Maximum number of rows of x for which the kernels of this file run. On an H200, for the projections of Llama 3.2 3B
plus the activation, these kernels take 0.95 times as long as cuBLAS plus the activation kernel if x has 16 rows, and
just as long if x has 64 rows."""

TILE_ROWS, TILE_COLUMNS = 64, 128
TILE_WARPS = 4
TILE_STAGES = 4
"""If x has several rows, a program reads `TILE_ROWS` rows and `TILE_COLUMNS` columns of W per step. The program has
`TILE_WARPS` warps and `TILE_STAGES` steps in flight. The columns are divided among so many programs that each
multiprocessor gets about one program. On an H200, for the projections of Llama 3.2 3B and Llama 3 8B, the kernel's time
with these numbers is within 4 % of the best of 35 choices."""

SMALL, SMALL_TILE_ROWS = 2**22, 16
"""W is small if it has at most `SMALL` elements. A program reads `SMALL_TILE_ROWS` rows of a small W."""

MOST_SMALL_ROWS = 64
"""Maximum number of rows of x for which the kernels of this file run if W is small."""

SUM_ROWS, SUM_WARPS = 32, 4
"""A program of the second kernel adds the partial sums for `SUM_ROWS` rows of W, and has `SUM_WARPS` warps."""

MOST_RANKS = 256
"""Maximum rank of a low-rank term that the kernels add. A program holds its rows of B in registers."""

LowRank = tuple[Tensor, Tensor]
"""The matrices A [R, C] and B [O, R] of the term ``(x @ Aᵀ) @ Bᵀ`` that a linear layer adds to its product. B is
already multiplied by the scale of the term, such as LoRA's alpha / rank."""


def low_rank_pair(A: Tensor | None, B: Tensor | None) -> LowRank | None:
    """Return the two tensors as a pair, or None if one of them is None."""
    return None if A is None or B is None else (A, B)


def row_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `row_linear` in plain PyTorch."""
    return torch.nn.functional.linear(x, weight, bias)


@triton.jit
def load_B(B_ptr, row, N, R, RANKS: tl.constexpr):
    """Load rows of B as a tile [rows, RANKS]. Columns R and above of the tile are 0."""
    rank = tl.arange(0, RANKS)
    mask = (row < N)[:, None] & (rank < R)[None, :]
    return tl.load(B_ptr + row.to(tl.int64)[:, None] * R + rank[None, :], mask=mask, other=0.0)


@triton.jit
def low_rank_row(B, low_ptr, R, RANKS: tl.constexpr, LOW: tl.constexpr):
    """For a single row of x, compute ROWS elements of the low-rank term.

    ``B`` [ROWS, RANKS] is the tile that `load_B` has loaded for these elements.

    ``low_ptr`` points to x @ Aᵀ. If LOW is "awaited", the kernel that computes x @ Aᵀ may still be running.
    """
    if LOW == "awaited":
        end_previous(True)
    rank = tl.arange(0, RANKS)
    low = tl.load(low_ptr + rank, mask=rank < R, other=0.0)
    return tl.sum(B.to(tl.float32) * low.to(tl.float32)[None, :], 1)


@triton.jit
def store_row(
    y, first, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """For one row of x, add the bias to ROWS sums, and store the results. Unless ACT is "", also store act(gate) · up.

    ``first`` is the index of the first sum. Unless ACT is "", ``first`` is even.
    """
    row = first + tl.arange(0, ROWS)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row, y, mask=row < N)
    if ACT != "":
        gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS // 2, 2]))
        a, _ = _activation(gate, ACT)
        result = first // 2 + tl.arange(0, ROWS // 2)
        product = a.to(product_ptr.dtype.element_ty).to(tl.float32) * up
        tl.store(product_ptr + result, product.to(product_ptr.dtype.element_ty), mask=2 * result < N)


@triton.jit
def store_rows(
    y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the low-rank term and the bias to the sums [ROWS, COLUMNS], and store the results.

    The tile of sums is transposed: its columns are the M rows of the result. Unless ACT is "", also store act(gate) ·
    up.
    """
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
        # Rows 2f and 2f + 1 are gate f and up f. Split [ROWS, COLUMNS] into gate and up, [ROWS / 2, COLUMNS] each.
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
    """Multiply ROWS rows of W by one row of x. The second program index is the index of this row of x.

    If STAGES is 0, the first step reads all columns of W, and the kernel has no loop.

    If the kernels for x @ Aᵀ and for y run at the same time, LOW is "made" in the kernel for x @ Aᵀ and "awaited" in
    the kernel for y. Otherwise, LOW is "".
    """
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
    # The first step of a dense W is loaded before the previous kernel ends, because no kernel writes to weights.
    if not HAS_SCALE:
        first = tl.load(at, mask=known & (column < K)[None, :], other=0.0, eviction_policy="evict_first")
    if LOW != "awaited":
        end_previous(OVERLAPS)
    if LOW == "made":  # everything that the next kernel reads before it waits is now complete
        start_next(True)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if STAGES:
        for start in tl.range(0 if HAS_SCALE else COLUMNS, K, COLUMNS, num_stages=STAGES):
            inside = start + column < K
            weight = tl.load(at + start, mask=known & inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
            total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    # The first step, which was loaded before x was complete, is added last.
    if not HAS_SCALE:
        x = tl.load(x_ptr + column, mask=column < K, other=0.0)
        total += first.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + row, mask=row < N, other=0.0)
    if RANKS:
        y += low_rank_row(B, low_ptr, R, RANKS, LOW)
    first = tl.program_id(0).to(tl.int64) * ROWS
    store_row(y, first, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)


@triton.jit
def _rows_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, sums_ptr, M, N, K, R, weight_n, share,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr,
    EARLY: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of W by up to COLUMNS rows of x.

    If PARTS is greater than 1, the columns of W are divided into parts. A program then sums over one part only, and
    `_add_rows_kernel` adds up the sums of all parts.

    With EARLY, the kernel may start before the previous kernel has ended. EARLY is not allowed if W has scales.
    """
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
    if EARLY:
        # The first step of W is loaded before the previous kernel ends, because no kernel writes to weights.
        inside = first + lane < end
        weight = tl.load(
            weights + first, mask=(row < N)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        end_previous(OVERLAPS)
        x = tl.load(rows + first, mask=inside[:, None] & (column < M)[None, :], other=0.0)
        total = tl.dot(weight, x, total)
    for start in range(first + BLOCK if EARLY else first, end, BLOCK):
        inside = start + lane < end
        mask = (row < N)[:, None] & inside[None, :]
        weight = tl.load(weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(rows + start, mask=inside[:, None] & (column < M)[None, :], other=0.0)
        if HAS_SCALE:
            # The weight is converted to float32 first, because a direct conversion takes instructions with a sixteenth
            # of the throughput. The scale is applied in every step, which forces the product of the step to complete.
            # Otherwise, on Hopper, Triton 3.6 and 3.7 would let the product continue during the next step, and the
            # conversion in the next step would overwrite registers that the product still reads.
            total += tl.dot(weight.to(tl.float32).to(x.dtype), x) * scale
        else:
            total = tl.dot(weight, x, total)
    # A program that has summed over all columns stores results. Other programs store their sums for `_add_rows_kernel`.
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
    """Add the sums of all PARTS in a fixed order, and store the results."""
    await_previous(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * N * COLUMNS + at, mask=(row < N)[:, None], other=0.0)
    store_rows(total, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


def are_few(x: Tensor, most: int) -> bool:
    """Return whether x [..., K] has few enough rows: one row or, in half precision, up to ``most`` rows.

    Inside `batch_invariant`, the result is False.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    return (rows == 1 or (1 < rows <= most and x.dtype != torch.float32)) and not is_batch_invariant()


def most_rows(weight: Tensor) -> int:
    """Return the maximum number of rows of x that `row_linear` supports for this weight, if x is in half precision."""
    return MOST_SMALL_ROWS if weight.numel() <= SMALL else MOST_ROWS


def takes_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `row_linear_forward` supports the product of x and weight.

    `row_linear_forward` supports a single row, or a few rows in half precision. All tensors must have the same dtype,
    and the rows of the weight must be contiguous. Inside `batch_invariant`, the result is False, because
    `row_linear_forward` is not batch-invariant.
    """
    return (
        are_few(x, most_rows(weight))
        and x.dtype == weight.dtype
        and x.dtype in TRITON_DTYPES
        and (bias is None or bias.dtype == x.dtype)
        and weight.stride(1) == 1
        and use_triton(x)
    )


def takes_low_rank(x: Tensor, low_rank: LowRank | None) -> bool:
    """Return whether the kernels for an x with few rows can add this low-rank term to their sums.

    Without a low-rank term, the result is True.
    """
    return low_rank is None or (len(low_rank[0]) <= MOST_RANKS and {matrix.dtype for matrix in low_rank} == {x.dtype})


def _launch_by_row(x: Tensor, weight: Tensor, y: Tensor, low: str = "") -> None:
    """Launch the kernel that computes ``y = x @ weightᵀ`` with a program for each element of y."""
    N, K = weight.shape
    columns = min(max(next_power_of_2(K), 32), LOW_COLUMNS)
    with on_device_of(x):
        _row_linear_kernel[(N, y.numel() // N)](
            x, weight, None, None, y, None, None, None, N, K, 0, weight.stride(0), HAS_SCALE=False, HAS_BIAS=False,
            ACT="", RANKS=0, LOW=low, **overlap(x), ROWS=1, COLUMNS=columns, STAGES=0 if columns >= K else 1,
            num_warps=max(columns // LOW_COLUMNS_PER_WARP, 1),
        )  # fmt: skip


def low_rank_arguments(x: Tensor, low_rank: LowRank | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Launch the kernel for ``x @ Aᵀ``, and return the arguments that the kernel for y needs to add the low-rank term.

    The rows of x [..., K] must be contiguous. The next kernel to be launched must be the kernel for y. If x has a
    single row, the kernel for y may start early. The kernel for y reads some tensors before it waits for the kernel for
    x @ Aᵀ. If the kernel for y starts early, these tensors must already be complete.

    Returns:
        The arguments ``(x @ Aᵀ, B, R)`` of the kernel for y, and the constants and options of that kernel's launch.
        Only the kernel for a single row has the constant LOW. The kernel for several rows starts early only if the
        weight is small, because the programs for a large weight would be distributed unevenly over the multiprocessors.
    """
    overlaps, one = overlap(x), x.numel() == x.shape[-1]
    constants = {"LOW": "", **overlaps} if one else {"OVERLAPS": overlaps["OVERLAPS"]}
    if low_rank is None:
        return (None, None, 0), {"RANKS": 0, **constants}
    A, B = (matrix.contiguous() for matrix in low_rank)
    R, K = A.shape
    low = x.new_empty(x.numel() // K, R)
    beside = one and can_overlap(x.device)  # with several rows, one kernel after the other is faster
    _launch_by_row(x, A, low, "made" if beside else "")
    constants["RANKS"] = dot_tile(R)
    return (low, B, R), constants | ({"LOW": "awaited", "launch_pdl": True} if beside else {})


def row_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str = "",
    scales: Tensor | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels that compute y and, with an activation, act(gate) · up.

    Args:
        x: [..., K], with at most as many rows as `takes_row` accepts.
        weight: [N, K].
        bias: [N]; None for no bias.
        act: the activation; "" for none.
        scales: [N] fp32, the scales of the rows of a float8 weight; None for a dense weight.
        low_rank: A and B of a low-rank term, in the dtype of x; None for no low-rank term.

    Returns:
        y [..., N], and act(gate) · up [..., N / 2], which is empty without an activation.
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
            # A single row is multiplied elementwise, without matrix units.
            columns = min(max(next_power_of_2(K), 32), COLUMNS)
            # Without the loop, the kernel needs a third of the registers, so that more programs run at once.
            stages = 0 if columns >= K and scales is None else STAGES
            _row_linear_kernel[(cdiv(N, ROWS),)](
                x, weight, scales, *ends, N, K, R, weight.stride(0), HAS_SCALE=scales is not None, ROWS=ROWS,
                COLUMNS=columns, STAGES=stages, **constants, num_warps=NUM_WARPS,
            )  # fmt: skip
            return y, product
        is_small = weight.numel() <= SMALL
        rows, columns = SMALL_TILE_ROWS if is_small else TILE_ROWS, max(next_power_of_2(M), 8)
        tiles, parts = cdiv(N, rows), 1
        if not is_small:
            # If W has few rows, there are few tiles. The columns of W are then divided among several programs to occupy
            # the device, and the programs' sums are added.
            parts = max(min(cdiv(num_programs(x, 1), tiles), K // (2 * TILE_COLUMNS)), 1)
        share = cdiv(cdiv(K, parts), TILE_COLUMNS) * TILE_COLUMNS
        sums = None if parts == 1 else torch.empty(parts, N, columns, dtype=torch.float32, device=x.device)
        early = is_small and scales is None
        constants |= {"PARTS": parts, "COLUMNS": columns}
        stage = TILE_COLUMNS * (rows * weight.itemsize + columns * x.itemsize)
        _rows_linear_kernel[(tiles, parts)](
            x, weight, scales, *ends, sums, M, N, K, R, weight.stride(0), share, HAS_SCALE=scales is not None,
            EARLY=early, ROWS=rows, BLOCK=TILE_COLUMNS, **constants | (overlap(x) if early else {}),
            num_warps=TILE_WARPS, num_stages=fitting_stages(x, TILE_STAGES, stage),
        )  # fmt: skip
        if parts > 1:
            constants |= overlap(x)
            _add_rows_kernel[(cdiv(N, SUM_ROWS),)](
                sums, *ends, M, N, R, ROWS=SUM_ROWS, **constants, num_warps=SUM_WARPS
            )
    return y, product


def _row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return row_linear_forward(x, weight, bias)[0]


FORWARD = define_op("row_linear", _row_linear, lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` for an x with few rows. The op has no backward.

    Args:
        x: [..., K], up to `most_rows` rows in float16 or bfloat16, or one row in float32.
        weight: [N, K] in the dtype of x, with contiguous rows.
        bias: [N] in the dtype of x.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: the shapes do not match, x has too many rows, or the rows of weight are not contiguous.
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
    most = 1 if x.dtype == torch.float32 else most_rows(weight)
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
    return FORWARD(x, weight, bias)


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` with `row_linear` where possible, and otherwise with ``F.linear``.

    `row_linear` requires that x has few rows, that the weight is an ordinary tensor, and that gradients and autocast
    are off.
    """
    plain = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    if plain or type(weight) not in (Tensor, torch.nn.Parameter) or not takes_row(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    return row_linear(x, weight, bias)


def _wide_row_linear(x: Tensor, weight: Tensor) -> Tensor:
    y = x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)
    _launch_by_row(x.contiguous(), weight, y)
    return y


WIDE = define_op(
    "wide_row_linear", _wide_row_linear,
    lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32),
)  # fmt: skip


def wide_inference_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weightᵀ`` in at least fp32, whatever the dtypes of x and weight. Autocast has no effect.

    If x has at most `MOST_ROWS` rows and gradients are disabled, a kernel reads x and weight in their own dtypes.
    Otherwise, x and weight are cast to the dtype of the result.

    Args:
        x: [..., K].
        weight: [N, K].

    Returns:
        [..., N] in fp32, or in fp64 if x is in fp64.
    """
    few = 0 < x.numel() <= MOST_ROWS * x.shape[-1] and not torch.is_grad_enabled() and not is_batch_invariant()
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.stride(1) == 1
    if few and plain and {x.dtype, weight.dtype} <= set(TRITON_DTYPES) and use_triton(x):
        return WIDE(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        return wide_linear_reference(x, weight)
