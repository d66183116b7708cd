"""Common code of the Qwen-VL families' vision towers: it checks sizes, builds a tower's parts and maps tensor names.

Every tower embeds patches, runs `VisionBlock`s, and merges squares of patches into image tokens. The blocks apply
rotary embeddings to queries and keys; the positions are the rows and columns of patches. The towers differ in norms,
MLPs and positions; each family's file has its own ``forward``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from liger_models.convert.weight_map import Expression, equal_qkv_rows, patch_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_values
from liger_models.layers.mlp import GatedMLP, LigerMLP
from liger_models.layers.norm import Norm
from liger_models.layers.rope import AxialRotaryEmbedding
from liger_models.layers.vision import PatchMerger, VisionBlock

PARAMETERS = ("weight", "bias")


def check_tower(config: Any, width: str, activations: tuple[str, ...] = PLAIN_ACTIVATIONS) -> None:
    """Raise ValueError if the head dimension is not a multiple of 4, as rotary embeddings of rows and columns require,
    or if the tower does not support the activation.

    Args:
        config: sizes of the tower.
        width: name of the field with the width of the tower.
        activations: values of ``hidden_act`` that the tower supports.
    """
    name, size = type(config).__name__, getattr(config, width)
    if size % (4 * config.num_heads) != 0:
        raise ValueError(
            f"{name}: {width} ({size}) must be a multiple of 4 · num_heads ({config.num_heads}), to rotate by row and "
            "column. Check config.json."
        )
    check_values(config, hidden_act=activations)


def check_token_width(config: Any, width: str) -> None:
    """Raise ValueError if the field of ``vision_config`` with the name ``width`` differs from the model's
    ``hidden_size``."""
    size = getattr(config.vision_config, width)
    if size != config.hidden_size:
        raise ValueError(
            f"{type(config).__name__}: vision_config.{width} ({size}) must be the language model's hidden_size "
            f"({config.hidden_size}). Check config.json."
        )


class QwenTower(nn.Module):
    """Base class of the vision towers. It builds a tower's parts, and subclasses define the forward.

    Args:
        config: sizes of the vision tower.
        width: C, width of the tower.
        token_width: width of an image token.
        norm: function that returns a norm of a given width.
        mlp: function that returns the MLP of a block.
        kernels: which parts of the model run on fused kernels.
        positions: number of learned positions. None means no learned positions, and no bias in the patch embedding.
        merger: the layer that makes image tokens from the blocks' output; None for a `PatchMerger`.
        attention: further arguments of `VisionBlock`.
    """

    def __init__(
        self,
        config: Any,
        width: int,
        token_width: int,
        norm: Callable[[int], Norm],
        mlp: Callable[[], GatedMLP | LigerMLP],
        kernels: KernelOptions,
        *,
        positions: int | None = None,
        merger: nn.Module | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.merge = config.spatial_merge_size
        # Patches arrive flattened, so the checkpoint's convolution becomes a linear layer.
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = nn.Linear(pixels, width, bias=positions is not None)
        if positions is not None:
            self.pos_embed = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(
            VisionBlock(width, config.num_heads, partial(norm, width), mlp(), kernels, **attention)
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(norm, width, token_width, self.merge, kernels) if merger is None else merger
        self.rotary = AxialRotaryEmbedding(width // config.num_heads, config.rope_theta)


def tower_entries(
    vision: Any,
    visual: str,
    mlp: Mapping[str, Expression | str],
    *,
    norm_bias: bool = True,
    qkv_bias: bool = True,
    o_bias: bool = True,
) -> dict[str, Expression | str]:
    """Return the entries of a weight map for the patch embedding and the blocks; ``{b}`` is the index of a block.

    Args:
        vision: sizes of the tower.
        visual: prefix of the checkpoint's names.
        mlp: maps the name of each parameter in this package's MLP to an expression over the checkpoint's names.
        norm_bias: whether the norms of the blocks have biases.
        qkv_bias, o_bias: whether the projections to q, k and v, and the output projection, have biases.
    """
    ours, theirs = "visual.blocks.{b}", f"{visual}.blocks.{{b}}"
    norms = [f"norm{n}.{parameter}" for n in (1, 2) for parameter in (PARAMETERS if norm_bias else ("weight",))]
    entries: dict[str, Expression | str] = {
        "visual.patch_embed.weight": patch_rows(
            f"{visual}.patch_embed.proj.weight", vision.in_channels, vision.temporal_patch_size, vision.patch_size
        ),
        **{f"{ours}.{norm}": f"{theirs}.{norm}" for norm in norms},
        **{f"{ours}.mlp.{name}": expression for name, expression in mlp.items()},
    }
    for parameter in PARAMETERS[: 1 + qkv_bias]:
        # The checkpoint has q, k and v in one matrix, one after the other.
        qkv = equal_qkv_rows(f"{theirs}.attn.qkv.{parameter}", vision.num_heads)
        entries[f"{ours}.attn.qkv_proj.{parameter}"] = qkv
    for parameter in PARAMETERS[: 1 + o_bias]:
        entries[f"{ours}.attn.o_proj.{parameter}"] = f"{theirs}.attn.proj.{parameter}"
    return entries


def merger_entries(ours: str, theirs: str, parts: Mapping[str, str], *, norm_bias: bool = True) -> dict[str, str]:
    """Return the weight-map entries of a `PatchMerger`; ``parts`` maps the names of the merger's parts to checkpoint
    names."""
    return {
        f"{ours}.{part}.{parameter}": f"{theirs}.{name}.{parameter}"
        for part, name in parts.items()
        for parameter in (PARAMETERS if norm_bias or part != "norm" else ("weight",))
    }
