"""Routed experts."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.moe import moe_mlp, moe_mlp_reference

from .mlp import gate_and_up, silu_mul
from .op import Op, Peer, liger_peer, load, randn


def make_moe(N: int, C: int, F: int, X: int, K: int) -> dict[str, Tensor]:
    weights, experts = torch.randn(N, X).softmax(-1).topk(K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    matrices = {"gate_up": randn(X, 2 * F, C, scale=0.02), "down": randn(X, C, F, scale=0.02)}
    return {"x": randn(N, C), "weights": weights, "experts": experts} | matrices


def moe_apart(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return x, weights, experts, torch.cat(gate_and_up(gate_up, -2), -2), down


def moe_in_torch(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort tokens by expert, and use PyTorch's grouped products."""
    # Rows [N K], sorted by expert, and the end of each expert's rows [X].
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(down), device=x.device), right=True).int()
    product = silu_mul(*F.grouped_mm(x[order // experts.shape[1]], gate_up.transpose(1, 2), offs=ends).chunk(2, -1))
    rows = F.grouped_mm(product, down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
    return rows[order.argsort()].view(*experts.shape, -1).sum(1).to(x.dtype)


def liger_moe(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return load("liger_kernel.ops:LigerFusedMoEFunction").apply(x, gate_up, down, experts.int(), weights)


OPS = (
    Op(
        name="moe_mlp", make=make_moe, truth=moe_mlp_reference,
        check={},  # some peers tune in the first call, so it needs the timed sizes
        shapes=(
            {"N": 8192, "C": 4096, "F": 14336, "X": 8, "K": 2},
            {"N": 8192, "C": 2048, "F": 768, "X": 128, "K": 8},
        ),
        limit="flops", work=lambda N, C, F, X, K: (6 * N * K * C * F, 12 * N * K * C * F),
        peers={
            "torch": Peer(moe_in_torch, moe_apart, needs="torch.nn.functional:grouped_mm"),
            "loop": Peer(moe_mlp_reference),
            "liger": liger_peer(liger_moe, moe_apart),
            "ours": Peer(moe_mlp),
            "ours+recompute": Peer(functools.partial(moe_mlp, recompute=True)),
        },
    ),
)  # fmt: skip
