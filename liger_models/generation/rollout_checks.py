"""Checks of `rollout`'s arguments, and of the features that `rollout` needs from the model.

There are three kinds of arguments: prompts, options, and integers that may differ between prompts (such as
``max_new_tokens``). `refusal` returns the reason why `rollout` does not support a model. Other modules also call
`refusal` to choose between `rollout` and `generate`.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch

from liger_models.common.device import as_tensor
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.deterministic import refusal as deterministic_refusal
from liger_models.generation.draft_rounds import draft_refusal
from liger_models.generation.eval_mode import evaluating
from liger_models.generation.float8_weights import refusal as float8_refusal
from liger_models.generation.model_state import state_of
from liger_models.generation.options import DRAWING, UNFILTERED, Options, Settings, select_inputs
from liger_models.generation.prompts import count_embeddings
from liger_models.kernels.frozen.frozen_float8_linear import converts
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.recompute import is_compiled
from liger_models.layers.rope import DynamicScaling


def check_prompts(model: Decoder, prompts: Any) -> list[list[int]]:
    """Check the prompts, and return them as lists of ids.

    Raises:
        ValueError: a prompt is empty, is not a list of integers, or has an id outside of the vocabulary.
    """
    if not isinstance(prompts, Iterable):
        raise ValueError(f"rollout: prompts must be a list of prompts, got {type(prompts).__name__}.")
    tensors = [as_tensor(prompt) for prompt in prompts]
    shapes = [list(prompt.shape) for prompt in tensors if prompt.dim() != 1 or not len(prompt)]
    if not tensors or shapes:
        raise ValueError(
            f"rollout: prompts must be a list of prompts with at least one token each, got shapes {shapes[:5]}."
        )

    # The prompts must consist of integers, which must be ids that the model has.
    vocab = count_embeddings(model)
    for number, prompt in enumerate(tensors):
        dtype = prompt.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"rollout: prompts must be integers, got {dtype} in prompt {number}.")
    tokens: list[list[int]] = [prompt.tolist() for prompt in tensors]
    low, high = min(map(min, tokens)), max(map(max, tokens))
    if low < 0 or high >= vocab:
        raise ValueError(
            f"rollout: prompts must be in [0, {vocab}), got {low} to {high}. Does the tokenizer belong to the model?"
        )
    return tokens


def one_per_prompt(name: str, value: int | Sequence[int], count: int) -> list[int]:
    """Return one integer for each of ``count`` prompts. ``value`` is either one integer for all prompts or a list."""
    numbers: Any = value.tolist() if hasattr(value, "tolist") else value
    values = list(numbers) if isinstance(numbers, Iterable) else [numbers] * count
    if not all(isinstance(number, Integral) for number in values):
        raise ValueError(f"rollout: {name} must be integers, got {value!r}.")
    if len(values) != count:
        raise ValueError(
            f"rollout: {name} must be one number, or one for each of the {count} prompts, got {len(values)}."
        )
    return values


def check_options(model: Decoder, settings: Settings, options: Options) -> None:
    """Raise ValueError for options of `generate` that `rollout` does not support."""
    for name, neutral in UNFILTERED.items():
        value = getattr(settings, name)
        if name not in DRAWING and value and value != neutral:
            raise ValueError(
                f"rollout: {name} must be {neutral}, got another from the call or from generation_config.json. Pass "
                f"{name}={neutral}, or use generate."
            )
    unsupported = ["attention_mask", "logits_processor", "cache", *select_inputs(model, options)]
    passed = [name for name in unsupported if options.get(name) is not None]
    if passed:
        raise ValueError(f"rollout: {', '.join(passed)} must be omitted, got a value. Use generate.")
    refused = None if settings.draft_model is None else draft_refusal(model, settings.draft_model)
    if refused is not None:
        raise ValueError(f"rollout: {refused}. Leave draft_model out, or use generate.")
    if not settings.use_cache:
        raise ValueError("rollout: use_cache must not be False. Use generate.")


def refusal(model: Decoder, tokens: int, prompt: Sequence[int]) -> str | None:
    """Return the reason why `rollout` does not support this model with rows of ``tokens`` tokens; None if it does.

    To find out what the model's layers cache, this function runs the model on the first token of ``prompt``.
    """
    cache = cache_of_one_token(model, tokens, prompt)
    return cache if isinstance(cache, str) else None


def cache_of_one_token(model: Decoder, tokens: int, prompt: Sequence[int]) -> DecodeCache | str:
    """Return a decode cache that is filled with the first token of ``prompt``, on the meta device.

    If `rollout` does not support the model, return the reason instead, as `refusal` does.
    """
    name, groups = type(model).__name__, model.groups

    # Attention layers must support pages, and rollouts must support the way in which the model is distributed.
    layers = named_layers(model.layers)
    unpaged = [path for path, layer in layers if layer.attention and not layer.attention.takes_pages]
    if unpaged:
        return f"attention layers must take pages of a cache, got layers.{', layers.'.join(unpaged)} of {name}"
    if not model.prompts_are_causal:
        return f"prompts must be causal, got {name}, in whose prompts each token attends to all others"
    if any(is_compiled(module) for module in model.modules()):
        return f"model must not be compiled, got a compiled {name}"
    shares_tokens = groups.context or groups.expert or (groups.tensor is not None and groups.tensor.sequence_parallel)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if shares_tokens or (sharded and groups == ParallelGroups()):
        return f"model may be distributed by apply_fsdp and by apply_tp without sequence_parallel, got {name} otherwise"

    # Cached keys must not depend on the final length of a row.
    for rotary in layers_of(model.rotary):
        limit: Any = rotary.switch_length
        if isinstance(getattr(rotary, "scaling", None), DynamicScaling):
            limit = rotary.max_position_embeddings
        if limit is not None and tokens > limit + 1:  # the model never runs on the last token
            return (
                f"prompt and new tokens must not exceed {limit + 1} tokens, beyond which {name} rotates cached keys by "
                f"other frequencies, got {tokens}"
            )

    # The layers must cache only what a pool of pages can hold. To find out what they cache, run one token. The result
    # is kept for later calls, except under autocast, which changes dtypes, and if the model is distributed, because
    # all ranks must run the same forwards.
    with torch.no_grad(), evaluating(list(model.modules())):
        state = state_of(model)
        is_stored = not (state.is_distributed or torch.is_autocast_enabled(model.device.type))
        cache = state.cached if is_stored else None
        if cache is None:
            filled = DecodeCache(1)
            model(torch.tensor([prompt[:1]], device=model.device), cache=filled, return_logits=False)
            cache = filled.on_meta()
            if is_stored:
                state.cached = cache
    if cache.extra:
        return f"layers must cache only keys, values and states, got other tensors in {name}"
    if not cache._layers:
        return f"some layer must cache keys and values, got none in {name}"
    return cache


def check_features(
    model: Decoder, *, record_routing: bool, deterministic: bool, weight_dtype: str | None, cache_dtype: str | None
) -> None:
    """Raise ValueError if the model or its device does not support ``record_routing``, ``deterministic``,
    ``weight_dtype`` or ``cache_dtype``."""
    refused = deterministic_refusal(model) if deterministic else None
    if deterministic and refused is None and is_sharded(model.lm_head.weight):
        refused = f"model must be whole, got a sharded {type(model).__name__}"
    if refused is not None:
        raise ValueError(f"rollout: {refused} with deterministic=True. Leave it out.")
    for name, dtype in (("weight_dtype", weight_dtype), ("cache_dtype", cache_dtype)):
        if dtype not in (None, "float8"):
            raise ValueError(f'rollout: {name} must be None or "float8", got {dtype!r}.')
        if dtype is not None and deterministic:
            raise ValueError(
                f"rollout: {name} must be None with deterministic=True, got {dtype!r}, which rounds numbers that the "
                "training forward does not round. Leave one of them out."
            )
    refused = None if weight_dtype is None else float8_refusal(model)
    if refused is not None:
        raise ValueError(f"rollout: {refused}, with weight_dtype={weight_dtype!r}. Leave it out.")
    if cache_dtype is not None and not converts(model.device):
        raise ValueError(
            "rollout: model must be on a CPU or on an NVIDIA GPU with compute capability 8.9 or higher, got "
            f"{model.device}, with cache_dtype={cache_dtype!r}. Leave it out."
        )
    if record_routing and (not model.routers or not model.replays_routing):
        raise ValueError(
            f"rollout: record_routing needs routed experts in blocks that replay routing, got {type(model).__name__}. "
            "Leave it out."
        )


def check_cached(model: Decoder, cache: DecodeCache, cache_dtype: str | None) -> None:
    """Raise ValueError if ``cache_dtype`` is given, but pages in float8 can't hold what the layers have cached."""
    widths = sorted({values.shape[3] for _, values in cache._layers.values()})
    if cache_dtype is not None and not all(width > 0 and width % 2 == 0 for width in widths):
        raise ValueError(
            "rollout: layers must cache values with an even number of columns, and no latents, got values of "
            f"{' and '.join(map(str, widths))} columns in {type(model).__name__}, with cache_dtype={cache_dtype!r}. "
            "Leave it out."
        )
