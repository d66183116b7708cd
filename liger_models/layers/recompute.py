"""Blocks that keep their input alone for the backward, which makes the rest again."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CURRENT: ContextVar["Again | None"] = ContextVar("current", default=None)


class Again:
    """A block's forward, and its repetition in the backward: what the block's parts need to know of it."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self._repeats = block, False
        self._made: tuple[nn.Module | None, tuple[Tensor, ...]] = None, ()
        self._last: nn.Module | None = None
        """The MLP whose result the block has returned as it is."""

    def may_end(self, mlp: nn.Module) -> bool:
        """Whether the repetition may end within an MLP, so that its result is made only if it goes on behind it."""
        return self._repeats and self._last is mlp

    def made(self, mlp: nn.Module, y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """To be told what an MLP returns, which may be what the block returns."""
        self._made = mlp, (y, residual)
        return y, residual

    def __call__(self, residual: Tensor, sequence: Any) -> Any:
        """The block's result."""
        token = _CURRENT.set(self)
        try:
            result = self.block(None, residual, sequence)
            mlp, last = self._made
            if not self._repeats and len(result) == len(last):
                self._last = mlp if all(a is b for a, b in zip(result, last, strict=True)) else None
        finally:
            _CURRENT.reset(token)
            self._made, self._repeats = (None, ()), True
        return result


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
