"""The decode cache: keys and values of the tokens so far, and states of linear attention."""

import sys
from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

LEAST_GROWTH = 256
"""Least number of tokens by which a cache grows."""


class Pages(NamedTuple):
    """Where the tokens of each row are, in a step that decodes one token of each.

    Attributes:
        table: [B, N] int32, the pages of each row.
        lengths: [B] int32, number of tokens of each row, the new one included.
    """

    table: Tensor
    lengths: Tensor


class DecodeCache:
    """What layers keep of the tokens so far, for decoding. Memory grows by a quarter, so that tokens are rarely copied.

    Args:
        capacity: maximum number of tokens per sequence; by default there is none.
    """

    pages: Pages | None = None
    """Set if keys and values are in pages, which `extend` then returns; see `PagedCache`."""
    takes_documents = False
    """Whether packed documents may be cached, whose next tokens are then given row by row; see `PagePool`."""

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self.capacity, self.length = capacity, 0
        self.extra: dict[Hashable, Tensor] = {}
        """Other tensors [B, ...] that a family saves for later tokens."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._new_states: dict[int, tuple[Tensor, ...]] = {}
        """States after the tokens of a forward that has not ended: one that fails leaves the cache as it was."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, T, G, D] of one layer, and return all keys and values of it, [B, length + T, G, D] each.

        This does not change ``length``; `advance` does so after all layers.

        Raises:
            ValueError: there are more tokens than ``capacity``.
        """
        end = self.length + k.shape[1]
        if not end <= self.capacity:
            raise ValueError(
                f"DecodeCache: capacity ({self.capacity}) must hold all tokens, got {end}. Make the cache larger."
            )
        held = self._layers.get(layer)
        # An empty cache may have room for other rows: of a forward that failed, or whose tokens are not used.
        if held is None or (not self.length and (held[0][:, :0].shape, held[0].dtype) != (k[:, :0].shape, k.dtype)):
            held = k[:, :0], v[:, :0]
        if held[0].shape[1] < end:
            room = min(end + max(LEAST_GROWTH, end // 4), self.capacity)
            held = _longer(held[0][:, : self.length], room), _longer(held[1][:, : self.length], room)
        keys, values = self._layers[layer] = held
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """The states of a layer of linear attention after the tokens so far, [B, ...] each; None before the first."""
        return self._states[layer] if self.length else None

    def replace_states(self, layer: int, *states: Tensor) -> None:
        """Store the states of a layer after its new tokens; unlike keys and values they replace what was there."""
        self._new_states[layer] = states

    def advance(self, tokens: int) -> None:
        """Count the tokens of a forward that ends: all layers have stored their keys, values and states."""
        self._states.update(self._new_states)
        self._new_states.clear()
        self.length += tokens

    @property
    def is_recurrent(self) -> bool:
        """Whether there are such states, from which the last tokens cannot be removed."""
        return bool(self._states)

    def select(self, rows: Tensor) -> None:
        """Select, repeat or reorder sequences; ``rows`` [B'] int64 indexes the batch."""
        self._layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self._layers.items()}
        self._states = {layer: tuple(state[rows] for state in states) for layer, states in self._states.items()}
        self.extra = {name: kept[rows] for name, kept in self.extra.items()}


def _longer(x: Tensor, tokens: int) -> Tensor:
    """Memory for so many tokens, of which the first ones are x [B, T, ...]."""
    longer = x.new_empty(len(x), tokens, *x.shape[2:])
    longer[:, : x.shape[1]] = x
    return longer
