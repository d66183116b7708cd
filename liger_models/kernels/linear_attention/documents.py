"""Packed documents in kernels: blocks of consecutive tokens of which each belongs to one document."""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import tl, triton


@triton.jit
def locate(cu_ptr, slot, documents, DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """The document of a block, its bounds, and the block's first token and end, which are equal if it is empty.

    The blocks of document n have the slots from start // BLOCK + n on, which are as many as it can need.
    """
    lanes = tl.arange(0, DOCUMENTS)
    starts = tl.load(cu_ptr + lanes, mask=lanes < documents, other=0)
    n = tl.sum(((starts // BLOCK + lanes <= slot) & (lanes < documents)).to(tl.int32), 0) - 1
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    first = start + (slot - start // BLOCK - n) * BLOCK
    return n.to(tl.int64), start, end, tl.minimum(first, end), tl.minimum(first + BLOCK, end)


def bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``cu_seqlens`` of the rows of x, [B, T, ...], one after the other; without them each row is a document."""
    if cu_seqlens is None:
        return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]
    return cu_seqlens.contiguous()


def slots(tokens: int, documents: int, block: int) -> int:
    """How many blocks there can be, whatever the lengths of the documents, which only the device knows."""
    return tokens // block + documents


def flat(x: Tensor) -> Tensor:
    """[B, T, ...] as [B · T, ...], the last dimension contiguous; a view if the strides allow it."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    B, T = x.shape[:2]
    if B == 1 or x.stride(0) == T * x.stride(1):
        return x.as_strided((B * T, *x.shape[2:]), x.stride()[1:])
    return x.contiguous().flatten(0, 1)
