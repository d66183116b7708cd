"""Rotary position embedding (RoPE) of one tensor, or of the packed QKV projection, which is split in the same kernel.

In each head of each token, the first R of D elements are rotated in pairs (x1, x2), in fp32. R is called the rotary
width. The other elements, and the values v, are copied::

    y1 = x1 · cos − x2 · sin
    y2 = x2 · cos + x1 · sin

In the half-split order of most Hugging Face checkpoints, a pair consists of the elements i and i + R/2. If
``interleaved`` (GLM), a pair consists of the elements 2i and 2i + 1. Layers without rotation have no tables of cos and
sin, and only split the packed projection.

The backward is the rotation by the opposite angle, ``dx = rope(dy, cos, −sin)``. No activation is saved. The forward
saves only the tables, which get no gradient. A table has one entry per pair, so its width is R / 2. The result is
rounded once, to the dtype of the input.

The packed projection is grouped by KV head. Each group consists of its H / G query heads, then k, then v. In the
kernels, GROUP is H / G, and x_b, x_t and x_h are the strides of x along batch, tokens and heads.

Source: https://arxiv.org/abs/2104.09864.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2

MIN_WARPS, MAX_WARPS = 4, 16
ELEMENTS_PER_WARP = 512
"""Number of elements of one token's heads that a warp processes. A program of four warps then has 16 heads of 128
elements, so three programs process 32 query heads, 8 keys and 8 values without idle lanes. In bf16, a thread loads 16
bytes of each half of a head."""

PAIRS_PER_WARP = 16
"""Maximum number of a head's pairs per warp. If a program had fewer threads than a token has angles, Triton would pass
the angles through shared memory."""


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute `rope` in plain PyTorch. The function is differentiable in x, and keeps fp64 inputs in fp64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    cos, sin = (table.detach().to(compute).unsqueeze(2) for table in (cos, sin))  # [B, T, 1, R / 2]
    rotary, rest = x.split([2 * half, x.shape[-1] - 2 * half], -1)
    pairs = rotary.unflatten(-1, (half, 2) if interleaved else (2, half)).to(compute)
    first, second = pairs.unbind(-1 if interleaved else -2)
    rotated_pairs = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(rotated_pairs, -1 if interleaved else -2).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection in plain PyTorch into new, contiguous q [B, T, H, D], k and v [B, T, G, D]."""
    queries = num_heads // num_kv_heads
    groups = qkv.unflatten(-1, (num_kv_heads, queries + 2, head_dim))  # [B, T, G, H / G + 2, D]
    parts = groups.split([queries, 1, 1], 3)
    q, k, v = (part.clone(memory_format=torch.contiguous_format).flatten(2, 3) for part in parts)
    return q, k, v


def rope_qkv_reference(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_qkv` in plain PyTorch."""
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)
    if cos is None or sin is None:
        return q, k, v
    return rope_reference(q, cos, sin, interleaved), rope_reference(k, cos, sin, interleaved), v


@triton.jit
def choose(condition, a, b):
    """Return the pointers ``a`` where ``condition`` holds, and ``b`` elsewhere.

    The pointers are converted to integers before one is selected, because AMD's compiler rejects ``tl.where`` if the
    two pointers point into different tensors. An offset from one tensor to the other does not work either, because
    offsets in a tensor of less than 2 GB are truncated to 32 bits. On other GPUs, integer addresses compile to the same
    instructions as pointers.
    """
    return tl.where(condition, a.to(tl.int64), b.to(tl.int64)).to(a.dtype)


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr
):
    """Load cos and sin of a token's angles or, with INVERSE, of the opposite angles, [1, BLOCK] each, in fp32."""
    pair = tl.arange(0, BLOCK)[None, :]
    entry = batch * table_b + position * table_t + pair
    cos = tl.load(cos_ptr + entry, mask=pair < HALF, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + entry, mask=pair < HALF, other=0.0).to(tl.float32)
    return cos, -sin if INVERSE else sin


@triton.jit
def _columns(D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """For the D / 2 pairs of a head in half-split order, return the columns of x1, the columns of x2, and a mask of the
    pairs.

    All results are [1, BLOCK].
    """
    pair = tl.arange(0, BLOCK)[None, :]
    rotated = pair < HALF  # other pairs have one element from each half of the elements after the rotary width
    return pair + tl.where(rotated, 0, HALF), pair + tl.where(rotated, HALF, D // 2), pair < D // 2


@triton.jit
def load_heads(
    source, mask, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Load the elements of ROWS heads as pairs x1 and x2 [ROWS, BLOCK].

    ``source`` [ROWS, 1] holds a pointer to each head. Heads whose ``mask`` is False are loaded as 0.
    """
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(source + column, mask=mask & (column < D), other=0.0)
        # Adjacent elements are a pair: [ROWS, 2 · BLOCK] -> two tensors [ROWS, BLOCK].
        x1, x2 = tl.split(tl.reshape(x, [source.shape[0], BLOCK, 2]))
    else:
        first, second, inside = _columns(D, HALF, BLOCK)
        x1 = tl.load(source + first, mask=mask & inside, other=0.0)
        x2 = tl.load(source + second, mask=mask & inside, other=0.0)
    return x1, x2


@triton.jit
def store_heads(
    target, mask, y1, y2, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store the pairs y1, y2 [ROWS, BLOCK] as elements of heads, rounded to the dtype of the pointers. This inverts
    `load_heads`.

    Heads whose ``mask`` is False are not written.
    """
    y1, y2 = y1.to(target.dtype.element_ty), y2.to(target.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(target + column, tl.interleave(y1, y2), mask=mask & (column < D))
    else:
        first, second, inside = _columns(D, HALF, BLOCK)
        tl.store(target + first, y1, mask=mask & inside)
        tl.store(target + second, y2, mask=mask & inside)


@triton.jit
def rotate(x1, x2, cos, sin, rotary, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """In the rows where ``rotary`` is True, rotate the first HALF pairs. All other elements are returned unchanged."""
    rotated = rotary
    # Pairs after the first HALF are not rotated, because they lie beyond the rotary width or are padding of the block.
    if HALF < BLOCK:
        rotated = rotary & (tl.arange(0, BLOCK)[None, :] < HALF)
    return tl.where(rotated, x1 * cos - x2 * sin, x1), tl.where(rotated, x2 * cos + x1 * sin, x2)


@triton.jit
def _rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, T, x_b, x_t, x_h, table_b, table_t,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program rotates ROWS heads of one token. With INVERSE, the program rotates by the opposite angle."""
    await_previous(OVERLAPS)
    CHUNKS: tl.constexpr = (H + ROWS - 1) // ROWS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    head = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)[:, None]
    inside = head < H
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, INVERSE)

    # Load and store two tensors [ROWS, BLOCK]. x may have any strides, and y is contiguous.
    x = x_ptr + batch * x_b + position * x_t + head.to(tl.int64) * x_h
    y = y_ptr + token.to(tl.int64) * (H * D) + head * D
    x1, x2 = load_heads(x, inside, D, HALF, BLOCK, INTERLEAVED)
    y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, inside, HALF, BLOCK)
    store_heads(y, inside, y1, y2, D, HALF, BLOCK, INTERLEAVED)


@triton.jit
def _rope_qkv_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, T, packed_b, packed_t,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, table_b, table_t,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program copies ROWS heads of one token from the packed projection to q, k and v, and rotates the heads of q
    and k.

    With BACKWARD, the program computes the packed gradient from dq, dk and dv, and rotates by the opposite angle.
    """
    await_previous(OVERLAPS)
    SLOTS: tl.constexpr = G * (GROUP + 2)
    CHUNKS: tl.constexpr = (SLOTS + ROWS - 1) // ROWS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    slot = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)[:, None]
    group = (slot // (GROUP + 2)).to(tl.int64)
    member = slot % (GROUP + 2)  # index in the group: query heads, then the key, then the value
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, BACKWARD)

    # Compute pointers [ROWS, 1] to the heads in the packed row, and in q, k and v.
    packed = packed_ptr + batch * packed_b + position * packed_t + slot * D
    q = q_ptr + batch * q_b + position * q_t + (group * GROUP + member) * q_h
    k = k_ptr + batch * k_b + position * k_t + group * k_h
    v = v_ptr + batch * v_b + position * v_t + group * v_h
    split = choose(member < GROUP, q, choose(member == GROUP, k, v))
    inside = slot < SLOTS

    # Absent gradients are loaded as 0.
    present = inside
    if not HAS_Q:
        present = present & (member >= GROUP)
    if not HAS_K:
        present = present & (member != GROUP)
    if not HAS_V:
        present = present & (member <= GROUP)
    # Rotate two tensors [ROWS, BLOCK] in fp32. Values are copied.
    x1, x2 = load_heads(split if BACKWARD else packed, present, D, HALF, BLOCK, INTERLEAVED)
    y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin, member <= GROUP, HALF, BLOCK)
    store_heads(packed if BACKWARD else split, inside, y1, y2, D, HALF, BLOCK, INTERLEAVED)


def tables(cos: Tensor | None, sin: Tensor | None, stand_in: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return ``(cos, sin, batch stride, position stride)``. The strides are the same for both tables.

    The batch stride is 0 if all rows of the batch share one table. Without tables, ``stand_in`` is returned in place of
    both tables. The kernel does not read ``stand_in``, because there are no pairs to rotate.
    """
    if cos is None or sin is None:
        return stand_in, stand_in, 0, 0
    # The kernels take only one pair of strides, so both tables must have the same strides.
    cos, sin = contiguous_rows(cos), contiguous_rows(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


def tiles(heads: int, head_dim: int, cos: Tensor | None) -> dict[str, int]:
    """Return the constants of a launch in which each program processes ROWS heads of a token, with BLOCK pairs per
    head.
    """
    # The number of warps depends on the width of a head. A program has as many heads as its warps can hold.
    block = next_power_of_2(head_dim // 2)
    warps = min(max(block // PAIRS_PER_WARP, MIN_WARPS), MAX_WARPS)
    return {
        "D": head_dim,
        "HALF": 0 if cos is None else cos.shape[-1],
        "BLOCK": block,
        "ROWS": min(next_power_of_2(heads), max(warps * ELEMENTS_PER_WARP // (2 * block), 1)),
        "num_warps": warps,
    }


def rope_forward(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool) -> Tensor:
    """Launch the kernel that rotates x. With ``inverse``, the kernel rotates by the opposite angle."""
    x = contiguous_rows(x)
    cos, sin, table_b, table_t = tables(cos, sin, x)
    B, T, H, D = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        constants = tiles(H, D, cos)
        with on_device_of(x):
            _rope_kernel[(B * T * cdiv(H, constants["ROWS"]),)](
                x, y, cos, sin, T, *x.stride()[:3], table_b, table_t,
                H=H, INTERLEAVED=interleaved, INVERSE=inverse, **constants, **overlap(x),
            )  # fmt: skip
    return y


def _launch_qkv(
    packed: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    queries: int, num_kv_heads: int, head_dim: int, interleaved: bool, backward: bool,
) -> None:  # fmt: skip
    slots = num_kv_heads * (queries + 2)
    constants = tiles(slots, head_dim, cos)
    cos, sin, table_b, table_t = tables(cos, sin, packed)
    B, T, _ = packed.shape

    # The kernel does not read an absent gradient, but a tensor with strides must be passed instead.
    parts = [packed.unsqueeze(2) if part is None else part for part in (q, k, v)]
    if packed.numel():
        with on_device_of(packed):
            _rope_qkv_kernel[(B * T * cdiv(slots, constants["ROWS"]),)](
                packed, *parts, cos, sin, T, *packed.stride()[:2],
                *(stride for part in parts for stride in part.stride()[:3]), table_b, table_t,
                G=num_kv_heads, GROUP=queries, INTERLEAVED=interleaved, BACKWARD=backward,
                HAS_Q=q is not None, HAS_K=k is not None, HAS_V=v is not None, **constants, **overlap(packed),
            )  # fmt: skip


def empty_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate uninitialized q, k and v for the packed projection ``qkv``."""
    q, k, v = (
        torch.empty(*qkv.shape[:2], heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return q, k, v


def _rope_qkv(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = contiguous_rows(qkv)
    q, k, v = empty_heads(qkv, num_heads, num_kv_heads, head_dim)
    _launch_qkv(qkv, q, k, v, cos, sin, num_heads // num_kv_heads, num_kv_heads, head_dim, interleaved, backward=False)
    return q, k, v


def _rope_qkv_backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    num_heads: int, num_kv_heads: int, head_dim: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    dq, dk, dv = (None if grad is None else contiguous_rows(grad) for grad in (dq, dk, dv))
    like = next(grad for grad in (dq, dk, dv) if grad is not None)
    # The kernel writes every element of dqkv, and writes 0 where a gradient is absent.
    width = (num_heads + 2 * num_kv_heads) * head_dim
    dqkv = torch.empty(*like.shape[:2], width, dtype=like.dtype, device=like.device)
    queries = num_heads // num_kv_heads
    _launch_qkv(dqkv, dq, dk, dv, cos, sin, queries, num_kv_heads, head_dim, interleaved, backward=True)
    return dqkv


def _rope_qkv_backward_fake(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    num_heads: int, num_kv_heads: int, head_dim: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    like = next(grad for grad in (dq, dk, dv) if grad is not None)
    return like.new_empty(*like.shape[:2], (num_heads + 2 * num_kv_heads) * head_dim)


def _rope_backward(dy: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool) -> Tensor:
    return ROPE(dy, cos, sin, not inverse, interleaved)


ROPE = define_op("rope", rope_forward, "x", backward=_rope_backward, gradients="x")
ROPE_QKV_BACKWARD = define_op("rope_qkv_backward", _rope_qkv_backward, _rope_qkv_backward_fake)
ROPE_QKV = define_op(
    "rope_qkv", _rope_qkv, lambda qkv, cos, sin, *sizes: empty_heads(qkv, *sizes[:3]),
    outputs="q k v", backward=ROPE_QKV_BACKWARD, gradients="qkv",
)  # fmt: skip


# The checks below format a message only when they raise an error, because Dynamo cannot format symbolic sizes.


def check_heads(op: str, num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the number of query heads is a multiple of the number of KV heads."""
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).")


def check_even(op: str, head_dim: int) -> None:
    """Raise ValueError unless ``head_dim`` is even, so that a head can be split into pairs."""
    if head_dim % 2:
        raise ValueError(f"{op}: head_dim must be even, got {head_dim}.")


def check_tables(op: str, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """Raise ValueError unless the tables match the tokens of x [B, T, ...] and the width of the heads."""
    B, T = x.shape[:2]
    if not (cos.shape == sin.shape and cos.dim() == 3 and cos.shape[0] in (1, B) and cos.shape[1] == T):
        raise ValueError(
            f"{op}: cos and sin must be [B or 1, T, R / 2] with B {B} and T {T}, "
            f"got {list(cos.shape)} and {list(sin.shape)}."
        )
    if not 0 < 2 * cos.shape[-1] <= head_dim:
        raise ValueError(
            f"{op}: cos and sin hold one entry per pair, at most head_dim ({head_dim}) / 2, got {cos.shape[-1]}."
        )


def check_qkv(
    op: str, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Raise an error unless the packed projection, the tables (or None) and the sizes match.

    Raises:
        TypeError: a tensor is not floating-point.
        ValueError: the sizes do not match, or only one of cos and sin is given.
    """
    check_heads(op, num_heads, num_kv_heads)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != width:
        raise ValueError(
            f"{op}: qkv must be [B, T, (H + 2 G) · D] with a last dimension of {width}, got {list(qkv.shape)}."
        )
    check_even(op, head_dim)
    check_floating(op, qkv=qkv, cos=cos, sin=sin)
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: cos and sin must both be given, or both be None for no rotation.")
    if cos is not None and sin is not None:
        check_tables(op, qkv, cos, sin, head_dim)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate every pair of every head: ``(x1 · cos − x2 · sin, x2 · cos + x1 · sin)``.

    Args:
        x: [B, T, H, D], float32, float16 or bfloat16, with any strides. A transposed [B, H, T, D] need not be copied.
        cos, sin: [B or 1, T, R / 2], cos and sin of the angles at each token's position, preferably in float32.
            Elements of a head beyond the first R are copied. The tables get no gradient.
        interleaved: whether pairs are (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        [B, T, H, D], contiguous, in the dtype of x.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not floating-point.
    """
    if x.dim() != 4:
        raise ValueError(f"rope: x must be [B, T, H, D], got {list(x.shape)}.")
    check_even("rope", x.shape[-1])
    check_floating("rope", x=x, cos=cos, sin=sin)
    check_tables("rope", x, cos, sin, x.shape[-1])
    if not use_triton(x):
        return rope_reference(x, cos, sin, interleaved)
    return ROPE(x, cos, sin, False, interleaved)


def rope_qkv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection, and rotate q and k, in one kernel. The packed tensor is not saved for the backward.

    Args:
        qkv: [B, T, (H + 2 G) · D]. Each of the G KV heads has its H / G query heads, then k, then v.
        cos, sin: as in `rope`; None for no rotation.
        num_heads: H, the number of query heads.
        num_kv_heads: G, the number of KV heads, a divisor of H.
        head_dim: D.
        interleaved: as in `rope`.

    Returns:
        ``(q, k, v)``: [B, T, H, D], [B, T, G, D] and [B, T, G, D], each contiguous, in the dtype of qkv.

    Raises:
        ValueError: the sizes do not match, or only one of cos and sin is given.
        TypeError: a tensor is not floating-point.
    """
    check_qkv("rope_qkv", qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    if not use_triton(qkv):
        return rope_qkv_reference(qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved=interleaved)
    return ROPE_QKV(qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved)


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, with the arguments of Liger Kernel and of transformers' ``apply_rotary_pos_emb``.

    Args:
        q: [B, H, T, D], or [B, T, H, D] if ``unsqueeze_dim`` is 2.
        k: [B, G, T, D], or [B, T, G, D] if ``unsqueeze_dim`` is 2.
        cos, sin: [B or 1, T, R] or [T, R], as transformers' rotary embeddings return them. Both halves of a table are
            equal, and only the first half is read.
        position_ids: ignored, as in transformers, because the tables already hold the angles of each token's position.
        unsqueeze_dim: the dimension of q and k that holds the heads, 1 or 2.
        rotary_dim: R, the number of leading elements of a head that are rotated; None for the width of the tables. Pass
            ``rotary_dim`` if the tables consist of the first half alone (GPT-OSS).

    Returns:
        The rotated q and k, as new tensors of the same shapes and dtypes.

    Raises:
        ValueError: the shapes do not match, unsqueeze_dim is neither 1 nor 2, or rotary_dim is odd or too large.
        TypeError: a tensor is not floating-point.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"liger_rotary_pos_emb: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}.")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"liger_rotary_pos_emb: q and k must have 4 dimensions, got {list(q.shape)} and {list(k.shape)}."
        )
    width = cos.shape[-1] if rotary_dim is None else rotary_dim
    if not (width % 2 == 0 and 0 < width <= min(q.shape[-1], 2 * cos.shape[-1])):
        raise ValueError(
            f"liger_rotary_pos_emb: rotary_dim must be even and at most {q.shape[-1]} (the head) and twice the width "
            f"of cos ({cos.shape[-1]}), got {width}."
        )
    cos, sin = (table[..., : width // 2] for table in (cos, sin))
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    if unsqueeze_dim == 2:
        return rope(q, cos, sin), rope(k, cos, sin)
    return rope(q.transpose(1, 2), cos, sin).transpose(1, 2), rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
