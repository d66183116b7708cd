"""The gated MLP behind its norm: residual addition, RMSNorm, gate and up projection, gated activation, down projection.

Forward, with N = `rms_norm` (without a norm weight, N(h) = h), cast to the weights' dtype, and A = `gated_act`::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    u = N(h) @ Wguᵀ + bgu                 gate and up interleaved
    y = A(u) @ Wdᵀ + bd

Backward, with dh the gradient that reaches the new residual stream, in this order::

    dp = dy @ Wd                          then one kernel gives du = A'(dp) and the product p = A(u), over dp
    dWd = dyᵀ @ p,   dbd = Σ_rows dy      p is freed
    dn = du @ Wgu                         then one kernel gives dx = N'(dn) + dh, the norm weight's gradient, and N(h)
    dWgu = duᵀ @ N(h),   dbgu = Σ_rows du

Saved: h, one fp32 number per row, the weights, and u; with ``recompute`` not u either: the backward makes it again from
h, bit for bit, and du takes its place. The normed activations and the product are never kept. Gradients that nobody
needs cost nothing, and come in the dtype of their input. The backward is one op, so that a compiler cannot see what it
recomputes and keep the forward's instead.

Source: https://arxiv.org/abs/2002.05202; recomputation as in https://arxiv.org/abs/2205.05198.
"""

import torch
from torch import Tensor

from .dispatch import LIBRARY, check, use_triton
from .gated_act import check_act, gated_act_backward, gated_act_forward, gated_act_reference
from .rms_norm import rms_norm_forward, rms_norm_reference
from .rms_norm_linear import check_linear, check_stream, given_or_empty, linear, norm_backward, normed_again


def gated_mlp_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `gated_mlp` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    normed = residual
    if norm_weight is not None:
        normed = rms_norm_reference(residual, norm_weight, eps, weight_offset, scale_in_fp32)
    gate_up = linear(normed, gate_up_weight, gate_up_bias)
    return linear(gated_act_reference(gate_up, act), down_weight, down_bias), residual


LIBRARY.define(
    "gated_mlp(Tensor? x, Tensor residual, Tensor? norm_weight, Tensor gate_up_weight, Tensor down_weight,"
    " Tensor? gate_up_bias, Tensor? down_bias, str act, float eps, float weight_offset, bool scale_in_fp32,"
    " bool recompute) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "gated_mlp_backward(Tensor dy, Tensor? dh, Tensor h, Tensor rstd, Tensor? gate_up, Tensor? norm_weight,"
    " Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias, str act, float weight_offset,"
    " bool scale_in_fp32, bool[6] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "gated_mlp", "CompositeExplicitAutograd")
def _gated_mlp(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if norm_weight is None:
        normed = h = residual if x is None else (residual + x).to(residual.dtype).contiguous()
        rstd = residual.new_empty(0, dtype=torch.float32)
    else:
        first, second = (residual, None) if x is None else (x, residual)
        normed, h, rstd = rms_norm_forward(first, second, norm_weight, eps, weight_offset, scale_in_fp32)
    gate_up = linear(normed, gate_up_weight, gate_up_bias)
    del normed
    product = gated_act_forward(gate_up, act)
    if recompute:
        gate_up = gate_up.new_empty(0)
    # An op's output may not be its input: without x the second output is empty.
    return linear(product, down_weight, down_bias), residual.new_empty(0) if x is None else h, rstd, gate_up


@torch.library.impl(LIBRARY, "gated_mlp_backward", "CompositeExplicitAutograd")
def _gated_mlp_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, rstd: Tensor, gate_up: Tensor | None, norm_weight: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, act: str, weight_offset: float,
    scale_in_fp32: bool, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    need_stream, need_norm_weight, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
    need_dn = need_stream or need_norm_weight
    need_du = need_dn or need_gate_up or need_gate_up_bias
    C, dtype = h.shape[-1], gate_up_weight.dtype
    dy = dy.reshape(-1, dy.shape[-1])
    dx = d_norm_weight = d_gate_up_weight = d_down_weight = d_gate_up = product = rows = None

    def normed() -> Tensor:
        if norm_weight is None:
            return h.to(dtype)
        return normed_again(h, norm_weight, rstd, weight_offset, scale_in_fp32, dtype)

    own = gate_up is None
    if gate_up is None and (need_du or need_down):
        gate_up = linear(normed(), gate_up_weight, gate_up_bias)
    if gate_up is not None and need_du:
        d_gate_up, product = gated_act_backward(
            dy @ down_weight,
            gate_up.reshape(-1, gate_up.shape[-1]),
            act,
            need_down,
            overwrite_dy=True,
            overwrite_gate_up=own,
        )
    elif gate_up is not None and need_down:
        product = gated_act_forward(gate_up.reshape(-1, gate_up.shape[-1]), act)
    del gate_up
    if product is not None:
        d_down_weight = dy.t() @ product
    del product
    if d_gate_up is not None and need_dn:
        dn = (d_gate_up @ gate_up_weight).view(h.shape)
        if norm_weight is None:
            dx = (dn if dh is None else dn + dh).to(h.dtype).contiguous()
        else:
            dx, d_norm_weight, rows = norm_backward(
                dn, dh, h, norm_weight, rstd, weight_offset, scale_in_fp32,
                need_norm_weight, dtype if need_gate_up else None,
            )  # fmt: skip
        del dn
    if d_gate_up is not None and need_gate_up:
        d_gate_up_weight = d_gate_up.t() @ (normed() if rows is None else rows).reshape(-1, C)
    d_gate_up_bias = d_gate_up.sum(0) if d_gate_up is not None and need_gate_up_bias else None
    grads = [dx if need_stream else None, d_norm_weight, d_gate_up_weight, d_down_weight, d_gate_up_bias]
    grads.append(dy.sum(0) if need_down_bias else None)
    return given_or_empty(grads, _likes(h, norm_weight, gate_up_weight, down_weight))


def _likes(h: Tensor, norm_weight: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor) -> list[Tensor]:
    """For each gradient a tensor of its dtype (the biases' come in the weights')."""
    return [h, h if norm_weight is None else norm_weight, gate_up_weight, down_weight, gate_up_weight, down_weight]


@torch.library.register_fake("liger_models::gated_mlp", lib=LIBRARY)
def _gated_mlp_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = residual.shape[:-1]
    y = down_weight.new_empty(*rows, down_weight.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    rstd = residual.new_empty(0 if norm_weight is None else rows, dtype=torch.float32)
    return y, h, rstd, gate_up_weight.new_empty(0 if recompute else (*rows, gate_up_weight.shape[0]))


@torch.library.register_fake("liger_models::gated_mlp_backward", lib=LIBRARY)
def _gated_mlp_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, rstd: Tensor, gate_up: Tensor | None, norm_weight: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, act: str, weight_offset: float,
    scale_in_fp32: bool, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = _likes(h, norm_weight, gate_up_weight[:, 0], down_weight[:, 0])
    likes[2:4] = gate_up_weight, down_weight
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, gate_up_weight, down_weight, gate_up_bias, down_bias, ctx.act, *constants = inputs
    _, ctx.weight_offset, ctx.scale_in_fp32, recompute = constants
    _, h, rstd, gate_up = output
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, gate_up_bias, down_bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h,) if frozen_stream else ()), rstd, gate_up)
    ctx.save_for_backward(
        residual if x is None else h, rstd, None if recompute else gate_up, norm_weight, gate_up_weight, down_weight,
        gate_up_bias if recompute else None,
    )  # fmt: skip


def _backward(ctx, dy, dh, _drstd, _dgate_up):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:7]
    x_dtype, gate_up_bias_dtype, down_bias_dtype = ctx.dtypes
    if dy is None:  # only the residual stream is used further on
        return dh.to(x_dtype) if need_x and dh is not None else None, dh, *(None,) * 10
    needs = [need_x or need_residual, *need_weights]
    dx, *grads = torch.ops.liger_models.gated_mlp_backward(
        dy, dh, *ctx.saved_tensors, ctx.act, ctx.weight_offset, ctx.scale_in_fp32, needs
    )
    d_norm, d_gate_up, d_down, d_gate_up_bias, d_down_bias = (
        grad if need else None for grad, need in zip(grads, need_weights, strict=True)
    )
    return (
        dx.to(x_dtype) if need_x else None,
        dx if need_residual else None,
        d_norm,
        d_gate_up,
        d_down,
        None if d_gate_up_bias is None else d_gate_up_bias.to(gate_up_bias_dtype),
        None if d_down_bias is None else d_down_bias.to(down_bias_dtype),
        *(None,) * 5,
    )


torch.library.register_autograd("liger_models::gated_mlp", _backward, setup_context=_setup, lib=LIBRARY)


def gated_mlp(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = gated_act(rms_norm(residual) @ Wguᵀ + bgu) @ Wdᵀ + bd``.

    Args:
        x: [..., C], what a branch adds to the stream, or None.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C], or None for no norm.
        gate_up_weight: [2 F, C], row 2f is gate f and row 2f + 1 is up f.
        down_weight: [O, F] in the dtype of gate_up_weight, which is that of y and may differ from the stream's.
            Autocast does not change it.
        gate_up_bias: [2 F].
        down_bias: [O].
        act: "silu", "gelu_tanh" or "gelu".
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        recompute: don't keep gate and up for the backward but make them again, for one more matrix product. The
            gradients are the same. (The reference backend takes no notice.)

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weights, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes don't fit together, or an unknown activation.
        TypeError: a tensor that is not floating-point, or weights of two dtypes.
    """
    check_act("gated_mlp", act)
    check_stream("gated_mlp", x, residual, norm_weight)
    check_linear("gated_mlp", "gate_up_weight", gate_up_weight, gate_up_bias, residual.shape[-1])
    check(
        gate_up_weight.shape[0] % 2 == 0,
        f"gated_mlp: gate_up_weight holds pairs of rows, got {list(gate_up_weight.shape)}.",
    )
    check_linear("gated_mlp", "down_weight", down_weight, down_bias, gate_up_weight.shape[0] // 2)
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "gated_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    tensors = (x, residual, norm_weight, gate_up_weight, down_weight, gate_up_bias, down_bias)
    if not use_triton(residual):
        return gated_mlp_reference(*tensors, act=act, eps=eps, weight_offset=weight_offset, scale_in_fp32=scale_in_fp32)
    # Without gradients nothing is kept, and gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    y, h, _, _ = torch.ops.liger_models.gated_mlp(*tensors, act, eps, weight_offset, scale_in_fp32, recompute)
    return y, residual if x is None else h
