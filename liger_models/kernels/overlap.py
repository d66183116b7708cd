"""Kernels that start before the previous kernel ends.

A step of decoding is hundreds of kernels of a few microseconds each. Between two kernels a GPU does nothing for about a
microsecond, while the last programs of one kernel end and the first programs of the next start. Within `overlapping`
each kernel lets the next one start at once (programmatic dependent launch, on Hopper and later GPUs). The next kernel
starts on free multiprocessors, loads weights (which no kernel of the step writes), and then waits for the end of the
previous kernel.

All kernels of the package that run in a step call `await_previous`, or its two halves. Other kernels run as usual: they
start after the previous kernel ends, and the next kernel starts after they end.

Source: https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import cuda_capability, tl, triton

MIN_CAPABILITY = (9, 0)
"""CUDA compute capability of the first GPUs with programmatic dependent launch."""

_active = False


@contextmanager
def overlapping(active: bool = True) -> Iterator[None]:
    """Context in which kernels overlap, or with ``active=False`` do not.

    No kernel in the context may write weights, including any tensor that `row_linear` takes as its weight.
    """
    global _active
    before, _active = _active, active
    try:
        yield
    finally:
        _active = before


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel on the device may start before the previous kernel ends."""
    return cuda_capability(device) >= MIN_CAPABILITY


def overlap(x: Tensor) -> dict[str, Any]:
    """The constant OVERLAPS of a launch on the device of x, and the launch option that goes with it."""
    return {"OVERLAPS": True, "launch_pdl": True} if _active and can_overlap(x.device) else {"OVERLAPS": False}


@triton.jit
def start_next(OVERLAPS: tl.constexpr):
    """Let the next kernel start once all programs of this kernel have called this."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_previous(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel, and therefore every earlier kernel, has ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """`start_next` and `end_previous`, for kernels that load nothing before the previous kernel ends."""
    start_next(OVERLAPS)
    end_previous(OVERLAPS)
