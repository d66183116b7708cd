"""Mistral 7B, Mistral Nemo, Mistral Small (text), Codestral (``mistral``), and Ministral (``ministral``).

Differs from Llama: all layers attend only to the last ``sliding_window`` tokens, and there are no biases.
``sliding_window`` is 4096 in v0.1, and also if config.json lacks the key. In later releases, it is null, which means no
window. If config.json has ``layer_types``, only layers of type ``sliding_attention`` have the window. Both model types
are read in the same way. The released Ministral-8B has model_type ``mistral``, and Ministral 3 is a different
architecture (``ministral3``).

Source: https://arxiv.org/abs/2310.06825, https://mistral.ai/news/ministraux, transformers ``models/mistral``,
``models/ministral``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, is_sliding


@dataclass(frozen=True, kw_only=True)
class MistralConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Mistral model."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=True) else None


class MistralBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: MistralConfig, layer: int) -> dict[str, Any]:
        return {"window": config.window(layer)}


class LigerMistral(CausalLM):
    """Mistral with its language-model head."""

    config_class = MistralConfig
    block_class = MistralBlock


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(MistralConfig):
    """Sizes and constants of a Ministral model, as in `MistralConfig`."""


class LigerMinistral(LigerMistral):
    """Ministral with its language-model head."""

    config_class = MinistralConfig


def weight_map(config: MistralConfig) -> WeightMap:
    """Maps the parameters of Mistral to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(LigerMistral, model_type="mistral", hf_class="MistralForCausalLM", weight_map=weight_map)
add_family(LigerMinistral, model_type="ministral", hf_class="MinistralForCausalLM", weight_map=weight_map)
