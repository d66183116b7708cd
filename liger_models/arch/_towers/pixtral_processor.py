"""The processor of Pixtral and Mistral Small 3, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_pixtral.py``, ``processing_pixtral.py``.
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
    image_settings,
    join,
    read_image,
    to_tensor,
)
from liger_models.base.processor import MediaSize
from liger_models.common.json_files import parse_json
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from liger_models.base.images import Source

BICUBIC = 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
FILE = "processor_config.json"


class PixtralImages(ImageConverter):
    """Shrinks images whose longer side exceeds a limit, and rounds both sides up to whole image tokens.

    Args:
        settings: the content of preprocessor_config.json.
        side: height and width, in pixels, of the square that becomes one image token.

    Attributes:
        longest: the maximum length of the longer side in pixels; users may change it.

    Raises:
        ValueError: the settings request a feature that is not implemented, or their limit is not positive.
    """

    def __init__(self, settings: Mapping[str, Any], side: int) -> None:
        check_settings(
            settings, do_resize=True, do_convert_rgb=True, do_pad=True, do_center_crop=False, resample=BICUBIC
        )
        size = settings.get("size") or {"longest_edge": 1024}
        longest = size.get("longest_edge") if isinstance(size, Mapping) else size
        if not (isinstance(longest, int) and longest > 0):
            raise ValueError(f"preprocessor_config.json: size must have longest_edge, a number of pixels, got {size}.")
        self.longest, self.side = longest, side
        self.normalize = Normalize(settings, CLIP_MEAN, CLIP_STD)
        self.as_read = self.settings()

    def __repr__(self) -> str:
        return f"PixtralImages(longest={self.longest}, side={self.side})"

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {"size": {"longest_edge": self.longest}}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the number of rows and columns of image tokens for an image of the given size in pixels."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        # As in transformers, a side that shrinks to 0 pixels has no tokens, so the image is refused.
        rows, columns = ((length - 1) // self.side + 1 for length in (height, width))
        if min(rows, columns) < 1:
            raise ValueError(
                f"PixtralImages: an image must be at least one pixel wide and high when its longer side is "
                f"{self.longest} pixels, got {columns} and {rows} tokens. Crop it."
            )
        return rows, columns

    def __call__(self, source: "Source") -> Tensor:
        """Return the pixels [3, height, width] fp32 of an image."""
        image = read_image(source)
        rows, columns = self.grid(*image.size)
        return self.normalize(to_tensor(image, (rows * self.side, columns * self.side), BICUBIC))


class PixtralProcessor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to pixels; set its attribute ``longest`` for smaller or larger images.
        image, row_end, end: the token that is repeated for the image, the token after each row but the last, and the
            token after the last row. In a caller's text, one ``image`` token is the placeholder of a whole image.
    """

    def __init__(self, tokenizer: Tokenizer, images: PixtralImages, *, image: str, row_end: str, end: str) -> None:
        super().__init__(tokenizer, images, image=image)
        self.row_end, self.end = row_end, end

    @classmethod
    def of(cls, model: CausalLM) -> "PixtralProcessor":
        """Build the processor of a model from the settings in its checkpoint.

        The size of an image token is read from the model's config. The processor's files have a copy of this size. The
        copy may be outdated, so it is not read.

        Raises:
            ValueError: the checkpoint has no tokenizer or no settings, the tokenizer lacks the placeholders, or the
                settings are not implemented.
        """
        tower: Any = model.visual
        common = parse_json(model.assets.get(FILE, b"{}"), FILE)
        names = [
            common.get(key) or word
            for key, word in (
                ("image_token", "[IMG]"), ("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]"),
            )
        ]  # fmt: skip
        ids = [model.tokenizer.backend.token_to_id(name) for name in names]
        if None in ids or ids[0] != model.config.image_token_index:
            raise ValueError(
                f"PixtralProcessor: the tokenizer must have the tokens {', '.join(names)}, the first with the id "
                f"{model.config.image_token_index} (image_token_index), got the ids {ids}. Use the tokenizer of the "
                "checkpoint."
            )
        settings = image_settings(model.assets)
        images = PixtralImages(settings, tower.patch * tower.merge)
        return cls(model.tokenizer, images, image=names[0], row_end=names[1], end=names[2])

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """See `Processor.media_tokens`; the tokens at the ends of rows belong to the image."""
        return self.image, self.row_end, self.end

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        rows, columns = self.images.grid(size.width, size.height)
        row = self.image * columns
        return (row + self.row_end) * (rows - 1) + row + self.end, rows * (columns + 1)

    def joined(self, converted: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`.

        Returns:
            ``pixel_values`` [n, 3, height, width], padded to the largest image at the bottom and on the right, and
            ``image_sizes`` [n, 2], the height and width of each image.
        """
        if not converted:
            return {}
        sizes = torch.tensor([image.shape[1:] for image in converted], device="cpu")
        return {"pixel_values": join([image[None] for image in converted]), "image_sizes": sizes}
