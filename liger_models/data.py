"""Texts and chats into packed batches: tokenised once, shuffled, shared out to the ranks, resumable at every batch."""

import functools
import hashlib
import itertools
import json
import os
import shutil
import uuid
import zlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from liger_models.convert.ranks import agreeing, several, this_rank, world_size
from liger_models.kernels.dispatch import check
from liger_models.tokenizer import Tokenizer, answer_mask

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".parquet")
FIELDS = ("messages", "text", "input_ids")
OVERFLOWS = ("split", "truncate")
ANSWERS = ("chosen", "rejected")
WINDOW = 4096
"""Documents among which the packing looks for those that fill a row. Of a stream they are read ahead."""
GROUP, GROUP_CHARACTERS = 1024, 1 << 22
"""Examples that are tokenised at a time, and the characters that are enough for that."""
FORMAT = 3
"""Of the files of `TokenFile`, and of what examples become in them; part of their name."""

Batch = dict[str, Tensor]
"""What a model's forward takes: ``input_ids`` [B, T] int64, ``labels`` [B, T] int64, ``cu_seqlens`` [n + 1] int32."""
Located = tuple[str, Any]
"""An example, and where it stands: "train.jsonl, line 7"."""


class PackedDataset(IterableDataset[Batch]):
    """Batches of rows of documents, for the forward of a model: a rank's share of them, epoch after epoch.

    A row holds whole documents and, where none fits any more, padding without labels; ``cu_seqlens`` has the bounds of
    all of them. Which documents share a row, and the order of the rows, depend on the data, ``seed`` and the epoch, and
    not on the ranks, which take turns: at each step the first ``batch_size`` rows are the first rank's, the next the
    second's. So every row is seen by one rank, all ranks have the same number of batches, and another number of ranks
    can go on. The last step of an epoch is filled up with rows of padding.

    Files and whatever has a length are tokenised when the data set is made, into files that later runs find again.
    Every rank must make it then; the first of each host does the work. An iterable without a length is a stream: each
    rank (and each worker) reads it all, tokenises `WINDOW` examples ahead, and shuffles only among those.

    Iterating begins an epoch anew, or where `load_state_dict` says, and ends by moving on to the next epoch. Where an
    iteration stopped at the last batch, as those of some engines do, the next one moves on.

    Args:
        source: a file (.jsonl, .ndjson or .json: an example per line; .txt: a text per line; .parquet), a folder of
            such files or a list of paths; a `datasets` or PyTorch data set, or any other iterable.
        tokenizer: that of the model.
        length: tokens of a row.
        batch_size: rows of a batch.
        overflow: "split" cuts longer documents: a part begins with the last token of the one before, so that no target
            is lost. "truncate" drops what is beyond ``length``.
        field: of an example; default: the first of ``messages``, ``text``, ``input_ids`` that the example has. The
            value decides what it is: a text gets what the tokenizer puts around one, and the end token; of a list of
            messages (with ``tools`` beside it) the answers are learnt; token ids are taken as they are, and ``labels``
            beside them say which are learnt.
        shuffle: False keeps documents in order, as far as packing does.
        seed: of the shuffling.
        rank, ranks: of the data-parallel processes; default: those of the process group.
        cache_dir: of the tokenised files; default: ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        progress: show a progress bar while tokenising.

    Raises:
        ValueError: an example that is not as it must be, with its file and line; nothing in the source.
        FileNotFoundError: no such file.
        ImportError: Parquet without pyarrow.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Tokenizer,
        *,
        length: int,
        batch_size: int = 1,
        overflow: str = "split",
        field: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        cache_dir: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        self.rank = this_rank() if rank is None else rank
        self.ranks = world_size() if ranks is None else ranks
        check(length >= 2, f"PackedDataset: length must be at least 2, got {length}.")
        check(batch_size >= 1, f"PackedDataset: batch_size must be at least 1, got {batch_size}.")
        check(overflow in OVERFLOWS, f"PackedDataset: overflow must be one of {OVERFLOWS}, got {overflow!r}.")
        check(
            0 <= self.rank < self.ranks, f"PackedDataset: rank must be 0 to {self.ranks - 1} (ranks), got {self.rank}."
        )
        self.length, self.batch_size, self.overflow = length, batch_size, overflow
        self.shuffle, self.seed = shuffle, seed
        check(
            not isinstance(source, Mapping),
            f"PackedDataset: source must be files, a data set or other examples, got {type(source).__name__} of "
            f"{', '.join(map(str, source)) if isinstance(source, Mapping) else ''}. Take one of its parts.",
        )
        check(
            isinstance(source, PathLike) or hasattr(source, "__iter__") or hasattr(source, "__getitem__"),
            f"PackedDataset: source must be files, a data set or other examples, got {source!r}.",
        )
        self.encoder = Encoder(tokenizer, field)
        self.source = _paths(source)
        self._rows: PackedRows | None = None
        if isinstance(self.source, tuple) or (hasattr(source, "__len__") and not isinstance(source, DataLoader)):
            tokens = _tokenised(self.source, self.encoder, cache_dir, progress)
            self._rows = PackedRows(tokens, length, self.encoder.filler, overflow, shuffle, seed)
        self.epoch = 0
        self.passed = 0  # rows of all ranks in all epochs until now, with those that fill up steps
        self._loaded = False
        self._rewind()

    def _begin(self) -> None:
        """An iteration does so: where `load_state_dict` says, or an epoch, the next one if all of this was taken."""
        if self._taken():
            self.set_epoch(self.epoch + 1)
        elif not self._loaded:
            self._rewind()

    def _taken(self) -> bool:
        """Whether an iteration has taken the last batch: engines that know the length don't ask for one more."""
        return self._row > 0 and not self._loaded and self._rows is not None and self._row >= len(self._rows)

    def _rewind(self) -> None:
        self._start = self._row = 0  # rows of all ranks that were taken: at the start of the iteration, and until now
        self._read = self._first = 0  # of a stream: examples before the present window, and the number of its first row

    @property
    def rows(self) -> "PackedRows":
        """All rows of the epoch, for samplers and engines that share rows out by themselves; `collate` joins them.

        Raises:
            ValueError: a stream.
        """
        if self._rows is None:
            raise ValueError("PackedDataset: rows must have a source with a length, got a stream. Save it as a file.")
        return self._rows

    def __len__(self) -> int:
        """Number of batches of each rank in the epoch, from its beginning; TypeError for a stream."""
        if self._rows is None:
            raise TypeError("PackedDataset: a stream has no length. Give the number of steps, or save it as a file.")
        return -(-len(self._rows) // (self.ranks * self.batch_size))

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; what `load_state_dict` has set stays if it is the same epoch."""
        if epoch != self.epoch or self._taken():
            self.epoch, self._loaded = epoch, False
            self._rewind()
            if self._rows is not None:
                self._rows.plan(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, counted over all ranks: the same on each of them after the same number of batches."""
        return {"epoch": self.epoch, **self._position(), "data": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were taken, with any ``batch_size`` and number of ranks.

        Raises:
            ValueError: the state of other data, or of rows that were made in another way.
        """
        check(
            state["data"] == self._identity(),
            f"PackedDataset: the data must be that of the saved state, {state['data']}, got {self._identity()}. Make "
            "it with the same source and options, or begin anew.",
        )
        self.set_epoch(state["epoch"])
        self._follow(state)
        if get_worker_info() is None:  # a worker takes turns with the others since the start of the iteration
            self._start = self._row
        self._loaded = True

    def _identity(self) -> dict[str, Any]:
        made = {"length": self.length, "overflow": self.overflow, "shuffle": self.shuffle, "seed": self.seed}
        tokens = None if self._rows is None else self._rows.tokens
        found = None if tokens is None else [tokens.documents, len(tokens.ids), tokens.checksum]
        return {**made, "documents, tokens and checksum": found}

    def __iter__(self) -> Iterator[Batch]:
        self._begin()
        self._loaded = False
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream = self._stream() if self._rows is None else None
        step = self.ranks * self.batch_size
        for turn in itertools.count((self._row - self._start) // step):
            taken: Sequence[int | list[Tensor]]
            if stream is not None:
                taken = list(itertools.islice(stream, step))
            else:
                taken = range(self._row, min(self._start + (turn + 1) * step, len(self.rows)))
            if not taken:
                break
            self._row += len(taken)
            self.passed += step
            if turn % workers == number:
                own = taken[self.rank * self.batch_size :][: self.batch_size]
                rows = [self.rows[row] if isinstance(row, int) else self._make_row(row) for row in own]
                yield collate(rows + [self._make_row([])] * (self.batch_size - len(rows)))
        self.set_epoch(self.epoch + 1)

    def _make_row(self, pieces: Sequence[Tensor]) -> Batch:
        return make_row(pieces, self.length, self.encoder.filler)

    def _position(self) -> dict[str, int]:
        place = {"start": self._start, "row": self._row, "read": self._read, "first": self._first}
        return {"passed": self.passed, **place}

    def _follow(self, position: Mapping[str, Any]) -> None:
        self.passed, self._start, self._row = (position[key] for key in ("passed", "start", "row"))
        self._read, self._first = position["read"], position["first"]

    def _stream(self) -> Iterator[list[Tensor]]:
        """The rows of a stream from the present position; keeps `_read` and `_first` up to it."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        examples = _located(self.source, self.encoder)
        if self._read:
            skip = getattr(self.source, "skip", None)  # of `datasets`: without reading what it need not
            if skip is None:
                examples = itertools.islice(examples, self._read, None)
            else:
                examples = _located(skip(self._read), self.encoder, self._read)
        unseen = self._row - self._first
        while window := list(itertools.islice(examples, WINDOW)):
            documents = [torch.tensor(ids, dtype=torch.int32) for ids in self.encoder.in_groups(window) if ids]
            if self.shuffle:
                order = torch.randperm(len(documents), generator=_generator(self.seed, self.epoch, self._read))
                documents = [documents[i] for i in order.tolist()]
            pieces = [
                document[start : start + size]
                for document in documents
                for start, size in zip(
                    *(each.tolist() for each in cut(torch.tensor([len(document)]), self.length, self.overflow)),
                    strict=True,
                )
            ]
            packed = pack([len(piece) for piece in pieces], self.length)
            for row in packed[unseen:]:
                yield [pieces[i] for i in row]
            unseen = 0
            self._read += len(window)
            self._first += len(packed)
        check(
            self._first > 0,
            f"PackedDataset: the source must hold documents, got none in epoch {self.epoch}. Pass what can be iterated "
            "again, and not an iterator.",
        )


class PackedLoader(DataLoader[Batch]):
    """A DataLoader whose state is that of the batches taken from it, whatever its workers have prepared.

    Args:
        data: goes on where it stands, and moves on with the batches that are taken.
        options: of ``torch.utils.data.DataLoader``, such as ``num_workers`` and ``pin_memory``.
    """

    def __init__(self, data: PackedDataset, **options: Any) -> None:
        check(
            not options.get("persistent_workers"),
            "PackedLoader: persistent_workers must be False, got True: workers take epoch and position along when they "
            "start.",
        )
        self.data = data
        # With a generator of its own: to start an epoch must not draw from that which decides dropout.
        super().__init__(_WithState(data), batch_size=None, **{"generator": torch.Generator(), **options})

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.data._begin()
        if self.data._rows is not None:
            len(self.data._rows)  # packed once, and not by each worker
        epoch, batches = self.data.epoch, super().__iter__()
        if self.num_workers:  # they have started, from the state of now
            self.data._loaded = False
        for batch, state in batches:
            self.data._follow(state)
            yield batch
        self.data.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """As of the data set."""
        self.data.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As of the data set."""
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of the data set."""
        self.data.load_state_dict(state)


class _WithState(IterableDataset[Any]):
    """Batches, and the state of the data set behind each."""

    def __init__(self, data: PackedDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for batch in self.data:
            yield batch, self.data._position()


class TokenFile:
    """Documents as token ids on disk, mapped into memory: an id for a token that is learnt, ``~id`` for another.

    Args:
        folder: written by `TokenFile.write`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents, tokens, self.checksum = json.loads((folder / "sizes.json").read_text())
        self.ids = torch.from_file(str(folder / "ids.bin"), size=tokens, dtype=torch.int32)
        self.ends = torch.from_file(str(folder / "ends.bin"), size=self.documents, dtype=torch.int64)

    def __reduce__(self) -> Any:  # a process that gets it maps the files by itself
        return TokenFile, (self.folder,)

    @staticmethod
    def write(folder: Path, documents: "Iterable[array[int]]") -> None:
        """Write documents into a new folder; empty ones are left out."""
        count = total = checksum = 0
        with (folder / "ids.bin").open("wb") as ids, (folder / "ends.bin").open("wb") as ends:
            for document in documents:
                if document:
                    count, total = count + 1, total + len(document)
                    document.tofile(ids)
                    checksum = zlib.crc32(document, checksum)
                    array("q", [total]).tofile(ends)
        check(count > 0, "PackedDataset: the source must hold documents, got none.")
        (folder / "sizes.json").write_text(json.dumps([count, total, checksum]))


class PackedRows(Dataset[Batch]):
    """The rows of an epoch by their number, each a batch of one: see `PackedDataset`, which makes them.

    Args:
        tokens: the documents.
        length: tokens of a row.
        filler: id of padding.
        overflow, shuffle, seed: as for `PackedDataset`.
    """

    def __init__(
        self, tokens: TokenFile, length: int, filler: int, overflow: str, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.tokens, self.length, self.filler, self.shuffle, self.seed = tokens, length, filler, shuffle, seed
        self.epoch = 0
        self._start, self._size = cut(tokens.ends.diff(prepend=torch.zeros(1, dtype=torch.int64)), length, overflow)
        self._plan: tuple[Tensor, Tensor] | None = None

    def plan(self, epoch: int) -> None:
        """Shuffle and pack for this epoch. Accelerate would call a ``set_epoch``, but not where it goes on in one."""
        if epoch != self.epoch and self.shuffle:
            self._plan = None
        self.epoch = epoch

    def _planned(self) -> tuple[Tensor, Tensor]:
        """The pieces of documents in the order of rows, and where each row ends among them."""
        if self._plan is None:
            number = len(self._size)
            generator = _generator(self.seed, self.epoch)
            order = torch.randperm(number, generator=generator) if self.shuffle else torch.arange(number)
            members, ends = array("q"), array("q")
            for window in order.split(WINDOW):
                for row in pack(self._size[window].tolist(), self.length):
                    members.extend(window[row].tolist())
                    ends.append(len(members))
            self._plan = torch.tensor(members), torch.tensor(ends)
        return self._plan

    def __len__(self) -> int:
        return len(self._planned()[1])

    def __getitem__(self, index: int) -> Batch:
        members, ends = self._planned()
        if not 0 <= index < len(ends):
            raise IndexError(f"PackedRows: index must be 0 to {len(ends) - 1}, got {index}.")
        pieces = members[ends[index - 1] if index else 0 : ends[index]]
        spans = zip(self._start[pieces].tolist(), self._size[pieces].tolist(), strict=True)
        return make_row([self.tokens.ids[start : start + size] for start, size in spans], self.length, self.filler)


def cut(sizes: Tensor, length: int, overflow: str) -> tuple[Tensor, Tensor]:
    """First token and size of the parts of documents that stand end to end; see ``overflow`` of `PackedDataset`.

    Args:
        sizes: [n] int64 of the documents, at least 1.
        length: of a part, at most.
        overflow: "split" or "truncate".
    """
    starts = sizes.cumsum(0) - sizes
    if overflow == "truncate":
        return starts, sizes.clamp(max=length)
    parts = ((sizes - 1 + length - 2) // (length - 1)).clamp(min=1)
    number = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
    offsets = number * (length - 1)
    return starts.repeat_interleave(parts) + offsets, (sizes.repeat_interleave(parts) - offsets).clamp(max=length)


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which of the pieces share a row: the longest first, each into the fullest row that has room for it.

    Rows are in the order of their longest pieces, pieces within a row in their own.

    Args:
        sizes: of the pieces, at most ``room``.
        room: of a row.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # that rows have left, ascending
    having: dict[int, list[int]] = {}  # room left -> rows
    for piece in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        place = bisect_left(rooms, sizes[piece])
        if place == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[place]
            row = having[left].pop()
            if not having[left]:
                del having[left], rooms[place]
        rows[row].append(piece)
        left -= sizes[piece]
        if left:
            if left not in having:
                insort(rooms, left)
                having[left] = []
            having[left].append(row)
    return [sorted(row) for row in sorted(rows)]


def make_row(pieces: Sequence[Tensor], length: int, filler: int) -> Batch:
    """A batch of one row.

    Args:
        pieces: [n] int32 each, as in a `TokenFile`.
        length: of the row.
        filler: id of padding.
    """
    bounds = [0, *itertools.accumulate(map(len, pieces))]
    padding = torch.full((length - bounds[-1],), ~filler, dtype=torch.int32)
    tokens = torch.cat([*pieces, padding]).long()[None]
    if len(padding):
        bounds.append(length)
    labels = tokens.masked_fill(tokens < 0, -100)
    labels[:, bounds[:-1]] = -100  # nothing predicts a document's first token: now labels can be counted, as engines do
    return {
        "input_ids": torch.where(tokens < 0, ~tokens, tokens),
        "labels": labels,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
    }


def collate(rows: Sequence[Batch]) -> Batch:
    """One batch of several, each with rows of the same length: a ``collate_fn``.

    Args:
        rows: at least one.
    """
    bounds, tokens = [torch.zeros(1, dtype=torch.int32)], 0
    for row in rows:
        bounds.append(row["cu_seqlens"][1:] + tokens)
        tokens += row["input_ids"].numel()
    joined = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**joined, "cu_seqlens": torch.cat(bounds)}


def preference_batch(
    pairs: Mapping[str, Any] | Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None = None
) -> Batch:
    """Pairs of a preferred and another answer as one batch: the chosen sequences, then the rejected ones.

    What TRL's trainers of pairs take is taken here, before and after their collators. A row is the prompt and its
    answer, without padding between or before them; the labels are those of the answer.

    Args:
        pairs: a list of examples, or columns by name, of one of these kinds:

            - ``prompt``, ``chosen`` and ``rejected``: texts, which get what the tokenizer puts before a prompt, and the
              end token, and are tokenised as a whole: a token that spans both is the answer's. Or lists of messages,
              for the chat template, with ``tools`` and ``chat_template_kwargs`` if there are any. Without ``prompt`` it
              is the messages that both answers begin with.
            - token ids ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
            - token ids ``chosen_input_ids`` and ``rejected_input_ids``, with ``prompt_input_ids``, or with
              ``chosen_labels`` and ``rejected_labels`` if they hold the prompt already; and with
              ``chosen_attention_mask`` and so on if they are padded, on either side.

            Or what a collator has made of all this: tensors ``input_ids``, ``attention_mask`` and ``completion_mask``
            (of TRL's unpaired data as well); pixels and what else a model with images takes are handed on. Images
            themselves are not read here: TRL's collator makes these of them.
        tokenizer: for all but token ids.

    Returns:
        ``input_ids``, ``labels`` (−100 for prompt and padding) and ``attention_mask``, each [2 · pairs, T] int64, what
        a model's forward takes with ``return_log_probs``; padded on the right, with the tokenizer's token or 0.

    Raises:
        ValueError: no pairs, a name that is missing, a tensor of token ids without its mask, an answer without tokens,
            images.
    """
    if isinstance(pairs, Mapping) and "completion_mask" in pairs:
        collated = ("input_ids", "attention_mask", "completion_mask")
        check(
            all(isinstance(pairs.get(name), Tensor) for name in collated),
            f"preference_batch: what is collated must have tensors {', '.join(collated)}, got {sorted(pairs)}.",
        )
        ids, mask, answers = (pairs[name] for name in collated)
        seen = {name: value for name, value in pairs.items() if name in _seen()}
        return {"input_ids": ids, "labels": ids.masked_fill(answers == 0, -100), "attention_mask": mask} | seen
    if isinstance(pairs, Mapping):
        named = (*ANSWERS, "prompt", "tools", "chat_template_kwargs")
        columns = {name: column for name, column in pairs.items() if name.startswith(named)}
        sizes = {name: len(column) for name, column in columns.items()}
        check(
            len(set(sizes.values())) == 1 and not any(isinstance(column, str) for column in columns.values()),
            "preference_batch: columns must be of one length and hold an entry for each pair, got "
            f"{sizes or sorted(pairs)}. A single pair goes into a list.",
        )
        for name, column in columns.items():
            mask = name.replace("input_ids", "attention_mask")
            check(
                mask in columns or not isinstance(column, Tensor),
                f"preference_batch: {name} is a tensor, which may be padded, and must come with {mask}. Add it.",
            )
        columns = {name: each.tolist() if isinstance(each, Tensor) else each for name, each in columns.items()}
        pairs = [{name: column[i] for name, column in columns.items()} for i in range(next(iter(sizes.values())))]
    check(len(pairs) > 0, "preference_batch: pairs must hold at least one, got none.")
    encoded = [_pair(f"preference_batch, pair {number}", pair, tokenizer) for number, pair in enumerate(pairs, 1)]
    rows = [chosen for chosen, _ in encoded] + [rejected for _, rejected in encoded]
    filler = 0 if tokenizer is None else Encoder(tokenizer, None).filler

    def padded(value: int, of_row: Callable[[list[int], list[int]], list[int]]) -> Tensor:
        made = [torch.tensor(of_row(*row)) for row in rows]
        return pad_sequence(made, batch_first=True, padding_value=value)

    return {
        "input_ids": padded(filler, lambda prompt, answer: prompt + answer),
        "labels": padded(-100, lambda prompt, answer: [-100] * len(prompt) + answer),
        "attention_mask": padded(0, lambda prompt, answer: [1] * len(prompt + answer)),
    }


@functools.cache
def _seen() -> list[str]:
    """Names of what models take besides text."""
    from liger_models.layers.vision_language import MRopeModel, SquareImageModel, TiledImageModel

    return sorted({name for model in (MRopeModel, SquareImageModel, TiledImageModel) for name in model.prompt_inputs})


def _pair(where: str, pair: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompt and chosen answer, and of prompt and rejected answer."""
    images = [name for name in ("image", "images", *_seen()) if len(pair.get(name) or ()) > 0]
    check(
        not images,
        f"{where}: must be text, got {', '.join(images)}. Collate it with TRL's DataCollatorForVisionPreference.",
    )
    rows = _of_ids(pair) or _of_texts(where, pair, tokenizer)
    for name, (_, answer) in zip(ANSWERS, rows, strict=True):
        check(bool(answer), f"{where}: {name} must have tokens, got none. Leave the pair out.")
    return rows


def _of_ids(pair: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The rows of a pair of token ids; none of another."""

    def unpadded(part: str, *names: str) -> list[int] | None:
        given = next((pair[f"{part}_{name}"] for name in names if f"{part}_{name}" in pair), None)
        if given is None:
            return None
        mask = pair.get(f"{part}_attention_mask", [1] * len(given))
        return [int(token) for token, seen in zip(given, mask, strict=True) if seen]

    prompt, rows = unpadded("prompt", "ids", "input_ids"), []
    for part in ANSWERS:
        ids, labels = unpadded(part, "ids", "input_ids"), unpadded(part, "labels")
        if ids is not None and labels is not None:  # of prompt and answer
            first = next((i for i, label in enumerate(labels) if label != -100), len(labels))
            rows.append((ids[:first], ids[first:]))
        elif ids is not None and prompt is not None:
            rows.append((prompt, ids))
    return rows if len(rows) == len(ANSWERS) else []


def _of_texts(where: str, pair: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[tuple[list[int], list[int]]]:
    parts = (*ANSWERS, "prompt")
    check(
        all(part in pair for part in ANSWERS) and ("prompt" in pair or not isinstance(pair[ANSWERS[0]], str)),
        f"{where}: must have prompt, chosen and rejected, or the same with _ids, got {sorted(pair)}.",
    )
    check(tokenizer is not None, f"{where}: texts and messages need a tokenizer. Pass it.")
    assert tokenizer is not None
    texts = [isinstance(pair[part], str) for part in parts if part in pair]
    check(all(texts) or not any(texts), f"{where}: must be all texts or all messages, got both. Convert them.")
    if not any(texts):
        same = 0 if "prompt" in pair else _shared(pair["chosen"], pair["rejected"])
        prompt = pair["prompt"] if "prompt" in pair else pair["chosen"][:same]
        variables = {"tools": _tools(pair)}
        variables |= pair.get("chat_template_kwargs") or {}
        return [_chat(prompt, pair[answer][same:], tokenizer, variables) for answer in ANSWERS]
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    whole = [tokenizer.encode(pair["prompt"] + pair[answer]) for answer in ANSWERS]
    whole = [ids if ids[-1:] == end else ids + end for ids in whole]
    prompt = tokenizer.encode(pair["prompt"])
    prompt = prompt[:-1] if prompt[-1:] == end else prompt
    first = min(_shared(prompt, ids) for ids in whole)
    return [(ids[:first], ids[first:]) for ids in whole]


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences have in common from their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _chat(prompt: Any, answer: Any, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Token ids up to an answer, and of it: from the first to the last token that the assistant writes there."""
    text, spans = tokenizer.render_answers([*prompt, *answer], **variables)
    earlier = sum(message.get("role") == "assistant" for message in prompt)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    mask = answer_mask(encoding.offsets, spans[earlier:])
    check(any(mask), f"preference_batch: an answer must be a message of the assistant, got {answer}.")
    first, last = mask.index(True), len(mask) - mask[::-1].index(True)
    return encoding.ids[:first], encoding.ids[first:last]


def _tools(example: Mapping[str, Any]) -> Any:
    """Those of a chat; as JSON where they have too many forms for a column."""
    tools = example.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


class Encoder:
    """Examples to token ids, as `TokenFile` has them; the arguments are those of `PackedDataset`."""

    def __init__(self, tokenizer: Tokenizer, field: str | None) -> None:
        self.tokenizer, self.fields = tokenizer, FIELDS if field is None else (field,)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self.filler = next((token for token in ids if token is not None), 0)

    def in_groups(self, examples: Iterable[Located]) -> "Iterator[array[int]]":
        """The ids of each example, many tokenised at a time, on all cores."""
        group: list[tuple[str, Any]] = []
        characters = 0
        for where, example in examples:
            group.append((where, self._text(where, example)))
            _check_characters(*group[-1])
            characters += len(group[-1][1][0]) if isinstance(group[-1][1], tuple) else 0
            if len(group) == GROUP or characters >= GROUP_CHARACTERS:
                yield from self._encode(group)
                group, characters = [], 0
        yield from self._encode(group)

    def _text(self, where: str, example: Any) -> "tuple[str, list[tuple[int, int]] | None] | array[int]":
        """A text, with the spans of answers if it is a chat, or ids."""
        if isinstance(example, str):
            return example, None
        known = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        fields = [name for name in self.fields if name in known]
        check(
            isinstance(example, Mapping) and bool(fields),
            f"{where}: an example must have {' or '.join(self.fields)}, got {known}. Name it by field=.",
        )
        value = example[fields[0]]
        if isinstance(value, str):
            return value, None
        value = value if isinstance(value, list) else _plain(value)
        if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
            try:
                text, spans = self.tokenizer.render_answers(value, tools=_tools(example))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            check(bool(spans), f"{where}: a chat must have a message of the assistant, got none. Leave it out.")
            return text, spans
        check(
            isinstance(value, Sequence) and all(type(token) is int and 0 <= token < 2**31 for token in value),
            f"{where}: {fields[0]} must be a text, messages, or token ids, got {str(value)[:60]!r}. Correct it.",
        )
        labels = example.get("labels", value)
        labels = labels if isinstance(labels, list) else _plain(labels)
        check(
            len(labels) == len(value)
            and all(label in (token, -100) for token, label in zip(value, labels, strict=True)),
            f"{where}: labels must be those of {fields[0]}, unshifted, or -100, got others. Correct them.",
        )
        return array("i", (token if label == token else ~token for token, label in zip(value, labels, strict=True)))

    def _encode(self, group: list[tuple[str, Any]]) -> "Iterator[array[int]]":
        made: list[Any] = [None if isinstance(content, tuple) else content for _, content in group]
        texts = [i for i, (_, content) in enumerate(group) if made[i] is None and content[1] is None]
        chats = [i for i, (_, content) in enumerate(group) if made[i] is None and content[1] is not None]
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_token_id
        for i, encoding in zip(texts, backend.encode_batch_fast([group[i][1][0] for i in texts]), strict=True):
            made[i] = array("i", encoding.ids)
            if eos is not None and (not made[i] or made[i][-1] != eos):
                made[i].append(eos)
        encodings = backend.encode_batch([group[i][1][0] for i in chats], add_special_tokens=False)
        for i, encoding in zip(chats, encodings, strict=True):
            mask = answer_mask(encoding.offsets, group[i][1][1])
            made[i] = array("i", (id if learnt else ~id for id, learnt in zip(encoding.ids, mask, strict=True)))
        yield from made


def _check_characters(where: str, content: Any) -> None:
    """Raise ValueError for a text with half of a character, as broken escapes in JSON leave it."""
    if isinstance(content, tuple) and not content[0].isascii():
        try:
            content[0].encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise ValueError(f"{where}: must be whole characters, got {half!r}. Correct the text.") from error


def _tokenised(source: Any, encoder: Encoder, cache_dir: str | PathLike[str] | None, progress: bool) -> TokenFile:
    """The tokens of a source, from the cache or made now by the first rank of each host."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_models"
    cache = Path(cache_dir or default).absolute()
    with agreeing():
        folder = cache / _fingerprint(source, encoder)
        first = not several() or int(os.environ.get("LOCAL_RANK", this_rank())) == 0
        if first and not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
            temporary.mkdir(parents=True)
            try:
                bar: Any = tqdm  # not typed
                examples = bar(_located(source, encoder), desc="Tokenising", unit=" examples", disable=not progress)
                TokenFile.write(temporary, encoder.in_groups(examples))
                try:
                    temporary.rename(folder)
                except OSError:
                    if not folder.is_dir():  # else another run was faster
                        raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return TokenFile(folder)


def _fingerprint(source: Any, encoder: Encoder) -> str:
    """Names what the tokens depend on: files by path, size and time, objects by their content."""
    tokenizer = encoder.tokenizer
    made = [FORMAT, encoder.fields, tokenizer.backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens]
    digest = hashlib.sha256(json.dumps(made).encode())
    if isinstance(source, tuple):
        for path in source:
            status = path.stat()
            digest.update(json.dumps([str(path), status.st_size, status.st_mtime_ns]).encode())
    elif hasattr(source, "_fingerprint"):  # of `datasets`
        digest.update(source._fingerprint.encode())
    else:
        for _, example in _located(source, encoder):
            digest.update(json.dumps(example, default=_plain).encode())
    return digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _paths(source: Any) -> Any:
    """The files that a source names, as a tuple; another source as it is."""
    if isinstance(source, str | PathLike):
        source = [source]
    if not (isinstance(source, list | tuple) and source and all(isinstance(each, str | PathLike) for each in source)):
        return source
    files: list[Path] = []
    for path in map(Path, source):
        found = [path]
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not path.exists() or not found:
            raise FileNotFoundError(
                f"PackedDataset: {path} must be a file or a folder of files ({', '.join(SUFFIXES)}), got nothing there."
            )
        files += found
    for file in files:
        check(file.suffix in SUFFIXES, f"PackedDataset: {file} must end in one of {', '.join(SUFFIXES)}. Convert it.")
    return tuple(file.absolute() for file in files)


def _located(source: Any, encoder: Encoder, start: int = 0) -> Iterator[Located]:
    """The examples of a source in their order, numbered from ``start`` + 1, and where each stands."""
    if isinstance(source, tuple):
        for path in source:
            yield from _parquet(path, encoder.fields) if path.suffix == ".parquet" else _lines(path)
        return
    examples: Iterable[Any] = source
    if isinstance(source, DataLoader) and source.batch_size is not None:
        examples = itertools.chain.from_iterable(map(_unbatched, source))
    elif not hasattr(source, "__iter__"):
        examples = (source[i] for i in range(len(source)))
    columns = hasattr(source, "features")  # of `datasets`
    for number, example in enumerate(examples, start + 1):
        yield f"{type(source).__name__}, example {number}", _present(example) if columns else example


def _unbatched(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    else:
        yield from batch


def _lines(path: Path) -> Iterator[Located]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
                if not text.strip():
                    continue
                example = text if path.suffix == ".txt" else json.loads(text)
            except ValueError as error:
                undecoded = isinstance(error, UnicodeDecodeError)
                wanted = "UTF-8 text" if undecoded else "a JSON object"
                todo = "Convert the file." if undecoded else "Write each example as one line."
                raise ValueError(f"{where}: must be {wanted}, got: {error}. {todo}") from error
            check(
                path.suffix == ".txt" or isinstance(example, dict),
                f"{where}: must be a JSON object, got: {text[:60]}. Write an example per line.",
            )
            yield where, example


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[Located]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"{path}: needs pyarrow, got no such package. pip install 'liger_models[data]'.") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = {*fields, "tools", "labels"} if {*fields} & {*names} else {*names}  # all, to be named
            batches = file.iter_batches(GROUP, columns=[name for name in names if name in columns])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", _present(row)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: must be a Parquet file, got: {error}. Write it again.") from error


def _present(value: Any) -> Any:
    """Without keys that have no value: a column has the keys of all rows in each, and templates ask what is there."""
    if isinstance(value, Mapping):
        return {key: _present(each) for key, each in value.items() if each is not None}
    listed = isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
    return [_present(each) for each in value] if listed else value


def _generator(*seeds: int) -> torch.Generator:
    digest = hashlib.sha256(json.dumps(seeds).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
