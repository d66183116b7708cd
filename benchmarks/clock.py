"""Times that are read after the GPU has finished its work, and the GPU's peak memory. A GPU is not required."""

import time
from collections.abc import Callable
from typing import Any

import torch


def now() -> float:
    """The current time in seconds, read after the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], Any]) -> float:
    """The duration of a call in seconds."""
    start = now()
    function()
    return now() - start


def peak_gib() -> float:
    """The peak memory of PyTorch's allocator in GiB; 0 without a GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0
