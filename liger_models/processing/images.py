"""Images from files, bytes or Pillow, resized and normalised: tensors bit for bit as transformers' Pillow backend."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import check

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = Image | str | os.PathLike[str] | bytes
    """An image of Pillow's, the path of a file, or a file's content."""


def read_image(source: "Source") -> "Image":
    """An image in RGB; what is transparent becomes white.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: something that is no image.
        ValueError: a file that Pillow cannot read.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "read_image: needs Pillow, which is not installed. pip install 'liger_models[vision]'"
        ) from error
    if isinstance(source, (str, os.PathLike, bytes)):
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        try:
            image: Image.Image = Image.open(io.BytesIO(content))
            image.load()
        except (UnidentifiedImageError, OSError) as error:
            name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
            raise ValueError(f"read_image: {name} must be a whole image file, got: {error}.") from error
    elif isinstance(source, Image.Image):
        image = source
    else:
        raise TypeError(
            f"read_image: an image must be a PIL image, a path or a file's bytes, got {type(source).__name__}."
        )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def to_tensor(image: "Image", size: tuple[int, int], resample: int) -> Tensor:
    """[3, height, width] uint8 of an RGB image resized to ``size`` (height, width) by one of Pillow's filters."""
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1)


class Normalize:
    """``(pixel · rescale_factor − mean) / std`` per channel, rounded to fp32 where transformers rounds.

    Args:
        settings: the content of a preprocessor_config.json.
        mean, std: of each channel, where it does not say.
    """

    def __init__(self, settings: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> None:
        self.factor = float(_given(settings, "rescale_factor", 1 / 255))
        if _given(settings, "do_rescale", True) is False:
            self.factor = 1.0
        normalizes = _given(settings, "do_normalize", True)
        means = _given(settings, "image_mean", mean) if normalizes else [0.0] * 3
        stds = _given(settings, "image_std", std) if normalizes else [1.0] * 3
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (means, stds))

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [..., 3, height, width] uint8 -> the same shape in fp32."""
        return ((pixels.double() * self.factor).float() - self.mean) / self.std


def _given(settings: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = settings.get(key)
    return otherwise if value is None else value


def check_settings(settings: Mapping[str, Any], **fixed: Any) -> None:
    """Raise ValueError if a preprocessor_config.json asks for what is not computed: other than these values."""
    for key, value in fixed.items():
        check(
            settings.get(key, value) in (value, None),
            f"preprocessor_config.json: {key} must be {value!r}, got {settings.get(key)!r}.",
        )
