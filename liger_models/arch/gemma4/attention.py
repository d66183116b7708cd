"""Attention of Gemma 4, and the layout that hands keys and values from layer to layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group, to_heads, to_tokens
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_reference
from liger_models.layers.attention import LigerAttention
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.layer import AttentionSpec
from liger_models.layers.masks import text_mask
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm, add_norm_linear
from liger_models.layers.recompute import draws, recomputes, run_twice

if TYPE_CHECKING:
    from typing_extensions import Self
from liger_models.arch.gemma4.config import Gemma4TextConfig


@dataclass(frozen=True, eq=False)
class Gemma4Layout(BatchLayout):
    """`BatchLayout` with what Gemma 4 hands from layer to layer.

    Attributes:
        per_layer: the input of each block besides the stream, [B, T, P] each, of this rank's tokens; None for none.
        shared: type of a layer -> keys and values [B, S, G, D] of the last layer of this type that has its own.
    """

    per_layer: tuple[Tensor, ...] | None = None
    shared: Mapping[str, tuple[Tensor, Tensor]] | None = None

    @classmethod
    def build(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        rotary: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]],
        *,
        windows: Mapping[int | None, bool] | None = None,
        visible_until: Tensor | None = None,
        **options: Any,
    ) -> "Self":
        """As `BatchLayout.build`, but ``visible_until`` holds for layers with a window only."""
        if visible_until is None:
            return super().build(shape, device, rotary, windows=windows, **options)
        every: dict[int | None, bool] = {None: False} if windows is None else {**windows}
        whole: dict[int | None, bool] = {None: every[None]} if None in every else {}
        layout = super().build(shape, device, rotary, windows=whole, **options)
        for window, needed in every.items():
            if window is not None:
                layout.masks[window] = text_mask(
                    layout.documents, layout.past, window, *shape, device, needed, visible_until
                )
        return layout


class Gemma4Attention(LigerAttention):
    """`LigerAttention` with norms of q, k and v, that computes keys and values or takes those of another layer.

    Args:
        config: sizes and constants.
        layer: index of the layer.
        norm: returns a Gemma 4 norm for a width.
        kernels: which parts run on fused kernels.
    """

    def __init__(
        self, config: Gemma4TextConfig, layer: int, norm: partial[LigerRMSNorm], kernels: KernelOptions
    ) -> None:
        C, H = config.hidden_size, config.num_attention_heads
        G, D = config.kv_heads_of(layer), config.head_size_of(layer)
        super().__init__(
            C, H, G, D,
            layer=layer, o_bias=config.attention_bias, scale=1.0, window=config.window(layer),
            dropout=config.attention_dropout, rotary=config.layer_type(layer), rope_kernel=kernels.rope,
        )  # fmt: skip
        self.layer_type, self.shares = config.layer_type(layer), config.shares(layer)
        parts = 0 if self.shares else 1 if config.keys_are_values(layer) else 2
        self.qkv_proj = nn.Linear(C, (H + parts * G) * D, bias=config.attention_bias)
        self.q_norm = norm(D)
        self.k_norm = None if self.shares else norm(D)

    @property
    def attention(self) -> AttentionSpec:
        """As `LigerAttention.attention`; without a slot in the cache for keys and values of another layer."""
        return super().attention._replace(cache_slot=None) if self.shares else super().attention

    def shard(self, group: Group) -> dict[str, int]:
        """As `LigerAttention.shard`."""
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.group = group
        return super().shard(group)

    def add_norm(  # type: ignore[override]
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, ...]:
        """As `LigerAttention.add_norm`: ``(y, residual, k, v)``, k and v [B, S, G, D] unless they are shared."""
        if norm is None:
            x, (residual, _) = None, add_norm(norm, x, residual)  # only the sum is saved
        if recomputes(self) and layout.cache is None:  # recomputation would append to the cache again
            random = draws(self, self.dropout)
            outputs: tuple[Tensor, ...] = run_twice(
                self._add_norm, norm, x, residual, layout, preserve_rng_state=random
            )
            return outputs
        return self._add_norm(norm, x, residual, layout)

    def _add_norm(  # type: ignore[override]
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: Any
    ) -> tuple[Tensor, ...]:
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)
        context = self.groups.context
        q, k, v = self._split(qkv if context is None else to_heads(qkv, context), layout)
        if self.shares:
            k, v = layout.shared[self.layer_type]
        elif layout.cache is not None:
            k, v = layout.cache.extend(self.layer, k, v)
        out = attention(
            q, k, v, layout, scale=self.scale, window=self.window, dropout=self.dropout if self.training else 0.0
        ).flatten(2)  # [B, T, H · D]
        y: Tensor = self.o_proj(out if context is None else to_tokens(out, context))
        return (y, residual) if self.shares else (y, residual, k, v)

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        split = qkv_norm_rope if self.rope_kernel and self.q_norm.kernel else qkv_norm_rope_reference
        k_norm_weight = None if self.k_norm is None else self.k_norm.local_weight(qkv)
        return split(
            qkv, *layout.tables[self.layer_type], self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm.local_weight(qkv), k_norm_weight, eps=self.q_norm.eps,
        )  # fmt: skip
