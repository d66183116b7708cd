"""Rounds of speculative decoding with drafts from a model's multi-token prediction block.

In a round, one forward of the model verifies the drafts of every row, and the block then drafts the next tokens. For
a row with L cached tokens, the last token x_L and the drafts d_1 ... d_k, a round computes::

    h_L ... h_{L+k} = model(x_L, d_1, ..., d_k)            the model's choices y_1 ... y_{k+1} come from these
    n = 1 + number of drafts that are accepted             y_1 ... y_n are the row's new tokens
    h'_{L+i} = block(h_{L+i}, y_{i+1}), i < n              the first new draft comes from h'_{L+n-1}
    h'_{L+n} = block(h'_{L+n-1}, d'_1), ...                and each further draft comes from the one before it

Each row accepts its own number of drafts. The numbers of accepted drafts stay on the device, so a round can be captured
as one CUDA graph.

Greedy decoding yields the same tokens with and without drafts. With seeds, the model and the block draw with the same
noise, so sampling also yields the same tokens with and without drafts. Without seeds, a draft ``d`` is accepted with
the probability ``min(1, p(d) / q(d))``, where ``p`` is the model's distribution and ``q`` is the block's
distribution. A rejected draft is replaced with a token from the normalized distribution ``max(0, p − q)``. New tokens
therefore follow the model's distribution.

Sources: https://arxiv.org/abs/2211.17192 and https://arxiv.org/abs/2412.19437.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from liger_models.common.errors import check_values
from liger_models.generation.deterministic import head_outputs
from liger_models.generation.graphs import try_record
from liger_models.generation.model_state import ModelState
from liger_models.generation.options import is_draft_block
from liger_models.generation.rows import log_probs_of
from liger_models.generation.sampling import NOT_FINITE, Sampler
from liger_models.kernels.loss.accept_drafts import accept_drafts
from liger_models.kernels.loss.choose_tokens import choose_tokens
from liger_models.kernels.loss.verify_drafts import verify_drafts
from liger_models.kernels.overlap import overlapping
from liger_models.layers.batch import BatchLayout
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.page_pool import PagePool


class DraftBlock(Protocol):
    """A block, such as `liger_models.adapters.LigerMTP`, that runs on a model's hidden states."""

    model: Any
    """The model for which the block drafts tokens. The block uses the model's embedding and head."""

    def predict(self, hidden: Tensor, ahead: Tensor, layout: BatchLayout) -> Tensor:
        """Return inputs of the head, [B, T, C], from which the head predicts the token two positions after each token.

        Args:
            hidden: [B, T, C], the inputs of the model's head, from which the head predicts the next token.
            ahead: [B, T, C], the embedding of each token's next token.
            layout: layout of the batch, with a cache to which the block appends.
        """

    def draft(self, hidden: Tensor, tokens: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the same as `predict`, but without gradients and from token ids instead of embeddings.

        ``tokens`` [B, T] int64 holds the next token of each token.
        """

    def modules(self) -> Any:
        """Return all modules of the block."""


class Round(NamedTuple):
    """The result of a round, in which each row gets at most ``k + 1`` new tokens.

    Attributes:
        tokens: [rows, k + 1] int64, the new tokens, followed by arbitrary tokens.
        log_probs: [rows, k + 1] fp32, log-probabilities of the tokens under the model's own distribution.
        counts: [rows] int64, the number of new tokens of each row.
        experts: [rows, k + 1, L, K] int16, the experts that the model chose for the row's last token before the round
            and for the drafts. None if experts are not recorded.
    """

    tokens: Tensor
    log_probs: Tensor
    counts: Tensor
    experts: Tensor | None


class DraftRound:
    """A round of speculative decoding for all rows of a `PagePool`.

    Like a `DecodeStep`, a round is captured as a CUDA graph on its second call.

    Args:
        model_state: the result of `state_of` for the model.
        pool: the cache of the rows, with the layers of both the model and the block.
        block: the block that drafts.
        sampler: the sampling options.
        num_drafts: ``k``, the number of drafts of each row.
        vocab_size: V, the number of logits per row.
        stops: the largest number of stop tokens that a row has.
        seeded: whether rows have seeds.
        captured: whether to capture the round.
        records_routing: whether to return the chosen experts.
        deterministic: whether to compute log-probabilities that are bitwise identical to the log-probabilities of a
            forward in `deterministic_forward`.
    """

    def __init__(
        self,
        model_state: ModelState,
        pool: PagePool,
        block: DraftBlock,
        sampler: Sampler,
        num_drafts: int,
        vocab_size: int,
        *,
        stops: int,
        seeded: bool,
        captured: bool,
        records_routing: bool,
        deterministic: bool,
    ) -> None:
        self.pool, self.block, self.sampler, self.num_drafts = pool, block, sampler, num_drafts
        self.seeded, self.captured = seeded, captured
        self.records_routing, self.deterministic = records_routing, deterministic
        rows, device = pool.rows, pool.lengths.device
        self._state, options = model_state, (num_drafts, stops, seeded, records_routing, deterministic)
        draws = sampler.settings.do_sample, sampler.restricts
        self._kind: Hashable = (ref(block), rows, pool.capacity, pool.cache_dtype, *options, *draws)

        # A captured round reads and writes these tensors. The first drafts of a row are arbitrary, so they are accepted
        # only by chance.
        self._tokens = torch.zeros(rows, num_drafts + 1, dtype=torch.int64, device=device)
        self._counts, self._seeds = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._stops = torch.full((rows, stops), -1, device=device)
        self._ahead = torch.arange(num_drafts + 1, device=device)

        # The scores from which the drafts were drawn, [rows, k, V], and the log-probabilities of the drafts, [rows, k].
        # The very first drafts are token 0. The random numbers are used as seeds: first the seeds for the tokens, then
        # the seeds for the drafts.
        self._proposed: Tensor | None = None
        if sampler.settings.do_sample and not seeded:
            self._proposed = torch.full((rows, num_drafts, vocab_size), -torch.inf, dtype=torch.float32, device=device)
            self._proposed[..., 0] = 0
            self._draft_log_probs = torch.zeros(rows, num_drafts, dtype=torch.float32, device=device)
            self._random = torch.zeros(2 * num_drafts + 1, rows, dtype=torch.int64, device=device)
            self._no_steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._called = False
        self._result: Round | None = None

    def resume(self, tokens: Tensor, counts: Tensor, seeds: Tensor, stops: Tensor) -> None:
        """Prepare a series of rounds. Call `PagePool.resume` first.

        Each slot of the pool keeps its drafts from the last round. If a slot now holds another row, the old drafts are
        unlikely to be accepted. New tokens still follow the model's distribution, because the next round verifies the
        old drafts like all others.

        Args:
            tokens: [rows] int64, the last token of each row.
            counts: [rows] int64, the number of new tokens that each row has so far.
            seeds: [rows] int64.
            stops: [rows, stops] int64, the stop tokens of each row, padded with −1.
        """
        self._tokens[:, 0] = tokens
        for fixed, given in ((self._counts, counts), (self._seeds, seeds), (self._stops, stops)):
            fixed.copy_(given)

    def __call__(self, model: Decoder) -> Round:
        """Run a round. The next call may overwrite the result."""
        if self.captured and self._graph is None and (self._called or self._state.is_ready(self._kind)):
            step = f"rollout: a round of {type(model).__name__} with drafts"
            generator = self.sampler.settings.generator
            with overlapping():
                recorded = try_record(step, lambda: self._run(model), model.device, generator=generator)
            if recorded is None:
                self.captured = False
            else:
                self._graph, self._result = recorded
        if self._graph is None:
            with overlapping(self.captured):  # this run compiles the kernels that the capture launches
                result = self._run(model)
            self._called = True
            if self.captured:
                self._state.add_step(self._kind)
            return result
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _run(self, model: Decoder) -> Round:
        pool, rows, k = self.pool, self.pool.rows, self.num_drafts

        # Verify the drafts: each token of a row becomes a row of the batch. [rows · (k + 1), 1]
        positions = pool.speculate(k + 1)
        embeds, layout = model.prepare(self._tokens.view(-1, 1), position_ids=positions, cache=pool)
        out = model.run(embeds, layout, return_logits=False)
        assert out.hidden_states is not None
        hidden: Tensor = out.hidden_states[-1]  # [rows · (k + 1), 1, C]
        experts = model.choose_experts(out.router_logits or ()) if self.records_routing else None
        head = model.lm_head
        if self.deterministic:
            raw, logits = head_outputs(head, hidden[:, 0])
            chosen, agree, _ = self._choose(logits)
            log_probs = log_probs_of(raw, chosen.flatten(), head.softcap, head.logit_scale)
        else:
            chosen, agree, log_probs = self._choose(head(hidden)[:, 0])

        # A row ends with its first stop token, or when it has the maximum number of tokens.
        counts, last = accept_drafts(
            chosen, self._tokens, agree, self._stops, pool.lengths, pool.remaining, self._counts
        )
        pool.accept(counts)

        # The block runs on the same tokens, each together with the next token that the model chose.
        x = self.block.draft(hidden, chosen.view(-1, 1), layout)[last]  # [rows, 1, C]
        for index in range(k):
            if index:
                # The model has not computed the hidden state of a draft yet, so use the block's own output instead.
                positions = pool.speculate(1, index - 1)
                _, layout = model.prepare(inputs_embeds=x, position_ids=positions, cache=pool)
                x = self.block.draft(x, self._tokens[:, index : index + 1], layout)
            self._tokens[:, index + 1] = self._draft(head(x)[:, 0], index)
        pool.width = 1
        experts = None if experts is None else experts.unflatten(0, (rows, k + 1))
        return Round(chosen, log_probs.view(rows, k + 1), counts, experts)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Choose tokens from the model's logits [rows · (k + 1), V].

        Returns:
            Three tensors: the choices [rows, k + 1]; whether each draft is accepted, [rows, k] bool, or None if
            exactly the drafts that equal the choices are accepted; the log-probabilities of the choices,
            [rows · (k + 1)] fp32.
        """
        k, scores = self.num_drafts, self._restricted(logits)
        agree = None
        if self._proposed is not None:
            self._random.random_(generator=self.sampler.settings.generator)
            drafts, seeds = self._tokens[:, 1:], self._random[: k + 1].flatten()
            chosen, agree, log_probs = verify_drafts(
                logits, scores, drafts, self._proposed, self._draft_log_probs, seeds
            )
        elif self.seeded:
            steps = (self._counts[:, None] + self._ahead).flatten()
            chosen, log_probs = choose_tokens(logits, scores, self._seeds.repeat_interleave(k + 1), steps)
        else:
            chosen, log_probs = choose_tokens(logits, scores)
        if self.sampler.settings.do_sample and not self.captured:  # a captured round can't wait for a check
            check_values(log_probs.isfinite().all(), NOT_FINITE)
        return chosen.view(-1, k + 1), agree, log_probs

    def _draft(self, logits: Tensor, index: int) -> Tensor:
        """Choose draft ``index`` of each row, [rows] int64, from the block's logits [rows, V]."""
        scores = self._restricted(logits)
        if self._proposed is None:
            draws = (self._seeds, self._counts + index) if self.seeded else ()
            return choose_tokens(logits, scores, *draws)[0]
        scores = logits if scores is None else scores
        self._proposed[:, index] = scores
        seeds = self._random[self.num_drafts + 1 + index]
        tokens, self._draft_log_probs[:, index] = choose_tokens(scores, None, seeds, self._no_steps)
        return tokens

    def _restricted(self, logits: Tensor) -> Tensor | None:
        """Return the scores from which tokens are drawn; None if tokens are drawn from the logits."""
        return self.sampler.restrict(logits) if self.sampler.restricts else None


@torch.no_grad()
def with_layers_of(block: DraftBlock, cache: DecodeCache, prompt: Any) -> DecodeCache:
    """Return a decode cache with the layers of both the model and the block, filled with the first token of ``prompt``.

    `rollout` inspects this cache to find out what each layer caches. The model's layers come from ``cache``.
    """
    model, joined = block.model, DecodeCache(1)
    embeds, layout = model.prepare(torch.tensor([prompt[:1]], device=model.device), cache=joined)
    block.predict(embeds, embeds, layout)
    joined._layers |= cache._layers
    joined._states |= cache._states
    return joined


def draft_refusal(model: Decoder, block: Any) -> str | None:
    """Return the reason why a block can't draft for a model; None if the block can draft."""
    if is_draft_block(block):
        return None
    return f"draft_model must be LigerMTP around this {type(model).__name__}, got {type(block).__name__}"
