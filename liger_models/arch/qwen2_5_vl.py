"""Qwen2.5-VL, olmOCR 0725, UI-TARS 1.5: model_type ``qwen2_5_vl``.

Differs from Qwen2-VL in the vision tower: blocks have RMSNorm and a gated MLP with biases, and attention is limited to
windows except in a few layers, which attend within the whole frame. Patches are sorted by window once before the
blocks, and image tokens are returned to their order after the merger. Temporal positions of a video are proportional to
its seconds.

Source: https://arxiv.org/abs/2502.13923, transformers ``models/qwen2_5_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch._qwen_vl.names import QWEN2_IGNORED_KEYS, read_multimodal, write_multimodal
from liger_models.arch._qwen_vl.qwen2 import Qwen2VLBlock, Qwen2VLTextConfig
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap, decoder_map, equal_qkv_rows, gate_up_rows, patch_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.patches import locate_patches, order_by_window
from liger_models.layers.rope import AxialRotaryEmbedding
from liger_models.layers.vision import PatchMerger, VisionBlock


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig:
    """Sizes of the vision tower; windows are ``window_size`` pixels wide and high.

    Raises:
        ValueError: the width does not divide into heads, a window is smaller than an image token, or the activation is
            not supported.
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
        if self.hidden_size % (4 * self.num_heads) != 0:
            raise ValueError(
                f"Qwen2_5VLVisionConfig: hidden_size ({self.hidden_size}) must be a multiple of 4 · num_heads "
                f"({self.num_heads}), to rotate by row and column. Check config.json."
            )
        if not self.window_side > 0:
            raise ValueError(
                f"Qwen2_5VLVisionConfig: window_size ({self.window_size}) must be at least the side of an image token "
                f"({self.patch_size * self.spatial_merge_size}). Check config.json."
            )
        if self.hidden_act != "silu":
            raise ValueError(
                f"Qwen2_5VLVisionConfig: hidden_act must be 'silu', got {self.hidden_act!r}. The tower has no other "
                "activation."
            )

    @property
    def window_side(self) -> int:
        """Side of a window in image tokens."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLConfig(Qwen2VLTextConfig):
    """Sizes and constants of a Qwen2.5-VL model; ``vision_config`` holds the sizes of the tower."""

    vision_config: Qwen2_5VLVisionConfig = field(default_factory=Qwen2_5VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision_config.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"Qwen2_5VLConfig: vision_config.out_hidden_size ({self.vision_config.out_hidden_size}) must be "
                f"hidden_size ({self.hidden_size}). Check config.json."
            )


class Qwen2_5VLTower(nn.Module):
    """The vision tower: patches to image tokens.

    Args:
        config: sizes.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Qwen2_5VLVisionConfig, kernels: KernelOptions) -> None:
        super().__init__()
        self.merge, self.side = config.spatial_merge_size, config.window_side
        self.full = frozenset(config.fullatt_block_indexes)
        C = config.hidden_size
        norm = partial(LigerRMSNorm, eps=1e-6, kernel=kernels.rms_norm)
        # Patches arrive flattened, so that the convolution of the checkpoint is a linear layer.
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = nn.Linear(pixels, C, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, config.num_heads, partial(norm, C),
                GatedMLP(C, config.intermediate_size, bias=True, kernel=kernels.swiglu), kernels,
            )
            for _ in range(config.depth)
        )  # fmt: skip
        self.merger = PatchMerger(norm, C, config.out_hidden_size, self.merge, kernels)
        self.rotary = AxialRotaryEmbedding(C // config.num_heads, config.rope_theta)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Turn patches [N, values] of images ``grid_thw`` [n, 3] into image tokens [N / merge², C]; no DeepStack."""
        # Patches in the order of their windows, so that a window is one segment. The patches of a token stay together.
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
        # The image tokens, back in the order of the text.
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
    """The layout of transformers' modules since 4.52, which some of its versions also wrote to checkpoints."""
    return [_map(config, "model.language_model", "model.visual")]


def _map(config: Qwen2_5VLConfig, text: str, visual: str) -> WeightMap:
    vision, block = config.vision_config, f"{visual}.blocks.{{b}}"
    kinds = ("weight", "bias")
    return decoder_map(
        config,
        qkv_bias=True,
        prefix=text,
        also={
            "visual.patch_embed.weight": patch_rows(
                f"{visual}.patch_embed.proj.weight", vision.in_channels, vision.temporal_patch_size, vision.patch_size
            ),
            # The blocks: norms without bias, q, k and v in one matrix, gate and up in two.
            **{f"visual.blocks.{{b}}.{norm}.weight": f"{block}.{norm}.weight" for norm in ("norm1", "norm2")},
            **{
                f"visual.blocks.{{b}}.attn.qkv_proj.{k}": equal_qkv_rows(f"{block}.attn.qkv.{k}", vision.num_heads)
                for k in kinds
            },
            **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.attn.proj.{k}" for k in kinds},
            **{
                f"visual.blocks.{{b}}.mlp.gate_up_proj.{k}": gate_up_rows(
                    f"{block}.mlp.gate_proj.{k}", f"{block}.mlp.up_proj.{k}"
                )
                for k in kinds
            },
            **{f"visual.blocks.{{b}}.mlp.down_proj.{k}": f"{block}.mlp.down_proj.{k}" for k in kinds},
            # The merger is a norm and a sequence of a layer, an activation and a layer.
            "visual.merger.norm.weight": f"{visual}.merger.ln_q.weight",
            **{f"visual.merger.mlp.fc1.{k}": f"{visual}.merger.mlp.0.{k}" for k in kinds},
            **{f"visual.merger.mlp.fc2.{k}": f"{visual}.merger.mlp.2.{k}" for k in kinds},
        },
        over={"b": range(vision.depth)},
    )


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
