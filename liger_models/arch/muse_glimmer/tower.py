"""The vision tower of Muse Glimmer, which turns patches into image tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.kernels.linear.act_linear import act_reference
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_layer_types, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.patches import interpolate_positions, locate_patches, order_by_window
from liger_models.layers.rope import AxialRotaryEmbedding
from liger_models.layers.vision import VisionBlock

BLOCK_EPS = 1e-5
"""Epsilon of the norms in the blocks. config.json does not set this epsilon."""


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerVisionConfig:
    """Sizes of the vision tower. An attention window has as many rows and columns of patches as the grid of learned
    positions.

    Raises:
        ValueError: the width is not a multiple of 4 times the number of heads, the grid of learned positions is not
            square, or a type of layer or the activation is not supported.
    """

    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 50
    num_attention_heads: int = 16
    hidden_act: str = "gelu"
    patch_size: int = 14
    patch_temporal: int = 2
    merge_size: int = 2
    pos_emb_height: int = 32
    pos_emb_width: int = 32
    layer_norm_eps: float = 1e-5
    layer_types: list[str] | None = None
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.hidden_size % (4 * self.num_attention_heads) != 0:
            raise ValueError(
                f"{name}: hidden_size ({self.hidden_size}) must be a multiple of 4 · num_attention_heads "
                f"({self.num_attention_heads}), to rotate by row and column. Check config.json."
            )
        if self.pos_emb_width != self.pos_emb_height:
            raise ValueError(
                f"{name}: pos_emb_height ({self.pos_emb_height}) and pos_emb_width ({self.pos_emb_width}) must be "
                "equal. Check config.json."
            )
        check_layer_types(name, self.layer_types, self.num_hidden_layers, ("full_attention", "window_attention"))
        check_values(self, hidden_act=PLAIN_ACTIVATIONS)

    def is_full(self, layer: int) -> bool:
        """Whether a layer attends within the whole frame: by default every fourth layer and the last one."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "full_attention"
        return (layer + 1) % 4 == 0 or layer == self.num_hidden_layers - 1


class MuseGlimmerTower(nn.Module):
    """The vision tower with the adapter and the projection to the language model.

    Args:
        config: config of the model, which has the sizes of the tower and of the adapter.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, H = vision.hidden_size, vision.num_attention_heads
        norm = partial(LigerLayerNorm, C, kernel=kernels.layer_norm)
        mlp = partial(LigerMLP, C, vision.intermediate_size, act=ACTIVATIONS[vision.hidden_act], kernel=kernels.swiglu)
        self.merge, self.side = vision.merge_size, vision.pos_emb_height
        # The values of a patch are ordered by frame, channel, row and column.
        self.patch_embed = nn.Linear(vision.patch_temporal * 3 * vision.patch_size**2, C, bias=False)
        self.pos_embed = nn.Embedding(vision.pos_emb_height * vision.pos_emb_width, C)
        self.ln_pre = norm(vision.layer_norm_eps)
        self.blocks = nn.ModuleList(
            VisionBlock(C, H, partial(norm, BLOCK_EPS), mlp(), kernels) for _ in range(vision.num_hidden_layers)
        )
        self.full = [vision.is_full(layer) for layer in range(vision.num_hidden_layers)]
        self.ln_post = norm(vision.layer_norm_eps)
        self.rotary = AxialRotaryEmbedding(C // H, vision.rope_theta)
        # These layers connect the tower to the decoder.
        wide, width = config.out_hidden_size, config.projector_hidden_size
        act = ACTIVATIONS[config.projector_hidden_act]
        self.adapter = LigerMLP(wide, width, width, act=act, bias=False, kernel=kernels.swiglu)
        self.projection = nn.Linear(width, config.hidden_size, bias=False)
        self.norm = LigerRMSNorm(
            config.hidden_size, config.rms_norm_eps, elementwise_affine=False, kernel=kernels.rms_norm
        )

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Turn patches [N, values] of images with grids ``grid_thw`` [n, 3] into image tokens [N / merge², C].

        The patches of a frame are ordered by row. The second result is an empty list, because the tower has no
        DeepStack features.
        """
        # Embedded patches with their learned positions, [N, C].
        patches = locate_patches(grid_thw, len(pixels), 1)
        embedded = self.patch_embed(pixels.to(self.pos_embed.weight.dtype))  # patch_embed.weight may be quantized
        positions = interpolate_positions(local(self.pos_embed.weight), patches, aligned=False)
        placed = self.ln_pre(embedded + positions.to(embedded.dtype))

        # Sort the patches by window, so that each window is one segment. RoPE rotates by column, then by row, both
        # counted from 1.
        order, window = order_by_window(patches, 1, self.side)
        sorted_patches = patches.take(order, 1)
        axes = sorted_patches.position_ids.flip(0) + 1
        frames, windows = (
            BatchLayout.bidirectional(axes, {"default": self.rotary}, segments)
            for segments in (sorted_patches.frame, window)
        )
        x, residual = None, placed[order][None]
        for full, block in zip(self.full, self.blocks, strict=True):
            x, residual = block(x, residual, frames if full else windows)
        seen = self.ln_post.add(x, residual)[0][0]

        # The tokens are in the order of the text. The values of a token's merge² patches are ordered by channel.
        blocks, _ = order_by_window(patches, 1, self.merge)
        merged = seen[order.argsort()[blocks]].unflatten(0, (-1, self.merge**2)).transpose(1, 2).flatten(1)
        tokens: Tensor = self.norm(self.projection(act_reference(self.adapter(merged), self.adapter.act)))
        return tokens, []
