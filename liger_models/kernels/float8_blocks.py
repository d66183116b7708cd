"""A frozen weight in float8 (e4m3) with a scale for each block of a checkpoint, as DeepSeek-V3 and Qwen3-FP8 have them.

    W = bf16(code · scale)        one scale for 128 numbers of a row, which share it with the rows of their block

It has these scales for every row, so that rows of several matrices may be interleaved, as packed projections do. W is
dequantised in one pass for each product and freed after it. Its numbers are those of the checkpoint read in bfloat16.

Source: https://arxiv.org/abs/2412.19437, section 3.3.
"""

import torch
from torch import Tensor

from .dispatch import on_device_of, tl, triton, use_triton

ROWS = 4
COLUMNS = 1024
NUM_WARPS = 4
"""Rows and columns that a program dequantises, and its warps."""


@triton.jit
def _block_weight_kernel(
    code_ptr, scale_ptr, w_ptr, N, K, G, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < N)[:, None] & (column < K)[None, :]
    code = tl.load(code_ptr + row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row[:, None] * G + (column // WIDTH)[None, :], mask=mask, other=0.0).to(tl.float32)
    number = (code * scale).to(tl.bfloat16).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + row[:, None] * K + column[None, :], number, mask=mask)


def blocks_dense_reference(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What `blocks_dense` computes, in plain torch."""
    factors = scales.float().repeat_interleave(width, 1)[:, : codes.shape[1]]
    return (codes.float() * factors).bfloat16().to(dtype)


def blocks_dense(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The weight [O, C], rounded to bfloat16 and then cast to ``dtype``.

    Args:
        codes: [O, C] in float8_e4m3fn, contiguous.
        scales: [O, C / width], rounded up, in a floating-point dtype.
        width: columns that share a scale.
        dtype: float32, float16 or bfloat16.
    """
    if not use_triton(scales):
        return blocks_dense_reference(codes, scales, width, dtype)
    (N, K), G = codes.shape, scales.shape[1]
    weight = torch.empty(N, K, dtype=dtype, device=codes.device)
    with on_device_of(codes):
        _block_weight_kernel[(triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))](
            codes, scales, weight, N, K, G, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS
        )
    return weight
