"""Rotary position embedding: of one tensor, or of the packed QKV projection while it is taken apart.

Forward, per token and head, for each pair (i, i + R/2) of the first R (rotary width) of D entries, in fp32::

    y1 = x1 · cos − x2 · sin
    y2 = x2 · cos + x1 · sin                      the entries from R on, and the values v, are copied

Backward is the rotation by the opposite angle, ``dx = rope(dy, cos, −sin)``: no activation is saved, only the tables,
which get no gradient. Tables hold one entry per pair (half width); the result is rounded once, to the input dtype.

The packed projection is grouped by KV head: for each KV head its H / G query heads, then k, then v.

Source: https://arxiv.org/abs/2104.09864, in the half-split order of Hugging Face's checkpoints.
"""

import torch
from torch import Tensor

from .dispatch import LIBRARY, check, check_floating, on_device_of, tl, triton, use_triton

PAIRS_PER_PROGRAM = 1024
"""Heads of one token are tiled to about this many pairs: 16 heads of 128, so 32 + 2 · 8 heads leave no lane idle."""

NUM_WARPS = 4
"""One 16-byte load of each half per thread in bf16, in 32 registers; 2 warps send the angles through shared memory."""


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `rope` computes, in plain torch (differentiable in x; fp64 stays fp64)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    cos, sin = (table.detach().to(compute).unsqueeze(2) for table in (cos, sin))  # [B, T, 1, R / 2]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    first, second = first.to(compute), second.to(compute)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def rope_qkv_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `rope_qkv` computes, in plain torch."""
    queries = num_heads // num_kv_heads
    groups = qkv.unflatten(-1, (num_kv_heads, queries + 2, head_dim))  # [B, T, G, H / G + 2, D]
    q, k, v = (part.flatten(2, 3) for part in groups.split([queries, 1, 1], 3))
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, batch, position, table_b, table_t,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    entry = batch * table_b + position * table_t + pair
    cos = tl.load(cos_ptr + entry, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + entry, mask=pair < HALF, other=0.0).to(tl.float32)
    return cos, -sin if INVERSE else sin


@triton.jit
def _rotate_rows(
    source, target, given, inside, rotary, cos, sin,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One head per row. source, target: [ROWS, 1] pointers; rows not given read as 0; rows not rotary are copied."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    x1 = tl.load(source + pair, mask=given & (pair < HALF), other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + pair, mask=given & (pair < HALF), other=0.0).to(tl.float32)
    y1 = tl.where(rotary, x1 * cos - x2 * sin, x1)
    y2 = tl.where(rotary, x2 * cos + x1 * sin, x2)
    tl.store(target + pair, y1.to(target.dtype.element_ty), mask=inside & (pair < HALF))
    tl.store(target + HALF + pair, y2.to(target.dtype.element_ty), mask=inside & (pair < HALF))
    if REST > 0:
        column = tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(source + 2 * HALF + column, mask=given & (column < REST), other=0.0)
        tl.store(target + 2 * HALF + column, rest, mask=inside & (column < REST))


@triton.jit
def _rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, T, x_b, x_t, x_h, table_b, table_t,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (H + ROWS - 1) // ROWS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    head = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)[:, None]
    cos, sin = _angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK_HALF, INVERSE)
    x = x_ptr + batch * x_b + position * x_t + head.to(tl.int64) * x_h
    y = y_ptr + token.to(tl.int64) * (H * D) + head * D
    _rotate_rows(x, y, head < H, head < H, head < H, cos, sin, HALF, BLOCK_HALF, D - 2 * HALF, BLOCK_REST)


@triton.jit
def _rope_qkv_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, T, packed_b, packed_t,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, table_b, table_t,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, ROWS: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = G * (QUERIES + 2)
    CHUNKS: tl.constexpr = (SLOTS + ROWS - 1) // ROWS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    slot = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)[:, None]
    group = (slot // (QUERIES + 2)).to(tl.int64)
    member = slot % (QUERIES + 2)  # the group's queries, then its key, then its value
    cos, sin = _angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK_HALF, BACKWARD)
    packed = packed_ptr + batch * packed_b + position * packed_t + slot * D
    q = q_ptr + batch * q_b + position * q_t + (group * QUERIES + member) * q_h
    k = k_ptr + batch * k_b + position * k_t + group * k_h
    v = v_ptr + batch * v_b + position * v_t + group * v_h
    split = tl.where(member < QUERIES, q, tl.where(member == QUERIES, k, v))
    inside = slot < SLOTS
    given = inside
    if not HAS_Q:
        given = given & (member >= QUERIES)
    if not HAS_K:
        given = given & (member != QUERIES)
    if not HAS_V:
        given = given & (member <= QUERIES)
    source = split if BACKWARD else packed
    target = packed if BACKWARD else split
    _rotate_rows(source, target, given, inside, member <= QUERIES, cos, sin, HALF, BLOCK_HALF, D - 2 * HALF, BLOCK_REST)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """``(cos, sin, batch stride, position stride)``, the strides common to both; batch 1 serves every batch."""
    cos, sin = _rows(cos), _rows(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


def _tiles(heads: int, head_dim: int, half: int) -> dict[str, int]:
    block_half = triton.next_power_of_2(half)
    return {
        "D": head_dim,
        "HALF": half,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        "ROWS": min(triton.next_power_of_2(heads), max(PAIRS_PER_PROGRAM // block_half, 1)),
    }


def rope_forward(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Launch the kernel; ``inverse`` rotates by the opposite angle."""
    x = _rows(x)
    cos, sin, table_b, table_t = _tables(cos, sin)
    B, T, H, D = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        tiles = _tiles(H, D, cos.shape[-1])
        with on_device_of(x):
            _rope_kernel[(B * T * triton.cdiv(H, tiles["ROWS"]),)](
                x, y, cos, sin, T, *x.stride()[:3], table_b, table_t,
                H=H, INVERSE=inverse, num_warps=NUM_WARPS, **tiles,
            )  # fmt: skip
    return y


def _launch_qkv(
    packed: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor | None, cos: Tensor, sin: Tensor,
    queries: int, num_kv_heads: int, head_dim: int, backward: bool,
) -> None:  # fmt: skip
    cos, sin, table_b, table_t = _tables(cos, sin)
    B, T, _ = packed.shape
    slots = num_kv_heads * (queries + 2)
    tiles = _tiles(slots, head_dim, cos.shape[-1])
    # A part that the constants switch off still has to be a tensor with strides.
    parts = [packed.unsqueeze(2) if part is None else part for part in (q, k, v)]
    if packed.numel():
        with on_device_of(packed):
            _rope_qkv_kernel[(B * T * triton.cdiv(slots, tiles["ROWS"]),)](
                packed, *parts, cos, sin, T, *packed.stride()[:2],
                *(stride for part in parts for stride in part.stride()[:3]), table_b, table_t,
                G=num_kv_heads, QUERIES=queries, BACKWARD=backward,
                HAS_Q=q is not None, HAS_K=k is not None, HAS_V=v is not None, num_warps=NUM_WARPS, **tiles,
            )  # fmt: skip


LIBRARY.define("rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor")
LIBRARY.define(
    "rope_qkv(Tensor qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, int head_dim)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "rope_qkv_backward(Tensor? dq, Tensor? dk, Tensor? dv, Tensor cos, Tensor sin,"
    " int num_heads, int num_kv_heads, int head_dim) -> Tensor"
)


@torch.library.impl(LIBRARY, "rope", "CompositeExplicitAutograd")
def _rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return rope_forward(x, cos, sin, inverse)


@torch.library.impl(LIBRARY, "rope_qkv", "CompositeExplicitAutograd")
def _rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = _rows(qkv)
    empty = lambda heads: torch.empty(*qkv.shape[:2], heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q, k, v = empty(num_heads), empty(num_kv_heads), empty(num_kv_heads)
    _launch_qkv(qkv, q, k, v, cos, sin, num_heads // num_kv_heads, num_kv_heads, head_dim, backward=False)
    return q, k, v


@torch.library.impl(LIBRARY, "rope_qkv_backward", "CompositeExplicitAutograd")
def _rope_qkv_backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, head_dim: int,
) -> Tensor:  # fmt: skip
    dq, dk, dv = (None if grad is None else _rows(grad) for grad in (dq, dk, dv))
    like = next(grad for grad in (dq, dk, dv) if grad is not None)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    dqkv = torch.empty(*like.shape[:2], width, dtype=like.dtype, device=like.device)
    _launch_qkv(dqkv, dq, dk, dv, cos, sin, num_heads // num_kv_heads, num_kv_heads, head_dim, backward=True)
    return dqkv


@torch.library.register_fake("liger_models::rope", lib=LIBRARY)
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("liger_models::rope_qkv", lib=LIBRARY)
def _rope_qkv_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (qkv.new_empty(*qkv.shape[:2], heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


@torch.library.register_fake("liger_models::rope_qkv_backward", lib=LIBRARY)
def _rope_qkv_backward_fake(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, head_dim: int,
) -> Tensor:  # fmt: skip
    like = next(grad for grad in (dq, dk, dv) if grad is not None)
    return like.new_empty(*like.shape[:2], (num_heads + 2 * num_kv_heads) * head_dim)


def _setup(ctx, inputs, output):
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dy):
    cos, sin = ctx.saved_tensors
    return torch.ops.liger_models.rope(dy, cos, sin, not ctx.inverse), None, None, None


def _qkv_setup(ctx, inputs, output):
    _, cos, sin, *ctx.sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)


def _qkv_backward(ctx, dq, dk, dv):
    if dq is None and dk is None and dv is None:
        return (None,) * 6
    cos, sin = ctx.saved_tensors
    return torch.ops.liger_models.rope_qkv_backward(dq, dk, dv, cos, sin, *ctx.sizes), None, None, None, None, None


torch.library.register_autograd("liger_models::rope", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("liger_models::rope_qkv", _qkv_backward, setup_context=_qkv_setup, lib=LIBRARY)


def _check(op: str, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    check_floating(op, x=x, cos=cos, sin=sin)
    check(
        cos.shape == sin.shape and cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[1],
        f"{op}: cos and sin must be [B or 1, T, R / 2] with B {x.shape[0]} and T {x.shape[1]}, "
        f"got {list(cos.shape)} and {list(sin.shape)}.",
    )
    check(
        0 < 2 * cos.shape[-1] <= head_dim,
        f"{op}: cos and sin hold one entry per pair, at most head_dim ({head_dim}) / 2, got {cos.shape[-1]}.",
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of every head: ``(x1 · cos − x2 · sin, x2 · cos + x1 · sin)``.

    Args:
        x: [B, T, H, D], any strides (a transposed [B, H, T, D] is read in place), float32, float16 or bfloat16.
        cos, sin: [B or 1, T, R / 2], best in float32; the tables of each token's position. Entries of a head from R on
            pass through. They get no gradient.

    Returns:
        [B, T, H, D], contiguous, in the dtype of x.

    Raises:
        ValueError: the shapes don't fit together.
        TypeError: a tensor that is not floating-point.
    """
    check(x.dim() == 4, f"rope: x must be [B, T, H, D], got {list(x.shape)}.")
    _check("rope", x, cos, sin, x.shape[-1])
    if not use_triton(x):
        return rope_reference(x, cos, sin)
    y: Tensor = torch.ops.liger_models.rope(x, cos, sin, False)
    return y


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the packed projection apart and rotate q and k, in one kernel; the packed buffer is not kept for backward.

    Args:
        qkv: [B, T, (H + 2 G) · D], for each of the G KV heads its H / G query heads, then k, then v.
        cos, sin: as in `rope`.
        num_heads: H, query heads.
        num_kv_heads: G, a divisor of H.
        head_dim: D.

    Returns:
        ``(q, k, v)``: [B, T, H, D], [B, T, G, D] and [B, T, G, D], each contiguous, in the dtype of qkv.

    Raises:
        ValueError: the sizes don't fit together.
        TypeError: a tensor that is not floating-point.
    """
    check(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"rope_qkv: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).",
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    check(
        qkv.dim() == 3 and qkv.shape[-1] == width,
        f"rope_qkv: qkv must be [B, T, (H + 2 G) · D] with a last dimension of {width}, got {list(qkv.shape)}.",
    )
    _check("rope_qkv", qkv, cos, sin, head_dim)
    if not use_triton(qkv):
        return rope_qkv_reference(qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    q, k, v = torch.ops.liger_models.rope_qkv(qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    return q, k, v


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rope` with the call order of Liger and of transformers' ``apply_rotary_pos_emb``.

    Args:
        q: [B, H, T, D] ([B, T, H, D] with unsqueeze_dim 2).
        k: [B, G, T, D] ([B, T, G, D] with unsqueeze_dim 2).
        cos, sin: [B or 1, T, R], the two halves equal, as transformers' rotary embeddings return them.
        position_ids: not used, as in transformers: the tables are those of the positions already.
        unsqueeze_dim: the dimension of q and k that holds the heads, 1 or 2.

    Returns:
        ``(q, k)`` rotated, new tensors of the same shapes and dtypes.

    Raises:
        ValueError: the shapes don't fit together, or unsqueeze_dim is neither 1 nor 2.
        TypeError: a tensor that is not floating-point.
    """
    check(unsqueeze_dim in (1, 2), f"liger_rotary_pos_emb: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}.")
    check(
        q.dim() == 4 and k.dim() == 4,
        f"liger_rotary_pos_emb: q and k must have 4 dimensions, got {list(q.shape)} and {list(k.shape)}.",
    )
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    if unsqueeze_dim == 2:
        return rope(q, cos, sin), rope(k, cos, sin)
    return rope(q.transpose(1, 2), cos, sin).transpose(1, 2), rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
