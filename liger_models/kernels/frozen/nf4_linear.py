"""A linear layer whose frozen weight is stored in 4 bits (NF4, in torchao's layout).

    W = table[code] · scale,   scale = cast(code of the scale / factor) + mean        y = x · Wᵀ + b,   dx = dy · W

The forward and the backward each dequantize W in one pass, and free the dequantized W after the product. The
dequantized W is bitwise identical to the result of torchao's ``get_original_weight``, because every step is rounded to
the dtype that W had before it was quantized. If x has few rows, as in a decoding step, the forward runs `nf4_rows`. W
is stored in these tensors::

    codes      two codes per byte, the first one in the upper half
    scales     one int8 number (the code of the scale) per block of 64 codes
    factors    one factor per block of at most 256 scales
    mean       one number for the whole matrix

For the backward, only these tensors are saved. This takes no additional memory, because the model holds these tensors
anyway.

Source: https://arxiv.org/abs/2305.14314.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.groups import PIECES, in_pieces, load_pieces
from liger_models.kernels.frozen.nf4_rows import Packed, nf4_rows, nf4_scale, takes_nf4_rows
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import Format, FrozenWeight, register
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.tiles import cdiv

NF4_BLOCK, MOST_SCALES = 64, 256
"""Number of codes per scale, and maximum number of scales per factor."""


@triton.jit
def _nf4_weight_kernel(
    code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, w_ptr, pieces, PIECES_PER_MEAN: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr, PIECES_PER_SCALE: tl.constexpr, NUMBERS: tl.constexpr, PIECES: tl.constexpr,
    LARGE: tl.constexpr,
):  # fmt: skip
    """Dequantize PIECES pieces per program. The pieces are divided among the threads; see `load_pieces`."""
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    first, lane, piece, inside, codes = load_pieces(code_ptr, pieces, NUMBERS, PIECES, LARGE)
    if PIECES_PER_MEAN:
        mean_ptr += piece // PIECES_PER_MEAN
    mean = tl.load(mean_ptr, mask=inside if PIECES_PER_MEAN else None).to(tl.float32)
    scale = nf4_scale(scale_ptr, factor_ptr, mean, piece // PIECES_PER_SCALE, inside, dtype, SCALES_PER_FACTOR)
    number = tl.arange(0, NUMBERS)[None, :]
    code = (codes >> (4 * (number ^ 1))) & 15  # the first number of a byte is in its upper half
    numbers = (tl.load(table_ptr + code).to(tl.float32) * scale[:, None]).to(dtype).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + first * NUMBERS + lane[:, None] * NUMBERS + number, numbers, mask=inside[:, None])


def nf4_layout(shape: Sequence[int]) -> list[int]:
    """Return the layout of a quantized matrix: rows, columns, codes per scale, and scales per factor.

    Raises:
        ValueError: the number of elements is not a multiple of 64.
    """
    size = math.prod(shape)
    if size % NF4_BLOCK != 0:
        raise ValueError(f"quantize_base: weights must have a multiple of {NF4_BLOCK} elements, got {list(shape)}.")
    return [*shape, NF4_BLOCK, math.gcd(size // NF4_BLOCK, MOST_SCALES)]


def nf4_dense(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantize the weight [rows, columns], round it to the dtype of the table, and cast it to ``dtype``.

    Args:
        packed: codes, scales, factors, mean and table. If there are several means, the rows are divided into as many
            equal parts, and each part has its own mean.
        layout: rows, columns, codes per scale, and scales per factor.
        dtype: float32, float16 or bfloat16.
    """
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    weight = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    pieces, launch = in_pieces(codes, codes_per_scale // 2)
    per_mean = pieces // mean.numel() if mean.numel() > 1 else 0
    with on_device_of(codes):
        _nf4_weight_kernel[(cdiv(pieces, PIECES),)](
            codes, scales, factors, mean, table, weight, pieces, PIECES_PER_MEAN=per_mean,
            SCALES_PER_FACTOR=per_factor, **launch,
        )  # fmt: skip
    return weight


def nf4_dense_reference(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute `nf4_dense` in plain PyTorch."""
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    scale = (scales.view(-1, per_factor) / factors.view(-1, 1)).to(table.dtype)
    scale = scale.view(mean.numel(), -1) + mean.view(-1, 1)
    numbers = table[torch.stack([codes >> 4, codes & 15], -1).long()]
    return (numbers.view(-1, codes_per_scale) * scale.view(-1, 1)).view(rows, columns).to(dtype)


def nf4_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ Wᵀ + bias`` with a frozen weight in NF4.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: torchao's ``NF4Tensor`` of shape [O, C]. The weight gets no gradient.
        bias: [O] or None.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        ValueError: the shapes do not match.
    """
    frozen = FrozenWeight.of(weight)
    assert frozen is not None
    return quantized_linear(x, frozen, bias)


TABLE = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
"""The numbers that the 16 codes stand for, as in torchao."""


@register
class NormalFloat4(Format):
    """The format with 4-bit codes as in torchao. A weight's layout is ``[codes per scale, scales per factor]``.

    A matrix [O, C], or a stack [X, O, C] of the matrices of X experts, is stored in the following tensors. The original
    dtype is the dtype that the matrix had before it was quantized::

                   a matrix                  X experts
        codes      uint8 [O · C / 2]         [X, O, C / 2]
        scales     int8 [blocks]             [X, blocks]
        factors    [factors]                 [X, factors]      in the original dtype
        means      []                        [X]               in the original dtype
        table      [16]                      [16]              in the original dtype

    A block of codes that share a scale may begin in one row of the matrix and end in the next. If a matrix is stored as
    parameters of a layer (see `pack`), codes and scales have one row per block, and factors, mean and table are
    concatenated to one tensor, ``factors``.

    For tensor parallelism (`slices`), each rank needs the factors of its own scales, but scales that share a factor may
    be in different slices. Several copies of each factor are therefore stored. Each copy then belongs to a shorter run
    of consecutive scales, which are all in the same slice. Every rank also needs the mean and the table. `slices`
    therefore moves these two to a separate tensor, ``constants``.
    """

    name = "nf4"
    number = 1
    names = ("codes", "scales", "factors", "means", "table")
    shared = ("table",)
    in_common = True
    remedy = 'dtype="float8" in quantize_base'

    def layout(self, matrix: Sequence[int]) -> list[int]:
        """Return the layout ``[codes per scale, scales per factor]``; see `nf4_layout`."""
        return nf4_layout(matrix)[2:]

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return the shapes and dtypes of the tensors that the docstring of this class lists."""
        *experts, rows, columns = shape
        per_scale, per_factor = self.layout((rows, columns))
        blocks = rows * columns // per_scale
        codes = [*experts, rows, columns // 2] if experts else [rows * columns // 2]
        return {
            "codes": (codes, torch.uint8),
            "scales": ([*experts, blocks], torch.int8),
            "factors": ([*experts, blocks // per_factor], dtype),
            "means": (experts, dtype),
            "table": ([len(TABLE)], dtype),
        }

    def quantize(self, matrix: Tensor) -> Sequence[Tensor]:
        """Quantize a matrix with torchao."""
        import torchao.quantization as torchao

        packed = self.of_torchao(torchao.to_nf4(matrix, *self.layout(matrix.shape)))
        assert packed is not None
        return packed.tensors

    def of_torchao(self, weight: Any) -> FrozenWeight | None:
        """Wrap torchao's ``NF4Tensor`` [O, C]. Return None for any other tensor."""
        if not hasattr(weight, "get_original_weight"):
            return None
        tensors = (
            weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean, weight.nf4,
        )  # fmt: skip
        return FrozenWeight(self, tensors, weight.shape, [weight.block_size, weight.scaler_block_size], weight.dtype)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight, or the weights of all experts in one call; see `nf4_dense`."""
        packed, sizes = self._packed(weight), self._sizes(weight)
        dequantize = nf4_dense if use_triton(packed[-1]) else nf4_dense_reference
        return dequantize(packed, sizes, weight.dtype).view(weight.shape)

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply x, which has few rows, by the weight; see `nf4_rows`."""
        packed, sizes = self._packed(weight), self._sizes(weight)
        return nf4_rows(x, bias, packed, sizes, act, low_rank) if takes_nf4_rows(x, packed, sizes) else None

    def pack(self, weight: FrozenWeight) -> dict[str, Tensor]:
        """For experts, return the tensors unchanged. For a single matrix, give codes and scales one row per block, and
        concatenate factors, mean and table.
        """
        if len(weight.shape) == 3:
            return super().pack(weight)
        codes, scales, factors, mean, table = weight.tensors
        numbers = torch.cat([factors, mean.view(1), table])
        return {"codes": codes.view(len(scales), -1), "scales": scales.view(-1, 1), "factors": numbers}

    def unpack(self, tensors: dict[str, Tensor], shape: torch.Size, layout: Sequence[int]) -> tuple[Tensor, ...]:
        """Invert `pack`, and flatten the tensors for the kernels; see `Format.unpack`."""
        if len(shape) == 3:
            codes, scales, factors, means, table = tensors.values()
            return codes, scales.flatten(1), factors.flatten(1), means, table
        codes, scales, factors = (tensors[name].flatten() for name in ("codes", "scales", "factors"))
        if "constants" in tensors:
            constants = tensors["constants"]
        else:
            factors, constants = factors.split([len(factors) - len(TABLE) - 1, len(TABLE) + 1])
        return codes, scales, factors, constants[0], constants[1:]

    def block(self, layout: Sequence[int], *, rows: bool) -> int:
        """Return the number of codes that share a scale. These codes may be in one row or in several rows."""
        return layout[0]

    def slices(
        self, tensors: dict[str, Tensor], shape: torch.Size, layout: list[int], dim: int, ranks: int
    ) -> tuple[dict[str, Tensor], list[int], dict[str, int]]:
        """Rearrange the tensors from `pack` for slicing; see `Format.slices`."""
        if dim == len(shape) - 3:  # whole experts
            return super().slices(tensors, shape, layout, dim, ranks)
        *experts, rows, columns = shape
        block, per_factor = layout
        by_columns = dim == len(shape) - 1

        # ``fewer`` is the number of consecutive scales that share a copy of a factor after slicing.
        scales = (columns // ranks if by_columns else rows // ranks * columns) // block
        fewer = math.gcd(scales, per_factor)
        tensors = dict(tensors)
        if not experts:
            numbers = tensors["factors"]
            tensors["factors"], tensors["constants"] = numbers.split([len(numbers) - len(TABLE) - 1, len(TABLE) + 1])
        tensors["factors"] = tensors["factors"].repeat_interleave(per_factor // fewer, -1)
        if by_columns:  # [rows, numbers of a row]
            for name in ("codes", "scales", "factors"):
                tensors[name] = tensors[name].reshape(*experts, rows, -1)
        return tensors, [block, fewer], dict.fromkeys(("codes", "scales", "factors"), dim)

    def quantize_part(self, numbers: Tensor, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the codes, and the maximum absolute value of each block, from which `finish` computes the scales."""
        import torchao.quantization as torchao

        blocks = numbers.reshape(-1, layout[0])
        codes: Any = torchao.to_nf4(blocks.flatten(), layout[0], len(blocks))
        return codes.quantized_data.view(len(numbers), -1), blocks.abs().amax(1).view(len(numbers), -1)

    def finish(self, statistics: Tensor, layout: Sequence[int]) -> Sequence[Tensor]:
        """Compute scales, factors, mean and table from the maximum absolute values of all blocks, as torchao does."""
        largest, per_factor = statistics.flatten(), layout[1]
        mean = largest.mean()
        centered = (largest - mean).view(-1, per_factor)  # [factors, scales of a factor]
        factors = 256 / (2 * centered.abs().amax(1))
        scales = (centered * factors[:, None]).round().clamp(-128, 127).to(torch.int8)
        table = torch.tensor(TABLE, dtype=largest.dtype, device=largest.device)
        return scales.flatten(), factors, mean, table

    @staticmethod
    def _packed(weight: FrozenWeight) -> Packed:
        codes, scales, factors, means, table = weight.tensors
        return codes.view(-1), scales.view(-1), factors.view(-1), means, table

    @staticmethod
    def _sizes(weight: FrozenWeight) -> list[int]:
        """Return the number of rows (of all experts together), the number of columns, and the layout."""
        return [math.prod(weight.shape[:-1]), weight.shape[-1], *weight.layout]
