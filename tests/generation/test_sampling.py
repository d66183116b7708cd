"""Filters and draws against transformers' and torch's."""

import pytest
import torch

from liger_models.generation import sampling
from liger_models.generation.loop import generate
from liger_models.generation.sampling import (
    Sampler,
    draw,
    keep_epsilon,
    keep_eta,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    penalize_repetition,
)
from liger_models.kernels.loss.seeded_scores import exponential_noise

from ..late import transformers
from .models import NEW, PROMPTS, VOCAB, resolved


def random_logits():
    torch.manual_seed(3)
    logits = torch.randn(16, VOCAB) * 3
    logits[3] = logits[3].round()  # ties
    logits[4] = 0.0
    logits[5, 7] = 100.0  # certain
    logits[6, 5:] = -torch.inf
    logits[7] = torch.tensor([0.0] * 4 + [-torch.inf] * (VOCAB - 4))  # quarters: sums that equal 1 − p
    return logits


@pytest.mark.parametrize("k", [1, 2, 5, VOCAB - 1, VOCAB, 1000])
def test_top_k_is_that_of_transformers(k):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_top_k(logits, k), transformers.TopKLogitsWarper(k)(None, logits))
    assert torch.equal(logits, before)
    assert (keep_top_k(logits, k).isfinite().sum(1) >= min(k, 4)).all()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_top_p(logits, p), transformers.TopPLogitsWarper(p)(None, logits))
    assert torch.equal(logits, before)
    assert keep_top_p(logits, p).isfinite().any(1).all()


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.3, 1.0])
def test_min_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_min_p(logits, p), transformers.MinPLogitsWarper(p)(None, logits))
    assert torch.equal(logits, before)
    assert keep_min_p(logits, p).isfinite().any(1).all()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_typical_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    want = transformers.TypicalLogitsWarper(p)(None, logits)
    assert torch.equal(keep_typical_p(logits, p), want)
    assert torch.equal(logits, before)
    dropped = want.gather(1, logits.argmax(1, keepdim=True)).isinf()
    assert dropped.any() == (p <= 0.5)  # unlike the others it may drop the most likely token


@pytest.mark.parametrize("epsilon", [1e-30, 3e-4, 0.02, 0.3, 0.999])
@pytest.mark.parametrize("keep", [keep_epsilon, keep_eta])
def test_cutoffs_are_those_of_transformers(keep, epsilon):
    logits = random_logits()
    before = logits.clone()
    warper = transformers.EpsilonLogitsWarper if keep is keep_epsilon else transformers.EtaLogitsWarper
    want = warper(epsilon)(None, logits)
    assert torch.equal(keep(logits, epsilon), want)
    assert torch.equal(logits, before)
    assert want.isfinite().any(1).all()
    assert not torch.equal(want, logits)  # all but one token of row 5 are less likely than 1e-43


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [keep_top_p, keep_typical_p])
@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9, 0.999])
def test_filters_are_the_same_where_sums_have_a_fixed_order(p, keep, device):
    logits = random_logits().to(device)
    want = keep(logits, p)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(keep(logits, p), want)
        assert torch.equal(keep(logits[:1], p), want[:1])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits()
    before = logits.clone()
    ids = torch.randint(0, VOCAB, (16, 12))
    seen = torch.zeros(16, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
    want = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(penalize_repetition(logits, seen, penalty), want)
    assert torch.equal(logits, before)


def test_filters_are_applied_in_the_order_of_transformers(ours, monkeypatch):
    """The probabilities that the draw is made from, exactly."""
    drawn = []
    monkeypatch.setattr(sampling, "draw", lambda p, generator: drawn.append(p) or draw(p, generator))
    logits = random_logits()
    ids = torch.randint(0, VOCAB, (16, 12))
    words = [[20], [30], [ids[0, -1].item(), 40], [*ids[1, -2:].tolist(), 2]]
    bias = transformers.SequenceBiasLogitsProcessor({(13,): 2.5})
    options = resolved(
        ours, do_sample=True, temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, typical_p=0.7, epsilon_cutoff=0.18,
        eta_cutoff=0.2, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=words, suppress_tokens=[50],
        min_new_tokens=1, eos_token_id=[30, 31], logits_processor=bias,
    )  # fmt: skip
    tokens = Sampler(options, ids, VOCAB)(ids, ids, logits)
    want = logits.clone()
    for process in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.NoBadWordsLogitsProcessor(words, [30, 31]),
        transformers.MinNewTokensLengthLogitsProcessor(12, 1, [30, 31]),
        transformers.SuppressTokensLogitsProcessor([50]),
        bias,
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.8),
        transformers.MinPLogitsWarper(0.1),
        transformers.TypicalLogitsWarper(0.7),
        transformers.EpsilonLogitsWarper(0.18),
        transformers.EtaLogitsWarper(0.2),
    ):
        want = process(ids, want)
    want = want.softmax(1)
    assert torch.equal(drawn[0], want)
    assert (want.gather(1, tokens[:, None]) > 0).all()


def test_draws_are_those_of_multinomial():
    for probabilities in (random_logits().softmax(1), torch.rand(3, VOCAB)):
        got, want = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        for _ in range(20):
            assert torch.equal(draw(probabilities, got), torch.multinomial(probabilities, 1, generator=want)[:, 0])
    with pytest.raises(ValueError, match="logits must be numbers below infinity, and finite for some token"):
        draw(torch.full((2, 3), -torch.inf).softmax(1), None)


SAMPLING = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 4},
    {"top_p": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02, "eta_cutoff": 0.01},
    {"temperature": 1.3, "min_p": 0.02, "typical_p": 0.9, "top_k": 30, "no_repeat_ngram_size": 2},
]


@pytest.mark.cases(5)
@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: "-".join(options) or "plain")
def test_sampled_tokens_are_those_of_transformers(pair, options):
    """Both draw from the global generator in the same way."""
    theirs, ours = pair("gqa")
    ids = torch.tensor(PROMPTS[:1] * 8)
    torch.manual_seed(11)
    want = theirs.generate(ids, max_new_tokens=NEW, do_sample=True, **{"top_k": 0, **options})
    torch.manual_seed(11)
    assert torch.equal(generate(ours, ids, max_new_tokens=NEW, do_sample=True, **options), want)
    assert len({tuple(row) for row in want.tolist()}) > 1


def test_a_generator_makes_the_draw_reproducible(ours):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(ours, PROMPTS, max_new_tokens=NEW, do_sample=True, generator=generator)

    state = torch.get_rng_state()
    first = draw(5)
    torch.rand(3)
    assert torch.equal(draw(5), first)
    assert not torch.equal(draw(6), first)
    torch.set_rng_state(state)
    draw(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_with_a_seed_depends_on_no_other(ours):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5, "top_k": 20}
    seeds = [2**40 + 5, 5, 7]
    alone = [
        generate(ours, [prompt], **options, seed=[seed])[0, len(prompt) :]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    state = torch.get_rng_state()
    for order in ([0, 1, 2], [2, 1], [1, 0, 0, 2]):
        got = generate(ours, [PROMPTS[row] for row in order], **options, seed=[seeds[row] for row in order])
        assert all(torch.equal(tokens, alone[row]) for tokens, row in zip(got[:, -NEW:], order, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    for other in (5 + 2**40 + 1, 2**41 + 5):
        assert not torch.equal(generate(ours, PROMPTS[:1], **options, seed=other)[0, 9:], alone[0])
    several = generate(ours, PROMPTS[:2], **options, seed=9, num_return_sequences=2)
    for row in range(4):
        prompt = PROMPTS[row // 2]
        assert torch.equal(several[row, -NEW:], generate(ours, [prompt], **options, seed=9 + row)[0, len(prompt) :])


@pytest.mark.parametrize("seed", [None, 3])
def test_low_temperatures_take_the_most_likely_token(ours, seed):
    want = generate(ours, PROMPTS, max_new_tokens=NEW)
    for temperature in (1e-9, 1e-31, 1e-39, 1e-45):
        options = {"do_sample": True, "temperature": temperature, "seed": seed, "top_p": 0.9}
        assert torch.equal(generate(ours, PROMPTS, max_new_tokens=NEW, **options), want)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "seed": 3}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_probabilities_are_an_error(ours, value, options):
    def spoil(ids, logits):
        return torch.full_like(logits, value)

    with pytest.raises(ValueError, match="logits must be numbers below infinity"):
        generate(ours, PROMPTS, max_new_tokens=1, logits_processor=spoil, **options)


def test_draws_with_seeds_have_the_probabilities_of_the_logits(ours):
    """Pearson's test of 40,000 draws for a few steps: about 1e-6 of fair samples have a larger sum."""
    logits = random_logits()[:1]
    sampler = Sampler(resolved(ours, do_sample=True, temperature=1.3, seed=100), torch.zeros(40000, 1).long(), VOCAB)
    p = (logits[0] / 1.3).softmax(0)
    common = p > 5e-4
    for step in (0, 1, 1000):
        counts = torch.bincount(sampler.draw(logits.expand(40000, -1), step), minlength=VOCAB)
        wanted = 40000 * p[common]
        assert ((counts[common] - wanted) ** 2 / wanted).sum() < 125  # up to 53 tokens
    noise = exponential_noise(torch.arange(200), 3, 5000)
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 5e-3
    assert abs(noise.var() - 1) < 2e-2
    flat = torch.stack([noise[:-1, :-1], noise[1:, :-1], noise[:-1, 1:]]).flatten(1)  # neighbors are independent
    assert (flat.corrcoef() - torch.eye(3)).abs().max() < 5e-3


@pytest.mark.gpu
def test_seeds_mean_the_same_on_every_device():
    seeds = torch.tensor([0, 5, 2**40 + 5])
    torch.testing.assert_close(exponential_noise(seeds.cuda(), 3, 5000).cpu(), exponential_noise(seeds, 3, 5000))
