"""Gemma checkpoints: the weights of ``arch/gemma.py`` under Hugging Face's names."""

from liger_models.arch.gemma import GemmaConfig
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "GemmaForCausalLM"


def weight_map(config: GemmaConfig) -> WeightMap:
    """Gemma's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
