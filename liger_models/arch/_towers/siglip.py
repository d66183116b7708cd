"""The vision tower of SigLIP: learned positions, no class token, and pre-norm blocks with LayerNorm and biases.

Source: https://arxiv.org/abs/2303.15343, transformers ``models/siglip``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch._towers.clip import block_entries
from liger_models.convert.weight_map import Expression, Rearrange
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_multiple, check_values
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.vision import VisionBlock


@dataclass(frozen=True, kw_only=True)
class SiglipSizes:
    """Sizes of a SigLIP tower for images of one or several sizes.

    Raises:
        ValueError: the width is not a multiple of the number of heads, or a setting is not supported.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_multiple(self, hidden_size="num_attention_heads")
        check_values(self, hidden_act=PLAIN_ACTIVATIONS, attention_dropout=(0.0,))


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig(SiglipSizes):
    """Sizes of a vision tower for images of one size.

    Raises:
        ValueError: the image size is not a multiple of the patch size; otherwise as in `SiglipSizes`.
    """

    image_size: int = 224
    vision_use_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self, image_size="patch_size")
        check_values(self, vision_use_head=(False,))

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches."""
        return self.image_size // self.patch_size


class SiglipTower(nn.Module):
    """The vision tower without a projector. Families derive their towers from this class and add a projector.

    Args:
        config: sizes of the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, kernels: KernelOptions) -> None:
        super().__init__()
        C, self.patch = config.hidden_size, config.patch_size
        norm = partial(LigerLayerNorm, C, config.layer_norm_eps, kernel=kernels.layer_norm)
        mlp = partial(LigerMLP, C, config.intermediate_size, act=ACTIVATIONS[config.hidden_act], kernel=kernels.swiglu)
        # Patches arrive flattened, so the checkpoint's convolution becomes a linear layer.
        self.patch_embed = nn.Linear(config.num_channels * self.patch**2, C)
        self.pos_embed = nn.Embedding(config.patches_per_side**2, C)
        self.blocks = nn.ModuleList(
            VisionBlock(C, config.num_attention_heads, norm, mlp(), kernels, rotary=None)
            for _ in range(config.num_hidden_layers)
        )
        self.post_layernorm = norm()

    def positions(self, rows: int) -> Tensor:
        """Return the position embeddings [patches, C] of a square image with ``rows`` rows and columns of patches."""
        return local(self.pos_embed.weight)

    def run_blocks(self, pixels: Tensor) -> Tensor:
        """Return the normalized output of the last block, [n, patches, C]; ``pixels`` is [n, channels, side, side].

        Pixels beyond the last whole patch are not read.
        """
        rows = pixels.shape[-1] // self.patch
        whole = pixels[..., : rows * self.patch, : rows * self.patch]
        # [n, patches, channels · patch²]
        patches = rearrange(whole, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x, residual = None, embedded + self.positions(rows)
        # All patches of an image attend to each other, without RoPE.
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen: Tensor = self.post_layernorm.add(x, residual)[0]
        return seen


def siglip_entries(vision: Any, theirs: str) -> dict[str, Expression | str]:
    """Return the entries of a weight map for the tower.

    Args:
        vision: sizes of the tower.
        theirs: the prefix of the tower's tensors in the checkpoint.
    """
    entries: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)", f"{theirs}.embeddings.patch_embedding.weight",
            p=vision.num_channels, y=vision.patch_size,
        ),
        "visual.patch_embed.bias": f"{theirs}.embeddings.patch_embedding.bias",
        "visual.pos_embed.weight": f"{theirs}.embeddings.position_embedding.weight",
        **{f"visual.post_layernorm.{k}": f"{theirs}.post_layernorm.{k}" for k in ("weight", "bias")},
    }  # fmt: skip
    for b in range(vision.num_hidden_layers):
        entries |= block_entries(f"visual.blocks.{b}", f"{theirs}.encoder.layers.{b}", vision)
    return entries
