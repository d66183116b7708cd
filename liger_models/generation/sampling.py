"""Choosing the next tokens from logits, by greedy decoding or by sampling."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.common.errors import check_values
from liger_models.generation.options import DRAWING, UNFILTERED, Settings
from liger_models.kernels.loss.seeded_scores import seeded_scores
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant

FILTERS = [name for name in DRAWING if name in UNFILTERED]
"""Options that exclude tokens based on the probabilities of all tokens."""
LOWEST_TEMPERATURE = 1e-30
"""Below this temperature, all probabilities except the largest are 0 in fp32."""
NOT_FINITE = (
    "generate: logits must be numbers below infinity, and finite for some token, got others in a row. Look for NaN in "
    "the weights, and in what a logits_processor returns."
)


class Sampler:
    """Chooses the next token of each row. The options are applied in the same order as in transformers.

    Args:
        settings: the options.
        prompts: [B, T] int64.
        vocab_size: V.
    """

    def __init__(self, settings: Settings, prompts: Tensor, vocab_size: int) -> None:
        self.device = device = prompts.device
        self.settings, self.prompt_length = settings, prompts.shape[1]
        stops = settings.eos_token_id
        # A stop token ends a row, so a bad word that consists of only a stop token is ignored.
        words = [word for word in settings.bad_words_ids if not (len(word) == 1 and word[0] in stops)]
        self.words = _by_length([*words, *([token] for token in settings.suppress_tokens)], device)
        self.seeds = None if settings.seed is None else _seeds(settings.seed, len(prompts)).to(device)
        self.vocab_size = vocab_size

    @functools.cached_property
    def stops(self) -> Tensor:
        """Whether each token of the vocabulary ends a row, [1, V] bool.

        This mask is needed only if the options set a minimum number of new tokens.
        """
        tokens = torch.tensor([self.settings.eos_token_id], dtype=torch.int64, device=self.device)
        return token_mask(tokens, self.vocab_size)

    def __call__(self, ids: Tensor, context: Tensor, logits: Tensor) -> Tensor:
        """Return the next tokens, [B] int64.

        Args:
            ids: [B, T + n] int64, the tokens so far. This method does not write to ``ids``.
            context: like ``ids``, but with −1 for padding.
            logits: [B, V] fp32.
        """
        return self.choose(self.scores(ids, context, logits), ids.shape[1] - self.prompt_length)

    def scores(self, ids: Tensor, context: Tensor, logits: Tensor) -> Tensor:
        """Return the logits after applying all options, [B, V] fp32. The arguments are the same as in `__call__`."""
        return self.restrict(self.process(ids, context, logits))

    def process(self, ids: Tensor, context: Tensor, logits: Tensor) -> Tensor:
        """Process logits [B, V] with the options that also affect greedy decoding."""
        settings, V = self.settings, logits.shape[1]

        # Penalize repeated tokens. Exclude tokens that would repeat a sequence, complete a bad word, or end a row too
        # early.
        if settings.repetition_penalty != 1:
            logits = penalize_repetition(logits, token_mask(context, V), settings.repetition_penalty)
        n = settings.no_repeat_ngram_size
        if 0 < n <= context.shape[1]:
            logits = logits.masked_fill(completing(context, context.unfold(1, n, 1), V), -torch.inf)
        for words in self.words:
            if words.shape[2] <= context.shape[1] + 1:
                logits = logits.masked_fill(completing(context, words, V), -torch.inf)
        if ids.shape[1] - self.prompt_length < settings.min_new_tokens:
            logits = logits.masked_fill(self.stops, -torch.inf)

        # Call the user's functions.
        for processor in settings.logits_processor:
            shape = logits.shape
            logits = processor(ids, logits)
            if not isinstance(logits, Tensor) or logits.shape != shape:
                raise ValueError(
                    f"generate: logits_processor must return logits {list(shape)}, got "
                    f"{list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}."
                )
        return logits

    def draw(self, logits: Tensor, step: int | Tensor) -> Tensor:
        """Return the most likely tokens or, if ``do_sample`` is set, sampled tokens, [B] int64.

        Args:
            logits: [B, V], the result of `process`.
            step: number of new tokens so far, either one number for all rows or [B] int64.
        """
        return self.choose(self.restrict(logits), step)

    @property
    def restricts(self) -> bool:
        """Whether any option restricts sampling, so that `restrict` does more than cast the logits to fp32."""
        settings = self.settings
        if not settings.do_sample:
            return False
        return settings.temperature != 1 or any(getattr(settings, name) != UNFILTERED[name] for name in FILTERS)

    def restrict(self, logits: Tensor) -> Tensor:
        """Apply the options that affect only sampling. The argument ``logits`` [B, V] is the result of `process`."""
        settings = self.settings
        if not settings.do_sample:
            return logits
        logits = logits.float()

        # Apply the temperature, then the filters. Each filter sets some logits to −∞ and leaves all other logits
        # unchanged.
        if settings.temperature != 1:
            if settings.temperature < LOWEST_TEMPERATURE:  # division would give infinite logits
                logits = logits.masked_fill(logits < logits.amax(1, keepdim=True), -torch.inf)
            else:
                logits = logits / settings.temperature
        if settings.top_k:
            logits = keep_top_k(logits, settings.top_k)
        if settings.top_p < 1:
            logits = keep_top_p(logits, settings.top_p)
        if settings.min_p > 0:
            logits = keep_min_p(logits, settings.min_p)
        if settings.typical_p < 1:
            logits = keep_typical_p(logits, settings.typical_p)
        if settings.epsilon_cutoff > 0:
            logits = keep_epsilon(logits, settings.epsilon_cutoff)
        if settings.eta_cutoff > 0:
            logits = keep_eta(logits, settings.eta_cutoff)
        return logits

    def choose(self, logits: Tensor, step: int | Tensor) -> Tensor:
        """Return the next tokens, [B] int64.

        Args:
            logits: [B, V], the result of `restrict`.
            step: see `draw`.
        """
        settings = self.settings
        if not settings.do_sample:
            tokens = logits.argmax(1)
            # argmax treats NaN as the largest value, so broken weights would repeat a token without an error.
            if isinstance(step, int) and step == 0:
                check_values(logits.gather(1, tokens[:, None]).isfinite().all(), NOT_FINITE)
            return tokens

        # Draw a token: as the argmax of seeded scores, or with the generator.
        if self.seeds is not None:
            best = seeded_scores(logits, self.seeds, step).max(1)
            check_values(best.values.isfinite().all(), NOT_FINITE)
            return best.indices
        return draw(logits.softmax(1), settings.generator)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a token for each row from the row's distribution. Returns [B] int64.

    The tokens are the same as with `torch.multinomial`, which waits for the device in some versions of PyTorch.

    Args:
        probabilities: [B, V] fp32.
        generator: random number generator; None for the global generator.

    Raises:
        ValueError: a probability is NaN. On CUDA and ROCm, a device-side assertion fails instead.
    """
    scores = probabilities / torch.empty_like(probabilities).exponential_(generator=generator)
    tokens = scores.argmax(1)
    # If a row contains NaN, its maximum score is NaN.
    check_values((scores.gather(1, tokens[:, None]) >= 0).all(), NOT_FINITE)
    return tokens


def _seeds(seed: int | list[int], rows: int) -> Tensor:
    return torch.tensor([*range(seed, seed + rows)] if isinstance(seed, int) else seed, device="cpu")


def token_mask(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return [B, V] bool: whether each token of the vocabulary occurs in the row's ``tokens`` [B, n].

    Numbers outside of [0, V) are ignored.
    """
    # Numbers outside of [0, V) set an extra column, which is dropped.
    inside = tokens.where((tokens >= 0) & (tokens < vocab_size), vocab_size)
    mask = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter_(1, inside, True)[:, :vocab_size]


def completing(context: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Return [B, V] bool: whether each token of the vocabulary would complete one of the ``words`` in a row.

    Args:
        context: [B, T] int64, the tokens so far, with −1 for padding.
        words: [1 or B, N, n] int64, N words with n tokens each, where n is at most T + 1.
        vocab_size: V.
    """
    # A word can be completed if the context ends with all tokens of the word but the last, [1 or B, N, n − 1].
    begun = words[..., :-1] == context[:, None, context.shape[1] - words.shape[2] + 1 :]
    return token_mask(torch.where(begun.all(2), words[..., -1], -1), vocab_size)


def _by_length(words: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Group words (sequences of tokens) by their length n. A group of N words is a tensor [1, N, n] int64."""
    lengths = dict.fromkeys(map(len, words))
    return [torch.tensor([[word for word in words if len(word) == n]], device=device) for n in lengths]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """For tokens in ``seen``, divide positive logits by ``penalty`` and multiply negative logits by ``penalty``.

    Args:
        logits: [B, V] fp32.
        seen: [B, V] bool, the tokens already in each row.
        penalty: positive number; above 1 it discourages repetition.

    Source: CTRL (https://arxiv.org/abs/1909.05858).
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep each row's ``k`` largest logits and all logits that equal the ``k``-th largest. Set all others to −∞.

    Args:
        logits: [B, V] fp32.
        k: number of logits to keep.
    """
    last = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities add up to at least ``p``.

    All other logits become −∞.

    Args:
        logits: [B, V] fp32.
        p: in (0, 1].

    Source: https://arxiv.org/abs/1904.09751.
    """
    # Starting with the least likely token, drop tokens as long as their total probability is at most 1 − p.
    ascending, order = logits.sort(1)
    total, rest = _running_sums(ascending.softmax(1), 1 - p)
    drop = total <= rest
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set to −∞ the logits of tokens whose probability is below ``p`` times the row's highest probability.

    Args:
        logits: [B, V] fp32.
        p: number in [0, 1].

    Source: https://arxiv.org/abs/2407.01082.
    """
    probabilities = logits.softmax(1)
    return logits.masked_fill(probabilities < p * probabilities.amax(1, keepdim=True), -torch.inf)


def keep_typical_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens whose information content is closest to the entropy. Set the logits of all other tokens to −∞.

    Args:
        logits: [B, V] fp32.
        p: number in (0, 1]. The fewest tokens whose probabilities add up to at least ``p`` are kept.

    Source: https://arxiv.org/abs/2202.00666.
    """
    log_probs = logits.log_softmax(1)
    entropy = -(log_probs * log_probs.exp()).nansum(1, keepdim=True)
    distance = (-log_probs - entropy).abs()

    # Find the distance of the last token that is needed to reach ``p``. Tokens at the same distance are kept, too.
    ascending, order = distance.sort(1)
    total, enough = _running_sums(logits.gather(1, order).softmax(1), p)
    last = (total < enough).sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > ascending.gather(1, last), -torch.inf)


def keep_epsilon(logits: Tensor, epsilon: float | Tensor) -> Tensor:
    """Set to −∞ the logits of tokens whose probability is below ``epsilon``.

    The most likely token is always kept.

    Args:
        logits: [B, V] fp32.
        epsilon: number in (0, 1), or [B, 1] fp32.

    Source: https://arxiv.org/abs/2210.15191.
    """
    drop = (logits.softmax(1) < epsilon) & (logits < logits.amax(1, keepdim=True))
    return logits.masked_fill(drop, -torch.inf)


def keep_eta(logits: Tensor, epsilon: float) -> Tensor:
    """Apply `keep_epsilon` with the smaller of ε and √ε · exp(−entropy).

    A flat distribution has a high entropy, so more of its tokens are kept.

    Args:
        logits: [B, V] fp32.
        epsilon: in (0, 1).

    Source: https://arxiv.org/abs/2210.15191.
    """
    entropy = torch.special.entr(logits.softmax(1)).sum(1, keepdim=True)
    return keep_epsilon(logits, (epsilon**0.5 * torch.exp(-entropy)).clamp(max=epsilon))


def _running_sums(share: Tensor, bound: float) -> tuple[Tensor, float]:
    """Return the cumulative sums of probabilities [B, V] fp32, and ``bound``.

    The sums can be compared with the returned ``bound``. If results must be deterministic, both are integers, in units
    of 2⁻⁵³.
    """
    # On a GPU, only the cumsum of integers is deterministic. Float sums also depend on the number of rows.
    if torch.are_deterministic_algorithms_enabled() or is_batch_invariant():
        return (share.double() * 2**53).long().cumsum(1), int(bound * 2**53)
    return share.cumsum(1), bound
