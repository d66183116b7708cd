"""Learning to sort, by a tiny model of both libraries."""

import argparse

import pytest
import torch

from benchmarks import task
from benchmarks.training.step import Step
from liger_models import LigerLlama

from ..late import transformers

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_answers_are_sorted_and_alone_are_labels():
    batch = task.draw_lists(3, torch.Generator().manual_seed(0))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == (3, 2 * task.LENGTH + 1)
    assert torch.equal(ids[:, task.LENGTH + 1 :], ids[:, : task.LENGTH].sort(1).values)
    assert (labels[:, : task.LENGTH + 1] == -100).all()
    assert torch.equal(labels[:, task.LENGTH + 1 :], ids[:, task.LENGTH + 1 :])


def test_both_libraries_learn_the_same_and_are_evaluated_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "EVALUATED", 8)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    theirs.save_pretrained(tmp_path)
    ours = LigerLlama.from_pretrained(tmp_path, progress=False)
    found = {}
    for model in (theirs, ours):
        step = Step(model.train(), model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        _, found[model] = task.train_on_lists(step, 4, 7, "cpu")
    torch.testing.assert_close(torch.tensor(found[ours]), torch.tensor(found[theirs]))
    assert found[ours][-1] != found[ours][0]
    assert task.accuracy(theirs, 4, False, "cpu") == task.accuracy(ours, 4, True, "cpu") == 0.0


def test_lists_that_are_sorted_count(monkeypatch):
    class Sorts(torch.nn.Module):
        def forward(self, ids, return_logits):
            right = torch.nn.functional.one_hot(ids.roll(-1, 1), 128).float()
            right[0, -2] = 0.0  # one number of one list
            return argparse.Namespace(logits=right)

    monkeypatch.setattr(task, "EVALUATED", 8)
    assert task.accuracy(Sorts(), 4, True, "cpu") == 6 / 8


def test_lists_have_their_length(tmp_path):
    with pytest.raises(argparse.ArgumentError, match="--batch must have 33 tokens per row, got 4x32"):
        task.run(argparse.Namespace(batch="4x32", steps=10, out=tmp_path))


def test_table():
    names = {"model": "llama", "batch": "512x33"}
    row = names | {"mode": "hf+liger", "accuracy": 0.99, "seconds": 30.0, "evaluation_s": 1.0, "peak_gib": 10.0}
    lines = task.table([row, row | {"mode": "ours", "seconds": 20.0}, names | {"mode": "hf", "error": "no"}])
    assert "| liger_models | 0.9900 | 20.0 | 1.0 | 10.0 | 1.500 | 1.000 |" in lines
    assert len({line.count("|") for line in lines.splitlines()}) == 1
