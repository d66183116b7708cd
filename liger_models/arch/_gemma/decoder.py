"""The decoder that Gemma 3n and Gemma 4 share: its embeddings, and the tensors that blocks pass to later blocks."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from liger_models.arch._gemma.attention import GemmaLayout
from liger_models.arch._gemma.base import CappedGemmaModel
from liger_models.arch._gemma.per_layer import PerLayerInputs, find_ids
from liger_models.layers.batch import BatchLayout
from liger_models.layers.embedding import LigerEmbedding, resize_rows, zero_padding_row
from liger_models.layers.norm import LigerRMSNorm, fp32_norm


class GemmaDecoder(CappedGemmaModel):
    """A decoder whose blocks read second inputs (see `PerLayerInputs`), and whose last blocks use the keys and values
    of earlier blocks."""

    layout_class: ClassVar[type[BatchLayout]] = GemmaLayout

    def build_blocks(self, config: Any) -> nn.ModuleList:
        """Build the blocks, and the module that computes the blocks' second inputs from the tokens."""
        norm = fp32_norm(config, self.kernels)
        # Create this module before the blocks, because optimizer states number parameters in the order of creation.
        self.per_layer = PerLayerInputs(config, norm) if config.hidden_size_per_layer_input else None
        return super().build_blocks(config)

    def build_norm(self, config: Any) -> LigerRMSNorm:
        """A norm that multiplies by its weight in fp32."""
        return fp32_norm(config, self.kernels)(config.hidden_size)

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
        # The second embedding has no rows for some tokens, such as image tokens. These tokens get the row of token 0.
        beyond = input_ids >= self.config.vocab_size_per_layer_input
        ids = self.groups.local_along_context(input_ids.masked_fill(beyond, 0))
        tokens = self.per_layer.embed_tokens(ids)  # [B, T, L · P]
        # Embeddings of all T tokens are cut to this rank's share. Embeddings that already are this share do not change.
        embeds, tokens = (self.groups.local_tokens(x) if x.shape[1] == T else x for x in (embeds, tokens))
        return {"per_layer": self.per_layer(embeds, tokens)}

    @property
    def held_elements(self) -> int:
        """Number of elements per token in the second inputs of all blocks and in the projections from which these
        inputs are computed."""
        count: int = 2 * self.config.num_hidden_layers * self.config.hidden_size_per_layer_input
        return count

    def carry(self, index: int, more: list[Tensor], layout: Any) -> tuple[list[Tensor], Any]:
        """Return a block's router logits, and a layout that passes the block's k and v to later blocks of the same
        layer type."""
        attention: Any = self.layers[index].self_attn
        if attention.shares:
            return more, layout
        # If no layers share keys and values, the layout keeps no reference to them.
        k, v, *routed = more
        if self.config.num_kv_shared_layers:
            layout = replace(layout, shared={**(layout.shared or {}), attention.layer_type: (k, v)})
        return routed, layout

    def stand_ins(self, layout: Any, like: Tensor) -> Any:
        """See `Decoder.stand_ins`. Uninitialized tensors of the same shapes replace the second inputs of all blocks,
        and the keys and values of each layer type."""
        config, shape = self.config, like.shape[:2]
        # Shapes differ between layer types. As in `carry`, later layers overwrite the keys and values of earlier layers
        # of the same type.
        width, shared = config.hidden_size_per_layer_input, {}
        for layer in range(config.num_hidden_layers):
            heads = (*shape, config.kv_heads_of(layer), config.head_size_of(layer))
            shared[config.layer_type(layer)] = tuple(like.new_empty(heads).requires_grad_() for _ in range(2))
        per_layer = tuple(like.new_empty(*shape, width).requires_grad_() for _ in self.layers) if width else None
        return replace(layout, shared=shared, per_layer=per_layer)
