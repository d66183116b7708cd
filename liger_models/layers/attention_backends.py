"""`attention` and its backends, which two tables list. The first backend that supports a call computes the result."""

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_models.kernels.attention.causal_attention import causal_attention
from liger_models.kernels.attention.copy_keys import copy_keys
from liger_models.kernels.attention.decode_attention import decode_attention
from liger_models.kernels.attention.heads import MOST_HEAD_DIM
from liger_models.kernels.attention.invariant_attention import invariant_attention
from liger_models.kernels.attention.sink_attention import is_fused, sink_attention
from liger_models.kernels.dispatch import ACCELERATORS, TRITON_DTYPES
from liger_models.kernels.linear_attention.documents import flat
from liger_models.kernels.matmul.batch_invariance import batch_invariant, is_batch_invariant
from liger_models.layers.batch import BatchLayout
from liger_models.layers.masks import MOST_FLASH_DIM, VARLEN_OPTIONS, Mask, Segments, takes_flash, takes_segments
from liger_models.layers.recompute import repeats

CAUSAL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,  # about a quarter faster than flash attention on an H200 for D = 128 and S = 8192
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""SDPA's backends for attention with a mask, except cuDNN, whose gradient of q may be NaN (pytorch#196678)."""

CUDNN_STEP = 128
"""cuDNN is used only for lengths that are multiples of this number. For every new length, cuDNN builds a plan, which
takes 0.13 s on an H200, so a job with many different lengths would wait for plans all the time.
"""

LEAST_CALL = 1024
"""If cuDNN calls cover at least this many tokens on average, one call for each run of segments is faster than one
kernel for all segments."""

MOST_SCORES = 2**28
"""Maximum number of bytes that the scores of unfused attention in fp32 may take. Unfused attention is used within
segments and for query heads that share keys and values. Unfused attention is PyTorch's most accurate implementation:
query gradients from the fused kernel have five times its error. (On GPUs, only flash attention and cuDNN support shared
keys and values, and both need half precision.) If the scores take more bytes, shared keys and values are repeated for
each head, and a fused kernel runs.
"""

MOST_QUERIES, MOST_RECOMPUTED = 2**31, 2**29
"""Limits for the number of elements of the queries. Above the limit, attention is computed for a part of the heads at a
time. `MOST_RECOMPUTED` applies in a block that is recomputed, and `MOST_QUERIES` applies everywhere else. The backward
of a fused kernel allocates up to four times as many bytes as the queries take up: for sums of dq in fp32 and, if query
heads share keys, for dk and dv of every query head. `MOST_QUERIES` is higher, because a block that is not recomputed
would save the results of the heads twice if the heads were computed in parts.
"""


NO_MASK = Mask()
"""The mask of an `AttentionCall` that has no mask yet. This object is not the default value of the field ``mask``,
because PyTorch 2.11 can't compile calls of a class with such a default.
"""


@dataclass(eq=False)
class AttentionCall:
    """The arguments of one call of `attention`, and its mask.

    Attributes:
        q: [B, T, H, D].
        k, v: [B, S, G, D] and [B, S, G, V]; with ``layout.pages``, the pages [pages, P, G, D] and [pages, P, G, V],
            which may be `ScaledPages`.
        layout, scale, window, softcap, dropout, sinks: as in `attention`.
        mask: the mask for ``window``, in a form that suits the call. The mask is empty for backends of `WITHOUT_MASK`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BatchLayout
    scale: float
    window: int | None
    softcap: float | None
    dropout: float
    sinks: Tensor | None
    mask: Mask

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with the dimension of heads before the dimension of tokens: [B, H, T, D], [B, G, S, D] and [B, G,
        S, V]."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    @property
    def grouped_query(self) -> Tensor:
        """The queries of a batch with one token per row, grouped by KV head: [B, G, H / G, D]."""
        B, _, H, D = self.q.shape
        G = self.k.shape[2]
        return self.q.transpose(1, 2).reshape(B, G, H // G, D)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result, [B, T, H, V]."""
        return (*self.q.shape[:3], self.v.shape[3])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention within documents and within a window. Attention is causal unless the layout says otherwise.

    The backends of `WITHOUT_MASK` are tried first, then the backends of `WITH_MASK`. The first backend that supports
    the call computes the result. On an accelerator, a T × T mask is never materialized, and scores are materialized
    only up to a size of `MOST_SCORES`.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D] and [B, S, G, V], where S is the number of cached tokens plus T, and H is a multiple of G.
            With ``layout.pages``, k and v are pages [pages, P, G, D] and [pages, P, G, V], or `ScaledPages`. v may be a
            view of the first V columns of k.
        layout: the layout of the batch, with a mask for ``window``.
        scale: multiplier of q·k.
        window: number of tokens that a token attends to, including itself; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight.
        sinks: [H], one extra score per head, which enters the softmax but has no key; None for no sinks.

    Returns:
        [B, T, H, V].

    Raises:
        ValueError: ``dropout`` is positive, but the kernel for this batch does not support dropout; or attention within
            `batch_invariant` is not causal.
    """
    call = AttentionCall(q, k, v, layout, scale, window, softcap, dropout, sinks, NO_MASK)
    for takes, compute in WITHOUT_MASK:
        if takes(call):
            return compute(call)

    # Without a fused kernel, attention with sinks needs an explicit mask even if each token attends to all earlier
    # tokens.
    unfused = q.device.type in ACCELERATORS and not is_fused(q)
    call.mask = mask = layout.mask(window, q, explicit=sinks is not None and (unfused or dropout > 0))
    if dropout != 0.0 and (mask.block is not None or mask.segments is not None):
        raise ValueError(
            "attention: dropout must be 0 with packed or padded batches, windows, softcaps and sinks on "
            f"{q.device.type}, got {dropout}. Set attention_dropout=0."
        )
    reach = layout.chunk or window
    if q.shape[1] == 1 and reach is not None and mask.segments is None:
        # A single query attends to the end of the cache: to the tokens in its window, or in its chunk.
        call.k, call.v = k[:, -reach:], v[:, -reach:]
        if mask.dense is not None:
            call.mask = replace(mask, dense=mask.dense[..., -reach:])
    for takes, compute in WITH_MASK:
        if takes(call):
            return compute(call)
    return _plain(call)


# Backends that need no mask


def _invariant(call: AttentionCall) -> Tensor:
    mask = call.layout.masks.get(call.window)
    causal = call.layout.spans is not None and call.layout.causal and not (mask is not None and mask.later)
    if not causal or call.dropout != 0.0:
        raise ValueError(
            f"attention: images and dropout can't be combined with deterministic_forward, got dropout {call.dropout} "
            f"and {'causal' if causal else 'bidirectional'} attention. Leave them out."
        )
    options = {"scale": call.scale, "window": call.window, "softcap": call.softcap}
    y: Tensor = _InvariantAttention.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, call.sinks, call.layout, options
    )
    return y


class _InvariantAttention(torch.autograd.Function):
    """Runs `invariant_attention` in the forward.

    The backward runs ordinary attention, and returns the gradients of ordinary attention.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: BatchLayout, options: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.layout, ctx.options = layout, options
        assert layout.spans is not None
        if layout.pages is None:
            k, v, table = flat(k), flat(v), None
        else:
            table = layout.pages.table
        out = invariant_attention(flat(q), k, v, *layout.spans, sinks=sinks, table=table, **options)
        return out.view(*q.shape[:3], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:4]
        inputs: list[Any] = [
            None if x is None else x.detach().requires_grad_(needs_grad)
            for x, needs_grad in zip(ctx.saved_tensors, needed, strict=True)
        ]
        q, k, v, sinks = inputs
        # The detached inputs start a separate graph. The op returns this graph's gradients as its own.
        with batch_invariant(False), torch.enable_grad():
            y = attention(q, k, v, ctx.layout, sinks=sinks, **ctx.options)
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(y, leaves, dy))
        return *(next(grads) if needs_grad else None for needs_grad in needed), None, None


def _paged(call: AttentionCall) -> Tensor:
    options = {"scale": call.scale, "window": call.window, "softcap": call.softcap, "sinks": call.sinks}
    options["chunk"] = call.layout.chunk
    assert call.layout.pages is not None
    y = decode_attention(call.q[:, 0], call.k, call.v, *call.layout.pages, **options)  # type: ignore[arg-type]
    return y[:, None]  # [B, 1, H, D]


def _counted(call: AttentionCall) -> Tensor:
    """Compute nothing, but save the tensors that the kernel for this call would save (for memory estimates)."""
    heads, V = [call.q, call.k, call.v], call.v.shape[3]
    if _pads_values(call):
        heads = [*_of_one_width(call.q, call.k, call.v)]
    # Flash attention saves heads padded to a multiple of 8, so the estimate counts them padded.
    if call.sinks is None and takes_flash(call.q.dtype, call.q.shape[3]):
        heads = [_padded(x, x.shape[3] + -x.shape[3] % 8) for x in heads]
    y: Tensor = _CountedAttention.apply(*heads)  # type: ignore[no-untyped-call]
    return y if y.shape[3] == V else y[..., :V]


def _pads_values(call: AttentionCall) -> bool:
    """Whether attention pads values to the width of the keys.

    Values that are narrower than the keys are always padded on the CPU and in attention with sinks. In other calls,
    they are padded only in half precision, and only if cuDNN does not compute the call; see `_takes_narrow_values`.
    cuDNN computes only calls without documents, whose length is a multiple of `CUDNN_STEP`.
    """
    q = call.q
    if q.shape[3] == call.v.shape[3]:
        return False
    if q.device.type not in ACCELERATORS or call.sinks is not None:
        return True
    return takes_flash(q.dtype, q.shape[3]) and (call.layout.documents is not None or q.shape[1] % CUDNN_STEP != 0)


class _CountedAttention(torch.autograd.Function):
    """Saves the tensors that a fused kernel saves, but computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        raise RuntimeError("attention: a counted mask has no backward.")


def _has_wide_heads(call: AttentionCall) -> bool:
    """Whether `causal_attention`, which supports wider heads than flash attention, supports the call."""
    q = call.q
    if not MOST_FLASH_DIM < q.shape[3] <= MOST_HEAD_DIM:
        return False
    on_triton = q.device.type in ACCELERATORS and q.dtype in TRITON_DTYPES
    modified = call.softcap is not None or call.sinks is not None or call.dropout != 0.0
    causal = call.layout.causal and not call.layout.masks[call.window].later and call.layout.parents is None
    return on_triton and q.shape[1] > 1 and not modified and causal


def _wide(call: AttentionCall) -> Tensor:
    return causal_attention(call.q, call.k, call.v, call.layout.documents, scale=call.scale, window=call.window)


# Backends that need the mask


def _sinks_in_segments(call: AttentionCall) -> Tensor:
    segments = call.mask.segments
    assert segments is not None
    assert call.sinks is not None
    y = sink_attention(
        *_of_one_width(call.q, call.k, call.v), call.sinks, scale=call.scale, window=call.window,
        cu_seqlens=segments.cu_seqlens, max_seqlen=segments.max_seqlen,
    )  # fmt: skip
    return y[..., : call.v.shape[3]]


def _has_causal_sinks(call: AttentionCall) -> bool:
    return call.sinks is not None and call.q.shape[1] > 1 and call.mask.block is None and call.mask.dense is None


def _causal_sinks(call: AttentionCall) -> Tensor:
    assert call.sinks is not None
    y = sink_attention(*_of_one_width(call.q, call.k, call.v), call.sinks, scale=call.scale)
    return y[..., : call.v.shape[3]]


def _segments(call: AttentionCall) -> Tensor:
    """Compute attention within segments: in a single kernel call, in one call for each run of segments of equal length,
    or with a mask.

    A compiled graph must work for all lengths, so it does not read the lengths of the segments. If no kernel
    supports segments, the graph uses a mask.
    """
    segments = call.mask.segments
    assert segments is not None
    key_segments = segments.keys or segments
    # [queries, H, D], [keys, G, D] and [keys, G, V]
    q, k, v = _sorted(call.q, segments), _sorted(call.k, key_segments), _sorted(call.v, key_segments)

    # Consecutive segments with equal numbers of queries and keys form a run. If the lengths are unknown, there are
    # no runs.
    takes_varlen = takes_segments(q.device, q.dtype, q.shape[2])
    compiling = torch.compiler.is_compiling()
    lengths = [] if compiling else [*zip(segments.lengths or [], key_segments.lengths or [], strict=True)]
    runs = [(length, len([*run])) for length, run in itertools.groupby(lengths)]

    # Long runs are faster on cuDNN, with one call per run.
    if takes_varlen and not 0 < len(runs) * LEAST_CALL <= len(q):
        y = _varlen(call, q, k, v, segments, key_segments)
    elif compiling:
        y = _by_mask(call, q, k, v, segments, key_segments)
    else:
        y = _by_run(call, q, k, v, runs, recurring=segments.recurring)
    if segments.at is not None:  # back to the order of the batch
        y = torch.empty_like(y).index_copy(0, segments.at, y)
    return y.view(call.result_shape)


def _continued(call: AttentionCall) -> Tensor:
    """Compute attention within documents and to the documents that they continue."""
    segments, copies = call.mask.segments, call.mask.copies
    assert segments is not None
    assert copies is not None
    options: dict[str, Any] = {"tokens": copies.tokens, "copy_bounds": copies.segments.cu_seqlens}
    options |= {"cu_seqlens": segments.cu_seqlens, "max_seqlen": segments.max_seqlen, "copies": copies.counts}
    k, v = (copy_keys(x.flatten(0, 1), **options) for x in (call.k, call.v))
    # A document has fewer queries than keys. Variable-length attention takes the queries as the last tokens.
    return _varlen(call, call.q.flatten(0, 1), k, v, segments, copies.segments).view(call.result_shape)


def _sorted(x: Tensor, segments: Segments) -> Tensor:
    """Sort the tokens of x [B, T, heads, D] by segment; the result is [tokens, heads, D]."""
    x = x.flatten(0, 1)
    return x if segments.at is None else x.index_select(0, segments.at)


def _varlen(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, segments: Segments, key_segments: Segments) -> Tensor:
    """Compute all segments in one call of PyTorch's variable-length attention."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, -1)
    if call.layout.causal:
        window = (-1 if call.window is None else call.window - 1, 0)
    options: dict[str, Any] = {"scale": call.scale, "window_size": window}
    if "enable_gqa" in VARLEN_OPTIONS:  # versions without the option always allow it
        options["enable_gqa"] = call.q.shape[2] != call.k.shape[2]
    bounds = segments.cu_seqlens, key_segments.cu_seqlens, segments.max_seqlen, key_segments.max_seqlen
    # Flash attention needs queries, keys and values of one width, which must be a multiple of 8.
    q, k, v = _of_one_width(q, k, v, step=8)
    y: Any = varlen_attn(q, k, v, *bounds, **options)
    narrow: Tensor = y[..., : call.v.shape[3]]
    return narrow


def _by_run(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[tuple[int, int], int]], *, recurring: bool
) -> Tensor:
    """Call SDPA once for each run of consecutive segments of equal length.

    Args:
        call: the call.
        q, k, v: [queries, H, D], [keys, G, D] and [keys, G, V], sorted by segment.
        runs: for each run, ``((queries, keys), segments)``: the numbers of queries and keys in each segment of the run,
            and the number of segments.
        recurring: as in `Segments`. If it is True, cuDNN may run for any length, because the execution plan that cuDNN
            makes for each length is reused.
    """
    run_queries = [queries * count for (queries, _), count in runs]
    run_keys = [keys * count for (_, keys), count in runs]
    results = []
    tokens = q.split(run_queries), k.split(run_keys), v.split(run_keys)
    for ((queries, keys), _), *run in zip(runs, *tokens, strict=True):
        # [segments, H, queries, D], [segments, G, keys, D] and [segments, G, keys, V]
        run_q, run_k, run_v = (
            x.unflatten(0, (-1, length)).transpose(1, 2) for x, length in zip(run, (queries, keys, keys), strict=True)
        )
        if q.dtype == torch.float32 and q.device.type in ACCELERATORS and _few_scores(run_q, run_k):
            y = attention_reference(run_q, run_k, run_v, None, call.scale, None, 0.0)
        else:
            with _unmasked(q, 0 if recurring else math.gcd(queries, keys)):  # `CUDNN_STEP` must divide both
                y = _sdpa(run_q, run_k, run_v, scale=call.scale, is_causal=call.layout.causal)
        results.append(y.transpose(1, 2).flatten(0, 1))  # [run's queries, H, V]
    return torch.cat(results)


def _by_mask(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, segments: Segments, key_segments: Segments
) -> Tensor:
    """Call SDPA once, with a mask for all pairs of a query and a key. The inputs q, k and v are as in `_by_run`."""
    query, key = (torch.arange(len(x), device=x.device, dtype=torch.int32) for x in (q, k))
    # `number_documents` is not used: its graph for a single segment does not work for other numbers of segments.
    of_query = torch.searchsorted(segments.cu_seqlens, query, right=True)
    of_key = torch.searchsorted(key_segments.cu_seqlens, key, right=True)
    visible = of_query[:, None] == of_key
    if call.layout.causal:
        visible = visible & (query[:, None] >= key)
    y = _sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=visible, scale=call.scale)
    return y[0].transpose(0, 1)  # [queries, H, V]


def _padded(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension of x with zeros to ``width``."""
    padding = width - x.shape[-1]
    return F.pad(x, (0, padding)) if padding else x


def _of_one_width(q: Tensor, k: Tensor, v: Tensor, step: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k [..., D] and v [..., V] with zeros to the larger of D and V, rounded up to a multiple of ``step``."""
    width = max(q.shape[-1], v.shape[-1])
    width += -width % step
    return _padded(q, width), _padded(k, width), _padded(v, width)


def _flex(call: AttentionCall) -> Tensor:
    from liger_models.layers.flex import flex_by_blocks  # imports torch's compiler, which takes a second

    assert call.mask.block is not None
    y: Tensor = flex_by_blocks(*call.heads_first, call.mask.block, call.scale, call.softcap, call.sinks)
    return y.transpose(1, 2)


def _single_query_with_sinks(call: AttentionCall) -> Tensor:
    _, k, v = call.heads_first
    rows = call.grouped_query  # [B, G, H / G, D]
    assert call.sinks is not None
    sinks = call.sinks.view(rows.shape[1:3])
    y = attention_reference(rows, k, v, call.mask.dense, call.scale, call.softcap, call.dropout, sinks)
    return y.reshape(call.result_shape)


def _unfused(call: AttentionCall) -> Tensor:
    sinks = None if call.sinks is None else call.sinks[:, None]
    y = attention_reference(*call.heads_first, call.mask.dense, call.scale, call.softcap, call.dropout, sinks)
    return y.transpose(1, 2)


def _single_query(call: AttentionCall) -> Tensor:
    _, k, v = call.heads_first
    with _sdpa_order(MASKED, call.q):
        y = F.scaled_dot_product_attention(call.grouped_query, k, v, attn_mask=call.mask.dense, scale=call.scale)
    return y.reshape(call.result_shape)


def _plain(call: AttentionCall) -> Tensor:
    dense = call.mask.dense
    causal = dense is None and call.layout.causal
    with _unmasked(call.q, call.q.shape[1]):
        return _sdpa_by_heads(
            call.q, call.k, call.v, attn_mask=dense, dropout_p=call.dropout, is_causal=causal, scale=call.scale
        )


Backend = tuple[Callable[[AttentionCall], bool], Callable[[AttentionCall], Tensor]]

WITHOUT_MASK: tuple[Backend, ...] = (
    # This entry is first, because no other kernel sums in an order that is independent of the batch.
    (lambda call: is_batch_invariant(), _invariant),
    # Keys and values are pages, which no backend below can read.
    (lambda call: call.layout.pages is not None, _paged),
    # A memory estimate runs on tensors without values. The backends below cannot build a mask from such tensors.
    (lambda call: call.layout.masks[call.window].counted, _counted),
    # Flash attention does not support such wide heads. Without this entry, flex_attention would run, which is slower.
    (_has_wide_heads, _wide),
)
"""Backends that need no mask. The first function of each pair returns whether the backend supports a call, and the
second one computes the call."""

WITH_MASK: tuple[Backend, ...] = (
    # Sinks have another form of the mask if documents continue others.
    (lambda call: call.mask.copies is not None, _continued),
    # Backends that support sinks come first, because the other backends for the same masks would ignore the sinks.
    (lambda call: call.sinks is not None and call.mask.segments is not None, _sinks_in_segments),
    (_has_causal_sinks, _causal_sinks),
    # The form of the mask determines the backend: segments for variable-length attention, blocks for flex_attention;
    # dense masks and no mask are left to the entries below.
    (lambda call: call.mask.segments is not None, _segments),
    (lambda call: call.mask.block is not None, _flex),
    # With one query per head, the query heads of a group become rows that share the group's keys. No key is repeated.
    (lambda call: call.sinks is not None and call.q.shape[1] == 1, _single_query_with_sinks),
    # SDPA supports neither softcaps nor sinks. This entry comes before `_single_query`, which is also SDPA.
    (lambda call: call.softcap is not None or call.sinks is not None, _unfused),
    (lambda call: call.q.shape[1] == 1 and call.layout.cache is not None, _single_query),
)
"""Backends that read the mask, as pairs of functions like the pairs in `WITHOUT_MASK`. `_plain`, which calls SDPA,
computes all calls that no backend of the two tables supports."""


# SDPA and the unfused form


def _few_scores(q: Tensor, k: Tensor) -> bool:
    """Whether the scores of q [B, H, T, D] and k [B, G, S, D] take at most `MOST_SCORES` bytes."""
    return math.prod(q.shape[:3]) * k.shape[2] * q.itemsize <= MOST_SCORES


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run PyTorch's SDPA on q and k [B, heads, T, D] and v [B, heads, T, V].

    If k and v have fewer heads than q, several query heads share a head of k and v.
    """
    V = v.shape[3]
    if q.shape[3] != V and not _takes_narrow_values(q, k, v, options):
        q, k, v = _of_one_width(q, k, v)
    # If keys and values are shared and flash attention can't run, SDPA materializes the scores; see `MOST_SCORES`.
    shared = q.shape[1] != k.shape[1]
    unfused = shared and q.device.type in ACCELERATORS and not takes_flash(q.dtype, q.shape[3])
    if unfused and not _few_scores(q, k):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        shared = False
    if shared:  # not enable_gqa=shared, which is not a bool in a graph with symbolic numbers of heads
        options["enable_gqa"] = True
    y: Tensor = F.scaled_dot_product_attention(q, k, v, **options)
    return y if y.shape[3] == V else y[..., :V]


def _takes_narrow_values(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether SDPA's fastest kernel for q and k supports values of a different width.

    In half precision, flash attention requires equal widths, and cuDNN's kernel supports only some widths and only in
    some versions. Another kernel supports all widths. It is slower than padding the values to the width of the keys and
    running flash attention. On the CPU, only unfused attention supports values of another width.
    """
    if q.device.type not in ACCELERATORS:
        return False
    if not takes_flash(q.dtype, q.shape[3]):
        return True
    if torch.compiler.is_compiling() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    dropout, causal, shared = options.get("dropout_p", 0.0), options.get("is_causal", False), q.shape[1] != k.shape[1]
    arguments = q, k, v, None, dropout, causal, shared
    return bool(torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*arguments)))


def _sdpa_by_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run `_sdpa` on q, k, v [B, T, heads, D]. If the queries have too many elements, run `_sdpa` for a part of the
    heads at a time; see `MOST_QUERIES`."""
    most = MOST_QUERIES if repeats() is None else MOST_RECOMPUTED
    if torch.compiler.is_compiling() or q.numel() <= most:
        return _sdpa(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    G, calls = k.shape[2], -(-q.numel() // most)
    kv_heads = -(-G // calls)  # KV heads per call
    heads = zip(q.split(q.shape[2] // G * kv_heads, 2), k.split(kv_heads, 2), v.split(kv_heads, 2), strict=True)
    return torch.cat([_sdpa(*(x.transpose(1, 2) for x in qkv), **options).transpose(1, 2) for qkv in heads], 2)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute unfused attention, with the softmax in fp32.

    q is [B, H, T, D], k and v are [B, G, S, D], visible is [B, 1, T, S] bool, and sinks [H, 1 or T] are extra scores.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale  # [B, H, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    compute = torch.promote_types(q.dtype, torch.float32)
    if sinks is not None:
        column = sinks.to(compute)[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores.to(compute), column], -1)  # [B, H, T, S + 1]
    weights = scores.softmax(-1, dtype=compute).to(q.dtype)
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ v


SETTINGS: tuple[tuple[SDPBackend, Callable[[], bool], Callable[[bool], None]], ...] = tuple(
    (backend, getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
    for backend, name in (
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "mem_efficient"),
        (SDPBackend.MATH, "math"),
        (SDPBackend.OVERRIDEABLE, "overrideable"),
    )
)
"""For each backend of SDPA, a function that returns whether the backend is enabled, and a function that enables or
disables it.
"""


class SDPAOrder:
    """A faster form of the context manager ``sdpa_kernel(backends, set_priority=True)``.

    ``sdpa_kernel`` takes more host time than SDPA itself. Unlike ``sdpa_kernel``, this context manager may be entered
    several times, but can't be traced by a compiler.
    """

    def __init__(self, backends: list[SDPBackend]) -> None:
        self.backends = backends
        self.priority: list[int] = [int(backend) for backend in backends]  # type: ignore[call-overload]
        self.wanted = [(backend in backends, is_enabled, enable) for backend, is_enabled, enable in SETTINGS]
        self.before: list[tuple[list[int], list[tuple[Callable[[bool], None], bool]]]] = []

    def __enter__(self) -> None:
        priority, changed = torch._C._get_sdp_priority_order(), []
        for wanted, is_enabled, enable in self.wanted:
            if is_enabled() != wanted:
                enable(wanted)
                changed.append((enable, not wanted))
        torch._C._set_sdp_priority_order(self.priority + [other for other in priority if other not in self.priority])
        self.before.append((priority, changed))

    def __exit__(self, *_: object) -> None:
        priority, changed = self.before.pop()
        torch._C._set_sdp_priority_order(priority)
        for enable, enabled in changed:
            enable(enabled)


CAUSAL, WITHOUT_CUDNN, MASKED = map(SDPAOrder, (CAUSAL_BACKENDS, CAUSAL_BACKENDS[1:], MASKED_BACKENDS))


def _unmasked(x: Tensor, T: int) -> AbstractContextManager[Any]:
    """Context manager that sets the order of SDPA's backends for unmasked attention over T tokens."""
    without_cudnn = x.device.type in ACCELERATORS and T % CUDNN_STEP != 0
    return _sdpa_order(WITHOUT_CUDNN if without_cudnn else CAUSAL, x)


def _sdpa_order(order: SDPAOrder, x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type not in ACCELERATORS:
        return nullcontext()
    return sdpa_kernel(order.backends, set_priority=True) if torch.compiler.is_compiling() else order
