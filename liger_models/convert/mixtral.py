"""Mixtral checkpoints: the weights of ``arch/mixtral.py`` under Hugging Face's names."""

from liger_models.arch.mixtral import MixtralConfig
from liger_models.convert.weight_map import WeightMap, decoder_map, expert_rows, fused_expert_rows

HF_CLASS = "MixtralForCausalLM"


def weight_map(config: MixtralConfig) -> WeightMap:
    """Mixtral's parameters over the tensors of a Hugging Face checkpoint."""
    return _map(config, "block_sparse_moe", fused=False)


def other_maps(config: MixtralConfig) -> list[WeightMap]:
    """transformers 5 calls the layer ``mlp`` and fuses its experts; it also reads what does only one of the two."""
    return [
        _map(config, "mlp", fused=True),
        _map(config, "mlp", fused=False),
        _map(config, "block_sparse_moe", fused=True),
    ]


def _map(config: MixtralConfig, name: str, *, fused: bool) -> WeightMap:
    moe = f"model.layers.{{i}}.{name}"
    expert = f"{moe}.experts.{{x}}"
    gate_up, down = (
        fused_expert_rows(f"{moe}.experts.gate_up_proj", f"{moe}.experts.down_proj")
        if fused
        else expert_rows(f"{expert}.w1.weight", f"{expert}.w3.weight", f"{expert}.w2.weight", config.num_local_experts)
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
