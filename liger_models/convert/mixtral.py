"""Mixtral checkpoints: the weights of ``arch/mixtral.py`` under Hugging Face's names."""

from liger_models.arch.mixtral import MixtralConfig
from liger_models.convert.weight_map import WeightMap, decoder_map, expert_rows

HF_CLASS = "MixtralForCausalLM"


def weight_map(config: MixtralConfig) -> WeightMap:
    """Mixtral's parameters over the tensors of a Hugging Face checkpoint."""
    moe = "model.layers.{i}.block_sparse_moe"
    expert = f"{moe}.experts.{{x}}"
    gate_up, down = expert_rows(
        f"{expert}.w1.weight", f"{expert}.w3.weight", f"{expert}.w2.weight", config.num_local_experts
    )
    return decoder_map(
        config,
        instead={
            "mlp.gate_up_proj.weight": None,
            "mlp.down_proj.weight": None,
            "mlp.gate.weight": f"{moe}.gate.weight",
            "mlp.gate_up_weight": gate_up,
            "mlp.down_weight": down,
        },
    )
