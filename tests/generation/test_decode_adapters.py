"""Decoding with adapters: what follows from their weights alone is computed once in a generation, and never kept."""

import gc

import pytest
import torch
import torch.distributed as dist

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base, without_adapters
from liger_models.adapters.lora_layers import LinearAdapters, adapted_layers
from liger_models.generation import graphs
from liger_models.generation.loop import generate, stream
from liger_models.generation.rollouts import rollout
from liger_models.layers import derived
from liger_models.parallel import apply_fsdp

from ..train.runs import no_group_is_left  # noqa: F401
from .test_decode_steps import NEW, PROMPTS, captures, device, llama, tiny  # noqa: F401

KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "some": {"target_modules": ["q_proj", "up_proj", "lm_head"], "lora_dropout": 0.3},
}
OPTIONS = {"max_new_tokens": NEW, "eos_token_id": []}


def adapted(kind="lora", device="cpu", **options):  # noqa: F811
    torch.manual_seed(1)
    return stir(apply_lora(llama(device, **options), LoRAConfig(**KINDS[kind]))).eval()


def stir(model):
    """Change the adapters in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def compute_always(monkeypatch):
    monkeypatch.setattr(derived.DerivedTensors, "find", lambda self, key, compute: compute())


@pytest.fixture
def calls(monkeypatch):
    """The layers whose factors were computed."""
    found, original = [], LinearAdapters.factors
    monkeypatch.setattr(LinearAdapters, "factors", lambda self, dtype: found.append(self) or original(self, dtype))
    return found


def by_generate(model):
    out = generate(model, PROMPTS, **OPTIONS, return_logprobs=True)
    return [out.sequences, out.logprobs]


def by_generate_without_a_cache(model):
    out = generate(model, PROMPTS, **OPTIONS, return_logprobs=True, use_cache=False)
    return [out.sequences, out.logprobs]


def by_stream(model):
    return list(stream(model, PROMPTS, **OPTIONS))


def by_rollout(model):
    found = rollout(model, PROMPTS, max_new_tokens=[NEW, 3, 7], eos_token_id=[], batch_size=2, chunk_size=4)
    return [each for row in found for each in (row.tokens, row.log_probs)]


def by_draft(model):
    out = generate(model, PROMPTS, **OPTIONS, return_logprobs=True, draft_model=llama())
    return [out.sequences, out.logprobs]


WAYS = [by_generate, by_generate_without_a_cache, by_stream, by_rollout, by_draft]


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_factors_are_computed_once_and_no_bit_changes(way, kind, calls, monkeypatch):
    model = adapted(kind)
    layers = [layer.lora for layer in adapted_layers(model).values()]
    got = way(model)
    assert len(calls) == len(layers)
    assert set(calls) == set(layers)
    with monkeypatch.context() as patch:
        compute_always(patch)
        want = way(model)
    assert len(calls) > 5 * len(layers)
    assert all(map(torch.equal, got, want))
    calls.clear()
    stir(model)
    assert not torch.equal(way(model)[-1], got[-1])
    assert len(calls) == len(layers)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_captured_steps_read_new_weights(kind, device, captures, calls):  # noqa: F811
    """A graph that is kept from call to call reads the factors where they are, which each call computes anew."""
    model = adapted(kind, device)
    layers, found = len(adapted_layers(model)), []
    for _ in range(3):
        calls.clear()
        found.append(generate(model, PROMPTS, **OPTIONS, return_logprobs=True))
        assert len(calls) <= 2 * layers  # for the prompts and for their capture, or in a graph; not for each token
        want = generate(model, PROMPTS, **OPTIONS, return_logprobs=True, use_cache=False)
        assert torch.equal(found[-1].sequences, want.sequences)
        torch.testing.assert_close(found[-1].logprobs, want.logprobs, rtol=1e-3, atol=1e-4)
        stir(model)
    assert len(captures) == 1
    assert not torch.equal(found[0].logprobs, found[1].logprobs)
    with without_adapters(model):
        assert torch.equal(generate(model, PROMPTS, **OPTIONS), generate(llama(device), PROMPTS, **OPTIONS))
    got = generate(model, PROMPTS, **OPTIONS)
    assert torch.equal(got, generate(model, PROMPTS, **OPTIONS, use_cache=False))


def test_captured_steps_of_latent_attention_read_new_weights(device, captures):  # noqa: F811
    """Steps read the absorbed weights of ``kv_b_proj``, which a forward of prompts does not compute."""
    torch.manual_seed(1)
    sizes = next(iter(tiny("deepseek_v2").values())) | {"model_type": "deepseek_v2", "initializer_range": 0.2}
    model = apply_lora(AutoLigerModel.from_config(sizes, device=device), LoRAConfig(target_modules="all-linear")).eval()
    for _ in range(3):
        stir(model)
        got = generate(model, PROMPTS, **OPTIONS, return_logprobs=True)
        want = generate(model, PROMPTS, **OPTIONS, return_logprobs=True, use_cache=False)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)
    assert len(captures) == 1


def test_outdated_tensors_are_computed_again_in_place():
    """By `find` on their next use, and by `refresh` even without a use."""
    layer, value, calls = torch.nn.Identity(), torch.ones(2), []

    def compute():
        calls.append(0)
        return (2 * value, None)

    kept = derived.DerivedTensors()
    with kept.used():
        (tensor, _) = derived.derive(layer, "double", compute)
    kept.refresh()
    assert len(calls) == 1
    value += 1
    kept.renew()
    kept.refresh()
    kept.refresh()
    assert len(calls) == 2
    assert tensor.tolist() == [4, 4]
    with kept.used():
        assert derived.derive(layer, "double", compute)[0] is tensor
    assert len(calls) == 2


def test_factors_count_as_memory_of_a_step(device, captures):  # noqa: F811
    plain, model = llama(device), adapted(device=device)
    for each in (plain, model):
        generate(each, PROMPTS, **OPTIONS)
    (bare,), (step,) = (graphs._kept[each] for each in (plain, model))
    assert bare.num_bytes == bare.cache.num_bytes
    sizes = [sum(each.nbytes for each in layer.lora.factors(torch.float32)) for layer in adapted_layers(model).values()]
    assert step.num_bytes == step.cache.num_bytes + sum(sizes)


def test_weights_of_4_bits(calls, monkeypatch):
    pytest.importorskip("torchao")
    model = quantize_base(adapted())
    got = by_generate(model)
    assert len(calls) == len(adapted_layers(model))
    compute_always(monkeypatch)
    assert all(map(torch.equal, got, by_generate(model)))


def test_nothing_else_finds_what_a_generation_keeps():
    """Not a step of training between two tokens of a stream, nor a forward after one that nobody went on with."""
    model = adapted()
    ids = torch.tensor(PROMPTS[:1])
    tokens = stream(model, ids, **OPTIONS)
    next(tokens)
    model(ids, labels=ids).loss.backward()
    assert all(each.grad.abs().sum() > 0 for each in model.parameters() if each.requires_grad)
    next(tokens)
    stir(model)
    with torch.no_grad():
        got = model(ids).logits
    assert torch.equal(got, model(ids).logits)
    assert torch.equal(generate(model, ids, **OPTIONS), generate(model, ids, **OPTIONS, use_cache=False))
    assert derived._USED.get() is None
    del tokens
    gc.collect()  # closes the generator, which keeps its frame for this collection
    gc.collect()
    keys = {layer for each in gc.get_objects() if type(each) is derived.DerivedTensors for layer, _ in each._tensors}
    assert not keys & set(model.modules())


def test_sharded_adapters(calls):
    """FSDP gathers the parameters of each block for its forward, and moves them."""
    want = by_generate(adapted())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = apply_fsdp(adapted(), param_dtype=None)
    calls.clear()
    got = by_generate(model)
    assert len(calls) == len(adapted_layers(model))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    other = by_generate(model)
    assert not torch.equal(other[1], got[1])
