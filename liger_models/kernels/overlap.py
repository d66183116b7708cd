"""Lets kernels start before the previous kernel ends.

A decoding step launches hundreds of kernels, which take a few microseconds each. Between two kernels, the GPU is idle
for about a microsecond, while the last programs of one kernel end and the first programs of the next kernel start.
Within `overlapping`, each kernel lets the next kernel start early (programmatic dependent launch, on Hopper and later
GPUs). The next kernel starts on free multiprocessors and immediately loads weights. This is safe, because no kernel of
the step writes weights. After loading these weights, the next kernel waits until the previous kernel has ended.

All kernels of this package that run in a decoding step call `await_previous`, or `start_next` and `end_previous`. Other
kernels run as usual: each starts after the previous kernel has ended, and ends before the next kernel starts.

Source: https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import cuda_capability, tl, triton

MIN_CAPABILITY = (9, 0)
"""Lowest CUDA compute capability that has programmatic dependent launch."""

_active = False


@contextmanager
def overlapping(active: bool = True) -> Iterator[None]:
    """Return a context manager in which kernels overlap or, with ``active=False``, do not overlap.

    Kernels load weights before the previous kernel ends, so no kernel in this context may write to a weight. The same
    applies to every tensor that is passed to `row_linear` or `narrow_linear` as its weight.
    """
    global _active
    before, _active = _active, active
    try:
        yield
    finally:
        _active = before


def can_overlap(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch, which lets kernels overlap."""
    return cuda_capability(device) >= MIN_CAPABILITY


def overlap(x: Tensor) -> dict[str, Any]:
    """Return the launch options for the device of ``x``: OVERLAPS and, if kernels overlap, ``launch_pdl``."""
    return {"OVERLAPS": True, "launch_pdl": True} if _active and can_overlap(x.device) else {"OVERLAPS": False}


@triton.jit
def start_next(OVERLAPS: tl.constexpr):
    """Let the next kernel start as soon as all programs of this kernel have called this function."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_previous(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel, and therefore every earlier kernel, has ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Call `start_next` and `end_previous`, for a kernel that loads nothing before the previous kernel ends."""
    start_next(OVERLAPS)
    end_previous(OVERLAPS)
