"""Data for embedding models and rerankers: queries with their documents, or pairs of texts with scores."""

import hashlib
import itertools
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_models.data.answers import AnswerRows
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset
from liger_models.data.encoding import Document, Encoder, check_characters
from liger_models.data.formats import NEGATIVES, mark_learned
from liger_models.data.packing import PackedRows
from liger_models.data.sources import Record
from liger_models.data.tokens import TokenFile, tokenize
from liger_models.retrieval.texts import EmptyTextError, pack_texts
from liger_models.text.tokenizer import Tokenizer

GROUP = 256
"""Number of examples that are tokenized together."""
QUERY = ("query", "anchor", "question", "sentence1")
DOCUMENT = ("positive", "pos", "document", "passage", "answer", "sentence2")
SCORE = ("score", "label", "similarity_score")
"""Possible names of three columns: the query of an example, its document, and the score of query and document."""
HEAD = 4
"""Number of integers before the scores in the header of an example; see `PairEncoder`."""


class Pair(NamedTuple):
    """A query with documents.

    Attributes:
        query: the query, or the first of two texts.
        documents: the positive document, followed by negative documents. With a score, there is only one document.
        score: the score of query and document; None for a positive document with negative documents.
    """

    query: str
    documents: list[str]
    score: float | None = None


class TextMaker(Protocol):
    """Turns each `Pair` into the texts that the model reads, as token ids.

    Two objects with equal fields create the same texts.
    """

    by_document: bool
    """Whether an example has one text per document, with a score. Otherwise, it has one text for the query and one for
    each document.
    """

    def __call__(self, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[list[Tensor]]:
        """Return, for each pair, the token ids of its texts, [n] int32 each."""


def read_pair(where: str, record: Mapping[str, Any], format: str) -> Pair:
    """Read a record of the format "contrastive" or "scored-pair".

    Raises:
        ValueError: a column is malformed.
    """

    def text(names: Iterable[str]) -> str:
        name = next(name for name in names if record.get(name) is not None)
        value = record[name]
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: {name} must be a text, got {str(value)[:60]!r}. Write an example for each of several."
            )
        check_characters(where, value)
        return value

    query = text(QUERY)
    if format == "scored-pair":
        score = record[next(name for name in SCORE if record.get(name) is not None)]
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"{where}: the score must be a finite number, got {score!r}. Correct it.")
        return Pair(query, [text(name for name in DOCUMENT if name not in ("positive", "pos", "answer"))], float(score))

    # Negative documents have one column each, or are in a list.
    unread = sorted(name for name in record if re.fullmatch(r"negative_\d+", name) and name not in NEGATIVES)
    if unread:
        raise ValueError(
            f"{where}: columns of negatives must be negative_1 to negative_64, got {unread[0]}. Write a list in the "
            "column negatives."
        )
    documents = [text(DOCUMENT)]
    for name in (name for name in NEGATIVES if record.get(name) is not None):
        value = record[name]
        for negative in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(negative, str):
                raise ValueError(f"{where}: {name} must be a text or texts, got {str(value)[:60]!r}. Correct it.")
            check_characters(where, negative)
            documents.append(negative)

    # An example with a single document and a score is an error, because the score may say that the document is
    # negative.
    score = next((name for name in SCORE if isinstance(record.get(name), int | float)), None)
    if score is not None and len(documents) == 1:
        raise ValueError(
            f"{where}: an example with a score must have the columns query, document and score, got {score} "
            f"{record[score]!r} with {', '.join(name for name in record if name in (*QUERY, *DOCUMENT))}. Rename them, "
            f"or remove {score} if all documents are positive."
        )
    return Pair(query, documents)


def key_of(content: bytes) -> int:
    """Return a 64-bit checksum of a text, by which equal texts are recognized."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


class PairEncoder(Encoder):
    """Encodes each record as a header, followed by the token ids of each of its texts.

    The header and each text are stored as one `Document` each. The header contains four things: the number of texts,
    the number of scores, the 64-bit checksum of the query as two integers, and the bits of the scores.
    """

    texts: TextMaker

    def encode(self, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of the records, in order; see `Encoder.encode`."""
        limited = iter(self._limited(records))
        while group := list(itertools.islice(limited, GROUP)):
            pairs = [read_pair(where, record, self.formats.name(where, record)) for where, record in group]
            try:
                encoded = self.texts(self.tokenizer, pairs)
            except EmptyTextError:
                for (where, _), pair in zip(group, pairs, strict=True):
                    try:
                        self.texts(self.tokenizer, [pair])
                    except EmptyTextError as error:
                        raise ValueError(f"{where}: {error}") from error
                raise
            for pair, texts in zip(pairs, encoded, strict=True):
                scores = [] if pair.score is None else [pair.score]
                if self.texts.by_document and pair.score is None:
                    scores = [1.0, *[0.0] * (len(pair.documents) - 1)]
                bits = array("i", array("f", scores).tobytes())
                key = array("i", key_of(pair.query.encode()).to_bytes(8, "little", signed=True))
                yield Document(array("i", [len(texts), len(scores)]) + key + bits)
                yield from (Document(array("i", ids.tolist())) for ids in texts)


class PairRows(AnswerRows):
    """The examples of an epoch, in order.

    An example has ``texts``, ``scores`` and ``key``, a checksum of its query.
    """

    def _with_answers(self) -> list[int]:
        """Return the indices of all examples, and store the position of each example's header in ``firsts``."""
        self.firsts, ends, ids = list[int](), self.tokens.ends.tolist(), self.tokens.ids
        first = 0
        while first < len(ends):
            self.firsts.append(first)
            first += 1 + int(ids[ends[first - 1] if first else 0])
        return [*range(len(self.firsts))]

    def _document(self, number: int) -> Tensor:
        return self.tokens.ids[int(self.tokens.ends[number - 1]) if number else 0 : int(self.tokens.ends[number])]

    def _read(self, number: int) -> Any:
        first = self.firsts[number]
        size, _, *key = self._document(first)[:HEAD].tolist()
        return {
            "texts": [self._document(first + 1 + index) for index in range(size)],
            "key": torch.tensor(key, dtype=torch.int32, device="cpu").view(torch.int64),  # [1]
            "scores": self.scores(number),
        }

    def scores(self, number: int) -> Tensor:
        """Return the scores, [n] fp32, of the example with the index ``number`` in the source."""
        return self._document(self.firsts[number])[HEAD:].clone().view(torch.float32)

    @property
    def are_scored(self) -> set[bool]:
        """A set: {True} if all examples have scores, {False} if none has, and {True, False} if only some have."""
        ends = self.tokens.ends
        return {bool(self.tokens.ids[(int(ends[first - 1]) if first else 0) + 1]) for first in self.firsts}


class PairDataset(PackedDataset):
    """Batches of queries with documents: this rank's share of the examples, epoch after epoch.

    A batch has packed texts (see `pack_texts`) and these tensors:

    - ``counted`` [examples] bool: False for an example that only fills the batch of a rank without examples.
    - ``query_keys`` [examples] int64: a checksum of each query.
    - ``keys`` [texts] int64: a checksum of each text.
    - ``scores`` fp32, if there are scores: [texts] for a reranker, otherwise [examples].
    - ``example`` [texts] int64: the index of the example to which each text belongs.

    For embedding models, the texts are ordered by kind: first all queries, then the document of each query, then all
    negative documents. For rerankers, the texts are prompts, one for each document.

    Order, distribution over ranks, position and cache work as in `PackedDataset`, with examples instead of rows. If
    ``complete`` is True, the last step of an epoch is filled up with the first examples of the epoch.

    Args:
        source: files or another source with a length; see `PackedDataset`. The examples have one of these formats:

            - "contrastive": a query (``query``, ``anchor``, ``question`` or ``sentence1``), its document (``positive``,
              ``pos``, ``document``, ``passage``, ``answer`` or ``sentence2``), and optionally hard negatives:
              ``negative``, ``negative_1`` and so on, or a list ``negatives`` or ``neg``.
            - "scored-pair": a query (``query``, ``sentence1`` or ``anchor``), a document (``document``, ``sentence2``
              or ``passage``) and a number ``score``, ``label`` or ``similarity_score``.
        tokenizer: the tokenizer of the model.
        length: maximum number of tokens in a text. Longer texts are cut.
        texts: object that creates the texts of the examples, such as `EmbedderTexts` or `RerankerTexts`.
        complete: whether to fill up the last step. Use False for an evaluation, which must see each example once.
        options: see `PackedDataset`. ``batch_size`` is the number of examples in a batch.

    Raises:
        ValueError: the source is a stream, or only some of the examples have scores; see also `PackedDataset`.
    """

    def __init__(
        self, source: Any, tokenizer: Tokenizer, *, length: int, texts: TextMaker, complete: bool = True, **options: Any
    ) -> None:
        self.texts, self.complete = texts, complete
        options = {**options, "formats": ("scored-pair", "contrastive"), "overflow": "truncate"}
        super().__init__(source, tokenizer, length=length, **options)
        if self._rows is None:
            raise ValueError("PairDataset: the source must have a length, got a stream. Save it as a file.")
        are_scored = set[bool]().union(*(part.are_scored for part in self._parts))
        if len(are_scored) > 1:
            raise ValueError(
                "PairDataset: all examples must have scores, or none may have any, got both. Train with one kind after "
                "the other."
            )
        self.is_scored = True in are_scored

    @property
    def _parts(self) -> list[Any]:
        return getattr(self.rows, "parts", [self.rows])

    def _make_encoder(self, tokenizer: Any, *options: Any) -> Encoder:
        encoder = PairEncoder(tokenizer, *options)
        encoder.texts = self.texts
        encoder.key = [*encoder.key, repr(self.texts)]
        return encoder

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        tokens: TokenFile = tokenize(source, self.encoder, cache_dir, progress)
        return PairRows(tokens, self._make_row, self.shuffle, self.seed)

    def score_outside(self, low: float, high: float) -> float | None:
        """Return a score that is below ``low`` or above ``high``; None if there is no such score."""
        for part in self._parts:
            for number in range(len(part.firsts)) if self.is_scored else ():
                wrong = [score for score in part.scores(number).tolist() if not low <= score <= high]
                if wrong:
                    return float(wrong[0])
        return None

    def _count(self) -> int:
        return sum(len(part.firsts) for part in self._parts)

    def _first_size(self) -> int:
        return 1 + int(self.rows.tokens.ids[0])

    def _notes(self) -> list[str]:
        return []  # no example has labels

    def _show(self, documents: list[list[int]]) -> str:
        head, *texts = documents
        scores = array("f", array("i", head[HEAD:]).tobytes())
        names = ["query", "positive", *[f"negative {number}" for number in range(1, len(texts))]]
        if scores and self.texts.by_document:
            names = [f"score {score:g}" for score in scores]
        elif scores:
            names = ["first", f"second, score {scores[0]:g}"]
        shown = (mark_learned(self.encoder.tokenizer, [~token for token in text]) for text in texts)
        return "\n".join(f"{name}:\n{text}" for name, text in zip(names, shown, strict=False))

    def _batch(self, rows: list[Any]) -> Batch:
        counted = [True] * len(rows)
        if self.complete:
            rows = self._completed(rows)
            counted = [True] * len(rows)
        elif not rows:
            rows, counted = [self.rows[0]], [False]  # so that all ranks have the same number of batches
        # Order the texts: for a reranker by example; otherwise queries first, then documents, then negative documents.
        numbered = [(number, text) for number, row in enumerate(rows) for text in row["texts"]]
        if not self.texts.by_document:
            parts = [[(number, row["texts"][place]) for number, row in enumerate(rows)] for place in (0, 1)]
            parts.append([(number, text) for number, row in enumerate(rows) for text in row["texts"][2:]])
            numbered = [item for part in parts for item in part]
        texts = [text for _, text in numbered]
        batch = pack_texts(texts, self._filler) | {
            "counted": torch.tensor(counted, device="cpu"),
            "query_keys": torch.cat([row["key"] for row in rows]),
            "keys": torch.tensor([key_of(text.numpy().tobytes()) for text in texts], device="cpu"),
            "example": torch.tensor([number for number, _ in numbered], device="cpu"),
        }
        scores = torch.cat([row["scores"] for row in rows])
        return batch | ({"scores": scores} if len(scores) else {})
