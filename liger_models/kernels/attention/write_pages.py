"""Writing the keys and values of new tokens into the pages of a cache, in place.

A page holds P tokens, and slot s is token s % P of page s // P. New token n is written to slot slots[n]. If the slot is
negative, the token is padding and is not written::

    keys[s // P, s % P] = k_n,   values[s // P, s % P] = v_n        with s = slots[n] >= 0

Source: https://arxiv.org/abs/2309.06180.
"""

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2

BLOCK = 1024
"""Largest number of elements of a token's keys, and of elements of its values, that a program copies."""


def write_pages_reference(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Perform `write_pages` in plain PyTorch."""
    kept = slots >= 0
    for pages, new in ((keys, k), (values, v)):
        pages.view(-1, *pages.shape[2:])[slots[kept]] = new[kept]


@triton.jit
def _write_pages_kernel(
    keys_ptr, values_ptr, k_ptr, v_ptr, slots_ptr, k_n, k_g, v_n, v_g,
    SIZE: tl.constexpr, D: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK of the SIZE = G · D elements of a token's keys, and the same elements of the token's values."""
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = element // D
    column = element % D
    inside = (element < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_n + head * k_g + column, mask=inside, other=0.0)
    tl.store(keys_ptr + slot * SIZE + element, k, mask=inside)
    v = tl.load(v_ptr + token * v_n + head * v_g + column, mask=inside, other=0.0)
    tl.store(values_ptr + slot * SIZE + element, v, mask=inside)


LIBRARY.define("write_pages(Tensor(a!) keys, Tensor(b!) values, Tensor k, Tensor v, Tensor slots) -> ()")


@torch.library.impl(LIBRARY, "write_pages", "CompositeExplicitAutograd")
def _write_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    k, v = contiguous_rows(k), contiguous_rows(v)
    N, G, D = k.shape
    if not k.numel():
        return
    block = min(next_power_of_2(G * D), BLOCK)
    with on_device_of(k):
        _write_pages_kernel[(N, cdiv(G * D, block))](
            keys, values, k, v, slots.contiguous(), *k.stride()[:2], *v.stride()[:2],
            SIZE=G * D, D=D, BLOCK=block, **overlap(k), num_warps=max(min(block // 256, 4), 1),
        )  # fmt: skip


@torch.library.register_fake("liger_models::write_pages", lib=LIBRARY)
def _write_pages_fake(keys, values, k, v, slots):
    return None


def write_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into pages, in place.

    If several tokens have the same slot, one of them is written, and it is not defined which one.

    Args:
        keys, values: [pages, P, G, D], contiguous; the pages.
        k, v: [N, G, D] in the dtype of the pages; the new tokens.
        slots: [N] int64, the slot of each token, less than pages · P. A token with a negative slot is not written.

    Raises:
        ValueError: shapes do not match, or the pages are not contiguous.
        TypeError: dtypes differ, or the slots are not int64.
    """
    op = "write_pages"
    if not keys.dtype == values.dtype == k.dtype == v.dtype or slots.dtype != torch.int64:
        raise TypeError(
            f"{op}: keys, values, k and v must have one dtype and slots must be int64, got {keys.dtype}, "
            f"{values.dtype}, {k.dtype}, {v.dtype} and {slots.dtype}."
        )
    fits = keys.dim() == 4 and keys.shape == values.shape and k.shape == v.shape == (len(slots), *keys.shape[2:])
    if not (fits and slots.dim() == 1):
        raise ValueError(
            f"{op}: keys and values must be [pages, P, G, D], k and v [N, G, D] and slots [N], got {list(keys.shape)}, "
            f"{list(values.shape)}, {list(k.shape)}, {list(v.shape)} and {list(slots.shape)}."
        )
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError(
            f"{op}: keys and values must be contiguous, got strides {keys.stride()} and {values.stride()}."
        )
    if use_triton(k):
        torch.ops.liger_models.write_pages(keys, values, k, v, slots)
    else:
        write_pages_reference(keys, values, k, v, slots)
