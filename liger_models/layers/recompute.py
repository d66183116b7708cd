"""Blocks that keep their input alone for the backward, which makes the rest again."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .norm import is_hooked

_REPEATS: ContextVar[bool | None] = ContextVar("repeats", default=None)


def repeats() -> bool | None:
    """Whether what runs is the repetition of a block in the backward; None outside of blocks that will be repeated.

    A repetition ends where the last tensor is saved that the backward needs.
    """
    return None if torch.compiler.is_compiling() else _REPEATS.get()


def recomputes(part: Any) -> bool:
    """Whether a part of a block is to be made again by itself: not where all of the block is."""
    return bool(part.recompute) and torch.is_grad_enabled() and repeats() is None


def draws(part: nn.Module, dropout: float) -> bool:
    """Whether a part of a block takes random numbers: for its dropout, or in what is hooked to or wraps its layers."""
    return (part.training and dropout > 0) or any(
        is_hooked(module) or (isinstance(module, nn.Dropout) and module.training and module.p > 0)
        for module in part.modules()
    )


def is_compiled(block: nn.Module) -> bool:
    """Whether calls of the block run compiled code."""
    return block._compiled_call_impl is not None or hasattr(block.forward, "_torchdynamo_orig_callable")


def run_again(block: nn.Module, x: Tensor | None, residual: Tensor, sequence: Any) -> Any:
    """``block(x, residual, sequence)``, which keeps ``residual + x`` [B, T, C] and nothing else."""
    repeated = False

    def run(total: Tensor, sequence: Any) -> Any:
        nonlocal repeated
        token = _REPEATS.set(repeated)
        try:
            return block(None, total, sequence)
        finally:
            _REPEATS.reset(token)
            repeated = True

    total = residual if x is None else (residual + x).to(residual.dtype)
    return checkpoint(run, total, sequence, use_reentrant=False)
