"""Blocks that keep their input alone for the backward, which makes the rest again."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CURRENT: ContextVar["Again | None"] = ContextVar("current", default=None)


class Again:
    """A block's forward, and its repetition in the backward.

    Attributes:
        repeats: whether this is the repetition, which ends where the last tensor is saved that the backward needs.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.repeats = block, False

    def __call__(self, residual: Tensor, sequence: Any) -> Any:
        """The block's result."""
        token = _CURRENT.set(self)
        try:
            return self.block(None, residual, sequence)
        finally:
            _CURRENT.reset(token)
            self.repeats = True


def block_again() -> Again | None:
    """The block that is being run and keeps its input alone, if there is one."""
    return None if torch.compiler.is_compiling() else _CURRENT.get()


def recomputes(part: Any) -> bool:
    """Whether a part of a block is to be made again by itself: not where all of the block is."""
    return bool(part.recompute) and torch.is_grad_enabled() and block_again() is None


def is_compiled(block: nn.Module) -> bool:
    """Whether calls of the block run compiled code."""
    return block._compiled_call_impl is not None or hasattr(block.forward, "_torchdynamo_orig_callable")


def run_again(block: nn.Module, x: Tensor | None, residual: Tensor, sequence: Any) -> Any:
    """``block(x, residual, sequence)``, which keeps ``residual + x`` [B, T, C] and nothing else."""
    total = residual if x is None else (residual + x).to(residual.dtype)
    return checkpoint(Again(block), total, sequence, use_reentrant=False, preserve_rng_state=block.training)
