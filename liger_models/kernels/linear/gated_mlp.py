"""The gated MLP after its norm: residual addition, norm, gate and up projection, gated activation, down projection.

Forward, with N = `rms_norm` or `layer_norm` (without a norm weight, N(h) = h), cast to the weights' dtype, and
A = `gated_act`::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    u = N(h) @ Wguᵀ + bgu                 gate and up interleaved
    y = A(u) @ Wdᵀ + bd

Either product may have a low-rank term (LoRA) as in `norm_linear`, with matrices and gradients of its own.

Backward, with dh the gradient of the new residual stream, in this order::

    dp = dy @ Wd                          one kernel then gives du = A'(dp), and the product p = A(u) in place of dp
    dWd = dyᵀ @ p,   dbd = Σ_rows dy      p is freed
    dn = du @ Wgu                         one kernel then gives dx = N'(dn) + dh, the norm's weight gradients, and N(h)
    dWgu = duᵀ @ N(h),   dbgu = Σ_rows du

Saved: h, the norm's fp32 statistics of each row, the weights, and u. With ``recompute`` u is not saved: the backward
recomputes it from h, bit for bit, and du takes its place. The normed activations and the product are never saved.
Frozen weights may be quantised, as in `norm_linear`: each is dequantised right before each of its products. A
gradient that is not needed costs nothing; the others have the dtype of their input. The backward is one op, so that a
compiler cannot see what it recomputes and save the forward's instead.

Where u is not saved, many rows go through in chunks, forward and backward: u, p, dn and the normed rows exist for one
chunk at a time. The gradients of the weights are then summed over the chunks in fp32 and rounded once.

With ``ranks`` each rank has its own gates and ups and the columns of Wd for them. y is then a rank's part of a sum, and
dn is summed over the ranks before N'. With ``ranks.sequence`` each rank also has its own tokens. N(h) is then gathered
before its products with Wgu and du, dn is reduce-scattered, y is of all tokens, and h of the own ones.

Source: https://arxiv.org/abs/2002.05202; recomputation as in https://arxiv.org/abs/2205.05198.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.distributed.collectives import (
    Group,
    copy_to_region,
    for_op,
    gather_rows,
    gathered_shape,
    ranks_from_op,
    rows_by_rank,
    rows_in_order,
    sum_rows,
)
from liger_models.kernels.activation.gated_act import (
    check_act,
    gated_act_backward,
    gated_act_forward,
    gated_act_reference,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.quantized_weight import (
    SCHEMA,
    QuantizedWeight,
    Weight,
    few_rows,
    weight_for_op,
    weight_from_op,
)
from liger_models.kernels.linear.norm_linear import (
    check_linear,
    check_low_rank,
    given_or_empty,
    input_gradient,
    linear,
    linear_forward,
    low_rank_gradients,
    low_rank_pair,
    weight_gradient,
)
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.norm.fused_norm import FusedNorm

WORKSPACE_MIB = 1024
"""Rows whose u fits into this workspace are one chunk: 18,724 rows of Llama-3-8B in bf16. The fp32 sums of several
chunks take 0.7 GiB there, so a smaller workspace would save little."""

MIN_CHUNK = 16384
"""Least number of rows in a chunk, whatever u takes. By arithmetic for an H200, reading and writing the sums costs a
chunk of this size 1.5% of its backward, at any C and F, and twice that at half of it."""


def _chunk_rows(N: int, row_bytes: int) -> int:
    """Rows per chunk, evened out over the chunks; ``row_bytes`` is the size of a row of u."""
    limit = max(WORKSPACE_MIB * 2**20 // max(row_bytes, 1), MIN_CHUNK)
    return max(-(-N // max(-(-N // limit), 1)), 1)


def gated_mlp_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Weight,
    down_weight: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    ranks: Group | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """What `gated_mlp` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    normed = FusedNorm(norm_weight, norm_bias, norm, eps, weight_offset, scale_in_fp32).reference(residual)
    gate_up = linear(copy_to_region(normed, ranks), gate_up_weight, gate_up_bias, gate_up_low_rank)
    return linear(gated_act_reference(gate_up, act), down_weight, down_bias, down_low_rank), residual


_QUANTIZED = f"{SCHEMA.format('gate_up_')}, {SCHEMA.format('down_')}"
LIBRARY.define(
    "gated_mlp(Tensor? x, Tensor residual, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_up_weight,"
    " Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_A, Tensor? gate_up_B,"
    " Tensor? down_A, Tensor? down_B, str norm, float eps, float weight_offset, bool scale_in_fp32, str act,"
    f" bool recompute, bool result, str group='', int ranks=1, bool sequence=False, {_QUANTIZED})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "gated_mlp_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, Tensor? gate_up, Tensor? norm_weight,"
    " Tensor? norm_bias, Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias, Tensor? gate_up_A,"
    " Tensor? gate_up_B, Tensor? down_A, Tensor? down_B, str norm, float eps, float weight_offset, bool scale_in_fp32,"
    f" str act, bool[11] needs, str group='', int ranks=1, bool sequence=False, {_QUANTIZED})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "gated_mlp", "CompositeExplicitAutograd")
def _gated_mlp(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor,
    down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_A: Tensor | None,
    gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool, act: str, recompute: bool, result: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    group, (gate_up_matrix, down_matrix) = ranks_from_op(*rest[:3]), _weights(gate_up_weight, down_weight, rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    low_ranks = low_rank_pair(gate_up_A, gate_up_B), low_rank_pair(down_A, down_B)
    constants = norm, gate_up_matrix, down_matrix, gate_up_bias, down_bias, low_ranks, act, recompute, result, group
    C, shape = residual.shape[-1], residual.shape[:-1]
    N = shape.numel()
    x = None if x is None else x.reshape(-1, C)
    residual = residual.reshape(-1, C)
    rows, copies = _split_rows(N, gate_up_matrix, group, recompute)
    if rows >= N:
        y, h, statistics, gate_up = _forward_rows(x, residual, *constants)
    else:
        parts = down_matrix.new_empty(copies, N, down_matrix.shape[0])
        h = residual.new_empty(0 if x is None else residual.shape)
        statistics = residual.new_empty(norm.statistics_shape((N,)), dtype=torch.float32)
        for start in range(0, N, rows):
            part = slice(start, start + rows)
            y, h[part], statistics[part], gate_up = _forward_rows(
                None if x is None else x[part], residual[part], *constants
            )
            if result:
                parts[:, part] = y.unflatten(0, (copies, -1))
        y = parts.flatten(0, 1)
    h = h if x is None else h.view(*shape, C)
    statistics = statistics.view(norm.statistics_shape(shape))
    if not recompute:  # gate and up hold all ranks' tokens, the first rank's first
        gate_up = gate_up.view(*gathered_shape(shape, group), gate_up.shape[-1])
    return rows_in_order(y, shape, group), h, statistics, gate_up


def _weights(gate_up_weight: Tensor, down_weight: Tensor, rest: Sequence[Any]) -> tuple[Weight, Weight]:
    """The op's weights; ``rest`` are its last arguments, from the group on."""
    return weight_from_op(gate_up_weight, rest[3:9]), weight_from_op(down_weight, rest[9:])


def _split_rows(N: int, gate_up_weight: Weight, group: Group | None, recompute: bool) -> tuple[int, int]:
    """Own rows per chunk, and the number of ranks whose rows u holds."""
    copies = group.size if group is not None and group.sequence_parallel else 1
    row_bytes = gate_up_weight.shape[0] * gate_up_weight.itemsize
    return -(-_chunk_rows(N * copies, row_bytes) // copies) if recompute else N, copies


def _forward_rows(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, gate_up_weight: Weight, down_weight: Weight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, low_ranks: tuple[LowRank | None, LowRank | None], act: str,
    recompute: bool, result: bool, group: Group | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op's outputs for rows [N, C]: all of them, or a chunk."""
    normed, h, statistics = norm.forward(x, residual)
    # An op's output may not be its input: without x the second output is empty.
    h = residual.new_empty(0) if x is None else h
    if recompute and not result:
        y = down_weight.new_empty(*gathered_shape(normed.shape[:-1], group), down_weight.shape[0])
        return y, h, statistics, gate_up_weight.new_empty(0)
    rows = gather_rows(normed, group).to(gate_up_weight.dtype)
    gate_up_low_rank, down_low_rank = low_ranks
    both = few_rows(rows, gate_up_weight, gate_up_bias, act, gate_up_low_rank)
    if both is not None:
        gate_up, product = both
    else:
        gate_up = linear_forward(rows, gate_up_weight, gate_up_bias, gate_up_low_rank)
        del normed, rows
        product = gated_act_forward(gate_up, act)
    if recompute:
        gate_up = gate_up.new_empty(0)
    return linear_forward(product, down_weight, down_bias, down_low_rank), h, statistics, gate_up


@torch.library.impl(LIBRARY, "gated_mlp_backward", "CompositeExplicitAutograd")
def _gated_mlp_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    gate_up_A: Tensor | None, gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None, kind: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, act: str, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    group, matrices = ranks_from_op(*rest[:3]), _weights(gate_up_weight, down_weight, rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    low_ranks = low_rank_pair(gate_up_A, gate_up_B), low_rank_pair(down_A, down_B)
    constants = norm, *matrices, gate_up_bias, low_ranks, act, needs, group
    likes = _likes(h, norm_weight, *matrices)
    shape, C = h.shape, h.shape[-1]
    N = shape[:-1].numel()
    dy, h, statistics = rows_by_rank(dy, group), h.reshape(-1, C), statistics.reshape(norm.statistics_shape((N,)))
    dh = None if dh is None else dh.reshape(-1, C)
    rows, copies = _split_rows(N, matrices[0], group, gate_up is None)
    if rows >= N:
        gate_up = None if gate_up is None else gate_up.reshape(-1, gate_up.shape[-1])
        dx, *grads = _backward_rows(dy, dh, h, statistics, gate_up, *constants)
    else:
        dx, grads = h.new_empty(N, C) if needs[0] else None, [None] * 10
        for start in range(0, N, rows):
            part = slice(start, start + rows)
            dy_part = dy.unflatten(0, (copies, -1))[:, part].reshape(-1, dy.shape[-1])
            piece, *grads = _backward_rows(
                dy_part, None if dh is None else dh[part], h[part], statistics[part], None, *constants, totals=grads
            )
            if dx is not None and piece is not None:
                dx[part] = piece
            del piece
        grads = [None if grad is None else grad.to(like.dtype) for grad, like in zip(grads, likes[1:], strict=True)]
    return given_or_empty([None if dx is None else dx.view(shape), *grads], likes)


def _backward_rows(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, norm: FusedNorm,
    gate_up_weight: Weight, down_weight: Weight, gate_up_bias: Tensor | None,
    low_ranks: tuple[LowRank | None, LowRank | None], act: str, needs: list[bool], group: Group | None,
    totals: list[Tensor | None] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """dx and the weights' gradients. Those of a chunk are in fp32 and added to the ``totals`` of the chunks before it.

    dy [N, O], dh, h [N, C], gate_up [N, 2 F]; dy and gate_up hold all ranks' rows where each rank has its own tokens.
    """
    need_stream, need_norm_weight, need_norm_bias, *need_linear = needs
    need_gate_up, need_down, need_gate_up_bias, need_down_bias, *need_pairs = need_linear
    need_dn = need_stream or need_norm_weight or need_norm_bias
    need_rows, need_product = need_gate_up or any(need_pairs[:2]), need_down or any(need_pairs[2:])
    need_du = need_dn or need_rows or need_gate_up_bias
    gate_up_low_rank, down_low_rank = low_ranks
    dtype, chunked = gate_up_weight.dtype, totals is not None
    wide = torch.promote_types(dtype, torch.float32) if chunked else None
    before = totals or [None] * 10
    dx = d_norm_weight = d_norm_bias = d_gate_up_weight = d_down_weight = d_gate_up = product = rows = g = None
    low_rank_grads: list[Tensor | None] = [None] * 4
    own = gate_up is None
    if gate_up is None and (need_du or need_product):
        gate_up = linear_forward(
            gather_rows(norm.again(h, statistics, dtype), group), gate_up_weight, gate_up_bias, gate_up_low_rank
        )
    if gate_up is not None and need_du:
        d_product, g = input_gradient(dy, down_weight, down_low_rank)
        d_gate_up, product = gated_act_backward(
            d_product, gate_up, act, need_product, overwrite_dy=True, overwrite_gate_up=own
        )
        del d_product
    elif gate_up is not None and need_product:
        product = gated_act_forward(gate_up, act)
    del gate_up
    if product is not None and need_down:
        d_down_weight = weight_gradient(before[3], dy, product, chunked)
    low_rank_grads[2:] = low_rank_gradients(before[8:], dy, g, product, down_low_rank, need_pairs[2:], chunked)
    del product
    g = None
    if d_gate_up is not None and need_dn:
        dn, g = input_gradient(d_gate_up, gate_up_weight, gate_up_low_rank)
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            sum_rows(dn, group), dh, h, statistics, need_weight=need_norm_weight, need_bias=need_norm_bias,
            rows_dtype=dtype if need_rows else None, sum_dtype=wide,
        )  # fmt: skip
        del dn
    if d_gate_up is not None and need_rows:
        rows = gather_rows(norm.again(h, statistics, dtype) if rows is None else rows, group)
        if need_gate_up:
            d_gate_up_weight = weight_gradient(before[2], d_gate_up, rows, chunked)
        low_rank_grads[:2] = low_rank_gradients(
            before[6:], d_gate_up, g, rows, gate_up_low_rank, need_pairs[:2], chunked
        )
    d_gate_up_bias = d_gate_up.sum(0, dtype=wide) if d_gate_up is not None and need_gate_up_bias else None
    d_down_bias = dy.sum(0, dtype=wide) if need_down_bias else None
    sums = [d_norm_weight, d_norm_bias, d_gate_up_weight, d_down_weight, d_gate_up_bias, d_down_bias, *low_rank_grads]
    for i in (0, 1, 4, 5):
        total, share = before[i], sums[i]
        if total is not None and share is not None:
            sums[i] = total + share
    return [dx if need_stream else None, *sums]


def _likes(h: Tensor, norm_weight: Tensor | None, gate_up_weight: Weight, down_weight: Weight) -> list[Weight]:
    """A tensor of each gradient's dtype; a bias's gradient has its weight's."""
    norm = h if norm_weight is None else norm_weight
    pairs: list[Weight] = [gate_up_weight, gate_up_weight, down_weight, down_weight]
    return [h, norm, norm, gate_up_weight, down_weight, gate_up_weight, down_weight, *pairs]


@torch.library.register_fake("liger_models::gated_mlp", lib=LIBRARY)
def _gated_mlp_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor,
    down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_A: Tensor | None,
    gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool, act: str, recompute: bool, result: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    rows, (gate_up, down) = (
        gathered_shape(residual.shape[:-1], ranks_from_op(*rest[:3])),
        _weights(gate_up_weight, down_weight, rest),
    )
    y = down.new_empty(*rows, down.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    statistics = residual.new_empty(norm.statistics_shape(residual.shape[:-1]), dtype=torch.float32)
    return y, h, statistics, gate_up.new_empty(0 if recompute else (*rows, gate_up.shape[0]))


@torch.library.register_fake("liger_models::gated_mlp_backward", lib=LIBRARY)
def _gated_mlp_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    gate_up_A: Tensor | None, gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None, kind: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, act: str, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    matrices = _weights(gate_up_weight, down_weight, rest)
    likes = _likes(h, norm_weight, *(each.new_empty(each.shape[0]) for each in matrices))
    likes[3:5] = matrices
    pairs = gate_up_A, gate_up_B, down_A, down_B
    likes[7:] = [like if each is None else each for like, each in zip(likes[7:], pairs, strict=True)]
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, norm_bias, gate_up_weight, down_weight, gate_up_bias, down_bias, *rest = inputs
    low_ranks, constants = rest[:4], rest[4:]
    ctx.constants, recompute, ctx.ranks = constants[:5], constants[5], constants[7:10]
    ctx.layouts = constants[14:16], constants[20:]
    _, h, statistics, gate_up = output
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, norm_bias, gate_up_bias, down_bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h,) if frozen_stream else ()), statistics, gate_up)
    ctx.save_for_backward(
        residual if x is None else h, statistics, None if recompute else gate_up, norm_weight, norm_bias,
        gate_up_weight, down_weight, gate_up_bias if recompute else None, *low_ranks,
        *constants[10:14], *constants[16:20],
    )  # fmt: skip


def _backward(ctx, dy, dh, _dstatistics, _dgate_up):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:12]
    x_dtype, norm_bias_dtype, gate_up_bias_dtype, down_bias_dtype = ctx.dtypes
    if dy is None:  # only the residual stream has a gradient
        return dh.to(x_dtype) if need_x and dh is not None else None, dh, *(None,) * 32
    needs = [need_x or need_residual, *need_weights]
    saved, (of_gate_up, of_down) = ctx.saved_tensors, ctx.layouts
    dx, *grads = torch.ops.liger_models.gated_mlp_backward(
        dy, dh, *saved[:12], *ctx.constants, needs, *ctx.ranks, *saved[12:16], *of_gate_up, *saved[16:], *of_down
    )
    d_norm, d_norm_bias, d_gate_up, d_down, d_gate_up_bias, d_down_bias, *d_low_ranks = (
        grad if need else None for grad, need in zip(grads, need_weights, strict=True)
    )
    return (
        dx.to(x_dtype) if need_x else None,
        dx if need_residual else None,
        d_norm,
        None if d_norm_bias is None else d_norm_bias.to(norm_bias_dtype),
        d_gate_up,
        d_down,
        None if d_gate_up_bias is None else d_gate_up_bias.to(gate_up_bias_dtype),
        None if d_down_bias is None else d_down_bias.to(down_bias_dtype),
        *d_low_ranks,
        *(None,) * 22,
    )


register_autograd("gated_mlp", _backward, _setup)


def gated_mlp(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Weight,
    down_weight: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    recompute: bool = False,
    result: bool = True,
    ranks: Group | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = gated_act(norm(residual) @ Wguᵀ + bgu) @ Wdᵀ + bd``.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C], or None for no norm.
        gate_up_weight: [2 F, C], row 2f is gate f and row 2f + 1 is up f; a tensor or a frozen `QuantizedWeight`.
        down_weight: [O, F] in the dtype of gate_up_weight, which is that of y and may differ from the stream's.
            Autocast does not change it.
        gate_up_bias: [2 F].
        down_bias: [O].
        act: "silu", "gelu_tanh" or "gelu".
        eps, weight_offset, scale_in_fp32: as in `rms_norm`; a LayerNorm uses eps alone.
        norm: "rms_norm" or "layer_norm".
        norm_bias: [C], of a LayerNorm; None for none.
        recompute: gate and up are not saved but recomputed in the backward, for one more matrix product. The gradients
            are the same. (The reference backend ignores it.)
        result: False, with ``recompute``, for a y of which only the gradient is used: it is left uninitialised. (The
            reference backend ignores it.)
        ranks: tensor parallel ranks, each with its own pairs of gate and up; None for one rank. y is then the rank's
            part of a sum, so down_bias must be None and is added to the sum. With ``ranks.sequence`` x and residual
            hold the rank's own tokens, y is of all tokens, and the gradients of the norm's weights are the own tokens'
            share.
        gate_up_low_rank: ``(A [R, C], B [2 F, R])`` in the weights' dtype; gate and up gain ``(norm(residual) @ Aᵀ) @
            Bᵀ``.
        down_low_rank: ``(A [R, F], B [O, R])``, in the same way for the down projection. With ranks, B of gate and up
            and A of down have the rank's own rows and columns; the others are the same on all ranks, and their
            gradients are the rank's share of a sum.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weights, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes do not fit together, or an unknown activation or norm.
        TypeError: a tensor that is not floating-point, or weights or low-rank terms of several dtypes.
    """
    check_act("gated_mlp", act)
    fused_norm = FusedNorm(norm_weight, norm_bias, norm, eps, weight_offset, scale_in_fp32)
    fused_norm.check("gated_mlp", x, residual)
    check_linear("gated_mlp", "gate_up_weight", gate_up_weight, gate_up_bias, residual.shape[-1])
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gated_mlp: gate_up_weight holds pairs of rows, got {list(gate_up_weight.shape)}.")
    check_linear("gated_mlp", "down_weight", down_weight, down_bias, gate_up_weight.shape[0] // 2)
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "gated_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    check_low_rank("gated_mlp", "gate_up_low_rank", gate_up_low_rank, gate_up_weight)
    check_low_rank("gated_mlp", "down_low_rank", down_low_rank, down_weight)
    if ranks is not None and down_bias is not None:
        raise ValueError("gated_mlp: down_bias must be None with ranks. Add it to their sum.")
    if not use_triton(residual):
        return gated_mlp_reference(
            x, residual, norm_weight, gate_up_weight, down_weight, gate_up_bias, down_bias, act=act, eps=eps,
            weight_offset=weight_offset, scale_in_fp32=scale_in_fp32, norm=norm, norm_bias=norm_bias, ranks=ranks,
            gate_up_low_rank=gate_up_low_rank, down_low_rank=down_low_rank,
        )  # fmt: skip
    # Without gradients nothing is saved, and gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    quantized: tuple[Any, ...] = ()
    if isinstance(gate_up_weight, QuantizedWeight) or isinstance(down_weight, QuantizedWeight):
        (gate_up_weight, of_gate_up), (down_weight, of_down) = map(weight_for_op, (gate_up_weight, down_weight))
        quantized = *of_gate_up, *of_down
    y, h, _, _ = torch.ops.liger_models.gated_mlp(
        x, residual, norm_weight, norm_bias, gate_up_weight, down_weight, gate_up_bias, down_bias,
        *(gate_up_low_rank or (None, None)), *(down_low_rank or (None, None)), *fused_norm.constants, act, recompute,
        result, *for_op(ranks), *quantized,
    )  # fmt: skip
    return y, residual if x is None else h
