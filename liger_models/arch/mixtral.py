"""Mixtral 8x7B, 8x22B: model_type ``mixtral``.

Differs from Mistral: the MLP is a mixture of experts. Each token passes through ``num_experts_per_tok`` experts, whose
routing weights are renormalized. There is no attention window by default. If ``output_router_logits`` is set, the
load-balancing loss is added to the loss.

Source: https://arxiv.org/abs/2401.04088, transformers ``models/mixtral``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.weight_map import MIXTRAL_LAYOUTS, WeightMap, decoder_map, mixtral_mlps
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.moe import LigerMoE


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Mixtral model."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0


class MixtralBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: MixtralConfig, layer: int) -> dict[str, Any]:
        return {"window": config.sliding_window}

    def build_mlp(self, config: MixtralConfig, layer: int, kernels: KernelOptions) -> LigerMoE:
        routing = Routing(config.num_experts_per_tok, normalize=True)
        return LigerMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            routing,
            router_jitter=config.router_jitter_noise,
            kernel=kernels.swiglu,
        )


class LigerMixtral(CausalLM):
    """Mixtral with its language-model head."""

    config_class = MixtralConfig
    block_class = MixtralBlock
    replays_routing = True


def weight_map(config: MixtralConfig, name: str = "block_sparse_moe", *, fused: bool = False) -> WeightMap:
    """Maps the parameters of Mixtral to the tensors of a checkpoint; for ``name`` and ``fused``, see `mixtral_mlps`."""
    return decoder_map(config, instead=mixtral_mlps(config, name, fused=fused))


add_family(
    LigerMixtral,
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, name, fused=fused) for name, fused in MIXTRAL_LAYOUTS],
    from_json=renaming({"num_experts": "num_local_experts"}),
)
