"""A frozen weight in fewer bits, and its formats.

An op dequantizes such a weight right before each product, forward and backward, and frees it after the product. With
few rows, as in a step of decoding, the forward multiplies with the codes instead. Only the stored tensors are saved for
the backward, which takes no extra memory.

Layers, ops, loading, saving and sharding know only the class `FrozenWeight`. A `Format` holds everything that is
specific to one format, and is defined and registered in a single file::

    nf4       `nf4_linear`: 4-bit codes with scales of 8 bits
    float8    `frozen_float8_linear`: e4m3 with a scale for each row, multiplied in float8 where the device can
    blocks    `float8_blocks`: e4m3 with a checkpoint's scales of blocks

The defaults of `Format` suit formats whose codes and scales follow the rows. Such a format only implements `quantize`,
`tensors_like` and `dense`.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.matmul.row_linear import LowRank

MAX_TENSORS = 5
"""Number of tensors that a format may have: the codes and those in `WEIGHT`."""


class FrozenWeight(NamedTuple):
    """A frozen weight [O, C], or the frozen matrices [X, O, C] of X experts, in fewer bits. It has no gradient.

    Ops and layers use it in place of a tensor, so it has some of a tensor's attributes.

    Attributes:
        format: the meaning of the tensors.
        tensors: the stored tensors, in the order of ``format.names``; the codes are first.
        shape: of the dense weight.
        layout: numbers that the format needs to read its tensors.
        dtype: of the dense weight: float32, float16 or bfloat16.
    """

    format: "Format"
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    layout: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def quantize(cls, weight: Tensor, name: str, device: torch.device | str | None = None) -> "FrozenWeight":
        """Quantize a dense weight [O, C], or matrices [X, O, C], each by itself.

        Args:
            weight: floating-point. On the meta device the result has no values either.
            name: of the format.
            device: the device to which the matrices are moved, one after the other, to be quantized. Default: the
                weight's device.

        Raises:
            ImportError: the format needs torchao, which is not installed.
            ValueError: the format does not take matrices of this size.
        """
        format_, shape = FORMATS[name], weight.shape
        layout = format_.layout(shape[-2:])  # raises for a wrong size, before anything is computed
        if weight.is_meta:
            sizes = format_.tensors_like(shape, weight.dtype).values()
            tensors = [weight.new_empty(size, dtype=dtype) for size, dtype in sizes]
        elif weight.dim() == 2:
            tensors = list(format_.quantize(weight.to(device)))
        else:
            # Matrix by matrix, so that only one dense matrix is on the device at a time.
            experts = [format_.quantize_expert(matrix.to(device)) for matrix in weight]
            tensors = [
                matrices[0] if part in format_.shared else torch.stack(matrices)
                for part, matrices in zip(format_.names, zip(*experts, strict=True), strict=True)
            ]
            tensors[0] = tensors[0].view(*shape[:2], -1)  # codes [X, O, ...]
        return cls(format_, tuple(tensors), shape, layout, weight.dtype)

    @classmethod
    def of(cls, weight: Tensor) -> "FrozenWeight | None":
        """The weight of a torchao tensor, sharing its memory; None for any other tensor."""
        weights = (format_.of_torchao(weight) for format_ in FORMATS.values())
        return next((frozen for frozen in weights if frozen is not None), None)

    @property
    def codes(self) -> Tensor:
        """The first of the tensors."""
        return self.tensors[0]

    @property
    def scales(self) -> Tensor:
        """The second of the tensors."""
        return self.tensors[1]

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def itemsize(self) -> int:
        """Bytes of a dense element."""
        return self.dtype.itemsize

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    def dim(self) -> int:
        """2, or 3 for experts."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of dense elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """True, as for the dense weight."""
        return True

    def data_ptr(self) -> int:
        """Always 0, which counts as aligned: the dense weight will be newly allocated."""
        return 0

    def to(self, dtype: torch.dtype) -> "FrozenWeight":
        """The same weight, cast to ``dtype`` when it is dequantized."""
        return self._replace(dtype=dtype)

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized tensor like the dense weight."""
        return self.scales.new_empty(*size, dtype=dtype or self.dtype)

    def split(self, count: int) -> list["FrozenWeight"]:
        """Split the matrices of experts into groups of ``count`` experts."""
        # [X, O, C] -> pieces [count, O, C], views of the same memory; the last one may be smaller.
        X, *matrix = self.shape
        return [
            self._replace(
                tensors=tuple(
                    tensor if name in self.format.shared else tensor[first : first + count]
                    for name, tensor in zip(self.format.names, self.tensors, strict=True)
                ),
                shape=torch.Size([min(count, X - first), *matrix]),
            )
            for first in range(0, X, count)
        ]

    def dense(self) -> Tensor:
        """The weight in ``dtype``, newly allocated."""
        return self.format.dense(self)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias`` inside an op."""
        rows = self.format.few_rows(self, x, bias)
        return self.format.product(self, x, bias) if rows is None else rows[0]

    def __repr__(self) -> str:
        return f"FrozenWeight({self.format.name}, {list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


class Format:
    """How a weight is stored in fewer bits. `register` makes an instance known by its name.

    A matrix [O, C] has codes and some other tensors. The tensors of experts have one more dimension in front, except
    the `shared` tensors. As parameters, the tensors are sharded along their first dimension (`apply_fsdp`, `apply_ep`)
    or by `slices` (`apply_tp`).
    """

    name: ClassVar[str]
    number: ClassVar[int]
    """The format as an argument of ops. It must not change, since compiled graphs are cached."""
    names: ClassVar[tuple[str, ...]] = ("codes", "scales")
    """Names of the tensors, at most `MAX_TENSORS`; the codes are first."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that all experts have in common."""
    by_column: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors besides the codes that have numbers for columns, in their last dimension."""
    rounds_inputs: ClassVar[bool] = False
    """Whether products round x, too, so that a row's result depends on the kernel that computes it."""
    is_kept: ClassVar[bool] = False
    """Whether the tensors come from a checkpoint and are saved unchanged. Such a weight cannot be quantized."""
    in_common: ClassVar[bool] = False
    """Whether ranks that have parts of a matrix [O, C] quantize it together; see `quantize_part`."""
    remedy: ClassVar[str] = "another format"
    """What to use instead where a slice would end within a block."""

    def layout(self, matrix: Sequence[int]) -> list[int]:
        """The integers needed to read the tensors of a matrix [O, C]; raises ValueError for an unsupported size."""
        return []

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Name, shape and dtype of each tensor of a weight [O, C] or [X, O, C] whose dense dtype is ``dtype``."""
        raise NotImplementedError

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the tensors of a weight [O, C] or [X, O, C]."""
        return sum(math.prod(size) * stored.itemsize for size, stored in self.tensors_like(shape, dtype).values())

    def quantize(self, matrix: Tensor) -> Sequence[Tensor]:
        """The tensors of a dense matrix [O, C]."""
        raise NotImplementedError

    def quantize_expert(self, matrix: Tensor) -> Sequence[Tensor]:
        """`quantize` for the matrix of one expert."""
        return self.quantize(matrix)

    def of_torchao(self, weight: Any) -> FrozenWeight | None:
        """The weight of a torchao tensor subclass, sharing its memory; None for any other tensor."""
        return None

    def dense(self, weight: FrozenWeight) -> Tensor:
        """The weight in its dtype, newly allocated."""
        raise NotImplementedError

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """As the function `few_rows`; None if the format has no such kernel for x."""
        return None

    def product(self, weight: FrozenWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias`` for any number of rows."""
        return F.linear(x, self.dense(weight), bias)

    def input_product(self, weight: FrozenWeight, dy: Tensor) -> Tensor:
        """``dy @ W``."""
        return dy @ self.dense(weight)

    def pack(self, weight: FrozenWeight) -> dict[str, Tensor]:
        """The tensors by name, in the shapes in which they are sharded."""
        return dict(zip(self.names, weight.tensors, strict=True))

    def unpack(self, tensors: dict[str, Tensor], shape: torch.Size, layout: Sequence[int]) -> tuple[Tensor, ...]:
        """The inverse of `pack`, for a whole weight or for a slice (`slices`), of the given shape and layout."""
        return tuple(tensors.values())

    def block(self, layout: Sequence[int], *, rows: bool) -> int:
        """The unit of slices: the elements of a slice of rows, or the columns of a slice, must be a multiple of it."""
        return 1

    def slices(
        self, tensors: dict[str, Tensor], shape: torch.Size, layout: list[int], dim: int, ranks: int
    ) -> tuple[dict[str, Tensor], list[int], dict[str, int]]:
        """Rearrange the tensors of `pack` so that equal parts of them are equal slices of the weight.

        Args:
            tensors: of the whole weight.
            shape: of the whole weight, [O, C] or [X, O, C].
            layout: of the whole weight.
            dim: the dimension along which the weight is sliced. Slices have whole blocks.
            ranks: number of slices.

        Returns:
            The tensors, their layout, and the dimension along which each sliced tensor is sliced. The other tensors are
            the same in every slice.
        """
        if dim == len(shape) - 1:
            return tensors, layout, dict.fromkeys(("codes", *self.by_column), dim)
        return tensors, layout, {name: dim for name in tensors if name not in self.shared}

    def quantize_part(self, numbers: Tensor, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Quantize one rank's numbers [n, K], n rows of a matrix's codes, if ranks quantize the matrix `in_common`.

        Returns:
            The codes, and statistics [n, m] that the ranks exchange; see `finish`.
        """
        raise NotImplementedError

    def finish(self, statistics: Tensor, layout: Sequence[int]) -> Sequence[Tensor]:
        """All tensors of the whole matrix except its codes, from the statistics [N, m] of all ranks."""
        raise NotImplementedError


FORMATS: dict[str, Format] = {}
"""Name -> format."""
_NUMBERS: dict[int, Format] = {}


def format_numbered(number: int) -> Format:
    """The format with a number."""
    return _NUMBERS[number]


def register(format_class: type[Format]) -> type[Format]:
    """Register a format; a decorator of its class. Raises ValueError if the name or number is taken."""
    if format_class.name in FORMATS or format_class.number in _NUMBERS:
        raise ValueError(
            f"register: name and number of a format must be new, got {format_class.name!r} and {format_class.number}."
        )
    FORMATS[format_class.name] = _NUMBERS[format_class.number] = format_class()
    return format_class
