"""A linear layer with a low-rank term (LoRA), for decoding.

::

    y = x @ Wᵀ + b + (x @ Aᵀ) @ Bᵀ

x @ Aᵀ is rounded to the dtype of W. If x has few rows, two launches of special kernels compute the layer. The first
launch computes x @ Aᵀ. The second launch multiplies x by W, and adds the low-rank term to the sums. All terms of y are
summed in fp32, and y is rounded once. The kernels are those of `row_linear` for a dense W, and those of W's format for
a frozen W (see `FrozenWeight`). `norm_linear` and `gated_mlp` use the same kernels.
"""

from typing import NamedTuple

from torch import Tensor

from liger_models.common.ops import Op
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.linear.projection import Projection, check_linear, check_low_rank, linear, linear_forward
from liger_models.kernels.matmul.row_linear import LowRank

low_rank_linear_reference = linear
"""Computes `low_rank_linear` in plain PyTorch."""


class LowRankLinearInputs(NamedTuple):
    """Inputs of the op `low_rank_linear`."""

    x: Tensor
    projection: Projection


def _forward(inputs: LowRankLinearInputs) -> Tensor:
    return linear_forward(inputs.x, *inputs.projection)


def _fake(inputs: LowRankLinearInputs) -> Tensor:
    weight = inputs.projection.weight
    return weight.new_empty(*inputs.x.shape[:-1], weight.shape[0])


FORWARD = Op("low_rank_linear", _forward, _fake)


def low_rank_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """Compute ``x @ weightᵀ + bias + (x @ Aᵀ) @ Bᵀ``. The op has no backward.

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
    return FORWARD(LowRankLinearInputs(x, Projection(weight, bias, low_rank)))
