"""Reading, resizing and normalising images, with results bit-identical to transformers' Pillow backend."""

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.kernels.checks import check
from liger_models.text.json_files import parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = Image | str | os.PathLike[str] | bytes
    """A PIL image, the path of a file, or the content of a file."""


def read_image(source: "Source") -> "Image":
    """Read an image as RGB, with transparent pixels made white.

    Files are rotated by their EXIF orientation. PIL images are not, as in transformers.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: ``source`` is not an image.
        ValueError: Pillow cannot read the file, ``source`` is a URL instead of a path, or the image has no pixels.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "read_image: needs Pillow, which is not installed. Run pip install 'liger_models[vision]'."
        ) from error
    check(
        not isinstance(source, str) or re.match(r"(?i)[a-z]+://|data:", source) is None,
        f"read_image: an image must be a PIL image, a path or a file's bytes, got the URL {str(source)[:60]}. "
        "Download it and pass its bytes.",
    )
    if isinstance(source, (str, os.PathLike, bytes)):
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        try:
            image: Image.Image = Image.open(io.BytesIO(content))
            image.load()
            image = ImageOps.exif_transpose(image)
        except (UnidentifiedImageError, OSError) as error:
            name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
            raise ValueError(f"read_image: {name} must be a whole image file, got: {error}.") from error
    elif isinstance(source, Image.Image):
        image = source
    else:
        raise TypeError(
            f"read_image: an image must be a PIL image, a path or a file's bytes, got {type(source).__name__}."
        )
    check(min(image.size) > 0, f"read_image: an image must have pixels, got {image.width} x {image.height}.")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def to_tensor(image: "Image", size: tuple[int, int], resample: int) -> Tensor:
    """Resize an RGB image to ``size`` (height, width) by one of Pillow's filters -> [3, height, width] uint8."""
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1)


class Normalize:
    """``(pixel · rescale_factor − mean) / std`` per channel, rounded to fp32 where transformers rounds.

    Args:
        settings: the content of a preprocessor_config.json.
        mean, std: one value per channel, used if the settings have none.
    """

    def __init__(self, settings: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> None:
        self.factor = float(_given(settings, "rescale_factor", 1 / 255))
        if _given(settings, "do_rescale", True) is False:
            self.factor = 1.0
        normalizes = _given(settings, "do_normalize", True)
        means = _given(settings, "image_mean", mean) if normalizes else [0.0] * 3
        stds = _given(settings, "image_std", std) if normalizes else [1.0] * 3
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (means, stds))

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [..., 3, height, width] uint8 -> the same shape in fp32."""
        return ((pixels.double() * self.factor).float() - self.mean) / self.std


def settings_of(assets: Mapping[str, bytes], part: str) -> dict[str, Any]:
    """The settings of "image_processor" or "video_processor" in the files of a checkpoint; empty if it has none.

    transformers 5 writes both to processor_config.json and looks there first; earlier versions have one file for each.
    """
    own = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}[part]
    common = "processor_config.json"
    found = parse_json(assets.get(common, b"{}"), common).get(part)
    return found if isinstance(found, dict) else parse_json(assets.get(own, b"{}"), own)


def check_given(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint has no image settings, because guessed means and sizes may be wrong."""
    check(
        bool(settings),
        "preprocessor_config.json: must be among the checkpoint's files, got none. Save it next to the model: "
        "AutoProcessor.from_pretrained(...).save_pretrained(folder).",
    )


def one_list(owner: str, token: str, texts: Sequence[str], images: Any) -> "list[Source]":
    """The images of all texts in one list, in order.

    Args:
        owner: name of the calling class, for errors.
        token: the placeholder.
        texts: texts with placeholders.
        images: a list; a list for each text, as in transformers' processors; a single image; or None.

    Raises:
        ValueError: the number of placeholders does not match the number of images, in total or in each text.
    """
    if not isinstance(images, list | tuple):
        images = [] if images is None else [images]
    counts = [text.count(token) for text in texts]
    if any(isinstance(each, list | tuple) for each in images):
        given = [len(each) if isinstance(each, list | tuple) else None for each in images]
        check(
            given == counts,
            f"{owner}: the list of images for each text must match its number of {token}, {counts}, got {given}.",
        )
        images = [image for each in images for image in each]
    check(
        sum(counts) == len(images),
        f"{owner}: the texts must have one {token} for each of the {len(images)} images, got {sum(counts)}.",
    )
    return list(images)


def _given(settings: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = settings.get(key)
    return otherwise if value is None else value


def check_settings(settings: Mapping[str, Any], **fixed: Any) -> None:
    """Raise ValueError if preprocessor_config.json has another value than the given one, which alone is implemented."""
    for key, value in fixed.items():
        check(
            settings.get(key, value) in (value, None),
            f"preprocessor_config.json: {key} must be {value!r}, got {settings.get(key)!r}.",
        )
