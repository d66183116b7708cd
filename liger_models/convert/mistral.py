"""Mistral checkpoints: the weights of ``arch/mistral.py`` under Hugging Face's names."""

from liger_models.arch.mistral import MistralConfig
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "MistralForCausalLM"


def weight_map(config: MistralConfig) -> WeightMap:
    """Mistral's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)
