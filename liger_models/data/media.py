"""Images and videos of examples: where they are and how they are spelled, their sizes from headers, their pixels."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from liger_models.base.images import image_size, locate_image, read_image
from liger_models.base.processor import BOUNDS, RESIZING, Edit, MediaSize, Processor, edited
from liger_models.base.videos import read_frames, read_header
from liger_models.text.chat import Span

if TYPE_CHECKING:
    from PIL.Image import Image


Found = tuple[str, Any, Mapping[str, Any]]
"""Kind and spelling of an image or a video, and its own settings, as far as it has them: ``min_pixels`` and
``max_pixels`` of an image, ``fps`` of a video."""


class BrokenMediaError(ValueError):
    """A file that is missing or cannot be decoded."""


_NONE: Mapping[str, Any] = MappingProxyType({})
Sampled = Callable[[int, float, float | None], list[int]]
"""`Processor.sampled`."""


@dataclass(frozen=True)
class Medium:
    """An image or a video of a document.

    Attributes:
        where: where its example is, for errors.
        source: the absolute path of the file, its content, or a PIL image in RGB.
        size: what decides how many tokens it has.
        first, end: its first token in the document, and the one after its last.
    """

    where: str
    source: "Path | bytes | Image"
    size: MediaSize
    first: int = 0
    end: int = 0

    @classmethod
    def open(cls, where: str, source: Any, own: Mapping[str, Any] = _NONE, sampled: Sampled | None = None) -> "Medium":
        """Read the header of an image or a video.

        Args:
            where: where its example is. Its ``folder``, if it has one, is that of relative paths.
            source: any spelling that `locate_image` takes.
            own: its own settings.
            sampled: chooses the frames of a video; None for an image.

        Raises:
            ValueError: ``source`` is a URL of the web or has another type.
            BrokenMediaError: there is no such file, or its header cannot be read.
        """
        try:
            found = locate_image(source)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        if isinstance(found, Path):
            found = Path(os.path.abspath(getattr(where, "folder", Path()) / found))
        named = "an image" if sampled is None else "a video"
        try:
            if sampled is None:
                size = MediaSize(*image_size(found), **own)
            else:
                if not isinstance(found, Path | bytes):
                    raise ValueError("an image. Pass images as images.")
                width, height, frames, fps = read_header(found)
                numbers = sampled(frames, fps, own.get("fps"))
                rate = len(numbers) / frames * fps
                size = MediaSize(width, height, len(numbers), rate, numbers=numbers, file_fps=fps)
            return cls(where, found if isinstance(found, Path | bytes) else read_image(found), size)
        except (OSError, TypeError, ValueError) as error:
            raise BrokenMediaError(f"{where}: {named} must be a file that can be read, got: {error}") from error

    def decode(self) -> "list[Image]":
        """The image, or the sampled frames of the video, in RGB.

        Raises:
            BrokenMediaError: the file cannot be read, or its image has another size than its header had.
        """
        named = "an image" if self.size.numbers is None else "a video"
        try:
            images = (
                [read_image(self.source)]
                if self.size.numbers is None
                else read_frames(cast("Path | bytes", self.source), self.size.numbers)
            )
        except (OSError, ValueError) as error:
            raise BrokenMediaError(f"{self.where}: {named} must be a file that can be read, got: {error}") from error
        for image in images:
            if image.size != self.size[:2]:
                raise BrokenMediaError(
                    f"{self.where}: {named} must have the size {self.size[:2]} of its header, got {image.size}"
                    + (f" in {self.source}." if isinstance(self.source, Path) else ".")
                )
        return images

    def blank(self) -> "list[Image]":
        """A black image of the same size, or as many black frames."""
        from PIL import Image

        return [Image.new("RGB", self.size[:2])] * (self.size.frames or 1)

    @property
    def content(self) -> bytes:
        """What is stored of it: nothing of a file, and a PIL image as PNG."""
        if isinstance(self.source, Path):
            return b""
        if isinstance(self.source, bytes):
            return self.source
        content = io.BytesIO()
        self.source.save(content, "PNG", compress_level=1)
        return content.getvalue()

    @property
    def memory(self) -> int:
        """Bytes of memory of its source."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return 0 if isinstance(self.source, Path) else 3 * self.size.width * self.size.height


def columns_of(example: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, list[Any]]:
    """The images in fields of their own, such as ``images``, by kind.

    Args:
        example: what was read.
        kinds: kinds that the model takes, such as "image".
    """
    columns: dict[str, list[Any]] = {}
    for kind in kinds:
        given = (example.get(name) for name in (kind, f"{kind}s"))
        columns[kind] = [
            each for value in given if value is not None for each in (value if _is_list(value) else [value])
        ]
    return columns


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def place_media(
    where: str, messages: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]], bounds: bool = False
) -> tuple[list[dict[str, Any]], list[Found]]:
    """Messages as a chat template reads them, and their images.

    An image is a part of a message, and holds the image itself or stands for the next one of a column. In a message
    that is a text ``<image>`` stands for the next one of the column. If nothing stands for them, the images of a column
    come before the text of the user's first message.

    Args:
        where: where the example is, for errors.
        messages: dicts with ``role`` and ``content``.
        columns: the images in fields of their own, by kind.
        bounds: whether a part with an image may have ``min_pixels`` and ``max_pixels``.

    Returns:
        The messages with parts ``{"type": "image"}``; kind, spelling and own bounds of each image, in order.

    Raises:
        ValueError: the number of places in the messages is not that of the images in the columns, or a part has a size
            of its own that the model does not take.
    """
    placed: list[dict[str, Any]] = []
    found: list[Found] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and any(f"<{kind}>" in content for kind, given in columns.items() if given):
            content = _split_marks(content, columns)
        if isinstance(content, list | tuple):
            parts: list[Any] = []
            for part in content:
                kind, source, own = _read_part(where, part, columns, bounds)
                found += [(kind, source, own)] if kind else []
                parts.append({"type": kind} if kind else part)
            content = parts
        placed.append({**message, "content": content})
    for kind, given in columns.items():
        users = [message for message in placed if message.get("role") == "user"]
        if given and users and not any(kind == each for each, _, _ in found):
            text = users[0].get("content")
            parts = list(text) if isinstance(text, list | tuple) else [{"type": "text", "text": text}]
            users[0]["content"] = [{"type": kind}] * len(given) + parts
            found = [(kind, None, _NONE)] * len(given) + found
    sources = iter(fill(where, [kind for kind, source, _ in found if source is None], columns))
    return placed, [(kind, next(sources) if source is None else source, own) for kind, source, own in found]


def fill(where: str, kinds: Sequence[str | None], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The next image of its column for each place.

    Args:
        where: where the example is, for errors.
        kinds: of the places.
        columns: the images, by kind.

    Raises:
        ValueError: there are more places than images, or fewer.
    """
    for kind in dict.fromkeys([*columns, *map(str, kinds)]):
        given = columns.get(kind, ())
        if kinds.count(kind) != len(given):
            raise ValueError(
                f"{where}: an example must have a place for each of its {len(given)} {kind}s, a part "
                f'{{"type": "{kind}"}} '
                f"or the model's placeholder, got {kinds.count(kind)}. Correct it."
            )
    queues = {kind: iter(given) for kind, given in columns.items()}
    return [next(queues[str(kind)]) for kind in kinds]


def _split_marks(text: str, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A text as parts, in which ``<image>`` stands for an image of a column that is not empty."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for kind in [kind for kind, given in columns.items() if given]:
        split = []
        for part in parts:
            pieces = part["text"].split(f"<{kind}>") if "text" in part else []
            split += [part] if not pieces else [{"type": "text", "text": pieces[0]}]
            for piece in pieces[1:]:
                split += [{"type": kind}, {"type": "text", "text": piece}]
        parts = split
    return [part for part in parts if part.get("text") != ""]


def _read_part(where: str, part: Any, kinds: Mapping[str, Any], bounds: bool) -> Found:
    """The image in a part of a message: "" as its kind if it has none, None as its spelling if it stands for one."""
    if not isinstance(part, Mapping):
        return "", None, _NONE
    present = {key: value for key, value in part.items() if value is not None}
    named = str(present.get("type", next((key for key in present if key.removesuffix("_url") in kinds), "")))
    kind = named.removesuffix("_url")
    if kind not in kinds:
        return "", None, _NONE
    taken = ("fps",) if kind == "video" else BOUNDS if bounds else ()
    own = {key: present[key] for key in taken if key in present}
    sizes = sorted(RESIZING & {*present} - {*own})
    if sizes:
        raise ValueError(
            f"{where}: a part of type {kind} must not have a size of its own, got {', '.join(sizes)}. Resize it first, "
            "or set bounds on the processor: processor.images.max_pixels = ..."
        )
    spellings = [present[key] for key in (kind, f"{kind}_url", "path", "url", "bytes") if key in present]
    return kind, spellings[0] if spellings else None, own


def open_media(where: str, found: Sequence[Found], processor: Processor | None) -> list[Medium]:
    """What `place_media` found, with what the headers say; see `Medium.open`."""
    sampled = {} if processor is None else {"video": processor.sampled}
    return [Medium.open(where, source, own, sampled.get(kind)) for kind, source, own in found]


def write_media(
    where: str, text: str, spans: Sequence[Span] | None, media: Sequence[Medium], processor: Processor
) -> tuple[str, list[Span] | None, list[int]]:
    """A text with the tokens of its images in place of their placeholders.

    Args:
        where: where the example is, for errors.
        text: as a chat template renders it.
        spans: of the answers in it; None for a text that is no chat.
        media: its images, in order.
        processor: of the model.

    Returns:
        The text, the spans in it, and the number of tokens of each image.

    Raises:
        ValueError: the placeholders in the text are not those of the images.
        BrokenMediaError: the processor takes no image of such a size.
    """
    places = list(processor.placeholder.finditer(text))
    kinds = [place.lastgroup for place in places]
    if kinds != [medium.size.kind for medium in media]:
        raise ValueError(
            f"{where}: a text must have a placeholder for each of its {len(media)} {_named(media)}, got {len(kinds)}. "
            "Does the chat template write them, or does a message have them by mistake?"
        )
    try:
        written = [processor.written(medium.size) for medium in media]
    except ValueError as error:
        raise BrokenMediaError(f"{where}: {error}") from error
    edits = [Edit(*place.span(), new) for place, (new, _) in zip(places, written, strict=True)]
    text, moved = edited(text, edits, spans or ())
    return text, None if spans is None else moved, [count for _, count in written]


def _named(media: Sequence[Medium]) -> str:
    return "images and videos" if any(medium.size.kind == "video" for medium in media) else "images"


def find_tokens(
    where: str, ids: Sequence[int], media: Sequence[Medium], counts: Sequence[int], tokens: set[int]
) -> list[Medium]:
    """The images with their first and last tokens in a document.

    Args:
        where: where the example is, for errors.
        ids: token ids of the document.
        media, counts: its images, and the number of tokens of each.
        tokens: ids of the tokens that stand for parts of images.

    Raises:
        ValueError: the document has another number of these tokens.
    """
    places = [place for place, id in enumerate(ids) if id in tokens]
    ends = [0, *accumulate(counts)]
    if len(places) != ends[-1]:
        raise ValueError(
            f"{where}: a document must have {ends[-1]} image tokens, got {len(places)}. Is it the model's tokenizer?"
        )
    return [
        replace(medium, first=places[start], end=places[end - 1] + 1)
        for medium, start, end in zip(media, ends, ends[1:], strict=False)
    ]


def keep_whole(media: Sequence[tuple[int, int]], length: int) -> int:
    """How many of the first ``length`` tokens of a document come before an image that does not end in them.

    Args:
        media: first token of each image, and the one after its last.
        length: number of tokens.
    """
    return next((first for first, end in media if first < length < end), length)
