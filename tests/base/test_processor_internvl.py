"""InternVL's tiles beside transformers' Pillow backend, and its texts."""

import io
import json

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.internvl.processor import InternVLImages
from liger_models.base.processor import MediaSize
from liger_models.convert.config_map import read_config

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.got_ocr2.image_processing_pil_got_ocr2", "a transformers with a Pillow backend")

TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<IMG_CONTEXT>\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
SPECIAL = ["<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<start>", "<end>"]
NAMED = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
SIZES = [(40, 30), (1, 1000), (1000, 1), (16, 16), (64, 64), (300, 200), (33, 57), (700, 90), (5, 5)]


@pytest.mark.parametrize("limits", [{}, {"max_patches": 4}, {"min_patches": 3}, {"max_patches": 1}], ids=str)
def test_pixels_are_transformers_bit_for_bit(limits):
    """Also of gray images, of images in CMYK, and of images in a palette."""
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.485, 0.456, 0.406], **limits}
    images = [picture(*size, seed=size[0]) for size in SIZES]
    images += [picture(40, 28, mode) for mode in ("L", "CMYK")] + [picture(50, 20).convert("P")]
    want = theirs.GotOcr2ImageProcessorPil(**settings)(images, crop_to_patches=True, return_tensors="pt")
    ours = InternVLImages(settings, 16)
    got = [ours(image) for image in images]
    assert [len(tiles) for tiles in got] == want["num_patches"].tolist() == [ours.tiles(image.size) for image in images]
    assert torch.equal(torch.cat(got), want["pixel_values"])


def test_grids_are_transformers():
    ours = InternVLImages({"size": {"height": 448, "width": 448}}, 448)
    hf = theirs.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    sides = (1, 7, 150, 224, 448, 449, 634, 640, 896, 1080, 1920, 5000)
    for width in sides:
        for height in sides:
            assert ours.tiles((width, height)) == hf.get_number_of_image_patches(height, width), (width, height)
    assert [ours.tiles(size) for size in ((640, 480), (1920, 1080), (200, 150))] == [13, 9, 13]


def make(**settings):
    tokenizer = byte_tokens(*SPECIAL)
    text = {
        "model_type": "qwen3", "vocab_size": 262, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 261,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "attention_bias": True,
    }  # fmt: skip
    hf = {"model_type": "internvl", "text_config": text, "vision_config": vision, "image_token_id": 256}
    model = AutoLigerModel.from_config(hf | {"image_seq_length": 4})
    assert model.config == read_config(type(model.config), hf)
    files = {
        "tokenizer_config.json": {"eos_token": "<end>", "pad_token": "<end>", "chat_template": TEMPLATE, **NAMED},
        "preprocessor_config.json": {
            "size": {"height": 16, "width": 16}, "max_patches": 3, "crop_to_patches": False,
            "image_processor_type": "GotOcr2ImageProcessor", **settings,
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    }  # fmt: skip
    model.assets = {name: json.dumps(content).encode() for name, content in files.items()}
    model.assets["tokenizer.json"] = tokenizer.to_str().encode()
    return model


def test_a_conversation():
    model = make()
    parts = [{"type": "image", "image": encoded(picture(40, 18))}, {"type": "image", "image": picture(8, 8)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    wide, square = (f"<img>{'<IMG_CONTEXT>' * 4 * tiles}</img>\n" for tiles in (3, 1))
    assert texts == [
        f"<start>user\n{wide}{square}What?<end>\n<start>assistant\n",
        "<start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    assert model.processor.written(MediaSize(40, 18)) == (wide.strip(), 12)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    assert torch.equal(batch["pixel_values"], model.processor.pixels([picture(40, 18), picture(8, 8)])["pixel_values"])


def test_a_rotated_photo_is_upright():
    model, image = make(), picture(40, 18)
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    turned, upright = (
        model.processor(["<IMG_CONTEXT>"], images=[source])["pixel_values"]
        for source in (file.getvalue(), image.rotate(-90, expand=True))
    )
    assert torch.equal(turned, upright)


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <IMG_CONTEXT> for each of the 0 images, got 1"):
        model.processor(["<IMG_CONTEXT>"])
    with pytest.raises(ValueError, match="texts must have no <video>, because videos are not read"):
        model.processor(["<video> What?"])
    with pytest.raises(ValueError, match="a part of a message must be of type text or image, got 'video'"):
        model.processor.apply_chat_template([{"role": "user", "content": [{"type": "video", "video": []}]}])
    for settings, message in (
        ({"size": {"height": 32, "width": 32}}, "size must be {'height': 16, 'width': 16}, got"),
        ({"resample": 2}, "resample must be 3, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            _ = make(**settings).processor
    model = make()
    object.__setattr__(model.config, "image_token_id", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got 262 tokens"):
        _ = model.processor
    model = make()
    config = json.loads(model.assets["tokenizer_config.json"])
    model.assets["tokenizer_config.json"] = json.dumps(config | {"end_image_token": {"content": "<no>"}}).encode()
    with pytest.raises(ValueError, match="must have the tokens <img>, <no>, but lacks <no>"):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"must be among the checkpoint's files, got none"):
        _ = model.processor
