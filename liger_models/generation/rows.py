"""The rows of a batch during generation: their tokens so far, and which rows have ended."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_models.generation.options import Settings
from liger_models.generation.sampling import Sampler
from liger_models.generation.stop_strings import StopStrings
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.loss.cross_entropy import token_statistics


class Step(NamedTuple):
    """The new tokens of one step.

    Attributes:
        tokens: [B] int64, the new token of each row, or padding if the row has ended before this step.
        ended: [B] bool, whether each row has ended in this step or earlier.
        logprobs: [B] fp32, the log-probabilities of the tokens, with 0 for padding; None if not computed.
        logits: [B, V] fp32, the logits of the model; None if not requested.
        scores: [B, V] fp32, the logits after all options were applied, with −∞ for tokens that could not be chosen;
            None if not requested.
        read_tokens: function that waits until the tokens have been copied to the host, and returns them, [B] int64;
            None if no copy was requested.
    """

    tokens: Tensor
    ended: Tensor
    logprobs: Tensor | None
    logits: Tensor | None = None
    scores: Tensor | None = None
    read_tokens: Callable[[], Tensor] | None = None


class Rows:
    """The tokens of a batch: prompts and new tokens.

    Args:
        prompts: [B, T] int64.
        mask: [B, T], which is 0 for padding on the left; None for no padding.
        settings: the options.
        vocab_size: V, the number of logits per row.
        logprobs: whether to compute the log-probabilities of new tokens.
        returns_logits: whether each step includes its logits.

    Attributes:
        ids: [B, T + max_new_tokens] int64, the tokens. The columns are filled step by step.
        context: like ``ids``, but with −1 for padding.
        length: number of filled columns.
    """

    def __init__(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        settings: Settings,
        vocab_size: int,
        *,
        logprobs: bool = False,
        returns_logits: bool = False,
    ) -> None:
        (B, T), device = prompts.shape, prompts.device
        room = (0, settings.max_new_tokens)
        self.ids = self.context = nn.functional.pad(prompts, room)
        if mask is not None:
            self.context = nn.functional.pad(prompts.masked_fill(mask == 0, -1), room)
        self.length, self.logprobs, self.returns_logits = T, logprobs, returns_logits
        self.sampler = Sampler(settings, prompts, vocab_size)
        self.stops = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=device)
        self.strings = settings.stop_strings
        self.padding = settings.pad_token_id or 0
        self.ended = torch.zeros(B, dtype=torch.bool, device=device)
        self._all_ended: bool | None = False

    def step(self, logits: Tensor) -> Step:
        """Choose and append the next tokens from logits [B, V]."""
        end, logits = self.length, logits.float()
        is_kept = self.logprobs or self.returns_logits
        scores = logits.clone() if is_kept else logits  # a logits processor may overwrite the logits
        scores = self.sampler.scores(self.ids[:, :end], self.context[:, :end], scores)
        tokens = self.sampler.choose(scores, end - self.sampler.prompt_length)  # [B]
        log_probs = None
        if self.logprobs:
            log_probs = log_probs_of(logits, tokens).masked_fill(self.ended, 0)

        # Rows that ended earlier get padding. A row ends with a stop token or, see below, with a stop string.
        if len(self.stops) or self.strings is not None:
            tokens = tokens.masked_fill(self.ended, self.padding)
            self.ended = self.ended | torch.isin(tokens, self.stops)
            self._all_ended = None
        self.put(tokens, end)
        self.length += 1
        if self.strings is not None:
            self._find(self.strings)
        returned = (logits, scores) if self.returns_logits else ()
        return Step(tokens, self.ended, log_probs, *returned)

    def put(self, tokens: Tensor, column: int) -> None:
        """Write tokens [B] into a column."""
        self.ids[:, column] = tokens
        if self.context is not self.ids:
            self.context[:, column] = tokens

    def _find(self, strings: StopStrings) -> None:
        """End the rows whose last token completes a stop string. Synchronizes with the device."""
        last = self.context[:, max(self.length - strings.window, 0) : self.length]
        rows = torch.cat([self.ended[:, None], last], 1).tolist()
        ended = [bool(done) or strings.completed_by_last(tokens) for done, *tokens in rows]
        self.ended, self._all_ended = torch.tensor(ended, device=last.device), all(ended)

    def all_ended(self) -> bool:
        """Return whether every row has ended. Synchronizes with the device if a row can end early."""
        if self._all_ended is None:
            self._all_ended = bool(self.ended.all())
        return self._all_ended

    def read_later(self) -> Callable[[], bool]:
        """Start to copy a flag to the host. The flag says whether every row has ended.

        Returns a function that waits for the copy and returns the flag.
        """
        if self._all_ended is not None or self.ended.device.type not in ACCELERATORS:
            known = self.all_ended()
            return lambda: known
        read = copy_later(self.ended.all())
        return lambda: bool(read())


def copy_later(x: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host. The returned function waits for the copy, and returns the copied tensor.

    Kernels that are launched afterwards do not delay the copy.
    """
    if x.device.type not in ACCELERATORS:
        return lambda: x
    # With pinned memory, the copy runs asynchronously. The event marks the end of the copy.
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x, non_blocking=True)
    copied = torch.accelerator.current_stream(x.device).record_event()

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read


def log_probs_of(logits: Tensor, tokens: Tensor, softcap: float | None = None, logit_scale: float = 1.0) -> Tensor:
    """Compute the log-probabilities [B] fp32 of tokens [B] int64 with the kernel that training uses.

    Args:
        logits: [B, V], before ``logit_scale`` and ``softcap`` are applied.
    """
    statistics = token_statistics(logits, tokens, None, -100, 0.0, 0.0, softcap, logit_scale)
    assert statistics is not None
    return statistics.log_probs
