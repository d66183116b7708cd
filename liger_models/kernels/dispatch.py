"""Which backend runs an op, and what every op's front needs: library, device guard, argument checks.

Triton runs on accelerators (CUDA, ROCm, XPU); the plain-torch reference runs on the CPU and everywhere else. With
``TRITON_INTERPRET=1`` in the environment before the first import, Triton's interpreter runs the kernels on the CPU.
On an accelerator an op never falls back silently: without Triton it raises.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform: the reference backend is all there is

    class _Absent:
        """Stands in for Triton where kernels are defined; nothing launches one, see `use_triton`."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = _Absent()

__all__ = ["tl", "triton"]  # re-exported, so that kernels can be defined where Triton is absent

HAS_TRITON = type(triton).__name__ != "_Absent"
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
ACCELERATORS = ("cuda", "xpu")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LIBRARY = torch.library.Library("liger_models", "DEF")
"""Every op of the package is defined in this one library, so `torch.ops.liger_models.<op>` names it."""

_reference_only = False


@contextmanager
def reference_backend() -> Iterator[None]:
    """Within this context every op runs its plain-torch reference, on whatever device."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def use_triton(x: Tensor) -> bool:
    """True if an op on ``x`` runs its Triton kernels, False if it runs the reference.

    Raises:
        RuntimeError: ``x`` is on an accelerator and Triton is not installed.
        TypeError: ``x`` is on an accelerator in a dtype that the kernels don't have.
    """
    if _reference_only:
        return False
    if x.device.type not in ACCELERATORS:
        return INTERPRET and x.device.type == "cpu"
    if not HAS_TRITON:
        raise RuntimeError(
            f"liger_models: tensors on {x.device} need Triton, which is not installed. pip install triton"
        )
    if x.dtype not in TRITON_DTYPES:
        raise TypeError(
            f"liger_models: the Triton kernels take float32, float16 and bfloat16, got {x.dtype}. "
            "Convert the tensor, or use kernels.reference_backend()."
        )
    return True


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Guard for a kernel launch: Triton launches on the current device, which need not be the tensor's."""
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    if x.device.type == "xpu":
        return torch.xpu.device(x.device)
    return nullcontext()


def num_programs(x: Tensor, per_sm: int) -> int:
    """Grid size of a persistent kernel: ``per_sm`` programs for each multiprocessor of the device of ``x``."""
    if x.device.type == "cuda":
        return torch.cuda.get_device_properties(x.device).multi_processor_count * per_sm
    if x.device.type == "xpu":
        return int(torch.xpu.get_device_properties(x.device).max_compute_units) * per_sm
    return 3  # the interpreter: few and odd, so that tests see uneven shares


def fitting_stages(x: Tensor, stages: int, stage_bytes: int) -> int:
    """``stages`` of a pipelined loop, or 1 if shared memory on the device of ``x`` cannot hold that many."""
    available = 2**17 if INTERPRET else _shared_memory(x.device.index)
    return stages if stages * stage_bytes <= available else 1


@functools.cache
def _shared_memory(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def check(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every tensor given is of a floating dtype."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {tensor.dtype}.")
