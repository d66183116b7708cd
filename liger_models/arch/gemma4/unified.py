"""Gemma 4 Unified with images (12B): model_type ``gemma4_unified``.

The language model is ``gemma4_unified_text``. There is no vision tower. Instead, the pixels of a large patch are
normalized and projected, and the learned embeddings of the patch's column and row are added. The sum is normalized and
projected to an image token.

Source: transformers ``models/gemma4_unified``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.arch.gemma4 import images
from liger_models.arch.gemma4.images import Gemma4WithImages, Placeholders
from liger_models.arch.gemma4.names import text_map
from liger_models.arch.gemma4.text import Gemma4UnifiedTextConfig, unified_to_json
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, Rearrange, WeightMap
from liger_models.kernels.options import KernelOptions
from liger_models.layers.linear import local
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedVisionConfig:
    """Sizes of the module that turns pixels into image tokens.

    A patch has ``patch_size · pooling_kernel_size`` pixels along each side, and becomes one image token.

    Raises:
        ValueError: the widths of the first and the last projection differ.
    """

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    output_proj_dims: int = 3840
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.mm_embed_dim != self.output_proj_dims:
            raise ValueError(
                f"Gemma4UnifiedVisionConfig: output_proj_dims ({self.output_proj_dims}) must be mm_embed_dim "
                f"({self.mm_embed_dim}). Check config.json."
            )

    @property
    def pooled(self) -> int:
        """Side of the square of patches that becomes one image token."""
        return 1

    @property
    def patch_values(self) -> int:
        """Number of pixel values in a patch, three for each pixel."""
        return 3 * (self.patch_size * self.pooling_kernel_size) ** 2

    @property
    def position_embedding_size(self) -> int:
        """Largest number of patches along each side of an image."""
        return self.mm_posemb_size


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Placeholders, Gemma4UnifiedTextConfig):
    """Sizes and constants, as in `Gemma4UnifiedTextConfig`; ``vision_config`` holds the sizes of the module that turns
    pixels into image tokens."""

    vision_config: Gemma4UnifiedVisionConfig = field(default_factory=Gemma4UnifiedVisionConfig)


class PatchEmbedder(nn.Module):
    """Turns patches into image tokens.

    Args:
        config: sizes of this module.
        width: width of an image token.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Gemma4UnifiedVisionConfig, width: int, kernels: KernelOptions) -> None:
        super().__init__()
        C = config.mm_embed_dim
        self.blocks = nn.ModuleList()  # empty, because this tower has no blocks
        self.patch_norm, self.embed_norm, self.pos_norm = (
            LigerLayerNorm(size, 1e-5, kernel=kernels.layer_norm) for size in (config.patch_values, C, C)
        )
        self.patch_embed = nn.Linear(config.patch_values, C)
        self.pos_embed = nn.Embedding(2 * config.mm_posemb_size, C)
        """The learned positions. Entry 2i belongs to column i of an image, and entry 2i + 1 belongs to row i."""
        self.soft_emb_norm = LigerRMSNorm(
            C, eps=config.rms_norm_eps, casting_mode="gemma", kernel=kernels.rms_norm, elementwise_affine=False
        )
        self.projection = nn.Linear(C, width, bias=False)

    def forward(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """Compute the image tokens of all images.

        Args:
            pixels: [n, P, values of a patch], with values from 0 to 1; padding comes last.
            positions: [n, P, 2] int64, column and row of each patch, −1 for padding.

        Returns:
            [n · P, C], the tokens of all images in order, followed by the tokens of padding.
        """
        valid = (positions >= 0).all(-1)
        # Put the patches of all images first and padding last: [n · P, values of a patch].
        order = (~valid).flatten().int().argsort(stable=True)
        patches, coordinates = pixels.flatten(0, 1)[order], positions.flatten(0, 1)[order].clamp_min(0)
        # Entries 2i and 2i + 1 of the table belong to column i and row i.
        table = local(self.pos_embed.weight)
        placed = F.embedding(2 * coordinates[:, 0], table) + F.embedding(2 * coordinates[:, 1] + 1, table)
        # Normalize the pixels, then their embedding, then the sum of embedding and position.
        embedded = self.embed_norm(self.patch_embed(self.patch_norm(patches.to(table.dtype))))
        normed = self.pos_norm(embedded + placed)
        projected: Tensor = self.projection(self.soft_emb_norm(normed))
        return projected


class LigerGemma4Unified(Gemma4WithImages):
    """Gemma 4 Unified for text and images, with its language-model head."""

    config_class = Gemma4UnifiedConfig
    tower_class = PatchEmbedder


IGNORED_KEYS = (
    *images.IGNORED_KEYS,
    "initializer_range",  # a key of the module that computes image tokens
    "num_soft_tokens",  # the processor's settings say how many tokens an image may have
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level.

    Raises:
        ValueError: a rope type is not supported, layers of the same type have different sizes, or ``model_patch_size``
            is not ``patch_size · pooling_kernel_size``.
    """
    vision = {"patch_size": 16, "pooling_kernel_size": 3, **(hf.get("vision_config") or {})}
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    stated = vision.pop("model_patch_size", side)
    if stated != side:
        raise ValueError(
            f"config.json: vision_config.model_patch_size must be patch_size · pooling_kernel_size, {side}, got "
            f"{stated}."
        )
    return images.from_json(Gemma4UnifiedConfig, hf, vision)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    return images.to_json(keys, keys["vision_config"], unified_to_json)


def weight_map(config: Gemma4UnifiedConfig) -> WeightMap:
    """Maps the parameters of Gemma 4 Unified to the tensors of a Hugging Face checkpoint."""
    return _map(config, "model.vision_embedder", "model.embed_vision.embedding_projection")


def other_maps(config: Gemma4UnifiedConfig) -> list[WeightMap]:
    """The weight map for the tensor names of transformers' modules, which differ from the names in files."""
    return [_map(config, "model.embed_vision", "model.embed_vision.multimodal_embedder.embedding_projection")]


def _map(config: Gemma4UnifiedConfig, embedder: str, projection: str) -> WeightMap:
    # The checkpoint stores the positions as [position, column or row, C].
    also: dict[str, Expression | str] = {
        "visual.pos_embed.weight": Rearrange("p two c -> (p two) c", f"{embedder}.pos_embedding", two=2),
        "visual.projection.weight": f"{projection}.weight",
    }
    named = {"patch_norm": "patch_ln1", "patch_embed": "patch_dense", "embed_norm": "patch_ln2", "pos_norm": "pos_norm"}
    for ours, theirs in named.items():
        also |= {f"visual.{ours}.{kind}": f"{embedder}.{theirs}.{kind}" for kind in ("weight", "bias")}
    return text_map(config, "model.language_model", also, kept=("model.embed_audio.",))


add_family(
    LigerGemma4Unified,
    model_type="gemma4_unified",
    hf_class="Gemma4UnifiedForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    module="model.embed_vision.pos_norm",
)
