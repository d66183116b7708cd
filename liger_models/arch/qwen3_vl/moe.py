"""Qwen3-VL with a mixture of experts (30B-A3B, 235B-A22B): model_type ``qwen3_vl_moe``.

The vision tower, the positions and DeepStack are those of dense Qwen3-VL. The language model has the blocks of
Qwen3-MoE, but always renormalises routing weights and has no attention window.

Source: https://arxiv.org/abs/2511.21631, transformers ``models/qwen3_vl_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch._qwen_vl import names
from liger_models.arch._qwen_vl.deepstack import Qwen3VLTower, Qwen3VLVisionConfig
from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch.registry import add_family
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import Expression, Rearrange, WeightMap, fused_expert_rows, sparse_mlps
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Qwen3-VL-MoE model; those of the vision tower are in ``vision_config``."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 128000
    rope_theta: float = 500000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])
    attention_bias: bool = False
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 4
    num_experts: int = 60
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vision_config.check_decoder("Qwen3VLMoeConfig", self.hidden_size, self.num_hidden_layers)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return step and layer not in (self.mlp_only_layers or ())


class Qwen3VLMoeBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: Qwen3VLMoeConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = LigerQKNormAttention.from_config(
            config, layer, kernels, norm=norm, qkv_bias=config.attention_bias, o_bias=config.attention_bias
        )
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp: LigerMoE | LigerSwiGLUMLP
        if not config.is_sparse(layer):
            self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        else:
            self.mlp = LigerMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                normalize=True,
                round_weights=True,
                kernel=kernels.swiglu,
            )

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """x [B, T, C] is yet to be added to residual [B, T, C]; returns the next such pair, and a router's logits."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual, *layout.experts)


class LigerQwen3VLMoE(MRopeModel):
    """Qwen3-VL-MoE with its language-model head."""

    config_class = Qwen3VLMoeConfig
    block_class = Qwen3VLMoeBlock
    replays_routing = True
    frames_apart = True
    tower_class = Qwen3VLTower
    interleaved = True


IGNORED_KEYS = (
    *names.IGNORED_KEYS,
    "norm_topk_prob",  # routing weights are always renormalised
    "sliding_window",  # there are no windows
    "use_sliding_window",
)
TEXT = "model.language_model"
EXPERTS = f"{TEXT}.layers.{{sparse}}.mlp.experts"


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """As `read_multimodal`; transformers 5 writes ``num_experts`` as ``num_local_experts``."""
    flat = names.read_multimodal(Qwen3VLMoeConfig, hf)
    if "num_local_experts" in flat:
        flat["num_experts"] = flat.pop("num_local_experts")
    return flat


def weight_map(config: Qwen3VLMoeConfig) -> WeightMap:
    """Maps the parameters of Qwen3-VL-MoE to the tensors of a hub checkpoint, whose expert weights are transposed."""
    gate_up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    return _map(config, Rearrange("x c (two f) -> x (f two) c", gate_up, two=2), Rearrange("x f c -> x c f", down))


def other_maps(config: Qwen3VLMoeConfig) -> list[WeightMap]:
    """The untransposed layout, which transformers 5 writes for models that it did not load from a checkpoint."""
    return [_map(config, *fused_expert_rows(f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"))]


def _map(config: Qwen3VLMoeConfig, gate_up: Expression, down: Expression) -> WeightMap:
    sparse = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
    mlps = sparse_mlps(sparse, config.num_hidden_layers, TEXT, gate_up, down)
    return names.qwen3_vl_map(config, TEXT, "model.visual", mlps)


add_family(
    LigerQwen3VLMoE,
    CheckpointFormat(
        model_type="qwen3_vl_moe",
        hf_class="Qwen3VLMoeForConditionalGeneration",
        weight_map=weight_map,
        other_maps=other_maps,
        from_json=from_json,
        to_json=names.write_qwen3_vl,
        ignored_keys=IGNORED_KEYS,
    ),
)
