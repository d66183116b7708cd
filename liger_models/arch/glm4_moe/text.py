"""GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7: model_type ``glm4_moe``.

Differs from Llama: the heads have 128 dimensions, whatever the width of the model, and only the first half
(``partial_rotary_factor``) of each head is rotated. If ``attention_bias`` is set, the q, k and v projections have
biases. The output projection never has a bias. If ``use_qk_norm`` is set, each head of q and k is normalized before
RoPE. From layer ``first_k_dense_replace`` on, the MLP is a mixture of experts plus shared experts. The
``n_shared_experts`` shared experts process all tokens. Together, the shared experts form one MLP, whose output is not
gated. The score of an expert is the sigmoid of its router logit, in fp32. To choose experts,
``e_score_correction_bias`` is added to the scores. The experts form ``n_group`` groups, and the score of a group is the
sum of its two best scores. Experts are chosen only from the ``topk_group`` best groups. The routing weights are the
scores without the bias, divided by their sum if ``norm_topk_prob`` is set, and multiplied by ``routed_scaling_factor``.
The bias stays in fp32 and is not trained by gradients. The layer for multi-token prediction is kept and saved with the
model.

Source: https://arxiv.org/abs/2508.06471, transformers ``models/glm4_moe``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.convert.format import deepseek_mtp
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.block import SharedExpertBlock
from liger_models.layers.config import GroupedExperts, RMSNormDecoderConfig
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedExperts, RMSNormDecoderConfig):
    """Sizes and constants of a GLM-4.5 model."""

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = 1
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class Glm4MoeBlock(SharedExpertBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def build_attention(self, config: Glm4MoeConfig, layer: int, kernels: KernelOptions) -> LigerAttention:
        if not config.use_qk_norm:
            return LigerAttention.from_config(config, layer, kernels, o_bias=False)
        norm = self.norm_factory(config, kernels)
        return LigerQKNormAttention.from_config(config, layer, kernels, norm=norm, o_bias=False)


class LigerGlm4Moe(CausalLM):
    """GLM-4.5 with its language-model head."""

    config_class = Glm4MoeConfig
    block_class = Glm4MoeBlock
    replays_routing = True


# Keys of the released code and of the router's training, which the model in transformers does not read.
IGNORED_KEYS = (
    "aux_loss_alpha",
    "moe_layer_freq",
    "output_router_logits",  # there is no load-balancing loss
    "scoring_func",
    "topk_method",
)


from_json = renaming({"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"})
"""Renames keys that transformers 5 writes."""


def weight_map(config: Glm4MoeConfig, *, fused: bool = False, prefix: str = "model", **more: Any) -> WeightMap:
    """Maps the parameters of GLM-4.5 to the tensors of a checkpoint.

    Args:
        config: config of the model.
        fused, prefix, more: as in `shared_moe_map`.
    """
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.use_qk_norm else []
    layers = config.num_hidden_layers
    later = [f"{prefix}.layers.{layers + i}." for i in range(config.num_nextn_predict_layers)]
    return shared_moe_map(config, fused=fused, o_bias=False, norms=norms, kept=later, prefix=prefix, **more)


add_family(
    LigerGlm4Moe,
    model_type="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    weight_map=weight_map,
    other_maps=lambda config: [weight_map(config, fused=True)],
    from_json=from_json,
    ignored_keys=IGNORED_KEYS,
    mtp=partial(deepseek_mtp, first_k_dense_replace=0),
)
