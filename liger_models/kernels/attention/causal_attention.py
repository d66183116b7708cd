"""Causal attention for head dimensions up to 512; the kernels of libraries stop at 256.

Query i of T is token i + S − T of the S keys. It sees key j if j belongs to its document and is neither after it nor
``window`` or more tokens before it. With s_ij = scale · log2 e · q_i · k_j and a number m_i near the largest s_ij,
summed over the keys that i sees, in fp32::

    Σ_i  = Σ_j exp2(s_ij − m_i)
    p_ij = exp2(s_ij − m_i) / Σ_i
    o_i  = Σ_j p_ij · v_j

Backward, with δ_i = do_i · o_i; dk and dv are also summed over the query heads that share a KV head::

    dv_j = Σ_i p_ij · do_i
    ds_ij = scale · p_ij · (do_i · v_j − δ_i)
    dq_i = Σ_j ds_ij · k_j,   dk_j = Σ_i ds_ij · q_i

Saved: q, k, v, o, m and 1 / Σ. One logarithm in place of m and Σ would be far from 0, and its rounding would make p
inaccurate. p and ds are rounded to the dtype of q, like the weights of the forward.

Neither direction is a single kernel. With heads of 512, a program that kept o of 128 queries in registers would need
all registers of a Hopper multiprocessor, and so would a program that kept dk and dv of 64 keys. Programs with fewer
queries or keys would load more bytes than the multiprocessors can take in. At this width the weights and scores are
small compared with the products that use them. One kernel therefore writes their visible tiles to a workspace, for some
queries and heads at a time, and plain matrix products read the tiles: 2 products in the forward and 5 in the backward.
The kernels, in their order::

    forward                                             backward
    _weights_kernel        tiles of exp2(s − m)         _row_products_kernel        δ
    _sums_kernel           m, 1 / Σ                     _score_gradients_kernel     tiles of p and ds
    _sum_over_keys_kernel  o = weights · v / Σ          _sum_over_keys_kernel       dq = ds · k
                                                        _sum_over_queries_kernel    dk = dsᵀ · q, dv = pᵀ · do

`workspace.py` has the layout of the workspace. A tile has BLOCK_M queries and BLOCK_N keys, and GROUP query heads share
a KV head.

The forward writes exp2(s_ij − m), with m and the sum of each row of a tile. m is 0 where the largest s of the row is
within ±64, and otherwise the largest s, rounded up: bf16 and fp32 hold weights around 2^64 as well as weights around 1.
A second kernel adds the sums. Where tiles of a query have different m, it multiplies the weights in the workspace by a
power of 2, which rounds only tiny weights. The product with v is then a plain matrix product. It cannot rescale the
weights itself: with Triton 3.6 a loop that does so overwrites registers that asynchronous products of the previous step
still read.

Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135.
"""

import math
from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.attention.heads import LOG2_E, check_heads
from liger_models.kernels.attention.workspace import VARYING, Launch, Part, first_place, launches, slot_head, tile_at
from liger_models.kernels.dispatch import (
    TensorDescriptor,
    fitting_stages,
    num_programs,
    on_device_of,
    tl,
    triton,
    use_triton,
)
from liger_models.kernels.tiles import dot_precision

LARGE, SMALL = 2, 4
"""Keys of the tables below: half precision with 226 KB of shared memory (Hopper, Blackwell), and everything else."""

TILE = {LARGE: (128, 128, 64), SMALL: (64, 64, 32)}
WEIGHTS_LAUNCH = {LARGE: {"num_warps": 4, "num_stages": 3}, SMALL: {"num_warps": 8, "num_stages": 2}}
SCORES_LAUNCH = {LARGE: {"num_warps": 8, "num_stages": 3}, SMALL: {"num_warps": 4, "num_stages": 2}}
"""Queries and keys of a tile of weights, or of p and ds, and columns of the heads of a step; launches of the forward
and the backward. In the forward two programs take 208 KB of a Hopper multiprocessor's 227 KB of shared memory: one
computes exponentials while the other multiplies."""

PRODUCT_COLUMNS = {LARGE: 256, SMALL: 64}
PRODUCT_STEP = {LARGE: 64, SMALL: 32}
PRODUCT_LAUNCH = {LARGE: {"num_warps": 8, "num_stages": 4}, SMALL: {"num_warps": 4, "num_stages": 2}}
"""Columns of a tile of o, dq, dk and dv, and queries or keys of a step."""

FAR = {torch.float32: 64.0, torch.bfloat16: 64.0, torch.float16: -1.0}
"""Where m is 0: the largest of a row's scores in a tile, times log2 e, is within ± this. float16 doesn't hold 2^64."""

PARTS = 64
SUMS_PROGRAMS = 4
"""Tiles of keys whose sums are loaded at a time, and programs that the tiles of weights of a tile of queries have."""


def causal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, scale: float, window: int | None = None
) -> Tensor:
    """`causal_attention` in plain torch, with all scores in memory (differentiable; fp64 stays fp64)."""
    T, S, queries = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(queries, 1) for x in (k, v))
    key = torch.arange(S, device=q.device)
    distance = key[S - T :, None] - key
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents is not None:
        visible = visible & (documents[:, None, S - T :, None] == documents[:, None, None, :])
    scores = ((q @ k.transpose(-1, -2)) * scale).masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2)


@triton.jit
def _scale_and_mask(
    scores, scale, position, key, S, window, documents_ptr, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Turn q · kᵀ [BLOCK_M, BLOCK_N] into s, with -inf where a query doesn't see a key."""
    # log2 e: the exponentials are powers of 2, which the hardware computes.
    scores *= scale * LOG2_E
    # Without bounds, tiles below the diagonal are visible as a whole.
    if HAS_DOCUMENTS or HAS_WINDOW or key + BLOCK_N > position:
        positions = position + tl.arange(0, BLOCK_M)
        keys = key + tl.arange(0, BLOCK_N)
        visible = (positions[:, None] >= keys[None, :]) & (keys < S)[None, :]  # [BLOCK_M, BLOCK_N]
        if HAS_WINDOW:
            visible = visible & (positions[:, None] - keys[None, :] < window)
        if HAS_DOCUMENTS:
            # The two fill values differ, so that what lies past the last token is never in one document.
            document = tl.load(documents_ptr + positions, mask=positions < S, other=-3)
            key_document = tl.load(documents_ptr + keys, mask=keys < S, other=-2)
            visible = visible & (document[:, None] == key_document[None, :])
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _load_tile(x, batch, head, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile [ROWS, COLUMNS] of a head from a descriptor of [B, heads, rows, D]; 0 outside."""
    return x.load([batch, head, row, column]).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=VARYING)
def _weights_kernel(
    q, k, weights_ptr, tile_m_ptr, tile_sum_ptr, documents_ptr, low_ptr, window, scale,
    T, S, kv_head, query_head, query_heads, query, tiles, width, slots,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tiles of exp2(s − m), and m and the sum of each row of a tile; a program writes many tiles."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    places = slots * ((tiles + 1) // 2) * width
    rows = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, first_query, key, visible = tile_at(place, part, low_ptr, H, GROUP, BOUNDED, BLOCK_M, BLOCK_N)
        position = first_query + S - T
        if not BOUNDED or visible:
            # s = scale · log2 e · q · kᵀ, summed over BLOCK_D columns of the heads at a time.
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                q_tile = _load_tile(q, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                k_tile = _load_tile(k, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(q_tile, tl.trans(k_tile), scores, input_precision=PRECISION)
            scores = _scale_and_mask(
                scores, scale, position, key, S, window, documents_ptr + batch * S, HAS_DOCUMENTS, HAS_WINDOW,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip

            # m of each row [BLOCK_M]: 0 unless the row's largest score is far from 0, and -inf if it sees no key.
            largest = tl.max(scores, 1)
            near = (tl.abs(largest) <= FAR) | (largest == float("-inf"))
            m = tl.where(near, 0.0, tl.ceil(largest))
            p = tl.exp2(scores - m[:, None])  # [BLOCK_M, BLOCK_N]

            tl.store(tile_m_ptr + place * BLOCK_M + rows, tl.where(largest == float("-inf"), largest, m))
            tl.store(tile_sum_ptr + place * BLOCK_M + rows, tl.sum(p, 1))
            entries = (place * BLOCK_M + rows).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(weights_ptr + entries, p.to(weights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def _sums_kernel(
    weights_ptr, tile_m_ptr, tile_sum_ptr, m_ptr, inverse_ptr, low_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, H: tl.constexpr, GROUP: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write one m for all weights of a query, and the inverse of their sum, [B, H, T] each.

    Each of the SUMS_PROGRAMS programs of a tile of queries computes both. They split the rescaling of weights that were
    written with another m.
    """
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    slot = tl.program_id(1)
    tile = tl.program_id(2)
    batch, head = slot_head(slot, part, H, GROUP)
    place = first_place(slot, tile, part, BLOCK_M, BLOCK_N)
    position = query + tile * BLOCK_M + S - T

    # Tiles of keys that the queries see.
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + position) // BLOCK_N
    end = tl.cdiv(tl.minimum(position + BLOCK_M, S), BLOCK_N)

    # m, the sum of exp2(s − m), and the largest |m| of a tile: [BLOCK_M] each, over PARTS tiles at a time.
    rows = tl.arange(0, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    far = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, PARTS):
        key_tile = start + tl.arange(0, PARTS)[:, None]
        entries = (place + key_tile) * BLOCK_M + rows[None, :]  # [PARTS, BLOCK_M]
        tile_m = tl.load(tile_m_ptr + entries, mask=key_tile < end, other=float("-inf"))
        sums = tl.load(tile_sum_ptr + entries, mask=key_tile < end, other=0.0)
        far = tl.maximum(far, tl.max(tl.where(tile_m == float("-inf"), 0.0, tl.abs(tile_m)), 0))
        larger = tl.maximum(m, tl.max(tile_m, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has seen no key yet
        total = total * tl.exp2(m - finite) + tl.sum(sums * tl.exp2(tile_m - finite[None, :]), 0)
        m = larger
    m = tl.where(total == 0.0, 0.0, m)  # rows past the last query
    total = tl.where(total == 0.0, 1.0, total)

    if tl.program_id(0) == 0:
        queries = query + tile * BLOCK_M + rows
        entries = (batch.to(tl.int64) * H + head) * T + queries
        tl.store(m_ptr + entries, m, mask=queries < T)
        tl.store(inverse_ptr + entries, 1.0 / total, mask=queries < T)

    # Tiles with another m than the query's are multiplied by a power of 2.
    if tl.max(far) > 0.0:
        for key_tile in range(begin + tl.program_id(0), end, tl.num_programs(0)):
            entries = (place + key_tile) * BLOCK_M + rows
            tile_m = tl.load(tile_m_ptr + entries)
            factor = tl.where(tile_m == float("-inf"), 1.0, tl.exp2(tile_m - m))
            if tl.min(factor) < 1.0:
                pointers = weights_ptr + entries.to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                p = tl.load(pointers)  # [BLOCK_M, BLOCK_N]
                tl.store(pointers, (p * factor[:, None]).to(p.dtype))


@triton.jit(do_not_specialize=VARYING)
def _sum_over_keys_kernel(
    weights, factors, out_ptr, inverse_ptr, low_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HAS_INVERSE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write o = weights · v / Σ or dq = ds · k [B, T, H, D], BLOCK_M queries and BLOCK_D columns per program."""
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    slot = tl.program_id(1)
    tile = tiles - 1 - tl.program_id(2)  # the queries with the most keys first
    batch, head = slot_head(slot, part, H, GROUP)
    place = first_place(slot, tile, part, BLOCK_M, BLOCK_N)
    position = query + tile * BLOCK_M + S - T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + position) // BLOCK_N * BLOCK_N

    queries = query + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inverse = 1.0
    if HAS_INVERSE:
        entries = (batch.to(tl.int64) * H + head) * T + queries
        inverse = tl.load(inverse_ptr + entries, mask=queries < T, other=0.0)[:, None]  # [BLOCK_M, 1]

    # The product, STEP keys at a time. In fp32 a sum over all keys in turn would err by more than the differences of
    # do · v and δ in the backward.
    BY_STEP: tl.constexpr = HAS_INVERSE and out_ptr.dtype.element_ty == tl.float32
    column = tl.program_id(0) * BLOCK_D
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in range(begin, tl.minimum(position + BLOCK_M, S), STEP):
        strip = weights.load([(place + key // BLOCK_N) * BLOCK_M, key % BLOCK_N])  # [BLOCK_M, STEP]
        factor = _load_tile(factors, batch, head // GROUP, key, column, STEP, BLOCK_D)
        if BY_STEP:
            total += tl.dot(strip, factor, input_precision=PRECISION) * inverse
        else:
            total = tl.dot(strip, factor, total, input_precision=PRECISION)
    if HAS_INVERSE and not BY_STEP:
        total *= inverse

    columns = column + tl.arange(0, BLOCK_D)
    out = out_ptr + ((batch.to(tl.int64) * T + queries) * H + head)[:, None] * D + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(queries < T)[:, None] & (columns < D)[None, :])


@triton.jit
def _row_products_kernel(
    out_ptr, d_out_ptr, delta_ptr, N, T, d_b, d_t, d_h, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write δ [B, H, T] from o [B, T, H, D] and do, ROWS of the N = B · T · H vectors per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % H
    token = row // H
    batch = token // T
    position = token % T
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < N)[:, None] & (column < D)  # [ROWS, BLOCK_D]
    out = tl.load(out_ptr + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
    start = batch * d_b + position * d_t + head * d_h
    d_out = tl.load(d_out_ptr + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * H + head) * T + position, tl.sum(out * d_out, 1), mask=row < N)


@triton.jit(do_not_specialize=VARYING)
def _score_gradients_kernel(
    q, k, v, d_out, p_ptr, ds_ptr, m_ptr, inverse_ptr, delta_ptr, documents_ptr, low_ptr, window, scale,
    T, S, kv_head, query_head, query_heads, query, tiles, width, slots,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tiles of p and ds, in the layout of the forward's weights."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    places = slots * ((tiles + 1) // 2) * width
    rows = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, first_query, key, visible = tile_at(place, part, low_ptr, H, GROUP, BOUNDED, BLOCK_M, BLOCK_N)
        position = first_query + S - T
        if not BOUNDED or visible:
            # s = scale · log2 e · q · kᵀ and dp = do · vᵀ, [BLOCK_M, BLOCK_N] each.
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                q_tile = _load_tile(q, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                k_tile = _load_tile(k, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(q_tile, tl.trans(k_tile), scores, input_precision=PRECISION)
                do_tile = _load_tile(d_out, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                v_tile = _load_tile(v, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                dp = tl.dot(do_tile, tl.trans(v_tile), dp, input_precision=PRECISION)
            scores = _scale_and_mask(
                scores, scale, position, key, S, window, documents_ptr + batch * S, HAS_DOCUMENTS, HAS_WINDOW,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip

            # m, 1 / Σ and δ of the queries, [BLOCK_M] each.
            entries = (batch.to(tl.int64) * H + head) * T + first_query + rows
            inside = (first_query + rows >= 0) & (first_query + rows < T)
            m = tl.load(m_ptr + entries, mask=inside, other=0.0)
            inverse = tl.load(inverse_ptr + entries, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + entries, mask=inside, other=0.0)

            p = tl.exp2(scores - m[:, None]) * inverse[:, None]
            ds = p * (dp - delta[:, None]) * scale
            entries = (place * BLOCK_M + rows).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(p_ptr + entries, p.to(p_ptr.dtype.element_ty))
            tl.store(ds_ptr + entries, ds.to(ds_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def _sum_over_queries_kernel(
    weights, factors, out_ptr, sum_ptr, last_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, later, finished, H: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write dv = pᵀ · do or dk = dsᵀ · q for BLOCK_N keys and BLOCK_D columns, summed over a group's query heads.

    Later launches add to sum_ptr. Tiles of keys from ``finished`` on are complete after this launch.
    """
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    key_tile = tl.program_id(2)
    key = key_tile * BLOCK_N
    batch, first_head = slot_head(tl.program_id(1) * query_heads, part, H, GROUP)

    # The queries whose tiles were written for these keys, counted from the part's first query.
    begin = tl.maximum(key - (S - T) - query, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(tiles * BLOCK_M, T - query)
    if BOUNDED:
        last = tl.load(last_ptr + batch * S + tl.minimum(key + BLOCK_N, S) - 1)
        end = tl.minimum(end, last + 1 - (S - T) - query)

    # The product, STEP queries of a query head at a time, and one query head after the other.
    steps = tl.maximum((end - begin + STEP - 1) // STEP, 0)
    column = tl.program_id(0) * BLOCK_D
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, query_heads * steps):
        group_head = i // steps
        row = begin + i % steps * STEP
        slot = tl.program_id(1) * query_heads + group_head
        place = first_place(slot, row // BLOCK_M, part, BLOCK_M, BLOCK_N) + key_tile
        strip = weights.load([place * BLOCK_M + row % BLOCK_M, 0])  # [STEP, BLOCK_N]
        factor = _load_tile(factors, batch, first_head + group_head, query + row, column, STEP, BLOCK_D)
        total = tl.dot(tl.trans(strip), factor, total, input_precision=PRECISION)

    # Sums stay in fp32 until the last launch that sees the keys.
    keys = key + tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, BLOCK_D)
    entries = ((batch.to(tl.int64) * S + keys) * (H // GROUP) + first_head // GROUP)[:, None] * D + columns[None, :]
    inside = (keys < S)[:, None] & (columns < D)[None, :]  # [BLOCK_N, BLOCK_D]
    if later != 0:
        total += tl.load(sum_ptr + entries, mask=inside, other=0.0)
    if key_tile >= finished:
        # This launch is the last one with these keys, so the sum is rounded once.
        tl.store(out_ptr + entries, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sum_ptr + entries, total, mask=inside)


def _tier(x: Tensor) -> int:
    """Key of the tables of tile sizes, for the dtype and device of ``x``."""
    return LARGE if x.element_size() == 2 and fitting_stages(x, 2, 113 * 2**10) == 2 else SMALL


def _bounds(documents: Tensor | None, window: int | None, B: int, S: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return ``(documents, low, last)``, [B, S] int32 each; without documents and window they are empty and not read.

    No token from i on sees a key before low[i], and last[j] is the last token i with low[i] <= j.
    """
    if documents is None and window is None:
        nothing = torch.empty(0, dtype=torch.int32, device=like.device)
        return nothing, nothing, nothing
    token = torch.arange(S, device=like.device).expand(B, -1)

    # The window's first key, and the first token of a document: the least over all later tokens, since documents may
    # be in any order.
    low = torch.zeros_like(token) if window is None else (token - (window - 1)).clamp_min(0)
    if documents is None:
        documents = token
    else:
        number = documents.long() - documents.amin()  # from 0 on
        number = number.clamp_max(S)  # numbers are dense, so this changes none
        first = torch.full((B, S + 1), S, device=like.device).scatter_reduce(1, number, token, "amin")
        low = torch.maximum(low, first.gather(1, number).flip(1).cummin(1)[0].flip(1))
    last = torch.searchsorted(low.contiguous(), token.contiguous(), right=True) - 1
    return documents.int().contiguous(), low.int().contiguous(), last.int().contiguous()


def _constants(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Constants of all kernels; constants of kernels that mask scores; constants and options of workspace products."""
    tier, D = _tier(q), q.shape[3]
    block_m, block_n, _ = TILE[tier]
    shared = {"H": q.shape[2], "GROUP": q.shape[2] // k.shape[2], "D": D, "PRECISION": dot_precision(q)}
    shared |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    masks = {"HAS_DOCUMENTS": documents is not None, "HAS_WINDOW": window is not None}
    columns = min(PRODUCT_COLUMNS[tier], max(triton.next_power_of_2(D), 16))
    product = {"BOUNDED": any(masks.values()), "BLOCK_D": columns, "STEP": PRODUCT_STEP[tier], **shared}
    return shared, masks, product | PRODUCT_LAUNCH[tier]


def _aligned(x: Tensor) -> Tensor:
    """Return x [B, T, H, D], copied and padded unless its rows begin at multiples of 16 bytes, as loads require."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:3]):
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % 8)).contiguous()
    return x


def _heads(x: Tensor, rows: int, columns: int) -> Any:
    """Describe an aligned x [B, T, H, D] as [B, H, T, D], to load ``rows`` x ``columns`` of a head at a time."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _programs(q: Tensor, per_sm: int, launch: Launch, bounded: bool) -> int:
    """How many programs write a workspace. With bounds tiles take unequal times, so each tile has a program."""
    return launch.places if bounded else min(launch.places, num_programs(q, per_sm))


def _strips(x: Tensor, rows: int, columns: int) -> Any:
    """Describe a workspace [places · BLOCK_M, BLOCK_N], to load ``rows`` x ``columns`` at a time."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


LIBRARY.define(
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int? window)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "causal_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor m, Tensor inverse,"
    " Tensor? documents, float scale, int? window) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "causal_attention", "CompositeExplicitAutograd")
def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, H, D), (_, S, G, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, inverse = (torch.empty(B, H, T, dtype=torch.float32, device=q.device) for _ in range(2))
    if not out.numel():
        return out, m, inverse
    tier = _tier(q)
    block_m, block_n, block_d = TILE[tier]
    document_numbers, low, _ = _bounds(documents, window, B, S, q)
    shared, masks, product = _constants(q, k, documents, window)
    step, columns, bounded = product["STEP"], product["BLOCK_D"], product["BOUNDED"]

    with on_device_of(q):
        # Descriptors: tiles of q and k for the weights, and of v for the product with them.
        parts = launches(q, k, block_m, block_n, backward=False)
        q, k, v = map(_aligned, (q, k, v))
        queries, keys = _heads(q, block_m, block_d), _heads(k, block_n, block_d)
        values = _heads(v, step, columns)

        # The workspace, which all launches share, and m and the sum of each row of its tiles.
        room = max(launch.places for launch in parts)
        weights = torch.empty(room * block_m, block_n, dtype=q.dtype, device=q.device)
        tile_m, tile_sums = torch.empty(2, room, block_m, dtype=torch.float32, device=q.device)
        strips = _strips(weights, block_m, step)

        for launch in parts:
            tiles = launch.part.tiles
            _weights_kernel[(_programs(q, 2, launch, bounded),)](
                queries, keys, weights, tile_m, tile_sums, document_numbers, low, window or 0, scale, *launch.part,
                launch.slots, FAR=FAR[q.dtype], BLOCK_D=block_d, **shared, **masks, **WEIGHTS_LAUNCH[tier],
            )  # fmt: skip
            _sums_kernel[(SUMS_PROGRAMS, launch.slots, tiles)](
                weights, tile_m, tile_sums, m, inverse, low, *launch.part, H=H, GROUP=H // G, BOUNDED=bounded,
                BLOCK_M=block_m, BLOCK_N=block_n, PARTS=PARTS, num_warps=8,
            )  # fmt: skip
            _sum_over_keys_kernel[(triton.cdiv(D, columns), launch.slots, tiles)](
                strips, values, out, inverse, low, *launch.part, HAS_INVERSE=True, **product
            )
    return out, m, inverse


@torch.library.impl(LIBRARY, "causal_attention_backward", "CompositeExplicitAutograd")
def _causal_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, m: Tensor, inverse: Tensor,
    documents: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = out.contiguous()
    (B, T, H, D), S = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not out.numel():
        return dq, dk.zero_(), dv.zero_()
    tier = _tier(q)
    block_m, block_n, block_d = TILE[tier]
    document_numbers, low, last = _bounds(documents, window, B, S, q)
    shared, masks, product = _constants(q, k, documents, window)
    step, columns, bounded = product["STEP"], product["BLOCK_D"], product["BOUNDED"]
    across = triton.cdiv(D, columns)

    with on_device_of(q):
        parts = launches(q, k, block_m, block_n, backward=True)
        # Descriptors need rows that begin at multiples of 16 bytes.
        q, k, v, d_out = map(_aligned, (q, k, v, d_out))

        # The workspace, which all launches share, and sums of dk and dv over launches.
        room = max(launch.places for launch in parts) * block_m
        p, ds = (torch.empty(room, block_n, dtype=q.dtype, device=q.device) for _ in range(2))
        several = any(launch.later for launch in parts)
        sums = [torch.empty(x.shape if several else 0, dtype=torch.float32, device=x.device) for x in (dk, dv)]

        # Descriptors: tiles for p and ds; then both factors of dq = ds · k, of dk = dsᵀ · q and of dv = pᵀ · do.
        queries, d_queries = (_heads(x, block_m, block_d) for x in (q, d_out))
        keys, values = (_heads(x, block_n, block_d) for x in (k, v))
        ds_rows, k_rows = _strips(ds, block_m, step), _heads(k, step, columns)
        ds_columns, p_columns = (_strips(x, step, block_n) for x in (ds, p))
        q_rows, do_rows = (_heads(x, step, columns) for x in (q, d_out))

        # δ of all queries.
        delta = torch.empty_like(m)
        vectors, block = B * T * H, max(triton.next_power_of_2(D), 16)
        _row_products_kernel[(triton.cdiv(vectors, 4),)](
            out, d_out, delta, vectors, T, *d_out.stride()[:3], H=H, D=D, BLOCK_D=block, ROWS=4
        )

        for launch in parts:
            _score_gradients_kernel[(_programs(q, 1, launch, bounded),)](
                queries, keys, values, d_queries, p, ds, m, inverse, delta, document_numbers, low, window or 0, scale,
                *launch.part, launch.slots, BLOCK_D=block_d, **shared, **masks, **SCORES_LAUNCH[tier],
            )  # fmt: skip
            _sum_over_keys_kernel[(across, launch.slots, launch.part.tiles)](
                ds_rows, k_rows, dq, inverse, low, *launch.part, HAS_INVERSE=False, **product
            )
            for weights, factors, total, sum_ in (
                (ds_columns, q_rows, dk, sums[0]),
                (p_columns, do_rows, dv, sums[1]),
            ):
                _sum_over_queries_kernel[(across, launch.kv_heads, launch.key_tiles)](
                    weights, factors, total, sum_, last, *launch.part, int(launch.later), launch.finished, **product
                )
    return dq, dk, dv


@torch.library.register_fake("liger_models::causal_attention", lib=LIBRARY)
def _causal_attention_fake(q, k, v, documents, scale, window):
    m, inverse = (q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), m, inverse


@torch.library.register_fake("liger_models::causal_attention_backward", lib=LIBRARY)
def _causal_attention_backward_fake(d_out, q, k, v, out, m, inverse, documents, scale, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, documents, ctx.scale, ctx.window = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, documents)


def _backward(ctx, d_out, _d_m, _d_inverse):
    if d_out is None:
        return (None,) * 6
    grads = torch.ops.liger_models.causal_attention_backward(d_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None


register_autograd("causal_attention", _backward, _setup)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within documents and a window. Only q, k, v, the result and two numbers per query are saved.

    Args:
        q: [B, T, H, D], float32, float16 or bfloat16, D at most 512.
        k, v: [B, S, G, D] in the dtype of q, S at least T; H is a multiple of G. The queries are the last T tokens.
        documents: [B, S] integers below S, the document of each token, −1 for padding. A token sees only its own
            document. None: all tokens are one document.
        scale: factor of q·k; None for D^-0.5.
        window: number of tokens that a token sees, itself included; None for all.

    Returns:
        [B, T, H, D] in the dtype of q.

    Raises:
        ValueError: shapes do not match, heads are wider than 512, or the window is below 1.
        TypeError: the tensors are not floating-point or differ in dtype, or the documents are not integers.
    """
    op = "causal_attention"
    check_floating(op, q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not (fits and q.shape[1] <= k.shape[1] and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0):
        raise ValueError(
            f"{op}: q must be [B, T, H, D], k and v [B, S, G, D] with S >= T and H a multiple of G, got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    D, S = q.shape[3], k.shape[1]
    check_heads(op, q.shape[2], D, window, None, "Wider ones need PyTorch's attention.")
    if documents is not None:
        if documents.dtype.is_floating_point or documents.dtype.is_complex:
            raise TypeError(f"{op}: documents must be integers, got {documents.dtype}.")
        if documents.shape != k.shape[:2]:
            raise ValueError(f"{op}: documents must be {[q.shape[0], S]}, got {list(documents.shape)}.")
    scale = 1 / math.sqrt(D) if scale is None else scale
    if not use_triton(q):
        return causal_attention_reference(q, k, v, documents, scale=scale, window=window)
    out: Tensor = torch.ops.liger_models.causal_attention(q, k, v, documents, scale, window)[0]
    return out
