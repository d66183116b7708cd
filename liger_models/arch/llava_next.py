"""LLaVA-NeXT (LLaVA 1.6) with Llama or Mistral: model_type ``llava_next``.

Differs from LLaVA 1.5: an image is resized to fit into one of several canvases, keeping its aspect ratio, and the
canvas is cut into tiles of the tower's image size. The whole image is also resized to one tile, and its tokens come
first. The tokens of the other tiles follow, without padding. A row of these tokens runs across the whole canvas and
ends with a learned token.

Source: https://llava-vl.github.io/blog/2024-01-30-llava-next/, transformers ``models/llava_next``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.arch._llava.config import TOP, LlavaTextConfig, from_json, llava_map, to_json, tower_levels
from liger_models.arch._llava.names import HUB, IGNORED_KEYS, MODULES, Prefixes
from liger_models.arch._llava.next_processor import LlavaNextProcessor
from liger_models.arch._llava.sizes import ImageSizesModel
from liger_models.arch._llava.text import LlavaBlock
from liger_models.arch._llava.tiles import Tiles, arrange
from liger_models.arch._llava.tower import LlavaClipTower
from liger_models.arch.registry import add_family
from liger_models.common.errors import check_integers, check_tensors
from liger_models.convert.weight_map import Rearrange, WeightMap
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import check_values
from liger_models.layers.linear import local


@dataclass(frozen=True, kw_only=True)
class LlavaNextConfig(LlavaTextConfig):
    """Sizes and constants of a LLaVA-NeXT model. ``image_grid_pinpoints`` has the height and width of each canvas.

    Raises:
        ValueError: the tower is not CLIP, the language model reads the tower's class token, or a canvas does not
            consist of whole tiles.
    """

    image_grid_pinpoints: list[list[int]] = field(
        default_factory=lambda: [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self.vision_config, model_type=("clip_vision_model",))
        check_values(self, vision_feature_select_strategy=("default",))
        side, sizes = self.vision_config.image_size, self.image_grid_pinpoints
        if not (sizes and all(len(size) == 2 and all(x > 0 and x % side == 0 for x in size) for size in sizes)):
            raise ValueError(
                f"LlavaNextConfig: image_grid_pinpoints must be heights and widths that are multiples of {side}, the "
                f"size of the tower's images, got {sizes}. Check config.json."
            )

    def arrange(self, height: int, width: int) -> Tiles:
        """Return the arrangement in tiles of an image whose size is given in pixels."""
        vision = self.vision_config
        patches = vision.image_size // vision.patch_size
        return arrange(height, width, self.image_grid_pinpoints, vision.image_size, patches)


class LlavaNextTower(LlavaClipTower):
    """CLIP and the projector, which together turn the tiles of images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: LlavaNextConfig, kernels: KernelOptions) -> None:
        super().__init__(config, kernels)
        self.config = config
        self.newline = nn.Embedding(1, config.hidden_size)

    def forward(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        """Turn tiles [n, tiles, channels, side, side] of images with ``sizes`` [n, 2] into image tokens [N, C]."""
        images = [self.config.arrange(*size) for size in sizes.tolist()]
        counts = [1 + image.rows * image.columns for image in images]
        tiles = torch.cat([own[:count] for own, count in zip(pixels, counts, strict=True)])
        tokens = self.project(tiles)  # [tiles · tokens, C]

        # One list of indices selects the result from the tokens of all tiles and the newline token, which comes last.
        order, before, per_tile = [], 0, self.tokens
        side = int(per_tile**0.5)
        for image, count in zip(images, counts, strict=True):
            order.append(torch.arange(per_tile, device="cpu") + before)
            first = before + per_tile
            # [rows of the canvas, columns of the canvas]
            canvas = torch.arange((count - 1) * per_tile, device="cpu") + first
            canvas = canvas.view(image.rows, image.columns, side, side)
            canvas = canvas.transpose(1, 2).reshape(image.rows * side, image.columns * side)
            shown = canvas[image.top : image.bottom, image.left : image.right]
            order.append(nn.functional.pad(shown, (0, 1), value=len(tokens)).flatten())
            before += count * per_tile
        table = torch.cat([tokens, local(self.newline.weight).to(tokens.dtype)])
        return table[torch.cat(order).to(tokens.device)]


class LigerLlavaNext(ImageSizesModel):
    """LLaVA-NeXT with its language-model head."""

    config_class = LlavaNextConfig
    block_class = LlavaBlock
    tower_class = LlavaNextTower
    processor_class = LlavaNextProcessor

    def images_of(self, pixels: Tensor | None, sizes: Tensor | None) -> tuple[Tensor, ...] | None:
        """See `ImageSizesModel.images_of`. The pixels are [images, tiles, ...], and ``sizes`` holds the sizes of the
        images before they were resized."""
        if pixels is None or not len(pixels):
            return None
        check_tensors(pixel_values=pixels)
        check_integers(image_sizes=sizes)
        assert sizes is not None
        shape = self.image_shape
        if pixels.dim() != 5 or tuple(pixels.shape[2:]) != shape or tuple(sizes.shape) != (len(pixels), 2):
            raise ValueError(
                f"forward: pixel_values must be [images, tiles, {', '.join(map(str, shape))}] and image_sizes [images, "
                f"2], got {list(pixels.shape)} and {list(sizes.shape)}."
            )
        if not bool((sizes > 0).all()):
            raise ValueError(f"forward: image_sizes must be positive, got {sizes.tolist()}.")
        most = max(1 + image.rows * image.columns for image in map(self._arrange, sizes.tolist()))
        if pixels.shape[1] < most:
            raise ValueError(
                f"forward: pixel_values must have the {most} tiles that image_sizes describes, got {pixels.shape[1]}. "
                "Pass what the processor returns."
            )
        return pixels, sizes

    def _arrange(self, size: list[int]) -> Tiles:
        tiles: Tiles = self.config.arrange(*size)
        return tiles

    def grids(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageSizesModel.grids`; the tokens of an image form one row."""
        counts = [self._arrange(size).count(self.visual.tokens) for size in images[1].tolist()]
        return torch.tensor([[1, count] for count in counts], device=images[0].device)

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        height, width = self.config.image_grid_pinpoints[0]
        tiles = self._arrange([height, width])
        pixels = embeds.new_zeros(1, 1 + tiles.rows * tiles.columns, *self.image_shape)
        return pixels, torch.tensor([[height, width]], device=embeds.device)


NEXT_TOP = (*TOP, "image_grid_pinpoints")


def read_next(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json; see `from_json`."""
    return from_json(LlavaNextConfig, hf, NEXT_TOP, text_ties=False)


def weight_map(config: LlavaNextConfig) -> WeightMap:
    """Maps the parameters of LLaVA-NeXT to the tensors of a Hugging Face checkpoint."""
    return _map(config, HUB, tower_levels(config)[0])


def other_maps(config: LlavaNextConfig) -> list[WeightMap]:
    """Return further weight maps: first for the tensor names in checkpoints that transformers 5 writes, then for the
    names of transformers' modules since version 4.52."""
    shallow, deep = "", tower_levels(config)[0]
    return [_map(config, HUB, shallow), _map(config, MODULES, shallow), _map(config, MODULES, deep)]


def _map(config: LlavaNextConfig, names: Prefixes, level: str) -> WeightMap:
    newline = Rearrange("(one c) -> one c", f"{names.top}image_newline", one=1)
    return llava_map(config, names, level, {"visual.newline.weight": newline})


add_family(
    LigerLlavaNext,
    model_type="llava_next",
    hf_class="LlavaNextForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=read_next,
    to_json=partial(to_json, top=NEXT_TOP, text_ties=False),
    ignored_keys=IGNORED_KEYS,
)
