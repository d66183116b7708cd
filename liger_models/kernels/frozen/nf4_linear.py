"""A linear layer whose frozen weight is stored in 4 bits (NF4, in torchao's layout).

    W = table[code] · scale,   scale = cast(code of the scale / factor) + mean        y = x · Wᵀ + b,   dx = dy · W

W is dequantised in one pass, in the weight's dtype, by the forward and again by the backward, and freed after the
product. It equals torchao's ``get_original_weight`` bit for bit: every step is rounded to the weight's dtype. The
forward of few rows, as in a step of decoding, is that of `nf4_rows`.

    codes      two per byte, the first in the upper half
    scales     one int8 per block of 64 codes
    factors    one per block of at most 256 scales; one mean for all

Saved: only the quantised weight, which exists anyway.

Source: https://arxiv.org/abs/2305.14314.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.nf4_rows import Packed, nf4_rows, nf4_scale, takes_nf4_rows
from liger_models.kernels.matmul.batch_invariance import product

NF4_BLOCK, MOST_SCALES = 64, 256
"""Numbers with one scale, and at most so many scales with one factor."""

BLOCK = 1024
NUM_WARPS = 4
"""Bytes of codes that a program reads, and its warps. A thread stores the numbers of the bytes that it has read, so
nothing is exchanged between threads."""


@triton.jit
def _nf4_weight_kernel(
    code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, w_ptr, pieces,
    PAIRS: tl.constexpr, PIECES_PER_SCALE: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr,
    PIECES_PER_MEAN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A piece is PAIRS bytes of codes with one scale, which is read and computed once for the piece."""
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    pairs, numbers = tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    piece = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    inside = piece < pieces
    mask = inside[:, None]
    if PIECES_PER_MEAN:
        mean_ptr += piece // PIECES_PER_MEAN
    mean = tl.load(mean_ptr, mask=inside if PIECES_PER_MEAN else None).to(tl.float32)
    scale = nf4_scale(scale_ptr, factor_ptr, mean, piece // PIECES_PER_SCALE, inside, dtype, SCALES_PER_FACTOR)
    pair = tl.load(code_ptr + piece[:, None] * PAIRS + pairs[None, :], mask=mask, other=0).to(tl.int32)
    first = tl.load(table_ptr + (pair >> 4)).to(tl.float32) * scale[:, None]
    second = tl.load(table_ptr + (pair & 15)).to(tl.float32) * scale[:, None]
    both = tl.interleave(first, second).to(dtype).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + piece[:, None] * (2 * PAIRS) + numbers[None, :], both, mask=mask)


def nf4_layout(shape: Sequence[int]) -> list[int]:
    """How a matrix is quantised: rows, columns, codes for each scale, scales for each factor.

    Raises:
        ValueError: its numbers are not a multiple of 64.
    """
    size = math.prod(shape)
    if size % NF4_BLOCK != 0:
        raise ValueError(f"quantize_base: weights must have a multiple of {NF4_BLOCK} elements, got {list(shape)}.")
    return [*shape, NF4_BLOCK, math.gcd(size // NF4_BLOCK, MOST_SCALES)]


def scales_per_factor(shape: Sequence[int], block: int, dim: int, per_factor: int) -> int:
    """Successive scales of a slice of a matrix that have the same factor, in each of equal slices.

    Args:
        shape: of the slice: rows, columns.
        block: numbers with one scale. The slice has whole blocks.
        dim: 0 for slices of rows, 1 for slices of columns.
        per_factor: scales of the whole matrix that have the same factor.
    """
    return math.gcd((math.prod(shape) if dim == 0 else shape[1]) // block, per_factor)


def nf4_dense(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Launch the kernel: the weight [rows, columns], rounded to the dtype of the table and then cast to ``dtype``.

    Args:
        packed: codes, scales, factors, mean, table. Several means are those of equal parts of the rows.
        layout: rows, columns, codes for each scale, scales for each factor.
        dtype: float32, float16 or bfloat16.
    """
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    weight = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    bytes_ = codes_per_scale // 2
    pairs = min(bytes_ & -bytes_, BLOCK)  # a power of two that divides the bytes of a scale
    pieces, step = codes.numel() // pairs, BLOCK // pairs
    with on_device_of(codes):
        _nf4_weight_kernel[(triton.cdiv(pieces, step),)](
            codes, scales, factors, mean, table, weight, pieces, PAIRS=pairs, PIECES_PER_SCALE=bytes_ // pairs,
            SCALES_PER_FACTOR=per_factor, PIECES_PER_MEAN=pieces // mean.numel() if mean.numel() > 1 else 0,
            PIECES=step, num_warps=NUM_WARPS,
        )  # fmt: skip
    return weight


def nf4_dense_reference(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `nf4_dense` computes, in plain torch."""
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    scale = (scales.view(-1, per_factor) / factors.view(-1, 1)).to(table.dtype)
    scale = scale.view(mean.numel(), -1) + mean.view(-1, 1)
    numbers = table[torch.stack([codes >> 4, codes & 15], -1).long()]
    return (numbers.view(-1, codes_per_scale) * scale.view(-1, 1)).view(rows, columns).to(dtype)


_PACKED = (
    "Tensor codes, Tensor scales, Tensor factors, Tensor mean, Tensor table, int rows, int columns, "
    "int codes_per_scale, int scales_per_factor"
)
LIBRARY.define(f"nf4_linear(Tensor x, Tensor? bias, {_PACKED}) -> Tensor")
LIBRARY.define(f"nf4_linear_backward(Tensor dy, {_PACKED}) -> Tensor")


@torch.library.impl(LIBRARY, "nf4_linear", "CompositeExplicitAutograd")
def _nf4_linear(x, bias, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    packed, sizes = (codes, scales, factors, mean, table), (rows, columns, codes_per_scale, scales_per_factor)
    if takes_nf4_rows(x, packed, sizes):
        return nf4_rows(x, bias, packed, sizes)[0]
    return product(x, nf4_dense(packed, sizes, x.dtype), bias)


@torch.library.impl(LIBRARY, "nf4_linear_backward", "CompositeExplicitAutograd")
def _nf4_linear_backward(dy, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    packed, sizes = (codes, scales, factors, mean, table), (rows, columns, codes_per_scale, scales_per_factor)
    return dy @ nf4_dense(packed, sizes, dy.dtype)


@torch.library.register_fake("liger_models::nf4_linear", lib=LIBRARY)
def _nf4_linear_fake(x, bias, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.register_fake("liger_models::nf4_linear_backward", lib=LIBRARY)
def _nf4_linear_backward_fake(
    dy, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor
):
    return dy.new_empty(*dy.shape[:-1], columns)


def _setup(ctx, inputs, output):
    _, bias, *packed, ctx.rows, ctx.columns, ctx.codes_per_scale, ctx.scales_per_factor = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(*packed)


def _backward(ctx, dy):
    sizes = ctx.rows, ctx.columns, ctx.codes_per_scale, ctx.scales_per_factor
    needs_x, needs_bias = ctx.needs_input_grad[:2]
    dx = torch.ops.liger_models.nf4_linear_backward(dy, *ctx.saved_tensors, *sizes) if needs_x else None
    d_bias = dy.flatten(0, -2).sum(0) if ctx.has_bias and needs_bias else None
    return dx, d_bias, *[None] * 9


register_autograd("nf4_linear", _backward, _setup)


def nf4_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """``x @ Wᵀ + bias`` with a frozen weight in NF4.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: torchao's ``NF4Tensor`` of shape [O, C]. It gets no gradient.
        bias: [O] or None.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        ValueError: the shapes do not match.
    """
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(
            f"nf4_linear: x must be [..., {columns}] for a weight {list(weight.shape)}, got {list(x.shape)}."
        )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if bias is None else bias.to(x.dtype)
    if not use_triton(x):
        return F.linear(x, weight.get_original_weight().to(x.dtype), bias)
    y: Tensor = torch.ops.liger_models.nf4_linear(
        x, bias, weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean,
        weight.nf4, rows, columns, weight.block_size, weight.scaler_block_size,
    )  # fmt: skip
    return y
