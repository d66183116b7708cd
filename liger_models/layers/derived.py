"""Derived tensors: tensors that depend only on weights. Decoding computes them once, instead of once per token.

A layer gets derived tensors from `derive`. Outside of decoding and in compiled code, every call of `derive` computes
the tensors again, with gradients.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor, nn

from liger_models.common.errors import is_traced

Tensors = TypeVar("Tensors", bound="tuple[Tensor | None, ...]")

Key = tuple[nn.Module, Hashable]
"""The arguments ``layer`` and ``purpose`` of `derive`."""

_USED: ContextVar["DerivedTensors | None"] = ContextVar("derived", default=None)


class DerivedTensors:
    """Tensors that layers have computed from their weights. A tensor keeps its memory address when it is recomputed.

    An instance belongs either to one call of ``generate``, during which the weights must not change, or to a captured
    CUDA graph that reads the tensors. Layers hold no reference to an instance, so an instance has no effect outside of
    `used`.
    """

    def __init__(self) -> None:
        self._tensors: dict[Key, tuple[Tensor | None, ...]] = {}
        self._compute: dict[Key, Callable[[], tuple[Tensor | None, ...]]] = {}
        self.current: set[Key] = set()
        """The keys of the tensors that have been computed since the last `renew`, either directly or by a replayed
        graph."""

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensors."""
        return sum(x.nbytes for tensors in self._tensors.values() for x in tensors if x is not None)

    def renew(self) -> None:
        """Mark all tensors as outdated, so that their next use recomputes them into the same memory."""
        self.current.clear()

    def refresh(self) -> None:
        """Recompute all outdated tensors.

        Call this method before a captured CUDA graph is replayed that reads the tensors but does not compute them.
        """
        if len(self.current) < len(self._tensors):
            for key, compute in self._compute.items():
                self.find(key, compute)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context manager within which `derive` returns these tensors, which have no gradients."""
        token = _USED.set(self)
        try:
            yield
        finally:
            _USED.reset(token)

    def find(self, key: Key, compute: Callable[[], Tensors]) -> Tensors:
        """Return the result of ``compute``. Only the first use of a key after each `renew` calls ``compute``; later
        uses return the same tensors."""
        if key not in self.current:
            computed = compute()
            for old, new in zip(self._tensors.setdefault(key, computed), computed, strict=True):
                if old is not None and new is not None and old is not new:
                    old.copy_(new)
            self._compute[key] = compute
            self.current.add(key)
        tensors: Tensors = self._tensors[key]  # type: ignore[assignment]
        return tensors


def num_derived() -> int:
    """Return the number of `derive` results that the `DerivedTensors` in use holds; 0 if no instance is in use."""
    used = _USED.get()
    return 0 if used is None else len(used)


def derive(layer: nn.Module, purpose: Hashable, compute: Callable[[], Tensors]) -> Tensors:
    """Return tensors that depend only on a layer's weights, reusing the results of an earlier call if possible.

    Args:
        layer: the layer with the weights.
        purpose: key that distinguishes the derived tensors of a layer, such as their dtype.
        compute: function that computes the tuple of tensors. Each call for a purpose must return the same shapes. The
            function may be called again later, so it should not hold activations.
    """
    used = None if is_traced() else _USED.get()
    return compute() if used is None else used.find((layer, purpose), compute)
