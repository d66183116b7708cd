"""RMSNorm, alone or after a residual addition.

The forward computes each row of width C in fp32::

    h = residual + x                                  in add_rms_norm, rounded to the dtype of the residual
    h = x                                             in rms_norm
    r = 1 / sqrt(mean(h²) + eps),   n = h · r
    y = (weight_offset + w) · cast(n)                 scale_in_fp32=False: cast to the input dtype, then scale (Llama)
    y = cast((weight_offset + w) · n)                 scale_in_fp32=True: scale in fp32, then cast (Gemma, OLMo2)

In the backward, let g = dy · (weight_offset + w), and let dh be the gradient of the new residual stream::

    dx = r · (g − n · mean(g · n)) + dh,   dw = Σ_rows dy · n

The forward saves h in its own dtype, and r in fp32. The kernels are in `row_norm.py`.

Source: https://arxiv.org/abs/1910.07467.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.norm.row_norm import ADD_NORM, NORM


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, scale_in_fp32: bool = False
) -> Tensor:
    """Compute `rms_norm` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scale_normed(normed, weight, x.dtype, weight_offset, scale_in_fp32)


def scale_normed(
    normed: Tensor, weight: Tensor, dtype: torch.dtype, weight_offset: float, scale_in_fp32: bool
) -> Tensor:
    """Perform the last step of the norm: multiply normalized fp32 rows by the weight, and cast them to ``dtype``."""
    if scale_in_fp32:
        return ((weight.to(normed.dtype) + weight_offset) * normed).to(dtype)
    scale = weight + weight_offset if weight_offset else weight
    return (scale * normed.to(dtype)).to(dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm` in plain PyTorch."""
    residual = (residual + x).to(residual.dtype)
    return rms_norm_reference(residual, weight, eps, weight_offset, scale_in_fp32), residual


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    check_floating(op, x=x, weight=weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have the shape of x's last dimension, got weight {list(weight.shape)} for x "
            f"{list(x.shape)}."
        )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, scale_in_fp32: bool = False
) -> Tensor:
    """Compute ``(weight_offset + weight) · x / sqrt(mean(x²) + eps)`` with the mean over the last dimension.

    Args:
        x: [..., C], float32, float16 or bfloat16.
        weight: [C].
        eps: added to the mean of squares.
        weight_offset: added to the weight; 1.0 for Gemma, which stores ``w − 1``.
        scale_in_fp32: whether to multiply by the weight before the cast to the dtype of x (Gemma, OLMo2) instead of
            after the cast (Llama).

    Returns:
        [..., C] in the dtype of x.

    Raises:
        ValueError: the weight's shape is not [C].
        TypeError: a tensor is not floating-point.
    """
    _check("rms_norm", x, weight)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps, weight_offset, scale_in_fp32)
    y: Tensor = NORM(x, weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)[0]
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and apply `rms_norm` to the sum in one kernel. The backward is also fused.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream.
        residual: [..., C], the residual stream.
        weight, eps, weight_offset, scale_in_fp32: as in `rms_norm`.

    Returns:
        The normalized sum, and the sum itself, which is the new residual stream. Both are [..., C] in the dtype of
        ``residual``.

    Raises:
        ValueError: x and residual differ in shape, or the weight's shape is not [C].
        TypeError: a tensor is not floating-point.
    """
    _check("add_rms_norm", x, weight)
    check_floating("add_rms_norm", residual=residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}."
        )
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps, weight_offset, scale_in_fp32)
    y, h, _ = ADD_NORM(x, residual, weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return y, h
