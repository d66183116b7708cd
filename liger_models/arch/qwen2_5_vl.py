"""Qwen2.5-VL, olmOCR 0725, UI-TARS 1.5: model_type ``qwen2_5_vl``.

Differs from Qwen2-VL in the vision tower: blocks have RMSNorm and a gated MLP with biases. In most layers, patches
attend only within windows; in the other layers, patches attend within the whole frame. Before the first block, patches
are sorted by window. After the merger, image tokens are put back into their original order. The temporal position of a
video frame is proportional to its time in seconds.

Source: https://arxiv.org/abs/2502.13923, transformers ``models/qwen2_5_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch._qwen_vl.names import QWEN2_IGNORED_KEYS, qwen2_vl_map, read_multimodal, write_multimodal
from liger_models.arch._qwen_vl.qwen2 import Qwen2VLBlock, Qwen2VLTextConfig
from liger_models.arch._qwen_vl.tower import PARAMETERS, QwenTower, check_token_width, check_tower
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, WeightMap, gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.patches import locate_patches, order_by_window


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig:
    """Sizes of the vision tower; windows are ``window_size`` pixels wide and high.

    Raises:
        ValueError: the width is not a multiple of the number of heads, a window is smaller than an image token, or the
            activation is not supported.
    """

    depth: int = 32
    hidden_size: int = 3584
    hidden_act: str = "silu"
    intermediate_size: int = 3420
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    tokens_per_second: int = 4
    window_size: int = 112
    out_hidden_size: int = 3584
    fullatt_block_indexes: list[int] = field(default_factory=lambda: [7, 15, 23, 31])
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_tower(self, "hidden_size", ("silu",))
        if not self.window_side > 0:
            raise ValueError(
                f"Qwen2_5VLVisionConfig: window_size ({self.window_size}) must be at least the side of an image token "
                f"({self.patch_size * self.spatial_merge_size}). Check config.json."
            )

    @property
    def window_side(self) -> int:
        """Number of rows and columns of image tokens in a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLConfig(Qwen2VLTextConfig):
    """Sizes and constants of a Qwen2.5-VL model; ``vision_config`` holds the sizes of the vision tower."""

    vision_config: Qwen2_5VLVisionConfig = field(default_factory=Qwen2_5VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token_width(self, "out_hidden_size")


class Qwen2_5VLTower(QwenTower):
    """The vision tower, which turns patches into image tokens.

    Args:
        config: sizes of the vision tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Qwen2_5VLVisionConfig, kernels: KernelOptions) -> None:
        C = config.hidden_size
        norm = partial(LigerRMSNorm, eps=1e-6, kernel=kernels.rms_norm)
        mlp = partial(GatedMLP, C, config.intermediate_size, bias=True, kernel=kernels.swiglu)
        super().__init__(config, C, config.out_hidden_size, norm, mlp, kernels)
        self.side, self.full = config.window_side, frozenset(config.fullatt_block_indexes)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Turn patches [N, values] of images with grids ``grid_thw`` [n, 3] into image tokens [N / merge², C].

        The second result is an empty list, because the tower has no DeepStack features.
        """
        # Sort the patches by window, so that each window is one segment. The patches of a token stay together.
        unit = self.merge**2
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        order, window = order_by_window(patches, self.merge, self.side)
        pixels = pixels.unflatten(0, (-1, unit))[order].flatten(0, 1)
        patches = patches.take(order, unit)
        # Most blocks attend within windows, and some within whole frames.
        frames, windows = (
            BatchLayout.bidirectional(patches.position_ids, {"default": self.rotary}, segments)
            for segments in (patches.frame, window.repeat_interleave(unit))
        )
        x, residual = None, self.patch_embed(pixels.to(self.patch_embed.weight.dtype))[None]
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, frames if index in self.full else windows)
        # Put the image tokens back into the order of the text.
        return self.merger(x, residual)[order.argsort()], []


class LigerQwen2_5VL(MRopeModel):
    """Qwen2.5-VL with its language-model head."""

    config_class = Qwen2_5VLConfig
    block_class = Qwen2VLBlock
    tower_class = Qwen2_5VLTower


def weight_map(config: Qwen2_5VLConfig) -> WeightMap:
    """Maps the parameters of Qwen2.5-VL to the tensors of a Hugging Face checkpoint."""
    return _map(config, "model", "visual")


def other_maps(config: Qwen2_5VLConfig) -> list[WeightMap]:
    """The weight map for the tensor names of transformers' modules since version 4.52. Some versions of transformers
    also wrote these names to checkpoints."""
    return [_map(config, "model.language_model", "model.visual")]


def _map(config: Qwen2_5VLConfig, text: str, visual: str) -> WeightMap:
    block = f"{visual}.blocks.{{b}}.mlp"
    mlp: dict[str, Expression | str] = {}
    for k in PARAMETERS:
        mlp[f"gate_up_proj.{k}"] = gate_up_rows(f"{block}.gate_proj.{k}", f"{block}.up_proj.{k}")
        mlp[f"down_proj.{k}"] = f"{block}.down_proj.{k}"
    return qwen2_vl_map(config, text, visual, mlp, norm_bias=False)


add_family(
    LigerQwen2_5VL,
    model_type="qwen2_5_vl",
    hf_class="Qwen2_5_VLForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=partial(read_multimodal, Qwen2_5VLConfig),
    to_json=write_multimodal,
    ignored_keys=QWEN2_IGNORED_KEYS,
)
