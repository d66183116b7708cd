"""Checks that stop a run with non-finite weights, losses or gradients.

A loss or a gradient that is not finite stops the run at the next log line.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from liger_models.distributed.ranks import is_distributed
from liger_models.layers.linear import local

NEVER = 2**62
"""A step number that no run reaches. It is stored in place of the first non-finite step while all steps are finite."""


class FiniteChecks:
    """Records, on the device, the first step with a non-finite loss or gradient. `check` raises an error for this step.

    Args:
        parameters: the trained parameters.
        scaler: the gradient scaler. If gradients overflow in float16, the scaler skips the step, which is not an error.
            However, an overflow with a scale below 1 is an error, because such a scale can't be the cause of the
            overflow.
        files: the data files, for error messages.
        newest: a function that returns the newest checkpoint, for error messages.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        scaler: torch.amp.GradScaler,
        files: Sequence[str],
        newest: Callable[[], Path | None],
    ) -> None:
        self._parameters, self._scaler = [*parameters], scaler
        self._files, self._newest = files, newest
        self._first: Tensor | None = None
        self._quantity = "loss"

    def watch(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Record whether the loss and the gradients of a step were finite, without waiting for the device.

        Args:
            step: number of the step.
            loss: the loss of this rank, [].
            norm: the norm of the gradients of all ranks, []; None if the optimizer has stepped in the backward.
        """
        # The number of the first non-finite step is a tensor [] on the device, so the host does not wait before
        # `check`.
        if self._first is None:
            self._first = torch.full((), NEVER, dtype=torch.int64, device=loss.device)
        finite = loss.isfinite()
        if norm is not None:
            self._quantity, finite = "norm of the gradients", norm.to(loss.device).isfinite()
        # If the gradients overflow with a scale of 1 or more, the scaler skips the step and lowers the scale.
        if self._scaler.is_enabled():
            finite = finite | (self._scaler.scale(torch.ones_like(loss)) >= 1)
        self._first = torch.where(finite, self._first, self._first.clamp(max=step))

    def check(self) -> None:
        """Raise ValueError on all ranks if any rank had a non-finite loss or norm. Every rank must call this method."""
        if self._first is None:
            return
        # Copy the step, because the all-reduce works in place, and this rank must keep its own first step.
        first = self._first.clone()
        if is_distributed():
            dist.all_reduce(first, dist.ReduceOp.MIN)
        step = int(first)
        if step != NEVER:
            raise self._error(self._quantity, step)

    @torch.no_grad()
    def check_weights(self, step: int) -> None:
        """Raise ValueError on all ranks if a trained weight is not finite. Every rank must call this method.

        The check waits for the device and reads each weight once.
        """
        # The maximum norm is infinite or NaN if any element is. A rank may hold no part of a sharded parameter.
        shards = [local(parameter.detach()) for parameter in self._parameters]
        largest = get_total_norm([shard for shard in shards if shard.numel() > 0], math.inf)
        finite = largest.isfinite().to(shards[0].device if shards else "cpu", torch.int32)
        if is_distributed():
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            raise self._error("trained weights", step)

    def _error(self, quantity: str, step: int) -> ValueError:
        checkpoint = self._newest()
        resume = "No checkpoint is saved yet" if checkpoint is None else f"The last finite checkpoint is {checkpoint}"
        files = ", ".join(self._files[:3]) + ", ..." * (len(self._files) > 3)
        return ValueError(
            f"train: the {quantity} must be finite, got infinity or nan in step {step} on data of {files}. {resume}: "
            "run the command again with a lower lr, or inspect the data of that step."
        )
