"""Attention of Gemma 3n and Gemma 4, and the layout that passes keys and values from layer to layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.distributed.collectives import Group, to_heads, to_tokens
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_reference
from liger_models.layers.attention import LigerAttention
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.layer import AttentionSpec
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm_linear, call_linear


@dataclass(frozen=True, eq=False)
class GemmaLayout(BatchLayout):
    """`BatchLayout` with the additional tensors that the blocks of Gemma 3n and Gemma 4 need.

    Attributes:
        per_layer: each block's second input [B, T, P] for this rank's tokens, see `PerLayerInputs`; None for models
            without second inputs.
        shared: maps each layer type to the keys and values [B, S, G, D] that the latest layer of this type computed.
    """

    images_need_window = True

    per_layer: tuple[Tensor, ...] | None = None
    shared: Mapping[str, tuple[Tensor, Tensor]] | None = None


class GemmaAttention(LigerAttention):
    """`LigerAttention` with norms of q, k and v. The last layers of a model use the keys and values of an earlier
    layer.

    In these last layers, the forward returns ``(y, residual)``, like the forward of `LigerAttention`. In all other
    layers, the forward returns ``(y, residual, k, v)``, and the block passes k and v on to later layers.

    Args:
        config: sizes and constants of the model.
        layer: index of the layer.
        norm: function that returns a norm of a given width.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, layer: int, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        C, H = config.hidden_size, config.num_attention_heads
        G, D = config.kv_heads_of(layer), config.head_size_of(layer)
        super().__init__(
            C, H, G, D,
            layer=layer, o_bias=config.attention_bias, scale=1.0, window=config.window(layer),
            dropout=config.attention_dropout, rotary=config.layer_type(layer), rope_kernel=kernels.rope,
        )  # fmt: skip
        # The last layers attend to keys and values that an earlier layer of their type computed.
        self.layer_type, self.shares = config.layer_type(layer), config.shares(layer)
        # In addition to queries, the layer projects keys and values, only keys (which are also the values), or neither.
        parts = 0 if self.shares else 1 if config.keys_are_values(layer) else 2
        self.qkv_proj = nn.Linear(C, (H + parts * G) * D, bias=config.attention_bias)
        self.q_norm = norm(D)
        self.k_norm = None if self.shares else norm(D)

    @property
    def attention(self) -> AttentionSpec:
        """See `LigerAttention.attention`. A layer that uses the keys and values of another layer has no cache slot of
        its own."""
        return super().attention._replace(cache_slot=None) if self.shares else super().attention

    def shard(self, group: Group) -> dict[str, int]:
        """See `LigerAttention.shard`."""
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                # Each rank normalizes its own heads, and all ranks have the same weights, so the gradients of these
                # weights are summed over the ranks.
                norm.group = group
        return super().shard(group)

    def _add_norm(  # type: ignore[override]
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: Any
    ) -> tuple[Tensor, ...]:
        """Return ``(y, residual, k, v)`` with k and v [B, S, G, D]. Layers that use the k and v of another layer return
        ``(y, residual)``."""
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)
        context = self.groups.context
        if context is not None:
            qkv = to_heads(qkv, context)  # all tokens, and 1 / R of the heads

        # q [B, T, H, D] of this layer, and k, v [B, S, G, D] of this layer and the cache, or of an earlier layer.
        q, k, v = self._split(qkv, layout)
        if self.shares:
            k, v = layout.shared[self.layer_type]
        elif layout.cache is not None:
            k, v = layout.cache.extend(self.layer, k, v)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, layout, scale=self.scale, window=self.window, dropout=dropout).flatten(2)

        if context is not None:
            out = to_tokens(out, context)
        y = call_linear(self.o_proj, out)
        # Keys and values are returned instead of stored as attributes, so that recomputing a block changes no state.
        return (y, residual) if self.shares else (y, residual, k, v)

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        split = qkv_norm_rope if self.rope_kernel and self.q_norm.kernel else qkv_norm_rope_reference
        k_norm_weight = None if self.k_norm is None else self.k_norm.local_weight(qkv)
        return split(
            qkv, *layout.tables[self.layer_type], self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm.local_weight(qkv), k_norm_weight, eps=self.q_norm.eps,
        )  # fmt: skip
