"""Tensors that depend only on weights. Decoding computes them once instead of for every token.

A layer gets them from `derive`. Outside of decoding, and in compiled code, every call computes them, with gradients.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor, nn

from liger_models.common.errors import is_traced

Tensors = TypeVar("Tensors", bound="tuple[Tensor | None, ...]")

_USED: ContextVar["DerivedTensors | None"] = ContextVar("derived", default=None)


class DerivedTensors:
    """Tensors that layers have derived from their weights since the last `renew`, at fixed addresses.

    An instance belongs to one generation, during which the weights must not change, or to a captured CUDA graph that
    reads these tensors. Layers hold no reference to it, so it has no effect outside of `used`.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[nn.Module, Hashable], tuple[Tensor | None, ...]] = {}
        self._current: set[tuple[nn.Module, Hashable]] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for tensors in self._tensors.values() for x in tensors if x is not None)

    def renew(self) -> None:
        """Recompute each tensor at its next use, into the same memory, because the weights may have changed."""
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
        """The result of ``compute``, which is called only once after each `renew`."""
        if key not in self._current:
            computed = compute()
            for old, new in zip(self._tensors.setdefault(key, computed), computed, strict=True):
                if old is not None and new is not None and old is not new:
                    old.copy_(new)
            self._current.add(key)
        tensors: Tensors = self._tensors[key]  # type: ignore[assignment]
        return tensors


def derive(layer: nn.Module, purpose: Hashable, compute: Callable[[], Tensors]) -> Tensors:
    """Return the tensors that ``compute`` derives from the weights of a layer alone, from a previous call if possible.

    Args:
        layer: the layer with the weights.
        purpose: key that distinguishes several derived tensors of a layer, such as their dtype.
        compute: function that returns a tuple of new tensors, with the same shapes in every call for a purpose.
    """
    used = None if is_traced() else _USED.get()
    return compute() if used is None else used.find((layer, purpose), compute)
