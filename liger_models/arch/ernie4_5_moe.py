"""ERNIE 4.5 21B-A3B and 300B-A47B: model_type ``ernie4_5_moe``.

Differs from ``ernie4_5``: from layer ``moe_layer_start_index`` to layer ``moe_layer_end_index`` (−1 stands for the last
layer), the MLP of layer i is a mixture of experts if i + 1 is a multiple of ``moe_layer_interval``. The router's logits
and weight are in fp32, whatever the dtype of the model. To choose experts, a correction bias is added to the softmax of
the logits. The bias does not enter the routing weights, stays in fp32, and is not trained by gradients. The routing
weights are divided by their sum. The ``moe_num_shared_experts`` shared experts process all tokens. Together, the shared
experts form one MLP, whose output is not gated. If ``use_bias`` is set, all linear layers except routers and routed
experts have biases, including the head. If ``output_router_logits`` is set, the load-balancing loss is added to the
loss. Weights for multi-token prediction are kept and saved with the model.

Source: https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf, transformers ``models/ernie4_5_moe``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Rearrange, WeightMap, shared_moe_map
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.moe import LigerMoE, LigerSharedExpertMoE


@dataclass(frozen=True, kw_only=True)
class Ernie4_5MoeConfig(RMSNormDecoderConfig):
    """Sizes and constants of an ERNIE 4.5 model with experts."""

    vocab_size: int = 103424
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    use_bias: bool = False
    tie_word_embeddings: bool = True
    moe_intermediate_size: int = 1536
    moe_k: int = 6
    moe_num_experts: int = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # The sum of a token's routing weights is always above the released ``moe_norm_min``, so this limit has no
        # effect.
        check_values(self, attention_dropout=(0.0,), moe_norm_min=(1e-12,))

    @property
    def mlp_bias(self) -> bool:
        """Whether dense MLPs and shared experts have biases."""
        return self.use_bias

    @property
    def num_experts_per_tok(self) -> int:
        """K, the number of experts per token."""
        return self.moe_k

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return (layer + 1) % self.moe_layer_interval == 0 and self.moe_layer_start_index <= layer <= last


class Ernie4_5MoeBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Ernie4_5MoeConfig, layer: int) -> dict[str, Any]:
        return {"qkv_bias": config.use_bias, "o_bias": config.use_bias, "interleaved": True}

    def build_experts(self, config: Ernie4_5MoeConfig, kernels: KernelOptions) -> LigerMoE | LigerSharedExpertMoE:
        width, shared = config.moe_intermediate_size, config.moe_num_shared_experts
        experts: Callable[..., LigerMoE | LigerSharedExpertMoE] = LigerMoE
        if shared:
            experts = partial(
                LigerSharedExpertMoE, shared_size=shared * width, shared_bias=config.use_bias, gated=False
            )
        return experts(
            config.hidden_size, width, config.moe_num_experts, Routing(config.moe_k, normalize=True),
            correction_bias=True, fp32_router=True, fp32_router_weight=True, kernel=kernels.swiglu,
        )  # fmt: skip


class LigerErnie4_5Moe(CausalLM):
    """ERNIE 4.5 with a mixture of experts and with its language-model head."""

    config_class = Ernie4_5MoeConfig
    block_class = Ernie4_5MoeBlock
    replays_routing = True

    def build_head(self, config: Ernie4_5MoeConfig) -> LigerLMHead:
        """A head that may have a bias."""
        return LigerLMHead(config.hidden_size, config.vocab_size, bias=config.use_bias, kernels=self.kernels)


# Keys of multi-token prediction, and keys of the released code that the model in transformers does not read.
IGNORED_KEYS = (
    "compression_ratio",
    "moe_aux_loss_lambda",
    "moe_capacity",
    "moe_gate",
    "moe_use_aux_free",
    "multi_token_pred_lambda",
    "num_nextn_predict_layers",
    "z_loss_lambda",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the alternative keys that transformers 5 also reads."""
    names = {"num_experts": "moe_num_experts", "num_local_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    return {names.get(key, key): value for key, value in hf.items()}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Omit the attention dropout from config.json, because the model in transformers has no such setting."""
    return {key: value for key, value in keys.items() if key != "attention_dropout"}


def weight_map(config: Ernie4_5MoeConfig) -> WeightMap:
    """Maps the parameters of ERNIE 4.5 to the tensors of a Hugging Face checkpoint."""
    return _map(config, "moe_statics", fused=False)


def other_maps(config: Ernie4_5MoeConfig) -> list[WeightMap]:
    """The weight maps for the checkpoints of transformers 5. These checkpoints differ from the released ones in one or
    both of these ways: the name of the bias contains the router's name; one tensor per projection holds all experts of
    a layer."""
    return [
        _map(config, "gate.moe_statics", fused=True),
        _map(config, "gate.moe_statics", fused=False),
        _map(config, "moe_statics", fused=True),
    ]


def _map(config: Ernie4_5MoeConfig, statics: str, *, fused: bool) -> WeightMap:
    shared = "shared_experts" if config.moe_num_shared_experts else None
    mlp = "layers.{sparse}.mlp"
    # In checkpoints the bias is [1, X].
    bias = Rearrange("one x -> (one x)", f"model.{mlp}.{statics}.e_score_correction_bias", one=1)
    ours = f"{mlp}.experts.correction.bias" if shared else f"{mlp}.correction.bias"
    head = {"lm_head.bias": "lm_head.bias"} if config.use_bias else {}
    return shared_moe_map(
        config, fused=fused, experts=config.moe_num_experts, shared=shared, correction=False,
        qkv_bias=config.use_bias, o_bias=config.use_bias, also={ours: bias, **head},
        kept=["model.mtp"],
    )  # fmt: skip


add_family(
    LigerErnie4_5Moe,
    model_type="ernie4_5_moe",
    hf_class="Ernie4_5_MoeForCausalLM",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
