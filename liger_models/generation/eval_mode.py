"""Context managers for generation: `evaluating` sets modules to eval mode, `resharded` lets FSDP reshard parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

from liger_models.layers.layer import modules_of

_lock = Lock()
_held: dict[nn.Module, int] = {}
"""Maps each module that was in training mode to the number of contexts that keep the module in eval mode."""


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager that sets modules to eval mode, and restores the mode of each module afterwards."""
    with _lock:
        # A module in `_held` is in eval mode because of another context, which may end before this context.
        training = [module for module in modules if module.training or module in _held]
        for module in training:
            _held[module] = _held.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in training:
                _held[module] -= 1
                if not _held[module]:
                    del _held[module]
                    module.training = True


@contextmanager
def resharded(*models: Any) -> Iterator[None]:
    """Context manager that lets FSDP reshard all gathered parameters of the models on exit. A model may be None.

    After a forward without a backward, FSDP keeps some parameters gathered. While they are gathered,
    ``model.parameters()`` returns the gathered tensors. If an optimizer updated these tensors, the updates would be
    lost.
    """
    try:
        yield
    finally:
        for module in (module for model in models if isinstance(model, nn.Module) for module in modules_of(model)):
            # FSDP adds `reshard` to the class. Looking it up on the instance takes much longer if the module lacks it.
            reshard: Any = getattr(type(module), "reshard", None)
            if reshard is not None:
                reshard(module)
