"""GLM-4.7-Flash: model_type ``glm4_moe_lite``.

Differs from Llama: keys and values are computed from a latent of each token, and decoding caches only the latents
(`LigerLatentAttention`). In layers of type "sparse" in ``mlp_layer_types`` (by default, all but the first layer), the
MLP is a mixture of experts plus shared experts. The ``n_shared_experts`` shared experts process all tokens. Together,
the shared experts form one MLP, whose output is not gated. The score of an expert is the sigmoid of its router logit.
To choose experts, ``e_score_correction_bias`` is added to the scores. The experts form ``n_group`` groups, and the
score of a group is the sum of its two best scores. Experts are chosen only from the ``topk_group`` best groups. The
routing weights are the scores without the bias, divided by their sum if ``norm_topk_prob`` is set, and multiplied by
``routed_scaling_factor``. The bias stays in fp32 and is not trained by gradients. The layer for multi-token prediction
follows the last layer; its weights are kept and saved with the model.

Source: https://arxiv.org/abs/2508.06471, transformers ``models/glm4_moe_lite``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.format import DEEPSEEK_IGNORED_KEYS, deepseek_mtp
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.layers.block import SharedExpertBlock
from liger_models.layers.config import GroupedExperts, LatentDecoderConfig, check_layer_types, check_values
from liger_models.layers.latent_attention import LigerLatentAttention

LAYER_TYPES = ("dense", "sparse")


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(GroupedExperts, LatentDecoderConfig):
    """Sizes and constants of a GLM-4.7-Flash model. ``partial_rotary_factor`` must be 1."""

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 20
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    n_routed_experts: int = 64
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1536
    mlp_layer_types: list[str] | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.8
    rope_interleave: bool = True
    partial_rotary_factor: float = 1.0
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, partial_rotary_factor=(1.0,))
        check_layer_types("Glm4MoeLiteConfig", self.mlp_layer_types, self.num_hidden_layers, LAYER_TYPES)

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return layer > 0 if self.mlp_layer_types is None else self.mlp_layer_types[layer] == "sparse"


class Glm4MoeLiteBlock(SharedExpertBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = LigerLatentAttention

    def attention_options(self, config: Glm4MoeLiteConfig, layer: int) -> dict[str, Any]:
        return {"interleaved": config.rope_interleave}


class LigerGlm4MoeLite(CausalLM):
    """GLM-4.7-Flash with its language-model head."""

    config_class = Glm4MoeLiteConfig
    block_class = Glm4MoeLiteBlock
    replays_routing = True


IGNORED_KEYS = (
    *DEEPSEEK_IGNORED_KEYS, "num_nextn_predict_layers", "num_mtp_layers", "topk_method",
    "first_k_dense_replace",  # mlp_layer_types is read instead
)  # fmt: skip


def weight_map(config: Glm4MoeLiteConfig, *, fused: bool = False) -> WeightMap:
    """Maps the parameters of GLM-4.7-Flash to the tensors of a checkpoint; for ``fused``, see `shared_moe_map`."""
    return shared_moe_map(config, fused=fused, kept=[f"model.layers.{config.num_hidden_layers}."])


add_family(
    LigerGlm4MoeLite,
    model_type="glm4_moe_lite",
    hf_class="Glm4MoeLiteForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=renaming({"num_local_experts": "n_routed_experts"}),
    ignored_keys=IGNORED_KEYS,
    mtp=partial(deepseek_mtp, mlp_layer_types=["sparse"]),
)
