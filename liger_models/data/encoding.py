"""Examples to token ids: texts, chats whose answers are learnt, and ids as they are."""

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from liger_models.base.processor import Processor
from liger_models.data.formats import DOCUMENTS, Formats
from liger_models.data.media import (
    BrokenMediaError,
    Found,
    Medium,
    columns_of,
    fill,
    find_tokens,
    open_media,
    place_media,
    write_media,
)
from liger_models.data.sources import MEDIA_COLUMNS, Located, to_plain
from liger_models.text.chat import Span, answer_mask
from liger_models.text.tokenizer import Tokenizer

READING = 3
"""Part of the name of a token cache. Raised when examples are read in another way than before."""
FIELDS = ("messages", "text", "input_ids")
GROUP, GROUP_CHARACTERS = 1024, 1 << 22
"""Examples are tokenised in groups, on all cores. A group is full at this number of examples or of characters."""
WINDOW_CHARACTERS, OVERLAP_CHARACTERS = 1 << 18, 1 << 12
"""Texts of more characters are tokenised in windows, which overlap: the library needs over 100 bytes a character."""
MEDIA = ("image", "video", "audio")
"""Parts of the names of special tokens and of parts of a message that stand for what is not text."""

SPEAKERS = ("system", "user", "assistant")
"""Roles whose messages are texts or parts; what a tool returns may be anything that the template writes."""


class Document(NamedTuple):
    """An example as tokens.

    Attributes:
        ids: ``~id`` instead of ``id`` for a token without a label, as in a `TokenFile`.
        media: its images, in order.
    """

    ids: "array[int]"
    media: Sequence[Medium] = ()


class Content(NamedTuple):
    """An example as text.

    Attributes:
        where: where it is, for errors.
        text: with the tokens of its images.
        spans: what of it is learnt; None for all.
        special: whether the tokenizer adds its special tokens.
        media, counts: its images, and the number of tokens of each.
    """

    where: str
    text: str
    spans: list[Span] | None
    special: bool
    media: Sequence[Medium] = ()
    counts: Sequence[int] = ()


@dataclass
class Skipped:
    """Examples that were left out because of broken images or videos: their number, and the first error."""

    count: int = 0
    why: str = ""

    def add(self, error: Exception) -> None:
        """Count one more."""
        self.count, self.why = self.count + 1, self.why or str(error)


class Encoder:
    """Examples to token ids.

    Args:
        tokenizer: the tokenizer of the model, or its processor, which also takes images.
        field: the field of an example to read, whatever else it has; None to read it by its format.
        formats: the formats that examples may have. Default: `DOCUMENTS`.
        max_samples: the most examples to read; None for all.
        broken_media: "error", or "skip" to leave out examples with an image or a video that is missing or has no
            readable header.

    Attributes:
        skipped: what was left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Processor,
        field: str | None,
        formats: Formats | None = None,
        max_samples: int | None = None,
        broken_media: str = "error",
    ) -> None:
        self.processor = tokenizer if isinstance(tokenizer, Processor) else None
        self.tokenizer = tokenizer.tokenizer if isinstance(tokenizer, Processor) else tokenizer
        self.field, self.formats = field, Formats(DOCUMENTS) if formats is None else formats
        self.fields = tuple(self.formats.columns) if field is None else (field,)
        self.max_samples, self.broken_media, self.skipped = max_samples, broken_media, Skipped()
        # What decides how examples are read.
        reads = (self.fields, self.formats.allowed, self.formats.format)
        self.key: Any = [READING, type(self).__name__, *reads, max_samples]
        added = self.tokenizer.backend.get_added_tokens_decoder()
        self._media = {
            token.content: id
            for id, token in added.items()
            if token.special and any(name in token.content for name in MEDIA)
        }
        self.kinds: Sequence[str] = () if self.processor is None else self.processor.kinds
        self.takes_bounds = self.processor is not None and self.processor.takes_bounds
        self._media_ids = set() if self.processor is None else self.processor.media_ids

    def encode(self, examples: Iterable[Located]) -> Iterator[Document]:
        """The documents of the examples, in order.

        Raises:
            ValueError: an example is malformed. The message begins with where it is.
        """
        group: list[Content | Document] = []
        characters = 0
        for where, example in self._limited(examples):
            try:
                content = self._read(where, example)
            except BrokenMediaError as error:
                if self.broken_media == "error":
                    raise
                self.skipped.add(error)
                continue
            if isinstance(content, Content):
                check_characters(where, content.text)
                characters += len(content.text)
                characters += sum(each.memory for each in content.media)
            group.append(content)
            if len(group) == GROUP or characters >= GROUP_CHARACTERS:
                yield from self._tokenise(group)
                group, characters = [], 0
        yield from self._tokenise(group)

    def _limited(self, examples: Iterable[Located]) -> Iterator[Located]:
        return itertools.islice(examples, self.max_samples)

    def _read(self, where: str, example: Any) -> Content | Document:
        """An example as text, with the spans of its answers if it has some; or as tokens if it has them."""
        if isinstance(example, str):
            return Content(where, self._check_text(where, example), None, True)
        if self.field is None:
            example = self.formats.convert(where, example, self.tokenizer)
        known = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        field = next((name for name in FIELDS if name in known), "completion") if self.field is None else self.field
        if not isinstance(example, Mapping) or field not in example:
            raise ValueError(f"{where}: an example must have {field}, got {known}. Name another column by field=.")
        unread = [name for name in MEDIA_COLUMNS if name.rstrip("s") not in self.kinds]
        media = [name for name in unread if not is_empty(example.get(name))]
        taken = " and ".join(("text", *self.kinds))
        if media:
            raise ValueError(f"{where}: an example must be {taken}, got a field {', '.join(media)}. {self._advice}")
        columns = columns_of(example, self.kinds)
        value, prompt = example[field], example.get("prompt") if self.field is None else None
        if isinstance(value, str):
            if prompt is not None and not isinstance(prompt, str):
                raise ValueError(f"{where}: prompt must be a text as {field} is, got messages. Convert one.")
            if self.field is None and field == "messages":
                raise ValueError(
                    f"{where}: messages must be a list of messages, got the text {value[:60]!r}. If it is JSON, parse "
                    "it."
                )
            whole = (prompt or "") + value
            places = () if self.processor is None else self.processor.placeholder.finditer(whole)
            kinds = [str(place.lastgroup) for place in places]
            found: list[Found] = [
                (kind, source, {}) for kind, source in zip(kinds, fill(where, kinds, columns), strict=True)
            ]
            return self._write(where, whole, None if prompt is None else [(len(prompt), len(whole))], True, found)
        value = value if isinstance(value, list) else to_plain(value)
        if is_messages(value) and (value or field == "messages" or prompt):
            if prompt is not None and not is_messages(prompt):
                raise ValueError(
                    f"{where}: prompt must be messages as {field} is, got {str(prompt)[:60]!r}. Convert one."
                )
            messages, found = place_media(where, [*(prompt or ()), *value], columns, self.takes_bounds)
            messages = read_messages(where, messages, self.kinds)
            first = len(prompt or ())
            answers = [number >= first and each["role"] == "assistant" for number, each in enumerate(messages)]
            if not any(answers):
                raise ValueError(f"{where}: a chat must have a message of the assistant, got none. Leave it out.")
            learnt = [answer and each.get("weight", 1) == 1 for answer, each in zip(answers, messages, strict=True)]
            try:
                text, spans = self.tokenizer.render_answers(messages, learnt=learnt, **read_variables(example))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from error
            if not spans and any(learnt):
                raise ValueError(
                    f"{where}: the chat template must mark answers by {{% generation %}}, got none marked. Mark them, "
                    "or leave all marks out."
                )
            return self._write(where, text, spans, False, found)
        if not isinstance(value, Sequence) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
            raise ValueError(
                f"{where}: {field} must be a text, messages, or token ids, got {str(value)[:60]!r}. Correct it."
            )
        placeholders = [token for token, id in self._media.items() if id in value]
        given = placeholders or [kind for kind, column in columns.items() if column]
        if given:
            raise ValueError(f"{where}: token ids must be of text, got {', '.join(given)}. {_NO_MEDIA}")
        labels = example.get("labels", value)
        labels = labels if isinstance(labels, list) else to_plain(labels)
        if len(labels) != len(value) or not all(
            label in (token, -100) for token, label in zip(value, labels, strict=True)
        ):
            raise ValueError(f"{where}: labels must be those of {field}, unshifted, or -100, got others. Correct them.")
        ids = (token if label == token else ~token for token, label in zip(value, labels, strict=True))
        return Document(array("i", ids))

    def _write(self, where: str, text: str, spans: list[Span] | None, special: bool, found: Sequence[Found]) -> Content:
        """A text with the tokens of the images that were found, each with its kind."""
        if self.processor is None or not found:
            return Content(where, self._check_text(where, text), spans, special)
        media = open_media(where, found, self.processor)
        text, spans, counts = write_media(where, text, spans, media, self.processor)
        return Content(where, text, spans, special, media, counts)

    def _tokenise(self, group: Sequence[Content | Document]) -> Iterator[Document]:
        """Replace the texts of a group, as `_read` returns them, by token ids."""
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_token_id
        contents = {i: content for i, content in enumerate(group) if isinstance(content, Content)}
        encoded: dict[int, array[int]] = {}
        for i, content in contents.items():
            if len(content.text) > WINDOW_CHARACTERS:
                ids = self._tokenise_long(content.text, content.spans)
                encoded |= {} if ids is None else {i: ids}
        texts = [i for i, content in contents.items() if content.spans is None and i not in encoded]
        chats = [i for i, content in contents.items() if content.spans is not None and i not in encoded]
        encodings: Any = backend.encode_batch_fast([contents[i].text for i in texts])
        encoded |= {i: array("i", encoding.ids) for i, encoding in zip(texts, encodings, strict=True)}
        encodings = backend.encode_batch([contents[i].text for i in chats], add_special_tokens=False)
        for i, encoding in zip(chats, encodings, strict=True):
            encoded[i] = _masked(encoding.ids, encoding.offsets, contents[i].spans)
        answers = [i for i, content in contents.items() if content.spans is not None and content.special]
        before, after = self._around() if answers else ([], [])
        for i in answers:  # special tokens are not learnt, except for the end
            rest = [token if token == eos else ~token for token in after]
            encoded[i] = array("i", [*(~token for token in before), *encoded[i], *rest])
        for i, each in enumerate(group):
            if isinstance(each, Document):
                yield each
                continue
            ids = encoded[i]
            if each.special and eos is not None and (not ids or ids[-1] != eos):
                ids.append(eos)
            yield self._with_media(ids, each) if each.media else Document(ids)

    def _with_media(self, ids: "array[int]", content: Content) -> Document:
        """A document without labels on the tokens of its images."""
        known = self._media_ids | {~id for id in self._media_ids}
        media = find_tokens(content.where, ids, content.media, content.counts, known)
        return Document(array("i", (~id if id in self._media_ids else id for id in ids)), media)

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
        if placeholders:
            raise ValueError(f"{where}: a text must be without images, got {', '.join(placeholders)}. {self._advice}")
        return text

    @property
    def _advice(self) -> str:
        return _NO_MEDIA if self.processor is None else "Give an image for each placeholder, and nothing else."


_NO_MEDIA = (
    "A tokenizer reads texts: pass the model's processor (model.processor) for images, and leave out what it does not "
    "take."
)


def read_messages(where: str, messages: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Messages for a chat template, alike from all sources: without nulls, which a column of a table adds.

    Args:
        where: where the messages are, for errors.
        messages: dicts with ``role`` and ``content``.
        kinds: kinds of parts that are allowed besides text, such as "image".

    Returns:
        The messages. The content of an assistant's message that only calls tools may be None. Without ``kinds`` parts
        of text are joined.

    Raises:
        ValueError: another message has no content, a message has no role, content is neither a text nor a list of
            parts, a part is neither text nor of these kinds, or a weight is neither 0 nor 1.
    """
    read = []
    for number, message in enumerate(messages, 1):
        present = {key: value for key, value in message.items() if value is not None}
        role = present.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{where}: message {number} must have a role, such as user, got {role!r}. Add it.")
        content = present.get("content")
        calls = present.get("tool_calls") if present.get("role") == "assistant" else None
        if content is None and not calls:
            raise ValueError(
                f"{where}: message {number} must have content, got null. Only an assistant's message with tool_calls "
                "may have none."
            )
        if content is not None and role in SPEAKERS and not isinstance(content, str | list | tuple):
            raise ValueError(
                f"{where}: message {number} must have content that is a text or a list of parts, got "
                f"{str(content)[:60]!r}. Correct it."
            )
        for part in content if isinstance(content, list | tuple) else ():
            if not isinstance(part, Mapping) or (part.get("type") == "text" and not _is_text(part)):
                raise ValueError(
                    f"{where}: message {number} must have parts such as {{'type': 'text', 'text': ...}}, got "
                    f"{str(part)[:60]!r}. Correct it."
                )
            found = [] if part.get("type") in kinds else _media_in(part)
            taken = " and ".join(("text", *kinds))
            if found:
                raise ValueError(
                    f"{where}: message {number} must be {taken}, got a part {', '.join(found)}. {_NO_MEDIA}"
                )
        if not kinds and isinstance(content, list | tuple) and all(map(_is_text, content)):
            content = "".join(part["text"] for part in content)  # templates of text models take no parts
        weight = present.get("weight", 1)
        if weight not in (0, 1):
            raise ValueError(
                f"{where}: message {number} must have weight 0 (not learnt) or 1, got {weight!r}. Correct it."
            )
        read.append({**present, "content": content})
    return read


def _is_text(part: Any) -> bool:
    """Whether a part of a message is a text."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _media_in(part: Mapping[str, Any]) -> list[str]:
    """The type and the keys of a part of a message that say that it is not text."""
    names = [str(part.get("type")), *(key for key, value in part.items() if value is not None)]
    return [name for name in names if any(kind in name for kind in MEDIA)]


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


def is_empty(value: Any) -> bool:
    """Whether a column of an example has nothing."""
    return value is None or (isinstance(value, list | tuple | str) and not value)


def _masked(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span] | None) -> "array[int]":
    """Token ids as a `TokenFile` stores them, with labels in ``spans`` only; None for all."""
    if spans is None:
        return array("i", ids)
    learnt = answer_mask(offsets, spans)
    return array("i", (id if learns else ~id for id, learns in zip(ids, learnt, strict=True)))


def read_variables(example: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template: the tools of a chat, and its ``chat_template_kwargs``.

    Both may be JSON text, because a column cannot hold values of different types.

    Raises:
        ValueError: such a text is not JSON, or ``chat_template_kwargs`` is not an object.
    """
    found = {}
    for name in ("tools", "chat_template_kwargs"):
        value = example.get(name)
        try:
            found[name] = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{name} must be JSON where it is a text, got {str(value)[:60]!r}. Correct it.") from error
    more = found["chat_template_kwargs"] or {}
    if not isinstance(more, Mapping):
        raise ValueError(f"chat_template_kwargs must be an object, got {str(more)[:60]!r}. Correct it.")
    return {"tools": found["tools"], **{key: value for key, value in more.items() if value is not None}}


def check_characters(where: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which a broken escape in JSON becomes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"{where}: must be whole characters, got {half!r}. Correct the text.") from error
