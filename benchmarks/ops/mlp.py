"""Gated activations, and the gated MLP with the norm before it."""

import functools

import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.activation.gated_act import gated_act_reference, geglu, swiglu
from liger_models.kernels.linear.gated_mlp import gated_mlp, gated_mlp_reference

from .norm import EPS, add_norm
from .op import Function, Op, Peer, liger, liger_peer, load, randn


def gate_and_up(gate_up: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return gate and up as two contiguous tensors. In ``gate_up``, they alternate along ``dim``."""
    gate, up = gate_up.unflatten(dim, (-1, 2)).unbind(dim)
    return gate.contiguous(), up.contiguous()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gated_op(name: str, ours: Function, in_torch: Function, act: str) -> Op:
    return Op(
        name=name, shapes=({"N": 16384, "F": 14336},), check={"N": 256}, make=lambda N, F: {"gate_up": randn(N, 2 * F)},
        truth=lambda gate_up: gated_act_reference(gate_up, act),
        limit="bytes", work=lambda N, F: (6 * N * F, 10 * N * F),
        peers={
            "torch": Peer(in_torch, gate_and_up),
            "liger": liger_peer(liger(f"liger_{name}"), gate_and_up),
            "ours": Peer(ours),
        },
    )  # fmt: skip


def mlp(norm: Function, act: Function | None) -> Function:
    """Norm, gate, up, activation and down as separate operations; without ``act``, the norm and Liger's fused MLP."""

    def run(x: Tensor, residual: Tensor, weight: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        normed, h = norm(x, residual, weight)
        if act is None:
            return load("liger_kernel.ops:LigerMLPFunction").apply(normed[None], *weights)[0], h
        gate, up, down = weights
        return F.linear(act(F.linear(normed, gate), F.linear(normed, up)), down), h

    return run


def mlp_apart(x: Tensor, residual: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return x, residual, weight, *gate_and_up(gate_up, -2), down


OPS = (
    gated_op("swiglu", swiglu, silu_mul, "silu"),
    gated_op("geglu", geglu, gelu_mul, "gelu_tanh"),
    Op(
        name="gated_mlp", shapes=({"N": 8192, "C": 4096, "F": 14336},), check={},
        make=lambda N, C, F: {
            "x": randn(N, C), "residual": randn(N, C), "weight": randn(C),
            "gate_up": randn(2 * F, C, scale=0.02), "down": randn(C, F, scale=0.02),
        },
        truth=gated_mlp_reference, limit="flops", work=lambda N, C, F: (6 * N * C * F, 12 * N * C * F),
        peers={
            "torch": Peer(mlp(add_norm, silu_mul), mlp_apart),
            "liger": liger_peer(mlp(liger("liger_fused_add_rms_norm", EPS), liger("liger_swiglu")), mlp_apart),
            "liger-mlp": liger_peer(mlp(liger("liger_fused_add_rms_norm", EPS), None), mlp_apart),
            "ours": Peer(gated_mlp),
            "ours+recompute": Peer(functools.partial(gated_mlp, recompute=True)),
        },
    ),
)  # fmt: skip
