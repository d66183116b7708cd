"""DeepSeek V3, R1 and V3.1, and Moonlight: model_type ``deepseek_v3``. Kimi K2 (``kimi_k2``) has the same layers.

Differs from Llama: keys and values are computed from a latent of each token, and decoding caches only the latents
(`LigerLatentAttention`). From layer ``first_k_dense_replace`` on, the MLP is a mixture of experts plus shared experts.
The ``n_shared_experts`` shared experts process all tokens. Together, the shared experts form one MLP, whose output is
not gated. The score of an expert is the sigmoid of its router logit. To choose experts, ``e_score_correction_bias`` is
added to the scores. The experts form ``n_group`` groups, and the score of a group is the sum of its two best scores.
Experts are chosen only from the ``topk_group`` best groups. The routing weights are the scores without the bias,
divided by their sum if ``norm_topk_prob`` is set, and multiplied by ``routed_scaling_factor``. The bias stays in fp32
and is not trained by gradients. With YaRN, attention scores are multiplied by the square of a factor that is computed
from ``mscale_all_dim``. The layers for multi-token prediction follow the last layer; their weights are kept and saved
with the model. Checkpoints of Kimi K2 are saved with the model_type ``deepseek_v3``, which transformers can read.

Source: https://arxiv.org/abs/2412.19437, transformers ``models/deepseek_v3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.format import DEEPSEEK_IGNORED_KEYS, deepseek_mtp
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.layers.block import SharedExpertBlock
from liger_models.layers.config import GroupedExperts, LatentDecoderConfig
from liger_models.layers.latent_attention import LigerLatentAttention


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(GroupedExperts, LatentDecoderConfig):
    """Sizes and constants of a DeepSeek V3 model."""

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    first_k_dense_replace: int = 3
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1


class DeepseekV3Block(SharedExpertBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = LigerLatentAttention

    def attention_options(self, config: DeepseekV3Config, layer: int) -> dict[str, Any]:
        return {"interleaved": config.rope_interleave}


class LigerDeepseekV3(CausalLM):
    """DeepSeek V3 with its language-model head."""

    config_class = DeepseekV3Config
    block_class = DeepseekV3Block
    replays_routing = True


IGNORED_KEYS = (*DEEPSEEK_IGNORED_KEYS, "topk_method")


from_json = renaming({"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"})
"""Renames keys that transformers 5 writes."""


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Also write the type of the rope scaling under the key ``type``, which DeepSeek's own code reads."""
    rope = keys.get("rope_scaling")
    return {**keys, "rope_scaling": {"type": rope["rope_type"], **rope}} if rope else dict(keys)


def weight_map(config: DeepseekV3Config, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of DeepSeek V3 to the tensors of a checkpoint; for ``fused``, see `shared_moe_map`."""
    layers = config.num_hidden_layers
    later = [f"model.layers.{layers + i}." for i in range(config.num_nextn_predict_layers)]
    return shared_moe_map(config, fused=fused, kept=later)


add_family(
    LigerDeepseekV3,
    model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    mtp=partial(deepseek_mtp, first_k_dense_replace=0),
    aliases=("kimi_k2",),
)
