"""Which tokens an example becomes, which of them are learned, and what a malformed example is called."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from liger_models import PackedDataset, Tokenizer
from liger_models.data.answers import AnswerDataset
from liger_models.data.encoding import Encoder
from liger_models.data.preference import encode_pair
from liger_models.data.prompts import PromptDataset, encode_prompt

from .examples import CHAT, counted, documents, write


def test_ids(make):
    ids = torch.tensor([5, 6, 7])
    ((found,),) = (list(documents(batch)) for batch in make([{"input_ids": ids, "labels": [-100, 6, -100]}]))
    assert found == ([5, 6, 7], [-100, 6, -100])
    ((found,),) = (list(documents(batch)) for batch in make([{"input_ids": [5, 6]}]))
    assert found == ([5, 6], [-100, 6])


def test_a_field_by_name(make):
    examples = [{"body": f"text {i}", "text": "not this"} for i in range(3)]
    assert counted(make(examples, field="body")) == counted(make([{"text": example["body"]} for example in examples]))


def test_answers_are_learned_and_nothing_else(make, tokenizer):
    chat = [
        {"role": "user", "content": "Grüße?"},
        {"role": "assistant", "content": "你好"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    ((found,),) = (list(documents(batch)) for batch in make([{"messages": chat}], length=128))
    ids, labels = found
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    learned = [token for token in labels if token != -100]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "你好</s>Ciao</s>"
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_a_prompt_whose_answers_the_template_changes(make, tokenizer):
    """Only the positions of answers that are learned must be known."""
    tokenizer.chat_template = CHAT.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}"
    )
    chat = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    try:
        for example in (
            {"prompt": chat[:3], "completion": chat[3:]},
            {"messages": [*chat[:1], {**chat[1], "weight": 0}, *chat[2:]]},
        ):
            ((found,),) = (list(documents(batch)) for batch in make([example], length=128))
            learned = [token for token in found[1] if token != -100]
            assert tokenizer.decode(learned, skip_special_tokens=False) == "assistant 1</s>"
        (batch,) = AnswerDataset(
            [{"prompt": chat[:3], "chosen": chat[3:], "rejected": chat[1:2]}],
            tokenizer,
            length=128,
            formats=["preference"],
            progress=False,
        )
        learned = [tokenizer.decode(row[row != -100]) for row in batch["labels"]]
        assert learned == ["assistant 1", "assistant 0"]
    finally:
        tokenizer.chat_template = CHAT


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", '{"text": '], "line 3: must be a JSON object, got: Expecting value"),
        (['{"text": "a"}', "[1]"], r"line 2: must be a JSON object, got: \[1\]. Write one example per line"),
        (['{"tekst": "a"}'], r"line 1: an example must have the columns of a format .*, got \['tekst'\]"),
        (['{"text": 3}'], "line 1: text must be a text, messages, or token ids, got '3'"),
        (['{"input_ids": [1, -2]}'], "line 1: input_ids must be a text, messages, or token ids"),
        (['{"input_ids": [1, 2147483648]}'], "line 1: input_ids must be a text, messages, or token ids"),
        (['{"text": "é"}', '{"text": "\\ud83d"}'], r"line 2: must be whole characters, got '\\ud83d'"),
        (["[", '{"text": "a"}'], "line 1: must be a JSON object, got: .* Write each example as one line"),
        (['{"input_ids": [1, 2], "labels": [1]}'], "line 1: labels must be those of input_ids"),
        (['{"input_ids": [1, 2], "labels": [2, -100]}'], "line 1: labels must be those of input_ids"),
        (['{"messages": [{"content": "x"}]}'], "line 1: message 1 must have a role, such as user, got None"),
        (['{"messages": []}'], "line 1: a chat must have a message of the assistant"),
        (
            ['{"messages": [{"role": "assistant", "content": 5}]}'],
            "line 1: message 1 must have content that is a text or",
        ),
        (['{"messages": [{"role": "assistant", "content": ["a"]}]}'], "line 1: message 1 must have parts such as"),
        (['{"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}'], "line 1: message 1 must have parts"),
        (
            ['{"instruction": "a", "output": "b", "history": [5]}'],
            r"line 1: history must be a list of pairs of question and answer, got '\[5\]'",
        ),
        (
            ['{"messages": [{"role": "user", "content": "x"}, {"role": "Assistant", "content": "y"}]}'],
            "line 1: a chat must have a message of the assistant, got only the roles 'user', 'Assistant'. Name them",
        ),
        (
            ['{"prompt": "a", "completion": "b"}', '{"prompt": "a", "completion": null}'],
            r"line 2: an example must be of format .*, got format prompt without a value for completion\.",
        ),
        (['{"text": null, "x": 1}'], r"got \['text', 'x'\] without a value for text\. Rename its columns"),
        (['{"question": "a", "answer": 4}'], "line 1: answer must be a text, got '4'"),
        (
            ['{"messages": [{"role": "assistant", "content": ""}, {"role": "x", "content": {}}]}', ""],
            None,
        ),
        (
            ['{"text": "a"}', '{"messages": [{"role": "assistant", "content": ""}]}'],
            "line 2: all examples of a file must have one format, got chat after text. Write them into several files",
        ),
        ([], r"train\.jsonl must hold documents, got none"),
    ],
)
def test_bad_input_is_named_by_file_and_line(make, tmp_path, lines, message):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines))
    if message is None:
        make(path)
        return
    with pytest.raises(ValueError, match=message) as error:
        make(path)
    assert not lines or str(error.value).startswith(f"{path}, line ")
    assert not list((tmp_path / "cache").iterdir()), "nothing half done is left"


def test_a_template_that_joins_texts_meets_a_number(tokenizer, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"messages": [{"role": "tool", "content": 1}, {"role": "assistant", "content": "a"}]}]
    )
    template = "{% for m in messages %}{{ '<' + m.content }}{% endfor %}"
    joining = Tokenizer(tokenizer.backend, {"chat_template": template})
    with pytest.raises(ValueError, match=r"line 1: .* must accept the messages, got: can only concatenate str"):
        PackedDataset(path, joining, length=32, cache_dir=tmp_path / "cache", progress=False)


CALLS = "{% for m in messages %}{{ m.role }}{% if m.content is none %}{{ m.tool_calls[0].name }}{% else %}{{ m.content }}{% endif %}{% if 'name' in m %}!{% endif %}</s>{% endfor %}"  # noqa: E501


def sources(tmp_path: Path, rows: list[Any]) -> list[Any]:
    """The same rows from all kinds of sources: a list, JSON lines, Parquet, `datasets`."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = dict.fromkeys(name for row in rows for name in row)
    full = [{name: row.get(name) for name in names} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(full), tmp_path / "a.parquet")
    return [rows, write(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet", datasets.Dataset.from_list(full)]


def test_null_as_content_is_the_same_from_everywhere(tokenizer, tmp_path):
    own = Tokenizer(tokenizer.backend, {"eos_token": "</s>", "chat_template": CALLS})
    options = {"length": 64, "cache_dir": tmp_path / "cache", "progress": False}
    user, answer = {"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    for source in sources(tmp_path, [{"messages": [user, call]}, {"messages": [user, answer]}]):
        found = {
            own.decode(list(ids), skip_special_tokens=False) for ids in counted(PackedDataset(source, own, **options))
        }
        assert found == {"usera</s>assistantf</s>", "usera</s>assistantb</s>"}
    for bad in ({**answer, "content": None}, {**user, "content": None}, {**call, "tool_calls": []}):
        rows = [{"messages": [user, answer]}, {"messages": [answer, bad]}]
        for source in sources(tmp_path, rows):
            with pytest.raises(ValueError, match=r"(line|row|example) 2: message 2 must have content, got null"):
                PackedDataset(source, own, **options)


def test_what_is_not_text_is_refused(tokenizer, tmp_path):
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|image|>"])
    own = Tokenizer(backend, {"eos_token": "</s>", "chat_template": CHAT})
    options = {"length": 256, "cache_dir": tmp_path / "cache", "progress": False}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "b"}]}
    part = {"type": "image", "text": None}
    typed = [{"type": "text", "text": "a"}, part]
    fine = {"text": "a", "images": []}
    for row, message in (
        ({"text": "see <|image|>"}, r"a text must be without images, got <\|image\|>"),
        (
            {"messages": [{"role": "user", "content": typed}, answer]},
            r"message 1 must be text, got a part image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"image_url": "x"}]}, answer]},
            "message 1 must be text, got a part image_url",
        ),
        ({"text": "a", "images": ["x.png"]}, "an example must be text, got a field images"),
        ({"messages": [answer], "video": "x.mp4"}, "an example must be text, got a field video"),
        ({"input_ids": [5, backend.token_to_id("<|image|>")]}, "token ids must be of text, got"),
    ):
        for source in ([fine, row], *sources(tmp_path, [row, row])[1:]):
            pattern = rf"(line|row|example) [12]: {message}.*pass the model's processor"
            with pytest.raises(ValueError, match=pattern):
                PackedDataset(source, own, **options)
    nulls = {"type": "text", "text": "a", "image": None}
    for rows in ([{**fine, "images": None}, fine], [{"messages": [{"role": "user", "content": [nulls]}, answer]}]):
        for source in sources(tmp_path, rows):
            assert counted(PackedDataset(source, own, **options)).total() == len(rows)


class Recorded:
    """A pipeline that notes the longest text it gets."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.longest = backend, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.longest = max([self.longest, *map(len, texts)])
        return self.backend.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.longest = max([self.longest, *map(len, texts)])
        return self.backend.encode_batch_fast(texts, **options)


GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(kind: str) -> Tokenizer:
    """A tokenizer with merges, of one of the kinds that the checkpoints have."""
    backend = Backend(models.BPE(byte_fallback=False, unk_token="?" if kind == "whole text" else None))
    special, alphabet = ["<s>", "</s>", "?"], []
    if kind == "whole text":  # as of Llama 2: one word, which begins with a space
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        [prose(4000)] if kind != "whole text" else [word + " " for word in prose(4000).split()], trainer
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    return Tokenizer(backend, config)


def prose(number: int) -> str:
    """Words, numbers, blanks and marks without a period."""
    draw = random.Random(number)
    parts = [
        "the",
        "then",
        "there",
        "ing",
        "été",
        "e\u0301",
        "你好",
        "🙂",
        " ",
        "  ",
        "\n",
        "\n\n",
        "1234567",
        "'s",
        "...",
        "</s>",
    ]
    return "".join(draw.choice(parts) + draw.choice(["", " "]) for _ in range(number))


@pytest.mark.parametrize("kind", ["words", "whole text"])
def test_a_long_text_is_tokenized_in_windows(kind, monkeypatch):
    own = trained(kind)
    long, short = prose(5000), "short"
    chat = [{"role": "user", "content": long}, {"role": "assistant", "content": prose(4000)}]
    examples = [("1", long), ("2", short), ("3", {"messages": chat}), ("4", {"text": long[:256]})]
    expected = list(Encoder(own, None).encode(examples))
    monkeypatch.setattr("liger_models.data.encoding.WINDOW_CHARACTERS", 1000)
    monkeypatch.setattr("liger_models.data.encoding.OVERLAP_CHARACTERS", 300)
    monkeypatch.setattr("liger_models.data.encoding.GROUP_CHARACTERS", 3000)
    own.backend = Recorded(own.backend)
    assert list(Encoder(own, None).encode(examples)) == expected
    assert own.backend.longest == 1000 < len(long)
    assert expected[0].ids[0] == 0
    assert expected[0].ids[-1] == 1
    assert 0 < sum(id < 0 for id in expected[2].ids) < len(expected[2].ids)


@pytest.mark.parametrize("kind", ["words", "whole text"])
def test_a_text_that_begins_with_bos_does_not_get_another(kind, monkeypatch, tmp_path):
    """Neither in windows, nor beside a prompt, in a pair or as a prompt; a text with two keeps both."""
    own = trained(kind)
    plain, doubled = (own.encode(text, add_special_tokens=False) for text in ("<s>the</s>", "<s><s>the</s>"))
    assert (plain[0], plain[1] != 0, doubled[:2]) == (0, True, [0, 0])
    records = [("1", "<s>the</s>"), ("2", {"text": "<s><s>the"}), ("3", {"prompt": "<s>the", "completion": "re"})]
    first, second, third = ([max(id, ~id) for id in document.ids] for document in Encoder(own, None).encode(records))
    assert (first, second) == (plain, doubled)
    assert third == own.encode("<s>there</s>", add_special_tokens=False)
    for chosen, rejected in [encode_pair("1", {"prompt": "<s>the", "chosen": "re", "rejected": "n"}, own)]:
        assert chosen.prompt + chosen.answer == third
        assert rejected.prompt == chosen.prompt
    rows = PromptDataset([{"prompt": "<s>the"}], own, length=8, cache_dir=tmp_path, progress=False).rows
    assert rows[0]["ids"] == plain[:-1]

    monkeypatch.setattr("liger_models.data.encoding.WINDOW_CHARACTERS", 1000)
    monkeypatch.setattr("liger_models.data.encoding.OVERLAP_CHARACTERS", 300)
    (document,) = Encoder(own, None).encode([("1", "<s>" + prose(5000))])
    assert document.ids[0] == 0 != document.ids[1]

    # A tokenizer that adds none leaves the text as it is.
    own.backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    (document,) = Encoder(own, None).encode([("1", "<s><s>the")])
    assert document.ids.tolist() == doubled


def test_a_long_text_whose_windows_do_not_join_is_tokenized_as_a_whole(monkeypatch):
    own = trained("words")
    digits = "1" * 5000  # in groups of three from its beginning
    expected = list(Encoder(own, None).encode([("1", digits)]))
    monkeypatch.setattr("liger_models.data.encoding.WINDOW_CHARACTERS", 1000)
    monkeypatch.setattr("liger_models.data.encoding.OVERLAP_CHARACTERS", 100)
    assert list(Encoder(own, None).encode([("1", digits)])) == expected


TOOLS_TEMPLATE = (
    "{% if tools is not none %}Tools:{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED, SAID = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}


def learned(
    tokenizer: Tokenizer, example: Any, template: str = TOOLS_TEMPLATE, **options: Any
) -> list[tuple[str, str]]:
    """Text and learned part of each document of an example."""
    own = Tokenizer(tokenizer.backend, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    found = []
    for ids, _ in Encoder(own, None, **options).encode([("f, line 1", example)]):
        text = own.decode([token if token >= 0 else ~token for token in ids], skip_special_tokens=False)
        found.append((text, own.decode([token for token in ids if token >= 0], skip_special_tokens=False)))
    return found


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"tool_calls": []}, "A</s>"),
        ({"tool_calls": None, "name": None, "reasoning_content": ""}, "A</s>"),
        ({"content": None, "tool_calls": [CALL]}, '(f {"x": "1"})</s>'),
        ({"content": None, "tool_calls": json.dumps([CALL])}, '(f {"x": "1"})</s>'),
        ({"tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"x": "1"}}}]}, 'A(f {"x": "1"})</s>'),
        ({"tool_calls": [{"function": {"name": "f", "arguments": None}}]}, "A(f {})</s>"),
        ({"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1"}}]}, 'A(f "[1")</s>'),
    ],
)
@pytest.mark.parametrize("tools", [None, [], "[]", "", "null"])
def test_null_and_empty_are_absent(tokenizer, fields, want, tools):
    example = {"messages": [ASKED, {**SAID, **fields}], "tools": tools}
    assert learned(tokenizer, example) == [(f"<user>Q</s><assistant>{want}", want)]


def test_arguments_of_sharegpt_are_objects(tokenizer):
    turns = [("human", "Q"), ("function_call", '{"name": "f", "arguments": "{\\"x\\": 1}"}'), ("gpt", "A")]
    example = {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}
    assert learned(tokenizer, example)[0][1] == '(f {"x": 1})</s>A</s>'


def test_a_chat_that_begins_with_an_answer(tokenizer):
    template = "{{ messages[0].role }}:" + TOOLS_TEMPLATE  # which cannot render a prompt before the first message
    example = {"conversations": [{"from": "gpt", "value": "A"}, {"from": "human", "value": "Q"}]}
    assert learned(tokenizer, example, template) == [("assistant:<assistant>A</s><user>Q</s>", "A</s>")]


@pytest.mark.parametrize("name", ["weight", "loss", "train"])
def test_messages_that_are_not_learned(tokenizer, name):
    for flag in (0, False):
        chat = [ASKED, {**SAID, name: flag}, ASKED, {"role": "assistant", "content": "B", name: not flag}]
        assert learned(tokenizer, {"messages": chat})[0][1] == "B</s>"
    with pytest.raises(ValueError, match=f"line 1: message 2 must have {name} 0 .not learned. or 1, got 'no'"):
        learned(tokenizer, {"messages": [ASKED, {**SAID, name: "no"}]})
    with pytest.raises(ValueError, match="line 1: message 1 must be learned or not, got"):
        learned(tokenizer, {"messages": [{**SAID, "weight": 1, "loss": False, "train": True}]})


@pytest.mark.parametrize(
    ("example", "field"),
    [
        ({"messages": [ASKED, {**SAID, "tool_calls": [CALL]}]}, "message 2: tool_calls"),
        ({"messages": [ASKED, {**SAID, "function_call": {"name": "f"}}]}, "message 2: function_call"),
        ({"messages": [ASKED, {**SAID, "reasoning_content": "R"}]}, "message 2: reasoning_content"),
        ({"messages": [ASKED, {**SAID, "thinking": "R"}, ASKED, SAID]}, "message 2: reasoning_content"),
        ({"messages": [{"role": "system", "content": "S"}, ASKED, SAID]}, "message 1: content"),
        ({"messages": [ASKED, SAID], "tools": [CALL]}, "tools"),
    ],
)
def test_what_the_template_leaves_out(tokenizer, example, field):
    template = CHAT.replace("<{{ m.role }}>{{ m.content }}", "<{{ m.role }}>{{ m.content if m.role != 'system' }}")
    with pytest.raises(ValueError, match=f"line 1: {field} must be in the text that the chat template renders, got no"):
        learned(tokenizer, example, template)
    with pytest.warns(UserWarning, match=field):
        (found,) = learned(tokenizer, example, template, on_unrendered="warn")
    assert [found] == learned(tokenizer, example, template, on_unrendered="drop")
    assert found[1].startswith("A</s>")
    pair = {"prompt": example["messages"], "chosen": [SAID], "rejected": [SAID], **example}
    own = Tokenizer(tokenizer.backend, {"eos_token": "</s>", "chat_template": template})
    if "reasoning" in field:  # of an answer that is not learned
        encode_pair("f, line 1", pair, own)
        encode_prompt("f, line 1", pair, own)
        return
    for encode in (encode_pair, encode_prompt):
        with pytest.raises(ValueError, match=f"line 1: {field} must be in the text"):
            encode("f, line 1", pair, own)


def test_thoughts_of_earlier_answers(tokenizer):
    template = CHAT.replace(
        "{{ m.content }}", "{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}{{ m.content }}"
    )
    chat = [ASKED, {**SAID, "reasoning_content": "R"}, ASKED, {**SAID, "thinking": "T"}]
    first, second = learned(tokenizer, {"messages": chat}, template)
    assert first == ("<user>Q</s>\n<assistant>(R)A</s>\n", "(R)A</s>")
    assert second == ("<user>Q</s>\n<assistant>A</s>\n<user>Q</s>\n<assistant>(T)A</s>\n", "(T)A</s>")
    assert learned(tokenizer, {"messages": chat}, template, multi_turn="last") == [second]
    with pytest.raises(ValueError, match=r"message 2: reasoning_content must be .* or multi_turn: split"):
        learned(tokenizer, {"messages": chat}, template, multi_turn="all")
    whole = learned(tokenizer, {"messages": chat}, template, multi_turn="all", on_unrendered="drop")
    assert whole == [(second[0], "A</s>(T)A</s>")]


@pytest.mark.parametrize(
    ("columns", "want"),
    [
        ({"completion_mask": [0, 0, 1, 1, 1]}, [[~2, ~3, 4, 5, 6]]),
        ({"assistant_masks": [0, 1, 0, True, 0], "completion_mask": [0, 0, 0, 1, 1]}, [[~2, ~3, ~4, 5, ~6]]),
        ({"completion_mask": [0, 1, 1, 1, 1], "labels": [2, 3, -100, -100, 6]}, [[~2, 3, ~4, ~5, 6]]),
        ({"attention_mask": [0, 1, 1, 1, 0]}, [[3, 4, 5]]),
        ({"seq_lengths": [2, 3]}, [[2, 3], [4, 5, 6]]),
        ({"position_ids": [0, 1, 0, 1, 2], "seq_lengths": [2, 3]}, [[2, 3], [4, 5, 6]]),
        ({"position_ids": [0, 1, 0, 1, 7], "attention_mask": [1, 1, 1, 1, 0]}, [[2, 3], [4, 5]]),
        ({"position_ids": [1, 1, 0, 1, 2], "attention_mask": torch.tensor([0, 0, 1, 1, 1])}, [[4, 5, 6]]),
    ],
)
def test_columns_beside_token_ids(tokenizer, columns, want):
    found = Encoder(tokenizer, None).encode([("f, line 1", {"input_ids": [2, 3, 4, 5, 6], **columns})])
    assert [list(ids) for ids, _ in found] == want


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"completion_mask": [1]}, "completion_mask must be those of input_ids, 5 of them, got 1"),
        ({"assistant_masks": [0, 0, 2, 0, 0]}, "assistant_masks must have values 0 and 1"),
        ({"attention_mask": [1, 1, 2, 2, 2]}, "attention_mask must have values 0 and 1"),
        ({"attention_mask": [1, 0, 1, 1, 1]}, "attention_mask must be 0 on padding, at the ends"),
        ({"seq_lengths": [2, 2]}, "seq_lengths must add up to the 5 tokens of input_ids, got 4"),
        ({"seq_lengths": [5, 0]}, "seq_lengths must be positive numbers"),
        ({"position_ids": [3, 4, 5, 6, 7]}, "position_ids must count from 0 in each document"),
        ({"position_ids": [0, 1, 2, 0, 1], "seq_lengths": [2, 3]}, "position_ids must count .* as seq_lengths does"),
    ],
)
def test_columns_that_contradict_token_ids(tokenizer, columns, message):
    with pytest.raises(ValueError, match=f"f, line 1: {message}"):
        list(Encoder(tokenizer, None).encode([("f, line 1", {"input_ids": [2, 3, 4, 5, 6], **columns})]))


@pytest.mark.parametrize("options", [{}, {"field": "input_ids"}])
def test_masks_from_everywhere(tokenizer, tmp_path, options):
    row = {"input_ids": [2, 3, 4], "completion_mask": [0, 0, 1], "attention_mask": [1, 1, 1]}
    for source in sources(tmp_path, [row, row]):
        data = PackedDataset(
            source, tokenizer, length=8, cache_dir=tmp_path / "cache", progress=False, max_samples=1, **options
        )
        ((found,),) = (list(documents(batch)) for batch in data)
        assert found == ([2, 3, 4], [-100, -100, 4])
