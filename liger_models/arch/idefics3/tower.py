"""The configuration of Idefics3, and its vision tower, which is SigLIP with positions for tiles of any size."""

from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch._towers.siglip import SiglipSizes, SiglipTower
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.linear import local


@dataclass(frozen=True, kw_only=True)
class Idefics3VisionConfig(SiglipSizes):
    """Sizes of the vision tower."""

    hidden_size: int = 1152
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 32
    initializer_range: float = 0.02

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
    """Sizes and constants of an Idefics3 model; ``vision_config`` holds the sizes of the vision tower.

    Raises:
        ValueError: ``scale_factor`` is below 1 or above the number of rows of patches in a tile.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    image_token_id: int = 128257
    scale_factor: int = 2
    vision_config: Idefics3VisionConfig = field(default_factory=Idefics3VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        patches = self.vision_config.patches_per_side
        # The rows need not be a multiple of the factor: transformers' defaults are 7 rows and a factor of 2.
        if self.scale_factor < 1 or patches < self.scale_factor:
            raise ValueError(
                f"{type(self).__name__}: scale_factor ({self.scale_factor}) must be from 1 to the number of rows of "
                f"patches of a tile ({patches}). Check config.json."
            )

    @property
    def tokens_per_tile(self) -> int:
        """Number of image tokens per tile."""
        return (self.vision_config.patches_per_side // self.scale_factor) ** 2


class Idefics3Tower(SiglipTower):
    """The vision tower and the projection.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Idefics3Config, kernels: KernelOptions) -> None:
        vision = config.vision_config
        super().__init__(vision, kernels)
        self.shuffle, self.side = config.scale_factor, vision.patches_per_side
        self.projection = nn.Linear(vision.hidden_size * self.shuffle**2, config.hidden_size, bias=False)

    def positions(self, rows: int) -> Tensor:
        """See `SiglipTower.positions`.

        The learned positions form a square grid. As in transformers, each side of a tile is split into as many buckets
        as this grid has rows. The row bucket and the column bucket of a patch determine its learned position.
        """
        table = local(self.pos_embed.weight)
        boundaries = torch.arange(1 / self.side, 1.0, 1 / self.side, dtype=torch.float32, device=table.device)
        places = (torch.arange(rows, device=table.device, dtype=torch.float32) * (1.0 / rows)).clamp(max=1.0 - 1e-6)
        buckets = torch.bucketize(places, boundaries, right=True)
        return nn.functional.embedding((buckets[:, None] * self.side + buckets).flatten(), table)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn square tiles [n, channels, side, side] into image tokens [n · tokens, C]."""
        seen, rows, shuffle = self.run_blocks(pixels), pixels.shape[-1] // self.patch, self.shuffle
        # Squares of patches are concatenated: [n · tokens, scale_factor² · C].
        side = rows // shuffle
        squares = rearrange(seen, "n (h y w x) c -> (n h w) (y x c)", h=side, w=side, y=shuffle, x=shuffle)
        tokens: Tensor = self.projection(squares)
        return tokens
