"""Tiles and patches of LFM2-VL beside transformers' processor with Pillow's resizing, and their texts."""

import importlib
import json
import sys
import types
from unittest import mock

import numpy
import pytest
import torch
from PIL import Image

from liger_models import AutoLigerModel
from liger_models.arch.lfm2.processor import Grid, Lfm2VlImages
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

backends = Late("transformers.image_processing_backends")
transforms = Late("transformers.image_transforms")
processing = Late("transformers.models.lfm2_vl.processing_lfm2_vl")

TEMPLATE = (
    "<|startoftext|>{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGIN, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
MARKS = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
SPECIAL = ["<image>", BEGIN, END, THUMBNAIL, "<|startoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = [(40, 30), (1, 3), (130, 9), (16, 16), (64, 64), (300, 200), (33, 57), (90, 70), (5, 5), (63, 64), (12, 20)]
SMALL = {
    "encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 4, "max_image_tokens": 16, "min_tiles": 2,
    "max_tiles": 6,
}  # fmt: skip


def transformers_images(settings):
    """transformers' image processor, whose only backend is torchvision, with the Pillow backend's steps instead."""

    class Pillow(backends.TorchvisionBackend):
        def resize(self, image, size, resample=None, **_):
            size = size.width, size.height
            pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in image]
            resized = [numpy.array(each.resize(size, resample)) for each in pictures]
            return torch.stack([torch.from_numpy(each).permute(2, 0, 1) for each in resized])

        def rescale_and_normalize(self, images, do_rescale, factor, do_normalize, mean, std):
            channels = {"data_format": "channels_first", "input_data_format": "channels_first"}
            scaled = [transforms.rescale(each, factor, **channels) for each in images.numpy()]
            normal = [transforms.normalize(each, mean, std, **channels) for each in scaled]
            return torch.from_numpy(numpy.stack(normal))

    functional = types.SimpleNamespace(InterpolationMode=None)
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    stubs = {name: types.ModuleType(name) for name in names}
    stubs[names[-1]].functional = functional
    with mock.patch.dict(sys.modules, stubs):
        module = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")

    class Processor(module.Lfm2VlImageProcessor, Pillow):
        def __call__(self, image):
            names = [name for name in module.Lfm2VlImageProcessorKwargs.__annotations__ if hasattr(self, name)]
            given = {name: getattr(self, name) for name in names}
            given |= {"do_resize": True, "resample": Image.Resampling.BILINEAR, "do_rescale": True}
            given |= {"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            given |= settings | {"return_row_col_info": True, "return_tensors": None, "disable_grouping": None}
            pixels = torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1)
            return self._preprocess([pixels], **given)

    return object.__new__(Processor)


def transformers_text(settings, out, marks=True):
    """The text that transformers' processor writes for an image."""
    processor = object.__new__(processing.Lfm2VlProcessor)
    vars(processor).update(
        image_token="<image>", image_start_token=BEGIN, image_end_token=END, image_thumbnail_token=THUMBNAIL,
        image_processor=types.SimpleNamespace(**{"downsample_factor": 2, "use_thumbnail": True, **settings}),
    )  # fmt: skip
    return processor.replace_image_token(out, 0, use_image_special_tokens=marks)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"use_thumbnail": False}, {"do_image_splitting": False}, {"max_tiles": 1, "min_tiles": 1},
        {"max_pixels_tolerance": 0.5}, {"downsample_factor": 4, "max_image_tokens": 8, "min_tiles": 3},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 1 / 128},
    ],
    ids=str,
)  # fmt: skip
def test_pixels_and_texts_are_transformers_bit_for_bit(settings):
    """Also of gray images, of images in CMYK, and of images in a palette."""
    settings = SMALL | settings
    images = [picture(*size, seed=size[0]) for size in SIZES]
    images += [picture(40, 28, mode) for mode in ("L", "CMYK")] + [picture(50, 20).convert("P")]
    theirs = transformers_images(settings)
    ours = Lfm2VlImages(settings, 4, settings.get("downsample_factor", 2))
    processor = make().processor
    processor.images = ours
    cut = 0
    for image in images:
        want, got, grid = theirs(image), ours(image), ours.grid(image.size)
        assert grid == Grid(want["image_cols"][0], want["image_rows"][0], *want["image_sizes"][0])
        for name, tensor in got.items():
            assert tensor.dtype == want[name].dtype
            assert torch.equal(tensor, want[name]), (name, image.size)
        text, tokens = processor.written(MediaSize(*image.size))
        assert text == transformers_text(settings, want)
        assert tokens == text.count("<image>") == int(got["spatial_shapes"].prod(1).sum()) // ours.merge**2
        processor.marks = False
        assert processor.written(MediaSize(*image.size)) == (transformers_text(settings, want, marks=False), tokens)
        processor.marks = True
        cut += len(got["pixel_values"]) > 1
    assert (cut > 0) == (settings.get("do_image_splitting", True) and settings["max_tiles"] > 1)


def test_elongated_images_are_refused():
    """transformers cannot stack their tiles."""
    for size in ((1, 1000), (1000, 1)):
        with pytest.raises(RuntimeError, match="equal size"):
            transformers_images(SMALL)(picture(*size))
        with pytest.raises(ValueError, match=r"at most 64 patches when .* 8 pixels, got an image of 1.* Crop it"):
            Lfm2VlImages(SMALL, 4, 2).grid(size)


def test_published_numbers_of_tokens():
    images = Lfm2VlImages({}, 16, 2)
    assert sum(images.tokens(images.grid((640, 480)))) == 234
    assert images.grid((640, 480)) == Grid(1, 1, 416, 576)
    assert images.grid((1920, 1080)) == Grid(4, 2, 384, 672)
    assert sum(images.tokens(images.grid((1920, 1080)))) == 2300
    assert sum(images.tokens(images.grid((200, 150)))) == 70
    assert images.most_patches == 1024


def make(**settings):
    tokenizer = byte_tokens(*SPECIAL, *MARKS)
    text = {
        "model_type": "lfm2", "vocab_size": 256 + len(SPECIAL) + len(MARKS), "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 262,
        "bos_token_id": 260, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "num_patches": 16,
    }  # fmt: skip
    hf = {
        "model_type": "lfm2_vl", "text_config": text, "vision_config": vision, "image_token_id": 256,
        "projector_hidden_size": 24,
    }  # fmt: skip
    model = AutoLigerModel.from_config(hf)
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    files = {
        "tokenizer_config.json": {**special, "chat_template": TEMPLATE},
        "preprocessor_config.json": {**SMALL, "image_processor_type": "Lfm2VlImageProcessorFast", **settings},
        "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
    }
    model.assets = {name: json.dumps(content).encode() for name, content in files.items()}
    model.assets["tokenizer.json"] = tokenizer.to_str().encode()
    return model


def test_a_conversation():
    model = make(max_tiles=2)
    parts = [{"type": "image", "image": encoded(picture(70, 30))}, {"type": "image", "image": picture(16, 16)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    tile = "<image>" * 4
    wide = f"{BEGIN}{MARKS[0]}{tile}{MARKS[1]}{tile}{THUMBNAIL}{'<image>' * 12}{END}"
    assert texts == [
        f"<|startoftext|><|im_start|>user\n{wide}{BEGIN}{tile}{END}What?<|im_end|>\n<|im_start|>assistant\n",
        "<|startoftext|><|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert batch["spatial_shapes"].tolist() == [[4, 4], [4, 4], [4, 12], [4, 4]]
    assert batch["pixel_attention_mask"].sum(1).tolist() == [16, 16, 48, 16]
    assert batch["pixel_values"].shape == (4, 64, 48)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    model(**batch, labels=batch["input_ids"]).loss.backward()
    alone = model.processor.pixels([picture(70, 30), picture(16, 16)])
    assert all(torch.equal(batch[name], tensor) for name, tensor in alone.items())


def test_changed_settings_are_saved(tmp_path):
    model = make()
    assert model.processor.changed_settings() == {}
    model.processor.images.max_tiles = 3
    model.processor.images.thumbnail = False
    model.save_pretrained(tmp_path)
    again = AutoLigerModel.from_pretrained(tmp_path, progress=False).processor.images
    assert again.settings() == model.processor.images.settings()
    assert again.max_tiles == 3
    assert not again.thumbnail


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <image> for each of the 0 images, got 1"):
        model.processor(["<image>"])
    with pytest.raises(ValueError, match="a part of a message must be of type text or image, got 'video'"):
        model.processor.apply_chat_template([{"role": "user", "content": [{"type": "video", "video": []}]}])
    for settings, message in (
        ({"encoder_patch_size": 16}, "encoder_patch_size must be 4, got 16"),
        ({"do_pad": False}, "do_pad must be True, got False"),
        ({"tile_size": 20}, "tile_size must be a multiple of 8, .*, got 20"),
        ({"max_tiles": 0}, "max_tiles must be a positive number, got 0"),
        ({"min_image_tokens": "4"}, "min_image_tokens must be a positive number, got '4'"),
        ({"min_tiles": 7}, r"min_tiles \(7\) must be at most max_tiles \(6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            _ = make(**settings).processor
    model = make()
    model.assets["tokenizer.json"] = model.assets["tokenizer.json"].replace(b"img_thumbnail", b"img_other")
    with pytest.raises(ValueError, match=r"but lacks <\|img_thumbnail\|>"):
        _ = model.processor
    model = make()
    object.__setattr__(model.config, "image_token_id", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got"):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"must be among the checkpoint's files, got none"):
        _ = model.processor
