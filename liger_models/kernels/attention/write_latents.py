"""Writes the latents and rotated keys of multi-head latent attention into the pages of a cache, in place.

A new token n has a latent c_n, from which its keys and values are computed, and r_n, the part of its key that all heads
share. Usually, the token also has a latent q_n, from which its queries are computed. N_c and N_q are RMSNorms, and
slots are as in `write_pages`. A page has one row for each of its P tokens. The op computes::

    pages[s // P, s % P] = [N_c(c_n), rotate(r_n)]        with s = slots[n] >= 0
    q'_n = N_q(q_n)

The norms are computed as in `rms_norm`, and the rotation as in `rope`. The results of the norms and of the rotation are
rounded to the dtype of the pages. There is no backward.

Source: https://arxiv.org/abs/2405.04434.
"""

from typing import Annotated

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.row_norm import scale_rows
from liger_models.kernels.overlap import end_previous, overlap, start_next
from liger_models.kernels.rope.rope import (
    check_even,
    check_tables,
    load_angles,
    load_heads,
    rope_reference,
    rotate,
    store_heads,
    tables,
)
from liger_models.kernels.tiles import contiguous_rows, next_power_of_2, num_warps


def write_latents_reference(
    pages: Tensor,
    slots: Tensor,
    c: Tensor,
    rope: Tensor,
    norm: FusedNorm,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q: Tensor | None = None,
    q_weight: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor | None:
    """Perform `write_latents` in plain PyTorch."""
    if cos is not None and sin is not None:
        rope = rope_reference(rope[:, None, None], cos, sin, interleaved)[:, 0, 0]
    kept = slots >= 0
    pages.flatten(0, 2)[slots[kept]] = torch.cat([norm.reference(c), rope], -1)[kept]
    return None if q is None else norm._replace(weight=q_weight).reference(q)


@triton.jit
def _normed(
    x_ptr, w_ptr, C: tl.constexpr, eps, weight_offset, SCALE_IN_FP32: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize a row [C]. No kernel writes the weight, so the weight is loaded before the previous kernel ends."""
    columns = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + columns, mask=columns < C, other=0.0)
    end_previous(OVERLAPS)
    x = tl.load(x_ptr + columns, mask=columns < C, other=0.0)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
    return scale_rows(wide * rstd, w, weight_offset, SCALE_IN_FP32, x.dtype)


@triton.jit
def _write_latents_kernel(
    pages_ptr, slots_ptr, c_ptr, c_weight_ptr, rope_ptr, cos_ptr, sin_ptr, q_ptr, q_weight_ptr, q_out_ptr,
    c_n, rope_n, q_n, table_n, eps, weight_offset, L: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write [normalized latent, rotated part of the key] of a token into the token's slot in a page.

    Programs whose second index is 1 normalize the latent of the token's queries instead.
    """
    start_next(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        c = _normed(c_ptr + token * c_n, c_weight_ptr, L, eps, weight_offset, SCALE_IN_FP32, OVERLAPS, BLOCK_L)
        slot = tl.load(slots_ptr + token)
        row = pages_ptr + slot * (L + R)
        columns = tl.arange(0, BLOCK_L)
        tl.store(row + columns, c.to(pages_ptr.dtype.element_ty), mask=(columns < L) & (slot >= 0))
        one = tl.arange(0, 1)[:, None]
        inside = (one == 0) & (slot >= 0)
        cos, sin = load_angles(cos_ptr, sin_ptr, token, 0, table_n, 0, HALF, BLOCK, False)
        x1, x2 = load_heads(rope_ptr + token * rope_n + one, inside, R, HALF, BLOCK, INTERLEAVED)
        y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, inside, HALF, BLOCK)
        store_heads(row + L + one, inside, y1, y2, R, HALF, BLOCK, INTERLEAVED)
    elif Q > 0:
        q = _normed(q_ptr + token * q_n, q_weight_ptr, Q, eps, weight_offset, SCALE_IN_FP32, OVERLAPS, BLOCK_Q)
        q_columns = tl.arange(0, BLOCK_Q)
        tl.store(q_out_ptr + token * Q + q_columns, q.to(q_out_ptr.dtype.element_ty), mask=q_columns < Q)


def _write_latents(
    pages: Annotated[Tensor, "Tensor(a!)"], slots: Tensor, c: Tensor, rope: Tensor, c_weight: Tensor,
    cos: Tensor | None, sin: Tensor | None, q: Tensor | None, q_weight: Tensor | None, eps: float, weight_offset: float,
    scale_in_fp32: bool, interleaved: bool,
) -> Tensor:  # fmt: skip
    c, rope = contiguous_rows(c), contiguous_rows(rope)
    q = c.new_empty(len(c), 0) if q is None else contiguous_rows(q)
    (N, L), R, Q = c.shape, rope.shape[1], q.shape[1]
    half = 0 if cos is None else cos.shape[-1]
    cos, sin, table_n, _ = tables(cos, sin, c)
    out = q.new_empty(N, Q)
    if N:
        block_l, block_q = next_power_of_2(L), max(next_power_of_2(Q), 1)
        with on_device_of(c):
            _write_latents_kernel[(N, 1 + (Q > 0))](
                pages, slots.contiguous(), c, c_weight.contiguous(), rope, cos, sin, q,
                c_weight if q_weight is None else q_weight.contiguous(), out, c.stride(0), rope.stride(0), q.stride(0),
                table_n, eps, weight_offset, L=L, R=R, Q=Q, HALF=half, INTERLEAVED=interleaved,
                SCALE_IN_FP32=scale_in_fp32, BLOCK_L=block_l, BLOCK_Q=block_q, BLOCK=next_power_of_2(R // 2),
                **overlap(c), num_warps=num_warps(max(block_l, block_q)),
            )  # fmt: skip
    return out


def _fake(pages: Tensor, slots: Tensor, c: Tensor, rope: Tensor, *others: Tensor | None) -> Tensor:
    q = others[3]
    return c.new_empty(c.shape[0], 0) if q is None else q.new_empty(q.shape)


WRITE_LATENTS = define_op("write_latents", _write_latents, _fake)


def write_latents(
    pages: Tensor,
    slots: Tensor,
    c: Tensor,
    rope: Tensor,
    norm: FusedNorm,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q: Tensor | None = None,
    q_weight: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor | None:
    """Write ``[norm(c), rotate(rope)]`` for new tokens into pages, in place, and return the normalized q.

    Args:
        pages: [pages, P, 1, L + R], contiguous, float32, float16 or bfloat16.
        slots: [N] int64, as in `write_pages`.
        c: [N, L] in the dtype of the pages.
        rope: [N, R] in the dtype of the pages, the part of the keys that all heads share. R is positive and even.
        norm: the RMSNorm of c, with a weight.
        cos, sin: [1 or N, 1, at most R / 2], the tables of the rotation; None to copy ``rope`` without a rotation.
        q: [N, Q] in the dtype of the pages; None if there are no latents of queries.
        q_weight: [Q], the weight of the RMSNorm of q. This RMSNorm has the same ``eps`` and other constants as
            ``norm``.
        interleaved: as in `rope`.

    Returns:
        [N, Q] in the dtype of q, or None without q.

    Raises:
        ValueError: shapes do not match, the pages are not contiguous, or the norm is not an RMSNorm.
        TypeError: dtypes differ, or the slots are not int64.
    """
    op = "write_latents"
    check_floating(op, pages=pages, c=c, rope=rope, q=q, weight=norm.weight, q_weight=q_weight)
    if not pages.dtype == c.dtype == rope.dtype == (c if q is None else q).dtype or slots.dtype != torch.int64:
        raise TypeError(
            f"{op}: pages, c, rope and q must have one dtype and slots must be int64, got {pages.dtype}, {c.dtype}, "
            f"{rope.dtype}, {None if q is None else q.dtype} and {slots.dtype}."
        )
    N, (L, R) = len(slots), (c.shape[-1], rope.shape[-1])
    check_even(op, R)
    fits = pages.dim() == 4 and pages.shape[2:] == (1, L + R) and c.shape == (N, L) and rope.shape == (N, R) and R > 0
    if not (fits and pages.is_contiguous() and (q is None or (q.dim() == 2 and len(q) == N))):
        raise ValueError(
            f"{op}: pages must be [pages, P, 1, L + R] and contiguous, c [N, L], rope [N, R], q [N, Q] and slots [N], "
            f"got {list(pages.shape)}, {list(c.shape)}, {list(rope.shape)}, {None if q is None else list(q.shape)} and "
            f"{list(slots.shape)}."
        )
    if norm.kind != "rms_norm" or norm.weight is None or norm.weight.shape != (L,):
        raise ValueError(f"{op}: norm must be an RMSNorm with a weight [{L}], got {norm.kind}.")
    if (q is None) != (q_weight is None) or (q is not None and q_weight is not None and q_weight.shape != q.shape[1:]):
        raise ValueError(f"{op}: q_weight must have the width of q, and be None without q.")
    if cos is not None and sin is not None:
        check_tables(op, rope[:, None], cos, sin, R)
    if not use_triton(c):
        return write_latents_reference(pages, slots, c, rope, norm, cos, sin, q, q_weight, interleaved=interleaved)
    constants = norm.eps, norm.weight_offset, norm.scale_in_fp32, interleaved
    out = WRITE_LATENTS(pages, slots, c, rope, norm.weight, cos, sin, q, q_weight, *constants)
    return None if q is None else out
