"""Phi-3.5-MoE: model_type ``phimoe``.

Differs from Llama: norms are LayerNorms with bias, and the projections of attention and the head may have biases. The
MLP of every layer is a mixture of experts, and each token passes through two experts. The router uses the SparseMixer
method, which chooses the two experts one after the other. The routing weight of a chosen expert is its probability in a
softmax over only those logits whose relative difference from the largest logit is at most 2 · ``router_jitter_noise``.
The softmax for the second expert leaves out the first expert. The routing weights of the two experts need not add up to
1. If ``sliding_window`` is set, all layers attend only to the last ``sliding_window`` tokens. LongRoPE has two sets of
divisors for the rotary frequencies: one for texts of up to ``original_max_position_embeddings`` tokens, and one for
longer texts. LongRoPE also multiplies cos and sin: by ``short_mscale`` for short texts, and by ``long_mscale`` for long
texts.

Differs from transformers 5.23: as in the published code, RoPE uses ``long_factor`` for long texts; transformers uses
``short_factor`` for texts of every length. In training, this package chooses experts as in evaluation, whereas
transformers samples experts at random. As in the published code, the input of the experts is multiplied by random noise
(``input_jitter_noise``) once, whereas transformers multiplies it twice.

Source: https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2409.12136 (sparsemixer), transformers
``models/phimoe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import (
    Expression,
    WeightMap,
    decoder_map,
    expert_mlps,
    expert_rows,
    fused_expert_rows,
)
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import DecoderConfig, check_values
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.rope import LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(DecoderConfig):
    """Sizes and constants of a Phi-3.5-MoE model.

    ``intermediate_size`` is the width of one expert, and ``rms_norm_eps`` is the epsilon of the LayerNorms.

    Raises:
        ValueError: a rope scaling is not LongRoPE, or lacks ``short_mscale`` or ``long_mscale``; or the number of
            experts per token is not two.
    """

    vocab_size: int = 32064
    intermediate_size: int = 6400
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    sliding_window: int | None = None
    attention_bias: bool = False
    lm_head_bias: bool = False
    num_local_experts: int = 16
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.01
    input_jitter_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, num_experts_per_tok=(2,))
        scaling = self.rope_scaling
        if scaling is not None and (
            not isinstance(scaling, LongRopeScaling) or None in (scaling.short_mscale, scaling.long_mscale)
        ):
            raise ValueError(
                "PhimoeConfig: rope_scaling must be LongRopeScaling with short_mscale and long_mscale, or None, got "
                f"{scaling}. Phi-3.5-MoE has no other."
            )


class PhimoeBlock(PreNormBlock):
    """``h += attention(norm(h)); h += experts(norm(h))``; each addition is fused with the norm that follows it."""

    def norm_factory(self, config: PhimoeConfig, kernels: KernelOptions) -> partial[LigerLayerNorm]:
        return partial(LigerLayerNorm, eps=config.rms_norm_eps, kernel=kernels.layer_norm)

    def attention_options(self, config: PhimoeConfig, layer: int) -> dict[str, Any]:
        return {"window": config.sliding_window}

    def build_mlp(self, config: PhimoeConfig, layer: int, kernels: KernelOptions) -> LigerMoE:
        tolerance = 2 * config.router_jitter_noise
        routing = Routing(config.num_experts_per_tok, score="sparsemixer", tolerance=tolerance, round_weights=True)
        return LigerMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            routing,
            router_jitter=config.input_jitter_noise,
            kernel=kernels.swiglu,
        )


class LigerPhimoe(CausalLM):
    """Phi-3.5-MoE with its language-model head."""

    config_class = PhimoeConfig
    block_class = PhimoeBlock
    replays_routing = True

    def build_norm(self, config: PhimoeConfig) -> LigerLayerNorm:
        """A LayerNorm with bias."""
        return LigerLayerNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.layer_norm)

    def build_head(self, config: PhimoeConfig) -> LigerLMHead:
        """A head that may have a bias."""
        return LigerLMHead(config.hidden_size, config.vocab_size, bias=config.lm_head_bias, kernels=self.kernels)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Write the class name that the published code and vLLM read, and write the type of the rope scaling under the key
    ``type``, which they also read."""
    scaling = keys["rope_scaling"]
    if scaling is not None:
        scaling = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    return {**keys, "architectures": ["PhiMoEForCausalLM"], "rope_scaling": scaling}


def weight_map(config: PhimoeConfig) -> WeightMap:
    """Maps the parameters of Phi-3.5-MoE to the tensors of a checkpoint on the hub."""
    experts = "model.layers.{i}.block_sparse_moe.experts.{x}"
    gate, up, down = (f"{experts}.w{number}.weight" for number in (1, 3, 2))
    return _map(config, "block_sparse_moe.gate", *expert_rows(gate, up, down, config.num_local_experts))


def fused_map(config: PhimoeConfig) -> WeightMap:
    """The weight map for checkpoints of transformers 5, in which one tensor per projection holds all experts of a
    layer."""
    experts = "model.layers.{i}.mlp.experts"
    return _map(config, "mlp.router", *fused_expert_rows(f"{experts}.gate_up_proj", f"{experts}.down_proj"))


def _map(config: PhimoeConfig, router: str, gate_up: Expression | str, down: Expression | str) -> WeightMap:
    return decoder_map(
        config,
        norm_bias=True,
        instead=expert_mlps(f"model.layers.{{i}}.{router}.weight", gate_up, down),
        also={"lm_head.bias": "lm_head.bias"} if config.lm_head_bias else None,
    )


# No code reads this key, which is 0 in the released file.
IGNORED_KEYS = ("hidden_dropout",)

add_family(
    LigerPhimoe,
    model_type="phimoe",
    hf_class="PhimoeForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [fused_map(config)],
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
