"""Images from files, bytes or Pillow, resized and normalised: tensors bit for bit as transformers' Pillow backend."""

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.convert.checkpoint import parse_json
from liger_models.kernels.dispatch import check

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = Image | str | os.PathLike[str] | bytes
    """An image of Pillow's, the path of a file, or a file's content."""


def read_image(source: "Source") -> "Image":
    """An image in RGB; what is transparent becomes white. A file is turned upright as its EXIF orientation says.

    An image of Pillow's is taken as it lies, as in transformers.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: something that is no image.
        ValueError: a file that Pillow cannot read, an address in place of a path, an image without pixels.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "read_image: needs Pillow, which is not installed. pip install 'liger_models[vision]'"
        ) from error
    check(
        not isinstance(source, str) or re.match(r"(?i)[a-z]+://|data:", source) is None,
        f"read_image: an image must be a PIL image, a path or a file's bytes, got the address {str(source)[:60]}. "
        "Fetch it and pass its bytes.",
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
    """[3, height, width] uint8 of an RGB image resized to ``size`` (height, width) by one of Pillow's filters."""
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1)


class Normalize:
    """``(pixel · rescale_factor − mean) / std`` per channel, or of all, rounded to fp32 where transformers rounds.

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
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (means, stds))

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [..., 3, height, width] uint8 -> the same shape in fp32."""
        return ((pixels.double() * self.factor).float() - self.mean) / self.std


def settings_of(assets: Mapping[str, bytes], part: str) -> dict[str, Any]:
    """The settings of "image_processor" or "video_processor" among a checkpoint's files; empty if it has none.

    transformers 5 writes both into processor_config.json, and reads them there first; versions before have files of
    their own.
    """
    own = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}[part]
    common = "processor_config.json"
    found = parse_json(assets.get(common, b"{}"), common).get(part)
    return found if isinstance(found, dict) else parse_json(assets.get(own, b"{}"), own)


def check_given(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint has no settings of images: means and sizes that are guessed may be others."""
    check(
        bool(settings),
        "preprocessor_config.json: must be among the checkpoint's files, got none. Save it beside the model: "
        "AutoProcessor.from_pretrained(...).save_pretrained(folder).",
    )


def one_list(owner: str, token: str, texts: Sequence[str], images: Any) -> "list[Source]":
    """The images of all texts in order.

    Args:
        owner: name of the class, for errors.
        token: the placeholder.
        texts: with the placeholders.
        images: a list; or a list for each text, as transformers' processors have it; or a single image, or None.

    Raises:
        ValueError: placeholders that differ in number from the images, of a text where each has its own.
    """
    if not isinstance(images, list | tuple):
        images = [] if images is None else [images]
    counts = [text.count(token) for text in texts]
    if any(isinstance(each, list | tuple) for each in images):
        given = [len(each) if isinstance(each, list | tuple) else None for each in images]
        check(
            given == counts,
            f"{owner}: images in a list for each text must be as many as its {token}, {counts}, got {given}.",
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
    """Raise ValueError if a preprocessor_config.json asks for what is not computed: other than these values."""
    for key, value in fixed.items():
        check(
            settings.get(key, value) in (value, None),
            f"preprocessor_config.json: {key} must be {value!r}, got {settings.get(key)!r}.",
        )
