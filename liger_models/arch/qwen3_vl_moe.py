"""Qwen3-VL with a mixture of experts (30B-A3B, 235B-A22B): model_type ``qwen3_vl_moe``.

Tower, positions and DeepStack are those of the dense Qwen3-VL. The blocks of the language model are Qwen3-MoE's, with
routing weights that are always renormalised, and without windows.

Source: https://arxiv.org/abs/2511.21631, transformers ``models/qwen3_vl_moe``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.config import DecoderConfig
from liger_models.layers.deepstack import Qwen3VLTower, Qwen3VLVisionConfig
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import MultimodalRotaryEmbedding
from liger_models.layers.sequence import Sequence
from liger_models.layers.vision_language import MRopeModel


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(DecoderConfig):
    """Sizes and constants of a Qwen3VLMoe model: the language model's own, and the tower's in ``vision_config``."""

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
        """True if a layer's MLP is a mixture of experts."""
        return layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0


class Qwen3VLMoeBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: Qwen3VLMoeConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = LigerQKNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            norm=norm,
            layer=layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
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

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, ...]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair, and a router's logits."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        if isinstance(self.mlp, LigerSwiGLUMLP):
            return self.mlp.add_norm(self.post_attention_layernorm, x, residual)
        normed, residual = self.post_attention_layernorm.add(x, residual)
        x, router_logits = self.mlp(normed)
        return x, residual, router_logits


class LigerQwen3VLMoE(MRopeModel):
    """Qwen3VLMoe with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Qwen3VLMoeConfig
    frames_apart = True

    def __init__(self, config: Qwen3VLMoeConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.visual = Qwen3VLTower(config.vision_config, self.kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3VLMoeBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = MultimodalRotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings,
            sections=config.mrope_section, interleaved=True,
        )  # fmt: skip
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()
