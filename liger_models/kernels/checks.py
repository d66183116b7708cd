"""Argument checks that every op and module shares; nothing here needs Triton."""

from torch import Tensor


def check(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every given tensor has a floating-point dtype; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {tensor.dtype}.")
