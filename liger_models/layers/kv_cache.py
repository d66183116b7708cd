"""The decode cache: keys and values of all previous tokens, and linear-attention states."""

import sys
from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from liger_models.kernels.attention.decode_attention import SharedKeys

LEAST_GROWTH = 256
"""Minimum number of tokens by which a cache grows."""


class Pages(NamedTuple):
    """The location of each row's tokens in the cache, in a step that decodes one token per row.

    Attributes:
        table: [B, N] int32, the pages of each row.
        lengths: [B] int32, number of tokens of each row, including the new token.
        shared: groups of rows that share pages; None if the cache keeps no such groups.
    """

    table: Tensor
    lengths: Tensor
    shared: SharedKeys | None = None


class DecodeCache:
    """The tensors that layers keep from previous tokens.

    When the memory is full, the cache grows by at least a quarter, so cached tokens are rarely copied.

    Args:
        capacity: maximum number of tokens per sequence; unlimited by default.
    """

    pages: Pages | None = None
    """The pages of each row in a decoding step on a `PagedCache`, in which `extend` returns pages; otherwise None."""
    bounds: Tensor | None = None
    """`BatchLayout.bounds` of the running forward. None if recurrent layers treat each row as one document. See
    `PagedCache.documents`."""
    takes_documents = False
    """Whether packed documents may be cached, each as a separate row; see `PagePool`."""
    width = 1
    """Number of consecutive rows of the batch that hold tokens of the same sequence; see `PagePool.speculate`."""

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self.capacity, self.length = capacity, 0
        self.extra: dict[Hashable, Tensor] = {}
        """Further tensors [B, ...] that a model family keeps for later tokens."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._new_states: dict[int, tuple[Tensor, ...]] = {}
        """The states after the tokens of the running forward. They are separate from the earlier states, so that a
        failed forward changes nothing.
        """

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k [B, T, G, D] and v [B, T, G, V] of a layer, and return all keys and values of the layer.

        The results are [B, length + T, G, D] and [B, length + T, G, V]. For latent attention, ``k`` holds one vector
        per token, from which keys and values are computed, and V is 0.

        This method does not change ``length``. `advance` changes ``length`` after all layers have run.

        Raises:
            ValueError: there are more tokens than ``capacity``.
        """
        end = self.length + k.shape[1]
        if not end <= self.capacity:
            raise ValueError(
                f"DecodeCache: capacity ({self.capacity}) must hold all tokens, got {end}. Make the cache larger."
            )
        held = self._layers.get(layer)
        # An empty cache may have memory of other shapes, which was allocated by a forward that failed, or for tokens
        # that were dropped.
        if held is None or (not self.length and (held[0][:, :0].shape, held[0].dtype) != (k[:, :0].shape, k.dtype)):
            held = k[:, :0], v[:, :0]
        if held[0].shape[1] < end:
            room = min(end + max(LEAST_GROWTH, end // 4), self.capacity)
            held = _longer(held[0][:, : self.length], room), _longer(held[1][:, : self.length], room)
        keys, values = self._layers[layer] = held
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def pages_of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the pages of a layer's keys, [pages, P, G, D], and the slots of the new tokens, [B] int64. Slot s is
        entry ``s % P`` of page ``s // P``.

        A layer may use this result to write the keys of a step itself. If the result is None, the layer must call
        `extend` instead.
        """
        return None

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return a layer's linear-attention states, each [B, ...]. Before the first token, return None."""
        return self._states[layer] if self.length else None

    def replace_states(self, layer: int, *states: Tensor) -> None:
        """Store a layer's states after the new tokens. They replace the earlier states when `advance` is called."""
        self._new_states[layer] = states

    def advance(self, tokens: int) -> None:
        """Add a forward's number of tokens to ``length``. Call this method after all layers have stored keys, values
        and states."""
        self._states.update(self._new_states)
        self._new_states.clear()
        self.length += tokens

    @property
    def is_recurrent(self) -> bool:
        """Whether the cache has linear-attention states, from which the last tokens cannot be removed."""
        return bool(self._states)

    def on_meta(self) -> "DecodeCache":
        """Return a cache with tensors of the same shapes and dtypes on the meta device."""
        cache = DecodeCache(self.capacity)
        cache.length = self.length
        cache.extra = {name: kept.to("meta") for name, kept in self.extra.items()}
        cache._layers = {layer: (k.to("meta"), v.to("meta")) for layer, (k, v) in self._layers.items()}
        cache._states = {layer: tuple(state.to("meta") for state in states) for layer, states in self._states.items()}
        return cache

    def select(self, rows: Tensor) -> None:
        """Select, repeat or reorder the cached sequences; ``rows`` [B'] int64 lists their indices in the batch."""
        self._layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self._layers.items()}
        self._states = {layer: tuple(state[rows] for state in states) for layer, states in self._states.items()}
        self.extra = {name: kept[rows] for name, kept in self.extra.items()}


def _longer(x: Tensor, tokens: int) -> Tensor:
    """Allocate memory for ``tokens`` tokens, and copy x [B, T, ...] to its beginning."""
    longer = x.new_empty(len(x), tokens, *x.shape[2:])
    longer[:, : x.shape[1]] = x
    return longer
