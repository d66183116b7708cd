"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): model_type ``qwen3_moe``.

Differs from Qwen3: the MLP of layer i is a mixture of experts if i + 1 is a multiple of ``decoder_sparse_step`` and i
is not in ``mlp_only_layers``. Routing weights are renormalized if ``norm_topk_prob`` is set, and then rounded to the
dtype of the router logits. If ``output_router_logits`` is set, the load-balancing loss is added to the loss.

Source: https://arxiv.org/abs/2505.09388, transformers ``models/qwen3_moe``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.weight_map import WeightMap, decoder_map, sparse_mlps, stacked_experts
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import QKNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.moe import LigerMoE


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Qwen3-MoE model."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return step and layer not in (self.mlp_only_layers or ())


class Qwen3MoeBlock(QKNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Qwen3MoeConfig, layer: int) -> dict[str, Any]:
        return {"window": config.sliding_window if config.use_sliding_window else None}

    def build_experts(self, config: Qwen3MoeConfig, kernels: KernelOptions) -> LigerMoE:
        routing = Routing(config.num_experts_per_tok, config.norm_topk_prob, round_weights=True)
        return LigerMoE(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, routing, kernel=kernels.swiglu
        )


class LigerQwen3MoE(CausalLM):
    """Qwen3-MoE with its language-model head."""

    config_class = Qwen3MoeConfig
    block_class = Qwen3MoeBlock
    replays_routing = True


IGNORED_KEYS = ("max_window_layers",)  # either all layers have the window or none


def weight_map(config: Qwen3MoeConfig, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of Qwen3-MoE to the tensors of a checkpoint; for ``fused``, see `stacked_experts`."""
    stacked = stacked_experts("model.layers.{sparse}.mlp.experts", config.num_experts, fused=fused)
    # Only sparse layers have experts. The other layers keep the names of a dense MLP.
    sparse = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
    return decoder_map(
        config,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
        **sparse_mlps(sparse, config.num_hidden_layers, "model", *stacked),
    )


add_family(
    LigerQwen3MoE,
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=renaming({"num_local_experts": "num_experts"}),
    ignored_keys=IGNORED_KEYS,
)
