"""Qwen3 (dense models): model_type ``qwen3``.

Differs from Llama: each head of q and k is normalized by an RMSNorm before RoPE, and all heads share the weight of this
norm; the head dimension is 128 for every hidden size. As in Qwen2, the layers from ``max_window_layers`` on can have an
attention window, but no released checkpoint uses it.

Source: https://arxiv.org/abs/2505.09388, transformers ``models/qwen3``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import QKNormBlock
from liger_models.layers.config import LateWindowDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LateWindowDecoderConfig):
    """Sizes and constants of a Qwen3 model."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class Qwen3Block(QKNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Qwen3Config, layer: int) -> dict[str, Any]:
        return {"window": config.window(layer)}


class LigerQwen3(CausalLM):
    """Qwen3 with its language-model head."""

    config_class = Qwen3Config
    block_class = Qwen3Block


def weight_map(config: Qwen3Config) -> WeightMap:
    """Maps the parameters of Qwen3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
    )


add_family(LigerQwen3, model_type="qwen3", hf_class="Qwen3ForCausalLM", weight_map=weight_map)
