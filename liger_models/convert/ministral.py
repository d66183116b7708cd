"""Ministral checkpoints: the weights of ``arch/ministral.py`` under Hugging Face's names."""

from liger_models.arch.ministral import MinistralConfig
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "MinistralForCausalLM"


def weight_map(config: MinistralConfig) -> WeightMap:
    """Ministral's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)
