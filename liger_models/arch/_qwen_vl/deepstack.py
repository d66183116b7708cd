"""The vision tower of Qwen3-VL, dense and MoE: patches to image tokens and DeepStack features.

Differs from the tower of Qwen2-VL: the patch embedding has a bias; besides the rotation, patches have learned positions
that are interpolated to the grid of the image. The tower also has DeepStack: the outputs of some blocks are merged into
features of the image tokens, and these are added to the residual stream after the first blocks of the language model.

Source: https://arxiv.org/abs/2511.21631, https://arxiv.org/abs/2406.04334, transformers ``models/qwen3_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.patches import interpolate_positions, locate_patches
from liger_models.layers.rope import AxialRotaryEmbedding
from liger_models.layers.vision import PatchMerger, VisionBlock


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the width does not divide into heads, ``num_position_embeddings`` is not a square number, or the
            activation is not supported.
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
        if self.hidden_size % (4 * self.num_heads) != 0:
            raise ValueError(
                f"Qwen3VLVisionConfig: hidden_size ({self.hidden_size}) must be a multiple of 4 · num_heads "
                f"({self.num_heads}), to rotate by row and column. Check config.json."
            )
        if int(self.num_position_embeddings**0.5) ** 2 != self.num_position_embeddings:
            raise ValueError(
                "Qwen3VLVisionConfig: num_position_embeddings must be a square number, got "
                f"{self.num_position_embeddings}. Check config.json."
            )
        if self.hidden_act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh"):
            raise ValueError(
                "Qwen3VLVisionConfig: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', got "
                f"{self.hidden_act!r}. The tower has no other activation."
            )

    def check_decoder(self, name: str, hidden_size: int, num_hidden_layers: int) -> None:
        """Raise ValueError unless the tower's outputs fit the language model, whose config class is ``name``."""
        if self.out_hidden_size != hidden_size:
            raise ValueError(
                f"{name}: vision_config.out_hidden_size ({self.out_hidden_size}) must be hidden_size ({hidden_size}). "
                "Check config.json."
            )
        if not len(self.deepstack_visual_indexes) <= num_hidden_layers:
            raise ValueError(
                f"{name}: deepstack_visual_indexes ({self.deepstack_visual_indexes}) must not have more entries than "
                f"num_hidden_layers ({num_hidden_layers}). Check config.json."
            )


class Qwen3VLTower(nn.Module):
    """The vision tower: patches to image tokens and DeepStack features.

    Args:
        config: sizes.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Qwen3VLVisionConfig, kernels: KernelOptions) -> None:
        super().__init__()
        self.merge, self.deepstack = config.spatial_merge_size, config.deepstack_visual_indexes
        # Patches are merged at the end into image tokens, and after some blocks into DeepStack features.
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

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute image tokens, and the DeepStack features of each level.

        Args:
            pixels: [N, channels · frames · height · width], one row per patch.
            grid_thw: [n, 3] int64.

        Returns:
            ``(tokens, levels)``, each [N / merge², C].
        """
        # Embedded patches with their learned positions, [1, N, C]. Patches of a frame attend to each other.
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        layout = BatchLayout.bidirectional(patches.position_ids, {"default": self.rotary}, patches.frame)
        embedded = self.patch_embed(pixels.to(self.patch_embed.weight.dtype))
        placed = embedded + interpolate_positions(local(self.pos_embed.weight), patches).to(embedded.dtype)
        x, residual = None, placed[None]
        levels = []
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, layout)
            if index in self.deepstack:
                levels.append(self.deepstack_mergers[self.deepstack.index(index)](x, residual))
        # [N / merge², C] each
        return self.merger(x, residual), levels
