"""The processor of Idefics3 and SmolVLM, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_idefics3.py``, ``processing_idefics3.py``, ``processing_smolvlm.py``.
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
    read_image,
    resize,
    to_tensor,
)
from liger_models.base.processor import MediaSize, check_tokens, image_tokens

if TYPE_CHECKING:
    from liger_models.base.images import Source

LANCZOS = 1
LONGEST = 4096
"""Largest width or height of an image after the first step of resizing."""
AROUND, GLOBAL, VIDEO = "<fake_token_around_image>", "<global-img>", "<video>"


def scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the width and height of an image after its longer side has been scaled to ``longest`` pixels, or to
    `LONGEST` pixels if ``longest`` is larger."""
    ratio = width / height
    # The shorter side is rounded down and then up to an even number.
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LONGEST:
        width, height = LONGEST, int(LONGEST / ratio)
    elif height > width and height > LONGEST:
        width, height = int(LONGEST * ratio), LONGEST
    return max(width, 1), max(height, 1)


def whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the numbers of columns and rows of tiles that an image fills after it has been enlarged to whole tiles."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return columns, math.ceil(int(columns * side / ratio) / side)
    rows = math.ceil(height / side)
    return math.ceil(int(rows * side * ratio) / side), rows


class Idefics3Images(ImageConverter):
    """Scales an image to ``longest_edge``, enlarges it to whole tiles, and adds a tile that shows the whole image.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of a tile, in pixels.

    Attributes:
        longest_edge: length of the longer side after resizing.
        splits: whether images are cut into tiles.

    Raises:
        ValueError: the settings request a feature that is not implemented.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        defaults = {"max_image_size": {"longest_edge": 364}}
        check_settings(
            {**defaults, **settings}, do_resize=True, do_convert_rgb=True, do_pad=True, resample=LANCZOS,
            max_image_size={"longest_edge": image_size},
        )  # fmt: skip
        size = settings.get("size") or {"longest_edge": 4 * 364}
        longest = size.get("longest_edge") if isinstance(size, Mapping) and len(size) == 1 else None
        if not (isinstance(longest, int) and longest > 0):
            raise ValueError(f"preprocessor_config.json: size must be a positive longest_edge, got {size}.")
        self.side, self.longest_edge = image_size, longest
        self.splits = bool(settings.get("do_image_splitting", True))
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)
        self.as_read = self.settings()

    def __repr__(self) -> str:
        return f"Idefics3Images(side={self.side}, longest_edge={self.longest_edge}, splits={self.splits})"

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {"size": {"longest_edge": self.longest_edge}, "do_image_splitting": self.splits}

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of columns and rows of tiles for an image of the given width and height, or (0, 0) if the
        image is not cut."""
        if not self.splits:
            return 0, 0
        columns, rows = whole_tiles(*scaled(*size, self.longest_edge), self.side)
        return (columns, rows) if columns * rows > 1 else (0, 0)

    def __call__(self, source: "Source") -> Tensor:
        """Return [tiles, 3, side, side]: the tiles of an image, row by row, and then the tile of the whole image."""
        image = read_image(source)
        columns, rows = self.grid(image.size)
        size = scaled(*image.size, self.longest_edge)
        image = resize(image, size[::-1], LANCZOS)
        whole = self.side, self.side
        if columns == 0:
            return self.normalize.stack([to_tensor(image, whole, LANCZOS)])
        # Each resizing step rounds to uint8. The tile of the whole image is made from the enlarged image.
        tall, wide = rows * self.side, columns * self.side
        image = resize(image, (tall, wide), LANCZOS)
        tiles = cut_tiles(to_tensor(image, (tall, wide), LANCZOS), rows, columns)
        return self.normalize.stack([*tiles, to_tensor(image, whole, LANCZOS)])


class Idefics3Processor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles; for fewer tiles, set its attribute ``splits`` to False, or lower
            ``longest_edge``.
        image: the placeholder, which is repeated for the tokens of a tile.
        tokens: number of tokens per tile.
    """

    video = VIDEO

    @classmethod
    def of(cls, model: CausalLM) -> "Idefics3Processor":
        """See `Processor.of`."""
        config = model.config
        (image,) = image_tokens("Idefics3Processor", model.tokenizer, [config.image_token_id])
        settings = image_settings(model.assets)
        check_tokens("Idefics3Processor", model.tokenizer, [AROUND])
        images = Idefics3Images(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, image=image, tokens=config.tokens_per_tile)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        columns, rows = self.images.grid((size.width, size.height))
        tile = self.image * self.tokens
        cut = "".join(
            "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text = (f"{cut}\n" if cut else "") + f"{AROUND}{GLOBAL}{tile}{AROUND}"
        return text, (columns * rows + 1) * self.tokens

    def batched(self, texts: Sequence[str], converted: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `ImageProcessor.batched`.

        Returns:
            ``pixel_values`` [B, M, 3, side, side] and ``pixel_attention_mask`` [B, M, side, side], where M is the
            largest number of tiles in one text. The mask is 0 on the padding of texts with fewer tiles.
        """
        if not converted:
            return {}
        # Pad the tiles of each text to the number of tiles of the text with the most tiles.
        following = iter(converted)
        rows = [[next(following) for _ in range(text.count(self.image))] for text in texts]
        side, most = self.images.side, max(sum(map(len, row)) for row in rows)
        pixels = torch.zeros(len(rows), most, 3, side, side, dtype=torch.float32, device="cpu")
        mask = torch.zeros(len(rows), most, side, side, dtype=torch.int64, device="cpu")
        for index, row in enumerate(rows):
            if row:
                tiles = torch.cat(row)
                pixels[index, : len(tiles)], mask[index, : len(tiles)] = tiles, 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask}
