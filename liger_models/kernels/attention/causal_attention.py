"""Causal attention for heads of up to 512, which the kernels of libraries stop short of: they take 256.

Query i of T is token i + S − T of the S keys. It sees key j if j is not after it, fewer than ``window`` tokens before
it, and of its document. With s_ij = scale · log2 e · q_i · k_j and a number m_i near the largest s_ij, summed over the
keys that i sees, in fp32::

    Σ_i  = Σ_j exp2(s_ij − m_i)
    p_ij = exp2(s_ij − m_i) / Σ_i
    o_i  = Σ_j p_ij · v_j

Backward, with δ_i = do_i · o_i; dk and dv sum over the query heads that share them, too::

    dv_j = Σ_i p_ij · do_i
    ds_ij = scale · p_ij · (do_i · v_j − δ_i)
    dq_i = Σ_j ds_ij · k_j,   dk_j = Σ_i ds_ij · q_i

Saved: q, k, v, o, m and 1 / Σ. The logarithm of the sum in their place would round p: it is not near 0. p and ds are
rounded to the dtype of q, like the weights of the forward.

Neither direction is a single kernel. A program that kept o of 128 queries, heads of 512, in registers would need all
registers of a Hopper multiprocessor, and so would one that kept dk and dv of 64 keys; with fewer queries or keys more
bytes are loaded than the multiprocessors take. At this width weights and scores are small beside the products that
they take part in. So a kernel writes the tiles of them that are visible to a workspace, for some queries and heads at a
time, and plain matrix products read them: 2 products in the forward and 5 in the backward.

The forward writes exp2(s_ij − m), with m and the sum of each row of a tile. m is 0 where the largest s of the row is
within ±64, and otherwise that number, rounded up: bf16 and fp32 hold weights around 2^64 as well as those around 1. A
second kernel adds the sums, and where the m of a query differ, multiplies its weights in the workspace by a power of 2,
which rounds nothing but what is tiny. The product with v is then a plain one. It could not multiply the weights itself:
with Triton 3.6 a loop that does so overwrites registers that asynchronous products of the step before still read.

Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY, register_autograd
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

MOST_HEAD_DIM = 512

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

PAIRS, LEAST_ROWS = 2**26, 2048
"""Visible pairs of a query and a key whose p and ds the workspace holds (4 bytes a pair in half precision). Beyond
32768 keys it grows, to hold `LEAST_ROWS` queries. The forward, which writes weights alone, holds twice as many. dk and
dv are summed over launches in fp32."""

PLACE = ["first_unit", "first_query", "queries", "first_row", "tiles", "width", "slots", "later", "finished"]
"""Arguments that differ between the launches of one op, which all run the same compiled kernel."""

LOG2_E = tl.constexpr(1.4426950408889634)


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
def _masked(
    scores, first, start, S, window, documents, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores [M, N] of queries from position ``first`` on and keys from ``start`` on, -inf where the query doesn't see
    the key; ``documents`` points to those of the keys."""
    position = first + tl.arange(0, BLOCK_M)
    key = start + tl.arange(0, BLOCK_N)
    visible = (position[:, None] >= key[None, :]) & (key < S)[None, :]
    if HAS_WINDOW:
        visible = visible & (position[:, None] - key[None, :] < window)
    if HAS_DOCUMENTS:
        document = tl.load(documents + position, mask=position < S, other=-3)
        others = tl.load(documents + key, mask=key < S, other=-2)
        visible = visible & (document[:, None] == others[None, :])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _tile(x, batch, head, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a head, of a descriptor of [B, heads, rows, D]; 0 outside."""
    return x.load([batch, head, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _key_tiles(tile, first, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles of keys a tile of queries sees, of those that begin at position ``first``."""
    return tl.cdiv(tl.minimum(first + (tile + 1) * BLOCK_M, S), BLOCK_N)


@triton.jit
def _place(slot, tile, first, S, tiles, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tiles of the workspace begin that belong to a tile of queries, see `_parts`."""
    upper = tile >= tiles // 2
    pair = tl.where(upper, tiles - 1 - tile, tile + tiles % 2)
    before = tl.where(upper, 0, _key_tiles(tiles - 1 - pair, first, S, BLOCK_M, BLOCK_N))
    return (slot * ((tiles + 1) // 2) + pair) * width + before


@triton.jit
def _head(slot, first_unit, first_query, queries, H: tl.constexpr, QUERIES: tl.constexpr):
    """Row of the batch and query head of a slot: of each KV head of a launch there are ``queries`` query heads."""
    unit = first_unit + slot // queries
    return unit // (H // QUERIES), unit % (H // QUERIES) * QUERIES + first_query + slot % queries


@triton.jit
def _at(
    place, low_ptr, T, S, first_unit, first_query, queries, first_row, tiles, width,
    H: tl.constexpr, QUERIES: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Row of the batch, query head, first query and first key of the tile at a place of the workspace, and with bounds
    whether one of its queries may see one of its keys."""
    pairs = (tiles + 1) // 2
    pair = place // width % pairs
    tile = tiles - 1 - pair
    key_tile = place % width
    count = _key_tiles(tile, first_row + S - T, S, BLOCK_M, BLOCK_N)
    other = key_tile >= count
    tile = tl.where(other, pair - tiles % 2, tile)  # -1: none
    key_tile = tl.where(other, key_tile - count, key_tile)
    batch, head = _head(place // width // pairs, first_unit, first_query, queries, H, QUERIES)
    top = first_row + tile * BLOCK_M
    start = key_tile * BLOCK_N
    seen = tile >= 0
    if BOUNDED:
        first = top + S - T
        lowest = tl.load(low_ptr + batch * S + first, mask=tile >= 0, other=0)
        seen = seen & (start < first + BLOCK_M) & (start + BLOCK_N > lowest)
    return batch, head, top, start, seen


@triton.jit(do_not_specialize=PLACE)
def _weights_kernel(
    q, k, weights_ptr, most_ptr, sum_ptr, documents_ptr, low_ptr, window, scale,
    T, S, first_unit, first_query, queries, first_row, tiles, width, slots,
    H: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles of exp(s − m) of the queries from ``first_row`` on, with m and the sum of each row of a tile."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    places = slots * ((tiles + 1) // 2) * width
    row = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, top, start, seen = _at(
            place, low_ptr, T, S, first_unit, first_query, queries, first_row, tiles, width, H, QUERIES, BOUNDED,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        first = top + S - T
        if not BOUNDED or seen:
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                rows = _tile(q, batch, head, top, column, BLOCK_M, BLOCK_D)
                keys = _tile(k, batch, head // QUERIES, start, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(rows, tl.trans(keys), scores, input_precision=PRECISION)
            scores *= scale * LOG2_E
            if BOUNDED or start + BLOCK_N > first:
                documents = documents_ptr + batch * S
                scores = _masked(
                    scores, first, start, S, window, documents, HAS_DOCUMENTS, HAS_WINDOW, BLOCK_M, BLOCK_N
                )
            largest = tl.max(scores, 1)
            near = (tl.abs(largest) <= FAR) | (largest == float("-inf"))
            most = tl.where(near, 0.0, tl.ceil(largest))
            p = tl.exp2(scores - most[:, None])
            tl.store(most_ptr + place * BLOCK_M + row, tl.where(largest == float("-inf"), largest, most))
            tl.store(sum_ptr + place * BLOCK_M + row, tl.sum(p, 1))
            out = (place * BLOCK_M + row).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(weights_ptr + out, p.to(weights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=PLACE)
def _sums_kernel(
    weights_ptr, mosts_ptr, sums_ptr, most_ptr, inverse_ptr, low_ptr,
    T, S, first_unit, first_query, queries, first_row, tiles, width, H: tl.constexpr, QUERIES: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One m for all weights of a query, and the inverse of their sum, [B, H, T] each."""
    slot = tl.program_id(1)
    tile = tl.program_id(2)
    batch, head = _head(slot, first_unit, first_query, queries, H, QUERIES)
    place = _place(slot, tile, first_row + S - T, S, tiles, width, BLOCK_M, BLOCK_N)
    first = first_row + tile * BLOCK_M + S - T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + first) // BLOCK_N
    end = tl.cdiv(tl.minimum(first + BLOCK_M, S), BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    far = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        at = (place + part) * BLOCK_M + row[None, :]
        each = tl.load(mosts_ptr + at, mask=part < end, other=float("-inf"))
        sums = tl.load(sums_ptr + at, mask=part < end, other=0.0)
        far = tl.maximum(far, tl.max(tl.where(each == float("-inf"), 0.0, tl.abs(each)), 0))
        larger = tl.maximum(most, tl.max(each, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has seen no key yet
        total = total * tl.exp2(most - finite) + tl.sum(sums * tl.exp2(each - finite[None, :]), 0)
        most = larger
    most = tl.where(total == 0.0, 0.0, most)  # rows past the last query
    total = tl.where(total == 0.0, 1.0, total)
    if tl.program_id(0) == 0:
        row_of_query = first_row + tile * BLOCK_M + row
        query = (batch.to(tl.int64) * H + head) * T + row_of_query
        tl.store(most_ptr + query, most, mask=row_of_query < T)
        tl.store(inverse_ptr + query, 1.0 / total, mask=row_of_query < T)
    if tl.max(far) > 0.0:
        for part in range(begin + tl.program_id(0), end, tl.num_programs(0)):
            at = (place + part) * BLOCK_M + row
            each = tl.load(mosts_ptr + at)
            factor = tl.where(each == float("-inf"), 1.0, tl.exp2(each - most))
            if tl.min(factor) < 1.0:
                pointers = weights_ptr + at.to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                p = tl.load(pointers)
                tl.store(pointers, (p * factor[:, None]).to(p.dtype))


@triton.jit(do_not_specialize=PLACE)
def _sum_over_keys_kernel(
    weights, rows, out_ptr, inverse_ptr, low_ptr,
    T, S, first_unit, first_query, queries, first_row, tiles, width, H: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, HAS_INVERSE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[B, T, H, D]: o = weights · v / Σ, or dq = ds · k."""
    slot = tl.program_id(1)
    tile = tiles - 1 - tl.program_id(2)  # the queries with the most keys first
    batch, head = _head(slot, first_unit, first_query, queries, H, QUERIES)
    place = _place(slot, tile, first_row + S - T, S, tiles, width, BLOCK_M, BLOCK_N)
    first = first_row + tile * BLOCK_M + S - T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + first) // BLOCK_N * BLOCK_N
    row = first_row + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inverse = 1.0
    if HAS_INVERSE:
        query = (batch.to(tl.int64) * H + head) * T + row
        inverse = tl.load(inverse_ptr + query, mask=row < T, other=0.0)[:, None]
    # In fp32 a sum over all keys in turn would err by more than the differences of do · v and δ in the backward.
    BY_STEP: tl.constexpr = HAS_INVERSE and out_ptr.dtype.element_ty == tl.float32
    column = tl.program_id(0) * BLOCK_D
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, tl.minimum(first + BLOCK_M, S), STEP):
        part = weights.load([(place + start // BLOCK_N) * BLOCK_M, start % BLOCK_N])
        factor = _tile(rows, batch, head // QUERIES, start, column, STEP, BLOCK_D)
        if BY_STEP:
            total += tl.dot(part, factor, input_precision=PRECISION) * inverse
        else:
            total = tl.dot(part, factor, total, input_precision=PRECISION)
    if HAS_INVERSE and not BY_STEP:
        total *= inverse
    columns = column + tl.arange(0, BLOCK_D)
    out = out_ptr + ((batch.to(tl.int64) * T + row) * H + head)[:, None] * D + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < T)[:, None] & (columns < D)[None, :])


@triton.jit
def _row_products_kernel(
    out_ptr, d_out_ptr, delta_ptr, N, T, d_b, d_t, d_h, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """δ [B, H, T] of o [B, T, H, D] and do, ROWS of the N = B · T · H vectors in each program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % H
    token = row // H
    batch = token // T
    position = token % T
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < N)[:, None] & (column < D)
    out = tl.load(out_ptr + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
    start = batch * d_b + position * d_t + head * d_h
    d_out = tl.load(d_out_ptr + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * H + head) * T + position, tl.sum(out * d_out, 1), mask=row < N)


@triton.jit(do_not_specialize=PLACE)
def _score_gradients_kernel(
    q, k, v, d_out, p_ptr, ds_ptr, most_ptr, inverse_ptr, delta_ptr, documents_ptr, low_ptr, window, scale,
    T, S, first_unit, first_query, queries, first_row, tiles, width, slots,
    H: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles of p and ds, where those of the forward's weights would be."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    places = slots * ((tiles + 1) // 2) * width
    row = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, top, start, seen = _at(
            place, low_ptr, T, S, first_unit, first_query, queries, first_row, tiles, width, H, QUERIES, BOUNDED,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        first = top + S - T
        if not BOUNDED or seen:
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            d_weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                rows = _tile(q, batch, head, top, column, BLOCK_M, BLOCK_D)
                keys = _tile(k, batch, head // QUERIES, start, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(rows, tl.trans(keys), scores, input_precision=PRECISION)
                d_rows = _tile(d_out, batch, head, top, column, BLOCK_M, BLOCK_D)
                values = _tile(v, batch, head // QUERIES, start, column, BLOCK_N, BLOCK_D)
                d_weights = tl.dot(d_rows, tl.trans(values), d_weights, input_precision=PRECISION)
            scores *= scale * LOG2_E
            if BOUNDED or start + BLOCK_N > first:
                documents = documents_ptr + batch * S
                scores = _masked(
                    scores, first, start, S, window, documents, HAS_DOCUMENTS, HAS_WINDOW, BLOCK_M, BLOCK_N
                )
            query = (batch.to(tl.int64) * H + head) * T + top + row
            inside = (top + row >= 0) & (top + row < T)
            most = tl.load(most_ptr + query, mask=inside, other=0.0)
            inverse = tl.load(inverse_ptr + query, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + query, mask=inside, other=0.0)
            p = tl.exp2(scores - most[:, None]) * inverse[:, None]
            ds = p * (d_weights - delta[:, None]) * scale
            out = (place * BLOCK_M + row).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(p_ptr + out, p.to(p_ptr.dtype.element_ty))
            tl.store(ds_ptr + out, ds.to(ds_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=PLACE)
def _sum_over_queries_kernel(
    weights, rows, out_ptr, sum_ptr, last_ptr,
    T, S, first_unit, first_query, queries, first_row, tiles, width, later, finished, H: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """weightsᵀ · rows, summed over the heads of a unit: dv of p and do, dk of ds and q. Later launches add it to sum;
    tiles of keys from ``finished`` on are not in launches to come."""
    key_tile = tl.program_id(2)
    start = key_tile * BLOCK_N
    batch, first_head = _head(tl.program_id(1) * queries, first_unit, first_query, queries, H, QUERIES)
    # The tiles of queries that were written for these keys, counted from first_row.
    begin = tl.maximum(start - (S - T) - first_row, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(tiles * BLOCK_M, T - first_row)
    if BOUNDED:
        last = tl.load(last_ptr + batch * S + tl.minimum(start + BLOCK_N, S) - 1)
        end = tl.minimum(end, last + 1 - (S - T) - first_row)
    steps = tl.maximum((end - begin + STEP - 1) // STEP, 0)
    column = tl.program_id(0) * BLOCK_D
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, queries * steps):
        query = i // steps
        row = begin + i % steps * STEP
        slot = tl.program_id(1) * queries + query
        place = _place(slot, row // BLOCK_M, first_row + S - T, S, tiles, width, BLOCK_M, BLOCK_N) + key_tile
        part = weights.load([place * BLOCK_M + row % BLOCK_M, 0])
        factor = _tile(rows, batch, first_head + query, first_row + row, column, STEP, BLOCK_D)
        total = tl.dot(tl.trans(part), factor, total, input_precision=PRECISION)
    key = start + tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, BLOCK_D)
    place = ((batch.to(tl.int64) * S + key) * (H // QUERIES) + first_head // QUERIES)[:, None] * D + columns[None, :]
    inside = (key < S)[:, None] & (columns < D)[None, :]
    if later != 0:
        total += tl.load(sum_ptr + place, mask=inside, other=0.0)
    if key_tile >= finished:
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sum_ptr + place, total, mask=inside)


def _tier(x: Tensor) -> int:
    """Which entry of the tables of tiles holds for ``x``."""
    return LARGE if x.element_size() == 2 and fitting_stages(x, 2, 113 * 2**10) == 2 else SMALL


def _bounds(documents: Tensor | None, window: int | None, B: int, S: int, like: Tensor) -> tuple[Tensor, ...]:
    """``(documents, low, last)``, [B, S] int32 each: low[i] is not after the first key that token i or a later one
    sees, last[j] the last token i with low[i] <= j. Without documents and window, tensors that are not read."""
    if documents is None and window is None:
        nothing = torch.empty(0, dtype=torch.int32, device=like.device)
        return nothing, nothing, nothing
    token = torch.arange(S, device=like.device).expand(B, -1)
    low = torch.zeros_like(token) if window is None else (token - (window - 1)).clamp_min(0)
    if documents is None:
        documents = token
    else:
        number = documents.long() - documents.amin()
        number = number.clamp_max(S)  # numbers are dense, so this changes none
        first = torch.full((B, S + 1), S, device=like.device).scatter_reduce(1, number, token, "amin")
        low = torch.maximum(low, first.gather(1, number).flip(1).cummin(1)[0].flip(1))
    last = torch.searchsorted(low.contiguous(), token.contiguous(), right=True) - 1
    return documents.int().contiguous(), low.int().contiguous(), last.int().contiguous()


def _constants(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Constants of all kernels, of those that mask scores, and constants and options of products with the workspace."""
    tier, D = _tier(q), q.shape[3]
    block_m, block_n, _ = TILE[tier]
    shared = {"H": q.shape[2], "QUERIES": q.shape[2] // k.shape[2], "D": D, "PRECISION": dot_precision(q)}
    shared |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    masks = {"HAS_DOCUMENTS": documents is not None, "HAS_WINDOW": window is not None}
    columns = min(PRODUCT_COLUMNS[tier], max(triton.next_power_of_2(D), 16))
    product = {"BOUNDED": any(masks.values()), "BLOCK_D": columns, "STEP": PRODUCT_STEP[tier], **shared}
    return shared, masks, product | PRODUCT_LAUNCH[tier]


def _aligned(x: Tensor) -> Tensor:
    """x [B, T, H, D], copied and padded unless its rows begin at multiples of 16 bytes, as loads of tiles need."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:3]):
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % 8)).contiguous()
    return x


def _heads(x: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of an aligned x [B, T, H, D] as [B, H, T, D], to load ``rows`` x ``columns`` of a head at a time."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _parts(T: int, S: int, block_m: int, block_n: int, matrices: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Parts of the workspace's matrices, which a launch writes: for how many heads, and of parts of the queries with
    about as many visible keys each, the first row, how many tiles of queries, and how many tiles of keys a pair of
    those sees. A pair is the last and the first, the last but one and the second, and so on: all see about as many. Of
    an odd number the last is alone."""
    rows, keys = triton.cdiv(T, block_m) * block_m, triton.cdiv(S, block_n) * block_n
    before = keys - rows
    seen = keys**2 - before**2  # twice the pairs of a head
    count = triton.cdiv(seen * matrices, 4 * max(PAIRS, LEAST_ROWS * keys))
    edges = sorted({(math.isqrt(before**2 + seen * part // count) - before) // block_m for part in range(count + 1)})
    parts = []
    for top, bottom in pairwise(edges):
        tiles = [-(-min((tile + 1) * block_m + S - T, S) // block_n) for tile in range(top, bottom)]
        folded = [0] * (len(tiles) % 2) + tiles
        parts.append((top * block_m, len(tiles), max(a + b for a, b in zip(folded, reversed(folded), strict=True))))
    return min(max(4 * PAIRS // (seen * matrices), 1), 2**15), parts


class Launch(NamedTuple):
    """A part of the heads and queries whose weights the workspace holds together.

    Attributes:
        unit, units: KV heads, of the B · G of all rows.
        query, queries: query heads of each of them.
        row, tiles, width: a part of the queries, see `_parts`.
        keys: tiles of keys that they see.
        later: whether launches before see some of these keys, with query heads of the same KV heads.
        finished: the tiles of keys from here on are not in launches to come.
    """

    unit: int
    units: int
    query: int
    queries: int
    row: int
    tiles: int
    width: int
    keys: int
    later: bool
    finished: int

    @property
    def place(self) -> tuple[int, ...]:
        return self.unit, self.query, self.queries, self.row, self.tiles, self.width

    @property
    def slots(self) -> int:
        return self.units * self.queries

    @property
    def places(self) -> int:
        """Tiles of weights in the workspace."""
        return self.slots * ((self.tiles + 1) // 2) * self.width


def _launches(q: Tensor, k: Tensor, block_m: int, block_n: int, backward: bool) -> list[Launch]:
    """The forward takes all query heads of a KV head before the next one: its keys are in the cache then. The backward
    takes all KV heads before the second query head of one: sums over queries have more tiles then."""
    (B, T, H, _), (_, S, G, _) = q.shape, k.shape
    heads, parts = _parts(T, S, block_m, block_n, matrices=2 if backward else 1)
    if backward:
        units = min(heads, B * G)
        queries = min(heads // units, H // G)
    else:
        queries = min(heads, H // G)
        units = min(heads // queries, B * G)
    launches = []
    for unit in range(0, B * G, units):
        for part, (row, tiles, width) in reversed([*enumerate(parts)]):
            keys = triton.cdiv(min(row + tiles * block_m, T) + S - T, block_n)
            before = triton.cdiv(row + S - T, block_n) if part else 0
            for query in range(0, H // G, queries):
                taken = min(queries, H // G - query)
                launches.append(
                    Launch(
                        unit, min(units, B * G - unit), query, taken, row, tiles, width, keys,
                        later=part < len(parts) - 1 or query > 0,
                        finished=before if query + taken == H // G else keys,
                    )
                )  # fmt: skip
    return launches


def _programs(q: Tensor, per_sm: int, launch: Launch, bounded: bool) -> int:
    """How many programs write a workspace. With bounds tiles differ in time, so that each has a program."""
    return launch.places if bounded else min(launch.places, num_programs(q, per_sm))


LIBRARY.define(
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int? window)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "causal_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor most, Tensor inverse,"
    " Tensor? documents, float scale, int? window) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "causal_attention", "CompositeExplicitAutograd")
def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, H, D), (_, S, G, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    most, inverse = (torch.empty(B, H, T, dtype=torch.float32, device=q.device) for _ in range(2))
    if not out.numel():
        return out, most, inverse
    tier = _tier(q)
    block_m, block_n, block_d = TILE[tier]
    numbers, low, _ = _bounds(documents, window, B, S, q)
    shared, masks, product = _constants(q, k, documents, window)
    step, columns, bounded = product["STEP"], product["BLOCK_D"], product["BOUNDED"]
    with on_device_of(q):
        launches = _launches(q, k, block_m, block_n, backward=False)
        q, k, v = map(_aligned, (q, k, v))
        queries, keys = _heads(q, block_m, block_d), _heads(k, block_n, block_d)
        values = _heads(v, step, columns)
        room = max(launch.places for launch in launches)
        weights = torch.empty(room * block_m, block_n, dtype=q.dtype, device=q.device)
        mosts, sums = torch.empty(2, room, block_m, dtype=torch.float32, device=q.device)
        strips = TensorDescriptor(weights, list(weights.shape), list(weights.stride()), [block_m, step])
        for each in launches:
            place = T, S, *each.place
            _weights_kernel[(_programs(q, 2, each, bounded),)](
                queries, keys, weights, mosts, sums, numbers, low, window or 0, scale, *place, each.slots,
                FAR=FAR[q.dtype], BLOCK_D=block_d, **shared, **masks, **WEIGHTS_LAUNCH[tier],
            )  # fmt: skip
            _sums_kernel[(SUMS_PROGRAMS, each.slots, each.tiles)](
                weights, mosts, sums, most, inverse, low, *place, H=H, QUERIES=H // G, BOUNDED=bounded,
                BLOCK_M=block_m, BLOCK_N=block_n, PARTS=PARTS, num_warps=8,
            )  # fmt: skip
            _sum_over_keys_kernel[(triton.cdiv(D, columns), each.slots, each.tiles)](
                strips, values, out, inverse, low, *place, HAS_INVERSE=True, **product
            )
    return out, most, inverse


@torch.library.impl(LIBRARY, "causal_attention_backward", "CompositeExplicitAutograd")
def _causal_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, most: Tensor, inverse: Tensor,
    documents: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = out.contiguous()
    (B, T, H, D), S = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not out.numel():
        return dq, dk.zero_(), dv.zero_()
    tier = _tier(q)
    block_m, block_n, block_d = TILE[tier]
    numbers, low, last = _bounds(documents, window, B, S, q)
    shared, masks, product = _constants(q, k, documents, window)
    step, columns, bounded = product["STEP"], product["BLOCK_D"], product["BOUNDED"]
    across = triton.cdiv(D, columns)
    with on_device_of(q):
        launches = _launches(q, k, block_m, block_n, backward=True)
        q, k, v, d_out = map(_aligned, (q, k, v, d_out))
        room = max(launch.places for launch in launches) * block_m
        p, ds = (torch.empty(room, block_n, dtype=q.dtype, device=q.device) for _ in range(2))
        delta = torch.empty_like(most)
        later = any(each.later for each in launches)
        sums = [torch.empty(x.shape if later else 0, dtype=torch.float32, device=x.device) for x in (dk, dv)]
        queries, d_queries = (_heads(x, block_m, block_d) for x in (q, d_out))
        keys, values = (_heads(x, block_n, block_d) for x in (k, v))
        strips = TensorDescriptor(ds, list(ds.shape), list(ds.stride()), [block_m, step])
        turned = [TensorDescriptor(x, list(x.shape), list(x.stride()), [step, block_n]) for x in (ds, p)]
        rows_of_k, *factors = (_heads(x, step, columns) for x in (k, q, d_out))
        vectors, block = B * T * H, max(triton.next_power_of_2(D), 16)
        _row_products_kernel[(triton.cdiv(vectors, 4),)](
            out, d_out, delta, vectors, T, *d_out.stride()[:3], H=H, D=D, BLOCK_D=block, ROWS=4
        )
        for each in launches:
            place = T, S, *each.place
            _score_gradients_kernel[(_programs(q, 1, each, bounded),)](
                queries, keys, values, d_queries, p, ds, most, inverse, delta, numbers, low, window or 0, scale, *place,
                each.slots, BLOCK_D=block_d, **shared, **masks, **SCORES_LAUNCH[tier],
            )  # fmt: skip
            _sum_over_keys_kernel[(across, each.slots, each.tiles)](
                strips, rows_of_k, dq, inverse, low, *place, HAS_INVERSE=False, **product
            )
            for weights, factor, total, sum_ in zip(turned, factors, (dk, dv), sums, strict=True):
                _sum_over_queries_kernel[(across, each.units, each.keys)](
                    weights, factor, total, sum_, last, *place, int(each.later), each.finished, **product
                )
    return dq, dk, dv


@torch.library.register_fake("liger_models::causal_attention", lib=LIBRARY)
def _causal_attention_fake(q, k, v, documents, scale, window):
    most, inverse = (q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), most, inverse


@torch.library.register_fake("liger_models::causal_attention_backward", lib=LIBRARY)
def _causal_attention_backward_fake(d_out, q, k, v, out, most, inverse, documents, scale, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, documents, ctx.scale, ctx.window = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, documents)


def _backward(ctx, d_out, _d_most, _d_inverse):
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
        documents: [B, S] integers, the document of each token, −1 for padding, below S. A token sees its own document.
            None: all tokens are one document.
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
    if not 1 <= D <= MOST_HEAD_DIM:
        raise ValueError(
            f"{op}: heads must be 1 to {MOST_HEAD_DIM} wide, got {D}. Wider ones need PyTorch's attention."
        )
    if window is not None and not window >= 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}. None is for no window.")
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
