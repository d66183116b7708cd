"""The processor of LLaVA-NeXT, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_llava_next.py``, ``processing_llava_next.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from liger_models.arch._llava.processor import LlavaProcessor, side_of
from liger_models.arch._towers.pixtral_processor import BICUBIC, CLIP_MEAN, CLIP_STD
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
from liger_models.base.processor import MediaSize, TextOptions, image_tokens
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source


class LlavaNextImages:
    """Resizes an image to one tile, and into a canvas that is cut into tiles.

    Args:
        settings: the content of preprocessor_config.json.
        config: the configuration of the model, which determines the tiles.

    Raises:
        ValueError: the settings request a feature that is not implemented, or other sizes than the model's.
    """

    def __init__(self, settings: Mapping[str, Any], config: Any) -> None:
        side = config.vision_config.image_size
        check_settings(
            settings, do_resize=True, do_convert_rgb=True, do_center_crop=True, do_pad=True, resample=BICUBIC,
            image_grid_pinpoints=config.image_grid_pinpoints,
        )  # fmt: skip
        sizes = side_of(settings, "size", "shortest_edge", "height"), side_of(settings, "crop_size", "height")
        if sizes != (side, side):
            raise ValueError(
                f"preprocessor_config.json: size and crop_size must be {side}, as in the tower, got "
                f"{settings.get('size')} and {settings.get('crop_size')}."
            )
        self.side, self.config = side, config
        self.normalize = Normalize(settings, CLIP_MEAN, CLIP_STD)

    def __repr__(self) -> str:
        return f"LlavaNextImages(side={self.side}, canvases={self.config.image_grid_pinpoints})"

    def __call__(self, source: "Source") -> tuple[Tensor, tuple[int, int]]:
        """Return the tiles of an image [tiles, 3, side, side] fp32, the whole image first, and its height and width."""
        image, side = read_image(source), self.side
        width, height = image.size
        tiles = self.config.arrange(height, width)
        tall, wide = tiles.rows * side, tiles.columns * side
        # The image fills one side of the canvas, and is in the middle of the other.
        across, down = wide / width, tall / height
        if across < down:
            size = min(math.ceil(height * across), tall), wide
        else:
            size = tall, min(math.ceil(width * down), wide)
        canvas = torch.zeros(3, tall, wide, dtype=torch.uint8)
        top, left = (tall - size[0]) // 2, (wide - size[1]) // 2
        canvas[:, top : top + size[0], left : left + size[1]] = to_tensor(image, size, BICUBIC)
        cut = rearrange(canvas, "c (r h) (k w) -> (r k) c h w", h=side, w=side)
        return self.normalize(torch.cat([to_tensor(image, (side, side), BICUBIC)[None], cut])), (height, width)


class LlavaNextProcessor(LlavaProcessor):
    """Turns images, and texts with placeholders for them, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles.
        image: the token that is repeated for the image. In a text, it is the placeholder.
        tokens: number of tokens per tile.
    """

    images: LlavaNextImages

    def __init__(self, tokenizer: Tokenizer, images: LlavaNextImages, *, image: str, tokens: int) -> None:
        super().__init__(tokenizer, images, image=image, tokens=tokens)

    @classmethod
    def of(cls, model: CausalLM) -> "LlavaNextProcessor":
        """Build the processor of a model from the settings in its checkpoint; see `LlavaProcessor.of`."""
        config, tower = model.config, cast(Any, model.visual)
        settings = settings_of(model.assets, "image_processor")
        (image,) = image_tokens(cls.__name__, model.tokenizer, [config.image_token_index])
        check_given(settings)
        return cls(model.tokenizer, LlavaNextImages(settings, config), image=image, tokens=tower.tokens)

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        bos: bool = True,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts and their images into model inputs; see `LlavaProcessor`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also ``pixel_values`` [n, tiles, 3, side,
            side], padded to the largest number of tiles, and ``image_sizes`` [n, 2], height and width before resizing.

        Raises:
            ValueError: the number of placeholders does not match the number of images, or image tokens do not fit into
                ``max_length``.
        """
        texts = self.texts(texts, options)
        tiles = each_once(self.images, one_list("LlavaNextProcessor", self.image, texts, images))
        edits = self.replace(texts, image=[self.image * self._count(*size) for _, size in tiles])
        out = self.encode(texts, edits, add_special_tokens=bos, **cast(Any, options))
        return out | _padded(tiles)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        count = self._count(size.height, size.width)
        return self.image * count, count

    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """See `Processor.pixels`; returns ``pixel_values`` and ``image_sizes``."""
        return _padded([self.images(image) for image in images])

    def _count(self, height: int, width: int) -> int:
        count: int = self.images.config.arrange(height, width).count(self.tokens)
        return count


def _padded(images: Sequence[tuple[Tensor, tuple[int, int]]]) -> dict[str, Tensor]:
    """Pad the tiles of images to one number; {} without images."""
    if not images:
        return {}
    most = max(len(tiles) for tiles, _ in images)
    padded = [pad(tiles, (0, 0) * 3 + (0, most - len(tiles))) for tiles, _ in images]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([size for _, size in images])}
