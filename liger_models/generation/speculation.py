"""Speculative decoding: a draft proposes the next tokens, and one forward of the model checks all of them.

Each token is the one that the model chooses after the tokens before it, as without a draft. A proposal that agrees with
it saves a forward. What follows the first proposal of any row that does not is dropped in all rows. Draws from seeds
depend on nothing but the logits of a row, so that they are the same, too.

Source: https://arxiv.org/abs/2211.17192.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.generation.eval_mode import evaluating
from liger_models.generation.options import Settings
from liger_models.generation.rows import Rows, Step
from liger_models.generation.sampling import Sampler
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of
from liger_models.layers.rope import DynamicScaling, switch_columns


class Draft(Protocol):
    """Proposes the next tokens."""

    def logits(self, ids: Tensor, end: int, index: int) -> Tensor:
        """Logits [B, V] of the proposal number ``index``, for the column after the first ``end`` of ids [B, S]."""

    def keep(self, length: int, hidden: Tensor | None) -> None:
        """Cut back to ``length`` columns, the last of which was chosen from the hidden states [B, C] of the model."""


class Columns:
    """Runs a model on the columns of a batch that are not in its cache yet.

    Args:
        model: the model.
        prompts: [B, T] int64.
        mask: [B, T], 0 for padding; None for no padding.
        settings: the options.
        inputs: inputs of the model that belong to the prompts besides their tokens.
    """

    def __init__(
        self, model: Decoder, prompts: Tensor, mask: Tensor | None, settings: Settings, inputs: dict[str, Any]
    ) -> None:
        new, self.repeats = settings.max_new_tokens, settings.num_return_sequences
        self.model, self.inputs, self.modules = model, inputs, list(model.modules())
        self.positions = model.prompt_positions(prompts, mask, new, inputs)
        furthest = self.positions.flatten(0, -2).amax(0)
        rotary: list[Any] = [*layers_of(model.rotary)]
        self.switches = switch_columns(rotary, self.positions)
        dynamic = [each.max_position_embeddings for each in rotary if isinstance(each.scaling, DynamicScaling)]
        self.alike_up_to = min((int((furthest < length).sum()) for length in dynamic), default=len(furthest))
        if self.positions.shape[-2] > 1:
            self.positions = self.positions.repeat_interleave(self.repeats, -2)
        self.mask = mask
        if mask is not None:
            self.mask = nn.functional.pad(mask, (0, new), value=1).repeat_interleave(self.repeats, 0)
        self.cache = DecodeCache(len(furthest))
        self.started = False
        self.derived = DerivedTensors()

    def most(self, end: int, count: int) -> int:
        """How many columns after the first ``end``, up to ``count``, can run with them.

        None with the prompts. Rotary frequencies that change at a column (longrope), or with each (dynamic), would be
        those of the last column for all that run together.
        """
        limits = [switch - end for switch in self.switches if switch >= end]
        return max(0, min(count if self.started else 0, self.alike_up_to - end, *limits))

    def run(self, ids: Tensor, end: int, **options: Any) -> Tensor:
        """The logits, or the hidden states with ``return_logits=False``, of those of the first ``end`` columns of ids
        [B, S] that are not cached."""
        cache, every = self.cache, 1 if self.started else self.repeats  # a prompt is computed once
        if any(cache.length <= switch < end for switch in self.switches):
            cache.length = 0
        new = slice(cache.length, end)
        with evaluating(self.modules), self.derived.used():
            out = self.model(
                ids[::every, new],
                position_ids=self.positions[..., ::every, new],
                attention_mask=None if self.mask is None else self.mask[::every, :end],
                cache=cache,
                **options,
                **(self.inputs if new.start == 0 else {}),
            )
        self.started = True
        if cache.is_recurrent:
            raise ValueError(
                "generate: draft_model needs caches that can be cut back, got recurrent states in "
                f"{type(self.model).__name__}. Generate without draft_model."
            )
        found: Tensor = out.hidden_states[-1] if out.logits is None else out.logits
        if every > 1:
            cache.select(torch.arange(len(found), device=ids.device).repeat_interleave(every))
            found = found.repeat_interleave(every, 0)
        return found

    def cut(self, length: int) -> None:
        """Keep of the cache at most ``length`` columns."""
        self.cache.length = min(self.cache.length, length)


class DraftModel:
    """Proposals of another model; see `Draft`.

    Args:
        columns: of the model.
        ids: [B, S] int64, the prompts [B, T] and room for what follows.
        T: number of columns of the prompts.
    """

    def __init__(self, columns: Columns, ids: Tensor, T: int) -> None:
        self.columns, self.known = columns, columns.model.embed_tokens.num_embeddings
        self.logits(ids, T, 0)

    def logits(self, ids: Tensor, end: int, index: int) -> Tensor:
        """See `Draft`."""
        return self.columns.run(ids.clamp(max=self.known - 1), end, logits_to_keep=1)[:, -1]

    def keep(self, length: int, hidden: Tensor | None) -> None:
        """See `Draft`."""
        self.columns.cut(length - 1)


class DraftHeads:
    """Proposals of heads on the model's own hidden states; see `Draft`.

    Args:
        heads: has ``draft_logits``.
    """

    def __init__(self, heads: Any) -> None:
        self.heads = heads
        self.hidden: Tensor | None = None

    def logits(self, ids: Tensor, end: int, index: int) -> Tensor:
        """See `Draft`."""
        logits: Tensor = self.heads.draft_logits(self.hidden, index)
        return logits

    def keep(self, length: int, hidden: Tensor | None) -> None:
        """See `Draft`."""
        self.hidden = hidden


@torch.no_grad()
def speculate(
    model: Decoder,
    prompts: Tensor,
    mask: Tensor | None,
    settings: Settings,
    inputs: dict[str, Any],
    *,
    logprobs: bool = False,
) -> Iterator[Step]:
    """The new tokens of each step, until every row has ended.

    Args:
        model: the model.
        prompts: [B, T] int64.
        mask: [B, T] int64, 0 for padding; None for no padding.
        settings: the options; with ``draft_model``.
        inputs: inputs of the model that belong to the prompts besides their tokens.
        logprobs: whether to compute log-probabilities.
    """
    T, repeats = prompts.shape[1], settings.num_return_sequences
    S = T + settings.max_new_tokens
    target = Columns(model, prompts, mask, settings, inputs)
    other = settings.draft_model
    heads = not isinstance(other, Decoder)
    columns = None
    if not heads:
        seen = {name: value for name, value in inputs.items() if name in other.prompt_inputs}
        columns = Columns(other, prompts, mask, settings, seen)
    vocab_size = min(model.config.vocab_size, (model if heads else other).config.vocab_size)
    prompts = prompts.repeat_interleave(repeats, 0)
    mask = None if mask is None else mask.repeat_interleave(repeats, 0)
    rows = Rows(prompts, mask, settings, model.config.vocab_size, logprobs=logprobs)
    guess = Sampler(replace(settings, logits_processor=[]), prompts, vocab_size)  # a processor may count its calls
    draft: Draft = DraftHeads(other) if columns is None else DraftModel(columns, rows.ids, T)

    while rows.length < S:
        end = rows.length
        count = target.most(end, min(settings.num_draft_tokens, S - end - 1))
        for index in range(count):
            ids, context = rows.ids[:, : end + index], rows.context[:, : end + index]
            logits = draft.logits(rows.ids, end + index, index)[:, :vocab_size].float()
            rows.put(guess(ids, context, logits), end + index)
        proposed = rows.ids[:, end : end + count].clone()
        checked, hidden = _check(target, rows.ids, end, count, heads)
        for index in range(count + 1):
            step = rows.step(checked[:, index])
            # Rows that have ended agree with everything. The host waits once for both answers.
            agree = step.ended if index == count else (step.tokens == proposed[:, index]) | step.ended
            answers = torch.stack([agree.all(), step.ended.all()])
            yield step
            agreed, ended = answers.tolist()
            if ended:
                return
            if not agreed:
                break
        target.cut(rows.length - 1)
        draft.keep(rows.length, None if hidden is None else hidden[:, index])


def _check(target: Columns, ids: Tensor, end: int, count: int, heads: bool) -> tuple[Tensor, Tensor | None]:
    """The model's logits [B, count + 1, V] for the columns from ``end`` on, and for heads its hidden states."""
    if not heads:
        return target.run(ids, end + count, logits_to_keep=count + 1), None
    hidden = target.run(ids, end + count, return_logits=False)[:, -count - 1 :]
    with target.derived.used():
        return target.model.lm_head(hidden), hidden
