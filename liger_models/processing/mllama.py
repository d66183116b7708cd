"""Prompts with images for Llama 3.2 Vision.

Source: transformers ``image_processing_pil_mllama.py``, ``processing_mllama.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from liger_models.kernels.dispatch import check

from .images import Normalize, check_given, check_settings, one_list, read_image, settings_of, to_tensor
from .messages import image_parts, rendered

if TYPE_CHECKING:
    from liger_models.layers.vision_language import TiledImageModel
    from liger_models.tokenizer import Tokenizer

    from .images import Source

BILINEAR = 2


def choose_tiles(height: int, width: int, ratios: Sequence[Sequence[int]], side: int) -> int:
    """Which arrangement of tiles an image fits best: enlarged least, or else reduced least; of equals the smallest.

    Args:
        height, width: of the image.
        ratios: rows and columns of tiles of each arrangement.
        side: of a tile.

    Returns:
        Index in ``ratios``.
    """
    scales = [min(rows * side / height, columns * side / width) for rows, columns in ratios]
    enlarged = [scale for scale in scales if scale >= 1]
    best = min(enlarged) if enlarged else max(scales)
    return min((i for i, scale in enumerate(scales) if scale == best), key=lambda i: math.prod(ratios[i]))


def fit(height: int, width: int, rows: int, columns: int, side: int) -> tuple[int, int]:
    """Height and width of an image resized, in proportion, for rows and columns of tiles: its smaller scale decides.

    An image that is smaller than the tiles is enlarged only up to a single tile.
    """
    high, wide = (min(max(size, side), tiles * side) for size, tiles in ((height, rows), (width, columns)))
    if wide / width < high / height:
        return min(math.floor(height * (wide / width)) or 1, high), wide
    return high, min(math.floor(width * (high / height)) or 1, wide)


class MllamaImages:
    """Images resized in proportion and cut into tiles; what a tile has no pixels for is black.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: rows and columns of pixels of a tile.
        max_tiles: of an image.
        ratios: rows and columns of tiles of each arrangement that the model knows.

    Raises:
        ValueError: settings that ask for what is not computed.
    """

    def __init__(
        self, settings: Mapping[str, Any], image_size: int, max_tiles: int, ratios: Sequence[Sequence[int]]
    ) -> None:
        check_settings(
            settings, do_resize=True, do_pad=True, do_convert_rgb=True, resample=BILINEAR, max_image_tiles=max_tiles,
            size={"height": image_size, "width": image_size},
        )  # fmt: skip
        self.side, self.max_tiles, self.ratios = image_size, max_tiles, ratios
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)

    def __call__(self, source: "Source") -> tuple[Tensor, int]:
        """The tiles of an image [max_tiles, 3, image_size, image_size] fp32, and 1 + the number of its arrangement."""
        image = read_image(source)
        width, height = image.size
        kind = choose_tiles(height, width, self.ratios, self.side)
        rows, columns = self.ratios[kind]
        size = fit(height, width, rows, columns, self.side)
        canvas = torch.zeros(3, rows * self.side, columns * self.side, dtype=torch.uint8)
        canvas[:, : size[0], : size[1]] = to_tensor(image, size, BILINEAR)
        tiles = rearrange(self.normalize(canvas), "c (r h) (k w) -> (r k) c h w", r=rows, k=columns)
        out = tiles.new_zeros(self.max_tiles, *tiles.shape[1:])
        out[: len(tiles)] = tiles
        return out, kind + 1


class MllamaProcessor:
    """Texts with placeholders, and images, as what the model's ``forward`` and ``generate`` take.

    Args:
        tokenizer: of the checkpoint.
        images: makes the tiles.
        image: the token that stands for an image.
        bos: the token that a text begins with.
    """

    def __init__(self, tokenizer: "Tokenizer", images: MllamaImages, *, image: str, bos: str) -> None:
        self.tokenizer, self.images, self.image, self.bos = tokenizer, images, image, bos

    @classmethod
    def of(cls, model: "TiledImageModel") -> "MllamaProcessor":
        """The processor whose settings came with a model's checkpoint.

        Raises:
            ValueError: the checkpoint had no tokenizer, or one without the placeholder; no settings, or wrong ones.
        """
        config, vision = model.config, model.config.vision_config
        settings = settings_of(model.assets, "image_processor")
        ids = config.image_token_index, config.bos_token_id
        image, bos = ((token is not None and model.tokenizer.backend.id_to_token(token)) or "" for token in ids)
        check(
            "" not in (image, bos),
            f"MllamaProcessor: the tokenizer must have the ids {ids[0]} of an image and {ids[1]} of a beginning, got "
            f"{len(model.tokenizer)} tokens. Take the checkpoint's own tokenizer.",
        )
        check_given(settings)
        images = MllamaImages(settings, vision.image_size, vision.max_num_tiles, vision.supported_aspect_ratios)
        return cls(model.tokenizer, images, image=image, bos=bos)

    def __call__(
        self, texts: Sequence[str], *, images: "Sequence[Source]" = (), padding_side: str = "left"
    ) -> dict[str, Any]:
        """A batch of texts with the images that their placeholders stand for, in order.

        A text without the token for its beginning gets it, behind the images that it begins with.

        Args:
            texts: with one placeholder per image, as the chat template writes it.
            images: PIL images, paths or bytes; in one list, or in a list for each text.
            padding_side: "left" (generation) or "right" (training).

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; with images ``pixel_values`` [B, M, tiles, 3, image_size,
            image_size], ``aspect_ratio_ids`` [B, M] and ``aspect_ratio_mask`` [B, M, tiles], M the most of a text.

        Raises:
            ValueError: placeholders that differ in number from the images.
        """
        texts = [self._begun(text) for text in ([texts] if isinstance(texts, str) else texts)]
        images = one_list("MllamaProcessor", self.image, texts, images)
        counts = [text.count(self.image) for text in texts]
        out: dict[str, Any] = {**self.tokenizer(texts, padding_side=padding_side, add_special_tokens=False)}
        if not images:
            return out
        tiles, side = self.images.max_tiles, self.images.side
        pixels = torch.zeros(len(texts), max(counts), tiles, 3, side, side)
        kinds = torch.zeros(len(texts), max(counts), dtype=torch.int64)
        places = [(row, place) for row, count in enumerate(counts) for place in range(count)]
        for image, place in zip(images, places, strict=True):
            pixels[place], kinds[place] = self.images(image)
        # A place without an image counts as one of a single tile, as in transformers.
        lengths = torch.tensor([1, *(math.prod(ratio) for ratio in self.images.ratios)])
        used = (torch.arange(tiles) < lengths[kinds][..., None]).long()
        return out | {"pixel_values": pixels, "aspect_ratio_ids": kinds, "aspect_ratio_mask": used}

    def _begun(self, text: str) -> str:
        if self.bos in text:
            return text
        rest = text
        while rest.startswith(self.image):
            rest = rest[len(self.image) :]
        return text[: len(text) - len(rest)] + self.bos + rest

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
        return self(texts, images=images, padding_side=padding_side)
