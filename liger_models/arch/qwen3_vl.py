"""Qwen3-VL, dense: model_type ``qwen3_vl``.

The language model is Qwen3's, with positions in time, height and width; the rotary frequencies of the three are
interleaved. The tower is Qwen2-VL's, with a bias in the patch embedding, a learned position of each patch, stretched
over the image's grid, besides the rotation, and DeepStack: the patches after some of its blocks become image tokens of
their own, which are added to the stream behind the first blocks of the language model. Each frame of a video stands for
itself in the text, with its time in front.

Source: https://arxiv.org/abs/2511.21631, https://arxiv.org/abs/2406.04334, transformers ``models/qwen3_vl``.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from liger_models.kernels.dispatch import check
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.config import DecoderConfig
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP, LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.patches import interpolate_positions, locate_patches
from liger_models.layers.rope import AxialRotaryEmbedding, MultimodalRotaryEmbedding
from liger_models.layers.sequence import Sequence
from liger_models.layers.tensor_parallel import own
from liger_models.layers.vision import PatchMerger, VisionBlock
from liger_models.layers.vision_language import ImageFeatures, MRopeModel


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig:
    """Sizes of the tower.

    Raises:
        ValueError: heads that do not fit the width, positions that are no square, or an activation that the tower does
            not have.
    """

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: list[int] = field(default_factory=lambda: [8, 16, 24])
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"Qwen3VLVisionConfig: hidden_size ({self.hidden_size}) must be a multiple of 4 · num_heads "
            f"({self.num_heads}), for rows and columns. Check config.json.",
        )
        check(
            int(self.num_position_embeddings**0.5) ** 2 == self.num_position_embeddings,
            f"Qwen3VLVisionConfig: num_position_embeddings must be a square, got {self.num_position_embeddings}. "
            "Check config.json.",
        )
        check(
            self.hidden_act in ("quick_gelu", "gelu", "gelu_pytorch_tanh"),
            f"Qwen3VLVisionConfig: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', "
            f"got {self.hidden_act!r}. The tower has no other activation.",
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(DecoderConfig):
    """Sizes and constants of a Qwen3-VL model: the language model's own, and the tower's in ``vision_config``."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 128000
    rope_theta: float = 500000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.vision_config.out_hidden_size == self.hidden_size,
            f"Qwen3VLConfig: vision_config.out_hidden_size ({self.vision_config.out_hidden_size}) must be "
            f"hidden_size ({self.hidden_size}). Check config.json.",
        )
        check(
            len(self.vision_config.deepstack_visual_indexes) <= self.num_hidden_layers,
            f"Qwen3VLConfig: deepstack_visual_indexes ({self.vision_config.deepstack_visual_indexes}) must not be more "
            f"than num_hidden_layers ({self.num_hidden_layers}). Check config.json.",
        )


class Qwen3VLTower(nn.Module):
    """Patches to image tokens.

    Args:
        config: sizes.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Qwen3VLVisionConfig, kernels: KernelOptions) -> None:
        super().__init__()
        self.merge, self.deepstack = config.spatial_merge_size, config.deepstack_visual_indexes
        C = config.hidden_size
        norm = partial(LigerLayerNorm, eps=1e-6, kernel=kernels.layer_norm)
        merger = partial(PatchMerger, norm, C, config.out_hidden_size, self.merge, kernels)
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = nn.Linear(pixels, C)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, C)
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, config.num_heads, partial(norm, C),
                LigerMLP(C, config.intermediate_size, act=ACTIVATIONS[config.hidden_act], kernel=kernels.swiglu),
                kernels,
            )
            for _ in range(config.depth)
        )  # fmt: skip
        self.merger = merger()
        self.deepstack_mergers = nn.ModuleList(merger(norm_of_all=True) for _ in self.deepstack)
        self.rotary = AxialRotaryEmbedding(C // config.num_heads, config.rope_theta)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> ImageFeatures:
        """pixels [N, channels · frames · height · width], grid_thw [n, 3] -> [N / merge², C], also for DeepStack."""
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        sequence = Sequence.bidirectional(patches.position_ids, {"default": self.rotary}, patches.frame)
        embedded = self.patch_embed(pixels.to(self.patch_embed.weight.dtype))
        placed = embedded + interpolate_positions(own(self.pos_embed.weight), patches).to(embedded.dtype)
        x, residual = None, placed[None]
        levels = []
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, sequence)
            if index in self.deepstack:
                levels.append(self.deepstack_mergers[self.deepstack.index(index)](x, residual))
        return ImageFeatures(self.merger(x, residual), levels)


class Qwen3VLBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: Qwen3VLConfig, layer: int, kernels: KernelOptions) -> None:
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
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class LigerQwen3VL(MRopeModel):
    """Qwen3-VL with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Qwen3VLConfig
    block_class: ClassVar[type[nn.Module]] = Qwen3VLBlock
    frames_apart = True

    def __init__(self, config: Qwen3VLConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.visual = Qwen3VLTower(config.vision_config, self.kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block_class(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = MultimodalRotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings,
            sections=config.mrope_section, interleaved=True,
        )  # fmt: skip
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()
