"""GPT-OSS (gpt-oss-20b, gpt-oss-120b): model_type ``gpt_oss``.

Differs from Mixtral: attention has sinks. A sink is one learned score per head, which takes part in the softmax but
belongs to no token. Every second layer, starting with the first, has an attention window. The attention projections,
the router and the experts have biases. The experts' activation is a clamped SwiGLU. Routing weights are the softmax
over the logits of the chosen experts. Norms multiply by their weight in fp32.

The released experts are stored in MXFP4, with four bits per weight. These experts are either converted to bf16 and
trained, or kept in MXFP4 and frozen.

Source: https://arxiv.org/abs/2508.10925, transformers ``models/gpt_oss``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, Name, Rearrange, WeightMap, decoder_map, expert_mlps
from liger_models.distributed.collectives import Group
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, check_values, is_sliding
from liger_models.layers.layer import AttentionSpec
from liger_models.layers.linear import local
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm, fp32_norm
from liger_models.layers.rope import RopeScaling, YarnScaling

YARN = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)
"""The rope scaling that transformers uses if config.json has no rope parameters."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(RMSNormDecoderConfig):
    """Sizes and constants of a GPT-OSS model."""

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: RopeScaling | None = YARN
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: list[str] | None = None
    num_experts_per_tok: int = 4
    num_local_experts: int = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, swiglu_alpha=(1.702,))

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=layer % 2 == 0) else None


class GptOssAttention(LigerAttention):
    """`LigerAttention` with a sink for each query head: an extra learned score in the softmax."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.sinks = nn.Parameter(torch.empty(self.num_heads))
        self.draw(0.02)  # for a layer outside of a model; a model draws again with its own ``initializer_range``

    @property
    def attention(self) -> AttentionSpec:
        """See `LigerAttention.attention`. On accelerators, attention with sinks needs a mask unless it runs in half
        precision."""
        return super().attention._replace(needs_flash=True)

    def draw(self, std: float) -> bool:
        """Initialize the sinks from a normal distribution with ``std``."""
        nn.init.normal_(self.sinks, std=std)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """See `LigerAttention.shard`. Each rank keeps the sinks of its heads."""
        return {**super().shard(group), "sinks": 0}

    def _local_sinks(self) -> Tensor:
        sinks, context = local(self.sinks), self.groups.context
        # Context parallelism shards tokens but not parameters, so each rank selects the sinks of its heads.
        return sinks if context is None else sinks.chunk(context.size)[context.rank]


class GptOssBlock(PreNormBlock):
    """``h += attention(norm(h)); h += experts(norm(h))``; each addition is fused with the norm that follows it."""

    norm_factory = staticmethod(fp32_norm)

    attention_class = GptOssAttention

    def attention_options(self, config: GptOssConfig, layer: int) -> dict[str, Any]:
        return {"window": config.window(layer)}

    def build_mlp(self, config: GptOssConfig, layer: int, kernels: KernelOptions) -> LigerMoE:
        # The softmax over all experts, renormalized over the chosen experts, equals the softmax over the chosen
        # experts.
        routing = Routing(config.num_experts_per_tok, normalize=True, round_weights=True)
        # Experts have biases, and their activation clamps gate and up.
        return LigerMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            routing,
            act="clamped_swiglu",
            limit=config.swiglu_limit,
            bias=True,
            kernel=kernels.swiglu,
        )


class LigerGptOss(CausalLM):
    """GPT-OSS with its language-model head."""

    config_class = GptOssConfig
    block_class = GptOssBlock
    replays_routing = True

    def build_norm(self, config: GptOssConfig) -> LigerRMSNorm:
        """A norm that multiplies by its weight in fp32."""
        return LigerRMSNorm(config.hidden_size, config.rms_norm_eps, casting_mode="gemma", kernel=self.kernels.rms_norm)


IGNORED_KEYS = ("experts_per_token", "initial_context_length")  # redundant with other keys


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """If there are no rope parameters, use YaRN with the constants of the released models, as transformers does."""
    flat = {"num_local_experts" if key == "num_experts" else key: value for key, value in hf.items()}
    if hf.get("rope_scaling") or (hf.get("rope_parameters") is not None):
        return flat
    return {**flat, "rope_scaling": {"rope_type": "yarn", **asdict(YARN)}}


def to_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    return {**fields, "rope_scaling": fields["rope_scaling"] or {"rope_type": "default"}}


def weight_map(config: GptOssConfig) -> WeightMap:
    """Maps the parameters of GPT-OSS to the tensors of a Hugging Face checkpoint without quantization."""
    experts = "model.layers.{i}.mlp.experts"
    return _map(config, *(Rearrange("x i o -> x o i", f"{experts}.{name}_proj") for name in ("gate_up", "down")))


def mxfp4_map(config: GptOssConfig) -> WeightMap:
    """Return the weight map for the released MXFP4 format of the experts. Unlike in `weight_map`, the experts' matrices
    are not transposed."""
    experts = "model.layers.{i}.mlp.experts"
    return _map(
        config,
        *(Name(f"{experts}.{name}_proj_blocks") for name in ("gate_up", "down")),
    )


def _map(config: GptOssConfig, gate_up: Expression, down: Expression) -> WeightMap:
    # None removes an entry of `decoder_map`, here the matrices of the dense MLP.
    mlp = "model.layers.{i}.mlp"
    return decoder_map(
        config,
        instead={
            "self_attn.sinks": "model.layers.{i}.self_attn.sinks",
            **expert_mlps(f"{mlp}.router.weight", gate_up, down),
            "mlp.gate.bias": f"{mlp}.router.bias",
            "mlp.gate_up_bias": f"{mlp}.experts.gate_up_proj_bias",
            "mlp.down_bias": f"{mlp}.experts.down_proj_bias",
        },
    )


add_family(
    LigerGptOss,
    model_type="gpt_oss",
    hf_class="GptOssForCausalLM",
    weight_map=weight_map,
    quantized_maps={"mxfp4": mxfp4_map},
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
