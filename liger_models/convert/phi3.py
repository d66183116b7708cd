"""Phi-3 checkpoints: the weights of ``arch/phi3.py`` under Hugging Face's names."""

from liger_models.arch.phi3 import Phi3Config
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows, fused_qkv_rows

HF_CLASS = "Phi3ForCausalLM"
# Of the code that came with the first releases; transformers does not read them.
IGNORED_KEYS = (
    "attention_bias",
    "embd_pdrop",
    "full_attn_mod",
    "interpolate_factor",
    "lm_head_bias",
    "mlp_bias",
)


def weight_map(config: Phi3Config) -> WeightMap:
    """Phi-3's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        instead={
            "self_attn.qkv_proj.weight": fused_qkv_rows(
                "model.layers.{i}.self_attn.qkv_proj.weight",
                heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_size,
            ),
            "mlp.gate_up_proj.weight": fused_gate_up_rows("model.layers.{i}.mlp.gate_up_proj.weight"),
        },
    )
