import io
import json

import pytest
import torch
from PIL import Image

from liger_models import AutoLigerModel
from liger_models.arch._towers.pixtral_processor import PixtralImages
from liger_models.base.processor import MediaSize
from liger_models.data.batch import join_rows

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.pixtral.image_processing_pil_pixtral", "a transformers with a Pillow backend")

TEMPLATE = (
    "<s>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
SIZES = [(1, 1000), (1000, 1), (40, 40), (99, 30), (31, 100), (64, 64), (8, 8), (7, 9)]


def make(model_type="mistral3", **settings):
    """A tiny model with bytes as tokens; an image token is 8 pixels wide and high."""
    tokenizer = byte_tokens("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<s>", "<start>", "<end>")
    text = {
        "model_type": "mistral", "vocab_size": 262, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None, "eos_token_id": 261,
        "bos_token_id": 259,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 4 if model_type == "mistral3" else 8,
    }  # fmt: skip
    config = {"model_type": model_type, "text_config": text, "vision_config": vision, "image_token_index": 256}
    config |= {} if model_type == "mistral3" else {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = AutoLigerModel.from_config(config)
    # Stale sizes, which the model's replace.
    processor = {"processor_class": "PixtralProcessor", "patch_size": 16, "spatial_merge_size": 1}
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}).encode(),
        "preprocessor_config.json": json.dumps({"size": {"longest_edge": 32}, "patch_size": 16, **settings}).encode(),
        "processor_config.json": json.dumps(processor).encode(),
    }
    return model


def rotated():
    """A file whose EXIF data ask for a quarter turn."""
    content, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    picture(30, 12).save(content, "JPEG", exif=exif)
    return content.getvalue()


def test_pixels_are_transformers_bit_for_bit():
    settings = {"size": {"longest_edge": 64}}
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[2:])]
    images += [picture(30, 20, mode) for mode in ("L", "RGBA", "CMYK")] + [picture(300, 200)]
    compare(settings, images)
    compare({"size": {"longest_edge": 1000}}, [picture(*size) for size in SIZES[:2]])


def compare(settings, images):
    hf = theirs.PixtralImageProcessorPil(**settings, patch_size={"height": 8, "width": 8})
    want = hf(images, return_tensors="pt")
    convert = PixtralImages(settings, 8)
    got = [convert(image) for image in images]
    assert [list(image.shape[1:]) for image in got] == want["image_sizes"].tolist()
    for image, padded, (height, width) in zip(got, want["pixel_values"], want["image_sizes"], strict=True):
        assert torch.equal(image, padded[:, :height, :width])
        assert not padded[:, height:].any()


def test_placeholders_are_counted_without_pixels():
    processor = make().processor
    for width, height in [*SIZES[2:], (300, 200)]:
        text, count = processor.written(MediaSize(width, height))
        batch = processor(["[IMG]"], images=[picture(width, height)], bos=False)
        assert processor.decode(batch["input_ids"][0], False) == text
        assert sum(int((batch["input_ids"] == id).sum()) for id in processor.media_ids) == count
        rows, columns = (length // 8 for length in batch["image_sizes"][0].tolist())
        assert text == "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"


@pytest.mark.parametrize("size", SIZES[:2])
def test_an_image_that_would_vanish_is_refused(size):
    """transformers makes 0 tokens of it, and fails while resizing."""
    with pytest.raises(ValueError, match="at least one pixel wide and high when its longer side is 32 pixels"):
        make().processor(["[IMG]"], images=[picture(*size)])


def test_a_conversation():
    model = make()
    content = [{"type": "image", "image": encoded(picture(20, 12))}, {"type": "text", "text": "What?"}]
    content.insert(1, {"type": "image", "image": rotated()})
    messages = [{"role": "user", "content": content}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    first, second = (
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )
    images = "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]" + "[IMG][IMG][IMG_BREAK]" * 3 + "[IMG][IMG][IMG_END]"
    assert first == f"<s><start>user\n{images}What?<end>\n<start>assistant\n"
    assert second == "<s><start>user\nHi.<end>\n<start>assistant\n"
    assert batch["image_sizes"].tolist() == [[16, 24], [32, 16]]
    assert batch["pixel_values"].shape == (2, 3, 32, 24)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2


def test_images_of_several_rows_are_joined():
    processor = make().processor
    rows = [processor.pixels([picture(*size) for size in sizes]) for sizes in ([(32, 8)], [], [(8, 24), (16, 16)])]
    joined = join_rows(rows)
    together = processor.pixels([picture(*size) for size in ((32, 8), (8, 24), (16, 16))])
    assert joined.keys() == together.keys()
    assert all(torch.equal(joined[name], together[name]) for name in joined)


def test_the_longest_side_is_saved(tmp_path):
    model = make()
    model.processor.images.longest = 16
    model.save_pretrained(tmp_path)
    again = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    assert again.processor.images.longest == 16
    assert again.processor(["[IMG]"], images=[picture(64, 64)])["image_sizes"].tolist() == [[16, 16]]


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match=r"one \[IMG\] for each of the 0 images, got 1"):
        model.processor(["[IMG]"])
    with pytest.raises(ValueError, match="must leave room for all image tokens, got 5, which cuts off"):
        model.processor(["Hi [IMG]"], images=[picture(30, 30)], truncation=True, max_length=5, bos=False)
    with pytest.raises(ValueError, match="size must have longest_edge, a number of pixels"):
        _ = make(size={"height": 32, "width": 32}).processor
    with pytest.raises(ValueError, match="resample must be 3, got 2"):
        _ = make(resample=2).processor
    model = make()
    object.__setattr__(model.config, "image_token_index", 9)
    with pytest.raises(
        ValueError, match=r"the first with the id 9 \(image_token_index\), got the ids \[256, 257, 258\]"
    ):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor
