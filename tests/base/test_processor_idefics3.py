"""Tiles of Idefics3 and SmolVLM beside transformers' Pillow backend, and their texts."""

import json

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.idefics3.processor import Idefics3Images
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.idefics3.image_processing_pil_idefics3", "a transformers with a Pillow backend")
small = Late("transformers.models.smolvlm.image_processing_pil_smolvlm", "a transformers with a Pillow backend")

TEMPLATE = (
    "<bos>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<bos>", "<start>", "<end>"]
SIZES = [(40, 30), (1, 1000), (1000, 1), (16, 16), (64, 64), (300, 200), (33, 57), (90, 70), (5, 5), (63, 64)]


@pytest.mark.parametrize("settings", [{}, {"size": {"longest_edge": 33}}, {"do_image_splitting": None}], ids=str)
def test_pixels_are_transformers_bit_for_bit(settings):
    """Also of gray images, of images in CMYK, and of images in a palette."""
    settings = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}, **settings}
    images = [picture(*size, seed=size[0]) for size in SIZES]
    images += [picture(40, 28, mode) for mode in ("L", "CMYK")] + [picture(50, 20).convert("P")]
    ours = Idefics3Images(settings, 16)
    for processor in (theirs.Idefics3ImageProcessorPil, small.SmolVLMImageProcessorPil):
        want = processor(**settings)([[image] for image in images], return_tensors="pt", return_row_col_info=True)
        for index, image in enumerate(images):
            got = ours(image)
            assert ours.grid(image.size) == (want["cols"][index][0], want["rows"][index][0])
            assert torch.equal(got, want["pixel_values"][index, : len(got)])
            assert not want["pixel_attention_mask"][index, len(got) :].any()
            assert want["pixel_attention_mask"][index, : len(got)].all()


def test_published_numbers_of_tokens():
    for longest, side, tokens in ((1456, 364, 169), (1536, 384, 81), (2048, 512, 64)):
        images = Idefics3Images({"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}, side)
        for size in ((640, 480), (1920, 1080), (200, 150)):
            columns, rows = images.grid(size)
            assert (columns, rows) == (4, 3)
            assert (columns * rows + 1) * tokens == {169: 2197, 81: 1053, 64: 832}[tokens]


def make(model_type="idefics3", **settings):
    tokenizer = byte_tokens(*SPECIAL, *TILES)
    text = {
        "model_type": "llama", "vocab_size": 256 + len(SPECIAL) + len(TILES), "hidden_size": 32,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "eos_token_id": 262, "bos_token_id": 260,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    hf = {"model_type": model_type, "text_config": text, "vision_config": vision, "image_token_id": 256}
    model = AutoLigerModel.from_config(hf)
    names = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}
    special = {"bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<end>"}
    files = {
        "tokenizer_config.json": {**special, "chat_template": TEMPLATE},
        "preprocessor_config.json": {
            "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, **settings,
            "image_processor_type": f"{names[model_type]}ImageProcessor",
        },
        "processor_config.json": {"image_seq_len": 4, "processor_class": f"{names[model_type]}Processor"},
    }  # fmt: skip
    model.assets = {name: json.dumps(content).encode() for name, content in files.items()}
    model.assets["tokenizer.json"] = tokenizer.to_str().encode()
    return model


AROUND = "<fake_token_around_image>"
TILE = "<image>" * 4
WIDE = f"{AROUND}<row_1_col_1>{TILE}{AROUND}<row_1_col_2>{TILE}\n\n{AROUND}<global-img>{TILE}{AROUND}"


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_a_conversation(model_type):
    model = make(model_type)
    parts = [{"type": "image", "image": encoded(picture(40, 18))}, {"type": "image", "image": picture(20, 8)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    wide = model.processor.written(MediaSize(40, 18))
    assert wide == (WIDE, 12)
    assert texts == [
        f"<bos><start>user\n{WIDE}{WIDE}What?<end>\n<start>assistant\n",
        "<bos><start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert batch["pixel_values"].shape == (2, 6, 3, 16, 16)
    assert batch["pixel_attention_mask"].flatten(2).any(2).sum(1).tolist() == [6, 0]
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    model(**batch, labels=batch["input_ids"]).loss.backward()
    tiles = model.processor.pixels([picture(40, 18), picture(20, 8)])["pixel_values"]
    assert torch.equal(batch["pixel_values"][0], tiles)
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        flat = model(**inputs, pixel_values=tiles).logits
        assert torch.equal(model(**batch).logits, flat)


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <image> for each of the 0 images, got 1"):
        model.processor(["<image>"])
    with pytest.raises(ValueError, match="texts must have no <video>, because videos are not read"):
        model.processor(["<video> What?"])
    with pytest.raises(ValueError, match="a part of a message must be of type text or image, got 'video'"):
        model.processor.apply_chat_template([{"role": "user", "content": [{"type": "video", "video": []}]}])
    for settings, message in (
        ({"max_image_size": {"longest_edge": 32}}, "max_image_size must be {'longest_edge': 16}, got"),
        ({"do_pad": False}, "do_pad must be True, got False"),
        ({"size": {"height": 16, "width": 16}}, "size must be a positive longest_edge, got"),
        ({"size": 32}, "size must be a positive longest_edge, got 32"),
    ):
        with pytest.raises(ValueError, match=message):
            _ = make(**settings).processor
    model = make()
    object.__setattr__(model.config, "image_token_id", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got"):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"must be among the checkpoint's files, got none"):
        _ = model.processor
