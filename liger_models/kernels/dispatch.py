"""Backend selection and launch helpers that all ops share.

On accelerators (CUDA, ROCm, XPU), ops run their Triton kernels; docs/correctness.md lists the tested GPUs. On the CPU
and all other devices, ops run their reference implementation in plain PyTorch. If ``TRITON_INTERPRET=1`` is in the
environment before the first import, Triton's interpreter runs the kernels on the CPU. On an accelerator, an op never
falls back to the reference implementation silently: if Triton is not installed, the op raises an error.
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
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # without Triton, which has no wheel for some platforms, only the reference backend is available

    class _Absent:
        """Takes the place of Triton if Triton is not installed, so that modules can still define kernels.

        `use_triton` ensures that no kernel is launched.
        """

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = TensorDescriptor = _Absent()

__all__ = ["TensorDescriptor", "tl", "triton"]  # modules with kernels import these names from here

HAS_TRITON = type(triton).__name__ != "_Absent"
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

SHORT_LAUNCHES = ("3.6", "3.7")
"""Versions of Triton whose compiled kernels accept the arguments that `launch.Kernel` passes."""

if (
    HAS_TRITON
    and not INTERPRET
    and torch.version.cuda is not None
    and triton.__version__.rpartition(".")[0] in SHORT_LAUNCHES
):
    from liger_models.kernels.launch import Kernel

    class _Triton:
        """A proxy of the module `triton` that replaces only the decorator ``jit``.

        Without options, the decorator creates a `Kernel`, whose repeated launches take less host time than Triton's.
        """

        def __init__(self, module: Any) -> None:
            self.module = module

        def jit(self, function: Any = None, **options: Any) -> Any:
            return self.module.jit(**options) if function is None else Kernel(function)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.module, name)

    triton = _Triton(triton)
ACCELERATORS = ("cuda", "xpu")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_SAME_DEVICE: AbstractContextManager[Any] = nullcontext()
"""The context manager that `on_device_of` returns if the current device need not change. Entering this context manager
takes almost no host time."""

_reference_only = False
_triton_assumed = False


@contextmanager
def reference_backend() -> Iterator[None]:
    """Return a context manager in which every op runs its reference implementation in plain PyTorch, on any device."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


@contextmanager
def triton_assumed() -> Iterator[None]:
    """Return a context manager in which ops on tensors without values (meta, fake) choose their Triton backend.

    In this context, the ops save the same tensors for the backward as on an accelerator.
    """
    global _triton_assumed
    before, _triton_assumed = _triton_assumed, True
    try:
        yield
    finally:
        _triton_assumed = before


def use_triton(x: Tensor) -> bool:
    """Return True if an op on ``x`` runs its Triton kernels, and False if it runs its reference implementation.

    Raises:
        RuntimeError: ``x`` is on an accelerator and Triton is not installed.
        TypeError: kernels would run on an accelerator or in the interpreter, but they do not support the dtype of
            ``x``. The interpreter also supports float64.
    """
    if _reference_only or _triton_assumed:
        return _triton_assumed
    interpreted = INTERPRET and x.device.type == "cpu"
    if interpreted and x.dtype == torch.float64:
        return True
    if not interpreted and x.device.type not in ACCELERATORS:
        return False
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


def use_triton_for_integers(x: Tensor) -> bool:
    """Return whether an op on an integer tensor ``x`` runs its Triton kernels; see `use_triton`."""
    return use_triton(x.new_empty(0, dtype=torch.float32))


def is_differentiable(*tensors: Tensor | None) -> bool:
    """Return whether autograd needs the gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that makes the device of ``x`` the current device, on which Triton launches kernels."""
    if x.device.type == "cuda":
        # The checks in `torch.cuda.current_device` are unnecessary, because a tensor is already on a GPU. The private
        # function skips them.
        return _SAME_DEVICE if torch._C._cuda_getDevice() == x.device.index else torch.cuda.device(x.device)
    if x.device.type == "xpu":
        return torch.xpu.device(x.device)
    return _SAME_DEVICE


def num_programs(x: Tensor, per_sm: int) -> int:
    """Return the grid size of a persistent kernel: ``per_sm`` programs per multiprocessor of the device of ``x``."""
    if x.device.type in ACCELERATORS:
        return _multiprocessors(x.device) * per_sm
    # In the interpreter, few programs are enough. The number is odd, so that in tests the programs get unequal shares
    # of the work.
    return 3


def fitting_stages(x: Tensor, stages: int, stage_bytes: int) -> int:
    """Return ``stages`` if this many pipeline stages fit into the shared memory of the device of ``x``, otherwise 1.

    Args:
        stage_bytes: shared memory that one stage takes, in bytes.
    """
    available = 2**17 if INTERPRET else _shared_memory(x.device.index)
    return stages if stages * stage_bytes <= available else 1


@functools.cache
def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability of an NVIDIA GPU, or (0, 0) for any other device."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_cuda else (0, 0)


def has_ptx(x: Tensor) -> bool:
    """Return whether kernels on the device of ``x`` may contain PTX, which requires an NVIDIA GPU from Ampere on."""
    return cuda_capability(x.device) >= (8, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).max_compute_units)
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_memory(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])
