"""Qwen3 checkpoints: the weights of ``arch/qwen3.py`` under Hugging Face's names."""

from liger_models.arch.qwen3 import Qwen3Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Qwen3ForCausalLM"


def weight_map(config: Qwen3Config) -> WeightMap:
    """Qwen3's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
    )
