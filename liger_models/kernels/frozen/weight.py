"""A frozen, quantized weight, and the base class of its formats.

In the forward and in the backward, an op dequantizes the weight right before each product, and frees the dequantized
weight after the product. If the input has few rows, as in a decoding step, the forward multiplies the rows by the codes
without dequantizing the weight in memory. For the backward, only the stored tensors are saved. This takes no additional
memory, because the model holds these tensors anyway.

The code of layers, ops, loading, saving and sharding depends only on the class `FrozenWeight`. Everything that is
specific to a format is in a subclass of `Format`. Each format is defined and registered in its own file. The first two
formats quantize dense weights, and the other formats keep the codes and scales of a checkpoint::

    nf4       `nf4_linear`: 4-bit codes with 8-bit scales
    float8    `frozen_float8_linear`: e4m3 codes with one scale per row, with products in float8 where possible
    blocks    `float8_blocks`: e4m3 codes with one scale per block, row or matrix
    mxfp4     `mxfp4`: 4-bit codes with a power of 2 per 32 columns
    nvfp4     `nvfp4`: 4-bit codes with an 8-bit scale per 16 columns
    int4      `int4`: 4-bit integers with one scale per group of columns
    bnb_nf4   `bnb_nf4`: the codes of nf4 with the scales of bitsandbytes

`groups` has the kernels that the last four formats share.

The default methods of `Format` suit formats in which each row of the weight has its own codes and scales. Such a format
needs to implement only `quantize`, `tensors_like` and `dense`.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.matmul.row_linear import LowRank

MAX_TENSORS = 5
"""Maximum number of tensors of a format, which is the number of tensors in `WEIGHT`."""


class FrozenWeight(NamedTuple):
    """A frozen, quantized weight [O, C], or the matrices [X, O, C] of X experts. A frozen weight has no gradient.

    Ops and layers take a frozen weight in place of a tensor, so this class has some attributes of a tensor.

    Attributes:
        format: the format, which defines the meaning of the tensors.
        tensors: the stored tensors, in the order of ``format.names``; the codes are first.
        shape: shape of the dense weight.
        layout: integers that the format needs to read the tensors.
        dtype: dtype of the dense weight: float32, float16 or bfloat16.
    """

    format: "Format"
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    layout: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def quantize(cls, weight: Tensor, name: str, device: torch.device | str | None = None) -> "FrozenWeight":
        """Quantize a dense weight [O, C], or each of the matrices [X, O, C] of X experts separately.

        Args:
            weight: a floating-point tensor. If the tensor is on the meta device, the result has no values either.
            name: name of the format.
            device: the device on which the matrices are quantized. The matrices are moved to this device one after the
                other. Default: the weight's device.

        Raises:
            ImportError: the format needs torchao, which is not installed.
            ValueError: the format does not support matrices of this size.
        """
        format_, shape = FORMATS[name], weight.shape
        layout = format_.layout(shape[-2:])  # raises for a wrong size, before anything is computed
        if weight.is_meta:
            sizes = format_.tensors_like(shape, weight.dtype).values()
            tensors = [weight.new_empty(size, dtype=dtype) for size, dtype in sizes]
        elif weight.dim() == 2:
            tensors = list(format_.quantize(weight.to(device)))
        else:
            # Quantize matrix by matrix, so that only one dense matrix is on the device at a time.
            experts = [format_.quantize_expert(matrix.to(device)) for matrix in weight]
            tensors = [
                per_expert[0] if tensor_name in format_.shared else torch.stack(per_expert)
                for tensor_name, per_expert in zip(format_.names, zip(*experts, strict=True), strict=True)
            ]
            tensors[0] = tensors[0].view(*shape[:2], -1)  # codes [X, O, ...]
        return cls(format_, tuple(tensors), shape, layout, weight.dtype)

    @classmethod
    def of(cls, weight: Tensor) -> "FrozenWeight | None":
        """Wrap a torchao tensor without copying its memory. Return None for any other tensor."""
        wrapped = (format_.of_torchao(weight) for format_ in FORMATS.values())
        return next((frozen for frozen in wrapped if frozen is not None), None)

    @property
    def codes(self) -> Tensor:
        """The codes, which are the first tensor."""
        return self.tensors[0]

    @property
    def scales(self) -> Tensor:
        """The scales, which are the second tensor."""
        return self.tensors[1]

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def itemsize(self) -> int:
        """Size of an element of the dense weight in bytes."""
        return self.dtype.itemsize

    @property
    def requires_grad(self) -> bool:
        """Always False, because the weight is frozen."""
        return False

    def dim(self) -> int:
        """Return the number of dimensions: 2 for a matrix, and 3 for experts."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements of the dense weight."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return True, because the dense weight is floating-point."""
        return True

    def data_ptr(self) -> int:
        """Return 0, so that checks of the alignment of a weight succeed.

        Products read the dequantized weight, which is newly allocated and therefore aligned.
        """
        return 0

    def to(self, dtype: torch.dtype) -> "FrozenWeight":
        """Return a weight that shares the stored tensors, but is dequantized to ``dtype``."""
        return self._replace(dtype=dtype)

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an uninitialized tensor on the weight's device. The default dtype is the dtype of the dense
        weight.
        """
        return self.scales.new_empty(*size, dtype=dtype or self.dtype)

    def split(self, count: int) -> list["FrozenWeight"]:
        """Split the matrices of experts into groups of ``count`` experts."""
        # [X, O, C] -> pieces [count, O, C]. The pieces are views of the same memory, and the last one may be smaller.
        X, *matrix = self.shape
        pieces = []
        for first in range(0, X, count):
            tensors = tuple(
                tensor if name in self.format.shared else tensor[first : first + count]
                for name, tensor in zip(self.format.names, self.tensors, strict=True)
            )
            pieces.append(self._replace(tensors=tensors, shape=torch.Size([min(count, X - first), *matrix])))
        return pieces

    def dense(self) -> Tensor:
        """Dequantize the weight to a new tensor in ``self.dtype``."""
        return self.format.dense(self)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias`` inside an op."""
        rows = self.format.few_rows(self, x, bias)
        return self.format.product(self, x, bias) if rows is None else rows[0]

    def __repr__(self) -> str:
        return f"FrozenWeight({self.format.name}, {list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


class Format:
    """A format in which quantized weights are stored.

    `register` creates the only instance of a format, and `FORMATS` maps the format's name to this instance. A matrix
    [O, C] is stored as codes and other tensors, such as scales. For experts, each tensor except the `shared` tensors
    has one more dimension in front. The tensors become parameters of a layer. `apply_fsdp` and `apply_ep` shard these
    parameters along the first dimension, and `apply_tp` shards them as `slices` describes.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    """Number that represents the format in arguments of ops. The number must not change, because cached compiled graphs
    contain it."""
    names: ClassVar[tuple[str, ...]] = ("codes", "scales")
    """Names of the tensors, at most `MAX_TENSORS`; the codes are first."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that all experts have in common."""
    by_column: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors, besides the codes, whose last dimension corresponds to the columns of the weight."""
    rounds_inputs: ClassVar[bool] = False
    """Whether some products also round x, so that a row's result depends on which kernel computes it."""
    is_kept: ClassVar[bool] = False
    """Whether the tensors come from a checkpoint and are saved unchanged. If so, dense weights cannot be quantized to
    this format."""
    in_common: ClassVar[bool] = False
    """Whether the ranks that hold the parts of a matrix [O, C] must exchange statistics to quantize it; see
    `quantize_part`."""
    remedy: ClassVar[str] = "another format"
    """What error messages recommend instead of this format if a slice would end inside a block."""

    def layout(self, matrix: Sequence[int]) -> list[int]:
        """Return the integers that are needed to read the tensors of a matrix [O, C].

        Raises:
            ValueError: the format does not support matrices of this size.
        """
        return []

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return the name, shape and dtype of each tensor that stores a weight [O, C] or [X, O, C] of this dtype."""
        raise NotImplementedError

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of bytes that a stored weight [O, C] or [X, O, C] takes."""
        return sum(math.prod(size) * stored.itemsize for size, stored in self.tensors_like(shape, dtype).values())

    def quantize(self, matrix: Tensor) -> Sequence[Tensor]:
        """Quantize a dense matrix [O, C], and return the tensors that store it."""
        raise NotImplementedError

    def quantize_expert(self, matrix: Tensor) -> Sequence[Tensor]:
        """Quantize the matrix of one expert, by default as `quantize` does."""
        return self.quantize(matrix)

    def of_torchao(self, weight: Any) -> FrozenWeight | None:
        """Wrap a torchao tensor of this format without copying its memory. Return None for any other tensor."""
        return None

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight to a new tensor in the dtype of the weight."""
        raise NotImplementedError

    def reference(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight as `dense` does, but in plain PyTorch.

        Only formats whose `is_kept` is True need this method.
        """
        raise NotImplementedError

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply x, which has few rows, by the weight, as the function `products.few_rows` does.

        Return None if the format has no kernel for x.
        """
        return None

    def product(self, weight: FrozenWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias`` for any number of rows."""
        return F.linear(x, self.dense(weight), bias)

    def input_product(self, weight: FrozenWeight, dy: Tensor) -> Tensor:
        """Compute ``dy @ W``."""
        return dy @ self.dense(weight)

    def pack(self, weight: FrozenWeight) -> dict[str, Tensor]:
        """Return the weight's tensors by name, in the shapes that the layer's parameters have and `slices` expects."""
        return dict(zip(self.names, weight.tensors, strict=True))

    def unpack(self, tensors: dict[str, Tensor], shape: torch.Size, layout: Sequence[int]) -> tuple[Tensor, ...]:
        """Invert `pack` for a weight with the given shape and layout. The weight may also be a slice from `slices`."""
        return tuple(tensors.values())

    def block(self, layout: Sequence[int], *, rows: bool) -> int:
        """Return the block size. The size of a slice must be a multiple of the block size.

        With ``rows``, a slice consists of rows, and its size is its number of elements. Otherwise, a slice consists of
        columns, and its size is its number of columns.
        """
        return 1

    def slices(
        self, tensors: dict[str, Tensor], shape: torch.Size, layout: list[int], dim: int, ranks: int
    ) -> tuple[dict[str, Tensor], list[int], dict[str, int]]:
        """Rearrange the tensors from `pack` so that dividing them into equal parts gives the slices of the weight.

        Args:
            tensors: tensors of the whole weight.
            shape: shape of the whole weight, [O, C] or [X, O, C].
            layout: layout of the whole weight.
            dim: dimension along which the weight is sliced. Each slice must consist of whole blocks.
            ranks: number of slices, which have equal sizes.

        Returns:
            The tensors, the layout of each slice, and a dict from the name of each divided tensor to the dimension
            along which it is divided. The other tensors are the same in every slice.
        """
        if dim == len(shape) - 1:
            return tensors, layout, dict.fromkeys(("codes", *self.by_column), dim)
        return tensors, layout, {name: dim for name in tensors if name not in self.shared}

    def quantize_part(self, numbers: Tensor, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Quantize one rank's part of a matrix. `finish` then completes the matrix.

        Only formats with `in_common` have this method.

        Args:
            numbers: [n, K], the elements of the dense weight that are stored in n rows of the codes.
            layout: layout of the matrix.

        Returns:
            The codes, and statistics [n, m] that the ranks exchange for `finish`.
        """
        raise NotImplementedError

    def finish(self, statistics: Tensor, layout: Sequence[int]) -> Sequence[Tensor]:
        """Compute the tensors that store the matrix besides its codes, such as scales, from the statistics [N, m] that
        `quantize_part` has returned on all ranks."""
        raise NotImplementedError


FORMATS: dict[str, Format] = {}
"""Maps the name of each format to the format."""
_NUMBERS: dict[int, Format] = {}


def format_numbered(number: int) -> Format:
    """Return the format with this number."""
    return _NUMBERS[number]


def register(format_class: type[Format]) -> type[Format]:
    """Register a format. Use this function as a decorator of the format's class.

    Raises:
        ValueError: another format has this name or number.
    """
    if format_class.name in FORMATS or format_class.number in _NUMBERS:
        raise ValueError(
            f"register: name and number of a format must be new, got {format_class.name!r} and {format_class.number}."
        )
    FORMATS[format_class.name] = _NUMBERS[format_class.number] = format_class()
    return format_class
