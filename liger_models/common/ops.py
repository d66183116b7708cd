"""Registration of the ops: one library for all of them, and their autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("liger_models", "DEF")
"""The library of all ops: they are `torch.ops.liger_models.<op>`."""


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    library: torch.library.Library = LIBRARY,
) -> None:
    """``torch.library.register_autograd`` for ops without keyword-only arguments and lists of tensors.

    To fill in the default values, PyTorch's own reads the whole schema once for each argument, in every call. That
    takes the host about as long as all else in a forward. Here they are read once.

    Args:
        name: of an op of ``library``.
        backward, setup_context: as PyTorch's own takes them.
    """
    op = getattr(getattr(torch.ops, library.ns), name).default
    defaults = [argument.default_value for argument in op._schema.arguments]

    def run(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"_{name}", (torch.autograd.Function,), members)

    def differentiable(*inputs: Any) -> Any:
        needed = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        return function.apply(*inputs) if needed else run(*inputs)

    library.impl(name, differentiable, "Autograd")
