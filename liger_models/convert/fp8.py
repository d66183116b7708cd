"""Float8 weights with one scale per block, as in DeepSeek-V3 and Qwen3-FP8.

A weight [..., O, C] is stored as two tensors: ``NAME``, the codes in e4m3, and ``NAME_scale_inv``, the scales [...,
ceil(O / 128), ceil(C / 128)] for blocks of 128 × 128. The value of an element is the product of its code and the scale
of its block. ``quantization_config`` in config.json contains the size of a block.

Source: https://arxiv.org/abs/2412.19437, section 3.3; transformers ``integrations/finegrained_fp8.py``.
"""

from collections.abc import Mapping
from typing import Any


def block_size(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Read the numbers of rows and columns in a block from the ``quantization_config`` of a float8 checkpoint.

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
