"""Processors beside those of transformers, which read the files that ours have saved."""

import json

import pytest
import torch

from liger_models import AutoLigerProcessor
from liger_models.base.processor import Edit, edited

from ..late import Late, transformers
from . import test_processor_gemma3 as test_gemma3
from . import test_processor_gemma4 as test_gemma4
from . import test_processor_idefics3 as test_idefics3
from . import test_processor_internvl as test_internvl
from . import test_processor_mllama as test_mllama
from .conftest import around, make_model, picture

qwen2_vl = Late("transformers.models.qwen2_vl.processing_qwen2_vl")
internvl = Late("transformers.models.internvl.processing_internvl")
glm4v = Late("transformers.models.glm4v.processing_glm4v", "a transformers with GLM-4.1V")
gemma4 = Late("transformers.models.gemma4.processing_gemma4", "a transformers with Gemma 4")
mixin = Late("transformers.processing_utils")

SMALL = {"size": {"shortest_edge": 64, "longest_edge": 400}}
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
"""Families whose images are patches with a grid."""
FAMILIES = (*GRIDS, "gemma3", "gemma4", "mllama", "internvl", "idefics3")
PLACEHOLDER = {
    "gemma3": "<boi>",
    "gemma4": "<|image|>",
    "mllama": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "idefics3": "<image>",
}
MARKED = (
    "BOS{% for message in messages %}START{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "CONTENTEND{% endgeneration %}{% else %}CONTENTEND{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}STARTassistant\n{% endif %}"
)
CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def make(arch: str):
    """A model with the files that its family has on the hub."""
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    if arch in GRIDS:
        vision = make_model(arch).config.vision_config
        sizes = {"merge_size": vision.spatial_merge_size, "temporal_patch_size": vision.temporal_patch_size}
        settings = {**SMALL, "patch_size": vision.patch_size, **sizes}
        model = make_model(arch, preprocessor_config=settings, video_preprocessor_config=settings)
        words, named = ("", "<|im_start|>", "<|im_end|>", "<|image_pad|>".join(around(arch, "image"))), {}
    else:
        modules = {"gemma3": test_gemma3, "gemma4": test_gemma4, "mllama": test_mllama, "internvl": test_internvl}
        modules |= {"idefics3": test_idefics3}
        family = modules[arch]
        model = family.make(**({"max_soft_tokens": 70} if arch == "gemma4" else {}))  # the least of transformers
        words = ("" if arch == "internvl" else "<bos>", "<start>", "<end>", PLACEHOLDER[arch])
        named = {"gemma3": named, "internvl": test_internvl.NAMED}.get(arch, {"image_token": PLACEHOLDER[arch]})
    template = MARKED.replace("CONTENT", CONTENT)
    for name, word in zip(("BOS", "START", "END", "IMAGE"), words, strict=True):
        template = template.replace(name, word)
    config = {"chat_template": template, "pad_token": words[2], "bos_token": words[0] or None, "eos_token": words[2]}
    config |= {"extra_special_tokens": named, "tokenizer_class": "PreTrainedTokenizerFast"}
    model.assets["tokenizer_config.json"] = json.dumps(config).encode()
    if arch == "gemma3":
        model.assets["processor_config.json"] = b'{"image_seq_length": 4, "processor_class": "Gemma3Processor"}'
    return model


TOKENS = {
    "grid": {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    "gemma4": {
        "image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "video": "<|video|>", "audio": "<|audio|>",
        "boa": "<|audio>", "eoa": "<audio|>",
    },
}  # fmt: skip


def theirs(folder, arch: str):
    """transformers' processor of a folder, with its Pillow backend; without videos, which need torchvision."""
    if arch in ("gemma3", "mllama", "idefics3"):
        return transformers.AutoProcessor.from_pretrained(folder)

    if arch == "internvl":
        base = internvl.InternVLProcessor
    else:
        base = {"gemma4": gemma4, "glm4v": glm4v}.get(arch, qwen2_vl)
        base = getattr(base, {"gemma4": "Gemma4Processor", "glm4v": "Glm4vProcessor"}.get(arch, "Qwen2VLProcessor"))

    class WithoutVideos(base):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            if arch == "internvl":
                base.__init__(self, image_processor, tokenizer, None, image_seq_length=4, chat_template=chat_template)
                return
            for name, token in TOKENS["gemma4" if arch == "gemma4" else "grid"].items():
                setattr(self, f"{name}_token", token)
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
            self.video_start_id, self.video_end_id = tokenizer.convert_tokens_to_ids([*around(arch, "video")])
            mixin.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return WithoutVideos(images, tokenizer, chat_template=tokenizer.chat_template)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Our processor and theirs of one folder, which ours has written."""
    arch, folder = request.param, tmp_path_factory.mktemp("processor")
    model = make(arch)
    model.processor.save_pretrained(folder)
    return AutoLigerProcessor.from_pretrained(folder), theirs(folder, arch), arch


def conversation(*sizes, question="What?", answer="Red, I think."):
    images = [{"type": "image", "image": picture(*size)} for size in sizes]
    messages = [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]
    return [*messages, {"role": "assistant", "content": [{"type": "text", "text": answer}]}] if answer else messages


CHATS = [conversation((20, 12), (9, 40)), conversation((24, 24), question="And this one?"), conversation((15, 15))]
PICTURED = ("pixel_values", "image_grid_thw", "aspect_ratio_ids", "aspect_ratio_mask")


def same(got, want, more=()):
    assert {"input_ids", "attention_mask", *more} <= got.keys()
    for name, value in got.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(want[name])), name


@pytest.mark.cases(5)
def test_inputs_move_and_pixels_change_their_dtype(pair):
    ours, hf, _ = pair
    options = {"return_dict": True, "return_tensors": "pt", "padding": True, "tokenize": True}
    for arguments in (("cpu", torch.bfloat16), (torch.float16,), ("cpu",)):
        moved, theirs = (each.apply_chat_template(CHATS, **options).to(*arguments) for each in (ours, hf))
        assert {name: each.dtype for name, each in moved.items()} == {name: theirs[name].dtype for name in moved}
    text = ours.apply_chat_template(CHATS[0], tokenize=False)
    images = [part["image"] for part in CHATS[0][0]["content"][:2]]
    assert ours([text], images=images).to("meta", dtype=torch.bfloat16).pixel_values.device.type == "meta"
    lists = ours(["plain"], return_tensors=None)
    assert lists.to("meta").input_ids == lists["input_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_inputs_are_transformers(pair, side):
    ours, hf, _ = pair
    options = {"return_dict": True, "return_tensors": "pt", "padding": True, "padding_side": side, "tokenize": True}
    for chats in (CHATS, CHATS[:1]):
        got, want = (each.apply_chat_template(chats, **options) for each in (ours, hf))
        same(got, want, ["pixel_values"])
        assert got["input_ids"].shape[0] == len(chats)
        options |= {"add_generation_prompt": True}
    text, wants = (each.apply_chat_template(CHATS[0], tokenize=False) for each in (ours, hf))
    assert text == wants
    assert ours.apply_chat_template(CHATS, tokenize=False) == hf.apply_chat_template(CHATS, tokenize=False)
    images = [part["image"] for part in CHATS[0][0]["content"][:2]]
    same(ours(text=[text], images=[images]), hf(text=[text], images=[images], return_tensors="pt"), ["pixel_values"])


def test_rows_are_lists_without_return_tensors(pair):
    ours, hf, _ = pair
    for padding in (False, True, "longest"):
        options = {"return_dict": True, "return_tensors": None, "tokenize": True}
        options |= {"padding": padding, "padding_side": "right"}
        got, want = (each.apply_chat_template(CHATS, **options) for each in (ours, hf))
        for name in ("input_ids", "attention_mask"):
            assert got[name] == want[name]
        assert len(set(map(len, got["input_ids"]))) == (1 if padding else 3)
    with pytest.raises(ValueError, match=r"rows of a tensor must have one length, got .*Set padding=True"):
        ours.apply_chat_template(CHATS, padding=False)
    ids = ours.apply_chat_template(CHATS[0], return_dict=False)
    assert torch.equal(ids, ours.apply_chat_template(CHATS[0])["input_ids"])


@pytest.mark.cases(5)
def test_truncation_keeps_images_whole(pair):
    ours, hf, arch = pair
    options = {"return_dict": True, "return_tensors": "pt", "tokenize": True, "padding": "max_length"}
    options |= {"padding_side": "left"}
    whole = ours.apply_chat_template(CHATS)["input_ids"].shape[1]
    for length in (whole + 7, whole - 9):
        truncation = length < whole
        got, want = (
            each.apply_chat_template(CHATS, max_length=length, truncation=truncation, **options) for each in (ours, hf)
        )
        same(got, want, ["pixel_values"])
        assert got["input_ids"].shape[1] == length
    for length in range(2, whole, 3):
        row = ours.apply_chat_template(CHATS[0], return_labels=True)
        media = {ours.tokenizer.backend.token_to_id(token) for token in ours.media_tokens}
        fits = not media & set(row["input_ids"][0, length:].tolist())
        short = {"truncation": True, "max_length": length, "tokenize": True, "return_dict": True}
        if fits:
            got = ours.apply_chat_template(CHATS[0], return_tensors="pt", **short)
            if arch == "idefics3":  # theirs looks for the token after an image, too, and fails without it
                want = {"input_ids": row["input_ids"][:, :length]}
            else:
                want = hf.apply_chat_template(CHATS[0], return_tensors="pt", **short)
            assert torch.equal(got["input_ids"], want["input_ids"])
            continue
        with pytest.raises(ValueError, match=f"must leave room for all image tokens, got {length}, which cuts off"):
            ours.apply_chat_template(CHATS[0], **short)
        # Their Idefics3 looks for tokens that were cut off.
        theirs_raises = (
            (TypeError, "unsupported operand") if arch == "idefics3" else (ValueError, "Mismatch in `image`")
        )
        with pytest.raises(theirs_raises[0], match=theirs_raises[1]):
            hf.apply_chat_template(CHATS[0], return_tensors="pt", **short)


def test_answers_are_transformers(pair):
    """Without marks in the template, too, which transformers needs."""
    ours, hf, _ = pair
    options = {"return_dict": True, "padding": True, "tokenize": True, "padding_side": "right"}
    chats = [[*CHATS[0], *conversation((30, 9), answer="No.")], *CHATS[1:]]
    got = ours.apply_chat_template(chats, return_assistant_tokens_mask=True, return_labels=True, **options)
    want = hf.apply_chat_template(chats, return_assistant_tokens_mask=True, return_tensors="pt", **options)
    assert got["assistant_masks"].tolist() == torch.as_tensor(want["assistant_masks"]).tolist()
    assert torch.equal(got["labels"], got["input_ids"].masked_fill(got["assistant_masks"] == 0, -100))
    end = ours.tokenizer.eos_token
    assert ours.decode(got["labels"][0][got["labels"][0] != -100], False) == f"Red, I think.{end}No.{end}"
    lists = ours.apply_chat_template(chats, return_labels=True, return_tensors=None, **options)
    assert lists["labels"] == got["labels"].tolist()
    assert "assistant_masks" not in lists
    marked = ours.tokenizer.chat_template
    try:
        ours.tokenizer.chat_template = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        unmarked = ours.apply_chat_template(chats, return_labels=True, **options)
    finally:
        ours.tokenizer.chat_template = marked
    assert torch.equal(unmarked["labels"], got["labels"])
    with pytest.raises(ValueError, match="answers must be complete and in a dict, got add_generation_prompt=True"):
        ours.apply_chat_template(chats, return_labels=True, add_generation_prompt=True)


def test_images_in_an_answer_are_no_labels(pair):
    ours, hf, _ = pair
    drawn = [{"type": "text", "text": "Here: "}, {"type": "image", "image": picture(16, 16)}]
    chat = [*conversation((20, 12), answer=""), {"role": "assistant", "content": drawn}]
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenize": True}
    got = ours.apply_chat_template(chat, return_labels=True, **options)
    want = hf.apply_chat_template(chat, return_tensors="pt", **options)
    assert got["assistant_masks"].tolist() == torch.as_tensor(want["assistant_masks"]).tolist()
    image = ours.tokenizer.backend.token_to_id(ours.media_tokens[0])
    inside = (got["input_ids"] == image) & (got["assistant_masks"] == 1)
    assert inside.any()
    assert (got["labels"][inside] == -100).all()
    assert torch.equal(got["labels"] != -100, (got["assistant_masks"] == 1) & ~inside)


def test_decode_is_transformers(pair):
    ours, hf, _ = pair
    batch = ours.apply_chat_template(CHATS)
    for skip in (True, False):
        got = ours.batch_decode(batch["input_ids"], skip_special_tokens=skip)
        assert got == hf.batch_decode(batch["input_ids"], skip_special_tokens=skip)
        assert ours.decode(batch["input_ids"][0], skip) == got[0]
        assert ours.batch_decode(batch["input_ids"].tolist(), skip) == got
    assert "What?" in ours.batch_decode(batch["input_ids"])[0]


@pytest.mark.cases(5)
def test_a_saved_processor_has_its_changes(pair, tmp_path):
    _, _, arch = pair
    model = make(arch)
    processor, image = model.processor, picture(60, 20)
    if arch == "mllama":
        processor.tokenizer.chat_template += "."
    elif arch == "gemma3":
        processor.images.scans, processor.images.least = True, 8
    elif arch == "idefics3":
        processor.images.longest_edge = 48
    elif arch == "internvl":
        processor.images.max_patches = 2
    elif arch == "gemma4":
        processor.images.max_soft_tokens = 140
    else:
        processor.images.min_pixels, processor.images.max_pixels = 600, 900
        processor.videos.max_pixels = 700
    processor.save_pretrained(tmp_path / "processor")
    model.save_pretrained(tmp_path / "model")
    text = PLACEHOLDER.get(arch, "<|image_pad|>") + " and so on"
    want = processor([text], images=[image])
    unchanged = make(arch).processor([text], images=[image])
    assert arch == "mllama" or want["pixel_values"].shape != unchanged["pixel_values"].shape
    for folder in (tmp_path / "processor", tmp_path / "model"):
        again = AutoLigerProcessor.from_pretrained(folder)
        same(again([text], images=[image]), want, ["pixel_values"])
        assert again.tokenizer.chat_template == processor.tokenizer.chat_template
        assert repr(again) == repr(processor)
        options = processor.images.settings() if arch == "gemma3" else {}  # which theirs reads from the call only
        same(want, theirs(folder, arch)(text=[text], images=[[image]], return_tensors="pt", **options))
    names = {path.name for path in (tmp_path / "processor").iterdir()}
    settings = "processor_config.json" if arch == "gemma4" else "preprocessor_config.json"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", settings} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    if arch in GRIDS:
        assert AutoLigerProcessor.from_pretrained(tmp_path / "model").videos.max_pixels == 700


def test_bounds_of_one_image(pair):
    """As Qwen's own messages have them; the pixels are those of transformers for this image alone."""
    ours, hf, arch = pair
    image, other = picture(60, 44), picture(20, 30)
    part = {"type": "image", "image": image, "min_pixels": 300, "max_pixels": 1600}
    chat = [{"role": "user", "content": [part, {"type": "image", "image": other}]}]
    if arch not in GRIDS:
        with pytest.raises(ValueError, match="must not have a size of its own, got max_pixels, min_pixels"):
            ours.apply_chat_template(chat)
        return
    got = ours.apply_chat_template(chat)
    text = "<|image_pad|>"
    alone = hf(text=[text], images=[image], size={"shortest_edge": 300, "longest_edge": 1600}, return_tensors="pt")
    plain = hf(text=[text], images=[other], return_tensors="pt")
    assert torch.equal(got["image_grid_thw"], torch.cat([alone["image_grid_thw"], plain["image_grid_thw"]]))
    assert torch.equal(got["pixel_values"], torch.cat([alone["pixel_values"], plain["pixel_values"]]))
    assert alone["image_grid_thw"].prod() > ours([text], images=[image])["image_grid_thw"].prod()
    all_alike = ours([text * 2], images=[image, other], min_pixels=300, max_pixels=[1600, None])
    assert torch.equal(all_alike["pixel_values"][: len(alone["pixel_values"])], alone["pixel_values"])
    few = hf(text=[text], images=[image], size={"shortest_edge": 64, "longest_edge": 200}, return_tensors="pt")
    assert torch.equal(ours([text], images=[image], max_pixels=200)["pixel_values"], few["pixel_values"])
    with pytest.raises(ValueError, match=r"one number, or one for each of the 2 images, got 2 and 1"):
        ours([text * 2], images=[image, other], max_pixels=[200])
    for wrong in ({"min_pixels": 900, "max_pixels": 800}, {"max_pixels": 0}, {"min_pixels": "9"}):
        with pytest.raises(ValueError, match="must be positive numbers of pixels, the second at least the first"):
            ours([text], images=[image], **{name: [value] for name, value in wrong.items()})
    with pytest.raises(ValueError, match="must not have a size of its own, got resized_height"):
        ours.apply_chat_template([{"role": "user", "content": [{**part, "resized_height": 28}]}])


def test_what_a_processor_prints(pair):
    ours, _, arch = pair
    text = repr(ours)
    assert text.startswith(f"{type(ours).__name__}(images={type(ours.images).__name__}(")
    settings = {"gemma3": "scans=False", "gemma4": "max_soft_tokens=70", "mllama": "max_tiles=4"}
    settings |= {"internvl": "max_patches=3", "idefics3": "longest_edge=32"}
    assert settings.get(arch, "max_pixels=400") in text


def test_options_that_say_nothing(pair):
    ours, _, _ = pair
    for options, message in (
        ({"max_length": 9}, "max_length must be a positive number of tokens, with truncation=True or padding="),
        ({"truncation": True}, "max_length must be a positive number of tokens, .* got None, truncation=True"),
        ({"padding": "max_length", "max_length": 0}, "max_length must be a positive number"),
        ({"padding": "left"}, "padding must be True, False, 'longest' or 'max_length', got 'left'"),
        ({"truncation": "only_first"}, "truncation must be True or False, got 'only_first'"),
        ({"padding_side": "top"}, "padding_side must be 'left' or 'right', got 'top'"),
        ({"return_tensors": "np"}, "return_tensors must be 'pt' or None, got 'np'"),
        ({"answers": [[], []]}, "answers must be one list for each text, got 2 lists"),
        ({"text": "a"}, "texts must be given once, got 2 of texts and text"),
    ):
        with pytest.raises(ValueError, match=message):
            ours("plain", **options)
    with pytest.raises(ValueError, match="texts must be given once, got 0"):
        ours(images=[picture(9, 9)])
    with pytest.raises(TypeError, match="paddings"):
        ours("plain", paddings=True)


def test_where_no_processor_can_be_had(tmp_path):
    with pytest.raises(TypeError, match="has no instances"):
        AutoLigerProcessor()
    with pytest.raises(FileNotFoundError):
        AutoLigerProcessor.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ValueError, match=r"must be a model with images, got LigerLlama, .*Use Tokenizer.from_pretrained"
    ):
        AutoLigerProcessor.from_pretrained(tmp_path)
    processor = make("gemma3").processor
    alone = type(processor)(processor.tokenizer, processor.images, begin="<boi>", image="<img>", end="<eoi>", tokens=4)
    with pytest.raises(ValueError, match="must come from a checkpoint to be saved"):
        alone.save_pretrained(tmp_path)


def test_spans_move_with_what_is_replaced():
    text, moved = edited(
        "ab<i>cd<i>e", [Edit(0, 0, "^"), Edit(2, 5, "III"), Edit(7, 10, "IIIII")], [(0, 2), (5, 7), (10, 11)]
    )
    assert text == "^abIIIcdIIIIIe"
    assert [text[slice(*span)] for span in moved] == ["ab", "cd", "e"]
    assert edited("abc", [Edit(1, 2, "xyz")], [(1, 2), (0, 3)]) == ("axyzc", [(1, 4), (0, 5)])
