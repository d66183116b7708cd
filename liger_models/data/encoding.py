"""Examples to token ids: texts, chats whose answers are learnt, and ids as they are."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from liger_models.data.sources import Located, to_plain
from liger_models.kernels.checks import check
from liger_models.text.chat import Span, answer_mask
from liger_models.text.tokenizer import Tokenizer

FIELDS = ("messages", "text", "input_ids")
GROUP, GROUP_CHARACTERS = 1024, 1 << 22
"""Examples are tokenised in groups, on all cores. A group is full at this number of examples or of characters."""


class Encoder:
    """Examples to token ids as a `TokenFile` stores them: ``~id`` instead of ``id`` for a token without a label.

    Args:
        tokenizer: the tokenizer of the model.
        field: the field of an example to read; None for the first of `FIELDS` that an example has.
    """

    def __init__(self, tokenizer: Tokenizer, field: str | None) -> None:
        self.tokenizer, self.fields = tokenizer, FIELDS if field is None else (field,)

    def encode(self, examples: Iterable[Located]) -> "Iterator[array[int]]":
        """The token ids of each example, in order.

        Raises:
            ValueError: an example is malformed. The message begins with where it is.
        """
        group: list[Any] = []
        characters = 0
        for where, example in examples:
            content = self._read(where, example)
            if isinstance(content, tuple):
                _check_characters(where, content[0])
                characters += len(content[0])
            group.append(content)
            if len(group) == GROUP or characters >= GROUP_CHARACTERS:
                yield from self._tokenise(group)
                group, characters = [], 0
        yield from self._tokenise(group)

    def _read(self, where: str, example: Any) -> "tuple[str, list[Span] | None] | array[int]":
        """A text, with the spans of its answers if it is a chat; or encoded token ids."""
        if isinstance(example, str):
            return example, None
        known = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        fields = [name for name in self.fields if name in known]
        check(
            isinstance(example, Mapping) and bool(fields),
            f"{where}: an example must have {' or '.join(self.fields)}, got {known}. Name the field by field=.",
        )
        value = example[fields[0]]
        if isinstance(value, str):
            return value, None
        value = value if isinstance(value, list) else to_plain(value)
        if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
            try:
                text, spans = self.tokenizer.render_answers(value, tools=read_tools(example))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            check(bool(spans), f"{where}: a chat must have a message of the assistant, got none. Leave it out.")
            return text, spans
        check(
            isinstance(value, Sequence) and all(type(token) is int and 0 <= token < 2**31 for token in value),
            f"{where}: {fields[0]} must be a text, messages, or token ids, got {str(value)[:60]!r}. Correct it.",
        )
        labels = example.get("labels", value)
        labels = labels if isinstance(labels, list) else to_plain(labels)
        check(
            len(labels) == len(value)
            and all(label in (token, -100) for token, label in zip(value, labels, strict=True)),
            f"{where}: labels must be those of {fields[0]}, unshifted, or -100, got others. Correct them.",
        )
        return array("i", (token if label == token else ~token for token, label in zip(value, labels, strict=True)))

    def _tokenise(self, group: list[Any]) -> "Iterator[array[int]]":
        """Replace the texts of a group, as `_read` returns them, by token ids."""
        encoded = list(group)
        texts = [i for i, content in enumerate(group) if isinstance(content, tuple) and content[1] is None]
        chats = [i for i, content in enumerate(group) if isinstance(content, tuple) and content[1] is not None]
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_token_id
        for i, encoding in zip(texts, backend.encode_batch_fast([group[i][0] for i in texts]), strict=True):
            encoded[i] = array("i", encoding.ids)
            if eos is not None and (not encoded[i] or encoded[i][-1] != eos):
                encoded[i].append(eos)
        encodings = backend.encode_batch([group[i][0] for i in chats], add_special_tokens=False)
        for i, encoding in zip(chats, encodings, strict=True):
            mask = answer_mask(encoding.offsets, group[i][1])
            encoded[i] = array("i", (id if learnt else ~id for id, learnt in zip(encoding.ids, mask, strict=True)))
        yield from encoded


def read_tools(example: Mapping[str, Any]) -> Any:
    """The tools of a chat. They may be JSON text, because a column cannot hold values of different types."""
    tools = example.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _check_characters(where: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which a broken escape in JSON becomes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"{where}: must be whole characters, got {half!r}. Correct the text.") from error
