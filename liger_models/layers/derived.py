"""Tensors that follow from weights alone: while tokens are decoded they are computed once, not for every token.

A layer asks for them by `derive`. Outside of decoding, and in compiled code, each call computes them, with gradients.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

Tensors = TypeVar("Tensors", bound="tuple[Tensor | None, ...]")

_USED: ContextVar["DerivedTensors | None"] = ContextVar("derived", default=None)


class DerivedTensors:
    """What layers have derived from their weights since the last `renew`, in memory that stays.

    It belongs to a generation, during which the weights are taken to be the same, or to a step that is captured as a
    CUDA graph and reads it. Layers have no state of it, so nothing outside of `used` sees it.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[nn.Module, Hashable], tuple[Tensor | None, ...]] = {}
        self._current: set[tuple[nn.Module, Hashable]] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for tensors in self._tensors.values() for x in tensors if x is not None)

    def renew(self) -> None:
        """Compute everything again when it is asked for, into the same memory: the weights may have changed."""
        self._current.clear()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which `derive` finds these tensors. They have no gradients."""
        token = _USED.set(self)
        try:
            yield
        finally:
            _USED.reset(token)

    def find(self, key: tuple[nn.Module, Hashable], compute: Callable[[], Tensors]) -> Tensors:
        """What ``compute`` returns, from the first call after `renew`."""
        if key not in self._current:
            computed = compute()
            for old, new in zip(self._tensors.setdefault(key, computed), computed, strict=True):
                if old is not None and new is not None and old is not new:
                    old.copy_(new)
            self._current.add(key)
        tensors: Tensors = self._tensors[key]  # type: ignore[assignment]
        return tensors


def derive(layer: nn.Module, purpose: Hashable, compute: Callable[[], Tensors]) -> Tensors:
    """Tensors that ``compute`` makes of the weights of a layer and of nothing else, or what it made of them before.

    Args:
        layer: whose weights they are.
        purpose: what tells them from others of the layer, such as their dtype.
        compute: returns a tuple of new tensors, always of the same shapes for a purpose.
    """
    used = None if torch.compiler.is_compiling() else _USED.get()
    return compute() if used is None else used.find((layer, purpose), compute)
