"""Frozen weights that are stored in fewer bits than they are multiplied in, as ops take them in place of a tensor.

An op dequantises such a weight right before each product, forward and backward, and frees it after it. Only the stored
tensors are saved, which exist anyway.

    NF4     `nf4_linear`: 4-bit codes with scales of 8 bits
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import use_triton
from .nf4_linear import Packed, nf4_dense, nf4_dense_reference, nf4_row, takes_nf4_row


class QuantizedWeight(NamedTuple):
    """A frozen weight [O, C] in NF4; it has no gradient.

    Attributes:
        codes, scales, factors, mean, table: as `nf4_linear` describes them.
        layout: O, C, codes for each scale, scales for each factor.
        dtype: of the dense weight: float32, float16 or bfloat16.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor
    mean: Tensor
    table: Tensor
    layout: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of_nf4(cls, weight: Any) -> "QuantizedWeight":
        """Torchao's ``NF4Tensor`` [O, C], in its own dtype. It shares the memory."""
        return cls(
            weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean, weight.nf4,
            [*weight.shape, weight.block_size, weight.scaler_block_size], weight.dtype,
        )  # fmt: skip

    @property
    def shape(self) -> torch.Size:
        """``[O, C]``."""
        return torch.Size(self.layout[:2])

    @property
    def device(self) -> torch.device:
        """Of the stored tensors."""
        return self.codes.device

    @property
    def itemsize(self) -> int:
        """Bytes of a dense element."""
        return self.dtype.itemsize

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    def dim(self) -> int:
        """Always 2."""
        return 2

    def is_floating_point(self) -> bool:
        """As of the dense weight."""
        return True

    def to(self, dtype: torch.dtype) -> "QuantizedWeight":
        """The same weight, which is cast to ``dtype`` when it is dequantised."""
        return self._replace(dtype=dtype)

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor like the dense weight."""
        return self.scales.new_empty(*size, dtype=dtype or self.dtype)

    @property
    def packed(self) -> Packed:
        """The stored tensors."""
        return self[:5]

    def dense(self) -> Tensor:
        """The weight [O, C] in ``dtype``, newly made."""
        function = nf4_dense if use_triton(self.table) else nf4_dense_reference
        return function(self.packed, self.layout, self.dtype)

    def row(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product with a single row, without a dense weight; None where x is not one. For the Triton backend."""
        if not takes_nf4_row(x, self.layout[1], self.layout[2]):
            return None
        return nf4_row(x, bias, self.packed, self.layout)


Weight = Tensor | QuantizedWeight
"""What ops multiply by: a dense weight, or one that they dequantise for each product."""

SCHEMA = (
    "Tensor? {0}scales=None, Tensor? {0}factors=None, Tensor? {0}mean=None, Tensor? {0}table=None, int[] {0}layout=[],"
    " ScalarType? {0}dtype=None"
)
"""What the schema of an op has for a weight besides the weight, which is a tensor of codes if these are given."""


def weight_for_op(weight: Weight) -> tuple[Tensor, tuple[Any, ...]]:
    """A weight as arguments of an op: the tensor, and what `SCHEMA` has besides."""
    return (weight, (None, None, None, None, [], None)) if isinstance(weight, Tensor) else (weight.codes, weight[1:])


def weight_from_op(weight: Tensor, rest: Sequence[Any]) -> Weight:
    """The inverse of `weight_for_op`; ``rest`` is empty where the dispatcher has left out defaults."""
    return weight if not rest or rest[0] is None else QuantizedWeight(weight, *rest)


def dense(weight: Weight) -> Tensor:
    """The weight [O, C] as a tensor, to be multiplied with and freed."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """``x @ Wᵀ + bias`` for x [..., C] and bias in the dtype of the weight."""
    y = None if isinstance(weight, Tensor) else weight.row(x, bias)
    return F.linear(x, dense(weight), bias) if y is None else y
