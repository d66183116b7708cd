"""Reuse of decode caches in later calls, for prompts that begin with the same tokens."""

from torch import Tensor

from liger_models.layers.kv_cache import DecodeCache

TOKENS = "tokens"
"""Key in ``cache.extra`` under which the cached tokens are stored, [B, S] int64, with -1 for padding. Columns beyond
the length of the cache are not cached yet."""


def cut_to_prefix(cache: DecodeCache, prompts: Tensor) -> None:
    """Shorten a cache to its longest prefix of columns whose tokens equal the tokens of the prompts.

    The last column of the prompts is never kept, because its logits must be computed. If the padding of a row has
    changed, no column is kept. This function synchronizes with the device.

    Args:
        cache: an empty cache, or a cache for which `remember` was called.
        prompts: [B, T] int64, with −1 for padding.

    Raises:
        ValueError: the numbers of rows of cache and prompts differ; the cache was not filled by ``generate``; or the
            cache has recurrent states, and the prompts do not begin with all of its tokens.
    """
    if not cache.length:
        return
    B, T = prompts.shape
    if TOKENS not in cache.extra:
        raise ValueError("generate: cache must be new or filled by generate, got one that a forward filled.")
    known = cache.extra[TOKENS]
    if len(known) != B:
        raise ValueError(
            f"generate: cache must have a row for each of the {B} prompts, got {len(known)}. Use a new DecodeCache."
        )

    # Count the columns before the first column in which any row differs.
    width = min(cache.length, T - 1)
    same = known[:, :width] == prompts[:, :width]
    length = int(same.all(0).cumprod(0).sum())

    # A recurrent state summarizes all tokens, so no token can be removed from it.
    if length < cache.length and cache.is_recurrent:
        difference = f"only {T} tokens"
        if length < width:
            row = int(same[:, length].logical_not().nonzero()[0])
            difference = (
                f"token {int(prompts[row, length])} instead of {int(known[row, length])} at {length} of row {row}"
            )
        raise ValueError(
            f"generate: prompts must begin with all {cache.length} tokens of the cache, because recurrent states can't "
            f"be cut back, and have further ones, got {difference}. Use a new DecodeCache."
        )
    cache.length = length


def remember(cache: DecodeCache, tokens: Tensor) -> None:
    """Store the tokens of a cache in the cache itself, for `cut_to_prefix`.

    Args:
        cache: the cache.
        tokens: [B, S] int64, with −1 for padding. Columns that are not cached yet may be filled later.
    """
    cache.extra[TOKENS] = tokens
