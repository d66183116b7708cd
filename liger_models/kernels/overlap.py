"""Kernels that start before the kernel in front of them has ended, as far as they do not need it.

A step of decoding is hundreds of kernels of a few microseconds each. Between two of them a GPU does nothing for about a
microsecond, while the last programs of one end and the first ones of the next start. Within `overlapping` each kernel
lets the next one start at once (programmatic dependent launch, on Hopper and later GPUs). The next one takes free
places on multiprocessors, reads what no kernel of the step writes, which are the weights, and waits for the end of the
kernel before.

All kernels of the package that a step runs call `await_previous`, or do the same in parts. Others run as ever: they
start after the end of the kernel before, and the kernel after them starts at their end.

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
    """Context in which kernels overlap. No kernel in it may write weights, or what `row_linear` takes for one.

    With ``active=False`` they don't, inside of it.
    """
    global _active
    before, _active = _active, active
    try:
        yield
    finally:
        _active = before


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel on the device may start before the kernel in front of it has ended."""
    return cuda_capability(device) >= MIN_CAPABILITY


def overlap(x: Tensor) -> dict[str, Any]:
    """The constant OVERLAPS of a launch on the device of x, and the option that goes with it."""
    return {"OVERLAPS": True, "launch_pdl": True} if _active and can_overlap(x.device) else {"OVERLAPS": False}


@triton.jit
def start_next(OVERLAPS: tl.constexpr):
    """Let the next kernel start, as soon as all programs of this one have come here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_previous(OVERLAPS: tl.constexpr):
    """Wait for the end of the kernel before, and so of all kernels before it."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Both, for a kernel that has nothing to do meanwhile."""
    start_next(OVERLAPS)
    end_previous(OVERLAPS)
