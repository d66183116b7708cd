"""Chat templates of families, as TRL ships them and rebuilt: texts of transformers, and exactly the answers learned.

The templates in `tests/fixtures/templates` are short ones with the structure of families' own.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have wide bars)

import functools
import json
import re
from typing import Any

import pytest

from liger_models.data.batch import collate
from liger_models.data.dataset import PackedDataset
from liger_models.data.encoding import read_messages
from liger_models.data.formats import mark_learned
from liger_models.data.preference import encode_pair
from liger_models.data.prompts import encode_prompt
from liger_models.text.templates import THOUGHTS
from liger_models.text.tokenizer import Tokenizer

from ..data.examples import documents
from ..late import transformers
from .conversations import (
    ASKED,
    ASKED_MORE,
    CASES,
    MODELS,
    TAKE_TEXTS,
    TEMPLATES,
    TOOLS,
    Case,
    Document,
    answer,
    call,
    cases_of,
    documents_of,
    learned_in,
    outcome,
    rendered,
    spellings,
    text_of,
    user,
)
from .folders import TEMPLATES as OWN
from .folders import tokenizer_of


@pytest.mark.cases(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_conversation_is_equal_or_refused_with_a_reason(name: str) -> None:
    """`python -m tests.text.conversations` counts the outcomes."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    outcomes = {title: outcome(tokenizer, case) for title, case in cases_of(name).items()}
    fields = ("tool_calls", "tools", "content", "reasoning_content")
    assert {*outcomes.values()} <= {"equal", "refused by the template", *(f"lacks {field}" for field in fields)}
    # No family refuses what everybody has.
    plain = ("one turn", "two turns", "three turns", "the same twice", "white space", "nulls", "empty fields")
    assert {outcomes[title] for title in plain} == {"equal"}


def test_models_that_people_train_are_among_them() -> None:
    """By the structure of their templates, which the test above renders."""
    assert {template for template in MODELS.values() if not template.startswith("trl-")} <= OWN.keys()
    assert not [path for path in TEMPLATES if path.startswith("trl-")] or {*MODELS.values()} <= TEMPLATES.keys()
    assert len(MODELS) >= 60


LEARNED = {
    "qwen1": [["Aone here.<|im_end|>", "Atwo<|im_end|>"]],
    "qwq": [["Aone here.<|im_end|>", "Atwo<|im_end|>"]],
    "qwen3_next": [["\n</think>\n\nAone here.<|im_end|>"], ["\n</think>\n\nAtwo<|im_end|>"]],
    "mistral_tools": [["Aone here.<eos>", "Atwo<eos>"]],
    "mistral_small": [["Aone here.<eos>", "Atwo<eos>"]],
    "glm4": [["\nAone here.<|user|>", "\nAtwo<|user|>"]],
    "falcon": [["Aone here.\nUser:", "Atwo\n<eos>"]],
    "granite_code": [["Aone here.\n\nQuestion:", "Atwo\n\n<eos>"]],
    "nemotron_mini": [["Aone here.\n<extra_id_1>", "Atwo\n<extra_id_1>"]],
    "deepseek_tools": [["Aone here.<｜end▁of▁sentence｜>", "Atwo<｜end▁of▁sentence｜>"]],
    "exaone4": [["Aone here.[|endofturn|]", "Atwo[|endofturn|]"]],
    "exaone_deep": [["Aone here.[|endofturn|]", "Atwo[|endofturn|]"]],
    "granite3": [["Aone here.<|end_of_text|>", "Atwo<|end_of_text|>"]],
    "granite4": [["Aone here.<|end_of_text|>", "Atwo<|end_of_text|>"]],
    "olmo2": [["Aone here.<eos>", "Atwo<eos>"]],
    "smollm3": [["Aone here.<|im_end|>", "Atwo<|im_end|>"]],
    "command_r7b": [["Aone here.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "Atwo<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"]],
    "phi4_mini": [["Aone here.<|end|>", "Atwo<|end|><eos>"]],
    "trl-qwen2_5": [["Aone here.<|im_end|>", "Atwo<|im_end|>"]],
    "trl-qwen3": [["<think>\n\n</think>\n\nAone here.<|im_end|>"], ["<think>\n\n</think>\n\nAtwo<|im_end|>"]],
    "trl-qwen3_5_think": [["\n</think>\n\nAone here.<|im_end|>"], ["\n</think>\n\nAtwo<|im_end|>"]],
    "trl-qwen3_6": [["\n</think>\n\nAone here.<|im_end|>"], ["\n</think>\n\nAtwo<|im_end|>"]],
    "trl-gptoss": [["<|channel|>final<|message|>Aone here.<|return|>"], ["<|channel|>final<|message|>Atwo<|return|>"]],
    "trl-glm4moe": [["\n<think></think>\nAone here.<|user|>", "\n<think></think>\nAtwo<|user|>"]],
    "trl-llama3": [["Aone here.<|eot_id|>", "Atwo<|eot_id|>"]],
    "trl-gemma3": [["Aone here.<end_of_turn>", "Atwo<end_of_turn>"]],
    "trl-gemma4": [["Aone here.<turn|>", "Atwo<turn|>"]],
    "trl-phi3": [["Aone here.<|end|>", "Atwo<|end|>\n<eos>"]],
    "trl-deepseek_r1_distill": [["Aone here.<｜end▁of▁sentence｜>", "Atwo<｜end▁of▁sentence｜>"]],
}


def parts_of(name: str, case: str, **options: Any) -> list[list[str]]:
    messages, tools, _ = CASES[case]
    examples = tokenizer_of(TEMPLATES[name]).render_examples(messages, tools=tools, multi_turn="split", **options)
    return [[example.text[start:end] for start, end in example.spans] for example in examples]


@pytest.mark.cases(14)
@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_of_two_turns(name: str) -> None:
    if name not in TEMPLATES:
        pytest.skip("needs TRL")
    assert parts_of(name, "two turns") == LEARNED[name]


PARIS = '{"name": "lookup", "arguments": {"city": "Aparis"}'
CALLED = {
    "qwq": [[f"<tool_call>\n{PARIS}}}\n</tool_call><|im_end|>", "Atwo<|im_end|>"]],
    "mistral_tools": [[f'[TOOL_CALLS][{PARIS}, "id": "callabcd1"}}]<eos>', "Atwo<eos>"]],
    "deepseek_tools": [
        [
            '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>lookup\n```json\n{"city": "Aparis"}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "Atwo<｜end▁of▁sentence｜>",
        ]
    ],
    "exaone4": [[f"<tool_call>{PARIS}}}</tool_call>[|endofturn|]", "Atwo[|endofturn|]"]],
    "granite4": [[f"<tool_call>\n{PARIS}}}\n</tool_call><|end_of_text|>", "Atwo<|end_of_text|>"]],
    "trl-glm4moe": [
        [
            "\n<think></think>\n<tool_call>lookup\n<arg_key>city</arg_key>\n<arg_value>Aparis</arg_value>\n"
            "</tool_call><|observation|>",
            "\n<think></think>\nAtwo<|user|>",
        ]
    ],
    "trl-gptoss": [
        [
            ' to=functions.lookup<|channel|>commentary json<|message|>{"city": "Aparis"}<|call|>',
            "<|channel|>final<|message|>Atwo<|return|>",
        ]
    ],
    "trl-llama3_1": [['{"name": "lookup", "parameters": {"city": "Aparis"}}<|eot_id|>', "Atwo<|eot_id|>"]],
}


@pytest.mark.parametrize("name", CALLED)
def test_what_is_learned_of_calls(name: str) -> None:
    if name not in TEMPLATES:
        pytest.skip("needs TRL")
    assert parts_of(name, "a call") == CALLED[name]


def test_thoughts_end_examples_of_their_own() -> None:
    tokenizer = tokenizer_of(OWN["qwen3_next"])
    messages = CASES["thoughts twice"].messages
    thought = ["Athought\n</think>\n\nAone<|im_end|>"], ["Amore\n</think>\n\nAtwo<|im_end|>"]
    assert parts_of("qwen3_next", "thoughts twice") == parts_of("qwen3_next", "thoughts in content") == [*thought]
    (whole,) = tokenizer.render_examples(messages, multi_turn="all")
    assert whole.unrendered == ["message 2: reasoning_content"]
    (last,) = tokenizer.render_examples(messages, multi_turn="last")
    assert (last.unrendered, [last.text[slice(*span)] for span in last.spans]) == ([], thought[1])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (answer("Aone", tool_calls=[call(1, "Aparis")]), "message 2: tool_calls"),
        (answer("Aone", function_call={"name": "lookup", "arguments": {}}), "message 2: function_call"),
        *((answer("Aone", **{name: "Athought"}), "message 2: reasoning_content") for name in THOUGHTS),
    ],
)
def test_fields_that_a_template_leaves_out(message: dict[str, Any], field: str) -> None:
    tokenizer = tokenizer_of(OWN["granite3"])
    (example,) = tokenizer.render_examples([ASKED, message, ASKED_MORE, answer("Atwo")])
    assert example.unrendered == [field]
    assert tokenizer.render_examples([ASKED, answer("Aone")], tools=TOOLS)[0].unrendered == ["tools"]
    assert tokenizer.render_prompt([ASKED, message, ASKED_MORE]).unrendered == ([] if "reasoning" in field else [field])


def test_what_templates_look_at_is_not_marked() -> None:
    """A flag at the end of a text, and a text between tags."""
    tokenizer = tokenizer_of(OWN["smollm3"])
    messages = [{"role": "system", "content": "Qbrief. /no_think"}, ASKED, answer("Aone")]
    (example,) = tokenizer.render_examples(messages)
    assert example.text == rendered(tokenizer, messages, None)
    assert [example.text[slice(*span)] for span in example.spans] == ["Aone<|im_end|>"]
    assert example.unrendered == []

    tokenizer = tokenizer_of(OWN["qwen3_next"])
    messages = [ASKED, answer("Aone"), user("<tool_response>Qtwo</tool_response>"), answer("Atwo")]
    examples = tokenizer.render_examples(messages, multi_turn="split")
    assert examples[-1].text == rendered(tokenizer, messages, None)


# The same in every kind of training


@pytest.fixture(params=TEMPLATES)
def trained(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Case], dict[str, list[Document]]]:
    """A tokenizer, the conversations that its template takes, and the documents that supervised training makes."""
    return supervised(request.param)


@functools.cache
def supervised(name: str) -> tuple[Tokenizer, dict[str, Case], dict[str, list[Document]]]:
    tokenizer = tokenizer_of(TEMPLATES[name])
    cases, learned = {}, {}
    for title, case in cases_of(name).items():
        try:
            learned[title], cases[title] = documents_of(tokenizer, case), case
        except ValueError:
            continue
    return tokenizer, cases, learned


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize("trained", TAKE_TEXTS, indirect=True)
def test_packed_rows_have_the_labels_of_the_documents(trained: Any, tmp_path: Any) -> None:
    """Of the data set, and of its rows and collator, which go into transformers' Trainer."""
    tokenizer, cases, learned = trained
    titles = [title for title, case in cases.items() if not case.has_parts]
    rows = [{"messages": cases[title].messages, "tools": json.dumps(cases[title].tools)} for title in titles]
    want = sorted(document for title in titles for document in learned[title])
    length = max(map(len, want)) + 1
    data = PackedDataset(rows, tokenizer, length=length, batch_size=2, cache_dir=tmp_path, progress=False)
    # Nothing predicts the first token of a document.
    want = [[max(id, ~id) for id in ids] + [int(id >= 0 and i > 0) for i, id in enumerate(ids)] for ids in want]
    for batches in ([*data], [collate([data.rows[number]]) for number in range(len(data.rows))]):
        got = [
            [*ids, *(int(label == id) for id, label in zip(ids, labels, strict=True))]
            for batch in batches
            for ids, labels in documents(batch, filler=tokenizer.padding_id)
        ]
        assert sorted(got) == sorted(want)
    # What `train` prints of the first one.
    assert data.describe().endswith(mark_learned(tokenizer, learned[titles[0]][0]))


@pytest.mark.cases(8)
@pytest.mark.slow
def test_the_preview_marks_what_is_learned(trained: Any) -> None:
    tokenizer, _, learned = trained
    for title in ("one turn", "two turns"):
        for document in learned[title]:
            shown = mark_learned(tokenizer, document, lines=1000)
            parts = re.findall("«([^«»]*)»", "\n".join(line.removeprefix("    ") for line in shown.split("\n")))
            assert parts == learned_in(tokenizer, document)


@pytest.mark.cases(8)
@pytest.mark.slow
def test_prompts_are_those_of_transformers(trained: Any) -> None:
    tokenizer, cases, _ = trained
    count = 0
    for case in cases.values():
        texts = {
            rendered(tokenizer, chat[:-1], case.tools or None, add_generation_prompt=True) for chat in spellings(case)
        } - {None}
        if len(case.messages) < 2 or not texts:
            continue
        kinds = ("image",) if case.has_parts else ()
        if case.has_parts:
            prompt = tokenizer.render_prompt(read_messages("", case.messages[:-1], kinds), tools=case.tools or None)
            assert prompt.text in texts
        else:
            example = {"prompt": case.messages[:-1], "tools": case.tools}
            ids, media = encode_prompt("prompts, line 1", example, tokenizer, on_unrendered="drop")
            assert (text_of(tokenizer, ids) in texts, media) == (True, [])
        count += 1
    assert count > 10


@pytest.mark.cases(8)
@pytest.mark.slow
def test_preferences_have_the_labels_of_the_last_answer(trained: Any) -> None:
    tokenizer, cases, learned = trained
    count = 0
    for title, case in cases.items():
        *before, last = case.messages
        neighbors = [message["role"] for message in case.messages[-2:]]
        if case.has_parts or neighbors[-1] != "assistant" or neighbors[0] == "assistant" or not last["content"]:
            continue
        pair = {"prompt": before, "chosen": [last], "rejected": [answer("Aother")], "tools": case.tools}
        chosen, rejected = encode_pair("pairs, line 1", pair, tokenizer, on_unrendered="drop")
        # The last document of supervised training ends with the same answer.
        document = learned[title][-1]
        ids = [id if id >= 0 else ~id for id in document]
        assert chosen.prompt + chosen.answer == ids[: len(chosen.prompt) + len(chosen.answer)]
        assert document[len(chosen.prompt)] >= 0 > document[len(chosen.prompt) - 1]
        assert not any(id >= 0 for id in document[len(chosen.prompt) + len(chosen.answer) :])
        assert chosen.prompt[: len(rejected.prompt)] == rejected.prompt[: len(chosen.prompt)]
        assert "Aother" in text_of(tokenizer, rejected.answer)
        count += 1
    assert count > 10 or all(case.has_parts for case in cases.values())


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith("_training")])
def test_marked_answers_are_those_of_transformers(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    messages = cases_of(name)["two turns"].messages
    example, *others = tokenizer.render_examples(messages, multi_turn="split")
    options = {"return_assistant_tokens_mask": True, "bos_token": "<bos>", "eos_token": "<eos>"}
    texts, spans = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, **options
    )
    if not others:
        assert (example.text, example.spans) == (texts[0], [*map(tuple, spans[0])])


@pytest.mark.cases(14)
@pytest.mark.parametrize("name", LEARNED)
def test_answers_of_preferences_are_those_of_chats(name: str) -> None:
    if name not in TEMPLATES:
        pytest.skip("needs TRL")
    tokenizer = tokenizer_of(TEMPLATES[name])
    messages = CASES["two turns"].messages
    pair = {"prompt": messages[:3], "chosen": messages[3:], "rejected": [answer("Aother")]}
    chosen, rejected = encode_pair("pair 1", pair, tokenizer)
    want = LEARNED[name][-1][-1]
    assert tokenizer.decode(chosen.answer, skip_special_tokens=False) == want
    assert tokenizer.decode(rejected.answer, skip_special_tokens=False) == want.replace("Atwo", "Aother")
    assert chosen.prompt == rejected.prompt
