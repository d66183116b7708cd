"""Functions for seeding all random number generators and for bitwise reproducible runs."""

import os
import random
import sys
from typing import Any

import torch


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed the random number generators of Python, NumPy and PyTorch, including PyTorch's generators on all devices.

    Args:
        seed: 0 ≤ seed < 2³². Use different seeds, such as ``seed + rank``, on ranks that must draw different random
            numbers (dropout). Use the same seed on ranks that must initialize the same weights or adapters.
        deterministic: whether two runs must be bitwise identical on the same machine, with the same versions and the
            same number of threads. PyTorch then uses algorithms that sum in a fixed order, and raises RuntimeError
            for operations without such an algorithm. Some of these algorithms are slower than the default algorithms.
            This package's kernels always sum in a fixed order. Call `seed_all` before the first matrix product on a
            GPU.

    Raises:
        ValueError: ``seed`` is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed_all: seed must be from 0 to 2**32 - 1, got {seed}. Choose another.")
    # NumPy is seeded only if something has imported it.
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires this variable
        torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # no kernel reads uninitialized memory
        torch.backends.cudnn.benchmark = False
