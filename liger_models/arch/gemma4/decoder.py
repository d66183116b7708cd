"""The decoder of the Gemma 4 families: the blocks, and the tensors that blocks pass to later blocks."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch.gemma4.attention import Gemma4Attention, Gemma4Layout
from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.experts import Gemma4Experts
from liger_models.arch.gemma4.per_layer import PerLayerBranch, PerLayerInputs, find_ids
from liger_models.base.causal_lm import CausalLM
from liger_models.distributed.collectives import Group
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.embedding import LigerEmbedding, resize_rows, zero_padding_row
from liger_models.layers.layer import Layer
from liger_models.layers.linear import replicated
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm, fp32_norm
from liger_models.layers.rope import ProportionalRotaryEmbedding, RotaryEmbedding


class LayerScale(Layer):
    """Multiplies its input by a number that comes from the checkpoint and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.group: Group | None = None

    def draw(self, std: float) -> bool:
        """Set the number to 1."""
        nn.init.ones_(self.weight)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """All-reduce the gradient, which exists only if a user trains the number."""
        self.group = group
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [...] by the number."""
        return x * replicated(self.weight, self.group).to(x.dtype)


class Gemma4Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h))); h += per-layer branch(h); h *= scale``.

    In a model with experts, the second step is ``h += norm(norm(mlp(norm(h))) + norm(experts(norm(h))))``.
    """

    def __init__(self, config: Gemma4TextConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, norm = config.hidden_size, fp32_norm(config, kernels)
        self.layer = layer
        # Each branch has a norm before it and another after it.
        self.input_layernorm = norm(C)
        self.self_attn = Gemma4Attention(config, layer, norm, kernels)
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C)
        self.mlp = GatedMLP(C, config.mlp_size_of(layer), act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(C)
        # Some models add experts to the MLP, and some a second input for each token.
        self.moe: Gemma4Experts | None = None
        if config.enable_moe_block:
            self.moe = Gemma4Experts(config, norm, kernels)
            self.pre_feedforward_layernorm_2 = norm(C)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(C), norm(C)
        self.per_layer = PerLayerBranch(config, norm) if config.hidden_size_per_layer_input else None
        self.layer_scalar = LayerScale()

    def forward(self, x: Tensor | None, residual: Tensor, layout: Any) -> tuple[Tensor | None, ...]:
        """Run the block on ``residual + x`` [B, T, C]; return the next ``(x, residual)`` and tensors for `carry`."""
        # Attention. x is the branch's output, which the next norm adds to the stream.
        attended: Any = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x, residual, *carried = attended  # keys and values, unless they are those of another layer
        # The MLP, which all models have.
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)

        if self.moe is not None:
            # The experts and their router read the stream before the MLP.
            y, router_logits = self.moe(self.pre_feedforward_layernorm_2(residual), *layout.experts, stream=residual)
            carried.append(router_logits)
            y = self.post_feedforward_layernorm_2(y)
            x, _ = self.post_feedforward_layernorm.add(y, self.post_feedforward_layernorm_1(x))
        else:
            x = self.post_feedforward_layernorm(x)
        residual = residual + x

        if self.per_layer is not None:
            residual = residual + self.per_layer(residual, layout.per_layer[self.layer])
        # The factor applies to the whole stream, so nothing is left to be added to it.
        return None, self.layer_scalar(residual), *carried


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
        """Build the blocks, and the module that computes the blocks' second inputs from the tokens."""
        norm = fp32_norm(config, self.kernels)
        # Set before the blocks: states of optimizers number parameters in this order.
        self.per_layer = PerLayerInputs(config, norm) if config.hidden_size_per_layer_input else None
        return super().build_blocks(config)

    def build_norm(self, config: Gemma4TextConfig) -> LigerRMSNorm:
        """A norm that multiplies by its weight in fp32."""
        return fp32_norm(config, self.kernels)(config.hidden_size)

    def build_head(self, config: Gemma4TextConfig) -> LigerLMHead:
        """A head with capped logits."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, softcap=config.final_logit_softcapping, kernels=self.kernels
        )

    def build_rotary(self, config: Gemma4TextConfig) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. Layers with full attention rotate only some pairs of dimensions."""
        # Both types have their own head dimension, so their tables differ in width, too.
        full = ProportionalRotaryEmbedding(config.global_head_dim, config.rope_theta, config.partial_rotary_factor)
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": full, "sliding_attention": sliding}

    def reset_parameters(self) -> None:
        """See `Decoder.reset_parameters`. In both token embeddings, the padding token's row is 0."""
        super().reset_parameters()
        if self.per_layer is not None:
            zero_padding_row(self.per_layer.embed_tokens)

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> LigerEmbedding:
        """See `CausalLM.resize_token_embeddings`. Both token embeddings are resized."""
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of)
        if self.per_layer is not None:
            resize_rows(self.per_layer.embed_tokens, embedding.num_embeddings)
            self.config = replace(self.config, vocab_size_per_layer_input=embedding.num_embeddings)
        return embedding

    def layout_inputs(self, input_ids: Tensor | None, embeds: Tensor, T: int) -> dict[str, Any]:
        """Return the second inputs of all blocks, for this rank's share of the tokens."""
        if self.per_layer is None:
            return {}
        if input_ids is None:
            if self.groups.sharded is not None:
                raise ValueError(
                    "forward: inputs_embeds needs the whole embedding on each rank, because this model embeds the ids "
                    "a second time. Pass input_ids."
                )
            input_ids = find_ids(embeds, self.embed_tokens)
        tokens = self.per_layer.embed_tokens(self.groups.context_share(input_ids))  # [B, T, L · P]
        # Embeddings of all tokens are cut to this rank's share; those of its share stay as they are.
        embeds, tokens = (self.groups.token_share(x) if x.shape[1] == T else x for x in (embeds, tokens))
        return {"per_layer": self.per_layer(embeds, tokens)}

    @property
    def held_elements(self) -> int:
        """Number of elements per token of the blocks' second inputs, and of the projections they are computed from."""
        count: int = 2 * self.config.num_hidden_layers * self.config.hidden_size_per_layer_input
        return count

    def carry(self, index: int, more: list[Tensor], layout: Any) -> tuple[list[Tensor], Any]:
        """Return a block's router logits, and a layout with the block's keys and values for blocks of its type."""
        attention: Any = self.layers[index].self_attn
        if attention.shares:
            return more, layout
        # Without sharing, nothing holds on to the keys and values.
        k, v, *routed = more
        if self.config.num_kv_shared_layers:
            layout = replace(layout, shared={**(layout.shared or {}), attention.layer_type: (k, v)})
        return routed, layout

    def stand_ins(self, layout: Any, like: Tensor) -> Any:
        """See `Decoder.stand_ins`. Placeholders replace all second inputs, and keys and values of each layer type."""
        config, shape = self.config, like.shape[:2]
        # Shapes differ between types of layers; of each type the last layer's remain, as in `carry`.
        width, shared = config.hidden_size_per_layer_input, {}
        for layer in range(config.num_hidden_layers):
            heads = (*shape, config.kv_heads_of(layer), config.head_size_of(layer))
            shared[config.layer_type(layer)] = tuple(like.new_empty(heads).requires_grad_() for _ in range(2))
        per_layer = tuple(like.new_empty(*shape, width).requires_grad_() for _ in self.layers) if width else None
        return replace(layout, shared=shared, per_layer=per_layer)
