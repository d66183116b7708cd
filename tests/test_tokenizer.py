import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from liger_models import LigerLlama, LlamaConfig
from liger_models.tokenizer import Tokenizer, answer_mask

TEXTS = [
    "Hello, world! It's 2024 .",
    "  two  spaces, a\ttab\nand a line",
    "naïve café — 你好 🙂",
    "<|begin_of_text|>special<|eot_id|> in the text",
    "",
    "n't stop ' quoted ' we 've , you 're ? !",
]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
CORPUS = [*TEXTS, "system user assistant tools", "the quick brown fox jumps over the lazy dog"] * 4
MESSAGES = [
    {"role": "system", "content": "  Be <brief> & 'kind'.  "},
    {"role": "user", "content": "Grüße?\nSecond line"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": '<ü> "q"', "parameters": {"b": 1, "a": [2]}}}

LLAMA3_STYLE = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("a " + message.role + " cannot speak") }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{% endif %}
"""
FEATURES = """\
{%- set ns = namespace(seen=0) -%}
{% for message in messages %}
    {% if loop.index0 == 1 %}
        {% continue %}
    {% endif %}
    {% if loop.index0 == 3 %}
        {% break %}
    {% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% generation %}
{{ message.content | tojson }}{{ {"b": "é<>", "a": none} | tojson(sort_keys=true) }}
    {% endgeneration %}
{% endfor %}
{{ ns.seen }} {{ mood }} {{ strftime_now("%Y") }} {{ documents }} {{ pad_token is defined }} {{ eos_token }}
"""


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3: byte-level BPE that begins a text with bos."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL.values(), "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: sentencepiece-like BPE over characters, unknown ones as bytes."""
    pieces = [*SPECIAL.values(), "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilnorstuw"]
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|eot_id|>", special_tokens=[("<|begin_of_text|>", 0), ("<|eot_id|>", 1)]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL.values()], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
}


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write tokenizer.json and tokenizer_config.json."""

    def make(kind: str = "byte_level", **config: Any) -> Path:
        KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def pair(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


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


@pytest.mark.parametrize("template", [LLAMA3_STYLE, FEATURES], ids=["llama3", "features"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True, "tools": [TOOL], "date_string": "1 Mai"}])
def test_chat_templates_render_as_in_transformers(
    make_folder: Callable[..., Path], template: str, options: dict[str, Any]
) -> None:
    ours, theirs = pair(make_folder(chat_template=template))
    options = options | {"mood": "calm"}
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text
    assert len(text) > 80
    ids = theirs.apply_chat_template(MESSAGES, **options)["input_ids"]
    assert ours.apply_chat_template(MESSAGES, **options) == ids
    if template is FEATURES:
        assert f" calm {datetime.now().year} None False <|eot_id|>" in text


def test_templates_by_name(make_folder: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    ours, theirs = pair(make_folder(chat_template=named))
    for options in ({}, {"tools": [TOOL]}):
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text


def test_a_template_file_comes_first(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(chat_template="from the config")
    (folder / "chat_template.jinja").write_text("größer: {{ messages | length }}", encoding="utf-8")
    ours, theirs = pair(folder)
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == "größer: 4"
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "größer: 4"


def test_a_template_of_a_processor_of_transformers_4(make_folder: Callable[..., Path]) -> None:
    """Before the tokenizer's own, behind a file of its own, as where transformers loads a processor."""
    folder = make_folder(chat_template="from the config")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False) == "of the processor"
    (folder / "chat_template.jinja").write_text("of the file")
    assert Tokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False) == "of the file"


def test_templates_that_cannot_be_used(make_folder: Callable[..., Path]) -> None:
    cases = {
        None: "must have a chat template default, got none",
        LLAMA3_STYLE: "the chat template must accept the messages, got: a robot cannot speak",
        "{{ messages[9].role.name }}": "has no attribute|has no element",
        "{% for %}": "got: Expected|got: expected",
        "{{ ''.__class__.__mro__ }}": "unsafe",
        "{{ messages.append(1) }}": "'append' of 'list' object is unsafe",
    }
    for template, message in cases.items():
        tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
        with pytest.raises(ValueError, match=message):
            tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])
    only_tools = [{"name": "tool_use", "template": "x"}]
    with pytest.raises(ValueError, match="must have a chat template default, got tool_use"):
        Tokenizer.from_pretrained(make_folder(chat_template=only_tools)).apply_chat_template(MESSAGES)


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
    with pytest.raises(ValueError, match="chat_template: must be text to be saved, got NoneType"):
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


CHAT = [
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": " 你好 🙂 the"},
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "quick\n\n"},
]
MARKED = """\
{%- for message in messages -%}
    {{ '<|start|>' + message.role + '<|end|>\\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration -%}
        {{ '\\n' }}
    {%- else -%}
        {{ message.content + eos_token + '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n' }}{% endif -%}
"""
UNMARKED = MARKED.replace("{%- generation %}", "").replace("{% endgeneration -%}", "{#- -#}")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_answers_are_those_of_transformers(make_folder: Callable[..., Path], kind: str) -> None:
    ours, theirs = pair(make_folder(kind, chat_template=MARKED))
    text, spans = ours.render_answers(CHAT)
    assert text == ours.apply_chat_template(CHAT, tokenize=False)
    assert [text[start:end] for start, end in spans] == [" 你好 🙂 the<|eot_id|>", "quick\n\n<|eot_id|>"]
    assert Tokenizer.from_pretrained(make_folder(kind, chat_template=UNMARKED)).render_answers(CHAT) == (text, spans)

    encoding = ours.backend.encode(text, add_special_tokens=False)
    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert encoding.ids == expected["input_ids"]
    mask = answer_mask(encoding.offsets, spans)
    assert [int(learnt) for learnt in mask] == expected["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


def test_an_answer_without_end_token_keeps_its_white_space(make_folder: Callable[..., Path]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"  # noqa: E501
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
    text, spans = tokenizer.render_answers(CHAT[:2])
    assert [text[start:end] for start, end in spans] == ["  你好 🙂 the\n\n"]


def test_templates_that_do_not_tell_where_answers_stand(make_folder: Callable[..., Path]) -> None:
    # As templates that take the thoughts out of all answers but the last.
    forgetful = "{% for m in messages %}{{ m.content if loop.last else m.content | trim }}|{% endfor %}"
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=forgetful))
    with pytest.raises(ValueError, match="must render the messages up to message 2 as the beginning of the convers"):
        tokenizer.render_answers(CHAT)
    text, spans = tokenizer.render_answers(CHAT[:2])
    assert [text[start:end] for start, end in spans] == [" 你好 🙂 the|"]

    filtered = "{% set t %}{% generation %} x {% endgeneration %}{% endset %}{{ t | trim }}"
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=filtered))
    with pytest.raises(ValueError, match="must stand in the text as it is"):
        tokenizer.render_answers(CHAT)
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=MARKED))
    with pytest.raises(ValueError, match=r"hold neither U\+FDD0 nor U\+FDD1"):
        tokenizer.render_answers([{"role": "user", "content": "\ufdd0\ufdd1"}, *CHAT])
    with pytest.raises(ValueError, match="must accept the messages"):
        Tokenizer.from_pretrained(make_folder(chat_template=LLAMA3_STYLE)).render_answers(
            [{"role": "x", "content": ""}]
        )
