"""RMSNorm and rotary embedding of queries and keys, fused with the split of the packed QKV projection.

The forward is computed in fp32, with r = 1 / sqrt(mean(x²) + eps) and n = x · r::

    z = cast((weight_offset + w) · cast(n))    with scale_in_fp32=False (Qwen3)
    z = cast((weight_offset + w) · n)          with scale_in_fp32=True (Gemma 3, OLMo 2)
    q, k = cast(rotated(z))                    rotated as in `rope`; v is copied

The function cast rounds to the dtype of the projection. The mean is over one head. All query heads share one weight
[D], and all key heads share another weight [D]. In OLMo 2, the weights are as wide as the projections ([H · D] and [G ·
D]). In this case, one mean is over all query heads of a token, and another mean is over all key heads of the token.

In the backward of q, let dz be dq rotated back, and let s = dz · (weight_offset + w). The backward of k is the same::

    dx = r · (s − x · r² · mean(s · x)),   dw = Σ dz · n

The forward saves the packed projection, from which the backward recomputes r. Attention saves q and k, the outputs of
this op, anyway. The backward cannot use these outputs instead of the packed projection: where a weight is 0, the
outputs do not determine n. The weight gradients are summed in fp32: each program writes a partial sum, and
`sum_partials` adds the partial sums.

Source: https://arxiv.org/abs/2010.04245, as in Qwen3 (https://arxiv.org/abs/2505.09388), Gemma 3
(https://arxiv.org/abs/2503.19786) and OLMo 2 (https://arxiv.org/abs/2501.00656).
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.norm.rms_norm import rms_norm_reference
from liger_models.kernels.norm.row_norm import scale_rows
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.rope.head_norm import backward_launch, inverse_rms, norm_gradient, store_weight_gradients
from liger_models.kernels.rope.rope import (
    ELEMENTS_PER_WARP,
    MAX_WARPS,
    check_qkv,
    choose,
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
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2


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
    """Compute `qk_norm_rope` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)

    def normed_and_rotated(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.unflatten(2, (-1, weight.shape[0] // head_dim)).flatten(3)  # [B, T, norms, D or heads · D]
        normed = rms_norm_reference(rows, weight, eps, weight_offset, scale_in_fp32).view_as(x)
        return normed if cos is None or sin is None else rope_reference(normed, cos, sin, interleaved)

    return normed_and_rotated(q, q_norm_weight), normed_and_rotated(k, k_norm_weight), v


@triton.jit
def _heads(chunk, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Return three tensors [ROWS, 1] that describe a program's heads.

    The first tensor is the index of the head. Key heads are numbered after the query heads. The second tensor is True
    if the head exists. The third tensor is the index of the head in the packed row. With WHOLE, the first chunk has all
    query heads, and the second chunk has all key heads.
    """
    H: tl.constexpr = G * GROUP
    # In the packed row, each group consists of its query heads, then its key, then its value.
    PER_CHUNK: tl.constexpr = H if WHOLE else ROWS
    row = tl.arange(0, ROWS)[:, None]
    head = chunk * PER_CHUNK + row
    packed_key = (head - H) * (GROUP + 2) + GROUP
    packed_head = tl.where(head < H, head // GROUP * (GROUP + 2) + head % GROUP, packed_key)
    return head, (row < PER_CHUNK) & (head < H + G), packed_head


@triton.jit
def _values(chunk, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr):
    """Return the part of a token's values that a program copies: the heads [ROWS, 1], the columns [1, 2 · BLOCK], and a
    mask.
    """
    row = tl.arange(0, ROWS)[:, None]
    value = chunk * SHARE + row
    column = tl.arange(0, 2 * BLOCK)[None, :]
    return value, column, (row < SHARE) & (value < G) & (column < D)


@triton.jit
def _qk_norm_rope_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, T, packed_b, packed_t, table_b, table_t,
    eps, weight_offset,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, SHARE_ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, SCALE_IN_FP32: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program normalizes and rotates a chunk of a token's heads, and copies a share of the token's values."""
    await_previous(OVERLAPS)
    H: tl.constexpr = G * GROUP
    W: tl.constexpr = D if WHOLE else 0  # distance between the weights of two heads
    chunk = tl.program_id(0) % CHUNKS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    row = token.to(tl.int64)

    # Load all inputs: heads and their weights (two halves [ROWS, BLOCK] each), values, and angles [1, BLOCK].
    packed = packed_ptr + batch * packed_b + position * packed_t
    head, inside, packed_head = _heads(chunk, G, GROUP, ROWS, WHOLE)
    x1, x2 = load_heads(packed + packed_head * D, inside, D, HALF, BLOCK, INTERLEAVED)
    value, column, inside_values = _values(chunk, G, D, BLOCK, SHARE, SHARE_ROWS)
    values = tl.load(packed + (value * (GROUP + 2) + GROUP + 1) * D + column, mask=inside_values, other=0.0)
    weight = choose(head < H, wq_ptr + head * W, wk_ptr + (head - H) * W)
    w1, w2 = load_heads(weight, inside, D, HALF, BLOCK, INTERLEAVED)
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, False)

    # Compute z = w · n, rounded to the dtype of the projection, and rotate it.
    dtype = packed_ptr.dtype.element_ty
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    count = tl.where(chunk == 0, H, G) * D if WHOLE else D
    rstd = inverse_rms(x1, x2, count, eps, WHOLE)
    z1 = scale_rows(x1 * rstd, w1, weight_offset, SCALE_IN_FP32, dtype).to(dtype).to(tl.float32)
    z2 = scale_rows(x2 * rstd, w2, weight_offset, SCALE_IN_FP32, dtype).to(dtype).to(tl.float32)
    y1, y2 = rotate(z1, z2, cos, sin, True, HALF, BLOCK)

    # Store queries and keys in their own contiguous tensors, and copy the values.
    split = choose(head < H, q_ptr + row * (H * D) + head * D, k_ptr + row * (G * D) + (head - H) * D)
    store_heads(split, inside, y1, y2, D, HALF, BLOCK, INTERLEAVED)
    tl.store(v_ptr + row * (G * D) + value * D + column, values, mask=inside_values)


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, packed_ptr, d_packed_ptr, wq_ptr, wk_ptr, dw_ptr, cos_ptr, sin_ptr, N, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, packed_b, packed_t, table_b, table_t, eps, weight_offset,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, SHARE_ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, STORE_DW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program computes the backward of one chunk of heads for several tokens, and sums the weight gradients."""
    H: tl.constexpr = G * GROUP
    W: tl.constexpr = D if WHOLE else 0
    chunk = tl.program_id(0) % CHUNKS
    program = (tl.program_id(0) // CHUNKS).to(tl.int64)

    # The indices of heads and values, and the weights, are the same for all tokens. Absent gradients are loaded as 0.
    head, inside, packed_head = _heads(chunk, G, GROUP, ROWS, WHOLE)
    has_gradient = inside
    if not HAS_Q:
        has_gradient = has_gradient & (head >= H)
    if not HAS_K:
        has_gradient = has_gradient & (head < H)
    value, column, inside_values = _values(chunk, G, D, BLOCK, SHARE, SHARE_ROWS)
    weight = choose(head < H, wq_ptr + head * W, wk_ptr + (head - H) * W)
    w1, w2 = load_heads(weight, inside, D, HALF, BLOCK, INTERLEAVED)
    count = tl.where(chunk == 0, H, G) * D if WHOLE else D

    dw1 = tl.zeros([ROWS, BLOCK], tl.float32)
    dw2 = tl.zeros([ROWS, BLOCK], tl.float32)
    for token in tl.range(tl.program_id(0) // CHUNKS, N, tl.num_programs(0) // CHUNKS, num_stages=STAGES):
        # Load the token's gradients, heads and angles, and the gradients of its values.
        batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
        dq = dq_ptr + batch * q_b + position * q_t + head.to(tl.int64) * q_h
        dk = dk_ptr + batch * k_b + position * k_t + (head - H).to(tl.int64) * k_h
        g1, g2 = load_heads(choose(head < H, dq, dk), has_gradient, D, HALF, BLOCK, INTERLEAVED)
        packed = packed_ptr + batch * packed_b + position * packed_t + packed_head * D
        x1, x2 = load_heads(packed, inside, D, HALF, BLOCK, INTERLEAVED)
        cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, True)
        dv = dv_ptr + batch * v_b + position * v_t + value.to(tl.int64) * v_h
        values = tl.load(dv + column, mask=inside_values & HAS_V, other=0.0)

        # Rotate g back, which gives dz, and compute s = dz · w and dx. Each of them consists of two tensors [ROWS,
        # BLOCK].
        g1, g2 = rotate(g1.to(tl.float32), g2.to(tl.float32), cos, sin, True, HALF, BLOCK)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        s1, s2 = g1 * (w1.to(tl.float32) + weight_offset), g2 * (w2.to(tl.float32) + weight_offset)
        rstd = inverse_rms(x1, x2, count, eps, WHOLE)
        dx1, dx2 = norm_gradient(x1, x2, s1, s2, rstd, count, WHOLE)

        # Store the gradients in dqkv, which is contiguous. The gradients of values are copied.
        d_packed = d_packed_ptr + (batch * T + position) * ((H + 2 * G) * D)
        store_heads(d_packed + packed_head * D, inside, dx1, dx2, D, HALF, BLOCK, INTERLEAVED)
        tl.store(d_packed + (value * (GROUP + 2) + GROUP + 1) * D + column, values, mask=inside_values)
        if STORE_DW:
            dw1 += g1 * (x1 * rstd)
            dw2 += g2 * (x2 * rstd)

    if STORE_DW:
        if WHOLE:
            store_heads(dw_ptr + (program * (H + G) + head) * D, inside, dw1, dw2, D, HALF, BLOCK, INTERLEAVED)
        else:
            is_query = head < H
            row = program * CHUNKS + chunk
            store_weight_gradients(dw_ptr, row, is_query, ~is_query, dw1, dw2, D, HALF, BLOCK, INTERLEAVED)


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor | None, whole: bool) -> dict[str, int]:
    """Return the constants of the forward and backward kernels. The heads of a token are split among ``CHUNKS``
    programs.
    """
    constants = tiles(num_heads + num_kv_heads, head_dim, cos)
    if whole:
        # One program has all query heads or all key heads of a token, because the norm is over all of them.
        rows = next_power_of_2(num_heads)
        warps = min(rows * 2 * constants["BLOCK"] // ELEMENTS_PER_WARP, MAX_WARPS)
        constants |= {"ROWS": rows, "num_warps": max(constants["num_warps"], warps)}
    chunks = 2 if whole else cdiv(num_heads + num_kv_heads, constants["ROWS"])
    share = cdiv(num_kv_heads, chunks)
    return constants | {
        "G": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "CHUNKS": chunks,
        "SHARE": share,
        "SHARE_ROWS": next_power_of_2(share),
    }


def _qk_norm_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int,
    q_norm_weight: Tensor, k_norm_weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = contiguous_rows(qkv)
    whole = q_norm_weight.shape[0] != head_dim
    constants = _constants(num_heads, num_kv_heads, head_dim, cos, whole)
    cos, sin, table_b, table_t = tables(cos, sin, qkv)
    q, k, v = empty_heads(qkv, num_heads, num_kv_heads, head_dim)
    B, T, _ = qkv.shape
    if qkv.numel():
        with on_device_of(qkv):
            _qk_norm_rope_kernel[(B * T * constants["CHUNKS"],)](
                qkv, q, k, v, q_norm_weight.contiguous(), k_norm_weight.contiguous(), cos, sin, T, *qkv.stride()[:2],
                table_b, table_t, eps, weight_offset,
                INTERLEAVED=interleaved, WHOLE=whole, SCALE_IN_FP32=scale_in_fp32, **constants, **overlap(qkv),
            )  # fmt: skip
    return q, k, v


def _qk_norm_rope_backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, qkv: Tensor, cos: Tensor | None, sin: Tensor | None,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm_weight: Tensor, k_norm_weight: Tensor, eps: float,
    weight_offset: float, interleaved: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = contiguous_rows(qkv)
    grads = [None if grad is None else contiguous_rows(grad) for grad in (dq, dk, dv)]
    whole = q_norm_weight.shape[0] != head_dim
    constants = _constants(num_heads, num_kv_heads, head_dim, cos, whole)
    chunks = constants["CHUNKS"]
    cos, sin, table_b, table_t = tables(cos, sin, qkv)
    B, T, _ = qkv.shape
    shares, stages = backward_launch(qkv, constants, need_dw, whole)

    # A program has one partial sum of the weight gradient for each head, or one for query heads and one for key heads.
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    rows, q_rows = (num_heads + num_kv_heads, num_heads) if whole else (2, 1)
    partials = (shares if whole else shares * chunks) if need_dw else 0
    partial = torch.empty(partials, rows, head_dim, dtype=torch.float32, device=qkv.device)

    # The kernel does not read an absent gradient, but a tensor with strides must be passed instead.
    parts = [qkv.unsqueeze(2) if grad is None else grad for grad in grads]
    if qkv.numel():
        with on_device_of(qkv):
            _qk_norm_rope_backward_kernel[(shares * chunks,)](
                *parts, qkv, dqkv, q_norm_weight.contiguous(), k_norm_weight.contiguous(), partial, cos, sin, B * T, T,
                *(stride for part in parts for stride in part.stride()[:3]), *qkv.stride()[:2], table_b, table_t,
                eps, weight_offset, INTERLEAVED=interleaved, WHOLE=whole,
                HAS_Q=dq is not None, HAS_K=dk is not None, HAS_V=dv is not None, STORE_DW=need_dw, STAGES=stages,
                **constants,
            )  # fmt: skip
    if not need_dw:
        return dqkv, q_norm_weight.new_empty(0), k_norm_weight.new_empty(0)
    dwq, dwk = (q_norm_weight.new_empty(count * head_dim) for count in (q_rows, rows - q_rows))
    sum_partials(partial, dwq, dwk)
    return dqkv, dwq, dwk


def _qk_norm_rope_backward_fake(
    dq, dk, dv, qkv, cos, sin, num_heads, num_kv_heads, head_dim, q_norm_weight, k_norm_weight, eps, weight_offset,
    interleaved, need_dw,
):  # fmt: skip
    weights = (weight.new_empty(weight.shape if need_dw else 0) for weight in (q_norm_weight, k_norm_weight))
    return qkv.new_empty(qkv.shape), *weights


BACKWARD = define_op("qk_norm_rope_backward", _qk_norm_rope_backward, _qk_norm_rope_backward_fake)
FORWARD = define_op(
    "qk_norm_rope", _qk_norm_rope, lambda qkv, cos, sin, *sizes: empty_heads(qkv, *sizes[:3]),
    outputs="q k v", backward=BACKWARD, gradients="qkv q_norm_weight k_norm_weight",
    needs={"need_dw": "q_norm_weight k_norm_weight"},
)  # fmt: skip


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
    """Split the packed projection, and normalize and rotate q and k, in one kernel.

    The packed tensor is saved for the backward.

    Args:
        qkv, cos, sin, num_heads, num_kv_heads, head_dim: as in `rope_qkv`.
        q_norm_weight, k_norm_weight: [D] each, to normalize each head separately. To normalize all query heads of a
            token as one vector, and all key heads as another vector, pass [H · D] and [G · D], in the order of the
            outputs' heads. Both weights have the same dtype.
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        interleaved: as in `rope`.

    Returns:
        ``(q, k, v)``: [B, T, H, D], [B, T, G, D] and [B, T, G, D], each contiguous, in the dtype of qkv.

    Raises:
        ValueError: the sizes do not match, or only one of cos and sin is given.
        TypeError: a tensor is not floating-point, or the weights differ in dtype.
    """
    check_qkv("qk_norm_rope", qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    check_floating("qk_norm_rope", q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    width, k_width = q_norm_weight.numel(), k_norm_weight.numel()
    fits = (width == head_dim and k_width == head_dim) or (
        width == num_heads * head_dim and k_width == num_kv_heads * head_dim
    )
    if not (fits and q_norm_weight.dim() == k_norm_weight.dim() == 1):
        raise ValueError(
            f"qk_norm_rope: q_norm_weight and k_norm_weight must both be [{head_dim}] (each head by itself) or "
            f"[{num_heads * head_dim}] and [{num_kv_heads * head_dim}] (all heads as one vector), got "
            f"{list(q_norm_weight.shape)} and {list(k_norm_weight.shape)}."
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
    return FORWARD(qkv, cos, sin, *sizes, *weights, eps, weight_offset, scale_in_fp32, interleaved)
