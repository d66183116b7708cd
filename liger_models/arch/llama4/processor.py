"""The processor of Llama 4, which turns text and images into model inputs.

Source: transformers ``image_processing_llama4.py``, ``processing_llama4.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter, ImageProcessor
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_tiles,
    image_settings,
    join,
    read_image,
    to_tensor,
)
from liger_models.base.processor import MediaSize, check_tokens, image_tokens

if TYPE_CHECKING:
    from liger_models.base.images import Source

BILINEAR = 2

PLACEHOLDER, BEGIN, END = "<|image|>", "<|image_start|>", "<|image_end|>"
BETWEEN_COLUMNS, AFTER_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
"""Tokens that the processor writes into the text for an image. As in transformers, no file of the checkpoint sets
them."""


def canvases(most: int) -> list[tuple[int, int]]:
    """Return all arrangements of at most ``most`` tiles, each as (rows, columns).

    Arrangements with the same aspect ratio are adjacent, with the largest one first.
    """
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                by_ratio.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return [arrangement for arrangements in by_ratio.values() for arrangement in arrangements]


class Llama4Images(ImageConverter):
    """Resizes images, keeping their proportions, pads them with black, and splits them into tiles.

    Each arrangement of tiles has a factor: the largest factor by which the image can be scaled without exceeding the
    arrangement. The arrangement with the smallest factor of at least 1 is chosen. If all factors are below 1, the
    arrangement with the largest factor is chosen. Among arrangements with the same factor, the one with the fewest
    tiles is chosen. An image is not enlarged beyond the size of one tile. With ``resize_to_max_canvas``, an image is
    enlarged further, and the arrangement that enlarges the image most is chosen. If an image has several tiles, one
    more tile with the whole image is added at the end.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of a tile in pixels.

    Raises:
        ValueError: the settings request a feature that is not implemented, or ``max_patches`` is not a positive
            integer.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        side = {"height": image_size, "width": image_size}
        check_settings(
            settings, do_resize=True, do_convert_rgb=True, do_rescale=True, do_normalize=True, resample=BILINEAR,
            size=side,
        )  # fmt: skip
        most = settings.get("max_patches") or 16
        if not (isinstance(most, int) and most > 0):
            raise ValueError(f"preprocessor_config.json: max_patches must be a positive integer, got {most!r}.")
        self.side, self.max_patches = image_size, most
        self.resize_to_max_canvas = bool(settings.get("resize_to_max_canvas"))
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)
        self.as_read = self.settings()

    def __repr__(self) -> str:
        return f"Llama4Images(side={self.side}, max_patches={self.max_patches})"

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {"max_patches": self.max_patches, "resize_to_max_canvas": self.resize_to_max_canvas}

    def arrange(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of tiles for an image of the given size in pixels."""
        arrangements = canvases(self.max_patches)
        # Compute the factors by which the arrangements would enlarge the image. The factors are compared in fp32.
        sides = self.side * torch.tensor(arrangements, device="cpu")
        scales = torch.minimum(sides[:, 0] / height, sides[:, 1] / width).tolist()
        enlarged = [scale for scale in scales if scale >= 1]
        best = max(scales) if not enlarged or self.resize_to_max_canvas else min(enlarged)
        equal = [arrangement for arrangement, scale in zip(arrangements, scales, strict=True) if scale == best]
        return min(equal, key=math.prod)

    def fit(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized for an arrangement of tiles."""
        high, wide = rows * self.side, columns * self.side
        if not self.resize_to_max_canvas:
            high, wide = (min(max(size, self.side), most) for size, most in ((height, high), (width, wide)))
        # The image is scaled to fit into this box: the limiting side is exact, and the other side is rounded down.
        if wide / width < high / height:
            return max(min(math.floor(height * (wide / width)), high), 1), wide
        return high, max(min(math.floor(width * (high / height)), wide), 1)

    def __call__(self, source: "Source") -> tuple[Tensor, tuple[int, int]]:
        """Return an image's tiles [n, 3, side, side] bf16, and the number of rows and columns of tiles."""
        image = read_image(source)
        width, height = image.size
        rows, columns = self.arrange(height, width)
        size = self.fit(height, width, rows, columns)
        # The image is placed at the upper left of a black canvas, which is cut into tiles row by row.
        canvas = torch.zeros(3, rows * self.side, columns * self.side, dtype=torch.uint8, device="cpu")
        canvas[:, : size[0], : size[1]] = to_tensor(image, size, BILINEAR)
        cut = cut_tiles(canvas, rows, columns)
        if rows * columns > 1:
            cut.append(to_tensor(image, (self.side, self.side), BILINEAR))
        tiles = torch.stack(cut)
        # Normalize in bf16, like the code that the model was trained with.
        scaled = tiles.bfloat16() * self.normalize.factor
        return (scaled - self.normalize.mean.bfloat16()) / self.normalize.std.bfloat16(), (rows, columns)


class Llama4Processor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles.
        image: the token that is repeated for a tile.
        tokens: number of tokens per tile.
    """

    placeholder_token = PLACEHOLDER

    @classmethod
    def of(cls, model: CausalLM) -> "Llama4Processor":
        """See `Processor.of`."""
        config, vision = model.config, model.config.vision_config
        (image,) = image_tokens("Llama4Processor", model.tokenizer, [config.image_token_index])
        check_tokens("Llama4Processor", model.tokenizer, (PLACEHOLDER, BEGIN, END, BETWEEN_COLUMNS, AFTER_ROW))
        settings = image_settings(model.assets)
        images = Llama4Images(settings, vision.image_size)
        return cls(model.tokenizer, images, image=image, tokens=vision.tokens_per_tile)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        rows, columns = self.images.arrange(size.height, size.width)
        tile = self.image * self.tokens
        if rows * columns == 1:
            return f"{BEGIN}{PLACEHOLDER}{tile}{END}", self.tokens
        # The tile of the whole image follows the other tiles.
        row = BETWEEN_COLUMNS.join([tile] * columns) + AFTER_ROW
        return f"{BEGIN}{row * rows}{PLACEHOLDER}{tile}{END}", (rows * columns + 1) * self.tokens

    def joined(self, converted: Sequence[tuple[Tensor, tuple[int, int]]]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`; returns ``pixel_values`` [tiles, 3, image_size, image_size] bf16."""
        return {"pixel_values": join([tiles for tiles, _ in converted])} if converted else {}
