"""Packing of pieces of documents into rows, and the sequence of an epoch's rows."""

import hashlib
import itertools
import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from liger_models.data.batch import Batch
from liger_models.data.media import keep_whole
from liger_models.data.pixels import RowMaker
from liger_models.data.tokens import TokenFile, document_sizes

WINDOW = 4096
"""The number of documents that are packed together, and the number of examples that a stream reads ahead."""


def split_documents(sizes: Tensor, length: int, overflow: str, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split documents, which are stored one after another, into pieces of at most ``length`` tokens.

    Args:
        sizes: [n] int64, the number of tokens of each document, at least 1.
        length: the maximum number of tokens in a piece.
        overflow: what happens to longer documents: "split" or "truncate"; see `PackedDataset`.
        kept: [n] int64, how many tokens of each document are used. A document with 0 used tokens has no piece.

    Returns:
        Two tensors [pieces] int64: the index of each piece's first token, counted from the first token of the first
        document, and the size of each piece.
    """
    starts = sizes.cumsum(0) - sizes
    if kept is not None:
        starts, sizes = starts[kept > 0], kept[kept > 0]
    if overflow == "truncate":
        return starts, sizes.clamp(max=length)

    # Each piece begins with the last token of the piece before, so it adds length - 1 tokens.
    counts = ((sizes - 1 + length - 2) // (length - 1)).clamp(min=1)
    number = torch.arange(int(counts.sum()), device="cpu")
    number -= (counts.cumsum(0) - counts).repeat_interleave(counts)  # in its document
    offsets = number * (length - 1)
    return starts.repeat_interleave(counts) + offsets, (sizes.repeat_interleave(counts) - offsets).clamp(max=length)


def pack(sizes: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Pack pieces into rows by best-fit decreasing: longest piece first, each into the fullest row that has room.

    Args:
        sizes: [n] int32 or int64, the number of tokens of each piece, at most ``capacity``.
        capacity: the number of tokens in a row.

    Returns:
        Two tensors: the indices of the pieces, row after row ([n] int64); and, for each row, the position after the
        row's last index ([rows] int64). Within a row, the indices are ascending. Rows are ordered by the index of
        their longest piece.
    """
    # Pieces of equal size must stay in the order of their indices, because a saved run was packed in this order.
    # `index_select` and `scatter` run in one thread. Indexing would start several threads, which takes a hundred
    # times as long for a window of pieces.
    descending = sizes.argsort(descending=True, stable=True)
    row_of, first_of = _best_fit(sizes.index_select(0, descending).tolist(), capacity)

    # Rows are numbered in the order in which they were opened. Renumber them by the index of their first piece, which
    # is their longest.
    by_longest = descending.index_select(0, torch.tensor(first_of, dtype=torch.int64, device="cpu")).argsort()
    number_of = torch.empty_like(by_longest).scatter_(0, by_longest, torch.arange(len(by_longest), device="cpu"))
    row_numbers = number_of.index_select(0, torch.tensor(row_of, dtype=torch.int64, device="cpu"))
    row_of_piece = torch.empty_like(descending).scatter_(0, descending, row_numbers)
    return row_of_piece.argsort(stable=True), row_of_piece.bincount().cumsum(0)


def _best_fit(sizes: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Return the row of each piece and the first piece of each row. ``sizes`` must be descending.

    If several rows have the same room, the piece goes to the row that got this room last.
    """
    smallest = min(sizes, default=0)  # a row with less room is full
    row_of: list[int] = []
    first_of: list[int] = []
    rooms: list[int] = []  # the distinct numbers of free tokens in rows, ascending
    rows_with: dict[int, list[int]] = {}  # number of free tokens -> rows
    for piece, size in enumerate(sizes):
        # Take the fullest row with enough room, or a new row.
        fullest = bisect_left(rooms, size)
        if fullest == len(rooms):
            row, room = len(first_of), capacity - size
            first_of.append(piece)
        else:
            room = rooms[fullest]
            rows = rows_with[room]
            row = rows.pop()
            if not rows:
                del rows_with[room], rooms[fullest]
            room -= size
        # List the row under the number of free tokens that it has now. A full row takes no more pieces.
        row_of.append(row)
        if room >= smallest:
            if room in rows_with:
                rows_with[room].append(row)
            else:
                insort(rooms, room)
                rows_with[room] = [row]
    return row_of, first_of


def has_target(piece: Tensor) -> bool:
    """Return whether a piece of a document has a target: a labeled token after the piece's first token.

    Args:
        piece: [n] int32, token ids, with ``~id`` for a token without a label.
    """
    return bool((piece[1:] >= 0).any())


def seeded_generator(*seeds: int) -> torch.Generator:
    """Return a generator whose state depends on all of ``seeds``."""
    digest = hashlib.sha256(json.dumps(seeds).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _index_dtype(count: int) -> torch.dtype:
    """Return the smallest integer dtype for numbers up to ``count``.

    A rank stores one number of this dtype per document.
    """
    return torch.int32 if count < 2**31 else torch.int64


class PackedRows(Dataset[Batch]):
    """The rows of an epoch, in order, each as a batch with one row. `PackedDataset` creates this sequence.

    Args:
        tokens: the documents.
        make_row: function that creates a row from pieces of documents.
        overflow, shuffle, seed: see `PackedDataset`.

    Attributes:
        truncated: the number of documents that have images and are longer than a row.
        longer: the number of documents, with or without images, that are longer than a row.
    """

    def __init__(
        self, tokens: TokenFile, make_row: RowMaker, overflow: str, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.tokens, self.make_row, self.shuffle, self.seed = tokens, make_row, shuffle, seed
        self.epoch, self.length = 0, make_row.length
        sizes = document_sizes(tokens.ends)
        self.longer = int((sizes > self.length).sum())
        kept = self._keep_whole(sizes)
        self.truncated = int((kept < sizes).sum())
        self._starts, piece_sizes = split_documents(sizes, self.length, overflow, kept)
        self._sizes = piece_sizes.int()  # at most a row
        self._packed: tuple[Tensor, Tensor] | None = None

    @property
    def sources(self) -> list[TokenFile]:
        """The `TokenFile` of all documents, in a list."""
        return [self.tokens]

    def identity(self) -> Any:
        """Return sizes and checksums of the data. If any of these values has changed, row ``i`` may be another row."""
        images = [len(self.tokens.media), self.tokens.media_checksum] if len(self.tokens.media) else []
        return [self.tokens.documents, len(self.tokens.ids), self.tokens.checksum, *images]

    def _keep_whole(self, sizes: Tensor) -> Tensor:
        """Return how many tokens of each document are used, [documents] int64.

        A document with images is cut at the end of a row or, if this would split an image, before this image. If no
        target remains, the document is left out.
        """
        kept, ends = sizes.clone(), self.tokens.ends
        first, last = self.tokens.media.T.contiguous()
        documents = torch.searchsorted(ends, first, right=True)  # [images], the document of each image
        for document in documents[sizes[documents] > self.length].unique().tolist():
            start, end = int(ends[document] - sizes[document]), int(ends[document])
            images = slice(*torch.searchsorted(first, torch.tensor([start, end], device="cpu")).tolist())
            bounds = zip((first[images] - start).tolist(), (last[images] - start).tolist(), strict=True)
            size = keep_whole(list(bounds), self.length)
            kept[document] = size if has_target(self.tokens.ids[start : start + size]) else 0
        return kept

    def has_targets(self) -> bool:
        """Return whether any piece has a target: a labeled token after the piece's first token.

        The first token of a piece cannot be predicted, so it is not a target.
        """
        return any(self._have_targets())  # nearly always, already the first piece has a target

    def count_without_targets(self) -> tuple[int, int]:
        """Return how many of the first `WINDOW` pieces have no target, and how many pieces were checked."""
        have = list(itertools.islice(self._have_targets(), WINDOW))
        return have.count(False), len(have)

    def _have_targets(self) -> Iterator[bool]:
        """Yield, for each piece, whether it has a target. The pieces are read in blocks, not one by one."""
        blocks = zip(self._starts.split(WINDOW), self._sizes.split(WINDOW), strict=True)
        for starts, sizes in blocks:
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                yield has_target(self.tokens.ids[start : start + size])

    def plan(self, epoch: int) -> None:
        """Select ``epoch``: indexing then returns the rows of this epoch.

        The method is not named ``set_epoch``, because Accelerate calls methods with this name at the start of an epoch,
        but not when an epoch is resumed.
        """
        if epoch != self.epoch and self.shuffle:
            self._packed = None
        self.epoch = epoch

    def _pack(self) -> tuple[Tensor, Tensor]:
        """Return the (cached) indices of the pieces, row after row, and the position after each row's last piece."""
        if self._packed is None:
            count = len(self._sizes)
            generator = seeded_generator(self.seed, self.epoch)
            order = torch.arange(count, device="cpu")
            if self.shuffle:
                order = torch.randperm(count, generator=generator, device="cpu")
            ends = []
            for number, window in enumerate(order.split(WINDOW)):
                start = number * WINDOW
                packed, row_ends = pack(self._sizes.index_select(0, window), self.length)
                order[start : start + WINDOW] = window.index_select(0, packed)
                ends.append(start + row_ends)
            self._packed = order.to(_index_dtype(count)), torch.cat(ends).to(_index_dtype(count))
        return self._packed

    def __len__(self) -> int:
        return len(self._pack()[1])

    def __getitem__(self, index: int) -> Batch:
        packed, ends = self._pack()
        if not 0 <= index < len(ends):
            raise IndexError(f"PackedRows: index must be 0 to {len(ends) - 1}, got {index}.")
        pieces = packed[ends[index - 1] if index else 0 : ends[index]].long()
        spans = zip(self._starts[pieces].tolist(), self._sizes[pieces].tolist(), strict=True)
        bounds = [(start, start + size) for start, size in spans]
        return self.make_row([(self.tokens.ids[start:end], self.tokens.media_in(start, end)) for start, end in bounds])
