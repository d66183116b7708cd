"""The vision tower of CLIP: images of one size, learned positions, a class token, and blocks with LayerNorm and biases.

Source: https://arxiv.org/abs/2103.00020, transformers ``models/clip``.
"""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.convert.weight_map import Expression, Rearrange, tower_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.vision import VisionBlock


class ClipTower(nn.Module):
    """The vision tower without a projector. Families derive their towers from this class and add a projector.

    Args:
        config: sizes of the tower.
        layers: number of blocks to run.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, layers: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, self.patch, self.merge = config.hidden_size, config.patch_size, 1
        norm = partial(LigerLayerNorm, C, config.layer_norm_eps, kernel=kernels.layer_norm)
        mlp = partial(LigerMLP, C, config.intermediate_size, act=ACTIVATIONS[config.hidden_act], kernel=kernels.swiglu)
        # Patches arrive flattened, so the checkpoint's convolution becomes a linear layer.
        self.patch_embed = nn.Linear(config.num_channels * self.patch**2, C, bias=False)
        self.class_embed = nn.Embedding(1, C)
        self.pos_embed = nn.Embedding((config.image_size // self.patch) ** 2 + 1, C)
        self.ln_pre = norm()
        heads = config.num_attention_heads
        blocks = [VisionBlock(C, heads, norm, mlp(), kernels, rotary=None) for _ in range(config.num_hidden_layers)]
        self.blocks = nn.ModuleList(blocks[:layers])
        self.unread = nn.ModuleList([*blocks[layers:], norm()]).requires_grad_(False)
        """Modules that do not run: the blocks after the last block that the language model needs, and the norm that
        only CLIP's pooling uses. Checkpoints contain these modules."""

    def run_blocks(self, pixels: Tensor) -> Tensor:
        """Return the output of the last block, [n, 1 + patches, C]; ``pixels`` is [n, channels, side, side]."""
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        # The class token comes first.
        first = local(self.class_embed.weight).to(embedded.dtype).expand(len(pixels), 1, -1)
        x, residual = None, self.ln_pre(torch.cat([first, embedded], 1) + local(self.pos_embed.weight))
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen: Tensor = residual if x is None else residual + x
        return seen


def clip_entries(vision: Any, layers: int, theirs: str) -> dict[str, Expression | str]:
    """Return the entries of a weight map for the tower.

    Args:
        vision: sizes of the tower.
        layers: number of blocks that the tower runs.
        theirs: the prefix of the tower's tensors in the checkpoint.
    """
    kinds, count = ("weight", "bias"), vision.num_hidden_layers
    entries: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)", f"{theirs}.embeddings.patch_embedding.weight",
            p=vision.num_channels, y=vision.patch_size,
        ),
        "visual.class_embed.weight": Rearrange("(one c) -> one c", f"{theirs}.embeddings.class_embedding", one=1),
        "visual.pos_embed.weight": f"{theirs}.embeddings.position_embedding.weight",
        **{f"visual.ln_pre.{k}": f"{theirs}.pre_layrnorm.{k}" for k in kinds},
        **{f"visual.unread.{count - layers}.{k}": f"{theirs}.post_layernorm.{k}" for k in kinds},
    }  # fmt: skip
    for b in range(count):
        ours = f"visual.blocks.{b}" if b < layers else f"visual.unread.{b - layers}"
        entries |= block_entries(ours, f"{theirs}.encoder.layers.{b}", vision)
    return entries


def block_entries(ours: str, theirs: str, vision: Any) -> dict[str, Expression | str]:
    """Return the weight-map entries of a CLIP or SigLIP block; ``ours`` is the block's name in this package, and
    ``theirs`` is its name in checkpoints."""
    entries: dict[str, Expression | str] = {}
    for k in ("weight", "bias"):
        rows = tower_rows(f"{theirs}.self_attn", k, vision.num_attention_heads, vision.hidden_size)
        entries |= {
            f"{ours}.attn.qkv_proj.{k}": rows,
            f"{ours}.attn.o_proj.{k}": f"{theirs}.self_attn.out_proj.{k}",
            **{f"{ours}.norm{n}.{k}": f"{theirs}.layer_norm{n}.{k}" for n in (1, 2)},
            **{f"{ours}.mlp.{fc}.{k}": f"{theirs}.mlp.{fc}.{k}" for fc in ("fc1", "fc2")},
        }
    return entries
