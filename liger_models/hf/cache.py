"""The decode cache under the interface of transformers, so that its generation can use it."""

import itertools

import torch
from torch import Tensor
from transformers import Cache

from liger_models.layers.kv_cache import DecodeCache


class LigerCache(Cache):
    """The ``past_key_values`` that a model returns, and takes for the following tokens.

    Attributes:
        decode: the cache of the layers.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.decode = DecodeCache()

    @staticmethod
    def of(past_key_values: object) -> "LigerCache":
        """The argument, if it is such a cache; otherwise raises ValueError."""
        if not isinstance(past_key_values, LigerCache):
            raise ValueError(
                "forward: past_key_values must be what this model returned, or None with use_cache=True for a new "
                f"cache, got {type(past_key_values).__name__}. PEFT's prefix tuning and cartridges need the class of "
                "transformers: here prompt tuning learns prompts."
            )
        return past_key_values

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
