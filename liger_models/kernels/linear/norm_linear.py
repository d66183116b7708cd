"""A norm and the linear layer after it, with the residual addition in front; the normed activations are not saved.

Forward, with N = `rms_norm` or `layer_norm` (its cast order, then a cast to the weight's dtype)::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    y = N(h) @ Wᵀ + b                     in the weight's dtype
    y = y + (N(h) @ Aᵀ) @ Bᵀ              with a low-rank term (LoRA), rounded in between

Backward, with dh the gradient of the new residual stream::

    g = dy @ B,   dn = dy @ W + g @ A     one kernel then gives dx = N'(dn) + dh, the norm's weight gradients, and N(h)
    dW = dyᵀ @ N(h),   db = Σ_rows dy
    dA = gᵀ @ N(h),   dB = dyᵀ @ (N(h) @ Aᵀ)

Saved: h, the norm's fp32 statistics of each row (one number for RMSNorm, two for LayerNorm) and the weights. With a
frozen W and a low-rank term nothing is saved beyond that: the normed rows are recomputed for dA and dB too. A gradient
that is not needed costs nothing; the others have the dtype of their input. The backward is one op, so that a compiler
cannot see that it recomputes N(h) and save the forward's instead.

A frozen W may be quantised (`quantized_weight`). It is dequantised right before y and again right before dn, each time
into a buffer that is freed after the product, or multiplied in float8. What is saved is W as it is stored, which exists
anyway.

With ``ranks`` each rank has its own rows of W, and dn is summed over the ranks before N'. With ``ranks.sequence`` each
rank also has its own tokens. N(h) is then gathered before the products with W and dy, dn is reduce-scattered, and y is
of all tokens. Nothing more is saved. B has the rows of W, and dA is a rank's part of a sum, which the caller completes.

Source: https://arxiv.org/abs/1910.07467 (RMSNorm), https://arxiv.org/abs/1607.06450 (LayerNorm);
https://arxiv.org/abs/2205.05198 for tokens on ranks; https://arxiv.org/abs/2106.09685 for low-rank terms.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
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
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.quantized_weight import (
    SCHEMA,
    QuantizedWeight,
    Weight,
    dense,
    few_rows,
    input_product,
    product,
    weight_for_op,
    weight_from_op,
)
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.tiles import accumulate


def norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Weight,
    bias: Tensor | None = None,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """What `norm_linear` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    return linear(copy_to_region(norm.reference(residual), ranks), weight, bias, low_rank), residual


def rms_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """What `rms_norm_linear` computes, in plain torch."""
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)


def layer_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """What `layer_norm_linear` computes, in plain torch."""
    norm = FusedNorm(norm_weight, norm_bias, "layer_norm", eps)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)


def linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None) -> Tensor:
    """``x @ weightᵀ + bias`` and the low-rank term, in the weight's dtype, which the caller casts under autocast."""
    with _no_autocast(weight.device):
        x = x.to(weight.dtype)
        y = product(x, dense(weight), None if bias is None else bias.to(weight.dtype))
        return y if low_rank is None else y + product(product(x, low_rank[0], None), low_rank[1], None)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def linear_forward(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None) -> Tensor:
    """`linear` without a backward, inside an op: few rows have kernels of their own, which add the low-rank term."""
    if is_batch_invariant():
        return linear(x, weight, bias, low_rank)
    x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    rows = few_rows(x, weight, bias, low_rank=low_rank)
    if rows is not None:
        return rows[0]
    with _no_autocast(weight.device):
        y = product(x, weight, bias)
    if low_rank is not None:
        A, B = low_rank
        y.view(-1, y.shape[-1]).addmm_(linear_forward(x, A, None).view(-1, A.shape[0]), B.t())
    return y


def input_gradient(dy: Tensor, weight: Weight, low_rank: LowRank | None) -> tuple[Tensor, Tensor | None]:
    """``dy @ W + g @ A`` and ``g = dy @ B``, the gradient of the low-rank rows, for dy [N, O]."""
    dx = input_product(dy, weight)
    if low_rank is None:
        return dx, None
    g = dy @ low_rank[1]
    return dx.addmm_(g, low_rank[0]), g


def weight_gradient(total: Tensor | None, gradient: Tensor, x: Tensor, chunked: bool) -> Tensor:
    """``gradientᵀ @ x``. For a chunk it is in fp32 and added to the ``total`` of the chunks before it."""
    if not chunked:
        return gradient.t() @ x
    beta = int(total is not None)
    if total is None:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_empty(gradient.shape[1], x.shape[1], dtype=wide)
    accumulate([total], gradient, x, beta)
    return total


def low_rank_gradients(
    totals: Sequence[Tensor | None], dy: Tensor, g: Tensor | None, x: Tensor | None, low_rank: LowRank | None,
    needs: Sequence[bool], chunked: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dA and dB by `weight_gradient`, each None unless it is needed; x [N, C] are the layer's input rows."""
    if low_rank is None or x is None:
        return None, None
    dA = weight_gradient(totals[0], dy @ low_rank[1] if g is None else g, x, chunked) if needs[0] else None
    dB = weight_gradient(totals[1], dy, x @ low_rank[0].t(), chunked) if needs[1] else None
    return dA, dB


def low_rank_pair(A: Tensor | None, B: Tensor | None) -> LowRank | None:
    """The two tensors of an op as a pair; None without them."""
    return None if A is None or B is None else (A, B)


LIBRARY.define(
    "norm_linear(Tensor? x, Tensor residual, Tensor norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias,"
    " Tensor? A, Tensor? B, str norm, float eps, float weight_offset, bool scale_in_fp32, str group='', int ranks=1,"
    f" bool sequence=False, {SCHEMA.format('')}) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "norm_linear_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, Tensor norm_weight, Tensor? norm_bias,"
    " Tensor weight, Tensor? A, Tensor? B, str norm, float eps, float weight_offset, bool scale_in_fp32,"
    f" bool[7] needs, str group='', int ranks=1, bool sequence=False, {SCHEMA.format('')})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "norm_linear", "CompositeExplicitAutograd")
def _norm_linear(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, A: Tensor | None, B: Tensor | None, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    group, matrix = ranks_from_op(*rest[:3]), _weight(weight, rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    normed, h, statistics = norm.forward(x, residual)
    if group is None or not group.sequence_parallel:
        y = linear_forward(normed, matrix, bias, low_rank_pair(A, B))
    else:
        rows = gather_rows(normed.reshape(-1, normed.shape[-1]), group)
        y = rows_in_order(linear_forward(rows, matrix, bias, low_rank_pair(A, B)), residual.shape[:-1], group)
    # An op's output may not be its input: without x the second output is empty.
    return y, residual.new_empty(0) if x is None else h, statistics


@torch.library.impl(LIBRARY, "norm_linear_backward", "CompositeExplicitAutograd")
def _norm_linear_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
    weight: Tensor, A: Tensor | None, B: Tensor | None, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    group, low_rank, matrix = ranks_from_op(*rest[:3]), low_rank_pair(A, B), _weight(weight, rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    need_stream, need_norm_weight, need_norm_bias, need_weight, need_bias, *need_low_rank = needs
    need_rows = need_weight or any(need_low_rank)
    dy = rows_by_rank(dy, group)
    dx = d_norm_weight = d_norm_bias = g = rows = None
    if need_stream or need_norm_weight or need_norm_bias:
        dn, g = input_gradient(dy, matrix, low_rank)
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            sum_rows(dn, group).view(h.shape), dh, h, statistics,
            need_weight=need_norm_weight, need_bias=need_norm_bias, rows_dtype=matrix.dtype if need_rows else None,
        )  # fmt: skip
        del dn
    elif need_rows:
        rows = norm.again(h, statistics, matrix.dtype)
    rows = None if rows is None else gather_rows(rows.view(-1, h.shape[-1]), group)
    d_weight = dy.t() @ rows if need_weight and rows is not None else None
    low_rank_grads = low_rank_gradients((None, None), dy, g, rows, low_rank, need_low_rank)
    d_bias = dy.sum(0) if need_bias else None
    grads = dx if need_stream else None, d_norm_weight, d_norm_bias, d_weight, d_bias, *low_rank_grads
    return given_or_empty(grads, (h, norm_weight, norm_weight, matrix, matrix, matrix, matrix))


def _weight(weight: Tensor, rest: Sequence[Any]) -> Weight:
    """The op's weight; ``rest`` are its last arguments, from the group on."""
    return weight_from_op(weight, rest[3:])


def given_or_empty(grads: Sequence[Tensor | None], likes: Sequence[Weight]) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: it must return tensors, so one that is not needed is empty."""
    return tuple(like.new_empty(0) if grad is None else grad for grad, like in zip(grads, likes, strict=True))


@torch.library.register_fake("liger_models::norm_linear", lib=LIBRARY)
def _norm_linear_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, A: Tensor | None, B: Tensor | None, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    norm, matrix = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32), _weight(weight, rest)
    y = matrix.new_empty(*gathered_shape(residual.shape[:-1], ranks_from_op(*rest[:3])), matrix.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    return y, h, residual.new_empty(norm.statistics_shape(residual.shape[:-1]), dtype=torch.float32)


@torch.library.register_fake("liger_models::norm_linear_backward", lib=LIBRARY)
def _norm_linear_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
    weight: Tensor, A: Tensor | None, B: Tensor | None, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    matrix = _weight(weight, rest)
    bias = matrix.new_empty(matrix.shape[0])
    likes = (h, norm_weight, norm_weight, matrix, bias, *(matrix if each is None else each for each in (A, B)))
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, norm_bias, weight, bias, A, B, *constants = inputs
    ctx.constants, ctx.ranks, ctx.layout = constants[:4], constants[4:7], constants[11:]
    _, h, statistics = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = residual.dtype if x is None else x.dtype
    ctx.bias_dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h, statistics) if frozen_stream else (statistics,)))
    stream = residual if x is None else h
    ctx.save_for_backward(stream, statistics, norm_weight, norm_bias, weight, A, B, *constants[7:11])


def _backward(ctx, dy, dh, _dstatistics):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:8]
    if dy is None:  # only the residual stream has a gradient
        return dh.to(ctx.x_dtype) if need_x and dh is not None else None, dh, *(None,) * 19
    saved, needs = ctx.saved_tensors, [need_x or need_residual, *need_weights]
    dx, *grads = torch.ops.liger_models.norm_linear_backward(
        dy, dh, *saved[:7], *ctx.constants, needs, *ctx.ranks, *saved[7:], *ctx.layout
    )
    d_norm_weight, d_norm_bias, d_weight, d_bias, dA, dB = (
        grad if need else None for grad, need in zip(grads, need_weights, strict=True)
    )
    norm_bias_dtype, bias_dtype = ctx.bias_dtypes
    return (
        dx.to(ctx.x_dtype) if need_x else None,
        dx if need_residual else None,
        d_norm_weight,
        None if d_norm_bias is None else d_norm_bias.to(norm_bias_dtype),
        d_weight,
        None if d_bias is None else d_bias.to(bias_dtype),
        dA,
        dB,
        *(None,) * 13,
    )


register_autograd("norm_linear", _backward, _setup)


def check_linear(op: str, name: str, weight: Weight, bias: Tensor | None, in_features: int) -> None:
    """Raise unless weight is [out, in_features] and bias, if any, [out]."""
    check_floating(op, **{name: weight if isinstance(weight, Tensor) else None, f"{name}'s bias": bias})
    shape = weight.shape
    if len(shape) == 2 and shape[1] == in_features and (bias is None or bias.shape == shape[:1]):
        return  # the usual case, in which no message has to be made
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(f"{op}: {name} must be [out, {in_features}], got {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: {name}'s bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}."
        )


def check_low_rank(op: str, name: str, low_rank: LowRank | None, weight: Weight) -> None:
    """Raise unless A is [R, in] and B [out, R], both in the dtype of the weight [out, in]."""
    if low_rank is None:
        return
    A, B = low_rank
    if not (A.dim() == B.dim() == 2 and (B.shape[0], A.shape[1]) == weight.shape and A.shape[0] == B.shape[1]):
        raise ValueError(
            f"{op}: {name} must be A [R, {weight.shape[1]}] and B [{weight.shape[0]}, R], got {list(A.shape)} and "
            f"{list(B.shape)}."
        )
    if not A.dtype == B.dtype == weight.dtype:
        raise TypeError(f"{op}: {name} must have the weight's dtype, {weight.dtype}, got {A.dtype} and {B.dtype}.")


def norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Weight,
    bias: Tensor | None = None,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm_linear` or `layer_norm_linear`, by the kind of ``norm``, which must have a weight."""
    op = f"{norm.kind}_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    check_low_rank(op, "low_rank", low_rank, weight)
    if not use_triton(residual):
        return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)
    (A, B), quantized = low_rank or (None, None), ()
    if isinstance(weight, QuantizedWeight):
        weight, quantized = weight_for_op(weight)
    y, h, _ = torch.ops.liger_models.norm_linear(
        x, residual, norm.weight, norm.bias, weight, bias, A, B, *norm.constants, *for_op(ranks), *quantized
    )
    return y, residual if x is None else h


def rms_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = rms_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C].
        weight: [O, C], a tensor or a frozen `QuantizedWeight`; its dtype is that of y and may differ from the stream's.
            Autocast does not change it.
        bias: [O].
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        ranks: tensor parallel ranks, each with its own rows of weight and bias; None for one rank. With
            ``ranks.sequence`` x and residual hold the rank's own tokens, y is of all tokens, and the gradients of the
            norm's weights are the own tokens' share.
        low_rank: ``(A [R, C], B [O, R])`` in the weight's dtype; y gains ``(rms_norm(residual) @ Aᵀ) @ Bᵀ``. With ranks
            A is the same on all of them, B has the rank's own rows, and the gradient of A is the rank's share of a sum.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weight, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: a tensor that is not floating-point, or a low-rank term of another dtype than the weight.
    """
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear(x, residual, norm, weight, bias, ranks, low_rank)


def layer_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = layer_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        norm_bias: [C], or None for a LayerNorm without bias.
        eps: as in `layer_norm`.
        Others: as in `rms_norm_linear`.

    Returns:
        As `rms_norm_linear`.

    Raises:
        ValueError: the shapes do not fit together, or rows are wider than 65536.
        TypeError: a tensor that is not floating-point, or a low-rank term of another dtype than the weight.
    """
    return norm_linear(x, residual, FusedNorm(norm_weight, norm_bias, "layer_norm", eps), weight, bias, ranks, low_rank)
