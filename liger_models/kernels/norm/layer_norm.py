"""LayerNorm, with or without bias, alone or after a residual addition.

The forward computes each row of width C in fp32::

    h = residual + x                                  in add_layer_norm, rounded to the dtype of the residual
    h = x                                             in layer_norm
    μ = mean(h),   r = 1 / sqrt(mean((h − μ)²) + eps),   n = (h − μ) · r
    y = cast(w · n + b)

In the backward, let g = dy · w, and let dh be the gradient of the new residual stream::

    dx = r · (g − mean(g) − n · mean(g · n)) + dh,   dw = Σ_rows dy · n,   db = Σ_rows dy

The forward saves h in its own dtype, and the statistics [μ, r] of each row in fp32. The forward subtracts exactly the
fp32 value of μ that it saves. Rows that are recomputed from the statistics are therefore bitwise identical to the rows
of the forward. The kernels are in `row_norm.py`.

Source: https://arxiv.org/abs/1607.06450.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.norm.row_norm import ADD_NORM, MAX_WIDTH, NORM


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Compute `layer_norm` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide_bias = None if bias is None else bias.to(compute)
    wide = torch.nn.functional.layer_norm(x.to(compute), weight.shape, weight.to(compute), wide_bias, eps)
    return wide.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute `add_layer_norm` in plain PyTorch."""
    residual = (residual + x).to(residual.dtype)
    return layer_norm_reference(residual, weight, bias, eps), residual


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating(op, x=x, weight=weight, bias=bias)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
        raise ValueError(
            f"{op}: weight and bias must have the shape of x's last dimension, got weight {list(weight.shape)} and "
            f"bias {None if bias is None else list(bias.shape)} for x {list(x.shape)}."
        )
    if not x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{op}: rows must be at most {MAX_WIDTH} wide, got {x.shape[-1]}.")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Compute ``weight · (x − mean(x)) / sqrt(var(x) + eps) + bias`` with mean and variance over the last dimension.

    Args:
        x: [..., C], float32, float16 or bfloat16, where C is at most 65536.
        weight: [C].
        bias: [C], or None for no bias.
        eps: added to the variance.

    Returns:
        [..., C] in the dtype of x.

    Raises:
        ValueError: weight or bias is not [C], or rows are too wide.
        TypeError: a tensor is not floating-point.
    """
    _check("layer_norm", x, weight, bias)
    if not use_triton(x):
        return layer_norm_reference(x, weight, bias, eps)
    y: Tensor = NORM(x, weight, bias, "layer_norm", eps, 0.0, True)[0]
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and apply `layer_norm` to the sum in one kernel. The backward is also fused.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream.
        residual: [..., C], the residual stream.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        The normalized sum, and the sum itself, which is the new residual stream. Both are [..., C] in the dtype of
        ``residual``.

    Raises:
        ValueError: x and residual differ in shape, weight or bias is not [C], or rows are too wide.
        TypeError: a tensor is not floating-point.
    """
    _check("add_layer_norm", x, weight, bias)
    check_floating("add_layer_norm", residual=residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_layer_norm: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}."
        )
    if not use_triton(x):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    y, h, _ = ADD_NORM(x, residual, weight, bias, "layer_norm", eps, 0.0, True)
    return y, h
