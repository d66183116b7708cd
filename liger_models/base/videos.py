"""Functions that read the header and selected frames of video files."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image


class VideoHeader(NamedTuple):
    """The properties of a video file's first video stream.

    Attributes:
        width, height: size of a frame in pixels.
        frames: number of frames.
        fps: mean number of frames per second.
    """

    width: int
    height: int
    frames: int
    fps: float


def read_header(source: Path | bytes) -> VideoHeader:
    """Read the frame size, the number of frames and the frame rate of a video without decoding it.

    If the container does not store the number of frames (Matroska, WebM), the whole file is read to count its packets.

    Args:
        source: the path or the content of a file.

    Raises:
        ImportError: PyAV is not installed.
        OSError: there is no such file.
        ValueError: the file is not a video.
    """
    with _opened(source) as (container, stream):
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        if not (bool(rate) and min(stream.width, stream.height, frames) > 0):
            raise ValueError(
                f"a video with frames and their rate is needed, not {frames} frames of {stream.width} x "
                f"{stream.height} at {rate} per second"
            )
        return VideoHeader(stream.width, stream.height, frames, float(rate))


def read_frames(source: Path | bytes, numbers: Sequence[int]) -> "list[Image]":
    """Read selected frames of a video as RGB images. A rotation in the header is not applied.

    Args:
        source: the path or the content of a file.
        numbers: indices of the frames, from 0, in ascending order. An index may repeat.

    Raises:
        ImportError, OSError: as for `read_header`.
        ValueError: as for `read_header`, or the video ends before the last frame in ``numbers``.
    """
    images: dict[int, Image] = {}
    with _opened(source) as (container, stream):
        selected = set(numbers)
        for number, frame in enumerate(container.decode(stream)):
            if number in selected:
                images[number] = frame.to_image()
            if number >= numbers[-1]:  # later frames need not be decoded
                break
        if len(images) != len(selected):
            raise ValueError(f"its frame {numbers[-1]} is missing")
    return [images[number] for number in numbers]


@contextlib.contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[Any, Any]]:
    """Context manager that yields the container and its first video stream, and raises the errors that `read_header`
    documents."""
    try:
        import av
    except ImportError as error:
        raise ImportError(
            "read_video: needs PyAV, which is not installed. Run pip install 'liger_models[video]'."
        ) from error
    name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    if isinstance(source, Path):
        source.stat()  # a missing file is an OSError
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        with av.open(file, options={"protocol_whitelist": "file"}) as container:  # a playlist may name URLs
            if not container.streams.video:
                raise ValueError("it has no video stream")
            yield container, container.streams.video[0]
    except ImportError:
        raise
    except Exception as error:  # FFmpeg's errors have many classes
        raise ValueError(f"read_video: {name} must be a whole video file, got: {error}.") from error
