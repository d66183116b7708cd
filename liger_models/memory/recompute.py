"""Recomputation of blocks: they save only their input, and the backward recomputes the rest."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_REPEATS: ContextVar[bool | None] = ContextVar("repeats", default=None)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than the forward of its class, such as hooks or a replaced forward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def repeats() -> bool | None:
    """Whether the running block is being recomputed in the backward; None outside of blocks run by `run_again`.

    Recomputation stops at the last tensor that the backward needs.
    """
    return None if torch.compiler.is_compiling() else _REPEATS.get()


def recomputes(part: Any) -> bool:
    """Whether a part of a block is to be recomputed by itself. It is not if the whole block is recomputed."""
    return bool(part.recompute) and torch.is_grad_enabled() and repeats() is None


def draws(part: nn.Module, dropout: float) -> bool:
    """Whether a part of a block may draw random numbers: in its dropout, or in hooks or wrappers of its layers."""
    return (part.training and dropout > 0) or any(
        is_hooked(module) or (isinstance(module, nn.Dropout) and module.training and module.p > 0)
        for module in part.modules()
    )


def is_compiled(block: nn.Module) -> bool:
    """Whether the block is compiled."""
    return block._compiled_call_impl is not None or hasattr(block.forward, "_torchdynamo_orig_callable")


def run_again(block: nn.Module, x: Tensor | None, residual: Tensor, layout: Any) -> Any:
    """Run ``block(x, residual, layout)``, saving only ``residual + x`` [B, T, C] and recomputing the rest."""
    repeated = False

    def run(total: Tensor, layout: Any) -> Any:
        nonlocal repeated
        token = _REPEATS.set(repeated)
        try:
            return block(None, total, layout)
        finally:
            _REPEATS.reset(token)
            repeated = True

    total = residual if x is None else (residual + x).to(residual.dtype)
    return checkpoint(run, total, layout, use_reentrant=False)
