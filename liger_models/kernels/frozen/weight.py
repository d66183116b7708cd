"""Frozen weights that are stored in fewer bits than they are multiplied in, as ops take them in place of a tensor.

An op dequantises such a weight right before each product, forward and backward, and frees it after it. A forward of
few rows, as in a step of decoding, multiplies with the codes instead. Only the stored tensors are saved, which exist
anyway.

    NF4       `nf4_linear`: 4-bit codes with scales of 8 bits
    float8    `frozen_float8_linear`: e4m3 with a scale for each row, multiplied in float8 where the device can
    blocks    `float8_blocks`: e4m3 with the scales of a checkpoint, for blocks of it
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.float8_blocks import block_rows, blocks_dense, takes_block_rows
from liger_models.kernels.frozen.frozen_float8_linear import (
    float8_dense,
    float8_input_product,
    float8_product,
    takes_float8_rows,
)
from liger_models.kernels.frozen.nf4_linear import nf4_dense, nf4_dense_reference
from liger_models.kernels.frozen.nf4_rows import Packed, nf4_rows, takes_nf4_rows
from liger_models.kernels.matmul import batch_invariance
from liger_models.kernels.matmul.row_linear import LowRank, row_linear_forward, takes_low_rank, takes_row


class QuantizedWeight(NamedTuple):
    """A frozen weight [O, C] in NF4 or float8; it has no gradient.

    Attributes:
        codes: NF4: uint8 [O · C / 2]. Float8: float8_e4m3fn [O, C].
        scales: NF4: int8, one for each block. Float8: float32 [O], or [O, C / width], rounded up, for blocks.
        factors, mean, table: of NF4, as `nf4_linear` describes them; None for float8.
        layout: O, C, and of NF4 codes for each scale, scales for each factor; of blocks the width of one.
        dtype: of the dense weight: float32, float16 or bfloat16.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    mean: Tensor | None
    table: Tensor | None
    layout: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of_nf4(cls, weight: Any) -> "QuantizedWeight":
        """Torchao's ``NF4Tensor`` [O, C], in its own dtype. It shares the memory."""
        return cls(
            weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean, weight.nf4,
            [*weight.shape, weight.block_size, weight.scaler_block_size], weight.dtype,
        )  # fmt: skip

    @classmethod
    def of_float8(cls, weight: Any) -> "QuantizedWeight":
        """Torchao's ``Float8Tensor`` [O, C] with a scale for each row, in its own dtype. It shares the memory."""
        return cls(weight.qdata, weight.scale.view(-1), None, None, None, [*weight.shape], weight.dtype)

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
    def stored(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return tuple(each for each in self[:5] if each is not None)

    def _nf4(self) -> Packed | None:
        _, _, factors, mean, table, *_ = self
        if factors is None or mean is None or table is None:
            return None
        return self.codes, self.scales, factors, mean, table

    @property
    def multiplies_in_float8(self) -> bool:
        """Whether products are those of `frozen_float8_linear`, not those with the dense weight."""
        return self.table is None and len(self.layout) == 2

    def dense(self) -> Tensor:
        """The weight [O, C] in ``dtype``, newly made."""
        nf4 = self._nf4()
        if nf4 is None and not self.multiplies_in_float8:
            return blocks_dense(self.codes, self.scales, self.layout[2], self.dtype)
        if nf4 is None:
            return float8_dense(self.codes, self.scales, self.dtype)
        return (nf4_dense if use_triton(nf4[-1]) else nf4_dense_reference)(nf4, self.layout, self.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias`` inside an op."""
        rows = self.few_rows(x, bias)
        if rows is not None:
            return rows[0]
        if self.multiplies_in_float8:
            return float8_product(x, self.codes, self.scales, bias)
        return F.linear(x, self.dense(), bias)

    def few_rows(
        self, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """As the function `few_rows`."""
        nf4 = self._nf4()
        if nf4 is not None:
            return nf4_rows(x, bias, nf4, self.layout, act, low_rank) if takes_nf4_rows(x, nf4, self.layout) else None
        if self.multiplies_in_float8:
            taken = takes_float8_rows(x, self.codes)
            return row_linear_forward(x, self.codes, bias, act, self.scales, low_rank) if taken else None
        blocks = self.codes, self.scales, self.layout[2]
        return block_rows(x, *blocks, bias, act, low_rank) if takes_block_rows(x, *blocks) else None

    def input_product(self, dy: Tensor) -> Tensor:
        """``dy @ W`` inside an op."""
        if self.multiplies_in_float8:
            return float8_input_product(dy, self.codes, self.scales)
        return dy @ self.dense()


Weight = Tensor | QuantizedWeight
"""A weight as ops take it: dense, or one that they dequantise for each product."""

SCHEMA = (
    "Tensor? {0}scales=None, Tensor? {0}factors=None, Tensor? {0}mean=None, Tensor? {0}table=None, int[] {0}layout=[],"
    " ScalarType? {0}dtype=None"
)
"""Arguments of an op besides a weight. If they are given, the weight is a tensor of codes."""


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
    """``x @ Wᵀ + bias`` inside an op, for x [..., C] and bias in the dtype of the weight."""
    if isinstance(weight, Tensor) or batch_invariance.is_batch_invariant():
        return batch_invariance.product(x, dense(weight), bias)
    return weight.product(x, bias)


def few_rows(
    x: Tensor, weight: Weight, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
) -> tuple[Tensor, Tensor] | None:
    """`product` with a low-rank term, and ``act(gate) · up``, by one kernel; None if there is none."""
    if not (takes_low_rank(x, low_rank) and use_triton(x)):
        return None
    if not isinstance(weight, Tensor):
        return weight.few_rows(x, bias, act, low_rank)
    return row_linear_forward(x, weight, bias, act, low_rank=low_rank) if takes_row(x, weight, bias) else None


def input_product(dy: Tensor, weight: Weight) -> Tensor:
    """``dy @ W`` inside an op, for dy [..., O] in the dtype of the weight."""
    return dy @ weight if isinstance(weight, Tensor) else weight.input_product(dy)


LIBRARY.define(f"quantized_linear(Tensor x, Tensor weight, Tensor? bias, {SCHEMA.format('')}) -> Tensor")
LIBRARY.define(f"quantized_linear_backward(Tensor dy, Tensor weight, {SCHEMA.format('')}) -> Tensor")


@torch.library.impl(LIBRARY, "quantized_linear", "CompositeExplicitAutograd")
def _quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return product(x, weight_from_op(weight, rest), bias)


@torch.library.impl(LIBRARY, "quantized_linear_backward", "CompositeExplicitAutograd")
def _quantized_linear_backward(dy: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return input_product(dy, weight_from_op(weight, rest))


@torch.library.register_fake("liger_models::quantized_linear", lib=LIBRARY)
def _quantized_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_from_op(weight, rest).shape[0])


@torch.library.register_fake("liger_models::quantized_linear_backward", lib=LIBRARY)
def _quantized_linear_backward_fake(dy: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], weight_from_op(weight, rest).shape[1])


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, codes, bias, *rest = inputs
    ctx.has_bias, ctx.constants = bias is not None, rest[4:]
    ctx.save_for_backward(codes, *rest[:4])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, _, needs_bias, *_ = ctx.needs_input_grad
    weight = *ctx.saved_tensors, *ctx.constants
    dx = torch.ops.liger_models.quantized_linear_backward(dy, *weight) if needs_x else None
    return dx, None, dy.flatten(0, -2).sum(0) if ctx.has_bias and needs_bias else None, *[None] * 6


register_autograd("quantized_linear", _backward, _setup)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ Wᵀ + bias`` with a frozen weight in fewer bits.

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
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not use_triton(x):
        return F.linear(x, weight.dense(), bias)
    codes, rest = weight_for_op(weight)
    y: Tensor = torch.ops.liger_models.quantized_linear(x, codes, bias, *rest)
    return y
