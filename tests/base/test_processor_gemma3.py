import json

import pytest
import torch

from liger_models import LigerGemma3
from liger_models.arch._towers.siglip import SiglipVisionConfig
from liger_models.arch.gemma3.processor import Gemma3Images
from liger_models.arch.gemma3.tower import Gemma3Config

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.gemma3.image_processing_pil_gemma3", "a transformers with a Pillow backend")

TEMPLATE = (
    "<bos>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<boi>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>model\n{% endif %}"
)
SCAN = {
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip


@pytest.mark.parametrize("scan", [{}, SCAN, SCAN | {"pan_and_scan_max_num_crops": 3}], ids=["", "scan", "three"])
def test_pixels_are_transformers_bit_for_bit(scan):
    settings = {"size": {"height": 32, "width": 32}, "resample": 2, **scan}
    sizes = [(40, 40), (100, 30), (30, 101), (45, 40), (250, 60), (19, 90), (33, 28)]
    images = [picture(width, height, seed=width) for width, height in sizes]
    want = theirs.Gemma3ImageProcessorPil(**settings)(images, return_tensors="pt")
    got = [Gemma3Images(settings, 32)(image) for image in images]
    assert [len(each) - 1 for each in got] == want["num_crops"].tolist()
    assert max(map(len, got)) > 2 or not scan
    assert torch.equal(torch.cat(got), want["pixel_values"])


def make(**settings):
    tokenizer = byte_tokens("<img>", "<boi>", "<eoi>", "<bos>", "<start>", "<end>")
    config = Gemma3Config(
        vocab_size=262, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, image_token_index=256,
        boi_token_index=257, eoi_token_index=258, mm_tokens_per_image=4, eos_token_id=261, bos_token_id=259,
        vision_config=SiglipVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=4,
        ),
    )  # fmt: skip
    model = LigerGemma3.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "chat_template": TEMPLATE}).encode(),
        "preprocessor_config.json": json.dumps({"size": {"height": 16, "width": 16}, **settings}).encode(),
    }
    return model


IMAGE = "\n\n<boi>" + 4 * "<img>" + "<eoi>\n\n"


def test_a_conversation():
    model = make()
    content = [{"type": "image", "image": encoded(picture(20, 12))}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts == [
        f"<bos><start>user\n{IMAGE}What?<end>\n<start>model\n",
        "<bos><start>user\nHi.<end>\n<start>model\n",
    ]
    assert batch["pixel_values"].shape == (1, 3, 16, 16)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2


def test_pan_and_scan_writes_the_pieces():
    model = make(**SCAN | {"pan_and_scan_min_crop_size": 8})
    batch = model.processor(["See <boi>."], images=[picture(60, 20)], bos=False)
    text = model.tokenizer.decode(batch["input_ids"][0], skip_special_tokens=False)
    crops = " ".join([IMAGE] * 3)
    want = f"See Here is the original image {IMAGE} and here are some crops to help you see better {crops}."
    assert text == want
    assert batch["pixel_values"].shape[0] == 4
    assert model(**batch).logits.isfinite().all()


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <boi> for each of the 0 images, got 1"):
        model.processor(["<boi>"])
    with pytest.raises(ValueError, match=r"size must be {'height': 16, 'width': 16}, got {'height': 32"):
        _ = make(size={"height": 32, "width": 32}).processor
    model = make()
    object.__setattr__(model.config, "boi_token_index", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, 256, 258, got 262 tokens"):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor


def test_settings_that_transformers_5_wrote(tmp_path):
    """Its processors are saved with all their settings in processor_config.json."""
    from transformers import Gemma3Processor, PreTrainedTokenizerFast

    model = make()
    model.save_pretrained(tmp_path)
    names = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), extra_special_tokens=names)
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.1, 0.2, 0.3], **SCAN}
    settings["pan_and_scan_min_crop_size"] = 8
    hf = Gemma3Processor(theirs.Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=4)
    (tmp_path / "preprocessor_config.json").unlink()
    hf.save_pretrained(tmp_path)
    image = picture(60, 20)
    want = hf.image_processor([image], return_tensors="pt")
    got = LigerGemma3.from_pretrained(tmp_path, progress=False).processor(["<boi>"], images=image)
    assert want["pixel_values"].shape[0] == 4
    assert torch.equal(got["pixel_values"], want["pixel_values"])
