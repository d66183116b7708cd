"""A row of a rollout: its state on the host, and its result."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Completion(NamedTuple):
    """The result of a row of `rollout`.

    Attributes:
        tokens: [n] int64 on the CPU, the new tokens. A stop token is included as the last token.
        log_probs: [n] fp32 on the CPU, the log-probability of each new token under the model's own distribution,
            before temperature and all other options.
        reason: "length" if ``max_new_tokens`` ended the row, otherwise "stop".
        routed_experts: [prompt + n, L, K] int16 on the CPU: for each token of the prompt and each new token, the K
            experts in each of the L layers with routed experts. −1 for the last token, on which the model has not
            run. None without ``record_routing``.
        rounds: number of forwards that chose the new tokens, if `rollout` had a ``draft_model``; otherwise None. The
            number of new tokens minus this number is the number of accepted drafts.
    """

    tokens: Tensor
    log_probs: Tensor
    reason: str
    routed_experts: Tensor | None = None
    rounds: int | None = None


@dataclass(eq=False)
class Row:
    """The state of a row on the host.

    Attributes:
        number: index of the row in the result.
        prompt: index of the row's prompt.
        tokens: the prompt and the new tokens.
        begin: length of the prompt.
        end: maximum number of tokens, including the prompt.
        stops: tokens that end the row.
        seed: seed of the row's random draws.
        log_probs: log-probabilities of the new tokens.
        experts: the recorded experts of the row's tokens, in one tensor for each forward.
        steps: number of steps that have added new tokens.
        slot: index of the row in a step; −1 while the row waits.
        pages: the pages that the row holds.
        cached: number of tokens of the row whose keys and values are in the pages.
        source: a running row with the same prompt, whose pages this row will use as soon as they are filled.
    """

    number: int
    prompt: int
    tokens: list[int]
    begin: int
    end: int
    stops: list[int]
    seed: int
    log_probs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    steps: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    source: "Row | None" = None

    @property
    def is_ready(self) -> bool:
        """Whether all tokens but the last are cached, so that the row's next forward is a step."""
        return self.source is None and self.cached == len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """The number of tokens that the row may still get."""
        return self.end - len(self.tokens)

    @property
    def num_recorded(self) -> int:
        """Number of tokens with recorded experts. A row keeps these experts when it is put back into the queue."""
        return sum(map(len, self.experts))
