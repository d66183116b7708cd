"""OLMoE-1B-7B: model_type ``olmoe``.

Differs from Llama: q and k are normalized over all heads before RoPE. If ``clip_qkv`` is set, q, k and v are clipped to
±clip_qkv after the norms. The MLP of every layer is a mixture of experts. The routing weights are renormalized only if
``norm_topk_prob`` is set, and rounded to the dtype of the router logits. If ``output_router_logits`` is set, the
load-balancing loss is added to the loss.

Source: https://arxiv.org/abs/2409.02060, transformers ``models/olmoe``.
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
class OlmoeConfig(RMSNormDecoderConfig):
    """Sizes and constants of an OLMoE model; ``intermediate_size`` is the width of one expert."""

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279


class OlmoeBlock(QKNormBlock):
    """``h += attention(norm(h)); h += experts(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: OlmoeConfig, layer: int) -> dict[str, Any]:
        return {"whole_projection": True, "clip": config.clip_qkv}

    def build_mlp(self, config: OlmoeConfig, layer: int, kernels: KernelOptions) -> LigerMoE:
        routing = Routing(config.num_experts_per_tok, config.norm_topk_prob, round_weights=True)
        return LigerMoE(
            config.hidden_size, config.intermediate_size, config.num_experts, routing, kernel=kernels.swiglu
        )


class LigerOlmoe(CausalLM):
    """OLMoE with its language-model head."""

    config_class = OlmoeConfig
    block_class = OlmoeBlock
    replays_routing = True


def weight_map(config: OlmoeConfig, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of OLMoE to the tensors of a checkpoint.

    Args:
        config: config of the model.
        fused: whether each projection is one tensor for all experts of a layer, as in transformers 5.
    """
    stacked = stacked_experts("model.layers.{sparse}.mlp.experts", config.num_experts, fused=fused)
    layers = range(config.num_hidden_layers)
    return decoder_map(
        config,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
        **sparse_mlps(layers, len(layers), "model", *stacked),
    )


add_family(
    LigerOlmoe,
    model_type="olmoe",
    hf_class="OlmoeForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=renaming({"num_local_experts": "num_experts"}),
)
