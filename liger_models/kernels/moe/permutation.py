"""Sorting tokens by expert, and back.

Each of N tokens has K copies, one for each of its experts. The copies are sorted by expert; the sort is stable, so the
tokens of an expert stay in order. Copy k of token n becomes row j = slot[n, k], copy order[j] is row j, and expert e
owns the rows from ends[e − 1] to ends[e]::

    permute       r_j = x_n                        each token is read once and written K times
    unpermute     y_n = Σ_k w_nk · r_slot[n,k]     in fp32 and in the order of k: every run gives the same bits
                                                   with biases b: r_slot[n,k] + b_e

The host never waits for the device, because the experts' row counts stay there.

A copy without an expert has the expert number X. It is sorted behind the S other copies and has no row: slot >= S.
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.overlap import await_previous, overlap

SORT_BLOCK = 2048
"""Copies that a program of the sort reads at a time. The program of an expert reads all copies twice. As 16-bit numbers
they stay in the L2 cache, and programs exchange nothing, so one launch is enough."""

ROW_BLOCK = 1024
"""Columns that a program of `permute` or `unpermute` moves: in bf16 one 16-byte vector per thread and row. The loads or
stores of all K rows are in flight at once."""

MAX_COPIES = 2**30
MAX_EXPERTS = 2**15 - 1
"""Copies are counted in 32 bits, and the sort counts one block past the last; experts are 16-bit numbers."""


@triton.jit
def _sort_kernel(experts_ptr, order_ptr, slot_ptr, ends_ptr, S, BLOCK: tl.constexpr):
    """Program e writes the copies of expert e behind the copies of all earlier experts."""
    expert = tl.program_id(0)
    indices = tl.arange(0, BLOCK)
    # First walk: how many copies belong to earlier experts, which is where this expert's rows begin.
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, S, BLOCK):
        chosen = tl.load(experts_ptr + start + indices, mask=start + indices < S, other=32767).to(tl.int32)
        before += (chosen < expert).to(tl.int32)
    end = tl.sum(before, 0)
    # Second walk: a running count gives each copy of this expert its slot, in order, so the sort is stable.
    for start in range(0, S, BLOCK):
        index = start + indices
        mine = tl.load(experts_ptr + index, mask=index < S, other=32767).to(tl.int32) == expert
        slot = end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + slot, index, mask=mine)
        tl.store(slot_ptr + index, slot, mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends_ptr + expert, end)


@triton.jit
def _permute_kernel(x_ptr, slot_ptr, rows_ptr, S, C, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    x = tl.load(x_ptr + token * C + columns, mask=inside, other=0.0).to(rows_ptr.dtype.element_ty)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + slot * C + columns, x, mask=inside & (slot < S))


@triton.jit
def _unpermute_kernel(
    rows_ptr, slot_ptr, weights_ptr, y_ptr, bias_ptr, experts_ptr, S, C, K: tl.constexpr, SORTED: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64) if SORTED else token * K + k
        # Slot S means that this copy has no row and adds nothing.
        there = inside & (slot < S)
        row = tl.load(rows_ptr + slot * C + columns, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts_ptr + token * K + k)
            row += tl.load(bias_ptr + expert * C + columns, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += row
    tl.store(y_ptr + token * C + columns, total.to(y_ptr.dtype.element_ty), mask=inside)


_sort_kernel.decides = True  # its output says where later kernels read and write


def sort_by_expert(experts: Tensor, X: int, copies: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sort copies into ``(order [S], slot [N K], ends [X])``, int32; copy k of token n has the number n · K + k.

    ``copies`` is S; None if all copies have an expert.
    """
    programs = X if copies is None else X + 1  # the last one sorts those without
    experts = experts.contiguous().to(torch.int16)
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    slot, ends = torch.empty_like(order), order.new_empty(programs)
    with on_device_of(experts):
        _sort_kernel[(programs,)](experts, order, slot, ends, experts.numel(), BLOCK=SORT_BLOCK, num_warps=8)
    return order[:copies], slot, ends[:X]


def _row_grid(N: int, C: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = min(triton.next_power_of_2(C), ROW_BLOCK)
    return (N, triton.cdiv(C, block)), {"BLOCK": block, "num_warps": max(block // 256, 1)}


def permute(x: Tensor, slot: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """Copy [N, C] -> [S, C], each token's row to all of its slots [N K] below S, cast to ``dtype``."""
    x = x.contiguous()
    N, C = x.shape
    rows = torch.empty(S, C, dtype=dtype, device=x.device)
    grid, constants = _row_grid(N, C)
    with on_device_of(x):
        _permute_kernel[grid](x, slot, rows, S, C, K=slot.numel() // N, **constants)
    return rows


def unpermute(
    rows: Tensor,
    slot: Tensor | None,
    weights: Tensor | None,
    N: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """Sum [S, C] -> [N, C] over each token's rows, times ``weights`` [N, K] if given.

    Without ``slot`` the rows are in the order of the copies. With ``bias`` [X, C] the bias of each row's expert,
    ``experts`` [N, K] int64, is added first.
    """
    S, C = rows.shape
    y = torch.empty(N, C, dtype=dtype, device=rows.device)
    grid, constants = _row_grid(N, C)
    with on_device_of(rows):
        _unpermute_kernel[grid](
            # A pointer argument that the constants disable must still be a tensor.
            rows, rows if slot is None else slot, rows if weights is None else weights, y,
            rows if bias is None else bias, rows if experts is None else experts.contiguous(), S, C,
            K=(S if slot is None else slot.numel()) // N, SORTED=slot is not None, WEIGHTED=weights is not None,
            BIAS=bias is not None, **overlap(rows), **constants,
        )  # fmt: skip
    return y
