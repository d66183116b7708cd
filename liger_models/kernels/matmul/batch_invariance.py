"""Forwards in which a row's result depends neither on the other rows nor on their number.

Within `batch_invariant` every product with a weight runs `invariant_linear`, and attention, expert products and the
head run implementations with this property. All other kernels of the package always have it: one program computes a
row, and its shape follows from the width. A PyTorch mode intercepts ``F.linear`` in modules, and on the CPU also
elementwise functions, whose last elements are computed by other instructions than the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from liger_models.kernels.matmul.invariant_linear import each_row, invariant_linear

_active: set[int] = set()
"""The threads that are inside of `batch_invariant`."""


def is_batch_invariant() -> bool:
    """Whether this thread is inside `batch_invariant`; always False in compiled code."""
    return bool(_active) and not torch.compiler.is_compiling() and get_ident() in _active


@contextmanager
def batch_invariant(active: bool = True) -> Iterator[None]:
    """Context in which ops compute every row as if it were alone; a nested ``active=False`` switches this off.

    It holds for the thread that enters it.
    """
    thread, before = get_ident(), is_batch_invariant()
    _set(thread, active)
    try:
        if active and not before:
            with _InvariantFunctions():
                yield
        else:
            yield
    finally:
        _set(thread, before)


def _set(thread: int, active: bool) -> None:
    (_active.add if active else _active.discard)(thread)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weightᵀ + bias``: by `invariant_linear` within `batch_invariant`, otherwise by ``F.linear``."""
    return invariant_linear(x, weight, bias) if is_batch_invariant() else F.linear(x, weight, bias)


ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (
    F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh, torch.exp, Tensor.exp
)  # fmt: skip


class _InvariantFunctions(TorchFunctionMode):
    """Replaces ``F.linear``; on the CPU also runs elementwise functions row by row."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        active = is_batch_invariant()
        if active and func is F.linear:
            return invariant_linear(*args, **kwargs)
        if active and func in ELEMENTWISE and args[0].device.type == "cpu" and args[0].dim() > 0:
            return each_row(lambda row: func(row, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)
