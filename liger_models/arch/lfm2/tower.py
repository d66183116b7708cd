"""The configuration of LFM2-VL, and its vision tower, which is SigLIP 2 for images of any size.

Source: https://arxiv.org/abs/2502.14786, transformers ``models/siglip2``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from liger_models.arch._towers.siglip import SiglipSizes, SiglipTower
from liger_models.arch.lfm2.dense import Lfm2Config
from liger_models.common.errors import is_traced
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.patches import Patches, locate_patches, resample_positions

PROJECTOR_EPS = 1e-5
"""The eps of the projector's norm. No configuration sets it."""


@dataclass(frozen=True, kw_only=True)
class Lfm2VisionConfig(SiglipSizes):
    """Sizes of the vision tower, with ``num_patches`` learned positions.

    Raises:
        ValueError: ``num_patches`` is not a square; otherwise as in `SiglipSizes`.
    """

    num_patches: int = 256
    vision_use_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patches_per_side**2 != self.num_patches:
            raise ValueError(
                f"{type(self).__name__}: num_patches must be the square of a number of rows, got {self.num_patches}. "
                "Check config.json."
            )

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of learned positions."""
        return int(self.num_patches**0.5)


@dataclass(frozen=True, kw_only=True)
class Lfm2VlConfig(Lfm2Config):
    """Sizes and constants of an LFM2 model with images; ``vision_config`` holds the sizes of the vision tower."""

    image_token_id: int = 396
    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = 2560
    projector_bias: bool = True
    projector_use_layernorm: bool = True
    downsample_factor: int = 2
    vision_config: Lfm2VisionConfig = field(default_factory=Lfm2VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, projector_hidden_act=PLAIN_ACTIVATIONS)


class Lfm2VlTower(SiglipTower):
    """The vision tower and the projector.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Lfm2VlConfig, kernels: KernelOptions) -> None:
        vision = config.vision_config
        super().__init__(vision, kernels)
        self.merge = config.downsample_factor
        wide = vision.hidden_size * self.merge**2
        use_norm = config.projector_use_layernorm
        self.norm = LigerLayerNorm(wide, PROJECTOR_EPS, kernel=kernels.layer_norm) if use_norm else None
        self.projection = LigerMLP(
            wide, config.projector_hidden_size, config.hidden_size, act=ACTIVATIONS[config.projector_hidden_act],
            bias=config.projector_bias, kernel=kernels.swiglu,
        )  # fmt: skip

    def forward(self, pixels: Tensor, shapes: Tensor) -> Tensor:
        """Turn the patches of all images into image tokens.

        Args:
            pixels: [n, P, channels · patch²], the patches of each image row by row, and then padding.
            shapes: [n, 2] int64, the number of rows and columns of patches of each image.

        Returns:
            [N / merge², C], where N is the number of patches without padding. In a compiled graph, which cannot depend
            on ``shapes``, the result ends with rows for the padding.
        """
        (n, P, _), unit, traced = pixels.shape, self.merge**2, is_traced()
        shapes = shapes.to(pixels.device)
        total = shapes.prod(1).sum()
        count = n * P // unit * unit if traced else int(total)
        # Patches are ordered by squares of merge × merge patches; a square becomes one image token.
        patches = locate_patches(torch.nn.functional.pad(shapes, (1, 0), value=1), count, self.merge)
        real = torch.arange(count, device=pixels.device) < total
        if traced:  # padding has no position in an image
            patches = Patches(*(column * real for column in patches))
        source = patches.item * P + patches.row * patches.width + patches.column
        item = patches.item.masked_fill(~real, n)  # the padding counts as an image of its own

        embedded = self.patch_embed(pixels.flatten(0, 1)[source].to(self.patch_embed.weight.dtype))
        positions = resample_positions(local(self.pos_embed.weight), patches).to(embedded.dtype)
        # All images form a single row. The patches of an image are one segment, and attend to each other without RoPE.
        layout = BatchLayout.bidirectional(torch.arange(count, device=pixels.device)[None], {}, item)
        x, residual = None, (embedded + positions)[None]
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen: Tensor = self.post_layernorm.add(x, residual)[0]
        # The patches of a square are adjacent: [N / merge², merge² · C].
        squares = seen.reshape(-1, unit * seen.shape[-1])
        tokens: Tensor = self.projection(squares if self.norm is None else self.norm(squares))
        return tokens
