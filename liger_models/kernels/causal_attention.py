"""Causal attention for heads of up to 512, which the kernels of libraries stop short of: they take 256.

Query i of T is token i + S − T of the S keys. It sees key j if j is not after it, fewer than ``window`` tokens before
it, and of its document. With s_ij = scale · q_i · k_j, summed over the keys that i sees, in fp32::

    lse_i = log Σ_j exp(s_ij)
    o_i   = Σ_j exp(s_ij − lse_i) · v_j

Backward, with p_ij = exp(s_ij − lse_i) and δ_i = do_i · o_i; dk and dv sum over the query heads that share them, too::

    dv_j = Σ_i p_ij · do_i
    ds_ij = scale · p_ij · (do_i · v_j − δ_i)
    dq_i = Σ_j ds_ij · k_j,   dk_j = Σ_i ds_ij · q_i

Saved: q, k, v, o and lse. p and ds are rounded to the dtype of q, like the weights of the forward.

Neither direction is a single kernel. A program that kept o of 128 queries, heads of 512, in registers would need all
registers of a Hopper multiprocessor, and so would one that kept dk and dv of 64 keys; with fewer queries or keys more
bytes are loaded than the multiprocessors take. At this width weights and scores are small beside the products that
they take part in. So a kernel writes the tiles of them that are visible to a workspace, for some queries and heads at a
time, and plain matrix products read them: 2 products in the forward and 5 in the backward.

The forward writes exp2(s'_ij − m), s' = s · log2 e, with m and the sum of each row of a tile in fp32. m is 0 where the
largest s' of the row is within ±64, and otherwise that number, rounded up: bf16 and fp32 hold weights around 2^64 as
well as those around 1. A second kernel finds lse, and where the m of a query differ, multiplies its weights in the
workspace by a power of 2, which rounds nothing but what is tiny. The product with v is then a plain one. It could not
multiply the weights itself: with Triton 3.6 a loop that does so overwrites registers that asynchronous products of the
step before still read.

Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import check, check_floating
from .dispatch import (
    LIBRARY,
    TensorDescriptor,
    fitting_stages,
    num_programs,
    on_device_of,
    register_autograd,
    tl,
    triton,
    use_triton,
)
from .rope import contiguous_rows

MOST_HEAD_DIM = 512

LARGE, SMALL = 2, 4
"""Keys of the tables below: half precision with 200 KB of shared memory (Hopper, Blackwell), and everything else."""

TILE = {LARGE: (128, 128, 64), SMALL: (64, 64, 32)}
WEIGHTS_LAUNCH = {LARGE: {"num_warps": 4, "num_stages": 3}, SMALL: {"num_warps": 8, "num_stages": 2}}
SCORES_LAUNCH = {LARGE: {"num_warps": 8, "num_stages": 3}, SMALL: {"num_warps": 4, "num_stages": 2}}
"""Queries and keys of a tile of weights, or of p and ds, and columns of the heads of a step; launches of the forward
and the backward. In the forward two programs take 208 KB of a Hopper multiprocessor's 227 KB of shared memory: one
computes exponentials while the other multiplies."""

PRODUCT_COLUMNS = {LARGE: 256, SMALL: 64}
PRODUCT_STEP = {LARGE: 64, SMALL: 32}
VALUES_LAUNCH = {LARGE: {"num_warps": 8, "num_stages": 4}, SMALL: {"num_warps": 4, "num_stages": 2}}
PRODUCT_LAUNCH = {LARGE: {"num_warps": 8, "num_stages": 3}, SMALL: {"num_warps": 4, "num_stages": 2}}
"""Columns of a tile of o, dq, dk and dv, and queries or keys of a step; launches of the forward and the backward."""

FAR = {torch.float32: 64.0, torch.bfloat16: 64.0, torch.float16: -1.0}
"""Where m is 0: the largest of a row's scores in a tile, times log2 e, is within ± this. float16 doesn't hold 2^64."""

PARTS = 64
SCALES_PROGRAMS = 4
"""Tiles of keys whose sums are loaded at a time, and programs that the tiles of weights of a tile of queries have."""

PAIRS = 2**26
MOST_ROWS, LEAST_ROWS = 4096, 2048
"""Pairs of a query and a key whose p and ds the workspace holds (4 bytes each in half precision), and queries, over all
heads of a group, that are taken at a time. dk and dv are summed over these in fp32; at 4096 reading and writing the
sums takes about 4% of the time of the products. Beyond 32768 keys the workspace grows, to hold `LEAST_ROWS`. The
forward, which writes weights alone, holds twice as many pairs, and twice `LEAST_ROWS`."""

PLACE = ["first_unit", "first_row"]
FORWARD_PLACE = ["first_head", "first_row", "heads", "tiles", "width"]
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
def _visible(
    position, key, S, window, documents, document, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """Which of the keys [N] each query [M] sees, [M, N]; ``documents`` points to those of the keys."""
    visible = (position[:, None] >= key[None, :]) & (key < S)[None, :]
    if HAS_WINDOW:
        visible = visible & (position[:, None] - key[None, :] < window)
    if HAS_DOCUMENTS:
        others = tl.load(documents + key, mask=key < S, other=-2)
        visible = visible & (document[:, None] == others[None, :])
    return visible


@triton.jit
def _load_rows(rows_ptr, row, end, stride, column, D: tl.constexpr, EVERY_COLUMN: tl.constexpr):
    """Rows [N] up to ``end``, columns [C] up to D; 0 elsewhere."""
    pointers = rows_ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    mask = (row < end)[:, None]
    if not EVERY_COLUMN:
        mask = mask & (column < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _tile(x, batch, head, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a head, of a descriptor of [B, heads, rows, D]; 0 outside."""
    return x.load([batch, head, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _key_tiles(tile, first, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles of keys a tile of queries sees, of those that begin at position ``first``."""
    return tl.cdiv(tl.minimum(first + (tile + 1) * BLOCK_M, S), BLOCK_N)


@triton.jit(do_not_specialize=FORWARD_PLACE)
def _weights_kernel(
    q, k, weights_ptr, most_ptr, sum_ptr, documents_ptr, low_ptr, T, S, window, scale, first_head, first_row, heads,
    tiles, width, H: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles of exp(s − m) of the queries from ``first_row`` on, with m and the sum of each row of a tile."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    pairs = (tiles + 1) // 2
    row = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), heads * pairs * width, tl.num_programs(0), flatten=not BOUNDED):
        pair = place // width % pairs
        head = first_head + place // width // pairs
        batch = head // H
        head = head % H
        tile = tiles - 1 - pair
        key_tile = place % width
        count = _key_tiles(tile, first_row + S - T, S, BLOCK_M, BLOCK_N)
        if key_tile >= count:  # the other tile of queries of the pair
            key_tile -= count
            tile = pair - tiles % 2
        top = first_row + tile * BLOCK_M
        first = top + S - T
        start = key_tile * BLOCK_N
        lowest = 0
        if BOUNDED:
            lowest = tl.load(low_ptr + batch * S + first, mask=tile >= 0, other=0)
        if not BOUNDED or (tile >= 0) & (start < first + BLOCK_M) & (start + BLOCK_N > lowest):
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                queries = _tile(q, batch, head, top, column, BLOCK_M, BLOCK_D)
                keys = _tile(k, batch, head // QUERIES, start, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
            scores *= scale * LOG2_E
            if BOUNDED or start + BLOCK_N > first:
                position = first + row
                documents = documents_ptr + batch * S
                document = position
                if HAS_DOCUMENTS:
                    document = tl.load(documents + position, mask=position < S, other=-3)
                key = start + tl.arange(0, BLOCK_N)
                visible = _visible(position, key, S, window, documents, document, HAS_DOCUMENTS, HAS_WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            largest = tl.max(scores, 1)
            near = (tl.abs(largest) <= FAR) | (largest == float("-inf"))
            most = tl.where(near, 0.0, tl.ceil(largest))
            p = tl.exp2(scores - most[:, None])
            tl.store(most_ptr + place * BLOCK_M + row, tl.where(largest == float("-inf"), largest, most))
            tl.store(sum_ptr + place * BLOCK_M + row, tl.sum(p, 1))
            out = (place * BLOCK_M + row).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(weights_ptr + out, p.to(weights_ptr.dtype.element_ty))


@triton.jit
def _place(slot, tile, first, S, tiles, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tiles of weights of a tile of queries begin."""
    place = slot * ((tiles + 1) // 2)
    if tile >= tiles // 2:
        place = (place + tiles - 1 - tile) * width
    else:
        place = (place + tile + tiles % 2) * width
        place += _key_tiles(tiles - 1 - tile - tiles % 2, first, S, BLOCK_M, BLOCK_N)
    return place


@triton.jit(do_not_specialize=FORWARD_PLACE)
def _scales_kernel(
    weights_ptr, most_ptr, sum_ptr, scale_ptr, lse_ptr, low_ptr, T, S, first_head, first_row, tiles, width,
    H: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One m for all weights of a query, the inverse of their sum [heads, tiles · BLOCK_M], and lse [B, H, T]."""
    slot = tl.program_id(1)
    tile = tl.program_id(2)
    head = first_head + slot
    place = _place(slot, tile, first_row + S - T, S, tiles, width, BLOCK_M, BLOCK_N)
    first = first_row + tile * BLOCK_M + S - T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + head // H * S + first) // BLOCK_N
    end = tl.cdiv(tl.minimum(first + BLOCK_M, S), BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    far = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        at = (place + part) * BLOCK_M + row[None, :]
        each = tl.load(most_ptr + at, mask=part < end, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=part < end, other=0.0)
        far = tl.maximum(far, tl.max(tl.where(each == float("-inf"), 0.0, tl.abs(each)), 0))
        larger = tl.maximum(most, tl.max(each, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has seen no key yet
        total = total * tl.exp2(most - finite) + tl.sum(sums * tl.exp2(each - finite[None, :]), 0)
        most = larger
    most = tl.where(total == 0.0, 0.0, most)  # rows past the last query
    total = tl.where(total == 0.0, 1.0, total)
    if tl.program_id(0) == 0:
        query = first_row + tile * BLOCK_M + row
        tl.store(scale_ptr + (slot * tiles + tile) * BLOCK_M + row, 1.0 / total)
        tl.store(lse_ptr + head.to(tl.int64) * T + query, (most + tl.log2(total)) / LOG2_E, mask=query < T)
    if tl.max(far) > 0.0:
        for part in range(begin + tl.program_id(0), end, tl.num_programs(0)):
            at = (place + part) * BLOCK_M + row
            each = tl.load(most_ptr + at)
            factor = tl.where(each == float("-inf"), 1.0, tl.exp2(each - most))
            if tl.min(factor) < 1.0:
                pointers = weights_ptr + at.to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                p = tl.load(pointers)
                tl.store(pointers, (p * factor[:, None]).to(p.dtype))


@triton.jit(do_not_specialize=FORWARD_PLACE)
def _values_kernel(
    weights, v, out_ptr, scale_ptr, low_ptr, T, S, first_head, first_row, tiles, width,
    H: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, D] = weights · v, scaled."""
    slot = tl.program_id(1)
    tile = tiles - 1 - tl.program_id(2)  # the queries with the most keys first
    batch = (first_head + slot) // H
    head = (first_head + slot) % H
    place = _place(slot, tile, first_row + S - T, S, tiles, width, BLOCK_M, BLOCK_N)
    first = first_row + tile * BLOCK_M + S - T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + first) // BLOCK_N * BLOCK_N
    column = tl.program_id(0) * BLOCK_D
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, tl.minimum(first + BLOCK_M, S), STEP):
        p = weights.load([(place + start // BLOCK_N) * BLOCK_M, start % BLOCK_N])
        values = _tile(v, batch, head // QUERIES, start, column, STEP, BLOCK_D)
        total = tl.dot(p, values, total, input_precision=PRECISION)
    row = tl.arange(0, BLOCK_M)
    total *= tl.load(scale_ptr + (slot * tiles + tile) * BLOCK_M + row)[:, None]
    row += first_row + tile * BLOCK_M
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
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, p_ptr, ds_ptr, documents_ptr, low_ptr,
    T, S, window, scale, first_unit, first_row, height, width,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, d_b, d_t, d_h,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles of p and ds [heads, height, width] of the queries from ``first_row`` on. A unit is a KV head of a row."""
    start = tl.program_id(0) * BLOCK_N
    top = first_row + tl.program_id(1) * BLOCK_M
    slot = tl.program_id(2).to(tl.int64)
    unit = first_unit + slot // QUERIES
    batch = unit // G
    group = unit % G
    head = group * QUERIES + slot % QUERIES
    first = top + S - T
    lowest = 0
    if HAS_DOCUMENTS or HAS_WINDOW:
        lowest = tl.load(low_ptr + batch * S + first)
    if (start < first + BLOCK_M) & (start + BLOCK_N > lowest):
        row = top + tl.arange(0, BLOCK_M)
        position = row + S - T
        key = start + tl.arange(0, BLOCK_N)
        q_ptr += batch * q_b + head * q_h
        k_ptr += batch * k_b + group * k_h
        v_ptr += batch * v_b + group * v_h
        d_out_ptr += batch * d_b + head * d_h
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        d_weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for left in range(0, D, BLOCK_D):
            column = left + tl.arange(0, BLOCK_D)
            q = _load_rows(q_ptr, row, T, q_t, column, D, D % BLOCK_D == 0)
            k = _load_rows(k_ptr, key, S, k_t, column, D, D % BLOCK_D == 0)
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
            d_out = _load_rows(d_out_ptr, row, T, d_t, column, D, D % BLOCK_D == 0)
            v = _load_rows(v_ptr, key, S, v_t, column, D, D % BLOCK_D == 0)
            d_weights = tl.dot(d_out, tl.trans(v), d_weights, input_precision=PRECISION)
        lse = tl.load(lse_ptr + (batch * G * QUERIES + head) * T + row, mask=row < T, other=0.0)
        delta = tl.load(delta_ptr + (batch * G * QUERIES + head) * T + row, mask=row < T, other=0.0)
        documents = documents_ptr + batch * S
        document = position
        if HAS_DOCUMENTS:
            document = tl.load(documents + position, mask=position < S, other=-3)
        visible = _visible(position, key, S, window, documents, document, HAS_DOCUMENTS, HAS_WINDOW)
        visible = visible & (row < T)[:, None]
        exponent = tl.where(visible, scores * (scale * LOG2_E) - (lse * LOG2_E)[:, None], float("-inf"))
        p = tl.exp2(exponent)
        ds = p * (d_weights - delta[:, None]) * scale
        place = (slot * height + (row - first_row).to(tl.int64))[:, None] * width + key[None, :]
        tl.store(p_ptr + place, p.to(p_ptr.dtype.element_ty))  # whole tiles: the workspace has room for them
        tl.store(ds_ptr + place, ds.to(ds_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=PLACE)
def _d_queries_kernel(
    ds_ptr, k_ptr, dq_ptr, low_ptr, T, S, first_unit, first_row, height, width, k_b, k_t, k_h,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, D] = ds · k."""
    top = first_row + (tl.num_programs(2) - 1 - tl.program_id(2)) * BLOCK_M  # the queries with the most keys first
    slot = tl.program_id(1).to(tl.int64)
    unit = first_unit + slot // QUERIES
    batch = unit // G
    group = unit % G
    first = top + S - T
    row = top + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + first) // BLOCK_N * BLOCK_N
    end = tl.minimum(first + BLOCK_M, S)
    k_ptr += batch * k_b + group * k_h
    ds_ptr += (slot * height + (row - first_row).to(tl.int64))[:, None] * width
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, STEP):
        key = start + tl.arange(0, STEP)
        ds = tl.load(ds_ptr + key[None, :])
        k = _load_rows(k_ptr, key, S, k_t, column, D, D % BLOCK_D == 0)
        total = tl.dot(ds, k, total, input_precision=PRECISION)
    head = group * QUERIES + slot % QUERIES
    place = ((batch * T + row.to(tl.int64)) * (G * QUERIES) + head)[:, None] * D + column[None, :]
    inside = (row < T)[:, None] & (column < D)[None, :]
    tl.store(dq_ptr + place, total.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PLACE)
def _d_keys_kernel(
    weights_ptr, rows_ptr, sum_ptr, last_ptr, T, S, first_unit, first_row, height, width, rows_b, rows_t, rows_h,
    G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """weightsᵀ · rows, summed over the heads of a unit: dv of p and do, dk of ds and q. With ADD it is added to sum."""
    start = tl.program_id(2) * BLOCK_N
    unit = (first_unit + tl.program_id(1)).to(tl.int64)
    batch = unit // G
    group = unit % G
    key = start + tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    # The tiles of queries that were written for these keys, counted from first_row.
    begin = tl.maximum(start - (S - T) - first_row, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(height, T - first_row)
    if BOUNDED:
        last = tl.load(last_ptr + batch * S + tl.minimum(start + BLOCK_N, S) - 1)
        end = tl.minimum(end, last + 1 - (S - T) - first_row)
    steps = tl.maximum((end - begin + STEP - 1) // STEP, 0)
    weights_ptr += tl.program_id(1).to(tl.int64) * QUERIES * height * width + key[None, :]
    rows_ptr += batch * rows_b + group * QUERIES * rows_h
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, QUERIES * steps):
        query = i // steps
        row = begin + i % steps * STEP + tl.arange(0, STEP)
        weights = tl.load(weights_ptr + (query.to(tl.int64) * height + row)[:, None] * width)
        rows = _load_rows(
            rows_ptr + query.to(tl.int64) * rows_h, first_row + row, T, rows_t, column, D, D % BLOCK_D == 0
        )
        total = tl.dot(tl.trans(weights), rows, total, input_precision=PRECISION)
    place = sum_ptr + ((batch * S + key.to(tl.int64)) * G + group)[:, None] * D + column[None, :]
    inside = (key < S)[:, None] & (column < D)[None, :]
    if ADD:
        if steps > 0:
            tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
    else:
        tl.store(place, total.to(sum_ptr.dtype.element_ty), mask=inside)


def _tier(x: Tensor) -> int:
    """Which entry of the tables of tiles holds for ``x``."""
    return LARGE if x.element_size() == 2 and fitting_stages(x, 2, 100 * 2**10) == 2 else SMALL


def _precision(x: Tensor) -> str:
    """How fp32 is multiplied: as TF32 only if the user chose that for matrix products."""
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # from torch 2.9
    return "tf32" if x.element_size() == 4 and chosen == "tf32" else "ieee"


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


def _heads(x: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of x [B, T, H, D] as [B, H, T, D], of which programs load ``rows`` x ``columns`` at a time."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:3]):
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % 8)).contiguous()
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _parts(heads: int, T: int, S: int, block_m: int, block_n: int) -> tuple[int, list[tuple[int, int, int]]]:
    """How many of the heads a launch of the forward takes, and parts of the queries with about as many keys each: the
    first row, how many tiles of queries, and how many tiles of keys a pair of those sees. A pair is the last and the
    first, the last but one and the second, and so on: all see about as many. Of an odd number the last is alone."""
    rows, keys = triton.cdiv(T, block_m) * block_m, triton.cdiv(S, block_n) * block_n
    before = keys - rows
    seen = keys**2 - before**2  # twice the pairs of a head
    count = triton.cdiv(seen, 4 * max(PAIRS, LEAST_ROWS * keys))
    edges = sorted({(math.isqrt(before**2 + seen * part // count) - before) // block_m for part in range(count + 1)})
    parts = []
    for top, bottom in pairwise(edges):
        tiles = [-(-min((tile + 1) * block_m + S - T, S) // block_n) for tile in range(top, bottom)]
        folded = [0] * (len(tiles) % 2) + tiles
        parts.append((top * block_m, len(tiles), max(a + b for a, b in zip(folded, reversed(folded), strict=True))))
    return min(max(4 * PAIRS // seen, 1), heads, 2**15), parts


LIBRARY.define(
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int? window) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "causal_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents,"
    " float scale, int? window) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "causal_attention", "CompositeExplicitAutograd")
def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    (B, T, H, D), (_, S, G, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    tier = _tier(q)
    step = PRODUCT_STEP[tier]
    numbers, low, _ = _bounds(documents, window, B, S, q)
    block_m, block_n, block_d = TILE[tier]
    columns = min(PRODUCT_COLUMNS[tier], max(triton.next_power_of_2(D), 16))
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    shared: dict[str, Any] = {"H": H, "QUERIES": H // G, "D": D, "PRECISION": _precision(q), **tile}
    masks = {"HAS_DOCUMENTS": documents is not None, "HAS_WINDOW": window is not None}
    bounded = documents is not None or window is not None
    with on_device_of(q):
        queries, keys, values = _heads(q, block_m, block_d), _heads(k, block_n, block_d), _heads(v, step, columns)
        heads, parts = _parts(B * H, T, S, block_m, block_n)
        room = heads * max((tiles + 1) // 2 * width for _, tiles, width in parts)
        weights = torch.empty(room * block_m, block_n, dtype=q.dtype, device=q.device)
        most, sums = torch.empty(2, room, block_m, dtype=torch.float32, device=q.device)
        scales = torch.empty(heads * max(part[1] for part in parts) * block_m, dtype=torch.float32, device=q.device)
        strips = TensorDescriptor(weights, list(weights.shape), list(weights.stride()), [block_m, step])
        for row, tiles, width in parts:
            for head in range(0, B * H, heads):
                count = min(heads, B * H - head)
                # With bounds programs differ in time, so that the multiprocessors must take them one by one.
                programs = count * ((tiles + 1) // 2) * width
                programs = programs if bounded else min(programs, num_programs(q, 2))
                _weights_kernel[(programs,)](
                    queries, keys, weights, most, sums, numbers, low, T, S, window or 0, scale, head, row, count,
                    tiles, width, FAR=FAR[q.dtype], BLOCK_D=block_d, **shared, **masks, **WEIGHTS_LAUNCH[tier],
                )  # fmt: skip
                place = T, S, head, row, tiles, width
                _scales_kernel[(SCALES_PROGRAMS, count, tiles)](
                    weights, most, sums, scales, lse, low, *place, H=H, BOUNDED=bounded, PARTS=PARTS, num_warps=8,
                    **tile,
                )  # fmt: skip
                _values_kernel[(triton.cdiv(D, columns), count, tiles)](
                    strips, values, out, scales, low, *place, BLOCK_D=columns, STEP=step, BOUNDED=bounded, **shared,
                    **VALUES_LAUNCH[tier],
                )  # fmt: skip
    return out, lse


@torch.library.impl(LIBRARY, "causal_attention_backward", "CompositeExplicitAutograd")
def _causal_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_out, q, k, v = (contiguous_rows(x) for x in (d_out, q, k, v))
    out = out.contiguous()
    (B, T, H, D), (_, S, G, _) = q.shape, k.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not out.numel():
        return dq, dk.zero_(), dv.zero_()
    tier, queries = _tier(q), H // G
    numbers, low, last = _bounds(documents, window, B, S, q)
    block_m, block_n, block_d = TILE[tier]
    width = triton.cdiv(S, block_n) * block_n
    rows = max(min(max(PAIRS // width, LEAST_ROWS), MOST_ROWS) // queries, 1)
    height = min(triton.cdiv(rows, block_m), triton.cdiv(T, block_m)) * block_m
    units = min(max(PAIRS // (height * queries * width), 1), B * G)
    parts = height < T  # dk and dv are then sums over the launches
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v)] if parts else [dk, dv]
    p, ds = (torch.empty(units * queries, height, width, dtype=q.dtype, device=q.device) for _ in range(2))
    delta = torch.empty_like(lse)
    shared: dict[str, Any] = {"G": G, "QUERIES": queries, "D": D, "PRECISION": _precision(q)}
    bounded = {"BOUNDED": documents is not None or window is not None}
    masks = {"HAS_DOCUMENTS": documents is not None, "HAS_WINDOW": window is not None}
    columns = min(PRODUCT_COLUMNS[tier], max(triton.next_power_of_2(D), 16))
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": columns, "STEP": PRODUCT_STEP[tier]}
    across = triton.cdiv(D, columns)
    with on_device_of(q):
        vectors, block = B * T * H, max(triton.next_power_of_2(D), 16)
        _row_products_kernel[(triton.cdiv(vectors, 4),)](
            out, d_out, delta, vectors, T, *d_out.stride()[:3], H=H, D=D, BLOCK_D=block, ROWS=4
        )
        for unit in range(0, B * G, units):
            count = min(units, B * G - unit)
            for row in range(0, T, height):
                tiles = triton.cdiv(min(height, T - row), block_m)
                seen = triton.cdiv(min(row + height, T) + S - T, block_n)  # tiles of keys, up to the last query's
                place = T, S, unit, row, height, width
                _score_gradients_kernel[(seen, tiles, count * queries)](
                    q, k, v, d_out, lse, delta, p, ds, numbers, low, T, S, window or 0, scale, *place[2:],
                    *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
                    BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, **shared, **masks, **SCORES_LAUNCH[tier],
                )  # fmt: skip
                _d_queries_kernel[(across, count * queries, tiles)](
                    ds, k, dq, low, *place, *k.stride()[:3], **shared, **bounded, **tile, **PRODUCT_LAUNCH[tier]
                )
                for weights, factor, total in ((ds, q, sums[0]), (p, d_out, sums[1])):
                    _d_keys_kernel[(across, count, seen if parts else triton.cdiv(S, block_n))](
                        weights, factor, total, last, *place, *factor.stride()[:3],
                        ADD=parts, **shared, **bounded, **tile, **PRODUCT_LAUNCH[tier],
                    )  # fmt: skip
    if parts:
        dk.copy_(sums[0])
        dv.copy_(sums[1])
    return dq, dk, dv


@torch.library.register_fake("liger_models::causal_attention", lib=LIBRARY)
def _causal_attention_fake(q, k, v, documents, scale, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.register_fake("liger_models::causal_attention_backward", lib=LIBRARY)
def _causal_attention_backward_fake(d_out, q, k, v, out, lse, documents, scale, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, documents, ctx.scale, ctx.window = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, documents)


def _backward(ctx, d_out, _d_lse):
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
    """Causal attention within documents and a window. Only q, k, v, the result and one number per query are saved.

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
    check(window is None or window >= 1, f"{op}: window must be at least 1, got {window}. None is for no window.")
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
