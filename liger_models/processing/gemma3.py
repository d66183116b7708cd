"""Prompts with images for Gemma 3.

Source: transformers ``image_processing_pil_gemma3.py``, ``processing_gemma3.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import check

from .images import Normalize, check_given, check_settings, one_list, read_image, settings_of, to_tensor
from .messages import image_parts, rendered

if TYPE_CHECKING:
    from PIL.Image import Image

    from liger_models.layers.vision_language import SquareImageModel
    from liger_models.tokenizer import Tokenizer

    from .images import Source

BILINEAR = 2


def pan_and_scan(image: "Image", least: int, most: int, ratio: float) -> "list[Image]":
    """An elongated image in pieces, from left to right or from top to bottom; none if it is not elongated.

    Args:
        image: to be cut.
        least: width and height that a piece must have, in pixels.
        most: number of pieces.
        ratio: of the longer to the shorter side from which an image is cut.
    """
    width, height = image.size
    longer, shorter = max(width, height), min(width, height)
    if longer / shorter < ratio:
        return []
    pieces = min(math.floor(longer / least), math.floor(longer / shorter + 0.5))
    pieces = min(most, max(2, pieces))
    size = math.ceil(longer / pieces)
    if min(size, shorter) < least:
        return []
    starts = [size * i for i in range(pieces)]
    if width >= height:
        return [image.crop((start, 0, min(start + size, width), height)) for start in starts]
    return [image.crop((0, start, width, min(start + size, height))) for start in starts]


class Gemma3Images:
    """Images resized to one size, whatever their shape; with ``do_pan_and_scan`` also pieces of elongated ones.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: rows and columns of pixels that the model takes.

    Raises:
        ValueError: settings that ask for what is not computed.
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

    def __call__(self, source: "Source") -> Tensor:
        """An image, and its pieces behind it: [1 + pieces, 3, image_size, image_size] fp32."""
        image = read_image(source)
        pieces = pan_and_scan(image, self.least, self.most, self.ratio) if self.scans else []
        return self.normalize(torch.stack([to_tensor(each, self.size, BILINEAR) for each in (image, *pieces)]))


class Gemma3Processor:
    """Texts with placeholders, and images, as what the model's ``forward`` and ``generate`` take.

    Args:
        tokenizer: of the checkpoint.
        images: makes the pixels; set ``images.scans`` for pan and scan.
        begin, image, end: the tokens around and of an image; ``begin`` alone is the placeholder in a text.
        tokens: number of tokens of an image.
    """

    def __init__(
        self, tokenizer: "Tokenizer", images: Gemma3Images, *, begin: str, image: str, end: str, tokens: int
    ) -> None:
        self.tokenizer, self.images, self.begin = tokenizer, images, begin
        self.expanded = f"\n\n{begin}{image * tokens}{end}\n\n"

    @classmethod
    def of(cls, model: "SquareImageModel") -> "Gemma3Processor":
        """The processor whose settings came with a model's checkpoint.

        Raises:
            ValueError: the checkpoint had no tokenizer, or one without the placeholders; no settings, or wrong ones.
        """
        config = model.config
        settings = settings_of(model.assets, "image_processor")
        ids = config.boi_token_index, config.image_token_index, config.eoi_token_index
        begin, image, end = (model.tokenizer.backend.id_to_token(token) or "" for token in ids)
        check(
            "" not in (begin, image, end),
            f"Gemma3Processor: the tokenizer must have the ids {', '.join(map(str, ids))} around and of an image, got "
            f"{len(model.tokenizer)} tokens. Take the checkpoint's own tokenizer.",
        )
        check_given(settings)
        images = Gemma3Images(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, begin=begin, image=image, end=end, tokens=config.mm_tokens_per_image)

    def __call__(
        self, texts: Sequence[str], *, images: "Sequence[Source]" = (), padding_side: str = "left", bos: bool = True
    ) -> dict[str, Any]:
        """A batch of texts with the images that their placeholders stand for, in order.

        Args:
            texts: with one placeholder per image, as the chat template writes it.
            images: PIL images, paths or bytes; in one list, or in a list for each text.
            padding_side: "left" (generation) or "right" (training).
            bos: add what the tokenizer puts around a text; a chat template has written it.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T], with images ``pixel_values`` [n, 3, image_size, image_size].

        Raises:
            ValueError: placeholders that differ in number from the images.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        pixels = [self.images(image) for image in one_list("Gemma3Processor", self.begin, texts, images)]
        written = iter([self._written(len(each) - 1) for each in pixels])
        whole = []
        for text in texts:
            first, *rest = text.split(self.begin)
            whole.append(first + "".join(next(written) + part for part in rest))
        out: dict[str, Any] = {**self.tokenizer(whole, padding_side=padding_side, add_special_tokens=bos)}
        return out | ({"pixel_values": torch.cat(pixels)} if pixels else {})

    def _written(self, pieces: int) -> str:
        if not pieces:
            return self.expanded
        crops = " ".join([self.expanded] * pieces)
        return f"Here is the original image {self.expanded} and here are some crops to help you see better {crops}"

    def apply_chat_template(
        self,
        conversations: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        padding_side: str = "left",
        **variables: Any,
    ) -> dict[str, Any]:
        """Conversations with images in the model's own format, as a batch.

        Args:
            conversations: messages, or a list of lists of them. The ``content`` of a message is a text, or a list of
                parts: ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` (or ``"path"``).
            add_generation_prompt, padding_side, variables: as in `QwenVLProcessor.apply_chat_template`.

        Returns:
            As of a call.

        Raises:
            ValueError: as of a call; a part that is neither text nor image; no chat template.
        """
        texts = rendered(self.tokenizer, conversations, add_generation_prompt=add_generation_prompt, **variables)
        images = [image for _, image, _ in image_parts(conversations)]
        return self(texts, images=images, padding_side=padding_side, bos=False)
