"""Sampling from a model under FSDP2 with gathered parameters: each rank by itself."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.generation.graphs import DecodeStep
from liger_models.parallel import apply_fsdp, apply_tp, compile_blocks, unsharded

from .comparison import build, configs_of
from .models import batch, init_device_mesh, make_optimizer, mixture, share, tiny, whole

PROMPTS = [[5, 7, 9, 11], [3], [8, 2, 6, 4, 1, 9], [10, 12]]


def sample(model, prompts):
    rows = model.rollout(prompts, max_new_tokens=7, eos_token_id=[], do_sample=True, seed=3)
    return [row.tokens.tolist() for row in rows]


def learn(model, step, rank=0, ranks=1):
    optimizer = make_optimizer("torch", model)
    model(**share(batch(step), rank, ranks), num_items_in_batch=30 / ranks).loss.backward()
    optimizer.step()


def sample_and_learn(tied: bool) -> None:
    """Before the first forward and after an optimizer step; the ranks have different numbers of prompts."""
    rank = dist.get_rank()
    model, alone = apply_fsdp(tiny(tie_word_embeddings=tied), param_dtype=None), tiny(tie_word_embeddings=tied)
    mine = PROMPTS[:1] if rank == 0 else PROMPTS
    for step in range(2):
        with unsharded(model) as policy:
            assert type(policy) is type(alone)
            assert not any(isinstance(module, FSDPModule) for module in policy.modules())
            assert [name for name, _ in policy.named_parameters()] == [name for name, _ in alone.named_parameters()]
            for got, want in zip(policy.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
            assert sample(policy, mine) == sample(alone, mine)
            if rank:
                sample(policy, mine)
        assert isinstance(model, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not any(parameter.untyped_storage().size() for parameter in policy.parameters())
        learn(model, step, rank, 2)
        learn(alone, step)


@pytest.mark.parametrize("tied", [False, True])
def test_samples_are_those_of_one_process(two, tied):
    two(sample_and_learn, tied)


def compute_in_bfloat16() -> None:
    model = apply_fsdp(tiny())
    model(**share(batch(0), dist.get_rank(), 2)).loss.backward()  # leaves some groups gathered
    with unsharded(model) as policy:
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
        assert sample(policy, PROMPTS) == sample(tiny().bfloat16(), PROMPTS)
        assert policy.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_parameters_have_the_dtype_of_the_computation(two):
    two(compute_in_bfloat16)


def with_adapters(model):
    torch.manual_seed(1)
    apply_lora(model, LoRAConfig(r=2, lora_dropout=0.5))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def compare_forwards() -> None:
    cases = {
        "experts": mixture,
        "recurrent": lambda: build("qwen3_next", configs_of("qwen3_next")[0]),
        "shared keys": lambda: build("gemma4_text", configs_of("gemma4_text")[0]),
        "images": lambda: build("qwen2_vl", configs_of("qwen2_vl")[0]),
        "adapters": lambda: with_adapters(tiny()),
    }
    ids = torch.tensor(PROMPTS[2:3])
    for name, make in cases.items():
        model, alone = apply_fsdp(make().eval(), param_dtype=None), make().eval()
        with unsharded(model) as policy:
            assert policy(ids).logits.equal(alone(ids).logits), name
            got, want = (each.generate(ids, max_new_tokens=5, eos_token_id=[]) for each in (policy, alone))
            assert got.equal(want), name
        assert model(ids).logits.equal(alone(ids).logits), name


def test_modules_of_all_kinds(two):
    two(compare_forwards)


def compare_compiled() -> None:
    model = compile_blocks(apply_fsdp(tiny(), param_dtype=None), backend="eager")
    with unsharded(model) as policy:
        assert sample(policy, PROMPTS) == sample(tiny(), PROMPTS)
    learn(model, 0, dist.get_rank(), 2)
    assert all("forward" in vars(block) for block in model.blocks)


@pytest.mark.compile
def test_compiled_blocks_run_as_they_are(two):
    two(compare_compiled)


def refuse() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = apply_fsdp(apply_tp(tiny(), mesh["tp"]), mesh["dp"])
    with pytest.raises(ValueError, match="must be sharded by apply_fsdp alone"), unsharded(model):
        pass


def test_other_shards_are_refused(two):
    two(refuse)


def test_a_model_that_is_not_sharded_is_itself():
    model = tiny()
    with unsharded(model) as policy:
        assert policy is model


def generate_and_learn() -> None:
    """An optimizer that is made after a generation updates the parameters, not what FSDP had gathered."""
    prompts = [[5, 6, 7], [8, 9]]
    for options in ({}, {"use_cache": False}, {"draft_model": tiny()}):
        model, alone = apply_fsdp(tiny(), param_dtype=None), tiny()
        got, want = (each.generate(prompts, max_new_tokens=3, eos_token_id=[], **options) for each in (model, alone))
        assert got.equal(want)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        steps = model.stream(prompts, max_new_tokens=3, **options)
        next(steps)
        del steps
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        sample(model, PROMPTS[: 1 + dist.get_rank()])
        model.generate(prompts[:1], max_new_tokens=2 + 9 * dist.get_rank(), eos_token_id=[])
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        learn(model, 0, dist.get_rank(), 2)
        learn(alone, 0)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other, rtol=2e-5, atol=2e-6)


def test_generation_leaves_no_parameters_gathered(two):
    two(generate_and_learn)


def test_parameters_are_sharded_again_after_an_error(two):
    two(fail)


def fail() -> None:
    model = apply_fsdp(tiny())
    with pytest.raises(ValueError, match="at least one token"), unsharded(model) as policy:
        policy.rollout([[]], max_new_tokens=3)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_group_of_one_process(device, monkeypatch):
    """Steps are captured, which those of a model with hooks are not."""
    captured, original = [], DecodeStep._capture
    monkeypatch.setattr(DecodeStep, "_capture", lambda self, model: captured.append(1) or original(self, model))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = apply_fsdp(tiny().to(device), init_device_mesh(device, (1,)), param_dtype=None)
        for step in range(2):
            alone = tiny().to(device)
            alone.load_state_dict(whole(model.named_parameters()))
            with unsharded(model) as policy:
                assert sample(policy, PROMPTS) == sample(alone, PROMPTS)
            assert not any(parameter.untyped_storage().size() for parameter in policy.parameters())
            optimizer = make_optimizer("torch", model)
            model(**{name: each.to(device) for name, each in batch(step).items()}).loss.backward()
            optimizer.step()
    finally:
        init_device_mesh.cache_clear()
        dist.destroy_process_group()
    assert len(captured) == (4 if device == "cuda" else 0)
