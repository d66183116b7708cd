"""The processor of LLaVA 1.5, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_llava.py``, ``processing_llava.py``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from liger_models.arch._llava.config import PIXTRAL
from liger_models.arch._towers.pixtral_processor import BICUBIC, CLIP_MEAN, CLIP_STD, PixtralProcessor
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
from liger_models.base.processor import MediaSize, image_tokens

if TYPE_CHECKING:
    from PIL.Image import Image

    from liger_models.base.images import Source


def side_of(settings: Mapping[str, Any], key: str, *names: str) -> int | None:
    """Read a size from preprocessor_config.json. The size is a number, or a mapping whose keys are some of ``names``.

    The result is None if the size is missing, or if the values in the mapping differ from each other.
    """
    value = settings.get(key)
    if isinstance(value, Mapping):
        values = {value[name] for name in names if value.get(name) is not None}
        value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


class LlavaImages(ImageConverter):
    """Resizes an image to a given length of its shorter side, and crops the center to the tower's image size.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of the tower's images in pixels.

    Raises:
        ValueError: the settings request a feature that is not implemented, or a size other than the tower's.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        check_settings(settings, do_resize=True, do_convert_rgb=True, do_center_crop=True, resample=BICUBIC)
        size = settings.get("size")
        shortest = side_of(settings, "size", "shortest_edge")
        crop = side_of(settings, "crop_size", "height", "width")
        limited = isinstance(size, Mapping) and size.get("longest_edge") is not None
        if crop != image_size or shortest is None or shortest < image_size or limited:
            raise ValueError(
                f"preprocessor_config.json: crop_size must be {image_size}, as in the tower, and size must have a "
                f"shortest_edge of at least this and no longest_edge, got {settings.get('crop_size')} and {size}."
            )
        self.size, self.shortest, self.pads = image_size, shortest, bool(settings.get("do_pad"))
        self.normalize = Normalize(settings, CLIP_MEAN, CLIP_STD)
        # transformers pads with the mean color.
        means = settings.get("image_mean") or CLIP_MEAN
        self.background = tuple(int(mean * 255) for mean in (means if isinstance(means, Sequence) else [means] * 3))

    def __repr__(self) -> str:
        return f"LlavaImages(size={self.size}, shortest={self.shortest}, pads={self.pads})"

    def __call__(self, source: "Source") -> Tensor:
        """Return the pixels [3, image_size, image_size] fp32 of an image."""
        image = read_image(source)
        if self.pads and image.width != image.height:
            image = self._square(image)
        shorter, longer = sorted(image.size)
        longer = int(self.shortest * longer / shorter)
        height, width = (self.shortest, longer) if image.width > image.height else (longer, self.shortest)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        pixels = to_tensor(image, (height, width), BICUBIC)
        return self.normalize(pixels[:, top : top + self.size, left : left + self.size])

    def _square(self, image: "Image") -> "Image":
        from PIL import Image as images

        side = max(image.size)
        square = images.new("RGB", (side, side), cast(Any, self.background))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square


class LlavaProcessor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to pixels.
        image: the placeholder of an image in the text. The processor replaces it with one copy per image token.
        tokens: number of tokens per image.
    """

    @classmethod
    def of(cls, model: CausalLM) -> Any:
        """Build a model's processor from its checkpoint's settings. The result is a `PixtralProcessor` if the tower is
        Pixtral's.

        The number of tokens per image is computed from the model's config. The copy of this number in the processor's
        files is not read.

        Raises:
            ValueError: the checkpoint has no tokenizer or no settings, the tokenizer lacks the placeholder, or the
                settings are not implemented.
        """
        config, tower = model.config, cast(Any, model.visual)
        if config.vision_config.model_type == PIXTRAL:
            return PixtralProcessor.of(model)
        (image,) = image_tokens(cls.__name__, model.tokenizer, [config.image_token_index])
        settings = image_settings(model.assets)
        images = LlavaImages(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, image=image, tokens=tower.tokens)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        return self.image * self.tokens, self.tokens

    def joined(self, converted: Sequence[Any]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`; returns ``pixel_values`` [n, 3, image_size, image_size]."""
        return {"pixel_values": join([image[None] for image in converted])} if converted else {}
