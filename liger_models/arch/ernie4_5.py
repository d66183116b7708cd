"""ERNIE 4.5 0.3B: model_type ``ernie4_5``.

Differs from Llama: RoPE rotates pairs of neighboring entries (2i, 2i + 1) of a head, and all linear layers have biases
if ``use_bias`` is set.

Source: https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf, transformers ``models/ernie4_5``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, check_values


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(RMSNormDecoderConfig):
    """Sizes and constants of an ERNIE 4.5 model."""

    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    use_bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, attention_dropout=(0.0,))

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP has biases."""
        return self.use_bias


class Ernie4_5Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Ernie4_5Config, layer: int) -> dict[str, Any]:
        return {"qkv_bias": config.use_bias, "o_bias": config.use_bias, "interleaved": True}


class LigerErnie4_5(CausalLM):
    """ERNIE 4.5 with its language-model head."""

    config_class = Ernie4_5Config
    block_class = Ernie4_5Block


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Omit the attention dropout from config.json, because the model in transformers has no such setting."""
    return {key: value for key, value in keys.items() if key != "attention_dropout"}


def weight_map(config: Ernie4_5Config) -> WeightMap:
    """Maps the parameters of ERNIE 4.5 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=config.use_bias, o_bias=config.use_bias, mlp_bias=config.use_bias)


add_family(LigerErnie4_5, model_type="ernie4_5", hf_class="Ernie4_5ForCausalLM", weight_map=weight_map, to_json=to_json)
