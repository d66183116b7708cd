"""The vision tower of Qwen3-VL (dense and MoE), which turns patches into image tokens and DeepStack features.

Differs from the tower of Qwen2-VL: the patch embedding has a bias. In addition to rotary positions, patches have
learned positions, which are interpolated to the grid of the image. The tower also has DeepStack: the outputs of some
blocks are merged into features of the image tokens, and these features are added to the residual stream after the first
blocks of the language model.

Source: https://arxiv.org/abs/2511.21631, https://arxiv.org/abs/2406.04334, transformers ``models/qwen3_vl``.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch._qwen_vl.tower import QwenTower, check_token_width, check_tower
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.patches import interpolate_positions, locate_patches
from liger_models.layers.vision import PatchMerger


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the width is not a multiple of the number of heads, ``num_position_embeddings`` is not a square
            number, or the activation is not supported.
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
        check_tower(self, "hidden_size")
        if int(self.num_position_embeddings**0.5) ** 2 != self.num_position_embeddings:
            raise ValueError(
                "Qwen3VLVisionConfig: num_position_embeddings must be a square number, got "
                f"{self.num_position_embeddings}. Check config.json."
            )


def check_decoder(config: Any) -> None:
    """Raise ValueError if the width of the tower's tokens or the number of DeepStack features does not fit the language
    model."""
    check_token_width(config, "out_hidden_size")
    indexes = config.vision_config.deepstack_visual_indexes
    if len(indexes) > config.num_hidden_layers:
        raise ValueError(
            f"{type(config).__name__}: deepstack_visual_indexes ({indexes}) must not have more entries than "
            f"num_hidden_layers ({config.num_hidden_layers}). Check config.json."
        )


class Qwen3VLTower(QwenTower):
    """The vision tower, which turns patches into image tokens and DeepStack features.

    Args:
        config: sizes of the vision tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Qwen3VLVisionConfig, kernels: KernelOptions) -> None:
        C, tokens, act = config.hidden_size, config.out_hidden_size, ACTIVATIONS[config.hidden_act]
        norm = partial(LigerLayerNorm, eps=1e-6, kernel=kernels.layer_norm)
        mlp = partial(LigerMLP, C, config.intermediate_size, act=act, kernel=kernels.swiglu)
        super().__init__(config, C, tokens, norm, mlp, kernels, positions=config.num_position_embeddings)
        # After the last block, patches are merged into image tokens. After some of the blocks, patches are also merged
        # into DeepStack features.
        self.deepstack = config.deepstack_visual_indexes
        merger = partial(PatchMerger, norm, C, tokens, self.merge, kernels, norm_of_all=True)
        self.deepstack_mergers = nn.ModuleList(merger() for _ in self.deepstack)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the image tokens, and their DeepStack features for the first blocks of the language model.

        Args:
            pixels: [N, channels · frames · height · width], one row per patch.
            grid_thw: [n, 3] int64.

        Returns:
            ``(tokens, levels)``: the image tokens [N / merge², C], and a list of DeepStack features of the same shape.
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
