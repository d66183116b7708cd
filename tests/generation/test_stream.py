"""`stream`, and what a call leaves behind: modes, prompts, gradients."""

import pytest
import torch

from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.eval_mode import evaluating
from liger_models.generation.loop import generate, stream

from .models import NEW, PROMPTS, SIZES, padded


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_stream_equals_generate(ours, sampled):
    batch = padded()
    free = generate(ours, **batch, max_new_tokens=NEW)[:, 9:]
    options = {"max_new_tokens": NEW, "do_sample": sampled, "eos_token_id": [free[0, 3].item(), free[1, 7].item()]}
    options["eos_token_id"].append(free[2, 5].item())
    torch.manual_seed(4)
    want = generate(ours, **batch, **options)
    torch.manual_seed(4)
    steps = []
    for tokens in stream(ours, **batch, **options):
        assert tokens.shape == (3,)
        steps.append(tokens.clone())
        tokens.zero_()  # what the consumer does with it changes nothing
    assert torch.equal(torch.stack(steps, 1), want[:, 9:])


def test_stream_computes_on_demand_but_checks_at_once(ours, monkeypatch):
    calls = []
    forward = ours.forward

    def counted(ids, **options):
        calls.append(ids.shape[1])
        assert not torch.is_grad_enabled()
        return forward(ids, **options)

    monkeypatch.setattr(ours, "forward", counted)
    steps = stream(ours, PROMPTS, max_new_tokens=5)
    assert calls == []
    next(steps)
    next(steps)
    assert calls == [9, 1]
    with pytest.raises(ValueError, match="max_new_tokens"):
        stream(ours, PROMPTS, max_new_tokens=0)


def test_the_models_methods(ours):
    want = generate(ours, **padded(), max_new_tokens=3)
    assert torch.equal(ours.generate(**padded(), max_new_tokens=3), want)
    assert torch.equal(torch.stack(list(ours.stream(**padded(), max_new_tokens=3)), 1), want[:, 9:])


def test_modes_are_restored(ours):
    """Each module's own training mode, and gradients: also between the steps, and after an error."""
    model = LigerLlama.from_config(LlamaConfig(**{**SIZES, "attention_dropout": 0.9}))
    model.load_state_dict(ours.state_dict())
    model.train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]

    def unchanged():
        return [module.training for module in model.modules()] == before and torch.is_grad_enabled()

    steps = stream(model, PROMPTS, max_new_tokens=NEW)
    tokens = []
    for step in steps:
        assert unchanged()
        tokens.append(step)
    assert torch.equal(torch.stack(tokens, 1), generate(ours, PROMPTS, max_new_tokens=NEW)[:, 9:])  # no dropout
    assert unchanged()

    def fail(*_):
        raise RuntimeError("stop here")

    handle = model.norm.register_forward_pre_hook(fail)
    model.norm.add, add = fail, model.norm.add
    with pytest.raises(RuntimeError, match="stop here"):
        generate(model, PROMPTS, max_new_tokens=1)
    handle.remove()
    model.norm.add = add
    assert unchanged()


def test_a_model_that_threads_share_is_in_eval_mode_until_the_last_of_them_ends(ours):
    model = LigerLlama.from_config(LlamaConfig(**SIZES)).train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    first, second = (evaluating(list(model.modules())) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == before


def test_tokens_can_be_trained_on(ours):
    tokens = generate(ours, PROMPTS, max_new_tokens=3)
    ours(tokens, labels=tokens).loss.backward()
    ours.zero_grad()


def test_the_prompts_are_left_alone(ours):
    batch = padded()
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    generate(ours, **batch, max_new_tokens=3, repetition_penalty=1.2)
    assert all(torch.equal(batch[name], copy) for name, copy in copies.items())
