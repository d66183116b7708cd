"""A paged cache for a changing set of rows. Each row takes pages for its tokens and gives the pages back later."""

from typing import Any

import torch
from torch import Tensor

from liger_models.common.device import as_tensor, on_device
from liger_models.kernels.attention.decode_attention import GROUP_ROWS, SharedKeys
from liger_models.kernels.attention.scaled_pages import ScaledPages
from liger_models.kernels.attention.token_slots import token_slots
from liger_models.kernels.attention.write_pages import write_pages
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE as FLOAT8
from liger_models.layers.kv_cache import DecodeCache, Pages
from liger_models.layers.paged_cache import PagedCache

LEAST_GROUP = 4
"""There is one group of rows that share pages for so many rows of the pool at most."""


class PagePool(PagedCache):
    """A `PagedCache` whose pages are allocated and freed individually. Several rows may hold the same page.

    The host assigns pages to rows in its own table, which `resume` copies to the device. As with `PagedCache`, a step
    can be captured in a CUDA graph, because ``lengths``, ``remaining`` and the table stay at the same addresses. A step
    may include finished rows. A finished row attends to one token, and writes to page 0, which is never assigned to a
    row. The linear-attention states of a finished row become invalid.

    Call `fill` before a forward of prompts, `resume` before a series of steps, and `step` before each step.

    Args:
        rows, capacity, device: as in `PagedCache`.
        pages: number of pages, including page 0.
        like: a cache that all layers of the model have already used, on any device. This cache determines the shapes
            and dtypes of keys, values and states.
        groups: whether the caller calls `group`, so that attention reads shared pages once for several rows.
        cache_dtype: float8_e4m3fn for keys and values in float8, each token and head with a scale (`ScaledPages`); None
            for the dtype of ``like``.

    Raises:
        ValueError: ``cache_dtype`` is another dtype, or is given for layers that cache latents.
    """

    takes_documents = True

    def __init__(
        self,
        rows: int,
        capacity: int,
        device: torch.device,
        *,
        pages: int,
        like: DecodeCache,
        groups: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows, capacity, device)
        if cache_dtype not in (None, FLOAT8):
            raise ValueError(f"PagePool: cache_dtype must be None or {FLOAT8}, got {cache_dtype}.")
        self.groups, self.cache_dtype = groups, cache_dtype
        self._make_tables(rows)
        self._states = {
            layer: tuple(state.new_zeros(rows, *state.shape[1:], device=device) for state in states)
            for layer, states in like._states.items()
        }
        self._filled = self._history = self.lengths
        """The rows in the forward that `fill` has prepared, [n] int64, and the pages of the first of these rows.
        """
        self._scales: dict[int, tuple[Tensor, ...]] = {}
        """The scales of the keys and values of each layer, [pages, G, P], if keys and values are in float8."""
        for layer, (k, v) in like._layers.items():
            if cache_dtype is not None and not v.shape[3]:
                raise ValueError(
                    f"PagePool: cache_dtype must be None for latents, got {cache_dtype} for layer {layer}, whose "
                    "values have no columns. Leave it out."
                )
            keys, values = (
                x.new_zeros(pages, self.page, *x.shape[2:], dtype=cache_dtype, device=device) for x in (k, v)
            )
            self._layers[layer] = keys, values
            if cache_dtype is not None:
                sizes = pages, keys.shape[2], self.page
                self._scales[layer] = tuple(torch.zeros(sizes, dtype=torch.float32, device=device) for _ in range(2))
        self._drafted: dict[int, list[tuple[Tensor, ...]]] = {}
        """For each layer, the states after each token of the forward that `speculate` has prepared."""
        self._free = list(range(pages - 1, 0, -1))
        self._holders = [0] * pages

    @property
    def num_bytes(self) -> int:
        """See `PagedCache.num_bytes`."""
        return super().num_bytes + sum(x.nbytes for scales in self._scales.values() for x in scales)

    def resize(self, kept: list[int]) -> None:
        """Keep only the rows that ``kept`` lists, and number them from 0. Afterwards, the caller must assign pages to
        the rows again, and capture the step again."""
        rows = self.upload(kept)
        self._states = {layer: tuple(state[rows] for state in states) for layer, states in self._states.items()}
        self._make_tables(len(kept))

    def _make_tables(self, rows: int) -> None:
        device, shape = self.lengths.device, (rows, self._own.shape[1])
        self.rows = rows
        self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host_table = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type in ACCELERATORS, device="cpu")
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.remaining = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of tokens that must still be generated for each row; 0 for finished rows."""
        self._shared_keys: SharedKeys | None = None
        if self.groups:
            sizes = (-(-rows // LEAST_GROUP), GROUP_ROWS + 1), (rows,)
            self._shared_keys = SharedKeys(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))
        self._grouped: list[tuple[list[int], int]] | None = None

    @property
    def num_free(self) -> int:
        """Number of pages that no row holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free pages for one row, and return them."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """Record that one more row uses these pages, and return the pages."""
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: list[int]) -> None:
        """Record that one row no longer uses these pages. A page that no other row holds becomes free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def assign(self, row: int, pages: list[int]) -> None:
        """Write a row's pages, in the order of the row's tokens, to the table on the host."""
        self._host_table[row] = 0
        self._host_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")

    def group(self, groups: list[tuple[list[int], int]]) -> None:
        """Set the groups of rows for which the next steps read shared pages once.

        Args:
            groups: (rows, tokens) for each group: up to `GROUP_ROWS` rows, and the number of tokens in the pages that
                all of them share. If there are too many groups, small groups are left out.
        """
        if self._shared_keys is None or groups == self._grouped:
            return
        self._grouped = groups
        most = len(self._shared_keys.groups)
        lines, counts = [[-1] * GROUP_ROWS + [0] for _ in range(most)], [0] * self.rows
        largest = sorted(groups, key=lambda group: len(group[0]), reverse=True)[:most]
        for line, (rows, tokens) in zip(lines, largest, strict=False):
            line[: len(rows)], line[-1] = rows, tokens
            for row in rows:
                counts[row] = tokens
        # Write in place, because a captured step reads these tensors.
        self._shared_keys.groups.copy_(self.upload(lines))
        self._shared_keys.counts.copy_(self.upload(counts))

    def copy(self, pages: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Copy pages, and copy the states of rows. Each pair is (source, target)."""
        for tensors, pairs in ((self._layers, pages), (self._scales, pages), (self._states, rows)):
            if tensors and pairs:
                source, target = self.upload(pairs).unbind(1)
                for x in (x for layer in tensors.values() for x in layer):
                    x = x.view(torch.uint8) if x.dtype == FLOAT8 else x  # not all devices can index float8
                    x[target] = x[source]

    def clear_states(self, row: int) -> None:
        """Reset the states of a row to zeros, the states before a first token."""
        for state in (x for states in self._states.values() for x in states):
            state[row].zero_()

    def fill(self, parts: list[tuple[int, int, int]]) -> None:
        """Prepare a forward of the tokens of several rows, which are concatenated in a single row of the batch.

        Args:
            parts: (row, first token, last token + 1) for each row. If the tokens follow cached tokens, there must be
                only one part.
        """
        slots = []
        for row, begin, end in parts:
            position = torch.arange(begin, end, device="cpu")
            slots.append(self._host_table[row, position // self.page].long() * self.page + position % self.page)
        self.slots = self.upload(torch.cat(slots))
        self._filled = self.upload([row for row, _, _ in parts])
        row, self.length, end = parts[0]
        self._history = self.upload(self._host_table[row, : -(-end // self.page)].long())
        self.pages, self.width = None, 1

    def resume(self, lengths: Tensor, remaining: Tensor) -> None:
        """Prepare a series of steps.

        Args:
            lengths: [rows], number of cached tokens of each row.
            remaining: [rows], number of tokens that must still be generated for each row; 0 for finished rows.
        """
        # Write in place, because a captured step reads these tensors.
        self._table.copy_(self._host_table, non_blocking=True)
        self.lengths.copy_(lengths)
        self.remaining.copy_(remaining)

    @property
    def positions(self) -> Tensor:
        """The position of each row's next token, [rows, 1] int64."""
        return (self.lengths * (self.remaining > 0)).long()[:, None]

    def step(self) -> None:
        """Like `PagedCache.step`, but only for the rows that still have tokens to generate."""
        positions = self.positions
        self.slots = self._slots_of(self._table, positions)[:, 0] * (self.remaining > 0)  # 0 for finished rows
        self.lengths.copy_(positions[:, 0] + 1)
        self.pages, self.length, self.width = Pages(self._table, self.lengths, self._shared_keys), 1, 1

    def speculate(self, n: int, offset: int = 0) -> Tensor:
        """Prepare a forward of n tokens per row. Then call `accept` to accept the first few tokens of each row.

        In this forward, each token is a separate row of the batch. The batch thus has ``rows · n`` rows, in which the n
        tokens of each row of the pool are consecutive. Neither ``lengths`` nor the linear-attention states change.

        Args:
            n: number of tokens of each row.
            offset: number of positions between a row's cached tokens and the first of its n new tokens.

        Returns:
            The positions of the tokens, [rows · n, 1] int64; 0 for finished rows.
        """
        positions, self.slots, ends, pages = token_slots(
            self._table, self.lengths, self.remaining, n=n, offset=offset, page=self.page
        )
        self.pages, self.length, self.width = Pages(pages, ends), 1, n
        return positions

    def keep_states(self, layer: int, *states: Tensor) -> None:
        """Store a layer's states after one token.

        Call this method once for each token, in the order in which `speculate` prepared the tokens.
        """
        self._drafted.setdefault(layer, []).append(states)

    def accept(self, counts: Tensor) -> None:
        """Accept the first ``counts[r]`` of the tokens that `speculate` prepared for row r.

        The states of the row become the states after these tokens. The caller must update ``lengths`` and
        ``remaining``.
        """
        if not self._drafted:
            return
        rows, last = torch.arange(self.rows, device=counts.device), (counts - 1).clamp_min(0)
        for layer, states in self._drafted.items():
            for held, drafted in zip(self._states[layer], zip(*states, strict=True), strict=True):
                held.copy_(torch.stack(drafted)[last, rows])
        self._drafted.clear()

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k [B, T, G, D] and v [B, T, G, V] of one layer.

        Returns:
            In a step, all pages of the layer, [pages, P, G, D] and [pages, P, G, V]; otherwise all keys and values of
            the row, [1, cached + T, G, D] and [1, cached + T, G, V]. Pages in float8 are `ScaledPages`. If the tokens
            follow cached tokens, keys and values in float8 are dequantized to the dtype of k.
        """
        keys: Any
        values: Any
        keys, values = self._layers[layer]
        if self.cache_dtype is not None:
            keys, values = map(ScaledPages, (keys, values), self._scales[layer])
        write_pages(keys, values, k.flatten(0, 1), v.flatten(0, 1), self.slots)
        if self.pages is not None:
            return keys, values
        if not self.length:
            return k, v
        if self.cache_dtype is None:
            keys, values = keys[self._history], values[self._history]
        else:
            keys, values = (pages.select(self._history, k.dtype) for pages in (keys, values))
        end = self.length + k.shape[1]
        return keys.flatten(0, 1)[None, :end], values.flatten(0, 1)[None, :end]

    def pages_of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """See `DecodeCache.pages_of`. Only `extend` writes pages in float8."""
        return super().pages_of(layer) if self.cache_dtype is None else None

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """Like `DecodeCache.states`, but only for the rows of the running forward."""
        if self.pages is not None:
            return self._states[layer]
        return tuple(state[self._filled] for state in self._states[layer]) if self.length else None

    def replace_states(self, layer: int, *states: Tensor) -> None:
        """Like `DecodeCache.replace_states`, but only for the rows of the running forward."""
        n = len(self._filled)
        for held, state in zip(self._states[layer], states, strict=True):
            if self.pages is not None:
                held.copy_(state)
            else:  # the first and the last document may be empty; see `Segments.of_rows`
                held[self._filled] = state[(len(state) - n) // 2 :][:n]

    def upload(self, values: "Tensor | list[tuple[int, int]] | list[list[int]] | list[int]") -> Tensor:
        """Copy integers from the host to the device as int64, without waiting for the copy."""
        return on_device(as_tensor(values, torch.int64), self.lengths.device)
