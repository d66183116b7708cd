"""The choice of the next tokens from logits, greedy or by sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.common.errors import check_values
from liger_models.generation.options import Settings
from liger_models.kernels.loss.seeded_scores import seeded_scores
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant

LOWEST_TEMPERATURE = 1e-30
"""At lower temperatures all probabilities but the largest are 0 in fp32."""
NOT_FINITE = "generate: logits must be numbers below infinity, and finite for some token, got others in a row."


class Sampler:
    """Chooses the next token of each row. It applies the options in the same order as transformers.

    Args:
        settings: the options.
        prompts: [B, T] int64.
        vocab_size: V.
    """

    def __init__(self, settings: Settings, prompts: Tensor, vocab_size: int) -> None:
        device = prompts.device
        self.settings, self.prompt_length = settings, prompts.shape[1]
        stops = settings.eos_token_id
        # A stop token ends a row, so it is never a bad word by itself.
        words = [word for word in settings.bad_words_ids if not (len(word) == 1 and word[0] in stops)]
        self.words = _by_length([*words, *([token] for token in settings.suppress_tokens)], device)
        self.seeds = None if settings.seed is None else _seeds(settings.seed, len(prompts)).to(device)
        self.stops = token_mask(torch.tensor([stops], dtype=torch.int64, device=device), vocab_size)

    def __call__(self, ids: Tensor, context: Tensor, logits: Tensor) -> Tensor:
        """The next tokens, [B] int64.

        Args:
            ids: [B, T + n] int64, the tokens so far. They are not overwritten.
            context: the same, with −1 for padding.
            logits: [B, V] fp32.
        """
        return self.draw(self.process(ids, context, logits), ids.shape[1] - self.prompt_length)

    def process(self, ids: Tensor, context: Tensor, logits: Tensor) -> Tensor:
        """The logits [B, V] after the options that also affect greedy decoding."""
        settings, V = self.settings, logits.shape[1]

        # Tokens that repeat, complete a forbidden word, or would end a row too early.
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

        # The caller's functions.
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
        """The most likely tokens, or with ``do_sample`` drawn tokens, [B] int64.

        Args:
            logits: [B, V], processed.
            step: number of new tokens so far, for all rows or for each as [B] int64.
        """
        settings = self.settings
        if not settings.do_sample:
            return logits.argmax(1)
        logits = logits.float()

        # Temperature, then the filters: each sets logits to −∞ and leaves the others.
        if settings.temperature != 1:
            if settings.temperature < LOWEST_TEMPERATURE:  # the quotients would be infinite
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

        # The draw: the argmax of seeded scores, or a draw from the generator.
        if self.seeds is not None:
            best = seeded_scores(logits, self.seeds, step).max(1)
            check_values(best.values.isfinite().all(), NOT_FINITE)
            return best.indices
        return draw(logits.softmax(1), settings.generator)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a token for each row from its distribution, [B] int64.

    The tokens equal those of `torch.multinomial`, which in some versions of PyTorch waits for the device.

    Args:
        probabilities: [B, V] fp32.
        generator: random number generator; None for the global one.

    Raises:
        ValueError: a probability is NaN. On CUDA and ROCm a device-side assertion fails instead.
    """
    scores = probabilities / torch.empty_like(probabilities).exponential_(generator=generator)
    tokens = scores.argmax(1)
    # The largest score of a row with NaN is NaN.
    check_values((scores.gather(1, tokens[:, None]) >= 0).all(), NOT_FINITE)
    return tokens


def _seeds(seed: int | list[int], rows: int) -> Tensor:
    return torch.tensor([*range(seed, seed + rows)] if isinstance(seed, int) else seed)


def token_mask(tokens: Tensor, vocab_size: int) -> Tensor:
    """Whether each token is among ``tokens`` [B, n] of a row, [B, V] bool. Numbers outside of [0, V) are ignored."""
    # Numbers outside go into an extra column, which is cut off.
    inside = tokens.where((tokens >= 0) & (tokens < vocab_size), vocab_size)
    mask = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter_(1, inside, True)[:, :vocab_size]


def completing(context: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Whether each token would complete a word at the end of a row, [B, V] bool.

    Args:
        context: [B, T] int64, the tokens so far, with −1 for padding.
        words: [1 or B, N, n] int64, N words of n tokens, n at most T + 1.
        vocab_size: V.
    """
    # A word is begun if all its tokens but the last are at the end of the context.  [1 or B, N, n − 1]
    begun = words[..., :-1] == context[:, None, context.shape[1] - words.shape[2] + 1 :]
    return token_mask(torch.where(begun.all(2), words[..., -1], -1), vocab_size)


def _by_length(words: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """The words grouped by their length n, each group as [1, N, n] int64."""
    lengths = dict.fromkeys(map(len, words))
    return [torch.tensor([[word for word in words if len(word) == n]], device=device) for n in lengths]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of the tokens in ``seen`` by ``penalty``, and multiply the negative ones by it.

    Args:
        logits: [B, V] fp32.
        seen: [B, V] bool, the tokens already in each row.
        penalty: above 1 to discourage repetition.

    Source: CTRL (https://arxiv.org/abs/1909.05858).
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set logits [B, V] fp32 to −∞ except for the ``k`` largest of each row and logits equal to the ``k``-th."""
    last = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set the logits of the least likely tokens, which together have probability at most 1 − ``p``, to −∞.

    The most likely token always stays.

    Args:
        logits: [B, V] fp32.
        p: in (0, 1].

    Source: https://arxiv.org/abs/1904.09751.
    """
    # From the least likely token on, tokens are dropped while their sum is at most 1 − p.
    ascending, order = logits.sort(1)
    total, rest = _running_sums(ascending.softmax(1), 1 - p)
    drop = total <= rest
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set the logits [B, V] fp32 of tokens less likely than ``p`` times the most likely one of the row to −∞.

    Source: https://arxiv.org/abs/2407.01082.
    """
    probabilities = logits.softmax(1)
    return logits.masked_fill(probabilities < p * probabilities.amax(1, keepdim=True), -torch.inf)


def keep_typical_p(logits: Tensor, p: float) -> Tensor:
    """Set logits to −∞ except for the tokens whose information content is closest to the entropy.

    Args:
        logits: [B, V] fp32.
        p: in (0, 1], the smallest sum of the probabilities of the remaining tokens.

    Source: https://arxiv.org/abs/2202.00666.
    """
    log_probs = logits.log_softmax(1)
    entropy = -(log_probs * log_probs.exp()).nansum(1, keepdim=True)
    distance = (-log_probs - entropy).abs()

    # The distance of the last token that is needed to reach the sum. Ties with it stay.
    ascending, order = distance.sort(1)
    total, enough = _running_sums(logits.gather(1, order).softmax(1), p)
    last = (total < enough).sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > ascending.gather(1, last), -torch.inf)


def keep_epsilon(logits: Tensor, epsilon: float | Tensor) -> Tensor:
    """Set the logits of tokens less likely than ``epsilon`` to −∞.

    The most likely token always stays.

    Args:
        logits: [B, V] fp32.
        epsilon: in (0, 1), or [B, 1] fp32.

    Source: https://arxiv.org/abs/2210.15191.
    """
    drop = (logits.softmax(1) < epsilon) & (logits < logits.amax(1, keepdim=True))
    return logits.masked_fill(drop, -torch.inf)


def keep_eta(logits: Tensor, epsilon: float) -> Tensor:
    """`keep_epsilon` with the lower of ε and √ε · exp(−entropy), so that a flat distribution keeps more tokens.

    Args:
        logits: [B, V] fp32.
        epsilon: in (0, 1).

    Source: https://arxiv.org/abs/2210.15191.
    """
    entropy = torch.special.entr(logits.softmax(1)).sum(1, keepdim=True)
    return keep_epsilon(logits, (epsilon**0.5 * torch.exp(-entropy)).clamp(max=epsilon))


def _running_sums(share: Tensor, bound: float) -> tuple[Tensor, float]:
    """The running sums of probabilities [B, V] fp32, and ``bound`` in their unit."""
    # Deterministic algorithms on a GPU include cumsum for integers only, and float sums depend on the number of rows.
    if torch.are_deterministic_algorithms_enabled() or is_batch_invariant():
        return (share.double() * 2**53).long().cumsum(1), int(bound * 2**53)
    return share.cumsum(1), bound
