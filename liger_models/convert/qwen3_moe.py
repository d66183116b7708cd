"""Qwen3-MoE checkpoints: the weights of ``arch/qwen3_moe.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.qwen3_moe import Qwen3MoeConfig
from liger_models.arch.qwen3_vl_moe import Qwen3VLMoeConfig
from liger_models.convert.weight_map import (
    Expression,
    WeightMap,
    decoder_map,
    expert_rows,
    fused_expert_rows,
    gate_up_rows,
)

HF_CLASS = "Qwen3MoeForCausalLM"
IGNORED_KEYS = ("max_window_layers",)  # windows are of all layers or of none


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes the number of experts under another name."""
    return {"num_experts" if key == "num_local_experts" else key: value for key, value in hf.items()}


def weight_map(config: Qwen3MoeConfig) -> WeightMap:
    """Qwen3-MoE's parameters over the tensors of a Hugging Face checkpoint."""
    expert = "model.layers.{sparse}.mlp.experts.{x}"
    gate_up, down = expert_rows(
        f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight", f"{expert}.down_proj.weight", config.num_experts
    )
    return _map(config, gate_up, down)


def other_maps(config: Qwen3MoeConfig) -> list[WeightMap]:
    """transformers 5 fuses a layer's experts."""
    experts = "model.layers.{sparse}.mlp.experts"
    return [_map(config, *fused_expert_rows(f"{experts}.gate_up_proj", f"{experts}.down_proj"))]


def _map(config: Qwen3MoeConfig, gate_up: Expression, down: Expression) -> WeightMap:
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
        **sparse_mlps(config, "model", gate_up, down),
    )


def sparse_mlps(
    config: Qwen3MoeConfig | Qwen3VLMoeConfig, prefix: str, gate_up: Expression, down: Expression
) -> dict[str, Any]:
    """The MLPs, as arguments of `decoder_map`: mixtures of experts in some layers, dense ones in the others."""
    sparse, dense = f"{prefix}.layers.{{sparse}}.mlp", f"{prefix}.layers.{{dense}}.mlp"
    layers = range(config.num_hidden_layers)
    return {
        "instead": {"mlp.gate_up_proj.weight": None, "mlp.down_proj.weight": None},
        "also": {
            "layers.{sparse}.mlp.gate.weight": f"{sparse}.gate.weight",
            "layers.{sparse}.mlp.gate_up_weight": gate_up,
            "layers.{sparse}.mlp.down_weight": down,
            "layers.{dense}.mlp.gate_up_proj.weight": gate_up_rows(
                f"{dense}.gate_proj.weight", f"{dense}.up_proj.weight"
            ),
            "layers.{dense}.mlp.down_proj.weight": f"{dense}.down_proj.weight",
        },
        "over": {
            "sparse": [i for i in layers if config.is_sparse(i)],
            "dense": [i for i in layers if not config.is_sparse(i)],
        },
    }
