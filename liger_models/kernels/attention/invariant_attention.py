"""Batch-invariant causal attention: a token's result is bitwise identical in training, prefill and decoding.

Token i sees the keys from first_i to last_i, where first_i is the start of the token's document, and last_i is the
token's own position. With a window, the first of these keys is max(first_i, last_i − window + 1). The score of key j is
s_j = scale · q · k_j or, with a softcap c, s_j = c · tanh(scale · q · k_j / c). z is the head's sink, an additional
score without a key; without sinks, exp(z) = 0. All sums are in fp32::

    lse = log(Σ_j exp(s_j) + exp(z))
    o   = Σ_j exp(s_j − lse) · v_j

The keys of a document are read in blocks, and the first block starts with the document's first token. Each program
computes the results of a few tokens, for a group of heads that share keys. The program reads all blocks with keys that
these tokens see, one block after the other. If the tokens belong to several documents, the program reads the blocks of
each document. If a block contains a key that a token does not see, the token's sums are multiplied by 1 and increased
by 0 for this key, so they do not change. The result therefore does not depend on the other tokens of the program, or on
whether the keys are contiguous or in pages. All matrix products have the same number of rows. With a different number
of rows, the compiler might choose other instructions, which might add in a different order.

There is no backward. `layers.attention_backends` runs the backward of ordinary attention.

Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2309.06180,
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.attention.heads import LOG2_E, check_heads, softmax_step
from liger_models.kernels.dispatch import fitting_stages, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv, contiguous_rows, dot_precision, dot_tile, next_power_of_2, scale_and_cap


class Tile(NamedTuple):
    """Sizes of the matrix products of a program, and launch options of the program.

    Attributes:
        rows: number of rows, which is the number of tokens times the number of heads.
        keys: number of keys.
        warps: number of warps.
        stages: number of pipeline stages.
    """

    rows: int
    keys: int
    warps: int
    stages: int


TILES = {2: (Tile(64, 64, 4, 3), Tile(64, 32, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(16, 16, 4, 2))}
"""Maps the size of an element in bytes to two tiles: the first for head dimensions up to 128, the second for larger
ones. The tile must not depend on anything else, so that a token's result does not depend on the other tokens."""

NOWHERE = tl.constexpr(2147483647)


def invariant_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Compute `invariant_attention` in plain PyTorch, token by token. If the inputs are fp64, so are all computations.

    For each token, the function copies the keys and values that the token sees.
    """
    (N, H, D), G, V = q.shape, k.shape[-2], v.shape[-1]
    compute = torch.promote_types(q.dtype, torch.float32)
    column = None if sinks is None else sinks.to(compute).view(G, H // G, 1)
    keys, values = k.reshape(-1, G, D), v.reshape(-1, G, V)
    out = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    for n, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        index = torch.arange(start if window is None else max(start, end - window + 1), end + 1, device=q.device)
        if table is not None:
            index = table[n, index // k.shape[1]].long() * k.shape[1] + index % k.shape[1]
        rows = q[n].reshape(G, -1, D).clone()
        token_keys, token_values = (x[index].transpose(0, 1) for x in (keys, values))  # [G, keys, D or V]
        scores = (rows @ token_keys.transpose(1, 2).contiguous()).to(compute) * scale  # [G, H / G, keys]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores if column is None else torch.cat([scores, column], 2)
        out[n] = (scores.softmax(2)[..., : len(index)].to(q.dtype) @ token_values.contiguous()).view(H, V)
    return out


@triton.jit(do_not_specialize=["N"])
def _invariant_attention_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, table_ptr, sinks_ptr, out_ptr, N, q_n, q_h, k_n, k_g, v_n, v_g, table_n,
    window, scale, softcap, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program computes the outputs of HEADS query heads of one KV head for TOKENS tokens.

    Each matrix product has TOKENS · HEADS rows, one for each pair of a token and a head.
    """
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // parts

    # Find the token and the head of each row, and load the queries [BLOCK_M, BLOCK_D].
    row = tl.arange(0, BLOCK_M)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    member = tl.program_id(1) % parts * HEADS + row % HEADS
    head = kv_head * GROUP + member
    inside = (row < TOKENS * HEADS) & (token < N) & (member < GROUP)
    column = tl.arange(0, BLOCK_D)
    inside_q = inside[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_n + head[:, None] * q_h + column[None, :], mask=inside_q, other=0.0)

    # Each row sees the keys from ``lowest`` to ``last``, [BLOCK_M] each.
    first = tl.load(first_ptr + token, mask=inside, other=NOWHERE)
    last = tl.load(last_ptr + token, mask=inside, other=-1)
    lowest = first
    if HAS_WINDOW:
        lowest = tl.maximum(first, last - window + 1)

    # The state of the online softmax is the unnormalized output [BLOCK_M, BLOCK_V], the maximum [BLOCK_M] and the
    # sum [BLOCK_M].
    value_column = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)

    # The documents are processed one after the other. Steps begin at multiples of BLOCK_N from the first key of the
    # document, so the division of a token's keys into steps does not depend on the other tokens.
    document = tl.min(first, 0)
    while document < NOWHERE:
        in_document = first == document
        begin = tl.min(tl.where(in_document, lowest, NOWHERE), 0)
        begin = document + (begin - document) // BLOCK_N * BLOCK_N
        end = tl.max(tl.where(in_document, last, -1), 0) + 1
        for start in range(begin, end, BLOCK_N):
            # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_V], from contiguous tensors or from pages.
            key = start + tl.arange(0, BLOCK_N)
            if PAGE == 0:
                slot = key.to(tl.int64)
            else:
                page = tl.load(table_ptr + tl.program_id(0) * table_n + key // PAGE, mask=key < end, other=0)
                slot = page.to(tl.int64) * PAGE + key % PAGE
            exists = (key < end)[:, None]
            k = k_ptr + slot[:, None] * k_n + kv_head * k_g + column[None, :]
            k = tl.load(k, mask=exists & (column < D)[None, :], other=0.0)
            v = v_ptr + slot[:, None] * v_n + kv_head * v_g + value_column[None, :]
            v = tl.load(v, mask=exists & (value_column < V)[None, :], other=0.0)

            # Compute the scores, multiplied by log2 e, [BLOCK_M, BLOCK_N], and add these keys to the online softmax.
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = scale_and_cap(scores, scale, softcap, HAS_SOFTCAP) * LOG2_E
            seen = in_document[:, None] & (key[None, :] >= lowest[:, None]) & (key[None, :] <= last[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            total, most, weight = softmax_step(scores, v, total, most, weight, False, PRECISION)
        document = tl.min(tl.where(first > document, first, NOWHERE), 0)

    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        larger = tl.maximum(most, sink)
        shrink = tl.exp2(most - larger)
        weight = weight * shrink + tl.exp2(sink - larger)
        total *= shrink[:, None]
    total /= tl.where(weight == 0.0, 1.0, weight)[:, None]
    out = out_ptr + (token[:, None] * (G * GROUP) + head[:, None]) * V + value_column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (value_column < V)[None, :])


def _invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, table: Tensor | None,
) -> Tensor:  # fmt: skip
    q, first, last = contiguous_rows(q), first.contiguous(), last.contiguous()
    k, v = (contiguous_rows(x) if table is None else x.contiguous() for x in (k, v))
    (N, H, D), G, V = q.shape, k.shape[-2], v.shape[-1]
    out = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    # The query heads of a KV head share its keys, so a tile has several heads of each token. With pages, a tile has
    # only one token, because different rows have different pages.
    tile = TILES[q.itemsize][max(D, V) > 128]
    heads = min(next_power_of_2(H // G), tile.rows)
    tokens = tile.rows // heads if table is None else 1
    block_d, block_v = (dot_tile(width) for width in (D, V))
    if out.numel():
        with on_device_of(q):
            _invariant_attention_kernel[(cdiv(N, tokens), G * cdiv(H // G, heads))](
                q, k, v, first, last, first if table is None else contiguous_rows(table),
                # Arguments that the kernel does not use must also be tensors, and are set to ``q`` or ``first``.
                q if sinks is None else sinks.contiguous(), out, N, *q.stride()[:2], k.stride(-3), k.stride(-2),
                v.stride(-3), v.stride(-2), 0 if table is None else table.stride(0), window or 0, scale, softcap or 0.0,
                G=G, GROUP=H // G, D=D, V=V, PAGE=0 if table is None else k.shape[1], TOKENS=tokens, HEADS=heads,
                HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
                PRECISION=dot_precision(q), BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=block_d, BLOCK_V=block_v,
                num_warps=tile.warps,
                num_stages=fitting_stages(q, tile.stages, tile.keys * (block_d + block_v) * q.itemsize),
            )  # fmt: skip
    return out


FORWARD = define_op(
    "invariant_attention", _invariant_attention, lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1])
)


def invariant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Compute batch-invariant causal attention.

    A token's result depends, bit for bit, only on its query and on the keys and values that it sees. The op has no
    backward.

    Args:
        q: [N, H, D], float32, float16 or bfloat16, where D is at most 576.
        k, v: [S, G, D] and [S, G, V] in the dtype of q, where H is a multiple of G, and V is at most 576. With
            ``table``, k and v are pages [pages, P, G, D] and [pages, P, G, V], and a token's keys are numbered in the
            order of the pages that ``table`` lists for the token.
        first: [N] int32, index of the first key of each token's document.
        last: [N] int32, index of the last key that each token sees, which is the token's own key; at least ``first``.
        scale: number by which q·k is multiplied.
        window: number of tokens that a token sees, including itself; None for all tokens.
        softcap: if given, scores become ``softcap · tanh(score / softcap)``.
        sinks: [H], an additional score in the softmax of each head, without a key or a value; None for no sinks.
        table: [N, M] int32, the indices of the pages that hold each token's keys, in the order of the keys; None if the
            keys are not in pages.

    Returns:
        [N, H, V] in the dtype of q.

    Raises:
        ValueError: shapes do not match, heads are wider than 576, or the window is below 1.
        TypeError: the tensors are not floating-point or differ in dtype, or first, last and table are not int32.
    """
    op = "invariant_attention"
    check_floating(op, q=q, k=k, v=v, sinks=sinks)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}. Cast them.")
    if not first.dtype == last.dtype == (first if table is None else table).dtype == torch.int32:
        raise TypeError(f"{op}: first, last and table must be int32, got {first.dtype} and {last.dtype}. Cast them.")
    fits = q.dim() == 3 and k.dim() == v.dim() == (3 if table is None else 4) and k.shape[:-1] == v.shape[:-1]
    if not (fits and q.shape[2] == k.shape[-1] and k.shape[-2] > 0 and q.shape[1] % k.shape[-2] == 0):
        raise ValueError(
            f"{op}: q must be [N, H, D], k [S, G, D] and v [S, G, V], or [pages, P, G, D] and [pages, P, G, V] with a "
            f"table, with H a multiple of G, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    N, H, D = q.shape
    check_heads(op, H, max(D, v.shape[-1]), window, sinks, "Use ordinary attention.")
    if not (first.shape == last.shape == (N,) and (table is None or (table.dim() == 2 and len(table) == N))):
        raise ValueError(
            f"{op}: first and last must be [{N}] and table [{N}, M], got {list(first.shape)}, {list(last.shape)} and "
            f"{None if table is None else list(table.shape)}."
        )
    if not use_triton(q):
        return invariant_attention_reference(
            q, k, v, first, last, scale=scale, window=window, softcap=softcap, sinks=sinks, table=table
        )
    return FORWARD(q, k, v, first, last, scale, window, softcap, sinks, table)
