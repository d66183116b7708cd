"""Functions with which ops use frozen weights, and the op `quantized_linear`.

A fused op takes a `Weight`, which is a dense tensor or a `FrozenWeight`, and multiplies by this weight with `product`
and `input_product`. `WEIGHT` represents a `Weight` by arguments of an op.
"""

from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.ops import Argument, Op
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.weight import MAX_TENSORS, FrozenWeight, format_numbered
from liger_models.kernels.matmul import batch_invariance
from liger_models.kernels.matmul.row_linear import LowRank, row_linear_forward, takes_low_rank, takes_row

Weight = Tensor | FrozenWeight
"""A weight that ops accept: a dense tensor, or a frozen weight that the ops dequantize for each product."""


def weight_for_op(weight: Weight) -> tuple[Any, ...] | None:
    """Return the op arguments that represent a quantized weight (see `WEIGHT`), or None if the weight is dense."""
    if isinstance(weight, Tensor):
        return None
    # An op has a fixed number of arguments: None stands for tensors that the format does not have.
    missing = [None] * (MAX_TENSORS - len(weight.tensors))
    layout = [weight.format.number, len(weight.shape), *weight.shape, *weight.layout]
    return *weight.tensors, *missing, layout, weight.dtype


def _weight_from_op(*arguments: Any) -> FrozenWeight:
    # The layout begins with the number of the format and the number of dimensions, which is the length of the shape.
    *tensors, (number, dims, *sizes), dtype = arguments
    stored = tuple(tensor for tensor in tensors if tensor is not None)
    return FrozenWeight(format_numbered(number), stored, torch.Size(sizes[:dims]), sizes[dims:], dtype)


WEIGHT = Argument(
    "Tensor {0}, Tensor? {0}_scales=None, Tensor? {0}_factors=None, Tensor? {0}_mean=None, Tensor? {0}_table=None,"
    " int[] {0}_layout=[], ScalarType? {0}_dtype=None",
    weight_for_op,
    _weight_from_op,
)
"""Represents a `Weight` by arguments of an op. If all other arguments have their default values, the first argument is
the dense weight. Otherwise, the first argument is the codes.

The tensors are named as in NF4; tensors that the format lacks are None. The layout holds the number of the format, the
number of dimensions, the shape, and the weight's own ``layout``.
"""


def dense(weight: Weight) -> Tensor:
    """Return the weight as a dense tensor, which the caller frees after the product."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute ``x @ Wᵀ + bias`` inside an op. x [..., C] and bias must have the dtype of the weight."""
    if isinstance(weight, Tensor) or batch_invariance.is_batch_invariant():
        return batch_invariance.product(x, dense(weight), bias)
    return weight.product(x, bias)


def few_rows(
    x: Tensor, weight: Weight, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
) -> tuple[Tensor, Tensor] | None:
    """For an x with few rows, compute y (`product` plus the low-rank term) and, from y, ``act(gate) · up``.

    Return None if no special kernel supports x and the weight.
    """
    if not (takes_low_rank(x, low_rank) and use_triton(x)):
        return None
    if not isinstance(weight, Tensor):
        return weight.format.few_rows(weight, x, bias, act, low_rank)
    return row_linear_forward(x, weight, bias, act, low_rank=low_rank) if takes_row(x, weight, bias) else None


def input_product(dy: Tensor, weight: Weight) -> Tensor:
    """Compute ``dy @ W`` inside an op. dy [..., O] must have the dtype of the weight."""
    return dy @ weight if isinstance(weight, Tensor) else weight.format.input_product(weight, dy)


class QuantizedLinearInputs(NamedTuple):
    """Inputs of the op `quantized_linear`."""

    x: Tensor
    weight: Annotated[Weight, WEIGHT]
    bias: Tensor | None


class QuantizedLinearUpstream(NamedTuple):
    """Inputs of the op `quantized_linear_backward`."""

    dy: Tensor
    weight: Annotated[Weight, WEIGHT]


class QuantizedLinearSaved(NamedTuple):
    """The values saved for the backward.

    Only W is saved: dx depends only on dy and W, and no gradient of W is computed.
    """

    weight: Annotated[Weight, WEIGHT]


class QuantizedLinearGradients(NamedTuple):
    """The gradients of the op's inputs.

    In a result of the backward, a field holds the gradient or None. In the argument ``needs``, a field says whether the
    gradient is needed.
    """

    x: Any = None
    bias: Any = None


def _forward(inputs: QuantizedLinearInputs) -> Tensor:
    return product(*inputs)


def _fake(inputs: QuantizedLinearInputs) -> Tensor:
    return inputs.x.new_empty(*inputs.x.shape[:-1], inputs.weight.shape[0])


def _backward(upstream: QuantizedLinearUpstream) -> Tensor:
    return input_product(*upstream)


def _backward_fake(upstream: QuantizedLinearUpstream) -> Tensor:
    return upstream.dy.new_empty(*upstream.dy.shape[:-1], upstream.weight.shape[1])


def _gradients(
    saved: QuantizedLinearSaved, needs: Annotated[QuantizedLinearGradients, bool], dy: Tensor
) -> QuantizedLinearGradients:
    dx = BACKWARD(QuantizedLinearUpstream(dy, saved.weight)) if needs.x else None
    return QuantizedLinearGradients(dx, dy.flatten(0, -2).sum(0) if needs.bias else None)


FORWARD = Op("quantized_linear", _forward, _fake)
BACKWARD = Op("quantized_linear_backward", _backward, _backward_fake)
FORWARD.differentiable(lambda ctx, inputs, y, needs: QuantizedLinearSaved(inputs.weight), _gradients)


def quantized_linear(x: Tensor, weight: FrozenWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ Wᵀ + bias`` with a frozen, quantized weight.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: [O, C], which gets no gradient.
        bias: [O] or None.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        ValueError: the shapes do not match.
    """
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(
            f"quantized_linear: x must be [..., {columns}] for a weight [{rows}, {columns}], got {list(x.shape)}."
        )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # The weight is dequantized to the dtype of x.
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not use_triton(x):
        return F.linear(x, weight.dense(), bias)
    return FORWARD(QuantizedLinearInputs(x, weight, bias))
