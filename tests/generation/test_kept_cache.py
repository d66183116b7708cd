"""A cache that is kept from call to call: only what is new is computed."""

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.loop import generate, stream
from liger_models.layers.kv_cache import DecodeCache

from .models import PROMPTS, SIZES, VARIANTS, VOCAB, _rope, counted, padded


def test_a_conversation_computes_only_what_is_new(ours, monkeypatch):
    sizes = counted(ours, monkeypatch)
    cache = DecodeCache(40)
    prompt = PROMPTS[0]
    first = generate(ours, [prompt], max_new_tokens=5, cache=cache)[0].tolist()
    assert cache.length == 13
    # The new tokens and the last; then two that follow these; then two others instead; then the last is run again.
    for more, computed in (([4, 8], 3), ([4, 8, 30, 31], 2), ([11, 12], 2), ([], 1)):
        asked = first + more
        sizes.clear()
        got = generate(ours, [asked], max_new_tokens=3, cache=cache)
        assert sizes[0] == computed
        assert cache.length == len(asked) + 2
        assert torch.equal(got, generate(ours, [asked], max_new_tokens=3))
    sizes.clear()
    assert torch.equal(
        generate(ours, [[1, 2]], max_new_tokens=3, cache=cache), generate(ours, [[1, 2]], max_new_tokens=3)
    )
    assert sizes[0] == 2  # nothing in common


def test_a_kept_cache_of_padded_rows(ours, monkeypatch):
    """Columns are compared: other padding, or another token in one row, cuts all rows."""
    cache = DecodeCache(40)
    first = generate(ours, **padded(), max_new_tokens=4, cache=cache)
    mask = torch.nn.functional.pad(padded()["attention_mask"], (0, 6), value=1)
    sizes = counted(ours, monkeypatch)
    asked = torch.cat([first, torch.tensor([[4, 8], [9, 9], [30, 1]])], 1)
    other = asked.clone()
    other[1, 11] = (asked[1, 11] + 1) % VOCAB
    for ids, start in ((asked, 12), (other, 11)):
        sizes.clear()
        got = generate(ours, ids, attention_mask=mask, max_new_tokens=4, cache=cache)
        assert sizes[0] == ids.shape[1] - start
        assert torch.equal(got, generate(ours, ids, attention_mask=mask, max_new_tokens=4))
    sizes.clear()
    got = generate(ours, ids[:, :8], max_new_tokens=2, cache=cache)
    assert sizes[0] == 8  # no padding now, so that the first tokens differ
    assert torch.equal(got, generate(ours, ids[:, :8], max_new_tokens=2))


def test_a_kept_cache_with_several_continuations_and_with_stream(ours, monkeypatch):
    cache = DecodeCache(30)
    steps = stream(ours, PROMPTS[:1], max_new_tokens=8, cache=cache)
    said = [int(next(steps)) for _ in range(4)]
    del steps  # what was computed is there
    sizes = counted(ours, monkeypatch)
    asked = [PROMPTS[0] + said + [3]]
    options = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3, "seed": 5}
    got = generate(ours, asked, **options, cache=cache)
    assert sizes[0] == 2
    assert torch.equal(got, generate(ours, asked, **options))
    sizes.clear()
    more = torch.cat([got, got[:, :2]], 1)
    assert torch.equal(generate(ours, more, max_new_tokens=2, cache=cache), generate(ours, more, max_new_tokens=2))
    assert sizes[0] == 3


@pytest.mark.parametrize("limit", [6, 11, 15, 40])
def test_a_kept_cache_where_frequencies_are_dynamic(limit, monkeypatch):
    torch.manual_seed(0)
    sizes = SIZES | VARIANTS["dynamic"] | {"max_position_embeddings": limit}
    ours = AutoLigerModel.from_config({**sizes, "model_type": "llama"}).eval()
    cache, computed = DecodeCache(60), counted(ours, monkeypatch)
    asked, starts = generate(ours, PROMPTS[:1], max_new_tokens=8, cache=cache), []
    for ids in (torch.cat([asked, asked[:, 3:9]], 1), asked[:, :11], asked[:, :14], asked[:, :7]):
        computed.clear()
        got = generate(ours, ids, max_new_tokens=8, cache=cache, return_logprobs=True)
        starts.append(ids.shape[1] - computed[0])
        want = generate(ours, ids, max_new_tokens=8, return_logprobs=True)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)
    assert any(starts) == (limit == 40)


@pytest.mark.parametrize("original", [9, 12, 20])
def test_a_kept_cache_where_longrope_switches(original):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0]}
    rope = _rope(rope_type="longrope", original_max_position_embeddings=original, **factors)
    torch.manual_seed(0)
    ours = AutoLigerModel.from_config(
        {**SIZES, "model_type": "phi3", **rope, "original_max_position_embeddings": original}
    )
    cache = DecodeCache(40)
    asked = generate(ours, PROMPTS[:1], max_new_tokens=5, cache=cache)
    for ids in (asked, torch.cat([asked, asked[:, 3:9]], 1), asked[:, :11], asked[:, :6]):
        assert torch.equal(generate(ours, ids, max_new_tokens=3, cache=cache), generate(ours, ids, max_new_tokens=3))


def test_a_forward_that_fails_leaves_a_kept_cache_as_it_was(ours):
    """For example one that runs out of memory: a retry may have fewer rows or other weights."""
    options = {"max_new_tokens": 3, "eos_token_id": []}
    cache, ids = DecodeCache(40), torch.tensor([PROMPTS[0]] * 3)

    def fail(*_):
        raise RuntimeError("out of memory")

    def refused(model, prompts):
        handle = model.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(prompts, cache=cache, **options)
        handle.remove()

    refused(ours, ids)
    for again in (ids[:1], ids[:2]):
        assert torch.equal(ours.generate(again, cache=cache, **options), ours.generate(again, **options))
        cache.length = 0
    half = LigerLlama.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).eval()
    refused(half, ids)
    assert torch.equal(half.generate(ids, cache=cache, **options), half.generate(ids, **options))
