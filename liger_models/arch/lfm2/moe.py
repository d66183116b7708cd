"""LFM2-8B-A1B, LFM2.5-8B-A1B: model_type ``lfm2_moe``.

Differs from ``lfm2``: the MLP is a mixture of experts, except in the first ``num_dense_layers`` layers. Experts are
chosen by the sigmoids of their logits plus a bias that is not trained by gradients. The width of dense MLPs is
``intermediate_size``.

Source: https://arxiv.org/abs/2511.23404, transformers ``models/lfm2_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.lfm2.block import IGNORED_KEYS, Lfm2BaseConfig, Lfm2Block, Lfm2Model, lfm2_map
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, WeightMap, gate_up_rows, stacked_experts
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerMoE


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2BaseConfig):
    """Sizes and constants of an LFM2 model with experts. Without ``layer_types``, all layers have attention."""

    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = True

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return layer >= self.num_dense_layers

    @property
    def routing(self) -> Routing:
        """How experts are chosen and weighted."""
        return Routing(
            self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            round_weights=True,
            score="sigmoid",
            scale=self.routed_scaling_factor,
            epsilon=1e-6,
        )


class Lfm2MoeBlock(Lfm2Block):
    """`Lfm2Block` with a gated MLP or a mixture of experts."""

    def build_mlp(self, config: Lfm2MoeConfig, layer: int, kernels: KernelOptions) -> LigerSwiGLUMLP | LigerMoE:
        """A mixture of experts, or a gated MLP in the first layers."""
        if not config.is_sparse(layer):
            return LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        return LigerMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.routing,
            correction_bias=config.use_expert_bias,
            kernel=kernels.swiglu,
        )


class LigerLfm2Moe(Lfm2Model):
    """LFM2 with a mixture of experts and with its language-model head."""

    config_class = Lfm2MoeConfig
    block_class = Lfm2MoeBlock
    replays_routing = True


def moe_map(config: Lfm2MoeConfig, *, fused: bool) -> WeightMap:
    """Return the weight map of LFM2 with experts. If ``fused`` is set, one tensor per projection holds all experts of a
    layer."""
    dense, sparse = (f"model.layers.{{{index}}}.feed_forward" for index in ("dense", "sparse"))
    stacked = stacked_experts(f"{sparse}.experts", config.num_experts, fused=fused, names=("w1", "w3", "w2"))
    ours = "layers.{sparse}.feed_forward"
    mlps: dict[str, Expression | str] = {
        "layers.{dense}.feed_forward.gate_up_proj.weight": gate_up_rows(f"{dense}.w1.weight", f"{dense}.w3.weight"),
        "layers.{dense}.feed_forward.down_proj.weight": f"{dense}.w2.weight",
        f"{ours}.gate.weight": f"{sparse}.gate.weight",
        f"{ours}.gate_up_weight": stacked[0],
        f"{ours}.down_weight": stacked[1],
    }
    if config.use_expert_bias:
        mlps[f"{ours}.correction.bias"] = f"{sparse}.expert_bias"
    layers = range(config.num_hidden_layers)
    over = {
        "dense": [i for i in layers if not config.is_sparse(i)],
        "sparse": [i for i in layers if config.is_sparse(i)],
    }
    return lfm2_map(config, mlps, over)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``tie_embedding``, which takes precedence over ``tie_word_embeddings``, as in transformers.

    Raises:
        ValueError: ``layer_types`` is missing; transformers also needs this key to build the model.
    """
    if hf.get("layer_types") is None:
        raise ValueError("config.json: layer_types must have a type for each layer, got none. Add it.")
    tied = {"tie_word_embeddings": hf["tie_embedding"]} if "tie_embedding" in hf else {}
    return {key: value for key, value in hf.items() if key != "tie_embedding"} | tied


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``tie_word_embeddings`` under both of its names, and drop keys that transformers does not know."""
    known = {key: value for key, value in keys.items() if key not in ("attention_dropout", "hidden_act")}
    return {**known, "tie_embedding": keys["tie_word_embeddings"]}


add_family(
    LigerLfm2Moe,
    model_type="lfm2_moe",
    hf_class="Lfm2MoeForCausalLM",
    weight_map=lambda config: moe_map(config, fused=False),
    other_maps=lambda config: [moe_map(config, fused=True)],
    from_json=from_json,
    to_json=to_json,
    ignored_keys=(*IGNORED_KEYS, "output_router_logits"),
    module="model.embedding_norm",
)
