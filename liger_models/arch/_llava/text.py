"""The language models of the families with a Pixtral or CLIP tower: Mistral and Llama."""

from dataclasses import dataclass
from typing import Any

from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig


@dataclass(frozen=True, kw_only=True)
class MistralTextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Mistral model. All layers have the attention window ``sliding_window``."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


class LlavaBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it.

    The configuration may set ``attention_bias`` and ``mlp_bias``, like Llama's configuration.
    """

    def attention_options(self, config: MistralTextConfig, layer: int) -> dict[str, Any]:
        return {"window": config.sliding_window}
