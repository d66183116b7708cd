"""The decode cache under the interface of transformers, so that its generation can use it."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from liger_models.layers.kv_cache import DecodeCache

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of transformers' caches that hold keys and values as they are."""


class LigerCache(Cache):
    """The ``past_key_values`` that a model returns, and takes for the following tokens.

    Attributes:
        decode: the cache of the layers.
        given: a cache of transformers in whose place this cache is; None if there is none.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.decode = DecodeCache()
        self.given: Cache | None = None

    @classmethod
    def in_place_of(cls, past_key_values: object, *, allowed: bool) -> "LigerCache":
        """A cache with the tokens of a cache of transformers.

        Args:
            past_key_values: transformers' ``DynamicCache``. Its tensors may require gradients, as those that PEFT's
                prefix tuning learns.
            allowed: whether the model caches keys and values only, so that such a cache can hold everything.

        Raises:
            ValueError: it is something else, or not allowed.
        """
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
                # [B, G, S, D] -> [B, S, G, D]. A layer with a window has dropped the first tokens, which no query
                # sees: zeros stand for them.
                held = (x.transpose(1, 2) for x in (layer.keys, layer.values))
                keys, values = (pad(x, (0, 0, 0, 0, cache.decode.length - x.shape[1], 0)) for x in held)
                cache.decode._layers[i] = keys, values
        return cache

    def returned(self) -> Cache:
        """The cache to return: this one, or that of transformers in whose place it is, with the new tokens."""
        if self.given is None:
            return self
        past = int(self.given.get_seq_length()) if self.given.layers else 0
        for i, (keys, values) in sorted(self.decode._layers.items()):
            new = (x[:, past : self.decode.length].transpose(1, 2) for x in (keys, values))  # [B, G, T, D]
            self.given.update(*new, i)
        return self.given

    def __len__(self) -> int:
        return len(self.decode._layers)

    def __repr__(self) -> str:
        return f"LigerCache({self.get_seq_length()} tokens)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached tokens."""
        return self.decode.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: there is no maximum."""
        return -1

    @property
    def max_cache_len(self) -> int:
        """`get_max_length` under the name by which PEFT asks."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys for so many queries, and the index of the first."""
        return self.decode.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows that beam search continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select, repeat or reorder the rows."""
        self.decode.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.decode.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; ``tokens_to_remove`` is minus their number.

        Raises:
            ValueError: the number is positive, as in transformers' own caches; or there are states of linear attention,
                from which no token can be taken.
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
        self.decode.length -= min(-tokens_to_remove, self.decode.length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.decode.length = 0
        self.decode.extra.clear()

    @property
    def batch_size(self) -> int:
        """Number of rows; −1 before the first token."""
        layers = itertools.chain(self.decode._layers.values(), self.decode._states.values())
        return next((len(tensors[0]) for tensors in layers), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether there are tokens."""
        return self.decode.length > 0

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` leaves no trace."""
        return not self.decode.is_recurrent


def _describe(cache: Any) -> str:
    """The type of a cache, and of those of its layers that hold more than keys and values."""
    layers = {type(layer) for layer in getattr(cache, "layers", None) or ()} - {*KEYS_AND_VALUES}
    names = ", ".join(sorted(layer.__name__ for layer in layers))
    return type(cache).__name__ + (f" with {names}" if names else "")
