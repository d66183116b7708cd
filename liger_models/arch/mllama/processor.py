"""The processor of Llama 3.2 Vision, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_mllama.py``, ``processing_mllama.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_tiles,
    each_once,
    image_settings,
    join,
    one_list,
    read_image,
    to_tensor,
)
from liger_models.base.processor import Edit, MediaSize, Processor, TextOptions
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source

BILINEAR = 2


def choose_tiles(height: int, width: int, ratios: Sequence[Sequence[int]], side: int) -> int:
    """Choose the arrangement of tiles for an image.

    If the image fits into some arrangements without shrinking, choose the one of these that enlarges the image least.
    Otherwise, choose the arrangement that shrinks the image least. Among equally good arrangements, choose the one with
    the fewest tiles.

    Args:
        height, width: size of the image in pixels.
        ratios: number of rows and columns of tiles of each arrangement.
        side: side of a tile in pixels.

    Returns:
        Index into ``ratios``.
    """
    # The factor by which each arrangement would enlarge the image; it is below 1 if the image would shrink.
    scales = [min(rows * side / height, columns * side / width) for rows, columns in ratios]
    enlarged = [scale for scale in scales if scale >= 1]
    best = min(enlarged) if enlarged else max(scales)
    return min((i for i, scale in enumerate(scales) if scale == best), key=lambda i: math.prod(ratios[i]))


def fit(height: int, width: int, rows: int, columns: int, side: int) -> tuple[int, int]:
    """Return the height and width to which an image is resized to fit into the tiles, keeping its aspect ratio.

    An image is never enlarged beyond the size of one tile.
    """
    # The image is scaled to fit into this box: the limiting side is exact, and the other side is rounded down.
    high, wide = (min(max(size, side), tiles * side) for size, tiles in ((height, rows), (width, columns)))
    if wide / width < high / height:
        return min(math.floor(height * (wide / width)) or 1, high), wide
    return high, min(math.floor(width * (high / height)) or 1, wide)


class MllamaImages:
    """Resizes images, keeping their aspect ratio, pads them with black, and splits them into tiles.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of a tile in pixels.
        max_tiles: maximum number of tiles per image.
        ratios: number of rows and columns of tiles of each arrangement that the model supports.

    Raises:
        ValueError: the settings request a feature that is not implemented.
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

    def __repr__(self) -> str:
        return f"MllamaImages(side={self.side}, max_tiles={self.max_tiles})"

    def __call__(self, source: "Source") -> tuple[Tensor, int]:
        """Return an image's tiles [max_tiles, 3, side, side] fp32, and 1 + index of the arrangement of its tiles in
        ``ratios``."""
        image = read_image(source)
        width, height = image.size
        ratio = choose_tiles(height, width, self.ratios, self.side)
        rows, columns = self.ratios[ratio]
        size = fit(height, width, rows, columns, self.side)
        # The image is placed at the upper left of a black canvas, which is cut into tiles row by row.
        canvas = torch.zeros(3, rows * self.side, columns * self.side, dtype=torch.uint8, device="cpu")
        canvas[:, : size[0], : size[1]] = to_tensor(image, size, BILINEAR)
        # Unused tiles are 0 after normalization.
        unused = (0, 0) * 3 + (0, self.max_tiles - rows * columns)
        return pad(self.normalize.stack(cut_tiles(canvas, rows, columns)), unused), ratio + 1


class MllamaProcessor(Processor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles.
        image: the placeholder token.
        bos: the token at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, images: MllamaImages, *, image: str, bos: str) -> None:
        super().__init__(tokenizer)
        self.images, self.image, self.bos = images, image, bos

    @classmethod
    def of(cls, model: CausalLM) -> "MllamaProcessor":
        """See `Processor.of`."""
        config, vision = model.config, model.config.vision_config
        ids = config.image_token_index, config.bos_token_id
        image, bos = ((token is not None and model.tokenizer.backend.id_to_token(token)) or "" for token in ids)
        if "" in (image, bos):
            raise ValueError(
                f"MllamaProcessor: the tokenizer must have the ids {ids[0]} (image) and {ids[1]} (bos_token_id), got "
                f"{len(model.tokenizer)} tokens. Use the tokenizer of the checkpoint."
            )
        settings = image_settings(model.assets)
        images = MllamaImages(settings, vision.image_size, vision.max_num_tiles, vision.supported_aspect_ratios)
        return cls(model.tokenizer, images, image=image, bos=bos)

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts, and their images in the order of the placeholders, into model inputs.

        If a text has no ``bos`` token, one is inserted at the beginning of the text, after any placeholders there.

        Args:
            texts: one text or several, with one placeholder per image, as written by the chat template.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also ``pixel_values`` [B, M, tiles, 3,
            image_size, image_size], ``aspect_ratio_ids`` [B, M] and ``aspect_ratio_mask`` [B, M, tiles], where M is the
            largest number of images in one text.

        Raises:
            ValueError: the number of placeholders does not match the number of images, or a placeholder lies beyond
                ``max_length``.
        """
        texts = self.texts(texts, options)
        images = one_list("MllamaProcessor", self.image, texts, images)
        counts = [text.count(self.image) for text in texts]
        out = self.encode(texts, [self._begun(text) for text in texts], **cast(Any, options))
        if not images:
            return out
        # Rows with fewer than M images are padded with zeros, and the ratio of missing images is 0.
        tiles, side = self.images.max_tiles, self.images.side
        pixels = torch.zeros(len(texts), max(counts), tiles, 3, side, side, dtype=torch.float32, device="cpu")
        kinds = torch.zeros(len(texts), max(counts), dtype=torch.int64, device="cpu")
        cells = [(row, cell) for row, count in enumerate(counts) for cell in range(count)]
        for image_tiles, cell in zip(each_once(self.images, images), cells, strict=True):
            pixels[cell], kinds[cell] = image_tiles
        # The mask of a missing image has one tile, as in transformers.
        lengths = torch.tensor([1, *(math.prod(ratio) for ratio in self.images.ratios)], device="cpu")
        used = (torch.arange(tiles, device="cpu") < lengths[kinds][..., None]).long()
        return out | {"pixel_values": pixels, "aspect_ratio_ids": kinds, "aspect_ratio_mask": used}

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`; an image of any size is one token."""
        return self.image, 1

    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """See `Processor.pixels`. The results are [1, M, ...] for M images; M may be 0."""
        pairs = [self.images(image) for image in images]
        empty = torch.zeros(
            0, self.images.max_tiles, 3, self.images.side, self.images.side, dtype=torch.float32, device="cpu"
        )
        return {
            "pixel_values": join([tiles[None] for tiles, _ in pairs] or [empty])[None],
            "aspect_ratio_ids": torch.tensor([[ratio for _, ratio in pairs]], dtype=torch.int64, device="cpu"),
        }

    def _begun(self, text: str) -> list[Edit]:
        """Return the edit that inserts ``bos`` at the beginning of a text, after any placeholders there. The result is
        [] if the text already has ``bos``."""
        rest = text
        while rest.startswith(self.image):
            rest = rest[len(self.image) :]
        start = len(text) - len(rest)
        return [] if self.bos in text else [Edit(start, start, self.bos)]
