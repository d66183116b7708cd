"""Expert parallelism: each rank holds some of the experts, and tokens are sent to the ranks that hold their experts.

A token is sent once to each rank that holds at least one of its experts, together with its routing weights and the
indices of its experts. The receiving rank computes the outputs of its experts as in `experts`, and sends back the
weighted sum s_j of these outputs. The sending rank copies its tokens to the rows r_j of a send buffer, and later adds
the sums that it gets back::

    r_j = x_n                     permute: for each rank r that receives token n, in row j = slot[n, r]
    y_n = Σ_r s_slot[n,r]         unpermute

If all experts are chosen equally often, each token is sent on average to about R (1 − (1 − 1 / R)ᴷ) of the R ranks. For
K = 8, a token is sent on average to 2 of 2 ranks, 3.6 of 4 ranks, or 5.3 of 8 ranks.

Source: https://arxiv.org/abs/2006.16668, https://arxiv.org/abs/2412.19437 (sending a token to each rank only once).
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
    """Copies row n of x [N, C] to the rows slot[n] of the result [M, C].

    Entries of ``slot`` that are M or larger are skipped. The gradient of row n is the sum, computed in fp32, of the
    gradients of the rows slot[n].
    """

    @staticmethod
    def forward(ctx, x, slot, M):
        ctx.save_for_backward(slot)
        return _permuted(x, slot, M)

    @staticmethod
    def backward(ctx, d_rows):
        (slot,) = ctx.saved_tensors
        return _unpermuted(d_rows, slot), None, None


class _Unpermute(torch.autograd.Function):
    """Adds the rows slot[n] of the input [M, C], and writes the sum to row n of the result [N, C].

    The forward is the backward of `_Permute`, and the backward is the forward of `_Permute`.
    """

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
    """Compute `moe_mlp` with experts that are sharded over a process group.

    Tokens are sent to the ranks of their experts and back. The host waits for the device once, to learn the number of
    rows that each pair of ranks exchanges.

    Args:
        x: [N, C], this rank's tokens.
        weights, experts: [N, K], as in `moe_mlp`, for all X experts.
        gate_up_weight, down_weight: [X / R, 2 F, C] and [X / R, C, F], the weights of this rank's experts. Rank 0 holds
            the first X / R experts. The gradients are sums over the tokens of all ranks.
        ranks: the process group, with R ranks.
        gate_up_bias, down_bias: [X / R, 2 F] and [X / R, C], the biases of this rank's experts; None for no bias.
        gate_up_low_rank, down_low_rank: as in `moe_mlp`, for this rank's experts.
        act, limit, recompute, dropout: as in `moe_mlp`.

    Returns:
        [N, C] in the dtype of ``gate_up_weight``.
    """
    R, K, local = ranks.size, experts.shape[1], gate_up_weight.shape[0]
    # Find the rank of each chosen expert [N, K], and count the experts of each token on each rank [N, R]. A token goes
    # once to each rank that has at least one of its experts.
    rank_of = experts // local
    copies = experts.new_zeros(len(experts), R).scatter_add_(1, rank_of, torch.ones_like(experts))
    goes = (copies > 0).T.contiguous()  # [R, N]
    counts = torch.stack([goes.sum(1), copies.sum(0)], 1)
    one_row = [1] * R
    # Each rank learns how many rows it will receive. The host waits for the device only in `tolist`.
    incoming = all_to_all(
        counts, one_row, one_row, ranks
    )  # [R, 2]: the number of rows that each rank sends, and the number of copies of these rows for local experts
    sent, received, local_copies = torch.stack([counts[:, 0], *incoming.T]).tolist()
    M = sum(sent)
    # Compute the row of each token in the send buffer [M, C], which is ordered by receiving rank. If the token is not
    # sent to a rank, its row for this rank is M.
    first = counts[:, 0].cumsum(0) - counts[:, 0]
    slot = torch.where(goes, first[:, None] + goes.cumsum(1) - 1, M).int().T.contiguous()  # [N, R]

    # Send rows and their routing. Experts of other ranks become expert X / R, which stands for no expert.
    rows = all_to_all(_Permute.apply(x.to(gate_up_weight.dtype), slot, M), sent, received, ranks)
    wide = torch.promote_types(weights.dtype, torch.float32)  # represents the indices of experts exactly
    routing = all_to_all(_Permute.apply(torch.cat([weights, experts], 1).to(wide), slot, M), sent, received, ranks)
    local_experts = routing[:, K:].detach().long() - local * ranks.rank
    local_experts = local_experts.where((local_experts >= 0) & (local_experts < local), local)
    low_ranks = gate_up_low_rank, down_low_rank
    inputs = rows, routing[:, :K].to(weights.dtype), local_experts, gate_up_weight, down_weight, gate_up_bias, down_bias
    options: dict[str, Any] = {"act": act, "limit": limit, "recompute": recompute, "dropout": dropout}
    # Compute the weighted sums of the local experts' outputs, send them back, and add the sums that all ranks return
    # for each token.
    y = moe_mlp(*inputs, *low_ranks, copies=sum(local_copies), **options)
    return _Unpermute.apply(all_to_all(y, received, sent, ranks), slot)  # type: ignore[no-any-return]
