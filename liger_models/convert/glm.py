"""GLM checkpoints: the weights of ``arch/glm.py`` under Hugging Face's names."""

from liger_models.arch.glm import GLMConfig
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows

HF_CLASS = "GlmForCausalLM"


def weight_map(config: GLMConfig) -> WeightMap:
    """GLM's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        instead={"mlp.gate_up_proj.weight": fused_gate_up_rows("model.layers.{i}.mlp.gate_up_proj.weight")},
    )
