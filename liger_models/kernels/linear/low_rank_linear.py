"""A linear layer with a low-rank term (LoRA).

::

    y = x @ Wᵀ + b + (x @ Aᵀ) @ Bᵀ
    g = dy @ B,   dx = dy @ W + g @ A
    dW = dyᵀ @ x,   db = Σ_rows dy,   dA = gᵀ @ x,   dB = dyᵀ @ (x @ Aᵀ)

x @ Aᵀ is rounded to the dtype of W. If x has few rows, as in decoding, two launches of special kernels compute the
layer. The first launch computes x @ Aᵀ. The second launch multiplies x by W, and adds the low-rank term to the sums.
All terms of y are then summed in fp32, and y is rounded once. With more rows, one of the two products is rounded before
the other is added to it. The kernels are those of `row_linear` for a dense W, and those
of W's format for a frozen W (see `FrozenWeight`). `norm_linear` and `gated_mlp` use the same kernels.

The forward saves x and, if x has many rows, x @ Aᵀ. With few rows, the backward recomputes x @ Aᵀ. A product adds one
term of dx to the other, so that only one tensor of this size is allocated. Gradients that are not needed are not
computed.

Source: https://arxiv.org/abs/2106.09685.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import Op
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.linear.projection import (
    Product,
    Projection,
    ProjectionGradients,
    check_linear,
    check_low_rank,
    keeps_low,
    linear,
    low_fake,
    projection_gradients_fake,
)
from liger_models.kernels.matmul.row_linear import LowRank

low_rank_linear_reference = linear
"""Computes `low_rank_linear` in plain PyTorch."""


class LowRankLinearInputs(NamedTuple):
    """Inputs of the op `low_rank_linear`."""

    x: Tensor
    projection: Projection
    keeps_low: bool = False


class LowRankLinearOutputs(NamedTuple):
    """Outputs of the op `low_rank_linear`, or the gradients of these outputs.

    Attributes:
        y: [..., O].
        low: x @ Aᵀ [N, R], for the gradient of B; None without ``keeps_low``.
    """

    y: Tensor
    low: Tensor | None


class LowRankLinearSaved(NamedTuple):
    """The values that the forward saves for the backward.

    Attributes:
        x: [..., C], or None if no gradient needs x.
        projection: the weights.
        low: x @ Aᵀ [N, R], or None.
        dtype: dtype of x.
    """

    x: Tensor | None
    projection: Projection
    low: Tensor | None
    dtype: torch.dtype


class LowRankLinearGradients(NamedTuple):
    """The gradients of the op's inputs.

    In `LowRankLinearNeeds`, the fields are bools that say which gradients are needed.
    """

    x: Any = None
    projection: ProjectionGradients = ProjectionGradients()


LowRankLinearNeeds = Annotated[LowRankLinearGradients, bool]


class LowRankLinearUpstream(NamedTuple):
    """Inputs of the op `low_rank_linear_backward`."""

    dy: Tensor
    saved: LowRankLinearSaved
    needs: LowRankLinearNeeds


def _forward(inputs: LowRankLinearInputs) -> LowRankLinearOutputs:
    x, projection, keeps = inputs
    product = Product(projection)
    x = x.to(product.dtype)
    low = product.low(x) if keeps else None
    return LowRankLinearOutputs(product.forward(x, low), low)


def _fake(inputs: LowRankLinearInputs) -> LowRankLinearOutputs:
    x, projection, keeps = inputs
    y = projection.weight.new_empty(*x.shape[:-1], projection.weight.shape[0])
    return LowRankLinearOutputs(y, low_fake(y, projection) if keeps else None)


def _backward(inputs: LowRankLinearUpstream) -> LowRankLinearGradients:
    dy, (x, projection, low, dtype), needs = inputs
    product = Product(projection)
    rows = dy.reshape(-1, dy.shape[-1])  # [N, O]
    dx = g = None
    if needs.x:
        dx, g = product.rows_gradient(rows)
        dx = dx.view(*dy.shape[:-1], dx.shape[-1]).to(dtype)
    x_rows = None if x is None else x.reshape(-1, x.shape[-1]).to(product.dtype)  # [N, C]
    return LowRankLinearGradients(dx, product.gradients(rows, g, x_rows, needs.projection, low=low))


def _backward_fake(inputs: LowRankLinearUpstream) -> LowRankLinearGradients:
    dy, (_, projection, _, dtype), needs = inputs
    dx = dy.new_empty(*dy.shape[:-1], projection.weight.shape[1], dtype=dtype) if needs.x else None
    return LowRankLinearGradients(dx, projection_gradients_fake(projection, needs.projection))


def _save(
    ctx: Any, inputs: LowRankLinearInputs, outputs: LowRankLinearOutputs, needs: LowRankLinearNeeds
) -> LowRankLinearSaved:
    if outputs.low is not None:
        ctx.mark_non_differentiable(outputs.low)
    return LowRankLinearSaved(
        x=inputs.x if needs.projection.by_rows else None,
        projection=inputs.projection.without_bias(),
        low=outputs.low if needs.projection.low_rank_B else None,
        dtype=inputs.x.dtype,
    )


def _gradients(saved: LowRankLinearSaved, needs: LowRankLinearNeeds, upstream: Any) -> LowRankLinearGradients:
    return BACKWARD(LowRankLinearUpstream(upstream.y, saved, needs))


FORWARD = Op("low_rank_linear", _forward, _fake)
BACKWARD = Op("low_rank_linear_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


def low_rank_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """Compute ``x @ weightᵀ + bias + (x @ Aᵀ) @ Bᵀ``.

    Args:
        x: [..., C], which is cast to the dtype of the weight.
        weight: [O, C], a tensor or a `FrozenWeight`. Its dtype is float32, float16 or bfloat16, and autocast does not
            change this dtype.
        bias: [O].
        low_rank: ``(A [R, C], B [O, R])`` in the dtype of the weight.

    Returns:
        [..., O] in the dtype of the weight.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not floating-point, or the low-rank term differs from the weight in dtype.
    """
    op = "low_rank_linear"
    check_linear(op, "weight", weight, bias, x.shape[-1])
    check_low_rank(op, "low_rank", low_rank, weight)
    if not use_triton(x):
        return low_rank_linear_reference(x, weight, bias, low_rank)
    return FORWARD(LowRankLinearInputs(x, Projection(weight, bias, low_rank), keeps_low(x, low_rank))).y
