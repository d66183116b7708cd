"""RMSNorm and the linear layer after it, with the residual addition in front: the normed activations are not kept.

Forward, with N = `rms_norm` (its cast order, then a cast to the weight's dtype)::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    y = N(h) @ Wᵀ + b                     in the weight's dtype

Backward, with dh the gradient that reaches the new residual stream::

    dn = dy @ W                           then one kernel gives dx = N'(dn) + dh, the norm weight's gradient, and N(h)
    dW = dyᵀ @ N(h),   db = Σ_rows dy

Saved: h, one fp32 number per row and the weights. Gradients that nobody needs cost nothing, and come in the dtype of
their input. The backward is one op, so that a compiler cannot see N(h) in it and keep the forward's instead.

With ``ranks``, of which each has its own rows of W, dn is summed over them before N'. If each has its own tokens, too,
N(h) is gathered before the products with W and dy, and the sum of dn comes back for the own tokens only; nothing more
is saved, and y is of all tokens.

Source: https://arxiv.org/abs/1910.07467; https://arxiv.org/abs/2205.05198 for tokens on ranks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import (
    Ranks,
    all_tokens_shape,
    enter,
    for_op,
    gather_rows,
    ranks_again,
    rows_by_rank,
    rows_in_order,
    sum_rows,
)
from .dispatch import LIBRARY, check, check_floating, on_device_of, tl, triton, use_triton
from .rms_norm import _scaled, rms_norm_backward, rms_norm_forward, rms_norm_reference

BLOCK = 4096
"""Columns per program of the elementwise kernel: a row of a 7B model, 16 elements per thread."""


def rms_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """What `rms_norm_linear` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    normed = rms_norm_reference(residual, norm_weight, eps, weight_offset, scale_in_fp32)
    return linear(enter(normed, ranks), weight, bias), residual


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weightᵀ + bias`` in the weight's dtype, also under autocast: who wants its dtype casts the weight."""
    device = weight.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


@triton.jit
def _rms_normed_kernel(
    h_ptr, w_ptr, rstd_ptr, y_ptr, C, weight_offset, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    h = tl.load(h_ptr + row + columns, mask=inside, other=0.0)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    n = h.to(tl.float32) * tl.load(rstd_ptr + tl.program_id(0))
    y = _scaled(n, w, weight_offset, SCALE_IN_FP32, h.dtype).to(h.dtype)
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def normed_again(
    h: Tensor, norm_weight: Tensor, rstd: Tensor, weight_offset: float, scale_in_fp32: bool, dtype: torch.dtype
) -> Tensor:
    """The forward's normed rows, bit for bit, from the saved rstd; cast to ``dtype``."""
    h, norm_weight = h.contiguous(), norm_weight.contiguous()
    C = h.shape[-1]
    y = torch.empty_like(h, dtype=dtype)
    block = min(triton.next_power_of_2(C), BLOCK)
    if h.numel():
        with on_device_of(h):
            _rms_normed_kernel[(h.numel() // C, triton.cdiv(C, block))](
                h, norm_weight, rstd, y, C, weight_offset, SCALE_IN_FP32=scale_in_fp32, BLOCK=block,
                num_warps=max(block // 512, 1),
            )  # fmt: skip
    return y


def norm_backward(
    dn: Tensor, dh: Tensor | None, h: Tensor, norm_weight: Tensor, rstd: Tensor,
    weight_offset: float, scale_in_fp32: bool, need_dw: bool, y_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """``(dx, dw or None, normed rows in y_dtype or None)``: the norm's backward, on the way its output once more."""
    # The kernel rounds its fp32 result once, the forward to the dtype of h and then to the weight's: only for an h in
    # fp32 are they the same.
    kernel_dtype = y_dtype if h.dtype == torch.float32 else None
    dx, dw, y = rms_norm_backward(
        dn, dh, h, norm_weight, rstd, weight_offset, scale_in_fp32,
        need_dw=need_dw, dw_dtype=dw_dtype, need_y=y_dtype is not None, y_dtype=kernel_dtype,
    )  # fmt: skip
    return dx, dw, None if y is None or y_dtype is None else y.to(y_dtype)


LIBRARY.define(
    "rms_norm_linear(Tensor? x, Tensor residual, Tensor norm_weight, Tensor weight, Tensor? bias, float eps,"
    " float weight_offset, bool scale_in_fp32, str group='', int ranks=1, bool sequence=False)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "rms_norm_linear_backward(Tensor dy, Tensor? dh, Tensor h, Tensor rstd, Tensor norm_weight, Tensor weight,"
    " float weight_offset, bool scale_in_fp32, bool[4] needs, str group='', int ranks=1, bool sequence=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "rms_norm_linear", "CompositeExplicitAutograd")
def _rms_norm_linear(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None,
    eps: float, weight_offset: float, scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ranks = ranks_again(*rest)
    first, second = (residual, None) if x is None else (x, residual)
    normed, h, rstd = rms_norm_forward(first, second, norm_weight, eps, weight_offset, scale_in_fp32)
    if ranks is None or not ranks.sequence:
        y = linear(normed, weight, bias)
    else:
        rows = gather_rows(normed.reshape(-1, normed.shape[-1]), ranks)
        y = rows_in_order(linear(rows, weight, bias), residual.shape[:-1], ranks)
    # An op's output may not be its input: without x the second output is empty.
    return y, residual.new_empty(0) if x is None else h, rstd


@torch.library.impl(LIBRARY, "rms_norm_linear_backward", "CompositeExplicitAutograd")
def _rms_norm_linear_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, rstd: Tensor, norm_weight: Tensor, weight: Tensor,
    weight_offset: float, scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    ranks = ranks_again(*rest)
    need_stream, need_norm_weight, need_weight, need_bias = needs
    dy = rows_by_rank(dy, ranks)
    dx = d_norm_weight = normed = None
    if need_stream or need_norm_weight:
        dx, d_norm_weight, normed = norm_backward(
            sum_rows(dy @ weight, ranks).view(h.shape), dh, h, norm_weight, rstd, weight_offset, scale_in_fp32,
            need_norm_weight, weight.dtype if need_weight else None,
        )  # fmt: skip
    elif need_weight:
        normed = normed_again(h, norm_weight, rstd, weight_offset, scale_in_fp32, weight.dtype)
    d_weight = None if normed is None else dy.t() @ gather_rows(normed.view(-1, h.shape[-1]), ranks)
    grads = dx if need_stream else None, d_norm_weight, d_weight, dy.sum(0) if need_bias else None
    return given_or_empty(grads, (h, norm_weight, weight, weight))


def given_or_empty(grads: Sequence[Tensor | None], likes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """An op returns tensors: a gradient that nobody needs is an empty one."""
    return tuple(like.new_empty(0) if grad is None else grad for grad, like in zip(grads, likes, strict=True))


@torch.library.register_fake("liger_models::rms_norm_linear", lib=LIBRARY)
def _rms_norm_linear_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None,
    eps: float, weight_offset: float, scale_in_fp32: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = weight.new_empty(*all_tokens_shape(residual.shape[:-1], ranks_again(*rest)), weight.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    return y, h, residual.new_empty(residual.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("liger_models::rms_norm_linear_backward", lib=LIBRARY)
def _rms_norm_linear_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, rstd: Tensor, norm_weight: Tensor, weight: Tensor,
    weight_offset: float, scale_in_fp32: bool, needs: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = (h, norm_weight, weight, weight[:, 0])
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, weight, bias, _, weight_offset, scale_in_fp32, *ranks = inputs
    ctx.constants, ctx.ranks = (weight_offset, scale_in_fp32), ranks
    _, h, rstd = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = residual.dtype if x is None else x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*((h, rstd) if x is None or not any(ctx.needs_input_grad[:2]) else (rstd,)))
    ctx.save_for_backward(residual if x is None else h, rstd, norm_weight, weight)


def _backward(ctx, dy, dh, _drstd):
    need_x, need_residual, need_norm_weight, need_weight, need_bias, *_ = ctx.needs_input_grad
    if dy is None:  # only the residual stream is used further on
        return dh.to(ctx.x_dtype) if need_x and dh is not None else None, dh, *(None,) * 9
    needs = [need_x or need_residual, need_norm_weight, need_weight, need_bias]
    dx, *grads = torch.ops.liger_models.rms_norm_linear_backward(
        dy, dh, *ctx.saved_tensors, *ctx.constants, needs, *ctx.ranks
    )
    d_norm_weight, d_weight, d_bias = (grad if need else None for grad, need in zip(grads, needs[1:], strict=True))
    return (
        dx.to(ctx.x_dtype) if need_x else None,
        dx if need_residual else None,
        d_norm_weight,
        d_weight,
        None if d_bias is None else d_bias.to(ctx.bias_dtype),
        *(None,) * 6,
    )


torch.library.register_autograd("liger_models::rms_norm_linear", _backward, setup_context=_setup, lib=LIBRARY)


def check_stream(op: str, x: Tensor | None, residual: Tensor, norm_weight: Tensor | None) -> None:
    """Raise unless x has the shape of the residual stream, and the norm's weight that of its rows."""
    check_floating(op, x=x, residual=residual, norm_weight=norm_weight)
    check(residual.dim() > 0, f"{op}: residual must be [..., C], got a scalar.")
    check(
        x is None or x.shape == residual.shape,
        f"{op}: x and residual must have one shape, "
        f"got {'none' if x is None else list(x.shape)} and {list(residual.shape)}.",
    )
    check(
        norm_weight is None or norm_weight.shape == residual.shape[-1:],
        f"{op}: norm_weight must have the shape of residual's last dimension, "
        f"got {'none' if norm_weight is None else list(norm_weight.shape)} for residual {list(residual.shape)}.",
    )


def check_linear(op: str, name: str, weight: Tensor, bias: Tensor | None, in_features: int) -> None:
    """Raise unless weight is [out, in_features] and bias, if any, [out]."""
    check_floating(op, **{name: weight, f"{name}'s bias": bias})
    check(
        weight.dim() == 2 and weight.shape[1] == in_features,
        f"{op}: {name} must be [out, {in_features}], got {list(weight.shape)}.",
    )
    check(
        bias is None or bias.shape == weight.shape[:1],
        f"{op}: {name}'s bias must be [{weight.shape[0]}], got {'none' if bias is None else list(bias.shape)}.",
    )


def rms_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = rms_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        x: [..., C], what a branch adds to the stream, or None.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C].
        weight: [O, C]; its dtype is that of y and may differ from the stream's. Autocast does not change it.
        bias: [O].
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        ranks: of which each has its own rows of weight and bias, None for one rank. With ``ranks.sequence`` x and
            residual are the rank's own tokens, y is of all of them, and norm_weight's gradient is the own share of it.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weight, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes don't fit together.
        TypeError: a tensor that is not floating-point.
    """
    check_stream("rms_norm_linear", x, residual, norm_weight)
    check_linear("rms_norm_linear", "weight", weight, bias, residual.shape[-1])
    if not use_triton(residual):
        return rms_norm_linear_reference(
            x, residual, norm_weight, weight, bias, eps, weight_offset, scale_in_fp32, ranks
        )
    y, h, _ = torch.ops.liger_models.rms_norm_linear(
        x, residual, norm_weight, weight, bias, eps, weight_offset, scale_in_fp32, *for_op(ranks)
    )
    return y, residual if x is None else h
