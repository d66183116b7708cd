"""Rollouts: continuation of thousands of prompts of unequal length. Waiting rows take the place of rows that end.

`rollout` checks its arguments (`rollout_checks.py`), creates one row per continuation and a paged cache for all rows,
and passes the rows and the cache to the scheduler (`scheduler.py`), which runs the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.distributed.collectives import all_gather
from liger_models.generation.draft_rounds import with_layers_of
from liger_models.generation.eval_mode import evaluating, resharded
from liger_models.generation.float8_weights import float8_weights
from liger_models.generation.graphs import rounded_tokens
from liger_models.generation.lockstep import in_lockstep
from liger_models.generation.model_state import state_of
from liger_models.generation.options import DRAWING, UNFILTERED, Options, Settings, resolve
from liger_models.generation.rollout_checks import (
    cache_of_one_token,
    check_cached,
    check_features,
    check_options,
    check_prompts,
    one_per_prompt,
)
from liger_models.generation.rollout_rows import Completion, Row
from liger_models.generation.rows import Step
from liger_models.generation.scheduler import Scheduler, least_shared
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE as FLOAT8
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.layers import paged_cache
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.page_pool import PagePool

if TYPE_CHECKING:
    from typing_extensions import Unpack

FREE_SHARE = 0.5
"""Default upper bound for the size of the cache, as a fraction of an accelerator's free memory."""
CHUNK_SIZE, ROUNDS_PER_READ = 8192, 4
"""`drafted_steps` uses these values for ``chunk_size`` and ``steps_per_read``, two arguments of `rollout`."""
HOST_BYTES = 2**31
"""Default upper bound for the size of the cache, in bytes, on devices whose free memory is unknown."""


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
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    record_routing: bool = False,
    deterministic: bool = False,
    **options: "Unpack[Options]",
) -> list[Completion]:
    """Continue many prompts of unequal length, as reinforcement learning does between training steps.

    Up to rounding, every row gets the tokens and log-probabilities that `generate` would compute for the row's prompt
    alone. The rollout runs the model itself, in eval mode, and frees the cache at the end. Unless ``weight_dtype`` is
    given, it makes no copy of the weights.

    Args:
        model: a language model. States of linear attention need memory in addition to ``cache_bytes``. Under
            `apply_fsdp`, every rank passes its own prompts. Under `apply_tp`, all ranks of a group must pass the same
            prompts and have the same ``seed`` or random state, and sequence parallelism is not supported.
        prompts: prompts without padding, each a 1-D tensor of integers or a list of ids; or a tensor [B, T].
        max_new_tokens: maximum number of new tokens: one integer for all prompts, or one for each prompt.
        stop_tokens: for each prompt, the tokens that end its rows. Default: ``eos_token_id`` for all prompts.
        batch_size: maximum number of rows that run at the same time.
        chunk_size: maximum number of prompt tokens in a forward, which bounds the memory of activations.
        steps_per_read: number of steps after which the host reads the new tokens. A row that ends earlier is idle
            until then.
        cache_bytes: maximum size of keys and values in bytes. When pages run out, the rows that started last return
            to the queue and are computed again later. Default: enough for ``batch_size`` rows of maximum length, but
            at most half of the free memory (on the CPU, at most 2 GiB).
        weight_dtype: "float8" to multiply by float8 copies of the weights of the blocks' projections, into which LoRA
            adapters are merged. The copies take one byte per element until the rollout ends. The copies and the inputs
            of their products have one scale per row. Routed experts, the embedding, the head, and projections whose
            sizes are not multiples of 16 are not rounded. The model must be in bfloat16. Default: the weights
            themselves.
        cache_dtype: "float8" to store keys and values in float8, each token and head with a scale, which takes about
            half the memory of 16 bits. Decoding steps, which read fewer bytes, are then faster, but the tokens and
            log-probabilities are those of rounded keys and values. Default: the dtype in which the layers compute.
        record_routing: whether to return the experts of each token in each layer with routed experts. Pass them to
            the training forward as ``routed_experts``. A row that is computed again uses the same experts.
        deterministic: whether to compute every row as if it were alone. The row's log-probabilities, and with
            ``seed`` its tokens, then do not depend on other rows. The log-probabilities are bitwise identical to the
            log-probabilities of a forward in `deterministic_forward`.
        options: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``epsilon_cutoff``,
            ``eta_cutoff``, ``eos_token_id``, ``num_return_sequences``, ``seed`` and ``generator`` of `Options`. With
            ``num_return_sequences``, a prompt is computed once and its rows share the prompt's pages; only recurrent
            states are computed again for rows that start later. With ``seed``, the random draws of a row depend only
            on the row's seed and tokens. ``draft_model`` may be the model's `LigerMTP`, which drafts
            ``num_draft_tokens`` tokens at a time. Greedy tokens, and tokens that are sampled with ``seed``, are the
            same with and without drafts. Tokens that are sampled without ``seed`` have the same distribution with and
            without drafts.

    Returns:
        The completed rows in the order of the prompts, with ``num_return_sequences`` consecutive rows for each prompt.

    Raises:
        TypeError: an argument is not in `Options`.
        ValueError: a prompt is empty; an argument is out of range; a row does not fit into ``cache_bytes``; an option
            depends on earlier tokens of a row (``repetition_penalty`` and others); or the model is compiled, is
            distributed in ways other than `apply_fsdp` and `apply_tp`, or has positions that depend on the length of
            the longest row. If an option or the model is the reason, use `generate`. ``record_routing`` needs blocks
            with routed experts that can be replayed. ``deterministic`` needs a model that `deterministic_forward`
            accepts. ``weight_dtype`` and ``cache_dtype`` need a CPU, or an NVIDIA GPU with compute capability 8.9 or
            higher, and can't be combined with ``deterministic``. ``weight_dtype`` also needs a model in bfloat16 that
            is not distributed, whose adapters are LoRA without DoRA. ``cache_dtype`` needs layers that do not cache
            latents.
    """
    sizes = {"batch_size": batch_size, "chunk_size": chunk_size, "steps_per_read": steps_per_read}
    for name, value in sizes.items():
        if not isinstance(value, int):
            raise ValueError(f"rollout: {name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"rollout: {name} must be at least 1, got {value}.")

    # The prompts, and the options of `generate`.
    tokens = check_prompts(model, prompts)
    limits = one_per_prompt("max_new_tokens", max_new_tokens, len(tokens))
    if min(limits) < 1:
        raise ValueError(f"rollout: max_new_tokens must be at least 1, got {min(limits)}.")
    settings = resolve(model, max(limits), options)
    check_options(model, settings, options)
    check_features(
        model, record_routing=record_routing, deterministic=deterministic, weight_dtype=weight_dtype,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    rows = _make_rows(tokens, limits, stop_tokens, settings)

    # Run one token to see what the layers cache. The result may differ between training mode and eval mode.
    derived, draft = DerivedTensors(), settings.draft_model
    modules = list((model if draft is None else draft).modules())
    with derived.used(), batch_invariant(deterministic), evaluating(modules):
        probe = cache_of_one_token(model, max(row.end for row in rows), tokens[0])
        if isinstance(probe, str):
            raise ValueError(f"rollout: {probe}. Use generate.")
        if draft is not None:
            probe = with_layers_of(draft, probe, tokens[0])
    check_cached(model, probe, cache_dtype)

    invariant = batch_invariant() if deterministic else nullcontext()
    with resharded(model), evaluating(modules):
        state = state_of(model) if weight_dtype is None else state_of(model).variant(weight_dtype)
        copies: Any = nullcontext()
        if weight_dtype is not None:
            # The adapters are in the copies. They are read outside of `used`, so that nothing of them is kept.
            copies, derived = float8_weights(model), DerivedTensors()
        with copies, derived.used(), invariant, in_lockstep(model):
            # Neither rounds with drafts nor deterministic attention read the pages of a group at once.
            groups = draft is None and not deterministic
            pool = _make_pool(
                probe, rows, min(batch_size, len(rows)), cache_bytes, model, _overhang(settings), groups,
                None if cache_dtype is None else FLOAT8,
            )  # fmt: skip
            return Scheduler(
                model, rows, pool, settings, chunk_size, steps_per_read, record_routing, deterministic, draft, state
            ).run()


@torch.no_grad()
def drafted_steps(
    model: Decoder,
    prompts: Tensor,
    mask: Tensor | None,
    settings: Settings,
    inputs: dict[str, Any],
    *,
    logprobs: bool = False,
) -> Iterator[Step]:
    """Yield the new tokens of each step until every row has ended, using a block's drafts as `rollout` does.

    Args:
        model: the model.
        prompts: [B, T] int64.
        mask: [B, T], which is 0 for padding; None for no padding.
        settings: the options. ``settings.draft_model`` is a `DraftBlock`.
        inputs: inputs of the model that belong to the prompts, in addition to the tokens.
        logprobs: whether the steps include log-probabilities.

    Raises:
        ValueError: `rollout` does not support the model, or an option.
    """
    # Refuse options that depend on earlier tokens of a row, and inputs besides the tokens.
    refused = [name for name, neutral in UNFILTERED.items() if name not in DRAWING and _is_set(settings, name, neutral)]
    refused += ["logits_processor"] * bool(settings.logits_processor) + sorted(inputs)
    if refused:
        raise ValueError(
            f"generate: with LigerMTP as draft_model, {', '.join(refused)} must be omitted, got a value from the call "
            "or from generation_config.json. Omit draft_model, or these options."
        )

    # Make a row for each continuation, and a cache for all rows.
    mask = torch.ones_like(prompts) if mask is None else mask
    tokens = [prompt[is_token != 0].tolist() for prompt, is_token in zip(prompts.cpu(), mask.cpu(), strict=True)]
    rows = _make_rows(tokens, [settings.max_new_tokens] * len(tokens), None, settings)
    draft, derived = settings.draft_model, DerivedTensors()
    modules = list(draft.modules())
    with derived.used(), evaluating(modules):
        probe = cache_of_one_token(model, max(row.end for row in rows), tokens[0])
        if isinstance(probe, str):
            raise ValueError(f"generate: with LigerMTP as draft_model, {probe}. Omit draft_model.")
        probe = with_layers_of(draft, probe, tokens[0])
    pool = _make_pool(probe, rows, len(rows), None, model, _overhang(settings), groups=False)
    scheduler = Scheduler(model, rows, pool, settings, CHUNK_SIZE, ROUNDS_PER_READ, draft=draft)

    # A round adds different numbers of tokens to the rows. Yield the columns that all running rows have. Rows that
    # have ended are padded.
    num_yielded, is_running, padding = 0, True, settings.pad_token_id or 0
    while is_running:
        with evaluating(modules), derived.used():
            is_running = scheduler.advance()
        completions = scheduler.completions
        lengths = [_num_new(row) for row in rows]
        running = [length for length, completion in zip(lengths, completions, strict=True) if completion is None]
        for column in range(num_yielded, min(running, default=max(lengths))):
            new, ended, log_probs = _column(rows, completions, column, padding)
            values = torch.tensor(log_probs, dtype=torch.float32, device=model.device) if logprobs else None
            yield Step(torch.tensor(new, device=model.device), torch.tensor(ended, device=model.device), values)
            num_yielded = column + 1


def _is_set(settings: Settings, name: str, neutral: Any) -> bool:
    value = getattr(settings, name)
    return bool(value) and value != neutral


def _overhang(settings: Settings) -> int:
    """Return the number of positions after a row's last token that a round of speculative decoding may write to."""
    return 0 if settings.draft_model is None else 1 + settings.num_draft_tokens


def _make_rows(prompts: list[list[int]], limits: list[int], stop_tokens: Any, settings: Settings) -> list[Row]:
    """Create one row per continuation, with ``num_return_sequences`` consecutive rows for each prompt.

    Args:
        prompts: the ids of each prompt.
        limits: the maximum number of new tokens of each prompt.
        stop_tokens: the stop tokens of each prompt; None for the stop tokens in the settings.
        settings: the options.
    """
    stops: list[Any] = [settings.eos_token_id] * len(prompts)
    if stop_tokens is not None:
        stops = [ids.tolist() if isinstance(ids, Tensor) else ids for ids in stop_tokens]
        if not all(isinstance(ids, Sequence) and all(isinstance(token, Integral) for token in ids) for ids in stops):
            raise ValueError(f"rollout: stop_tokens must be a list of integers for each prompt, got {stop_tokens!r}.")
    if len(stops) != len(prompts):
        raise ValueError(
            f"rollout: stop_tokens must be a list for each of the {len(prompts)} prompts, got {len(stops)}."
        )
    repeats = settings.num_return_sequences
    count = len(prompts) * repeats
    seeds = settings.seed if isinstance(settings.seed, list) else [(settings.seed or 0) + row for row in range(count)]
    if len(seeds) != count:
        raise ValueError(f"rollout: seed must be one integer, or one for each of {count} rows, got {len(seeds)}.")

    rows = []
    for number, seed in enumerate(seeds):
        prompt = number // repeats
        begin = len(prompts[prompt])
        rows.append(Row(number, prompt, [*prompts[prompt]], begin, begin + limits[prompt], [*stops[prompt]], seed))
    return rows


def _make_pool(
    probe: DecodeCache, rows: list[Row], num_rows: int, cache_bytes: int | None, model: Decoder, overhang: int,
    groups: bool, cache_dtype: torch.dtype | None = None,
) -> PagePool:  # fmt: skip
    """Create a cache for ``num_rows`` running rows, with the same kinds of layers as the cache ``probe``.

    The page table has entries for ``overhang`` positions after the last token of a row, but these positions need no
    pages. ``groups`` says whether steps can read shared pages once for several rows. ``cache_dtype`` is an argument of
    `PagePool`.
    """
    device, group = model.device, model.groups.tensor
    if cache_bytes is None:
        free = free_memory(device)
        cache_bytes = HOST_BYTES if free is None else int(FREE_SHARE * free)
        if group is not None:  # all ranks must schedule the same rows
            cache_bytes = int(all_gather(torch.tensor(cache_bytes, device=device), group).min())

    # Compute the number of pages that the longest row needs. Its last token is never cached, and page 0 belongs to no
    # row.
    longest = max(rows, key=lambda row: row.end)
    token_bytes = (_token_bytes(x, cache_dtype) for layer in probe._layers.values() for x in layer)
    page_bytes = sum(token_bytes) * paged_cache.PAGE
    needed = -(-(longest.end - 1) // paged_cache.PAGE)
    pages = min(cache_bytes // page_bytes, num_rows * needed + 1)
    if pages <= needed:
        raise ValueError(
            f"rollout: cache_bytes must be at least {(needed + 1) * page_bytes} for prompt {longest.prompt}, which may "
            f"have {longest.end} tokens, got {cache_bytes}. Raise it, or lower max_new_tokens."
        )
    # The length is rounded so that the steps of many rollouts have the same shapes; see `ModelState.is_ready`.
    # Rows with the same prompt share the pages that the prompt fills.
    repeats = len({row.prompt for row in rows}) < len(rows)
    groups = groups and repeats and any(row.begin > least_shared(cache_dtype) for row in rows)
    capacity = rounded_tokens(longest.end - 1 + overhang)
    return PagePool(num_rows, capacity, device, pages=pages, like=probe, groups=groups, cache_dtype=cache_dtype)


def _token_bytes(x: Tensor, cache_dtype: torch.dtype | None) -> int:
    """Return the number of bytes that a `PagePool` takes for the keys or the values of a token, [1, 1, G, D]."""
    if cache_dtype is None:
        return x.nbytes
    return x.numel() * cache_dtype.itemsize + x.shape[2] * torch.float32.itemsize  # codes and scales


def free_memory(device: torch.device) -> int | None:
    """Return the number of bytes that can still be allocated on an accelerator; None for other devices."""
    if device.type not in ACCELERATORS:
        return None
    backend = getattr(torch, device.type)
    # Memory that PyTorch has reserved but not allocated can be allocated, too.
    unused: int = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + unused


def _num_new(row: Row) -> int:
    return len(row.tokens) - row.begin


def _column(
    rows: Sequence[Row], completions: Sequence[Completion | None], column: int, padding: int
) -> tuple[list[int], list[bool], list[float]]:
    """Return three lists with an entry for each row: the row's new token number ``column``, whether a stop token has
    ended the row by then, and the token's log-probability.

    If the row has no such token, the entries are ``padding`` and 0.
    """
    tokens, ended, log_probs = [], [], []
    for row, completion in zip(rows, completions, strict=True):
        has_token = column < _num_new(row)
        tokens.append(row.tokens[row.begin + column] if has_token else padding)
        ended.append(completion is not None and completion.reason == "stop" and column >= _num_new(row) - 1)
        log_probs.append(row.log_probs[column] if has_token else 0.0)
    return tokens, ended, log_probs
