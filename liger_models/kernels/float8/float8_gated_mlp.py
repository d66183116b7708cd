"""The gated MLP with the norm before it, as in `gated_mlp`, with products in float8.

q rounds a matrix to float8 as a `Recipe` specifies, N is a norm, and A is `gated_act`. The forward computes::

    h = residual + x                      rounded to the dtype of the residual; without x, h = residual
    u = q(N(h)) @ q(Wgu)ᵀ + bgu           gate and up interleaved
    y = q(A(u)) @ q(Wd)ᵀ + bd

With dh, the gradient of the new residual stream h, the backward computes in this order::

    dp = q(dy) @ q(Wd)
    dWd = q(dy)ᵀ @ q(A(u)),   dbd = Σ_rows dy
    du = A'(dp),   dn = q(du) @ q(Wgu),   dx = N'(dn) + dh
    dWgu = q(du)ᵀ @ q(N(h)),   dbgu = Σ_rows du

For N(h), A(u) and du, the kernel that computes the matrix also rounds it. The unrounded matrices are stored only if a
recipe or a bias needs them. Weights are rounded in the forward and again in the backward, as in `float8_norm_linear`.

The forward saves the same tensors as `gated_mlp` and, with one scale per operand, the largest absolute values of N(h),
Wgu, A(u) and Wd. With ``recompute``, u is not saved, and large numbers of rows are processed in chunks, as in
`gated_mlp`. With a recipe that has one scale per operand, each chunk of an operand then has its own scale. The forward
computes this scale from all rows up to the end of the chunk. The backward computes the scales of dy, du and A(u) from
the rows of the chunk alone, and the scale of N(h) from all rows.

Source: https://arxiv.org/abs/2002.05202 (gated MLP), https://arxiv.org/abs/2209.05433 (float8 training).
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import Op
from liger_models.kernels.activation.gated_act import check_act, gated_act_reference
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.float8 import RECIPES, Float8
from liger_models.kernels.float8.float8_linear import check_float8, float8_linear_reference
from liger_models.kernels.float8.float8_product import FLOAT8, Float8Product
from liger_models.kernels.linear.gated_mlp import (
    GatedMLPGradients,
    GatedMLPInputs,
    GatedMLPOutputs,
    GatedMLPSaved,
    GatedMLPUpstream,
    Products,
    gated_mlp_backward,
    gated_mlp_backward_fake,
    gated_mlp_fake,
    gated_mlp_forward,
    gated_mlp_save,
)
from liger_models.kernels.linear.projection import Projection, check_linear, of_stream
from liger_models.kernels.norm.fused_norm import FusedNorm


def float8_gated_mlp_reference(
    x: Tensor | None, residual: Tensor, norm: FusedNorm, gate_up_weight: Tensor, down_weight: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, *, act: str, recipe: str,
    gathered: tuple[Float8 | None, Float8 | None] = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `float8_gated_mlp` in plain PyTorch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    gate_up = float8_linear_reference(norm.reference(residual), gate_up_weight, gate_up_bias, recipe, gathered[0])
    product = gated_act_reference(gate_up, act)
    return float8_linear_reference(product, down_weight, down_bias, recipe, gathered[1]), residual


class Float8GatedMLPInputs(NamedTuple):
    """Inputs of the op `float8_gated_mlp`."""

    mlp: GatedMLPInputs
    recipe: str
    gate_up_gathered: Annotated[Float8 | None, FLOAT8] = None
    down_gathered: Annotated[Float8 | None, FLOAT8] = None


class Float8GatedMLPOutputs(NamedTuple):
    """Outputs of the op `float8_gated_mlp`. ``amax`` [4] has the largest absolute values of N(h), Wgu, A(u) and Wd."""

    mlp: GatedMLPOutputs
    amax: Tensor


class Float8GatedMLPSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward."""

    mlp: GatedMLPSaved
    amax: Tensor
    recipe: str
    gate_up_gathered: Annotated[Float8 | None, FLOAT8] = None
    down_gathered: Annotated[Float8 | None, FLOAT8] = None


class Float8GatedMLPGradients(NamedTuple):
    """The gradients of the op's inputs. `Float8GatedMLPNeeds` has bools that say which gradients are needed."""

    mlp: GatedMLPGradients


Float8GatedMLPNeeds = Annotated[Float8GatedMLPGradients, bool]


class Float8GatedMLPUpstream(NamedTuple):
    """Inputs of the op `float8_gated_mlp_backward`."""

    dy: Tensor
    dh: Tensor | None
    saved: Float8GatedMLPSaved
    needs: Float8GatedMLPNeeds


def _products(inputs: Float8GatedMLPInputs | Float8GatedMLPSaved, amax: Tensor) -> tuple[Float8Product, Float8Product]:
    """Return the `Float8Product` of the gate and up projection, and the `Float8Product` of the down projection."""
    mlp, recipe = inputs.mlp, RECIPES[inputs.recipe]
    gate_up = Float8Product(mlp.gate_up, recipe, amax[:1], amax[1:2], inputs.gate_up_gathered)
    down = Float8Product(mlp.down, recipe, amax[2:3], amax[3:], inputs.down_gathered)
    return gate_up, down


def _forward(inputs: Float8GatedMLPInputs) -> Float8GatedMLPOutputs:
    mlp = inputs.mlp
    amax = torch.zeros(4, dtype=torch.float32, device=mlp.residual.device)
    products = _products(inputs, amax)

    # All chunks share the rounded weights. If neither y nor u is needed, only the maxima of the weights are found.
    for product in products:
        if mlp.need_y or not mlp.recompute:
            product.round_weight()
        else:
            product.find_weight_amax()
    return Float8GatedMLPOutputs(gated_mlp_forward(mlp, Products(*products)), amax)


def _backward(inputs: Float8GatedMLPUpstream) -> Float8GatedMLPGradients:
    dy, dh, saved, needs = inputs
    gate_up, down = _products(saved, saved.amax)
    if saved.mlp.u is None:  # the maximum of A(u) must be found for each chunk
        down.amax = None
    upstream = GatedMLPUpstream(dy, dh, saved.mlp, needs.mlp)
    return Float8GatedMLPGradients(gated_mlp_backward(upstream, Products(gate_up, down)))


def _forward_fake(inputs: Float8GatedMLPInputs) -> Float8GatedMLPOutputs:
    return Float8GatedMLPOutputs(gated_mlp_fake(inputs.mlp), inputs.mlp.residual.new_empty(4, dtype=torch.float32))


def _backward_fake(inputs: Float8GatedMLPUpstream) -> Float8GatedMLPGradients:
    upstream = GatedMLPUpstream(inputs.dy, inputs.dh, inputs.saved.mlp, inputs.needs.mlp)
    return Float8GatedMLPGradients(gated_mlp_backward_fake(upstream))


def _save(
    ctx: Any, inputs: Float8GatedMLPInputs, outputs: Float8GatedMLPOutputs, needs: Float8GatedMLPNeeds
) -> Float8GatedMLPSaved:
    mlp = gated_mlp_save(ctx, inputs.mlp, outputs.mlp, needs.mlp, outputs.amax)
    return Float8GatedMLPSaved(mlp, outputs.amax, *inputs[1:])


def _gradients(saved: Float8GatedMLPSaved, needs: Float8GatedMLPNeeds, upstream: Any) -> Float8GatedMLPGradients:
    dy, dh, *_ = upstream.mlp
    if dy is None:  # only the residual stream has a gradient
        return Float8GatedMLPGradients(of_stream(GatedMLPGradients(), dh, needs.mlp))
    gradients = BACKWARD(Float8GatedMLPUpstream(dy, dh, saved, needs)).mlp
    return Float8GatedMLPGradients(of_stream(gradients, gradients.residual, needs.mlp))


FORWARD = Op("float8_gated_mlp", _forward, _forward_fake)
BACKWARD = Op("float8_gated_mlp_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


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
    need_y: bool = True,
    gathered: tuple[Float8 | None, Float8 | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Compute ``residual = residual + x``, then ``y = gated_act(norm(residual) @ Wguᵀ + bgu) @ Wdᵀ + bd`` in float8.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None to add nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm: the norm. If it has no weight, rows are not normalized.
        gate_up_weight: Wgu [2 F, C], where row 2f is gate f and row 2f + 1 is up f. 2 F and C are multiples of 16.
        down_weight: Wd [O, F] in the dtype of gate_up_weight. O and F are multiples of 16. y has the dtype of the
            weights, which may differ from the dtype of the residual stream. Autocast does not change the dtype of y.
        gate_up_bias: bgu [2 F], or None.
        down_bias: bd [O], or None.
        act: "silu", "gelu_tanh" or "gelu".
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        recompute, need_y: as in `gated_mlp`.
        gathered: gate_up_weight and down_weight, already rounded by the caller with one scale each. If an entry is
            None, the op rounds this weight itself. If a rounded weight is given, the values of the unrounded weight are
            not read.

    Returns:
        ``(y, residual)``, where y is [..., O] in the dtype of the weights, and the new residual stream is [..., C] in
        the dtype of ``residual``. Without x, the second result is the ``residual`` that was passed.

    Raises:
        ValueError: the shapes do not match or are not multiples of 16, or the activation, norm or recipe is unknown.
        TypeError: a tensor is not floating-point, or the weights differ in dtype.
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
    # If no gradients are computed, nothing is saved, and gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    mlp = GatedMLPInputs(
        x=x,
        residual=residual,
        norm=norm,
        gate_up=Projection(gate_up_weight, gate_up_bias),
        down=Projection(down_weight, down_bias),
        act=act,
        recompute=recompute,
        need_y=need_y,
    )
    y, h, *_ = FORWARD(Float8GatedMLPInputs(mlp, recipe, *gathered)).mlp
    return y, residual if h is None else h
