"""Writes the keys and values of new tokens into the pages of a cache, in place.

A page holds P tokens, and slot s is token s % P of page s // P. New token n is written to slot slots[n]. If the slot is
negative, the token is padding and is not written::

    keys[s // P, s % P] = k_n,   values[s // P, s % P] = v_n        with s = slots[n] >= 0

Latent attention caches one row for each token, and computes the keys and values from this row. This row is passed to
the op as the key, and the width of the values is 0.

Pages may be in float8, with a scale for each token and head. The op then quantizes the keys and values; see
`scaled_pages.py`.

Source: https://arxiv.org/abs/2309.06180.
"""

from typing import Annotated

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.attention.scaled_pages import (
    WRITE_SCALED_PAGES,
    ScaledPages,
    check_scaled_pages,
    write_scaled_pages_reference,
)
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2

BLOCK = 1024
"""Maximum number of elements that a program copies from a token's keys. The same maximum applies to the token's
values."""


def write_pages_reference(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Perform `write_pages` in plain PyTorch."""
    kept = slots >= 0
    for pages, new in ((keys, k), (values, v)):
        pages.flatten(0, 1)[slots[kept]] = new[kept]


@triton.jit
def _write_pages_kernel(
    keys_ptr, values_ptr, k_ptr, v_ptr, slots_ptr, k_n, k_g, v_n, v_g,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK of the G · D elements of a token's keys, and BLOCK of the G · V elements of the token's values."""
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (element < G * D) & (slot >= 0)
    k = tl.load(k_ptr + token * k_n + element // D * k_g + element % D, mask=inside, other=0.0)
    tl.store(keys_ptr + slot * (G * D) + element, k, mask=inside)
    if V > 0:
        inside = (element < G * V) & (slot >= 0)
        v = tl.load(v_ptr + token * v_n + element // V * v_g + element % V, mask=inside, other=0.0)
        tl.store(values_ptr + slot * (G * V) + element, v, mask=inside)


def _write_pages(
    keys: Annotated[Tensor, "Tensor(a!)"], values: Annotated[Tensor, "Tensor(b!)"], k: Tensor, v: Tensor, slots: Tensor
) -> None:
    k, v = contiguous_rows(k), contiguous_rows(v)
    (N, G, D), V = k.shape, v.shape[2]
    if not k.numel():
        return
    block = min(next_power_of_2(G * max(D, V)), BLOCK)
    with on_device_of(k):
        _write_pages_kernel[(N, cdiv(G * max(D, V), block))](
            keys, values, k, v, slots.contiguous(), *k.stride()[:2], *v.stride()[:2],
            G=G, D=D, V=V, BLOCK=block, **overlap(k), num_warps=max(min(block // 256, 4), 1),
        )  # fmt: skip


WRITE_PAGES = define_op("write_pages", _write_pages, lambda *_: None)


def write_pages(keys: Tensor | ScaledPages, values: Tensor | ScaledPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into pages, in place.

    If several tokens have the same slot, only one of these tokens is written, and it is undefined which one.

    Args:
        keys, values: the pages, [pages, P, G, D] and [pages, P, G, V], contiguous. V may be 0. Both may be
            `ScaledPages`, unless V is 0.
        k, v: the keys and values of the new tokens, [N, G, D] and [N, G, V] in the dtype of the pages or, with
            `ScaledPages`, in one floating-point dtype.
        slots: [N] int64, the slot of each token, less than pages · P. A token with a negative slot is not written.

    Raises:
        ValueError: shapes do not match, the pages are not contiguous, or kernels on the device can't convert float8.
        TypeError: dtypes differ, the slots are not int64, or only one of ``keys`` and ``values`` is `ScaledPages`.
    """
    op = "write_pages"
    if isinstance(keys, ScaledPages) or isinstance(values, ScaledPages):
        _write_scaled(op, keys, values, k, v, slots)
        return
    if not keys.dtype == values.dtype == k.dtype == v.dtype or slots.dtype != torch.int64:
        raise TypeError(
            f"{op}: keys, values, k and v must have one dtype and slots must be int64, got {keys.dtype}, "
            f"{values.dtype}, {k.dtype}, {v.dtype} and {slots.dtype}."
        )
    _check(op, keys, values, k, v, slots)
    if use_triton(k):
        WRITE_PAGES(keys, values, k, v, slots)
    else:
        write_pages_reference(keys, values, k, v, slots)


def _write_scaled(
    op: str, keys: Tensor | ScaledPages, values: Tensor | ScaledPages, k: Tensor, v: Tensor, slots: Tensor
) -> None:
    check_scaled_pages(op, keys, values, k.device)
    assert isinstance(keys, ScaledPages)
    assert isinstance(values, ScaledPages)
    check_floating(op, k=k, v=v)
    if k.dtype != v.dtype or slots.dtype != torch.int64:
        raise TypeError(
            f"{op}: k and v must have one dtype and slots must be int64, got {k.dtype}, {v.dtype} and {slots.dtype}."
        )
    _check(op, keys.codes, values.codes, k, v, slots)
    if not keys.scales.is_contiguous() or not values.scales.is_contiguous():
        raise ValueError(
            f"{op}: scales must be contiguous, got strides {keys.scales.stride()} and {values.scales.stride()}."
        )
    if use_triton(k):
        WRITE_SCALED_PAGES(*keys, *values, k, v, slots)
    else:
        write_scaled_pages_reference(keys, values, k, v, slots)


def _check(op: str, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Raise ValueError if shapes do not match, or if the pages are not contiguous."""
    fits = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3] and slots.dim() == 1
    if not (fits and all(x.shape == (len(slots), *pages.shape[2:]) for x, pages in ((k, keys), (v, values)))):
        raise ValueError(
            f"{op}: keys and values must be [pages, P, G, D] and [pages, P, G, V], k and v [N, G, D] and [N, G, V] and "
            f"slots [N], got {list(keys.shape)}, {list(values.shape)}, {list(k.shape)}, {list(v.shape)} and "
            f"{list(slots.shape)}."
        )
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError(
            f"{op}: keys and values must be contiguous, got strides {keys.stride()} and {values.stride()}."
        )
