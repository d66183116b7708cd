"""Computes the positions, slots and pages of each row's next tokens in a paged cache, with one kernel.

Let ``table`` be the pages of a row with L cached tokens, and let P be the number of tokens per page. The row's next n
tokens are numbered from i = 0. Token i has the position p = L + offset + i. For each of these tokens, the op returns p
and the following values::

    slot = table[p // P] · P + p % P          where the token is stored
    length = p + 1                            number of tokens that the token attends to
    pages = table                             a copy for each of the n tokens

A row is idle if it has no tokens left to generate. The tokens of an idle row are stored in slot 0, which belongs to no
row. Each of these tokens has position 0 and attends to one token.

Source: https://arxiv.org/abs/2309.06180.
"""

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton_for_integers
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import next_power_of_2

Slots = tuple[Tensor, Tensor, Tensor, Tensor]


def token_slots_reference(table: Tensor, lengths: Tensor, remaining: Tensor, n: int, offset: int, page: int) -> Slots:
    """Compute `token_slots` in plain PyTorch."""
    runs = (remaining > 0)[:, None]
    positions = (lengths.long()[:, None] + offset + torch.arange(n, device=lengths.device)) * runs  # [rows, n]
    slots = table.gather(1, positions // page).long() * page + positions % page
    ends = (positions + 1).flatten().int()
    return positions.view(-1, 1), (slots * runs).flatten(), ends, table.repeat_interleave(n, 0)


@triton.jit
def _token_slots_kernel(
    table_ptr, length_ptr, remaining_ptr, position_ptr, slot_ptr, end_ptr, pages_ptr, offset, WIDTH,
    N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute the position, slot, length and pages of one token."""
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    row = token // N
    runs = tl.load(remaining_ptr + row) > 0
    position = tl.where(runs, tl.load(length_ptr + row) + offset + (token % N).to(tl.int32), 0)
    page = tl.load(table_ptr + row * WIDTH + position // PAGE).to(tl.int64)
    tl.store(position_ptr + token, position.to(tl.int64))
    tl.store(slot_ptr + token, tl.where(runs, page * PAGE + position % PAGE, 0))
    tl.store(end_ptr + token, position + 1)
    if N > 1:
        column = tl.arange(0, BLOCK)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            pages = tl.load(table_ptr + row * WIDTH + start + column, mask=inside, other=0)
            tl.store(pages_ptr + token * WIDTH + start + column, pages, mask=inside)


def _token_slots(table: Tensor, lengths: Tensor, remaining: Tensor, n: int, offset: int, page: int) -> Slots:
    positions, slots, ends, pages = _token_slots_fake(table, lengths, remaining, n, offset, page)
    if len(slots):
        width = table.shape[1]
        with on_device_of(table):
            _token_slots_kernel[(len(slots),)](
                table.contiguous(), lengths, remaining, positions, slots, ends, pages, offset, width,
                N=n, PAGE=page, BLOCK=min(next_power_of_2(width), 1024), **overlap(table), num_warps=1,
            )  # fmt: skip
    return positions, slots, ends, pages


def _token_slots_fake(table, lengths, remaining, n, offset, page):
    tokens = table.shape[0] * n
    positions, slots = (remaining.new_empty(size) for size in ((tokens, 1), (tokens,)))
    return positions, slots, lengths.new_empty(tokens), table.new_empty(tokens if n > 1 else 0, table.shape[1])


FORWARD = define_op("token_slots", _token_slots, _token_slots_fake)


def token_slots(table: Tensor, lengths: Tensor, remaining: Tensor, *, n: int, offset: int, page: int) -> Slots:
    """For each of the next n tokens of each row, return the position, slot, length and pages.

    Args:
        table: [rows, W] int32, the pages of each row.
        lengths: [rows] int32, number of cached tokens of each row.
        remaining: [rows] int64, number of tokens that each row has yet to generate. A row is idle if this number is 0.
        n: number of next tokens of each row.
        offset: number of positions between the last cached token and the first of the next tokens.
        page: P, the number of tokens per page.

    Returns:
        ``(positions, slots, lengths, pages)``: [rows · n, 1] int64, [rows · n] int64, [rows · n] int32 and [rows · n,
        W] int32. The slot of a token is the place in the cache where the token is stored. The length of a token is the
        number of tokens to which it attends. The pages of a token are the pages of its row. The n tokens of a row are
        consecutive.
    """
    if not use_triton_for_integers(table):
        return token_slots_reference(table, lengths, remaining, n, offset, page)
    positions, slots, ends, pages = FORWARD(table, lengths, remaining, n, offset, page)
    return positions, slots, ends, pages if n > 1 else table
