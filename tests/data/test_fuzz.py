"""Random rows of chats: each is transformers' text with the right labels, or an error that names its line and field.

The rows are the same in every run. ``LIGER_FUZZ=20`` runs twenty times as many, and ``LIGER_FUZZ_SEED=2`` others.
"""

import copy
import json
import os
import random
import re
from typing import Any

import pytest

from liger_models.data.encoding import Encoder
from liger_models.text.tokenizer import Tokenizer

from ..text.conversations import TAKE_TEXTS, TEMPLATES, TOOLS, Case, Document, check, reason
from ..text.folders import tokenizer_of

ROWS = 30
"""Rows for each template: about half a minute in all."""
TIMES = int(os.environ.get("LIGER_FUZZ", "1"))
SEED = os.environ.get("LIGER_FUZZ_SEED", "")
TEXTS: list[Any] = [
    "",
    " ",
    "Q",
    "Q here.",
    "\n\nQ\n",
    "<b>Q</b>",
    "<think>\nQ\n</think>\n\nQ",
    "[1, 2]",
    "</think>",
    "</p>Q<p>",
    "Qé🙂",
    "None",
    "{{ Q }}",
]
ODD: list[Any] = [None, [], {}, 0, False, "x", [None], [{"type": "text", "text": "x"}], {"a": None}, 1.5, "", [[]]]
ODD += [
    {"type": "image"},
    [{"type": "image"}, {"type": "text", "text": "Q"}],
    [{"text": "Q"}],
    '[{"name": "f"}]',
    "[",
    -1,
]
ROLES = ["developer", "robot", "Human", "", "function", "ipython", "assistant", "tool", 3]
FIELDS = "message|content|role|tool|call|weight|loss|train|thinking|reasoning|chat|images"
"""What an error names."""


def call(chance: random.Random) -> dict[str, Any]:
    arguments: Any = chance.choice(
        [{"x": "A"}, {}, '{"x": "A"}', "{", None, {"x": None, "y": [1, "A"]}, "[1]", "null", [], {"x": {"y": "A</b>"}}]
    )
    function = {"name": chance.choice(["f", "f", "g_h", ""]), "arguments": arguments}
    return {"id": "callabcd1", "type": "function", "function": function} if chance.random() < 0.9 else function


def row(chance: random.Random) -> dict[str, Any]:
    """Mostly an ordinary chat; what the assistant says has A where others have Q."""
    messages: list[Any] = [{"role": "system", "content": chance.choice(TEXTS)}] if chance.random() < 0.2 else []
    for _ in range(chance.randint(1, 3)):
        messages.append({"role": "user", "content": chance.choice(TEXTS)})
        answer: dict[str, Any] = {"role": "assistant", "content": chance.choice(TEXTS).replace("Q", "A")}
        if chance.random() < 0.2:
            answer |= {"tool_calls": [call(chance) for _ in range(chance.randint(0, 2))]}
            answer["content"] = chance.choice([None, "", answer["content"]])
        if chance.random() < 0.2:
            answer[chance.choice(["reasoning_content", "thinking", "reasoning"])] = chance.choice(["A", "", None])
        messages.append(answer)
        if answer.get("tool_calls"):
            messages += [
                {"role": "tool", "content": chance.choice(["Q", '{"q": "Q"}']), "tool_call_id": "callabcd1"},
                {"role": "assistant", "content": "A"},
            ]
    if chance.random() < 0.2:
        chance.shuffle(messages)
    if chance.random() < 0.1:
        chance.choice(messages)["role"] = chance.choice(ROLES)
    if chance.random() < 0.3:
        message = chance.choice(messages)
        fields = [*message, "name", "weight", "loss", "tool_calls", "function_call", "thinking", "tool_call_id"]
        message[chance.choice(fields)] = copy.deepcopy(chance.choice(ODD))
    if chance.random() < 0.1:
        message = chance.choice(messages)
        message["content"] = [{"type": "text", "text": part} for part in str(message["content"]).split(" ")]
    messages = [
        json.loads(json.dumps(message).replace("Q", "A")) if message["role"] == "assistant" else message
        for message in messages
    ]
    example: dict[str, Any] = {"messages": messages}
    if chance.random() < 0.3:
        example["tools"] = chance.choice([None, [], "[]", "", TOOLS, json.dumps(TOOLS), "x", {}, [None]])
    if chance.random() < 0.05:
        example[chance.choice(["images", "chat_template_kwargs"])] = copy.deepcopy(chance.choice(ODD))
    return example


def case_of(example: dict[str, Any]) -> Case:
    tools = example.get("tools")
    return Case(example["messages"], json.loads(tools or "null") if isinstance(tools, str) else tools)


def examine(tokenizer: Tokenizer, number: int, example: dict[str, Any]) -> bool:
    """Whether a row is refused; raises AssertionError if it should not be, or if what is learned is wrong."""
    before = json.dumps(example)
    documents: list[Document] = []
    refusal = ""
    try:
        encoder = Encoder(tokenizer, None)
        documents = [[*ids] for ids, _ in encoder.encode([(f"chats, line {number}", copy.deepcopy(example))])]
    except ValueError as error:
        refusal = str(error)
    if not refusal:
        check(tokenizer, case_of(example), documents)
        return False
    assert re.fullmatch(rf"chats, line {number}: .*\b({FIELDS})[^\n]*", refusal), (refusal, before)
    if "must accept the messages" in refusal or "that the chat template renders" in refusal:
        reason(tokenizer, case_of(example), refusal.replace(f"line {number}:", "line 1:"))
    return True


@pytest.mark.cases(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", TAKE_TEXTS)
def test_rows_of_chats(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    chance = random.Random(name + SEED)
    refused = 0
    for number in range(ROWS * TIMES):
        example = row(chance)
        before = json.dumps(example)
        try:
            refused += examine(tokenizer, number, example)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} in {before}") from error
        assert json.dumps(example) == before, "an example is not changed"
    assert refused <= 0.85 * ROWS * TIMES
