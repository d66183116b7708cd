"""A linear layer in float8, alone or after a residual addition and a norm.

q rounds a matrix to float8 as a `Recipe` specifies. N is a norm as in `norm_linear`, or the identity if there is no
norm. The forward computes::

    h = residual + x                      rounded to the dtype of the residual; without x, h = residual
    y = q(N(h)) @ q(W)ᵀ + b               in the dtype of the weight

With dh, the gradient of the new residual stream h, the backward computes::

    dn = q(dy) @ q(W),   dx = N'(dn) + dh
    dW = q(dy)ᵀ @ q(N(h)),   db = Σ_rows dy

One kernel computes dx and the gradients of the norm's weight and bias. If the norm is an RMSNorm, its kernel also
rounds the normalized rows, so these rows exist only in float8. The backward recomputes these rows from h. q(W) is not
saved, because the forward rounds W by rows, but the backward needs W rounded by columns.

The forward saves the same tensors as `norm_linear` and, with one scale per operand, the largest absolute values of N(h)
and W.

Source: https://arxiv.org/abs/2209.05433 (float8 training), https://arxiv.org/abs/1910.07467 (RMSNorm).
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import Op
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.float8 import (
    MULTIPLE,
    RECIPES,
    Float8,
    Recipe,
    float8_dtype,
    float8_pair,
    round_reference,
    scaled_product,
    transposed,
)
from liger_models.kernels.float8.float8_product import FLOAT8, Float8Product
from liger_models.kernels.linear.norm_linear import (
    NormLinearGradients,
    NormLinearInputs,
    NormLinearOutputs,
    NormLinearSaved,
    NormLinearUpstream,
    norm_linear_backward,
    norm_linear_backward_fake,
    norm_linear_fake,
    norm_linear_forward,
    norm_linear_save,
)
from liger_models.kernels.linear.projection import Projection, check_linear, of_stream
from liger_models.kernels.norm.fused_norm import FusedNorm


class _Float8Product(torch.autograd.Function):
    """Computes ``q(x) @ q(W)ᵀ`` for x [N, C] in plain PyTorch, where q rounds a matrix to float8."""

    @staticmethod
    def forward(ctx, x, weight, recipe, codes, inverse):
        ctx.recipe = RECIPES[recipe]
        ctx.save_for_backward(x, weight, codes, inverse)
        # FSDP may already have gathered W in rounded form.
        rows = float8_pair(codes, inverse) or _rounded(weight, ctx.recipe)
        return scaled_product(_rounded(x, ctx.recipe), rows, weight.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        (x, weight, codes, inverse), recipe = ctx.saved_tensors, ctx.recipe
        gathered = float8_pair(codes, inverse)
        dx = d_weight = None
        if ctx.needs_input_grad[0]:
            # dx is a sum over the rows of W, so each column of W, which is a row of Wᵀ, has its own scale. With
            # "rowwise_with_gw_hp", W has a single scale.
            for_dx = recipe if recipe.rounds_dw else recipe._replace(by_row=False)
            columns = transposed(gathered) if gathered else _rounded(weight.t(), for_dx)
            dx = scaled_product(_rounded(dy, recipe, True), columns, weight.dtype)
        if ctx.needs_input_grad[1] and recipe.rounds_dw:
            d_weight = scaled_product(_rounded(dy.t(), recipe, True), _rounded(x.t(), recipe), weight.dtype)
        elif ctx.needs_input_grad[1]:
            # "rowwise_with_gw_hp" computes dW without rounding.
            d_weight = dy.t() @ x
        return dx, d_weight, None, None, None


def _rounded(x: Tensor, recipe: Recipe, gradient: bool = False) -> Float8:
    dtype = float8_dtype(x.device, gradient and recipe.wide_gradients)
    return round_reference(x.contiguous(), dtype, recipe.by_row, recipe.power_of_2)


def float8_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, gathered: Float8 | None = None
) -> Tensor:
    """Compute `float8_linear` in plain PyTorch."""
    rows = x.to(weight.dtype).reshape(-1, x.shape[-1])
    y: Tensor = _Float8Product.apply(rows, weight, recipe, *(gathered or (None, None)))
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def float8_norm_linear_reference(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, weight: Tensor, bias: Tensor | None, recipe: str,
    gathered: Float8 | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `float8_norm_linear` in plain PyTorch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    return float8_linear_reference(norm.reference(residual), weight, bias, recipe, gathered), residual


class Float8NormLinearInputs(NamedTuple):
    """Inputs of the op `float8_norm_linear`."""

    linear: NormLinearInputs
    recipe: str
    gathered: Annotated[Float8 | None, FLOAT8] = None


class Float8NormLinearOutputs(NamedTuple):
    """Outputs of the op `float8_norm_linear`. ``amax`` [2] has the largest absolute values of the normalized rows and
    of the weight.
    """

    linear: NormLinearOutputs
    amax: Tensor


class Float8NormLinearSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward."""

    linear: NormLinearSaved
    amax: Tensor
    recipe: str
    gathered: Annotated[Float8 | None, FLOAT8] = None


class Float8NormLinearGradients(NamedTuple):
    """The gradients of the op's inputs. `Float8NormLinearNeeds` has bools that say which gradients are needed."""

    linear: NormLinearGradients


Float8NormLinearNeeds = Annotated[Float8NormLinearGradients, bool]


class Float8NormLinearUpstream(NamedTuple):
    """Inputs of the op `float8_norm_linear_backward`."""

    dy: Tensor
    dh: Tensor | None
    saved: Float8NormLinearSaved
    needs: Float8NormLinearNeeds


def _forward(inputs: Float8NormLinearInputs) -> Float8NormLinearOutputs:
    linear, recipe, gathered = inputs
    weight = linear.projection.weight
    # With one scale per operand, the product fills amax, from which the backward computes the scales.
    amax = torch.zeros(2, dtype=torch.float32, device=weight.device)
    product = Float8Product(linear.projection, RECIPES[recipe], amax[:1], amax[1:], gathered)
    product.round_weight()
    return Float8NormLinearOutputs(norm_linear_forward(linear, product), amax)


def _backward(inputs: Float8NormLinearUpstream) -> Float8NormLinearGradients:
    (linear, amax, recipe, gathered), needs = inputs.saved, inputs.needs.linear
    product = Float8Product(linear.projection, RECIPES[recipe], amax[:1], amax[1:], gathered)
    need_dn = needs.x or needs.residual or needs.norm.weight or needs.norm.bias
    dy = inputs.dy.reshape(-1, inputs.dy.shape[-1]).contiguous()  # [N, O]
    upstream = product.upstream(dy, for_rows=need_dn, for_weight=needs.projection.weight)
    return Float8NormLinearGradients(norm_linear_backward(upstream, inputs.dh, linear, product, needs))


def _forward_fake(inputs: Float8NormLinearInputs) -> Float8NormLinearOutputs:
    amax = inputs.linear.residual.new_empty(2, dtype=torch.float32)
    return Float8NormLinearOutputs(norm_linear_fake(inputs.linear), amax)


def _backward_fake(inputs: Float8NormLinearUpstream) -> Float8NormLinearGradients:
    upstream = NormLinearUpstream(inputs.dy, inputs.dh, inputs.saved.linear, inputs.needs.linear)
    return Float8NormLinearGradients(norm_linear_backward_fake(upstream))


def _save(
    ctx: Any, inputs: Float8NormLinearInputs, outputs: Float8NormLinearOutputs, needs: Float8NormLinearNeeds
) -> Float8NormLinearSaved:
    linear = norm_linear_save(ctx, inputs.linear, outputs.linear, needs.linear, outputs.amax)
    return Float8NormLinearSaved(linear, outputs.amax, inputs.recipe, inputs.gathered)


def _gradients(saved: Float8NormLinearSaved, needs: Float8NormLinearNeeds, upstream: Any) -> Float8NormLinearGradients:
    dy, dh, *_ = upstream.linear
    if dy is None:  # only the residual stream has a gradient
        return Float8NormLinearGradients(of_stream(NormLinearGradients(), dh, needs.linear))
    gradients = BACKWARD(Float8NormLinearUpstream(dy, dh, saved, needs)).linear
    return Float8NormLinearGradients(of_stream(gradients, gradients.residual, needs.linear))


FORWARD = Op("float8_norm_linear", _forward, _forward_fake)
BACKWARD = Op("float8_norm_linear_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


def check_float8(op: str, recipe: str, **weights: Tensor) -> None:
    """Raise ValueError unless the recipe exists and both sizes of each weight are multiples of 16."""
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
    """Compute ``residual = residual + x``, then ``y = norm(residual) @ weightᵀ + bias`` with a product in float8.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None to add nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm: the norm. If it has no weight, rows are not normalized.
        weight: [O, C], where O and C are multiples of 16. y has the dtype of the weight, which may differ from the
            dtype of the residual stream. Autocast does not change the dtype of y.
        bias: [O] or None.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        gathered: the weight, already rounded by the caller with one scale; None if the op must round it. If
            ``gathered`` is given, the values of ``weight`` are not read.

    Returns:
        ``(y, residual)``, where y is [..., O] in the dtype of the weight, and the new residual stream is [..., C] in
        the dtype of ``residual``. Without x, the second result is the ``residual`` that was passed.

    Raises:
        ValueError: the shapes do not match or are not multiples of 16, or the recipe is unknown.
        TypeError: a tensor is not floating-point.
    """
    op = "float8_norm_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    check_float8(op, recipe, weight=weight)
    if not use_triton(residual):
        return float8_norm_linear_reference(x, residual, norm, weight, bias, recipe, gathered)
    linear = NormLinearInputs(x, residual, norm, Projection(weight, bias))
    y, h, *_ = FORWARD(Float8NormLinearInputs(linear, recipe, gathered)).linear
    return y, residual if h is None else h


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, gathered: Float8 | None = None
) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` [..., O] in float8. For arguments and errors, see `float8_norm_linear`."""
    return float8_norm_linear(None, x, FusedNorm(None), weight, bias, recipe, gathered)[0]
