"""Argument checks that all ops and modules share. This module does not import Triton."""

import torch
from torch import Tensor


def check_values(condition: Tensor, message: str) -> None:
    """Check the values of tensors without waiting for the device.

    Nothing is checked while a graph is compiled or captured, inside a ``torch.func`` transform, or if ``condition`` is
    a fake or meta tensor, which has no values.

    Args:
        condition: [] bool. On the CPU, False raises ValueError with ``message``. On CUDA and ROCm, False triggers a
            device-side assertion that prints ``message``. On other accelerators the condition is not checked.
        message: text that names the argument, describes the error, and says how to fix it.
    """
    if is_traced() or condition.is_meta or hasattr(condition, "fake_mode"):
        return
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    elif condition.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch._assert_async(condition, message)


def is_traced() -> bool:
    """Return whether tensor values cannot be read because of compilation or a ``torch.func`` transform."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def check_tensors(**given: object) -> None:
    """Raise ValueError unless each argument of a forward is a tensor or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(
                f"forward: {name} must be a tensor, got {type(value).__name__}. Pass torch.tensor(...), or "
                "return_tensors='pt' to a tokenizer or processor."
            )


def check_integers(**given: object) -> None:
    """Call `check_tensors`, then raise TypeError unless each tensor has an integer dtype."""
    check_tensors(**given)
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"forward: {name} must be int64 or int32, got {tensor.dtype}. Pass {name}.long().")


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every tensor that is not None has a floating-point dtype."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {tensor.dtype}.")


def check_documents(op: str, cu_seqlens: Tensor | None, B: int, T: int) -> int:
    """Return the number of documents in ``cu_seqlens``. If ``cu_seqlens`` is None, each of the B rows is a document.

    Raises:
        TypeError: ``cu_seqlens`` is neither int32 nor int64.
        ValueError: ``cu_seqlens`` is not [documents + 1], B is not 1, or the values of ``cu_seqlens`` do not ascend
            from 0 to T. The values are checked only on the CPU.
    """
    if cu_seqlens is None:
        return B
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) <= 1 or B != 1:
        raise ValueError(
            f"{op}: cu_seqlens must be [documents + 1] and the batch one row of packed documents, got "
            f"{list(cu_seqlens.shape)} and {B} rows. Flatten the rows and add their bounds."
        )
    # On an accelerator, checking the values would launch five kernels for each op of each layer. While a graph is
    # compiled, no values are checked, but formatting the message would make the number of tokens a constant. The graph
    # would then be compiled again for every length.
    if cu_seqlens.device.type != "cpu" or is_traced():
        return len(cu_seqlens) - 1
    check_values(
        (cu_seqlens[0] == 0) & (cu_seqlens[-1] == T) & (cu_seqlens.diff() >= 0).all(),
        f"{op}: cu_seqlens must ascend from 0 to the number of tokens ({T}).",
    )
    return len(cu_seqlens) - 1
