"""Argument checks that every op and module shares; nothing here needs Triton."""

import torch
from torch import Tensor


def check(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_values(condition: Tensor, message: str) -> None:
    """Check the values of tensors without waiting for the device.

    Tensors in a graph that is being compiled or captured, and tensors without values, are not checked.

    Args:
        condition: [] bool. On the CPU, False raises ValueError with ``message``. On CUDA and ROCm, False ends the
            computation with a device-side assertion that prints ``message``. Other accelerators are not checked.
        message: names the argument, what is wrong with it and what to do.
    """
    if torch.compiler.is_compiling() or condition.is_meta or hasattr(condition, "fake_mode"):
        return
    if condition.device.type == "cpu":
        check(bool(condition), message)
    elif condition.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch._assert_async(condition, message)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every given tensor has a floating-point dtype; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {tensor.dtype}.")
