"""The processor of LLaVA-NeXT, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_llava_next.py``, ``processing_llava_next.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_models.arch._llava.processor import LlavaProcessor, side_of
from liger_models.arch._towers.pixtral_processor import BICUBIC, CLIP_MEAN, CLIP_STD
from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_tiles,
    image_settings,
    join,
    read_image,
    to_tensor,
)
from liger_models.base.processor import MediaSize, image_tokens

if TYPE_CHECKING:
    from liger_models.base.images import Source


class LlavaNextImages(ImageConverter):
    """Resizes an image twice: to one tile, and to a canvas that is cut into tiles.

    Args:
        settings: the content of preprocessor_config.json.
        config: the configuration of the model, which determines the tiles.

    Raises:
        ValueError: the settings request a feature that is not implemented, or sizes other than the model's.
    """

    def __init__(self, settings: Mapping[str, Any], config: Any) -> None:
        side = config.vision_config.image_size
        check_settings(
            settings, do_resize=True, do_convert_rgb=True, do_center_crop=True, do_pad=True, resample=BICUBIC,
            image_grid_pinpoints=config.image_grid_pinpoints,
        )  # fmt: skip
        names = ("shortest_edge", "height", "width")
        sizes = side_of(settings, "size", *names), side_of(settings, "crop_size", *names[1:])
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
        """Return tiles [tiles, 3, side, side] fp32, starting with the tile of the whole image, and the image's height
        and width."""
        image, side = read_image(source), self.side
        width, height = image.size
        tiles = self.config.arrange(height, width)
        tall, wide = tiles.rows * side, tiles.columns * side
        # The image fills the canvas along one side, and is centered along the other.
        across, down = wide / width, tall / height
        if across < down:
            size = min(math.ceil(height * across), tall), wide
        else:
            size = tall, min(math.ceil(width * down), wide)
        canvas = torch.zeros(3, tall, wide, dtype=torch.uint8, device="cpu")
        top, left = (tall - size[0]) // 2, (wide - size[1]) // 2
        canvas[:, top : top + size[0], left : left + size[1]] = to_tensor(image, size, BICUBIC)
        cut = cut_tiles(canvas, tiles.rows, tiles.columns)
        return self.normalize.stack([to_tensor(image, (side, side), BICUBIC), *cut]), (height, width)


class LlavaNextProcessor(LlavaProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to tiles.
        image: the placeholder of an image in the text. The processor replaces it with one copy per image token.
        tokens: number of tokens per tile.
    """

    images: LlavaNextImages

    @classmethod
    def of(cls, model: CausalLM) -> "LlavaNextProcessor":
        """Build the processor of a model from the settings in its checkpoint; see `LlavaProcessor.of`."""
        config, tower = model.config, cast(Any, model.visual)
        (image,) = image_tokens(cls.__name__, model.tokenizer, [config.image_token_index])
        settings = image_settings(model.assets)
        return cls(model.tokenizer, LlavaNextImages(settings, config), image=image, tokens=tower.tokens)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        tokens = self.images.config.arrange(size.height, size.width).count(self.tokens)
        return self.image * tokens, tokens

    def joined(self, converted: Sequence[tuple[Tensor, tuple[int, int]]]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`.

        Returns:
            ``pixel_values`` [n, tiles, 3, side, side], padded to the largest number of tiles; ``image_sizes`` [n, 2],
            the height and width of each image before resizing.
        """
        if not converted:
            return {}
        pixels = join([tiles[None] for tiles, _ in converted])
        return {"pixel_values": pixels, "image_sizes": torch.tensor([size for _, size in converted], device="cpu")}
