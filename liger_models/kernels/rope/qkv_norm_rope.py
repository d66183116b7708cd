"""RMSNorm of queries, keys and values, and rotary embedding of queries and keys, fused with the split of packed QKV.

The packed projection is grouped by KV head. Each group consists of its H / G query heads, then its key, then its value.
If the projection has no values, the key is also the value. If the projection has neither keys nor values, the layer
uses the keys and values of another layer. Every head is normalized separately. The forward is computed in fp32, with r
= 1 / sqrt(mean(x²) + eps) and n = x · r::

    q, k = cast(rotated(cast(n · w)))     w [D] is the weight of queries or keys; rotated as in `rope`
    v = cast(n)

In the backward, let g be dq or dk rotated back::

    s = g · w                             for queries and keys
    s = g · w + dv                        for keys that are also values
    s = dv                                for values
    dx = r · (s − x · r² · mean(s · x)),   dw = Σ g · n

The forward saves the packed projection, from which the backward recomputes r. The weight gradients are summed in fp32:
each program writes a partial sum, and `sum_partials` adds the partial sums.

Source: transformers ``models/gemma4``; https://arxiv.org/abs/2010.04245.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.norm.rms_norm import rms_norm_reference
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.rope.head_norm import backward_launch, inverse_rms, norm_gradient, store_weight_gradients
from liger_models.kernels.rope.rope import (
    check_even,
    check_heads,
    check_tables,
    choose,
    load_angles,
    load_heads,
    rope_reference,
    rotate,
    store_heads,
    tables,
    tiles,
)
from liger_models.kernels.tiles import cdiv, contiguous_rows


def qkv_norm_rope_reference(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `qkv_norm_rope` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    queries = num_heads // num_kv_heads
    groups = packed.unflatten(-1, (num_kv_heads, -1, head_dim))  # [B, T, G, H / G + parts, D]

    # Queries and keys are normalized with a weight and rotated. Values are normalized without a weight.
    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        weight = x.new_ones(head_dim) if weight is None else weight
        return rms_norm_reference(x, weight, eps, scale_in_fp32=True)

    q = rope_reference(normed(groups[..., :queries, :].flatten(2, 3), q_norm_weight), cos, sin)
    if k_norm_weight is None:
        nothing = q[:, :, :0]
        return q, nothing, nothing
    k = rope_reference(normed(groups[..., queries, :], k_norm_weight), cos, sin)
    return q, k, normed(groups[..., -1, :], None)


@triton.jit
def _slots(chunk, G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return four tensors [ROWS, 1] that describe a program's heads.

    For each head, the tensors hold the index of the head in the packed row, the index of its group, its index within
    the group, and whether the head exists. There is one group for each KV head.
    """
    slot = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    return slot, slot // (GROUP + PARTS), slot % (GROUP + PARTS), slot < G * (GROUP + PARTS)


@triton.jit
def _weights(
    slot, member, inside, wq_ptr, wk_ptr, GROUP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the norm's weight for each head in fp32, as two tensors [ROWS, BLOCK] like the results of `load_heads`. The
    weight of values is 1.
    """
    weight = choose(member < GROUP, wq_ptr + slot * 0, wk_ptr + slot * 0)
    # For values, the weight of keys is loaded but not used.
    w1, w2 = load_heads(weight, inside, D, HALF, BLOCK, False)
    scaled = member <= GROUP
    return tl.where(scaled, w1.to(tl.float32), 1.0), tl.where(scaled, w2.to(tl.float32), 1.0)


@triton.jit
def _qkv_norm_rope_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, T, packed_b, packed_t, table_b, table_t, eps,
    G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program normalizes and rotates a chunk of one token's heads."""
    await_previous(OVERLAPS)
    H: tl.constexpr = G * GROUP
    chunk = tl.program_id(0) % CHUNKS
    token = tl.program_id(0) // CHUNKS
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    row = token.to(tl.int64)

    # Load heads and their weights, as two tensors [ROWS, BLOCK] each, and angles [1, BLOCK].
    slot, group, member, inside = _slots(chunk, G, GROUP, PARTS, ROWS)
    x1, x2 = load_heads(packed_ptr + batch * packed_b + position * packed_t + slot * D, inside, D, HALF, BLOCK, False)
    w1, w2 = _weights(slot, member, inside, wq_ptr, wk_ptr, GROUP, D, HALF, BLOCK)
    cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, False)

    # Normalize every head, and rotate queries and keys.
    dtype = packed_ptr.dtype.element_ty
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    rstd = inverse_rms(x1, x2, D, eps, False)
    n1, n2 = x1 * rstd, x2 * rstd
    z1, z2 = (n1 * w1).to(dtype).to(tl.float32), (n2 * w2).to(dtype).to(tl.float32)
    y1, y2 = rotate(z1, z2, cos, sin, member <= GROUP, HALF, BLOCK)

    # A key that is also the value is stored twice: the rotated key is stored as the key, and n is stored as the value.
    q = q_ptr + row * (H * D) + (group * GROUP + member) * D
    value = v_ptr + row * (G * D) + group * D
    if PARTS == 0:
        store_heads(q, inside, y1, y2, D, HALF, BLOCK, False)
    else:
        key = k_ptr + row * (G * D) + group * D
        split = choose(member < GROUP, q, choose(member == GROUP, key, value))
        store_heads(split, inside, y1, y2, D, HALF, BLOCK, False)
    if PARTS == 1:
        store_heads(value, inside & (member == GROUP), n1, n2, D, HALF, BLOCK, False)


@triton.jit
def _qkv_norm_rope_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, packed_ptr, d_packed_ptr, wq_ptr, wk_ptr, dw_ptr, cos_ptr, sin_ptr, N, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, packed_b, packed_t, table_b, table_t, eps,
    G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, STORE_DW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program computes the backward of one chunk of heads for several tokens, and sums the weight gradients."""
    chunk = tl.program_id(0) % CHUNKS
    program = (tl.program_id(0) // CHUNKS).to(tl.int64)
    slot, group, member, inside = _slots(chunk, G, GROUP, PARTS, ROWS)
    group, member = group.to(tl.int64), member.to(tl.int64)
    w1, w2 = _weights(slot, member, inside, wq_ptr, wk_ptr, GROUP, D, HALF, BLOCK)
    dw1 = tl.zeros([ROWS, BLOCK], tl.float32)
    dw2 = tl.zeros([ROWS, BLOCK], tl.float32)
    for token in tl.range(tl.program_id(0) // CHUNKS, N, tl.num_programs(0) // CHUNKS, num_stages=STAGES):
        # Load the gradient of each head from dq, dk or dv, the heads, and the angles.
        batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
        source = dq_ptr + batch * q_b + position * q_t + (group * GROUP + member) * q_h
        value = dv_ptr + batch * v_b + position * v_t + group * v_h
        if PARTS > 0:
            key = dk_ptr + batch * k_b + position * k_t + group * k_h
            source = choose(member < GROUP, source, choose(member == GROUP, key, value))
        g1, g2 = load_heads(source, inside, D, HALF, BLOCK, False)
        packed = packed_ptr + batch * packed_b + position * packed_t + slot * D
        x1, x2 = load_heads(packed, inside, D, HALF, BLOCK, False)
        cos, sin = load_angles(cos_ptr, sin_ptr, batch, position, table_b, table_t, HALF, BLOCK, True)

        # Compute s and dx, as two tensors [ROWS, BLOCK] each. A key that is also the value has a second gradient, dv.
        g1, g2 = rotate(g1.to(tl.float32), g2.to(tl.float32), cos, sin, member <= GROUP, HALF, BLOCK)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        s1, s2 = g1 * w1, g2 * w2
        if PARTS == 1:
            v1, v2 = load_heads(value, inside & (member == GROUP), D, HALF, BLOCK, False)
            s1 += v1.to(tl.float32)
            s2 += v2.to(tl.float32)
        rstd = inverse_rms(x1, x2, D, eps, False)
        dx1, dx2 = norm_gradient(x1, x2, s1, s2, rstd, D, False)

        # d_packed is contiguous, but packed may have strides.
        d_packed = d_packed_ptr + (batch * T + position) * (G * (GROUP + PARTS) * D) + slot * D
        store_heads(d_packed, inside, dx1, dx2, D, HALF, BLOCK, False)
        if STORE_DW:
            # Each lane sums its element of dw = Σ g · n over the program's tokens.
            dw1 += g1 * (x1 * rstd)
            dw2 += g2 * (x2 * rstd)

    if STORE_DW:
        store_weight_gradients(
            dw_ptr, program * CHUNKS + chunk, member < GROUP, member == GROUP, dw1, dw2, D, HALF, BLOCK, False
        )


def _constants(packed: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor) -> dict[str, int]:
    """Return the constants of the forward and backward kernels.

    ``PARTS`` is 2 if each group has a key and a value, 1 if it has only a key, and 0 if it has neither. ``CHUNKS`` is
    the number of programs per token.
    """
    slots = packed.shape[-1] // head_dim
    constants = tiles(slots, head_dim, cos)
    return constants | {
        "G": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "PARTS": (slots - num_heads) // num_kv_heads,
        "CHUNKS": cdiv(slots, constants["ROWS"]),
    }


def _heads(packed: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate q, k and v. If the projection has no keys and values, k and v are empty."""
    shared = num_kv_heads if packed.shape[-1] > num_heads * head_dim else 0
    q, k, v = (packed.new_empty(*packed.shape[:2], heads, head_dim) for heads in (num_heads, shared, shared))
    return q, k, v


def _qkv_norm_rope(
    packed: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    q_norm_weight: Tensor, k_norm_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    packed = contiguous_rows(packed)
    constants = _constants(packed, num_heads, num_kv_heads, head_dim, cos)
    cos, sin, table_b, table_t = tables(cos, sin, packed)
    q, k, v = _heads(packed, num_heads, num_kv_heads, head_dim)
    B, T, _ = packed.shape
    weights = [q_norm_weight if weight is None else weight for weight in (q_norm_weight, k_norm_weight)]
    if packed.numel():
        with on_device_of(packed):
            _qkv_norm_rope_kernel[(B * T * constants["CHUNKS"],)](
                packed, q, k, v, *(weight.contiguous() for weight in weights), cos, sin, T, *packed.stride()[:2],
                table_b, table_t, eps, **constants, **overlap(packed),
            )  # fmt: skip
    return q, k, v


def _qkv_norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    head_dim: int, q_norm_weight: Tensor, k_norm_weight: Tensor | None, eps: float, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    packed, dq, dk, dv = (contiguous_rows(x) for x in (packed, dq, dk, dv))
    constants = _constants(packed, num_heads, num_kv_heads, head_dim, cos)
    chunks = constants["CHUNKS"]
    cos, sin, table_b, table_t = tables(cos, sin, packed)
    B, T, _ = packed.shape
    # Each program has a share of the tokens and a chunk of the heads, and sums its part of dw.
    shares, stages = backward_launch(packed, constants, need_dw)
    d_packed = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    partial = torch.empty(shares * chunks if need_dw else 0, 2, head_dim, dtype=torch.float32, device=packed.device)
    weights = [q_norm_weight if weight is None else weight for weight in (q_norm_weight, k_norm_weight)]
    if packed.numel():
        with on_device_of(packed):
            _qkv_norm_rope_backward_kernel[(shares * chunks,)](
                dq, dk, dv, packed, d_packed, *(weight.contiguous() for weight in weights), partial, cos, sin, B * T, T,
                *(stride for part in (dq, dk, dv) for stride in part.stride()[:3]), *packed.stride()[:2],
                table_b, table_t, eps, STORE_DW=need_dw, STAGES=stages, **constants,
            )  # fmt: skip
    if not need_dw:
        return d_packed, weights[0].new_empty(0), weights[1].new_empty(0)
    dwq, dwk = (weight.new_empty(head_dim) for weight in weights)
    sum_partials(partial, dwq, dwk)
    return d_packed, dwq, dwk


def _qkv_norm_rope_backward_fake(
    dq, dk, dv, packed, cos, sin, num_heads, num_kv_heads, head_dim, q_norm_weight, k_norm_weight, eps, need_dw
):
    weights = [q_norm_weight if weight is None else weight for weight in (q_norm_weight, k_norm_weight)]
    return packed.new_empty(packed.shape), *(weight.new_empty(weight.shape if need_dw else 0) for weight in weights)


BACKWARD = define_op("qkv_norm_rope_backward", _qkv_norm_rope_backward, _qkv_norm_rope_backward_fake)
FORWARD = define_op(
    "qkv_norm_rope", _qkv_norm_rope, lambda packed, cos, sin, *sizes: _heads(packed, *sizes[:3]),
    outputs="q k v", backward=BACKWARD, gradients="packed q_norm_weight k_norm_weight",
    needs={"need_dw": "q_norm_weight k_norm_weight"},
)  # fmt: skip


def qkv_norm_rope(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection, normalize every head, and rotate q and k, in one kernel.

    The packed tensor is saved for the backward.

    Args:
        packed: [B, T, (H + 2 G) · D], where each KV head has its query heads, its key and its value. Without values,
            packed is [B, T, (H + G) · D], and the unnormalized keys are also the values. Without keys and values,
            packed is [B, T, H · D].
        cos, sin: [B or 1, T, R / 2], as in `rope`.
        num_heads: H, a multiple of G.
        num_kv_heads: G.
        head_dim: D, an even number.
        q_norm_weight: [D].
        k_norm_weight: [D] in the dtype of q_norm_weight; None without keys and values. The norm of values has no
            weight.
        eps: added to the mean of squares.

    Returns:
        ``(q, k, v)``: [B, T, H, D], [B, T, G, D] and [B, T, G, D], all contiguous and in the dtype of packed. Without
        keys and values, k and v are [B, T, 0, D].

    Raises:
        ValueError: the sizes do not match.
        TypeError: a tensor is not floating-point, or the weights differ in dtype.
    """
    op = "qkv_norm_rope"
    check_floating(op, packed=packed, cos=cos, sin=sin, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    check_heads(op, num_heads, num_kv_heads)
    check_even(op, head_dim)
    parts = (0,) if k_norm_weight is None else (1, 2)
    widths = [(num_heads + part * num_kv_heads) * head_dim for part in parts]
    if packed.dim() != 3 or packed.shape[-1] not in widths:
        raise ValueError(
            f"{op}: packed must be [B, T, W] with W {' or '.join(map(str, widths))} "
            f"{'without' if k_norm_weight is None else 'with'} k_norm_weight, got {list(packed.shape)}."
        )
    check_tables(op, packed, cos, sin, head_dim)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None and tuple(weight.shape) != (head_dim,):
            raise ValueError(f"{op}: {name} must be [{head_dim}], got {list(weight.shape)}.")
        if weight is not None and weight.dtype != q_norm_weight.dtype:
            raise TypeError(
                f"{op}: the norm weights must have one dtype, got {q_norm_weight.dtype} and {weight.dtype}."
            )
    sizes, weights = (num_heads, num_kv_heads, head_dim), (q_norm_weight, k_norm_weight)
    if not use_triton(packed):
        return qkv_norm_rope_reference(packed, cos, sin, *sizes, *weights, eps=eps)
    return FORWARD(packed, cos, sin, *sizes, *weights, eps)
