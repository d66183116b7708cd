"""Eval mode while tokens are computed."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and restore the mode of each afterwards."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
