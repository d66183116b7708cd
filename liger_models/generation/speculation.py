"""Speculative decoding: a draft proposes the next tokens, and one forward of the model verifies all of them.

The model itself chooses every token, as in generation without a draft. Each proposal that equals the model's choice
saves a forward. After the first wrong proposal in any row, all rows discard their remaining proposals. With seeds, the
random draws of a row depend only on its seed and its tokens, so sampling yields the same tokens with and without a
draft.

Source: https://arxiv.org/abs/2211.17192.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.generation.eval_mode import evaluating
from liger_models.generation.options import Settings
from liger_models.generation.prompts import count_embeddings
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
        """Return the logits [B, V] for proposal ``index``, the token after the first ``end`` columns of ids [B, S]."""

    def keep(self, length: int, hidden: Tensor | None) -> None:
        """Keep the first ``length`` columns, and discard all proposals after them.

        The model chose the tokens in the last of these columns from the hidden states ``hidden`` [B, C].
        """


class Columns:
    """Runs a model on the columns of a batch that are not in the cache yet.

    Args:
        model: the model.
        prompts: [B, T] int64.
        mask: [B, T], which is 0 for padding; None for no padding.
        settings: the options.
        inputs: inputs of the model that belong to the prompts, in addition to the tokens.
    """

    def __init__(
        self, model: Decoder, prompts: Tensor, mask: Tensor | None, settings: Settings, inputs: dict[str, Any]
    ) -> None:
        new, self.repeats = settings.max_new_tokens, settings.num_return_sequences
        self.model, self.inputs, self.modules = model, inputs, list(model.modules())
        self.positions = model.prompt_positions(prompts, mask, new, inputs)

        # Rotary frequencies may change at a certain column (LongRoPE), or with the length (dynamic scaling).
        furthest = self.positions.flatten(0, -2).amax(0)
        rotary: list[Any] = [*layers_of(model.rotary)]
        self.switches = switch_columns(rotary, self.positions)
        dynamic = [module.max_position_embeddings for module in rotary if isinstance(module.scaling, DynamicScaling)]
        self.alike_up_to = min((int((furthest < length).sum()) for length in dynamic), default=len(furthest))

        # Repeat each prompt for all of its rows, and add columns for the new tokens.
        if self.positions.shape[-2] > 1:
            self.positions = self.positions.repeat_interleave(self.repeats, -2)
        self.mask = mask
        if mask is not None:
            self.mask = nn.functional.pad(mask, (0, new), value=1).repeat_interleave(self.repeats, 0)
        self.cache = DecodeCache(len(furthest))
        self.started = False
        self.derived = DerivedTensors()

    def most(self, end: int, count: int) -> int:
        """Return how many of the ``count`` columns from ``end`` on can run in the same forward as the columns before
        ``end``.

        Before the first forward, which runs only the prompts, the result is 0. All columns of a forward use the rotary
        frequencies of the forward's last column. Therefore, a forward must not cross a column at which the frequencies
        change (LongRoPE) or start to depend on the length (dynamic scaling).
        """
        limits = [switch - end for switch in self.switches if switch >= end]
        return max(0, min(count if self.started else 0, self.alike_up_to - end, *limits))

    def run(self, ids: Tensor, end: int, **options: Any) -> Tensor:
        """Run the columns of ids [B, S] that are before ``end`` and not cached yet, and return their logits.

        With ``return_logits=False``, return the hidden states of these columns instead.
        """
        cache, every = self.cache, 1 if self.started else self.repeats  # each prompt is computed only once
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

        # A recurrent state summarizes all tokens, so wrong proposals can't be removed from it.
        self.started = True
        if cache.is_recurrent:
            raise ValueError(
                "generate: draft_model needs caches that can be cut back, got recurrent states in "
                f"{type(self.model).__name__}. Generate without draft_model."
            )
        result: Tensor = out.hidden_states[-1] if out.logits is None else out.logits

        # After the forward of the prompts, expand the cache to all rows.
        if every > 1:
            cache.select(torch.arange(len(result), device=ids.device).repeat_interleave(every))
            result = result.repeat_interleave(every, 0)
        return result

    def cut(self, length: int) -> None:
        """Cut the cache to at most ``length`` columns."""
        self.cache.length = min(self.cache.length, length)


class DraftModel:
    """A `Draft` whose proposals come from another model.

    Args:
        columns: the `Columns` of the model that proposes.
        ids: [B, S] int64, the prompts [B, T] followed by room for new tokens.
        T: number of columns of the prompts.
    """

    def __init__(self, columns: Columns, ids: Tensor, T: int) -> None:
        self.columns, self.vocab_size = columns, count_embeddings(columns.model)
        self.logits(ids, T, 0)

    def logits(self, ids: Tensor, end: int, index: int) -> Tensor:
        """See `Draft`."""
        # The model may have chosen a token that has no embedding in the draft model.
        return self.columns.run(ids.clamp(max=self.vocab_size - 1), end, logits_to_keep=1)[:, -1]

    def keep(self, length: int, hidden: Tensor | None) -> None:
        """See `Draft`."""
        self.columns.cut(length - 1)


class DraftHeads:
    """A `Draft` whose proposals come from heads on the model's own hidden states.

    Args:
        heads: a module with ``draft_logits``, such as `LigerMedusa`.
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
    """Yield the new tokens of each step until every row has ended.

    Args:
        model: the model.
        prompts: [B, T] int64.
        mask: [B, T] int64, which is 0 for padding; None for no padding.
        settings: the options, with a ``draft_model``.
        inputs: inputs of the model that belong to the prompts, in addition to the tokens.
        logprobs: whether to compute log-probabilities.
    """
    T, repeats = prompts.shape[1], settings.num_return_sequences
    S = T + settings.max_new_tokens
    target = Columns(model, prompts, mask, settings, inputs)

    # The draft is either another model, which gets the inputs that it accepts, or heads on the model's hidden states.
    source = settings.draft_model
    heads = not isinstance(source, Decoder)
    columns = None
    if not heads:
        accepted = {name: value for name, value in inputs.items() if name in source.prompt_inputs}
        columns = Columns(source, prompts, mask, settings, accepted)
    vocab_size = min(model.config.vocab_size, (model if heads else source).config.vocab_size)

    # Repeat each prompt for its rows.
    prompts = prompts.repeat_interleave(repeats, 0)
    mask = None if mask is None else mask.repeat_interleave(repeats, 0)
    rows = Rows(prompts, mask, settings, model.config.vocab_size, logprobs=logprobs)
    guess = Sampler(replace(settings, logits_processor=[]), prompts, vocab_size)  # a processor may count calls
    draft: Draft = DraftHeads(source) if columns is None else DraftModel(columns, rows.ids, T)

    while rows.length < S:
        # Let the draft propose `count` tokens, and write them to the columns from `end` on.
        end = rows.length
        count = target.most(end, min(settings.num_draft_tokens, S - end - 1))
        for index in range(count):
            ids, context = rows.ids[:, : end + index], rows.context[:, : end + index]
            logits = draft.logits(rows.ids, end + index, index)[:, :vocab_size].float()
            rows.put(guess(ids, context, logits), end + index)

        # Verify all proposals in one forward of the model.
        proposed = rows.ids[:, end : end + count].clone()
        checked, hidden = _check(target, rows.ids, end, count, heads)

        # Accept the model's tokens as long as they equal the proposals in all rows, plus the next token of the model.
        for index in range(count + 1):
            step = rows.step(checked[:, index])
            # Rows that have ended accept every proposal. Both flags are copied to the host together, so the host waits
            # only once.
            agree = step.ended if index == count else (step.tokens == proposed[:, index]) | step.ended
            answers = torch.stack([agree.all(), step.ended.all()])
            yield step
            agreed, ended = answers.tolist()
            if ended:
                return
            if not agreed:
                break

        # Remove the cached keys of wrong proposals. The model has not run on the last token yet.
        target.cut(rows.length - 1)
        draft.keep(rows.length, None if hidden is None else hidden[:, index])


def _check(target: Columns, ids: Tensor, end: int, count: int, heads: bool) -> tuple[Tensor, Tensor | None]:
    """Run the model on ``count`` proposals.

    Return the logits [B, count + 1, V] and, for draft heads, the hidden states.
    """
    if not heads:
        return target.run(ids, end + count, logits_to_keep=count + 1), None
    hidden = target.run(ids, end + count, return_logits=False)[:, -count - 1 :]
    with target.derived.used():
        return target.model.lm_head(hidden), hidden
