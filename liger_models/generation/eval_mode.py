"""The state of modules while tokens are computed: eval mode, and what FSDP gathers."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

_lock = Lock()
_held: dict[nn.Module, int] = {}
"""Modules that were in training mode -> number of contexts that hold them in eval mode: threads may share a model."""


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and restore the mode of each afterwards."""
    with _lock:
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
    """Context after which no parameters of models are gathered; None is skipped.

    FSDP keeps some of a forward without a backward, and ``model.parameters()`` then returns these, which an optimizer
    would update in vain.
    """
    try:
        yield
    finally:
        for module in (module for model in models if isinstance(model, nn.Module) for module in model.modules()):
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()
