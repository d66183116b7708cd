"""The processor of InternVL, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_got_ocr2.py``, ``processing_internvl.py``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from liger_models.arch._tiles.grid import choose_grid
from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter, ImageProcessor
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_tiles,
    image_settings,
    read_image,
    to_tensor,
)
from liger_models.base.processor import MediaSize, check_tokens, image_tokens
from liger_models.common.json_files import parse_json
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from liger_models.base.images import Source

BICUBIC = 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class InternVLImages(ImageConverter):
    """Resizes an image to a grid of tiles, without keeping its aspect ratio, and adds a tile with the whole image.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of a tile, in pixels.

    Attributes:
        min_patches, max_patches: minimum and maximum number of tiles of an image, not counting the tile of the whole
            image. With a maximum of 1, images are not cut.

    Raises:
        ValueError: the settings request a feature that is not implemented.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        size = {"height": image_size, "width": image_size}
        defaults = {"size": {"height": 384, "width": 384}}
        check_settings({**defaults, **settings}, do_resize=True, do_convert_rgb=True, resample=BICUBIC, size=size)
        self.side = image_size
        self.min_patches = settings.get("min_patches") or 1
        self.max_patches = settings.get("max_patches") or 12
        self.normalize = Normalize(settings, CLIP_MEAN, CLIP_STD)
        self.as_read = self.settings()

    def __repr__(self) -> str:
        return f"InternVLImages(side={self.side}, max_patches={self.max_patches})"

    def settings(self) -> dict[str, int]:
        """See `ImageConverter.settings`."""
        return {"min_patches": self.min_patches, "max_patches": self.max_patches}

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of columns and rows of tiles for an image of the given width and height."""
        if self.max_patches <= 1:
            return 1, 1
        return choose_grid(size, self.side, self.min_patches, self.max_patches)

    def tiles(self, size: tuple[int, int]) -> int:
        """Return the total number of tiles, including the tile of the whole image, for an image of the given width and
        height."""
        columns, rows = self.grid(size)
        return columns * rows + (columns * rows > 1)

    def __call__(self, source: "Source") -> Tensor:
        """Return [tiles, 3, side, side]: the tiles of an image, row by row, and then the tile of the whole image."""
        image = read_image(source)
        columns, rows = self.grid(image.size)
        tiles = cut_tiles(to_tensor(image, (rows * self.side, columns * self.side), BICUBIC), rows, columns)
        if len(tiles) > 1:
            tiles.append(to_tensor(image, (self.side, self.side), BICUBIC))
        return self.normalize.stack(tiles)


class InternVLProcessor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles; set its attribute ``max_patches`` for fewer tiles.
        image: the placeholder, which is repeated for the tokens of an image.
        begin, end: the tokens before and after an image.
        tokens: number of tokens per tile.
        video: the placeholder of a video. Texts that contain this placeholder are refused.
    """

    adds_special_tokens = False

    def __init__(
        self, tokenizer: Tokenizer, images: InternVLImages, *, image: str, begin: str, end: str, tokens: int, video: str
    ) -> None:
        super().__init__(tokenizer, images, image=image, tokens=tokens)
        self.begin, self.end, self.video = begin, end, video

    @classmethod
    def of(cls, model: CausalLM) -> "InternVLProcessor":
        """See `Processor.of`."""
        config = model.config
        (image,) = image_tokens("InternVLProcessor", model.tokenizer, [config.image_token_id])
        settings = image_settings(model.assets)
        # tokenizer_config.json has the other tokens, at its top level or under ``extra_special_tokens``.
        file = parse_json(model.assets.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
        special = file.get("extra_special_tokens")
        named = {**(special if isinstance(special, dict) else {}), **file}
        begin, end, video = (
            token["content"] if isinstance(token := named.get(name, default), dict) else str(token)
            for name, default in (
                ("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")
            )
        )  # fmt: skip
        check_tokens("InternVLProcessor", model.tokenizer, (begin, end))
        images = InternVLImages(settings, config.vision_config.side)
        tokens = config.tokens_per_tile
        return cls(model.tokenizer, images, image=image, begin=begin, end=end, tokens=tokens, video=video)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        tokens = self.images.tiles((size.width, size.height)) * self.tokens
        return f"{self.begin}{self.image * tokens}{self.end}", tokens
