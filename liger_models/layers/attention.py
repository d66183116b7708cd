"""Grouped-query attention on the packed QKV projection."""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.collectives import Ranks, sum_over, to_heads, to_tokens
from liger_models.kernels.dispatch import ACCELERATORS, check
from liger_models.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rms_norm import scale_normed
from liger_models.kernels.rope import rope, rope_qkv, rope_qkv_reference, rope_reference, split_heads

from .norm import LigerRMSNorm, Norm, add_norm, add_norm_linear
from .recompute import draws, recomputes
from .sequence import VARLEN_OPTIONS, Segments, Sequence, takes_flash, takes_segments
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, check_parts

CAUSAL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,  # H200, head dim 128, S 8192: ahead of flash by about a quarter
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Never cuDNN with a mask: its gradient of q has been NaN for some lengths (pytorch#196678)."""

CUDNN_STEP = 128
"""cuDNN only for lengths that are multiples of this: it builds a plan for every new one, 0.13 s on an H200, and a job
whose lengths vary would wait for that again and again."""

LEAST_CALL = 1024
"""Tokens: segments of as many on average are faster in calls of their own, on cuDNN, than in one kernel for all."""

LEAST_HEAD_DIM = 16
"""Of flex_attention's kernel; smaller heads are filled up with zeros."""

MOST_SCORES = 2**28
"""Bytes. On GPUs only flash attention and cuDNN, which are for half precision, let heads share keys and values. In fp32
PyTorch keeps all scores then. That is its most exact way; beyond this size each head has copies, and a fused kernel."""

LARGE_HEAD_OPTIONS = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 8,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_stages": 2,
    "bwd_num_warps": 8,
}  # fmt: skip
"""Of flex_attention's kernels, for heads of more than 128 in half precision on Hopper. PyTorch's own options have four
warps, which such a head's sums do not fit in the registers of."""

RECOMPILE_LIMIT = 256
"""Each dtype, head size and batch shape compiles flex_attention once; from PyTorch's own limit of 8 on it would run
unfused, with all scores in memory."""


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _on_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _score(softcap: float) -> Callable[..., Tensor]:
    def capped(s: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(s / softcap)

    return capped


_cached_score = functools.cache(_score)
"""One function per value, so that flex_attention compiles once for all layers."""


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    """flex_attention's fused kernel, on [B, heads, T, D]."""
    D = q.shape[-1]
    if D < LEAST_HEAD_DIM:
        q, k, v = (F.pad(x, (0, LEAST_HEAD_DIM - D)) for x in (q, k, v))
    options: dict[str, Any] = {"block_mask": block_mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    # The kernel for few queries has no configuration for some head sizes.
    options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if 128 < D <= 256 and takes_flash(q.dtype, D) and q.is_cuda and _on_hopper():
        options["kernel_options"] |= LARGE_HEAD_OPTIONS
    out: Any
    if torch.compiler.is_compiling():  # compiled with the rest of the graph
        out = flex_attention(q, k, v, None if softcap is None else _score(softcap), **options)
    else:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, specialize_float=True):
            out = _compiled_flex_attention()(q, k, v, None if softcap is None else _cached_score(softcap), **options)
    y: Tensor = out
    return y[..., :D]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's, of [B, heads, T, D], where the heads of a group share keys and values."""
    shared = q.shape[1] != k.shape[1]
    by_formula = shared and q.device.type in ACCELERATORS and not takes_flash(q.dtype, q.shape[3])
    if by_formula and math.prod(q.shape[:3]) * k.shape[2] * q.itemsize > MOST_SCORES:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared, **options)


def _within_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: tuple[int, int]
) -> Tensor:
    """Attention of [B, T, H, D] within segments: one kernel for all, or a call for each length."""
    seen = segments.keys or segments
    queries, keys, values = (
        x.flatten(0, 1) if each.at is None else x.flatten(0, 1).index_select(0, each.at)
        for x, each in ((q, segments), (k, seen), (v, seen))
    )
    at_once = takes_segments(q.device, q.dtype, q.shape[3])
    graph = at_once and torch.compiler.is_compiling()  # for all lengths
    lengths = [] if graph else [*zip(segments.lengths or [], seen.lengths or [], strict=True)]
    runs = [(length, len([*run])) for length, run in itertools.groupby(lengths)]
    if at_once and not 0 < len(runs) * LEAST_CALL <= len(queries):
        from torch.nn.attention.varlen import varlen_attn

        padding = -q.shape[3] % 8
        queries, keys, values = (F.pad(x, (0, padding)) if padding else x for x in (queries, keys, values))
        options: dict[str, Any] = {"scale": scale, "window_size": window}
        if "enable_gqa" in VARLEN_OPTIONS:  # else it is always so
            options["enable_gqa"] = q.shape[2] != k.shape[2]
        bounds = segments.bounds, seen.bounds, segments.longest, seen.longest
        out: Any = varlen_attn(queries, keys, values, *bounds, **options)
        y: Tensor = out[..., : q.shape[3]]
    else:
        splits = [[length[side] * count for length, count in runs] for side in (0, 1, 1)]
        parts = [x.split(split) for x, split in zip((queries, keys, values), splits, strict=True)]
        results = []
        for ((n, m), _), *run in zip(runs, *parts, strict=True):
            queries, keys, values = (
                x.unflatten(0, (-1, size)).transpose(1, 2) for x, size in zip(run, (n, m, m), strict=True)
            )
            with _unmasked(q, 0 if segments.recurring else math.gcd(n, m)):
                out = _sdpa(queries, keys, values, scale=scale)
            results.append(out.transpose(1, 2).flatten(0, 1))
        y = torch.cat(results)
    if segments.at is not None:
        y = torch.empty_like(y).index_copy(0, segments.at, y)
    return y.view(q.shape)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float | None, dropout: float
) -> Tensor:
    """Attention by its formula, softmax in fp32. q [B, H, T, D], k, v [B, G, S, D], visible [B, 1, T, S] bool."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: Sequence,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention within each document of ``sequence``, and within a window; causal unless it is of patches.

    SDPA on the fastest backend where causality is all there is. On an accelerator no T × T mask exists, and scores only
    up to `MOST_SCORES`: documents and windows go through a kernel for segments in half precision, else, and where there
    are padding and softcaps, through flex_attention. SDPA with a mask on the CPU and for single-token decoding.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D], S = cached + T; H is a multiple of G.
        sequence: has a mask for ``window``.
        scale: factor of q·k.
        window: number of tokens that are seen, the token itself included; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, T, H, D].

    Raises:
        ValueError: dropout where a kernel runs that has none.
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    mask = sequence.mask(window, q)
    check(
        dropout == 0.0 or (mask.block is None and mask.segments is None),
        f"attention: dropout must be 0 with packed or padded batches, windows and softcaps on {q.device.type}, "
        f"got {dropout}. Set attention_dropout=0.",
    )
    if mask.segments is not None:
        back = -1 if window is None else window - 1
        return _within_segments(q, k, v, mask.segments, scale, (back, 0) if sequence.causal else (-1, -1))
    dense = mask.dense
    if T == 1 and window is not None:
        k, v = k[:, -window:], v[:, -window:]
        dense = None if dense is None else dense[..., -window:]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    if mask.block is not None:
        out = _flex_attention(queries, keys, values, mask.block, scale, softcap)
    elif softcap is not None:
        out = attention_reference(queries, keys, values, dense, scale, softcap, dropout)
    elif T == 1 and sequence.cache is not None:
        # One query per head: the heads of a group are rows that share keys, so keys and values are not repeated.
        rows = queries.reshape(q.shape[0], G, H // G, q.shape[3])
        with _backends(MASKED_BACKENDS, q):
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=dense, scale=scale)
        return out.reshape(q.shape)
    else:
        with _unmasked(q, T):
            causal = dense is None and sequence.causal
            out = _sdpa(queries, keys, values, attn_mask=dense, dropout_p=dropout, is_causal=causal, scale=scale)
    y: Tensor = out.transpose(1, 2)
    return y


def _unmasked(x: Tensor, T: int) -> AbstractContextManager[Any]:
    without = x.device.type in ACCELERATORS and T % CUDNN_STEP != 0
    return _backends(CAUSAL_BACKENDS[1:] if without else CAUSAL_BACKENDS, x)


def _backends(order: list[SDPBackend], x: Tensor) -> AbstractContextManager[Any]:
    return sdpa_kernel(order, set_priority=True) if x.device.type in ACCELERATORS else nullcontext()


def check_heads(where: str, kv_heads: int, ranks: Ranks) -> None:
    """Raise ValueError unless ranks can have equal parts of the heads."""
    advice = ": heads are not copied. Use fewer ranks, and FSDP over the others."
    check_parts(where, "num_key_value_heads", kv_heads, ranks, advice)


class LigerAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding, on one projection for q, k and v.

    The rows of ``qkv_proj`` are grouped by KV head: for each one its H / G query heads, then k, then v.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, its place in the decode cache.
        qkv_bias, o_bias: biases in the projections.
        scale: factor of q·k, None for D^-0.5.
        window: number of tokens that are seen, the token itself included; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight in training.
        rotary: name of the model's rotary embedding; None for no rotation.
        interleaved: rotate the pairs (2i, 2i + 1) and not (i, i + R/2).
        rope_kernel: False for plain torch.

    Raises:
        ValueError: H is not a multiple of G.
    """

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
        check(
            num_heads % num_kv_heads == 0,
            f"LigerAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).",
        )
        self.num_heads, self.num_kv_heads, self.head_dim, self.layer = num_heads, num_kv_heads, head_dim, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.dropout = window, softcap, dropout
        self.rotary, self.interleaved, self.rope_kernel = rotary, interleaved, rope_kernel
        self.recompute = False
        """True keeps only the inputs and makes everything again in the backward (checkpointing policy "full")."""
        self.context_ranks: Ranks | None = None
        """Those that have a part of the tokens each, and here, of all tokens, a part of the heads."""
        self.qkv_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias)

    @property
    def parts(self) -> int:
        """What R ranks must divide to have equal parts: the number of KV heads."""
        return self.num_kv_heads

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the KV heads, and the query heads that share them: see `layers.tensor_parallel`.

        Raises:
            ValueError: there is no equal part of them.
        """
        self._share_heads(ranks)
        self.qkv_proj = ColumnParallelLinear.of(self.qkv_proj, ranks)
        self.o_proj = RowParallelLinear.of(self.o_proj, ranks)
        return {"qkv_proj.weight": 0, "qkv_proj.bias": 0, "o_proj.weight": 1}

    def _share_heads(self, ranks: Ranks) -> None:
        check_heads("LigerAttention", self.num_kv_heads, ranks)
        self.num_heads //= ranks.size
        self.num_kv_heads //= ranks.size

    def spread(self, ranks: Ranks) -> None:
        """Take T / R tokens of a rank, and attend from all T with 1 / R of the heads.

        Raises:
            ValueError: there is no equal part of them.
        """
        self._share_heads(ranks)
        self.context_ranks = ranks

    def forward(self, x: Tensor, sequence: Sequence) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        return self._attend(self.qkv_proj(x), sequence)

    def add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, sequence: Sequence
    ) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; attention(norm(residual))``: ``(y, residual)``, each [B, T, C].

        Without a norm, attention takes the sum itself. The normed activations are recomputed in the backward; with
        ``recompute`` all but the output projection.
        """
        if norm is None:
            x, (residual, _) = None, add_norm(norm, x, residual)  # the sum is all that is kept
        if recomputes(self) and sequence.cache is None:  # which would be appended to again
            y, residual = checkpoint(
                self._add_norm, norm, x, residual, sequence,
                use_reentrant=False, preserve_rng_state=draws(self, self.dropout),
            )  # fmt: skip
            return y, residual
        return self._add_norm(norm, x, residual, sequence)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, sequence: Sequence
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)
        return self._attend(qkv, sequence), residual

    def _split(self, qkv: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k, v [B, T, G, D], rotated."""
        split = rope_qkv if self.rope_kernel else rope_qkv_reference
        cos, sin = self._tables(sequence)
        return split(qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim, interleaved=self.interleaved)

    def _tables(self, sequence: Sequence) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (None, None) if self.rotary is None else sequence.tables[self.rotary]

    def _attend(self, qkv: Tensor, sequence: Sequence) -> Tensor:
        qkv = qkv if self.context_ranks is None else to_heads(qkv, self.context_ranks)
        q, k, v = self._split(qkv, sequence)
        if sequence.cache is not None:
            k, v = sequence.cache.extend(self.layer, k, v)
        out = attention(
            q, k, v, sequence, scale=self.scale, window=self.window, softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = out.flatten(2)  # [B, T, H · D]
        y: Tensor = self.o_proj(out if self.context_ranks is None else to_tokens(out, self.context_ranks))
        return y


class LigerQKNormAttention(LigerAttention):
    """`LigerAttention` with a norm of q and one of k before the rotation.

    Args:
        norm: width -> a `LigerRMSNorm`.
        whole_projection: norm over all heads together (OLMo 2), not over each head (Qwen3, Gemma 3).
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
        self.ranks: Ranks | None = None
        """Those over which the norms take their means."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """As `LigerAttention.cut`; norms over all heads together take the mean over the ranks."""
        dims = super().cut(ranks)
        if not self.whole_projection:
            self.q_norm.ranks = self.k_norm.ranks = ranks
            return dims
        self.ranks = ranks
        self.q_norm.ranks = self.k_norm.ranks = None  # their weights are cut, too
        return {**dims, "q_norm.weight": 0, "k_norm.weight": 0}

    def spread(self, ranks: Ranks) -> None:
        """As `LigerAttention.spread`; norms over all heads together take the mean over the ranks."""
        super().spread(ranks)
        self.ranks = ranks if self.whole_projection else None

    def _split_over(self, qkv: Tensor, sequence: Sequence, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        """`_split` with norms over the heads of all ranks: not fused, for their means are exchanged."""
        *heads, v = split_heads(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        wide = [x.flatten(2).to(torch.promote_types(x.dtype, torch.float32)) for x in heads]
        means = torch.stack([x.square().mean(-1) for x in wide], -1)
        means = sum_over(means, ranks) / ranks.size  # [B, T, 2]
        cos, sin = self._tables(sequence)
        rotate = rope if self.rope_kernel else rope_reference
        results = []
        for norm, x, mean, like in zip((self.q_norm, self.k_norm), wide, means.split(1, -1), heads, strict=True):
            weight = norm.own_weight()
            if self.context_ranks is not None:  # whole on every rank
                weight = weight.chunk(ranks.size)[ranks.rank]
            normed = scale_normed(
                x * torch.rsqrt(mean + norm.eps), weight, like.dtype, norm.offset, norm.scale_in_fp32
            ).view_as(like)
            if cos is not None and sin is not None:
                normed = rotate(normed, cos, sin, interleaved=self.interleaved)
            results.append(normed)
        q, k = results
        return q, k, v

    def _split(self, qkv: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        if self.ranks is not None:
            return self._split_over(qkv, sequence, self.ranks)
        split = qk_norm_rope if self.rope_kernel and self.q_norm.kernel else qk_norm_rope_reference
        cos, sin = self._tables(sequence)
        return split(
            qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm.own_weight(), self.k_norm.own_weight(),
            eps=self.q_norm.eps, weight_offset=self.q_norm.offset, scale_in_fp32=self.q_norm.scale_in_fp32,
            interleaved=self.interleaved,
        )  # fmt: skip
