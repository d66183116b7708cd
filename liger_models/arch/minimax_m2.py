"""MiniMax M2, M2.1, M2.5, M2.7: model_type ``minimax_m2``.

Differs from Llama: q and k are normalized over all heads before RoPE, and only the first ``rotary_dim`` entries of each
head are rotated. The MLP of every layer is a mixture of experts. The score of an expert is the sigmoid of its router
logit. To choose experts, ``e_score_correction_bias`` is added to the scores; the routing weights are the scores without
the bias, divided by their sum. The bias stays in fp32, although transformers casts it with the other weights, and
gradients do not train it. If ``output_router_logits`` is set, the load-balancing loss is added to the loss. As in
transformers, the load-balancing loss is computed from the softmax of the logits.

Source: https://arxiv.org/abs/2506.13585, transformers ``models/minimax_m2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import MIXTRAL_LAYOUTS, WeightMap, decoder_map, mixtral_mlps
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.moe import LigerMoE
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(RMSNormDecoderConfig):
    """Sizes and constants of a MiniMax M2 model; ``intermediate_size`` is the width of one expert."""

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 196608
    rope_theta: float = 5000000.0
    partial_rotary_factor: float | None = None
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    router_jitter_noise: float = 0.0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = 200034
    eos_token_id: int | list[int] | None = 200020


class MiniMaxM2Block(PreNormBlock):
    """``h += attention(norm(h)); h += experts(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = LigerQKNormAttention

    def attention_options(self, config: MiniMaxM2Config, layer: int) -> dict[str, Any]:
        return {"whole_projection": True}

    def build_mlp(self, config: MiniMaxM2Config, layer: int, kernels: KernelOptions) -> LigerMoE:
        routing = Routing(config.num_experts_per_tok, normalize=True, score="sigmoid")
        return LigerMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            routing,
            correction_bias=True,
            router_jitter=config.router_jitter_noise,
            kernel=kernels.swiglu,
        )


class LigerMiniMaxM2(CausalLM):
    """MiniMax M2 with its language-model head."""

    config_class = MiniMaxM2Config
    block_class = MiniMaxM2Block
    replays_routing = True


# Keys in released files that only the released code reads, and not the model in transformers.
IGNORED_KEYS = (
    "mtp_transformer_layers",
    "num_mtp_modules",
    "qk_norm_type",
    "scoring_func",
    "shared_intermediate_size",
    "use_mtp",
    "use_qk_norm",
    "use_routing_bias",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Accept ``num_experts`` as another name of ``num_local_experts``, and convert ``rotary_dim`` to the rotated
    fraction of a head."""
    flat = {"num_local_experts" if key == "num_experts" else key: value for key, value in hf.items()}
    width = flat.pop("rotary_dim", None)
    if width is not None:
        flat.setdefault("partial_rotary_factor", width / flat.get("head_dim", MiniMaxM2Config.head_dim))
    return flat


def weight_map(config: MiniMaxM2Config, name: str = "block_sparse_moe", *, fused: bool = False) -> WeightMap:
    """Maps MiniMax M2's parameters to the tensors of a checkpoint; for ``name`` and ``fused``, see `mixtral_mlps`."""
    bias = {"mlp.correction.bias": f"model.layers.{{i}}.{name}.e_score_correction_bias"}
    return decoder_map(
        config,
        norms=["input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"],
        instead=mixtral_mlps(config, name, fused=fused) | bias,
    )


add_family(
    LigerMiniMaxM2,
    model_type="minimax_m2",
    hf_class="MiniMaxM2ForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, name, fused=fused) for name, fused in MIXTRAL_LAYOUTS],
    from_json=from_json,
    ignored_keys=IGNORED_KEYS,
)
