"""Images and videos in examples: how examples refer to them, how headers give their sizes, and how they are decoded."""

import io
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from liger_models.base.images import image_size, locate_image, read_image
from liger_models.base.processor import BOUNDS, RESIZING, Edit, MediaSize, Processor, edited
from liger_models.base.videos import read_frames, read_header
from liger_models.text.chat import Span

if TYPE_CHECKING:
    from PIL.Image import Image


NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
Sampled = Callable[[int, float, float | None], list[int]]
"""The type of `Processor.sampled`, which chooses the frames of a video."""
Columns = Mapping[str, Sequence[Any]]
"""Maps each kind of media to the images that an example has in separate columns, such as ``images``."""


class BrokenMediaError(ValueError):
    """Raised for an image or a video that is missing or cannot be decoded.

    Args:
        message: the error message.
        file: the file of the image; None if the image is not in a file.
    """

    def __init__(self, message: str, file: Path | None = None) -> None:
        super().__init__(message)
        self.file = file


SAMPLED = 1 << 16
"""A file's checksum covers only this many bytes at its beginning and its end, because media files are large."""


class FileState(NamedTuple):
    """The state of a file, used to detect that the file was replaced.

    Attributes:
        bytes, time: size of the file in bytes, and time of its last change in nanoseconds.
        checksum: checksum of the first and the last `SAMPLED` bytes of the file.
    """

    bytes: int
    time: int
    checksum: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "FileState | None":
        """Return the state of a file; None if it is missing or cannot be read."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                checksum = zlib.crc32(file.read(SAMPLED))
                file.seek(max(status.st_size - SAMPLED, 0))
                return cls(status.st_size, status.st_mtime_ns, zlib.crc32(file.read(SAMPLED), checksum))
        except OSError:
            return None

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file is still in this state.

        The sizes must be equal. If the times differ, as they do after copying, the checksums must be equal, too.
        """
        status = os.stat(path) if os.path.isfile(path) else None
        if status is None or status.st_size != self.bytes:
            return False
        return status.st_mtime_ns == self.time or getattr(self.of(path), "checksum", None) == self.checksum


class MediaSource(NamedTuple):
    """A reference to an image or a video in an example.

    Attributes:
        kind: "image" or "video"; "" for a message part that is neither.
        source: any source that `locate_image` takes; None for the next image of a column.
        settings: ``min_pixels`` and ``max_pixels`` of an image, or ``fps`` of a video, if the example sets them.
    """

    kind: str
    source: Any = None
    settings: Mapping[str, Any] = NO_SETTINGS


@dataclass(frozen=True)
class Medium:
    """An image or a video in a document.

    Attributes:
        where: location of the example, for error messages.
        source: the absolute path of the file, the content of the file, or a PIL image in RGB.
        size: the size of the image or video, which determines its number of tokens.
        first, end: the index of the medium's first token in the document, and the index after its last token.
    """

    where: str
    source: "Path | bytes | Image"
    size: MediaSize
    first: int = 0
    end: int = 0

    @classmethod
    def open(
        cls, where: str, source: Any, settings: Mapping[str, Any] = NO_SETTINGS, sampled: Sampled | None = None
    ) -> "Medium":
        """Read the header of an image or a video.

        Args:
            where: location of the example. If the location has a ``folder``, relative paths start from it.
            source: any source that `locate_image` takes.
            settings: the settings of this image or video; see `MediaSource`.
            sampled: the function that chooses the frames of a video; None for an image.

        Raises:
            ValueError: ``source`` is a web URL or has an unsupported type.
            BrokenMediaError: there is no such file, or its header cannot be read.
        """
        try:
            file = locate_image(source)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        # Relative paths start from the folder of the file that contains them.
        if isinstance(file, Path):
            file = Path(os.path.abspath(getattr(where, "folder", Path()) / file))

        # The size determines the number of tokens. The pixels are decoded when a row is made.
        try:
            size = MediaSize(*image_size(file), **settings) if sampled is None else _video_size(file, settings, sampled)
            return cls(where, file if isinstance(file, Path | bytes) else read_image(file).copy(), size)
        except (OSError, TypeError, ValueError) as error:
            noun = "an image" if sampled is None else "a video"
            raise BrokenMediaError(
                f"{where}: {noun} must be a file that can be read, got: {error}",
                file if isinstance(file, Path) else None,
            ) from error

    def decode(self) -> "list[Image]":
        """Return the image, or the sampled frames of the video, in RGB.

        Raises:
            BrokenMediaError: the file cannot be read, or the image does not have the size that was in its header.
        """
        noun = "an image" if self.size.numbers is None else "a video"
        try:
            if self.size.numbers is None:
                images = [read_image(self.source)]
            else:
                images = read_frames(cast("Path | bytes", self.source), self.size.numbers)
        except (OSError, ValueError) as error:
            raise BrokenMediaError(f"{self.where}: {noun} must be a file that can be read, got: {error}") from error
        for image in images:
            if image.size != self.size[:2]:
                raise BrokenMediaError(
                    f"{self.where}: {noun} must have the size {self.size[:2]} of its header, got {image.size}"
                    + (f" in {self.source}." if isinstance(self.source, Path) else ".")
                )
        return images

    def blank(self) -> "list[Image]":
        """Return a black image of the same size or, for a video, the same number of black frames."""
        from PIL import Image

        return [Image.new("RGB", self.size[:2])] * (self.size.frames or 1)

    @property
    def content(self) -> bytes:
        """The bytes to store: none for a file, the source itself if it is bytes, and a PNG for a PIL image."""
        if isinstance(self.source, Path):
            return b""
        if isinstance(self.source, bytes):
            return self.source
        content = io.BytesIO()
        self.source.save(content, "PNG", compress_level=1)
        return content.getvalue()

    @property
    def checksum(self) -> int | None:
        """The checksum of the content or, for a file, of its first and last bytes; None if the file is missing."""
        if isinstance(self.source, Path):
            state = FileState.of(self.source)
            return None if state is None else state.checksum
        return zlib.crc32(self.source if isinstance(self.source, bytes) else self.source.tobytes())

    @property
    def memory(self) -> int:
        """The number of bytes of memory that the source takes."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return 0 if isinstance(self.source, Path) else 3 * self.size.width * self.size.height


def _video_size(file: Any, settings: Mapping[str, Any], sampled: Sampled) -> MediaSize:
    """Read a video's header, and return the size of the frames and the indices of the sampled frames."""
    if not isinstance(file, Path | bytes):
        raise ValueError("an image. Pass images as images.")
    # Compute the rate of the sampled frames. From this rate, the model computes the times of the frames.
    width, height, frames, fps = read_header(file)
    numbers = sampled(frames, fps, settings.get("fps"))
    rate = len(numbers) / frames * fps
    return MediaSize(width, height, len(numbers), rate, numbers=numbers, file_fps=fps)


class MediaReader:
    """Finds the images and videos of examples, and inserts the tokens that represent media into texts.

    In the docstrings of the methods, "image" stands for an image or a video.

    Args:
        processor: the processor of the model. None for a text model, whose examples have no images.

    Attributes:
        kinds: the kinds of media that the model takes, such as "image".
        token_ids: the ids of the tokens that represent parts of images.
    """

    def __init__(self, processor: Processor | None) -> None:
        self.processor = processor
        self.kinds: Sequence[str] = () if processor is None else processor.kinds
        self.token_ids: set[int] = set() if processor is None else processor.media_ids

    def columns(self, example: Mapping[str, Any]) -> dict[str, list[Any]]:
        """For each kind of media, return the images in the example's columns of this kind, such as ``images``."""
        # An example may have both a singular and a plural column. The images of the singular column come first.
        columns: dict[str, list[Any]] = {kind: [] for kind in self.kinds}
        for kind, column in columns.items():
            for name in (kind, f"{kind}s"):
                value = example.get(name)
                if value is not None:
                    column += value if isinstance(value, list | tuple) else [value]
        return columns

    def sources_in_text(self, where: str, text: str, columns: Columns) -> list[MediaSource]:
        """Return the image that each of the model's placeholders in a text stands for, in order.

        Raises:
            ValueError: the number of placeholders differs from the number of images.
        """
        placeholders = () if self.processor is None else self.processor.placeholder.finditer(text)
        kinds = [str(placeholder.lastgroup) for placeholder in placeholders]
        return [MediaSource(kind, image) for kind, image in zip(kinds, take(where, kinds, columns), strict=True)]

    def count(self, text: str) -> int:
        """Return the number of image placeholders in a text."""
        return 0 if self.processor is None else len(self.processor.placeholder.findall(text))

    def place(
        self, where: str, messages: Sequence[Mapping[str, Any]], columns: Columns
    ) -> tuple[list[dict[str, Any]], list[MediaSource]]:
        """Return messages in the form that a chat template reads, and the images of the messages.

        A message part of type "image" either contains an image or marks the place of the next image of a column. If the
        content of a message is a text, each ``<image>`` in the text marks the place of the next image of the column. If
        the messages have no place for the images of a column, these images come before the text of the user's first
        message.

        Args:
            where: location of the example, for error messages.
            messages: dicts with ``role`` and ``content``.
            columns: maps each kind to the images in its column.

        Returns:
            The messages, whose images are now parts ``{"type": "image"}``, and the images in order.

        Raises:
            ValueError: the messages do not have one place for each image in the columns, or a part sets a size in a
                way that the model does not support.
        """
        placed: list[dict[str, Any]] = []
        sources: list[MediaSource] = []

        # A message part contains an image, or stands for the next image of a column. A mark in a text stands for the
        # next image of a column.
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and any(f"<{kind}>" in content for kind, column in columns.items() if column):
                content = _split_marks(content, columns)
            if isinstance(content, list | tuple):
                parts: list[Any] = []
                for part in content:
                    source = self._read_part(where, part, columns)
                    sources += [source] if source.kind else []
                    parts.append({"type": source.kind} if source.kind else part)
                content = parts
            placed.append({**message, "content": content})

        # If no message has a place for the images of a column, put them at the beginning of the user's first message.
        for kind, column in columns.items():
            users = [message for message in placed if message.get("role") == "user"]
            if column and users and not any(kind == source.kind for source in sources):
                text = users[0].get("content")
                parts = list(text) if isinstance(text, list | tuple) else [{"type": "text", "text": text}]
                users[0]["content"] = [{"type": kind}] * len(column) + parts
                sources = [MediaSource(kind)] * len(column) + sources

        # Each place without its own image takes the next image of its column.
        images = iter(take(where, [source.kind for source in sources if source.source is None], columns))
        return placed, [source._replace(source=next(images)) if source.source is None else source for source in sources]

    def _read_part(self, where: str, part: Any, kinds: Columns) -> MediaSource:
        """Return the image in a message part, or a `MediaSource` of kind "" if the part has no image."""
        if not isinstance(part, Mapping):
            return MediaSource("")
        # The type is "image" or "image_url". Without a type, a key with such a name determines the type.
        present = {key: value for key, value in part.items() if value is not None}
        part_type = str(present.get("type", next((key for key in present if key.removesuffix("_url") in kinds), "")))
        kind = part_type.removesuffix("_url")
        if kind not in kinds:
            return MediaSource("")

        # A part may have its own settings. If it sets a size in a way that the model does not support, this is an
        # error.
        takes_bounds = self.processor is not None and self.processor.takes_bounds
        names = ("fps",) if kind == "video" else BOUNDS if takes_bounds else ()
        settings = {name: present[name] for name in names if name in present}
        sizes = sorted(RESIZING & {*present} - {*settings})
        if sizes:
            raise ValueError(
                f"{where}: a part of type {kind} must not have a size of its own, got {', '.join(sizes)}. Resize it "
                "first, or set bounds on the processor: processor.images.max_pixels = ..."
            )
        spellings = [present[key] for key in (kind, f"{kind}_url", "path", "url", "bytes") if key in present]
        spellings += [{"base64": present["base64"]}] if "base64" in present else []
        return MediaSource(kind, spellings[0] if spellings else None, settings)

    def open(self, where: str, sources: Sequence[MediaSource]) -> list[Medium]:
        """Open images and read their sizes from the headers; see `Medium.open`."""
        sampled = {} if self.processor is None else {"video": self.processor.sampled}
        return [Medium.open(where, source, settings, sampled.get(kind)) for kind, source, settings in sources]

    def write(
        self, where: str, text: str, spans: Sequence[Span] | None, media: Sequence[Medium]
    ) -> tuple[str, list[Span] | None, list[int]]:
        """Return a text in which the placeholders of images are replaced with the tokens of the images.

        Args:
            where: location of the example, for error messages.
            text: the text, as a chat template renders it.
            spans: the spans of the answers in the text; None if the text is not a chat.
            media: the images of the text, in order.

        Returns:
            The new text, the spans of the answers in it, and the number of tokens of each image.

        Raises:
            ValueError: the placeholders in the text do not match the images.
            BrokenMediaError: an image has a size that the processor does not take.
        """
        if self.processor is None:
            return text, None if spans is None else [*spans], []
        # Placeholders and images must have the same kinds in the same order.
        placeholders = list(self.processor.placeholder.finditer(text))
        if [placeholder.lastgroup for placeholder in placeholders] != [medium.size.kind for medium in media]:
            noun = "images and videos" if any(medium.size.kind == "video" for medium in media) else "images"
            raise ValueError(
                f"{where}: a text must have a placeholder for each of its {len(media)} {noun}, got "
                f"{len(placeholders)}. Does the chat template write them, or does a message have them by mistake?"
            )
        try:
            written = [self.processor.written(medium.size) for medium in media]
        except ValueError as error:
            raise BrokenMediaError(f"{where}: {error}") from error
        # Replace each placeholder with its tokens, and adjust the spans of the answers.
        edits = [Edit(*place.span(), tokens) for place, (tokens, _) in zip(placeholders, written, strict=True)]
        text, moved = edited(text, edits, spans or ())
        return text, None if spans is None else moved, [count for _, count in written]

    def locate(self, where: str, ids: Sequence[int], media: Sequence[Medium], counts: Sequence[int]) -> list[Medium]:
        """Return the images of a document with their positions: the attributes ``first`` and ``end`` of `Medium`.

        Args:
            where: location of the example, for error messages.
            ids: the token ids of the document, with ``~id`` for a token without a label.
            media, counts: the images of the document, and the number of tokens of each image.

        Raises:
            ValueError: the number of image tokens in the document differs from the sum of ``counts``.
        """
        # Image tokens with and without a label.
        tokens = self.token_ids | {~token for token in self.token_ids}
        positions = [position for position, token in enumerate(ids) if token in tokens]
        ends = [0, *accumulate(counts)]  # the first position of each image, as an index into `positions`
        if len(positions) != ends[-1]:
            raise ValueError(
                f"{where}: a document must have {ends[-1]} image tokens, got {len(positions)}. Is it the model's "
                "tokenizer?"
            )
        return [
            replace(medium, first=positions[start], end=positions[end - 1] + 1)
            for medium, start, end in zip(media, ends, ends[1:], strict=False)
        ]


def take(where: str, kinds: Sequence[str], columns: Columns) -> list[Any]:
    """Assign images to the places where an example refers to them.

    Each place gets the next image from the column of its kind.

    Args:
        where: location of the example, for error messages.
        kinds: for each place, the kind of its image, such as "image".
        columns: maps each kind to the images in its column.

    Raises:
        ValueError: the number of places differs from the number of images.
    """
    for kind in dict.fromkeys([*columns, *kinds]):
        column = columns.get(kind, ())
        if kinds.count(kind) != len(column):
            raise ValueError(
                f"{where}: an example must have a place for each of its {len(column)} {kind}s, a part "
                f'{{"type": "{kind}"}} '
                f"or the model's placeholder, got {kinds.count(kind)}. Correct it."
            )
    images = {kind: iter(column) for kind, column in columns.items()}
    return [next(images[kind]) for kind in kinds]


def _split_marks(text: str, columns: Columns) -> list[dict[str, Any]]:
    """Split a text into message parts. Each ``<image>`` becomes a part of type "image" if a column has images."""
    kinds = [kind for kind, column in columns.items() if column]
    parts: list[dict[str, Any]] = []
    for position, piece in enumerate(re.split(f"<({'|'.join(kinds)})>", text)):
        if position % 2:  # the matched mark
            parts.append({"type": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def keep_whole(media: Sequence[tuple[int, int]], length: int) -> int:
    """Return where to cut a document: at ``length`` or, if this would split an image, before this image.

    Args:
        media: for each image, the index of its first token and the index after its last token.
        length: the maximum number of tokens.
    """
    return next((first for first, end in media if first < length < end), length)
