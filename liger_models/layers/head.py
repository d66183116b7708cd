"""Language-model head, with the loss inside its forward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.kernels.collectives import Ranks, all_words
from liger_models.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_models.kernels.dispatch import ACCELERATORS, check
from liger_models.kernels.linear_cross_entropy import Words, linear_cross_entropy
from liger_models.kernels.options import KernelOptions

from .tensor_parallel import own

LossFunction = Callable[[Tensor, Tensor, Tensor], Any]
"""Hidden states [..., C], the head's weight [V, C] and targets [...], already shifted, to a loss or anything else."""


ROW_MULTIPLE = 256
"""Of a head's rows, if some are left out: few different shapes, and such as products like."""


class _Rows(torch.autograd.Function):
    """Rows of x [N, C] by their numbers, none twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None


@functools.cache
def _aside(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class Targets:
    """Targets [...] of which those with −100 need no logits: how many others there are is on its way to the host.

    Made before the blocks run, it is known when the head wants it, and the device has not been waited for. The copy has
    a stream of its own, so that the computation doesn't wait for moments that are on their way to the host before it.
    """

    def __init__(self, target: Tensor) -> None:
        self.target, self.ignored = target, (target == -100).flatten()
        self.count, self.copied = (~self.ignored).sum(), None
        if target.device.type in ACCELERATORS:
            stream, count = _aside(target.device), self.count
            stream.wait_stream(torch.accelerator.current_stream(target.device))
            count.record_stream(stream)
            with stream:
                self.count = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(count, non_blocking=True)
            self.copied = stream.record_event()

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., C] and the targets [...], or of both a multiple of 256 rows [n, ...], among them all that count."""
        if self.copied is not None:
            self.copied.synchronize()
        N = len(self.ignored)
        wanted = max(-(-int(self.count) // ROW_MULTIPLE), 1) * ROW_MULTIPLE
        if wanted >= N:
            return x, self.target
        rows = self.ignored.to(torch.uint8).argsort(stable=True)[:wanted]
        return _Rows.apply(x.flatten(0, -2), rows), self.target.flatten()[rows]  # type: ignore[no-untyped-call]


class LigerLMHead(nn.Linear):
    """Projection to the vocabulary; given targets it returns their loss without building the logits.

    The loss is computed in here, not around it, so that whatever gathers this module's weight for its forward (FSDP)
    has gathered it for the loss.

    Args:
        hidden_size: C.
        vocab_size: V.
        logit_scale: factor of the logits.
        softcap: logits, scaled, become ``softcap · tanh(logits / softcap)``; None for no cap.
        kernels: which loss runs.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.logit_scale, self.softcap = logit_scale, softcap
        self.kernels = kernels or KernelOptions()
        self.words: Words | None = None
        """Those that this rank has, where the weight's rows are cut over ranks."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the words: see `layers.tensor_parallel`."""
        self.words = Words(ranks, self.out_features).check()
        return {"weight": 0}

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight whose product are the logits before scale and cap; adapters add columns to both."""
        return x, own(self.weight)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        num_items: Tensor | float | None = None,
        return_logits: bool = False,
        log_probs: bool = False,
        loss_function: LossFunction | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Loss and logits, each None where it is not wanted.

        Args:
            x: [..., C]. Where the words are cut over ranks, of all tokens, and of its gradient each rank gets a part
                of the sum (`collectives.enter`); loss and logits are those of all words, on each rank.
            target: [...] int64, already shifted; −100 is ignored. None: no loss.
            num_items: divisor of the loss, None for the number of targets.
            return_logits: build the logits [..., V] even with a target.
            log_probs: return the log-probability of each target [...] in the loss's place, 0 where ignored.
            loss_function: called with x, the weight and the targets; its result takes the loss's place.
        """
        scale, cap, words = self.logit_scale, self.softcap, self.words
        x, weight = self.operands(x)
        # Over ranks there is no other way: logits would have to be gathered.
        fused = self.kernels.fused_linear_cross_entropy or words is not None
        raw = None
        if target is None or return_logits or not (fused or log_probs or loss_function):
            raw = F.linear(x, weight)
            raw = raw if words is None else all_words(raw, words.ranks, words.vocabulary)
        logits = None
        if raw is not None and (target is None or return_logits):
            logits = raw if scale == 1.0 else raw * scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
        if target is None:
            return None, logits
        if loss_function is not None:
            check(words is None, "LigerLMHead: loss_function needs the whole weight, got one cut by apply_tp.")
            return loss_function(x, weight, target), logits
        if log_probs:
            results = linear_cross_entropy(
                x, weight, target, logit_scale=scale, softcap=cap, reduction="sum", return_log_probs=True, words=words
            )
            return results.log_probs, logits
        if raw is None or fused:
            loss = linear_cross_entropy(
                x, weight, target, num_items=num_items, logit_scale=scale, softcap=cap, words=words
            ).loss
        else:
            function = cross_entropy if self.kernels.cross_entropy else cross_entropy_reference
            loss = function(raw, target, num_items=num_items, logit_scale=scale, softcap=cap).loss
        return loss, logits
