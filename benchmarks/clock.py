"""Times after the device has finished its work, and its peak memory. Tests run them without a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch


def now() -> float:
    """The time in seconds at which the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], Any]) -> float:
    """The time of a call."""
    start = now()
    function()
    return now() - start


def peak_gib() -> float:
    """The peak of PyTorch's allocator, which is 0 without a GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0
