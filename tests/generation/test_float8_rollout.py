"""Rollouts that multiply by float8 copies of the weights."""

import copy

import pytest
import torch

from liger_models.adapters import LoRAConfig, apply_lora, merge_lora, without_adapters
from liger_models.generation import rollouts as module
from liger_models.generation.graphs import DecodeStep
from liger_models.generation.rollouts import rollout
from liger_models.kernels.frozen.frozen_float8_linear import MOST_ROWS, quantize_rows_reference, round_weight
from liger_models.layers.derived import num_derived
from liger_models.layers.frozen_linear import FrozenLinear

from .test_rollout import NEW, llama, make_prompts

pytestmark = pytest.mark.slow


def count(calls, function):
    return lambda *args: calls.append(1) or function(*args)


def with_lora(model):
    apply_lora(model, LoRAConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
def test_a_rollout_multiplies_by_float8_copies_of_the_adapted_weights(adapters):
    model = with_lora(llama().bfloat16()) if adapters else llama().bfloat16()
    prompts, before = make_prompts(), {name: x.clone() for name, x in model.state_dict().items()}
    options = {"max_new_tokens": NEW, "eos_token_id": [], "batch_size": 3}
    plain, found = rollout(model, prompts, **options), rollout(model, prompts, weight_dtype="float8", **options)
    assert any(not torch.equal(a.log_probs, b.log_probs) for a, b in zip(plain, found, strict=True))

    # The same model whose weights are rounded, with the adapters in them. Without a GPU, inputs are not rounded.
    rounded = llama().bfloat16()
    merged = merge_lora(copy.deepcopy(model)) if adapters else model
    rounded.load_state_dict(merged.state_dict())
    with torch.no_grad():
        for block in rounded.layers:
            attention, mlp = block.self_attn, block.mlp
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                codes, scales = quantize_rows_reference(linear.weight)
                linear.weight.copy_(codes.to(torch.bfloat16).mul_(scales[:, None]))
    for a, b in zip(found, rollout(rounded, prompts, **options), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.log_probs, b.log_probs)

    # The model is as before, and so is its next rollout.
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for a, b in zip(plain, rollout(model, prompts, **options), strict=True):
        assert torch.equal(a.log_probs, b.log_probs)


def test_adapters_that_are_switched_off_are_not_merged():
    model = with_lora(llama().bfloat16())
    options = {"max_new_tokens": 6, "eos_token_id": [], "weight_dtype": "float8"}
    with without_adapters(model):
        found = rollout(model, make_prompts(), **options)
    for a, b in zip(found, rollout(llama().bfloat16(), make_prompts(), **options), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.log_probs, b.log_probs)


def test_frozen_weights_are_rounded_again():
    model = llama().bfloat16()
    for block in model.layers:
        linear = block.mlp.down_proj
        block.mlp.down_proj = FrozenLinear(linear, round_weight(linear.weight.detach()))
    options = {"max_new_tokens": 6, "eos_token_id": [], "weight_dtype": "float8"}
    found, want = (rollout(x, make_prompts(), **options) for x in (model, llama().bfloat16()))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.log_probs, b.log_probs)


def test_dropout_of_adapters_has_no_effect():
    model = llama().bfloat16()
    apply_lora(model, LoRAConfig(r=4, lora_dropout=0.5))
    options = {"max_new_tokens": 6, "eos_token_id": [], "weight_dtype": "float8"}
    found, want = (rollout(model.train(mode), make_prompts(), **options) for mode in (True, False))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a.log_probs, b.log_probs)


def test_nothing_is_kept_of_the_adapters(monkeypatch):
    """The copies are made before the tensors of the rollout, so that fp32 copies of the adapters are not kept."""
    kept, run = [], module.Scheduler.run
    monkeypatch.setattr(module.Scheduler, "run", lambda scheduler: kept.append(num_derived()) or run(scheduler))
    model = with_lora(llama().bfloat16())
    for _ in range(2):
        rollout(model, make_prompts(), max_new_tokens=2, weight_dtype="float8")
    assert kept == [0, 0]


def test_weights_return_after_an_error(monkeypatch):
    model = llama().bfloat16()
    linears = [linear for linear in model.modules() if type(linear) is torch.nn.Linear]
    monkeypatch.setattr(module, "Scheduler", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rollout(model, make_prompts(), max_new_tokens=2, weight_dtype="float8")
    assert [linear for linear in model.modules() if type(linear) is torch.nn.Linear] == linears


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.float(), "must be in bfloat16, .* got torch.float32 on cpu"),
        (
            lambda model: apply_lora(model, LoRAConfig(r=4, use_dora=True)),
            r"got others: layers\.0\.self_attn\.qkv_proj",
        ),
        (lambda model: model.layers[1].mlp.down_proj.register_forward_hook(print), r"layers\.1\.mlp\.down_proj"),
    ],
    ids=["dtype", "dora", "hook"],
)
def test_models_without_float8_weights_are_refused(change, message):
    model = llama().bfloat16()
    change(model)
    with pytest.raises(ValueError, match=message):
        rollout(model, [[3]], max_new_tokens=2, weight_dtype="float8")


@pytest.mark.gpu
def test_steps_with_many_rows_are_captured(monkeypatch):
    """The products of many rows round their inputs, too. The second rollout captures its step at once."""
    captured, run, original = [], [], DecodeStep._capture
    monkeypatch.setattr(DecodeStep, "_capture", lambda step, model: captured.append(step) or original(step, model))
    monkeypatch.setattr(DecodeStep, "_run", count(run, DecodeStep._run))
    model = with_lora(llama("cuda").bfloat16())
    prompts = make_prompts([5] * (MOST_ROWS + 8))
    options = {"max_new_tokens": 8, "eos_token_id": []}
    plain = rollout(model, prompts, **options)
    forwards = []
    for _ in range(2):
        run.clear()
        found = rollout(model, prompts, weight_dtype="float8", **options)
        forwards.append(len(run))
        differences = [abs(a.log_probs[0] - b.log_probs[0]).item() for a, b in zip(plain, found, strict=True)]
        assert 0 < max(differences) < 0.5
    # A capture and the call before it run the step.
    assert forwards == [2, 1]
    assert len(captured) == 3
