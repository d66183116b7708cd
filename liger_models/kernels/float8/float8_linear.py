"""A linear layer in float8, alone and after a norm with the residual addition in front.

Forward, with q the rounding of a `Recipe` and N a norm as in `norm_linear`, or none::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    y = q(N(h)) @ q(W)ᵀ + b               in the weight's dtype

Backward, with dh the gradient of the new residual stream::

    dn = q(dy) @ q(W)                     one kernel then gives dx = N'(dn) + dh and the norm's weight gradients
    dW = q(dy)ᵀ @ q(N(h)),   db = Σ_rows dy

An RMSNorm rounds its rows itself, so that they never exist in another format. The backward rounds them again from h. W
is rounded in each pass, because the forward needs its rows and the backward its columns: q(W) is not saved.

Saved: what `norm_linear` saves, and with one scale for a tensor the largest absolute values of N(h) and W, two numbers.

Source: https://arxiv.org/abs/2209.05433 (float8 training); https://arxiv.org/abs/1910.07467 (RMSNorm).
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.float8 import (
    MULTIPLE,
    RECIPES,
    Float8,
    Matrix,
    Recipe,
    float8_dtype,
    float8_pair,
    normed_matrix,
    plain,
    rms_norm_round,
    round_columns,
    round_matrix,
    round_reference,
    scaled_product,
    transposed,
    weight_columns,
    weight_rows,
)
from liger_models.kernels.linear.norm_linear import check_linear, given_or_empty
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.row_norm import MAX_TILE


class _Float8Product(torch.autograd.Function):
    """``q(x) @ q(W)ᵀ`` of x [N, C], in plain torch."""

    @staticmethod
    def forward(ctx, x, weight, recipe, codes, inverse):
        ctx.recipe = RECIPES[recipe]
        ctx.save_for_backward(x, weight, codes, inverse)
        rows = float8_pair(codes, inverse) or _rounded(weight, ctx.recipe)
        return scaled_product(_rounded(x, ctx.recipe), rows, weight.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        (x, weight, codes, inverse), recipe = ctx.saved_tensors, ctx.recipe
        gathered = float8_pair(codes, inverse)
        dx = d_weight = None
        if ctx.needs_input_grad[0]:
            for_dx = recipe if recipe.rounds_dw else recipe._replace(by_row=False)
            columns = transposed(gathered) if gathered else _rounded(weight.t(), for_dx)
            dx = scaled_product(_rounded(dy, recipe, True), columns, weight.dtype)
        if ctx.needs_input_grad[1] and recipe.rounds_dw:
            d_weight = scaled_product(_rounded(dy.t(), recipe, True), _rounded(x.t(), recipe), weight.dtype)
        elif ctx.needs_input_grad[1]:
            d_weight = dy.t() @ x
        return dx, d_weight, None, None, None


def _rounded(x: Tensor, recipe: Recipe, gradient: bool = False) -> Float8:
    dtype = float8_dtype(x.device, gradient and recipe.wide_gradients)
    return round_reference(x.contiguous(), dtype, recipe.by_row, recipe.power_of_2)


def float8_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, gathered: Float8 | None = None
) -> Tensor:
    """What `float8_linear` computes, in plain torch."""
    rows = x.to(weight.dtype).reshape(-1, x.shape[-1])
    y: Tensor = _Float8Product.apply(rows, weight, recipe, *(gathered or (None, None)))
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def float8_norm_linear_reference(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, weight: Tensor, bias: Tensor | None, recipe: str,
    gathered: Float8 | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `float8_norm_linear` computes, in plain torch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    return float8_linear_reference(norm.reference(residual), weight, bias, recipe, gathered), residual


def _rounds_itself(norm: FusedNorm, h: Tensor, dtype: torch.dtype) -> bool:
    return norm.kind == "rms_norm" and norm.weight is not None and h.dtype == dtype and h.shape[-1] <= MAX_TILE


def round_normed(
    norm: FusedNorm, x: Tensor | None, residual: Tensor, dtype: torch.dtype, recipe: Recipe, amax: Tensor
) -> tuple[Float8, Tensor, Tensor]:
    """``(normed rows, h, statistics)`` as `FusedNorm.forward`, the rows cast to ``dtype`` and rounded.

    amax [1] in fp32 is raised as in `round_matrix`.
    """
    if _rounds_itself(norm, residual, dtype):
        assert norm.weight is not None
        constants = norm.eps, norm.weight_offset, norm.scale_in_fp32
        return rms_norm_round(x, residual, norm.weight, *constants, recipe, amax)
    normed, h, statistics = norm.forward(x, residual)
    return round_matrix(plain(normed.to(dtype)), recipe, amax=amax)[0], h, statistics


def normed_again(norm: FusedNorm, h: Tensor, statistics: Tensor, dtype: torch.dtype) -> Matrix:
    """The rows that `round_normed` rounds, to be rounded again."""
    if not _rounds_itself(norm, h, dtype):
        return plain(norm.again(h, statistics, dtype))
    assert norm.weight is not None
    return normed_matrix(h, norm.weight, statistics, norm.weight_offset, norm.scale_in_fp32)


LIBRARY.define(
    "float8_norm_linear(Tensor? x, Tensor residual, Tensor? norm_weight, Tensor? norm_bias, Tensor weight,"
    " Tensor? bias, str norm, float eps, float weight_offset, bool scale_in_fp32, str recipe,"
    " Tensor? codes, Tensor? inverse) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "float8_norm_linear_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, Tensor amax, Tensor? norm_weight,"
    " Tensor? norm_bias, Tensor weight, str norm, float eps, float weight_offset, bool scale_in_fp32, str recipe,"
    " Tensor? codes, Tensor? inverse, bool[5] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "float8_norm_linear", "CompositeExplicitAutograd")
def _float8_norm_linear(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool, recipe: str,
    codes: Tensor | None, inverse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm, rules = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32), RECIPES[recipe]
    amax = torch.zeros(2, dtype=torch.float32, device=weight.device)
    rows, h, statistics = round_normed(norm, x, residual, weight.dtype, rules, amax[:1])
    by_rows = weight_rows(weight, rules, amax[1:], float8_pair(codes, inverse))
    y = scaled_product(rows, by_rows, weight.dtype, fast=True)
    y = y if bias is None else y.add_(bias.to(y.dtype))
    # An op's output may not be its input: without x the second output is empty.
    h = residual.new_empty(0) if x is None else h
    return y.view(*residual.shape[:-1], weight.shape[0]), h, statistics, amax


@torch.library.impl(LIBRARY, "float8_norm_linear_backward", "CompositeExplicitAutograd")
def _float8_norm_linear_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, amax: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, weight: Tensor, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool,
    recipe: str, codes: Tensor | None, inverse: Tensor | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    norm, rules = FusedNorm(norm_weight, norm_bias, kind, eps, weight_offset, scale_in_fp32), RECIPES[recipe]
    need_stream, need_norm_weight, need_norm_bias, need_weight, need_bias = needs
    need_dn, dtype = need_stream or need_norm_weight or need_norm_bias, weight.dtype
    gradient = plain(dy)
    dx = d_norm_weight = d_norm_bias = rows = None
    by_rows, by_columns = round_matrix(
        gradient, rules, gradient=True, rows=need_dn, columns=need_weight and rules.rounds_dw
    )
    if need_dn:
        dn = scaled_product(by_rows, weight_columns(weight, rules, amax[1:], float8_pair(codes, inverse)), dtype)
        del by_rows
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            dn.view(h.shape), dh, h, statistics, need_weight=need_norm_weight, need_bias=need_norm_bias,
            rows_dtype=dtype if need_weight and not rules.rounds_dw else None,
        )  # fmt: skip
        del dn
    d_weight = None
    if need_weight and rules.rounds_dw:
        again = normed_again(norm, h, statistics, dtype)
        d_weight = scaled_product(by_columns, round_columns(again, rules, amax[:1]), dtype)
    elif need_weight:
        rows = norm.again(h, statistics, dtype) if rows is None else rows
        d_weight = gradient.x.t() @ rows.reshape(-1, h.shape[-1])
    d_bias = gradient.x.sum(0) if need_bias else None
    grads = dx if need_stream else None, d_norm_weight, d_norm_bias, d_weight, d_bias
    of_norm = h if norm_weight is None else norm_weight
    return given_or_empty(grads, (h, of_norm, of_norm, weight, weight))


@torch.library.register_fake("liger_models::float8_norm_linear", lib=LIBRARY)
def _float8_norm_linear_fake(
    x: Tensor | None, residual: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, *constants: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    statistics = FusedNorm(norm_weight, norm_bias, *constants[:4]).statistics_shape(residual.shape[:-1])
    y = weight.new_empty(*residual.shape[:-1], weight.shape[0])
    h = residual.new_empty(0 if x is None else residual.shape)
    amax = residual.new_empty(2, dtype=torch.float32)
    return y, h, residual.new_empty(statistics, dtype=torch.float32), amax


@torch.library.register_fake("liger_models::float8_norm_linear_backward", lib=LIBRARY)
def _float8_norm_linear_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, amax: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, weight: Tensor, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool,
    recipe: str, codes: Tensor | None, inverse: Tensor | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    of_norm = h if norm_weight is None else norm_weight
    likes = (h, of_norm, of_norm, weight, weight[:, 0])
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, residual, norm_weight, norm_bias, weight, bias, *ctx.constants, codes, inverse = inputs
    _, h, statistics, amax = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = residual.dtype if x is None else x.dtype
    ctx.bias_dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
    frozen_stream = x is None or not any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*((h,) if frozen_stream else ()), statistics, amax)
    saved = residual if x is None else h, statistics, amax, norm_weight, norm_bias, weight
    ctx.save_for_backward(*saved, codes, inverse)


def _backward(ctx, dy, dh, _dstatistics, _damax):
    need_x, need_residual, *need_weights = ctx.needs_input_grad[:6]
    if dy is None:  # only the residual stream has a gradient
        return dh.to(ctx.x_dtype) if need_x and dh is not None else None, dh, *(None,) * 11
    *saved, codes, inverse = ctx.saved_tensors
    dx, *grads = torch.ops.liger_models.float8_norm_linear_backward(
        dy, dh, *saved, *ctx.constants, codes, inverse, [need_x or need_residual, *need_weights]
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


register_autograd("float8_norm_linear", _backward, _setup)


def check_float8(op: str, recipe: str, **weights: Tensor) -> None:
    """Raise unless the recipe exists and the hardware can multiply float8 weights of these sizes."""
    if recipe not in RECIPES:
        raise ValueError(f"{op}: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}.")
    for name, weight in weights.items():
        if any(size % MULTIPLE for size in weight.shape):
            raise ValueError(
                f"{op}: both sizes of {name} must be multiples of {MULTIPLE}, got {list(weight.shape)}. Multiply in "
                "bfloat16."
            )


def float8_norm_linear(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, weight: Tensor, bias: Tensor | None, recipe: str,
    gathered: Float8 | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``residual = residual + x``, then ``y = norm(residual) @ weightᵀ + bias`` with a product in float8.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm: the norm; without a weight none.
        weight: [O, C], both multiples of 16; its dtype is that of y and may differ from the stream's. Autocast does not
            change it.
        bias: [O] or None.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        gathered: q(W) with one scale, where it is known; the values of the weight are not read then.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weight, and [..., C] in that of the residual (without x, the
        tensor that came in).

    Raises:
        ValueError: the shapes do not fit together or are no multiples of 16, or the recipe is unknown.
        TypeError: a tensor is not floating-point.
    """
    op = "float8_norm_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    check_float8(op, recipe, weight=weight)
    if not use_triton(residual):
        return float8_norm_linear_reference(x, residual, norm, weight, bias, recipe, gathered)
    y, h, _, _ = torch.ops.liger_models.float8_norm_linear(
        x, residual, norm.weight, norm.bias, weight, bias, *norm.constants, recipe, *(gathered or (None, None))
    )
    return y, residual if x is None else h


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, gathered: Float8 | None = None
) -> Tensor:
    """``x @ weightᵀ + bias`` [..., O] with a product in float8; arguments and errors as of `float8_norm_linear`."""
    return float8_norm_linear(None, x, FusedNorm(None), weight, bias, recipe, gathered)[0]
