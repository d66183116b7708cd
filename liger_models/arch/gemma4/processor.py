"""The processor of the Gemma 4 families, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_gemma4.py``, ``image_processing_gemma4_unified.py``,
``processing_gemma4.py``.
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
    cut_patches,
    image_settings,
    join,
    read_image,
    to_rows,
)
from liger_models.base.processor import MediaSize, image_tokens
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from liger_models.base.images import Source

BICUBIC = 3


class Gemma4Images(ImageConverter):
    """Resizes images to the allowed number of image tokens, keeping the aspect ratio, and cuts them into patches.

    Args:
        settings: the content of preprocessor_config.json.
        patch: side of a patch, in pixels.
        pool: side of the square of patches that becomes one image token.
        merge: whether each such square becomes one large patch, as in Gemma 4 Unified.

    Raises:
        ValueError: the settings request a feature that is not implemented, or do not fit the model.
    """

    def __init__(self, settings: Mapping[str, Any], patch: int, pool: int, merge: bool = False) -> None:
        check_settings(
            settings, do_resize=True, do_convert_rgb=True, resample=BICUBIC, patch_size=patch, pooling_kernel_size=pool
        )
        tokens = settings.get("max_soft_tokens") or 280
        if not (isinstance(tokens, int) and tokens > 0):
            raise ValueError(f"preprocessor_config.json: max_soft_tokens must be a positive integer, got {tokens!r}.")
        self.patch, self.pool = (patch * pool, 1) if merge else (patch, pool)
        self.max_soft_tokens = tokens
        self.normalize = Normalize({"do_normalize": False, **settings}, [0.0] * 3, [1.0] * 3)
        self.as_read = self.settings()

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {"max_soft_tokens": self.max_soft_tokens}

    def tokens(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of rows and columns of image tokens for an image of the given width and height."""
        # The image is scaled to the allowed area with the same aspect ratio, and its sides are rounded down to whole
        # tokens.
        side = self.patch * self.pool
        factor = math.sqrt(self.max_soft_tokens * self.pool**2 * self.patch**2 / (size[0] * size[1]))
        columns, rows = (math.floor(factor * length / side) for length in size)
        # If an image is too narrow for one token, it gets a single row or column of tokens. The number of these tokens
        # is the aspect ratio, rounded down, but at most the limit.
        if rows == 0:
            return 1, min(size[0] // size[1], self.max_soft_tokens)
        if columns == 0:
            return min(size[1] // size[0], self.max_soft_tokens), 1
        return rows, columns

    def __call__(self, source: "Source") -> tuple[Tensor, Tensor]:
        """Return patches [P, 3 · patch²] fp32 and their columns and rows [P, 2] int64, padded to P, the largest number
        of patches."""
        image = read_image(source)
        rows, columns = (count * self.pool for count in self.tokens(image.size))
        pixels = to_rows(image, (rows * self.patch, columns * self.patch), BICUBIC)
        cut = cut_patches(pixels[None], self.patch, 3 * self.patch)[:, 0]
        sides = torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
        row, column = torch.meshgrid(*sides, indexing="ij")
        # Pad at the end, so that all images have the same number of patches.
        most = self.max_soft_tokens * self.pool**2
        patches = torch.zeros(most, cut.shape[1], dtype=torch.float32, device="cpu")
        positions = torch.full((most, 2), -1, device="cpu")
        self.normalize.write(cut, patches[: len(cut)])
        positions[: len(cut)] = torch.stack([column, row], -1).flatten(0, 1)
        return patches, positions


class Gemma4Processor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to patches; set ``images.max_soft_tokens`` for larger or smaller images.
        begin, image, end: the token before an image, the token that is repeated for the image, and the token after the
            image. In a caller's text, ``image`` is the placeholder of an image.
    """

    def __init__(self, tokenizer: Tokenizer, images: Gemma4Images, *, begin: str, image: str, end: str) -> None:
        super().__init__(tokenizer, images, image=image)
        self.begin, self.end = begin, end

    @classmethod
    def of(cls, model: CausalLM) -> "Gemma4Processor":
        """See `Processor.of`."""
        config = model.config
        ids = config.boi_token_id, config.image_token_id, config.eoi_token_id
        begin, image, end = image_tokens("Gemma4Processor", model.tokenizer, ids)
        settings = image_settings(model.assets)
        vision = config.vision_config
        merge = vision.pooled < vision.pooling_kernel_size
        images = Gemma4Images(settings, vision.patch_size, vision.pooling_kernel_size, merge)
        return cls(model.tokenizer, images, begin=begin, image=image, end=end)

    def __call__(self, *arguments: Any, audio: None = None, videos: None = None, **options: Any) -> ModelInputs:
        """See `ImageProcessor.__call__`; ``audio`` and ``videos`` must be left out."""
        if audio or videos:
            raise ValueError(
                "Gemma4Processor: audio and videos must be left out, got some. The model takes texts and images."
            )
        return super().__call__(*arguments, **options)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        tokens = math.prod(self.images.tokens((size.width, size.height)))
        return f"{self.begin}{self.image * tokens}{self.end}", tokens

    def joined(self, converted: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`; returns ``pixel_values`` [n, P, 3 · patch²] and ``image_position_ids``."""
        if not converted:
            return {}
        pixels, positions = (join([x[None] for x in column]) for column in zip(*converted, strict=True))
        return {"pixel_values": pixels, "image_position_ids": positions}
