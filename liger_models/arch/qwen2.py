"""Qwen2, Qwen2.5, Qwen1.5, QwQ: model_type ``qwen2``.

Differs from Llama: the q, k and v projections always have biases, and the output projection never has one. If
``use_sliding_window`` is set, the layers from ``max_window_layers`` on attend only to the last ``sliding_window``
tokens. If ``layer_types`` is given, this list selects the layers with an attention window instead. No released
checkpoint uses the window.

Source: https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2412.15115, transformers ``models/qwen2``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import LateWindowDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LateWindowDecoderConfig):
    """Sizes and constants of a Qwen2 model."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class Qwen2Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Qwen2Config, layer: int) -> dict[str, Any]:
        return {"qkv_bias": True, "window": config.window(layer)}


class LigerQwen2(CausalLM):
    """Qwen2 with its language-model head."""

    config_class = Qwen2Config
    block_class = Qwen2Block


IGNORED_KEYS = ("use_mrope",)  # a key of the text models that transformers does not read


def weight_map(config: Qwen2Config) -> WeightMap:
    """Maps the parameters of Qwen2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=True)


add_family(
    LigerQwen2, model_type="qwen2", hf_class="Qwen2ForCausalLM", weight_map=weight_map, ignored_keys=IGNORED_KEYS
)
