"""`PackedDataset` yields a rank's share of packed batches, epoch after epoch, and can resume after any batch."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from liger_models.base.processor import Processor
from liger_models.data.batch import Batch, collate
from liger_models.data.encoding import ON_UNRENDERED, Document, Encoder, Skipped
from liger_models.data.formats import DOCUMENTS, Formats, mark_learned
from liger_models.data.media import keep_whole
from liger_models.data.mixture import MixedRows
from liger_models.data.packing import WINDOW, PackedRows, has_target, pack, seeded_generator, split_documents
from liger_models.data.pixels import Piece, RowMaker
from liger_models.data.sources import find_files, read_records
from liger_models.data.tokens import tokenize
from liger_models.distributed import ranks as processes
from liger_models.text.chat import MULTI_TURN
from liger_models.text.tokenizer import Tokenizer

OVERFLOWS = ("split", "truncate")

_NO_TARGETS = (
    "must have a token to predict, got none: every document has one token, or all its labels are -100. Give longer "
    "documents, or labels."
)


class PackedDataset(IterableDataset[Batch]):
    """Yields this rank's share of packed rows, epoch after epoch. The batches hold the arguments of a model's forward.

    A row contains whole documents, or pieces of documents that are longer than a row. It ends with padding, which has
    no labels. ``cu_seqlens`` contains the bounds of all documents. The packing and the order of the rows depend only on
    the data, ``seed`` and the epoch. In each step, the first ``batch_size`` rows go to rank 0, the next ``batch_size``
    rows to rank 1, and so on. Therefore, each row goes to exactly one rank, all ranks have the same number of batches,
    and a run may resume with another number of ranks. The last step of an epoch is filled up with rows of padding.

    If the source has a length, as files do, the constructor tokenizes the source into a cache that later runs reuse. In
    this case, every rank must call the constructor, and the first rank of each host tokenizes. An iterable without a
    length is a stream. Each rank and each worker reads the whole stream and tokenizes `WINDOW` examples at a time.
    Examples are shuffled only within such a window.

    An iteration starts at the beginning of the epoch, or at the position that `load_state_dict` has set. When the
    iteration ends, the data set moves to the next epoch. If a training loop stops the iteration right after the last
    batch of the epoch, the next iteration also starts the next epoch.

    Args:
        source: a file, a folder of files, a list of paths, a data set of `datasets` or PyTorch, or any other iterable.
            Files that end in .jsonl or .ndjson have one example per line. Files that end in .json have one example per
            line, or an array of examples. Files that end in .txt have one text per line. Files that end in .csv or .tsv
            have the names of the columns in the first line. All of these files may be compressed (.gz). Parquet files
            (.parquet) and Arrow files (.arrow) are also accepted.
        tokenizer: the tokenizer of the model, or the model's processor (``model.processor``), which also takes images
            and, for Qwen-VL, videos.
        length: number of tokens in a row.
        batch_size: number of rows in a batch.
        overflow: what happens to documents that are longer than ``length``. "split" splits them into pieces. Each
            piece begins with the last token of the piece before, so that no target is lost. "truncate" drops the
            tokens beyond ``length``. Documents with images are always truncated, before the first image that does not
            end within the row. A document with images is left out if no target remains. A warning reports how many
            documents are truncated or left out.
        format: the format of all examples. By default, the columns of each file's first example determine the format.
            With "chat" (``messages``), "sharegpt" (``conversations``), "prompt-completion", "alpaca"
            (``instruction``, ``input``, ``output``) and "question-answer", only answers are learned. "text" gets the
            tokenizer's special tokens and the end token. "input_ids" are taken unchanged. If only some ids should be
            learned, the example must also have ``labels``, ``completion_mask`` or ``assistant_masks``. If the ids
            consist of several documents, the example must also have ``seq_lengths`` or ``position_ids``.
        formats: the formats that examples may have. Any other format is an error.
        field: the only field of an example to read. The type of its value (a text, messages or ids) determines how
            the value is read.
        max_samples: the maximum number of examples to read, for a short trial. With ``shares``, this is the maximum
            for each source. Default: all examples.
        shares: for a list of sources, the share of an epoch's rows that comes from each source. An epoch ends when
            one of the sources is used up. In the next epoch, the other sources continue where they stopped. Default:
            an epoch has all rows of all sources.
        broken_media: what happens if an image is missing or cannot be read: "error" or "skip". Before training
            starts, the sizes of images are read from their headers. "skip" leaves out an example with an unreadable
            header. If pixels cannot be decoded later, "skip" makes the image black and removes the labels of its
            document. A warning names the first such image.
        multi_turn: how the answers of a chat become examples. "split" makes one example of all answers that the
            rendered chat shows as they were generated. If the template changes an earlier answer, for example by
            removing its reasoning, a further example ends with this answer and shows it as it was generated. "all"
            makes one example of all answers, as the template renders them in the whole chat. "last" makes one example,
            in which only the last answer is learned.
        on_unrendered: what happens if the chat template leaves out the content, the tool calls, the reasoning or the
            tools of a chat. "error" raises an error. "warn" and "drop" train on the text without the parts that are
            left out, and "warn" issues a warning.
        shuffle: whether to shuffle. False keeps the documents in order, as far as packing allows.
        seed: seed for shuffling.
        rank, ranks: this process's rank, and the number of ranks that share the data. Default: rank and size of the
            process group.
        cache_dir: folder for the tokens; default: ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        progress: whether rank 0 shows a progress bar while the source is tokenized.

    Attributes:
        epoch: the current epoch.
        passed: number of rows that all ranks together have taken in all epochs, including rows of padding.

    Raises:
        ValueError: an example is malformed (the message names its file and line); the source is empty or has no
            target (for a stream: no target among the first `WINDOW` examples); or the cached tokens are damaged.
        FileNotFoundError: a file does not exist.
        ImportError: a file is a Parquet or Arrow file, and pyarrow is not installed.
    """

    per_example: ClassVar[int] = 1
    """The number of documents that each example has in the token cache."""

    def __init__(
        self,
        source: Any,
        tokenizer: Tokenizer | Processor,
        *,
        length: int,
        batch_size: int = 1,
        overflow: str = "split",
        format: str | None = None,
        formats: Sequence[str] = DOCUMENTS,
        field: str | None = None,
        max_samples: int | None = None,
        shares: Sequence[float] | None = None,
        broken_media: str = "error",
        multi_turn: str = "split",
        on_unrendered: str = "error",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        cache_dir: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        self.rank = processes.rank() if rank is None else rank
        self.ranks = processes.world_size() if ranks is None else ranks
        if not length >= 2:
            raise ValueError(f"PackedDataset: length must be at least 2, got {length}.")
        if not batch_size >= 1:
            raise ValueError(f"PackedDataset: batch_size must be at least 1, got {batch_size}.")
        if overflow not in OVERFLOWS:
            raise ValueError(f"PackedDataset: overflow must be one of {OVERFLOWS}, got {overflow!r}.")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"PackedDataset: rank must be 0 to {self.ranks - 1} (ranks), got {self.rank}.")
        if format is not None and field is not None:
            raise ValueError(f"PackedDataset: give format or field, got {format!r} and {field!r}.")
        if shares is not None and not isinstance(source, list | tuple):
            raise ValueError(f"PackedDataset: shares need a list of sources, got {type(source).__name__}.")
        for name, value, choices in (
            ("multi_turn", multi_turn, MULTI_TURN), ("on_unrendered", on_unrendered, ON_UNRENDERED)
        ):  # fmt: skip
            if value not in choices:
                raise ValueError(f"PackedDataset: {name} must be one of {', '.join(choices)}, got {value!r}.")
        if max_samples is not None and not max_samples >= 1:
            raise ValueError(f"PackedDataset: max_samples must be at least 1, got {max_samples}.")

        self.length, self.batch_size, self.overflow = length, batch_size, overflow
        self.shuffle, self.seed = shuffle, seed
        # Define how records become documents, and how documents become rows.
        self.encoder = self._make_encoder(
            tokenizer, field, Formats(formats, format), max_samples, broken_media, multi_turn, on_unrendered
        )
        self._filler = self.encoder.tokenizer.padding_id
        self._make_row = RowMaker(length, self._filler, self.encoder.processor, broken_media)
        self.source = find_files(source)

        # A source with a length is tokenized now. A stream is tokenized while it is read.
        self._rows: PackedRows | None = None  # None for a stream
        if isinstance(self.source, tuple) or (hasattr(source, "__len__") and not isinstance(source, DataLoader)):
            if shares is None:
                self._rows = self._load_rows(self.source, cache_dir, progress)
            else:
                parts = [self._load_rows(find_files(part), cache_dir, progress) for part in source]
                self._rows = MixedRows(parts, shares, shuffle, seed)
            if not self._rows.has_targets():
                raise ValueError(f"PackedDataset: {self._named()} {_NO_TARGETS}")
        if self._rows is None and (max_samples is not None or shares is not None):
            raise ValueError("PackedDataset: max_samples and shares must be None for a stream. Prepare the stream.")

        # The position in the data. `state_dict` saves it.
        self.epoch = self.passed = 0
        self._loaded = False  # whether the next iteration starts at a loaded position
        self._rewind()

    @property
    def rows(self) -> PackedRows:
        """All rows of the epoch, for samplers and engines that distribute rows themselves.

        `collate` joins rows into a batch.

        Raises:
            ValueError: the source is a stream.
        """
        if self._rows is None:
            raise ValueError("PackedDataset: rows must have a source with a length, got a stream. Save it as a file.")
        return self._rows

    @property
    def broken(self) -> int:
        """The number of documents that have lost their labels so far because an image could not be decoded."""
        return int(self._make_row.broken.sum())

    @property
    def has_images(self) -> bool:
        """Whether any document has an image.

        The documents of a stream are not known in advance, so for a stream, True means that some documents may have
        images.
        """
        if self._rows is None:
            return self.encoder.processor is not None
        return any(len(tokens.media) for tokens in self._rows.sources)

    def __len__(self) -> int:
        """Return the number of batches per rank in a whole epoch. Raises TypeError for a stream."""
        if self._rows is None:
            raise TypeError("PackedDataset: a stream has no length. Give the number of steps, or save it as a file.")
        return -(-len(self._rows) // (self.ranks * self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        self._begin()
        self._loaded = False
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream = self._stream() if self._rows is None else None
        step_rows = self.ranks * self.batch_size
        for step in itertools.count((self._row - self._start) // step_rows):
            # The rows of all ranks in this step. A row is given by its number or, for a stream, by its pieces.
            rows: Sequence[int | list[Piece]]
            if stream is not None:
                rows = list(itertools.islice(stream, step_rows))
            else:
                rows = range(self._row, min(self._start + (step + 1) * step_rows, len(self.rows)))
            if not rows:
                break
            self._row += len(rows)
            self.passed += step_rows

            # Workers take turns: one worker makes the rows of a step. A worker counts all rows, but makes this rank's
            # rows only in its own steps.
            if step % workers == number:
                rank_rows = rows[self.rank * self.batch_size :][: self.batch_size]
                yield self._batch(
                    [self.rows[row] if isinstance(row, int) else self._make_row(row) for row in rank_rows]
                )
        self.set_epoch(self.epoch + 1)

    def describe(self) -> str:
        """Return a text with the files, their formats, the number of documents, and the first document.

        In the first document, the parts that have labels are marked.

        Raises:
            ValueError: the source is a stream.
        """
        tokens = self.rows.tokens
        sources = [(path.name, (path,)) for path in self.source] if isinstance(self.source, tuple) else []
        # The format of each file, recognized by its first record.
        formats: dict[str, list[str]] = {}  # name of a format -> the files in it
        for name, source in sources or [(self._named(), self.source)]:
            first = next(iter(read_records(source, self.encoder.fields)), None)
            if first is not None:
                formats.setdefault(self.encoder.field or self.encoder.formats.name(*first), []).append(name)
        listed = "; ".join(
            f"format {format}: {', '.join(names[:5])}" + ", ..." * (len(names) > 5) for format, names in formats.items()
        )

        chats = {"chat", "sharegpt", "prompt-completion", "alpaca", "question-answer"}
        if self.per_example == 1 and self.encoder.tokenizer.chat_template and {*formats} & chats:
            listed += f"; multi_turn {self.encoder.multi_turn}"

        ends = [0, *tokens.ends[: self._first_size()].tolist()]
        shown = self._show([tokens.ids[start:end].tolist() for start, end in itertools.pairwise(ends)])
        return "\n".join([f"{self._count():,} examples, {listed}", shown, *self._notes()])

    def _notes(self) -> list[str]:
        """Return notes, for `describe`, about the examples that are changed or left out."""
        parts: Any = getattr(self.rows, "parts", [self.rows])
        longer, total = sum(part.longer for part in parts), sum(int(part.tokens.documents) for part in parts)
        counts = [part.count_without_targets() for part in parts]
        without, counted = (sum(column) for column in zip(*counts, strict=True))
        notes = []
        if longer:
            done = "split into several" if self.overflow == "split" else "cut"
            notes.append(
                f"{longer:,} of {total:,} documents are longer than a row ({self.length} tokens) and are {done}."
            )
        if without:
            remedy = "raise length, or " if longer else ""
            pieces = "pieces" if longer else "documents"
            notes.append(
                f"{without:,} of the first {counted:,} {pieces} have no token with a label, so "
                f"nothing is learned from them: {remedy}leave such documents out."
            )
        return notes

    def _count(self) -> int:
        """Return the number of examples, for `describe`."""
        documents = sum(int(part.documents) for part in self.rows.sources)
        return documents // self.per_example

    def _first_size(self) -> int:
        """Return the number of documents that the first example has, for `describe`."""
        return self.per_example

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration over the data set yield epoch ``epoch``. A loaded position in this epoch is kept."""
        if epoch != self.epoch or self._is_finished():
            self.epoch, self._loaded = epoch, False
            self._rewind()
            if self._rows is not None:
                self._rows.plan(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in the data, counted over all ranks.

        After the same number of batches, every rank returns the same state.
        """
        return {"epoch": self.epoch, **self._position(), "data": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch of a saved state. ``batch_size`` and the number of ranks may have changed.

        Raises:
            ValueError: the state belongs to other data, or to rows packed with other options.
        """
        saved, current = state["data"], self._identity()
        differing = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
        if differing:
            raise ValueError(
                "PackedDataset: the data must be that of the saved state, got other "
                + "; ".join(f"{name} ({current.get(name)} instead of {saved.get(name)})" for name in differing)
                + ". Use the same source and options, or start a new run in another folder."
            )
        self.set_epoch(state["epoch"])
        self._follow(state)
        # The number of steps since the start of the iteration determines which worker makes the next rows. A worker
        # therefore keeps the start that it already has.
        if get_worker_info() is None:
            self._start = self._row
        self._loaded = True

    def _make_encoder(self, tokenizer: Tokenizer | Processor, *options: Any) -> Encoder:
        return Encoder(tokenizer, *options)

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        tokens = tokenize(source, self.encoder, cache_dir, progress)
        rows = PackedRows(tokens, self._make_row, self.overflow, self.shuffle, self.seed)
        self._warn(*tokens.skipped, rows.truncated)
        return rows

    def _show(self, documents: list[list[int]]) -> str:
        """Return the first example as text, for `describe`."""
        return mark_learned(self.encoder.tokenizer, documents[0])

    def _completed(self, rows: list[Any]) -> list[Any]:
        """Return this rank's rows of a step. The last step of an epoch is filled up with the epoch's first rows."""
        first = self.rank * self.batch_size
        return rows + [self.rows[(first + i) % len(self.rows)] for i in range(len(rows), self.batch_size)]

    def _batch(self, rows: list[Batch]) -> Batch:
        """Return this rank's rows of a step as a batch. The last step of an epoch is filled up with rows of padding."""
        return collate(rows + [self._make_row([])] * (self.batch_size - len(rows)))

    def _identity(self) -> dict[str, Any]:
        """Return the options and the checksum on which a saved position depends. If one of them changes, the position
        is invalid."""
        options = {"length": self.length, "overflow": self.overflow, "shuffle": self.shuffle, "seed": self.seed}
        return {**options, "documents, tokens and checksum": None if self._rows is None else self._rows.identity()}

    def _named(self) -> str:
        """Return the name of the source, for error messages."""
        files = self.source if isinstance(self.source, tuple) else ()
        return ", ".join(map(str, files[:3])) + ", ..." * (len(files) > 3) or f"the {type(self.source).__name__}"

    def _begin(self) -> None:
        """Move to the start of an iteration: a loaded position, or the beginning of the current or the next epoch."""
        if self._is_finished():
            self.set_epoch(self.epoch + 1)
        elif not self._loaded:
            self._rewind()
        if self._rows is not None:
            # Pack now, before the workers start, because otherwise each worker would pack.
            len(self._rows)

    def _is_finished(self) -> bool:
        """Return whether an iteration was stopped right after it had yielded the last batch of the epoch."""
        return self._row > 0 and not self._loaded and self._rows is not None and self._row >= len(self._rows)

    def _rewind(self) -> None:
        self._start = self._row = 0  # the numbers of rows that all ranks took before this iteration, and until now
        self._read = self._first = 0  # for a stream: the numbers of records and of rows before the current window

    def _position(self) -> dict[str, int]:
        position = {"start": self._start, "row": self._row, "read": self._read, "first": self._first}
        return {"passed": self.passed, **position}

    def _follow(self, position: Mapping[str, Any]) -> None:
        """Move to a position that `_position` has returned."""
        self.passed, self._start, self._row = (position[key] for key in ("passed", "start", "row"))
        self._read, self._first = position["read"], position["first"]

    def _warn(self, skipped: int, why: str, truncated: int) -> None:
        """Warn about examples that were left out or truncated because of their images."""
        if skipped:
            warnings.warn(
                f"PackedDataset: {skipped} examples have broken images or videos and are left out. {why}", stacklevel=3
            )
        if truncated:
            warnings.warn(
                f"PackedDataset: {truncated} documents with images or videos are longer than a row (length="
                f"{self.length}). They are truncated before the one that does not fit, or left out if no target "
                "remains. Raise length.",
                stacklevel=3,
            )

    def _stream(self) -> Iterator[list[Piece]]:
        """Yield the pieces of each row of a stream, starting at the current position. Advances `_read` and `_first`."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        records = read_records(self.source, self.encoder.fields)
        if self._read:
            skip = getattr(self.source, "skip", None)  # data sets of `datasets` skip without reading
            if skip is None:
                records = itertools.islice(records, self._read, None)
            else:
                records = read_records(skip(self._read), self.encoder.fields, self._read)

        # Windows are packed one at a time. Some rows of the first window may already have been taken.
        begun = self._row - self._first
        while window := list(itertools.islice(records, WINDOW)):
            documents = [document for document in self.encoder.encode(window) if document.ids]
            skipped, self.encoder.skipped = self.encoder.skipped, Skipped()
            self._warn(skipped.count, skipped.why, 0)
            if self.shuffle:
                generator = seeded_generator(self.seed, self.epoch, self._read)
                order = torch.randperm(len(documents), generator=generator, device="cpu")
                documents = [documents[i] for i in order.tolist()]

            pieces = [piece for document in documents for piece in self._split(document)]
            if not self._first > 0 and pieces and not any(has_target(ids) for ids, _ in pieces):
                raise ValueError(f"PackedDataset: the first {len(window)} examples of {self._named()} {_NO_TARGETS}")

            # Yield the rows of the window, starting at the current position.
            sizes = torch.tensor([len(ids) for ids, _ in pieces], dtype=torch.int64, device="cpu")
            packed, ends = pack(sizes, self.length)
            for row in packed.tensor_split(ends[:-1])[begun : len(ends)]:
                yield [pieces[i] for i in row.tolist()]
            begun = 0
            self._read += len(window)
            self._first += len(ends)

        if not self._first > 0:
            raise ValueError(
                f"PackedDataset: the source must hold documents, got none in epoch {self.epoch}. Pass something that "
                "can be iterated more than once, not an iterator."
            )

    def _split(self, document: Document) -> list[Piece]:
        """Divide a document into pieces that fit into a row. Return the token ids and the images of each piece."""
        ids = torch.tensor(document.ids, dtype=torch.int32, device="cpu")
        if document.media and len(ids) > self.length:
            # A row must contain whole images, so truncate the document before an image that does not fit.
            end = keep_whole([(medium.first, medium.end) for medium in document.media], self.length)
            self._warn(0, "", 1)
            media = [medium for medium in document.media if medium.end <= end]
            return [(ids[:end], media)] if has_target(ids[:end]) else []
        if document.media:
            return [(ids, document.media)]
        starts, sizes = split_documents(torch.tensor([len(ids)], device="cpu"), self.length, self.overflow)
        return [(ids[start : start + size], ()) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
