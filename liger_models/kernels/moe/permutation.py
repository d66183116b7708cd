"""Sorting tokens by expert, and restoring their order.

Each of N tokens has K copies, one for each of its experts. The copies are sorted by expert. The sort is stable, so the
tokens of an expert stay in order. Copy k of token n becomes row j = slot[n, k], and order[j] = n · K + k is the index
of this copy. Expert e has the rows from ends[e − 1] to ends[e] − 1. Two functions move rows between the two orders::

    permute       r_j = x_n                        each token's row is read once and written K times
    unpermute     y_n = Σ_k w_nk · r_slot[n,k]     in fp32, in the order of k, and so bitwise identical in every run

If there are biases b, unpermute adds b_e to each row before the row is multiplied by its weight. If there is an addend,
unpermute adds it to y_n after y_n has been rounded.

The numbers of rows per expert stay on the device, so the host never waits for the device.

A copy without an expert has the expert index X. The sort places all such copies after the S copies that have an expert.
A copy without an expert has no row, and its slot is at least S.
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2

SORT_BLOCK = 2048
"""Number of copies whose experts a program of the sort reads at a time. There is one program for each expert, and each
program reads the experts of all copies twice. The experts' indices are stored as 16-bit integers, which stay in the L2
cache. The programs exchange no data, so a single launch suffices."""

ROW_BLOCK = 1024
"""Maximum number of columns that a program of `permute` or `unpermute` processes. In bf16, each thread of such a
program processes one 16-byte vector of each row. The loads or stores of all K rows are in flight at the same time."""

MAX_COPIES = 2**30
MAX_EXPERTS = 2**15 - 1
"""Maximum number of copies, and maximum number of experts. Indices of copies are 32-bit integers and reach up to one
block beyond the last copy. Indices of experts are 16-bit integers."""


@triton.jit
def _sort_kernel(experts_ptr, order_ptr, slot_ptr, ends_ptr, S, BLOCK: tl.constexpr):
    """Program e writes the indices of expert e's copies to ``order``, after the indices for all earlier experts. The
    program also writes the slots of these copies, and the end of the expert's rows.
    """
    expert = tl.program_id(0)
    indices = tl.arange(0, BLOCK)
    # A first loop counts the copies of earlier experts. The count is the index of this expert's first row.
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, S, BLOCK):
        chosen = tl.load(experts_ptr + start + indices, mask=start + indices < S, other=32767).to(tl.int32)
        before += (chosen < expert).to(tl.int32)
    end = tl.sum(before, 0)
    # A second loop numbers the copies of this expert in their order, so that the sort is stable.
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
    rows_ptr, slot_ptr, weights_ptr, y_ptr, bias_ptr, experts_ptr, addend_ptr, S, C, K: tl.constexpr,
    SORTED: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64) if SORTED else token * K + k
        # If the slot is S or larger, the copy has no row and contributes 0.
        there = inside & (slot < S)
        row = tl.load(rows_ptr + slot * C + columns, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts_ptr + token * K + k)
            row += tl.load(bias_ptr + expert * C + columns, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += row
    y = total.to(y_ptr.dtype.element_ty)
    if addend_ptr is not None:  # y is rounded first, as if the addition were a separate op
        addend = tl.load(addend_ptr + token * C + columns, mask=inside, other=0.0)
        y = (y.to(tl.float32) + addend.to(tl.float32)).to(y.dtype)
    tl.store(y_ptr + token * C + columns, y, mask=inside)


_sort_kernel.decides = True  # its output determines the addresses at which later kernels read and write


def sort_by_expert(experts: Tensor, X: int, copies: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the copies of tokens by expert. Copy k of token n has the index n · K + k.

    Args:
        experts: [N, K], the expert of each copy.
        X: number of experts.
        copies: S, the number of copies that have an expert; None if all copies have an expert.

    Returns:
        ``(order [S], slot [N · K], ends [X])`` in int32, as the module's docstring defines them.
    """
    programs = X if copies is None else X + 1  # the last program sorts the copies without an expert
    experts = experts.contiguous().to(torch.int16)
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    slot, ends = torch.empty_like(order), order.new_empty(programs)
    with on_device_of(experts):
        _sort_kernel[(programs,)](experts, order, slot, ends, experts.numel(), BLOCK=SORT_BLOCK, num_warps=8)
    return order[:copies], slot, ends[:X]


def _row_grid(N: int, C: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = min(next_power_of_2(C), ROW_BLOCK)
    return (N, cdiv(C, block)), {"BLOCK": block, "num_warps": max(block // 256, 1)}


def permute(x: Tensor, slot: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """Cast each token's row to ``dtype``, and copy it to the token's slots: [N, C] -> [S, C].

    ``slot`` is [N · K]. Slots that are S or larger have no row in the result.
    """
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
    addend: Tensor | None = None,
) -> Tensor:
    """Sum the rows of each token: [S, C] -> [N, C].

    Args:
        rows: [S, C], the rows of the copies.
        slot: [N · K], the row of each copy; None if the rows are in the order of the copies.
        weights: [N, K], the factors by which the rows are multiplied; None for a sum without weights.
        N: number of tokens.
        dtype: dtype of the result.
        bias: [X, C], the bias of each expert, which is added to the expert's rows before the rows are multiplied by
            their weights; None for no bias.
        experts: [N, K] int64, the expert of each copy; needed only with ``bias``.
        addend: [N, C] in ``dtype``, which is added to the rounded sums; None to add nothing.
    """
    S, C = rows.shape
    y = torch.empty(N, C, dtype=dtype, device=rows.device)
    grid, constants = _row_grid(N, C)
    with on_device_of(rows):
        _unpermute_kernel[grid](
            # Arguments that the kernel does not use must also be tensors, and are set to ``rows``.
            rows, rows if slot is None else slot, rows if weights is None else weights, y,
            rows if bias is None else bias, rows if experts is None else experts.contiguous(),
            None if addend is None else addend.contiguous(), S, C,
            K=(S if slot is None else slot.numel()) // N, SORTED=slot is not None, WEIGHTED=weights is not None,
            BIAS=bias is not None, **overlap(rows), **constants,
        )  # fmt: skip
    return y
