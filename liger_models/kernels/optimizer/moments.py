"""8-bit moments of AdamW: one code c per element, and one fp32 scale s per block of 128 elements of the last dimension.

The scale of a block is the largest magnitude in the block. The moments are::

    m = sign(c) · (c / 127)² · s    c from −127 to 127, int8
    v = (c / 255)⁴ · s              c from 0 to 255, uint8

Because of the exponents 2 and 4, more of the codes stand for small values: the square root of a nonzero second moment
can be as small as 1 / 65,025 of the largest square root in its block. In one step, a moment usually changes by less
than the distance between the values of two adjacent codes. Moments are therefore rounded up or down at random, such
that the expected result equals the exact value. If 0.999 · v were rounded to nearest, the result would always be v
again. A positive second moment never gets the code 0: with v = 0, the update would be m / eps. If a block contains
infinity or NaN, its scale is infinity or NaN, too.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.dispatch import tl, triton

WIDTH = 128
"""Number of elements in a block. The elements of a block share a scale."""
LEVELS = {torch.int8: 127, torch.uint8: 255}
POWERS = {torch.int8: 2, torch.uint8: 4}
SMALLEST = 2.0**-126
"""Minimum scale: blocks with a smaller scale are rounded to 0, because the inverse of such a scale could be
infinite."""


def has_blocks(shape: Sequence[int]) -> bool:
    """Return whether moments of this shape are stored as codes.

    The shape must have two or more dimensions, and rows of at least one block.
    """
    return len(shape) > 1 and shape[-1] >= WIDTH


def scale_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of the scales of one moment, given the shape of the moment."""
    return [*shape[:-1], -(-shape[-1] // WIDTH)]


def moment_bytes(shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Return the sizes in bytes of the tensors that store a parameter's two moments.

    Args:
        shape: shape of the parameter.
        dtype: dtype of the moments; int8 stands for codes with scales.
    """
    sizes = [math.prod(shape) * dtype.itemsize]
    if dtype == torch.int8:
        sizes.append(math.prod(scale_shape(shape)) * torch.float32.itemsize)
    return 2 * sizes


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode codes [..., N] in int8 or uint8 with scales [..., ceil(N / 128)] to values [..., N].

    The returned values have the dtype of the scales.
    """
    root = codes.to(scales.dtype) / LEVELS[codes.dtype]
    value = root * root.abs() if codes.dtype == torch.int8 else root.square().square()
    return value * scales.repeat_interleave(WIDTH, -1)[..., : codes.shape[-1]]


def encode(values: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Encode floating-point values [..., N] as codes [..., N] and fp32 scales [..., ceil(N / 128)].

    Args:
        values: [..., N], which must not be negative if ``dtype`` is uint8.
        dtype: dtype of the codes; int8 for a first moment, uint8 for a second moment.
        generator: generator of the random numbers for rounding; None rounds to nearest.
    """
    levels, power = LEVELS[dtype], POWERS[dtype]

    # Divide the magnitudes by the largest magnitude in their block.
    blocks = F.pad(values.abs(), (0, -values.shape[-1] % WIDTH))
    scales = blocks.reshape(*scale_shape(values.shape), WIDTH).amax(-1)
    x = values.abs() / scales.where(scales >= SMALLEST, math.inf).repeat_interleave(WIDTH, -1)[..., : values.shape[-1]]
    x = x.where(x < 1, 1)  # NaN also becomes 1

    # Find the largest code whose value is at most x, and the next code. A random number chooses one of the two.
    low = (x ** (1 / power) * levels).floor().clamp(max=levels - 1)
    below, above = (low / levels) ** power, ((low + 1) / levels) ** power
    draw = 0.5 if generator is None else torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    codes = low + (draw * (above - below) < x - below)
    codes = codes * values.sign() if dtype == torch.int8 else codes.maximum((values > 0).to(codes.dtype))
    return codes.nan_to_num().to(dtype), scales.float()


@triton.jit
def decoded(codes, scale, LEVELS: tl.constexpr):
    """Decode codes [R, 128] with scales [R] to fp32 values [R, 128].

    LEVELS is 127 for a first moment, and 255 for a second moment.
    """
    root = codes.to(tl.float32) * (1.0 / LEVELS)
    if LEVELS == 127:
        value = root * tl.abs(root)
    else:
        value = root * root
        value = value * value
    return value * scale[:, None]


@triton.jit
def encoded(value, draw, LEVELS: tl.constexpr):
    """Encode fp32 values [R, 128] as codes [R, 128] in int32 and scales [R].

    ``draw`` [R, 128] holds random integers from 0 to 65535, which decide the rounding.
    """
    size = tl.abs(value)
    # Compare magnitudes as integers: the bit patterns have the same order as the magnitudes, and NaN is the largest.
    scale = tl.max(size.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    inverse = tl.where(scale >= 2.0**-126, 1.0 / tl.maximum(scale, 2.0**-126), 0.0)
    x = size * inverse[:, None]  # [R, 128], from 0 to 1
    x = tl.where(x < 1, x, 1.0)  # NaN also becomes 1
    root = tl.sqrt(x)
    if LEVELS == 255:
        root = tl.sqrt(root)

    # Find the largest code whose value is at most x, and the next code. A random number chooses one of the two.
    low = tl.minimum(tl.floor(root * LEVELS), LEVELS - 1.0)
    below = low * (1.0 / LEVELS)
    above = (low + 1) * (1.0 / LEVELS)
    below *= below
    above *= above
    if LEVELS == 255:
        below *= below
        above *= above
    up = (draw.to(tl.float32) + 0.5) * (above - below) < (x - below) * 65536
    codes = low.to(tl.int32) + up.to(tl.int32)
    if LEVELS == 255:
        codes = tl.where(value > 0, tl.maximum(codes, 1), codes)
    return tl.where(value < 0, -codes, codes), scale
