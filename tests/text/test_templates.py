"""Chat templates of families, as TRL ships them and rebuilt: texts of transformers, and exactly the answers learned.

The templates in `tests/fixtures/templates` are short ones with the structure of families' own.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have wide bars)

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liger_models.data.preference import encode_pair
from liger_models.text.templates import THOUGHTS
from liger_models.text.tokenizer import Tokenizer

from ..late import transformers
from .folders import TEMPLATES as OWN
from .folders import WRITTEN, tokenizer_of

Messages = list[dict[str, Any]]
Case = tuple[Messages, list[Any] | None]


def trl_templates() -> dict[str, Path]:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    return {f"trl-{path.stem}": path for path in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))}


TEMPLATES = OWN | trl_templates()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": {"city": city}}
    return {"id": f"callabcd{number}", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": f"callabcd{number}", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks up a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}},
        },
    }
]
ASKED, ASKED_MORE = user("Qone?"), user("Qtwo?")
CASES: dict[str, Case] = {
    "one turn": ([ASKED, answer("Aone here.")], None),
    "two turns": ([ASKED, answer("Aone here."), ASKED_MORE, answer("Atwo")], None),
    "the same twice": ([ASKED, answer("Aone"), ASKED, answer("Aone")], None),
    "system": ([{"role": "system", "content": "Qsystem."}, ASKED, answer("Aone"), ASKED_MORE, answer("Atwo")], None),
    "tools": ([ASKED, answer("Aone")], TOOLS),
    "a call": ([ASKED, answer(None, tool_calls=[call(1, "Aparis")]), result(1, "Qsunny"), answer("Atwo")], TOOLS),
    "empty content": ([ASKED, answer("", tool_calls=[call(1, "Aparis")]), result(1, "Qs"), answer("Atwo")], TOOLS),
    "calls": (
        [
            *(ASKED, answer("Aone", tool_calls=[call(1, "Aparis"), call(2, "Arome")])),
            *(result(1, "Qsunny"), result(2, "Qrain"), answer("Atwo"), ASKED_MORE, answer("Athree")),
        ],
        TOOLS,
    ),
    "a call at the end": ([ASKED, answer(None, tool_calls=[call(1, "Aparis")])], TOOLS),
    "thoughts": ([ASKED, answer("Aone", reasoning_content="Athought")], None),
    "thoughts twice": (
        [ASKED, answer("Aone", thinking="Athought"), ASKED_MORE, answer("Atwo", reasoning_content="Amore")],
        None,
    ),
    "thoughts in content": (
        [ASKED, answer("<think>\nAthought\n</think>\n\nAone"), ASKED_MORE, answer("<think>\nAmore\n</think>\n\nAtwo")],
        None,
    ),
    "an answer first": ([answer("Ahello"), ASKED, answer("Aone")], None),
    "two answers": ([ASKED, answer("Aone"), answer("Atwo")], None),
    "white space": ([user("  Qone?\n"), answer("  Aone \n"), user("\nQtwo?"), answer("\n\nAtwo ")], None),
    "markup": ([user("<b>Qone</b>"), answer("<div><p>Aone</p></div>"), user("<i>"), answer("</p>Atwo<p>")], None),
    "a question at the end": ([ASKED, answer("Aone"), ASKED_MORE], None),
}


TAKES_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take no text as content."""


def case_of(name: str, case: str) -> Case:
    """A conversation as messages that a template takes."""
    messages, tools = CASES[case]
    if not any(family in name for family in TAKES_PARTS):
        return messages, tools
    contents = [[{"type": "text", "text": m["content"]}] if m["content"] else m["content"] for m in messages]
    return [{**m, "content": content} for m, content in zip(messages, contents, strict=True)], tools


def rendered(tokenizer: Tokenizer, messages: Messages, tools: list[Any] | None, **options: Any) -> str | None:
    """The text of transformers; None if the template refuses the messages there, too."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        texts, _ = transformers.utils.chat_template_utils.render_jinja_template(
            [present],
            tools=tools,
            chat_template=tokenizer.chat_template,
            bos_token="<bos>",
            eos_token="<eos>",
            **options,
        )
    except Exception:  # whatever a template raises
        return None
    return str(texts[0])


def words(messages: Messages) -> Iterator[str]:
    """What the assistant says: the words that begin with A."""
    for message in messages:
        if message["role"] == "assistant":
            yield from re.findall(r"\bA[a-z]+", json.dumps({**message, "role": ""}))


def outcome(tokenizer: Tokenizer, messages: Messages, tools: list[Any] | None) -> str:
    """ "equal", or why the conversation is refused; asserts that nothing else is learned."""
    try:
        examples = tokenizer.render_examples(messages, tools=tools, multi_turn="split")
    except ValueError as error:
        return "refused by the template" if rendered(tokenizer, messages, tools) is None else str(error)
    missing = [field for example in examples for field in example.unrendered]
    if missing:
        return f"lacks {missing[0].split(': ')[-1]}"

    # Texts: of transformers, up to some answer, and the token that ends the turn.
    texts = {rendered(tokenizer, messages[: end + 1], tools) for end in range(len(messages))}
    special = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    for example in examples:
        ends = {example.text.removesuffix(token) for token in special} | {example.text}
        assert ends & texts or texts == {None} or rendered(tokenizer, messages, tools) is None

    # Labels: what the assistant says, and no more.
    parts = [example.text[start:end] for example in examples for start, end in example.spans]
    learned = "".join(parts)
    assert not re.search(r"\bQ(?!uestion:)[a-z]+", learned)
    for word in words(messages):
        assert learned.count(word) >= 1, (word, learned)
    if "generation" not in str(tokenizer.chat_template):
        for part in parts:
            ends = WRITTEN.search(part) or re.search(r"(<eos>|User:|Question:|Falcon:|Answer:)$", part)
            assert ends or messages[-2]["role"] == "assistant", part  # Gemma 4 joins neighboring answers
    return "equal"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_conversation_is_equal_or_refused_with_a_reason(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    outcomes = {case: outcome(tokenizer, *case_of(name, case)) for case in CASES}
    reasons = {"equal", "refused by the template", *(f"lacks {field}" for field in ("tool_calls", "tools", "content"))}
    assert {*outcomes.values()} <= {*reasons, "lacks reasoning_content"}
    # No family refuses what everybody has.
    assert {outcomes[case] for case in ("one turn", "two turns", "the same twice", "white space")} == {"equal"}


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
    messages, tools = CASES[case]
    examples = tokenizer_of(TEMPLATES[name]).render_examples(messages, tools=tools, multi_turn="split", **options)
    return [[example.text[start:end] for start, end in example.spans] for example in examples]


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
    messages, _ = CASES["thoughts twice"]
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


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith("_training")])
def test_marked_answers_are_those_of_transformers(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    messages, _ = case_of(name, "two turns")
    example, *others = tokenizer.render_examples(messages, multi_turn="split")
    options = {"return_assistant_tokens_mask": True, "bos_token": "<bos>", "eos_token": "<eos>"}
    texts, spans = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, **options
    )
    if not others:
        assert (example.text, example.spans) == (texts[0], [*map(tuple, spans[0])])


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    messages, _ = case_of(name, "two turns")
    prompt = tokenizer.render_prompt(messages[:3])
    assert prompt.text == rendered(tokenizer, messages[:3], None, add_generation_prompt=True)
    assert (prompt.spans, prompt.unrendered) == ([], [])


@pytest.mark.parametrize("name", LEARNED)
def test_answers_of_preferences_are_those_of_chats(name: str) -> None:
    if name not in TEMPLATES:
        pytest.skip("needs TRL")
    tokenizer = tokenizer_of(TEMPLATES[name])
    messages, _ = CASES["two turns"]
    pair = {"prompt": messages[:3], "chosen": messages[3:], "rejected": [answer("Aother")]}
    chosen, rejected = encode_pair("pair 1", pair, tokenizer)
    want = LEARNED[name][-1][-1]
    assert tokenizer.decode(chosen.answer, skip_special_tokens=False) == want
    assert tokenizer.decode(rejected.answer, skip_special_tokens=False) == want.replace("Atwo", "Aother")
    assert chosen.prompt == rejected.prompt
