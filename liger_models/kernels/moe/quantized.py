"""Frozen matrices of experts that are stored in fewer bits than they are multiplied in, and their grouped products.

    NF4       codes of 4 bits, a scale of 8 bits for 64 of them, a factor for 256 scales, and a mean for each expert
    float8    codes in e4m3, and a scale for each row of each expert's matrix, or the scales of a checkpoint, which has
              them for blocks: one for so many columns of each row (`float8_blocks`)

Each expert is quantised by itself, so that every stored tensor has experts in its first dimension and shards over it.

For rows that are sorted by expert, `moe_mlp` dequantises the matrices of all experts in one pass, multiplies dense ones
and frees them. With few rows, as in a step of decoding, the kernels of `few` read the codes of the experts that have
rows, and dequantise a tile right before it is multiplied. Both multiply the same numbers.

Source: https://arxiv.org/abs/2305.14314 (NF4), https://arxiv.org/abs/2209.05433 (float8).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.float8_blocks import blocks_dense
from liger_models.kernels.frozen.frozen_float8_linear import float8_dense, quantize_rows_reference
from liger_models.kernels.frozen.nf4_linear import nf4_dense, nf4_dense_reference, nf4_layout, scales_per_factor

ATTRIBUTES = ("codes", "scales", "factors", "means", "table")


class QuantizedExperts(Tensor):
    """Frozen matrices [X, O, C] of X experts in NF4 or float8, as a tensor that stands for the dense one.

    It can be moved, copied, cast, saved, and split by experts. Casting changes the dtype of `dense` alone. Whatever
    else needs numbers calls `dense`.

    Attributes:
        codes: NF4: uint8 [X, O, C / 2], the first of two in the upper half. Float8: float8_e4m3fn [X, O, C].
        scales: NF4: int8 [X, blocks]. Float8: float32 [X, O], or [X, O, C / block], rounded up, for blocks.
        factors, means: of NF4, [X, factors] and [X] in the dtype that was quantised; None for float8.
        table: of NF4, the numbers [16] that the codes stand for; None for float8.
        block: columns that share a scale, of float8 with the scales of a checkpoint; 0 for all others.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    means: Tensor | None
    table: Tensor | None
    block: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["QuantizedExperts"],
        codes: Tensor,
        scales: Tensor,
        factors: Tensor | None,
        means: Tensor | None,
        table: Tensor | None,
        dtype: torch.dtype,
        block: int = 0,
    ) -> "QuantizedExperts":
        X, out, width = codes.shape
        width = width if table is None else 2 * width
        made = torch.Tensor._make_wrapper_subclass(cls, (X, out, width), dtype=dtype, device=codes.device)
        for name, value in zip(ATTRIBUTES, (codes, scales, factors, means, table), strict=True):
            setattr(made, name, value)
        made.block = block
        return made

    @property
    def stored(self) -> list[Tensor]:
        """The stored tensors."""
        return [each for name in ATTRIBUTES if (each := getattr(self, name)) is not None]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the stored tensors."""
        return sum(each.nbytes for each in self.stored)

    def dense(self) -> Tensor:
        """The matrices [X, O, C] in ``dtype``, newly made."""
        X, out, width = self.shape
        if self.block:
            codes, scales = self.codes.view(X * out, width), self.scales.view(X * out, -1)
            return blocks_dense(codes, scales, self.block, self.dtype).view(X, out, width)
        if self.factors is None or self.means is None or self.table is None:
            return float8_dense(self.codes, self.scales, self.dtype)
        packed = self.codes.view(-1), self.scales.view(-1), self.factors.view(-1), self.means, self.table
        layout = X * out, width, out * width // self.scales.shape[1], self.scales.shape[1] // self.factors.shape[1]
        make_nf4 = nf4_dense if use_triton(self.table) else nf4_dense_reference
        return make_nf4(packed, layout, self.dtype).view(X, out, width)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantizedExperts":
        """``function`` of each stored tensor, and of nothing for what is None."""
        kept = {name: each for name in ATTRIBUTES if (each := getattr(self, name)) is not None}
        tensors = {name: function(each) for name, each in kept.items()}
        return self.__tensor_unflatten__(tensors, (dtype or self.dtype, self.block))

    def of_experts(self, function: Callable[[Tensor], Tensor]) -> "QuantizedExperts":
        """``function`` of each stored tensor that has experts in its first dimension."""
        return self.map(lambda each: each if each is self.table else function(each))

    def slice(self, dim: int, rank: int, ranks: int) -> "QuantizedExperts":
        """One of equal slices of each matrix, as a copy with the same numbers. It must have whole blocks.

        Args:
            dim: 1 for slices of rows, 2 for slices of columns.
            rank, ranks: place and number of the slices.
        """
        X, out, width = self.shape
        rows = 1 if dim == 1 else out

        def part(each: Tensor, per_matrix: int) -> Tensor:
            """The slice of what has equal numbers for each matrix, or for each row of it."""
            taken = each.reshape(X, per_matrix, -1).chunk(ranks, 2)[rank]
            return taken.clone(memory_format=torch.contiguous_format).view(X, -1)

        new = [out // ranks, width] if dim == 1 else [out, width // ranks]
        codes, scales, factors = self.codes, self.scales, self.factors
        codes = part(codes, rows).view(X, new[0], -1)
        if factors is not None:
            per_factor = scales.shape[1] // factors.shape[1]
            fewer = scales_per_factor(new, out * width // scales.shape[1], dim - 1, per_factor)
            factors = part(factors.repeat_interleave(per_factor // fewer, 1), rows)
        if factors is not None or dim == 1 or self.block:
            scales = part(scales, rows)
        scales = scales.view(X, new[0], -1) if self.block else scales
        return QuantizedExperts(codes, scales, factors, self.means, self.table, self.dtype, self.block)

    @property
    def kind(self) -> str:
        """ "nf4" or "float8"."""
        return "float8" if self.table is None else "nf4"

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedExperts({self.kind}, {list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int]]:
        return [name for name in ATTRIBUTES if getattr(self, name) is not None], (self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], constants: tuple[torch.dtype, int], *_: Any
    ) -> "QuantizedExperts":
        codes, scales, factors, means, table = (tensors.get(name) for name in ATTRIBUTES)
        assert codes is not None
        assert scales is not None
        return QuantizedExperts(codes, scales, factors, means, table, *constants)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, aten, (self, *rest) = kwargs or {}, torch.ops.aten, args
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return self.map(func)
        if func in (aten._to_copy.default, aten.empty_like.default):
            kept = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if key in kwargs}
            return self.map(lambda each: func(each, **kept), kwargs.get("dtype"))
        if func is aten.view.default and torch.Size(rest[0]) == self.shape:
            return self.map(aten.alias.default)
        if func is aten.split.Tensor and rest[1:] in ([], [0]):
            starts = range(0, self.shape[0], rest[0])
            return [self.of_experts(lambda each, first=first: each[first : first + rest[0]]) for first in starts]
        if func is aten.copy_.default and isinstance(self, cls) and (isinstance(rest[0], cls) or not self.block):
            other = rest[0] if isinstance(rest[0], cls) else quantize_experts(rest[0], self.kind)
            for mine, its in zip(self.stored, other.stored, strict=True):
                mine.copy_(its)
            return self
        raise TypeError(f"QuantizedExperts: {func} has no meaning for codes. Call dense() for the numbers.")


def dense(weight: Tensor) -> Tensor:
    """The matrices as an ordinary tensor, whatever they are stored in."""
    return weight.dense() if isinstance(weight, QuantizedExperts) else weight


def quantize_experts(weight: Tensor, kind: str, device: torch.device | str | None = None) -> QuantizedExperts:
    """Matrices [X, O, C] in NF4, with torchao's numbers for each expert, or in float8.

    Args:
        weight: [X, O, C], floating-point.
        kind: "nf4" or "float8".
        device: the device to which the matrices are moved, one after the other, and where they are quantised. Default:
            that of weight.

    Raises:
        ImportError: torchao is not installed, for "nf4".
        ValueError: for "nf4" the size of an expert's matrix is not a multiple of 64.
    """
    if weight.is_meta:
        return _empty_experts(weight, kind)
    if kind == "float8":
        codes, scales = map(torch.stack, zip(*(quantize_rows_reference(m.to(device)) for m in weight), strict=True))
        return QuantizedExperts(codes, scales, None, None, None, weight.dtype)
    import torchao.quantization as torchao

    X, out, width = weight.shape
    each = [torchao.to_nf4(matrix.to(device), *nf4_layout([out, width])[2:]) for matrix in weight]
    found = ([m.quantized_data, m.quantized_scalers, m.quantization_factor, m.scaler_mean] for m in each)
    codes, scales, factors, means = map(torch.stack, zip(*found, strict=True))
    return QuantizedExperts(codes.view(X, out, width // 2), scales, factors, means, each[0].nf4, weight.dtype)


def _empty_experts(weight: Tensor, kind: str) -> QuantizedExperts:
    """The result of `quantize_experts` for matrices on the meta device. It has no values either."""
    X, out, width = weight.shape
    if kind == "float8":
        codes, rows = torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.new_empty(X, out, dtype=torch.float32)
        return QuantizedExperts(codes, rows, None, None, None, weight.dtype)
    *_, per_scale, per_factor = nf4_layout([out, width])
    blocks, new = out * width // per_scale, weight.new_empty
    return QuantizedExperts(
        new(X, out, width // 2, dtype=torch.uint8), new(X, blocks, dtype=torch.int8), new(X, blocks // per_factor),
        new(X), new(16), weight.dtype,
    )  # fmt: skip


def bytes_of_experts(weight: Tensor, kind: str) -> int:
    """Bytes of the tensors that `quantize_experts` makes of matrices like these, [X, O, C]."""
    X, out, width = weight.shape
    if kind == "float8":
        return X * out * (width + 4)
    *_, per_scale, per_factor = nf4_layout([out, width])
    blocks = out * width // per_scale
    numbers = X * (blocks // per_factor + 1) + 16  # factors, means, and the table
    return X * (out * width // 2 + blocks) + numbers * weight.itemsize


SCHEMA = (
    "Tensor? {0}scales=None, Tensor? {0}factors=None, Tensor? {0}means=None, Tensor? {0}table=None,"
    " ScalarType? {0}dtype=None, int {0}block=0"
)
"""Arguments of an op besides matrices. If they are given, the matrices are codes."""


def experts_for_op(weight: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Matrices as arguments of an op: the tensor, and what `SCHEMA` has besides."""
    if not isinstance(weight, QuantizedExperts):
        return weight, (*[None] * 5, 0)
    rest = weight.scales, weight.factors, weight.means, weight.table, weight.dtype, weight.block
    return weight.codes, rest


def experts_from_op(weight: Tensor, rest: Sequence[Any]) -> Tensor:
    """The inverse of `experts_for_op`; ``rest`` is empty where the dispatcher has left out defaults."""
    return weight if not rest or rest[0] is None else QuantizedExperts(weight, *rest)
