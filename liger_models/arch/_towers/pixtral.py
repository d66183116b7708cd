"""The vision tower of Pixtral and Mistral Small 3, for images of any size. RoPE rotates q and k by the row and the
column of a patch.

Blocks are pre-norm with RMSNorm and a gated MLP, without biases. A norm follows the patch embedding, but no norm
follows the last block. The patches of an image attend to each other, but not to patches of other images.

Source: https://arxiv.org/abs/2410.07073, transformers ``models/pixtral``.
"""

from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.convert.weight_map import Expression, Rearrange, gate_up_rows, tower_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import check_multiple, check_values
from liger_models.layers.mlp import ACTIVATIONS, GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.vision import VisionBlock

EPS = 1e-5
"""The eps of all norms of the tower; no configuration sets it."""


@dataclass(frozen=True, kw_only=True)
class PixtralVisionConfig:
    """Sizes of the vision tower. ``image_size`` has no effect: images may have any size.

    Raises:
        ValueError: the width is not a multiple of the number of heads, the width of a head is not a multiple of 4, or
            the activation is not supported.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 1024
    patch_size: int = 16
    hidden_act: str = "gelu"
    attention_dropout: float = 0.0
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_multiple(self, hidden_size="num_attention_heads")
        check_values(self, hidden_act=("silu", "gelu", "gelu_pytorch_tanh"), attention_dropout=(0.0,))
        if not self.hidden_size // self.num_attention_heads % 4 == 0:
            raise ValueError(
                f"{type(self).__name__}: the width of a head must be a multiple of 4, got "
                f"{self.hidden_size // self.num_attention_heads}. Check config.json."
            )


class PixtralRotaryEmbedding(RotaryEmbedding):
    """Computes the cosines and sines that rotate q and k by the row and the column of a patch.

    Frequencies with an even index rotate by the row, and frequencies with an odd index rotate by the column.
    """

    def forward(self, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, N, width / 2] fp32; ``position_ids`` [2, B, N] int64 holds the rows and the
        columns of patches."""
        cos, sin = super().forward(position_ids)  # [2, B, N, width / 2]
        row, column = slice(0, None, 2), slice(1, None, 2)
        cos, sin = (torch.cat([table[0][..., row], table[1][..., column]], -1) for table in (cos, sin))
        return cos, sin


def locate_patches(sizes: Tensor, rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor, Tensor]:
    """Locate the patches of images that are padded to one size. The patches that become one image token are adjacent.

    Args:
        sizes: [n, 2] int64, the number of rows and columns of patches of each image.
        rows, columns: the number of rows and columns of patches, including padding.
        merge: side of a square block of patches, which becomes one image token.

    Returns:
        ``(item, position, real)`` for each of the N = n · rows · columns patches: the index of its image, [N] int64;
        its row and column, [2, N] int64; and whether it is part of the image instead of padding, [N] bool.
    """
    device = sizes.device
    item, row, column = torch.meshgrid(
        torch.arange(len(sizes), device=device), torch.arange(rows, device=device),
        torch.arange(columns, device=device), indexing="ij",
    )  # fmt: skip
    pattern = "n (h m) (w k) -> (n h w m k)"
    item, row, column = (rearrange(index, pattern, m=merge, k=merge) for index in (item, row, column))
    position = torch.stack([row, column])
    return item, position, (position < sizes[item].T).all(0)


class PixtralTower(nn.Module):
    """The vision tower without a projector. Families derive their towers from this class and add a projector.

    Args:
        config: sizes of the tower.
        layers: number of blocks to run.
        merge: side of the square of patches that becomes one image token.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: PixtralVisionConfig, layers: int, merge: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, self.patch, self.merge = config.hidden_size, config.patch_size, merge
        # Patches arrive flattened, so the checkpoint's convolution becomes a linear layer.
        self.patch_embed = nn.Linear(config.num_channels * self.patch**2, C, bias=False)
        norm = partial(LigerRMSNorm, C, EPS, kernel=kernels.rms_norm)
        self.ln_pre = norm()
        mlp = partial(GatedMLP, C, config.intermediate_size, act=ACTIVATIONS[config.hidden_act], kernel=kernels.swiglu)
        heads = config.num_attention_heads
        blocks = [VisionBlock(C, heads, norm, mlp(), kernels, bias=False) for _ in range(config.num_hidden_layers)]
        self.blocks = nn.ModuleList(blocks[:layers])
        self.unread = nn.ModuleList(blocks[layers:]).requires_grad_(False)
        """Blocks that do not run, because the language model reads the output of an earlier block. Checkpoints contain
        these blocks."""
        self.rotary = PixtralRotaryEmbedding(C // heads, config.rope_theta)

    def run_blocks(self, pixels: Tensor, sizes: Tensor) -> tuple[Tensor | None, Tensor]:
        """Run the blocks on all images together.

        Args:
            pixels: [n, channels, height, width]; images that are smaller are padded at the bottom and on the right.
            sizes: [n, 2] int64, height and width of each image in pixels.

        Returns:
            The pair ``(x, residual)`` [1, N, C], whose sum is the output of the last block. The N patches are ordered
            by image. Within an image, the patches that become one image token are adjacent. In a compiled graph, which
            cannot depend on ``sizes``, the padding follows the patches of all images.
        """
        m, p = self.merge, self.patch
        values = rearrange(pixels, "n c (h m y) (w k x) -> (n h w m k) (c y x)", m=m, k=m, y=p, x=p)
        rows, columns = (length // p for length in pixels.shape[2:])
        item, position, real = locate_patches(sizes.to(pixels.device) // p, rows, columns, m)
        if torch.compiler.is_compiling():
            order = (~real).long().argsort(stable=True)
            item = item.masked_fill(~real, len(sizes))  # the padding counts as an image of its own
        else:
            order = real.nonzero()[:, 0]

        # All images form a single row, in which each image is one segment.
        layout = BatchLayout.bidirectional(position[:, None, order], {"default": self.rotary}, item[order])
        embedded = self.patch_embed(values[order].to(self.patch_embed.weight.dtype))
        x, residual = None, self.ln_pre(embedded)[None]
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        return x, residual


def pixtral_entries(vision: PixtralVisionConfig, layers: int, theirs: str) -> dict[str, Expression | str]:
    """Return the entries of a weight map for the tower.

    Args:
        vision: sizes of the tower.
        layers: number of blocks that the tower runs.
        theirs: the prefix of the tower's tensors in the checkpoint.
    """
    heads = vision.num_attention_heads
    entries: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)", f"{theirs}.patch_conv.weight", p=vision.num_channels, y=vision.patch_size
        ),
        "visual.ln_pre.weight": f"{theirs}.ln_pre.weight",
    }
    for b in range(vision.num_hidden_layers):
        ours = f"visual.blocks.{b}" if b < layers else f"visual.unread.{b - layers}"
        block = f"{theirs}.transformer.layers.{b}"
        entries |= {
            f"{ours}.norm1.weight": f"{block}.attention_norm.weight",
            f"{ours}.attn.qkv_proj.weight": tower_rows(f"{block}.attention", "weight", heads, vision.hidden_size),
            f"{ours}.attn.o_proj.weight": f"{block}.attention.o_proj.weight",
            f"{ours}.norm2.weight": f"{block}.ffn_norm.weight",
            f"{ours}.mlp.gate_up_proj.weight": gate_up_rows(
                f"{block}.feed_forward.gate_proj.weight", f"{block}.feed_forward.up_proj.weight"
            ),
            f"{ours}.mlp.down_proj.weight": f"{block}.feed_forward.down_proj.weight",
        }  # fmt: skip
    return entries
