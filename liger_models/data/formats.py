"""Formats of records: the columns of each format, how it is recognized, and how its records become examples.

An example has the column ``messages``, ``text`` or ``input_ids``, or the two columns ``prompt`` and ``completion``.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from liger_models.data.sources import TOKEN_COLUMNS, read_records
from liger_models.text.chat import shared_prefix
from liger_models.text.tokenizer import Tokenizer

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    "system": "system",
}
"""Maps speakers in ShareGPT data to message roles. "call" means a message in which the assistant calls a tool."""
_OF_TURN = ("tool_calls", "tool_call_id", "name", "weight", "loss", "train", "reasoning_content")
ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"

SHOWN = 4096
"""Maximum number of tokens of a document that `mark_learned` shows."""

Columns = Mapping[str, Any]
"""A record or an example, as a mapping from column names to values."""
Convert = Callable[[str, Columns, bool], Columns]
"""A function that converts a record to an example. Arguments: location, record, whether there is a chat template."""


class Format(NamedTuple):
    """A format of records.

    Attributes:
        columns: the columns that a record must have. If an entry has several names, joined by "|", the record must
            have one of these columns.
        optional: other columns that are read if they exist.
        convert: function that converts a record to an example with ``messages``, or with ``prompt`` and
            ``completion``. None if a record already has this form.
        todo: advice for the error message about a record that has this format although the format is not allowed.
    """

    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    convert: Convert | None = None
    todo: str = "It trains with objective sft."

    def fits(self, record: Columns) -> bool:
        """Return whether a record has the columns of this format."""
        return all(any(record.get(name) is not None for name in names.split("|")) for names in self.columns)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return [name for names in (*self.columns, *self.optional) for name in names.split("|")]


def _from_sharegpt(where: str, record: Columns, chat: bool) -> Columns:
    turns = _first(record, "conversations|conversation")
    if (
        not isinstance(turns, Sequence)
        or isinstance(turns, str)
        or not all(isinstance(turn, Mapping) for turn in turns)
    ):
        raise ValueError(
            f"{where}: conversations must be a list of turns with from and value, got {str(turns)[:60]!r}. Correct it."
        )

    # Each turn becomes a message. A tool call, which has a turn of its own, becomes a message of the assistant.
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        speaker, content = (_first(turn, names) for names in ("from|role", "value|content"))
        role = ROLES.get(str(speaker))
        if role is None:
            raise ValueError(
                f"{where}: turn {number} must be from one of {', '.join(ROLES)}, got {speaker!r}. Rename it."
            )
        if role == "call":
            calls = {"tool_calls": _read_calls(where, number, content)}
            messages.append({"role": "assistant", "content": None, **_only(turn, *_OF_TURN), **calls})
        else:
            messages.append({"role": role, "content": content, **_only(turn, *_OF_TURN)})
    return {"messages": _with_system(where, record, messages), **_only(record, *_TEMPLATE)}


def _read_calls(where: str, number: int, content: Any) -> list[dict[str, Any]]:
    try:
        calls = json.loads(content) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: turn {number} must be a call as JSON with name and arguments, got {str(content)[:60]!r}."
        ) from error


def _from_alpaca(where: str, record: Columns, chat: bool) -> Columns:
    columns = ("instruction|question", "input|context", "output|response|answer")
    instruction, context, output = (_first_text(where, record, names) for names in columns)
    history = record.get("history") or ()
    if not isinstance(history, list | tuple) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in history
    ):
        raise ValueError(
            f"{where}: history must be a list of pairs of question and answer, got {str(history)[:60]!r}. Correct it."
        )

    # With a chat template, the record becomes a conversation.
    if chat:
        prompt = []
        for question, answer in history:
            prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt.append({"role": "user", "content": f"{instruction}\n\n{context}" if context else instruction})
        return {"prompt": _with_system(where, record, prompt), "completion": [{"role": "assistant", "content": output}]}

    # Without a chat template, the record becomes a text in the form on which Alpaca was trained.
    unread = [name for name in ("system", "history") if record.get(name)]
    if unread:
        raise ValueError(f"{where}: {' and '.join(unread)} needs a chat template, and the tokenizer has none. Set one.")
    parts = [ALPACA.format(ALPACA_INPUT if context else ""), f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{context}"] if context else []
    return {"prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": output}


def _from_preference(where: str, record: Columns, chat: bool) -> Columns:
    """Return a pair in TRL's form: ``prompt``, ``chosen`` and ``rejected``, which are all texts or all messages."""
    pair = _only(record, "prompt", *ANSWERS, *_TEMPLATE)
    for name in ANSWERS:
        answer = pair[name]
        if isinstance(answer, Mapping) and {"role", "from"} & answer.keys():
            answer = [answer]
        if _are_turns(answer):
            answer = _from_sharegpt(where, {"conversations": answer}, chat)["messages"]
        pair[name] = answer
    have_texts = all(isinstance(pair[name], str) for name in ANSWERS)

    # The prompt may be in the columns of ShareGPT or Alpaca.
    if "prompt" not in pair and _first(record, "conversations|conversation") is not None:
        pair["prompt"] = _from_sharegpt(where, record, chat)["messages"]
    elif "prompt" not in pair and have_texts and _first(record, "instruction|question") is not None:
        for name in ANSWERS:
            example = _from_alpaca(where, {**record, "output": pair[name]}, chat)
            pair |= {"prompt": example["prompt"], name: example["completion"]}
        return pair

    # First case: the prompt is a text, and the answers are messages, which may begin with this prompt.
    prompt, answers = pair.get("prompt"), [pair[name] for name in ANSWERS]
    have_messages = all(isinstance(answer, list) and answer and isinstance(answer[0], Mapping) for answer in answers)
    if isinstance(prompt, str) and have_messages:
        if all(answer[0].get("role") == "assistant" for answer in answers):
            pair["prompt"] = [{"role": "user", "content": prompt}]
        elif any(message.get("content") == prompt for message in answers[0][: shared_prefix(*answers)]):
            del pair["prompt"]
    # Second case: the prompt consists of messages, and the answers are texts, or messages that begin with the prompt.
    elif isinstance(prompt, list) and have_texts:
        pair |= {name: [{"role": "assistant", "content": pair[name]}] for name in ANSWERS}
    elif isinstance(prompt, list) and have_messages and all(answer[: len(prompt)] == prompt for answer in answers):
        pair |= {name: pair[name][len(prompt) :] for name in ANSWERS}

    # Without a prompt, the messages with which both answers begin are the prompt.
    if "prompt" in pair:
        pair["prompt"] = _whole_prompt(where, record, pair["prompt"])
    elif have_messages:
        pair |= {name: _with_system(where, record, pair[name]) for name in ANSWERS}
    return pair


def _from_messages(where: str, record: Columns, chat: bool) -> Columns:
    messages = record["messages"]
    messages = messages if isinstance(messages, str) else _with_system(where, record, messages)
    return {"messages": messages, **_only(record, *_TEMPLATE)}


def _from_prompt(where: str, record: Columns, chat: bool) -> Columns:
    example = _only(record, "prompt", "completion", "label", *_TEMPLATE)
    return {**example, "prompt": _whole_prompt(where, record, example["prompt"])}


def _are_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, as in ShareGPT data, rather than a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "from" in value[0]


def _whole_prompt(where: str, record: Columns, prompt: Any) -> Any:
    """Return a prompt that includes the text of the column ``system``.

    Raises:
        ValueError: the text of ``system`` cannot be added to the prompt, or the prompt lacks the text of the column
            ``input`` or ``context``.
    """
    # If there is an instruction or a question, `input` and `context` belong to it, and are already part of the prompt.
    given = {} if _first(record, "instruction|question") else _only(record, "input", "context")
    unread = [name for name, text in given.items() if isinstance(text, str) and text.strip() not in _text_of(prompt)]
    if unread:
        raise ValueError(
            f"{where}: {' and '.join(unread)} must be in the prompt, because only an instruction or a question has "
            "such a column. Write the text into the prompt, or remove the column."
        )
    return _with_system(where, record, prompt)


def _with_system(where: str, record: Columns, prompt: Any) -> Any:
    """Return a prompt with the text of the column ``system`` in front, unless the prompt already contains this text."""
    system = record.get("system")
    if not system or not (isinstance(prompt, str) or is_messages(prompt)):
        return prompt  # the encoder raises an error for a prompt of another type
    own = [prompt] if isinstance(prompt, str) else [message for message in prompt if message.get("role") == "system"]
    if own and str(system).strip() in _text_of(own):
        return prompt
    if own:
        kind = "is a text" if isinstance(prompt, str) else "has another system message"
        raise ValueError(
            f"{where}: system must be part of a prompt that {kind}, got {str(system)[:60]!r}. Write it into the "
            "prompt, or remove the column."
        )
    return [{"role": "system", "content": system}, *prompt]


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value)


def _text_of(prompt: Any) -> str:
    """Return the text in a prompt, in messages, or in the parts of a message."""
    if isinstance(prompt, Mapping):
        return _text_of(_first(prompt, "content|text"))
    if isinstance(prompt, list | tuple):
        return "\n".join(map(_text_of, prompt))
    return prompt if isinstance(prompt, str) else ""


def _first(columns: Columns, names: str) -> Any:
    return next((columns[name] for name in names.split("|") if columns.get(name) is not None), None)


def _first_text(where: str, columns: Columns, names: str) -> Any:
    """Return the first value in the columns ``names`` (joined by "|"), which must be a text; None if there is none."""
    name = next((name for name in names.split("|") if columns.get(name) is not None), names)
    value = columns.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be a text, got {str(value)[:60]!r}. Correct it.")
    return value


def _only(columns: Columns, *names: str) -> dict[str, Any]:
    return {name: columns[name] for name in names if columns.get(name) is not None}


ANSWERS = ("chosen", "rejected")
_TEMPLATE = ("tools", "chat_template_kwargs")
_OF_INSTRUCTION = ("input|context", "system", "history")
_PAIRS = "Pairs train with objective dpo, orpo, cpo or simpo."
_TEXTS = "Queries with documents train with objective embed or rerank."
NEGATIVES = ("negative", "negatives", "neg", *(f"negative_{number}" for number in range(1, 65)))
"""Names of columns with hard negatives of a query. Each column holds one document or a list of documents."""
FORMATS = {
    "chat": Format(("messages",), ("system", *_TEMPLATE), _from_messages),
    "sharegpt": Format(("conversations|conversation",), ("system", *_TEMPLATE), _from_sharegpt),
    "preference": Format(
        ANSWERS,
        ("prompt", "conversations|conversation", "instruction|question", *_OF_INSTRUCTION, *_TEMPLATE),
        _from_preference,
        _PAIRS,
    ),
    "kto": Format(
        ("prompt", "completion", "label"),
        ("input|context", "system", *_TEMPLATE),
        _from_prompt,
        "Labeled answers train with objective kto.",
    ),
    "prompt-completion": Format(("prompt", "completion"), ("input|context", "system", *_TEMPLATE), _from_prompt),
    "alpaca": Format(("instruction", "output|response"), _OF_INSTRUCTION, _from_alpaca),
    "question-answer": Format(("question", "answer"), _OF_INSTRUCTION, _from_alpaca),
    "text": Format(("text",)),
    "input_ids": Format(("input_ids",), TOKEN_COLUMNS),
    "scored-pair": Format(
        ("query|sentence1|anchor", "document|sentence2|passage", "score|label|similarity_score"), todo=_TEXTS
    ),
    "contrastive": Format(
        ("query|anchor|question|sentence1", "positive|pos|document|passage|answer|sentence2"), NEGATIVES, todo=_TEXTS
    ),
    "prompt": Format(("prompt",), todo="Prompts without answers train with objective grpo."),
}
"""The formats, in the order in which they are compared with a record."""
_COLUMNS = {column for format in FORMATS.values() for column in format.names}
DOCUMENTS = ("chat", "sharegpt", "prompt-completion", "alpaca", "question-answer", "text", "input_ids")
"""The formats of examples for supervised fine-tuning and pretraining. Their records become documents of packed rows."""


class Formats:
    """Recognizes the format of records, and converts records to examples.

    Args:
        allowed: the names of the allowed formats, which are keys of `FORMATS`.
        format: the format of all records. With None, the format is recognized by the columns, and all records of a
            file must have the same format as the first record.

    Attributes:
        of_file: maps the path of a file to the format of its first record.

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
        self.of_file: dict[str, str] = {}

    @property
    def columns(self) -> list[str]:
        """The columns to read: the columns of ``format`` or, if ``format`` is not set, the columns of all formats."""
        return sorted(_COLUMNS if self.format is None else FORMATS[self.format].names)

    def name(self, where: str, record: Any) -> str:
        """Return the name of a record's format.

        Raises:
            ValueError: the record's format is not allowed, or differs from the format of the first record of its file.
        """
        if isinstance(record, str):
            return "text"
        names = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        # A column without a value does not count. The error message names such columns.
        nulls = [str(name) for name, value in record.items() if value is None] if isinstance(record, Mapping) else []
        without = f" without a value for {', '.join(nulls)}" if {*nulls} & _COLUMNS else ""
        if self.format is not None:
            if not isinstance(record, Mapping) or not FORMATS[self.format].fits(record):
                raise ValueError(
                    f"{where}: an example of format {self.format} must have {', '.join(FORMATS[self.format].columns)}, "
                    f"got {names}{without}. Correct it, or name another format by format=."
                )
            return self.format

        # Take the first format that fits the record and is allowed.
        fitting = [name for name in FORMATS if isinstance(record, Mapping) and FORMATS[name].fits(record)]
        # A labeled answer may be labeled as bad, so it must not be learned as a completion.
        is_labeled = "kto" in fitting and "kto" not in self.allowed
        usable = [name for name in fitting if name in self.allowed and not (is_labeled and name == "prompt-completion")]
        if not usable and fitting:
            raise ValueError(
                f"{where}: an example must be of format {', '.join(self.allowed)}, got format {fitting[0]}{without}. "
                f"{FORMATS[fitting[0]].todo}"
            )
        if not usable:
            columns = "; ".join(f"{name}: {', '.join(FORMATS[name].columns)}" for name in self.allowed)
            raise ValueError(
                f"{where}: an example must have the columns of a format ({columns}), got {names}{without}. Rename "
                "its columns, or name the column of a text by field=."
            )

        # All records of a file must have the format of its first record. Records from other sources may have several
        # formats.
        file = re.match(r"(.*), (?:line|row) \d+$", where)
        first = self.of_file.setdefault(file[1], usable[0]) if file else usable[0]
        if first != usable[0]:
            raise ValueError(
                f"{where}: all examples of a file must have one format, got {usable[0]}{without} after {first}. "
                "Write them into several files, or name the format by format=."
            )
        return first

    def convert(self, where: str, record: Any, tokenizer: Tokenizer) -> Columns:
        """Convert a record to an example with ``messages``, ``text``, ``input_ids``, or ``prompt`` and ``completion``.

        Raises:
            ValueError: a column is malformed; see also `name`.
        """
        format = FORMATS[self.name(where, record)]
        if format.convert is None:
            example = {name: value for name, value in record.items() if name in format.names}
        else:
            example = dict(format.convert(where, record, tokenizer.chat_template is not None))
        # Other columns, such as images, stay in the example.
        others = {name: value for name, value in record.items() if name not in _COLUMNS}
        return others | example


def recognized_format(source: Any) -> str | None:
    """Return the name of the format of a source's first record; None if the record has no format or cannot be read.

    If the record fits the format of labeled answers, this format is returned. If the record fits a document format and
    another format, the document format is returned.

    Args:
        source: a result of `find_files`.
    """
    try:
        _, record = next(read_records(source, sorted(_COLUMNS)))
    except (ImportError, OSError, StopIteration, ValueError):
        return None
    fitting = [name for name in FORMATS if isinstance(record, Mapping) and FORMATS[name].fits(record)]
    documents = [name for name in fitting if name in DOCUMENTS and "kto" not in fitting]
    return next(iter(documents + fitting), None)


def mark_learned(tokenizer: Tokenizer, ids: Sequence[int], lines: int = 12) -> str:
    """Return a document as indented text, in which « and » enclose the parts that have labels.

    Args:
        tokenizer: the tokenizer that decodes the ids.
        ids: token ids, with ``~id`` for a token without a label. Only the first `SHOWN` ids are read.
        lines: the maximum number of lines to show for each part. Long lines are cut, too.
    """
    text = ""
    for learned, run in itertools.groupby(ids[:SHOWN], lambda token: token >= 0):
        part = tokenizer.decode([token if learned else ~token for token in run], skip_special_tokens=False)
        shown = [line if len(line) <= 160 else line[:157] + "..." for line in part.split("\n")]
        if len(shown) > lines:
            omitted = f"... ({len(shown) - lines + 1} lines)"
            shown = [*shown[: lines // 2], omitted, *shown[len(shown) - lines // 2 + 1 :]]
        text += "«{}»".format("\n".join(shown)) if learned else "\n".join(shown)
    return "\n".join("    " + line for line in text.split("\n"))
