"""The processor of Gemma 3, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_gemma3.py``, ``processing_gemma3.py``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import (
    Normalize,
    check_given,
    check_settings,
    each_once,
    one_list,
    read_image,
    settings_of,
    to_tensor,
)
from liger_models.base.processor import MediaSize, Processor, TextOptions, image_tokens
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source

BILINEAR = 2


def pan_and_scan(size: tuple[int, int], least: int, most: int, ratio: float) -> list[tuple[int, int, int, int]]:
    """Split an elongated image into pieces, from left to right or from top to bottom, and return their borders.

    Args:
        size: width and height of the image.
        least: minimum width and height of a piece, in pixels.
        most: maximum number of pieces.
        ratio: images whose ratio of the longer to the shorter side is below this are not split.

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


class Gemma3Images:
    """Resizes images to one size. With ``do_pan_and_scan``, crops of elongated images are added and resized, too.

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
        self.as_read = self.scanning()

    def __repr__(self) -> str:
        return f"Gemma3Images(size={self.size}, scans={self.scans})"

    def scanning(self) -> dict[str, Any]:
        """The pan-and-scan attributes, which users may change, under their names in the settings."""
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
        return self.normalize(torch.stack([to_tensor(picture, self.size, BILINEAR) for picture in (image, *pieces)]))


class Gemma3Processor(Processor):
    """Turns images, and texts with placeholders for them, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to pixels; set its attribute ``scans`` to True for pan and scan.
        begin, image, end: the token before an image, the token that is repeated for the image, and the token after it.
            In a text, ``begin`` is the placeholder.
        tokens: number of tokens per image.
    """

    def __init__(
        self, tokenizer: Tokenizer, images: Gemma3Images, *, begin: str, image: str, end: str, tokens: int
    ) -> None:
        super().__init__(tokenizer)
        self.images, self.begin, self.image, self.tokens = images, begin, image, tokens
        self.expanded = f"\n\n{begin}{image * tokens}{end}\n\n"

    @classmethod
    def of(cls, model: CausalLM) -> "Gemma3Processor":
        """Build the processor of a model from the settings in its checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer or no settings, the tokenizer lacks the placeholders, or the
                settings are not implemented.
        """
        config = model.config
        # The model's configuration has the ids of the placeholders; the processor's files have the image settings.
        settings = settings_of(model.assets, "image_processor")
        ids = config.boi_token_index, config.image_token_index, config.eoi_token_index
        begin, image, end = image_tokens("Gemma3Processor", model.tokenizer, ids)
        check_given(settings)
        images = Gemma3Images(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, begin=begin, image=image, end=end, tokens=config.mm_tokens_per_image)

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        bos: bool = True,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts and their images into model inputs; the images are in the order of their placeholders.

        Args:
            texts: one text or several, with one placeholder per image, as written by the chat template.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            bos: whether to add the tokenizer's special tokens; False if a chat template has already added them.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also ``pixel_values`` [n, 3, image_size,
            image_size].

        Raises:
            ValueError: the number of placeholders does not match the number of images, or image tokens do not fit into
                ``max_length``.
        """
        # The pixels come first, because an image's number of crops determines how many tokens replace its placeholder.
        texts = self.texts(texts, options)
        pixels = each_once(self.images, one_list("Gemma3Processor", self.begin, texts, images))
        edits = self.replace(texts, image=[self._written(len(tiles) - 1) for tiles in pixels])
        out = self.encode(texts, edits, add_special_tokens=bos, **cast(Any, options))
        return out | ({"pixel_values": torch.cat(pixels)} if pixels else {})

    @property
    def placeholders(self) -> dict[str, str]:
        """See `Processor.placeholders`."""
        return {"image": re.escape(self.begin)}

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        pieces = len(self.images.crops((size.width, size.height)))
        return self._written(pieces), (1 + pieces) * self.tokens

    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """See `Processor.pixels`; returns ``pixel_values`` [n, 3, image_size, image_size]."""
        return {"pixel_values": torch.cat([self.images(image) for image in images])} if images else {}

    def _written(self, pieces: int) -> str:
        if not pieces:
            return self.expanded
        # The checkpoint was trained with these words around the crops.
        crops = " ".join([self.expanded] * pieces)
        return f"Here is the original image {self.expanded} and here are some crops to help you see better {crops}"

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """See `Processor.media`; no special tokens are added, because the chat template already added them."""
        return super().media(parts) | {"bos": False}

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """The pan-and-scan settings if they were changed since they were read, and otherwise nothing."""
        settings = self.images.scanning()
        return {} if settings == self.images.as_read else {"image_processor": settings}
