"""A norm and the linear layer after it, with the residual addition in front; the normed activations are not saved.

Forward, with N = `rms_norm` or `layer_norm` (its cast order, then a cast to the weight's dtype)::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    y = N(h) @ Wᵀ + b                     in the weight's dtype

Backward, with dh the gradient of the new residual stream::

    dn = dy @ W                           one kernel then gives dx = N'(dn) + dh, the norm's weight gradients, and N(h)
    dW = dyᵀ @ N(h),   db = Σ_rows dy

Saved: h, the norm's fp32 statistics of each row (one number for RMSNorm, two for LayerNorm) and the weights. A gradient
that is not needed costs nothing; the others have the dtype of their input. The backward is one op, so that a compiler
cannot see that it recomputes N(h) and save the forward's instead.

With ``ranks`` each rank has its own rows of W, and dn is summed over the ranks before N'. With ``ranks.sequence`` each
rank also has its own tokens. N(h) is then gathered before the products with W and dy, dn is reduce-scattered, and y is
of all tokens. Nothing more is saved.

Source: https://arxiv.org/abs/1910.07467 (RMSNorm), https://arxiv.org/abs/1607.06450 (LayerNorm);
https://arxiv.org/abs/2205.05198 for tokens on ranks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check, check_floating
from .collectives import (
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
from .dispatch import LIBRARY, use_triton
from .fused_norm import FusedNorm
from .row_linear import row_linear_forward, takes_row


def norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Tensor,
    bias: Tensor | None = None,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """What `norm_linear` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    return linear(copy_to_region(norm.reference(residual), ranks), weight, bias), residual


def rms_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """What `rms_norm_linear` computes, in plain torch."""
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks)


def layer_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """What `layer_norm_linear` computes, in plain torch."""
    norm = FusedNorm(norm_weight, norm_bias, "layer_norm", eps)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weightᵀ + bias`` in the weight's dtype, also under autocast, for which the caller casts the weight."""
    device = weight.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` without a backward, inside an op: a single row has a kernel of its own."""
    x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    return row_linear_forward(x, weight, bias)[0] if takes_row(x, weight, bias) else linear(x, weight, bias)


LIBRARY.define(
    "norm_linear(Tensor? x, Tensor residual, Tensor norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias,"
    " str norm, float eps, float weight_offset, bool scale_in_fp32, str group='', int ranks=1, bool sequence=False)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "norm_linear_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, Tensor norm_weight, Tensor? norm_bias,"
    " Tensor weight, str norm, float eps, float weight_offset, bool scale_in_fp32, bool[5] needs, str group='',"
    " int ranks=1, bool sequence=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "norm_linear", "CompositeExplicitAutograd")
def _norm_linear(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    group = ranks_from_op(*rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    normed, h, statistics = norm.forward(x, residual)
    if group is None or not group.sequence_parallel:
        y = linear_forward(normed, weight, bias)
    else:
        rows = gather_rows(normed.reshape(-1, normed.shape[-1]), group)
        y = rows_in_order(linear(rows, weight, bias), residual.shape[:-1], group)
    # An op's output may not be its input: without x the second output is empty.
    return y, residual.new_empty(0) if x is None else h, statistics


@torch.library.impl(LIBRARY, "norm_linear_backward", "CompositeExplicitAutograd")
def _norm_linear_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
    weight: Tensor, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    group = ranks_from_op(*rest)
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    need_stream, need_norm_weight, need_norm_bias, need_weight, need_bias = needs
    dy = rows_by_rank(dy, group)
    dx = d_norm_weight = d_norm_bias = normed = None
    if need_stream or need_norm_weight or need_norm_bias:
        dx, d_norm_weight, d_norm_bias, normed = norm.backward(
            sum_rows(dy @ weight, group).view(h.shape), dh, h, statistics,
            need_weight=need_norm_weight, need_bias=need_norm_bias, rows_dtype=weight.dtype if need_weight else None,
        )  # fmt: skip
    elif need_weight:
        normed = norm.again(h, statistics, weight.dtype)
    d_weight = None if normed is None else dy.t() @ gather_rows(normed.view(-1, h.shape[-1]), group)
    grads = dx if need_stream else None, d_norm_weight, d_norm_bias, d_weight, dy.sum(0) if need_bias else None
    return given_or_empty(grads, (h, norm_weight, norm_weight, weight, weight))


def given_or_empty(grads: Sequence[Tensor | None], likes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: it must return tensors, so one that is not needed is empty."""
    return tuple(like.new_empty(0) if grad is None else grad for grad, like in zip(grads, likes, strict=True))


@torch.library.register_fake("liger_models::norm_linear", lib=LIBRARY)
def _norm_linear_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    y = weight.new_empty(*gathered_shape(residual.shape[:-1], ranks_from_op(*rest)), weight.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    return y, h, residual.new_empty(norm.statistics_shape(residual.shape[:-1]), dtype=torch.float32)


@torch.library.register_fake("liger_models::norm_linear_backward", lib=LIBRARY)
def _norm_linear_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
    weight: Tensor, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = (h, norm_weight, norm_weight, weight, weight[:, 0])
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, norm_bias, weight, bias, *constants = inputs
    ctx.constants, ctx.ranks = constants[:4], constants[4:]
    _, h, statistics = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = residual.dtype if x is None else x.dtype
    ctx.bias_dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h, statistics) if frozen_stream else (statistics,)))
    ctx.save_for_backward(residual if x is None else h, statistics, norm_weight, norm_bias, weight)


def _backward(ctx, dy, dh, _dstatistics):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:6]
    if dy is None:  # only the residual stream has a gradient
        return dh.to(ctx.x_dtype) if need_x and dh is not None else None, dh, *(None,) * 11
    dx, *grads = torch.ops.liger_models.norm_linear_backward(
        dy, dh, *ctx.saved_tensors, *ctx.constants, [need_x or need_residual, *need_weights], *ctx.ranks
    )
    d_norm_weight, d_norm_bias, d_weight, d_bias = (
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
        *(None,) * 7,
    )


torch.library.register_autograd("liger_models::norm_linear", _backward, setup_context=_setup, lib=LIBRARY)


def check_linear(op: str, name: str, weight: Tensor, bias: Tensor | None, in_features: int) -> None:
    """Raise unless weight is [out, in_features] and bias, if any, [out]."""
    check_floating(op, **{name: weight, f"{name}'s bias": bias})
    shape = weight.shape
    if len(shape) == 2 and shape[1] == in_features and (bias is None or bias.shape == shape[:1]):
        return  # the usual case, in which no message has to be made
    check(
        weight.dim() == 2 and weight.shape[1] == in_features,
        f"{op}: {name} must be [out, {in_features}], got {list(weight.shape)}.",
    )
    check(
        bias is None or bias.shape == weight.shape[:1],
        f"{op}: {name}'s bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}.",
    )


def norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Tensor,
    bias: Tensor | None = None,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm_linear` or `layer_norm_linear`, by the kind of ``norm``, which must have a weight."""
    op = f"{norm.kind}_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    if not use_triton(residual):
        return norm_linear_reference(x, residual, norm, weight, bias, ranks)
    y, h, _ = torch.ops.liger_models.norm_linear(
        x, residual, norm.weight, norm.bias, weight, bias, *norm.constants, *for_op(ranks)
    )
    return y, residual if x is None else h


def rms_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = rms_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C].
        weight: [O, C]; its dtype is that of y and may differ from the stream's. Autocast does not change it.
        bias: [O].
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        ranks: tensor parallel ranks, each with its own rows of weight and bias; None for one rank. With
            ``ranks.sequence`` x and residual hold the rank's own tokens, y is of all tokens, and the gradients of the
            norm's weights are the own tokens' share.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weight, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: a tensor that is not floating-point.
    """
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear(x, residual, norm, weight, bias, ranks)


def layer_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
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
        TypeError: a tensor that is not floating-point.
    """
    return norm_linear(x, residual, FusedNorm(norm_weight, norm_bias, "layer_norm", eps), weight, bias, ranks)
