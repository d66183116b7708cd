"""Continuing prompts: greedy decoding and sampling, with the names and semantics of transformers' ``generate``.

Differences from transformers: top-k is off by default (transformers keeps 50 tokens), and padding does not count as a
repeated token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_models.generation.options import Options, Settings, resolve, select_inputs, shows_options
from liger_models.generation.prompts import Prompts, batch_prompts
from liger_models.generation.sampling import choose
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@shows_options
def generate(model: Decoder, input_ids: Prompts, *, max_new_tokens: int, **options: "Unpack[Options]") -> Tensor:
    """Continue the prompts.

    The model runs in eval mode without gradients, and its mode is restored afterwards.

    Args:
        model: a language model.
        input_ids: [B, T] integers, with rows of different length padded on the left; or a list of prompts, each a 1-D
            tensor or a list of ids, which are padded here; or a single prompt.
        max_new_tokens: maximum number of new tokens, at least 1.
        options: see `Options`.

    Returns:
        [B, T + new] int64 on the model's device: the padded prompts and their continuations, up to the step in which
        the last row ended.

    Raises:
        TypeError: an argument is not in `Options`, and no argument of transformers that asks for what happens anyway.
        ValueError: an argument is out of range, a prompt is empty, or the mask has another shape or padding on the
            right.
    """
    settings = resolve(model, max_new_tokens, options)
    ids, mask = batch_prompts(model, input_ids, options.get("attention_mask"), settings)
    return torch.cat([ids, torch.stack(list(_steps(model, ids, mask, settings, select_inputs(model, options))), 1)], 1)


@shows_options
def stream(
    model: Decoder, input_ids: Prompts, *, max_new_tokens: int, **options: "Unpack[Options]"
) -> Iterator[Tensor]:
    """Continue the prompts, yielding the new tokens of each step.

    Args:
        model, input_ids, max_new_tokens, options: as in `generate`. They are checked immediately, not with the first
            token.

    Returns:
        Iterator over the new tokens, [B] int64 per step. The model is in eval mode only while it computes a step.

    Raises:
        TypeError, ValueError: as in `generate`.
    """
    settings = resolve(model, max_new_tokens, options)
    ids, mask = batch_prompts(model, input_ids, options.get("attention_mask"), settings)
    return _steps(model, ids, mask, settings, select_inputs(model, options))


@torch.no_grad()
def _steps(
    model: Decoder, prompts: Tensor, mask: Tensor | None, settings: Settings, inputs: dict[str, Any]
) -> Iterator[Tensor]:
    """The new tokens of each step, [B] int64, until every row has ended.

    Args:
        prompts: [B, T] int64.
        mask: [B, T] int64, 0 for padding; None for no padding.
        inputs: inputs of the model that belong to the prompts besides their tokens.
    """
    B, T = prompts.shape
    S = T + settings.max_new_tokens
    ids = nn.functional.pad(prompts, (0, settings.max_new_tokens))  # [B, S], filled step by step
    positions = model.prompt_positions(prompts, mask, settings.max_new_tokens, inputs)
    if mask is not None:
        mask = nn.functional.pad(mask, (0, settings.max_new_tokens), value=1)
    # Columns at which all rotary frequencies change (longrope). Keys cached before that are rotated by the old ones, so
    # the cache is recomputed there.
    lengths = [rotary.switch_length for rotary in layers_of(model.rotary)]
    furthest = positions.flatten(0, -2).amax(0)
    switches = [int((furthest < length).sum()) for length in lengths if length is not None]
    seen = None
    if settings.repetition_penalty != 1:
        tokens = prompts if mask is None else torch.where(mask[:, :T] != 0, prompts, prompts[:, -1:])
        known = model.embed_tokens.num_embeddings
        seen = torch.zeros(B, known, dtype=torch.bool, device=ids.device).scatter_(1, tokens, True)
        seen = seen[:, : model.config.vocab_size]
    stops = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=ids.device)
    ended = torch.zeros(B, dtype=torch.bool, device=ids.device)
    cache = DecodeCache(S - 1) if settings.use_cache else None  # the last token is never cached
    modules = list(model.modules())

    for end in range(T, S):
        if cache is not None and any(cache.length <= switch < end for switch in switches):
            cache.length = 0
        new = slice(cache.length if cache is not None else 0, end)
        with _evaluating(modules):
            logits = model(
                ids[:, new],
                position_ids=positions[..., new],
                attention_mask=None if mask is None else mask[:, :end],
                logits_to_keep=1,
                cache=cache,
                **(inputs if new.start == 0 else {}),
            ).logits
        tokens = choose(logits[:, -1].float(), seen, settings)
        if len(stops):
            tokens = tokens.masked_fill(ended, settings.pad_token_id or 0)
            ended |= torch.isin(tokens, stops)
        ids[:, end] = tokens
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        yield tokens
        if len(stops) and bool(ended.all()):
            return


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and restore the mode of each afterwards."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
