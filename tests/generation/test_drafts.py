"""Drafts of a model's multi-token prediction block: the tokens and their distribution are those without drafts."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from liger_models import AutoLigerModel, LigerMTP
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.draft_rounds import DraftRound
from liger_models.kernels.dispatch import reference_backend

from ..arch.families import tiny

FAMILIES = ["qwen3_next", "deepseek_v3", "nemotron_h", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe_text", "qwen3_5_text"]


@pytest.fixture(autouse=True)
def _plain_torch(request):
    on_kernels = "kernel_device" in request.fixturenames or request.node.get_closest_marker("gpu")
    with nullcontext() if on_kernels else reference_backend():
        yield


def drafting(arch, **changes):
    """A model and its block with random weights, whose drafts are sometimes right."""
    torch.manual_seed(0)
    sizes = {**next(iter(tiny(arch).values())), **changes}
    model = AutoLigerModel.from_config({**sizes, "model_type": arch}).eval()
    mtp = LigerMTP(model)
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.02))
            if name.endswith("A_log"):
                parameter.sub_(4)
        # The block passes on the embedding of the last token, and the model prefers the token after it.
        C = model.config.hidden_size
        mtp.fc.weight[:, :C] += torch.eye(C)
        model.lm_head.weight.copy_(model.embed_tokens.weight.roll(1, 0) * 10 / model.embed_tokens.weight.std() / C**0.5)
    return model, mtp


def prompts_of(model, lengths=(1, 5, 9, 3)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.cases(4)
@pytest.mark.parametrize("arch", FAMILIES)
def test_tokens_are_those_without_drafts(arch):
    """Greedy, and sampled with seeds; with prompts in chunks, shared prompts, ended rows and recorded experts."""
    model, mtp = drafting(arch)
    prompts, new = prompts_of(model), [12, 3, 15, 7]
    records = {"record_routing": bool(model.routers)}
    greedy = {"max_new_tokens": new, "eos_token_id": [11], **records}
    sampled = {"max_new_tokens": 8, "do_sample": True, "seed": 3, "num_return_sequences": 2, "top_k": 20}
    drafts = {"draft_model": mtp, "num_draft_tokens": 2}
    for options, small in ((greedy, {"batch_size": 2, "steps_per_read": 3, "chunk_size": 4}), (sampled, {})):
        want = model.rollout(prompts, **options)
        found = model.rollout(prompts, **options, **drafts, **small)
        for expected, row in zip(want, found, strict=True):
            assert row.tokens.tolist() == expected.tokens.tolist()
            assert row.reason == expected.reason
            torch.testing.assert_close(row.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)
            if expected.routed_experts is not None:
                assert torch.equal(row.routed_experts.sort(-1)[0], expected.routed_experts.sort(-1)[0])
        assert sum(row.rounds for row in found) < sum(len(row.tokens) for row in found)  # some drafts are accepted


def test_drafts_with_a_cache_in_float8():
    """Keys and values of drafts that are not accepted are overwritten."""
    model, mtp = drafting("qwen3_5_text")
    prompts, options = (
        prompts_of(model),
        {"max_new_tokens": [12, 3, 15, 7], "eos_token_id": [], "cache_dtype": "float8"},
    )
    for more in ({}, {"do_sample": True, "seed": 3}):
        want = model.rollout(prompts, **options, **more)
        found = model.rollout(prompts, **options, **more, draft_model=mtp, num_draft_tokens=2)
        for expected, row in zip(want, found, strict=True):
            assert row.tokens.tolist() == expected.tokens.tolist()
            torch.testing.assert_close(row.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)
        assert sum(row.rounds for row in found) < sum(len(row.tokens) for row in found)


@torch.no_grad()
def drafts_after(model, mtp, tokens, count):
    """The drafts for the tokens after ``tokens``, by forwards of the block without a cache."""
    ids = torch.tensor([tokens])
    hidden, ahead = model(ids[:, :-1], return_logits=False).hidden_states[-1], ids[:, 1:]
    for _ in range(count):
        embeds, layout = model.prepare(ahead)
        last = mtp.predict(hidden, embeds, layout)[:, -1:]
        hidden = torch.cat([hidden, last], 1)
        ahead = torch.cat([ahead, model.lm_head(last)[:, 0].argmax(-1, keepdim=True)], 1)
    return ahead[0, -count:].tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize("arch", FAMILIES)
def test_drafts_are_those_of_the_block_without_a_cache(arch, monkeypatch):
    """After each round, however many drafts of the rounds before were accepted."""
    model, mtp = drafting(arch)
    (prompt,), rounds = prompts_of(model, [5]), []
    run = DraftRound._run

    def watch(self, *arguments):
        result = run(self, *arguments)
        rounds.append((int(result.counts), self._tokens[0, 1:].tolist()))
        return result

    monkeypatch.setattr(DraftRound, "_run", watch)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [], "batch_size": 1}
    (row,) = model.rollout([prompt], **options, draft_model=mtp, num_draft_tokens=3)
    tokens, length = prompt + row.tokens.tolist(), len(prompt)
    for count, drafts in rounds[:-1]:  # the last round ends the row
        length += count
        assert drafts == drafts_after(model, mtp, tokens[:length], 3)
    assert len({count for count, _ in rounds}) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_a_later_rollout_captures_its_rounds_at_once(arch, monkeypatch):
    """Without an ordinary round, because the kernels of a round of the same shapes are compiled."""
    model, mtp = drafting(arch)
    model, mtp = model.to("cuda"), mtp.to("cuda")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [], "batch_size": 4}
    calls, run, is_capturing = [], DraftRound._run, torch.cuda.is_current_stream_capturing
    monkeypatch.setattr(DraftRound, "_run", lambda *args: calls.append(is_capturing()) or run(*args))
    for lengths, ordinary in (((1, 5, 9, 3), 1), ((2, 4, 8, 6), 0)):
        prompts = prompts_of(model, lengths)
        want = model.rollout(prompts, **options)
        calls.clear()
        found = model.rollout(prompts, **options, draft_model=mtp, num_draft_tokens=2)
        assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in want]
        assert calls == [False] * ordinary + [True]


def test_generate_and_stream_are_those_without_drafts():
    model, mtp = drafting("qwen3_5_text")
    prompts = prompts_of(model)
    options = {"max_new_tokens": 9, "eos_token_id": [int(model.generate(prompts[1], max_new_tokens=3)[0, -1])]}
    want = model.generate(prompts, **options, pad_token_id=0, return_logprobs=True)
    found = model.generate(prompts, **options, pad_token_id=0, return_logprobs=True, draft_model=mtp)
    assert torch.equal(found.sequences, want.sequences)
    assert found.finish_reasons == want.finish_reasons
    assert set(want.finish_reasons) == {"stop", "length"}
    torch.testing.assert_close(found.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)
    mtp.train()
    streamed = [*model.stream(prompts, **options, pad_token_id=0, draft_model=mtp, num_draft_tokens=3)]
    assert torch.equal(torch.stack(streamed, 1), want.sequences[:, len(prompts[2]) :])
    assert mtp.training


def test_kernels_draft_as_plain_torch(kernel_device):
    """Sampled tokens, from seeds and from the numbers of a generator, which verify and draw drafts in two ways."""
    model, mtp = drafting("qwen3_5_text")
    model, mtp = model.to(kernel_device), mtp.to(kernel_device)
    options = {"max_new_tokens": 5, "eos_token_id": [11], "do_sample": True, "draft_model": mtp, "num_draft_tokens": 2}
    for draws in ({"seed": 3}, {"generator": torch.Generator(kernel_device)}):
        rows = []
        for context in (reference_backend(), nullcontext()):
            if "generator" in draws:
                draws["generator"].manual_seed(1)
            with context:
                rows += model.rollout([[5, 9, 30]], **options, **draws)
        assert rows[1].tokens.tolist() == rows[0].tokens.tolist()
        assert rows[1].rounds == rows[0].rounds < 5
        torch.testing.assert_close(rows[1].log_probs, rows[0].log_probs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seeded", [False, True], ids=["generator", "seed"])
def test_sampled_tokens_have_the_distribution_of_the_model(seeded):
    """The chi-square statistic of all answers of three tokens, whose probabilities follow from forwards."""
    V, rows = 5, 2000
    model, mtp = drafting("qwen3_5_text", vocab_size=V, pad_token_id=None)
    with torch.no_grad():  # of draft and model alike, but not the same
        model.lm_head.weight *= 0.1
    prompt, temperature = [1, 4], 0.8
    answers = torch.tensor([*itertools.product(range(V), repeat=3)])  # [V^3, 3]
    ids = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], 1)
    with torch.no_grad():
        log_probs = (model(ids).logits[:, 1:-1] / temperature).log_softmax(-1)
    expected = rows * log_probs.gather(2, answers[..., None]).sum((1, 2)).exp()
    draws = {"seed": 5} if seeded else {"generator": torch.Generator().manual_seed(0)}
    found = model.rollout(
        [prompt], max_new_tokens=3, do_sample=True, temperature=temperature, num_return_sequences=rows, eos_token_id=[],
        draft_model=mtp, num_draft_tokens=2, batch_size=1000, **draws,
    )  # fmt: skip
    numbers = torch.stack([row.tokens for row in found]) @ torch.tensor([V * V, V, 1])
    counts = torch.bincount(numbers, minlength=V**3)
    statistic, freedom = ((counts - expected) ** 2 / expected).sum().item(), V**3 - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
    accepted = 3 * rows - sum(row.rounds for row in found)
    assert 0.1 * rows < accepted < 1.5 * rows  # both branches have run


def test_drafts_that_do_not_fit_are_refused():
    model, mtp = drafting("qwen3_5_text")
    with pytest.raises(ValueError, match="LigerMTP as draft_model, repetition_penalty, stop_strings must be omitted"):
        model.generate([1], max_new_tokens=2, draft_model=mtp, repetition_penalty=1.2, stop_strings="a", tokenizer=[])
    llama = LigerLlama(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_attention_heads=1))
    for call in (llama.generate, llama.rollout):
        with pytest.raises(ValueError, match="or LigerMTP or LigerMedusa around this model, got LigerMTP"):
            call([[1]], max_new_tokens=2, draft_model=mtp)
    with pytest.raises(ValueError, match="draft_model must be LigerMTP around this LigerLlama, got LigerLlama"):
        llama.rollout([[1]], max_new_tokens=2, draft_model=llama)


def test_deterministic_log_probabilities_are_bitwise_those_without_drafts():
    model, mtp = drafting("glm4_moe")
    options = {"max_new_tokens": 9, "eos_token_id": [], "do_sample": True, "seed": 0, "deterministic": True}
    want = model.rollout(prompts_of(model), **options)
    found = model.rollout(prompts_of(model), **options, draft_model=mtp)
    assert sum(row.rounds for row in found) < 36
    for expected, row in zip(want, found, strict=True):
        assert torch.equal(row.tokens, expected.tokens)
        assert torch.equal(row.log_probs, expected.log_probs)
