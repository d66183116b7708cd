"""The processor of GLM-4.1V and GLM-4.5V, which turns text, images and videos into model inputs.

Differs from the processor of Qwen3-VL: an image is repeated to fill all frames that a patch spans, and each repetition
counts toward the bounds on the image's area. Video frames have the same placeholder as images, and each pair of frames
is followed by the time of its first frame in whole seconds. Video files are sampled by time, at a fixed rate.

Source: transformers ``image_processing_pil_glm4v.py``, ``video_processing_glm4v.py``, ``processing_glm4v.py``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.arch._qwen_vl.processor import CLIP_MEAN, CLIP_STD, QwenVLImages, QwenVLProcessor

CLIP = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
LEAST_PIXELS = 112 * 112
MOST_PIXELS = {"image": 28 * 28 * 15000, "video": 28 * 28 * 2 * 30000}
MAX_DURATION = 300
"""The default of ``max_duration``, in seconds. From longer videos, a fixed number of frames is sampled."""


class Glm4vVideos(QwenVLImages):
    """Turns videos into patches; see `QwenVLImages`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        most = MOST_PIXELS["video"]
        super().__init__({**CLIP, **settings}, min_pixels=LEAST_PIXELS, max_pixels=most, of="video")
        self.max_duration = float(settings.get("max_duration") or MAX_DURATION)

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """See `Processor.sampled`. The number of indices is even. If necessary, the last index is repeated."""
        self.check_rate(wanted)
        rate, duration = wanted or self.fps, frames / fps
        # The index of each sampled frame, before it is rounded up. From videos beyond `max_duration`, a fixed number of
        # frames is sampled.
        most = max(int(self.max_duration * rate), 1)
        if duration <= self.max_duration:
            exact = [index * fps / rate for index in range(max(math.floor(duration * rate), 1))]
        elif most >= frames:
            exact = [float(index) for index in range(frames)]
        else:
            exact = [index * (duration / max(most - 1, 1)) * fps for index in range(most)]
        # Sample no frame twice. Only the last frame may be repeated.
        numbers = list(dict.fromkeys(min(math.ceil(number), frames - 1) for number in exact))
        return numbers + numbers[-1:] * (len(numbers) % 2)


class Glm4vProcessor(QwenVLProcessor):
    """Turns images, videos, and texts with placeholders for them into the inputs of ``forward`` and ``generate``."""

    @classmethod
    def makers(
        cls, images: Mapping[str, Any], videos: Mapping[str, Any], frames_apart: bool
    ) -> tuple[QwenVLImages, QwenVLImages]:
        """See `QwenVLProcessor.makers`."""
        bounds = {"min_pixels": LEAST_PIXELS, "max_pixels": MOST_PIXELS["image"]}
        return QwenVLImages({**CLIP, **images}, of="repeated image", **bounds), Glm4vVideos(videos)

    @property
    def placeholders(self) -> dict[str, str]:
        """See `Processor.placeholders`. The expression for a video matches only the placeholder, so the tokens around
        it are not replaced."""
        return {"image": re.escape(self.image_token), "video": re.escape(self.video_token)}

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """See `Processor.media_tokens`."""
        return (self.image_token,)

    def _timed(self, frame: str, numbers: Sequence[int], rate: float) -> str:
        """Return the text that stands for a video. For each group of frames that share patches, the text contains
        ``frame``, followed by the time of the group's first frame in whole seconds."""
        seconds = [int(number / rate) for number in numbers[:: self.videos.frames]]
        return "".join(f"<|begin_of_image|>{frame}<|end_of_image|>{second}" for second in seconds)
