"""Rollouts: continuations of thousands of unequal prompts, in which a waiting prompt replaces an ended row."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.distributed.collectives import all_gather
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.deterministic import refusal as deterministic_refusal
from liger_models.generation.eval_mode import evaluating, resharded
from liger_models.generation.lockstep import in_lockstep
from liger_models.generation.options import DRAWING, UNFILTERED, Options, Settings, resolve, select_inputs
from liger_models.generation.scheduler import Completion, Row, Scheduler
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.layers import paged_cache
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.page_pool import PagePool
from liger_models.layers.recompute import is_compiled
from liger_models.layers.rope import DynamicScaling

if TYPE_CHECKING:
    from typing_extensions import Unpack

FREE_SHARE = 0.5
"""Largest share of an accelerator's free memory that the cache takes by default."""
HOST_BYTES = 2**31
"""Largest size of the cache by default where the free memory is unknown."""


@torch.no_grad()
def rollout(
    model: Decoder,
    prompts: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_tokens: Sequence[Sequence[int]] | None = None,
    batch_size: int = 256,
    chunk_size: int = 8192,
    steps_per_read: int = 16,
    cache_bytes: int | None = None,
    record_routing: bool = False,
    deterministic: bool = False,
    **options: "Unpack[Options]",
) -> list[Completion]:
    """Continue many prompts of unequal length, as reinforcement learning does between training steps.

    Every row gets the tokens and log-probabilities that `generate` computes for its prompt alone, up to rounding. The
    rollout uses the model's own weights, with the model in eval mode, and keeps no memory afterwards.

    Args:
        model: a language model. States of linear attention need memory in addition to ``cache_bytes``. Under
            `apply_fsdp` every rank passes prompts of its own. Under `apply_tp`, which must not use sequence
            parallelism, all ranks of a group pass the same prompts and the same ``seed`` or random state.
        prompts: prompts without padding, each a 1-D tensor of integers or a list of ids; or [B, T].
        max_new_tokens: maximum number of new tokens, for all prompts or for each.
        stop_tokens: for each prompt, the tokens that end its rows. Default: ``eos_token_id`` for all prompts.
        batch_size: maximum number of rows that run at the same time.
        chunk_size: maximum number of prompt tokens in a forward. It bounds the memory of activations.
        steps_per_read: number of steps after which the host reads the new tokens. A row that ends earlier does nothing
            until then.
        cache_bytes: maximum number of bytes of keys and values. When pages run out, the rows that started last return
            to the queue and are computed again later. Default: enough for ``batch_size`` rows of the greatest length,
            but at most half of the free memory (on the CPU at most 2 GiB).
        record_routing: return the experts of each token in each layer with routed experts, to pass as
            ``routed_experts`` to the forward that trains. A row that is computed again uses the same experts.
        deterministic: compute every row as if it were alone. Its log-probabilities, and with ``seed`` its tokens, then
            do not depend on other rows, and equal those of a forward in `deterministic_forward` bit for bit.
        options: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
            ``epsilon_cutoff``, ``eta_cutoff``, ``eos_token_id``, ``num_return_sequences``, ``seed`` and ``generator``
            of `Options`. With ``num_return_sequences`` rows share the pages of their prompt, which is computed once.
            Only recurrent states are computed again for rows that start later. With ``seed`` a row's draws depend on
            nothing else.

    Returns:
        The rows in the order of the prompts, ``num_return_sequences`` consecutive rows for each prompt.

    Raises:
        TypeError: an argument is not in `Options`.
        ValueError: a prompt is empty, an argument is out of range, an option depends on earlier tokens of a row
            (``repetition_penalty`` and others), a row does not fit into ``cache_bytes``, or the model is compiled, is
            distributed in other ways, or has positions that depend on the length of the longest row. Use `generate`
            then. ``record_routing`` needs routed experts in blocks that replay them. ``deterministic`` needs a model
            that `deterministic_forward` accepts.
    """
    # The prompts and the limits.
    tokens = _checked_prompts(model, prompts)
    limits = _one_per_prompt("max_new_tokens", max_new_tokens, len(tokens))
    if min(limits) < 1:
        raise ValueError(f"rollout: max_new_tokens must be at least 1, got {min(limits)}.")
    for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size), ("steps_per_read", steps_per_read)):
        if not isinstance(value, int):
            raise ValueError(f"rollout: {name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"rollout: {name} must be at least 1, got {value}.")

    # The options of `generate`, and stop tokens and seeds of each row.
    settings = resolve(model, max(limits), options)
    _check_options(model, settings, options)
    stops = [settings.eos_token_id] * len(tokens) if stop_tokens is None else [list(ids) for ids in stop_tokens]
    if len(stops) != len(tokens):
        raise ValueError(
            f"rollout: stop_tokens must be a list for each of the {len(tokens)} prompts, got {len(stops)}."
        )
    repeats = settings.num_return_sequences
    count = len(tokens) * repeats
    seeds = settings.seed if isinstance(settings.seed, list) else [(settings.seed or 0) + row for row in range(count)]
    if len(seeds) != count:
        raise ValueError(f"rollout: seed must be one integer, or one for each of {count} rows, got {len(seeds)}.")

    # What the model can do.
    refused = deterministic_refusal(model) if deterministic else None
    if deterministic and refused is None and is_sharded(model.lm_head.weight):
        refused = f"model must be whole, got a sharded {type(model).__name__}"
    if refused is not None:
        raise ValueError(f"rollout: {refused} with deterministic=True. Leave it out.")
    if record_routing and (not model.routers or not model.replays_routing):
        raise ValueError(
            f"rollout: record_routing needs routed experts in blocks that replay routing, got {type(model).__name__}. "
            "Leave it out."
        )

    # One row for each continuation. A forward of one token shows what the layers cache.
    rows = []
    for number, seed in enumerate(seeds):
        prompt = number // repeats
        begin = len(tokens[prompt])
        rows.append(Row(number, prompt, [*tokens[prompt]], begin, begin + limits[prompt], stops[prompt], seed))
    derived = DerivedTensors()
    with derived.used():
        cache = _cache_of_one_token(model, max(row.end for row in rows), tokens[0])
    if isinstance(cache, str):
        raise ValueError(f"rollout: {cache}. Use generate.")

    invariant = batch_invariant() if deterministic else nullcontext()
    with resharded(model), evaluating(list(model.modules())), derived.used(), invariant, in_lockstep(model):
        pool = _make_pool(cache, rows, min(batch_size, count), cache_bytes, model)
        return Scheduler(model, rows, pool, settings, chunk_size, steps_per_read, record_routing, deterministic).run()


def _make_pool(probe: DecodeCache, rows: list[Row], num_rows: int, cache_bytes: int | None, model: Decoder) -> PagePool:
    """A cache for ``num_rows`` rows at the same time, with the same layers as ``probe``, which holds a single token."""
    device, group = model.device, model.groups.tensor
    if cache_bytes is None:
        free = free_memory(device)
        cache_bytes = HOST_BYTES if free is None else int(FREE_SHARE * free)
        if group is not None:  # all ranks must schedule alike
            cache_bytes = int(all_gather(torch.tensor(cache_bytes, device=device), group).min())

    # The pages that the longest row needs by itself. Its last token is never cached, and page 0 belongs to no row.
    longest = max(rows, key=lambda row: row.end)
    page_bytes = sum(state.nbytes for layer in probe._layers.values() for state in layer) * paged_cache.PAGE
    needed = -(-(longest.end - 1) // paged_cache.PAGE)
    pages = min(cache_bytes // page_bytes, num_rows * needed + 1)
    if pages <= needed:
        raise ValueError(
            f"rollout: cache_bytes must be at least {(needed + 1) * page_bytes} for prompt {longest.prompt}, which may "
            f"have {longest.end} tokens, got {cache_bytes}. Raise it, or lower max_new_tokens."
        )
    return PagePool(num_rows, longest.end - 1, device, pages=pages, like=probe)


def free_memory(device: torch.device) -> int | None:
    """Number of bytes that can still be allocated on an accelerator; None for other devices."""
    if device.type not in ACCELERATORS:
        return None
    backend = getattr(torch, device.type)
    # Memory that PyTorch has reserved but not allocated is free, too.
    unused: int = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + unused


def _checked_prompts(model: Decoder, prompts: Any) -> list[list[int]]:
    """The prompts as lists of ids."""
    if not isinstance(prompts, Iterable):
        raise ValueError(f"rollout: prompts must be a list of prompts, got {type(prompts).__name__}.")
    tensors = [torch.as_tensor(prompt) for prompt in prompts]
    shapes = [list(prompt.shape) for prompt in tensors if prompt.dim() != 1 or not len(prompt)]
    if not tensors or shapes:
        raise ValueError(
            f"rollout: prompts must be a list of prompts with at least one token each, got shapes {shapes[:5]}."
        )

    # Integers, and ids that the model has.
    vocab = model.embed_tokens.num_embeddings
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


def _one_per_prompt(name: str, value: int | Sequence[int], count: int) -> list[int]:
    numbers: Any = value.tolist() if hasattr(value, "tolist") else value
    values = list(numbers) if isinstance(numbers, Iterable) else [numbers] * count
    if not all(isinstance(number, Integral) for number in values):
        raise ValueError(f"rollout: {name} must be integers, got {value!r}.")
    if len(values) != count:
        raise ValueError(
            f"rollout: {name} must be one number, or one for each of the {count} prompts, got {len(values)}."
        )
    return values


def _check_options(model: Decoder, settings: Settings, options: Options) -> None:
    """Raise ValueError for options of `generate` that `rollout` does not support."""
    for name, neutral in UNFILTERED.items():
        value = getattr(settings, name)
        if name not in DRAWING and value and value != neutral:
            raise ValueError(
                f"rollout: {name} must be {neutral}, got another from the call or from generation_config.json. Pass "
                f"{name}={neutral}, or use generate."
            )
    unsupported = ["attention_mask", "logits_processor", "cache", "draft_model", *select_inputs(model, options)]
    passed = [name for name in unsupported if options.get(name) is not None]
    if passed:
        raise ValueError(f"rollout: {', '.join(passed)} must be omitted, got a value. Use generate.")
    if not settings.use_cache:
        raise ValueError("rollout: use_cache must not be False. Use generate.")


def refusal(model: Decoder, tokens: int, prompt: Sequence[int]) -> str | None:
    """The reason why `rollout` refuses this model with rows of ``tokens`` tokens; None if it accepts the model.

    The model runs the first token of a prompt, to see what its layers cache.
    """
    cache = _cache_of_one_token(model, tokens, prompt)
    return cache if isinstance(cache, str) else None


def _cache_of_one_token(model: Decoder, tokens: int, prompt: Sequence[int]) -> DecodeCache | str:
    """A cache with the first token of a prompt, or the reason that `refusal` returns."""
    name, groups = type(model).__name__, model.groups

    # Attention layers must work on pages, and the model must be distributed in a way that rollouts support.
    layers = named_layers(model.layers)
    unpaged = [path for path, layer in layers if layer.attention and not layer.attention.takes_pages]
    if unpaged:
        return f"attention layers must take pages of a cache, got layers.{', layers.'.join(unpaged)} of {name}"
    if any(is_compiled(module) for module in model.modules()):
        return f"model must not be compiled, got a compiled {name}"
    shares_tokens = groups.context or groups.expert or (groups.tensor is not None and groups.tensor.sequence_parallel)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if shares_tokens or (sharded and groups == ParallelGroups()):
        return f"model may be distributed by apply_fsdp and by apply_tp without sequence_parallel, got {name} otherwise"

    # Cached keys must not depend on the length that a row will have.
    for rotary in layers_of(model.rotary):
        limit: Any = rotary.switch_length
        if isinstance(getattr(rotary, "scaling", None), DynamicScaling):
            limit = rotary.max_position_embeddings
        if limit is not None and tokens > limit + 1:  # the last token is never run
            return (
                f"prompt and new tokens must not exceed {limit + 1} tokens, beyond which {name} rotates cached keys by "
                f"other frequencies, got {tokens}"
            )

    # The layers must cache only what a pool of pages can hold: run a token and look.
    cache = DecodeCache(1)
    with torch.no_grad(), evaluating(list(model.modules())):
        model(torch.tensor([prompt[:1]], device=model.device), cache=cache, return_logits=False)
    if cache.extra or not cache._layers:
        return f"layers must cache keys, values and states, got others in {name}"
    return cache
