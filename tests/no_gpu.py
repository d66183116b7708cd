"""Importing this lets PyTorch for the CPU answer as PyTorch from PyPI does on a machine without a GPU.

On Linux PyPI has PyTorch built for CUDA. It names CUDA as its accelerator even where there is none, unless it is asked
for an available one. All tests run so, and so do the processes that they start by `tests.processes`: code that asks
without ``check_available=True`` would move a model to a device that does not exist.
"""

import torch


def _current_accelerator(check_available: bool = False) -> torch.device | None:
    return None if check_available else torch.device("cuda")


# `torch.accelerator.is_available` would start CUDA here, and processes that are forked later could not use it.
if torch.cuda.device_count() == 0:
    torch.accelerator.current_accelerator = _current_accelerator
