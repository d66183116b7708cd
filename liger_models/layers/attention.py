"""Grouped-query attention on the packed QKV projection."""

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_models.distributed.collectives import Group, sum_over, to_heads, to_tokens
from liger_models.kernels.attention.causal_attention import MOST_HEAD_DIM, causal_attention
from liger_models.kernels.attention.decode_attention import decode_attention
from liger_models.kernels.attention.invariant_attention import invariant_attention
from liger_models.kernels.attention.sink_attention import is_fused, sink_attention
from liger_models.kernels.dispatch import ACCELERATORS, TRITON_DTYPES
from liger_models.kernels.linear_attention.documents import flat
from liger_models.kernels.matmul.batch_invariance import batch_invariant, is_batch_invariant
from liger_models.kernels.norm.rms_norm import scale_normed
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rope.rope import rope, rope_qkv, rope_qkv_reference, rope_reference, split_heads
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import DecoderConfig
from liger_models.layers.layer import AttentionSpec, Layer
from liger_models.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divisible
from liger_models.layers.masks import MOST_FLASH_DIM, VARLEN_OPTIONS, Segments, takes_flash, takes_segments
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm, add_norm_linear, call_linear
from liger_models.layers.recompute import draws, recomputes, repeats, run_twice

if TYPE_CHECKING:
    from typing_extensions import Self

CAUSAL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,  # about a quarter faster than flash on an H200, head dimension 128, S 8192
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends for attention with a mask. Not cuDNN: its gradient of q is NaN for some lengths (pytorch#196678)."""

CUDNN_STEP = 128
"""cuDNN is used only for lengths that are multiples of this. It builds a plan for every new length, which takes 0.13 s
on an H200, so a job with varying lengths would wait for plans all the time."""

LEAST_CALL = 1024
"""Mean length in tokens from which on segments are faster in separate calls, on cuDNN, than in one kernel for all."""

MOST_SCORES = 2**28
"""Bytes of scores up to which fp32 attention runs unfused where keys and values are shared, and within segments. It is
PyTorch's most accurate way: the fused kernel's gradients of queries have five times the error. (On GPUs only flash
attention and cuDNN, both for half precision, support sharing.) Beyond this size shared keys and values are repeated for
each head, and a fused kernel runs."""


MOST_QUERIES, MOST_RECOMPUTED = 2**31, 2**29
"""Elements of the queries beyond which attention takes a part of the heads at a time, and beyond which it does so in a
block that is recomputed. The backward of a fused kernel allocates up to four times the queries' bytes: sums of dq in
fp32, and where heads share keys also dk and dv of every head. Elsewhere the heads' results would be saved twice."""


def _few_scores(q: Tensor, k: Tensor) -> bool:
    return math.prod(q.shape[:3]) * k.shape[2] * q.itemsize <= MOST_SCORES


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's scaled dot-product attention on [B, heads, T, D]; heads of a group share keys and values."""
    shared = q.shape[1] != k.shape[1]
    by_formula = shared and q.device.type in ACCELERATORS and not takes_flash(q.dtype, q.shape[3])
    if by_formula and not _few_scores(q, k):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        shared = False
    if shared:  # not enable_gqa=shared: in a graph with symbolic numbers of heads that is no bool
        options["enable_gqa"] = True
    return F.scaled_dot_product_attention(q, k, v, **options)


def _sdpa_by_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`_sdpa` on [B, T, heads, D], over a part of the heads at a time where the queries are many."""
    most = MOST_QUERIES if repeats() is None else MOST_RECOMPUTED
    if torch.compiler.is_compiling() or q.numel() <= most:
        return _sdpa(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    G, parts = k.shape[2], -(-q.numel() // most)
    each = -(-G // parts)  # KV heads of a part
    pieces = zip(q.split(q.shape[2] // G * each, 2), k.split(each, 2), v.split(each, 2), strict=True)
    return torch.cat([_sdpa(*(x.transpose(1, 2) for x in piece), **options).transpose(1, 2) for piece in pieces], 2)


def _padded(*heads: Tensor) -> list[Tensor]:
    """Heads [..., D] padded with zeros to a multiple of 8, the widths that flash attention has."""
    padding = -heads[0].shape[-1] % 8
    return [F.pad(x, (0, padding)) if padding else x for x in heads]


def _within_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: tuple[int, int]
) -> Tensor:
    """Attention of [B, T, H, D] within segments, by one kernel for all segments or one call for each length."""
    seen = segments.keys or segments
    queries, keys, values = (
        x.flatten(0, 1) if each.at is None else x.flatten(0, 1).index_select(0, each.at)
        for x, each in ((q, segments), (k, seen), (v, seen))
    )
    at_once = takes_segments(q.device, q.dtype, q.shape[3])
    graph = at_once and torch.compiler.is_compiling()  # one graph must serve all lengths
    lengths = [] if graph else [*zip(segments.lengths or [], seen.lengths or [], strict=True)]
    runs = [(length, len([*run])) for length, run in itertools.groupby(lengths)]
    if at_once and not 0 < len(runs) * LEAST_CALL <= len(queries):
        from torch.nn.attention.varlen import varlen_attn

        queries, keys, values = _padded(queries, keys, values)
        options: dict[str, Any] = {"scale": scale, "window_size": window}
        if "enable_gqa" in VARLEN_OPTIONS:  # versions without the option always allow it
            options["enable_gqa"] = q.shape[2] != k.shape[2]
        lengths_of = segments.cu_seqlens, seen.cu_seqlens, segments.max_seqlen, seen.max_seqlen
        out: Any = varlen_attn(queries, keys, values, *lengths_of, **options)
        y: Tensor = out[..., : q.shape[3]]
    else:
        splits = [[length[side] * count for length, count in runs] for side in (0, 1, 1)]
        parts = [x.split(split) for x, split in zip((queries, keys, values), splits, strict=True)]
        results = []
        for ((n, m), _), *run in zip(runs, *parts, strict=True):
            queries, keys, values = (
                x.unflatten(0, (-1, size)).transpose(1, 2) for x, size in zip(run, (n, m, m), strict=True)
            )
            if q.dtype == torch.float32 and q.device.type in ACCELERATORS and _few_scores(queries, keys):
                out = attention_reference(queries, keys, values, None, scale, None, 0.0)
            else:
                with _unmasked(q, 0 if segments.recurring else math.gcd(n, m)):
                    out = _sdpa(queries, keys, values, scale=scale)
            results.append(out.transpose(1, 2).flatten(0, 1))
        y = torch.cat(results)
    if segments.at is not None:
        y = torch.empty_like(y).index_copy(0, segments.at, y)
    return y.view(q.shape)


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
    """Unfused attention with softmax in fp32.

    q [B, H, T, D]; k, v [B, G, S, D]; visible [B, 1, T, S] bool; sinks [H, 1 or T], one more score of no key.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    compute = torch.promote_types(q.dtype, torch.float32)
    if sinks is not None:
        column = sinks.to(compute)[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores.to(compute), column], -1)
    weights = scores.softmax(-1, dtype=compute).to(q.dtype)
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ v


class _InvariantAttention(torch.autograd.Function):
    """`invariant_attention` with the gradients of ordinary attention, which the backward computes first."""

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
        return invariant_attention(flat(q), k, v, *layout.spans, sinks=sinks, table=table, **options).view(q.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs: list[Any] = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, ctx.needs_input_grad[:4], strict=True)
        ]
        q, k, v, sinks = inputs
        with batch_invariant(False), torch.enable_grad():
            y = attention(q, k, v, ctx.layout, sinks=sinks, **ctx.options)
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(y, leaves, dy))
        return *(next(grads) if need else None for need in ctx.needs_input_grad[:4]), None, None


class _CountedAttention(torch.autograd.Function):
    """Saves what a fused kernel saves, but computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        raise RuntimeError("attention: a counted mask has no backward.")


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
    """Attention within each document of ``layout`` and within a window; causal, except for image patches.

    Plainly causal attention runs in SDPA, on the fastest backend. On an accelerator there is never a T × T mask, and
    scores exist only up to `MOST_SCORES`: in half precision documents and windows run in variable-length attention;
    padding, softcaps and other dtypes run in flex_attention. The CPU and single-token decoding use SDPA with a mask,
    or the formula where there are sinks. A step on a paged cache runs in `decode_attention`. Within `batch_invariant`
    everything runs in `invariant_attention`.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D], S = cached + T; H is a multiple of G. With ``layout.pages`` the pages [pages, P, G, D].
        layout: has a mask for ``window``.
        scale: factor of q·k.
        window: number of tokens that a token attends to, itself included; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight.
        sinks: [H], a score of each head that no key belongs to and that takes its share of the softmax; None for none.

    Returns:
        [B, T, H, D].

    Raises:
        ValueError: ``dropout`` is positive, but the kernel for this batch does not support it; or, within
            `batch_invariant`, attention is not causal.
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    if is_batch_invariant():
        mask = layout.masks.get(window)
        causal = layout.spans is not None and layout.causal and not (mask is not None and mask.later)
        if not causal or dropout != 0.0:
            raise ValueError(
                f"attention: images and dropout can't be combined with deterministic_forward, got dropout {dropout} "
                f"and {'causal' if causal else 'bidirectional'} attention. Leave them out."
            )
        choice = {"scale": scale, "window": window, "softcap": softcap}
        invariant: Tensor = _InvariantAttention.apply(q, k, v, sinks, layout, choice)  # type: ignore[no-untyped-call]
        return invariant
    if layout.pages is not None:
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return decode_attention(q[:, 0], k, v, *layout.pages, **options)[:, None]  # type: ignore[arg-type]
    if layout.masks[window].counted:
        heads = _padded(q, k, v) if sinks is None and takes_flash(q.dtype, q.shape[3]) else (q, k, v)
        counted: Tensor = _CountedAttention.apply(*heads)  # type: ignore[no-untyped-call]
        return counted[..., : q.shape[3]]
    plain = softcap is None and sinks is None and dropout == 0.0 and layout.causal and not layout.masks[window].later
    if plain and _takes_wide_heads(q):
        return causal_attention(q, k, v, layout.documents, scale=scale, window=window)
    unfused = q.device.type in ACCELERATORS and not is_fused(q)
    mask = layout.mask(window, q, explicit=sinks is not None and (unfused or dropout > 0))
    if dropout != 0.0 and (mask.block is not None or mask.segments is not None):
        raise ValueError(
            "attention: dropout must be 0 with packed or padded batches, windows, softcaps and sinks on "
            f"{q.device.type}, got {dropout}. Set attention_dropout=0."
        )
    if sinks is not None and mask.segments is not None:
        bounds, longest = mask.segments.cu_seqlens, mask.segments.max_seqlen
        return sink_attention(q, k, v, sinks, scale=scale, window=window, cu_seqlens=bounds, max_seqlen=longest)
    if sinks is not None and T > 1 and mask.block is None and mask.dense is None:
        return sink_attention(q, k, v, sinks, scale=scale)
    if mask.segments is not None:
        back = -1 if window is None else window - 1
        return _within_segments(q, k, v, mask.segments, scale, (back, 0) if layout.causal else (-1, -1))
    dense = mask.dense
    if T == 1 and window is not None:
        k, v = k[:, -window:], v[:, -window:]
        dense = None if dense is None else dense[..., -window:]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    if mask.block is not None:
        from liger_models.layers.flex import flex_by_blocks  # imports torch's compiler, which takes a second

        out = flex_by_blocks(queries, keys, values, mask.block, scale, softcap, sinks)
    elif sinks is not None and T == 1:
        rows = queries.reshape(q.shape[0], G, H // G, q.shape[3])
        out = attention_reference(rows, keys, values, dense, scale, softcap, dropout, sinks.view(G, H // G))
        return out.reshape(q.shape)
    elif softcap is not None or sinks is not None:
        column = None if sinks is None else sinks[:, None]
        out = attention_reference(queries, keys, values, dense, scale, softcap, dropout, column)
    elif T == 1 and layout.cache is not None:
        # One query per head: treat the heads of a group as rows that share keys, so that nothing is repeated.
        rows = queries.reshape(q.shape[0], G, H // G, q.shape[3])
        with _backends(MASKED_BACKENDS, q):
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=dense, scale=scale)
        return out.reshape(q.shape)
    else:
        with _unmasked(q, T):
            causal = dense is None and layout.causal
            return _sdpa_by_heads(q, k, v, attn_mask=dense, dropout_p=dropout, is_causal=causal, scale=scale)
    y: Tensor = out.transpose(1, 2)
    return y


def _takes_wide_heads(q: Tensor) -> bool:
    """Whether q [B, T, H, D] has heads that only `causal_attention` takes, and more than a single token to decode."""
    wide = MOST_FLASH_DIM < q.shape[3] <= MOST_HEAD_DIM
    return wide and q.shape[1] > 1 and q.device.type in ACCELERATORS and q.dtype in TRITON_DTYPES


def _unmasked(x: Tensor, T: int) -> AbstractContextManager[Any]:
    without = x.device.type in ACCELERATORS and T % CUDNN_STEP != 0
    return _backends(CAUSAL_BACKENDS[1:] if without else CAUSAL_BACKENDS, x)


def _backends(order: list[SDPBackend], x: Tensor) -> AbstractContextManager[Any]:
    return sdpa_kernel(order, set_priority=True) if x.device.type in ACCELERATORS else nullcontext()


def check_heads(where: str, kv_heads: int, group: Group) -> None:
    """Raise ValueError unless the KV heads can be divided equally among the ranks."""
    advice = ": heads are not replicated. Use fewer ranks, and FSDP over the others."
    check_divisible(where, "num_key_value_heads", kv_heads, group, advice)


class LigerAttention(Layer):
    """Causal grouped-query attention with rotary embedding, and one projection for q, k and v.

    The rows of ``qkv_proj`` are grouped by KV head: its H / G query heads, then its key, then its value.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, its slot in the decode cache.
        qkv_bias, o_bias: whether the projections have biases.
        scale: factor of q·k; None for D^-0.5.
        window: number of tokens that a token attends to, itself included; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight in training.
        rotary: name of the rotary embedding; None for no rotation.
        interleaved: rotate the pairs (2i, 2i + 1) instead of (i, i + R/2).
        rope_kernel: False for plain torch.

    Raises:
        ValueError: H is not a multiple of G.
    """

    linears = ("qkv_proj", "o_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        qkv_bias: bool = False,
        o_bias: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        rotary: str | None = "default",
        interleaved: bool = False,
        rope_kernel: bool = True,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"LigerAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})."
            )
        self.num_heads, self.num_kv_heads, self.head_dim, self.layer = num_heads, num_kv_heads, head_dim, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.dropout = window, softcap, dropout
        self.rotary, self.interleaved, self.rope_kernel = rotary, interleaved, rope_kernel
        self.recompute = False
        """Save only the inputs and recompute the rest in the backward (checkpointing policy "full")."""
        self.qkv_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias)

    @classmethod
    def from_config(cls, config: DecoderConfig, layer: int, kernels: KernelOptions, **options: Any) -> "Self":
        """The attention of a layer, with the sizes and the dropout of a config.

        Args:
            config: sizes and constants.
            layer: index of the layer, its slot in the decode cache.
            kernels: which parts run on fused kernels.
            options: other arguments of the class.
        """
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            **{"dropout": config.attention_dropout, "rope_kernel": kernels.rope, **options},
        )

    @property
    def attention(self) -> AttentionSpec:
        """What the layer requires from the model, and what it computes."""
        return AttentionSpec(
            self.layer, self.rotary, self.window, self.softcap is not None, 4 * self.num_heads * self.head_dim,
            takes_pages=True,
        )  # fmt: skip

    def set_policy(self, policy: str) -> None:
        """Recompute under "full"."""
        self.recompute = policy == "full"

    def recomputed_share(self, policy: str) -> float:
        """All of the layer under "full"."""
        return float(policy == "full")

    def can_shard(self, size: int) -> bool:
        """Whether ``size`` divides the number of KV heads."""
        return self.num_kv_heads % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the KV heads and the query heads that share them; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.qkv_proj = ColumnParallelLinear.of(self.qkv_proj, group)
        self.o_proj = RowParallelLinear.of(self.o_proj, group)
        return {"qkv_proj.weight": 0, "qkv_proj.bias": 0, "o_proj.weight": 1}

    def _share_heads(self, group: Group) -> None:
        check_heads("LigerAttention", self.num_kv_heads, group)
        self.num_heads //= group.size
        self.num_kv_heads //= group.size

    def shard_tokens(self, group: Group) -> None:
        """Take T / R tokens per rank; inside attention each rank has all T tokens and 1 / R of the heads.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.groups = replace(self.groups, context=group)

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        return self._attend(self.qkv_proj(x), layout)

    def add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; attention(norm(residual))``: ``(y, residual)``, each [B, T, C].

        Without a norm, attention takes the sum itself. The backward recomputes the normed activations; with
        ``recompute`` it recomputes everything except the output projection.
        """
        if norm is None:
            x, (residual, _) = None, add_norm(norm, x, residual)  # only the sum is saved
        if recomputes(self) and layout.cache is None:  # recomputation would append to the cache again
            y, residual = run_twice(
                self._add_norm, norm, x, residual, layout,
                preserve_rng_state=draws(self, self.dropout),
            )  # fmt: skip
            return y, residual
        return self._add_norm(norm, x, residual, layout)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)
        return self._attend(qkv, layout), residual

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k, v [B, T, G, D], rotated."""
        split = rope_qkv if self.rope_kernel else rope_qkv_reference
        cos, sin = self._tables(layout)
        return split(qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim, interleaved=self.interleaved)

    def _tables(self, layout: BatchLayout) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (None, None) if self.rotary is None else layout.tables[self.rotary]

    def _local_sinks(self) -> Tensor | None:
        """The sinks of this rank's query heads; None for attention without sinks."""
        return None

    def _attend(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        context = self.groups.context
        out = self._mix(qkv if context is None else to_heads(qkv, context), layout)
        out = out if context is None else to_tokens(out, context)
        return call_linear(self.o_proj, out)

    def _mix(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        """The heads' results [B, T, H · D] from the projection's output for all tokens."""
        q, k, v = self._split(qkv, layout)
        if layout.cache is not None:
            k, v = layout.cache.extend(self.layer, k, v)
        out = attention(
            q, k, v, layout, scale=self.scale, window=self.window, softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0, sinks=self._local_sinks(),
        )  # fmt: skip
        return out.flatten(2)


class LigerQKNormAttention(LigerAttention):
    """`LigerAttention` with norms of q and k before the rotation.

    Args:
        norm: returns a `LigerRMSNorm` for a width.
        whole_projection: normalise over all heads together (OLMo 2), not over each head (Qwen3, Gemma 3).
        Others: as in `LigerAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm: Callable[[int], LigerRMSNorm],
        whole_projection: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **options)
        self.q_norm = norm(num_heads * head_dim if whole_projection else head_dim)
        self.k_norm = norm(num_kv_heads * head_dim if whole_projection else head_dim)
        self.whole_projection = whole_projection
        self.mean_group: Group | None = None
        """The process group over whose heads the norms take their means."""

    def shard(self, group: Group) -> dict[str, int]:
        """As `LigerAttention.shard`; norms over all heads together take the mean over the ranks."""
        dims = super().shard(group)
        if not self.whole_projection:
            self.q_norm.group = self.k_norm.group = group
            return dims
        self.mean_group = group
        self.q_norm.group = self.k_norm.group = None  # their weights are sharded, too
        return {**dims, "q_norm.weight": 0, "k_norm.weight": 0}

    def shard_tokens(self, group: Group) -> None:
        """As `LigerAttention.shard_tokens`; norms over all heads together take the mean over the ranks."""
        super().shard_tokens(group)
        self.mean_group = group if self.whole_projection else None

    def _split_over(self, qkv: Tensor, layout: BatchLayout, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """`_split` with norms over the heads of all ranks; not fused, because the ranks must exchange their means."""
        *heads, v = split_heads(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        wide = [x.flatten(2).to(torch.promote_types(x.dtype, torch.float32)) for x in heads]
        means = torch.stack([x.square().mean(-1) for x in wide], -1)
        means = sum_over(means, group) / group.size  # [B, T, 2]
        cos, sin = self._tables(layout)
        rotate = rope if self.rope_kernel else rope_reference
        results = []
        for norm, x, mean, like in zip((self.q_norm, self.k_norm), wide, means.split(1, -1), heads, strict=True):
            weight = norm.local_weight(qkv)
            if self.groups.context is not None:  # replicated
                weight = weight.chunk(group.size)[group.rank]
            normed = scale_normed(
                x * torch.rsqrt(mean + norm.eps), weight, like.dtype, norm.offset, norm.scale_in_fp32
            ).view_as(like)
            if cos is not None and sin is not None:
                normed = rotate(normed, cos, sin, interleaved=self.interleaved)
            results.append(normed)
        q, k = results
        return q, k, v

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        if self.mean_group is not None:
            return self._split_over(qkv, layout, self.mean_group)
        split = qk_norm_rope if self.rope_kernel and self.q_norm.kernel else qk_norm_rope_reference
        cos, sin = self._tables(layout)
        return split(
            qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm.local_weight(qkv), self.k_norm.local_weight(qkv),
            eps=self.q_norm.eps, weight_offset=self.q_norm.offset, scale_in_fp32=self.q_norm.scale_in_fp32,
            interleaved=self.interleaved,
        )  # fmt: skip


class LigerGatedAttention(LigerQKNormAttention):
    """`LigerQKNormAttention` whose heads are multiplied by ``sigmoid`` of a gate, which is projected with them.

    The rows of ``qkv_proj`` are grouped by KV head: its H / G query heads, their gates, then its key, then its value.

    Args: as in `LigerQKNormAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **options)
        bias = self.qkv_proj.bias is not None
        self.qkv_proj = nn.Linear(hidden_size, 2 * (num_heads + num_kv_heads) * head_dim, bias=bias)

    def _mix(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        queries = self.num_heads // self.num_kv_heads
        groups = qkv.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))  # [B, T, G, 2 H / G + 2, D]
        q, gate, kv = groups.split([queries, queries, 2], 3)
        out: Tensor = super()._mix(torch.cat([q, kv], 3).flatten(2), layout) * gate.flatten(2).sigmoid()
        return out
