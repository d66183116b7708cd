"""The rows of a batch while they are continued: their tokens so far, and which of them have ended."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_models.generation.options import Settings
from liger_models.generation.sampling import Sampler


class Step(NamedTuple):
    """The new tokens of one step.

    Attributes:
        tokens: [B] int64; padding for rows that had ended.
        ended: [B] bool, the rows that have ended.
        logprobs: [B] fp32, log-probabilities of the tokens, 0 for rows that had ended; None if they are not computed.
    """

    tokens: Tensor
    ended: Tensor
    logprobs: Tensor | None


class Rows:
    """The tokens of a batch, from the prompts on.

    Args:
        prompts: [B, T] int64.
        mask: [B, T], 0 for padding on the left; None for no padding.
        settings: the options.
        vocab_size: V of the logits.
        logprobs: whether to compute log-probabilities of the tokens.

    Attributes:
        ids: [B, T + max_new_tokens] int64, filled step by step.
        context: as ``ids``, with −1 for padding.
        length: number of columns that are filled.
    """

    def __init__(
        self, prompts: Tensor, mask: Tensor | None, settings: Settings, vocab_size: int, *, logprobs: bool = False
    ) -> None:
        (B, T), device = prompts.shape, prompts.device
        room = (0, settings.max_new_tokens)
        self.ids = self.context = nn.functional.pad(prompts, room)
        if mask is not None:
            self.context = nn.functional.pad(prompts.masked_fill(mask == 0, -1), room)
        self.length, self.logprobs = T, logprobs
        self.sampler = Sampler(settings, prompts, vocab_size)
        self.stops = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=device)
        self.padding = settings.pad_token_id or 0
        self.ended = torch.zeros(B, dtype=torch.bool, device=device)

    def step(self, logits: Tensor) -> Step:
        """Choose and append the next tokens from logits [B, V]."""
        end, logits = self.length, logits.float()
        given = logits.clone() if self.logprobs else logits  # a processor may overwrite it
        tokens = self.sampler(self.ids[:, :end], self.context[:, :end], given)
        found = None
        if self.logprobs:
            found = log_probs_of(logits, tokens).masked_fill(self.ended, 0)
        if len(self.stops):
            tokens = tokens.masked_fill(self.ended, self.padding)
            self.ended = self.ended | torch.isin(tokens, self.stops)
        self.ids[:, end] = tokens
        if self.context is not self.ids:
            self.context[:, end] = tokens
        self.length += 1
        return Step(tokens, self.ended, found)

    def all_ended(self) -> bool:
        """Whether every row has ended. Synchronises with the device if rows can end."""
        return len(self.stops) > 0 and bool(self.ended.all())


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities [B] fp32 of tokens [B] int64 by logits [B, V] fp32."""
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return chosen - logits.logsumexp(1)
