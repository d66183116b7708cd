"""Expert parallelism: each rank holds some of the experts, and tokens travel to the ranks of their experts and back.

Source: https://arxiv.org/abs/2006.16668.
"""

import torch
from torch import Tensor

from liger_models.kernels.collectives import Group, all_to_all
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.row_linear import LowRank

from .experts import moe_mlp
from .permutation import permute, unpermute


class _Permute(torch.autograd.Function):
    """[N, C] -> [N K, C], each token's row in all of its slots. The gradient is the sum of the slots', in fp32."""

    @staticmethod
    def forward(ctx, x, order, slot, K):
        ctx.save_for_backward(order, slot)
        ctx.K = K
        return _permuted(x, order, slot, K)

    @staticmethod
    def backward(ctx, d_rows):
        return _unpermuted(d_rows, ctx.saved_tensors[1], ctx.K), None, None, None


class _Unpermute(torch.autograd.Function):
    """The reverse of `_Permute`: [N K, C] -> [N, C]."""

    @staticmethod
    def forward(ctx, rows, order, slot, K):
        ctx.save_for_backward(order, slot)
        ctx.K = K
        return _unpermuted(rows, slot, K)

    @staticmethod
    def backward(ctx, dy):
        order, slot = ctx.saved_tensors
        return _permuted(dy, order, slot, ctx.K), None, None, None


def _permuted(x: Tensor, order: Tensor, slot: Tensor, K: int) -> Tensor:
    return permute(x, slot, x.dtype) if use_triton(x) and x.numel() else x[order // K]


def _unpermuted(rows: Tensor, slot: Tensor, K: int) -> Tensor:
    N = len(slot) // K
    if use_triton(rows) and rows.numel():
        return unpermute(rows.contiguous(), slot, None, N, rows.dtype)
    compute = torch.promote_types(rows.dtype, torch.float32)
    return rows[slot].view(N, K, -1).sum(1, dtype=compute).to(rows.dtype)


def moe_mlp_over(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    ranks: Group,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
    *,
    act: str = "silu",
    limit: float = 0.0,
    recompute: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """`moe_mlp` with the experts sharded over a process group: tokens are sent to the ranks of their experts and back.

    The host waits for the device once, for the number of tokens that each pair of ranks exchanges.

    Args:
        x: [N, C], this rank's tokens.
        weights, experts: [N, K], over all X experts.
        gate_up_weight, down_weight: [X / R, 2 F, C] and [X / R, C, F], this rank's experts; rank 0 has the first X / R.
            Their gradients are sums over the tokens of all ranks.
        ranks: the process group, of size R.
        gate_up_bias, down_bias: [X / R, 2 F] and [X / R, C], this rank's; None for none.
        gate_up_low_rank, down_low_rank: as in `moe_mlp`, of this rank's experts.
        act, limit, recompute, dropout: as in `moe_mlp`.

    Returns:
        [N, C] in the dtype of the weights.
    """
    N, K = experts.shape
    local = gate_up_weight.shape[0]
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
    counts = torch.zeros(local * ranks.size, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen)).view(ranks.size, local)
    each = [1] * ranks.size
    incoming = all_to_all(counts, each, each, ranks)  # [R, X / R]: copies that each rank sends to each local expert
    sent, received = torch.stack([counts.sum(1), incoming.sum(1)]).tolist()

    rows = all_to_all(_Permute.apply(x.to(gate_up_weight.dtype), order, slot, K), sent, received, ranks)
    factors = all_to_all(_Permute.apply(weights.reshape(-1, 1), order, slot, 1), sent, received, ranks)
    local_experts = torch.arange(local, device=x.device).repeat(ranks.size)
    local_experts = local_experts.repeat_interleave(incoming.reshape(-1), output_size=sum(received)).unsqueeze(1)
    low_ranks = gate_up_low_rank, down_low_rank
    inputs = rows, factors, local_experts, gate_up_weight, down_weight, gate_up_bias, down_bias, *low_ranks
    y = moe_mlp(*inputs, act=act, limit=limit, recompute=recompute, dropout=dropout)
    return _Unpermute.apply(all_to_all(y, received, sent, ranks), order, slot, K)  # type: ignore[no-any-return]
