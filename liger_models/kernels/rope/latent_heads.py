"""Queries, keys and values of latent attention, from the outputs of its projections.

The queries and keys of each of the H heads have two parts: N elements that are not rotated, and R elements that are
rotated. The rotated part of the key is the same for all heads. For each token, the projections return::

    q       [H, N + R]    the query of each head
    kv      [H, N + V]    the first part of the key, and the value, of each head
    k_rope  [R]           the second part of all keys

The op rotates the second parts, as in `kernels.rope.rope`, in fp32, and copies everything else::

    q'_h = [q_h[:N], rotate(q_h[N:])],   k_h = [kv_h[:N], rotate(k_rope)],   v_h = kv_h[N:]

Attention saves the results q', k and v for its backward, so q and kv need not stay in memory. The backward rotates by
the opposite angle, and sums the gradient of ``k_rope`` over the heads, in fp32. The forward saves only the tables of
cos and sin.

Source: https://arxiv.org/abs/2405.04434.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
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
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2

ELEMENTS = 2048
"""Number of elements in the tile of heads that a program of four warps loads at a time."""


def latent_heads_reference(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `latent_heads` in plain PyTorch."""
    R = k_rope.shape[-1]
    N = q.shape[-1] // num_heads - R
    heads, pairs = (x.unflatten(-1, (num_heads, -1)) for x in (q, kv))
    nope, rest = heads.split([N, R], -1)
    shared = k_rope.unsqueeze(2)  # [B, T, 1, R]
    if cos is not None and sin is not None:
        rest, shared = (rope_reference(x, cos, sin, interleaved) for x in (rest, shared))
    k_nope, v = pairs.split([N, pairs.shape[-1] - N], -1)
    k = torch.cat([k_nope, shared.expand(-1, -1, num_heads, -1)], -1)
    return torch.cat([nope, rest], -1), k, v.clone(memory_format=torch.contiguous_format)


@triton.jit
def _copy(source, target, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy WIDTH elements of each head. ``source`` and ``target`` [ROWS, 1] hold one pointer per head."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = mask & (column < WIDTH)
    x = tl.load(source + column, mask=inside, other=0.0)
    tl.store(target + column, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _latent_heads_kernel(
    q_ptr, kv_ptr, rope_ptr, q_out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, T,
    q_b, q_t, kv_b, kv_t, rope_b, rope_t, table_b, table_t,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program builds the queries, keys and values of ROWS heads of one token. The results are contiguous."""
    await_previous(OVERLAPS)
    CHUNKS: tl.constexpr = (H + ROWS - 1) // ROWS
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    batch, position = token // T, token % T
    head = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)[:, None]
    inside = head < H
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, False)
    row = token * H + head  # [ROWS, 1]

    # Queries: copy the first part, and rotate the second part, which is two tensors [ROWS, BLOCK].
    q = q_ptr + batch * q_b + position * q_t + head * (N + R)
    q_out = q_out_ptr + row * (N + R)
    _copy(q, q_out, inside, N, BLOCK_N)
    x1, x2 = load_heads(q + N, inside, R, HALF, BLOCK, INTERLEAVED)
    y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, inside, HALF, BLOCK)
    store_heads(q_out + N, inside, y1, y2, R, HALF, BLOCK, INTERLEAVED)

    # Keys and values: copy the parts of each head, and store the rotated part that all heads share, two tensors
    # [1, BLOCK].
    kv = kv_ptr + batch * kv_b + position * kv_t + head * (N + V)
    k = k_ptr + row * (N + R)
    _copy(kv, k, inside, N, BLOCK_N)
    _copy(kv + N, v_ptr + row * V, inside, V, BLOCK_V)
    one = tl.arange(0, 1)[:, None]
    shared = rope_ptr + batch * rope_b + position * rope_t + one
    x1, x2 = load_heads(shared, one == 0, R, HALF, BLOCK, INTERLEAVED)
    y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, one == 0, HALF, BLOCK)
    every = tl.zeros([ROWS, BLOCK], tl.float32)
    store_heads(k + N, inside, every + y1, every + y2, R, HALF, BLOCK, INTERLEAVED)


@triton.jit
def _latent_heads_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, dq_out_ptr, dkv_ptr, d_rope_ptr, cos_ptr, sin_ptr, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, table_b, table_t,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradients of one token, ROWS heads at a time. The results are contiguous."""
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // T, token % T
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, True)
    sum1 = tl.zeros([BLOCK], tl.float32)
    sum2 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, ROWS):
        head = start + tl.arange(0, ROWS)[:, None]
        inside = head < H
        row = token * H + head

        # Queries: copy the first part, and rotate the second part back.
        dq = dq_ptr + batch * q_b + position * q_t + head.to(tl.int64) * q_h
        dq_out = dq_out_ptr + row * (N + R)
        _copy(dq, dq_out, inside, N, BLOCK_N)
        x1, x2 = load_heads(dq + N, inside, R, HALF, BLOCK, INTERLEAVED)
        y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, inside, HALF, BLOCK)
        store_heads(dq_out + N, inside, y1, y2, R, HALF, BLOCK, INTERLEAVED)

        # Keys and values: copy the parts of each head, and add the part that all heads share.
        dk = dk_ptr + batch * k_b + position * k_t + head.to(tl.int64) * k_h
        dkv = dkv_ptr + row * (N + V)
        _copy(dk, dkv, inside, N, BLOCK_N)
        dv = dv_ptr + batch * v_b + position * v_t + head.to(tl.int64) * v_h
        _copy(dv, dkv + N, inside, V, BLOCK_V)
        x1, x2 = load_heads(dk + N, inside, R, HALF, BLOCK, INTERLEAVED)
        sum1 += tl.sum(x1.to(tl.float32), 0)
        sum2 += tl.sum(x2.to(tl.float32), 0)

    one = tl.arange(0, 1)[:, None]
    y1, y2 = rotate(sum1[None, :], sum2[None, :], cos, sin, one == 0, HALF, BLOCK)
    store_heads(d_rope_ptr + token * R + one, one == 0, y1, y2, R, HALF, BLOCK, INTERLEAVED)


def _constants(num_heads: int, N: int, R: int, V: int, cos: Tensor | None) -> dict[str, int]:
    """Return the constants of a launch in which a program processes ROWS heads at a time."""
    block_n, block_v = next_power_of_2(N), next_power_of_2(V)
    return {
        "H": num_heads,
        "N": N,
        "R": R,
        "V": V,
        "HALF": 0 if cos is None else cos.shape[-1],
        "BLOCK": next_power_of_2(R // 2),
        "BLOCK_N": block_n,
        "BLOCK_V": block_v,
        "ROWS": min(next_power_of_2(num_heads), max(ELEMENTS // max(block_n, block_v, R), 1)),
    }


def _empty_heads(q: Tensor, kv: Tensor, k_rope: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate uninitialized q, k [B, T, H, N + R] and v [B, T, H, V]."""
    B, T, width = q.shape
    D = width // num_heads
    V = kv.shape[2] // num_heads - (D - k_rope.shape[2])
    heads = (torch.empty(B, T, num_heads, columns, dtype=q.dtype, device=q.device) for columns in (D, D, V))
    return next(heads), next(heads), next(heads)


def _latent_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, k_rope = map(contiguous_rows, (q, kv, k_rope))
    results = _empty_heads(q, kv, k_rope, num_heads)
    if q.numel():
        R, V = k_rope.shape[2], results[2].shape[3]
        constants = _constants(num_heads, results[0].shape[3] - R, R, V, cos)
        cos, sin, table_b, table_t = tables(cos, sin, q)
        with on_device_of(q):
            _latent_heads_kernel[(q.shape[0] * q.shape[1] * cdiv(num_heads, constants["ROWS"]),)](
                q, kv, k_rope, *results, cos, sin, q.shape[1], *q.stride()[:2], *kv.stride()[:2], *k_rope.stride()[:2],
                table_b, table_t, INTERLEAVED=interleaved, **constants, **overlap(q),
            )  # fmt: skip
    return results


def _latent_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, width: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = map(contiguous_rows, (dq, dk, dv))
    results = _empty_gradients(dq, dv, width)
    if dq.numel():
        (B, T, H, D), V = dq.shape, dv.shape[3]
        constants = _constants(H, D - width, width, V, cos)
        cos, sin, table_b, table_t = tables(cos, sin, dq)
        with on_device_of(dq):
            _latent_heads_backward_kernel[(B * T,)](
                dq, dk, dv, *results, cos, sin, T, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
                table_b, table_t, INTERLEAVED=interleaved, **constants, **overlap(dq),
            )  # fmt: skip
    return results


def _empty_gradients(dq: Tensor, dv: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate uninitialized gradients of q [B, T, H · (N + R)], kv [B, T, H · (N + V)] and k_rope [B, T, R]."""
    (B, T, H, D), V = dq.shape, dv.shape[3]
    sizes = H * D, H * (D - width + V), width
    grads = (torch.empty(B, T, size, dtype=dq.dtype, device=dq.device) for size in sizes)
    return next(grads), next(grads), next(grads)


BACKWARD = define_op(
    "latent_heads_backward", _latent_heads_backward,
    lambda dq, dk, dv, cos, sin, width, interleaved: _empty_gradients(dq, dv, width),
)  # fmt: skip
FORWARD = define_op(
    "latent_heads", _latent_heads,
    lambda q, kv, k_rope, cos, sin, num_heads, interleaved: _empty_heads(q, kv, k_rope, num_heads),
    outputs="q k v", backward=BACKWARD, gradients="q kv k_rope", sizes={"width": ("k_rope", 2)},
)  # fmt: skip


def latent_heads(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Build queries, keys and values of latent attention in one kernel, and rotate queries and keys.

    Args:
        q: [B, T, H · (N + R)], float32, float16 or bfloat16, with any strides between tokens. Each head has N elements
            that are not rotated, then R elements that are rotated.
        kv: [B, T, H · (N + V)] in the dtype of q. Each head has the N elements of its key that are not rotated, then
            the V elements of its value.
        k_rope: [B, T, R] in the dtype of q, the R elements of the keys that are rotated. All heads share them.
        cos, sin: [B or 1, T, R / 2], cos and sin of the angles at each token's position, preferably in float32; None
            for no rotation. The tables get no gradient.
        num_heads: H.
        interleaved: whether the R elements are rotated in the pairs (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        ``(q, k, v)``: [B, T, H, N + R] twice, and [B, T, H, V], contiguous, in the dtype of q.

    Raises:
        ValueError: the sizes do not match, R is odd, or only one of cos and sin is given.
        TypeError: a tensor is not floating-point, or q, kv and k_rope differ in dtype.
    """
    op = "latent_heads"
    check_floating(op, q=q, kv=kv, k_rope=k_rope, cos=cos, sin=sin)
    if not q.dtype == kv.dtype == k_rope.dtype:
        raise TypeError(f"{op}: q, kv and k_rope must have one dtype, got {q.dtype}, {kv.dtype} and {k_rope.dtype}.")
    fits = q.dim() == kv.dim() == k_rope.dim() == 3 and q.shape[:2] == kv.shape[:2] == k_rope.shape[:2]
    fits = fits and num_heads > 0 and q.shape[2] % num_heads == 0 and kv.shape[2] % num_heads == 0
    # Each head must have at least one element of each part.
    if not (fits and 0 < q.shape[2] // num_heads - k_rope.shape[2] < kv.shape[2] // num_heads):
        raise ValueError(
            f"{op}: q must be [B, T, H · (N + R)], kv [B, T, H · (N + V)] and k_rope [B, T, R] with H = {num_heads}, "
            f"got {list(q.shape)}, {list(kv.shape)} and {list(k_rope.shape)}."
        )
    check_even(op, k_rope.shape[2])
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: cos and sin must both be given, or both be None for no rotation.")
    if cos is not None and sin is not None:
        check_tables(op, q, cos, sin, k_rope.shape[2])
    if not use_triton(q):
        return latent_heads_reference(q, kv, k_rope, cos, sin, num_heads, interleaved=interleaved)
    return FORWARD(q, kv, k_rope, cos, sin, num_heads, interleaved)
