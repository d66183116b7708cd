"""Encoding of examples as token ids.

In a plain text, every token gets a label. In a chat, only the answers get labels.
"""

import contextlib
import itertools
import json
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from liger_models.base.processor import Processor
from liger_models.data.formats import DOCUMENTS, Formats, is_messages
from liger_models.data.media import BrokenMediaError, Columns, FileState, MediaReader, MediaSource, Medium
from liger_models.data.sources import MEDIA_COLUMNS, Record, to_plain
from liger_models.text.chat import Rendering, Span, answer_mask
from liger_models.text.templates import THOUGHTS
from liger_models.text.tokenizer import Tokenizer

READING = 7
"""Version of the way in which examples are read. The name of a token cache is a digest that depends on it."""
FIELDS = ("messages", "text", "input_ids")
GROUP, GROUP_CHARACTERS = 1024, 1 << 22
"""Examples are tokenized in groups, on all cores. A group is full at this number of examples or characters."""
WINDOW_CHARACTERS, OVERLAP_CHARACTERS = 1 << 18, 1 << 12
"""Size and overlap, in characters, of the windows in which long texts are tokenized, in order to save memory.

Tokenizers need over 100 bytes of memory per character.
"""
MEDIA = ("image", "video", "audio")
"""A special token or a part of a message stands for media if its name or type contains one of these words."""

ON_UNRENDERED = ("error", "warn", "drop")
"""What may happen to an example if the chat template leaves out one of its fields."""

WEIGHTS = ("weight", "loss", "train")
"""Keys of a message that say whether the message is learned."""
MASKS = ("completion_mask", "assistant_masks", "attention_mask")
POSITIONS = "position_ids"
"""Columns with one value per token id: masks and positions.

``completion_mask`` and ``assistant_masks`` are 1 for learned tokens. ``attention_mask`` is 1 for all tokens except
padding.
"""

SPEAKERS = ("system", "user", "assistant")
"""Roles whose messages must contain a text or parts. A tool's result may be anything that the template can render."""


class Document(NamedTuple):
    """An example as token ids.

    Attributes:
        ids: the token ids, with ``~id`` instead of ``id`` for a token without a label, as in a `TokenFile`.
        media: the images of the document, in order.
    """

    ids: "array[int]"
    media: Sequence[Medium] = ()


class Text(NamedTuple):
    """An example as text, before it is tokenized.

    Attributes:
        where: location of the example, for error messages.
        text: the text, with the tokens of its images.
        spans: the parts of the text that get labels; None for the whole text.
        special: whether the tokenizer adds its special tokens to the text.
        media, counts: the images of the text, and the number of tokens of each image.
    """

    where: str
    text: str
    spans: list[Span] | None
    special: bool
    media: Sequence[Medium] = ()
    counts: Sequence[int] = ()


@dataclass
class Skipped:
    """Counts the examples that were left out because of broken images or videos.

    Attributes:
        count: the number of examples that were left out.
        why: the first error.
        files: maps the path of each broken file to the state of the file, or to None if the file was missing.
    """

    count: int = 0
    why: str = ""
    files: dict[str, FileState | None] = field(default_factory=dict)

    def add(self, error: BrokenMediaError) -> None:
        """Count one more example."""
        self.count, self.why = self.count + 1, self.why or str(error)
        if error.file is not None:
            self.files[str(error.file)] = FileState.of(error.file)


class Encoder:
    """Converts records to token ids.

    A record is converted in three steps: to an example, according to its format, then to a text, then to a document.

    Args:
        tokenizer: the tokenizer of the model, or its processor, which also takes images.
        field: the only field of a record to read; None to read records by their format.
        formats: the formats that examples may have. Default: `DOCUMENTS`.
        max_samples: the maximum number of examples to read; None for all.
        broken_media: "error", or "skip" to leave out an example if an image or a video is missing or has no readable
            header.
        multi_turn: how the answers of a conversation become examples; see `Tokenizer.render_examples`.
        on_unrendered: what happens if the chat template leaves out a field of a message: "error", "warn" or "drop".

    Attributes:
        skipped: the examples that were left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Processor,
        field: str | None,
        formats: Formats | None = None,
        max_samples: int | None = None,
        broken_media: str = "error",
        multi_turn: str = "split",
        on_unrendered: str = "error",
    ) -> None:
        self.tokenizer, self.media = open_reader(tokenizer)
        self.processor = self.media.processor
        self.field, self.formats = field, Formats(DOCUMENTS) if formats is None else formats
        self.fields = tuple(self.formats.columns) if field is None else (field,)
        self.max_samples, self.broken_media, self.skipped = max_samples, broken_media, Skipped()

        self.multi_turn, self.on_unrendered = multi_turn, on_unrendered

        # Everything that determines how records are read.
        reads = (self.fields, self.formats.allowed, self.formats.format, multi_turn, on_unrendered)
        self.key: Any = [READING, type(self).__name__, *reads, max_samples]

        self._has_warned = False
        # Not every placeholder has one of these words in its name: Mistral's placeholder is [IMG].
        added = self.tokenizer.backend.get_added_tokens_decoder()
        own = () if self.processor is None else self.processor.media_tokens
        self._placeholders = {
            token.content: id
            for id, token in added.items()
            if token.content in own or (token.special and any(name in token.content for name in MEDIA))
        }

    def encode(self, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of the records, in order.

        Raises:
            ValueError: a record is malformed. The message begins with the location of the record.
        """
        group: list[Text | Document] = []
        characters = 0
        for where, record in self._limited(records):
            # A record becomes texts or, if it holds token ids, documents.
            try:
                texts = self._read(where, record)
            except BrokenMediaError as error:
                if self.broken_media == "error":
                    raise
                self.skipped.add(error)
                continue
            for text in texts:
                if isinstance(text, Text):
                    check_characters(where, text.text)
                    characters += len(text.text) + sum(medium.memory for medium in text.media)
            group += texts

            # Full groups are tokenized on all cores.
            if len(group) >= GROUP or characters >= GROUP_CHARACTERS:
                yield from self._tokenize(group)
                group, characters = [], 0
        yield from self._tokenize(group)

    def _limited(self, records: Iterable[Record]) -> Iterator[Record]:
        return itertools.islice(records, self.max_samples)

    # Methods that convert a record to texts

    def _read(self, where: str, record: Any) -> Sequence[Text | Document]:
        """Return a record's texts, with the spans of the answers.

        If the record holds token ids, return its documents instead.
        """
        if isinstance(record, str):
            return [Text(where, self._check_text(where, record), None, True)]

        example = self.formats.convert(where, record, self.tokenizer) if self.field is None else record
        names = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        field = next((name for name in FIELDS if name in names), "completion") if self.field is None else self.field
        if not isinstance(example, Mapping) or field not in example:
            raise ValueError(f"{where}: an example must have {field}, got {names}. Name another column by field=.")
        check_media_columns(where, example, self.media, "an example must be", f"a field {{}}. {self._advice}")

        # The type of the value determines how it is read.
        columns = self.media.columns(example)
        value = example[field]
        prompt = example.get("prompt") if self.field is None else None  # a field named by the user is read alone
        if isinstance(value, str):
            return [self._read_text(where, field, prompt, value, columns)]
        value = value if isinstance(value, list) else to_plain(value)
        if is_messages(value) and (value or field == "messages" or prompt):
            return self._read_chat(where, field, prompt, value, example, columns)
        return self._read_ids(where, field, value, example, columns)

    def _read_text(self, where: str, field: str, prompt: Any, answer: str, columns: Columns) -> Text:
        """Return a record's text: its answer, preceded by its prompt if it has one."""
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError(
                f"{where}: prompt must be a text because {field} is a text, got messages. Convert one of the two."
            )
        if self.field is None and field == "messages":
            raise ValueError(
                f"{where}: messages must be a list of messages, got the text {answer[:60]!r}. If it is JSON, parse it."
            )
        if self.processor is not None:
            whole = prompt is None
            framed = self.processor.framed(answer if prompt is None else prompt, is_prompt=not whole)
            prompt, answer = (None, framed) if whole else (framed, answer)
        # Prompt and answer are tokenized as one text, so that a token may contain characters of both.
        text = (prompt or "") + answer
        spans = None if prompt is None else [(len(prompt), len(text))]
        return self._write(where, text, spans, True, self.media.sources_in_text(where, text, columns))

    def _read_chat(
        self, where: str, field: str, prompt: Any, answer: Any, example: Mapping[str, Any], columns: Columns
    ) -> list[Text]:
        """Render a conversation with the chat template as one or more examples, and return the text of each."""
        if prompt is not None and not is_messages(prompt):
            raise ValueError(
                f"{where}: prompt must be messages because {field} holds messages, got {str(prompt)[:60]!r}. Convert "
                "one of the two."
            )
        prompt = prompt or ()

        # The assistant's messages after the prompt are learned, unless their weight is 0.
        messages, sources = self.media.place(where, [*prompt, *answer], columns)
        messages = read_messages(where, messages, self.media.kinds)
        answers = [number >= len(prompt) and message["role"] == "assistant" for number, message in enumerate(messages)]
        if not any(answers):
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages[len(prompt) :]))
            raise ValueError(
                f"{where}: a chat must have a message of the assistant, got "
                + (
                    f"only the roles {roles}. Name them as the template does, or leave it out."
                    if roles
                    else "none. Leave it out."
                )
            )
        learned = [is_answer and is_learned(message) for is_answer, message in zip(answers, messages, strict=True)]
        examples = render_examples(
            where, self.tokenizer, messages, learned, example, self.multi_turn, self.on_unrendered
        )
        if any(learned) and not any(rendering.spans for rendering in examples):
            raise ValueError(
                f"{where}: the chat template must mark answers by {{% generation %}}, got none marked. Mark them, or "
                "leave all marks out."
            )

        # An example that ends before the last message has only the images of its own messages.
        texts = []
        for rendering in examples:
            count = len(sources) if len(examples) == 1 else self.media.count(rendering.text)
            texts.append(self._write(where, rendering.text, rendering.spans, False, sources[:count]))
        return texts

    def _read_ids(
        self, where: str, field: str, ids: Any, example: Mapping[str, Any], columns: Columns
    ) -> list[Document]:
        """Return the documents in a record of token ids, without padding. Packed ids contain several documents."""
        if not isinstance(ids, Sequence) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ValueError(
                f"{where}: {field} must be a text, messages, or token ids, got {str(ids)[:60]!r}. Correct it."
            )
        media = [name for name, token in self._placeholders.items() if token in ids]
        media = media or [kind for kind, column in columns.items() if column]
        if media:
            raise ValueError(f"{where}: token ids must be of text, got {', '.join(media)}. {_NO_MEDIA}")
        lists = {name: _read_column(where, field, len(ids), example, name) for name in (*MASKS, "labels", POSITIONS)}
        masks = {name: values for name in MASKS if (values := lists[name]) is not None}
        for name, mask in masks.items():
            if not all(value in (0, 1) for value in mask):
                raise ValueError(f"{where}: {name} must have values 0 and 1, got {str(mask)[:60]}. Correct it.")

        # Labels are unshifted: a token's label is its own id or -100. A token is learned unless one of its masks is 0.
        labels = ids if lists["labels"] is None else lists["labels"]
        if not all(label in (token, -100) for token, label in zip(ids, labels, strict=True)):
            raise ValueError(f"{where}: labels must be those of {field}, unshifted, or -100, got others. Correct them.")
        learned = [
            label == token and all(mask[i] for mask in masks.values())
            for i, (token, label) in enumerate(zip(ids, labels, strict=True))
        ]
        document = array("i", (token if learns else ~token for token, learns in zip(ids, learned, strict=True)))

        # Padding is removed from both ends of each document.
        seen = masks.get("attention_mask", [1] * len(ids))
        documents = []
        for start, end in _document_bounds(where, field, len(ids), example, lists[POSITIONS], seen):
            shown = [i for i in range(start, end) if seen[i]]
            if shown and len(shown) != shown[-1] + 1 - shown[0]:
                raise ValueError(
                    f"{where}: attention_mask must be 0 on padding, at the ends of a document, got 0 inside. Remove "
                    "these tokens, or leave them out by labels of -100."
                )
            if shown or not ids:
                documents.append(Document(document[shown[0] : shown[-1] + 1] if shown else document))
        return documents

    def _write(
        self, where: str, text: str, spans: list[Span] | None, special: bool, sources: Sequence[MediaSource]
    ) -> Text:
        """Return a text in which the placeholders of images are replaced with the tokens of the images."""
        if not sources:
            return Text(where, self._check_text(where, text), spans, special)
        media = self.media.open(where, sources)
        text, spans, counts = self.media.write(where, text, spans, media)
        return Text(where, text, spans, special, media, counts)

    # Methods that convert a text to tokens

    def _tokenize(self, group: Sequence[Text | Document]) -> Iterator[Document]:
        """Yield the documents of a group, in order. Items that already are documents are yielded unchanged."""
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_token_id
        texts = {i: text for i, text in enumerate(group) if isinstance(text, Text)}
        encoded: dict[int, array[int]] = {}

        # Very long texts are tokenized one at a time, in windows.
        for i, text in texts.items():
            ids = self._tokenize_long(text.text, text.spans) if len(text.text) > WINDOW_CHARACTERS else None
            if ids is not None:
                encoded[i] = ids

        # The other texts are tokenized together, on all cores. Offsets cost time, so they are computed only for texts
        # with spans.
        plain = [i for i, text in texts.items() if text.spans is None and i not in encoded]
        masked = [i for i, text in texts.items() if text.spans is not None and i not in encoded]
        encodings: Any = backend.encode_batch_fast(
            [texts[i].text for i in plain], add_special_tokens=self._adds_special_tokens
        )
        encoded |= {i: array("i", encoding.ids) for i, encoding in zip(plain, encodings, strict=True)}
        encodings = backend.encode_batch([texts[i].text for i in masked], add_special_tokens=False)
        for i, encoding in zip(masked, encodings, strict=True):
            encoded[i] = _masked(encoding.ids, encoding.offsets, texts[i].spans)

        # The special tokens around a prompt and its answer are not learned, except for the end token.
        around = [i for i, text in texts.items() if text.spans is not None and text.special]
        before, after = self._special_tokens() if around else ([], [])
        for i in around:
            end = [token if token == eos else ~token for token in after]
            encoded[i] = array("i", [*(~token for token in before), *encoded[i], *end])

        # Yield the documents in the order of the group.
        for i, item in enumerate(group):
            if isinstance(item, Document):
                yield item
                continue
            ids = drop_second_bos(self.tokenizer, encoded[i]) if item.special else encoded[i]
            if item.special and eos is not None and (not ids or ids[-1] != eos):
                ids.append(eos)
            yield self._with_media(ids, item) if item.media else Document(ids)

    def _with_media(self, ids: "array[int]", text: Text) -> Document:
        """Convert a text and its token ids to a document with the images of the text. Image tokens get no labels."""
        media = self.media.locate(text.where, ids, text.media, text.counts)
        return Document(array("i", (~token if token in self.media.token_ids else token for token in ids)), media)

    def _tokenize_long(self, text: str, spans: list[Span] | None) -> "array[int] | None":
        """Tokenize a long text with bounded memory. Returns None if the windows cannot be joined exactly.

        Pre-tokenizers read from left to right, and a sequence of tokens is the BPE encoding of its text if each pair of
        neighboring tokens is the BPE encoding of the pair's text. The text is therefore tokenized in overlapping
        windows, and each overlap is also tokenized alone. Two windows are joined in the middle of their overlap if both
        windows and the overlap alone have the same tokens there. Tokens at the ends of the overlap may differ, because
        they depend on the text outside of the overlap.
        """
        backend = self.tokenizer.backend
        if type(backend.model).__name__ != "BPE" or backend.model.dropout:
            return None
        encode: Any = backend.encode_batch_fast if spans is None else backend.encode_batch
        before, after = self._special_tokens() if spans is None else ([], [])
        joined = array("i", before)
        ids: list[int] = []  # the ids of the last window that are not in `joined` yet
        offsets: list[Span] = []

        # Several windows are tokenized at the same time, on all cores, and then joined one after another.
        starts = range(0, len(text) - OVERLAP_CHARACTERS, WINDOW_CHARACTERS - OVERLAP_CHARACTERS)
        windows_at_once = GROUP_CHARACTERS // WINDOW_CHARACTERS
        for first in range(0, len(starts), windows_at_once):
            batch = starts[first : first + windows_at_once]
            windows = encode([text[start : start + WINDOW_CHARACTERS] for start in batch], add_special_tokens=False)
            overlaps = [text[start : start + OVERLAP_CHARACTERS] for start in batch]
            seams = backend.encode_batch_fast(overlaps, add_special_tokens=False)
            for start, window, seam in zip(batch, windows, seams, strict=True):
                previous, begin = ids, 0
                ids = window.ids
                if start:
                    # The middle of the overlap must have the same tokens in both windows and in the overlap tokenized
                    # alone.
                    n = len(seam.ids)
                    low, begin, high = n // 8, n // 2, n - n // 8
                    if n < 16 or previous[low - n :] != seam.ids[low:] or ids[:high] != seam.ids[:high]:
                        return None
                    joined.extend(_masked(previous[: begin - n], offsets[: begin - n], spans))
                ids = ids[begin:]
                if spans is not None:
                    offsets = [
                        (first_character + start, end + start) for first_character, end in window.offsets[begin:]
                    ]
        joined.extend(_masked(ids, offsets, spans))
        joined.extend(after)
        return joined

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after a text."""
        if not self._adds_special_tokens:
            return [], []
        backend = self.tokenizer.backend
        plain, whole = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    @property
    def _adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds special tokens to texts without a chat template."""
        return self.processor is None or not self.processor.places_bos

    def _check_text(self, where: str, text: str) -> str:
        """Return the unchanged text of an example without images. Warns if the text seems to need an image.

        Raises:
            ValueError: the text contains one of the model's image placeholders.
        """
        placeholders = [name for name in self._placeholders if name in text]
        if placeholders:
            raise ValueError(f"{where}: a text must be without images, got {', '.join(placeholders)}. {self._advice}")
        if "<image>" in text and self.processor is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{where}: <image> is learned as text, because the example has no column of images. If it stands for "
                "an image, give the image in a column images or image.",
                stacklevel=2,
            )
        return text

    @property
    def _advice(self) -> str:
        return _NO_MEDIA if self.processor is None else "Give an image for each placeholder, and nothing else."


_NO_MEDIA = (
    "A tokenizer reads texts: pass the model's processor (model.processor) for images, and leave out what it does not "
    "take."
)


def open_reader(reader: Any) -> tuple[Tokenizer, MediaReader]:
    """Return a model's tokenizer and a reader for its images, given the model's tokenizer or processor."""
    if isinstance(reader, Processor):
        return reader.tokenizer, MediaReader(reader)
    return reader, MediaReader(None)


def drop_second_bos(tokenizer: Tokenizer, ids: Any) -> Any:
    """If a text itself begins with BOS, remove the BOS that the tokenizer added to the text's ids.

    Args:
        tokenizer: the tokenizer, which may add a BOS.
        ids: a list or an array of ids, including the tokenizer's special tokens. ``~id`` stands for a token without a
            label.
    """
    bos = tokenizer.bos_token_id
    is_repeated = bos is not None and [max(token, ~token) for token in ids[:2]] == [bos, bos]
    return ids[1:] if is_repeated and tokenizer.encode("")[:1] == [bos] else ids


def check_media_columns(
    where: str,
    example: Mapping[str, Any],
    media: MediaReader,
    must: str,
    advice: str,
    names: Sequence[str] = MEDIA_COLUMNS,
) -> None:
    """Raise ValueError if an example has image columns that the model does not accept.

    Args:
        where: location of the example.
        example: the columns.
        media: reader for the model's images.
        must: the beginning of the error message, which continues with the kinds of media that the model takes.
        advice: the end of the error message, with ``{}`` for the names of the fields.
        names: the fields to check.
    """
    unread = [name for name in names if name.rstrip("s") not in media.kinds and not is_empty(example.get(name))]
    if unread:
        kinds = " and ".join(("text", *media.kinds))
        raise ValueError(f"{where}: {must} {kinds}, got {advice.format(', '.join(unread))}")


def render_examples(
    where: str,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    learned: list[bool],
    example: Mapping[str, Any],
    multi_turn: str = "all",
    on_unrendered: str = "error",
) -> list[Rendering]:
    """Call `Tokenizer.render_examples` with an example's template variables. Error messages begin with ``where``."""
    try:
        # The call raises a TypeError if there are variables that the template does not read.
        options = {**read_variables(example), "learned": learned, "multi_turn": multi_turn}
        examples = tokenizer.render_examples(messages, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    check_rendered(where, [field for rendering in examples for field in rendering.unrendered], on_unrendered)
    return examples


def check_rendered(where: str, fields: Sequence[str], on_unrendered: str) -> None:
    """Raise ValueError or warn if the chat template leaves out fields of an example.

    Args:
        where: location of the example.
        fields: the fields that are left out, such as "message 2: tool_calls".
        on_unrendered: one of `ON_UNRENDERED`.
    """
    if not fields or on_unrendered == "drop":
        return
    text = f"{where}: {', '.join(dict.fromkeys(fields))} must be in the text that the chat template renders, got none."
    if on_unrendered == "error":
        advice = " or multi_turn: split" if any("content" in field for field in fields) else ""
        raise ValueError(
            f"{text} Remove it, use a template that renders it{advice}, or set on_unrendered to warn or drop."
        )
    warnings.warn(text, stacklevel=2)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message from `read_messages` is learned: True unless one of its `WEIGHTS` is 0."""
    return all(message.get(name, True) for name in WEIGHTS)


def _read_column(where: str, field: str, size: int, example: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a column with one value per token; None if the example has no such column."""
    values = example.get(name)
    if values is None:
        return None
    values = values if isinstance(values, list | tuple) else to_plain(values)
    if not isinstance(values, list | tuple) or len(values) != size:
        got = len(values) if isinstance(values, list | tuple) else repr(values)[:60]
        raise ValueError(f"{where}: {name} must be those of {field}, {size} of them, got {got}. Correct them.")
    return [int(value) if isinstance(value, bool) else value for value in values]


def _document_bounds(
    where: str,
    field: str,
    size: int,
    example: Mapping[str, Any],
    positions: Sequence[Any] | None,
    seen: Sequence[int],
) -> list[Span]:
    """Return the bounds of the documents in packed token ids.

    The bounds come from the column ``seq_lengths`` or ``position_ids`` of the example.
    """
    bounds = [0, size]

    # Lengths must add up to the number of tokens.
    lengths = example.get("seq_lengths")
    if lengths is not None:
        lengths = lengths if isinstance(lengths, list | tuple) else to_plain(lengths)
        if not isinstance(lengths, list | tuple) or not all(type(n) is int and n > 0 for n in lengths):
            raise ValueError(
                f"{where}: seq_lengths must be positive numbers of tokens, got {str(lengths)[:60]}. Correct them."
            )
        if sum(lengths) != size:
            raise ValueError(
                f"{where}: seq_lengths must add up to the {size} tokens of {field}, got {sum(lengths)}. Correct them."
            )
        bounds = [0, *itertools.accumulate(lengths)]

    # Positions must start at 0 in each document. Padding may have any positions.
    if positions is not None:
        shown = [i for i in range(size) if seen[i]]
        starts = [i for i in shown if positions[i] == 0]
        expected = [i - starts[bisect_right(starts, i) - 1] for i in shown] if starts else []
        by_positions = [0, *starts[1:], size]
        if [positions[i] for i in shown] != expected or (lengths is not None and by_positions != bounds):
            raise ValueError(
                f"{where}: position_ids must count from 0 in each document, as seq_lengths does, got others. Correct "
                "them, or leave them out."
            )
        bounds = by_positions
    return [*itertools.pairwise(bounds)]


def read_messages(where: str, messages: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return messages for a chat template, without the null values that a table adds for missing keys.

    Args:
        where: location of the messages, for error messages.
        messages: dicts with ``role`` and ``content``.
        kinds: the kinds of parts that are allowed besides text, such as "image".

    Returns:
        The messages. An assistant's message with tool calls or reasoning may lack content. Without ``kinds``, text
        parts are joined.

    Raises:
        ValueError: a message has no role; a message that may not lack content has none; content is neither a text nor
            a list of parts; reasoning is not a text; a part is neither text nor of an allowed kind; or the weights of a
            message contradict each other or are neither 0 nor 1.
    """
    checked = []
    for number, message in enumerate(messages, 1):
        # In a table, every message has the keys of all messages. Null and empty fields therefore count as absent.
        present = {key: value for key, value in message.items() if value is not None}
        for key in ("tool_calls", "function_call", *THOUGHTS):
            if key in present and not present[key]:
                del present[key]
        role = present.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{where}: message {number} must have a role, such as user, got {role!r}. Add it.")
        if "tool_calls" in present:
            present["tool_calls"] = _read_calls(where, number, present["tool_calls"])
        if isinstance(present.get("function_call"), Mapping):
            present["function_call"] = _with_arguments(present["function_call"])

        # Content is a text or parts. An assistant's message may have tool calls or reasoning instead.
        content = present.get("content")
        instead = [key for key in ("tool_calls", "function_call", *THOUGHTS) if role == "assistant" and key in present]
        if content is None and not instead:
            raise ValueError(
                f"{where}: message {number} must have content, got null. Only an assistant's message with tool_calls "
                "may have none."
            )
        if content is not None and role in SPEAKERS and not isinstance(content, str | list | tuple):
            raise ValueError(
                f"{where}: message {number} must have content that is a text or a list of parts, got "
                f"{str(content)[:60]!r}. Correct it."
            )
        for key in THOUGHTS:
            if not isinstance(present.get(key, ""), str):
                raise ValueError(
                    f"{where}: message {number} must have {key} that is a text, got {str(present[key])[:60]!r}. "
                    "Correct it."
                )

        # Parts are texts, or media that the model takes.
        for part in content if isinstance(content, list | tuple) else ():
            if not isinstance(part, Mapping) or (part.get("type") == "text" and not _is_text(part)):
                raise ValueError(
                    f"{where}: message {number} must have parts such as {{'type': 'text', 'text': ...}}, got "
                    f"{str(part)[:60]!r}. Correct it."
                )
            media = [] if part.get("type") in kinds else _media_in(part)
            if media:
                raise ValueError(
                    f"{where}: message {number} must be {' and '.join(('text', *kinds))}, got a part "
                    f"{', '.join(media)}. {_NO_MEDIA}"
                )
        if not kinds and isinstance(content, list | tuple) and all(map(_is_text, content)):
            content = "".join(part["text"] for part in content)  # chat templates of text models take no parts

        # Weights say whether the message is learned. OpenAI, ms-swift and axolotl use different names for them.
        weights = {name: present[name] for name in WEIGHTS if name in present}
        for name, weight in weights.items():
            if weight not in (0, 1):
                raise ValueError(
                    f"{where}: message {number} must have {name} 0 (not learned) or 1, got {weight!r}. Correct it."
                )
        if len({*weights.values()}) > 1:
            raise ValueError(f"{where}: message {number} must be learned or not, got {weights}. Leave one out.")
        checked.append({**present, "content": content} if content is not None else present)
    return checked


def _read_calls(where: str, number: int, calls: Any) -> list[Any]:
    """Return a message's tool calls, with arguments converted to objects.

    In OpenAI's format, arguments are JSON texts.
    """
    if isinstance(calls, str):
        with contextlib.suppress(ValueError):
            calls = json.loads(calls)
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"{where}: message {number} must have tool_calls that are a list of calls, got {str(calls)[:60]!r}. "
            "Correct them."
        )
    return [
        {**call, "function": _with_arguments(call["function"])}
        if isinstance(call.get("function"), Mapping)
        else _with_arguments(call)
        for call in calls
    ]


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object: missing arguments become {}, and a JSON text is parsed."""
    function = {key: value for key, value in function.items() if value is not None}
    arguments = function.get("arguments")
    if arguments is None and "name" in function and "parameters" not in function:
        function["arguments"] = {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments) if arguments.strip() else {}
            if isinstance(parsed, dict):
                function["arguments"] = parsed
    return function


def _is_text(part: Any) -> bool:
    """Return whether a part of a message is a text."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _media_in(part: Mapping[str, Any]) -> list[str]:
    """Return the names in a message part (its type and its keys) that refer to an image, a video or audio."""
    names = [str(part.get("type")), *(key for key, value in part.items() if value is not None)]
    return [name for name in names if any(kind in name for kind in MEDIA)]


def is_empty(value: Any) -> bool:
    """Return whether a column of an example is missing or empty."""
    return value is None or (isinstance(value, list | tuple | str) and not value)


def _masked(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span] | None) -> "array[int]":
    """Return token ids, with ``~id`` for each token outside of ``spans``, which gets no label.

    If ``spans`` is None, all tokens get labels.
    """
    if spans is None:
        return array("i", ids)
    learned = answer_mask(offsets, spans)
    return array("i", (token if is_learned else ~token for token, is_learned in zip(ids, learned, strict=True)))


def read_variables(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example's variables for the chat template: its tools and its ``chat_template_kwargs``.

    The values of these columns may also be JSON texts, because a column of a table cannot hold values of different
    types.

    Raises:
        ValueError: a text in these columns is not JSON, or ``chat_template_kwargs`` is not an object.
    """
    variables = {}
    for name in ("tools", "chat_template_kwargs"):
        value = example.get(name)
        try:
            variables[name] = json.loads(value.strip() or "null") if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{name} must be JSON where it is a text, got {str(value)[:60]!r}. Correct it.") from error
    # A missing list of tools, an empty list and an empty text all mean no tools. Null variables count as absent.
    options = variables["chat_template_kwargs"] or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"chat_template_kwargs must be an object, got {str(options)[:60]!r}. Correct it.")
    return {"tools": variables["tools"] or None, **{key: value for key, value in options.items() if value is not None}}


def check_characters(where: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair. A broken escape in JSON produces such a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"{where}: must be whole characters, got {half!r}. Correct the text.") from error
