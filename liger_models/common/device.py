"""Chooses a device (by name, or the best that the machine has), and creates tensors on a given device."""

from typing import Any

import torch
from torch import Tensor, nn


def available_device(where: str, name: str | None = None) -> torch.device:
    """Return the device called ``name``. If no name is given, return the accelerator or, if there is none, the CPU.

    Args:
        where: name of the function or command in the error message.
        name: name of the device, such as "cpu", "cuda" or "cuda:1".

    Raises:
        ValueError: the machine or this build of PyTorch has no such device.
    """
    # Without `check_available`, a CUDA build of PyTorch returns CUDA even on a machine without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    names = ["cpu"]
    if accelerator is not None:
        names += [
            accelerator.type,
            *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())),
        ]
    if name not in names:
        raise ValueError(
            f"{where}: device must be one of this machine and this PyTorch ({', '.join(names)}), got {name!r}. Use one "
            "of these."
        )
    return torch.device(name)


def as_tensor(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Convert ``values`` to a tensor, as `torch.as_tensor` does. A tensor stays on its device. All other values become
    a tensor on the CPU, regardless of `torch.set_default_device`."""
    return values.to(dtype=dtype) if isinstance(values, Tensor) else torch.as_tensor(values, dtype=dtype, device="cpu")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. The host does not wait for a copy from its own memory."""
    if tensor.device.type == "cpu" and device.type == "cuda" and not torch.compiler.is_compiling():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")  # a copy to the host must be complete


def empty_on(device: Any, tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor on ``device`` with the shape and dtype of ``tensor``.

    Unlike ``torch.empty_like(tensor, device=device)``, this function does not import SymPy if one of the two devices is
    meta.
    """
    if type(tensor) in (nn.Parameter, Tensor) and tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)
