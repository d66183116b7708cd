"""Answers for preference training: pairs of a chosen and a rejected answer, or answers labeled as good or bad."""

import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.data.batch import Batch, collate, make_row
from liger_models.data.dataset import PackedDataset
from liger_models.data.encoding import Document, Encoder
from liger_models.data.formats import ANSWERS, mark_learned
from liger_models.data.media import BrokenMediaError, Medium, keep_whole
from liger_models.data.packing import PackedRows, seeded_generator
from liger_models.data.pixels import RowMaker, make_pixels
from liger_models.data.preference import encode_pair
from liger_models.data.sources import Record
from liger_models.data.tokens import TokenFile, document_sizes, tokenize

MULTIPLE = 64
"""Rows are padded to a multiple of this number of tokens, so that there are only a few different shapes."""


class AnswerEncoder(Encoder):
    """Encodes each record as two documents.

    For a pair, the two documents are the chosen and the rejected answer. For a labeled answer, the first document is
    the answer, and the second document holds its label, which is 0 or 1. The document of an answer holds the prompt
    followed by the answer. The tokens of the prompt have no labels. In a pair, only the first document has the prompt's
    images.
    """

    def encode(self, records: Iterable[Record]) -> Iterator[Document]:
        """Yield two documents for each record; see `Encoder.encode`."""
        for where, record in self._limited(records):
            # A label must be a truth value, because other numbers may be scores.
            has_label = self.formats.name(where, record) == "kto"
            record = self.formats.convert(where, record, self.tokenizer)
            label: Any = record.get("label")
            if isinstance(label, str):
                label = {"true": True, "false": False}.get(label.lower(), label)
            if has_label and label not in (0, 1):
                raise ValueError(
                    f"{where}: label must be true for a good answer and false for a bad one, got {label!r}. Correct it."
                )
            try:
                names = ("completion",) if has_label else ANSWERS
                answers = encode_pair(where, record, self.processor or self.tokenizer, names, self.on_unrendered)
            except BrokenMediaError as error:
                if self.broken_media == "error":
                    raise
                self.skipped.add(error)
                continue
            except ValueError as error:
                raise ValueError(f"{where}: {str(error).removeprefix(where).lstrip(',: ')}") from error
            # Both answers have the prompt's images, so the images are stored only with the first answer.
            for number, (prompt, answer, media) in enumerate(answers):
                yield Document(array("i", [*(~token for token in prompt), *answer]), () if number else media)
            if has_label:
                yield Document(array("i", [int(label)]))


class AnswerRows(PackedRows):
    """The examples of an epoch, in order. `AnswerDataset` creates this sequence.

    An example is a dict. The entries ``first`` and ``second`` of the dict are documents ([n] int32 each). All other
    entries are pixels, named like the arguments of the forward. With ``broken_media="skip"``, an example whose images
    cannot be decoded is replaced with the next example of the source.
    """

    def __init__(self, tokens: TokenFile, make_row: RowMaker, shuffle: bool, seed: int) -> None:
        super().__init__(tokens, make_row, "truncate", shuffle, seed)
        self._order: Tensor | None = None
        self.kept = self._with_answers()

    def _with_answers(self) -> list[int]:
        """Return the indices of the examples whose answers begin within the first ``length`` tokens."""
        sizes = document_sizes(self.tokens.ends).view(-1, 2)  # [examples, 2]
        is_long = (sizes > self.length).any(1).tolist()
        return [
            number
            for number, long in enumerate(is_long)
            if not long or all((document >= 0).any() for document in self._documents(number)[:2])
        ]

    def has_targets(self) -> bool:
        """Return whether there is at least one example."""
        return bool(self.kept)

    def plan(self, epoch: int) -> None:
        """Select ``epoch``. From then on, indexing returns the examples of this epoch."""
        self._order = self._order if epoch == self.epoch else None
        self.epoch = epoch

    def number(self, index: int) -> int:
        """Convert the index of an example in the epoch to its index in the source."""
        return self.kept[self._place(index)]

    def _place(self, index: int) -> int:
        """Convert the index of an example in the epoch to its index in ``self.kept``."""
        if not 0 <= index < len(self):
            raise IndexError(f"{type(self).__name__}: index must be 0 to {len(self) - 1}, got {index}.")
        # The order of an epoch depends only on the seed and the epoch's number, so that any process can resume the
        # epoch.
        if self.shuffle and self._order is None:
            self._order = torch.randperm(len(self), generator=seeded_generator(self.seed, self.epoch), device="cpu")
        return index if self._order is None else int(self._order[index])

    def __len__(self) -> int:
        return len(self.kept)

    def _documents(self, number: int) -> tuple[Tensor, Tensor, list[Medium]]:
        """Return an example's documents and images.

        A document is cut after ``length`` tokens or, if this would split an image, before this image.
        """
        start = int(self.tokens.ends[2 * number - 1]) if number else 0
        middle, end = self.tokens.ends[2 * number : 2 * number + 2].tolist()
        # Both documents begin with the same prompt, so the images in the first document determine where both are cut.
        media = self.tokens.media_in(start, middle)
        length = keep_whole([(medium.first, medium.end) for medium in media], self.length)
        first, second = self.tokens.ids[start:middle], self.tokens.ids[middle:end]
        return first[:length], second[:length], [medium for medium in media if medium.end <= length]

    def count_equal(self) -> int:
        """Return the number of pairs whose two answers are equal, for example because both were cut."""
        sizes = document_sizes(self.tokens.ends).view(-1, 2).clamp(max=self.length)
        alike = (sizes[:, 0] == sizes[:, 1]).tolist()
        pairs = (self._documents(number)[:2] for number in self.kept if alike[number])
        return sum(torch.equal(first, second) for first, second in pairs)

    def __getitem__(self, index: int) -> Any:
        # Replace a broken example with the next example, so that every epoch has the same number of batches.
        first = self._place(index)
        for step in range(len(self)):
            try:
                return self._read(self.kept[(first + step) % len(self)])
            except BrokenMediaError as error:
                self.make_row.count(error, "Examples with broken images or videos are replaced by the next ones.")
        raise ValueError(f"{type(self).__name__}: images must be files that can be read, got only broken ones.")

    def _read(self, number: int) -> Any:
        first, second, media = self._documents(number)
        return {"first": first, "second": second, **make_pixels(media, self.make_row.processor)}


class AnswerDataset(PackedDataset):
    """Batches of answers for preference training: this rank's share of the examples, epoch after epoch.

    An example is either a pair or a labeled answer. A pair has ``prompt``, ``chosen`` and ``rejected``. The field
    ``prompt`` may be missing if ``chosen`` and ``rejected`` are messages that begin with the prompt. A labeled answer
    has ``prompt``, ``completion`` and ``label``. The values are texts or messages, as in TRL's trainers. If the model's
    processor is passed, the messages of a prompt may have images, in the forms that `PackedDataset` accepts.

    A batch holds the arguments of a model's forward. In a batch of pairs, the first rows are the chosen sequences, and
    the other rows are the rejected sequences. All rows are padded on the right. Only answers have labels. Both
    sequences of a pair have the pixels of the prompt. A batch of labeled answers also has ``preference_labels`` [rows]
    bool, and mismatched rows under keys with the prefix ``kl_``. A mismatched row consists of a prompt and the answer
    to the next prompt. The mismatched rows have the same prompts as the other rows, so the pixels are not repeated.
    KTO estimates its KL divergence from the mismatched rows.

    A sequence is cut after ``length`` tokens or, if this would split an image, before this image. An example is left
    out if its prompt leaves no room for an answer. A warning reports how many examples are left out.

    Order, distribution over ranks, position and cache work as in `PackedDataset`, with examples instead of rows. If
    ``complete`` is True, the last step of an epoch is filled up with the first examples of the epoch.

    Args:
        source: files or another source with a length; see `PackedDataset`.
        tokenizer: the tokenizer of the model, or its processor, which also takes images.
        length: maximum number of tokens in a sequence.
        formats: the formats that examples may have: ("preference",) or ("kto",).
        complete: whether to fill up the last step. Use False for an evaluation, which must see each example once. The
            last batches then have fewer examples, and a rank without examples gets an example without labels.
        options: see `PackedDataset`. ``batch_size`` is the number of examples in a batch.

    Raises:
        ValueError: the source is a stream; see also `PackedDataset`.
    """

    per_example: ClassVar[int] = 2

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        *,
        length: int,
        formats: Sequence[str],
        complete: bool = True,
        **options: Any,
    ) -> None:
        self.formats, self.complete = tuple(formats), complete
        super().__init__(source, tokenizer, length=length, formats=formats, **{**options, "overflow": "truncate"})
        if self._rows is None:
            raise ValueError("AnswerDataset: the source must have a length, got a stream. Save it as a file.")

    def _notes(self) -> list[str]:
        """Return notes that count examples left out, sequences that are cut, and pairs with equal answers."""
        parts: Any = getattr(self.rows, "parts", [self.rows])
        sizes = [document_sizes(part.tokens.ends).view(-1, 2) for part in parts]
        left_out = sum(len(size) - len(part.kept) for part, size in zip(parts, sizes, strict=True))
        cut = sum(int((size[part.kept] > self.length).sum()) for part, size in zip(parts, sizes, strict=True))
        equal = sum(part.count_equal() for part in parts) if self.formats != ("kto",) else 0
        notes = []
        if left_out:
            notes.append(
                f"{left_out:,} examples are left out: their prompts have {self.length} tokens (length) or more, which "
                "leaves none of an answer."
            )
        if cut:
            notes.append(f"{cut:,} sequences are longer than {self.length} tokens and are cut.")
        if equal:
            notes.append(f"{equal:,} pairs have equal answers{' once cut' * bool(cut)}, from which nothing is learned.")
        return notes

    def _make_encoder(self, tokenizer: Any, *options: Any) -> Encoder:
        return AnswerEncoder(tokenizer, *options)

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        tokens = tokenize(source, self.encoder, cache_dir, progress)
        self._warn(*tokens.skipped, 0)
        rows = AnswerRows(tokens, self._make_row, self.shuffle, self.seed)
        left_out = tokens.documents // 2 - len(rows.kept)
        if left_out:
            warnings.warn(
                f"AnswerDataset: {left_out} examples are left out, because their prompts have {self.length} tokens "
                "(length) or more, which leaves none of an answer. Raise length.",
                stacklevel=3,
            )
        return rows

    def _show(self, documents: list[list[int]]) -> str:
        shown = mark_learned(self.encoder.tokenizer, documents[0])
        if self.formats == ("kto",):
            return f"{shown}\n    label: {bool(documents[1][0])}"
        return f"chosen:\n{shown}\nrejected:\n{mark_learned(self.encoder.tokenizer, documents[1])}"

    def _batch(self, rows: list[Batch]) -> Batch:
        # A rank without examples gets an example without labels, so that all ranks have the same number of batches.
        rows = self._completed(rows) if self.complete else rows or [self._without_labels(self.rows[0])]
        first, second = ([row.pop(name) for row in rows] for name in ("first", "second"))
        if self.formats != ("kto",):
            return self._padded(first + second, rows * 2)

        # KTO estimates its KL divergence from pairs of a prompt and the answer to the next prompt.
        prompts = [document[: int((document < 0).sum())] for document in first]
        answers = [document[int((document < 0).sum()) :] for document in first]
        unrelated = [torch.cat(pair) for pair in zip(prompts, answers[1:] + answers[:1], strict=True)]
        return {
            **self._padded(first, rows),
            "preference_labels": torch.tensor([bool(label) for label in second], device="cpu"),
            **{f"kl_{name}": tensor for name, tensor in self._padded(unrelated).items()},
        }

    def _without_labels(self, row: Any) -> Any:
        return {**row, **{name: torch.where(row[name] < 0, row[name], ~row[name]) for name in ("first", "second")}}

    def _padded(self, documents: list[Tensor], pixels: Sequence[Batch] = ()) -> Batch:
        return padded(documents, self.length, self._filler, pixels)


def padded(documents: Sequence[Tensor], length: int, filler: int, pixels: Sequence[Batch] = ()) -> Batch:
    """Return a batch with one row per document, cut at ``length`` and padded to a multiple of `MULTIPLE` tokens.

    Args:
        documents: the token ids of each document, [n], with ``~id`` instead of ``id`` for a token without a label.
        length: the maximum number of tokens in a row.
        filler: the token id of padding.
        pixels: each row's inputs other than tokens, such as pixels; empty if there are none.
    """
    documents = [document[:length] for document in documents]
    longest = max(map(len, documents))
    # A row has at most `length` tokens, and at least two, because a single token has no target.
    rounded = max(min(-(-longest // MULTIPLE) * MULTIPLE, length), 2)
    rows = [make_row([document.int()], rounded, filler) for document in documents]
    return collate([row | images for row, images in zip(rows, pixels or [{}] * len(rows), strict=True)])
