"""Formats of examples: each becomes the documents of the format that it means, and is recognized by its columns."""

import pytest

from liger_models import PackedDataset, Tokenizer
from liger_models.data.formats import ALPACA, ALPACA_INPUT

from .examples import documents, write

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALLS = "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


@pytest.fixture
def read(tokenizer, tmp_path):
    """All text of the documents of a file, and what of it is learned."""

    def made(example, *more, template=CALLS, **options):
        own = Tokenizer(tokenizer.backend, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
        path = write(tmp_path / "a.jsonl", [example, *more])
        options = {"length": 512, "cache_dir": tmp_path / "cache", "progress": False, "shuffle": False, **options}
        data = PackedDataset(path, own, **options)
        found = [document for batch in data for document in documents(batch)]
        learned = [[token for token in labels if token != -100] for _, labels in found]
        texts = [
            [own.decode(ids, skip_special_tokens=False) for ids in each]
            for each in ([ids for ids, _ in found], learned)
        ]
        return [pair for pair in zip(*texts, strict=True) if pair[0]], data

    return made


@pytest.mark.parametrize(
    ("example", "text", "learned"),
    [
        ({"messages": [ASKED, ANSWERED]}, "<user>2 + 2?</s><assistant>4</s>", "4</s>"),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "system": "S"},
            "<system>S</s><user>2 + 2?</s><assistant>4</s>",
            "4</s>",
        ),
        ({"conversations": [ASKED, ANSWERED]}, "<user>2 + 2?</s><assistant>4</s>", "4</s>"),
        (
            {
                "conversations": [
                    {"from": "system", "value": "S"},
                    {"from": "human", "value": "?"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "!"},
                ]
            },
            "<system>S</s><user>?</s><assistant>f</s><tool>1</s><assistant>!</s>",
            "f</s>!</s>",
        ),
        *(
            (
                {
                    "conversations": [
                        {"from": "human", "value": "?"},
                        {"from": "function_call", "value": '{"name": "f"}', **keys},
                        {"from": "gpt", "value": "!"},
                    ]
                },
                "<user>?</s><assistant>f</s><assistant>!</s>",
                "!</s>",
            )
            for keys in ({"weight": 0}, {"loss": False}, {"train": False})
        ),
        (
            {"instruction": "Add.", "input": "2, 2", "output": "4", "text": "something else"},
            "<user>Add.\n\n2, 2</s><assistant>4</s>",
            "4</s>",
        ),
        (
            {"instruction": "Add.", "input": "", "output": "4", "system": "S", "history": [["a", "b"]]},
            "<system>S</s><user>a</s><assistant>b</s><user>Add.</s><assistant>4</s>",
            "4</s>",
        ),
        (
            {"instruction": "Add.", "context": "2, 2", "response": "4"},
            "<user>Add.\n\n2, 2</s><assistant>4</s>",
            "4</s>",
        ),
        ({"question": "2 + 2?", "answer": "4"}, "<user>2 + 2?</s><assistant>4</s>", "4</s>"),
        ({"prompt": "2 + 2 = ", "completion": "4"}, "<s>2 + 2 = 4</s>", "4</s>"),
        (
            {"prompt": [ASKED, ANSWERED, ASKED], "completion": [{"role": "assistant", "content": "5"}]},
            "<user>2 + 2?</s><assistant>4</s><user>2 + 2?</s><assistant>5</s>",
            "5</s>",
        ),
        (
            {"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, {**ANSWERED, "weight": 1}]},
            "<user>2 + 2?</s><assistant>4</s><user>2 + 2?</s><assistant>4</s>",
            "4</s>",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "a", "weight": 0}, {"from": "gpt", "value": "b"}]},
            "<assistant>a</s><assistant>b</s>",
            "b</s>",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": c} for c in "ab"]}, ANSWERED]},
            "<user>ab</s><assistant>4</s>",
            "4</s>",
        ),
        ({"text": "abc"}, "<s>abc</s>", "abc</s>"),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, None, None),
    ],
)
def test_each_format(read, example, text, learned):
    found, _ = read(example)
    if text is None:
        assert len(found) == 1
    else:
        assert found == [(text, learned)]


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    "example",
    [
        {"messages": [ASKED, ANSWERED]},
        {"messages": [SYSTEM, ASKED, ANSWERED]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "S"}]}, ASKED, ANSWERED]},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]},
        {"conversations": [{"from": "system", "value": "S"}, ASKED, ANSWERED]},
    ],
)
def test_the_column_system(read, example):
    """It becomes the first message once, also if a message has this text already."""
    with_system = "<system>S</s><user>2 + 2?</s><assistant>4</s>"
    assert read({**example, "system": "S"})[0] == [(with_system, "4</s>")]
    want = read(example)[0]
    for nothing in (None, ""):
        assert read({**example, "system": nothing, "input": nothing, "context": nothing})[0] == want
    other = [{**SYSTEM, "content": "T"}, *(turn for turn in next(iter(example.values())) if "user" in turn.values())]
    with pytest.raises(ValueError, match=r"line 1: system must be part of a prompt that has another system message"):
        read({**example, next(iter(example)): other, "system": "S"})


def test_columns_that_a_prompt_of_text_must_have(read):
    example = {"prompt": "S: 2 + 2 = ", "completion": "4"}
    want = [("<s>S: 2 + 2 = 4</s>", "4</s>")]
    without = {"system": "", "context": None}
    for columns in ({"system": "S"}, {"input": "2 + 2"}, without, {"question": "T", "input": "U"}):
        assert read({**example, **columns})[0] == want
    for name in ("system", "input", "context"):
        with pytest.raises(ValueError, match=rf"line 1: {name} must be .* [Ww]rite .* into the prompt, or remove"):
            read({**example, name: "T"})


def test_a_column_system_of_questions_in_parquet(tokenizer, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    record = {"question": "2 + 2?", "answer": "4", "system": "S", "history": [["a", "b"]]}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    own = Tokenizer(tokenizer.backend, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CALLS})
    options = {"length": 512, "cache_dir": tmp_path / "cache", "progress": False, "format": "question-answer"}
    ((found,),) = (list(documents(batch)) for batch in PackedDataset(tmp_path / "a.parquet", own, **options))
    want = "<system>S</s><user>a</s><assistant>b</s><user>2 + 2?</s><assistant>4</s>"
    assert own.decode(found[0], skip_special_tokens=False) == want


def test_thoughts_before_a_tool_call(read):
    call = {"from": "function_call", "value": '{"name": "f"}', "reasoning_content": "why"}
    template = CALLS.replace("{% if m.content", "{{ m.reasoning_content }}{% if m.content", 1)
    found, _ = read({"conversations": [{"from": "human", "value": "?"}, call]}, template=template)
    assert found == [("<user>?</s><assistant>whyf</s>", "whyf</s>")]


def test_alpaca_without_a_chat_template(read):
    for given in ("", "2, 2"):
        ((text, learned),), _ = read({"instruction": "Add.", "input": given, "output": "4"}, template=None)
        between = "### Input:\n2, 2\n\n" if given else ""
        asked = f"{ALPACA.format(ALPACA_INPUT if given else '')}\n\n### Instruction:\nAdd.\n\n{between}### Response:\n"
        assert (text, learned) == (f"<s>{asked}4</s>", "4</s>")
    with pytest.raises(ValueError, match=r"line 1: system needs a chat template, and the tokenizer has none"):
        read({"instruction": "Add.", "output": "4", "system": "S"}, template=None)


def test_the_format_is_named(read):
    example = {"text": "abc", "instruction": "Add.", "output": "4"}
    assert read(example)[0] == [("<user>Add.</s><assistant>4</s>", "4</s>")]
    assert read(example, format="text")[0] == [("<s>abc</s>", "abc</s>")]
    assert read(example, field="output")[0] == [("<s>4</s>", "4</s>")]
    with pytest.raises(ValueError, match=r"format must be one of chat, .*, got 'alpaka'"):
        read(example, format="alpaka")
    with pytest.raises(ValueError, match=r"line 1: an example of format chat must have messages, got \['instruction'"):
        read(example, format="chat")
    with pytest.raises(ValueError, match="give format or field, got 'text' and 'text'"):
        read(example, format="text", field="text")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "alien", "value": "b"}]},
            "turn 2 must be from one of",
        ),
        ({"conversations": "a"}, "conversations must be a list of turns"),
        ({"conversations": [{"from": "function_call", "value": "no"}]}, "turn 1 must be a call as JSON"),
        ({"instruction": 3, "output": "a"}, "instruction must be a text, got '3'"),
        ({"instruction": "a", "output": ["b"]}, "output must be a text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "got format preference. Pairs train with objective dpo"),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "got format kto. Labeled answers train with objective kto",
        ),
        ({"prompt": "a"}, "got format prompt. Prompts without answers train with objective grpo"),
        (
            {"prompt": "a", "completion": [ANSWERED]},
            "prompt must be messages because completion holds messages, got 'a'",
        ),
        ({"prompt": [ASKED], "completion": "a"}, "prompt must be a text because completion is a text, got messages"),
        ({"messages": '[{"role": "user"'}, "messages must be a list of messages, got the text"),
        ({"messages": [ASKED, ANSWERED], "tools": "f"}, "tools must be JSON where it is a text, got 'f'"),
        ({"messages": [ASKED, ANSWERED], "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"thinks": 1}}, "variables must be names .*thinks"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, r"message 2 must have weight 0 .* or 1, got 0.5"),
        ({"instruction": "a", "output": "b", "history": [["a", "b", "c"]]}, "history must be a list of pairs"),
        ({"instruction": "a", "output": "b", "history": "abc"}, "history must be a list of pairs"),
    ],
)
def test_what_cannot_be_read(read, example, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: .*{message}"):
        read(example)


@pytest.mark.parametrize(
    "example",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [ASKED, ANSWERED]},
        {"prompt": [ASKED], "completion": [ANSWERED]},
    ],
)
def test_variables_of_the_template(read, example):
    template = "{% if thinks %}!{% endif %}" + CALLS
    assert read(example, template=template)[0] == [("<user>2 + 2?</s><assistant>4</s>", "4</s>")]
    for given in ({"thinks": True, "other": None}, '{"thinks": true}'):
        found, _ = read({**example, "chat_template_kwargs": given}, template=template)
        assert found == [("!<user>2 + 2?</s><assistant>4</s>", "4</s>")]


def test_a_description(read):
    _, data = read(*[{"instruction": f"Add.\n{'x' * 200}", "output": "4\n" * 30}] * 3)
    count, *lines = data.describe().splitlines()
    assert count == "3 examples, format alpaca: a.jsonl; multi_turn split"
    assert lines[0] == "    <user>Add."
    assert lines[1].startswith("    " + "x" * 157 + "...")
    assert lines[1].endswith("«4")
    assert "    ... (20 lines)" in lines
    assert lines[-1] == "    </s>»"
