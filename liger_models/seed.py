"""One seed for every source of random numbers, and runs that are equal in every bit."""

import os
import random
import sys
from typing import Any

import torch

from liger_models.kernels.dispatch import check


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, those of all devices included.

    Args:
        seed: not negative, below 2³². Ranks that are to draw different numbers (dropout) take different ones:
            ``seed + rank``; to make the same weights or adapters they take the same.
        deterministic: from now on two runs on the same machine, with the same versions and number of threads, give the
            same bits. PyTorch takes algorithms that add in a fixed order, some of them slower, and raises RuntimeError
            where it has none; this package's kernels always add in a fixed order. Call it before the first product on
            a GPU.

    Raises:
        ValueError: a seed out of range.
    """
    check(0 <= seed < 2**32, f"seed_all: seed must be from 0 to 2**32 - 1, got {seed}. Give another one.")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # no kernel reads memory that nobody wrote
        torch.backends.cudnn.benchmark = False
