"""Rollouts of prompts of unequal length, by every mode."""

import torch

from benchmarks import drafts, rollout
from benchmarks.tables import TIMES
from liger_models import AutoLigerModel
from liger_models.kernels.dispatch import reference_backend

from ..late import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_all_modes_find_the_same_tokens(monkeypatch, tmp_path):
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, eos_token_id=None)).eval()
    theirs.save_pretrained(tmp_path)
    ours = AutoLigerModel.from_pretrained(tmp_path, progress=False).eval()
    prompts, limits = rollout.draw_prompts(64, 5, 24, 8)
    assert rollout.draw_prompts(64, 5, 24, 8)[1] == limits
    assert {3 <= len(each) <= 24 for each in prompts} == {2 <= limit <= 8 for limit in limits} == {True}
    monkeypatch.setattr(rollout, "ROWS", {"hf": 2, "ours+generate": 3})
    found = [rollout.continuing(theirs if mode == "hf" else ours, mode)(prompts, limits) for mode in rollout.NAMES]
    assert [len(row) for row in found[0]] == limits
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_table():
    names = {"model": "llama-3.2-3b", "batch": "1024x512"}
    found = {"new_tokens": 655360, "seconds": 30.0, "tokens_per_s": 20000.0, "peak_gib": 80.0}
    rows = [names | found | {"mode": "hf"}, names | found | {"mode": "ours", "tokens_per_s": 30000.0}]
    lines = rollout.table([*rows, names | {"mode": "ours+generate", "error": "out of memory"}]).splitlines()
    assert f"| 1024 {TIMES} 512 | liger_models, rollout | 655360 | 30.0 | 30,000 | 1.500 | 80.0 |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1


def test_rollouts_with_drafts_are_compared_after_training(monkeypatch):
    monkeypatch.setattr(drafts, "EVERY", 5)
    monkeypatch.setattr(drafts, "DRAFTS", (2,))
    monkeypatch.setattr(drafts, "LR", 1e-2)
    sizes = drafts.SIZES | SIZES | {"num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 64}
    texts = [[2, *range(3 + n, 20 + n), 1] for n in range(40)]
    with reference_backend():
        mtp = drafts.make(sizes, hybrid=False, device="cpu")
        trained = drafts.train(mtp, texts, texts[:9], 96, 60.0)
        rollouts = drafts.compare(mtp, [text[:4] for text in texts], 3, 12)
    assert trained["accepted"] >= drafts.ENOUGH
    assert [(row["rows"], row["drafts"]) for row in rollouts] == [(3, 0), (3, 2)]
    assert rollouts[0]["tokens_per_round"] == 1 < rollouts[1]["tokens_per_round"]
    row = {"model": "demo", "mode": "ours+drafts+hybrid", **trained, "rollouts": rollouts}
    lines = rollout.table([row, row | {"mode": "ours+drafts", "rollouts": [], "error": "out of memory"}]).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| hybrid | 3 | 0 |")
    assert len({line.count("|") for line in lines}) == 1
