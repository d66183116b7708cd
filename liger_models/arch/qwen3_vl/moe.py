"""Qwen3-VL with a mixture of experts (30B-A3B, 235B-A22B): model_type ``qwen3_vl_moe``.

The vision tower, the positions and DeepStack are the same as in dense Qwen3-VL. The language model has the blocks of
Qwen3-MoE, but always renormalizes routing weights and has no attention window.

Source: https://arxiv.org/abs/2511.21631, transformers ``models/qwen3_vl_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch._qwen_vl import names
from liger_models.arch.qwen3_vl.dense import Qwen3VLBlock, Qwen3VLConfig, Qwen3VLModel
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, Rearrange, WeightMap, fused_expert_rows, sparse_mlps
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.moe import LigerMoE


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """Sizes and constants of a Qwen3-VL-MoE model; ``vision_config`` holds the sizes of the vision tower."""

    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = None
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 4
    num_experts: int = 60
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return step and layer not in (self.mlp_only_layers or ())


class Qwen3VLMoeBlock(Qwen3VLBlock):
    """`Qwen3VLBlock` whose MLP is a mixture of experts in most layers."""

    def build_experts(self, config: Any, kernels: KernelOptions) -> LigerMoE:
        # Routing weights always add up to 1, and are rounded to the dtype of the logits, as in transformers.
        routing = Routing(config.num_experts_per_tok, normalize=True, round_weights=True)
        return LigerMoE(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, routing, kernel=kernels.swiglu
        )


class LigerQwen3VLMoE(Qwen3VLModel):
    """Qwen3-VL-MoE with its language-model head."""

    config_class = Qwen3VLMoeConfig
    block_class = Qwen3VLMoeBlock
    replays_routing = True


IGNORED_KEYS = (
    *names.IGNORED_KEYS,
    "norm_topk_prob",  # routing weights are always renormalized
    "sliding_window",  # there are no windows
    "use_sliding_window",
)
TEXT = "model.language_model"
EXPERTS = f"{TEXT}.layers.{{sparse}}.mlp.experts"


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read config.json as `read_multimodal` does, and accept ``num_local_experts``, which is the name of
    ``num_experts`` in transformers 5."""
    flat = names.read_multimodal(Qwen3VLMoeConfig, hf)
    if "num_local_experts" in flat:
        flat["num_experts"] = flat.pop("num_local_experts")
    return flat


def weight_map(config: Qwen3VLMoeConfig) -> WeightMap:
    """Maps the parameters of Qwen3-VL-MoE to the tensors of a hub checkpoint, whose expert weights are transposed."""
    gate_up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    return _map(config, Rearrange("x c (two f) -> x (f two) c", gate_up, two=2), Rearrange("x f c -> x c f", down))


def other_maps(config: Qwen3VLMoeConfig) -> list[WeightMap]:
    """The weight map for files whose expert weights are not transposed. transformers 5 writes such files for newly
    created models."""
    return [_map(config, *fused_expert_rows(f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"))]


def _map(config: Qwen3VLMoeConfig, gate_up: Expression, down: Expression) -> WeightMap:
    sparse = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
    mlps = sparse_mlps(sparse, config.num_hidden_layers, TEXT, gate_up, down)
    return names.qwen3_vl_map(config, TEXT, "model.visual", mlps)


add_family(
    LigerQwen3VLMoE,
    model_type="qwen3_vl_moe",
    hf_class="Qwen3VLMoeForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=names.write_nested,
    ignored_keys=IGNORED_KEYS,
)
