"""OLMo 2 checkpoints: the weights of ``arch/olmo2.py`` under Hugging Face's names."""

from liger_models.arch.olmo2 import Olmo2Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Olmo2ForCausalLM"


def weight_map(config: Olmo2Config) -> WeightMap:
    """OLMo 2's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )
