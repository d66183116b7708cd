"""The vision tower of Gemma 3, which is SigLIP, and the configuration of the model with images."""

from dataclasses import dataclass, field
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.gemma3.text import Gemma3TextConfig
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_multiple, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm, zero_centered_norm
from liger_models.layers.vision import VisionBlock


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the width is not a multiple of the number of heads, the image size is not a multiple of the patch
            size, or the activation is not supported.
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
        check_multiple(self, hidden_size="num_attention_heads", image_size="patch_size")
        check_values(self, hidden_act=PLAIN_ACTIVATIONS, attention_dropout=(0.0,), vision_use_head=(False,))

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3TextConfig):
    """Sizes and constants of a Gemma 3 model; ``vision_config`` holds the sizes of the tower."""

    image_token_index: int = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: int = 256
    vision_config: Gemma3VisionConfig = field(default_factory=Gemma3VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        side, patches = self.tokens_per_side, self.vision_config.patches_per_side
        if not (side**2 == self.mm_tokens_per_image and side > 0 and patches % side == 0):
            raise ValueError(
                f"Gemma3Config: mm_tokens_per_image ({self.mm_tokens_per_image}) must be the square of a number that "
                f"divides the number of rows of patches ({patches}). Check config.json."
            )

    @property
    def tokens_per_side(self) -> int:
        """Number of rows and columns of image tokens."""
        return int(self.mm_tokens_per_image**0.5)


class Gemma3Tower(nn.Module):
    """The vision tower, which turns images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Gemma3Config, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        self.patch, self.side, C = vision.patch_size, config.tokens_per_side, vision.hidden_size
        layer_norm = partial(LigerLayerNorm, C, vision.layer_norm_eps, kernel=kernels.layer_norm)
        # Patches arrive flattened, so that the convolution of the checkpoint is a linear layer.
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
        # From the tower to the decoder: the norm is that of the decoder with the eps of the tower.
        self.soft_emb_norm = zero_centered_norm(config, kernels)(C, eps=vision.layer_norm_eps)
        self.projection = nn.Linear(C, config.hidden_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, image_size, image_size] into image tokens [n · tokens, C]."""
        # [n, patches, channels · side²]
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x, residual = None, embedded + local(self.pos_embed.weight)
        # All patches of an image attend to each other, without rotation.
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen = self.post_layernorm.add(x, residual)[0]
        # Image tokens are means over squares of patches: [n, tokens, patches of a token, C].
        side = int(seen.shape[1] ** 0.5)
        squares = rearrange(
            seen, "n (h y w x) c -> n (h w) (y x) c", h=self.side, w=self.side, y=side // self.side, x=side // self.side
        )
        tokens: Tensor = self.projection(self.soft_emb_norm(squares.mean(2)))
        return tokens.flatten(0, 1)
