"""The processor of Gemma 3, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_gemma3.py``, ``processing_gemma3.py``.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter, ImageProcessor
from liger_models.base.images import (
    Normalize,
    check_settings,
    image_settings,
    read_image,
    to_tensor,
)
from liger_models.base.processor import MediaSize, image_tokens
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from liger_models.base.images import Source

BILINEAR = 2


def pan_and_scan(size: tuple[int, int], least: int, most: int, ratio: float) -> list[tuple[int, int, int, int]]:
    """Split an elongated image into pieces, from left to right or from top to bottom. Return the borders of the pieces.

    Args:
        size: width and height of the image.
        least: minimum width and height of a piece, in pixels.
        most: maximum number of pieces.
        ratio: an image is not split if its longer side divided by its shorter side is below this number.

    Returns:
        Left, upper, right and lower border of each piece. The list is empty if the image is not elongated or the pieces
        would be too small.
    """
    width, height = size
    longer, shorter = max(width, height), min(width, height)
    # Only elongated images are cropped.
    if longer / shorter < ratio:
        return []
    pieces = min(math.floor(longer / least), math.floor(longer / shorter + 0.5))
    pieces = min(most, max(2, pieces))
    # Length of a piece along the longer side; the last piece may be shorter.
    part = math.ceil(longer / pieces)
    if min(part, shorter) < least:
        return []
    starts = [part * i for i in range(pieces)]
    if width >= height:
        return [(start, 0, min(start + part, width), height) for start in starts]
    return [(0, start, width, min(start + part, height)) for start in starts]


class Gemma3Images(ImageConverter):
    """Resizes images to one size. With ``do_pan_and_scan``, an elongated image is followed by crops of this image. The
    crops are resized, too.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of the model's images, in pixels.

    Raises:
        ValueError: the settings request a feature that is not implemented.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        side = {"height": image_size, "width": image_size}
        check_settings(settings, do_resize=True, do_convert_rgb=True, resample=BILINEAR, size=side)
        self.size = image_size, image_size
        self.scans = bool(settings.get("do_pan_and_scan"))
        self.least = settings.get("pan_and_scan_min_crop_size") or 256
        self.most = settings.get("pan_and_scan_max_num_crops") or 4
        self.ratio = settings.get("pan_and_scan_min_ratio_to_activate") or 1.2
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)
        self.as_read = self.settings()

    def __repr__(self) -> str:
        return f"Gemma3Images(size={self.size}, scans={self.scans})"

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {
            "do_pan_and_scan": self.scans,
            "pan_and_scan_min_crop_size": self.least,
            "pan_and_scan_max_num_crops": self.most,
            "pan_and_scan_min_ratio_to_activate": self.ratio,
        }

    def crops(self, size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
        """Return the borders of the crops of an image with the given width and height; see `pan_and_scan`."""
        return pan_and_scan(size, self.least, self.most, self.ratio) if self.scans else []

    def __call__(self, source: "Source") -> Tensor:
        """Return the image followed by its crops, [1 + crops, 3, image_size, image_size] fp32."""
        image = read_image(source)
        pieces = [image.crop(box) for box in self.crops(image.size)]
        return self.normalize.stack([to_tensor(picture, self.size, BILINEAR) for picture in (image, *pieces)])


class Gemma3Processor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to pixels; set its attribute ``scans`` to True for pan and scan.
        begin, image, end: the token before an image, the token that is repeated for the image, and the token after the
            image. In a caller's text, ``begin`` is the placeholder of an image.
        tokens: number of tokens per image.
    """

    def __init__(
        self, tokenizer: Tokenizer, images: Gemma3Images, *, begin: str, image: str, end: str, tokens: int
    ) -> None:
        super().__init__(tokenizer, images, image=image, tokens=tokens)
        self.begin = begin
        self.expanded = f"\n\n{begin}{image * tokens}{end}\n\n"

    @classmethod
    def of(cls, model: CausalLM) -> "Gemma3Processor":
        """See `Processor.of`."""
        config = model.config
        # The model's configuration has the ids of the placeholders; the processor's files have the image settings.
        ids = config.boi_token_index, config.image_token_index, config.eoi_token_index
        begin, image, end = image_tokens("Gemma3Processor", model.tokenizer, ids)
        settings = image_settings(model.assets)
        images = Gemma3Images(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, begin=begin, image=image, end=end, tokens=config.mm_tokens_per_image)

    @property
    def placeholder_token(self) -> str:
        """See `ImageProcessor.placeholder_token`."""
        return self.begin

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        pieces = len(self.images.crops((size.width, size.height)))
        if not pieces:
            return self.expanded, self.tokens
        # The checkpoint was trained with these words around the crops.
        crops = " ".join([self.expanded] * pieces)
        text = f"Here is the original image {self.expanded} and here are some crops to help you see better {crops}"
        return text, (1 + pieces) * self.tokens
