"""Mixture of experts: the router's choice, the experts' gated MLPs as grouped products, the load-balancing loss.

`route`, per token, in fp32, with T the K experts of the largest logits l::

    q = softmax(l) over all X experts, or with normalize over T alone
    w_k = q[T_k]                          with round_weights rounded to the logits' dtype
    dl = q · (d − Σ_x q_x · d_x)          d[T_k] = dw_k, 0 elsewhere; q as in the forward

Saved: the logits and T.

`moe_mlp`, with the N · K copies of the tokens sorted by expert (stably: tokens ascend within an expert); copy k of
token n stands in row j = slot[n, k], expert e owns rows ends[e−1] to ends[e], and A = `gated_act`::

    r_j = x_n                             each token read once and written K times
    u_j = Wgu_e · r_j                     grouped product; gate and up interleaved
    o_j = Wd_e · A(u_j)                   grouped product
    y_n = Σ_k w_nk · o_slot[n,k]          in fp32, in the order of k: the same bits in every run

Backward. The routing weight stands between linear maps, so it moves to where rows are narrow and read anyway: the
gradient dy is copied unweighted, and one kernel over u and g does all the rest of the element-wise work::

    d_j = dy_n
    g_j = Wd_eᵀ · d_j                     grouped product; the gradient of A(u_j) but for the weight
    dw_nk = g_j · A(u_j)                  which is dy_n · o_j: the experts' outputs are neither kept nor made again
    du_j = w_nk · A'(u_j)(g_j),   p_j = w_nk · A(u_j)     p in the place of g
    dWd_e = Σ_j d_j ⊗ p_j,   dWgu_e = Σ_j du_j ⊗ r_j      grouped products over the rows of e; 0 for an expert without
    dx_n = Σ_k Wgu_eᵀ · du_slot[n,k]      grouped product, then in fp32 in the order of k

Saved: x (unless no backward needs it), the weights, the order of the copies, and u; with ``recompute`` not u either:
the backward makes it again bit for bit, and du takes its place. The sorted copies of x and the gated product are never
kept. Gradients that nobody needs cost nothing, and come in the dtype of their input. The backward is one op, so that a
compiler cannot see what it recomputes and keep the forward's instead.

Nothing waits for the device: the row counts of the experts stay there. The grouped products are PyTorch's where those
are one kernel (`library_runs`), elsewhere the kernels below.

Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2211.15841; the gradient of the weights without the
experts' outputs as in https://arxiv.org/abs/2512.14080.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import Ranks, all_to_all, sum_over
from .dispatch import LIBRARY, check, check_floating, on_device_of, tl, triton, use_triton
from .gated_act import _activation, _load_pairs, check_act, gated_act_forward, gated_act_reference
from .rms_norm_linear import given_or_empty

ROUTE_ROWS, ROUTE_TILE = 32, 4096
"""Tokens per program of the routing kernels, at most, and logits: all of a token's logits are in registers at once."""

SORT_BLOCK = 2048
"""Copies that a program of the sort looks at in one step. Each expert's program looks at all copies, twice: as 16-bit
numbers they stay in the L2 cache, and nothing has to be exchanged between programs, so that one launch does it all."""

ROW_BLOCK = 1024
"""Columns per program that copies or combines a token's rows: in bf16 one 16-byte vector per thread and row, and the K
rows' loads or stores are all in flight at once."""

ACT_BLOCK = 1024
"""Gate and up pairs per step of the activation's backward, which walks a row so that its dot product is one sum."""

MAX_COPIES = 2**30
MAX_EXPERTS = 2**15 - 1
"""The copies are counted in 32 bits, and the sort counts one block beyond the last; the experts in 16 bits."""

PRODUCT_BLOCKS = {2: (128, 128, 64), 4: (64, 64, 32)}
PRODUCT_WARPS = {2: 8, 4: 4}
PRODUCT_STAGES = 3
"""Tile (two of the result, the summed one), warps and pipeline stages of the Triton grouped products, by element size:
for 16-bit types 96 KB of shared memory, which Ampere, Ada and Hopper all have."""


def route_reference(logits: Tensor, top_k: int, normalize: bool, round_weights: bool = False) -> tuple[Tensor, Tensor]:
    """What `route` computes, in plain torch (differentiable; fp64 stays fp64)."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    weights, experts = logits.softmax(-1, dtype=compute).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if round_weights:
        weights = weights.to(logits.dtype).to(compute)
    return weights, experts


def moe_mlp_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *, act: str = "silu"
) -> Tensor:
    """What `moe_mlp` computes, in plain torch (differentiable; fp64 stays fp64), but for the loop over the experts.

    That is an op of its own, which a compiler need not look into: the experts' row counts are known to the host only
    when it has waited for them.
    """
    N, K = experts.shape
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    every = torch.arange(gate_up_weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen[order], every, right=True)
    product = torch.ops.liger_models.grouped_product
    gate_up = product(x.to(gate_up_weight.dtype)[order // K], gate_up_weight.transpose(1, 2), ends)
    sorted_rows = product(gated_act_reference(gate_up, act), down_weight.transpose(1, 2), ends)
    rows: Tensor = sorted_rows[order.argsort()].view(N, K, x.shape[1])
    compute = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(compute) * weights.to(compute).unsqueeze(-1)).sum(1).to(rows.dtype)


LIBRARY.define("grouped_product(Tensor rows, Tensor weight, Tensor ends) -> Tensor")
LIBRARY.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")


def _counts(ends: Tensor) -> list[int]:
    """Rows of each expert, for which the host waits."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


@torch.library.impl(LIBRARY, "grouped_product", "CompositeExplicitAutograd")
def _grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = zip(rows.split(_counts(ends)), weight.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


@torch.library.impl(LIBRARY, "grouped_outer", "CompositeExplicitAutograd")
def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    counts = _counts(ends)
    return torch.stack([a.t() @ b for a, b in zip(left.split(counts), right.split(counts), strict=True)])


@torch.library.register_fake("liger_models::grouped_product", lib=LIBRARY)
def _grouped_product_fake(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.register_fake("liger_models::grouped_outer", lib=LIBRARY)
def _grouped_outer_fake(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _grouped_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx, d_product):
    rows, weight, ends = ctx.saved_tensors
    need_rows, need_weight, _ = ctx.needs_input_grad
    ops = torch.ops.liger_models
    d_rows = ops.grouped_product(d_product, weight.transpose(1, 2), ends) if need_rows else None
    return d_rows, ops.grouped_outer(rows, d_product, ends) if need_weight else None, None


torch.library.register_autograd(
    "liger_models::grouped_product", _grouped_backward, setup_context=_grouped_setup, lib=LIBRARY
)


@triton.jit
def _load_logits(logits_ptr, rows, lanes, N, X):
    """The logits of these tokens in fp32, −inf beyond the last expert (and 0 in rows beyond the last token)."""
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * X + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(lanes[None, :] < X, logits, float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, N, X, K: tl.constexpr, NORMALIZE: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Integers in the order of the floats, NaN above all: whatever the logits are, K different experts are chosen.
    bits = logits.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(lanes[None, :] < X, tl.maximum(keys, -2147483646), -2147483647)
    picks = tl.arange(0, BLOCK_K)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for k in tl.static_range(K):
        largest = keys == tl.max(keys, 1)[:, None]
        pick = tl.min(tl.where(largest, lanes[None, :], BLOCK_X), 1)  # of equals the first
        mine = lanes[None, :] == pick[:, None]
        weights = tl.where(picks[None, :] == k, tl.sum(tl.where(mine, e, 0.0), 1)[:, None], weights)
        experts = tl.where(picks[None, :] == k, pick[:, None], experts)
        keys = tl.where(mine, -2147483647, keys)
    weights /= (tl.sum(weights, 1) if NORMALIZE else tl.sum(e, 1))[:, None]
    if ROUND:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    inside = (rows < N)[:, None] & (picks < K)[None, :]
    out = rows[:, None] * K + picks[None, :]
    tl.store(weights_ptr + out, weights, mask=inside)
    tl.store(experts_ptr + out, experts.to(tl.int64), mask=inside)


@triton.jit
def _route_backward_kernel(
    d_weights_ptr, logits_ptr, experts_ptr, d_logits_ptr, N, X, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    d = tl.zeros([ROWS, BLOCK_X], tl.float32)
    chosen = tl.zeros([ROWS, BLOCK_X], tl.float32)
    for k in tl.static_range(K):
        pick = tl.load(experts_ptr + rows * K + k, mask=rows < N, other=0)
        dw = tl.load(d_weights_ptr + rows * K + k, mask=rows < N, other=0.0).to(tl.float32)
        mine = lanes[None, :] == pick[:, None]
        d = tl.where(mine, dw[:, None], d)
        chosen = tl.where(mine, 1.0, chosen)
    if NORMALIZE:
        e = tl.where(chosen > 0, e, 0.0)
    q = e / tl.sum(e, 1)[:, None]
    d_logits = q * (d - tl.sum(q * d, 1)[:, None])
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    tl.store(d_logits_ptr + rows[:, None] * X + lanes[None, :], d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sort_kernel(experts_ptr, order_ptr, slot_ptr, ends_ptr, S, BLOCK: tl.constexpr):
    """Program e puts the copies of expert e behind those of the experts before it."""
    expert = tl.program_id(0)
    indices = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, S, BLOCK):
        chosen = tl.load(experts_ptr + start + indices, mask=start + indices < S, other=32767).to(tl.int32)
        before += (chosen < expert).to(tl.int32)
    end = tl.sum(before, 0)
    for start in range(0, S, BLOCK):
        index = start + indices
        mine = tl.load(experts_ptr + index, mask=index < S, other=32767).to(tl.int32) == expert
        slot = end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + slot, index, mask=mine)
        tl.store(slot_ptr + index, slot, mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends_ptr + expert, end)


@triton.jit
def _spread_kernel(x_ptr, slot_ptr, rows_ptr, C, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    x = tl.load(x_ptr + token * C + columns, mask=inside, other=0.0).to(rows_ptr.dtype.element_ty)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + slot * C + columns, x, mask=inside)


@triton.jit
def _combine_kernel(
    rows_ptr, slot_ptr, weights_ptr, y_ptr, C, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64)
        row = tl.load(rows_ptr + slot * C + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += row
    tl.store(y_ptr + token * C + columns, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _act_backward_kernel(
    g_ptr, gate_up_ptr, weights_ptr, order_ptr, d_gate_up_ptr, product_ptr, d_weights_ptr, F,
    ACT: tl.constexpr, READ_G: tl.constexpr, STORE_D_GATE_UP: tl.constexpr, STORE_PRODUCT: tl.constexpr,
    STORE_D_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * F
    copy = tl.load(order_ptr + tl.program_id(0))
    w = tl.load(weights_ptr + copy).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    results = tl.arange(0, BLOCK)
    elements = tl.arange(0, 2 * BLOCK)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        left = F - start
        gate, up = _load_pairs(gate_up_ptr + 2 * (row + start), left, BLOCK)
        a, slope = _activation(gate, ACT)
        a = a.to(dtype).to(tl.float32)
        p = (a * up).to(dtype).to(tl.float32)  # what the forward gave to the down projection
        if READ_G:
            g = tl.load(g_ptr + row + start + results, mask=results < left, other=0.0).to(tl.float32)
            dot += g * p
            if STORE_D_GATE_UP:
                gradient = tl.interleave((w * g * up * slope).to(dtype), (w * g * a).to(dtype))
                tl.store(d_gate_up_ptr + 2 * (row + start) + elements, gradient, mask=elements < 2 * left)
        if STORE_PRODUCT:
            tl.store(product_ptr + row + start + results, (w * p).to(dtype), mask=results < left)
    if STORE_D_WEIGHTS:
        tl.store(d_weights_ptr + copy, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))


@triton.jit
def _product_kernel(
    rows_ptr, weight_ptr, ends_ptr, out_ptr, X, IN, OUT, stride_x, stride_in, stride_out, PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    tiles_out = tl.cdiv(OUT, BLOCK_OUT)
    tile = tl.program_id(0) // tiles_out
    # Which expert's rows the tile covers: each expert has as many tiles as its rows need.
    lanes = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + lanes, mask=lanes < X, other=0)
    starts = tl.load(ends_ptr + lanes - 1, mask=(lanes > 0) & (lanes < X), other=0)
    tiles = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < X:
        first = tl.sum(tl.where(lanes == expert, starts, 0), 0)
        end = tl.sum(tl.where(lanes == expert, ends, 0), 0)
        first += (tile - tl.sum(tl.where(lanes < expert, tiles, 0), 0)) * BLOCK_ROWS
        rows = first + tl.arange(0, BLOCK_ROWS)
        columns = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        row_starts = rows_ptr + rows.to(tl.int64)[:, None] * IN
        column_starts = weight_ptr + expert.to(tl.int64) * stride_x + columns.to(tl.int64)[None, :] * stride_out
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in range(0, IN, BLOCK_IN):
            i = start + tl.arange(0, BLOCK_IN)
            a = tl.load(row_starts + i[None, :], mask=(rows < end)[:, None] & (i < IN)[None, :], other=0.0)
            b = tl.load(
                column_starts + i.to(tl.int64)[:, None] * stride_in,
                mask=(i < IN)[:, None] & (columns < OUT)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * OUT + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(rows < end)[:, None] & (columns < OUT)[None, :],
        )


@triton.jit
def _outer_kernel(
    left_ptr, right_ptr, ends_ptr, out_ptr, LEFT, RIGHT, PRECISION: tl.constexpr,
    BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    tiles_right = tl.cdiv(RIGHT, BLOCK_RIGHT)
    tiles = tl.cdiv(LEFT, BLOCK_LEFT) * tiles_right
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = (tile // tiles_right) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    o = (tile % tiles_right) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
    for start in range(first, end, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = rows < end
        a = tl.load(left_ptr + rows[None, :] * LEFT + m[:, None], mask=inside[None, :] & (m < LEFT)[:, None], other=0.0)
        b = tl.load(
            right_ptr + rows[:, None] * RIGHT + o[None, :], mask=inside[:, None] & (o < RIGHT)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(
        out_ptr + (expert.to(tl.int64) * LEFT + m.to(tl.int64)[:, None]) * RIGHT + o[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(m < LEFT)[:, None] & (o < RIGHT)[None, :],
    )


def _block(size: int) -> int:
    """The next power of two, and not 1: no tile is to be degenerate."""
    return max(int(triton.next_power_of_2(size)), 2)


def _route_tile(X: int) -> dict[str, int]:
    block = _block(X)
    return {"ROWS": max(min(ROUTE_ROWS, ROUTE_TILE // block), 1), "BLOCK_X": block}


_route_kernel.decides = _sort_kernel.decides = True  # where others read and write


def _sort(experts: Tensor, X: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the sort: the copies n · K + k by row [N K], the row of each copy [N K], each expert's end [X]; int32."""
    experts = experts.contiguous().to(torch.int16)
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    slot, ends = torch.empty_like(order), order.new_empty(X)
    with on_device_of(experts):
        _sort_kernel[(X,)](experts, order, slot, ends, experts.numel(), BLOCK=SORT_BLOCK, num_warps=8)
    return order, slot, ends


def _row_grid(N: int, C: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = min(triton.next_power_of_2(C), ROW_BLOCK)
    return (N, triton.cdiv(C, block)), {"BLOCK": block, "num_warps": max(block // 256, 1)}


def _spread(x: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the copying: [N, C] -> [N K, C], each token's row in all of its slots."""
    x = x.contiguous()
    N, C = x.shape
    rows = torch.empty(slot.numel(), C, dtype=dtype, device=x.device)
    grid, constants = _row_grid(N, C)
    with on_device_of(x):
        _spread_kernel[grid](x, slot, rows, C, K=slot.numel() // N, **constants)
    return rows


def _combine(rows: Tensor, slot: Tensor, weights: Tensor | None, N: int, dtype: torch.dtype) -> Tensor:
    """Launch the summation: [N K, C] -> [N, C], each token's rows, weighted or not."""
    C = rows.shape[1]
    y = torch.empty(N, C, dtype=dtype, device=rows.device)
    grid, constants = _row_grid(N, C)
    with on_device_of(rows):
        _combine_kernel[grid](
            # A pointer argument that the constants switch off still has to be a tensor.
            rows, slot, rows if weights is None else weights, y, C,
            K=slot.numel() // N, WEIGHTED=weights is not None, **constants,
        )  # fmt: skip
    return y


def _act_backward(
    g: Tensor | None, gate_up: Tensor, weights: Tensor, order: Tensor, act: str, *,
    need_d_gate_up: bool, need_product: bool, need_d_weights: bool, overwrite_gate_up: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the activation's backward: ``(d_gate_up, weighted product, d_weights)``; the product overwrites g."""
    S, F = gate_up.shape[0], gate_up.shape[1] // 2
    d_gate_up = (gate_up if overwrite_gate_up else torch.empty_like(gate_up)) if need_d_gate_up else None
    product = None
    if need_product:
        product = torch.empty(S, F, dtype=gate_up.dtype, device=gate_up.device) if g is None else g
    d_weights = torch.empty_like(weights) if need_d_weights else None
    # Below 128 pairs the threads of a warp would hold copies of each other's.
    block = max(min(triton.next_power_of_2(F), ACT_BLOCK), 128)
    with on_device_of(gate_up):
        _act_backward_kernel[(S,)](
            gate_up if g is None else g, gate_up, weights, order, gate_up if d_gate_up is None else d_gate_up,
            gate_up if product is None else product, weights if d_weights is None else d_weights, F,
            ACT=act, READ_G=g is not None, STORE_D_GATE_UP=need_d_gate_up, STORE_PRODUCT=need_product,
            STORE_D_WEIGHTS=need_d_weights, BLOCK=block, num_warps=block // 128,
        )  # fmt: skip
    return d_gate_up, product, d_weights


_library_product = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10


def library_runs(gate_up_weight: Tensor, down_weight: Tensor) -> bool:
    """True if the grouped products of these contiguous weights [X, 2 F, C] and [X, C, F] run in PyTorch's grouped_mm.

    That is one CUTLASS kernel, without a wait for the device, for bf16 on Hopper, row lengths of whole 16-byte vectors
    and fewer than 1024 experts; rows per expert are any number. On Blackwell the weight gradient of an expert without
    rows is not zero (pytorch#172439); everywhere else it is a loop over the experts with a wait.
    """
    return (
        gate_up_weight.device.type == "cuda"
        and torch.version.hip is None
        and gate_up_weight.dtype == torch.bfloat16
        and gate_up_weight.shape[0] < 1024
        and down_weight.shape[1] % 8 == 0
        and down_weight.shape[2] % 8 == 0
        and gate_up_weight.data_ptr() % 16 == 0
        and down_weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(gate_up_weight.device)[0] == 9
    )


def _tile(rows: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Tile of the Triton grouped products, and their constants; fp32 is TF32 only where the user chose that for mm."""
    size = rows.element_size()
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # from torch 2.9
    precision = "tf32" if size == 4 and chosen == "tf32" else "ieee"
    return PRODUCT_BLOCKS[size], {
        "PRECISION": precision,
        "num_warps": PRODUCT_WARPS[size],
        "num_stages": PRODUCT_STAGES,
    }


def _product(rows: Tensor, weight: Tensor, ends: Tensor, library: bool) -> Tensor:
    """Rows of each expert times its matrix: [S, in], [X, in, out] -> [S, out]; the weight may be a transposed view."""
    if library:
        product: Tensor = _library_product(rows, weight, offs=ends)
        return product
    S, X, width = rows.shape[0], weight.shape[0], weight.shape[2]
    out = torch.empty(S, width, dtype=rows.dtype, device=rows.device)
    (block_rows, block_out, block_in), constants = _tile(rows)
    tiles = S // block_rows + min(S, X)  # at most: the whole ones, and a last one for each expert with rows
    with on_device_of(rows):
        _product_kernel[(tiles * triton.cdiv(width, block_out),)](
            rows, weight, ends, out, X, weight.shape[1], width, *weight.stride(),
            BLOCK_X=_block(X), BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, BLOCK_IN=block_in,
            **constants,
        )  # fmt: skip
    return out


def _outer(left: Tensor, right: Tensor, ends: Tensor, library: bool) -> Tensor:
    """Sum of the outer products of each expert's rows: [S, left], [S, right] -> [X, left, right]."""
    if library:
        sums: Tensor = _library_product(left.t(), right, offs=ends)
        return sums
    X, height, width = ends.shape[0], left.shape[1], right.shape[1]
    out = torch.empty(X, height, width, dtype=left.dtype, device=left.device)
    (block_left, block_right, block_rows), constants = _tile(left)
    with on_device_of(left):
        _outer_kernel[(X * triton.cdiv(height, block_left) * triton.cdiv(width, block_right),)](
            left, right, ends, out, height, width,
            BLOCK_LEFT=block_left, BLOCK_RIGHT=block_right, BLOCK_ROWS=block_rows, **constants,
        )  # fmt: skip
    return out


LIBRARY.define("route(Tensor logits, int top_k, bool normalize, bool round_weights) -> (Tensor, Tensor)")
LIBRARY.define("route_backward(Tensor d_weights, Tensor logits, Tensor experts, bool normalize) -> Tensor")
LIBRARY.define(
    "moe_mlp(Tensor x, Tensor weights, Tensor experts, Tensor gate_up_weight, Tensor down_weight, str act,"
    " bool recompute) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "moe_mlp_backward(Tensor dy, Tensor? x, Tensor weights, Tensor order, Tensor slot, Tensor ends, Tensor? gate_up,"
    " Tensor gate_up_weight, Tensor down_weight, str act, ScalarType x_dtype, bool[4] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "route", "CompositeExplicitAutograd")
def _route(logits: Tensor, top_k: int, normalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    N, X = logits.shape
    weights = torch.empty(N, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(N, top_k, dtype=torch.int64, device=logits.device)
    if N:
        tile = _route_tile(X)
        with on_device_of(logits):
            _route_kernel[(triton.cdiv(N, tile["ROWS"]),)](
                logits, weights, experts, N, X, K=top_k, NORMALIZE=normalize, ROUND=round_weights,
                BLOCK_K=_block(top_k), **tile,
            )  # fmt: skip
    return weights, experts


@torch.library.impl(LIBRARY, "route_backward", "CompositeExplicitAutograd")
def _route_backward(d_weights: Tensor, logits: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    d_weights, logits, experts = d_weights.contiguous(), logits.contiguous(), experts.contiguous()
    d_logits = torch.empty_like(logits)
    N, X = logits.shape
    if N:
        tile = _route_tile(X)
        with on_device_of(logits):
            _route_backward_kernel[(triton.cdiv(N, tile["ROWS"]),)](
                d_weights, logits, experts, d_logits, N, X, K=experts.shape[1], NORMALIZE=normalize, **tile
            )
    return d_logits


@torch.library.impl(LIBRARY, "moe_mlp", "CompositeExplicitAutograd")
def _moe_mlp(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, act: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gate_up_weight, down_weight = gate_up_weight.contiguous(), down_weight.contiguous()
    X, dtype = gate_up_weight.shape[0], gate_up_weight.dtype
    if weights.numel() == 0:
        empty = experts.new_zeros(0, dtype=torch.int32)
        gate_up = gate_up_weight.new_empty(0) if recompute else gate_up_weight.new_empty(0, gate_up_weight.shape[1])
        return x.new_empty(x.shape, dtype=dtype), empty, empty.clone(), empty.new_zeros(X), gate_up
    library = library_runs(gate_up_weight, down_weight)
    order, slot, ends = _sort(experts, X)
    rows = _spread(x, slot, dtype)
    gate_up = _product(rows, gate_up_weight.transpose(1, 2), ends, library)
    del rows
    product = gated_act_forward(gate_up, act)
    if recompute:
        gate_up = gate_up.new_empty(0)
    rows = _product(product, down_weight.transpose(1, 2), ends, library)
    del product
    return _combine(rows, slot, weights.contiguous(), x.shape[0], dtype), order, slot, ends, gate_up


@torch.library.impl(LIBRARY, "moe_mlp_backward", "CompositeExplicitAutograd")
def _moe_mlp_backward(
    dy: Tensor, x: Tensor | None, weights: Tensor, order: Tensor, slot: Tensor, ends: Tensor, gate_up: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, act: str, x_dtype: torch.dtype, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    need_x, need_weights, need_gate_up, need_down = needs
    need_d_gate_up = need_x or need_gate_up
    N, dtype = dy.shape[0], gate_up_weight.dtype
    likes = dy.new_empty(0, dtype=x_dtype), weights, gate_up_weight, down_weight
    if weights.numel() == 0:
        shapes = dy.shape, weights.shape, gate_up_weight.shape, down_weight.shape
        shaped = zip(likes, shapes, needs, strict=True)
        return tuple(like.new_zeros(shape if need else 0) for like, shape, need in shaped)
    gate_up_weight, down_weight = gate_up_weight.contiguous(), down_weight.contiguous()
    library = library_runs(gate_up_weight, down_weight)
    dx = d_gate_up_weight = d_down_weight = rows = g = None
    own = gate_up is None
    if gate_up is None:
        assert x is not None
        rows = _spread(x, slot, dtype)
        gate_up = _product(rows, gate_up_weight.transpose(1, 2), ends, library)
        if not need_gate_up:
            rows = None
    d_rows = _spread(dy, slot, dtype)
    if need_d_gate_up or need_weights:
        g = _product(d_rows, down_weight, ends, library)
    d_gate_up, product, d_weights = _act_backward(
        g, gate_up, weights.contiguous(), order, act, need_d_gate_up=need_d_gate_up, need_product=need_down,
        need_d_weights=need_weights, overwrite_gate_up=own,
    )  # fmt: skip
    del g, gate_up
    if product is not None:
        d_down_weight = _outer(d_rows, product, ends, library)
    del d_rows, product
    if d_gate_up is not None and need_gate_up:
        if rows is None:
            assert x is not None
            rows = _spread(x, slot, dtype)
        d_gate_up_weight = _outer(d_gate_up, rows, ends, library)
        del rows
    if d_gate_up is not None and need_x:
        d_rows = _product(d_gate_up, gate_up_weight, ends, library)
        del d_gate_up
        dx = _combine(d_rows, slot, None, N, x_dtype)
    return given_or_empty((dx, d_weights, d_gate_up_weight, d_down_weight), likes)


@torch.library.register_fake("liger_models::route", lib=LIBRARY)
def _route_fake(logits: Tensor, top_k: int, normalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int64)


@torch.library.register_fake("liger_models::route_backward", lib=LIBRARY)
def _route_backward_fake(d_weights: Tensor, logits: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("liger_models::moe_mlp", lib=LIBRARY)
def _moe_mlp_fake(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, act: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    X, width, _ = gate_up_weight.shape
    copies = experts.numel()
    order = experts.new_empty(copies, dtype=torch.int32)
    gate_up = gate_up_weight.new_empty(0 if recompute else (copies, width))
    return gate_up_weight.new_empty(x.shape), order, torch.empty_like(order), order.new_empty(X), gate_up


@torch.library.register_fake("liger_models::moe_mlp_backward", lib=LIBRARY)
def _moe_mlp_backward_fake(
    dy: Tensor, x: Tensor | None, weights: Tensor, order: Tensor, slot: Tensor, ends: Tensor, gate_up: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, act: str, x_dtype: torch.dtype, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = dy.to(x_dtype), weights, gate_up_weight, down_weight
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _route_setup(ctx, inputs, output):
    logits, _, ctx.normalize, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_autograd(ctx, d_weights, _d_experts):
    if d_weights is None:
        return (None,) * 4
    return torch.ops.liger_models.route_backward(d_weights, *ctx.saved_tensors, ctx.normalize), None, None, None


def _setup(ctx, inputs, output):
    x, weights, _, gate_up_weight, down_weight, ctx.act, recompute = inputs
    _, order, slot, ends, gate_up = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.mark_non_differentiable(order, slot, ends, gate_up)
    need_rows = recompute or ctx.needs_input_grad[3]
    ctx.save_for_backward(
        x if need_rows else None, weights, order, slot, ends, None if recompute else gate_up,
        gate_up_weight, down_weight,
    )  # fmt: skip


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 7
    need_x, need_weights, _, need_gate_up, need_down, *_ = ctx.needs_input_grad
    needs = [need_x, need_weights, need_gate_up, need_down]
    grads = torch.ops.liger_models.moe_mlp_backward(dy, *ctx.saved_tensors, ctx.act, ctx.x_dtype, needs)
    dx, d_weights, d_gate_up, d_down = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, d_weights, None, d_gate_up, d_down, None, None


torch.library.register_autograd("liger_models::route", _route_autograd, setup_context=_route_setup, lib=LIBRARY)
torch.library.register_autograd("liger_models::moe_mlp", _backward, setup_context=_setup, lib=LIBRARY)


def route(logits: Tensor, top_k: int, normalize: bool, round_weights: bool = False) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token and their weights, from the softmax over all experts.

    Args:
        logits: [N, X], float32, float16 or bfloat16.
        top_k: K, 1 to X. Of equal logits the first are chosen (on the reference backend any).
        normalize: divide the weights of a token by their sum (Mixtral; Qwen3-MoE if norm_topk_prob).
        round_weights: round the weights to the dtype of the logits (Qwen3-MoE).

    Returns:
        ``(weights, experts)``: [N, K] fp32, largest first, and [N, K] int64.

    Raises:
        ValueError: logits that are not [N, X], or a top_k that is not in 1 to X.
        TypeError: logits that are not floating-point.
    """
    check_floating("route", logits=logits)
    check(logits.dim() == 2, f"route: logits must be [N, X], got {list(logits.shape)}.")
    X = logits.shape[1]
    check(1 <= top_k <= X, f"route: top_k must be 1 to the {X} experts there are, got {top_k}.")
    if not use_triton(logits):
        return route_reference(logits, top_k, normalize, round_weights)
    weights, experts = torch.ops.liger_models.route(logits, top_k, normalize, round_weights)
    return weights, experts


def moe_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    act: str = "silu",
    recompute: bool = False,
) -> Tensor:
    """``y[n] = Σ_k weights[n, k] · (gated_act(x[n] @ Wguᵀ) @ Wdᵀ)`` with the matrices of expert ``experts[n, k]``.

    Args:
        x: [N, C], float32, float16 or bfloat16.
        weights: [N, K], as `route` gives them.
        experts: [N, K] int64, in 0 to X − 1.
        gate_up_weight: [X, 2 F, C]; of each expert row 2f is gate f and row 2f + 1 is up f.
        down_weight: [X, C, F] in the dtype of gate_up_weight, which is that of y and may differ from x's. Autocast does
            not change it.
        act: "silu", "gelu_tanh" or "gelu".
        recompute: don't keep gate and up for the backward but make them again, for one more grouped product. The
            gradients are the same. (The reference backend takes no notice.)

    Returns:
        [N, C] in the dtype of the weights.

    Raises:
        ValueError: the shapes don't fit together, or an unknown activation.
        TypeError: a tensor that is not floating-point, experts that are not int64, or weights of two dtypes.
    """
    check_act("moe_mlp", act)
    check_floating("moe_mlp", x=x, weights=weights, gate_up_weight=gate_up_weight, down_weight=down_weight)
    if experts.dtype != torch.int64:
        raise TypeError(f"moe_mlp: experts must be int64, got {experts.dtype}.")
    check(x.dim() == 2, f"moe_mlp: x must be [N, C], got {list(x.shape)}.")
    check(
        weights.dim() == 2
        and weights.shape == experts.shape
        and weights.shape[:1] == x.shape[:1]
        and weights.shape[1] > 0,
        f"moe_mlp: weights and experts must be [{x.shape[0]}, K], got {list(weights.shape)} and {list(experts.shape)}.",
    )
    check(
        gate_up_weight.dim() == 3 and gate_up_weight.shape[2] == x.shape[1] and gate_up_weight.shape[1] % 2 == 0,
        f"moe_mlp: gate_up_weight must be [X, 2 F, {x.shape[1]}], got {list(gate_up_weight.shape)}.",
    )
    X, width, C = gate_up_weight.shape
    check(
        tuple(down_weight.shape) == (X, C, width // 2),
        f"moe_mlp: down_weight must be {[X, C, width // 2]}, got {list(down_weight.shape)}.",
    )
    check(
        X <= MAX_EXPERTS and experts.numel() <= MAX_COPIES,
        f"moe_mlp: at most {MAX_EXPERTS} experts and {MAX_COPIES} copies of tokens, got {X} and {experts.numel()}.",
    )
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "moe_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    if not (use_triton(x) and use_triton(gate_up_weight)):
        return moe_mlp_reference(x, weights, experts, gate_up_weight, down_weight, act=act)
    # Without gradients nothing is kept, and gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    y: Tensor = torch.ops.liger_models.moe_mlp(x, weights, experts, gate_up_weight, down_weight, act, recompute)[0]
    return y


class _Spread(torch.autograd.Function):
    """[N, C] -> [N K, C], each token's row in all of its slots. Its gradient is their sum in fp32."""

    @staticmethod
    def forward(ctx, x, order, slot, K):
        ctx.save_for_backward(order, slot)
        ctx.K = K
        return _rows_of_copies(x, order, slot, K)

    @staticmethod
    def backward(ctx, d_rows):
        return _sum_of_copies(d_rows, ctx.saved_tensors[1], ctx.K), None, None, None


class _Combine(torch.autograd.Function):
    """The reverse of `_Spread`: [N K, C] -> [N, C]."""

    @staticmethod
    def forward(ctx, rows, order, slot, K):
        ctx.save_for_backward(order, slot)
        ctx.K = K
        return _sum_of_copies(rows, slot, K)

    @staticmethod
    def backward(ctx, dy):
        order, slot = ctx.saved_tensors
        return _rows_of_copies(dy, order, slot, ctx.K), None, None, None


def _rows_of_copies(x: Tensor, order: Tensor, slot: Tensor, K: int) -> Tensor:
    return _spread(x, slot, x.dtype) if use_triton(x) and x.numel() else x[order // K]


def _sum_of_copies(rows: Tensor, slot: Tensor, K: int) -> Tensor:
    N = len(slot) // K
    if use_triton(rows) and rows.numel():
        return _combine(rows.contiguous(), slot, None, N, rows.dtype)
    compute = torch.promote_types(rows.dtype, torch.float32)
    return rows[slot].view(N, K, -1).sum(1, dtype=compute).to(rows.dtype)


def moe_mlp_over(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    ranks: Ranks,
    *,
    act: str = "silu",
    recompute: bool = False,
) -> Tensor:
    """`moe_mlp` with the experts spread over ranks: each token goes to the ranks of its experts, and back.

    The host waits once, for the numbers of tokens that ranks send to each other.

    Args:
        x: [N, C], the rank's own tokens.
        weights, experts: [N, K], of all X experts.
        gate_up_weight, down_weight: [X / R, 2 F, C] and [X / R, C, F], the rank's own experts: the first rank has the
            first ones. Their gradients are the sum over the tokens of all ranks.
        ranks: R.
        act, recompute: as in `moe_mlp`.

    Returns:
        [N, C] in the dtype of the weights.
    """
    N, K = experts.shape
    here = gate_up_weight.shape[0]
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
    counts = torch.zeros(here * ranks.size, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen)).view(ranks.size, here)
    each = [1] * ranks.size
    theirs = all_to_all(counts, each, each, ranks)  # [R, X / R], what each rank has for the own experts
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()

    rows = all_to_all(_Spread.apply(x.to(gate_up_weight.dtype), order, slot, K), sent, received, ranks)
    factors = all_to_all(_Spread.apply(weights.reshape(-1, 1), order, slot, 1), sent, received, ranks)
    own = torch.arange(here, device=x.device).repeat(ranks.size)
    own = own.repeat_interleave(theirs.reshape(-1), output_size=sum(received)).unsqueeze(1)
    if use_triton(rows):
        y = moe_mlp(rows, factors, own, gate_up_weight, down_weight, act=act, recompute=recompute)
    else:
        y = moe_mlp_reference(rows, factors, own, gate_up_weight, down_weight, act=act)
    return _Combine.apply(all_to_all(y, received, sent, ranks), order, slot, K)  # type: ignore[no-any-return]


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    top_k: int,
    attention_mask: Tensor | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """``X · Σ_e f_e · P_e`` over the rows of all layers together, as transformers computes it.

    f_e is how many of a row's K choices fall on expert e, P_e its probability (the softmax over all experts), both
    averaged over the rows; the gradient flows through P. Uniform routing gives K.

    Args:
        router_logits: a tensor [.., X] of each layer, or all of them as one.
        top_k: K.
        attention_mask: [B, T], 0 where a token is padding; each layer has B · T rows in this order.
        ranks: over whose rows together it is taken, each having its own. Its gradient is then such that the average of
            all ranks' gradients is that of the loss.

    Returns:
        [] fp32 (0 without a row), the same on all ranks.

    Raises:
        ValueError: no layer, or a mask that does not fit the rows.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    check(len(layers) > 0, "load_balancing_loss: router_logits must hold a tensor, got none.")
    logits = torch.cat([layer.flatten(0, -2) for layer in layers])
    rows, X = logits.shape
    compute = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=compute)
    _, experts = route(logits.detach(), top_k, normalize=False)
    if attention_mask is None:
        counted = probabilities.new_ones(rows)
    else:
        check(
            attention_mask.numel() > 0 and rows % attention_mask.numel() == 0,
            f"load_balancing_loss: the {rows} rows of router_logits must be a multiple of attention_mask's "
            f"{attention_mask.numel()}.",
        )
        counted = attention_mask.reshape(-1).to(logits.device, compute).repeat(rows // attention_mask.numel())
        probabilities = probabilities * counted.unsqueeze(-1)
    # Sums of ones, so that the atomic additions give the same in every order.
    picked = counted.new_zeros(X).scatter_add(
        0, experts.reshape(-1), counted.unsqueeze(-1).expand_as(experts).reshape(-1)
    )
    total, probability = counted.sum(), probabilities.sum(0)
    if ranks is not None:
        picked, total = sum_over(picked, ranks), sum_over(total, ranks)
        probability = sum_over(probability, ranks)
    total = total.clamp_min(1)
    return X * (picked / total * (probability / total)).sum()
