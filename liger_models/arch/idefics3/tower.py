"""The vision tower of Idefics3, which is SigLIP with positions for tiles of any size, and the configuration."""

from dataclasses import dataclass, field
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import PLAIN_ACTIVATIONS, RMSNormDecoderConfig, check_multiple, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.vision import VisionBlock


@dataclass(frozen=True, kw_only=True)
class Idefics3VisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the width is not a multiple of the number of heads, or a setting is not supported.
    """

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_multiple(self, hidden_size="num_attention_heads")
        check_values(self, hidden_act=PLAIN_ACTIVATIONS, attention_dropout=(0.0,))

    @property
    def side(self) -> int:
        """Height and width of a tile in pixels."""
        return self.image_size

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches in a tile; pixels beyond the last whole patch are not read."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Idefics3Config(RMSNormDecoderConfig):
    """Sizes and constants of an Idefics3 model; ``vision_config`` holds the sizes of the tower.

    Raises:
        ValueError: the rows of patches of a tile can't be divided by ``scale_factor``.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    image_token_id: int = 128257
    scale_factor: int = 2
    vision_config: Idefics3VisionConfig = field(default_factory=Idefics3VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        patches = self.vision_config.patches_per_side
        # The default sizes of transformers, 7 rows and a factor of 2, do not fit together.
        if self.scale_factor < 1 or patches < self.scale_factor:
            raise ValueError(
                f"{type(self).__name__}: scale_factor ({self.scale_factor}) must be from 1 to the number of rows of "
                f"patches of a tile ({patches}). Check config.json."
            )

    @property
    def tokens_per_tile(self) -> int:
        """Number of image tokens of a tile."""
        return (self.vision_config.patches_per_side // self.scale_factor) ** 2


class Idefics3Tower(nn.Module):
    """The vision tower and the projection.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Idefics3Config, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, self.patch, self.shuffle = vision.hidden_size, vision.patch_size, config.scale_factor
        self.side = vision.patches_per_side
        layer_norm = partial(LigerLayerNorm, C, vision.layer_norm_eps, kernel=kernels.layer_norm)
        # Patches arrive flattened, so that the convolution of the checkpoint is a linear layer.
        self.patch_embed = nn.Linear(vision.num_channels * self.patch**2, C)
        self.pos_embed = nn.Embedding(self.side**2, C)
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, vision.num_attention_heads, layer_norm,
                LigerMLP(C, vision.intermediate_size, act=ACTIVATIONS[vision.hidden_act], kernel=kernels.swiglu),
                kernels, rotary=None,
            )
            for _ in range(vision.num_hidden_layers)
        )  # fmt: skip
        self.post_layernorm = layer_norm()
        self.projection = nn.Linear(C * config.scale_factor**2, config.hidden_size, bias=False)

    def positions(self, patches: int, device: torch.device) -> Tensor:
        """Return the row of `pos_embed` for each patch of a tile with so many rows and columns, [patches²] int64.

        Each side of the tile is divided into as many buckets as the table has rows, as in transformers.
        """
        boundaries = torch.arange(1 / self.side, 1.0, 1 / self.side, device=device)
        places = (torch.arange(patches, device=device, dtype=torch.float32) * (1.0 / patches)).clamp(max=1.0 - 1e-6)
        buckets = torch.bucketize(places, boundaries, right=True)
        return (buckets[:, None] * self.side + buckets).flatten()

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn square tiles [n, channels, side, side] into image tokens [n · tokens, C]."""
        rows = pixels.shape[-1] // self.patch
        whole = pixels[..., : rows * self.patch, : rows * self.patch]
        # [n, patches, channels · patch²]
        patches = rearrange(whole, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        positions = nn.functional.embedding(self.positions(rows, pixels.device), local(self.pos_embed.weight))
        x, residual = None, embedded + positions
        # All patches of a tile attend to each other, without rotation.
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen = self.post_layernorm.add(x, residual)[0]
        # Squares of patches are concatenated: [n · tokens, scale_factor² · C].
        side, shuffle = rows // self.shuffle, self.shuffle
        squares = rearrange(seen, "n (h y w x) c -> (n h w) (y x c)", h=side, w=side, y=shuffle, x=shuffle)
        tokens: Tensor = self.projection(squares)
        return tokens
