"""The scheduler of `rollout`. It decides which rows run, which place in the batch (slot) each of them gets, and when
prompts are computed.

Prefills and steps alternate. A prefill is one forward of prompt tokens: either several whole prompts as packed
documents, or a chunk of a long prompt. Then all rows whose prompt has been computed run some steps. Each step adds one
token to every row. All values that a step reads are on the device, so the step can be captured as a CUDA graph under
the same conditions as in `generate`. The host reads tokens and log-probabilities after several steps, and discards
everything after a stop token. A prefill omits the last token of each prompt. The first step of a row runs this omitted
token, so every new token comes from a step.

A prefill waits until there are enough new prompts, because the host takes as long to launch a small prefill as a large
prefill. When the queue is empty, rows that end are no longer replaced. The scheduler then captures a step with fewer
rows if the remaining steps save more time than the capture costs.

Rows with the highest limit on new tokens start first. Otherwise, a few long rows would run alone at the end. Rows with
equal limits start in the order of their prompts. When pages run out, the rows that started last return to the front of
the queue. The order of the rows is thus preserved, the first row can always continue, and every row eventually ends.
"""

import math
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_models.generation.deterministic import head_outputs
from liger_models.generation.draft_rounds import DraftBlock, DraftRound
from liger_models.generation.graphs import DecodeStep, can_capture
from liger_models.generation.model_state import ModelState, state_of
from liger_models.generation.options import Settings
from liger_models.generation.rollout_rows import Completion, Row
from liger_models.generation.rows import log_probs_of
from liger_models.generation.sampling import Sampler
from liger_models.kernels.attention.decode_attention import GROUP_ROWS
from liger_models.kernels.loss.choose_tokens import choose_tokens
from liger_models.layers.decoder import CausalLMOutput, Decoder
from liger_models.layers.masks import MOST_DOCUMENTS
from liger_models.layers.page_pool import PagePool

IDLE_SHARE = 1 / 32
"""While prompts are queued, a small prefill starts only if more than this fraction of the running rows wait for it.

The host takes about 35 ms to launch a prefill of Llama 3.2 3B. In this time, an H200 computes 3,000 tokens, so a small
prefill would waste time.
"""

CAPTURE_ROWS = 2**14
"""If the empty slots, summed over the remaining steps, exceed this number, capturing a step with fewer rows saves time.

For Llama 3.2 3B on an H200, a step with 128 fewer rows saves the time of a capture within about 150 steps, and a step
with 64 fewer rows saves it within about 300 steps.
"""

LEAST_SHARED, LEAST_SHARED_FLOAT8 = 448, 1024
"""Minimum number of tokens in the pages that a group of rows shares, for pages in 16 bits or more, and in float8. For
fewer tokens, grouping does not save time, because the rows find each other's keys in the L2 cache."""


class Scheduler:
    """Runs all rows until they end.

    Args:
        model: the model, in eval mode.
        rows: the rows, in the order of the result.
        pool: the cache. It must have room for at least the longest row.
        settings: the sampling options.
        chunk_size: maximum number of tokens in a prefill.
        steps_per_read: number of steps after which the host reads the new tokens.
        record_routing: whether to record the experts of each token.
        deterministic: whether to compute log-probabilities that are bitwise identical to the log-probabilities of a
            forward in `deterministic_forward`.
        draft: the block that drafts tokens; see `DraftRound`. Rounds with drafts then take the place of steps. The
            settings contain the number of drafts.
        model_state: the state of the model, by default the result of `state_of`.
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
        draft: DraftBlock | None = None,
        model_state: ModelState | None = None,
    ) -> None:
        self.model, self.pool, self.chunk_size, self.steps_per_read = model, pool, chunk_size, steps_per_read
        self.record_routing, self.deterministic = record_routing, deterministic
        self.draft, self.width = draft, 1 if draft is None else 1 + settings.num_draft_tokens
        self.model_state = model_state or state_of(model)
        self.captured = can_capture(model, self.model_state)
        self.prefill_options: dict[str, Any] = {"return_logits": False}
        if model.groups.data:  # under FSDP, every forward must run the head, see `in_lockstep`
            self.prefill_options = {"logits_to_keep": 1}

        layers = model.routers if record_routing else []
        shape = 1, len(layers), layers[0].top_k if layers else 0
        self.no_experts = torch.full(shape, -1, dtype=torch.int16, device="cpu")
        """Placeholder [1, L, K] for the experts of a token on which the model has not run."""

        # The queue of waiting rows, and the running rows in the order in which they left the queue.
        self.waiting = deque(sorted(rows, key=lambda row: row.begin - row.end))
        self.running: list[Row] = []
        self.completions: list[Completion | None] = [None] * len(rows)

        # The sampler needs no prompts, and `_run_steps` sets its seeds. Steps draw all tokens with seeds. Rounds with
        # drafts accept more drafts if tokens are drawn without seeds.
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.is_seeded = settings.seed is not None
        if settings.do_sample and not self.is_seeded and draft is None:
            self.is_seeded = True
            _draw_seeds(rows, settings.generator, model.device)
        self.sampler = Sampler(replace(settings, seed=None), nothing, model.config.vocab_size)
        self.most_stops = max(len(row.stops) for row in rows)
        self._start_steps()

    def run(self) -> list[Completion]:
        """Run all rows and return one completion per row, ordered by `Row.number`."""
        while self.advance():
            pass
        return [completion for completion in self.completions if completion is not None]

    def advance(self) -> bool:
        """Run steps until the host reads tokens again. Returns whether there are more rows to run."""
        self._admit()
        self._prefill()
        self._decode(self._with_room())
        if not self.waiting and self.running and self._has_too_many_slots():
            self.pool.resize([row.slot for row in self.running])
            self._start_steps()
        return bool(self.waiting or self.running)

    def _has_too_many_slots(self) -> bool:
        """Return whether capturing a step with fewer slots would save more time than it costs."""
        empty = self.pool.rows - len(self.running)
        steps = max((row.remaining for row in self.running), default=0)
        return 2 * empty >= self.pool.rows and empty * steps >= (CAPTURE_ROWS if self.captured else 1)

    def _start_steps(self) -> None:
        """Create a step with as many slots as the cache has rows. Its first slots are for the running rows."""
        shape, device = (self.steps_per_read, self.pool.rows, self.width), self.model.device
        self.step = DecodeStep(
            self.pool, captured=self.captured, model_state=self.model_state,
            records_routing=self.record_routing, returns_hidden=self.deterministic,
        )  # fmt: skip
        self.round: DraftRound | None = None
        if self.draft is not None:
            self.round = DraftRound(
                self.model_state, self.pool, self.draft, self.sampler, self.width - 1, self.model.config.vocab_size,
                stops=self.most_stops, seeded=self.is_seeded, captured=self.captured,
                records_routing=self.record_routing, deterministic=self.deterministic,
            )  # fmt: skip
        # The steps between two reads write to these tensors [steps, slots, width]. The tensor of experts is
        # [steps, slots, width, L, K]. The width is the largest number of tokens that a step adds to a row.
        self.new_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.new_log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.new_experts = torch.zeros(*shape, *self.no_experts.shape[1:], dtype=torch.int16, device=device)
        self.new_counts = torch.ones(shape[:2], dtype=torch.int64, device=device)
        self.free_slots = list(range(len(self.running), self.pool.rows))
        for slot, row in enumerate(self.running):
            row.slot = slot
            self.pool.assign(slot, row.pages)

    # Methods that start rows.

    def _admit(self) -> None:
        """Move rows from the queue to the running rows.

        Enough pages must remain free to give another page to each running row that will need one.
        """
        while self.waiting and self.free_slots:
            # If a row with the same prompt is running, the new row shares the full pages of this prompt.
            row = self.waiting[0]
            source = next((running for running in self.running if self._can_share(running, row)), None)
            shared = [] if source is None else source.pages[: (row.begin - 1) // self.pool.page]
            count = self._pages_for(len(row.tokens)) - len(shared)

            # `growing` counts the running rows that will need another page.
            growing = sum(len(running.pages) < self._pages_for(running.end - 1) for running in self.running)
            if self.running and self.pool.num_free < count + growing:
                return

            row.pages = self.pool.share(shared) + self.pool.take(count)
            row.slot, row.source = self.free_slots.pop(), source
            self.pool.assign(row.slot, row.pages)
            self.pool.clear_states(row.slot)
            self.running.append(self.waiting.popleft())

    def _can_share(self, source: Row, row: Row) -> bool:
        """Return whether a row can use the prompt that ``source`` has cached.

        If the model has recurrent states, neither row may have new tokens yet.
        """
        is_new = len(source.tokens) == source.begin and len(row.tokens) == row.begin
        return source.prompt == row.prompt and (is_new or not self.pool.is_recurrent)

    # Methods that compute prompts.

    def _prefill(self) -> None:
        """Compute the uncached prompts of running rows.

        If these prompts have few tokens in total and more rows are queued, do nothing. A later call then computes them
        together with the prompts of more rows.
        """
        self._copy_prompts()
        new = [row for row in self.running if not row.is_ready]
        tokens = sum(len(row.tokens) - 1 - row.cached for row in new if row.source is None)
        if self.waiting and tokens < self.chunk_size and len(new) <= IDLE_SHARE * len(self.running):
            return
        while rows := [row for row in new if row.source is None and not row.is_ready]:
            self._fill(self._choose_chunk(rows))
            self._copy_prompts()

    def _choose_chunk(self, rows: list[Row]) -> list[tuple[Row, int]]:
        """Return the rows of the next forward as pairs (row, end).

        The forward runs the tokens of ``row`` before ``end``. The result contains either several rows with whole
        prompts, or one row with a chunk of its prompt.
        """
        chunk: list[tuple[Row, int]] = []
        room = self.chunk_size
        for row in rows:
            end = len(row.tokens) - 1
            if not row.cached and end <= room and len(chunk) < MOST_DOCUMENTS:
                chunk.append((row, end))
                room -= end

        # If the first row has cached tokens or is longer than a chunk, it runs alone.
        first = rows[0]
        if not chunk or chunk[0][0] is not first:
            chunk = [(first, min(first.cached + self.chunk_size, len(first.tokens) - 1))]
        return chunk

    def _fill(self, chunk: list[tuple[Row, int]]) -> None:
        """Run a forward of the rows in ``chunk``.

        For each row, the forward runs the tokens from the first uncached token up to, but not including, the position
        that ``chunk`` gives for the row.
        """
        ids = [row.tokens[row.cached : end] for row, end in chunk]
        options: dict[str, Any] = {}
        if len(chunk) > 1:  # packed documents
            options["cu_seqlens"] = self.pool.upload([0, *map(len, ids)]).cumsum(0)
        if self.record_routing:
            options["routed_experts"] = torch.cat([self._recorded(row, end) for row, end in chunk])[None]
        self.pool.fill([(row.slot, row.cached, end) for row, end in chunk])
        packed = self.pool.upload([token for tokens in ids for token in tokens])[None]  # [1, tokens]
        if self.draft is None:
            out = self.model(packed, cache=self.pool, **self.prefill_options, **options)
        else:
            out = self._fill_block(packed, [row.tokens[row.cached + 1 : end + 1] for row, end in chunk], **options)

        # A row that was put back into the queue has kept its recorded experts, so add only the experts of later tokens.
        if self.record_routing:
            chosen = self.model.choose_experts(out.router_logits).cpu().split([len(tokens) for tokens in ids])
            for (row, _), experts in zip(chunk, chosen, strict=True):
                row.experts.append(experts[row.num_recorded - row.cached :].clone())
        for row, end in chunk:
            row.cached = end

    def _fill_block(self, packed: Tensor, ahead: list[list[int]], **options: Any) -> CausalLMOutput:
        """Run the model and the drafting block on tokens [1, T].

        For each token of each row, ``ahead`` holds the next token.
        """
        model, pool, draft = self.model, self.pool, self.draft
        assert draft is not None
        bounds, cached = options.pop("cu_seqlens", None), pool.length
        embeds, layout = model.prepare(packed, cu_seqlens=bounds, cache=pool)
        out = model.run(embeds, layout, **self.prefill_options, **options)
        assert out.hidden_states is not None
        pool.length = cached  # the block's tokens are at the same positions
        following = pool.upload([token for tokens in ahead for token in tokens])[None]
        draft.predict(out.hidden_states[-1], model.embed(following, None)[0], layout)
        return out

    def _recorded(self, row: Row, end: int) -> Tensor:
        """Return the recorded experts of a row's tokens from ``cached`` to ``end``; −1 where no expert was recorded."""
        missing = self.no_experts.expand(max(end - row.num_recorded, 0), -1, -1)
        return torch.cat([*row.experts, missing])[row.cached : end]

    def _copy_prompts(self) -> None:
        """Give rows the cached prompt of their source row.

        A row shares the full pages of the prompt with its source row, and gets its own copy of the last page.
        """
        pages, rows = [], []
        for row in self.running:
            if row.source is None or row.source.cached < row.begin - 1:
                continue
            full, partial = divmod(row.begin - 1, self.pool.page)
            if partial:
                pages.append((row.source.pages[full], row.pages[full]))
            rows.append((row.source.slot, row.slot))
            if self.record_routing and row.num_recorded < row.begin - 1:
                row.experts = [torch.cat(row.source.experts)[: row.begin - 1]]
            row.cached, row.source = row.begin - 1, None
        self.pool.copy(pages, rows)

    # Methods that run steps.

    def _with_room(self) -> list[Row]:
        """Give pages to the rows that are ready for the next steps, and return the rows that can run these steps.

        If pages run out, the rows that started last are put back into the queue.
        """
        rows = [row for row in self.running if row.is_ready]
        for row in rows:
            # A round with drafts also writes the keys of drafts that it does not accept.
            length = min(row.cached + (self.steps_per_read + 1) * self.width - 1, row.end - 1)

            # The row that is put back may be the row that needs pages. It then waits in the queue again.
            while row.slot >= 0 and (count := self._pages_for(length) - len(row.pages)) > self.pool.num_free:
                last = self.running[-1]
                self._remove(last)
                self.waiting.appendleft(last)
            if row.slot >= 0 and count > 0:
                row.pages += self.pool.take(count)
                self.pool.assign(row.slot, row.pages)
        return [row for row in rows if row.slot >= 0]

    def _decode(self, rows: list[Row]) -> None:
        """Run steps for these rows, read the new tokens, and remove the rows that have ended."""
        if not rows:
            return
        steps = min(self.steps_per_read, -(-max(row.remaining for row in rows) // self.width))
        self._run_steps(rows, steps)
        tokens, log_probs, counts = self._read(steps)
        experts = self.new_experts[:steps].cpu()

        # The model has run on all tokens of a row except the last, so all except the last are cached and have experts.
        for row in rows:
            slot, of_steps = row.slot, counts[row.slot]
            self._extend(row, _first(tokens[slot], of_steps), _first(log_probs[slot], of_steps))
            if self.record_routing:
                chosen = torch.cat([experts[step, slot, :count] for step, count in enumerate(of_steps)])
                row.experts.append(chosen[: len(row.tokens) - 1 - row.cached].clone())
            row.steps += sum(count > 0 for count in of_steps)
            row.cached = len(row.tokens) - 1
            if row.tokens[-1] in row.stops or not row.remaining:
                self._remove(row)
                self._complete(row)

    def _run_steps(self, rows: list[Row], steps: int) -> None:
        """Launch steps without waiting for the device."""
        # All numbers that describe the rows are uploaded at once, [slots, 5 + stops]. The columns are: last token,
        # cached length, remaining tokens, new tokens, seed, stop tokens. Empty slots have zeros. Stop tokens are
        # padded with −1.
        numbers = [[0] * (5 + self.most_stops) for _ in range(self.pool.rows)]
        for row in rows:
            stops = row.stops + [-1] * (self.most_stops - len(row.stops))
            new = len(row.tokens) - row.begin
            numbers[row.slot] = [row.tokens[-1], row.cached, row.remaining, new, row.seed, *stops]
        state = self.pool.upload(numbers)
        tokens, lengths, remaining, counts, seeds = state[:, :5].unbind(1)
        stop_tokens = state[:, 5:]
        self.sampler.seeds = seeds if self.is_seeded else None
        self.pool.resume(lengths, remaining)
        self.pool.group(self._groups(rows))
        if self.round is not None:
            self._run_rounds(self.round, steps, tokens, counts, seeds, stop_tokens)
            return

        head = self.model.lm_head
        draws = (seeds, counts) if self.sampler.settings.do_sample else ()
        for step in range(steps):
            out = self.step(self.model, tokens, self.pool.positions)
            if self.deterministic:
                raw, logits = head_outputs(head, out)
                tokens = self.sampler.draw(logits, counts)
                log_probs = log_probs_of(raw, tokens, head.softcap, head.logit_scale)
            else:
                scores = self.sampler.restrict(out) if self.sampler.restricts else None
                tokens, log_probs = choose_tokens(out, scores, *draws)
            self.new_tokens[step, :, 0], self.new_log_probs[step, :, 0] = tokens, log_probs
            if self.step.routed_experts is not None:
                self.new_experts[step, :, 0] = self.step.routed_experts
            counts.add_(1)

            # A row without remaining tokens does nothing in later steps.
            self.pool.remaining.sub_(1).masked_fill_((tokens[:, None] == stop_tokens).any(1), 0)

    def _groups(self, rows: list[Row]) -> list[tuple[list[int], int]]:
        """Return the groups of rows that share the full pages of their prompt; see `PagePool.group`."""
        if not self.pool.groups:
            return []
        by_page: dict[int, list[Row]] = {}
        for row in rows:
            by_page.setdefault(row.pages[0], []).append(row)
        groups = []
        for sharing in by_page.values():
            for start in range(0, len(sharing), GROUP_ROWS):
                part = sharing[start : start + GROUP_ROWS]
                # Rows with the same first page have the same prompt, and share its full pages.
                tokens = (part[0].begin - 1) // self.pool.page * self.pool.page
                if len(part) > 1 and tokens >= least_shared(self.pool.cache_dtype):
                    groups.append(([row.slot for row in part], tokens))
        return groups

    def _run_rounds(self, rounds: DraftRound, steps: int, *state: Tensor) -> None:
        """Launch rounds with drafts without waiting for the device."""
        rounds.resume(*state)
        for step in range(steps):
            result = rounds(self.model)
            self.new_tokens[step], self.new_log_probs[step] = result.tokens, result.log_probs
            self.new_counts[step] = result.counts
            if result.experts is not None:
                self.new_experts[step] = result.experts

    def _read(self, steps: int) -> list[list[list[Any]]]:
        """Return tokens, log-probabilities and counts of the last steps as nested lists, by slot and step.

        Synchronizes with the device.
        """
        return [
            values[:steps].transpose(0, 1).tolist() for values in (self.new_tokens, self.new_log_probs, self.new_counts)
        ]

    def _extend(self, row: Row, tokens: list[int], log_probs: list[float]) -> None:
        """Add new tokens to a row, up to the row's maximum or the first stop token.

        Raises:
            ValueError: the model has computed NaN.
        """
        count = row.remaining
        for token, log_prob in zip(tokens[:count], log_probs[:count], strict=True):
            if math.isnan(log_prob):
                raise ValueError(
                    f"rollout: log-probabilities must be numbers, got NaN for token {len(row.log_probs)} of row "
                    f"{row.number}. Look for NaN in the weights."
                )
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            if token in row.stops:
                return

    def _complete(self, row: Row) -> None:
        """Store the completion of a row that has ended."""
        reason = "stop" if row.tokens[-1] in row.stops else "length"
        experts = torch.cat([*row.experts, self.no_experts]) if self.record_routing else None
        row.experts = []
        self.completions[row.number] = Completion(
            torch.tensor(row.tokens[row.begin :], device="cpu"),
            torch.tensor(row.log_probs, dtype=torch.float32, device="cpu"), reason, experts,
            None if self.draft is None else row.steps,
        )  # fmt: skip

    def _remove(self, row: Row) -> None:
        """Free the pages and the slot of a row."""
        self.running.remove(row)
        self.free_slots.append(row.slot)
        self.pool.assign(row.slot, [])
        self.pool.give_back(row.pages)
        row.slot, row.pages, row.cached, row.source = -1, [], 0, None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)


def least_shared(cache_dtype: torch.dtype | None) -> int:
    """Return the minimum number of tokens in shared pages for which rows are grouped."""
    return LEAST_SHARED if cache_dtype is None else LEAST_SHARED_FLOAT8


def _draw_seeds(rows: list[Row], generator: torch.Generator | None, device: torch.device) -> None:
    """Give each row a random seed, from the generator or, if it is None, from the device's global generator."""
    device = device if generator is None else generator.device
    seeds = torch.randint(2**62, (len(rows),), generator=generator, device=device)
    for row, seed in zip(rows, seeds.tolist(), strict=True):
        row.seed = seed


def _first(values: list[list[Any]], counts: list[int]) -> list[Any]:
    """Concatenate the first ``counts[i]`` values of each list ``values[i]``."""
    return [value for step, count in zip(values, counts, strict=True) for value in step[:count]]
