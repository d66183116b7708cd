"""Packed documents in kernels: the division of documents into blocks of consecutive tokens."""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import tl, triton


@triton.jit
def locate(cu_ptr, slot, documents, DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the document of the block in ``slot``, the start and end of the document, and the start and end of the
    block.

    Each block of each document has a number, which is called its slot. If document n begins at token ``start``, its
    first block has the slot start // BLOCK + n, and its other blocks have the following slots. With this numbering, no
    two blocks have the same slot, no matter how long the documents are. If there is no block in a slot, the returned
    start and end of the block are equal.
    """
    lanes = tl.arange(0, DOCUMENTS)
    starts = tl.load(cu_ptr + lanes, mask=lanes < documents, other=0)
    n = tl.sum(((starts // BLOCK + lanes <= slot) & (lanes < documents)).to(tl.int32), 0) - 1
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    first = start + (slot - start // BLOCK - n) * BLOCK
    return n.to(tl.int64), start, end, tl.minimum(first, end), tl.minimum(first + BLOCK, end)


def bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the bounds [documents + 1] of the documents in the flattened tokens of x [B, T, ...].

    Without ``cu_seqlens``, each row is a document.
    """
    if cu_seqlens is None:
        return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]
    return cu_seqlens.contiguous()


def count_documents(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of documents in x [B, T, ...]. Without ``cu_seqlens``, each row is a document."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def slots(tokens: int, documents: int, block: int) -> int:
    """Return the number of slots (see `locate`) for blocks of ``block`` tokens. Kernels are launched for every slot.

    The number of slots is an upper bound on the number of blocks. The host cannot compute the number of blocks itself,
    because the documents' lengths are on the device.
    """
    return tokens // block + documents


def flat(x: Tensor) -> Tensor:
    """Return x [B, T, ...] as [B · T, ...] with a contiguous last dimension, without a copy where possible."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    B, T = x.shape[:2]
    if B == 1 or x.stride(0) == T * x.stride(1):
        return x.as_strided((B * T, *x.shape[2:]), x.stride()[1:])
    return x.contiguous().flatten(0, 1)
