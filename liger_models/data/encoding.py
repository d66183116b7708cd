"""Examples to token ids: texts, chats whose answers are learnt, and ids as they are."""

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from liger_models.data.formats import DOCUMENTS, Formats
from liger_models.data.sources import MEDIA_COLUMNS, Located, to_plain
from liger_models.kernels.checks import check
from liger_models.text.chat import Span, answer_mask
from liger_models.text.tokenizer import Tokenizer

FIELDS = ("messages", "text", "input_ids")
GROUP, GROUP_CHARACTERS = 1024, 1 << 22
"""Examples are tokenised in groups, on all cores. A group is full at this number of examples or of characters."""
WINDOW_CHARACTERS, OVERLAP_CHARACTERS = 1 << 18, 1 << 12
"""Texts of more characters are tokenised in windows, which overlap: the library needs over 100 bytes a character."""
MEDIA = ("image", "video", "audio")
"""Parts of the names of special tokens and of parts of a message that stand for what is not text."""


class Content(NamedTuple):
    """A text, the spans of it that are learnt (None for all), and whether the tokenizer adds its special tokens."""

    text: str
    spans: list[Span] | None
    special: bool


class Encoder:
    """Examples to token ids as a `TokenFile` stores them: ``~id`` instead of ``id`` for a token without a label.

    Args:
        tokenizer: the tokenizer of the model.
        field: the field of an example to read, whatever else it has; None to read it by its format.
        formats: the formats that examples may have. Default: `DOCUMENTS`.
        max_samples: the most examples to read; None for all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        field: str | None,
        formats: Formats | None = None,
        max_samples: int | None = None,
    ) -> None:
        self.tokenizer, self.field = tokenizer, field
        self.formats = Formats(DOCUMENTS) if formats is None else formats
        self.fields = tuple(self.formats.columns) if field is None else (field,)
        self.max_samples = max_samples
        # What decides how examples are read.
        self.key: Any = [type(self).__name__, self.fields, self.formats.allowed, self.formats.format, max_samples]
        added = tokenizer.backend.get_added_tokens_decoder()
        self._media = {
            token.content: id
            for id, token in added.items()
            if token.special and any(name in token.content for name in MEDIA)
        }

    def encode(self, examples: Iterable[Located]) -> "Iterator[array[int]]":
        """The token ids of each example, in order.

        Raises:
            ValueError: an example is malformed. The message begins with where it is.
        """
        group: list[Any] = []
        characters = 0
        for where, example in self._limited(examples):
            content = self._read(where, example)
            if isinstance(content, Content):
                _check_characters(where, content.text)
                characters += len(content.text)
            group.append(content)
            if len(group) == GROUP or characters >= GROUP_CHARACTERS:
                yield from self._tokenise(group)
                group, characters = [], 0
        yield from self._tokenise(group)

    def _limited(self, examples: Iterable[Located]) -> Iterator[Located]:
        return itertools.islice(examples, self.max_samples)

    def _read(self, where: str, example: Any) -> "Content | array[int]":
        """A text, with the spans of its answers if it has some; or encoded token ids."""
        if isinstance(example, str):
            return Content(self._check_text(where, example), None, True)
        if self.field is None:
            example = self.formats.convert(where, example, self.tokenizer)
        known = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        field = next((name for name in FIELDS if name in known), "completion") if self.field is None else self.field
        check(
            isinstance(example, Mapping) and field in example,
            f"{where}: an example must have {field}, got {known}. Name another column by field=.",
        )
        media = [name for name in MEDIA_COLUMNS if not _is_empty(example.get(name))]
        check(not media, f"{where}: an example must be text, got a field {', '.join(media)}. {_NO_MEDIA}")
        value, prompt = example[field], example.get("prompt") if self.field is None else None
        if isinstance(value, str) and prompt is not None:
            check(isinstance(prompt, str), f"{where}: prompt must be a text as {field} is, got messages. Convert one.")
            whole = self._check_text(where, prompt + value)
            return Content(whole, [(len(prompt), len(whole))], True)
        if isinstance(value, str):
            return Content(self._check_text(where, value), None, True)
        value = value if isinstance(value, list) else to_plain(value)
        if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
            check(
                prompt is None or (isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt)),
                f"{where}: prompt must be messages as {field} is, got {str(prompt)[:60]!r}. Convert one.",
            )
            earlier = read_messages(where, prompt or ())
            messages = earlier + read_messages(where, value)
            try:
                text, spans = self.tokenizer.render_answers(messages, tools=read_tools(example))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            spans = spans[sum(message.get("role") == "assistant" for message in earlier) :]
            check(bool(spans), f"{where}: a chat must have a message of the assistant, got none. Leave it out.")
            return Content(self._check_text(where, text), spans, False)
        check(
            isinstance(value, Sequence) and all(type(token) is int and 0 <= token < 2**31 for token in value),
            f"{where}: {field} must be a text, messages, or token ids, got {str(value)[:60]!r}. Correct it.",
        )
        placeholders = [token for token, id in self._media.items() if id in value]
        check(not placeholders, f"{where}: token ids must be of text, got {', '.join(placeholders)}. {_NO_MEDIA}")
        labels = example.get("labels", value)
        labels = labels if isinstance(labels, list) else to_plain(labels)
        check(
            len(labels) == len(value)
            and all(label in (token, -100) for token, label in zip(value, labels, strict=True)),
            f"{where}: labels must be those of {field}, unshifted, or -100, got others. Correct them.",
        )
        return array("i", (token if label == token else ~token for token, label in zip(value, labels, strict=True)))

    def _tokenise(self, group: list[Any]) -> "Iterator[array[int]]":
        """Replace the texts of a group, as `_read` returns them, by token ids."""
        encoded = list(group)
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_token_id
        contents = {i: content for i, content in enumerate(group) if isinstance(content, Content)}
        for i, (text, spans, _) in contents.items():
            if len(text) > WINDOW_CHARACTERS:
                encoded[i] = self._tokenise_long(text, spans) or group[i]
        texts = [i for i, content in contents.items() if content.spans is None and encoded[i] is group[i]]
        chats = [i for i, content in contents.items() if content.spans is not None and encoded[i] is group[i]]
        for i, encoding in zip(texts, backend.encode_batch_fast([group[i].text for i in texts]), strict=True):
            encoded[i] = array("i", encoding.ids)
        encodings = backend.encode_batch([group[i].text for i in chats], add_special_tokens=False)
        for i, encoding in zip(chats, encodings, strict=True):
            encoded[i] = _masked(encoding.ids, encoding.offsets, group[i].spans)
        answers = [i for i, content in contents.items() if content.spans is not None and content.special]
        before, after = self._around() if answers else ([], [])
        for i in answers:  # special tokens are not learnt, except for the end
            rest = [token if token == eos else ~token for token in after]
            encoded[i] = array("i", [*(~token for token in before), *encoded[i], *rest])
        for i, content in contents.items():
            if content.special and eos is not None and (not encoded[i] or encoded[i][-1] != eos):
                encoded[i].append(eos)
        yield from encoded

    def _tokenise_long(self, text: str, spans: list[Span] | None) -> "array[int] | None":
        """The token ids of a long text in bounded memory; None if its windows cannot be joined exactly.

        Tokens are the BPE of their text if each pair of neighbours is the BPE of its own text, and pre-tokenisers read
        from left to right. So two windows may be joined at a token of their overlap at which both have the tokens that
        the overlap has alone. Only the tokens at its ends may differ, because they depend on what is outside.
        """
        backend = self.tokenizer.backend
        if type(backend.model).__name__ != "BPE" or backend.model.dropout:
            return None
        encode: Any = backend.encode_batch_fast if spans is None else backend.encode_batch
        before, after = self._around() if spans is None else ([], [])
        joined = array("i", before)
        ids: list[int] = []
        offsets: list[Span] = []
        starts = range(0, len(text) - OVERLAP_CHARACTERS, WINDOW_CHARACTERS - OVERLAP_CHARACTERS)
        at_once = GROUP_CHARACTERS // WINDOW_CHARACTERS
        for first in range(0, len(starts), at_once):
            some = starts[first : first + at_once]
            windows = encode([text[start : start + WINDOW_CHARACTERS] for start in some], add_special_tokens=False)
            overlaps = [text[start : start + OVERLAP_CHARACTERS] for start in some]
            seams = backend.encode_batch_fast(overlaps, add_special_tokens=False)
            for start, window, seam in zip(some, windows, seams, strict=True):
                old, begin = ids, 0
                ids = window.ids
                if start:
                    n = len(seam.ids)
                    low, begin, high = n // 8, n // 2, n - n // 8
                    if n < 16 or old[low - n :] != seam.ids[low:] or ids[:high] != seam.ids[:high]:
                        return None
                    joined.extend(_masked(old[: begin - n], offsets[: begin - n], spans))
                ids = ids[begin:]
                if spans is not None:
                    offsets = [(a + start, b + start) for a, b in window.offsets[begin:]]
        joined.extend(_masked(ids, offsets, spans))
        joined.extend(after)
        return joined

    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        backend = self.tokenizer.backend
        plain, whole = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def _check_text(self, where: str, text: str) -> str:
        """The text; raises ValueError if it holds placeholders, whose images would be missing."""
        placeholders = [token for token in self._media if token in text]
        check(not placeholders, f"{where}: a text must be without images, got {', '.join(placeholders)}. {_NO_MEDIA}")
        return text


_NO_MEDIA = "Images, videos and audio are not supported in training data. Remove them."


def read_messages(where: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template, alike from all sources: without nulls, which a column of a table adds.

    Args:
        where: where the messages are, for errors.
        messages: dicts with ``role`` and ``content``.

    Returns:
        The messages. The content of an assistant's message that only calls tools may be None.

    Raises:
        ValueError: another message has no content, or a part of a message is not text.
    """
    read = []
    for number, message in enumerate(messages, 1):
        present = {key: value for key, value in message.items() if value is not None}
        content = present.get("content")
        calls = present.get("tool_calls") if present.get("role") == "assistant" else None
        check(
            content is not None or bool(calls),
            f"{where}: message {number} must have content, got null. Only an assistant's message with tool_calls may "
            "have none.",
        )
        for part in content if isinstance(content, list) else ():
            found = _media_in(part)
            check(not found, f"{where}: message {number} must be text, got a part {', '.join(found)}. {_NO_MEDIA}")
        read.append({**present, "content": content})
    return read


def _media_in(part: Any) -> list[str]:
    """The type and the keys of a part of a message that say that it is not text."""
    if not isinstance(part, Mapping):
        return []
    names = [str(part.get("type")), *(key for key, value in part.items() if value is not None)]
    return [name for name in names if any(kind in name for kind in MEDIA)]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | str) and not value)


def _masked(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span] | None) -> "array[int]":
    """Token ids as a `TokenFile` stores them, with labels in ``spans`` only; None for all."""
    if spans is None:
        return array("i", ids)
    learnt = answer_mask(offsets, spans)
    return array("i", (id if learns else ~id for id, learns in zip(ids, learnt, strict=True)))


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
