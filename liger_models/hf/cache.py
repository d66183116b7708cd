"""The decode cache with transformers' cache interface, so that transformers' ``generate`` can use it."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from liger_models.layers.kv_cache import DecodeCache

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""The cache layers of transformers that store keys and values unchanged."""
DummyLayer: Any = getattr(cache_utils, "DummyLayer", None) or type("DummyLayer", (DynamicLayer,), {})
"""A cache layer without keys and values. Older versions of transformers have no such class."""


class LigerCache(Cache):
    """The ``past_key_values`` that a model returns, and that the caller passes back with the next tokens.

    Attributes:
        given: the transformers cache that the caller passed, to which new tokens are added after the forward; None if
            the caller passed no transformers cache.
        is_unused: whether ``generate`` has created the cache but not yet used it.
    """

    def __init__(self, *, is_unused: bool = False) -> None:
        super().__init__(layers=[])
        self._decode = DecodeCache()
        self._fill: Callable[[], DecodeCache] | None = None
        self.given: Cache | None = None
        self.is_unused = is_unused

    @property
    def is_compileable(self) -> bool:
        """Always False.

        ``generate`` therefore passes the caller's mask instead of building masks for transformers' layers.
        """
        return False

    @property
    def decode(self) -> DecodeCache:
        """The `DecodeCache` that the model's layers read and extend."""
        if self._fill is not None:
            self._decode, self._fill = self._fill(), None
        return self._decode

    def fill_later(self, fill: Callable[[], DecodeCache]) -> None:
        """Register ``fill``, a function that computes the cache. It is called when the cache is first used.

        The cache that ``generate`` returns is seldom used, so computing it immediately would usually be wasted work.
        """
        self._fill = fill

    @classmethod
    def in_place_of(cls, past_key_values: object, *, allowed: bool) -> "LigerCache":
        """Create a cache that contains the tokens of a transformers cache.

        Args:
            past_key_values: transformers' ``DynamicCache``. Its tensors may require gradients, because PEFT's prefix
                tuning trains them.
            allowed: whether the model caches only keys and values. A ``DynamicCache`` can hold nothing else.

        Raises:
            ValueError: ``past_key_values`` is not a ``DynamicCache``, or ``allowed`` is False.
        """
        # Quantized cache layers, static cache layers and cache layers of linear attention do not store keys and values
        # unchanged.
        layers = past_key_values.layers if isinstance(past_key_values, Cache) else None
        if layers is None or not allowed or not all(type(layer) in (*KEYS_AND_VALUES, DummyLayer) for layer in layers):
            known = "a DynamicCache, " if allowed else ""
            raise ValueError(
                f"forward: past_key_values must be {known}what this model returned, or None with use_cache=True for a "
                f"new cache, got {_describe(past_key_values)}. Pass None."
            )
        cache = cls()
        cache.given = past_key_values
        filled = [layer for layer in layers if type(layer) is not DummyLayer and layer.is_initialized]
        cache.decode.length = max((int(layer.get_seq_length()) for layer in filled), default=0)
        for i, layer in enumerate(layers):
            if layer in filled and cache.decode.length:
                # [B, G, S, D] -> [B, S, G, D]. A layer with a window has dropped the first tokens. Zeros replace the
                # dropped tokens, because no query attends to them.
                held = (x.transpose(1, 2) for x in (layer.keys, layer.values))
                keys, values = (pad(x, (0, 0, 0, 0, cache.decode.length - x.shape[1], 0)) for x in held)
                cache.decode._layers[i] = keys, values
        return cache

    def returned(self) -> Cache:
        """Return the cache that the forward returns: this cache, or the caller's cache with the new tokens added."""
        if self.given is None:
            return self
        # `update` appends the new tokens, and drops tokens that a layer with a window no longer needs.
        past = int(self.given.get_seq_length()) if self.given.layers else 0
        for i, (keys, values) in sorted(self.decode._layers.items()):
            new = (x[:, past : self.decode.length].transpose(1, 2) for x in (keys, values))  # [B, G, T, D]
            self.given.update(*new, i)
        return self.given

    @property
    def layers(self) -> list[Any]:
        """For each layer of the model, a cache layer of transformers with views of the keys and values, [B, G, S, D].

        Do not write to the views. The entry for a layer of linear attention is a ``DummyLayer``. For a layer of latent
        attention, the key of a token is the cached vector with the token's latent, and the values have width 0.
        """
        layers: list[Any] = []
        for i in range(len(self)):
            if i not in self.decode._layers:
                layers.append(DummyLayer())
                continue
            layer = DynamicLayer()
            keys, values = (x[:, : self.decode.length].transpose(1, 2) for x in self.decode._layers[i])
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            layers.append(layer)
        return layers

    @layers.setter
    def layers(self, _: list[Any]) -> None:
        """Do nothing. This setter exists because transformers' constructor sets the attribute."""

    def __len__(self) -> int:
        return 1 + max((*self.decode._layers, *self.decode._states), default=-1)

    def __repr__(self) -> str:
        return f"LigerCache({self.get_seq_length()} tokens)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        return self.decode.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return −1, because the length of the cache is not limited."""
        return -1

    @property
    def max_cache_len(self) -> int:
        """The result of `get_max_length`. PEFT reads this property."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys for ``query_length`` new queries, and the index of the first of these keys."""
        return self.decode.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows that beam search continues; ``beam_idx`` is [B] int64."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select, repeat or reorder the rows; ``indices`` is [B'] int64."""
        self.decode.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self.decode.select(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens; ``tokens_to_remove`` is −n.

        Raises:
            ValueError: ``tokens_to_remove`` is positive, or the cache holds linear-attention states, from which tokens
                cannot be removed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: tokens_to_remove must be 0 or minus the number of tokens to remove, got {tokens_to_remove}. To "
                "keep n tokens, pass n - get_seq_length()."
            )
        if not self.is_croppable:
            raise ValueError(
                "crop: the cache must hold keys and values only, got states of linear attention, from which no token "
                "can be taken. Generate without assistant_model and prompt_lookup_num_tokens."
            )
        # The tensors keep the removed tokens until the next tokens overwrite them.
        self.decode.length -= min(-tokens_to_remove, self.decode.length)

    def reset(self) -> None:
        """Remove all tokens."""
        self.decode.length = 0
        self.decode.extra.clear()

    @property
    def batch_size(self) -> int:
        """The number of rows; −1 before the first token."""
        layers = itertools.chain(self.decode._layers.values(), self.decode._states.values())
        return next((len(tensors[0]) for tensors in layers), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether the cache holds tokens."""
        return self.decode.length > 0

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens."""
        return not self.decode.is_recurrent


def _describe(cache: Any) -> str:
    """Return a description of a cache for an error message: its type, and the types of its unsupported layers."""
    layers = {type(layer) for layer in getattr(cache, "layers", None) or ()} - {*KEYS_AND_VALUES}
    names = ", ".join(sorted(layer.__name__ for layer in layers))
    return type(cache).__name__ + (f" with {names}" if names else "")
