"""A row of a rollout: its state on the host while it runs, and its result."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Completion(NamedTuple):
    """A row that `rollout` has continued.

    Attributes:
        tokens: [n] int64 on the CPU, the new tokens; a stop token is the last of them.
        log_probs: [n] fp32 on the CPU, log-probability of each new token in the model's own distribution, before
            temperature and all other options.
        reason: "stop", or "length" for a row that ``max_new_tokens`` ended.
        routed_experts: with ``record_routing`` [prompt + n, L, K] int16 on the CPU, the K experts of each token of
            prompt and answer in each of the L layers with routed experts; −1 for the last token, which never runs.
    """

    tokens: Tensor
    log_probs: Tensor
    reason: str
    routed_experts: Tensor | None = None


@dataclass(eq=False)
class Row:
    """The state of a row on the host.

    Attributes:
        number: the position of the row in the result.
        prompt: number of its prompt.
        tokens: the prompt and the new tokens.
        begin: length of the prompt.
        end: number of tokens at which the row ends.
        stops: tokens that end the row.
        seed: the seed of its draws.
        log_probs: the log-probabilities of the new tokens.
        experts: the recorded experts of its tokens, in one tensor for each forward.
        slot: its index in a step; −1 while it waits.
        pages: the pages that it holds.
        cached: number of its tokens that the pages hold.
        source: a running row of the same prompt, whose pages this one will use as soon as they are filled.
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
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    source: "Row | None" = None

    @property
    def is_ready(self) -> bool:
        """Whether all tokens but the last are cached, so that the next forward of the row is a step."""
        return self.source is None and self.cached == len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """The number of tokens that the row may still get."""
        return self.end - len(self.tokens)

    @property
    def num_recorded(self) -> int:
        """Number of tokens with recorded experts. It may exceed ``cached``: a row keeps them when it is put back."""
        return sum(map(len, self.experts))
