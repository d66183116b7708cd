"""Llama checkpoints: the weights of ``arch/llama.py`` under Hugging Face's names."""

from liger_models.arch.llama import LlamaConfig
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "LlamaForCausalLM"


def weight_map(config: LlamaConfig) -> WeightMap:
    """Llama's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        # Llama 2 files store the rotary frequencies, which follow from the config.
        skip=["model.layers.{i}.self_attn.rotary_emb.inv_freq"],
    )
