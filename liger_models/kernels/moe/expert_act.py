"""Activations of experts: all activations of `gated_act`, GPT-OSS's clamped SwiGLU (limit l), and Nemotron's ReLU².

::

    clamped_swiglu    A(g, u) = (clamp(u, −l, l) + 1) · g' · σ(1.702 · g')   with g' = min(g, l)
    relu2             A(u) = max(u, 0)²                                      without a gate
"""

import torch
from torch import Tensor

from liger_models.kernels.activation.gated_act import ACTIVATIONS, _activation, gated_act_reference
from liger_models.kernels.dispatch import tl, triton

EXPERT_ACTIVATIONS = (*ACTIVATIONS, "clamped_swiglu", "relu2")


def inputs_of(act: str) -> int:
    """Return the number of inputs of an activation: 2 for gate and up, or 1 for up alone."""
    return 1 if act == "relu2" else 2


def check_expert_act(op: str, act: str, limit: float) -> None:
    """Raise ValueError if ``act`` is not in `EXPERT_ACTIVATIONS`, or if it is "clamped_swiglu" and the limit is not
    positive.
    """
    if act not in EXPERT_ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(EXPERT_ACTIVATIONS)}, got {act!r}.")
    if act == "clamped_swiglu" and not limit > 0:
        raise ValueError(f"{op}: limit must be positive with act='clamped_swiglu', got {limit}. It bounds gate and up.")


def expert_act_reference(gate_up: Tensor, act: str, limit: float = 0.0) -> Tensor:
    """Compute the experts' activation in plain PyTorch: [..., 2 F] -> [..., F], or [..., F] -> [..., F] for "relu2"."""
    if act == "relu2":
        return gate_up.relu().square()
    if act != "clamped_swiglu":
        return gated_act_reference(gate_up, act)
    gate, up = gate_up[..., 0::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


@triton.jit
def _expert_act(gate, up, limit, ACT: tl.constexpr):
    """Return four tensors: the factors ``a`` and ``u``, whose product is the activation, and the derivatives da / dgate
    and du / dup.
    """
    if ACT == "clamped_swiglu":
        a, slope = _activation(tl.minimum(gate, limit), "quick_gelu")
        slope = tl.where(gate <= limit, slope, 0.0)
        clamped = tl.minimum(tl.maximum(up, -limit), limit)
        return a, clamped + 1.0, slope, tl.where(up == clamped, 1.0, 0.0)
    elif ACT == "relu2":
        # The only input is passed as the gate, and ``up`` is 1.
        positive = tl.maximum(gate, 0.0)
        return positive * positive, up, 2.0 * positive, tl.zeros_like(up)
    else:
        a, slope = _activation(gate, ACT)
        return a, up, slope, tl.full(up.shape, 1.0, tl.float32)
