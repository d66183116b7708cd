"""Adds several tensors in fp32 and divides the sum: out[i] = (Σ_r parts[r, i]) / divisor.

The kernel reads each part once and writes the result once. If there are only a few parts, PyTorch's reduction takes
several times as long as this kernel.
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

BLOCK = 2048
NUM_WARPS = 8
"""A program computes `BLOCK` results and has `NUM_WARPS` warps. In bf16, a thread loads one 16-byte vector of each
part."""


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, count, divisor, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK elements of the sum of the rows of ``parts`` [PARTS, count], divided by ``divisor``."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < count
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(parts_ptr + elements, mask=mask, other=0.0).to(tl.float32)
        parts_ptr += count
    tl.store(out_ptr + elements, total / divisor, mask=mask)


def add_parts(parts: Tensor, out: Tensor, divisor: int = 1) -> None:
    """Write the sum of the parts, divided by ``divisor``, to ``out``. This function is not differentiable.

    Args:
        parts: [R, N], floating-point, contiguous.
        out: [N], contiguous. If ``out`` is not in fp32, PyTorch's reduction runs.
        divisor: the number by which the sum is divided.
    """
    if use_triton(parts) and out.dtype == torch.float32:
        if out.numel():
            with on_device_of(parts):
                _add_parts_kernel[(cdiv(out.numel(), BLOCK),)](
                    parts, out, out.numel(), float(divisor), PARTS=len(parts), BLOCK=BLOCK, num_warps=NUM_WARPS
                )
    else:
        torch.sum(parts, 0, dtype=out.dtype, out=out).div_(divisor)
