"""Token ids, text, special and added tokens as in transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch

from liger_models import LigerLlama, LlamaConfig
from liger_models.text.tokenizer import Tokenizer

from .folders import KINDS, LLAMA3_STYLE, MESSAGES, SPECIAL, TEXTS, byte_level, pair

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clean_up", [False, True])
def test_ids_and_text_are_transformers(make_folder: Callable[..., Path], kind: str, clean_up: bool) -> None:
    ours, theirs = pair(make_folder(kind, clean_up_tokenization_spaces=clean_up, unk_token="<unk>"))
    for add in (True, False):
        ids = [theirs(text, add_special_tokens=add)["input_ids"] for text in TEXTS]
        assert [ours.encode(text, add_special_tokens=add) for text in TEXTS] == ids
        assert ours.encode(TEXTS, add_special_tokens=add) == ids
        for row in ids:
            for skip in (True, False):
                text = theirs.decode(row, skip_special_tokens=skip)
                assert ours.decode(row, skip_special_tokens=skip) == text
                assert ours.decode(torch.tensor(row, dtype=torch.int64), skip) == text
    assert len(ours) == len(theirs)
    assert ours.vocab_size == theirs.vocab_size


def stream_of(ids: Any) -> Iterator[torch.Tensor]:
    """As a model streams the tokens of one prompt."""
    return (torch.tensor([token]) for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_decoded_as_a_whole(make_folder: Callable[..., Path], kind: str) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(kind, unk_token="<unk>"))
    for text in TEXTS:
        for skip in (True, False):
            ids = tokenizer.encode(text)
            pieces = list(tokenizer.decode_stream(stream_of(ids), skip))
            assert "".join(pieces) == tokenizer.decode(ids, skip)
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
            assert list(tokenizer.decode_stream(ids, skip)) == pieces
    assert list(tokenizer.decode_stream([])) == []
    with pytest.raises(ValueError, match="each tensor must have one token, got 2"):
        list(tokenizer.decode_stream([torch.tensor([3, 4])]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_any_tokens_is_decoded(make_folder: Callable[..., Path], kind: str) -> None:
    """Broken characters are replaced: at the end as by `decode`, in the middle perhaps by fewer signs."""
    tokenizer = Tokenizer.from_pretrained(make_folder(kind, unk_token="<unk>"))
    sign = "\N{REPLACEMENT CHARACTER}"
    for seed in range(100):
        ids = torch.randint(len(tokenizer), (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        streamed, whole = "".join(tokenizer.decode_stream(ids)), tokenizer.decode(ids)
        assert streamed == whole or (sign in streamed and sign in whole)
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    if len(smile) > 3:
        assert "".join(tokenizer.decode_stream(smile[:-1])).count(sign) > 0


def test_the_clean_up_is_for_word_pieces_only(make_folder: Callable[..., Path]) -> None:
    text = "it 's here , no ?"
    for kind, expected in (("word_piece", "it's here, no?"), ("byte_level", text)):
        tokenizer = Tokenizer.from_pretrained(make_folder(kind, clean_up_tokenization_spaces=True, unk_token="<unk>"))
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_special_tokens(make_folder: Callable[..., Path]) -> None:
    ours, theirs = pair(make_folder())
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert ours.special_tokens == SPECIAL
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 1, None)
    assert ours.encode("x")[0] == 0


def test_special_tokens_as_objects_from_the_map_and_new_ones(make_folder: Callable[..., Path]) -> None:
    token = {"content": "<|eot_id|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    folder = make_folder(bos_token={"__type": "AddedToken", **token, "content": "<|begin_of_text|>"}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": token, "pad_token": "[PAD]"}))
    ours, theirs = pair(folder)
    assert ours.special_tokens == {**SPECIAL, "pad_token": "[PAD]"} == theirs.special_tokens_map
    assert ours.pad_token_id == theirs.pad_token_id == len(ours) - 1
    assert ours.encode("a[PAD]b") == theirs("a[PAD]b")["input_ids"]
    assert ours.decode(ours.encode("a[PAD]b")) == theirs.decode(
        theirs("a[PAD]b")["input_ids"], skip_special_tokens=True
    )


def test_added_tokens_of_the_config(make_folder: Callable[..., Path]) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
    size = byte_level().get_vocab_size()
    added = {
        str(size + 1): {"content": "<b>", **flags, "special": False},
        str(size): {"content": "<a>", **flags, "special": True},
    }
    ours, theirs = pair(make_folder(added_tokens_decoder=added))
    text = "x <a> y <b>  z"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert {size, size + 1} <= set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_special_is_what_the_config_names(make_folder: Callable[..., Path], key: str) -> None:
    """A chat fine-tune whose end token is a plain added token in tokenizer.json."""
    folder = make_folder(eos_token="<|im_end|>", **{key: ["<|im_start|>", "<|new|>"]})
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(token, rstrip=True) for token in ("<|im_end|>", "<|im_start|>")])
    backend.save(str(folder / "tokenizer.json"))
    ours, theirs = pair(folder)
    text = "<|im_start|>user\nHi<|im_end|>  <|new|> x"
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "<|im_start|>user\nHi x"
    assert len(ours) == len(theirs)


def test_the_files_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert tokenizer.bos_token is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, "<|end|>"])
def test_batches(make_folder: Callable[..., Path], side: str, pad: str | None) -> None:
    ours, theirs = pair(make_folder(pad_token=pad))
    if pad is None:
        theirs.pad_token = theirs.eos_token
    batch = ours(TEXTS, padding_side=side)
    expected = theirs(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask"}
    for name, tensor in batch.items():
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor, expected[name]), name
    assert ours("one text")["attention_mask"].shape[0] == 1
    assert ours([])["input_ids"].shape == (0, 0)
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'top'"):
        ours(TEXTS, padding_side="top")


def test_from_the_files_of_a_model(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(chat_template=LLAMA3_STYLE)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert Tokenizer.from_files(files).encode(TEXTS) == Tokenizer.from_pretrained(folder).encode(TEXTS)


def test_changes_are_saved_with_the_model(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(chat_template=LLAMA3_STYLE)
    model = LigerLlama(LlamaConfig(**SIZES, vocab_size=len(Tokenizer.from_pretrained(folder))))
    model.assets = {path.name: path.read_bytes() for path in folder.iterdir()}
    model.assets["special_tokens_map.json"] = json.dumps(SPECIAL).encode()
    tokenizer = model.tokenizer
    model.save_pretrained(folder / "same")
    assert all((folder / "same" / name).read_bytes() == content for name, content in model.assets.items())
    size = len(tokenizer)
    assert tokenizer.add_tokens(["<|user|>", "<|over|>"], special_tokens=True) == 2
    assert tokenizer.add_tokens("<think>") == 1
    assert tokenizer.add_tokens(["<think>", "<|user|>"]) == 0
    tokenizer.special_tokens["eos_token"] = "<|over|>"
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "more")
    ours, theirs = pair(folder / "more")
    text = "a<|user|>b <think>c<|over|>"
    assert [*range(size, size + 3)] == [ours.encode(each)[-1] for each in ("<|user|>", "<|over|>", "<think>")]
    assert tokenizer.encode(text) == ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert len(ours) == len(theirs) == size + 3
    assert ours.eos_token == theirs.eos_token == "<|over|>"
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == rendered
    assert rendered.count("<|over|>") == len(MESSAGES)
    again = LigerLlama.from_pretrained(folder / "more", progress=False)
    ids = torch.tensor([ours.encode(text)])
    assert torch.equal(again(ids).logits, model(ids).logits)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template: must be a str to be saved, got NoneType"):
        model.save_pretrained(folder / "more")


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"must have tokenizer\.json, got no tokenizer file"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    message = r"must have tokenizer\.json, got tokenizer\.model\. Write one with transformers"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: must be JSON"):
        Tokenizer.from_pretrained(tmp_path)


def test_the_side_of_padding_is_an_attribute(make_folder: Callable[..., Path]) -> None:
    ours, theirs = pair(make_folder(pad_token="<|eot_id|>"))
    ours.padding_side = theirs.padding_side = "right"
    expected = theirs(TEXTS, padding=True, return_tensors="pt")
    assert all(torch.equal(value, expected[name]) for name, value in ours(TEXTS).items())
    ours.padding_side = "middle"
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'middle'"):
        ours(TEXTS)
    for name in ("truncation_side", "model_max_length", "mask_token"):
        with pytest.raises(AttributeError):  # it would be ignored
            setattr(ours, name, "left")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": {"id": 3}}, r"bos_token must be a text, or an object with the text content, got {'id': 3}"),
        ({"eos_token": 7}, "eos_token must be a text"),
        ({"chat_template": 7}, "chat_template must be a text, or texts by name, got 7"),
        ({"chat_template": [{"template": "x"}]}, "must belong to the tokenizer, got KeyError: 'name'"),
        ({"added_tokens_decoder": {"x": 1}}, "must belong to the tokenizer, got ValueError: invalid literal"),
        ({"added_tokens_decoder": {"900": {"contents": "x"}}}, "must belong to the tokenizer, got KeyError: 'content'"),
    ],
)
def test_an_invalid_configuration_names_the_file(
    make_folder: Callable[..., Path], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"tokenizer_config.json: {message}"):
        Tokenizer.from_pretrained(make_folder(**config))


class PanicException(BaseException):
    pass


def test_a_panic_of_the_library_names_the_file(make_folder: Callable[..., Path]) -> None:
    """It derives from BaseException, and its class cannot be imported."""
    tokenizer = Tokenizer.from_pretrained(make_folder())
    tokenizer.backend = mock.Mock(**{
        f"{name}.side_effect": PanicException("index out of bounds") for name in ("encode", "encode_batch", "decode")
    })  # fmt: skip
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer(["x"]), lambda: tokenizer.decode([1])):
        with pytest.raises(ValueError, match=r"tokenizer.json: must .*, got PanicException: index out of bounds"):
            call()
