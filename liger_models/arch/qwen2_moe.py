"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: model_type ``qwen2_moe``.

Differs from Qwen2: the MLP of layer i is a mixture of experts plus a shared expert with a gate if i + 1 is a multiple
of ``decoder_sparse_step`` and i is not in ``mlp_only_layers``. The routing weights are renormalized only if
``norm_topk_prob`` is set, and are always rounded to the dtype of the router logits. If ``use_sliding_window`` is set,
the even-numbered layers below ``max_window_layers`` attend only to the last ``sliding_window`` tokens. If
``layer_types`` is given, this list selects the layers with an attention window instead. If ``output_router_logits`` is
set, the load-balancing loss is added to the loss.

Source: https://qwenlm.github.io/blog/qwen-moe, https://arxiv.org/abs/2407.10671, transformers ``models/qwen2_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, is_sliding
from liger_models.layers.moe import LigerSharedExpertMoE


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Qwen2-MoE model."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    qkv_bias: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        sliding = is_sliding(layer, self.layer_types, default=layer % 2 == 0 and layer < self.max_window_layers)
        return self.sliding_window if self.use_sliding_window and sliding else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return step and layer not in (self.mlp_only_layers or ())


class Qwen2MoeBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Qwen2MoeConfig, layer: int) -> dict[str, Any]:
        return {"qkv_bias": config.qkv_bias, "window": config.window(layer)}

    def build_experts(self, config: Qwen2MoeConfig, kernels: KernelOptions) -> LigerSharedExpertMoE:
        routing = Routing(config.num_experts_per_tok, config.norm_topk_prob, round_weights=True)
        return LigerSharedExpertMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            routing,
            shared_size=config.shared_expert_intermediate_size,
            kernel=kernels.swiglu,
        )


class LigerQwen2MoE(CausalLM):
    """Qwen2-MoE with its language-model head."""

    config_class = Qwen2MoeConfig
    block_class = Qwen2MoeBlock
    replays_routing = True


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Accept transformers 5's name for ``num_experts``, and read a window of 0 tokens as no window."""
    flat = {"num_experts" if key == "num_local_experts" else key: value for key, value in hf.items()}
    return flat | ({"sliding_window": None} if flat.get("sliding_window") == 0 else {})


def weight_map(config: Qwen2MoeConfig, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of Qwen2-MoE to the tensors of a checkpoint; for ``fused``, see `shared_moe_map`."""
    return shared_moe_map(
        config, fused=fused, experts=config.num_experts, shared="shared_expert", gated=True, correction=False,
        qkv_bias=config.qkv_bias,
    )  # fmt: skip


add_family(
    LigerQwen2MoE,
    model_type="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=from_json,
)
