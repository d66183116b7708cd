"""Contexts around generation: modules in eval mode, and parameters that FSDP shards again at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

_lock = Lock()
_held: dict[nn.Module, int] = {}
"""Module that was in training mode -> number of contexts that hold it in eval mode. Threads may share a model."""


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and restore the mode of each afterwards."""
    with _lock:
        # A module in `_held` is in eval mode only because of another context, which may end before this one.
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
    """Context after which FSDP holds no gathered parameters of these models. None is skipped.

    After a forward without a backward, FSDP keeps some parameters gathered. ``model.parameters()`` then returns the
    gathered ones, and an optimizer would update them in vain.
    """
    try:
        yield
    finally:
        for module in (module for model in models if isinstance(model, nn.Module) for module in model.modules()):
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()
