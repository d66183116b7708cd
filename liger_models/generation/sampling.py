"""Choosing the next tokens from logits: greedily or by sampling."""

import torch
from torch import Tensor

from liger_models.generation.options import Settings


def choose(logits: Tensor, seen: Tensor | None, settings: Settings) -> Tensor:
    """Choose the next tokens [B] from logits [B, V] fp32; ``seen`` [B, V] bool marks the tokens already in each row."""
    if seen is not None:
        logits = penalize_repetition(logits, seen, settings.repetition_penalty)
    if not settings.do_sample:
        return logits.argmax(1)
    logits = logits / settings.temperature
    if settings.top_k:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    return torch.multinomial(logits.softmax(1), 1, generator=settings.generator)[:, 0]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of the tokens in ``seen`` by ``penalty``, and multiply the negative ones by it.

    Args:
        logits: [B, V] fp32.
        seen: [B, V] bool, the tokens already in each row.
        penalty: above 1 to discourage repetition.

    Source: CTRL (https://arxiv.org/abs/1909.05858).
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all logits [B, V] fp32 to −∞ except the ``k`` largest of each row and those equal to the last of them."""
    last = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set the logits of the least likely tokens, which together have probability at most 1 − ``p``, to −∞.

    The most likely token always stays.

    Args:
        logits: [B, V] fp32.
        p: in (0, 1].

    Source: https://arxiv.org/abs/1904.09751.
    """
    ascending, order = logits.sort(1)
    share, rest = ascending.softmax(1), 1 - p
    if torch.are_deterministic_algorithms_enabled():  # cumsum on a GPU then supports integers only
        share, rest = (share.double() * 2**53).long(), int(rest * 2**53)
    drop = share.cumsum(1) <= rest
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
