"""The gated MLP after its norm, as `gated_mlp`, with its products in float8.

Forward, with q the rounding of a `Recipe`, N a norm and A = `gated_act`::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    u = q(N(h)) @ q(Wgu)ᵀ + bgu           gate and up interleaved
    y = q(A(u)) @ q(Wd)ᵀ + bd

Backward, with dh the gradient of the new residual stream, in this order::

    dp = q(dy) @ q(Wd)
    dWd = q(dy)ᵀ @ q(A(u)),   dbd = Σ_rows dy
    dn = q(du) @ q(Wgu)                   with du = A'(dp); one kernel then gives dx = N'(dn) + dh
    dWgu = q(du)ᵀ @ q(N(h)),   dbgu = Σ_rows du

The kernels that round compute N(h), A(u) and du on the way, so that these never exist in another format, unless a
recipe or a bias needs them as they are. Weights are rounded in each pass, as in `float8_norm_linear`.

Saved: what `gated_mlp` saves, and with one scale for a tensor the largest absolute values of N(h), Wgu, A(u) and Wd.
With ``recompute`` u is not saved, and many rows go through in chunks, as there. A scale for a tensor then follows from
a chunk or from the rows up to its end.

Source: https://arxiv.org/abs/2002.05202 (gated MLP), https://arxiv.org/abs/2209.05433 (float8 training).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.activation.gated_act import (
    check_act,
    gated_act_backward,
    gated_act_forward,
    gated_act_reference,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.float8 import (
    RECIPES,
    Float8,
    Matrix,
    Recipe,
    add_amax,
    float8_pair,
    plain,
    round_columns,
    round_gradient,
    round_matrix,
    scaled_product,
    weight_columns,
    weight_rows,
)
from liger_models.kernels.float8.float8_linear import check_float8, float8_linear_reference, normed_again, round_normed
from liger_models.kernels.linear.gated_mlp import _likes, _split_rows
from liger_models.kernels.linear.norm_linear import check_linear, given_or_empty, weight_gradient
from liger_models.kernels.norm.fused_norm import FusedNorm

WEIGHTS = slice(1, 2), slice(3, 4)
"""Where the largest absolute values of the two weights are among the four."""


def float8_gated_mlp_reference(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, *, act: str, recipe: str,
    gathered: tuple[Float8 | None, Float8 | None] = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `float8_gated_mlp` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    gate_up = float8_linear_reference(norm.reference(residual), gate_up_weight, gate_up_bias, recipe, gathered[0])
    product = gated_act_reference(gate_up, act)
    return float8_linear_reference(product, down_weight, down_bias, recipe, gathered[1]), residual


LIBRARY.define(
    "float8_gated_mlp(Tensor? x, Tensor residual, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_up_weight,"
    " Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, str norm, float eps, float weight_offset,"
    " bool scale_in_fp32, str act, str recipe, bool recompute, bool result,"
    " Tensor? gate_up_codes, Tensor? gate_up_inverse, Tensor? down_codes, Tensor? down_inverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "float8_gated_mlp_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, Tensor? gate_up, Tensor amax,"
    " Tensor? norm_weight, Tensor? norm_bias, Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias,"
    " str norm, float eps, float weight_offset, bool scale_in_fp32, str act, str recipe,"
    " Tensor? gate_up_codes, Tensor? gate_up_inverse, Tensor? down_codes, Tensor? down_inverse, bool[7] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class _MLP(NamedTuple):
    """Arguments that all rows share.

    ``amax`` [4] in fp32 has the largest values of N(h), Wgu, A(u) and Wd, and ``gathered`` q(Wgu) and q(Wd) if known.
    """

    norm: FusedNorm
    gate_up_weight: Tensor
    down_weight: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    act: str
    recipe: Recipe
    amax: Tensor
    gathered: tuple[Float8 | None, Float8 | None]

    def gate_up(self, rows: Float8, weight: Float8) -> Tensor:
        """u [N, 2 F] of rounded normed rows."""
        return _product(rows, weight, self.gate_up_weight.dtype, self.gate_up_bias)


def _product(rows: Float8, weight: Float8, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    y = scaled_product(rows, weight, dtype, fast=True)
    return y if bias is None else y.add_(bias.to(dtype))


@torch.library.impl(LIBRARY, "float8_gated_mlp", "CompositeExplicitAutograd")
def _float8_gated_mlp(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor,
    down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool, act: str, recipe: str, recompute: bool, result: bool,
    gate_up_codes: Tensor | None, gate_up_inverse: Tensor | None, down_codes: Tensor | None,
    down_inverse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    amax = torch.zeros(4, dtype=torch.float32, device=residual.device)
    weights = gate_up_weight, down_weight
    gathered = float8_pair(gate_up_codes, gate_up_inverse), float8_pair(down_codes, down_inverse)
    mlp = _MLP(norm, *weights, gate_up_bias, down_bias, act, RECIPES[recipe], amax, gathered)
    rounded = []
    for weight, at, known in zip(weights, WEIGHTS, gathered, strict=True):
        if result or not recompute:
            rounded.append(weight_rows(weight, mlp.recipe, amax[at], known))
        elif not mlp.recipe.by_row and known is None:  # the backward reads the maxima
            add_amax(plain(weight), amax[at])
    C, shape = residual.shape[-1], residual.shape[:-1]
    N = shape.numel()
    x, residual = None if x is None else x.reshape(N, C), residual.reshape(N, C)
    rows, _ = _split_rows(N, gate_up_weight, None, recompute)
    if rows >= N:
        y, h, statistics, gate_up = _forward_rows(x, residual, mlp, rounded, recompute, result)
    else:
        y = down_weight.new_empty(N, down_weight.shape[0])
        h = residual.new_empty(0 if x is None else residual.shape)
        statistics = residual.new_empty(norm.statistics_shape((N,)), dtype=torch.float32)
        for start in range(0, N, rows):
            part = slice(start, start + rows)
            y[part], h[part], statistics[part], gate_up = _forward_rows(
                None if x is None else x[part], residual[part], mlp, rounded, recompute, result
            )
    h = h if x is None else h.view(*shape, C)
    gate_up = gate_up if recompute else gate_up.view(*shape, gate_up_weight.shape[0])
    return y.view(*shape, down_weight.shape[0]), h, statistics.view(norm.statistics_shape(shape)), gate_up, amax


def _forward_rows(
    x: Tensor | None, residual: Tensor, mlp: _MLP, rounded: list[Float8], recompute: bool, result: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op's outputs for rows [N, C]: all of them, or a chunk."""
    dtype, nothing = mlp.down_weight.dtype, mlp.gate_up_weight.new_empty(0)
    normed, h, statistics = round_normed(mlp.norm, x, residual, dtype, mlp.recipe, mlp.amax[:1])
    # An op's output may not be its input: without x the second output is empty.
    h = residual.new_empty(0) if x is None else h
    if recompute and not result:
        return mlp.down_weight.new_empty(len(residual), mlp.down_weight.shape[0]), h, statistics, nothing
    gate_up = mlp.gate_up(normed, rounded[0])
    del normed
    product = round_matrix(Matrix("product", gate_up, act=mlp.act), mlp.recipe, amax=mlp.amax[2:3])[0]
    gate_up = nothing if recompute else gate_up
    return _product(product, rounded[1], dtype, mlp.down_bias), h, statistics, gate_up


@torch.library.impl(LIBRARY, "float8_gated_mlp_backward", "CompositeExplicitAutograd")
def _float8_gated_mlp_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, amax: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, act: str,
    recipe: str, gate_up_codes: Tensor | None, gate_up_inverse: Tensor | None, down_codes: Tensor | None,
    down_inverse: Tensor | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    norm = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32)
    gathered = float8_pair(gate_up_codes, gate_up_inverse), float8_pair(down_codes, down_inverse)
    mlp = _MLP(norm, gate_up_weight, down_weight, gate_up_bias, None, act, RECIPES[recipe], amax, gathered)
    shape, C = h.shape, h.shape[-1]
    N = shape[:-1].numel()
    dy, h, statistics = dy.reshape(N, dy.shape[-1]), h.reshape(N, C), statistics.reshape(norm.statistics_shape((N,)))
    dh = None if dh is None else dh.reshape(N, C)
    rows, _ = _split_rows(N, gate_up_weight, None, gate_up is None)
    if rows >= N:
        gate_up = None if gate_up is None else gate_up.reshape(N, gate_up_weight.shape[0])
        dx, *grads = _backward_rows(dy, dh, h, statistics, gate_up, mlp, needs)
    else:
        dx, grads = h.new_empty(N, C) if needs[0] else None, [None] * 6
        for start in range(0, N, rows):
            part = slice(start, start + rows)
            piece, *grads = _backward_rows(
                dy[part], None if dh is None else dh[part], h[part], statistics[part], None, mlp, needs, grads
            )
            if dx is not None and piece is not None:
                dx[part] = piece
            del piece
    likes = _likes(h, norm_weight, gate_up_weight, down_weight)[:7]
    grads = [None if grad is None else grad.to(like.dtype) for grad, like in zip(grads, likes[1:], strict=True)]
    return given_or_empty([None if dx is None else dx.view(shape), *grads], likes)


def _backward_rows(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, mlp: _MLP,
    needs: list[bool], totals: list[Tensor | None] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """dx and the gradients of the weights. Those of a chunk are in fp32, added to ``totals``, the sums so far.

    dy [N, O], dh, h [N, C], gate_up [N, 2 F].
    """
    need_stream, need_norm_weight, need_norm_bias, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
    need_dn = need_stream or need_norm_weight or need_norm_bias
    need_du = need_dn or need_gate_up or need_gate_up_bias
    norm, act, recipe, amax, dtype = mlp.norm, mlp.act, mlp.recipe, mlp.amax, mlp.gate_up_weight.dtype
    wide = torch.promote_types(dtype, torch.float32) if totals is not None else None
    rounds_dw = recipe.rounds_dw
    dx = d_norm_weight = d_norm_bias = d_gate_up_weight = d_down_weight = d_gate_up_bias = rows = du = p = None
    own = gate_up is None
    if gate_up is None and (need_du or need_down):
        normed, _ = round_matrix(normed_again(norm, h, statistics, dtype), recipe, amax=amax[:1], known=True)
        weight = mlp.gathered[0]
        if weight is None:
            weight, _ = round_matrix(plain(mlp.gate_up_weight), recipe, amax=amax[WEIGHTS[0]], known=True)
        gate_up = mlp.gate_up(normed, weight)
        del normed, weight
    of_product = None if own else amax[2:3]
    dy_rows, dy_columns = round_matrix(plain(dy), recipe, gradient=True, rows=need_du, columns=need_down and rounds_dw)
    if gate_up is not None and need_du:
        columns = weight_columns(mlp.down_weight, recipe, amax[WEIGHTS[1]], mlp.gathered[1])
        d_product = scaled_product(dy_rows, columns, dtype)
        del dy_rows, columns
        if rounds_dw and not need_gate_up_bias:
            du_rows, du_columns, p_columns = round_gradient(
                gate_up, d_product, act, recipe, of_product, rows=need_dn, columns=need_gate_up, product=need_down
            )
        else:
            du, p = gated_act_backward(d_product, gate_up, act, need_down, overwrite_dy=True, overwrite_gate_up=own)
            d_gate_up_bias = du.sum(0, dtype=wide) if need_gate_up_bias else None
            du_rows, du_columns = round_matrix(
                plain(du), recipe, gradient=True, rows=need_dn, columns=need_gate_up and rounds_dw
            )
        del d_product
    elif gate_up is not None and need_down:
        p = gated_act_forward(gate_up, act)
    del gate_up
    if need_down and rounds_dw:
        p_columns = p_columns if p is None else round_columns(plain(p), recipe, of_product)
        d_down_weight = scaled_product(dy_columns, p_columns, wide or dtype)
        del p_columns
    elif p is not None:
        d_down_weight = weight_gradient(None, dy, p, wide is not None)
    del p, dy_columns
    if need_dn:
        columns = weight_columns(mlp.gate_up_weight, recipe, amax[WEIGHTS[0]], mlp.gathered[0])
        dn = scaled_product(du_rows, columns, dtype)
        del du_rows, columns
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            dn, dh, h, statistics, need_weight=need_norm_weight, need_bias=need_norm_bias,
            rows_dtype=dtype if need_gate_up and not rounds_dw else None, sum_dtype=wide,
        )  # fmt: skip
        del dn
    if need_gate_up and rounds_dw:
        n_columns = round_columns(normed_again(norm, h, statistics, dtype), recipe, amax[:1])
        d_gate_up_weight = scaled_product(du_columns, n_columns, wide or dtype)
    elif need_gate_up and du is not None:
        rows = norm.again(h, statistics, dtype) if rows is None else rows
        d_gate_up_weight = weight_gradient(None, du, rows, wide is not None)
    d_down_bias = dy.sum(0, dtype=wide) if need_down_bias else None
    sums = [d_norm_weight, d_norm_bias, d_gate_up_weight, d_down_weight, d_gate_up_bias, d_down_bias]
    if totals is not None:
        sums = [
            share if total is None or share is None else total.add_(share)
            for total, share in zip(totals, sums, strict=True)
        ]
    return [dx if need_stream else None, *sums]


@torch.library.register_fake("liger_models::float8_gated_mlp", lib=LIBRARY)
def _float8_gated_mlp_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor,
    down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool, act: str, recipe: str, recompute: bool, result: bool,
    gate_up_codes: Tensor | None, gate_up_inverse: Tensor | None, down_codes: Tensor | None,
    down_inverse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm, rows = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32), residual.shape[:-1]
    y = down_weight.new_empty(*rows, down_weight.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    statistics = residual.new_empty(norm.statistics_shape(rows), dtype=torch.float32)
    gate_up = gate_up_weight.new_empty(0 if recompute else (*rows, gate_up_weight.shape[0]))
    return y, h, statistics, gate_up, residual.new_empty(4, dtype=torch.float32)


@torch.library.register_fake("liger_models::float8_gated_mlp_backward", lib=LIBRARY)
def _float8_gated_mlp_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, gate_up: Tensor | None, amax: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, act: str,
    recipe: str, gate_up_codes: Tensor | None, gate_up_inverse: Tensor | None, down_codes: Tensor | None,
    down_inverse: Tensor | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = _likes(h, norm_weight, gate_up_weight[:, 0], down_weight[:, 0])[:7]
    likes[3:5] = gate_up_weight, down_weight
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, norm_bias, gate_up_weight, down_weight, gate_up_bias, down_bias, *constants = inputs
    ctx.constants, recompute, gathered = constants[:6], constants[6], constants[8:]
    _, h, statistics, gate_up, amax = output
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, norm_bias, gate_up_bias, down_bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h,) if frozen_stream else ()), statistics, gate_up, amax)
    ctx.save_for_backward(
        residual if x is None else h, statistics, None if recompute else gate_up, amax, norm_weight, norm_bias,
        gate_up_weight, down_weight, gate_up_bias if recompute else None, *gathered,
    )  # fmt: skip


def _backward(ctx, dy, dh, _dstatistics, _dgate_up, _damax):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:8]
    x_dtype, norm_bias_dtype, gate_up_bias_dtype, down_bias_dtype = ctx.dtypes
    if dy is None:  # only the residual stream has a gradient
        return dh.to(x_dtype) if need_x and dh is not None else None, dh, *(None,) * 18
    saved = ctx.saved_tensors
    dx, *grads = torch.ops.liger_models.float8_gated_mlp_backward(
        dy, dh, *saved[:-4], *ctx.constants, *saved[-4:], [need_x or need_residual, *need_weights]
    )
    d_norm, d_norm_bias, d_gate_up, d_down, d_gate_up_bias, d_down_bias = (
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
        *(None,) * 12,
    )


register_autograd("float8_gated_mlp", _backward, _setup)


def float8_gated_mlp(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    recipe: str = "tensorwise",
    recompute: bool = False,
    result: bool = True,
    gathered: tuple[Float8 | None, Float8 | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then ``y = gated_act(norm(residual) @ Wguᵀ + bgu) @ Wdᵀ + bd``, products in float8.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm: the norm; without a weight none.
        gate_up_weight: [2 F, C], row 2f is gate f and row 2f + 1 is up f; 2 F and C are multiples of 16.
        down_weight: [O, F] in the dtype of gate_up_weight, which is that of y and may differ from the stream's; O and F
            are multiples of 16. Autocast does not change it.
        gate_up_bias: [2 F].
        down_bias: [O].
        act: "silu", "gelu_tanh" or "gelu".
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        recompute, result: as in `gated_mlp`.
        gathered: q(Wgu) and q(Wd) with one scale each, where they are known; the weights' values are not read then.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weights, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes do not fit together or are no multiples of 16, or an unknown activation, norm or recipe.
        TypeError: a tensor is not floating-point, or the weights have several dtypes.
    """
    op = "float8_gated_mlp"
    check_act(op, act)
    norm.check(op, x, residual)
    check_linear(op, "gate_up_weight", gate_up_weight, gate_up_bias, residual.shape[-1])
    check_linear(op, "down_weight", down_weight, down_bias, gate_up_weight.shape[0] // 2)
    check_float8(op, recipe, gate_up_weight=gate_up_weight, down_weight=down_weight)
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            f"{op}: gate_up_weight and down_weight must have one dtype, got {gate_up_weight.dtype} and "
            f"{down_weight.dtype}. Cast one of them."
        )
    weights = gate_up_weight, down_weight, gate_up_bias, down_bias
    if not use_triton(residual):
        return float8_gated_mlp_reference(x, residual, norm, *weights, act=act, recipe=recipe, gathered=gathered)
    # Without gradients nothing is saved, and gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    y, h, *_ = torch.ops.liger_models.float8_gated_mlp(
        x, residual, norm.weight, norm.bias, *weights, *norm.constants, act, recipe, recompute, result,
        *(part for each in gathered for part in each or (None, None)),
    )  # fmt: skip
    return y, residual if x is None else h
