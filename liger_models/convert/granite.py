"""Granite checkpoints: the weights of ``arch/granite.py`` under Hugging Face's names."""

from liger_models.arch.granite import GraniteConfig
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "GraniteForCausalLM"


def weight_map(config: GraniteConfig) -> WeightMap:
    """Granite's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)
