"""The configuration of Llama 4 with images, and its vision tower, which turns tiles of images into image tokens."""

from dataclasses import dataclass, field
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.llama4.text import Llama4TextConfig
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import check_multiple, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.rope import AxialRotaryEmbedding
from liger_models.layers.vision import VisionBlock

EPS = 1e-5
"""The eps of all LayerNorms. transformers does not read this eps from config.json."""


@dataclass(frozen=True, kw_only=True)
class Llama4VisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the sizes do not fit together, or dropout is not 0.
    """

    hidden_size: int = 768
    intermediate_size: int = 5632
    num_hidden_layers: int = 34
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 448
    patch_size: int = 14
    rope_theta: float = 10000.0
    pixel_shuffle_ratio: float = 0.5
    projector_input_dim: int = 4096
    projector_output_dim: int = 4096
    vision_output_dim: int = 7680
    attention_dropout: float = 0.0
    projector_dropout: float = 0.0

    def __post_init__(self) -> None:
        name, C, heads, merge = type(self).__name__, self.hidden_size, self.num_attention_heads, self.merge
        check_multiple(self, hidden_size="num_attention_heads", image_size="patch_size")
        check_values(self, attention_dropout=(0.0,), projector_dropout=(0.0,))
        if C // heads % 4 != 0:
            raise ValueError(
                f"{name}: hidden_size ({C}) must be a multiple of 4 per head, to rotate by column and row, got "
                f"{heads} heads. Check config.json."
            )
        if not (merge >= 1 and self.pixel_shuffle_ratio * merge == 1 and self.patches_per_side % merge == 0):
            raise ValueError(
                f"{name}: pixel_shuffle_ratio must be 1 / n, where n divides the number of rows of patches "
                f"({self.patches_per_side}), got {self.pixel_shuffle_ratio}. Check config.json."
            )
        if self.intermediate_size != C * merge**2:
            raise ValueError(
                f"{name}: intermediate_size ({self.intermediate_size}) must be hidden_size ({C}) times the {merge**2} "
                "patches of an image token. Check config.json."
            )
        if not self.projector_input_dim == self.projector_output_dim == self.vision_output_dim:
            raise ValueError(
                f"{name}: projector_input_dim, projector_output_dim and vision_output_dim must be equal, got "
                f"{self.projector_input_dim}, {self.projector_output_dim} and {self.vision_output_dim}. Check "
                "config.json."
            )

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches of a tile."""
        return self.image_size // self.patch_size

    @property
    def merge(self) -> int:
        """Side of the square of patches that becomes one image token."""
        return round(1 / self.pixel_shuffle_ratio) if self.pixel_shuffle_ratio > 0 else 0

    @property
    def tokens_per_tile(self) -> int:
        """Number of image tokens per tile."""
        return (self.patches_per_side // self.merge) ** 2


@dataclass(frozen=True, kw_only=True)
class Llama4Config(Llama4TextConfig):
    """Sizes and constants of a Llama 4 model; ``vision_config`` holds the sizes of the vision tower."""

    image_token_index: int = 200092
    boi_token_index: int = 200080
    eoi_token_index: int = 200081
    vision_config: Llama4VisionConfig = field(default_factory=Llama4VisionConfig)


class Llama4Tower(nn.Module):
    """The vision tower, which turns tiles into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Llama4Config, kernels: KernelOptions) -> None:
        super().__init__()
        self.config = vision = config.vision_config
        C, heads = vision.hidden_size, vision.num_attention_heads
        norm = partial(LigerLayerNorm, C, EPS, kernel=kernels.layer_norm)
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C, bias=False)
        self.class_embed = nn.Parameter(torch.empty(C))
        self.pos_embed = nn.Embedding(vision.patches_per_side**2 + 1, C)
        self.layernorm_pre = norm()
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, heads, norm, LigerMLP(C, vision.intermediate_size, act="gelu", kernel=kernels.swiglu), kernels,
                interleaved=True,
            )
            for _ in range(vision.num_hidden_layers)
        )  # fmt: skip
        self.layernorm_post = norm()
        self.adapter = LigerMLP(
            vision.intermediate_size, vision.projector_input_dim, vision.projector_output_dim,
            act="gelu", bias=False, kernel=kernels.swiglu,
        )  # fmt: skip
        self.projection = nn.Linear(vision.vision_output_dim, config.hidden_size, bias=False)
        self.rotary = AxialRotaryEmbedding(C // heads, vision.rope_theta)

    def reset_parameters(self) -> None:
        """Initialize the class token at random. `Decoder.reset_parameters` initializes the rest."""
        nn.init.normal_(self.class_embed, std=self.config.hidden_size**-0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [tiles, channels, image_size, image_size] into image tokens [tiles · tokens, C]."""
        vision, side = self.config, self.config.patches_per_side
        # [tiles, patches, channels · patch_size²]
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=vision.patch_size, x=vision.patch_size)
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        # The class token is the last one.
        x = torch.cat([x, local(self.class_embed).expand(len(x), 1, -1)], 1) + local(self.pos_embed.weight)
        x, residual = None, self.layernorm_pre(x)

        # RoPE rotates patches by column and row, counted from 1. The class token has position 0, so RoPE does not
        # rotate it.
        index = torch.arange(side**2, device=residual.device)
        places = torch.stack([index % side, index // side]) + 1
        places = torch.nn.functional.pad(places, (0, 1))[:, None]  # [2, 1, patches + 1]
        layout = BatchLayout.bidirectional(places, {"default": self.rotary}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen = self.layernorm_post.add(x, residual)[0][:, :-1]

        # Each square of patches becomes one token: the features of its patches are concatenated row by row.
        squares = rearrange(
            seen, "n (h y w x) c -> (n h w) (y x c)", y=vision.merge, x=vision.merge, w=side // vision.merge,
            h=side // vision.merge,
        )  # fmt: skip
        tokens: Tensor = self.projection(torch.nn.functional.gelu(self.adapter(squares)))
        return tokens
