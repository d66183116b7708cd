"""Attention whose keys and values are computed from latents (multi-head latent attention, MLA).

A token x has a latent c with L elements and a key part r with R elements. All H heads share the latent and the key
part. In each head, queries and keys have N + R elements, and values have V elements::

    [a, l, r'] = W_a x                         Q, L and R elements; without low-rank queries, q = W_q x
    q = W_q norm(a)                            the last R elements of each head's query are then rotated
    c = norm(l),   r = rotate(r')
    k_h = [W_k,h c, r],   v_h = W_v,h c
    o_h = Σ_j softmax_j(scale · q_h · k_j,h) · v_j,h

Training and prompts use this form. In decoding, the cache keeps only the vector [c, r] of each token. This vector is
called the token's row. Instead of multiplying the latents by W_k and W_v, decoding multiplies the queries by W_k and
the weighted sums of latents by W_v::

    q_h · k_j,h = [W_k,hᵀ q_h[:N], q_h[N:]] · [c_j, r_j]
    o_h = W_v,h Σ_j softmax_j(...) · c_j

This is attention with one KV head, whose keys are the rows and whose values are the first L elements of the rows.

Source: https://arxiv.org/abs/2405.04434.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, copy_to_region, to_heads
from liger_models.kernels.attention.write_latents import write_latents
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.head_linear import head_linear, takes_heads
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.latent_heads import latent_heads, latent_heads_reference
from liger_models.kernels.rope.rope import rope, rope_reference
from liger_models.layers.attention import BaseAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import LatentDecoderConfig
from liger_models.layers.derived import derive
from liger_models.layers.layer import AttentionSpec
from liger_models.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    check_divisible,
    local,
    ranks_of,
)
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm, add_norm_linear, call_linear, fused_norm, is_plain

if TYPE_CHECKING:
    from typing_extensions import Self


class Latents(NamedTuple):
    """The results of the first projections, for each token.

    Attributes:
        q: [B, T, Q], the latent of the queries, before the norm. Without low-rank queries, the queries themselves, [B,
            T, H · (N + R)].
        c: [B, T, L], the latent of keys and values, before the norm.
        rope: [B, T, R], the part of the key that all heads share, before the rotation.
    """

    q: Tensor
    c: Tensor
    rope: Tensor


class LigerLatentAttention(BaseAttention):
    """Causal attention whose keys and values are computed from a latent of each token.

    With low-rank queries, one matrix (``qkv_a_proj``) projects the input to the latents of queries, keys and values.

    Args:
        hidden_size: C.
        num_heads: H.
        nope_dim, rope_dim: N and R, the numbers of dimensions without rotation (N) and with rotation (R) in a head's
            queries and keys.
        value_dim: V.
        kv_rank: L, the width of the latent of keys and values.
        q_rank: Q, the width of the latent of queries; None for queries that are computed directly from the input.
        norm: function that returns an RMSNorm of a given width, for the latents.
        layer: index of the layer, and of its slot in the decode cache.
        bias: whether the output projection and the projections of the input have biases. If ``q_rank`` is None, the
            projection to the queries never has a bias.
        scale: multiplier of q·k; None for (N + R)^-0.5.
        dropout: probability of dropping an attention weight in training.
        rotary: name of the rotary embedding, whose width is R; None for no rotation.
        interleaved: whether to rotate the pairs of dimensions (2i, 2i + 1) instead of (i, i + R/2).
        rope_kernel: False rotates in plain PyTorch, without a kernel.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        kv_rank: int,
        q_rank: int | None,
        *,
        norm: Callable[[int], LigerRMSNorm],
        layer: int,
        bias: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        rotary: str | None = "default",
        interleaved: bool = True,
        rope_kernel: bool = True,
    ) -> None:
        super().__init__(
            num_heads, layer=layer, scale=(nope_dim + rope_dim) ** -0.5 if scale is None else scale, dropout=dropout,
            rotary=rotary, interleaved=interleaved, rope_kernel=rope_kernel,
        )  # fmt: skip
        self.nope_dim, self.rope_dim, self.value_dim = nope_dim, rope_dim, value_dim
        self.kv_rank, self.q_rank = kv_rank, q_rank
        # The projections to latents. Without low-rank queries, the queries have a separate projection, so that tensor
        # parallelism can shard its rows.
        if q_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * (nope_dim + rope_dim), bias=False)
            self.kv_a_proj = nn.Linear(hidden_size, kv_rank + rope_dim, bias=bias)
        else:
            self.qkv_a_proj = nn.Linear(hidden_size, q_rank + kv_rank + rope_dim, bias=bias)
            self.q_a_layernorm = norm(q_rank)
            self.q_b_proj = nn.Linear(q_rank, num_heads * (nope_dim + rope_dim), bias=False)
        # The projection from the latent of keys and values to the first part of each head's key and to each head's
        # value. The rows are grouped by head.
        self.kv_a_layernorm = norm(kv_rank)
        self.kv_b_proj = nn.Linear(kv_rank, num_heads * (nope_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, hidden_size, bias=bias)

    @classmethod
    def from_config(cls, config: LatentDecoderConfig, layer: int, kernels: KernelOptions, **options: Any) -> "Self":
        """Build the attention of a layer with the sizes, the scale and the dropout of a config.

        Args:
            config: sizes and constants.
            layer: index of the layer, and of its slot in the decode cache.
            kernels: which parts run on fused kernels.
            options: further arguments of the class.
        """
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
            config.q_lora_rank,
            layer=layer,
            norm=lambda width: LigerRMSNorm(width, 1e-6, kernel=kernels.rms_norm),
            **{
                "bias": config.attention_bias,
                "scale": config.attention_scale,
                "dropout": config.attention_dropout,
                "rope_kernel": kernels.rope,
                **options,
            },
        )

    @property
    def linears(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Layer.linears`."""
        first = ("q_proj", "kv_a_proj") if self.q_rank is None else ("qkv_a_proj", "q_b_proj")
        return (*first, "kv_b_proj", "o_proj")

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        return self._attend(self._project(x), layout)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        if self.q_rank is None:
            normed, residual = add_norm(norm, x, residual)
            return self._attend(self._project(normed), layout), residual
        latents, residual = add_norm_linear(norm, self.qkv_a_proj, x, residual)  # [B, T, Q + L + R]
        return self._attend(self._latents(latents), layout), residual

    def _project(self, x: Tensor) -> Latents:
        """Compute the first projections of x [B, T, C]; see `Latents`."""
        if self.q_rank is not None:
            return self._latents(call_linear(self.qkv_a_proj, x))
        c, shared = call_linear(self.kv_a_proj, x).split([self.kv_rank, self.rope_dim], -1)
        return Latents(call_linear(self.q_proj, x), c, shared)

    def _latents(self, latents: Tensor) -> Latents:
        """Split the output of ``qkv_a_proj``, [B, T, Q + L + R], into the fields of `Latents`."""
        assert self.q_rank is not None
        return Latents(*latents.split([self.q_rank, self.kv_rank, self.rope_dim], -1))

    def _to_heads(self, projected: Latents, context: Group) -> tuple[Tensor, Tensor, Tensor]:
        """For all tokens, return the queries and the output of ``kv_b_proj`` for this rank's heads, and the part of the
        keys that all heads share.

        The ranks exchange latents, which are smaller than keys and values, and each rank projects them to its heads.
        """
        if self.q_rank is None:
            q = to_heads(projected.q, context)
        else:
            q = self._own_heads(self.q_a_layernorm, self.q_b_proj, projected.q, context)
        kv = self._own_heads(self.kv_a_layernorm, self.kv_b_proj, projected.c, context)
        return q, kv, _gather(projected.rope, context)

    def _own_heads(self, norm: LigerRMSNorm, linear: nn.Linear, latent: Tensor, context: Group) -> Tensor:
        """Compute ``linear(norm(latent))`` for this rank's heads and all tokens, [B, T, columns of these heads]."""
        if not is_plain(linear):  # a layer with adapters, for example, computes all heads of this rank's tokens
            return to_heads(linear(norm(latent)), context)
        weight = local(linear.weight).chunk(context.size)[context.rank]
        return F.linear(_gather(norm(latent), context), weight)

    def _mix(self, projected: Any, layout: BatchLayout) -> Tensor:
        if self.groups.context is not None:
            q, kv, shared = projected
            return self._weigh(*self._heads(self._scaled(q, layout), kv, shared, layout), layout).flatten(2)
        latents: Latents = projected
        pages, normed = self._write_latents(latents, layout)
        q = latents.q
        if normed is not None:
            q = call_linear(self.q_b_proj, normed)
        elif self.q_rank is not None:
            q, _ = add_norm_linear(self.q_a_layernorm, self.q_b_proj, None, q)
        latents = latents._replace(q=self._scaled(q, layout))
        if not self._absorbs(layout, q.shape[1]):
            return self._weigh(*self._qkv(latents, layout), layout).flatten(2)
        # Attention returns weighted sums of latents, [B, T, H, L]. They are then projected to weighted sums of values.
        weight = self._up_weight(q)[:, self.nope_dim :]  # [H, V, L]
        out = self._weigh(*self._absorbed_qkv(latents, pages, layout), layout)
        values = head_linear(out, weight) if takes_heads(out, weight) else torch.einsum("bthl,hvl->bthv", out, weight)
        return values.flatten(2)

    def _scaled(self, q: Tensor, layout: BatchLayout) -> Tensor:
        """Return the queries [B, T, H · (N + R)] of all new tokens. A derived class may first scale each query by a
        factor that depends on the token's position."""
        return q

    def _heads(self, q: Tensor, kv: Tensor, shared: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k [B, T, H, N + R] and v [B, T, H, V] of the new tokens."""
        build = latent_heads if self.rope_kernel else latent_heads_reference
        cos, sin = self._tables(layout)
        return build(q, kv, shared, cos, sin, self.num_heads, interleaved=self.interleaved)

    def _qkv(self, projected: Latents, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        q, latent, shared = projected
        cache, group = layout.cache, ranks_of(self.kv_b_proj)
        if cache is None:
            kv, _ = add_norm_linear(self.kv_a_layernorm, self.kv_b_proj, None, latent)  # [B, T, H · (N + V)]
            return self._heads(q, kv, copy_to_region(shared, group), layout)

        c = self.kv_a_layernorm(latent)
        if is_batch_invariant() or not cache.length:
            q, k, v = self._heads(q, call_linear(self.kv_b_proj, c), shared, layout)
            # Batch-invariant decoding must compute the same sums as training, so it caches the keys and values of
            # training.
            if is_batch_invariant():
                k, v = cache.extend(self.layer, k, v)
            else:
                rows = torch.cat([c, k[:, :, 0, self.nope_dim :]], -1)[:, :, None]
                cache.extend(self.layer, rows, rows[..., :0])
            return q, k, v

        # If many new tokens follow cached tokens, compute the keys and values of all tokens, [B, S, H, ...], from their
        # cached rows.
        rows, _ = cache.extend(self.layer, self._rows(c, shared, layout), c[:, :, None, :0])
        c, shared = rows.squeeze(2).split([self.kv_rank, self.rope_dim], -1)
        kv = call_linear(self.kv_b_proj, c).unflatten(-1, (self.num_heads, -1))
        k_nope, v = kv.split([self.nope_dim, self.value_dim], -1)
        k = torch.cat([k_nope, shared[:, :, None].expand(-1, -1, self.num_heads, -1)], -1)
        return torch.cat(self._rotated_queries(q, layout), -1), k, v

    # Decoding: the new tokens attend to cached latents.

    def _absorbs(self, layout: BatchLayout, T: int) -> bool:
        """Whether T new tokens attend directly to cached latents, instead of to keys and values that are computed from
        the latents.

        With cached latents, each cached token takes T · (2 L + R) multiplications per head. With keys and values, each
        cached token takes L · (N + V) multiplications per head to compute its key and value, and T · (N + R + V)
        multiplications per head to attend to them.
        """
        cache = layout.cache
        if cache is None or is_batch_invariant() or not (cache.length or cache.pages is not None):
            return False
        expanded = self.nope_dim + self.value_dim
        return cache.pages is not None or T * (2 * self.kv_rank - expanded) <= self.kv_rank * expanded

    def _write_latents(self, latents: Latents, layout: BatchLayout) -> tuple[Tensor | None, Tensor | None]:
        """Write the rows (see the module's docstring) of a step's tokens into the cache's pages, and normalize the
        latents of the tokens' queries.

        Returns:
            The pages [pages, P, 1, L + R], and the normalized latents [B, T, Q]. The pages are None if the rows have
            not been written, and the latents are None if they have not been normalized.
        """
        cache, fused = layout.cache, self.rope_kernel and not torch.is_grad_enabled() and use_triton(latents.c)
        place = None if cache is None or not fused or is_batch_invariant() else cache.pages_of(self.layer)
        norm = fused_norm(self.kv_a_layernorm)
        if place is None or norm is None or place[0].dtype != latents.c.dtype:
            return None, None
        q = q_weight = None
        # If `q_b_proj` is not plain, for example because it has adapters, its input is normalized later instead.
        if self.q_rank is not None and type(self.q_b_proj) is nn.Linear and is_plain(self.q_b_proj):
            q_norm = fused_norm(self.q_a_layernorm)
            if q_norm is not None and q_norm[1:] == norm[1:]:
                q, q_weight = latents.q.flatten(0, 1), q_norm.weight
        (pages, slots), (cos, sin) = place, self._tables(layout)
        c, rest = latents.c.flatten(0, 1), latents.rope.flatten(0, 1)
        normed = write_latents(pages, slots, c, rest, norm, cos, sin, q, q_weight, interleaved=self.interleaved)
        return pages, None if normed is None else normed.view(latents.q.shape)

    def _absorbed_qkv(
        self, projected: Latents, rows: Tensor | None, layout: BatchLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, L + R], the rows [B, S, 1, L + R] of all tokens, and a view of the rows' latents.

        If the rows of the new tokens have already been written to the cache, the argument ``rows`` has the rows of all
        tokens. Otherwise, the argument is None.
        """
        assert layout.cache is not None
        q, latent, shared = projected
        if rows is None:
            new = self._rows(self.kv_a_layernorm(latent), shared, layout)
            rows, _ = layout.cache.extend(self.layer, new, new[..., :0])
        weight = self._up_weight(q)[:, : self.nope_dim].transpose(1, 2)  # [H, L, N]
        if self.rope_kernel and takes_heads(q, weight):
            heads = q.unflatten(-1, (self.num_heads, -1))
            folded = head_linear(heads, weight, *self._tables(layout), interleaved=self.interleaved)
        else:
            nope, rest = self._rotated_queries(q, layout)
            folded = torch.cat([torch.einsum("bthn,hln->bthl", nope, weight), rest], -1)
        return folded, rows, rows[..., : self.kv_rank]

    def _rows(self, c: Tensor, shared: Tensor, layout: BatchLayout) -> Tensor:
        """Return the rows [B, T, 1, L + R] that the cache stores for new tokens."""
        return torch.cat([c[:, :, None], self._rotate(shared[:, :, None], layout)], -1)

    def _rotated_queries(self, q: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Split queries [B, T, H · (N + R)] into a part [B, T, H, N] that is not rotated, and a part [B, T, H, R],
        which this method rotates."""
        nope, rest = q.unflatten(-1, (self.num_heads, -1)).split([self.nope_dim, self.rope_dim], -1)
        return nope, self._rotate(rest, layout)

    def _rotate(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Rotate x [B, T, heads, R]."""
        cos, sin = self._tables(layout)
        if cos is None or sin is None:
            return x
        return (rope if self.rope_kernel else rope_reference)(x, cos, sin, interleaved=self.interleaved)

    def _up_weight(self, like: Tensor) -> Tensor:
        """Return the weight of ``kv_b_proj`` as [H, N + V, L]. Each head has rows for its key, then for its value.

        If ``kv_b_proj`` is not an ordinary linear layer, its weight is computed once per generation, by applying the
        layer to the identity matrix. For a layer with adapters, the result thus includes the adapters.
        """
        linear = self.kv_b_proj
        if is_plain(linear):
            return _by_heads(local(linear.weight), self.num_heads)

        dtype, device = like.dtype, like.device

        def compute() -> tuple[Tensor]:
            identity = torch.eye(self.kv_rank, dtype=dtype, device=device)
            return (linear(identity).T.contiguous(),)

        return _by_heads(derive(self, dtype, compute)[0], self.num_heads)

    # The interface of layers.

    @property
    def attention(self) -> AttentionSpec:
        """The masks, rotary tables and cache that the layer needs, and its operations per query and key in training."""
        columns = self.nope_dim + self.rope_dim + self.value_dim
        return AttentionSpec(
            self.layer, self.rotary, self.window, self.softcap is not None, 2 * self.num_heads * columns,
            takes_pages=True, caches_latents=True,
        )  # fmt: skip

    def can_shard(self, size: int) -> bool:
        """Whether the number of heads is divisible by ``size``."""
        return self.num_heads % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep an equal part of the heads on each rank, and replicate the projections to latents.

        Raises:
            ValueError: the number of heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        replicated = ("kv_a_proj",) if self.q_rank is None else ("qkv_a_proj",)
        columns = ("q_proj" if self.q_rank is None else "q_b_proj", "kv_b_proj")
        for name in replicated:
            alone = group if group.sequence_parallel else None
            setattr(self, name, ReplicatedLinear.of(getattr(self, name), alone))
        for name in columns:
            setattr(self, name, ColumnParallelLinear.of(getattr(self, name), group))
        self.o_proj = RowParallelLinear.of(self.o_proj, group)
        return {**{f"{name}.weight": 0 for name in columns}, "o_proj.weight": 1}

    def _share_heads(self, group: Group) -> None:
        advice = ": heads are not replicated. Use fewer ranks, and FSDP over the others."
        check_divisible("LigerLatentAttention", "num_attention_heads", self.num_heads, group, advice)
        self.num_heads //= group.size

    def shard_tokens(self, group: Group) -> None:
        """Prepare the layer for context parallelism, where each rank has an equal part of the tokens. Inside attention,
        each rank has all tokens, but only an equal part of the heads.

        Raises:
            ValueError: the number of heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.groups = replace(self.groups, context=group)


def _by_heads(weight: Tensor, heads: int) -> Tensor:
    """Split the rows of a weight [H · O, C] by head, into [H, O, C]."""
    return weight.view(heads, -1, weight.shape[1])


def _gather(x: Tensor, context: Group) -> Tensor:
    """All-gather the ranks' tokens [B, T / R, C] into [B, T, C]. The backward sums the gradients of all ranks."""
    return copy_to_region(x, replace(context, sequence_parallel=True))
