"""Hunyuan-A13B: model_type ``hunyuan_v1_moe``.

Differs from ``hunyuan_v1_dense``: the MLP of every layer is a mixture of experts plus one shared expert, which
processes all tokens and whose output is not gated. Each routed expert and the shared expert have the width
``intermediate_size``. The router's logits and weight are in fp32, whatever the dtype of the model, and the routing
weights of a token are divided by their sum.

Source: https://github.com/Tencent-Hunyuan/Hunyuan-A13B, transformers ``models/hunyuan_v1_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.hunyuan_v1 import dense
from liger_models.arch.hunyuan_v1.dense import HEAD_NORMS, HunYuanDenseV1Block, HunYuanDenseV1Config, to_json
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.moe import LigerSharedExpertMoE


@dataclass(frozen=True, kw_only=True)
class HunYuanMoEV1Config(HunYuanDenseV1Config):
    """Sizes and constants of a Hunyuan model with experts; ``moe_topk`` may be a list with one number per layer."""

    num_experts: int = 1
    moe_topk: int | list[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.moe_topk
        if isinstance(counts, list) and (len(counts) < self.num_hidden_layers or len({*counts}) > 1):
            raise ValueError(
                "HunYuanMoEV1Config: moe_topk must be a number, or the same number for each of the "
                f"{self.num_hidden_layers} layers, got {counts}. Released models have 8 for all layers."
            )

    @property
    def num_experts_per_tok(self) -> int:
        """K, the number of experts per token."""
        return self.moe_topk[0] if isinstance(self.moe_topk, list) else self.moe_topk

    def is_sparse(self, layer: int) -> bool:
        """True, because the MLP of every layer is a mixture of experts."""
        return True


class HunYuanMoEV1Block(HunYuanDenseV1Block):
    """`HunYuanDenseV1Block` with a mixture of experts."""

    def build_mlp(self, config: HunYuanMoEV1Config, layer: int, kernels: KernelOptions) -> LigerSharedExpertMoE:
        """A mixture of experts and a shared expert of the same width."""
        width = config.intermediate_size
        return LigerSharedExpertMoE(
            config.hidden_size, width, config.num_experts, Routing(config.num_experts_per_tok, normalize=True),
            shared_size=width, gated=False, fp32_router=True, fp32_router_weight=True, kernel=kernels.swiglu,
        )  # fmt: skip


class LigerHunYuanMoEV1(CausalLM):
    """Hunyuan with a mixture of experts and with its language-model head."""

    config_class = HunYuanMoEV1Config
    block_class = HunYuanMoEV1Block
    replays_routing = True


# Keys in released files that only the released code reads, and not the model in transformers.
IGNORED_KEYS = (
    *dense.IGNORED_KEYS,
    "capacity_factor",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "group_limited_greedy",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "kv_lora_rank",
    "mask_init_id",
    "moe_drop_tokens",
    "moe_intermediate_size",
    "moe_layer_num_skipped",
    "moe_random_routing_dropped_token",
    "n_group",
    "norm_topk_prob",
    "norm_type",
    "num_media_embeds",
    "num_shared_expert",
    "org_vocab_size",
    "output_router_logits",  # there is no load-balancing loss
    "pool_type",
    "position_embedding_xdrope",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "routed_scaling_factor",
    "sep_token_id",
    "text_end_id",
    "text_start_id",
    "topk_group",
    "use_cla",
    "use_mixed_mlp_moe",
    "use_mla",
    "v_head_dim",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the keys of transformers 5, and check the sizes that only the released code reads.

    Raises:
        ValueError: an expert does not have the width ``intermediate_size``, or a layer does not have exactly one shared
            expert.
    """
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"}
    flat = {names.get(key, key): value for key, value in dense.from_json(hf).items()}
    width = flat.get("intermediate_size", HunYuanMoEV1Config.intermediate_size)
    for key, want in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        values = flat.get(key)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value != want:
                raise ValueError(
                    f"config.json: {key} must be {want} for all layers, got {values}. Only models whose routed and "
                    "shared experts have the width intermediate_size are supported."
                )
    return flat


def weight_map(config: HunYuanMoEV1Config, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of Hunyuan to the tensors of a checkpoint; for ``fused``, see `shared_moe_map`."""
    mlp = "layers.{sparse}.mlp"
    return shared_moe_map(
        config, fused=fused, experts=config.num_experts, shared="shared_mlp", correction=False,
        instead=HEAD_NORMS,
        also={f"{mlp}.experts.gate.weight": f"model.{mlp}.gate.wg.weight"},
    )  # fmt: skip


add_family(
    LigerHunYuanMoEV1,
    model_type="hunyuan_v1_moe",
    hf_class="HunYuanMoEV1ForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
