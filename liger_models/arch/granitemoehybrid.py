"""Granite 4.0 (hybrid models with and without experts, and dense models): model_type ``granitemoehybrid``.

Differs from Granite 3: in the models with "h" in their names, most layers have a state-space mixer (`LigerMamba2`)
instead of attention. The MLP is a mixture of experts plus a shared MLP for all tokens, or the shared MLP alone. Queries
and keys are rotated only if ``position_embedding_type`` is "rope". The embeddings, the attention scores, the outputs of
the branches and the logits are scaled as in ``granite``.

Unlike in transformers, padding does not change the result: for padding tokens, the biases of the projection and of the
convolution do not enter the state. Step sizes are also limited in cached decoding; transformers 5.23 limits them only
while it processes a prompt.

Source: https://www.ibm.com/granite, transformers ``models/granitemoehybrid``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch._mamba import (
    IGNORED_MIXER_KEYS,
    MambaHybridConfig,
    build_mixer,
    hybrid_map,
    read_mixer,
    write_mixer,
)
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, WeightMap, fused_expert_rows, fused_gate_up_rows
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm

MAMBA, ATTENTION = "mamba", "attention"


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(MambaHybridConfig):
    """Sizes and constants of a Granite 4 model. Without ``layer_types``, no layer has attention."""

    layer_kinds = (MAMBA, ATTENTION)

    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None
    layer_types: list[str] | None = None

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention instead of a state-space mixer."""
        return self.layer_types is not None and self.layer_types[layer] == ATTENTION


class GraniteMoeHybridBlock(nn.Module):
    """``h += m · mixer(norm(h)); h += m · (experts(norm(h)) + mlp(norm(h)))`` with ``m = residual_multiplier``.

    The mixer is a state-space mixer or attention. In models without experts, the second step has no term
    ``experts(norm(h))``.
    """

    def __init__(self, config: GraniteMoeHybridConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = norm()
        self.has_attention = config.has_attention(layer)
        if self.has_attention:
            self.self_attn = LigerAttention.from_config(
                config,
                layer,
                kernels,
                scale=config.attention_multiplier,
                rotary="default" if config.position_embedding_type == "rope" else None,
            )
        else:
            self.mamba = build_mixer(config, layer, kernels)
        self.post_attention_layernorm = norm()
        self.block_sparse_moe = None
        if config.num_local_experts > 0:
            self.block_sparse_moe = LigerMoE(
                config.hidden_size,
                config.intermediate_size,
                config.num_local_experts,
                Routing(config.num_experts_per_tok, normalize=True, round_weights=True),
                kernel=kernels.swiglu,
            )
        self.shared_mlp = LigerSwiGLUMLP(config, config.shared_intermediate_size, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and router logits
        if the block has experts."""
        mixer, scale = self.self_attn if self.has_attention else self.mamba, self.residual_multiplier
        x, residual = mixer.add_norm(self.input_layernorm, x, residual, layout)
        if self.block_sparse_moe is None:
            x, residual = self.shared_mlp.add_norm(self.post_attention_layernorm, x * scale, residual)
            return x * scale, residual
        norm = self.post_attention_layernorm
        y, residual, logits = self.block_sparse_moe.add_norm(norm, x * scale, residual, *layout.experts)
        shared, residual = self.shared_mlp.add_norm(norm, None, residual)
        return (y + shared) * scale, residual, logits


class LigerGraniteMoeHybrid(CausalLM):
    """Granite 4 with its language-model head."""

    config_class = GraniteMoeHybridConfig
    block_class = GraniteMoeHybridBlock
    replays_routing = True

    def build_head(self, config: GraniteMoeHybridConfig) -> LigerLMHead:
        """A head whose logits are divided by ``logits_scaling``."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, logit_scale=1 / config.logits_scaling, kernels=self.kernels
        )

    def run_blocks(
        self, embeds: Tensor, layout: BatchLayout, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Scale the embeddings and call `Decoder.run_blocks`. A caller's ``inputs_embeds`` are also scaled."""
        return super().run_blocks(embeds * self.config.embedding_multiplier, layout, states)


def _map(config: GraniteMoeHybridConfig, experts: tuple[str, str, str]) -> WeightMap:
    """Return the weight map of Granite 4; ``experts`` has the names that the experts' matrices and the router have in
    the checkpoint."""
    layer = "model.layers.{i}"
    mlps: dict[str, Expression | str] = {}
    if config.num_local_experts > 0:
        gate_up, down, router = (f"{layer}.block_sparse_moe.{name}" for name in experts)
        ours = "layers.{i}.block_sparse_moe"
        mlps[f"{ours}.gate.weight"] = router
        mlps[f"{ours}.gate_up_weight"], mlps[f"{ours}.down_weight"] = fused_expert_rows(gate_up, down)
    shared = f"{layer}.shared_mlp"
    mlps["layers.{i}.shared_mlp.gate_up_proj.weight"] = fused_gate_up_rows(f"{shared}.input_linear.weight")
    mlps["layers.{i}.shared_mlp.down_proj.weight"] = f"{shared}.output_linear.weight"
    return hybrid_map(config, ("input_layernorm", "post_attention_layernorm"), mlps)


HUB = "input_linear.weight", "output_linear.weight", "router.layer.weight"
MEMORY = "experts.gate_up_proj", "experts.down_proj", "router.weight"
"""The names that the experts' matrices and the router have on the hub (`HUB`) and in transformers 5's modules
(`MEMORY`)."""

WORDS = {"linear_attention": MAMBA, "full_attention": ATTENTION}
"""Maps the layer types in files of transformers 5 to the layer types in files on the hub."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of the mixer, and convert the layer types of transformers 5 to those on the hub."""
    flat = read_mixer(hf)
    types = flat.pop("layers_block_type", None) if flat.get("layer_types") is None else flat["layer_types"]
    return flat if types is None else {**flat, "layer_types": [WORDS.get(word, word) for word in types]}


add_family(
    LigerGraniteMoeHybrid,
    model_type="granitemoehybrid",
    hf_class="GraniteMoeHybridForCausalLM",
    weight_map=lambda config: _map(config, HUB),
    other_maps=lambda config: [_map(config, MEMORY)] if config.num_local_experts > 0 else [],
    from_json=from_json,
    to_json=write_mixer,
    ignored_keys=(*IGNORED_MIXER_KEYS, "init_method", "normalization_function"),
    module="model.norm",
)
