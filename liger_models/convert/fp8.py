"""Float8 weights with one scale per block, as in DeepSeek-V3 and Qwen3-FP8.

A weight [..., O, C] is stored as two tensors: ``NAME``, the codes in e4m3, and ``NAME_scale_inv``, the scales [...,
ceil(O / 128), ceil(C / 128)] for blocks of 128 × 128. The value of an element is its code times the scale of its block.
The size of a block is in ``quantization_config`` of config.json.

Source: https://arxiv.org/abs/2412.19437, section 3.3; transformers ``integrations/finegrained_fp8.py``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def block_size(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Read the numbers of rows and columns of a block from the ``quantization_config`` of a float8 checkpoint.

    Raises:
        ValueError: the checkpoint has another format.
    """
    block, fmt = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    if quantization.get("quant_method") != "fp8" or not is_block or fmt != "e4m3":
        raise ValueError(
            "config.json: quantization_config of a checkpoint in float8 must have quant_method 'fp8', fmt 'e4m3' and "
            f"weight_block_size [rows, columns], got {quantization.get('quant_method')!r}, {fmt!r} and {block!r}. Load "
            "the original checkpoint instead."
        )
    assert block is not None
    return block[0], block[1]


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int], before: int = 0) -> Tensor:
    """Dequantize codes with their scales.

    Args:
        codes: [..., R, C] in float8.
        scales: [..., rows of blocks, columns of blocks].
        block: numbers of rows and columns of a block.
        before: number of rows of the first block that are not in ``codes``, because they precede its first row.

    Returns:
        [..., R, C] in bfloat16.
    """
    dense = torch.empty(codes.shape, dtype=torch.bfloat16)
    (R, C), (height, width) = codes.shape[-2:], block
    for number, start in enumerate(range(-before, R, height)):  # row by row of blocks, to save memory
        rows = slice(max(start, 0), min(start + height, R))
        factors = scales[..., number, :].float().repeat_interleave(width, -1)[..., :C]
        dense[..., rows, :] = codes[..., rows, :].float() * factors[..., None, :]
    return dense
