"""Attention for decoding: one new token of each row attends to the keys and values in a paged cache.

Row b has n = lengths[b] tokens in the cache, including the new token. A page holds P tokens, and token j is in slot j %
P of page table[b, j // P]. With a window, the new token sees token j if n − j is at most ``window``. With chunks, the
new token sees token j if j and n − 1 are in the same chunk of ``chunk`` tokens. Without a window and without chunks,
the new token sees all n tokens. The score of token j is s_j = scale · q · k_j or, with a softcap c, s_j = c ·
tanh(scale · q · k_j / c). z is the head's sink, an additional score without a key; without sinks, exp(z) = 0. The sums
are over the tokens that the new token sees, and are computed in fp32::

    lse = log(Σ_j exp(s_j) + exp(z))
    o   = Σ_j exp(s_j − lse) · v_j

The keys of a row are split among several programs, because one program per head would occupy only a small part of a
GPU. Program i writes o_i and lse_i for its keys, without the sink. A second kernel combines the results of all
programs::

    o = Σ_i exp(lse_i − lse) · o_i

Keys have D columns, and values have V columns. In latent attention, the values are the first V columns of the keys.
A program then reads only the keys, and computes two products with the queries: one for the first V columns of the keys,
and one for the other D − V columns.

Rows may share the pages of a prompt. Keys that several rows share are then read once for all of them: another kernel
computes attention to the shared keys for groups of rows, and the first kernel computes attention to all other keys.

Keys and values may be in float8, with a scale for each token and head; see `scaled_pages.py`. The kernels then convert
the codes, and multiply scores and weights by the scales. No dequantized page is written to memory.

Query heads that share keys are rows of the same matrix product, so that each key is read only once. The number of
programs depends only on the shapes. Each program reads ``lengths`` on the device to find its keys, so a launch that was
captured in a CUDA graph works for all lengths. There is no backward.

Source: https://arxiv.org/abs/1805.02867, https://pytorch.org/blog/flash-decoding, https://arxiv.org/abs/2309.06180.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.attention.heads import LOG2_E, check_heads, softmax_step
from liger_models.kernels.attention.scaled_pages import (
    ScaledPages,
    check_scaled_pages,
    fp16_queries,
    load_pairs,
    scaled_softmax_step,
    store_pairs,
)
from liger_models.kernels.dispatch import fitting_stages, has_ptx, num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, dot_precision, dot_tile, next_power_of_2, scale_and_cap

PROGRAMS_PER_SM = 2
MOST_PARTS = 128
"""The keys of all rows are divided among about `PROGRAMS_PER_SM` programs per multiprocessor. The keys of a row and a
KV head are divided into at most `MOST_PARTS` parts."""

STEP_BYTES = 2**14
STAGES = 3
"""A program loads up to `STEP_BYTES` bytes of keys and as many bytes of values per step. `STAGES` is the number of
steps in flight. With these numbers, a program takes 96 KB of shared memory, so two programs fit into a multiprocessor
of an H200."""

SCALED_STEP_BYTES, SCALED_STAGES, SCALED_WARPS = 2**13, 5, 2
"""`SCALED_STEP_BYTES` and `SCALED_STAGES` replace `STEP_BYTES` and `STAGES` for keys and values in float8. A step then
has as many keys as a step in half precision. `SCALED_WARPS` is the number of warps of a program."""

ROWS_PER_SM, ROW_STEP_BYTES = 3, 2**12
"""For keys and values in float8: if there are at least `ROWS_PER_SM` tiles of queries (the query heads of a row and a
KV head) per multiprocessor, the keys of a row are not divided, and no kernel combines results. A step then loads up to
`ROW_STEP_BYTES` bytes of keys, and a program whose tile has at most `MOST_WARP_QUERIES` elements is a single warp.

On an H200, for 256 rows of 512 tokens and the heads of Llama 3.2 3B, this takes 65 us. With two parts, programs of 4
warps and steps of 64 keys, float8 takes 100 us, and bfloat16 takes 101 us. In bfloat16, rows of a single part take 111
us."""

MOST_WARP_QUERIES = 2**11
"""See `ROWS_PER_SM`."""

SCALED_ROWS = 32
"""Maximum number of query heads in a tile of `_shared_kernel` for keys and values in float8."""

LEAST_ROWS = 16
"""Minimum number of heads in a matrix product. A smaller group of heads is padded."""

MOST_QUERIES = 2**13
"""Maximum number of query elements (heads · columns) that a program holds. If the query heads that share keys have more
elements, they are divided among several programs, which all read the keys."""

MOST_LATENT_QUERIES, LATENT_BYTES = 2**15, 2**16
"""These numbers apply if the values are columns of the keys, in half precision on GPUs with enough shared memory
(Hopper, Blackwell). `MOST_LATENT_QUERIES` then replaces `MOST_QUERIES`. A program loads `LATENT_BYTES` / 2 bytes per
step from the first V columns of the keys. For keys of 576 columns and values of 512 columns, a program thus holds up to
64 query heads, and loads 32 keys per step."""

GROUP_ROWS = 8
"""Maximum number of rows in a group of rows that share keys."""

COMBINED_COLUMNS, COMBINED_ELEMENTS, COMBINING_PER_SM = 128, 2**12, 4
"""Number of columns of a head that a program of the last kernel combines, and maximum number of elements that it reads.
A program combines several heads if there are more than `COMBINING_PER_SM` heads per multiprocessor."""


class SharedKeys(NamedTuple):
    """Groups of rows that share the pages of their first tokens.

    Attributes:
        groups: [groups, `GROUP_ROWS` + 1] int32, the rows of each group, −1 for no row, and in the last column the
            number of tokens whose pages the rows share. This number is a multiple of the page size, and 0 for an empty
            group. Each row of the group has more tokens.
        counts: [B] int32, the number of shared tokens of each row; 0 for a row that is in no group.
    """

    groups: Tensor
    counts: Tensor


def decode_attention_reference(
    q: Tensor,
    keys: Tensor | ScaledPages,
    values: Tensor | ScaledPages,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `decode_attention` in plain PyTorch, from copies of the pages in the table.

    If q is fp64, so are all computations. Pages in float8 are dequantized to fp32 or, if q is fp64, to fp64. A table
    may have far more pages per row than the longest row uses. On the CPU, pages after the last page of the longest row
    are therefore not read.
    """
    (B, H, D), G, V, dtype = q.shape, keys.shape[2], values.shape[3], q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    if B and table.device.type == "cpu" and not torch.compiler.is_compiling():
        table = table[:, : max(cdiv(int(lengths.max()), keys.shape[1]), 1)]
    # [B, G, S, D] and [B, G, S, V]
    selected = (
        pages.select(table.long(), compute) if isinstance(pages, ScaledPages) else pages[table.long()]
        for pages in (keys, values)
    )
    k, v = (x.flatten(1, 2).transpose(1, 2) for x in selected)
    q = q.to(k.dtype)
    distance = lengths[:, None] - torch.arange(k.shape[2], device=q.device)
    reach = lengths[:, None] if chunk is None else (lengths[:, None] - 1).clamp_min(0) % chunk + 1
    reach = reach if window is None else reach.clamp(max=window)
    visible = (distance > 0) & (distance <= reach)
    visible = visible[:, None, None]
    scores = ((q.view(B, G, H // G, D) @ k.transpose(2, 3)) * scale).to(compute)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(compute).view(1, G, H // G, 1).expand(B, -1, -1, -1)], 3)
    weights = scores.softmax(3)[..., : k.shape[2]].to(q.dtype)
    v = v.masked_fill(~visible.transpose(2, 3), 0.0)  # slots that were never written may contain NaN
    return (weights @ v).view(B, H, V).to(dtype)


@triton.jit
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, lengths_ptr, shared_ptr, sinks_ptr,
    out_ptr, lse_ptr, table_b, q_b, q_h, window, scale, softcap, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr,
    SCALED: tl.constexpr, PTX: tl.constexpr, LATENT: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program computes attention over one part of a row's keys, for some of the GROUP query heads of a KV head.
    Its results are the output and the log-sum-exp for this part. With LATENT, the values are the first V columns of the
    keys. BLOCK_D then equals BLOCK_V, and the remaining D − V columns of the keys are processed in a block of
    BLOCK_REST columns. With SCALED, keys and values are codes in float8 with scales.

    With SHARED_PARTS, the results have places for as many parts of the keys that the row shares with other rows. These
    keys are left out here; see `_shared_kernel`.

    If a row has a single part, the results are the outputs of the op, with the sinks and without log-sum-exps.
    """
    await_previous(OVERLAPS)
    part = tl.program_id(0)
    tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // tiles
    batch = tl.program_id(2).to(tl.int64)

    # Load the queries [BLOCK_M, BLOCK_D] and, with LATENT, their other columns [BLOCK_M, BLOCK_REST].
    FIRST: tl.constexpr = V if LATENT else D
    member = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_D)
    heads = q_ptr + batch * q_b + head[:, None] * q_h
    q = tl.load(heads + column[None, :], mask=(member < GROUP)[:, None] & (column < FIRST)[None, :], other=0.0)
    if LATENT:
        rest = V + tl.arange(0, BLOCK_REST)
        q_rest = tl.load(heads + rest[None, :], mask=(member < GROUP)[:, None] & (rest < D)[None, :], other=0.0)
    if SCALED and q.dtype.primitive_bitwidth == 16:
        q, divisor = fp16_queries(q)
        scale *= divisor

    # The keys that the token sees are divided into steps of BLOCK_N keys. Each part has an equal share of these
    # steps.
    length = tl.load(lengths_ptr + batch)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    if CHUNKED:
        first = tl.maximum(length - 1, 0) // window * window
    if SHARED_PARTS > 0:
        first = tl.load(shared_ptr + batch)
    lowest = first // BLOCK_N
    share = tl.cdiv(tl.cdiv(length, BLOCK_N) - lowest, PARTS)
    begin = (lowest + part * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, length)

    # The state of the online softmax is the unnormalized output [BLOCK_M, BLOCK_V], the maximum [BLOCK_M] and the
    # sum [BLOCK_M].
    value_column = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    totals = total, total  # with SCALED, the columns with even and with odd numbers
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        # Load the step's keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_V], which are all in the same page.
        page = tl.load(table_ptr + batch * table_b + start // PAGE).to(tl.int64)
        key = start + tl.arange(0, BLOCK_N)
        slot = page * PAGE + start % PAGE + tl.arange(0, BLOCK_N)
        at = (slot * G + kv_head)[:, None]
        exists = (key < end)[:, None]
        k = tl.load(keys_ptr + at * D + column[None, :], mask=exists & (column < FIRST)[None, :], other=0.0)
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LATENT:
            k_rest = tl.load(keys_ptr + at * D + rest[None, :], mask=exists & (rest < D)[None, :], other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
            v = k
        elif SCALED:
            inside_v = exists & (value_column < V // 2)[None, :]
            first_v, second_v = load_pairs(values_ptr + at * (V // 2) + value_column[None, :], inside_v, q.dtype, PTX)
            place = (page * G + kv_head) * PAGE + start % PAGE + tl.arange(0, BLOCK_N)
            scores *= tl.load(key_scales_ptr + place, mask=key < end, other=1.0)[None, :]
            value_scales = tl.load(value_scales_ptr + place, mask=key < end, other=1.0)
        else:
            inside_v = exists & (value_column < V)[None, :]
            v = tl.load(values_ptr + at * V + value_column[None, :], mask=inside_v, other=0.0)

        # Convert the scores [BLOCK_M, BLOCK_N] to base 2, and add the step's part of the output.
        scores = scale_and_cap(scores, scale, softcap, HAS_SOFTCAP) * LOG2_E
        scores = tl.where(((key >= first) & (key < end))[None, :], scores, float("-inf"))
        if SCALED:
            totals, most, weight = scaled_softmax_step(
                scores, first_v, second_v, value_scales, totals, most, weight, PRECISION
            )
        else:
            total, most, weight = softmax_step(scores, v, total, most, weight, True, PRECISION)

    # If a part has no keys, its log-sum-exp is -inf, and the program writes no output.
    row = (batch * G * GROUP + head) * (PARTS + SHARED_PARTS) + part
    ONE_PART: tl.constexpr = PARTS + SHARED_PARTS == 1
    if ONE_PART and HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
        weight += tl.exp2(sink * LOG2_E - most)
    if SHARED_PARTS > 0:
        # A row that shares no keys has no results for shared keys.
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(lse_ptr + row + PARTS, nothing, mask=(member < GROUP) & (first == 0))
    if begin < end:
        exists = (member < GROUP)[:, None]
        if SCALED:
            inside = exists & (value_column < V // 2)[None, :]
            store_pairs(out_ptr + row[:, None] * V + 2 * value_column[None, :], totals, weight, inside)
        else:
            inside = exists & (value_column < V)[None, :]
            out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row[:, None] * V + value_column[None, :], out, mask=inside)
        most += tl.log2(weight)
    if not ONE_PART:
        tl.store(lse_ptr + row, most, mask=member < GROUP)


@triton.jit
def _shared_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, groups_ptr, out_ptr, lse_ptr, table_b,
    q_b, q_h, scale, softcap, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    PAGE: tl.constexpr, PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program computes attention over one part of the keys that a group of rows shares, for BLOCK_M of the rows'
    query heads that share a KV head. The results follow the PARTS results of `_decode_kernel`.
    """
    await_previous(OVERLAPS)
    part = tl.program_id(0)
    tiles: tl.constexpr = (GROUP_ROWS * GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // tiles
    rows_ptr = groups_ptr + tl.program_id(2) * (GROUP_ROWS + 1)
    length = tl.load(rows_ptr + GROUP_ROWS)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), PARTS) * BLOCK_N
    begin = part * share
    end = tl.minimum(begin + share, length)

    # Member m of a group is head m % GROUP of row m // GROUP. Load the queries [BLOCK_M, BLOCK_D].
    member = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(rows_ptr + member // GROUP, mask=member < GROUP_ROWS * GROUP, other=-1)
    exists = (row >= 0) & (length > 0)
    row = tl.maximum(row, 0).to(tl.int64)
    head = kv_head * GROUP + member % GROUP
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    at = q_ptr + (row * q_b + head * q_h)[:, None] + column[None, :]
    q = tl.load(at, mask=exists[:, None] & (column < D)[None, :], other=0.0)
    if SCALED and q.dtype.primitive_bitwidth == 16:
        q, divisor = fp16_queries(q)
        scale *= divisor

    # All rows of the group have the same pages. Add up the keys as in `_decode_kernel`.
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    totals = total, total
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    pages_ptr = table_ptr + tl.maximum(tl.load(rows_ptr), 0).to(tl.int64) * table_b
    for start in range(begin, end, BLOCK_N):
        page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
        key_at = ((page * PAGE + start % PAGE + tl.arange(0, BLOCK_N)) * G + kv_head)[:, None]
        k = tl.load(keys_ptr + key_at * D + column[None, :], mask=(column < D)[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCALED:
            inside_v = (value_column < V // 2)[None, :]
            first_v, second_v = load_pairs(
                values_ptr + key_at * (V // 2) + value_column[None, :], inside_v, q.dtype, PTX
            )
            place = (page * G + kv_head) * PAGE + start % PAGE + tl.arange(0, BLOCK_N)
            scores *= tl.load(key_scales_ptr + place)[None, :]
            value_scales = tl.load(value_scales_ptr + place)
        else:
            v = tl.load(values_ptr + key_at * V + value_column[None, :], mask=(value_column < V)[None, :], other=0.0)
        scores = scale_and_cap(scores, scale, softcap, HAS_SOFTCAP) * LOG2_E
        if SCALED:
            totals, most, weight = scaled_softmax_step(
                scores, first_v, second_v, value_scales, totals, most, weight, PRECISION
            )
        else:
            total, most, weight = softmax_step(scores, v, total, most, weight, True, PRECISION)

    result = (row * G * GROUP + head) * (2 * PARTS) + PARTS + part
    if begin < end:
        if SCALED:
            inside = exists[:, None] & (value_column < V // 2)[None, :]
            store_pairs(out_ptr + result[:, None] * V + 2 * value_column[None, :], totals, weight, inside)
        else:
            inside = exists[:, None] & (value_column < V)[None, :]
            tl.store(out_ptr + result[:, None] * V + value_column[None, :], total / weight[:, None], mask=inside)
        most += tl.log2(weight)
    tl.store(lse_ptr + result, most, mask=exists)


@triton.jit
def _combine_kernel(
    parts_ptr, lse_ptr, sinks_ptr, out_ptr, ROWS, H, V: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_V columns of the outputs of BLOCK heads: the weighted sums of the outputs of all parts that have
    keys. The heads of all rows are numbered from 0 to ROWS.

    The log-sum-exps are in base 2.
    """
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = row[:, None] * PARTS + part[None, :]
    lse = tl.load(lse_ptr + at, mask=(row < ROWS)[:, None], other=float("-inf"))
    most = tl.max(lse, 1)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % H).to(tl.float32) * LOG2_E
        most = tl.maximum(most, sink)
    most = tl.where(most == float("-inf"), 0.0, most)  # the maximum is -inf if the row has no tokens

    # Compute the weight of each part [BLOCK, PARTS], and the weighted sums of the parts [BLOCK, PARTS, BLOCK_V].
    share = tl.exp2(lse - most[:, None])
    weight = tl.sum(share, 1)
    if HAS_SINKS:
        weight += tl.exp2(sink - most)
    weight = tl.where(weight == 0.0, 1.0, weight)
    inside = (lse > float("-inf"))[:, :, None] & (column < V)[None, None, :]
    out = tl.load(parts_ptr + at[:, :, None] * V + column[None, None, :], mask=inside, other=0.0)
    out = tl.sum(out * share[:, :, None], 1) / weight[:, None]
    inside = (row < ROWS)[:, None] & (column < V)[None, :]
    tl.store(out_ptr + row[:, None] * V + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def _power_below(x: int) -> int:
    """Return the largest power of two that is at most x."""
    return 1 << (x.bit_length() - 1)


def _decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None,
    chunk: int | None, softcap: float | None, sinks: Tensor | None, groups: Tensor | None, counts: Tensor | None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (B, H, D), (_, page, G, _), V = q.shape, keys.shape, values.shape[3]
    scaled = key_scales is not None
    # If the values are the first columns of the keys, they are neither read nor copied separately.
    latent = not scaled and V < D and keys.is_contiguous()
    latent = latent and values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    q, keys, values = contiguous_rows(q), keys.contiguous(), keys if latent else values.contiguous()
    # Without scales, the kernels do not read the scales, but they need a tensor.
    key_scales = keys if key_scales is None else key_scales.contiguous()
    if scaled:
        values = values.view(torch.int16)
    value_scales = values if value_scales is None else value_scales.contiguous()
    table, lengths = contiguous_rows(table), lengths.contiguous()
    out = torch.empty(B, H, V, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out

    # Choose the number of query heads per program and the number of keys per step. The keys of a step must be in one
    # page.
    block_v = dot_tile(V // 2 if scaled else V)  # pairs of columns of values with scales
    block_d = block_v if latent else dot_tile(D)
    block_rest = dot_tile(D - V) if latent else 0
    most_queries, read = MOST_QUERIES, 2 * block_d  # columns of keys and values
    widest = max(block_d, next_power_of_2(V))
    step_bytes, stages = (SCALED_STEP_BYTES, SCALED_STAGES) if scaled else (STEP_BYTES, STAGES)
    if latent:
        read = block_d + block_rest
        if q.itemsize == 2 and fitting_stages(q, 2, 112 * 2**10) == 2:
            most_queries, step_bytes = MOST_LATENT_QUERIES, LATENT_BYTES // 2
    block_m = max(min(next_power_of_2(H // G), most_queries // widest), LEAST_ROWS)
    tiles = G * cdiv(H // G, block_m)
    shares = groups is not None and window is None and chunk is None and not latent
    one_part = scaled and not shares and B * tiles >= num_programs(q, ROWS_PER_SM)
    step_bytes = ROW_STEP_BYTES if one_part else step_bytes
    block_n = min(max(_power_below(step_bytes // (widest * keys.itemsize)), 16), page)

    # Divide the keys into enough parts to occupy the device. The lengths are on the device, so the host computes the
    # largest possible number of keys from the width of the table.
    seen = table.shape[1] * page
    reach = window or chunk
    seen = seen if reach is None else min(reach + block_n, seen)
    room = _power_below(max(num_programs(q, PROGRAMS_PER_SM) // (B * tiles), 2))
    parts = max(min(room, next_power_of_2(cdiv(seen, block_n)), MOST_PARTS), 2)

    # Keys that groups of rows share are read separately, unless a token sees only its last keys.
    shared_parts = parts if shares else 0
    results, lse = out, out
    if one_part:
        parts = 1
    else:
        results = torch.empty(B, H, parts + shared_parts, V, dtype=torch.float32, device=q.device)
        lse = torch.empty(B, H, parts + shared_parts, dtype=torch.float32, device=q.device)
    sinks_or_any = out if sinks is None else sinks.contiguous()
    columns = min(dot_tile(V), COMBINED_COLUMNS)
    constants: dict[str, Any] = {
        "G": G, "GROUP": H // G, "D": D, "V": V, "PAGE": page, "PARTS": parts, "HAS_SOFTCAP": softcap is not None,
        "PRECISION": dot_precision(q), "SCALED": scaled, "PTX": has_ptx(q), "BLOCK_N": block_n, "BLOCK_D": block_d,
        "BLOCK_V": block_v, **overlap(q), "num_stages": fitting_stages(q, stages, block_n * read * keys.itemsize),
    }  # fmt: skip
    strides = table.stride(0), *q.stride()[:2]
    num_warps = 8 if block_m * next_power_of_2(V) > MOST_QUERIES else 4
    if scaled and num_warps == 4:
        num_warps = 1 if one_part and block_m * widest <= MOST_WARP_QUERIES else SCALED_WARPS
    with on_device_of(q):
        if shares and groups is not None:
            members = GROUP_ROWS * (H // G)
            most = min(MOST_QUERIES // widest, SCALED_ROWS) if scaled else MOST_QUERIES // widest
            block = max(min(next_power_of_2(members), most), LEAST_ROWS)
            _shared_kernel[(parts, G * cdiv(members, block), len(groups))](
                q, keys, values, key_scales, value_scales, table, groups, results, lse, *strides, scale, softcap or 0.0,
                GROUP_ROWS=GROUP_ROWS, BLOCK_M=block, **constants, num_warps=4,
            )  # fmt: skip
        _decode_kernel[(parts, tiles, B)](
            q, keys, values, key_scales, value_scales, table, lengths, counts if shares else lengths,
            sinks_or_any, results, lse, *strides, reach or 0, scale, softcap or 0.0, SHARED_PARTS=shared_parts,
            LATENT=latent, HAS_SINKS=sinks is not None, HAS_WINDOW=window is not None, CHUNKED=chunk is not None,
            BLOCK_M=block_m, BLOCK_REST=block_rest, **constants,
            num_warps=num_warps,
        )  # fmt: skip
        if one_part:
            return out
        most_heads = COMBINED_ELEMENTS // ((parts + shared_parts) * columns)
        block = _power_below(max(min(B * H // num_programs(q, COMBINING_PER_SM), most_heads), 1))
        _combine_kernel[(cdiv(B * H, block), cdiv(V, columns))](
            results, lse, sinks_or_any, out, B * H, H, V=V,
            PARTS=parts + shared_parts, HAS_SINKS=sinks is not None, BLOCK=block, BLOCK_V=columns, **overlap(q),
        )  # fmt: skip
    return out


FORWARD = define_op(
    "decode_attention", _decode_attention, lambda q, keys, values, *_: q.new_empty(*q.shape[:2], values.shape[3])
)


def decode_attention(
    q: Tensor,
    keys: Tensor | ScaledPages,
    values: Tensor | ScaledPages,
    table: Tensor,
    lengths: Tensor,
    shared: SharedKeys | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of the last token of each row to the tokens of this row in a paged cache.

    The op has no backward.

    Args:
        q: [B, H, D], float32, float16 or bfloat16, where D is at most 576.
        keys, values: [pages, P, G, D] and [pages, P, G, V] in the dtype of q, where P is a power of two of at least 16,
            V is at most 576, and H is a multiple of G. If the values are a view of the first V columns of contiguous
            keys, the kernel reads only the keys. Both may be `ScaledPages`.
        table: [B, N] int32, the page indices of each row, in the order of the row's tokens. Entries after the page of
            the last token may be any valid index. N · P determines the number of programs.
        lengths: [B] int32, number of tokens of each row, from 0 to N · P. The result of a row without tokens is
            undefined.
        shared: groups of rows that share pages; None if no pages are shared, or if the kernel need not know it. With a
            window, with chunks, and if values are columns of the keys, the groups are ignored.
        scale: number by which q·k is multiplied.
        window: number of tokens that the token sees, including itself; None for all tokens.
        chunk: number of tokens per chunk, if the token sees only the tokens of its own chunk. ``window`` must then be
            None.
        softcap: if given, scores become ``softcap · tanh(score / softcap)``.
        sinks: [H], an additional score in the softmax of each head, without a key or a value; None for no sinks.

    Returns:
        [B, H, V] in the dtype of q.

    Raises:
        ValueError: shapes do not match, heads are wider than 576, the window or the chunk is below 1, both a window and
            a chunk are given, P is not a power of two of at least 16, or the pages are `ScaledPages` and kernels on the
            device can't convert float8.
        TypeError: the tensors are not floating-point or differ in dtype, table and lengths are not int32, or only one
            of ``keys`` and ``values`` is `ScaledPages`.
    """
    op = "decode_attention"
    scaled = isinstance(keys, ScaledPages) or isinstance(values, ScaledPages)
    if scaled:
        check_scaled_pages(op, keys, values, q.device)
    (key_codes, key_scales), (value_codes, value_scales) = (
        pages if isinstance(pages, ScaledPages) else (pages, None) for pages in (keys, values)
    )
    check_floating(op, q=q, keys=key_codes, values=value_codes, sinks=sinks)
    if not scaled and not q.dtype == key_codes.dtype == value_codes.dtype:
        raise TypeError(
            f"{op}: q, keys and values must have one dtype, got {q.dtype}, {key_codes.dtype}, {value_codes.dtype}."
        )
    if not table.dtype == lengths.dtype == torch.int32:
        raise TypeError(f"{op}: table and lengths must be int32, got {table.dtype} and {lengths.dtype}.")
    fits = q.dim() == 3 and len(keys.shape) == len(values.shape) == 4 and keys.shape[:3] == values.shape[:3]
    if not (fits and q.shape[2] == keys.shape[3] and keys.shape[2] > 0 and q.shape[1] % keys.shape[2] == 0):
        raise ValueError(
            f"{op}: q must be [B, H, D], keys [pages, P, G, D] and values [pages, P, G, V] with H a multiple of G, got "
            f"{list(q.shape)}, {list(keys.shape)} and {list(values.shape)}."
        )
    B, H, D = q.shape
    page = keys.shape[1]
    check_heads(op, H, max(D, values.shape[3]), window, sinks, "Decode without pages.")
    if chunk is not None and (window is not None or chunk < 1):
        raise ValueError(f"{op}: chunk must be at least 1, and window None, got {chunk} and {window}. Pass one.")
    if not (page >= 16 and page & (page - 1) == 0):
        raise ValueError(f"{op}: a page must have a power of two of tokens, at least 16, got {page}. Make other pages.")
    if not (table.dim() == 2 and table.shape[0] == B and lengths.shape == (B,)):
        raise ValueError(
            f"{op}: table must be [{B}, N] and lengths [{B}], got {list(table.shape)} and {list(lengths.shape)}."
        )
    if not use_triton(q):
        return decode_attention_reference(
            q, keys, values, table, lengths, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
        )
    groups, counts = (None, None) if shared is None else shared
    return FORWARD(
        q, key_codes, value_codes, table, lengths, scale, window, chunk, softcap, sinks, groups, counts,
        key_scales, value_scales,
    )  # fmt: skip
