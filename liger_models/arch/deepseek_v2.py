"""DeepSeek V2, V2 Lite and Coder V2: model_type ``deepseek_v2``.

Differs from Llama: keys and values are computed from a latent of each token, and decoding caches only the latents
(`LigerLatentAttention`). In V2 Lite, ``q_lora_rank`` is null, and queries are computed from the layer's input instead
of a latent. From layer ``first_k_dense_replace`` on, the MLP is a mixture of experts plus shared experts. The
``n_shared_experts`` shared experts process all tokens. Together, the shared experts form one MLP, whose output is not
gated. Routing weights are the softmax probabilities, multiplied by ``routed_scaling_factor`` and not renormalized. With
``topk_method`` "group_limited_greedy", the experts form ``n_group`` groups, and the score of a group is the score of
its best expert. Experts are chosen only from the ``topk_group`` best groups. With YaRN, attention scores are multiplied
by the square of a factor that is computed from ``mscale_all_dim``.

Source: https://arxiv.org/abs/2405.04434, transformers ``models/deepseek_v2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.format import DEEPSEEK_IGNORED_KEYS
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import LatentDecoderConfig, check_values
from liger_models.layers.latent_attention import LigerLatentAttention
from liger_models.layers.moe import LigerSharedExpertMoE


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LatentDecoderConfig):
    """Sizes and constants of a DeepSeek V2 model. ``mlp_bias`` adds biases to dense MLPs and to shared experts."""

    vocab_size: int = 102400
    first_k_dense_replace: int = 0
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    routed_scaling_factor: float = 1.0
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, topk_method=("greedy", "group_limited_greedy"))

    @property
    def routing(self) -> Routing:
        """How experts are chosen, and the factor that scales the routing weights."""
        if self.topk_method == "greedy":
            return Routing(self.top_k, scale=self.routed_scaling_factor)
        groups, top_groups = self.n_group or 1, self.topk_group or 1
        return Routing(self.top_k, groups=groups, top_groups=top_groups, scale=self.routed_scaling_factor)

    @property
    def top_k(self) -> int:
        """Number of routed experts per token. By default, the number is 6, as in all released models."""
        return 6 if self.num_experts_per_tok is None else self.num_experts_per_tok

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return layer >= self.first_k_dense_replace


class DeepseekV2Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = LigerLatentAttention

    def build_experts(self, config: DeepseekV2Config, kernels: KernelOptions) -> LigerSharedExpertMoE:
        return LigerSharedExpertMoE.from_config(config, kernels, shared_bias=config.mlp_bias)


class LigerDeepseekV2(CausalLM):
    """DeepSeek V2 with its language-model head."""

    config_class = DeepseekV2Config
    block_class = DeepseekV2Block
    replays_routing = True


# Released models never renormalize the routing weights.
IGNORED_KEYS = (*DEEPSEEK_IGNORED_KEYS, "norm_topk_prob", "num_nextn_predict_layers")


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Also write the type of the rope scaling under the key ``type``, which DeepSeek's own code reads."""
    rope = keys.get("rope_scaling")
    return {**keys, "rope_scaling": {"type": rope["rope_type"], **rope}} if rope else dict(keys)


def weight_map(config: DeepseekV2Config, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of DeepSeek V2 to the tensors of a checkpoint; for ``fused``, see `shared_moe_map`."""
    return shared_moe_map(config, fused=fused, correction=False)


add_family(
    LigerDeepseekV2,
    model_type="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=renaming({"num_experts": "n_routed_experts"}),
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
