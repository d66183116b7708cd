"""Qwen2-VL, QVQ, olmOCR 0225: model_type ``qwen2_vl``.

The language model is Qwen2 with positions in time, height and width. Each of these three coordinates has its own
section of the rotary frequencies. The vision tower has pre-norm blocks with LayerNorm and a plain MLP. In the tower,
patches attend only to patches of the same frame, and RoPE rotates queries and keys by row and column. A patch spans two
frames, and a square of two by two patches becomes one image token.

Source: https://arxiv.org/abs/2409.12191, transformers ``models/qwen2_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch._qwen_vl.names import QWEN2_IGNORED_KEYS, qwen2_vl_map, read_multimodal, write_multimodal
from liger_models.arch._qwen_vl.qwen2 import Qwen2VLBlock, Qwen2VLTextConfig
from liger_models.arch._qwen_vl.tower import PARAMETERS, QwenTower, check_token_width, check_tower
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.patches import locate_patches


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVisionConfig:
    """Sizes of the vision tower; ``embed_dim`` is the width of the tower, and ``hidden_size`` is the width of the
    language model.

    Raises:
        ValueError: the width is not a multiple of the number of heads, or the activation is not supported.
    """

    depth: int = 32
    embed_dim: int = 1280
    hidden_size: int = 3584
    hidden_act: str = "quick_gelu"
    mlp_ratio: int = 4
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_tower(self, "embed_dim")


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(Qwen2VLTextConfig):
    """Sizes and constants of a Qwen2-VL model; ``vision_config`` holds the sizes of the vision tower."""

    vision_config: Qwen2VLVisionConfig = field(default_factory=Qwen2VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token_width(self, "hidden_size")


class Qwen2VLTower(QwenTower):
    """The vision tower, which turns patches into image tokens.

    Args:
        config: sizes of the vision tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Qwen2VLVisionConfig, kernels: KernelOptions) -> None:
        C, act = config.embed_dim, ACTIVATIONS[config.hidden_act]
        norm = partial(LigerLayerNorm, eps=1e-6, kernel=kernels.layer_norm)
        mlp = partial(LigerMLP, C, C * config.mlp_ratio, act=act, kernel=kernels.swiglu)
        super().__init__(config, C, config.hidden_size, norm, mlp, kernels)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Turn patches [N, values] of images with grids ``grid_thw`` [n, 3] into image tokens [N / merge², C].

        The second result is an empty list, because the tower has no DeepStack features.
        """
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        # Patches of a frame attend to each other. All images form one row: [1, N, C].
        layout = BatchLayout.bidirectional(patches.position_ids, {"default": self.rotary}, patches.frame)
        x, residual = None, self.patch_embed(pixels.to(self.patch_embed.weight.dtype))[None]
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        return self.merger(x, residual), []


class LigerQwen2VL(MRopeModel):
    """Qwen2-VL with its language-model head."""

    config_class = Qwen2VLConfig
    block_class = Qwen2VLBlock
    tower_class = Qwen2VLTower


def weight_map(config: Qwen2VLConfig) -> WeightMap:
    """Maps the parameters of Qwen2-VL to the tensors of a Hugging Face checkpoint."""
    return _map(config, "model", "visual")


def other_maps(config: Qwen2VLConfig) -> list[WeightMap]:
    """The weight map for the tensor names of transformers' modules since version 4.52. Some versions of transformers
    also wrote these names to checkpoints."""
    return [_map(config, "model.language_model", "model.visual")]


def _map(config: Qwen2VLConfig, text: str, visual: str) -> WeightMap:
    mlp = {f"{fc}.{k}": f"{visual}.blocks.{{b}}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in PARAMETERS}
    return qwen2_vl_map(config, text, visual, mlp)


add_family(
    LigerQwen2VL,
    model_type="qwen2_vl",
    hf_class="Qwen2VLForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=partial(read_multimodal, Qwen2VLConfig),
    to_json=write_multimodal,
    ignored_keys=QWEN2_IGNORED_KEYS,
)
