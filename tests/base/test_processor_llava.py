import json

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch._llava.processor import LlavaImages
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from . import test_processor_pixtral as test_pixtral
from .conftest import encoded, picture

theirs_next = Late("transformers.models.llava_next.image_processing_pil_llava_next", "a transformers with Pillow")
theirs = Late("transformers.models.llava.image_processing_pil_llava", "a transformers with a Pillow backend")

TEMPLATE = test_pixtral.TEMPLATE.replace("[IMG]", "<image>")
PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16]]
SETTINGS = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


def make(model_type="llava", **settings):
    """A tiny model with bytes as tokens; an image, or a tile of LLaVA-NeXT, is 16 tokens."""
    tokenizer = byte_tokens("<image>", "<s>", "<start>", "<end>")
    text = {
        "model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 259, "bos_token_id": 257,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
    }  # fmt: skip
    config = {"model_type": model_type, "text_config": text, "vision_config": vision, "image_token_index": 256}
    if model_type == "llava_next":
        config["image_grid_pinpoints"] = settings["image_grid_pinpoints"] = PINPOINTS
    model = AutoLigerModel.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}).encode(),
        "preprocessor_config.json": json.dumps({**SETTINGS, **settings}).encode(),
        # As of files that lack what transformers needs to count tokens.
        "processor_config.json": b'{"processor_class": "LlavaProcessor"}',
    }
    return model


@pytest.mark.parametrize(
    "more",
    [{}, {"size": {"shortest_edge": 21}}, {"do_pad": True}, {"image_mean": 0.4}],
    ids=["", "larger", "pad", "gray mean"],
)
def test_pixels_are_transformers_bit_for_bit(more):
    settings = SETTINGS | more
    images = [picture(*size, seed=i) for i, size in enumerate([*test_pixtral.SIZES, (15, 17), (300, 200)])]
    images += [picture(30, 20, mode) for mode in ("L", "RGBA", "CMYK")]
    want = theirs.LlavaImageProcessorPil(**settings)(images, return_tensors="pt")["pixel_values"]
    convert = LlavaImages(settings, 16)
    assert torch.equal(torch.stack([convert(image) for image in images]), want)


def test_sizes_as_numbers():
    """As in old files."""
    image = picture(30, 20)
    assert torch.equal(LlavaImages({"size": 16, "crop_size": 16}, 16)(image), LlavaImages(SETTINGS, 16)(image))


def test_a_conversation():
    model = make()
    content = [{"type": "image", "image": encoded(picture(20, 12))}, {"type": "text", "text": "What?"}]
    content.insert(1, {"type": "image", "image": test_pixtral.rotated()})
    messages = [{"role": "user", "content": content}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    image, count = model.processor.written(MediaSize(20, 12))
    assert (image, count) == ("<image>" * 16, 16)
    assert texts == [
        f"<s><start>user\n{image}{image}What?<end>\n<start>assistant\n",
        "<s><start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2


def test_pixtral_has_its_processor():
    model = test_pixtral.make("llava")
    batch = model.processor(["[IMG]"], images=[picture(20, 12)], bos=False)
    assert batch["image_sizes"].tolist() == [[16, 24]]
    assert model(**batch).logits.isfinite().all()


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <image> for each of the 0 images, got 1"):
        model.processor(["<image>"])
    with pytest.raises(ValueError, match="must leave room for all image tokens, got 5, which cuts off"):
        model.processor(["Hi <image>"], images=[picture(30, 30)], truncation=True, max_length=5, bos=False)
    for wrong in (
        {"crop_size": {"height": 14, "width": 14}},
        {"crop_size": {"height": 16, "width": 32}},
        {"size": {"shortest_edge": 15}},
        {"size": {"shortest_edge": 16, "longest_edge": 32}},
        {"size": None},
    ):
        with pytest.raises(ValueError, match="crop_size must be 16, as in the tower, and size must have a"):
            _ = make(**wrong).processor
    model = make()
    object.__setattr__(model.config, "image_token_index", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got 260 tokens"):
        _ = model.processor


def test_tiles_are_transformers_bit_for_bit():
    images = [picture(*size, seed=i) for i, size in enumerate([*test_pixtral.SIZES, (15, 17), (300, 200)])]
    images += [picture(30, 20, mode) for mode in ("L", "RGBA", "CMYK")]
    hf = theirs_next.LlavaNextImageProcessorPil(**SETTINGS, image_grid_pinpoints=PINPOINTS)
    want = hf(images, return_tensors="pt")
    got = make("llava_next").processor.pixels(images)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_a_conversation_with_tiles():
    model = make("llava_next")
    content = [{"type": "image", "image": encoded(picture(20, 40))}, {"type": "text", "text": "What?"}]
    content.insert(1, {"type": "image", "image": test_pixtral.rotated()})
    batch = model.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    counts = [model.processor.written(MediaSize(*size))[1] for size in ((20, 40), (12, 30))]
    assert int((batch["input_ids"] == 256).sum()) == sum(counts)
    assert counts == [16 + 8 * (4 + 1), 16 + 8 * (4 + 1)]
    assert batch["image_sizes"].tolist() == [[40, 20], [30, 12]]
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 1
    with pytest.raises(ValueError, match="size and crop_size must be 16, as in the tower"):
        _ = make("llava_next", size={"shortest_edge": 20}).processor
