"""Attention of one new token of each row to the keys and values in a paged cache, for decoding.

Row b has n = lengths[b] tokens in the cache, the new one included. With P tokens in a page, token j is in slot j % P of
page table[b, j // P]. The new token sees token j if n − j is at most ``window``. With s_j = scale · q · k_j, or
c · tanh(scale · q · k_j / c) with a softcap c, summed over the tokens that are seen, in fp32::

    lse = log(Σ_j exp(s_j) + exp(z))      with a sink z of the head; without, exp(z) = 0
    o   = Σ_j exp(s_j − lse) · v_j

The keys of a row are divided among programs, because one program per head would use only a small part of a GPU. Program
i writes o_i and lse_i of its keys, without the sink, and a second kernel combines them::

    o = Σ_i exp(lse_i − lse) · o_i

Heads that share keys are rows of the same matrix product, so that a key is read once. The number of programs follows
from the shapes alone, and ``lengths`` decides which keys each of them reads, so a captured launch serves all lengths.
There is no backward.

Source: https://arxiv.org/abs/1805.02867, https://pytorch.org/blog/flash-decoding, https://arxiv.org/abs/2309.06180.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY
from liger_models.kernels.attention.heads import LOG2_E, check_heads, softmax_step
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import contiguous_rows, dot_precision, scale_and_cap

PROGRAMS_PER_SM = 2
MOST_PARTS = 128
"""Programs per multiprocessor among which the keys of all rows are divided, and the most for one row and KV head."""

STEP_BYTES = 2**14
STAGES = 3
"""Bytes of keys, and as many of values, that a program loads in a step, and steps that are in flight: on an H200 two
programs of 96 KB fit into the shared memory of a multiprocessor."""

LEAST_ROWS = 16
"""Minimum number of heads in a product; a smaller group is padded."""

MOST_QUERIES = 2**13
"""Maximum number of elements in a program's queries. A wider group is divided, and each part reads the keys again."""

COMBINED_COLUMNS = 128
"""Columns of a head that a program of the second kernel combines."""


def decode_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode_attention` in plain torch (fp64 stays fp64), on copies of all pages in the table.

    On the CPU it reads only as many pages as the longest row has, because tables are sized for the longest rows
    allowed.
    """
    (B, H, D), G = q.shape, keys.shape[2]
    if B and table.device.type == "cpu" and not torch.compiler.is_compiling():
        table = table[:, : max(-(-int(lengths.max()) // keys.shape[1]), 1)]
    k, v = (pages[table.long()].flatten(1, 2).transpose(1, 2) for pages in (keys, values))  # [B, G, S, D]
    distance = lengths[:, None] - torch.arange(k.shape[2], device=q.device)
    visible = distance > 0 if window is None else (distance > 0) & (distance <= window)
    visible = visible[:, None, None]
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = ((q.view(B, G, H // G, D) @ k.transpose(2, 3)) * scale).to(compute)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(compute).view(1, G, H // G, 1).expand(B, -1, -1, -1)], 3)
    weights = scores.softmax(3)[..., : k.shape[2]].to(q.dtype)
    v = v.masked_fill(~visible.transpose(2, 3), 0.0)  # slots that were never written may hold NaN
    return (weights @ v).view(B, H, D)


@triton.jit
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, out_ptr, lse_ptr, table_b, q_b, q_h, window, scale, softcap,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the output and the log-sum over one part of a row's keys, for a tile of the GROUP heads of a KV head."""
    await_previous(OVERLAPS)
    part = tl.program_id(0)
    tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // tiles
    batch = tl.program_id(2).to(tl.int64)

    # The queries, [BLOCK_M, BLOCK_D].
    member = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_D)
    inside_q = (member < GROUP)[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + batch * q_b + head[:, None] * q_h + column[None, :], mask=inside_q, other=0.0)

    # The part's keys: an equal share of the steps of BLOCK_N keys that the row's token sees.
    length = tl.load(lengths_ptr + batch)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    lowest = first // BLOCK_N
    share = tl.cdiv(tl.cdiv(length, BLOCK_N) - lowest, PARTS)
    begin = (lowest + part * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, length)

    # The online softmax: unnormed output [BLOCK_M, BLOCK_D], and maximum and sum [BLOCK_M].
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        # Keys and values of a step, [BLOCK_N, BLOCK_D] each, which lie in one page.
        page = tl.load(table_ptr + batch * table_b + start // PAGE).to(tl.int64)
        key = start + tl.arange(0, BLOCK_N)
        slot = page * PAGE + start % PAGE + tl.arange(0, BLOCK_N)
        at = (slot * G + kv_head)[:, None] * D + column[None, :]
        inside = (key < end)[:, None] & (column < D)[None, :]
        k = tl.load(keys_ptr + at, mask=inside, other=0.0)
        v = tl.load(values_ptr + at, mask=inside, other=0.0)

        # Scores with the base 2, [BLOCK_M, BLOCK_N], and their share of the output.
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = scale_and_cap(scores, scale, softcap, HAS_SOFTCAP) * LOG2_E
        scores = tl.where(((key >= first) & (key < end))[None, :], scores, float("-inf"))
        total, most, weight = softmax_step(scores, v, total, most, weight, True, PRECISION)

    # A part without keys has the log-sum -inf, and no output.
    row = (batch * G * GROUP + head) * PARTS + part
    if begin < end:
        tl.store(out_ptr + row[:, None] * D + column[None, :], total / weight[:, None], mask=inside_q)
        most += tl.log2(weight)
    tl.store(lse_ptr + row, most, mask=member < GROUP)


@triton.jit
def _combine_kernel(
    parts_ptr, lse_ptr, sinks_ptr, out_ptr, H, D: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the weighted sum of the parts that have keys, for BLOCK_D columns of a head; ``lse`` is in base 2."""
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + row * PARTS + part)
    most = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + tl.program_id(0) % H).to(tl.float32) * LOG2_E
        most = tl.maximum(most, sink)
    most = tl.where(most == float("-inf"), 0.0, most)  # a row without tokens

    # The share of each part [PARTS], and the weighted sum of the parts [PARTS, BLOCK_D].
    share = tl.exp2(lse - most)
    weight = tl.sum(share, 0)
    if HAS_SINKS:
        weight += tl.exp2(sink - most)
    weight = tl.where(weight == 0.0, 1.0, weight)
    inside = (lse > float("-inf"))[:, None] & (column < D)[None, :]
    out = tl.load(parts_ptr + (row * PARTS + part)[:, None] * D + column[None, :], mask=inside, other=0.0)
    out = tl.sum(out * share[:, None], 0) / weight
    tl.store(out_ptr + row * D + column, out.to(out_ptr.dtype.element_ty), mask=column < D)


def _power_below(x: int) -> int:
    """The largest power of two that is at most x."""
    return 1 << (x.bit_length() - 1)


LIBRARY.define(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lengths, float scale, int? window,"
    " float? softcap, Tensor? sinks) -> Tensor"
)


@torch.library.impl(LIBRARY, "decode_attention", "CompositeExplicitAutograd")
def _decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    q, keys, values = contiguous_rows(q), keys.contiguous(), values.contiguous()
    table, lengths = contiguous_rows(table), lengths.contiguous()
    (B, H, D), (_, page, G, _) = q.shape, keys.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out

    # Query heads of a program, and keys of a step, which must not exceed a page.
    block_d = max(triton.next_power_of_2(D), 16)
    block_m = max(min(triton.next_power_of_2(H // G), MOST_QUERIES // block_d), LEAST_ROWS)
    block_n = min(max(_power_below(STEP_BYTES // (block_d * q.itemsize)), 16), page)
    tiles = G * triton.cdiv(H // G, block_m)

    # Parts of the keys: as many as keep the device busy. Lengths are on the device, so tables give the most keys.
    seen = table.shape[1] * page
    seen = seen if window is None else min(window + block_n, seen)
    room = _power_below(max(num_programs(q, PROGRAMS_PER_SM) // (B * tiles), 2))
    parts = max(min(room, triton.next_power_of_2(triton.cdiv(seen, block_n)), MOST_PARTS), 2)
    results = torch.empty(B, H, parts, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, parts, dtype=torch.float32, device=q.device)
    columns = min(block_d, COMBINED_COLUMNS)
    with on_device_of(q):
        _decode_kernel[(parts, tiles, B)](
            q, keys, values, table, lengths, results, lse, table.stride(0), *q.stride()[:2], window or 0, scale,
            softcap or 0.0, G=G, GROUP=H // G, D=D, PAGE=page, PARTS=parts, HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None, PRECISION=dot_precision(q), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_D=block_d, **overlap(q), num_warps=4,
            num_stages=fitting_stages(q, STAGES, 2 * block_n * block_d * q.itemsize),
        )  # fmt: skip
        _combine_kernel[(B * H, triton.cdiv(D, columns))](
            results, lse, lse if sinks is None else sinks.contiguous(), out, H,
            D=D, PARTS=parts, HAS_SINKS=sinks is not None, BLOCK_D=columns, **overlap(q),
        )  # fmt: skip
    return out


@torch.library.register_fake("liger_models::decode_attention", lib=LIBRARY)
def _decode_attention_fake(q, keys, values, table, lengths, scale, window, softcap, sinks):
    return q.new_empty(q.shape)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token of each row to the tokens of this row in a paged cache, itself included.

    Args:
        q: [B, H, D], float32, float16 or bfloat16, D at most 512.
        keys, values: [pages, P, G, D] in the dtype of q, P a power of two of at least 16; H is a multiple of G.
        table: [B, N] int32, the pages of each row in the order of its tokens. Entries after the last token may name any
            page. N · P determines the number of programs.
        lengths: [B] int32, number of tokens of each row, 0 to N · P; the result of a row without tokens is undefined.
        scale: factor of q·k.
        window: number of tokens that a token sees, itself included; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        sinks: [H], one extra score per head, which has no key and takes its share of the softmax; None for none.

    Returns:
        [B, H, D] in the dtype of q, without a backward.

    Raises:
        ValueError: shapes do not match, heads are wider than 512, or the window is below 1.
        TypeError: the tensors are not floating-point or differ in dtype, or table and lengths are not int32.
    """
    op = "decode_attention"
    check_floating(op, q=q, keys=keys, values=values, sinks=sinks)
    if not q.dtype == keys.dtype == values.dtype:
        raise TypeError(f"{op}: q, keys and values must have one dtype, got {q.dtype}, {keys.dtype}, {values.dtype}.")
    if not table.dtype == lengths.dtype == torch.int32:
        raise TypeError(f"{op}: table and lengths must be int32, got {table.dtype} and {lengths.dtype}.")
    fits = q.dim() == 3 and keys.dim() == 4 and keys.shape == values.shape and q.shape[2] == keys.shape[3]
    if not (fits and keys.shape[2] > 0 and q.shape[1] % keys.shape[2] == 0):
        raise ValueError(
            f"{op}: q must be [B, H, D], keys and values [pages, P, G, D] with H a multiple of G, got "
            f"{list(q.shape)}, {list(keys.shape)} and {list(values.shape)}."
        )
    B, H, D = q.shape
    page = keys.shape[1]
    check_heads(op, H, D, window, sinks, "Decode without pages.")
    if not (page >= 16 and page & (page - 1) == 0):
        raise ValueError(f"{op}: a page must have a power of two of tokens, at least 16, got {page}. Make other pages.")
    if not (table.dim() == 2 and table.shape[0] == B and lengths.shape == (B,)):
        raise ValueError(
            f"{op}: table must be [{B}, N] and lengths [{B}], got {list(table.shape)} and {list(lengths.shape)}."
        )
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if not use_triton(q):
        return decode_attention_reference(q, keys, values, table, lengths, **options)  # type: ignore[arg-type]
    out: Tensor = torch.ops.liger_models.decode_attention(q, keys, values, table, lengths, **options)
    return out
