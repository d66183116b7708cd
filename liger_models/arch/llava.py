"""LLaVA 1.5, BakLLaVA and Pixtral 12B: model_type ``llava``.

The language model is Llama or Mistral. The vision tower is CLIP, which takes images of one size, or Pixtral's tower,
which takes images of any size. The language model reads one of the tower's hidden states. ``vision_feature_layer``
selects this hidden state: 0 is the output of the embedding, i is the output of block i, and negative numbers count from
the end. CLIP's class token is left out if ``vision_feature_select_strategy`` is "default". A plain MLP projects the
patches to image tokens, which attend only to earlier tokens, like text tokens. The tower's blocks after the selected
hidden state are loaded and saved, but not run.

Source: https://arxiv.org/abs/2310.03744, https://arxiv.org/abs/2410.07073, transformers ``models/llava``.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from liger_models.arch._llava.config import CLIP, LlavaTextConfig, from_json, llava_map, to_json, tower_levels
from liger_models.arch._llava.names import HUB, IGNORED_KEYS, MODULES
from liger_models.arch._llava.processor import LlavaProcessor
from liger_models.arch._llava.sizes import ImageSizesModel
from liger_models.arch._llava.text import LlavaBlock
from liger_models.arch._llava.tower import LlavaPixtralTower, LlavaTower
from liger_models.arch.registry import add_family
from liger_models.common.errors import check_tensors
from liger_models.convert.weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(LlavaTextConfig):
    """Sizes and constants of a LLaVA 1.5 or Pixtral model; ``vision_config`` holds the sizes of the vision tower."""


class LigerLlava(ImageSizesModel):
    """LLaVA 1.5 or Pixtral with its language-model head."""

    config_class = LlavaConfig
    block_class = LlavaBlock
    processor_class = LlavaProcessor

    def build_visual(self, config: LlavaConfig) -> nn.Module:
        """Build the tower that ``vision_config.model_type`` names."""
        tower = LlavaTower if config.vision_config.model_type == CLIP else LlavaPixtralTower
        return tower(config, self.kernels)

    @property
    def _has_clip(self) -> bool:
        return self.config.vision_config.model_type == CLIP  # type: ignore[no-any-return]

    def images_of(self, pixels: Tensor | None, sizes: Tensor | None) -> tuple[Tensor, ...] | None:
        """See `ImageSizesModel.images_of`. With CLIP, all images have the tower's image size."""
        if not self._has_clip:
            return super().images_of(pixels, sizes)
        if pixels is None or not len(pixels):
            return None
        check_tensors(pixel_values=pixels)
        shape = self.image_shape
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != shape or sizes is not None:
            raise ValueError(
                f"forward: pixel_values must be [images, {', '.join(map(str, shape))}] without image_sizes, got "
                f"{list(pixels.shape)}{'' if sizes is None else ' and image_sizes'}."
            )
        return (pixels,)

    def grids(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageSizesModel.grids`. With CLIP, the tokens of an image form one row."""
        if not self._has_clip:
            return super().grids(images)
        grid = torch.tensor([[1, self.visual.tokens]], device=images[0].device)
        return grid.expand(len(images[0]), 2)

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        return (embeds.new_zeros(1, *self.image_shape),) if self._has_clip else super().blank_image(embeds)


def weight_map(config: LlavaConfig) -> WeightMap:
    """Maps the parameters of LLaVA to the tensors of a Hugging Face checkpoint."""
    return llava_map(config, HUB, tower_levels(config)[0])


def other_maps(config: LlavaConfig) -> list[WeightMap]:
    """Return further weight maps, in this order: for checkpoints that transformers 5 writes, and for the tensor names
    of transformers' modules since version 4.52."""
    levels = tower_levels(config)
    return [
        *(llava_map(config, HUB, level) for level in levels[1:]),
        *(llava_map(config, MODULES, level) for level in reversed(levels)),
    ]


add_family(
    LigerLlava,
    model_type="llava",
    hf_class="LlavaForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=partial(from_json, LlavaConfig),
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
