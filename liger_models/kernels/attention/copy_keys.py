"""Copies of keys for packed documents that continue an earlier document, as answers continue a prompt.

A document that continues another one, its parent, attends to the tokens of the parent and to its own tokens. In the
result, each document has a copy of its parent's keys, followed by its own keys, as variable-length attention requires.
In the backward, the gradients of all copies of a key are added in fp32, in the order of the documents.
"""

from typing import Annotated

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

Size = Annotated[int, "SymInt"]

ROWS, COLUMNS = 4, 512
"""Number of tokens and number of columns for which a program adds gradients."""


@triton.jit
def _add_copies_kernel(
    dy_ptr, dx_ptr, bounds_ptr, copy_bounds_ptr, copies_ptr, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the gradients dy [m, WIDTH] of all copies of a document's tokens, for ROWS tokens and BLOCK columns."""
    document = tl.program_id(1)
    start = tl.load(bounds_ptr + document)
    length = tl.load(bounds_ptr + document + 1) - start
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < length) & (column < WIDTH)

    # The document's own keys are the last ones that it attends to.
    end = tl.load(copy_bounds_ptr + document + 1)
    total = tl.load(dy_ptr + (end - length + row).to(tl.int64) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    # The documents that continue this one follow it, and its keys are the first ones that they attend to.
    for copy in range(tl.load(copies_ptr + document)):
        first = tl.load(copy_bounds_ptr + document + 1 + copy)
        total += tl.load(dy_ptr + (first + row).to(tl.int64) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + (start + row).to(tl.int64) * WIDTH + column, total.to(dx_ptr.dtype.element_ty), mask=mask)


def _copy_keys(
    x: Tensor, tokens: Tensor, cu_seqlens: Tensor, copy_bounds: Tensor, copies: Tensor, max_seqlen: Size
) -> Tensor:
    return x.index_select(0, tokens)


def _copy_keys_backward(
    dy: Tensor, tokens: Tensor, cu_seqlens: Tensor, copy_bounds: Tensor, copies: Tensor, max_seqlen: Size, N: Size
) -> Tensor:
    if not use_triton(dy):
        wide = torch.promote_types(dy.dtype, torch.float32)
        total = torch.zeros(N, *dy.shape[1:], dtype=wide, device=dy.device)
        return total.index_add_(0, tokens, dy.to(wide)).to(dy.dtype)
    dx = torch.empty(N, *dy.shape[1:], dtype=dy.dtype, device=dy.device)
    width = dx[0].numel()
    with on_device_of(dy):
        _add_copies_kernel[cdiv(max_seqlen, ROWS), len(copies), cdiv(width, COLUMNS)](
            dy.contiguous(), dx, cu_seqlens, copy_bounds, copies, width, ROWS=ROWS, BLOCK=COLUMNS
        )
    return dx


def _fake(x: Tensor, tokens: Tensor, *_: object) -> Tensor:
    return x.new_empty(tokens.shape[0], *x.shape[1:])  # `len` would turn a symbolic size into a constant


def _fake_backward(
    dy: Tensor, tokens: Tensor, cu_seqlens: Tensor, copy_bounds: Tensor, copies: Tensor, max_seqlen: int, N: int
) -> Tensor:
    return dy.new_empty(N, *dy.shape[1:])


BACKWARD = define_op("copy_keys_backward", _copy_keys_backward, _fake_backward)
FORWARD = define_op("copy_keys", _copy_keys, _fake, backward=BACKWARD, gradients="x", sizes={"N": ("x", 0)})


def copy_keys(
    x: Tensor, *, tokens: Tensor, cu_seqlens: Tensor, copy_bounds: Tensor, copies: Tensor, max_seqlen: int
) -> Tensor:
    """Return the keys, or the values, that each of n packed documents attends to.

    Args:
        x: [N, G, D], the keys or the values of all tokens.
        tokens: [m] int64, for each document the indices of its parent's tokens, if it has a parent, and then the
            indices of its own tokens.
        cu_seqlens: [n + 1] int32, the bounds of the documents among the N tokens. The last one is N. The documents that
            continue a parent follow the parent directly.
        copy_bounds: [n + 1] int32, the bounds of the documents in ``tokens``.
        copies: [n] int32, the number of documents that continue each document.
        max_seqlen: upper bound of the length of a document.

    Returns:
        [m, G, D].

    Raises:
        TypeError: x is not floating-point.
    """
    check_floating("copy_keys", x=x)
    return FORWARD(x, tokens, cu_seqlens, copy_bounds, copies, max_seqlen)
