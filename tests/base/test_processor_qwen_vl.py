import itertools
import math

import pytest
import torch

from liger_models.arch._glm4v.processor import Glm4vProcessor
from liger_models.arch._qwen_vl.processor import CLIP_MEAN, CLIP_STD, QwenVLImages, smart_resize
from liger_models.base.images import to_tensor

from ..late import Late
from ..oracle_version import needs_newest
from .conftest import around, encoded, make_model, picture

theirs = Late("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "a transformers with a Pillow backend")
glm4v = Late("transformers.models.glm4v.image_processing_pil_glm4v", "a transformers with GLM-4.1V")

SIZES = [(40, 56), (97, 31), (300, 211), (33, 640), (5, 7), (1, 100)]
SETTINGS = {
    "qwen2-vl": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
    "small": {"patch_size": 4, "size": {"shortest_edge": 512, "longest_edge": 4096}},
    "qwen3-vl": {
        "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    },
    "merge 3": {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 1, "size": None},
}  # fmt: skip


@needs_newest("resizing of these bits")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_patches_are_transformers_bit_for_bit(settings):
    ours = QwenVLImages(settings)
    processor = theirs.Qwen2VLImageProcessorPil(**settings)
    assert_same_patches(ours, processor)


def assert_same_patches(ours, processor):
    """The images have odd sizes, and some have other modes than RGB."""
    images = [picture(width, height, seed=width) for height, width in SIZES] + [picture(50, 60, "RGBA")]
    images += [picture(40, 28, mode) for mode in ("L", "CMYK")] + [picture(50, 20).convert("P")]
    want = processor(images, return_tensors="pt")
    patches, grids = zip(*(ours([image]) for image in images), strict=True)
    assert torch.equal(torch.stack(grids), want["image_grid_thw"])
    assert torch.equal(torch.cat(patches), want["pixel_values"])
    for image, grid in zip(images, grids, strict=True):
        assert ours.resized(*image.size) == (grid[1] * ours.patch, grid[2] * ours.patch)


@needs_newest("resizing of these bits")
@pytest.mark.parametrize("settings", [{}, SETTINGS["small"], SETTINGS["merge 3"] | {"temporal_patch_size": 2}], ids=str)
def test_patches_of_glm4v_are_transformers_bit_for_bit(settings):
    settings = {key: value for key, value in settings.items() if value is not None}
    ours, _ = Glm4vProcessor.makers(settings, {}, True)
    assert_same_patches(ours, glm4v.Glm4vImageProcessorPil(**settings))


def test_sizes_of_glm4v_are_transformers():
    images, videos = Glm4vProcessor.makers({}, {}, True)
    tokens = {(640, 480): 391, (1920, 1080): 2691, (200, 150): 35}
    assert {size: math.prod(images.resized(*size)) // 28**2 for size in tokens} == tokens
    for height, width in itertools.product(range(1, 4000, 397), range(2, 3000, 217)):
        for count, most, make in ((2, 28 * 28 * 15000, images), (2, 28 * 28 * 60000, videos), (90, 47040000, videos)):
            bounds = {"min_pixels": 112 * 112, "max_pixels": most}
            if max(height, width) * 28 <= 200 * min(height, width) * max(28, min(height, width)):
                want = glm4v.smart_resize(count, height, width, **bounds)
                assert make.resized(width, height, count) == want
    with pytest.raises(ValueError, match="at most 200 times as long as wide, got 28 x 28000"):
        images.resized(1000, 1)


def test_sizes_are_transformers():
    for height in range(1, 400, 13):
        for width in range(2, 400, 17):
            if max(height, width) <= 200 * min(height, width):
                for bounds in ((3136, 20000), (100, 1000), (1, 10**7)):
                    assert smart_resize(height, width, 28, *bounds) == theirs.smart_resize(height, width, 28, *bounds)
    with pytest.raises(ValueError, match="at most 200 times as long as wide, got 1 x 201"):
        smart_resize(1, 201, 28, 1, 1000)


def video_size(frames, height, width, factor, min_pixels, max_pixels):
    """Qwen3-VL's, bounds over all frames, by its description."""
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    high, wide, deep = (round(side / step) * step for side, step in ((height, factor), (width, factor), (frames, 2)))
    if deep * high * wide > max_pixels:
        beta = math.sqrt(frames * height * width / max_pixels)
        return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    if deep * high * wide < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))
    return high, wide


@pytest.mark.parametrize("of", ["frame", "video"])
def test_video_patches(of):
    """The patches of transformers' video processor, which needs torchvision: its resize is torch's, on bytes."""
    settings = {"patch_size": 4, "size": {"shortest_edge": 600, "longest_edge": 6000}}
    videos = QwenVLImages(settings | {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}, of=of)
    mean, std = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    for count, (height, width) in ((4, (30, 40)), (5, (7, 31)), (3, (200, 100))):
        frames = [picture(width, height, seed=seed) for seed in range(count)]
        patches, grid = videos(frames)
        t, h, w = grid.tolist()
        if of == "frame":
            size = theirs.smart_resize(height, width, 8, 600, 6000)
        else:
            size = video_size(count, height, width, 8, 600, 6000)
        assert (t, 4 * h, 4 * w) == ((count + 1) // 2, *size)
        pixels = torch.stack([to_tensor(frame, (height, width), 3) for frame in frames])
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
        pixels = (torch.cat([pixels, pixels[-1:]])[: 2 * t] / 255 - mean) / std
        for number, patch in enumerate(patches):
            frame, place = divmod(number, h * w)
            block, inner = divmod(place, 4)
            row, column = 2 * (block // (w // 2)) + inner // 2, 2 * (block % (w // 2)) + inner % 2
            want = pixels[2 * frame : 2 * frame + 2, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            torch.testing.assert_close(patch, want.transpose(0, 1).flatten(), rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match=r"the frames of a video must have one size, got \[\(3, 4\), \(4, 4\)\]"):
        videos([picture(4, 4), picture(3, 4)])
    with pytest.raises(ValueError, match="at least one frame, got none"):
        videos([])


CAPPED = {
    "frame": {(2, 40, 30): [1, 8, 6], (12, 40, 30): [6, 4, 2], (2, 20, 100): [1, 2, 18], (33, 7, 300): [17, 2, 26]},
    "video": {(3, 40, 30): [2, 10, 6], (12, 40, 30): [6, 4, 2], (2, 20, 100): [1, 4, 20], (33, 7, 300): [17, 2, 26]},
}
"""Frames, height and width of a video -> the grid that transformers' video processors give it, with torchvision."""


@pytest.mark.parametrize("of", CAPPED)
def test_frames_that_share_out_a_number_of_tokens(of):
    settings = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    free, capped = (
        QwenVLImages(settings | {"cap_pixels_per_frame": cap, "max_video_tokens": 20}, of=of) for cap in (False, True)
    )
    for (count, height, width), grid in CAPPED[of].items():
        frames = [picture(width, height)] * count
        assert capped(frames)[1].tolist() == grid
        assert free(frames)[1].tolist() != grid


def test_settings_that_are_left_out_are_those_of_transformers_classes():
    """Qwen3-VL's videos are normalized otherwise than Qwen2-VL's images and videos."""
    for of, mean in (("image", CLIP_MEAN), ("frame", CLIP_MEAN), ("video", (0.5, 0.5, 0.5))):
        assert QwenVLImages({}, of=of).normalize.mean.flatten().tolist() == pytest.approx(mean)


def test_a_size_without_bounds_of_the_area():
    """What older versions of transformers wrote beside min_pixels and max_pixels says nothing more than these."""
    for size in ({"height": 56, "width": 56}, {"shortest_edge": 3136}):
        with pytest.raises(ValueError, match="size must have shortest_edge and longest_edge, in pixels of area, got"):
            QwenVLImages({"size": size})
    old = QwenVLImages({"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 100, "max_pixels": 5000})
    assert (old.min_pixels, old.max_pixels) == (100, 5000)


def test_one_frame_is_no_video_for_bounds_of_all_frames():
    with pytest.raises(ValueError, match=r"at least 2 frames, got 1\. Pass an image as an image"):
        QwenVLImages({}, of="video")([picture(40, 40)])
    with pytest.raises(ValueError, match=r"of must be one of .*, got 'frames'"):
        QwenVLImages({}, of="frames")


@pytest.fixture
def model(arch):
    small = {"size": {"shortest_edge": 64, "longest_edge": 400}}
    return make_model(arch, preprocessor_config=small, video_preprocessor_config=small)


def test_placeholders_are_written_out(model, arch):
    processor = model.processor
    pictures = [picture(20, 12), picture(9, 40), picture(24, 24)]
    texts = ["A <|image_pad|> and <|image_pad|>.", "None.", "<|image_pad|>"]
    batch = processor(texts, images=pictures)
    tokens = (batch["image_grid_thw"].prod(1) // 4).tolist()
    assert len(set(tokens)) > 1
    counts = (batch["input_ids"] == 256).sum(1).tolist()
    assert counts == [tokens[0] + tokens[1], 0, tokens[2]]
    for row, text in enumerate(texts):
        kept = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        words = kept[kept != 256]
        assert model.tokenizer.decode(words) == text.replace("<|image_pad|>", "")
    assert batch["attention_mask"][1, 0] == 0
    right = processor(texts, images=pictures, padding_side="right")
    assert right["attention_mask"][1, 0] == 1
    nothing = processor(["None."], images=None, videos=None)
    assert nothing.keys() == {"input_ids", "attention_mask"}
    out = model(**batch, labels=batch["input_ids"])
    assert out.loss.isfinite()


def test_a_conversation(model, arch):
    frames = [picture(20, 20, seed=seed) for seed in range(3)]
    messages = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": encoded(picture(20, 12))},
                {"type": "video", "video": frames, "fps": 2.0},
                {"type": "text", "text": "What is it?"},
            ],
        },
    ]
    batch = model.processor.apply_chat_template(messages, add_generation_prompt=True)
    text = model.tokenizer.decode(batch["input_ids"][0], skip_special_tokens=False)
    image, (t, h, w) = int(batch["image_grid_thw"].prod() // 4), (batch["video_grid_thw"][0]).tolist()
    assert t == 2
    frame = ("<|image_pad|>" if arch == "glm4v" else "<|video_pad|>") * (h * w // 4)
    starts, ends = zip(*(around(arch, kind) for kind in ("image", "video")), strict=True)
    if arch == "glm4v":
        video = f"{starts[1]}{starts[0]}{frame}{ends[0]}0{starts[0]}{frame}{ends[0]}1{ends[1]}"
    elif arch == "qwen3_vl":  # frames 0 and 1, then 2 twice, at two frames a second
        video = f"<0.2 seconds><|vision_start|>{frame}<|vision_end|><1.0 seconds><|vision_start|>{frame}<|vision_end|>"
    else:
        video = f"<|vision_start|>{frame}{frame}<|vision_end|>"
    assert text == (
        f"<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n{starts[0]}" + "<|image_pad|>" * image
        + f"{ends[0]}{video}What is it?<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    assert batch.get("second_per_grid_ts") == ([1.0] if arch == "qwen2_5_vl" else None)
    continued = model.generate(**batch, max_new_tokens=3, eos_token_id=[])
    assert continued.shape == (1, batch["input_ids"].shape[1] + 3)
    both = model.processor.apply_chat_template([messages, messages[:1]])
    assert both["input_ids"].shape[0] == 2
    assert len(both["image_grid_thw"]) == 1


def test_wrong_numbers_of_images(model):
    processor = model.processor
    with pytest.raises(ValueError, match=r"one <\|image_pad\|> for each of the 0 images, got 1"):
        processor(["<|image_pad|>"])
    with pytest.raises(ValueError, match=r"one <\|image_pad\|> for each of the 1 images, got 0"):
        processor(["text"], images=[picture(8, 8)])
    with pytest.raises(ValueError, match=r"one <\|video_pad\|> for each of the 0 videos, got 2"):
        processor(["<|video_pad|><|video_pad|>"])
    with pytest.raises(ValueError, match="fps must be one, or one for each of the 0 videos, got 1"):
        processor(["text"], fps=[1.0])
    with pytest.raises(ValueError, match="the list of images for each text must match"):
        processor(["<|image_pad|>", "text"], images=[[], [picture(8, 8)]])


def test_what_is_no_video(model):
    frames = [picture(20, 20)] * 2
    for wrong in ("clip.mp4", b"clip", torch.zeros(2, 3, 20, 20), frames[0]):
        with pytest.raises(ValueError, match=f"must be a list of images, its frames, got {type(wrong).__name__}"):
            model.processor(["<|video_pad|>"], videos=[wrong], fps=1.0)
    for fps in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"fps must be positive, got \[-?\d"):
            model.processor(["<|video_pad|>"], videos=[frames], fps=fps)


def test_videos_whose_time_matters_need_their_rate(model, arch):
    call = lambda: model.processor(["<|video_pad|>"], videos=[[picture(8, 8)] * 2])
    if arch == "qwen2_vl":
        assert "second_per_grid_ts" not in call()
    else:
        with pytest.raises(ValueError, match="fps must be given with videos"):
            call()


def test_files_that_do_not_belong_together():
    model = make_model("qwen2_vl", preprocessor_config={"patch_size": 14})
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must have the model's .*, got {'patch_size': 14}"):
        _ = model.processor
    model = make_model("qwen2_vl")
    object.__setattr__(model.config, "image_token_id", 9999)
    with pytest.raises(ValueError, match=r"must have the placeholders' ids 9999 and 257, got 262 tokens"):
        _ = model.processor


def test_settings_that_are_not_there(arch):
    """Qwen3-VL's mean is not that of transformers' class: a guess would be wrong without a word."""
    for other in ({}, {"video_preprocessor_config": {}}, {"processor_config": {"processor_class": "Qwen"}}):
        with pytest.raises(
            ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"
        ):
            _ = make_model(arch, **other).processor


def test_settings_that_transformers_5_wrote(arch):
    """In processor_config.json, before files of older versions beside it."""
    small = {"size": {"shortest_edge": 64, "longest_edge": 400}}
    nested = {"image_processor": small, "video_processor": small | {"image_mean": [0.1, 0.2, 0.3]}}
    processor = make_model(arch, processor_config=nested, preprocessor_config={"patch_size": 14}).processor
    assert processor.images.max_pixels == processor.videos.max_pixels == 400
    assert processor.videos.normalize.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert processor.images.normalize.mean.flatten().tolist() == pytest.approx(CLIP_MEAN)


def test_the_processor_travels_with_the_checkpoint(model, arch, tmp_path):
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model", progress=False)
    image = picture(20, 12)
    want, got = (m.processor(["<|image_pad|>"], images=[image]) for m in (model, again))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
