"""The tower of Qwen3-VL, dense and MoE: patches to image tokens, and to DeepStack's.

It is Qwen2-VL's, with a bias in the patch embedding, a learned position of each patch, stretched over the image's grid,
besides the rotation, and DeepStack: the patches after some of its blocks become image tokens of their own, which are
added to the stream behind the first blocks of the language model.

Source: https://arxiv.org/abs/2511.21631, https://arxiv.org/abs/2406.04334, transformers ``models/qwen3_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.dispatch import check
from liger_models.kernels.options import KernelOptions

from .mlp import ACTIVATIONS, LigerMLP
from .norm import LigerLayerNorm
from .patches import interpolate_positions, locate_patches
from .rope import AxialRotaryEmbedding
from .sequence import Sequence
from .tensor_parallel import own
from .vision import PatchMerger, VisionBlock
from .vision_language import ImageFeatures


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig:
    """Sizes of the tower.

    Raises:
        ValueError: heads that do not fit the width, positions that are no square, or an activation that the tower does
            not have.
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
        check(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"Qwen3VLVisionConfig: hidden_size ({self.hidden_size}) must be a multiple of 4 · num_heads "
            f"({self.num_heads}), for rows and columns. Check config.json.",
        )
        check(
            int(self.num_position_embeddings**0.5) ** 2 == self.num_position_embeddings,
            f"Qwen3VLVisionConfig: num_position_embeddings must be a square, got {self.num_position_embeddings}. "
            "Check config.json.",
        )
        check(
            self.hidden_act in ("quick_gelu", "gelu", "gelu_pytorch_tanh"),
            f"Qwen3VLVisionConfig: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', "
            f"got {self.hidden_act!r}. The tower has no other activation.",
        )

    def check_decoder(self, name: str, hidden_size: int, num_hidden_layers: int) -> None:
        """Raise ValueError unless the tower's results fit the language model of the configuration ``name``."""
        check(
            self.out_hidden_size == hidden_size,
            f"{name}: vision_config.out_hidden_size ({self.out_hidden_size}) must be hidden_size ({hidden_size}). "
            "Check config.json.",
        )
        check(
            len(self.deepstack_visual_indexes) <= num_hidden_layers,
            f"{name}: deepstack_visual_indexes ({self.deepstack_visual_indexes}) must not be more than "
            f"num_hidden_layers ({num_hidden_layers}). Check config.json.",
        )


class Qwen3VLTower(nn.Module):
    """Patches to image tokens.

    Args:
        config: sizes.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Qwen3VLVisionConfig, kernels: KernelOptions) -> None:
        super().__init__()
        self.merge, self.deepstack = config.spatial_merge_size, config.deepstack_visual_indexes
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

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> ImageFeatures:
        """pixels [N, channels · frames · height · width], grid_thw [n, 3] -> [N / merge², C], also for DeepStack."""
        patches = locate_patches(grid_thw, len(pixels), self.merge)
        sequence = Sequence.bidirectional(patches.position_ids, {"default": self.rotary}, patches.frame)
        embedded = self.patch_embed(pixels.to(self.patch_embed.weight.dtype))
        placed = embedded + interpolate_positions(own(self.pos_embed.weight), patches).to(embedded.dtype)
        x, residual = None, placed[None]
        levels = []
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, sequence)
            if index in self.deepstack:
                levels.append(self.deepstack_mergers[self.deepstack.index(index)](x, residual))
        return ImageFeatures(self.merger(x, residual), levels)
