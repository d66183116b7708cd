import json
from itertools import pairwise

import pytest
import torch

from liger_models import LigerPaliGemma
from liger_models.arch._towers.siglip import SiglipVisionConfig
from liger_models.arch.paligemma.config import PaliGemmaConfig
from liger_models.arch.paligemma.processor import PaliGemmaImages
from liger_models.base.processor import MediaSize
from liger_models.data import PackedDataset

from ..late import Late, transformers
from ..text.folders import byte_tokens
from . import test_processor_pixtral as test_pixtral
from .conftest import encoded, picture

pil = Late("transformers.models.siglip.image_processing_pil_siglip", "a transformers with a Pillow backend")
theirs = Late("transformers.models.paligemma.processing_paligemma", "transformers")

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Released checkpoints have no chat template."""
SETTINGS = {"size": {"height": 16, "width": 16}, "resample": 3, "do_convert_rgb": None, "image_seq_length": 4}


def make(**settings):
    """A tiny model with bytes as tokens; an image is 4 tokens."""
    tokenizer = byte_tokens("<image>", "<bos>", "<eos>")
    config = PaliGemmaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, image_token_index=256, bos_token_id=257, eos_token_id=258,
        vision_config=SiglipVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=8,
        ),
    )  # fmt: skip
    model = LigerPaliGemma.from_config(config)
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>", "chat_template": TEMPLATE}
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(tokens).encode(),
        "preprocessor_config.json": json.dumps({**SETTINGS, **settings}).encode(),
    }
    return model


def test_pixels_are_transformers_bit_for_bit():
    sizes = [(16, 16), (1, 1000), (1000, 1), (15, 17), (300, 200), (3, 2)]
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    images += [picture(30, 20, mode) for mode in ("L", "RGBA", "CMYK")]
    want = pil.SiglipImageProcessorPil(**SETTINGS | {"do_convert_rgb": True})(images, return_tensors="pt")
    convert = PaliGemmaImages(SETTINGS, 16)
    assert torch.equal(torch.stack([convert(image) for image in images]), want["pixel_values"])
    turned = convert(test_pixtral.rotated())
    assert turned.shape == (3, 16, 16)
    assert not torch.equal(turned, turned.transpose(1, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Our processor, and theirs of the same tokenizer."""
    processor, folder = make().processor, tmp_path_factory.mktemp("processor")
    processor.save_pretrained(folder)
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens |= {"extra_special_tokens": {"image_token": "<image>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = pil.SiglipImageProcessorPil(**SETTINGS | {"do_convert_rgb": True})
    images.image_seq_length = 4
    return processor, theirs.PaliGemmaProcessor(images, tokenizer)


@pytest.mark.filterwarnings("ignore")  # theirs, about placeholders that are missing
@pytest.mark.parametrize("side", ["left", "right"])
def test_inputs_are_transformers(pair, side):
    """With placeholders or without, with several images or one, with answers or without."""
    ours, hf = pair
    images = [picture(20, 12), picture(9, 40), picture(31, 31)]
    calls = [
        (["<image>What?", "<image>Where is it?"], images[:2], None),
        (["What?", "Where is it?"], images[:2], ["Red.", "There."]),
        (["<image><image>Both?", "<image>And?"], [images[:2], images[2:]], ["Yes.", "No, I think."]),
    ]
    for texts, chosen, suffix in calls:
        options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
        got = ours(texts, images=chosen, suffix=suffix, **options)
        want = hf(images=chosen, text=texts, suffix=suffix, **options)
        assert want.keys() - {"labels"} == got.keys() - {"labels"}
        assert ("labels" in got) == (suffix is not None)
        for name, tensor in got.items():
            assert torch.equal(tensor, want[name]), name
        lists = ours(texts, images=chosen, suffix=suffix, **options | {"return_tensors": None})
        assert lists["token_type_ids"] == got["token_type_ids"].tolist()


def test_a_conversation():
    """The types of its tokens are 1 from the first answer on, and its labels are those of the answers."""
    model = make()
    content = [{"type": "image", "image": encoded(picture(20, 12))}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "Red."}]
    batch = model.processor.apply_chat_template([chat[:1]], add_generation_prompt=True)
    text = model.tokenizer.decode(batch["input_ids"][0], skip_special_tokens=False)
    assert text == "user: " + "<image>" * 4 + "What?\nassistant: "
    assert model.processor.written(MediaSize(20, 12)) == ("<image>" * 4, 4)
    assert not batch["token_type_ids"].any()
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 1
    whole = model.processor.apply_chat_template([chat, chat[:1] + chat], return_labels=True, padding_side="right")
    first = (whole["labels"] != -100).int().argmax(1)
    length = whole["attention_mask"].sum(1)
    for types, start, end in zip(whole["token_type_ids"], first, length, strict=True):
        assert types.nonzero().flatten().tolist() == [*range(int(start), int(end))]


def test_texts_get_the_form_of_the_training_data(tmp_path):
    """The beginning of a text follows its images; the prompt ends with a line break, and the answer with an end."""
    model = make()
    picture(20, 12).save(tmp_path / "0.png")
    rows = [
        {"prompt": "<image>What?", "completion": "Red.", "images": [str(tmp_path / "0.png")]},
        {"prompt": "Who?", "completion": "Me."},
        {"text": "<image>A cat.", "images": [str(tmp_path / "0.png")]},
    ]
    data = PackedDataset(rows, model.processor, length=24, shuffle=False, cache_dir=tmp_path, progress=False)
    found = set()
    for batch in data:
        assert model(**batch).loss.isfinite()
        bounds = batch["cu_seqlens"].tolist()
        for start, end in pairwise(bounds):
            ids, labels = batch["input_ids"][0, start:end], batch["labels"][0, start:end]
            decode = lambda ids: model.tokenizer.decode(ids, skip_special_tokens=False)
            found.add((decode(ids), decode(labels[labels != -100])))
    image = "<image>" * 4
    assert {
        (f"{image}<bos>What?\nRed.<eos>", "Red.<eos>"),
        ("<bos>Who?\nMe.<eos>", "Me.<eos>"),
        (f"{image}<bos>A cat.<eos>", "<bos>A cat.<eos>"),
    } <= found


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match="one <image> for each of the 0 images, got 1"):
        model.processor(["<image>"])
    with pytest.raises(ValueError, match=r"texts without <image> must have an image, .* each, got 1 for 2 texts"):
        model.processor(["One", "Two"], images=[picture(9, 9)])
    with pytest.raises(ValueError, match="suffix must be one for each of the 2 texts"):
        model.processor(["One", "Two"], suffix=["1"])
    with pytest.raises(ValueError, match="must leave room for all image tokens, got 3, which cuts off"):
        model.processor(["<image>"], images=[picture(30, 30)], truncation=True, max_length=3)
    with pytest.raises(ValueError, match=r"size must be {'height': 16, 'width': 16}, got {'height': 32"):
        _ = make(size={"height": 32, "width": 32}).processor
    model = make()
    object.__setattr__(model.config, "image_token_index", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got 259 tokens"):
        _ = model.processor
