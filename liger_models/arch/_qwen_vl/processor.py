"""The processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4.1V, which turns text, images and videos into model inputs.

Source: transformers ``image_processing_pil_qwen2_vl.py``, ``video_processing_qwen3_vl.py``, ``processing_qwen3_vl.py``.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
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
from liger_models.base.processor import MediaSize, Processor, TextOptions
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BICUBIC = 3
MOST_ELONGATED = 200


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return the nearest size whose sides are multiples of ``factor`` and whose area is within the bounds.

    Args:
        height, width: size of the image in pixels.
        factor: side, in pixels, of the square that becomes one image token.
        min_pixels, max_pixels: bounds of the area; for a video, bounds of the total area of all frames.
        frames: number of frames, and the same number rounded to a multiple of the frames per token.

    Returns:
        ``(height, width)``.

    Raises:
        ValueError: one side of the image is more than 200 times as long as the other.
    """
    longer, shorter = max(height, width), min(height, width)
    if not longer <= MOST_ELONGATED * shorter:
        raise ValueError(
            f"smart_resize: an image must be at most {MOST_ELONGATED} times as long as wide, got {height} x {width}."
        )
    exact, rounded = frames
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if rounded * high * wide > max_pixels:
        shrink = math.sqrt(exact * height * width / max_pixels)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if rounded * high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (exact * height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return high, wide


BOUNDS = ("image", "repeated image", "frame", "video")
FPS = 2.0
"""Frames per second to sample if the settings have no ``fps``. The authors' qwen_vl_utils has the same default."""


class QwenVLImages:
    """Turns images or videos into patches.

    As in transformers, images are resized by Pillow, and video frames are resized by torch, which is the only library
    that the video processors of transformers support. For noisy pictures, Pillow and torch produce pixel values that
    differ by a few levels out of 256.

    Args:
        settings: the content of preprocessor_config.json or video_preprocessor_config.json.
        min_pixels, max_pixels: bounds of the area, used if the settings have none.
        of: what the bounds apply to: "image" for the area of an image; "repeated image" for the total area of all
            repetitions of an image in a patch (GLM-4.1V); "frame" for the area of each frame of a video; "video" for
            the total area of all frames (Qwen3-VL).

    Raises:
        ValueError: the settings request a feature that is not implemented.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, min_pixels: int = 3136, max_pixels: int = 1003520, of: str = "image"
    ) -> None:
        if of not in BOUNDS:
            raise ValueError(f"QwenVLImages: of must be one of {BOUNDS}, got {of!r}.")
        check_settings(settings, do_resize=True, do_convert_rgb=True, resample=BICUBIC)
        size, edges = settings.get("size") or {}, {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        if size and not all(settings.get(bound) or size.get(edge) for bound, edge in edges.items()):
            raise ValueError(
                f"preprocessor_config.json: size must have {' and '.join(edges.values())}, in pixels of area, got "
                f"{size}."
            )
        # The side of a patch in pixels, the side of a token in patches, and the number of frames in a patch.
        self.patch, self.merge, self.frames = (
            int(settings.get(key) or value)
            for key, value in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
        )
        # The names of the bounds depend on the version of transformers. Some of the following settings are only for
        # videos.
        self.min_pixels = settings.get("min_pixels") or size.get("shortest_edge") or min_pixels
        self.max_pixels = settings.get("max_pixels") or size.get("longest_edge") or max_pixels
        self.as_read = self.min_pixels, self.max_pixels
        self.of, self.caps = of, bool(settings.get("cap_pixels_per_frame"))
        self.most_tokens = settings.get("max_video_tokens") or (768 if of == "video" else 128000)
        # How videos are sampled.
        self.fps = float(settings.get("fps") or FPS)
        self.num_frames = settings.get("num_frames")
        self.least_frames = int(settings.get("min_frames") or 4)
        self.most_frames = int(settings.get("max_frames") or 768)
        self.normalize = Normalize(settings, *((HALF, HALF) if of == "video" else (CLIP_MEAN, CLIP_STD)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(of={self.of!r}, min_pixels={self.min_pixels}, max_pixels={self.max_pixels}, "
            f"patch={self.patch}, merge={self.merge}, frames={self.frames})"
        )

    def __call__(
        self, frames: "Sequence[Source]", min_pixels: int | None = None, max_pixels: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cut an image, or the frames of a video, into patches.

        A patch spans several frames, so an image is repeated to fill the frames of a patch. If the number of frames of
        a video is not a multiple of the frames per patch, the last frame is repeated.

        Args:
            frames: the frames of a video (all of one size) or a single image, given as PIL images or anything that
                `locate_image` takes.
            min_pixels, max_pixels: bounds of this image's area; by default the bounds for all images.

        Returns:
            ``(patches, grid)``: the patches [frames · rows · columns, 3 · depth · side · side] fp32, where depth is the
            number of frames per patch; and the grid [3] int64, which holds frames, rows and columns.

        Raises:
            ValueError: there are too few frames, frames differ in size, or the bounds allow no size.
        """
        images = [read_image(frame) for frame in frames]
        if not images:
            raise ValueError("QwenVLImages: a video must have at least one frame, got none.")
        sizes = sorted({image.size for image in images})
        if len(sizes) != 1:
            raise ValueError(f"QwenVLImages: the frames of a video must have one size, got {sizes}.")
        count = len(images)
        size = self.resized(*images[0].size, count, min_pixels, max_pixels)
        if self.of in ("image", "repeated image"):
            resized = to_tensor(images[0], size, BICUBIC)[None]
        else:
            original = images[0].size[::-1]
            resized = torch.stack([to_tensor(image, original, BICUBIC) for image in images])
            resized = F.interpolate(resized, size, mode="bicubic", antialias=True)  # in uint8
        return self._patches(resized)

    def resized(
        self,
        width: int,
        height: int,
        count: int = 1,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> tuple[int, int]:
        """Return the height and width to which an image or ``count`` video frames of the given size are resized.

        Raises:
            ValueError: there are too few frames, frames are too elongated, or the bounds allow no size.
        """
        factor, whole = self.patch * self.merge, self.of in ("repeated image", "video")
        count = self.frames if self.of == "repeated image" else count
        if not count >= self.frames and whole:
            raise ValueError(
                f"QwenVLImages: a video must have at least {self.frames} frames, got {count}. Pass an image as an "
                "image."
            )
        bounds = [bound for bound in (min_pixels, max_pixels) if bound is not None]
        if not all(isinstance(bound, int) and bound > 0 for bound in bounds) or bounds != sorted(bounds):
            raise ValueError(
                "QwenVLImages: min_pixels and max_pixels must be positive numbers of pixels, the second at least the "
                f"first, got {min_pixels!r} and {max_pixels!r}."
            )
        # The area of a video is the total area of all frames. The number of frames is rounded to a multiple of the
        # frames per token.
        deep = (count, round(count / self.frames) * self.frames) if whole else (1, 1)
        if whole and min(height, width) < factor:
            scale = factor / min(height, width)
            height, width = int(height * scale), int(width * scale)
        least = self.min_pixels if min_pixels is None else min_pixels
        most = self._most_pixels(count) if max_pixels is None else max_pixels
        return smart_resize(height, width, factor, least, most, deep)

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """See `Processor.sampled`. The frames are evenly spaced, beginning with the first frame. In Qwen3-VL, the last
        of them is the last frame of the file."""
        self.check_rate(wanted)
        whole, most = self.of == "video", min(self.most_frames, frames)
        # The number of frames is fixed, or computed from the rate and clamped to the limits. Except in Qwen3-VL, this
        # number is a multiple of the frames per patch.
        if wanted is None and self.num_frames:
            depth = 1 if whole else self.frames
            count = min(round(self.num_frames / depth), frames // depth) * depth
        elif whole:
            count = min(max(int(frames / fps * (wanted or self.fps)), self.least_frames), most)
        else:
            most = most // self.frames * self.frames
            count = int(min(max(frames / fps * (wanted or self.fps), self.least_frames), most))
            count = count // self.frames * self.frames
        if not count >= self.frames:
            raise ValueError(
                f"QwenVLImages: a video must have at least {self.frames} frames, got {count} of {frames}. Pass an "
                "image as an image."
            )
        if whole:
            # Evenly spaced from the first frame to the last one.
            step = (frames - 1) / (count - 1)
            return [round(index * step) for index in range(count)]
        numbers: list[int] = torch.arange(0, frames, frames / count, dtype=torch.float32, device="cpu").int().tolist()
        return numbers

    def check_rate(self, wanted: float | None) -> None:
        """Raise ValueError unless the wanted sampling rate is None or a positive number."""
        if wanted is not None and not (isinstance(wanted, int | float) and 0 < wanted < math.inf):
            raise ValueError(
                f"{type(self).__name__}: fps must be a positive number of frames per second, got {wanted!r}."
            )

    def bounds(self) -> dict[str, Any]:
        """Return the bounds of the area as settings, under the names that the different versions of transformers
        read."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return bounds | {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}

    def _most_pixels(self, count: int) -> int:
        """Return the largest area, in pixels, that an image or ``count`` video frames may have.

        If ``cap_pixels_per_frame`` is set, the frames of a video share a budget of tokens.
        """
        if not self.caps:
            return self.max_pixels
        budget, least = self.most_tokens * (self.patch * self.merge) ** 2, int(self.min_pixels * 1.05)
        if self.of == "video":
            return max(min(budget, self.max_pixels // count), least) * count
        return max(min(self.max_pixels, int(budget * 0.9) * self.frames // count), least)

    def _patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Cut frames [T, 3, height, width] uint8 into normalized patches. The patches of one token are adjacent."""
        T, (rows, columns) = len(pixels), (length // self.patch for length in pixels.shape[2:])
        out = torch.empty(
            -(-T // self.frames), rows * columns, 3, self.frames, self.patch**2, dtype=torch.float32, device="cpu"
        )
        for number, frame in enumerate(pixels):
            cut = cut_patches(frame, self.patch, self.patch, self.merge)  # [rows · columns, 3, side · side]
            slots = slots_of_frame(number, T, self.frames)
            self.normalize.write(cut, *(out[number // self.frames, :, :, slot] for slot in slots))
        return out.flatten(0, 1).flatten(1), torch.tensor([len(out), rows, columns], device="cpu")


class QwenVLProcessor(Processor):
    """Turns images, videos, and texts with placeholders for them into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images, videos: converters that turn images and videos into patches.
        image_token, video_token: the placeholder tokens.
        frames_apart: whether the text contains the tokens of each frame of a video separately, with its timestamp
            (Qwen3-VL).
        times: whether the seconds between frames are passed to the model (Qwen2.5-VL).
    """

    takes_videos = True
    takes_bounds = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        images: QwenVLImages,
        videos: QwenVLImages,
        *,
        image_token: str,
        video_token: str,
        frames_apart: bool = False,
        times: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        self.images, self.videos = images, videos
        self.image_token, self.video_token = image_token, video_token
        self.frames_apart, self.times = frames_apart, times

    @classmethod
    def of(cls, model: CausalLM) -> "QwenVLProcessor":
        """See `Processor.of`."""
        vision, config = model.config.vision_config, model.config
        # Look up the texts of the placeholders.
        ids = config.image_token_id, config.video_token_id
        image, video = (model.tokenizer.backend.id_to_token(token) or "" for token in ids)
        if image == "" or video == "":
            raise ValueError(
                f"{cls.__name__}: the tokenizer must have the placeholders' ids {ids[0]} and {ids[1]}, got "
                f"{len(model.tokenizer)} tokens. Use the tokenizer of the checkpoint."
            )
        images, videos = image_settings(model.assets), settings_of(model.assets, "video_processor")
        sizes = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }
        for name, settings in (("preprocessor_config.json", images), ("video_preprocessor_config.json", videos)):
            wrong = {key: settings[key] for key, value in sizes.items() if settings.get(key, value) != value}
            if wrong:
                raise ValueError(
                    f"{name}: must have the model's {sizes}, got {wrong}. Take the files of one checkpoint."
                )

        apart: bool = cast(Any, model).frames_apart
        return cls(
            model.tokenizer,
            *cls.makers(sizes | images, sizes | (videos or images), apart),
            image_token=image,
            video_token=video,
            frames_apart=apart,
            times=hasattr(vision, "tokens_per_second"),
        )

    @classmethod
    def makers(
        cls, images: Mapping[str, Any], videos: Mapping[str, Any], frames_apart: bool
    ) -> tuple[QwenVLImages, QwenVLImages]:
        """Create two converters from their settings, one for images and one for videos."""
        # The default bounds of videos differ from those of images. They depend on whether frames are written
        # separately.
        least, most = (131072, 786432) if frames_apart else (100352, 602112)
        of = "video" if frames_apart else "frame"
        return QwenVLImages(images), QwenVLImages(videos, min_pixels=least, max_pixels=most, of=of)

    def _described(self) -> str:
        return f"images={self.images}, videos={self.videos}"

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        videos: "Sequence[Sequence[Source]] | None" = (),
        fps: float | Sequence[float | None] | None = None,
        min_pixels: int | Sequence[int | None] | None = None,
        max_pixels: int | Sequence[int | None] | None = None,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts, and their images and videos in the order of the placeholders, into model inputs.

        Args:
            texts: one text or several, with one placeholder per image or video, as written by the chat template.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            videos: the sampled frames of each video. All frames of a video have one size.
            fps: sampled frames per second of each video. Models that use the times of frames, such as Qwen2.5-VL and
                Qwen3-VL, require this argument.
            min_pixels, max_pixels: bounds of an image's area after resizing: one number for all images, or one number
                per image. None stands for the processor's bound, such as ``processor.images.max_pixels``.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also ``pixel_values`` [N, P] and
            ``image_grid_thw`` [images, 3]; if there are videos, also ``pixel_values_videos``, ``video_grid_thw`` and,
            for Qwen2.5-VL, ``second_per_grid_ts``.

        Raises:
            ValueError: the number of placeholders does not match the number of images or videos, a required ``fps`` is
                missing, a video is not a list of frames, or image tokens do not fit into ``max_length``.
        """
        texts, videos = self.texts(texts, options), () if videos is None else videos
        rates = list(fps) if isinstance(fps, Sequence) else [fps] * len(videos)
        if len(rates) != len(videos):
            raise ValueError(
                f"{type(self).__name__}: fps must be one, or one for each of the {len(videos)} videos, got "
                f"{len(rates)}."
            )
        if not all(rate is None or rate > 0 for rate in rates):
            raise ValueError(
                f"{type(self).__name__}: fps must be positive, got {[rate for rate in rates if rate is not None]}."
            )
        if None in rates and (self.frames_apart or self.times):
            raise ValueError(
                f"{type(self).__name__}: fps must be given with videos, because this model uses the times of their "
                "frames."
            )
        for frames in videos:
            if not isinstance(frames, Sequence) or isinstance(frames, str | bytes):
                raise ValueError(
                    f"{type(self).__name__}: a video must be a list of images, its frames, got "
                    f"{type(frames).__name__}. Decode video files first."
                )
        count = sum(text.count(self.video_token) for text in texts)
        if count != len(videos):
            raise ValueError(
                f"{type(self).__name__}: the texts must have one {self.video_token} for each of the {len(videos)} "
                f"videos, got {count}."
            )
        # Bounds for each image.
        listed = one_list(type(self).__name__, self.image_token, texts, images)
        bounds = [
            [bound] * len(listed) if bound is None or isinstance(bound, int) else list(bound)
            for bound in (min_pixels, max_pixels)
        ]
        if not all(len(bound) == len(listed) for bound in bounds):
            raise ValueError(
                f"{type(self).__name__}: min_pixels and max_pixels must be one number, or one for each of the "
                f"{len(listed)} images, got {' and '.join(str(len(bound)) for bound in bounds)}."
            )
        # The patches of all images and videos.
        pictures: list[Image] = each_once(read_image, listed)
        clips: list[list[Image]] = [each_once(read_image, video) for video in videos]
        out: dict[str, Any] = self.pixels(pictures, clips, [float(rate or 0) for rate in rates], bounds)
        if "second_per_grid_ts" in out:
            out["second_per_grid_ts"] = out["second_per_grid_ts"].tolist()  # as in transformers
        sizes = [
            MediaSize(image.width, image.height, min_pixels=least, max_pixels=most)
            for image, least, most in zip(pictures, *bounds, strict=True)
        ]
        sizes += [MediaSize(*clip[0].size, len(clip), rate) for clip, rate in zip(clips, rates, strict=True)]
        # Each placeholder in the texts becomes the tokens of the next image or video of its kind.
        written = {kind: [self.written(size)[0] for size in sizes if size.kind == kind] for kind in self.placeholders}
        edits = self.replace(texts, **written)
        return self.encode(texts, edits, **cast(Any, options)) | out

    @property
    def placeholders(self) -> dict[str, str]:
        """See `Processor.placeholders`. If frames have timestamps, the tokens around a video's placeholder are replaced
        together with the placeholder."""
        image, video = re.escape(self.image_token), re.escape(self.video_token)
        wrapped = re.escape(f"<|vision_start|>{self.video_token}<|vision_end|>")
        return {"image": image, "video": f"{wrapped}|{video}" if self.frames_apart else video}

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """See `Processor.media_tokens`. The first token stands for parts of an image, and the second for parts of a
        video."""
        return self.image_token, self.video_token

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        make, token = (self.images, self.image_token) if size.frames is None else (self.videos, self.media_tokens[-1])
        height, width = make.resized(*size[:2], size.frames or 1, size.min_pixels, size.max_pixels)
        per_frame = height * width // (make.patch * make.merge) ** 2
        deep = -(-(size.frames or 1) // make.frames)
        if size.frames is None or not self.frames_apart:
            return token * per_frame * deep, per_frame * deep
        numbers, rate = (range(size.frames), size.fps) if size.numbers is None else (size.numbers, size.file_fps)
        return self._timed(token * per_frame, numbers, float(rate or 0)), per_frame * deep

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
        """See `Processor.pixels`; the results have the same names as in ``__call__``.

        If images have their own bounds, ``bounds`` consists of two lists, the images' ``min_pixels`` and their
        ``max_pixels``.
        """
        out: dict[str, Tensor] = {}
        of_image: Callable[..., Any] = lambda image, *image_bounds: self.images([image], *image_bounds)
        for kind, names, pairs in (
            ("image", "pixel_values", each_once(of_image, images, *bounds)),
            ("video", "pixel_values_videos", [self.videos(frames) for frames in videos]),
        ):
            if pairs:
                out[names] = join([patches for patches, _ in pairs])
                out[f"{kind}_grid_thw"] = torch.stack([grid for _, grid in pairs])
        if videos and self.times:
            out["second_per_grid_ts"] = self.videos.frames / torch.tensor(fps, dtype=torch.float64, device="cpu")
        return out

    def _timed(self, frame: str, numbers: Sequence[int], rate: float) -> str:
        """Return the text that stands for a video. For each group of frames that share patches, the text contains a
        timestamp, followed by ``frame``.

        The timestamp is the mean of the times of the group's first and last frame.
        """
        depth = self.videos.frames
        seconds = [number / rate for number in (*numbers, *([numbers[-1]] * (-len(numbers) % depth)))]
        times = [(seconds[i] + seconds[i + depth - 1]) / 2 for i in range(0, len(seconds), depth)]
        return "".join(f"<{time:.1f} seconds><|vision_start|>{frame}<|vision_end|>" for time in times)

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the arguments of ``__call__`` besides the texts: the images, videos and settings in the result of
        `image_parts`."""
        videos = [(video, part.get("fps")) for kind, video, part in parts if kind == "video"]
        images = [(image, part) for kind, image, part in parts if kind == "image"]
        return {
            "images": [image for image, _ in images],
            "min_pixels": [part.get("min_pixels") for _, part in images],
            "max_pixels": [part.get("max_pixels") for _, part in images],
            "videos": [video for video, _ in videos],
            "fps": [fps for _, fps in videos],
        }

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """Return the bounds of images and videos if any bound was changed, and {} otherwise."""
        parts = {"image_processor": self.images, "video_processor": self.videos}
        return {part: images.bounds() for part, images in parts.items()} if any(map(_changed, parts.values())) else {}


def _changed(images: QwenVLImages) -> bool:
    return images.as_read != (images.min_pixels, images.max_pixels)
