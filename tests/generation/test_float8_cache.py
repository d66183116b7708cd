"""Rollouts whose keys and values are cached in float8."""

import itertools
import re
from contextlib import nullcontext

import pytest
import torch

from liger_models.generation import rollout_checks, scheduler
from liger_models.generation.graphs import DecodeStep
from liger_models.generation.rollouts import rollout
from liger_models.generation.scheduler import Scheduler
from liger_models.kernels.attention.scaled_pages import ScaledPages
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers import paged_cache
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.page_pool import PagePool

from .test_rollout import NEW, PAGE_BYTES, VOCAB, captured, family, llama, make_prompts, pools

__all__ = ["captured", "pools"]

pytestmark = pytest.mark.slow

FLOAT8 = torch.float8_e4m3fn
FLOAT8_PAGE_BYTES = 2 * 2 * 2 * (16 + 4) * 16
"""Two layers, keys and values, 2 heads of 16 codes and a scale, pages of 16 tokens."""


@pytest.fixture(autouse=True)
def _pages_of_16_tokens(monkeypatch):
    monkeypatch.setattr(paged_cache, "PAGE", 16)


@pytest.fixture(autouse=True)
def _plain_torch(request):
    on_kernels = "kernel_device" in request.fixturenames or request.node.get_closest_marker("gpu")
    with nullcontext() if on_kernels else reference_backend():
        yield


def rounded(x):
    """Round x [..., D] to float8, with a power of two as the scale of each row."""
    scale = 2 ** (x.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12).log2().ceil()
    return (x / scale).to(FLOAT8).to(x.dtype) * scale


def rollout_of_rounded(model, prompts, monkeypatch, cache_bytes=None, **options):
    """A rollout with ordinary pages, in which rounded keys and values are written."""
    extend = PagePool.extend

    def extend_rounded(self, layer, k, v):
        found = extend(self, layer, rounded(k), rounded(v))
        return (k, v) if self.pages is None and not self.length else found

    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "extend", extend_rounded)
        return rollout(model, prompts, cache_bytes=cache_bytes, **options)


def assert_same(found, want):
    for got, expected in zip(found, want, strict=True):
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert torch.equal(got.log_probs, expected.log_probs)


@pytest.mark.cases(3)
@pytest.mark.parametrize("arch", ["llama", "gpt_oss", "gemma4_text", "qwen3_next", "gemma2", "mixtral", "llama4_text"])
def test_steps_attend_to_rounded_keys_and_values(arch, monkeypatch):
    """With windows, sinks, keys of other layers and chunks: bit for bit as with pages of rounded numbers."""
    model = family(arch)
    prompts = make_prompts(vocab=40)
    options = {"max_new_tokens": NEW, "do_sample": True, "seed": 0, "eos_token_id": []}
    options |= {"batch_size": 3, "chunk_size": 11, "steps_per_read": 3}
    found = rollout(model, prompts, cache_dtype="float8", **options)
    assert_same(found, rollout_of_rounded(model, prompts, monkeypatch, **options))
    exact = rollout(model, prompts, **options)
    assert any(not torch.equal(got.log_probs, want.log_probs) for got, want in zip(found, exact, strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("more", [0, 2])
def test_rows_that_share_prompts_and_are_put_back(pools, monkeypatch, more):
    """Partly filled pages are copied with their scales, and rows that are computed again fill other pages."""
    model, removed, original = llama(), [], Scheduler._remove
    monkeypatch.setattr(Scheduler, "_remove", lambda self, row: removed.append(row.number) or original(self, row))
    prompts, new = make_prompts([20, 3, 17, 2, 5, 19]), [20, 44, 22, 35, 38, 25]
    options = {"max_new_tokens": new, "do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": 3}
    options |= {"chunk_size": 9, "steps_per_read": 5}
    found = rollout(model, prompts, cache_dtype="float8", cache_bytes=(4 + more) * FLOAT8_PAGE_BYTES, **options)
    assert len(removed) > len(found)
    assert_same(found, rollout_of_rounded(model, prompts, monkeypatch, (4 + more) * PAGE_BYTES, **options))
    small, large = pools
    assert small.num_free == large.num_free == 3 + more
    assert small.num_bytes == (4 + more) * FLOAT8_PAGE_BYTES
    assert large.num_bytes == (4 + more) * PAGE_BYTES
    with pytest.raises(ValueError, match=f"cache_bytes must be at least {4 * FLOAT8_PAGE_BYTES} for prompt"):
        rollout(model, prompts, cache_dtype="float8", cache_bytes=4 * FLOAT8_PAGE_BYTES - 1, **options)


def test_kernels_compute_what_the_reference_computes(kernel_device, monkeypatch):
    """Also for groups of rows whose prompt is read once."""
    monkeypatch.setattr(scheduler, "LEAST_SHARED_FLOAT8", 32)
    model, prompts = llama(kernel_device), make_prompts([38, 9])
    options = {"max_new_tokens": 4, "do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": 3}
    found = rollout(model, prompts, cache_dtype="float8", **options)
    with reference_backend():
        want = rollout(model, prompts, cache_dtype="float8", **options)
    for got, expected in zip(found, want, strict=True):
        assert got.tokens.tolist() == expected.tokens.tolist()
        # A key on the border between two float8 numbers may be rounded to either.
        torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=2e-2, atol=2e-3)


def compare_with_training(model, prompts, rows):
    """The differences of the log-probabilities of rows to those of a training forward."""
    texts = [torch.tensor([*prompt, *row.tokens.tolist()]) for prompt, row in zip(prompts, rows, strict=True)]
    ids = torch.cat(texts)[None].to(model.device)
    bounds = torch.tensor([0, *itertools.accumulate(map(len, texts))], device=model.device)
    trained = model(ids, labels=ids, cu_seqlens=bounds, return_log_probs=True).log_probs[0].float().cpu()
    starts = [start + len(prompt) - 1 for start, prompt in zip(bounds.tolist(), prompts, strict=False)]
    pairs = ((row.log_probs, trained[start : start + len(row.tokens)]) for start, row in zip(starts, rows, strict=True))
    return torch.cat([mine - theirs for mine, theirs in pairs]).abs()


def test_log_probs_are_near_those_of_the_training_forward():
    model, prompts = llama(), make_prompts()
    options = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "eos_token_id": []}
    difference = compare_with_training(model, prompts, rollout(model, prompts, cache_dtype="float8", **options))
    assert 1e-3 < difference.mean() < 0.2
    assert compare_with_training(model, prompts, rollout(model, prompts, **options)).max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_steps_read_float8(captured, dtype):
    model, prompts = llama("cuda", dtype=dtype), make_prompts()
    options = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "eos_token_id": [], "batch_size": 3}
    rollout(model, prompts, **options)
    captured.clear()
    found = rollout(model, prompts, cache_dtype="float8", **options)
    assert captured[0] == 3
    assert 1e-3 < compare_with_training(model, prompts, found).mean() < 0.2


def test_a_step_with_float8_is_another_step():
    """A step without float8 has compiled other kernels, so the next step with float8 must not be captured at once."""
    kinds = []
    for dtype in (None, FLOAT8):
        kinds.append(DecodeStep(pool_of(dtype), captured=False)._kind())
    assert kinds[0] != kinds[1]


def pool_of(cache_dtype, D=2, V=2):
    probe = DecodeCache(1)
    probe.extend(0, torch.ones(1, 1, 1, D), torch.ones(1, 1, 1, V))
    return PagePool(2, 40, torch.device("cpu"), pages=6, like=probe, cache_dtype=cache_dtype)


def test_pages_of_a_pool():
    pool = pool_of(FLOAT8, V=4)
    assert pool.num_bytes == 6 * 16 * (2 + 4 + 4 + 4)
    pool.assign(0, [4, 2])
    pool.fill([(0, 0, 17)])
    k, v = torch.randn(1, 17, 1, 2, dtype=torch.bfloat16), torch.randn(1, 17, 1, 4, dtype=torch.bfloat16)
    assert pool.extend(0, k, v) == (k, v)

    # A later chunk reads the rounded numbers of all tokens.
    pool.fill([(0, 17, 20)])
    more = torch.randn(1, 3, 1, 2, dtype=torch.bfloat16), torch.randn(1, 3, 1, 4, dtype=torch.bfloat16)
    for got, *parts in zip(pool.extend(0, *more), (k, v), more, strict=True):
        assert torch.equal(got, rounded(torch.cat(parts, 1).float()).bfloat16())

    # Copied pages have their scales.
    pool.copy([(2, 3)], [])
    pool.resume(torch.tensor([20, 0]), torch.tensor([1, 0]))
    pool.step()
    assert pool.pages_of(0) is None
    for pages in pool.extend(0, *(x[:, :1].expand(2, -1, -1, -1) for x in (k, v))):
        assert isinstance(pages, ScaledPages)
        copies, originals = pages.select(torch.tensor([3, 2]), torch.float32)
        assert torch.equal(copies[:4], originals[:4])
        assert copies[:4].all()


def test_what_is_refused(monkeypatch):
    model, options = llama(), {"max_new_tokens": 3, "eos_token_id": []}
    for more, message in (
        ({"cache_dtype": "int8"}, "cache_dtype must be None or \"float8\", got 'int8'."),
        ({"cache_dtype": FLOAT8}, 'must be None or "float8", got torch.float8_e4m3fn.'),
        ({"cache_dtype": "float8", "deterministic": True}, "must be None with deterministic=True, got 'float8'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            rollout(model, [[3, 4]], **options, **more)
    with pytest.raises(
        ValueError, match="and no latents, got values of 0 columns in LigerDeepseekV2, with cache_dtype='float8'"
    ):
        rollout(family("deepseek_v2"), [[3, 4]], cache_dtype="float8", **options)
    with pytest.raises(ValueError, match=r"None for latents, got .* for layer 0, whose values have no columns"):
        pool_of(FLOAT8, V=0)
    with pytest.raises(ValueError, match=r"PagePool: cache_dtype must be None or torch\.float8_e4m3fn, got"):
        pool_of(torch.float16)
    monkeypatch.setattr(rollout_checks, "converts", lambda device: False)
    with pytest.raises(ValueError, match=r"on an NVIDIA GPU with compute capability 8\.9 or higher, got cpu"):
        rollout(model, [[3, VOCAB - 1]], cache_dtype="float8", **options)
