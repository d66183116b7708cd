import json

import pytest
import torch

from liger_models import LigerMllama
from liger_models.arch.mllama.config import MllamaConfig, MllamaVisionConfig
from liger_models.arch.mllama.processor import MllamaImages

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.mllama.image_processing_pil_mllama", "a transformers with a Pillow backend")

TEMPLATE = (
    "<bos>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
SPECIAL = ["<bos>", "<start>", "<end>", "<image>"]
RATIOS = {4: [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]], 2: [[1, 1], [1, 2], [2, 1]]}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


@pytest.mark.parametrize("tiles", RATIOS)
@pytest.mark.parametrize("stats", [{}, CLIP, {"do_normalize": False}], ids=["", "clip", "plain"])
def test_pixels_are_transformers_bit_for_bit(tiles, stats):
    """Images of every arrangement of tiles, larger and smaller than all, hardly wide, of the tiles' very size."""
    settings = {"size": {"height": 28, "width": 28}, "resample": 2, "max_image_tiles": tiles, **stats}
    sides = (1, 9, 28, 29, 41, 56, 84, 90, 112, 113, 200)
    sizes = [(width, height) for width in sides for height in sides if (width + height) % 3 != 2] + [(500, 2)]
    images = [picture(width, height, seed=width) for width, height in sizes]
    want = theirs.MllamaImageProcessorPil(**settings)([images], return_tensors="pt")
    ours = MllamaImages(settings, 28, tiles, RATIOS[tiles])
    pixels, kinds = zip(*(ours(image) for image in images), strict=True)
    assert list(kinds) == want["aspect_ratio_ids"][0].tolist()
    assert set(kinds) == set(range(1, len(RATIOS[tiles]) + 1))
    assert torch.equal(torch.stack(pixels), want["pixel_values"][0])


def make(**settings):
    tokenizer = byte_tokens(*SPECIAL)
    config = MllamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], image_token_index=259, bos_token_id=256, eos_token_id=258,
        pad_token_id=258,
        vision_config=MllamaVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_global_layers=1, attention_heads=2,
            image_size=16, patch_size=4, intermediate_layers_indices=[0], vision_output_dim=32,
        ),
    )  # fmt: skip
    model = LigerMllama.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "chat_template": TEMPLATE}).encode(),
        "preprocessor_config.json": json.dumps({"size": {"height": 16, "width": 16}, **settings}).encode(),
    }
    return model


def texts_of(model, batch):
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [model.tokenizer.decode(row[mask == 1], skip_special_tokens=False) for row, mask in rows]


def test_a_conversation():
    model = make()
    parts = [{"type": "image", "image": encoded(picture(30, 12))}, {"type": "image", "image": picture(8, 30)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    assert texts_of(model, batch) == [
        "<bos><start>user\n<image><image>What?<end>\n<start>assistant\n",
        "<bos><start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert batch["pixel_values"].shape == (2, 2, 4, 3, 16, 16)
    assert batch["aspect_ratio_ids"].tolist() == [[2, 5], [0, 0]]
    assert batch["aspect_ratio_mask"].tolist() == [[[1, 1, 0, 0]] * 2, [[1, 0, 0, 0]] * 2]
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    labels = batch["input_ids"].masked_fill(batch["input_ids"] >= 258, -100)
    model(**batch, labels=labels).loss.backward()


def test_a_batch_is_transformers():
    model = make()
    images = [picture(30, 12), picture(17, 40), picture(5, 5)]
    settings = {"size": {"height": 16, "width": 16}, "max_image_tiles": 4}
    want = theirs.MllamaImageProcessorPil(**settings)([images[:1], images[1:]], return_tensors="pt")
    got = model.processor(["<image>one", "<image>and<image>"], images=images, padding_side="right")
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        assert torch.equal(got[name], want[name])


def test_where_a_text_begins():
    from transformers.models.mllama.processing_mllama import build_string_from_input

    model = make()
    texts = ["plain", "<image>one", "<image><image>two <image>", "<bos>here", "<image><bos>there"]
    batch = model.processor(texts, images=[picture(9, 9)] * 5)
    assert texts_of(model, batch) == [build_string_from_input(text, "<bos>", "<image>") for text in texts]
    assert model.processor("plain")["input_ids"].shape == (1, 6)


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <image> for each of the 0 images, got 1"):
        model.processor(["<image>"])
    with pytest.raises(ValueError, match="max_image_tiles must be 4, got 9"):
        _ = make(max_image_tiles=9).processor
    model = make()
    object.__setattr__(model.config, "image_token_index", 9999)
    with pytest.raises(ValueError, match=r"must have the ids 9999 \(image\) and 256 \(bos_token_id\), got 260 tokens"):
        _ = model.processor
    with pytest.raises(ValueError, match="1 image placeholders in input_ids must have pixel_values, got none"):
        model(torch.tensor([[3, 9999]]))  # not that the embedding lacks the id
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor


def test_keywords_of_transformers():
    model = make()
    messages = [{"role": "user", "content": "Hi."}]
    want = model.processor.apply_chat_template(messages)
    got = model.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert torch.equal(got["input_ids"], want["input_ids"])
    with pytest.raises(TypeError, match=r"must be names that the chat template reads .*got documents"):
        model.processor.apply_chat_template(messages, documents=[])
    begun = [*messages, {"role": "assistant", "content": "Hel"}]
    assert model.processor.apply_chat_template(begun, continue_final_message=True, tokenize=False).endswith("Hel")
    model.tokenizer.padding_side = "right"
    both = [messages, [{"role": "user", "content": "Hello there."}]]
    assert model.processor.apply_chat_template(both)["attention_mask"][0].tolist()[-1] == 0
    assert model.processor(["a", "bc"])["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
