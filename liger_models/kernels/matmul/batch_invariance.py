"""Batch-invariant forwards, in which a row's result depends neither on the other rows nor on the number of rows.

Within `batch_invariant`, every product with a weight runs `invariant_linear`. Attention, expert products and the head
run batch-invariant implementations. All other kernels of this package are always batch-invariant: one program computes
a whole row, and the block size depends only on the width of the row. If a module calls ``F.linear``, a PyTorch function
mode intercepts the call. On the CPU, the mode also intercepts elementwise functions, because the CPU computes the last
elements of a tensor with other instructions than the elements before them.
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
"""Identifiers of the threads that are inside `batch_invariant`."""


def is_batch_invariant() -> bool:
    """Return whether this thread is inside `batch_invariant`. In compiled code, the result is always False."""
    return bool(_active) and not torch.compiler.is_compiling() and get_ident() in _active


@contextmanager
def batch_invariant(active: bool = True) -> Iterator[None]:
    """Return a context manager in which ops compute every row as if it were the only row.

    The context applies only to the thread that enters it. A nested context with ``active=False`` switches batch
    invariance off.
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
    """Compute ``x @ weightᵀ + bias``: with `invariant_linear` inside `batch_invariant`, otherwise with ``F.linear``."""
    return invariant_linear(x, weight, bias) if is_batch_invariant() else F.linear(x, weight, bias)


ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (
    F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh, torch.exp, Tensor.exp
)  # fmt: skip


class _InvariantFunctions(TorchFunctionMode):
    """A function mode that runs `invariant_linear` in place of ``F.linear``. On the CPU, the mode also runs elementwise
    functions row by row.
    """

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
