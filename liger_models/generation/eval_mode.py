"""Eval mode while tokens are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

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
