"""Qwen2 checkpoints: the weights of ``arch/qwen2.py`` under Hugging Face's names."""

from liger_models.arch.qwen2 import Qwen2Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Qwen2ForCausalLM"
IGNORED_KEYS = ("use_mrope",)  # of the text model's own files; transformers does not read it


def weight_map(config: Qwen2Config) -> WeightMap:
    """Qwen2's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=True)
