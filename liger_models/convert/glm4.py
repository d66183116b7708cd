"""GLM-4 checkpoints: the weights of ``arch/glm4.py`` under Hugging Face's names."""

from liger_models.arch.glm4 import GLM4Config
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows

HF_CLASS = "Glm4ForCausalLM"


def weight_map(config: GLM4Config) -> WeightMap:
    """GLM-4's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        instead={"mlp.gate_up_proj.weight": fused_gate_up_rows("model.layers.{i}.mlp.gate_up_proj.weight")},
    )
