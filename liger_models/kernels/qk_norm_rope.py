"""RMSNorm of queries and keys, then their rotation, while the packed QKV projection is taken apart.

Forward, with r = 1 / sqrt(mean(x²) + eps) and n = x · r, in fp32::

    z = (weight_offset + w) · cast(n)    scale_in_fp32=False (Qwen3)        both rounded to the input dtype
    z = (weight_offset + w) · n          scale_in_fp32=True (Gemma 3, OLMo 2)
    q, k = cast(rotated(z))              as in `rope`;  v is copied

The mean is over a head, with one weight [D] for all queries and one for all keys; or, where the weights are as wide as
the projections ([H · D] and [G · D]: OLMo 2), over all heads of a token, queries and keys apart.

Backward, with dz = rotated back(dq), s = dz · (weight_offset + w), and likewise for k::

    dx = r · (s − x · r² · mean(s · x)),   dw = Σ dz · n

Saved: the packed projection itself. r is made again from x, which the backward has at hand. The outputs, which
attention keeps anyway, would not do instead: n is not to be had from them where a weight is 0. The weight gradients are
summed in fp32: a partial result per program, then a sum.

Source: https://arxiv.org/abs/2010.04245, as Qwen3 (https://arxiv.org/abs/2505.09388), Gemma 3
(https://arxiv.org/abs/2503.19786) and OLMo 2 (https://arxiv.org/abs/2501.00656) have it.
"""

import torch
from torch import Tensor

from .dispatch import LIBRARY, check, check_floating, num_programs, on_device_of, tl, triton, use_triton
from .rms_norm import _scaled, rms_norm_reference
from .rope import (
    check_qkv,
    contiguous_rows,
    empty_heads,
    load_angles,
    load_heads,
    rope_reference,
    rotate,
    split_heads,
    store_heads,
    tables,
    tiles,
)

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16
"""16 elements per thread, as in `rope`; a token of 64 heads of 128, normed as a whole, is the widest held like that."""

BACKWARD_WARPS_PER_SM = 32
"""Warps per multiprocessor that share the tokens when each program sums a weight gradient over those it takes."""


def qk_norm_rope_reference(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `qk_norm_rope` computes, in plain torch (differentiable; fp64 stays fp64)."""
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)

    def normed_and_rotated(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.unflatten(2, (-1, weight.shape[0] // head_dim)).flatten(3)  # [B, T, norms, heads of each · D]
        normed = rms_norm_reference(rows, weight, eps, weight_offset, scale_in_fp32).view_as(x)
        return normed if cos is None or sin is None else rope_reference(normed, cos, sin, interleaved)

    return normed_and_rotated(q, q_norm_weight), normed_and_rotated(k, k_norm_weight), v


@triton.jit
def _mean(
    x, rest, is_query, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr
):
    """[ROWS, 1]: the mean over each row, or, with WHOLE, over all rows that are queries or all that are keys."""
    total = tl.sum(x, 1)[:, None]
    if D > 2 * HALF:
        total += tl.sum(rest, 1)[:, None]
    if WHOLE:
        queries = tl.sum(tl.where(is_query, total, 0.0)) / (H * D)
        keys = tl.sum(tl.where(is_query, 0.0, total)) / (G * D)
        return tl.where(is_query, queries, keys)
    return total / D


@triton.jit
def _places(chunk, G: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """The heads of a program, [ROWS, 1]: index (queries, then keys), which are queries, index in the packed row."""
    head = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    is_query = head < G * QUERIES
    key = (head - G * QUERIES) * (QUERIES + 2) + QUERIES
    return head, is_query, tl.where(is_query, head // QUERIES * (QUERIES + 2) + head % QUERIES, key)


@triton.jit
def _copy_values(
    source, source_h, target, target_h, chunk, given,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr, BLOCK_SHARE: tl.constexpr,
):  # fmt: skip
    """Copy a program's share of a token's values."""
    row = tl.arange(0, BLOCK_SHARE)[:, None]
    value = chunk * SHARE + row
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < SHARE) & (value < G) & (column < D)
    values = tl.load(source + value * source_h + column, mask=inside & given, other=0.0)
    tl.store(target + value * target_h + column, values, mask=inside)


@triton.jit
def _forward_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, T, packed_b, packed_t, table_b, table_t,
    eps, weight_offset,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_SHARE: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, SCALE_IN_FP32: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = G * QUERIES
    CHUNKS: tl.constexpr = (H + G + ROWS - 1) // ROWS
    W: tl.constexpr = D if WHOLE else 0
    chunk = tl.program_id(0) % CHUNKS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    packed = packed_ptr + batch * packed_b + position * packed_t
    head, is_query, place = _places(chunk, G, QUERIES, ROWS)
    inside = head < H + G
    x1, x2, rest = load_heads(packed + place * D, inside, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
    weight = tl.where(is_query, wq_ptr + head * W, wk_ptr + (head - H) * W)
    w1, w2, w_rest = load_heads(weight, inside, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK_HALF, False)
    dtype = packed_ptr.dtype.element_ty
    x1, x2, rest = x1.to(tl.float32), x2.to(tl.float32), rest.to(tl.float32)
    rstd = 1.0 / tl.sqrt(_mean(x1 * x1 + x2 * x2, rest * rest, is_query, H, G, D, HALF, WHOLE) + eps)
    z1 = _scaled(x1 * rstd, w1, weight_offset, SCALE_IN_FP32, dtype).to(dtype).to(tl.float32)
    z2 = _scaled(x2 * rstd, w2, weight_offset, SCALE_IN_FP32, dtype).to(dtype).to(tl.float32)
    rest = _scaled(rest * rstd, w_rest, weight_offset, SCALE_IN_FP32, dtype)
    z1, z2 = rotate(z1, z2, cos, sin)
    row = batch * T + position
    split = tl.where(is_query, q_ptr + row * (H * D) + head * D, k_ptr + row * (G * D) + (head - H) * D)
    store_heads(split, inside, z1, z2, rest, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
    values = packed + (QUERIES + 1) * D
    _copy_values(values, (QUERIES + 2) * D, v_ptr + row * (G * D), D, chunk, True, G, D, BLOCK_D, SHARE, BLOCK_SHARE)


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, packed_ptr, d_packed_ptr, wq_ptr, wk_ptr, dw_ptr, cos_ptr, sin_ptr, N, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, packed_b, packed_t, table_b, table_t, eps, weight_offset,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_SHARE: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, SCALE_IN_FP32: tl.constexpr,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, STORE_DW: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = G * QUERIES
    CHUNKS: tl.constexpr = (H + G + ROWS - 1) // ROWS
    W: tl.constexpr = D if WHOLE else 0
    chunk = tl.program_id(0) % CHUNKS
    head, is_query, place = _places(chunk, G, QUERIES, ROWS)
    inside = head < H + G
    given = inside
    if not HAS_Q:
        given = given & (head >= H)
    if not HAS_K:
        given = given & is_query
    weight = tl.where(is_query, wq_ptr + head * W, wk_ptr + (head - H) * W)
    w1, w2, w_rest = load_heads(weight, inside, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
    dtype = packed_ptr.dtype.element_ty
    dw1 = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    dw2 = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    dw_rest = tl.zeros([ROWS, BLOCK_REST], tl.float32)
    for token in tl.range(tl.program_id(0) // CHUNKS, N, tl.num_programs(0) // CHUNKS):
        batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
        dq = dq_ptr + batch * q_b + position * q_t + head.to(tl.int64) * q_h
        dk = dk_ptr + batch * k_b + position * k_t + (head - H).to(tl.int64) * k_h
        split = tl.where(is_query, dq, dk)
        g1, g2, g_rest = load_heads(split, given, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
        packed = packed_ptr + batch * packed_b + position * packed_t + place * D
        x1, x2, rest = load_heads(packed, inside, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
        cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK_HALF, True)
        g1, g2, g_rest = g1.to(tl.float32), g2.to(tl.float32), g_rest.to(tl.float32)
        x1, x2, rest = x1.to(tl.float32), x2.to(tl.float32), rest.to(tl.float32)
        g1, g2 = rotate(g1, g2, cos, sin)
        s1, s2 = g1 * (w1.to(tl.float32) + weight_offset), g2 * (w2.to(tl.float32) + weight_offset)
        s_rest = g_rest * (w_rest.to(tl.float32) + weight_offset)
        rstd = 1.0 / tl.sqrt(_mean(x1 * x1 + x2 * x2, rest * rest, is_query, H, G, D, HALF, WHOLE) + eps)
        along = rstd * rstd * _mean(s1 * x1 + s2 * x2, s_rest * rest, is_query, H, G, D, HALF, WHOLE)
        dx1, dx2, dx_rest = rstd * (s1 - x1 * along), rstd * (s2 - x2 * along), rstd * (s_rest - rest * along)
        d_token = d_packed_ptr + (batch * T + position) * ((H + 2 * G) * D)
        store_heads(d_token + place * D, inside, dx1, dx2, dx_rest, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
        dv = dv_ptr + batch * v_b + position * v_t
        values = d_token + (QUERIES + 1) * D
        _copy_values(dv, v_h, values, (QUERIES + 2) * D, chunk, HAS_V, G, D, BLOCK_D, SHARE, BLOCK_SHARE)
        if STORE_DW:
            n1, n2, n_rest = x1 * rstd, x2 * rstd, rest * rstd
            if not SCALE_IN_FP32:
                n1, n2 = n1.to(dtype).to(tl.float32), n2.to(dtype).to(tl.float32)
                n_rest = n_rest.to(dtype).to(tl.float32)
            dw1 += g1 * n1
            dw2 += g2 * n2
            dw_rest += g_rest * n_rest
    if STORE_DW:
        program = tl.program_id(0).to(tl.int64)
        if WHOLE:
            dw = dw_ptr + (program * (H + G) + head) * D
            store_heads(dw, inside, dw1, dw2, dw_rest, D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
        else:
            first = tl.arange(0, 1)[:, None]
            for keys in tl.static_range(2):
                mine = is_query != (keys == 1)
                store_heads(
                    dw_ptr + (program * 2 + keys) * D + first, first == 0,
                    tl.sum(tl.where(mine, dw1, 0.0), 0)[None, :], tl.sum(tl.where(mine, dw2, 0.0), 0)[None, :],
                    tl.sum(tl.where(mine, dw_rest, 0.0), 0)[None, :],
                    D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
                )  # fmt: skip


def _constants(
    num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor | None, whole: bool
) -> tuple[int, dict[str, int]]:
    """Programs that share a token's heads, and what both kernels are compiled for."""
    normed = num_heads + num_kv_heads
    constants = tiles(normed, head_dim, cos)
    if whole:
        constants["ROWS"] = triton.next_power_of_2(normed)
    chunks = triton.cdiv(normed, constants["ROWS"])
    share = triton.cdiv(num_kv_heads, chunks)
    block_d = triton.next_power_of_2(head_dim)
    return chunks, constants | {
        "G": num_kv_heads,
        "QUERIES": num_heads // num_kv_heads,
        "BLOCK_D": block_d,
        "SHARE": share,
        "BLOCK_SHARE": triton.next_power_of_2(share),
        "num_warps": min(max(constants["ROWS"] * block_d // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    }


LIBRARY.define(
    "qk_norm_rope(Tensor qkv, Tensor? cos, Tensor? sin, int num_heads, int num_kv_heads, int head_dim,"
    " Tensor q_norm_weight, Tensor k_norm_weight, float eps, float weight_offset, bool scale_in_fp32, bool interleaved)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "qk_norm_rope_backward(Tensor? dq, Tensor? dk, Tensor? dv, Tensor qkv, Tensor? cos, Tensor? sin, int num_heads,"
    " int num_kv_heads, int head_dim, Tensor q_norm_weight, Tensor k_norm_weight, float eps, float weight_offset,"
    " bool scale_in_fp32, bool interleaved, bool need_dw) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "qk_norm_rope", "CompositeExplicitAutograd")
def _qk_norm_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int,
    q_norm_weight: Tensor, k_norm_weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = contiguous_rows(qkv)
    whole = q_norm_weight.shape[0] != head_dim
    chunks, constants = _constants(num_heads, num_kv_heads, head_dim, cos, whole)
    cos, sin, table_b, table_t = tables(cos, sin, qkv)
    q, k, v = empty_heads(qkv, num_heads, num_kv_heads, head_dim)
    B, T, _ = qkv.shape
    if qkv.numel():
        with on_device_of(qkv):
            _forward_kernel[(B * T * chunks,)](
                qkv, q, k, v, q_norm_weight.contiguous(), k_norm_weight.contiguous(), cos, sin, T, *qkv.stride()[:2],
                table_b, table_t, eps, weight_offset,
                INTERLEAVED=interleaved, WHOLE=whole, SCALE_IN_FP32=scale_in_fp32, **constants,
            )  # fmt: skip
    return q, k, v


@torch.library.impl(LIBRARY, "qk_norm_rope_backward", "CompositeExplicitAutograd")
def _qk_norm_rope_backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, qkv: Tensor, cos: Tensor | None, sin: Tensor | None,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm_weight: Tensor, k_norm_weight: Tensor, eps: float,
    weight_offset: float, scale_in_fp32: bool, interleaved: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = contiguous_rows(qkv)
    grads = [None if grad is None else contiguous_rows(grad) for grad in (dq, dk, dv)]
    whole = q_norm_weight.shape[0] != head_dim
    chunks, constants = _constants(num_heads, num_kv_heads, head_dim, cos, whole)
    cos, sin, table_b, table_t = tables(cos, sin, qkv)
    B, T, _ = qkv.shape
    shares = B * T  # programs among which the tokens are divided, for each chunk of heads
    if need_dw:
        shares = min(shares, max(num_programs(qkv, BACKWARD_WARPS_PER_SM // constants["num_warps"]) // chunks, 1))
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    q_rows, k_rows = (num_heads, num_kv_heads) if whole else (1, 1)
    partial = torch.empty(
        shares * chunks if need_dw else 0, q_rows + k_rows, head_dim, dtype=torch.float32, device=qkv.device
    )
    # A part that the constants switch off still has to be a tensor with strides.
    parts = [qkv.unsqueeze(2) if grad is None else grad for grad in grads]
    if qkv.numel():
        with on_device_of(qkv):
            _backward_kernel[(shares * chunks,)](
                *parts, qkv, dqkv, q_norm_weight.contiguous(), k_norm_weight.contiguous(), partial, cos, sin, B * T, T,
                *(stride for part in parts for stride in part.stride()[:3]), *qkv.stride()[:2], table_b, table_t,
                eps, weight_offset, INTERLEAVED=interleaved, WHOLE=whole, SCALE_IN_FP32=scale_in_fp32,
                HAS_Q=dq is not None, HAS_K=dk is not None, HAS_V=dv is not None, STORE_DW=need_dw, **constants,
            )  # fmt: skip
    if not need_dw:
        return dqkv, q_norm_weight.new_empty(0), k_norm_weight.new_empty(0)
    total = partial.sum(0)
    dwq, dwk = total[:q_rows].flatten().to(q_norm_weight.dtype), total[q_rows:].flatten().to(k_norm_weight.dtype)
    return dqkv, dwq, dwk


@torch.library.register_fake("liger_models::qk_norm_rope", lib=LIBRARY)
def _qk_norm_rope_fake(qkv, cos, sin, num_heads, num_kv_heads, head_dim, *norms):
    return empty_heads(qkv, num_heads, num_kv_heads, head_dim)


@torch.library.register_fake("liger_models::qk_norm_rope_backward", lib=LIBRARY)
def _qk_norm_rope_backward_fake(
    dq, dk, dv, qkv, cos, sin, num_heads, num_kv_heads, head_dim, q_norm_weight, k_norm_weight, eps, weight_offset,
    scale_in_fp32, interleaved, need_dw,
):  # fmt: skip
    weights = (weight.new_empty(weight.shape if need_dw else 0) for weight in (q_norm_weight, k_norm_weight))
    return qkv.new_empty(qkv.shape), *weights


def _setup(ctx, inputs, output):
    qkv, cos, sin, *ctx.sizes, q_norm_weight, k_norm_weight, eps, weight_offset, scale_in_fp32, interleaved = inputs
    ctx.options = eps, weight_offset, scale_in_fp32, interleaved
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, cos, sin, q_norm_weight, k_norm_weight)


def _backward(ctx, dq, dk, dv):
    if dq is None and dk is None and dv is None:
        return (None,) * 12
    qkv, cos, sin, *weights = ctx.saved_tensors
    need_dwq, need_dwk = ctx.needs_input_grad[6:8]
    dqkv, dwq, dwk = torch.ops.liger_models.qk_norm_rope_backward(
        dq, dk, dv, qkv, cos, sin, *ctx.sizes, *weights, *ctx.options, need_dwq or need_dwk
    )
    return dqkv, *(None,) * 5, dwq if need_dwq else None, dwk if need_dwk else None, *(None,) * 4


torch.library.register_autograd("liger_models::qk_norm_rope", _backward, setup_context=_setup, lib=LIBRARY)


def qk_norm_rope(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the packed projection apart, norm q and k and rotate them, in one kernel; it is kept for the backward.

    Args:
        qkv, cos, sin, num_heads, num_kv_heads, head_dim: as in `rope_qkv`.
        q_norm_weight, k_norm_weight: [D] both, to norm each head by itself; or [H · D] and [G · D], in the order of the
            outputs' heads, to norm all queries and all keys of a token as one vector each. Of one dtype.
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        interleaved: as in `rope`.

    Returns:
        ``(q, k, v)``: [B, T, H, D], [B, T, G, D] and [B, T, G, D], each contiguous, in the dtype of qkv.

    Raises:
        ValueError: the sizes don't fit together, or one table is given without the other.
        TypeError: a tensor that is not floating-point, or weights of two dtypes.
    """
    check_qkv("qk_norm_rope", qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    check_floating("qk_norm_rope", q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    shapes = [list(weight.shape) for weight in (q_norm_weight, k_norm_weight)]
    heads, whole = [[head_dim]] * 2, [[num_heads * head_dim], [num_kv_heads * head_dim]]
    check(
        shapes in (heads, whole),
        f"qk_norm_rope: q_norm_weight and k_norm_weight must be {heads} (each head by itself) or {whole} (all heads as "
        f"one vector), got {shapes}.",
    )
    if q_norm_weight.dtype != k_norm_weight.dtype:
        raise TypeError(
            f"qk_norm_rope: the norm weights must have one dtype, got {q_norm_weight.dtype} and {k_norm_weight.dtype}."
        )
    sizes, weights = (num_heads, num_kv_heads, head_dim), (q_norm_weight, k_norm_weight)
    if not use_triton(qkv):
        return qk_norm_rope_reference(
            qkv, cos, sin, *sizes, *weights,
            eps=eps, weight_offset=weight_offset, scale_in_fp32=scale_in_fp32, interleaved=interleaved,
        )  # fmt: skip
    q, k, v = torch.ops.liger_models.qk_norm_rope(
        qkv, cos, sin, *sizes, *weights, eps, weight_offset, scale_in_fp32, interleaved
    )
    return q, k, v
