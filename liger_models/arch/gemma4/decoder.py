"""The language model of the Gemma 4 families: configuration, layers, block, decoder, names in a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import (
    Expression,
    Name,
    WeightMap,
    decoder_map,
    fused_expert_rows,
    key_rows,
    qkv_rows,
)
from liger_models.distributed.collectives import Group, to_heads, to_tokens
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_reference
from liger_models.layers.attention import LigerAttention
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import LAYER_TYPES, RMSNormDecoderConfig, check_layer_types, check_values
from liger_models.layers.embedding import LigerEmbedding, resize_rows, zero_padding_row
from liger_models.layers.layer import AttentionSpec, Layer
from liger_models.layers.linear import ReplicatedLinear, replicated
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.masks import text_mask
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm, add_norm_linear
from liger_models.layers.recompute import draws, recomputes, run_twice
from liger_models.layers.rope import ProportionalRotaryEmbedding, RotaryEmbedding

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma 4 language model; config.json spells ``hidden_act`` as ``hidden_activation``.

    ``head_dim`` and ``num_key_value_heads`` are those of the layers with a window, ``global_head_dim`` and, with
    ``attention_k_eq_v``, ``num_global_key_value_heads`` those of the others. ``rope_theta`` and
    ``partial_rotary_factor`` apply to the layers without a window, ``rope_local_base_freq`` to those with one.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new")

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    sliding_window: int = 512
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        name, H = type(self).__name__, self.num_attention_heads
        check_layer_types(name, self.layer_types, self.num_hidden_layers)
        check_values(self, use_bidirectional_attention=(None, "vision"), rope_scaling=(None,))
        groups = {self.kv_heads_of(layer) for layer in range(self.num_hidden_layers)}
        if not all(H % G == 0 for G in groups) or self.global_head_dim % 2 != 0:
            raise ValueError(
                f"{name}: num_attention_heads ({H}) must be a multiple of num_global_key_value_heads "
                f"({self.num_global_key_value_heads}), and global_head_dim ({self.global_head_dim}) even."
            )
        own = {self.layer_type(layer) for layer in range(self.num_hidden_layers) if not self.shares(layer)}
        every = {self.layer_type(layer) for layer in range(self.num_hidden_layers)}
        if not (own == every and self.num_kv_shared_layers < self.num_hidden_layers):
            raise ValueError(
                f"{name}: num_kv_shared_layers ({self.num_kv_shared_layers}) must leave a layer of each type with keys "
                f"and values of its own, got {self.num_hidden_layers} layers. Check config.json."
            )
        sizes = (self.num_experts, self.top_k_experts, self.moe_intermediate_size)
        if self.enable_moe_block and None in sizes:
            raise ValueError(
                f"{name}: enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size, got {sizes}."
            )

    def layer_type(self, layer: int) -> str:
        """The type of a layer, "sliding_attention" or "full_attention"; also the name of its rotary embedding."""
        if layer == self.num_hidden_layers - 1:
            return "full_attention"  # whatever layer_types says
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % 6 else "full_attention"

    def window(self, layer: int) -> int | None:
        """Number of tokens that a layer sees, None for all."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def shares(self, layer: int) -> bool:
        """Whether a layer attends to the keys and values of the last layer of its type that has its own."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def keys_are_values(self, layer: int) -> bool:
        """Whether a layer's keys, before their norm, are its values."""
        return self.attention_k_eq_v and self.window(layer) is None

    def kv_heads_of(self, layer: int) -> int:
        """Number of KV heads of a layer."""
        own = self.num_global_key_value_heads if self.keys_are_values(layer) else None
        return self.kv_heads if own is None else own

    def head_size_of(self, layer: int) -> int:
        """Dimension of a layer's heads."""
        return self.head_size if self.window(layer) is not None else self.global_head_dim

    def mlp_size_of(self, layer: int) -> int:
        """Width of a layer's MLP."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.shares(layer) else 1)


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


def fp32_norm(config: Gemma4TextConfig, kernels: KernelOptions) -> partial[LigerRMSNorm]:
    """Makes norms of a width whose weight multiplies in fp32."""
    return partial(LigerRMSNorm, eps=config.rms_norm_eps, casting_mode="gemma", kernel=kernels.rms_norm)


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


class Gemma4Router(Layer):
    """Chooses experts by the logits of a normed token, and multiplies their weights by a factor of each expert.

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.norm = norm(config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def draw(self, std: float) -> bool:
        """Set the factors to 1; norm and projection initialise themselves."""
        nn.init.ones_(self.per_expert_scale)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projection."""
        self.proj = ReplicatedLinear.of(self.proj, group)
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Return True: the forward sums the gradient of the factors."""
        return True

    def forward(
        self, x: Tensor, route: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] -> ``(weights [N, K], experts [N, K], logits [N, X])``, N the number of tokens."""
        logits, _ = add_norm_linear(self.norm, self.proj, None, x)
        weights, experts, logits = route(logits.flatten(0, -2) * x.shape[-1] ** -0.5)
        return weights * replicated(self.per_expert_scale, self.groups.tensor)[experts], experts, logits


class Gemma4Experts(LigerMoE):
    """`LigerMoE` with a `Gemma4Router`, whose input is not that of the experts.

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        X, K, width = config.num_experts, config.top_k_experts, config.moe_intermediate_size
        assert X is not None
        assert K is not None
        assert width is not None
        super().__init__(config.hidden_size, width, X, K, normalize=True, act="gelu_tanh", kernel=kernels.swiglu)
        self.gate = Gemma4Router(config, norm)

    def forward(self, x: Tensor, experts: Tensor | None = None, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and the stream before its norm [B, T, C] -> ``(y [B, T, C], router_logits [N, X])``, N tokens."""
        return self._mix(x, *self.gate(x if stream is None else stream, partial(self._route, given=experts)))


class PerLayerInputs(Layer):
    """The inputs of the blocks besides the stream: of each token an embedding for each block, and of its embedding a
    projection, which is normed. Their sum is divided by sqrt(2).

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        width = config.hidden_size_per_layer_input
        self.embed_tokens = LigerEmbedding(
            config.vocab_size_per_layer_input,
            config.num_hidden_layers * width,
            padding_idx=config.pad_token_id,
            scale=width**0.5,
        )
        self.projection = nn.Linear(config.hidden_size, config.num_hidden_layers * width, bias=False)
        self.norm = norm(width)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projection; the embedding shards itself."""
        self.projection = ReplicatedLinear.of(self.projection, group)
        return {}

    def forward(self, embeds: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The embeddings [B, T, C], and those of `embed_tokens` [B, T, L · P] -> [B, T, P] for each of L blocks."""
        width = self.norm.hidden_size
        projected = self.norm((self.projection(embeds) * embeds.shape[-1] ** -0.5).unflatten(-1, (-1, width)))
        inputs: Tensor = (projected + tokens.view_as(projected)) * 2**-0.5
        return inputs.unbind(2)


class PerLayerBranch(Layer):
    """``norm(projection(gelu(gate(x)) · input))`` of the stream and a block's input of `PerLayerInputs`.

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        C, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = nn.Linear(C, width, bias=False)
        self.projection = nn.Linear(width, C, bias=False)
        self.norm = norm(C)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate both projections."""
        self.gate = ReplicatedLinear.of(self.gate, group)
        self.projection = ReplicatedLinear.of(self.projection, group)
        return {}

    def forward(self, x: Tensor, per_layer: Tensor) -> Tensor:
        """x [B, T, C], per_layer [B, T, P] -> [B, T, C]."""
        y: Tensor = self.norm(self.projection(F.gelu(self.gate(x), approximate="tanh") * per_layer))
        return y


class LayerScale(Layer):
    """Multiplies by a number of the checkpoint, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.group: Group | None = None

    def draw(self, std: float) -> bool:
        """Set the number to 1."""
        nn.init.ones_(self.weight)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """All-reduce the gradient, for those who train the number all the same."""
        self.group = group
        return True

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        return x * replicated(self.weight, self.group).to(x.dtype)


class Gemma4Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h))); h += per-layer branch(h); h *= scale``.

    With experts the second step is ``h += norm(norm(mlp(norm(h))) + norm(experts(norm(h))))``.
    """

    def __init__(self, config: Gemma4TextConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, norm = config.hidden_size, fp32_norm(config, kernels)
        self.layer = layer
        self.input_layernorm = norm(C)
        self.self_attn = Gemma4Attention(config, layer, norm, kernels)
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C)
        self.mlp = GatedMLP(C, config.mlp_size_of(layer), act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(C)
        self.moe: Gemma4Experts | None = None
        if config.enable_moe_block:
            self.moe = Gemma4Experts(config, norm, kernels)
            self.pre_feedforward_layernorm_2 = norm(C)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(C), norm(C)
        self.per_layer = PerLayerBranch(config, norm) if config.hidden_size_per_layer_input else None
        self.layer_scalar = LayerScale()

    def forward(self, x: Tensor | None, residual: Tensor, layout: Any) -> tuple[Tensor | None, ...]:
        """x [B, T, C] is yet to be added to residual [B, T, C]; returns the next such pair, and what `carry` takes."""
        x, residual, *more = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)
        if self.moe is not None:
            y, router_logits = self.moe(self.pre_feedforward_layernorm_2(residual), *layout.experts, stream=residual)
            more.append(router_logits)
            y = self.post_feedforward_layernorm_2(y)
            x, _ = self.post_feedforward_layernorm.add(y, self.post_feedforward_layernorm_1(x))
        else:
            x = self.post_feedforward_layernorm(x)
        residual = residual + x
        if self.per_layer is not None:
            residual = residual + self.per_layer(residual, layout.per_layer[self.layer])
        return None, self.layer_scalar(residual), *more


class Gemma4Decoder(CausalLM):
    """The decoder of the Gemma 4 families."""

    block_class = Gemma4Block
    layout_class: ClassVar[type[BatchLayout]] = Gemma4Layout
    replays_routing = True

    def build_embedding(self, config: Gemma4TextConfig) -> LigerEmbedding:
        """An embedding multiplied by sqrt(hidden_size)."""
        return LigerEmbedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id, scale=config.hidden_size**0.5
        )

    def build_blocks(self, config: Gemma4TextConfig) -> nn.ModuleList:
        """The blocks; before them, where their parameters have always been, what makes their inputs of the tokens."""
        norm = fp32_norm(config, self.kernels)
        self.per_layer = PerLayerInputs(config, norm) if config.hidden_size_per_layer_input else None
        return super().build_blocks(config)

    def build_norm(self, config: Gemma4TextConfig) -> LigerRMSNorm:
        """A norm whose weight multiplies in fp32."""
        return fp32_norm(config, self.kernels)(config.hidden_size)

    def build_head(self, config: Gemma4TextConfig) -> LigerLMHead:
        """A head with capped logits."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, softcap=config.final_logit_softcapping, kernels=self.kernels
        )

    def build_rotary(self, config: Gemma4TextConfig) -> dict[str, nn.Module]:
        """A rotary embedding for each type of layers; that of full attention rotates a part of the pairs."""
        full = ProportionalRotaryEmbedding(config.global_head_dim, config.rope_theta, config.partial_rotary_factor)
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": full, "sliding_attention": sliding}

    def reset_parameters(self) -> None:
        """As `Decoder.reset_parameters`; both embeddings have a row of zeros for the padding token."""
        super().reset_parameters()
        if self.per_layer is not None:
            zero_padding_row(self.per_layer.embed_tokens)

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> LigerEmbedding:
        """As `CausalLM.resize_token_embeddings`; both embeddings get as many rows."""
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of)
        if self.per_layer is not None:
            resize_rows(self.per_layer.embed_tokens, embedding.num_embeddings)
            self.config = replace(self.config, vocab_size_per_layer_input=embedding.num_embeddings)
        return embedding

    def layout_inputs(self, input_ids: Tensor | None, embeds: Tensor, T: int) -> dict[str, Any]:
        """The inputs of the blocks besides the stream, of this rank's share of the tokens."""
        if self.per_layer is None:
            return {}
        if input_ids is None:
            input_ids = self.ids_of(embeds)
        tokens = self.per_layer.embed_tokens(self.groups.context_share(input_ids))
        embeds, tokens = (self.groups.token_share(x) if x.shape[1] == T else x for x in (embeds, tokens))
        return {"per_layer": self.per_layer(embeds, tokens)}

    @torch.no_grad()
    def ids_of(self, embeds: Tensor) -> Tensor:
        """The token ids [B, T] of embeddings [B, T, C], whose values must be those of the embedding, bit for bit.

        Raises:
            ValueError: an embedding is that of no token, or the embedding is sharded.
        """
        if self.groups.sharded is not None:
            raise ValueError(
                "forward: inputs_embeds needs the whole embedding on each rank, because this model embeds the ids a "
                "second time. Pass input_ids."
            )
        rows, known = embeds.flatten(0, 1), self.embed_tokens.weight
        # A random projection sorts the table; equal rows have equal values.
        direction = torch.randn(known.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        direction = direction.to(known.device)
        scale = 1.0 if self.embed_tokens.scale is None else torch.tensor(self.embed_tokens.scale, dtype=known.dtype)
        values, order = torch.cat([(part * scale).double() @ direction for part in known.split(4096)]).sort()
        wanted = rows.double() @ direction
        near = torch.searchsorted(values, wanted - 1e-9 * wanted.abs()).clamp_max(len(values) - 1)
        ids = order[near]
        if not torch.equal(known[ids] * scale, rows.to(known.dtype)):
            raise ValueError(
                "forward: inputs_embeds must be embeddings of tokens as embed_tokens returns them, because this model "
                "embeds the ids a second time, got others. Pass input_ids."
            )
        return ids.view(embeds.shape[:2])

    @property
    def held_elements(self) -> int:
        """The inputs of all blocks, and the projections that they are made of."""
        count: int = 2 * self.config.num_hidden_layers * self.config.hidden_size_per_layer_input
        return count

    def carry(self, index: int, more: list[Tensor], layout: Any) -> tuple[list[Tensor], Any]:
        """Keep the keys and values of a block for later ones of its type, which may attend to them."""
        attention: Any = self.layers[index].self_attn
        if attention.shares:
            return more, layout
        k, v, *routed = more
        if self.config.num_kv_shared_layers:
            layout = replace(layout, shared={**(layout.shared or {}), attention.layer_type: (k, v)})
        return routed, layout

    def stand_ins(self, layout: Any, like: Tensor) -> Any:
        """Inputs of all blocks, and keys and values of both types."""
        config, shape = self.config, like.shape[:2]
        width, shared = config.hidden_size_per_layer_input, {}
        for layer in range(config.num_hidden_layers):
            heads = (*shape, config.kv_heads_of(layer), config.head_size_of(layer))
            shared[config.layer_type(layer)] = tuple(like.new_empty(heads).requires_grad_() for _ in range(2))
        per_layer = tuple(like.new_empty(*shape, width).requires_grad_() for _ in self.layers) if width else None
        return replace(layout, shared=shared, per_layer=per_layer)


IGNORED_KEYS = (
    "cache_implementation",  # a generation setting
    "per_layer_config",  # what transformers derives from the keys above, and reads again
    "expert_intermediate_size",  # an old name of moe_intermediate_size, null in the files that have it
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads ``hidden_activation``, ``rope_parameters`` of each layer type, and ``per_layer_config`` of transformers 5.

    Raises:
        ValueError: a rope type is not supported, or layers of one type differ.
    """
    flat = {key: value for key, value in hf.items() if key not in ("rope_parameters", "hidden_activation")}
    flat["hidden_act"] = hf.get("hidden_activation")
    nested = hf.get("rope_parameters") or {}
    full, sliding = (dict(nested.get(layer_type) or {}) for layer_type in LAYER_TYPES)
    given = bool(full)
    types = full.pop("rope_type", "default" if given else "proportional"), sliding.pop("rope_type", "default")
    flat["rope_theta"], flat["rope_local_base_freq"] = full.pop("rope_theta", None), sliding.pop("rope_theta", None)
    if given:
        share = full.pop("partial_rotary_factor", 1.0)
        flat["partial_rotary_factor"] = share if types[0] == "proportional" else 1.0
    known = types in (("proportional", "default"), ("default", "default"))
    if not known or full or sliding or nested.keys() - set(LAYER_TYPES):
        raise ValueError(
            "config.json: rope_parameters must be of type 'proportional' or 'default' for full_attention, and "
            f"'default' for sliding_attention, got {nested}. The architecture supports nothing else."
        )
    return flat | _of_full_layers(hf)


def _of_full_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the layers without a window, from the layers that ``per_layer_config`` names."""
    if "per_layer_config" not in hf:
        return {}
    own: list[dict[str, Any]] = [dict(each) for each in hf["per_layer_config"].values()]
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if any(each != own[0] for each in own) or any(each.keys() - names.keys() for each in own):
        raise ValueError(
            "config.json: per_layer_config must give head_dim and num_key_value_heads of all layers without a window "
            f"alike, got {hf['per_layer_config']}. The architecture supports nothing else."
        )
    found = {names[key]: value for each in own[:1] for key, value in each.items()}
    return {"global_head_dim": hf.get("head_dim", 256)} | found


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `from_json`."""
    out = {key: value for key, value in keys.items() if key not in ("rope_scaling", "hidden_act")}
    full, share, sliding = (out.pop(k) for k in ("rope_theta", "partial_rotary_factor", "rope_local_base_freq"))
    kind = {"rope_type": "proportional", "partial_rotary_factor": share} if share < 1 else {"rope_type": "default"}
    rope = {
        "full_attention": {**kind, "rope_theta": full},
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
    }
    return out | {"hidden_activation": keys["hidden_act"], "rope_parameters": rope}


def text_map(
    config: Gemma4TextConfig,
    prefix: str = "model",
    also: Mapping[str, Expression | str] | None = None,
    over: Mapping[str, Sequence[int]] | None = None,
    kept: Sequence[str] = (),
) -> WeightMap:
    """Maps the parameters of the language model to the tensors under ``prefix``; the other arguments add to them."""
    entries: dict[str, Expression | str] = {**(also or {})}
    skip = []
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.self_attn", f"{prefix}.layers.{i}.self_attn"
        heads = {"heads": config.num_attention_heads, "kv_heads": config.kv_heads_of(i)}
        size = config.head_size_of(i)
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            q, k, v = (f"{theirs}.{part}_proj.{kind}" for part in "qkv")
            rows = qkv_rows(q, k, v, **heads, head_dim=size)
            if config.shares(i):
                rows = Name(q)
                skip += [k, v]
            elif config.keys_are_values(i):
                rows = key_rows(q, k, **heads, head_dim=size)
            entries[f"{ours}.qkv_proj.{kind}"] = rows
        if config.shares(i):
            skip.append(f"{theirs}.k_norm.weight")
        else:
            entries[f"{ours}.k_norm.weight"] = f"{theirs}.k_norm.weight"
    block = f"{prefix}.layers.{{i}}"
    entries["layers.{i}.layer_scalar.weight"] = f"{block}.layer_scalar"
    norms = [
        "input_layernorm", "self_attn.q_norm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]  # fmt: skip
    if config.enable_moe_block:
        norms += [f"{place}_feedforward_layernorm_{n}" for place, n in (("pre", 2), ("post", 1), ("post", 2))]
        gate_up, down = fused_expert_rows(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")
        entries |= {
            "layers.{i}.moe.gate.proj.weight": f"{block}.router.proj.weight",
            "layers.{i}.moe.gate.norm.weight": f"{block}.router.scale",
            "layers.{i}.moe.gate.per_expert_scale": f"{block}.router.per_expert_scale",
            "layers.{i}.moe.gate_up_weight": gate_up,
            "layers.{i}.moe.down_weight": down,
        }
    if config.hidden_size_per_layer_input:
        entries |= {
            "layers.{i}.per_layer.gate.weight": f"{block}.per_layer_input_gate.weight",
            "layers.{i}.per_layer.projection.weight": f"{block}.per_layer_projection.weight",
            "layers.{i}.per_layer.norm.weight": f"{block}.post_per_layer_input_norm.weight",
            "per_layer.embed_tokens.weight": f"{prefix}.embed_tokens_per_layer.weight",
            "per_layer.projection.weight": f"{prefix}.per_layer_model_projection.weight",
            "per_layer.norm.weight": f"{prefix}.per_layer_projection_norm.weight",
        }
    without = [f"self_attn.qkv_proj.{kind}" for kind in ("weight", "bias")]
    return decoder_map(
        config,
        o_bias=config.attention_bias,
        norms=norms,
        instead=dict.fromkeys(without),
        also=entries,
        over=over,
        skip=skip,
        kept=kept,
        prefix=prefix,
    )
