"""RMSNorm whose result is multiplied by the SiLU of a gate (the output norm of Qwen3-Next and Qwen3.5).

Forward, per row of width D, in fp32, with r = 1 / sqrt(mean(x²) + eps) and n = x · r::

    y = cast((w · cast(n)) · gate · σ(gate))

cast is to the dtype of x; the product with w has the dtype that torch gives it. Backward, with a = gate · σ(gate) and
u = dy · a · w::

    dx = r · (u − n · mean(u · n)),   dw = Σ_rows dy · a · n
    dgate = dy · w · n · σ(gate) · (1 + gate · (1 − σ(gate)))

Saved: x, the gate and the weight; r is recomputed from x, which the backward reads anyway.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check, check_floating


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """What `gated_norm` computes, in plain torch (differentiable; fp64 stays fp64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.to(wide.dtype))).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``weight · x / sqrt(mean(x²) + eps) · silu(gate)`` over the last dimension.

    Args:
        x: [..., D], float32, float16 or bfloat16.
        gate: [..., D].
        weight: [D].
        eps: added to the mean of squares.

    Returns:
        [..., D] in the dtype of x.

    Raises:
        ValueError: x and gate differ in shape, or the weight's shape is not [D].
        TypeError: a tensor that is not floating-point.
    """
    op = "gated_norm"
    check_floating(op, x=x, gate=gate, weight=weight)
    check(x.shape == gate.shape, f"{op}: x and gate must have one shape, got {list(x.shape)} and {list(gate.shape)}.")
    check(
        x.dim() > 0 and weight.shape == x.shape[-1:],
        f"{op}: weight must have the shape of x's last dimension, "
        f"got weight {list(weight.shape)} for x {list(x.shape)}.",
    )
    return gated_norm_reference(x, gate, weight, eps)
