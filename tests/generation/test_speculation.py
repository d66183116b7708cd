"""Speculative decoding: the same tokens as without drafts, in fewer forwards of the model."""

import copy
import math

import pytest
import torch

from liger_models import AutoLigerModel, LigerMedusa
from liger_models.generation.loop import generate, stream
from liger_models.layers.kv_cache import DecodeCache

from ..arch.families import tiny
from .models import PROMPTS, SIZES, VOCAB, counted

NEW = 16


def make(seed=0, **changes):
    torch.manual_seed(seed)
    return AutoLigerModel.from_config({"model_type": "llama", **SIZES, **changes}).eval()


@torch.no_grad()
def disturbed(model, by=0.15):
    """A model that often says the same."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * by * parameter.std(correction=0))
    return other


def trained_heads(model, ids, K=3):
    """Medusa heads that know a text by heart, more or less."""
    medusa = LigerMedusa(model, K)
    optimizer = torch.optim.AdamW(medusa.heads.parameters(), lr=1e-2)
    for _ in range(40):
        medusa(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return medusa


FAMILIES = (
    "llama",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "gpt_oss",
    "cohere2",
    "qwen3",
    "olmo2",
    "gemma4_text",
    "llama4_text",
)


@pytest.mark.cases(5)
@pytest.mark.parametrize("arch", FAMILIES)
def test_families(arch, monkeypatch):
    """Also such with windows, softcaps, sinks, experts, and keys that layers share."""
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({"model_type": arch, **next(iter(tiny(arch).values()))}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    ids = torch.randint(3, 40, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :2] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": [], "no_repeat_ngram_size": 1}
    want = model.generate(ids, **options)
    draft = disturbed(model, 0.05)
    sizes = counted(model, monkeypatch)
    assert torch.equal(model.generate(ids, draft_model=draft, num_draft_tokens=3, **options), want)
    assert NEW // 4 + 1 < len(sizes) < NEW  # rows disagree with the draft, but not at each token
    assert {2, 3, 4} & {*sizes}


OPTIONS = {
    "greedy": {},
    "rules": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 8, "suppress_tokens": [4]},
    "processor": {"logits_processor": lambda ids, logits: logits - (ids[:, -1:] % 5)},
    "sampled": {"do_sample": True, "seed": [5, 9, 2**40], "temperature": 1.2, "top_p": 0.95},
    "several": {"do_sample": True, "seed": 3, "min_p": 0.02, "num_return_sequences": 2},
}
DRAFTS = ("disturbed", "itself", "stranger", "fewer-tokens", "more-tokens", "heads")


@pytest.mark.cases(8)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", DRAFTS)
def test_the_tokens_are_those_without_a_draft(kind, options, monkeypatch):
    model, options = make(), {"max_new_tokens": NEW, **OPTIONS[options]}
    free = generate(model, PROMPTS, **options)[:, -NEW:].tolist()
    stops = [free[0][5], free[1][9], free[2][2]]
    options |= {"eos_token_id": stops, "pad_token_id": 1, "return_logprobs": True}
    want = generate(model, PROMPTS, **options)
    draft = {
        "disturbed": lambda: disturbed(model),
        "itself": lambda: model,
        "stranger": lambda: make(1, hidden_size=16, num_hidden_layers=1),
        "fewer-tokens": lambda: make(2, vocab_size=VOCAB - 20),
        "more-tokens": lambda: make(3, vocab_size=VOCAB + 20),
        "heads": lambda: trained_heads(model, want.sequences[:1]),
    }[kind]()
    got = generate(model, PROMPTS, **options, draft_model=draft)
    assert torch.equal(got.sequences, want.sequences)
    assert got.finish_reasons == want.finish_reasons
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)
    del options["return_logprobs"]
    steps = []
    for tokens in stream(model, PROMPTS, **options, draft_model=draft, num_draft_tokens=2):
        steps.append(tokens.clone())
        tokens.zero_()
    assert torch.equal(torch.stack(steps, 1), want.sequences[:, 9:])


@pytest.mark.parametrize("count", [1, 4, 40])
def test_a_draft_that_is_always_right(count, monkeypatch):
    model = make()
    draft = copy.deepcopy(model)
    sizes, drafted = counted(model, monkeypatch), counted(draft, monkeypatch)
    got = generate(model, PROMPTS, max_new_tokens=NEW, draft_model=draft, num_draft_tokens=count)
    assert len(sizes) == 1 + math.ceil((NEW - 1) / (count + 1))
    assert sizes[0] == 9
    assert sum(sizes) == 9 + NEW - 1  # nothing is run twice
    assert max(drafted[1:]) <= 2
    assert torch.equal(got, generate(model, PROMPTS, max_new_tokens=NEW))
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=1, draft_model=draft), got[:, :10])


@pytest.mark.cases(4)
@pytest.mark.parametrize("original", [9, 10, 14, 40])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_depend_on_the_length(kind, original, monkeypatch):
    rope = {"rope_theta": 10000.0, "rope_type": kind}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0]}
        rope |= {"original_max_position_embeddings": original}
        model = make(model_type="phi3", rope_parameters=rope, original_max_position_embeddings=original)
    else:
        model = make(rope_parameters={**rope, "factor": 4.0}, max_position_embeddings=original)
    for prompts in (PROMPTS, PROMPTS[1:2]):
        want = generate(model, prompts, max_new_tokens=NEW)
        sizes = counted(model, monkeypatch)
        assert torch.equal(generate(model, prompts, max_new_tokens=NEW, draft_model=make(model_type="llama")), want)
        assert torch.equal(generate(model, prompts, max_new_tokens=NEW, draft_model=copy.deepcopy(model)), want)
        assert max(sizes[1:]) > 1 or (kind, original) in (("dynamic", 9), ("dynamic", 10))
        monkeypatch.undo()


def test_heads_propose_what_they_say_of_the_whole_text(monkeypatch):
    """As many forwards as the heads' logits for the whole sequence lead to."""
    model = make()
    ids = generate(model, PROMPTS[:1], max_new_tokens=NEW)
    medusa = trained_heads(model, ids)
    with torch.no_grad():
        proposals = medusa(ids).logits[1:, 0].argmax(2)  # [K, S], of column t for columns t + 2, ...
    end, forwards, S = 10, 1, ids.shape[1]
    while end < S:
        count = min(3, S - end - 1)
        hits = [int(proposals[index, end - 2]) == int(ids[0, end + index]) for index in range(count)]
        end += 1 + (hits.index(False) if False in hits else count)
        forwards += 1
    assert forwards < 2 * NEW // 3
    sizes = counted(model, monkeypatch)
    assert torch.equal(medusa.generate(PROMPTS[:1], max_new_tokens=NEW), ids)
    assert len(sizes) == forwards
    assert torch.equal(medusa.generate(PROMPTS[:1], max_new_tokens=NEW, num_draft_tokens=1), ids)


def test_heads_that_share_the_models_projection():
    model = make()
    medusa = LigerMedusa(model, 2, share_lm_head=True)
    with torch.no_grad():
        for parameter in medusa.heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        hidden = model(torch.tensor(PROMPTS[:1]), return_logits=False).hidden_states[-1]
        logits = medusa(torch.tensor(PROMPTS[:1])).logits
        for index in range(2):
            torch.testing.assert_close(medusa.draft_logits(hidden, index), logits[1 + index])
    assert torch.equal(medusa.generate(PROMPTS, max_new_tokens=6), model.generate(PROMPTS, max_new_tokens=6))


def test_what_is_refused():
    model, medusa = make(), LigerMedusa(make(), 2)
    recurrent = AutoLigerModel.from_config({"model_type": "qwen3_next", **tiny("qwen3_next")["aux"]})
    for draft, options, message in (
        ("model", {}, r"must be a model of this package, or LigerMTP or LigerMedusa around this model, got str"),
        (medusa, {}, r"LigerMedusa around this model, got LigerMedusa"),
        (make(), {"do_sample": True}, r"draft_model needs seed with do_sample=True.*Pass seed=0"),
        (make(), {"use_cache": False}, r"draft_model must be given without cache and use_cache=False"),
        (make(), {"cache": DecodeCache(30)}, r"draft_model must be given without cache and use_cache=False"),
        (make(), {"num_draft_tokens": 0}, r"num_draft_tokens must be an integer of at least 1, got 0"),
        (LigerMedusa(model, 2), {"num_draft_tokens": 3}, r"at most the number of heads \(2\), got 3"),
        (recurrent, {}, r"needs caches that can be cut back, got recurrent states in LigerQwen3Next"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, max_new_tokens=4, draft_model=draft, **options)
    with pytest.raises(ValueError, match=r"draft_model must be on cpu like the model, got meta"):
        generate(model, PROMPTS, max_new_tokens=4, draft_model=make().to("meta"))
    with pytest.raises(ValueError, match=r"recurrent states in LigerQwen3Next"):
        generate(recurrent, PROMPTS, max_new_tokens=4, draft_model=model)


@pytest.mark.gpu
def test_on_the_gpu():
    """Several tokens go through flex_attention, a single one through other kernels: in fp32 the same tokens."""
    model = make(hidden_size=64).cuda()
    for prompts in (PROMPTS, PROMPTS[:1]):
        want = generate(model, prompts, max_new_tokens=NEW)
        for draft in (disturbed(model), trained_heads(model, want[:1])):
            assert torch.equal(generate(model, prompts, max_new_tokens=NEW, draft_model=draft), want)
