"""Steps of GRPO here and by TRL, on a tiny model."""

import argparse

import pytest
import torch

from benchmarks import grpo
from benchmarks.training.modes import Mode
from benchmarks.training.tokenizer import words_tokenizer
from liger_models import LigerLlama, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.data import pack_answers

from ..late import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("options", [{}, {"weight_dtype": "float8", "cache_dtype": "float8"}], ids=["16", "8"])
def test_our_step_trains_adapters(options):
    model = LigerLlama.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16 if options else torch.float32)
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear"))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    steps = grpo.our_steps(model, 64, 32, 7, 4, options)
    times = [next(steps) for _ in range(2)]
    assert all(seconds > 0 for pair in times for seconds in pair)
    moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {name for name, each in model.named_parameters() if each.requires_grad}


def test_parts_of_a_step_have_the_gradients_of_the_whole():
    model = LigerLlama.from_config(LlamaConfig(**SIZES))
    loss = grpo_loss()
    prompts = [torch.randint(64, (5,)) for _ in range(2)]
    answers = [torch.randint(64, (4,)) for _ in range(4)]
    old, advantages = torch.randn(4, 64) - 4, torch.randn(4)

    def train(first, last, share):
        batch = pack_answers(prompts[first:last], answers[2 * first : 2 * last])
        rows = slice(2 * first, 2 * last)
        grpo.train_on(model, loss, *batch, old[rows], advantages[rows], share=share, rounds=False)

    train(0, 2, share=1.0)
    whole = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    train(0, 1, share=0.5)
    train(1, 2, share=0.5)
    for each, want in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(each.grad, want)


def test_sampling_and_training_compute_almost_the_same():
    model = LigerLlama.from_config(LlamaConfig(**SIZES))
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear"))
    assert grpo.divergence(model, 64, 7, 4, {}) < 1e-5
    assert 1e-5 < grpo.divergence(model, 64, 7, 4, {"cache_dtype": "float8"}) < 0.1


def grpo_loss():
    from liger_models import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # names that TRL's and transformers' next versions drop
def test_trls_steps_are_timed(monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    monkeypatch.setattr(grpo, "REPEATS", 1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=64))
    times = grpo.trl_steps(model, Mode.parse("trl"), 16, 7, 4, bf16=False, use_cpu=True)
    assert len(times) == 2
    assert all(seconds > 0 for pair in times for seconds in pair)


def test_words_are_their_numbers():
    tokenizer = words_tokenizer(64)
    assert tokenizer(" ".join(f"t{index}" for index in range(4, 64)))["input_ids"] == [*range(4, 64)]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 1)


def test_answers_in_whole_parts(tmp_path):
    options = argparse.Namespace(batch="250x8", out=tmp_path)
    with pytest.raises(argparse.ArgumentError, match="--batch must have a multiple of 16 answers, got 250"):
        grpo.run(options)


def test_table():
    names = {"model": "llama-3.2-3b", "batch": "256x256", "commit": "0a1b2c3"}
    found = {"new_tokens": 512, "step_s": 60.0, "sampling_s": 40.0, "training_s": 20.0, "peak_gib": 60.0}
    rows = [names | found | {"mode": "trl+liger+ac"}, names | found | {"mode": "ours", "step_s": 20.0}]
    rows.append(names | found | {"mode": "ours+rollout8", "commit": "4d5e6f7"})  # TRL was not measured at this commit
    lines = grpo.table([*rows, names | {"mode": "trl", "error": "out of memory"}]).splitlines()
    assert "TRL, Liger Kernel's loss, activation checkpointing" in lines[2]
    assert "| liger_models | 512 | 20.0 | 40.0 | 20.0 | 60.0 | 3.000 | 1.000 |  |" in lines[3]
    assert "| liger_models, rollouts in float8 | 512 | 60.0 | 40.0 | 20.0 | 60.0 |  |  |  |" in lines[4]
    assert len({line.count("|") for line in lines}) == 1
