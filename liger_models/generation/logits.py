"""The logits of the next token of each row, with or without a decode cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_models.generation.graphs import FIRST_TOKENS, DecodeStep, borrow_step, last_logits
from liger_models.generation.model_state import ModelState, state_of
from liger_models.generation.options import Settings
from liger_models.generation.prefix import cut_to_prefix, remember
from liger_models.generation.rows import Rows
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of
from liger_models.layers.rope import DynamicScaling, switch_columns

PAGED_DEVICES = ACCELERATORS
"""Devices on which `generate` uses a `PagedCache`. On the CPU, attention would have to copy all pages first."""


@contextmanager
def next_logits(
    model: Decoder,
    rows: Rows,
    mask: Tensor | None,
    positions: Tensor,
    inputs: dict[str, Any],
    settings: Settings,
) -> Iterator[Callable[[int], Tensor]]:
    """Context manager that yields a function for computing the logits of the next tokens.

    The function takes the number of columns that have tokens, and returns the logits [B, V] of the next column. Call
    the function first with the prompts' length ``T``, then with ``T + 1``, and so on.

    Args:
        model: the model.
        rows: the rows of the batch. Each prompt has ``num_return_sequences`` consecutive rows.
        mask: [B, S], which is 0 for padding; None for no padding.
        positions: [1 or B, S] int64, or [3, 1 or B, S].
        inputs: other arguments of the forward that describe the prompts, such as images.
        settings: the options.
    """
    ids, repeats, new = rows.ids, settings.num_return_sequences, settings.max_new_tokens
    T = ids.shape[1] - new

    # Find the columns at which all rotary frequencies of a row change (LongRoPE). The cached keys were rotated with
    # the old frequencies, so the cache must be recomputed at these columns.
    rotary: list[Any] = [*layers_of(model.rotary)]
    switches = switch_columns(rotary, positions)
    dynamic = [module.max_position_embeddings for module in rotary if isinstance(module.scaling, DynamicScaling)]

    def run(first: int, end: int, every: int, forward: Callable[..., Tensor], **options: Any) -> Tensor:
        """Return the logits [B, V] of the token after column ``end − 1``.

        In each group of ``every`` consecutive rows, only the first row is computed. The other rows of the group get a
        copy of its logits.
        """
        logits = forward(
            model, ids[::every, first:end], position_ids=positions[..., ::every, first:end],
            attention_mask=None if mask is None else mask[::every, :end], **options,
            **(inputs if first == 0 else {}),
        )  # fmt: skip
        return logits if every == 1 else logits.repeat_interleave(every, 0)

    @DerivedTensors().used()
    def of_all(end: int, cache: DecodeCache | None) -> Tensor:
        """Compute the logits of the token after ``end`` columns, with an ordinary forward of the uncached columns."""
        if cache is None:
            return run(0, end, 1, last_logits)
        if any(cache.length <= switch < end for switch in switches):
            cache.length = 0
        every = repeats if end == T else 1  # each prompt is computed only once
        logits = run(cache.length, end, every, last_logits, cache=cache)
        if every > 1:
            cache.select(torch.arange(len(ids) // every, device=ids.device).repeat_interleave(every))
            remember(cache, rows.context)
        return logits

    def of_last(end: int, step: DecodeStep) -> Tensor:
        """Compute the logits of the token after ``end`` columns, with a prefill (for the first new token) or a step."""
        step.reserve(end, T + new - 1)
        with step.derived.used():
            if end == T:
                return run(0, end, repeats, step.prefill, repeats=repeats)
            if end - 1 in switches:
                return run(0, end, 1, step.prefill)
            return step(model, ids[:, end - 1], positions[..., end - 1 : end])

    if settings.cache is not None:
        old = settings.cache.length
        cut_to_prefix(settings.cache, rows.context[::repeats, :T])
        # Dynamic rotary frequencies depend on the sequence length, but cached keys were rotated with earlier
        # frequencies.
        reached = max(old, T) + int(positions[..., -1].amax()) + 1 - positions.shape[-1]
        if any(T <= switch < old for switch in switches) or any(reached > length for length in dynamic):
            settings.cache.length = 0
        remember(settings.cache, rows.context[::repeats])
        yield lambda end: of_all(end, settings.cache)
    elif not settings.use_cache:
        yield lambda end: of_all(end, None)
    elif (state := paged_state(model)) and (mask is None or not bool((mask.diff(dim=1) < 0).any())):
        # There is no padding between tokens.
        first = min(new, FIRST_TOKENS)
        with borrow_step(model, state, len(ids), T + first - 1) as step:  # the last new token is never cached
            yield lambda end: of_last(end, step)
    else:
        cache = DecodeCache(T + new - 1)
        yield lambda end: of_all(end, cache)


def paged_state(model: Decoder) -> ModelState | None:
    """Return the state of a model that can decode with a `PagedCache`; None for other models.

    To decode with a `PagedCache`, the model must be on one of `PAGED_DEVICES`, all its attention layers must support
    paged caches, and no module may be compiled.
    """
    if model.device.type not in PAGED_DEVICES:
        return None
    state = state_of(model)
    return state if state.takes_pages else None
