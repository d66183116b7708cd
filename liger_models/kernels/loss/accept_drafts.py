"""The last step of a round of speculative decoding.

The op decides how many new tokens each row gets, and updates the row's state. Let a row have the drafts d_1 ... d_k and
the model's choices y_1 ... y_{k+1}::

    n = 1 + number of accepted drafts before the first rejected one         draft d_i is accepted if it equals y_i
    n = number of tokens up to the first stop token of y_1 ... y_n          if there is one
    n = min(n, remaining)

Then n is added to the row's number of cached tokens and to its number of new tokens, and subtracted from its number of
remaining tokens. After a stop token, the number of remaining tokens is set to 0. y_n becomes the row's last token. In
plain PyTorch, these steps would take thirty kernels, each of which would process only a few numbers.

Source: https://arxiv.org/abs/2211.17192.
"""

from typing import Annotated

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton_for_integers
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import next_power_of_2


def accept_drafts_reference(
    chosen: Tensor, tokens: Tensor, agree: Tensor | None, stops: Tensor, lengths: Tensor, remaining: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `accept_drafts` in plain PyTorch."""
    rows, width = chosen.shape
    if agree is None:
        agree = chosen[:, :-1] == tokens[:, 1:]
    new = agree.long().cumprod(1).sum(1) + 1
    is_stop = (chosen[:, :, None] == stops[:, None]).any(2)
    before = (is_stop.long().cumsum(1) == 0).sum(1)  # number of tokens before the first stop token
    stopped = before < new
    new = torch.where(stopped, before + 1, new).minimum(remaining)
    lengths += new
    remaining -= new
    remaining.masked_fill_(stopped, 0)
    counts += new
    last = torch.arange(rows, device=new.device) * width + (new - 1).clamp_min(0)
    tokens[:, 0] = chosen.flatten()[last]
    return new, last


@triton.jit
def _accept_drafts_kernel(
    chosen_ptr, token_ptr, agree_ptr, stop_ptr, length_ptr, remaining_ptr, count_ptr, new_ptr, last_ptr,
    K: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Decide how many new tokens a row gets, and update the state of the row."""
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at, stop = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    token = tl.load(chosen_ptr + row * (K + 1) + at, mask=at <= K, other=-1)
    if agree_ptr is None:
        agrees = token == tl.load(token_ptr + row * (K + 1) + 1 + at, mask=at < K, other=-2)
    else:
        agrees = tl.load(agree_ptr + row * K + at, mask=at < K, other=0).to(tl.int1)
    new = tl.min(tl.where((at < K) & agrees, K, at), 0) + 1

    # Lanes without a stop token hold −1, which is not a token.
    stops = tl.load(stop_ptr + row * STOPS + stop, mask=stop < STOPS, other=-1)
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) & (at <= K)
    before = tl.min(tl.where(is_stop != 0, at, WIDTH + K), 0)
    stopped = before < new
    remaining = tl.load(remaining_ptr + row)
    new = tl.minimum(tl.where(stopped, before + 1, new).to(tl.int64), remaining)
    last = row * (K + 1) + tl.maximum(new - 1, 0)
    chosen = tl.load(chosen_ptr + last)

    tl.store(new_ptr + row, new)
    tl.store(last_ptr + row, last)
    tl.store(token_ptr + row * (K + 1), chosen)
    tl.store(length_ptr + row, tl.load(length_ptr + row) + new.to(tl.int32))
    tl.store(remaining_ptr + row, tl.where(stopped, 0, remaining - new))
    tl.store(count_ptr + row, tl.load(count_ptr + row) + new)


def _accept_drafts(
    chosen: Tensor, tokens: Annotated[Tensor, "Tensor(a!)"], agree: Tensor | None, stops: Tensor,
    lengths: Annotated[Tensor, "Tensor(b!)"], remaining: Annotated[Tensor, "Tensor(c!)"],
    counts: Annotated[Tensor, "Tensor(d!)"],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, width = chosen.shape
    new, last = torch.empty_like(remaining), torch.empty_like(remaining)
    agree = None if agree is None else agree.contiguous()
    if rows:
        with on_device_of(chosen):
            _accept_drafts_kernel[(rows,)](
                chosen.contiguous(), tokens, agree, stops.contiguous(), lengths, remaining, counts, new, last,
                K=width - 1, STOPS=stops.shape[1], WIDTH=next_power_of_2(width),
                BLOCK=max(next_power_of_2(stops.shape[1]), 1), **overlap(chosen), num_warps=1,
            )  # fmt: skip
    return new, last


FORWARD = define_op("accept_drafts", _accept_drafts, "remaining remaining")


def accept_drafts(
    chosen: Tensor, tokens: Tensor, agree: Tensor | None, stops: Tensor, lengths: Tensor, remaining: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accept the drafts of a round, and write the state of each row in place.

    Args:
        chosen: [rows, k + 1] int64, the model's choices.
        tokens: [rows, k + 1] int64, contiguous. Each row consists of the row's last token, which is overwritten, and
            the drafts.
        agree: [rows, k] bool, whether each draft may be accepted; None to accept drafts that equal the model's choice.
        stops: [rows, S] int64, the stop tokens of each row, padded with −1.
        lengths: [rows] int32, number of cached tokens of each row; overwritten.
        remaining: [rows] int64, number of tokens that each row still needs; overwritten.
        counts: [rows] int64, number of new tokens of each row so far; overwritten.

    Returns:
        The number of new tokens of each row, and the index of the row's last new token in the flattened ``chosen``.
        Both are [rows] int64.

    Raises:
        ValueError: the shapes do not match, or a tensor that is overwritten is not contiguous.
    """
    rows, width = chosen.shape
    fits = tokens.shape == chosen.shape and (agree is None or agree.shape == (rows, width - 1)) and len(stops) == rows
    if not fits or any(x.shape != (rows,) for x in (lengths, remaining, counts)):
        raise ValueError(
            f"accept_drafts: tokens must be [{rows}, {width}], agree [{rows}, {width - 1}] or None, stops [{rows}, S], "
            f"and lengths, remaining and counts [{rows}], got {list(tokens.shape)}, "
            f"{'none' if agree is None else list(agree.shape)}, {list(stops.shape)}, {list(lengths.shape)}, "
            f"{list(remaining.shape)} and {list(counts.shape)}."
        )
    if not all(x.is_contiguous() for x in (tokens, lengths, remaining, counts)):
        raise ValueError("accept_drafts: tokens, lengths, remaining and counts must be contiguous, got strides.")
    if not use_triton_for_integers(chosen):
        return accept_drafts_reference(chosen, tokens, agree, stops, lengths, remaining, counts)
    return FORWARD(chosen, tokens, agree, stops, lengths, remaining, counts)
