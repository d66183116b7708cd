"""Gemma 3 with images (4B, 12B, 27B), MedGemma: model_type ``gemma3``.

The language model is ``gemma3_text``'s, but that the tokens of an image see each other, also those after them. The
tower is SigLIP's: images of one size, learned positions, pre-norm blocks with LayerNorm and biases, no rotation. What
comes out of it is averaged over squares of patches, normed, and projected.

Source: https://arxiv.org/abs/2503.19786, https://arxiv.org/abs/2303.15343, transformers ``models/gemma3``.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.kernels.dispatch import check
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.config import DecoderConfig, check_layer_types, check_values
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import ACTIVATIONS, GatedMLP, LigerMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.sequence import Sequence
from liger_models.layers.tensor_parallel import own
from liger_models.layers.vision import VisionBlock
from liger_models.layers.vision_language import SquareImageModel


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig:
    """Sizes of the tower.

    Raises:
        ValueError: heads that do not fit the width, patches that do not fit the image, or an activation that the tower
            does not have.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    vision_use_head: bool = False

    def __post_init__(self) -> None:
        check(
            self.hidden_size % self.num_attention_heads == 0,
            f"Gemma3VisionConfig: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
            f"({self.num_attention_heads}). Check config.json.",
        )
        check(
            not self.vision_use_head,
            "Gemma3VisionConfig: vision_use_head must be False, got True. The tower has no head, and no release does.",
        )
        check(
            self.image_size % self.patch_size == 0,
            f"Gemma3VisionConfig: image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}). "
            "Check config.json.",
        )
        check(
            self.hidden_act in ("quick_gelu", "gelu", "gelu_pytorch_tanh") and self.attention_dropout == 0.0,
            f"Gemma3VisionConfig: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh' and attention_dropout "
            f"0, got {self.hidden_act!r} and {self.attention_dropout}. The tower has nothing else.",
        )

    @property
    def patches_per_side(self) -> int:
        """Rows and columns of patches."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Sizes and constants of a Gemma 3 model: the language model's own, and the tower's in ``vision_config``.

    ``rope_theta`` and ``rope_scaling`` are those of the layers without a window; ``layer_types``, where it is given,
    names the layers instead of ``sliding_window_pattern``.
    """

    activations = ("gelu_pytorch_tanh",)

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0
    image_token_index: int = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: int = 256
    vision_config: Gemma3VisionConfig = field(default_factory=Gemma3VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        side, patches = self.tokens_per_side, self.vision_config.patches_per_side
        check(
            side**2 == self.mm_tokens_per_image and side > 0 and patches % side == 0,
            f"Gemma3Config: mm_tokens_per_image ({self.mm_tokens_per_image}) must be the square of a number that "
            f"divides the rows of patches ({patches}). Check config.json.",
        )
        check_layer_types("Gemma3Config", self.layer_types, self.num_hidden_layers)
        check_values(self, use_bidirectional_attention=(None, False))

    @property
    def tokens_per_side(self) -> int:
        """Rows and columns of an image's tokens."""
        return int(self.mm_tokens_per_image**0.5)

    def layer_type(self, layer: int) -> str:
        """What a layer attends to; also the name of its rotary embedding."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"


class Gemma3Tower(nn.Module):
    """Images to image tokens.

    Args:
        config: sizes, of the language model as well.
        norm: makes a Gemma norm of a width.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Gemma3Config, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        self.patch, self.side, C = vision.patch_size, config.tokens_per_side, vision.hidden_size
        layer_norm = partial(LigerLayerNorm, C, vision.layer_norm_eps, kernel=kernels.layer_norm)
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C)
        self.pos_embed = nn.Embedding(vision.patches_per_side**2, C)
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, vision.num_attention_heads, layer_norm,
                LigerMLP(C, vision.intermediate_size, act=ACTIVATIONS[vision.hidden_act], kernel=kernels.swiglu),
                kernels, rotary=None,
            )
            for _ in range(vision.num_hidden_layers)
        )  # fmt: skip
        self.post_layernorm = layer_norm()
        self.soft_emb_norm = norm(C, eps=vision.layer_norm_eps)
        self.projection = nn.Linear(C, config.hidden_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [n, channels, image_size, image_size] -> [n · tokens, C]."""
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x, residual = None, embedded + own(self.pos_embed.weight)
        sequence = Sequence.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, sequence)
        seen = self.post_layernorm.add(x, residual)[0]
        side = int(seen.shape[1] ** 0.5)
        squares = rearrange(
            seen, "n (h y w x) c -> n (h w) (y x) c", h=self.side, w=self.side, y=side // self.side, x=side // self.side
        )
        tokens: Tensor = self.projection(self.soft_emb_norm(squares.mean(2)))
        return tokens.flatten(0, 1)


class Gemma3Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``, each addition done with the next norm."""

    def __init__(self, config: Gemma3Config, layer: int, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        super().__init__()
        layer_type = config.layer_type(layer)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = LigerQKNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            norm=norm,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.sliding_window if layer_type == "sliding_attention" else None,
            dropout=config.attention_dropout,
            rotary=layer_type,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm(config.hidden_size)
        self.pre_feedforward_layernorm = norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x), residual


class LigerGemma3(SquareImageModel):
    """Gemma 3 with images, and its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Gemma3Config
    config: Any

    def __init__(self, config: Gemma3Config, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        norm = partial(
            LigerRMSNorm, eps=config.rms_norm_eps, offset=1.0, casting_mode="gemma", init_fn="zeros",
            kernel=self.kernels.rms_norm,
        )  # fmt: skip
        self.visual = Gemma3Tower(config, norm, self.kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5)
        self.layers = nn.ModuleList(Gemma3Block(config, i, norm, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        full = RotaryEmbedding(config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        self.rotary = nn.ModuleDict({"full_attention": full, "sliding_attention": sliding})
        self.post_init()
