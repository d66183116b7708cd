"""Functions that read, resize and normalize images. The results are bitwise equal to those of transformers' image
processors that use Pillow."""

import base64
import contextlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from liger_models.common.json_files import parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = Image | str | os.PathLike[str] | bytes | Mapping[str, Any]
    """A PIL image, a path, a file:// URL, a data URI, the content of a file, or a mapping with one of these; see
    `locate_image`."""


def locate_image(source: "Source") -> "Image | Path | bytes":
    """Convert any source of an image into a PIL image, a path, or the content of a file. No file is opened.

    Args:
        source: a PIL image; a path; a ``file://`` URL; a data URI such as ``data:image/png;base64,...``; the bytes of a
            file; or a mapping with one of these. The mapping's first key out of "bytes", "path", "url" and "base64" is
            read. Undecoded image columns of ``datasets`` have the keys "bytes" and "path", OpenAI's ``image_url`` parts
            have "url", and parts of transformers' messages may have "base64".

    Raises:
        TypeError: ``source`` has none of these types.
        ValueError: ``source`` is a URL with another scheme, a data URI that cannot be decoded, a text that is too long
            for a path, or a mapping without an image.
    """
    # Mappings, bytes, paths and PIL images.
    if isinstance(source, Mapping):
        values = [source[key] for key in ("bytes", "path", "url", "base64") if source.get(key) is not None]
        if not values:
            raise ValueError(
                f"open_image: a mapping must have the key bytes, path, url or base64, got {sorted(map(str, source))}."
            )
        is_bare = values[0] is source.get("base64") and not str(values[0]).startswith("data:")
        return locate_image(f"data:;base64,{values[0]}" if is_bare else values[0])
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, os.PathLike):
        return Path(source)
    if not isinstance(source, str):
        # An object with `getbands` is a PIL image. An `isinstance` check would have to import Pillow.
        if hasattr(source, "getbands"):
            return source
        raise TypeError(f"open_image: an image must be {_SPELLINGS}, got {type(source).__name__}.")

    # A path, unless the text has the scheme of a data URI or of a URL.
    scheme = re.match(r"(?i)(data):|([a-z][a-z0-9+.-]*)://", source)
    if scheme is None:
        if len(source) > LONGEST_PATH:
            raise ValueError(
                f"open_image: a path must have at most {LONGEST_PATH} characters, got {len(source)}: {source[:40]}... "
                "If it is base64, put data:image/png;base64, in front of it."
            )
        return Path(source)

    # The content of a data URI, percent-encoded or in base64.
    if scheme[1]:
        header, comma, content = source[len("data:") :].partition(",")
        try:
            if not comma:
                raise ValueError("no comma")
            raw = unquote_to_bytes(content)
            return base64.b64decode(b"".join(raw.split()), validate=True) if header.endswith(";base64") else raw
        except ValueError as error:
            raise ValueError(
                f"open_image: a data URI must be data:image/png;base64, and the encoded file, got {source[:60]} "
                f"({error}). Encode it again."
            ) from error

    # A file:// URL. Other schemes would need the network.
    url = urlsplit(source)
    if scheme[2].lower() != "file" or url.netloc not in ("", "localhost"):
        raise ValueError(
            f"open_image: an image must be {_SPELLINGS}, got the URL {source[:60]}. Download it and pass its bytes."
        )
    return Path(url2pathname(url.path))


LONGEST_PATH = 4096
"""Linux's limit on the length of a path. The system's error for a longer path would contain the whole text."""
_SPELLINGS = "a PIL image, a path, a file:// URL, a data URI or a file's bytes"


def open_image(source: "Source") -> "Image":
    """Read an image from any source that `locate_image` takes, and decode its pixels.

    A file may have any of the formats in `FORMATS`. An image from a file is rotated according to its EXIF orientation.
    As in transformers, a PIL image is not rotated.

    Raises:
        ImportError: Pillow is not installed.
        OSError: there is no such file, or it cannot be read.
        TypeError: ``source`` is not an image.
        ValueError: Pillow cannot read the file, ``source`` is a URL that is neither ``file://`` nor a data URI, or the
            image has no pixels or more than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    _check_pillow()
    from PIL import Image, ImageOps

    # The file is read and decoded here rather than on first use, so that errors name the file.
    located = locate_image(source)
    if isinstance(located, Path | bytes):
        content = located if isinstance(located, bytes) else located.read_bytes()
        with _naming(located) as name:
            image: Image.Image = _open(io.BytesIO(content))
            _check_size(image, name)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # an upright image is not copied
    else:
        image = located
        _check_size(image, "an image")
    if not min(image.size) > 0:
        raise ValueError(f"open_image: an image must have pixels, got {image.width} x {image.height}.")
    return image


def image_size(source: "Source") -> tuple[int, int]:
    """Return the width and height of the image that `open_image` would return. Only the header of a file is read.

    Raises:
        ImportError, OSError, TypeError, ValueError: as for `open_image`, if the error is in the header.
    """
    _check_pillow()
    from PIL import ExifTags, Image

    located = locate_image(source)
    if not isinstance(located, Path | bytes):
        return located.size
    if isinstance(located, Path):
        located.stat()  # a missing file is an OSError
    file = io.BytesIO(located) if isinstance(located, bytes) else located
    with _naming(located) as name, _open(file) as image:
        _check_size(image, name)
        if image.format == "PNG" and _may_turn_late(getattr(image, "fp", None)):
            return open_image(source).size
        # The method ``getexif`` of a PNG image would decode all pixels if no orientation comes before the pixels.
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in TURNED
        # For a TIFF, Pillow has already applied the orientation tag to the size, but not the orientation in the XMP
        # data.
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        return image.size[::-1] if turned and tags.get(ExifTags.Base.Orientation) not in TURNED else image.size


TURNED = (5, 6, 7, 8)
"""Values of the EXIF orientation that swap width and height."""


def _may_turn_late(file: Any) -> bool:
    """Return whether a PNG file has EXIF or XMP data after its pixels. Such data may rotate the image, and Pillow finds
    it only after decoding."""
    follows = False
    file.seek(8)
    while len(header := file.read(8)) == 8:
        length, name = int.from_bytes(header[:4], "big"), header[4:]
        start = file.read(min(length, 22))
        if follows and (name == b"eXIf" or start.startswith((b"XML:com.adobe.xmp\0", b"Raw profile type exif\0"))):
            return True
        follows = follows or name == b"IDAT"
        file.seek(length - len(start) + 4, os.SEEK_CUR)  # skip the rest and the checksum
    return False


FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "HEIF", "JXL", "JPEG2000", "ICO", "PCX", "QOI",
    "SGI", "TGA",
)  # fmt: skip
"""Image formats that are read if Pillow or one of its plugins supports them. All other formats are refused, whatever
the file name. This protects against EPS files, which Pillow opens with Ghostscript, and against IPTC files, which may
contain EPS."""


def _open(file: Any) -> "Image":
    """Open a file or a path as a PIL image, without decoding its pixels."""
    from PIL import Image, UnidentifiedImageError

    Image.init()  # load all plugins, which add their formats to `Image.OPEN`
    try:
        return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError as error:
        raise ValueError(f"none in the formats {', '.join(FORMATS)}") from error


def _check_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "open_image: needs Pillow, which is not installed. Run pip install 'liger_models[vision]'."
        ) from error


@contextlib.contextmanager
def _naming(located: "Path | bytes") -> "Iterator[str]":
    """Context manager that yields the image's name for error messages, and turns errors into the errors that
    `open_image` documents."""
    from PIL import Image

    name = f"{len(located)} bytes" if isinstance(located, bytes) else str(located)
    try:
        yield name
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"open_image: {name} must have fewer pixels, got: {error} {_LARGER}") from error
    except ImageSizeError:
        raise
    except Exception as error:  # Pillow's decoders raise SyntaxError, struct.error, IndexError and others
        raise ValueError(f"open_image: {name} must be a whole image file, got: {error}.") from error


def read_image(source: "Source") -> "Image":
    """Read an image as RGB; see `open_image`. Transparent images are composited onto white.

    Images with 16 bits per pixel are scaled to 8 bits. A PIL image in RGB is returned as it is, without a copy.

    Raises:
        ImportError, OSError, TypeError: as for `open_image`.
        ValueError: as for `open_image`, or the range of the image's pixels is unknown (floats and 32-bit integers).
    """
    image = open_image(source)
    from PIL import Image

    # Scale 16 bits to 8 bits: 65535 / 257 = 255.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # "I" before Pillow 11
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"read_image: an image must have 8 or 16 bits per channel, got mode {image.mode}, whose range is unknown. "
            "Scale it to 0 ... 255 and convert it: image.convert('L')."
        )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    image.load()  # a PIL image may not be decoded yet
    return image if image.mode == "RGB" else image.convert("RGB")


_LARGER = "Resize it, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it."


class ImageSizeError(ValueError):
    """Raised for an image with more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``."""


def _check_size(image: "Image", name: str) -> None:
    """Check the number of pixels before decoding, because a header of a few bytes can claim any number of pixels."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        size = f"{image.width} x {image.height}"
        raise ImageSizeError(f"open_image: {name} must have at most {limit} pixels, got {size}. {_LARGER}")


def to_tensor(image: "Image", size: tuple[int, int], resample: int) -> Tensor:
    """Resize an RGB image to ``size`` (height, width) with a Pillow filter, and return [3, height, width] uint8."""
    image = resize(image, size, resample)
    # The planes are joined in a bytearray, because a tensor needs writable memory.
    planes = bytearray().join(image.tobytes("raw", channel) for channel in "RGB")
    return torch.frombuffer(planes, dtype=torch.uint8).view(3, *size)


def to_rows(image: "Image", size: tuple[int, int], resample: int) -> Tensor:
    """Resize an RGB image as `to_tensor` does. Return [height, width · 3], where a pixel's channels are adjacent."""
    pixels = bytearray(resize(image, size, resample).tobytes())
    return torch.frombuffer(pixels, dtype=torch.uint8).view(size[0], -1)


def resize(image: "Image", size: tuple[int, int], resample: int) -> "Image":
    """Resize an image to ``size`` (height, width) with a Pillow filter. The image may already have this size."""
    return image if image.size == size[::-1] else image.resize(size[::-1], resample)


def cut_tiles(pixels: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Return the tiles of an image [3, rows · height, columns · width], row by row, without a copy."""
    return [tile for row in pixels.chunk(rows, 1) for tile in row.chunk(columns, 2)]


def cut_patches(pixels: Tensor, height: int, width: int, merge: int = 1) -> Tensor:
    """Cut an image into patches, row by row.

    Args:
        pixels: [C, rows · height, columns · width] uint8, with contiguous rows.
        height, width: height and width of a patch.
        merge: number m. The patches of each square of m × m patches are adjacent in the result.

    Returns:
        [patches, C, height · width] uint8.
    """
    # A row of a patch is copied as integers of 8, 4, 2 or 1 bytes: the largest size that divides ``width``.
    size, dtype = next((size, dtype) for size, dtype in _INTEGERS.items() if width % size == 0)
    pattern = "c (h m y) (w k x) -> (h w m k) c (y x)"
    cut = rearrange(pixels.view(dtype), pattern, m=merge, k=merge, y=height, x=width // size)
    return cut.view(torch.uint8)


def slots_of_frame(number: int, frames: int, depth: int) -> range:
    """Return the positions that a frame fills along the time dimension of a patch.

    Args:
        number: index of the frame.
        frames: number of frames of the video, or 1 for an image. The last frame also fills all later positions of its
            patch.
        depth: number of frames that a patch spans.
    """
    first = number % depth
    return range(first, depth if number == frames - 1 else first + 1)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension, after padding all other dimensions with zeros to the largest size.

    Padding is needed for models whose inputs differ in size. In Llama 3.2 Vision, rows differ in the number of images.
    In LLaVA-NeXT, images differ in the number of tiles. In Pixtral and Mistral Small 3, images differ in height and
    width. A single tensor is returned without a copy.
    """
    if len(tensors) == 1:
        return tensors[0]
    shape = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        # `pad` takes the widths before and after each dimension, from the last dimension to the second.
        widths: list[int] = []
        for most, length in zip(reversed(shape), reversed(tensor.shape[1:]), strict=True):
            widths += 0, most - length
        padded.append(pad(tensor, widths) if any(widths) else tensor)
    return torch.cat(padded)


def reuse_memory() -> None:
    """Let Pillow keep up to 256 MB of this process's image memory for later images.

    Otherwise, each image gets new memory pages from the system, which takes time for large images. This function has no
    effect if the number of Pillow's memory blocks was already set, by the program or the environment variable
    PILLOW_BLOCKS_MAX.
    """
    from PIL import Image

    core = cast(Any, Image).core
    if not core.get_blocks_max() and "PILLOW_BLOCKS_MAX" not in os.environ:
        core.set_blocks_max(BLOCKS)


BLOCKS = 16
"""The number of memory blocks, by default 16 MB each, that `reuse_memory` lets Pillow keep."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Maps a size in bytes to the integer dtype of this size."""
PORTION = 1 << 17
"""The number of values that are normalized at a time. In fp32, these values fit into a processor cache."""


class Normalize:
    """Computes ``(pixel · rescale_factor − mean) / std`` per channel, and rounds to fp32 where transformers does.

    Args:
        settings: the content of a preprocessor_config.json.
        mean, std: default values, one per channel, which are used if the settings have none.

    Raises:
        ValueError: a value is not finite, or a factor or a standard deviation is not positive.
    """

    def __init__(self, settings: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> None:
        self.factor = _numbers("rescale_factor", _setting(settings, "rescale_factor", 1 / 255), positive=True)[0]
        # As in transformers, a step is switched off if its setting is null.
        if not settings.get("do_rescale", True):
            self.factor = 1.0

        # Without normalization the mean is 0 and the standard deviation 1.
        normalizes = settings.get("do_normalize", True)
        means = _setting(settings, "image_mean", mean) if normalizes else [0.0] * 3
        stds = _setting(settings, "image_std", std) if normalizes else [1.0] * 3
        numbers = _numbers("image_mean", means), _numbers("image_std", stds, positive=True)
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1) for values in numbers
        )
        # transformers multiplies in fp64 and rounds to fp32 before it subtracts. If a division in fp32 gives the same
        # values, as for a division by 255, the faster division is used.
        levels, divisor = torch.arange(256, dtype=torch.float64, device="cpu"), 1 / self.factor
        is_equal = torch.equal(levels.float() / divisor, (levels * self.factor).float())
        self.divisor = divisor if is_equal else None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize pixels [3, height, width] uint8; returns the same shape in fp32."""
        return self.stack([pixels])[0]

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Normalize images [3, height, width] uint8 of one size, and return [images, 3, height, width] fp32."""
        out = torch.empty(len(images), *images[0].shape, dtype=torch.float32, device="cpu")
        for image, target in zip(images, out, strict=True):
            self.write(image.transpose(0, 1), target.transpose(0, 1))
        return out

    def write(self, pixels: Tensor, *outs: Tensor) -> None:
        """Normalize pixels and write them to one or more tensors, in portions that fit into a CPU cache.

        Args:
            pixels: [n, 3, m] uint8, or [n, m · 3], where the channels of a pixel are adjacent.
            outs: fp32 tensors that have the shape of ``pixels`` and any strides.
        """
        mean, std = self.mean[:, 0], self.std[:, 0]  # [3 or 1, 1]
        if pixels.dim() == 2:
            mean, std = (x.expand(3, 1).flatten().repeat(pixels.shape[1] // 3) for x in (mean, std))  # [m · 3]
        rows = max(PORTION // pixels[0].numel(), 1)
        for source, target, *copies in zip(*(x.split(rows) for x in (pixels, *outs)), strict=True):
            if self.divisor is None:
                target.copy_(source.double() * self.factor)
            else:
                target.copy_(source).div_(self.divisor)
            target.sub_(mean).div_(std)
            for copy in copies:
                copy.copy_(target)


def _numbers(key: str, value: Any, *, positive: bool = False) -> list[float]:
    """Return the value of a setting as a list of one number, or of three numbers for the three channels."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    valid = len(numbers) in (1, 3) and all(
        isinstance(number, int | float) and math.isfinite(number) and (number > 0 or not positive) for number in numbers
    )
    if not valid:
        raise ValueError(
            f"preprocessor_config.json: {key} must be {'positive' if positive else 'finite'}, a number or one for each "
            f"of 3 channels, got {value!r:.80}. Take the file of the checkpoint."
        )
    return [float(number) for number in numbers]


def settings_of(assets: Mapping[str, bytes], part: str) -> dict[str, Any]:
    """Return the settings of "image_processor" or "video_processor" in a checkpoint's files; {} if there are none.

    transformers 5 writes the settings of both processors to processor_config.json and reads this file first. Earlier
    versions of transformers write one file for each processor.
    """
    settings = parse_json(assets.get(_COMMON_FILE, b"{}"), _COMMON_FILE).get(part)
    if isinstance(settings, dict):
        return settings
    file = _OWN_FILES[part]
    return parse_json(assets.get(file, b"{}"), file)


def settings_file(assets: Mapping[str, bytes], part: str, changes: Mapping[str, Any]) -> dict[str, bytes]:
    """Apply changes to the file that `settings_of` reads, and return a dict from the file's name to its new content.

    If a checkpoint has no video settings, the changes are applied to a copy of its image settings.
    """
    common = parse_json(assets.get(_COMMON_FILE, b"{}"), _COMMON_FILE)
    settings = {**(settings_of(assets, part) or settings_of(assets, "image_processor")), **changes}
    nested = isinstance(common.get(part), dict)
    content = common | {part: settings} if nested else settings
    return {_COMMON_FILE if nested else _OWN_FILES[part]: (json.dumps(content, indent=2) + "\n").encode()}


_COMMON_FILE = "processor_config.json"
_OWN_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}


def image_settings(assets: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the image settings in a checkpoint's files.

    Raises:
        ValueError: there are no image settings. Defaults are not used, because default means and sizes could be wrong.
    """
    settings = settings_of(assets, "image_processor")
    if not settings:
        raise ValueError(
            "preprocessor_config.json: must be among the checkpoint's files, got none. Save it next to the model: "
            "AutoProcessor.from_pretrained(...).save_pretrained(folder)."
        )
    return settings


def one_list(owner: str, token: str, texts: Sequence[str], images: Any) -> "list[Source]":
    """Collect the images of all texts in one list, in order.

    Args:
        owner: name of the calling class, for errors.
        token: the placeholder.
        texts: texts with placeholders.
        images: a list of images; a list for each text, as in transformers' processors; a single image; or None.

    Raises:
        ValueError: the number of placeholders does not match the number of images, in total or in each text.
    """
    if not isinstance(images, list | tuple):
        images = [] if images is None else [images]

    # The list for a text must have one image per placeholder in the text. A flat list must have one image per
    # placeholder in all texts.
    counts = [text.count(token) for text in texts]
    if any(isinstance(row, list | tuple) for row in images):
        lengths = [len(row) if isinstance(row, list | tuple) else None for row in images]
        if lengths != counts:
            raise ValueError(
                f"{owner}: the list of images for each text must match its number of {token}, {counts}, got {lengths}."
            )
        images = [image for row in images for image in row]
    if sum(counts) != len(images):
        raise ValueError(
            f"{owner}: the texts must have one {token} for each of the {len(images)} images, got {sum(counts)}."
        )
    return list(images)


def each_once(make: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Call ``make(*row)`` for each row of the columns, and return the results in a list.

    A row consists of the elements that the columns have at one index. If several rows consist of the same objects, for
    example because several answers share an image, ``make`` is called only once for these rows.
    """
    results: dict[tuple[int, ...], Any] = {}
    for row in zip(*columns, strict=True):
        key = tuple(map(id, row))
        if key not in results:
            results[key] = make(*row)
    return [results[tuple(map(id, row))] for row in zip(*columns, strict=True)]


def _setting(settings: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = settings.get(key)
    return otherwise if value is None else value


def check_settings(settings: Mapping[str, Any], **fixed: Any) -> None:
    """Raise ValueError if a setting in preprocessor_config.json differs from its only supported value, which ``fixed``
    holds.

    As in transformers, the value null switches off a step if the key is in `STEPS`. For all other keys, null stands for
    the default.
    """
    for key, value in fixed.items():
        found = settings.get(key, value)
        if found != value and (found is not None or key in STEPS):
            raise ValueError(f"preprocessor_config.json: {key} must be {value!r}, got {found!r}.")


STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
"""Settings that switch on a step of transformers' image processors."""
