"""Expert parallelism: each rank holds some of the experts, and tokens travel to the ranks of their experts and back.

A token is sent once to each rank that has any of its experts, with its routing weights and the numbers of its experts.
That rank sorts the token's copies for these experts, multiplies them as in `experts`, and sends back their sum::

    r_j = x_n                     for each rank r that receives n, in row j = slot[n, r]; permute
    y_n = Σ_r s_slot[n,r]         s_j the weighted sum over the experts of rank r; unpermute

If all experts are chosen equally often, a token is sent to R (1 − (1 − 1 / R)ᴷ) of R ranks on average. For K = 8 this
is 2 of 2, 3.6 of 4 and 5.3 of 8.

Source: https://arxiv.org/abs/2006.16668; each token once to a rank: https://arxiv.org/abs/2412.19437.
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.distributed.collectives import Group, all_to_all
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.moe.experts import moe_mlp
from liger_models.kernels.moe.permutation import permute, unpermute


class _Permute(torch.autograd.Function):
    """[N, C] -> [M, C], each token's row in all of its slots below M. The gradient sums over the slots in fp32."""

    @staticmethod
    def forward(ctx, x, slot, M):
        ctx.save_for_backward(slot)
        return _permuted(x, slot, M)

    @staticmethod
    def backward(ctx, d_rows):
        (slot,) = ctx.saved_tensors
        return _unpermuted(d_rows, slot), None, None


class _Unpermute(torch.autograd.Function):
    """The reverse of `_Permute`: [M, C] -> [N, C]."""

    @staticmethod
    def forward(ctx, rows, slot):
        ctx.save_for_backward(slot)
        ctx.M = len(rows)
        return _unpermuted(rows, slot)

    @staticmethod
    def backward(ctx, dy):
        (slot,) = ctx.saved_tensors
        return _permuted(dy, slot, ctx.M), None


def _permuted(x: Tensor, slot: Tensor, M: int) -> Tensor:
    if use_triton(x) and M:
        return permute(x, slot, M, x.dtype)
    tokens, ranks = (slot < M).nonzero(as_tuple=True)
    return x.new_empty(M, x.shape[1]).index_copy(0, slot[tokens, ranks].long(), x[tokens])


def _unpermuted(rows: Tensor, slot: Tensor) -> Tensor:
    if use_triton(rows) and len(rows):
        return unpermute(rows.contiguous(), slot, None, len(slot), rows.dtype)
    compute = torch.promote_types(rows.dtype, torch.float32)
    total: Tensor = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[slot.long()].sum(1, dtype=compute)
    return total.to(rows.dtype)


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
    """`moe_mlp` with experts sharded over a process group; tokens travel to the ranks of their experts and back.

    The host waits for the device once, to learn how many rows each pair of ranks exchanges.

    Args:
        x: [N, C], this rank's tokens.
        weights, experts: [N, K], over all X experts.
        gate_up_weight, down_weight: [X / R, 2 F, C] and [X / R, C, F], this rank's experts; rank 0 has the first X / R.
            Their gradients are sums over the tokens of all ranks.
        ranks: the process group, of size R.
        gate_up_bias, down_bias: [X / R, 2 F] and [X / R, C], the biases of this rank's experts; None for none.
        gate_up_low_rank, down_low_rank: as in `moe_mlp`, for this rank's experts.
        act, limit, recompute, dropout: as in `moe_mlp`.

    Returns:
        [N, C] in the dtype of the weights.
    """
    R, K, local = ranks.size, experts.shape[1], gate_up_weight.shape[0]
    # For each token: the rank of each of its experts, its copies per rank [N, R], and the ranks that it goes to, once
    # each however many of its experts are there.
    rank_of = experts // local
    copies = experts.new_zeros(len(experts), R).scatter_add_(1, rank_of, torch.ones_like(experts))
    goes = (copies > 0).T.contiguous()  # [R, N]
    counts = torch.stack([goes.sum(1), copies.sum(0)], 1)
    one_row = [1] * R
    # Each rank learns what it will receive. `tolist` is the one wait for the device.
    incoming = all_to_all(
        counts, one_row, one_row, ranks
    )  # [R, 2]: rows from each rank, and their copies for experts here
    sent, received, local_copies = torch.stack([counts[:, 0], *incoming.T]).tolist()
    M = sum(sent)
    # Where each token goes in the send buffer [M, C], which is ordered by rank; M means that it does not go there.
    first = counts[:, 0].cumsum(0) - counts[:, 0]
    slot = torch.where(goes, first[:, None] + goes.cumsum(1) - 1, M).int().T.contiguous()  # [N, R]

    # Send rows and their routing. Experts of other ranks become expert X / R, which stands for no expert.
    rows = all_to_all(_Permute.apply(x.to(gate_up_weight.dtype), slot, M), sent, received, ranks)
    wide = torch.promote_types(weights.dtype, torch.float32)  # whole numbers of experts are exact
    routing = all_to_all(_Permute.apply(torch.cat([weights, experts], 1).to(wide), slot, M), sent, received, ranks)
    local_experts = routing[:, K:].detach().long() - local * ranks.rank
    local_experts = local_experts.where((local_experts >= 0) & (local_experts < local), local)
    low_ranks = gate_up_low_rank, down_low_rank
    inputs = rows, routing[:, :K].to(weights.dtype), local_experts, gate_up_weight, down_weight, gate_up_bias, down_bias
    options: dict[str, Any] = {"act": act, "limit": limit, "recompute": recompute, "dropout": dropout}
    # Run the local experts, send the sums back, and add what the ranks return for each token.
    y = moe_mlp(*inputs, *low_ranks, copies=sum(local_copies), **options)
    return _Unpermute.apply(all_to_all(y, received, sent, ranks), slot)  # type: ignore[no-any-return]
