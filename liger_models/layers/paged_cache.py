"""The paged decode cache. A decoding step depends on no values on the host, so a captured step can be replayed."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from liger_models.kernels.attention.write_pages import write_pages
from liger_models.layers.kv_cache import DecodeCache, Pages

PAGE = 64
"""Number of tokens per page, a power of two of at least 16."""


class PagedCache(DecodeCache):
    """A decode cache that first stores prompts without their padding, and then one token per row in each step.

    The keys of a layer are stored as [pages, P, G, D] and the values as [pages, P, G, V], where P is the number of
    tokens per page. A table lists the pages of each row. Tensors on the device determine where new tokens are stored,
    and which tokens the new tokens attend to. All tensors that the forward of a step reads or writes stay at the same
    addresses: the pages, the table, the lengths, the linear-attention states and ``extra``. A captured forward can
    therefore be replayed for later tokens and for other prompts.

    Call `start` before a forward of prompts, `settle` after it, and `step` before each forward of one token per row.
    ``length`` is the number of tokens, including padding, that the host has counted. The host does not count replayed
    steps, so a step may rely only on whether ``length`` is 0.

    Args:
        rows: number of rows in a step. If the prompts need fewer rows, the last row of the prompts is repeated.
        capacity: maximum number of tokens per row, which is rounded up to whole pages and can be increased by `grow`.
        device: device of the tensors.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.page = PAGE
        count = -(-capacity // self.page)
        super().__init__(count * self.page)
        self.rows = rows
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        """Number of tokens of each row, without padding."""
        # `_own` lists the pages that belong to each row, [rows, pages]. The table differs from `_own` if rows share the
        # pages of a prompt.
        self._own = torch.arange(rows * count, dtype=torch.int32, device=device).view(rows, count)
        self._table = self._own.clone()
        self._row: Tensor | None = None
        """For each row that repeats another row, the index of the other row; for all other rows, their own index.
        [rows] int64; None if no row repeats another.
        """
        self._prompt = torch.zeros(rows, dtype=torch.int64, device=device)
        """For each row, the index of its prompt, [rows] int64."""
        self._prompts = 0
        self._shared: tuple[Tensor, Tensor] | None = None
        """For each row, the partly filled page of its prompt, and the row's own page to which that page is copied,
        both [rows].
        """
        self.slots = self.lengths
        """The slot of each token of the forward, [B · T] int64; negative for padding. Slot s is entry ``s % P`` of page
        ``s // P``."""
        self._fixed: dict[Hashable, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensors on the device."""
        of_layers = [*self._layers.values(), *self._states.values()]
        return sum(x.nbytes for x in (*self._fixed.values(), *(x for tensors in of_layers for x in tensors)))

    def start(self, B: int, T: int, mask: Tensor | None = None, repeats: int = 1) -> None:
        """Empty the cache, and prepare a forward of B prompts of T tokens.

        Args:
            B: number of prompts.
            T: number of tokens of each prompt, including padding.
            mask: [B, T], 0 for padding, which must be on one side of each row. None for no padding.
            repeats: number of consecutive rows per prompt. These rows share the pages that the prompt fills completely.

        Raises:
            ValueError: there are more rows or tokens than the cache can hold.
        """
        N = B * repeats
        if not (1 <= N <= self.rows and self.capacity >= T):
            raise ValueError(
                f"PagedCache: must hold all prompts, has {self.rows} rows of {self.capacity} tokens, got {N} rows of "
                f"{T}. Make the cache larger."
            )
        device = self.lengths.device
        self.length, self.pages = 0, None
        self.extra.clear()

        # If a step has more than the N rows that are needed, the additional rows repeat the last of the N rows.
        row = torch.arange(self.rows, device=device).clamp_max_(N - 1)
        self._row = None if self.rows == N else row
        self._prompt.copy_(row // repeats)
        self._prompts = B

        # The tokens of a prompt, without its padding, are stored in the pages of the prompt's first row.
        position = torch.arange(T, device=device).expand(B, T) if mask is None else (mask != 0).cumsum(1) - 1
        slots = self._slots_of(self._own[:N:repeats], position)  # [B, T]
        self.slots = (slots if mask is None else slots.masked_fill(mask == 0, -1)).flatten()
        self.lengths.copy_(self._of_prompts(position[:, -1] + 1))

        self._shared = None
        if repeats == 1:
            self._table.copy_(self.of_rows(self._own))
            return

        # The rows of a prompt share the pages that the prompt fills completely. `settle` copies the last page, which
        # the prompt fills only partly.
        first = row // repeats * repeats
        filled = (self.lengths // self.page)[:, None].long()
        column = torch.arange(self._own.shape[1], device=device)
        self._table.copy_(torch.where(column < filled, self._own[first], self._own[row]))
        begun = filled.clamp_max(self._own.shape[1] - 1)
        self._shared = self._own[first].gather(1, begun)[:, 0], self._own[row].gather(1, begun)[:, 0]

    @contextmanager
    def documents(self, bounds: Tensor) -> Iterator[None]:
        """Context manager for a forward of prompts that are padded on the right. Within the context, the attribute
        ``bounds`` of the cache is set.

        Args:
            bounds: [2B + 1] int32, the boundaries of each row's tokens and of its padding, for layers that read
                `BatchLayout.bounds`. The cache keeps only the states after the tokens, not the states after the
                padding.
        """
        self.bounds = bounds
        try:
            yield
        finally:
            self.bounds = None

    def grow(self, capacity: int) -> None:
        """Increase the capacity to ``capacity`` tokens per row. The pages and the table get new addresses, so the
        caller must capture the step again."""
        (rows, count), new = self._own.shape, -(-capacity // self.page)
        pages = torch.arange(rows * count, rows * new, dtype=torch.int32, device=self._own.device).view(rows, -1)
        self._own, self._table = (torch.cat([table, pages], 1) for table in (self._own, self._table))
        for layer, keys_values in self._layers.items():
            keys, values = (torch.cat([x, x.new_empty(pages.numel(), *x.shape[1:])]) for x in keys_values)
            self._layers[layer] = keys, values
        self.capacity = new * self.page

    def of_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return x with as many rows along dimension ``dim`` as a step has. If `start` prepared fewer rows, the last
        row of x is repeated."""
        return x if self._row is None else x.index_select(dim, self._row)

    def _of_prompts(self, x: Tensor) -> Tensor:
        """Given a tensor x [B, ...] with an entry for each prompt, return a tensor [rows, ...] in which each row of a
        step has the entry of its prompt."""
        return x if self._prompts == self.rows else x[self._prompt]

    def settle(self) -> bool:
        """For each prompt, copy the partly filled page and the entries of ``extra`` to all rows of the prompt.

        Returns:
            Whether ``extra`` has the same addresses as for earlier prompts, so that a captured step remains valid.
        """
        if self._shared is not None:
            begun, copies = self._shared
            for pages in (x for keys_values in self._layers.values() for x in keys_values):
                pages[copies] = pages[begun]

        # If the shapes are the same as for earlier prompts, write in place, because a captured step reads these
        # addresses.
        extra = {name: self._of_prompts(x) for name, x in self.extra.items()}
        formats, fixed_formats = (
            {name: (x.shape, x.dtype) for name, x in tensors.items()} for tensors in (extra, self._fixed)
        )
        stays = formats == fixed_formats
        if stays:
            for name, x in extra.items():
                self._fixed[name].copy_(x)
        else:
            self._fixed = {name: x.clone() for name, x in extra.items()}
        self.extra = dict(self._fixed)
        return stays

    @property
    def is_settled(self) -> bool:
        """Whether ``extra`` still holds the same tensors as after `settle`. If so, a captured step reads the tensors
        that ``extra`` now holds."""
        same = all(self.extra.get(name) is x for name, x in self._fixed.items())
        return same and len(self.extra) == len(self._fixed)

    def step(self) -> None:
        """Prepare a forward of one token per row. Each token is stored after the other tokens of its row."""
        self.slots = self._slots_of(self._table, self.lengths[:, None].long()).flatten()
        self.lengths += 1
        self.pages = Pages(self._table, self.lengths)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k [B, T, G, D] and v [B, T, G, V] of one layer.

        Returns:
            In a step, all pages of the layer, [pages, P, G, D] and [pages, P, G, V]; for prompts, k and v.

        Raises:
            ValueError: the number of tokens differs from the number that `start` or `step` prepared.
        """
        if k.shape[0] * k.shape[1] != len(self.slots) or (self.pages is None and self.length):
            raise ValueError(
                f"PagedCache: must be given the {len(self.slots)} tokens of the prompts or of a step, got "
                f"{k.shape[0]} x {k.shape[1]}. Call start or step before the forward."
            )
        if layer not in self._layers:
            room = (self._own.numel(), self.page)
            self._layers[layer] = k.new_empty(*room, *k.shape[2:]), v.new_empty(*room, *v.shape[2:])
        keys, values = self._layers[layer]
        write_pages(keys, values, k.flatten(0, 1), v.flatten(0, 1), self.slots)
        return (k, v) if self.pages is None else (keys, values)

    def pages_of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """See `DecodeCache.pages_of`."""
        return None if self.pages is None or layer not in self._layers else (self._layers[layer][0], self.slots)

    def replace_states(self, layer: int, *states: Tensor) -> None:
        """Like `DecodeCache.replace_states`, but the addresses of the states do not change."""
        if self.bounds is not None:  # every second state comes after padding
            states = tuple(state[::2] for state in states)
        states = states if self.pages is not None else tuple(map(self._of_prompts, states))
        if layer not in self._states:
            self._states[layer] = tuple(torch.empty_like(state) for state in states)
        for fixed, state in zip(self._states[layer], states, strict=True):
            fixed.copy_(state)

    def select(self, rows: Tensor) -> None:
        """Raise ValueError, because tensors that a captured step reads must keep their addresses."""
        raise ValueError("PagedCache: rows can't be selected. Use a DecodeCache.")

    def _slots_of(self, table: Tensor, position: Tensor) -> Tensor:
        """Return the slots (see ``slots``), [B, T] int64, of tokens at the positions [B, T] in their rows."""
        position = position.clamp_min(0)
        return table.gather(1, position // self.page).long() * self.page + position % self.page
