"""MXFP4: four-bit floating-point numbers in blocks of 32 elements, which share a power of two as their scale.

A tensor [..., I] is stored as blocks [..., I / 32, 16] and scales [..., I / 32], both uint8. A byte of a block holds
two codes, the first in its low half. A code has a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A
stored scale s means 2^(s − 127), and a value is the product of its code and this power. In bf16 this product is exact,
so if the scales are known, encoding unchanged values reproduces the original bits. The scales can't be computed from
the values, because a block of zeros fits every scale, and the code 2 with one scale has the same value as the code 1
with the next scale.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from liger_models.convert.weight_map import Expression, WeightMap

BLOCK = 32
"""Number of values that share a scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _powers(exponents: Tensor) -> Tensor:
    """Compute 2^e for the exponents e [..., I / 32], one per block. Returns [..., I / 32, 1] fp32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).unsqueeze(-1)


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode blocks [X, ..., I / 32, 16] uint8 and scales [X, ..., I / 32] uint8 to [X, ..., I] in ``dtype``."""
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * BLOCK, dtype=dtype, device=blocks.device)
    if out.is_meta:
        return out
    signed = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=blocks.device)

    # Tabulate the two values of every byte, [256, 2]: the byte 16 · b + a holds a and then b.
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], 1)
    for values, block, scale in zip(out, blocks, scales, strict=True):  # one at a time, to save memory
        decoded = pairs[block.int()].flatten(-2) * _powers(scale.int() - 127)
        values.copy_(decoded.flatten(-2))
    return out


def encode(values: Tensor, scales: Tensor) -> Tensor | None:
    """Encode values [X, ..., I] as blocks [X, ..., I / 32, 16] uint8. Returns None if decoding changes a value."""
    blocks = torch.empty(*scales.shape, BLOCK // 2, dtype=torch.uint8, device=values.device)
    magnitudes = torch.tensor(MAGNITUDES, device=values.device)
    for block, value, scale in zip(blocks, values, scales, strict=True):
        scaled = value.float().unflatten(-1, (-1, BLOCK)) * _powers(127 - scale.int())
        # Encode the magnitudes, put the sign into bit 3, and put two codes into a byte.
        codes = torch.searchsorted(magnitudes, scaled.abs().contiguous()).clamp_(max=len(MAGNITUDES) - 1)
        codes = (codes + 8 * scaled.signbit()).to(torch.uint8)
        block.copy_(codes[..., 0::2] | (codes[..., 1::2] << 4))

        # Signs are compared, too, because -0 equals 0.
        again = decode(block[None], scale[None], value.dtype)[0]
        if not torch.equal(again, value) or not torch.equal(again.signbit(), value.signbit()):
            return None
    return blocks


class Mxfp4(Expression):
    """A tensor that a checkpoint stores in MXFP4.

    Unpacking requires the scales of the original checkpoint; see `with_scales`.

    Args:
        blocks, scales: names of the two tensors.
    """

    by_rows = True

    def __init__(self, blocks: str, scales: str) -> None:
        self.blocks, self.scales = blocks, scales
        self.read: Callable[[str], Tensor] | None = None

    def names(self) -> list[str]:
        return [self.blocks, self.scales]

    def expand(self, indices: Mapping[str, int]) -> Mxfp4:
        return Mxfp4(self.blocks.format(**indices), self.scales.format(**indices))

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return decode(tensors[self.blocks], tensors[self.scales])

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        *shape, width = packed.shape
        if width % BLOCK != 0:
            raise ValueError(
                f"{self.blocks}: the last dimension must be a multiple of {BLOCK} in MXFP4, got {list(packed.shape)}."
            )
        # On the meta device, compute only shapes. Otherwise encode blocks with the scales of the checkpoint.
        if packed.is_meta:
            scales = packed.new_empty(*shape, width // BLOCK, dtype=torch.uint8)
            return {self.blocks: scales.new_empty(*scales.shape, BLOCK // 2), self.scales: scales}
        if self.read is None:
            raise ValueError(f"{self.blocks}: unpacking MXFP4 needs the scales of a checkpoint, got none.")
        scales = self.read(self.scales).to(packed.device)
        blocks = encode(packed, scales) if scales.shape == (*shape, width // BLOCK) else None
        if blocks is None:
            raise ValueError(
                f"{self.blocks}: the values must be those of the checkpoint in MXFP4, got others. They were trained or "
                "merged: save without mxfp4."
            )
        return {self.blocks: blocks, self.scales: scales}

    def __str__(self) -> str:
        return f"Mxfp4({self.blocks}, {self.scales})"


def with_scales(weights: WeightMap, read: Callable[[str], Tensor]) -> WeightMap:
    """Set the function of a name by which a map's MXFP4 tensors read their scales, and return the map."""
    for expression in weights.entries.values():
        if isinstance(expression, Mxfp4):
            expression.read = read
    return weights
