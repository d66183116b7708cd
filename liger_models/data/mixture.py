"""Mixtures of data sets with given shares.

A mixture determines which rows come from each data set in an epoch, and the order of all rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.data.packing import PackedRows, seeded_generator
from liger_models.data.tokens import TokenFile


class MixedRows(PackedRows):
    """The rows of several data sets. In each epoch, a data set provides a given share of the rows.

    An epoch ends when all rows of one data set have been used: the data set that is smallest relative to its share. In
    the next epoch, the other data sets continue with rows that have not been used yet. When all rows of a data set have
    been used, they are used again in another order.

    Args:
        parts: the rows of each data set. The parts' own epochs are ignored.
        shares: the share of each data set, a positive number. Shares need not add up to 1.
        shuffle, seed: see `PackedDataset`.

    Raises:
        ValueError: the shares do not match the parts.
    """

    def __init__(self, parts: Sequence[PackedRows], shares: Sequence[float], shuffle: bool, seed: int) -> None:
        if len(shares) != len(parts) or not all(0 < share < float("inf") for share in shares):
            raise ValueError(
                f"PackedDataset: shares must be {len(parts)} positive numbers, one for each source, got {list(shares)}."
            )
        self.parts, self.shares, self.shuffle, self.seed, self.epoch = list(parts), list(shares), shuffle, seed, 0
        self.tokens = parts[0].tokens
        # The data set that is smallest relative to its share determines the number of rows in an epoch.
        sizes = [len(part) for part in parts]
        rows = min(size / share for size, share in zip(sizes, shares, strict=True))
        self.counts = [max(round(rows * share), 1) for share in shares]
        self._chosen: tuple[Tensor, Tensor] | None = None

    @property
    def sources(self) -> list[TokenFile]:
        """The `TokenFile` objects of all data sets, in the order of the parts."""
        return [part.tokens for part in self.parts]

    def identity(self) -> Any:
        """Return sizes, checksums and shares. If any of these values changes, an index may refer to another row."""
        return [*(part.identity() for part in self.parts), self.shares]

    def has_targets(self) -> bool:
        """Return whether any piece of a document has a target: a labeled token after the piece's first token."""
        return any(part.has_targets() for part in self.parts)

    def plan(self, epoch: int) -> None:
        """Select ``epoch``. From then on, indexing returns the rows of this epoch."""
        self._chosen = self._chosen if epoch == self.epoch else None
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"MixedRows: index must be 0 to {len(self) - 1}, got {index}.")
        if self._chosen is None:
            self._chosen = self._choose()
        parts, rows = self._chosen
        return self.parts[int(parts[index])][int(rows[index])]

    def _choose(self) -> tuple[Tensor, Tensor]:
        """For each row of the epoch, return its part and its index in this part, as two tensors [rows] int64."""
        parts, rows = [], []
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            # A cycle uses each row of the part once. Rows are numbered consecutively over all cycles, and this epoch
            # takes the rows from `first` to `last`.
            size, first, last = len(part), self.epoch * count, (self.epoch + 1) * count
            cycles = [self._order(size, number, cycle) for cycle in range(first // size, -(-last // size))]
            skipped = first // size * size  # rows of the cycles before
            parts.append(torch.full((count,), number, device="cpu"))
            rows.append(torch.cat(cycles)[first - skipped : last - skipped])
        # Shuffle the rows of all parts together.
        order = self._order(len(self), len(self.parts), self.epoch)
        return torch.cat(parts)[order], torch.cat(rows)[order]

    def _order(self, size: int, number: int, cycle: int) -> Tensor:
        generator = seeded_generator(self.seed, number, cycle)
        if self.shuffle:
            return torch.randperm(size, generator=generator, device="cpu")
        return torch.arange(size, device="cpu")
