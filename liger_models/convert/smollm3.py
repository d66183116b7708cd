"""SmolLM3 checkpoints: the weights of ``arch/smollm3.py`` under Hugging Face's names."""

from liger_models.arch.smollm3 import SmolLM3Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "SmolLM3ForCausalLM"
IGNORED_KEYS = ("max_window_layers",)  # of Qwen2; transformers does not read it


def weight_map(config: SmolLM3Config) -> WeightMap:
    """SmolLM3's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)
