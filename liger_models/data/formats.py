"""Formats of examples: which columns each has, how it is recognised, and what it becomes for the encoder."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from liger_models.text.tokenizer import Tokenizer

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    "system": "system",
}
"""Who speaks in ShareGPT's data -> the role of a message; "call" is an assistant's message that calls a tool."""
_OF_TURN = ("tool_calls", "tool_call_id", "name", "weight")
ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"

SHOWN = 4096
"""Tokens of a document that are read to show it."""

Example = Mapping[str, Any]
Convert = Callable[[str, Example, bool], Example]
"""Takes where an example is, the example, and whether the tokenizer has a chat template."""


class Format(NamedTuple):
    """A format of examples.

    Attributes:
        columns: what an example must have; of names joined by "|", one.
        optional: other columns that are read.
        convert: makes ``messages``, or ``prompt`` and ``completion``, of it; None if it has these or another column
            that is read as it is.
        todo: what to do with an example of this format where it cannot be used.
    """

    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    convert: Convert | None = None
    todo: str = "It trains with objective sft."

    def fits(self, example: Example) -> bool:
        """Whether an example has the columns."""
        return all(any(example.get(name) is not None for name in names.split("|")) for names in self.columns)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return [name for names in (*self.columns, *self.optional) for name in names.split("|")]


def _from_sharegpt(where: str, example: Example, chat: bool) -> Example:
    turns = next(example[name] for name in ("conversations", "conversation") if example.get(name) is not None)
    if (
        not isinstance(turns, Sequence)
        or isinstance(turns, str)
        or not all(isinstance(each, Mapping) for each in turns)
    ):
        raise ValueError(
            f"{where}: conversations must be a list of turns with from and value, got {str(turns)[:60]!r}. Correct it."
        )
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        speaker, content = (_first(turn, names) for names in ("from|role", "value|content"))
        role = ROLES.get(str(speaker))
        if role is None:
            raise ValueError(
                f"{where}: turn {number} must be from one of {', '.join(ROLES)}, got {speaker!r}. Rename it."
            )
        if role == "call":
            messages.append({"role": "assistant", "content": None, "tool_calls": _read_calls(where, number, content)})
        else:
            messages.append({"role": role, "content": content, **_only(turn, *_OF_TURN)})
    return {**_with_system(example, messages), **_only(example, *_TEMPLATE)}


def _read_calls(where: str, number: int, content: Any) -> list[dict[str, Any]]:
    try:
        calls = json.loads(content) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: turn {number} must be a call as JSON with name and arguments, got {str(content)[:60]!r}."
        ) from error


def _from_alpaca(where: str, example: Example, chat: bool) -> Example:
    instruction, given, output = (
        _first(example, names) for names in ("instruction|question", "input|context", "output|response|answer")
    )
    for name, value in (("instruction", instruction), ("input", given or ""), ("output", output)):
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} must be a text, got {str(value)[:60]!r}. Correct it.")
    history = example.get("history") or ()
    if not isinstance(history, list | tuple) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in history
    ):
        raise ValueError(
            f"{where}: history must be a list of pairs of question and answer, got {str(history)[:60]!r}. Correct it."
        )
    if chat:
        asked = {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction}
        earlier = [
            {"role": role, "content": content}
            for turn in history
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        answer = [{"role": "assistant", "content": output}]
        conversation = _with_system(example, [*earlier, asked])
        return {"prompt": conversation["messages"], "completion": answer}
    unread = [name for name in ("system", "history") if example.get(name)]
    if unread:
        raise ValueError(f"{where}: {' and '.join(unread)} needs a chat template, and the tokenizer has none. Set one.")
    parts = [ALPACA.format(ALPACA_INPUT if given else ""), f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{given}"] if given else []
    return {"prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": output}


def _with_system(example: Example, messages: list[dict[str, Any]]) -> dict[str, Any]:
    system = example.get("system")
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": first + messages}


def _first(example: Example, names: str) -> Any:
    return next((example[name] for name in names.split("|") if example.get(name) is not None), None)


def _only(example: Example, *names: str) -> dict[str, Any]:
    return {name: example[name] for name in names if example.get(name) is not None}


_TEMPLATE = ("tools", "chat_template_kwargs")
_PAIRS = "Pairs train with objective dpo, orpo, cpo or simpo."
FORMATS = {
    "chat": Format(("messages",), _TEMPLATE),
    "sharegpt": Format(("conversations|conversation",), ("system", *_TEMPLATE), _from_sharegpt),
    "preference": Format(("chosen", "rejected"), ("prompt", *_TEMPLATE), todo=_PAIRS),
    "kto": Format(("prompt", "completion", "label"), _TEMPLATE, todo="Labelled answers train with objective kto."),
    "prompt-completion": Format(("prompt", "completion"), _TEMPLATE),
    "alpaca": Format(("instruction", "output|response"), ("input", "context", "system", "history"), _from_alpaca),
    "question-answer": Format(("question", "answer"), ("context",), _from_alpaca),
    "text": Format(("text",)),
    "input_ids": Format(("input_ids",), ("labels",)),
    "prompt": Format(("prompt",), todo="Prompts without answers train with objective grpo."),
}
"""The formats, in the order in which an example is compared with them."""
_COLUMNS = {column for each in FORMATS.values() for column in each.names}
DOCUMENTS = ("chat", "sharegpt", "prompt-completion", "alpaca", "question-answer", "text", "input_ids")
"""Formats of an example that is one document."""


class Formats:
    """Recognises the format of examples.

    Args:
        allowed: names in `FORMATS` of the formats that can be used.
        format: the format of all examples; None to recognise it by the columns. All examples of a file must have the
            format of its first one.

    Raises:
        ValueError: ``format`` is not allowed.
    """

    def __init__(self, allowed: Sequence[str], format: str | None = None) -> None:
        if format is not None and format not in allowed:
            raise ValueError(
                f"format must be one of {', '.join(allowed)}, got {format!r}."
                + (f" {FORMATS[format].todo}" if format in FORMATS else "")
            )
        self.allowed, self.format = tuple(allowed), format
        self._of_file: dict[str, str] = {}

    @property
    def columns(self) -> list[str]:
        """The columns that are read: without ``format`` also those by which other formats are recognised."""
        return sorted(_COLUMNS if self.format is None else FORMATS[self.format].names)

    def name(self, where: str, example: Any) -> str:
        """The name of an example's format.

        Raises:
            ValueError: it has none that is allowed, or another one than the first example of its file.
        """
        if isinstance(example, str):
            return "text"
        known = sorted(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
        columns = "; ".join(f"{name}: {', '.join(FORMATS[name].columns)}" for name in self.allowed)
        if self.format is not None:
            if not isinstance(example, Mapping) or not FORMATS[self.format].fits(example):
                raise ValueError(
                    f"{where}: an example of format {self.format} must have {', '.join(FORMATS[self.format].columns)}, "
                    f"got {known}. Correct it, or name another format by format=."
                )
            return self.format
        found = [name for name in FORMATS if isinstance(example, Mapping) and FORMATS[name].fits(example)]
        labelled = "kto" in found and "kto" not in self.allowed  # bad answers must not be learnt
        usable = [name for name in found if name in self.allowed and not (labelled and name == "prompt-completion")]
        if not usable and found:
            raise ValueError(
                f"{where}: an example must be of format {', '.join(self.allowed)}, got format {found[0]}. "
                f"{FORMATS[found[0]].todo}"
            )
        if not usable:
            raise ValueError(
                f"{where}: an example must have the columns of a format ({columns}), got {known}. Rename its columns, "
                "or name the column of a text by field=."
            )
        file = re.match(r"(.*), (?:line|row) \d+$", where)  # data sets may hold examples of several formats
        first = self._of_file.setdefault(file[1], usable[0]) if file else usable[0]
        if first != usable[0]:
            raise ValueError(
                f"{where}: all examples of a file must have one format, got {usable[0]} after {first}. Write them into "
                "several files, or name the format by format=."
            )
        return first

    def convert(self, where: str, example: Example, tokenizer: Tokenizer) -> Example:
        """An example as ``messages``, ``text``, ``input_ids``, or ``prompt`` and ``completion``.

        Raises:
            ValueError: as for `name`, or a column is malformed.
        """
        name = self.name(where, example)
        kind = FORMATS[name]
        made = kind.convert(where, example, tokenizer.chat_template is not None) if kind.convert else example
        own = kind.names if kind.convert is None else made.keys()
        others = {key: value for key, value in example.items() if key not in _COLUMNS}  # such as images
        return {**others, **{key: value for key, value in made.items() if key in own}}


def mark_learnt(tokenizer: Tokenizer, ids: Sequence[int], lines: int = 12) -> str:
    """A document as text, indented, with what is learnt between « and ».

    Args:
        tokenizer: decodes the ids.
        ids: as in a `TokenFile`: ``~id`` for a token without a label. The first `SHOWN` are read.
        lines: the most lines of each part that are shown; a long line is cut, too.
    """
    text = ""
    for learnt, run in itertools.groupby(ids[:SHOWN], lambda token: token >= 0):
        part = tokenizer.decode([token if learnt else ~token for token in run], skip_special_tokens=False)
        rows = [row if len(row) <= 160 else row[:157] + "..." for row in part.split("\n")]
        if len(rows) > lines:
            rows = [*rows[: lines // 2], f"... ({len(rows) - lines + 1} lines)", *rows[len(rows) - lines // 2 + 1 :]]
        text += "«{}»".format("\n".join(rows)) if learnt else "\n".join(rows)
    return "\n".join("    " + row for row in text.split("\n"))
