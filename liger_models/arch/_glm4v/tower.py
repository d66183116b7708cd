"""The vision tower of GLM-4.1V and GLM-4.5V, which turns patches into image tokens.

Differs from the tower of Qwen2-VL: patches are normalized after the embedding, which has a bias. In addition to rotary
positions, patches have learned positions, which are interpolated bicubically to the grid of the image. Blocks have
RMSNorm and a gated MLP, whose width is ``out_hidden_size``. After the blocks, a projection merges squares of two by two
patches, and a gated MLP of width ``intermediate_size`` follows.

Source: https://arxiv.org/abs/2507.01006, transformers ``models/glm4v``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch._qwen_vl.names import IGNORED_KEYS as QWEN_IGNORED_KEYS
from liger_models.arch._qwen_vl.names import TOP as QWEN_TOP
from liger_models.arch._qwen_vl.tower import QwenTower, check_token_width, check_tower, tower_entries
from liger_models.convert.weight_map import Expression, Rearrange, gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm, Norm
from liger_models.layers.patches import interpolate_positions, locate_patches


@dataclass(frozen=True, kw_only=True)
class Glm4vVisionConfig:
    """Sizes of the vision tower.

    ``out_hidden_size`` is the width of the image tokens, and also the width of the MLPs in the blocks.
    ``intermediate_size`` is the width of the MLP that follows the merging of patches.

    Raises:
        ValueError: the width is not a multiple of the number of heads, the activation is not supported, or the grid of
            learned positions is empty.
    """

    depth: int = 24
    hidden_size: int = 1536
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    num_heads: int = 12
    in_channels: int = 3
    image_size: int = 336
    patch_size: int = 14
    rms_norm_eps: float = 1e-5
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 4096
    intermediate_size: int = 13696
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_tower(self, "hidden_size", ("silu",))
        check_values(self, attention_dropout=(0.0,))
        if not self.image_size >= self.patch_size:
            raise ValueError(
                f"Glm4vVisionConfig: image_size ({self.image_size}) must be at least patch_size ({self.patch_size}). "
                "Check config.json."
            )

    @property
    def num_positions(self) -> int:
        """Number of learned positions, which form a square grid."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, kw_only=True)
class Glm4vFields:
    """The fields that the configs of GLM-4.1V and GLM-4.5V have in addition to the language model's fields.

    ``video_token_id`` is the placeholder of a whole video in the text. The processor replaces this placeholder with
    image placeholders, which stand for the video's frames.
    """

    mrope_section: list[int] = field(default_factory=lambda: [8, 12, 12])
    video_start_token_id: int = 151341
    video_end_token_id: int = 151342
    vision_config: Glm4vVisionConfig = field(default_factory=Glm4vVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        check_token_width(self, "out_hidden_size")


class Glm4vMerger(nn.Module):
    """Merges squares of patches into image tokens: ``mlp(gelu(norm(proj(downsample(norm(patches))))))``.

    Args:
        norm: function that returns an RMSNorm of a given width.
        config: sizes of the vision tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, norm: Callable[[int], Norm], config: Glm4vVisionConfig, kernels: KernelOptions) -> None:
        super().__init__()
        C, tokens = config.hidden_size, config.out_hidden_size
        self.wide = C * config.spatial_merge_size**2
        self.norm = norm(C)
        # The patches of a token are adjacent, so the checkpoint's convolution becomes a linear layer.
        self.downsample = nn.Linear(self.wide, tokens)
        self.proj = nn.Linear(tokens, tokens, bias=False)
        self.proj_norm = LigerLayerNorm(tokens, eps=1e-5, kernel=kernels.layer_norm)
        self.mlp = GatedMLP(tokens, config.intermediate_size, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Merge ``residual + x`` [1, N, C] into image tokens [N / merge², out_hidden_size]."""
        normed = self.norm.add(x, residual)[0].reshape(-1, self.wide)
        projected = self.proj_norm(self.proj(self.downsample(normed)))
        y: Tensor = self.mlp(nn.functional.gelu(projected))
        return y


class Glm4vTower(QwenTower):
    """The vision tower, which turns patches into image tokens.

    Args:
        config: sizes of the vision tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Glm4vVisionConfig, kernels: KernelOptions) -> None:
        C, tokens = config.hidden_size, config.out_hidden_size
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        mlp = partial(GatedMLP, C, tokens, kernel=kernels.swiglu)
        super().__init__(
            config, C, tokens, norm, mlp, kernels,
            positions=config.num_positions, merger=Glm4vMerger(norm, config, kernels),
            bias=config.attention_bias, o_bias=False,
        )  # fmt: skip
        self.patch_norm = norm(C)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Turn patches [N, values] of images with grids ``grid_thw`` [n, 3] into image tokens [N / merge², C].

        The second result is an empty list, because the tower has no DeepStack features.
        """
        # Embedded patches with their learned positions, [1, N, C]. Patches of a frame attend to each other.
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        layout = BatchLayout.bidirectional(patches.position_ids, {"default": self.rotary}, patches.frame)
        embedded = self.patch_norm(self.patch_embed(pixels.to(self.patch_embed.weight.dtype)))
        positions = interpolate_positions(local(self.pos_embed.weight), patches, bicubic=True)
        x, residual = None, (embedded + positions.to(embedded.dtype))[None]
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        return self.merger(x, residual), []


IGNORED_KEYS = (
    *QWEN_IGNORED_KEYS,
    "image_start_token_id",
    "image_end_token_id",
)
"""Keys of config.json that do not change the model."""

TOP = (*QWEN_TOP, "video_start_token_id", "video_end_token_id")
"""Keys of config.json that do not belong to the language model."""


def glm4v_tower(vision: Glm4vVisionConfig, visual: str) -> tuple[dict[str, Expression | str], Mapping[str, range]]:
    """Return the arguments ``also`` and ``over`` of `decoder_map` for a tower whose tensor names begin with
    ``visual``."""
    block, merger = f"{visual}.blocks.{{b}}.mlp", f"{visual}.merger"

    def gated(ours: str, theirs: str) -> dict[str, Any]:
        gate_up = gate_up_rows(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        return {f"{ours}gate_up_proj.weight": gate_up, f"{ours}down_proj.weight": f"{theirs}.down_proj.weight"}

    downsample = Rearrange(
        "tokens c height width -> tokens (height width c)", f"{visual}.downsample.weight",
        height=vision.spatial_merge_size, width=vision.spatial_merge_size,
    )  # fmt: skip
    entries = {
        **tower_entries(
            vision, visual, gated("", block), norm_bias=False, qkv_bias=vision.attention_bias, o_bias=False
        ),
        "visual.patch_embed.bias": f"{visual}.patch_embed.proj.bias",
        "visual.patch_norm.weight": f"{visual}.post_conv_layernorm.weight",
        "visual.pos_embed.weight": f"{visual}.embeddings.position_embedding.weight",
        "visual.merger.norm.weight": f"{visual}.post_layernorm.weight",
        "visual.merger.downsample.weight": downsample,
        "visual.merger.downsample.bias": f"{visual}.downsample.bias",
        "visual.merger.proj.weight": f"{merger}.proj.weight",
        "visual.merger.proj_norm.weight": f"{merger}.post_projection_norm.weight",
        "visual.merger.proj_norm.bias": f"{merger}.post_projection_norm.bias",
        **gated("visual.merger.mlp.", merger),
    }
    return entries, {"b": range(vision.depth)}
