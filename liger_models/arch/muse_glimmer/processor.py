"""The processor of Muse Glimmer, which turns text, images and videos into model inputs.

Source: transformers ``image_processing_muse_glimmer.py``, ``video_processing_muse_glimmer.py``,
``processing_muse_glimmer.py``.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_patches,
    each_once,
    image_settings,
    join,
    one_list,
    read_image,
    settings_of,
    slots_of_frame,
    to_tensor,
)
from liger_models.base.processor import MediaSize, Processor, TextOptions, check_tokens, image_tokens
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source

LANCZOS = 1
HALF = (0.5, 0.5, 0.5)
AROUND = ("<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>")
"""The tokens around an image, and the tokens before, between and after the frames of a video."""

LIMITS = {"image": ("max_image_tokens", 4096), "video": ("max_video_frame_tokens", 144)}
"""Maps each kind of input to a setting's name and default. The setting limits the tokens of an image or a video
frame."""


def token_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Choose the numbers of rows and columns of image tokens so that their ratio is closest to the image's aspect
    ratio.

    Args:
        height, width: size of the image in pixels.
        side: side, in pixels, of the square that becomes one image token.
        most: maximum number of tokens. Larger images are scaled down to this number.
    """
    high, wide = height / side, width / side
    ratio = wide / high
    if high * wide > most:
        high = (most / ratio) ** 0.5
        wide = high * ratio
    # Each side is rounded down or up. Of two equally close grids, the first one in the iteration order of the set is
    # taken, as in transformers.
    sides = (math.floor(high), math.ceil(high)), (math.floor(wide), math.ceil(wide))
    grids = [grid for grid in set(itertools.product(*sides)) if min(grid) >= 1 and math.prod(grid) <= most]
    if not grids:
        return max(1, round(high)), max(1, round(wide))
    return min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))


class MuseGlimmerImages:
    """Turns images or videos into patches. Images and frames are resized by Pillow.

    Args:
        settings: the content of preprocessor_config.json or video_preprocessor_config.json.
        kind: "image" or "video".

    Raises:
        ValueError: the settings request a feature that is not implemented, or a limit is not a positive integer.
    """

    def __init__(self, settings: Mapping[str, Any], kind: str = "image") -> None:
        check_settings(settings, do_resize=True, do_convert_rgb=True, resample=LANCZOS)
        self.kind = kind
        # The side of a patch in pixels, the side of a token in patches, and the number of frames in a patch.
        self.patch, self.merge, self.frames = (
            int(settings.get(key) or value)
            for key, value in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
        )
        name, otherwise = LIMITS[kind]
        self.max_tokens = settings.get(name) or otherwise
        if not (isinstance(self.max_tokens, int) and self.max_tokens > 0):
            raise ValueError(f"preprocessor_config.json: {name} must be a positive integer, got {self.max_tokens!r}.")
        self.as_read = self.max_tokens
        # How videos are sampled and written.
        self.fps, self.num_frames = float(settings.get("fps") or 2.0), int(settings.get("num_frames") or 96)
        self.time = settings.get("frame_timestamp_format") or "Time: {timestamp:.1f}s"
        self.normalize = Normalize(settings, HALF, HALF)

    def __repr__(self) -> str:
        return f"MuseGlimmerImages(kind={self.kind!r}, max_tokens={self.max_tokens}, patch={self.patch})"

    def tokens(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of rows and columns of tokens for an image or frame of the given width and height."""
        return token_grid(size[1], size[0], self.patch * self.merge, self.max_tokens)

    def __call__(self, frames: "Sequence[Source]") -> tuple[Tensor, Tensor]:
        """Cut an image, or the frames of a video, into patches.

        A patch spans several frames. If the frames do not fill the last patches, the last frame is repeated.

        Args:
            frames: the frames of a video (all of one size) or a single image, given as PIL images or anything that
                `locate_image` takes.

        Returns:
            ``(patches, grid)``: the patches [frames · rows · columns, depth · 3 · side · side] fp32, where depth is the
            number of frames per patch; and the grid [3] int64, which holds frames, rows and columns.

        Raises:
            ValueError: there are no frames, or frames differ in size.
        """
        images = [read_image(frame) for frame in frames]
        sizes = sorted({image.size for image in images})
        if len(sizes) != 1:
            raise ValueError(
                f"MuseGlimmerImages: a video must have at least one frame, and all frames one size, got {sizes}."
            )
        rows, columns = (count * self.merge for count in self.tokens(sizes[0]))
        size = (rows * self.patch, columns * self.patch)
        T = len(images)
        out = torch.empty(
            -(-T // self.frames), rows * columns, self.frames, 3, self.patch**2, dtype=torch.float32, device="cpu"
        )
        for number, image in enumerate(images):
            cut = cut_patches(to_tensor(image, size, LANCZOS), self.patch, self.patch)  # [rows · columns, 3, side²]
            slots = slots_of_frame(number, T, self.frames)
            self.normalize.write(cut, *(out[number // self.frames, :, slot] for slot in slots))
        return out.flatten(0, 1).flatten(1), torch.tensor([len(out), rows, columns], device="cpu")

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """See `Processor.sampled`. The frames are evenly spaced from the first to the last frame."""
        if wanted is not None and not (isinstance(wanted, int | float) and 0 < wanted < math.inf):
            raise ValueError(f"MuseGlimmerImages: fps must be a positive number of frames per second, got {wanted!r}.")
        count = min(int(frames * (wanted or self.fps) / fps), self.num_frames, frames)
        count = min(max(self.frames, count // self.frames * self.frames), frames)
        numbers: list[int] = torch.linspace(0, frames - 1, count, dtype=torch.float32, device="cpu").long().tolist()
        return numbers


class MuseGlimmerProcessor(Processor):
    """Turns images, videos, and texts with placeholders for them into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images, videos: converters that turn images and videos into patches. Lower a converter's ``max_tokens`` to get
            fewer image tokens.
        image, video: the tokens that represent a part of an image and a part of a video. In a text, these tokens are
            the placeholders.

    Raises:
        ValueError: the tokenizer lacks the tokens around images and videos.
    """

    takes_videos = True

    def __init__(
        self, tokenizer: Tokenizer, images: MuseGlimmerImages, videos: MuseGlimmerImages, *, image: str, video: str
    ) -> None:
        super().__init__(tokenizer)
        check_tokens("MuseGlimmerProcessor", tokenizer, AROUND)
        self.images, self.videos, self.image, self.video = images, videos, image, video

    @classmethod
    def of(cls, model: CausalLM) -> "MuseGlimmerProcessor":
        """See `Processor.of`."""
        config, vision = model.config, model.config.vision_config
        videos = settings_of(model.assets, "video_processor")
        image, video = image_tokens(
            "MuseGlimmerProcessor", model.tokenizer, (config.image_token_id, config.video_token_id)
        )
        images = image_settings(model.assets)
        sizes = {
            "patch_size": vision.patch_size,
            "merge_size": vision.merge_size,
            "temporal_patch_size": vision.patch_temporal,
        }
        for settings in (images, videos):
            check_settings(settings, **sizes)
        return cls(
            model.tokenizer,
            MuseGlimmerImages(images | sizes),
            MuseGlimmerImages(videos | sizes, "video"),
            image=image,
            video=video,
        )

    def _described(self) -> str:
        return f"images={self.images}, videos={self.videos}"

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        videos: "Sequence[Sequence[Source]] | None" = (),
        fps: float | Sequence[float | None] | None = None,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts, and their images and videos in the order of the placeholders, into model inputs.

        Args:
            texts: one text or several, with one placeholder per image or video, as written by the chat template.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            videos: the sampled frames of each video. All frames of a video have one size.
            fps: sampled frames per second, from which the timestamps are computed: one number for all videos, or one
                for each video.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also ``pixel_values`` [N, P] and
            ``image_grid_thw`` [images, 3]; if there are videos, also ``pixel_values_videos`` and ``video_grid_thw``.

        Raises:
            ValueError: the number of placeholders does not match the number of images or videos, ``fps`` is missing or
                not positive, a video is not a list of frames, or image tokens do not fit into ``max_length``.
        """
        texts, videos = self.texts(texts, options), () if videos is None else videos
        rates = list(fps) if isinstance(fps, Sequence) else [fps] * len(videos)
        if len(rates) != len(videos) or not all(rate is not None and rate > 0 for rate in rates):
            raise ValueError(
                f"MuseGlimmerProcessor: fps must be a positive number, or one for each of the {len(videos)} videos, "
                f"got {fps}. The times of frames are part of the text."
            )
        for frames in videos:
            if not isinstance(frames, Sequence) or isinstance(frames, str | bytes):
                raise ValueError(
                    f"MuseGlimmerProcessor: a video must be a list of images, its frames, got {type(frames).__name__}. "
                    "Decode video files first."
                )
        count = sum(text.count(self.video) for text in texts)
        if count != len(videos):
            raise ValueError(
                f"MuseGlimmerProcessor: the texts must have one {self.video} for each of the {len(videos)} videos, got "
                f"{count}."
            )
        pictures = each_once(read_image, one_list("MuseGlimmerProcessor", self.image, texts, images))
        clips: list[list[Image]] = [each_once(read_image, video) for video in videos]
        # Compute the pixels. This also checks the frames of videos. Then write the text that replaces each placeholder.
        out = self.pixels(pictures, clips)
        sizes = [MediaSize(*image.size) for image in pictures]
        sizes += [MediaSize(*clip[0].size, len(clip), rate) for clip, rate in zip(clips, rates, strict=True)]
        written = {kind: [self.written(size)[0] for size in sizes if size.kind == kind] for kind in self.placeholders}
        return self.encode(texts, self.replace(texts, **written), **cast(Any, options)) | out

    @property
    def placeholders(self) -> dict[str, str]:
        """See `Processor.placeholders`."""
        return {"image": re.escape(self.image), "video": re.escape(self.video)}

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """See `Processor.media_tokens`."""
        return self.image, self.video

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`. In a video, the tokens of each group of frames that share patches follow the time of
        the group's first frame."""
        begin, end, video_begin, between, video_end = AROUND
        if size.frames is None:
            count = math.prod(self.images.tokens((size.width, size.height)))
            return f"{begin}{self.image * count}{end}", count
        make = self.videos
        count = math.prod(make.tokens((size.width, size.height)))
        # A patch spans several frames, and has the time of the first frame.
        numbers, rate = (range(size.frames), size.fps) if size.numbers is None else (size.numbers, size.file_fps)
        times = [number / float(rate or 1) for number in numbers[:: make.frames]]
        frames = [make.time.format(timestamp=time) + self.video * count for time in times]
        return f"{video_begin}{between.join(frames)}{video_end}", count * len(times)

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """See `Processor.sampled`."""
        return self.videos.sampled(frames, fps, wanted)

    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """See `Processor.pixels`; the results have the same names as in ``__call__``."""
        out: dict[str, Tensor] = {}
        for kind, name, pairs in (
            ("image", "pixel_values", each_once(lambda image: self.images([image]), images)),
            ("video", "pixel_values_videos", [self.videos(frames) for frames in videos]),
        ):
            if pairs:
                out[name] = join([patches for patches, _ in pairs])
                out[f"{kind}_grid_thw"] = torch.stack([grid for _, grid in pairs])
        return out

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the arguments of ``__call__`` besides the texts: the images, videos and settings in the result of
        `image_parts`."""
        videos = [(video, part.get("fps")) for kind, video, part in parts if kind == "video"]
        return {
            "images": [image for kind, image, _ in parts if kind == "image"],
            "videos": [video for video, _ in videos],
            "fps": [fps for _, fps in videos],
        }

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """Return the token limits that were changed after loading."""
        parts = {"image_processor": self.images, "video_processor": self.videos}
        return {
            part: {LIMITS[make.kind][0]: make.max_tokens}
            for part, make in parts.items()
            if make.max_tokens != make.as_read
        }
