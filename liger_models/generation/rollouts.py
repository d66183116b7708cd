"""Continuing thousands of prompts of unequal length: rows that end make room for waiting prompts at once.

The scheduler alternates between two kinds of work. A prefill is one forward of tokens of prompts: several whole prompts
as packed documents, or a chunk of a long one. Then all rows that have their prompts run some steps, each of which gives
every row one token. In a step all numbers are on the device, so it is captured as one CUDA graph where `generate`
would do so, too. The host reads tokens and log-probabilities after several steps, and cuts off what follows a stop
token. The last token of a prompt is left to the first step, so that every new token comes from a step.

A prefill waits until there are enough new prompts for it, because the host needs as long to launch a small one as a
large one. When no rows wait any more, steps get fewer rows as rows end, if enough steps are left to pay for a capture.

Rows that may get the most new tokens start first, so that few rows are left to run alone at the end, and equal ones in
the order of their prompts. Only the rows that have started last are put back into the queue when pages run out. So all
running rows come before all waiting ones, the first row can always go on, and all rows end.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.distributed.collectives import all_gather
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.deterministic import head_outputs
from liger_models.generation.deterministic import refusal as deterministic_refusal
from liger_models.generation.eval_mode import evaluating, resharded
from liger_models.generation.graphs import DecodeStep, can_capture
from liger_models.generation.lockstep import in_lockstep
from liger_models.generation.options import DRAWING, UNFILTERED, Options, Settings, resolve, select_inputs
from liger_models.generation.rows import log_probs_of
from liger_models.generation.sampling import Sampler
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.layers import paged_cache
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.masks import MOST_DOCUMENTS
from liger_models.layers.page_pool import PagePool
from liger_models.layers.recompute import is_compiled
from liger_models.layers.rope import DynamicScaling

if TYPE_CHECKING:
    from typing_extensions import Unpack

FREE_SHARE = 0.5
"""Part of the free memory of an accelerator that the cache takes by default, if it needs so much."""

IDLE_SHARE = 1 / 32
"""Part of the running rows that may wait for their prompts while these are not enough tokens for a whole prefill. The
host needs about 35 ms to launch one of Llama 3.2 3B, in which an H200 computes 3,000 tokens."""

CAPTURE_ROWS = 2**14
"""Steps are captured anew with fewer rows if otherwise places would stay empty so often until the end. For Llama 3.2 3B
on an H200, a capture takes about as long as 150 steps save that have 128 rows less, or 300 that have 64 less."""

HOST_BYTES = 2**31
"""Size of the cache by default, if it needs so much, where the free memory is not known."""


class Completion(NamedTuple):
    """A row that `rollout` has continued.

    Attributes:
        tokens: [n] int64 on the CPU, the new tokens; a stop token is the last of them.
        log_probs: [n] fp32 on the CPU, log-probability of each by the model's own distribution, before temperature and
            all other options.
        reason: "stop", or "length" for a row that ``max_new_tokens`` ended.
        routed_experts: [prompt + n, L, K] int16 on the CPU with ``record_routing``, the K experts of each token of
            prompt and answer in each of the L layers with routed experts; −1 for the last token, which is never run.
    """

    tokens: Tensor
    log_probs: Tensor
    reason: str
    routed_experts: Tensor | None = None


@dataclass(eq=False)
class Row:
    """A row, as the host knows it.

    Attributes:
        number: its place in the result.
        prompt: number of its prompt.
        tokens: the prompt and the new tokens.
        begin: length of the prompt.
        end: number of tokens at which it ends.
        stops: tokens that end it.
        seed: of its draws.
        log_probs: of the new tokens.
        experts: of the tokens that have been run, one after the other, if they are recorded.
        slot: its place in a step; −1 while it waits.
        pages: the pages that it holds.
        cached: number of its tokens that the pages hold.
        source: a running row of the same prompt, whose pages this one will use as soon as they are filled.
    """

    number: int
    prompt: int
    tokens: list[int]
    begin: int
    end: int
    stops: list[int]
    seed: int
    log_probs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    source: "Row | None" = None

    @property
    def is_ready(self) -> bool:
        """Whether the next forward of the row is a step: all of its tokens but the last are cached."""
        return self.source is None and self.cached == len(self.tokens) - 1

    @property
    def num_recorded(self) -> int:
        """Number of tokens whose experts are recorded. Those of a row that was put back stay, so it is at least
        ``cached``."""
        return sum(map(len, self.experts))


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
    """Continue many prompts of unequal length, as between the steps of training by reinforcement learning.

    The tokens and log-probabilities of a row are those that `generate` finds for its prompt alone, up to rounding,
    whatever else runs. The weights are those of the model, which is in eval mode meanwhile, and no memory is kept.

    Args:
        model: a language model. States of linear attention need memory besides ``cache_bytes``. Under `apply_fsdp`
            every rank passes prompts of its own; under `apply_tp`, without sequence parallelism, all ranks of a group
            pass the same prompts, and the same ``seed`` or random numbers.
        prompts: prompts without padding, each a 1-D tensor of integers or a list of ids; or [B, T].
        max_new_tokens: maximum number of new tokens, or one for each prompt.
        stop_tokens: the tokens that end a row, for each prompt. Default: ``eos_token_id`` for all.
        batch_size: maximum number of rows that run at the same time.
        chunk_size: maximum number of prompt tokens of a forward, which bounds the memory of their activations.
        steps_per_read: number of steps after which the host reads the new tokens. A row that has ended is idle for the
            rest of them.
        cache_bytes: maximum number of bytes of keys and values. When a running row finds no page, the last rows that
            were started are put back and later computed again. Default: what ``batch_size`` of the longest rows need,
            but at most half of the free memory (on the CPU at most 2 GiB).
        record_routing: return the experts that each token passed, in each layer with routed experts, for
            ``routed_experts`` of the forward that trains. A row that is computed again passes the same.
        deterministic: compute every row as if it were alone. Its log-probabilities, and with ``seed`` its tokens, are
            then the same bits whatever else runs, and those of a forward in `deterministic_forward`.
        options: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
            ``epsilon_cutoff``, ``eta_cutoff``, ``eos_token_id``, ``num_return_sequences``, ``seed`` and ``generator``
            of `Options`. With ``num_return_sequences`` rows share the pages of their prompt, which is computed once,
            but with states anew for each row that starts later. With ``seed`` a row's draws depend on nothing else.

    Returns:
        The rows in the order of the prompts, with ``num_return_sequences`` consecutive ones for each.

    Raises:
        TypeError: an argument is not in `Options`.
        ValueError: a prompt is empty, an argument is out of range, an option depends on earlier tokens of a row
            (``repetition_penalty`` and others), a row does not fit into ``cache_bytes``, or the model cannot run here:
            it is compiled, distributed in other ways, or its positions depend on the length of the longest row. Use
            `generate` then. With ``record_routing`` it must have routed experts, and its blocks must replay them. With
            ``deterministic`` it must be a model that `deterministic_forward` takes.
    """
    tokens = _checked_prompts(model, prompts)
    limits = _for_each("max_new_tokens", max_new_tokens, len(tokens))
    if not min(limits) >= 1:
        raise ValueError(f"rollout: max_new_tokens must be at least 1, got {min(limits)}.")
    settings = resolve(model, max(limits), options)
    _check_options(model, settings, options)
    stops = [settings.eos_token_id] * len(tokens) if stop_tokens is None else [list(each) for each in stop_tokens]
    if len(stops) != len(tokens):
        raise ValueError(
            f"rollout: stop_tokens must be a list for each of the {len(tokens)} prompts, got {len(stops)}."
        )
    for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size), ("steps_per_read", steps_per_read)):
        if not isinstance(value, int):
            raise ValueError(f"rollout: {name} must be an integer, got {value!r}.")
        if not value >= 1:
            raise ValueError(f"rollout: {name} must be at least 1, got {value}.")
    repeats = settings.num_return_sequences
    count = len(tokens) * repeats
    seeds = settings.seed if isinstance(settings.seed, list) else [(settings.seed or 0) + row for row in range(count)]
    if len(seeds) != count:
        raise ValueError(f"rollout: seed must be one integer, or one for each of {count} rows, got {len(seeds)}.")
    rows = [
        Row(
            number, prompt := number // repeats, list(tokens[prompt]), len(tokens[prompt]),
            len(tokens[prompt]) + limits[prompt], stops[prompt], seed,
        )
        for number, seed in enumerate(seeds)
    ]  # fmt: skip
    derived = DerivedTensors()
    refused = deterministic_refusal(model) if deterministic else None
    if deterministic and refused is None and is_sharded(model.lm_head.weight):
        refused = f"model must be whole, got a sharded {type(model).__name__}"
    if refused is not None:
        raise ValueError(f"rollout: {refused} with deterministic=True. Leave it out.")
    with derived.used():
        cache = _cache_of_one_token(model, max(row.end for row in rows), tokens[0])
    if isinstance(cache, str):
        raise ValueError(f"rollout: {cache}. Use generate.")
    if record_routing and (not model.routers or not model.replays_routing):
        raise ValueError(
            f"rollout: record_routing needs routed experts in blocks that replay routing, got {type(model).__name__}. "
            "Leave it out."
        )
    invariant = batch_invariant() if deterministic else nullcontext()
    with resharded(model), evaluating(list(model.modules())), derived.used(), invariant, in_lockstep(model):
        pool = _make_pool(cache, rows, min(batch_size, count), cache_bytes, model)
        return Scheduler(model, rows, pool, settings, chunk_size, steps_per_read, record_routing, deterministic).run()


class Scheduler:
    """Runs rows to their ends.

    Args:
        model: the model, in eval mode.
        rows: the rows, in the order of their numbers.
        pool: the cache, which can hold each row by itself.
        settings: how tokens are chosen.
        chunk_size: maximum number of tokens of a prefill.
        steps_per_read: number of steps after which the host reads the new tokens.
        record_routing: whether to record the experts of each token.
        deterministic: whether log-probabilities are to have the bits of `deterministic_forward`.
    """

    def __init__(
        self,
        model: Decoder,
        rows: list[Row],
        pool: PagePool,
        settings: Settings,
        chunk_size: int,
        steps_per_read: int,
        record_routing: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.model, self.pool, self.chunk_size, self.steps_per_read = model, pool, chunk_size, steps_per_read
        self.record_routing, self.deterministic = record_routing, deterministic
        layers = model.routers if record_routing else []
        self.no_experts = torch.full((1, len(layers), layers[0].top_k if layers else 0), -1, dtype=torch.int16)
        """The experts of a token that has not been run."""
        self.captured = can_capture(model)
        self.kept: dict[str, Any] = {"logits_to_keep": 1} if model.groups.data else {"return_logits": False}
        """Arguments of a prefill. Under FSDP it runs the head, too: `in_lockstep` says why."""
        self.waiting = deque(sorted(rows, key=lambda row: row.begin - row.end))
        self.running: list[Row] = []
        """Rows in the order in which they have waited, so that all come before those that still wait."""
        self.found: list[Completion | None] = [None] * len(rows)
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.is_seeded = settings.seed is not None
        self.sampler = Sampler(replace(settings, seed=None), nothing, model.config.vocab_size)
        self.most_stops = max(len(row.stops) for row in rows)
        self._start_steps()

    def run(self) -> list[Completion]:
        """The completions of all rows, by their numbers."""
        while self.waiting or self.running:
            self._admit()
            self._prefill()
            self._decode(self._with_room())
            if not self.waiting and self._has_too_many_places():
                self.pool.resize([row.slot for row in self.running])
                self._start_steps()
        return [found for found in self.found if found is not None]

    def _has_too_many_places(self) -> bool:
        """Whether fewer places would save more time than it takes to capture a step with them."""
        empty = self.pool.rows - len(self.running)
        steps = max((row.end - len(row.tokens) for row in self.running), default=0)
        return 2 * empty >= self.pool.rows and empty * steps >= (CAPTURE_ROWS if self.captured else 1)

    def _start_steps(self) -> None:
        """Give the running rows places in a step with as many rows as the cache has, which is captured anew."""
        shape, device = (self.steps_per_read, self.pool.rows), self.model.device
        self.step = DecodeStep(
            self.pool, captured=self.captured, records_routing=self.record_routing,
            returns_hidden=self.deterministic,
        )  # fmt: skip
        self.new_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.new_log_probs = torch.zeros(shape, device=device)
        self.new_experts = torch.zeros(*shape, *self.no_experts.shape[1:], dtype=torch.int16, device=device)
        self.slots = list(range(len(self.running), self.pool.rows))
        for slot, row in enumerate(self.running):
            row.slot = slot
            self.pool.assign(slot, row.pages)

    def _admit(self) -> None:
        """Start waiting rows. Running rows that may need a page find one, so that no row is put back at once."""
        while self.waiting and self.slots:
            row = self.waiting[0]
            source = next((each for each in self.running if self._can_share(each, row)), None)
            shared = [] if source is None else source.pages[: (row.begin - 1) // self.pool.page]
            count = self._pages_for(len(row.tokens)) - len(shared)
            growing = sum(len(each.pages) < self._pages_for(each.end - 1) for each in self.running)
            if self.running and self.pool.num_free < count + growing:
                return
            row.pages, row.slot, row.source = self.pool.share(shared) + self.pool.take(count), self.slots.pop(), source
            self.pool.assign(row.slot, row.pages)
            self.pool.clear_states(row.slot)
            self.running.append(self.waiting.popleft())

    def _can_share(self, source: Row, row: Row) -> bool:
        """Whether a row can take over what a running one has for the prompt: states only before its first step."""
        at_its_end = all(len(each.tokens) == each.begin for each in (source, row))
        return source.prompt == row.prompt and (at_its_end or not self.pool.is_recurrent)

    def _prefill(self) -> None:
        """Compute the prompts of all running rows, or none as long as there are few and others wait."""
        self._copy_prompts()
        new = [row for row in self.running if not row.is_ready]
        tokens = sum(len(row.tokens) - 1 - row.cached for row in new if row.source is None)
        if self.waiting and tokens < self.chunk_size and len(new) <= IDLE_SHARE * len(self.running):
            return
        while todo := [row for row in new if row.source is None and not row.is_ready]:
            self._fill(todo)
            self._copy_prompts()

    def _fill(self, todo: list[Row]) -> None:
        """Run a forward of tokens of these rows: the prompts that fit into it, or a part of the first."""
        parts: list[tuple[Row, int]] = []
        room = self.chunk_size
        for row in todo:
            end = len(row.tokens) - 1
            if not row.cached and end <= room and len(parts) < MOST_DOCUMENTS:
                parts.append((row, end))
                room -= end
        first = todo[0]
        if not parts or parts[0][0] is not first:  # it follows cached tokens, or is longer than a chunk
            parts = [(first, min(first.cached + self.chunk_size, len(first.tokens) - 1))]
        ids = [row.tokens[row.cached : end] for row, end in parts]
        options: dict[str, Any] = {}
        if len(parts) > 1:
            options["cu_seqlens"] = self.pool.upload([0, *map(len, ids)]).cumsum(0)
        if self.record_routing:
            options["routed_experts"] = torch.cat([self._recorded(*part) for part in parts])[None]
        self.pool.fill([(row.slot, row.cached, end) for row, end in parts])
        batch = self.pool.upload([token for part in ids for token in part])[None]
        out = self.model(batch, cache=self.pool, **self.kept, **options)
        if self.record_routing:
            chosen = self.model.choose_experts(out.router_logits).cpu().split([len(each) for each in ids])
            for (row, _), experts in zip(parts, chosen, strict=True):
                row.experts.append(experts[row.num_recorded - row.cached :].clone())
        for row, end in parts:
            row.cached = end

    def _recorded(self, row: Row, end: int) -> Tensor:
        """The recorded experts of the tokens from ``cached`` to ``end`` of a row; −1 where there are none."""
        missing = self.no_experts.expand(max(end - row.num_recorded, 0), -1, -1)
        return torch.cat([*row.experts, missing])[row.cached : end]

    def _copy_prompts(self) -> None:
        """Give rows the cached prompt of their source: they share its full pages and copy the begun one."""
        pages, rows = [], []
        for row in self.running:
            if row.source is not None and row.source.cached >= row.begin - 1:
                full, begun = divmod(row.begin - 1, self.pool.page)
                if begun:
                    pages.append((row.source.pages[full], row.pages[full]))
                rows.append((row.source.slot, row.slot))
                if self.record_routing and row.num_recorded < row.begin - 1:
                    row.experts = [torch.cat(row.source.experts)[: row.begin - 1]]
                row.cached, row.source = row.begin - 1, None
        self.pool.copy(pages, rows)

    def _with_room(self) -> list[Row]:
        """The rows that run the next steps, with pages for their tokens."""
        rows = [row for row in self.running if row.is_ready]
        for row in rows:
            most = min(row.cached + self.steps_per_read, row.end - 1)
            while row.slot >= 0 and (count := self._pages_for(most) - len(row.pages)) > self.pool.num_free:
                last = self.running[-1]
                self._remove(last)
                self.waiting.appendleft(last)
            if row.slot >= 0 and count > 0:
                row.pages += self.pool.take(count)
                self.pool.assign(row.slot, row.pages)
        return [row for row in rows if row.slot >= 0]

    def _decode(self, rows: list[Row]) -> None:
        """Run steps of these rows, and read their tokens."""
        if not rows:
            return
        steps = min(self.steps_per_read, max(row.end - len(row.tokens) for row in rows))
        numbers = [[0] * (5 + self.most_stops) for _ in range(self.pool.rows)]
        for row in rows:
            stops = row.stops + [-1] * (self.most_stops - len(row.stops))
            new, left = len(row.tokens) - row.begin, row.end - len(row.tokens)
            numbers[row.slot] = [row.tokens[-1], row.cached, left, new, row.seed, *stops]
        state = self.pool.upload(numbers)
        tokens, lengths, remaining, counts, seeds = state[:, :5].unbind(1)
        stop_tokens = state[:, 5:]
        self.sampler.seeds = seeds if self.is_seeded else None
        self.pool.resume(lengths, remaining)
        head = self.model.lm_head
        for step in range(steps):
            out = self.step(self.model, tokens, self.pool.positions)
            if self.deterministic:
                raw, logits = head_outputs(head, out)
                tokens = self.sampler.draw(logits, counts)
                log_probs = log_probs_of(raw, tokens, head.softcap, head.logit_scale)
            else:
                tokens = self.sampler.draw(out, counts)
                log_probs = log_probs_of(out, tokens)
            self.new_tokens[step], self.new_log_probs[step] = tokens, log_probs
            if self.step.routed_experts is not None:
                self.new_experts[step] = self.step.routed_experts
            counts.add_(1)
            self.pool.remaining.sub_(1).masked_fill_((tokens[:, None] == stop_tokens).any(1), 0)
        read = self._read(steps)
        experts = self.new_experts[:steps].cpu()
        for row in rows:
            tokens_of_row, log_probs_of_row = (each[row.slot][: row.end - len(row.tokens)] for each in read)
            for token, log_prob in zip(tokens_of_row, log_probs_of_row, strict=True):
                row.tokens.append(token)
                row.log_probs.append(log_prob)
                if token in row.stops:
                    break
            if self.record_routing:
                row.experts.append(experts[: len(row.tokens) - 1 - row.cached, row.slot].clone())
            row.cached = len(row.tokens) - 1
            stopped = row.tokens[-1] in row.stops
            if stopped or len(row.tokens) == row.end:
                self._remove(row)
                answer = torch.tensor(row.tokens[row.begin :])
                log_probs = torch.tensor(row.log_probs, dtype=torch.float32)
                routed = torch.cat([*row.experts, self.no_experts]) if self.record_routing else None
                row.experts = []
                self.found[row.number] = Completion(answer, log_probs, "stop" if stopped else "length", routed)

    def _read(self, steps: int) -> list[list[list[Any]]]:
        """Tokens and log-probabilities of the last steps, a list for each slot. Synchronises with the device."""
        return [each[:steps].T.tolist() for each in (self.new_tokens, self.new_log_probs)]

    def _remove(self, row: Row) -> None:
        """Take a row's pages and its place in the step."""
        self.running.remove(row)
        self.slots.append(row.slot)
        self.pool.assign(row.slot, [])
        self.pool.give_back(row.pages)
        row.slot, row.pages, row.cached, row.source = -1, [], 0, None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)


def _make_pool(probe: DecodeCache, rows: list[Row], most: int, cache_bytes: int | None, model: Decoder) -> PagePool:
    """A cache for at most so many rows at the same time, with the layers of one that holds a single token."""
    device, group = model.device, model.groups.tensor
    if cache_bytes is None:
        free = free_memory(device)
        cache_bytes = HOST_BYTES if free is None else int(FREE_SHARE * free)
        if group is not None:  # all ranks must schedule alike
            cache_bytes = int(all_gather(torch.tensor(cache_bytes, device=device), group).min())
    longest = max(rows, key=lambda row: row.end)
    each = sum(x.nbytes for layer in probe._layers.values() for x in layer) * paged_cache.PAGE
    needed = -(-(longest.end - 1) // paged_cache.PAGE)
    pages = min(cache_bytes // each, most * needed + 1)
    if not pages > needed:
        raise ValueError(
            f"rollout: cache_bytes must be at least {(needed + 1) * each} for prompt {longest.prompt}, which may have "
            f"{longest.end} tokens, got {cache_bytes}. Raise it, or lower max_new_tokens."
        )
    return PagePool(most, longest.end - 1, device, pages=pages, like=probe)


def free_memory(device: torch.device) -> int | None:
    """Number of bytes that can be allocated on an accelerator; None for other devices."""
    if device.type not in ACCELERATORS:
        return None
    backend = getattr(torch, device.type)
    unused: int = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + unused


def _checked_prompts(model: Decoder, prompts: Any) -> list[list[int]]:
    """The prompts as lists of ids."""
    if not isinstance(prompts, Iterable):
        raise ValueError(f"rollout: prompts must be a list of prompts, got {type(prompts).__name__}.")
    found = [torch.as_tensor(prompt) for prompt in prompts]
    shapes = [list(prompt.shape) for prompt in found if prompt.dim() != 1 or not len(prompt)]
    if not found or shapes:
        raise ValueError(
            f"rollout: prompts must be a list of prompts with at least one token each, got shapes {shapes[:5]}."
        )
    vocab = model.embed_tokens.num_embeddings
    for number, prompt in enumerate(found):
        kind = prompt.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise ValueError(f"rollout: prompts must be integers, got {kind} in prompt {number}.")
    tokens: list[list[int]] = [prompt.tolist() for prompt in found]
    low, high = min(map(min, tokens)), max(map(max, tokens))
    if not (low >= 0 and high < vocab):
        raise ValueError(
            f"rollout: prompts must be in [0, {vocab}), got {low} to {high}. Does the tokenizer belong to the model?"
        )
    return tokens


def _for_each(name: str, value: int | Sequence[int], count: int) -> list[int]:
    numbers: Any = value.tolist() if hasattr(value, "tolist") else value
    values = list(numbers) if isinstance(numbers, Iterable) else [numbers] * count
    if not all(isinstance(each, Integral) for each in values):
        raise ValueError(f"rollout: {name} must be integers, got {value!r}.")
    if len(values) != count:
        raise ValueError(
            f"rollout: {name} must be one number, or one for each of the {count} prompts, got {len(values)}."
        )
    return values


def _check_options(model: Decoder, settings: Settings, options: Options) -> None:
    """Raise ValueError for options of `generate` that `rollout` does not have."""
    for name, neutral in UNFILTERED.items():
        value = getattr(settings, name)
        if name not in DRAWING and value and value != neutral:
            raise ValueError(
                f"rollout: {name} must be {neutral}, got another from the call or from generation_config.json. Pass "
                f"{name}={neutral}, or use generate."
            )
    others = ["attention_mask", "logits_processor", "cache", "draft_model", *select_inputs(model, options)]
    given = [name for name in others if options.get(name) is not None]
    if given:
        raise ValueError(f"rollout: {', '.join(given)} must be omitted, got a value. Use generate.")
    if not settings.use_cache:
        raise ValueError("rollout: use_cache must not be False. Use generate.")


def refusal(model: Decoder, tokens: int, prompt: Sequence[int]) -> str | None:
    """Why `rollout` does not take this model with rows of so many tokens; None if it does.

    It runs the first token of a prompt, to see what the layers cache.
    """
    found = _cache_of_one_token(model, tokens, prompt)
    return found if isinstance(found, str) else None


def _cache_of_one_token(model: Decoder, tokens: int, prompt: Sequence[int]) -> DecodeCache | str:
    """A cache with the first token of a prompt, or what `refusal` returns."""
    name = type(model).__name__
    layers = named_layers(model.layers)
    refused = [path for path, layer in layers if layer.attention and not layer.attention.takes_pages]
    if refused:
        return f"attention layers must take pages of a cache, got layers.{', layers.'.join(refused)} of {name}"
    if any(is_compiled(module) for module in model.modules()):
        return f"model must not be compiled, got a compiled {name}"
    groups = model.groups
    shares_tokens = groups.context or groups.expert or (groups.tensor is not None and groups.tensor.sequence_parallel)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if shares_tokens or (sharded and groups == ParallelGroups()):
        return f"model may be distributed by apply_fsdp and by apply_tp without sequence_parallel, got {name} otherwise"
    for rotary in layers_of(model.rotary):
        limit: Any = rotary.switch_length
        if isinstance(getattr(rotary, "scaling", None), DynamicScaling):
            limit = rotary.max_position_embeddings
        if limit is not None and tokens > limit + 1:  # the last token is never run
            return (
                f"prompt and new tokens must not exceed {limit + 1} tokens, beyond which the frequencies of {name} "
                f"depend on the longest row, got {tokens}"
            )
    cache = DecodeCache(1)
    with torch.no_grad(), evaluating(list(model.modules())):
        model(torch.tensor([prompt[:1]], device=model.device), cache=cache, return_logits=False)
    if cache.extra or not cache._layers:
        return f"layers must cache keys, values and states, got others in {name}"
    return cache
