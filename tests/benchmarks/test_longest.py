"""Sequences of growing length: the peak of a whole model from a few of its blocks."""

import argparse

import pytest
import torch

from benchmarks import longest
from benchmarks.training.modes import Mode
from benchmarks.training.step import Step
from liger_models import LigerLlama, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}


def step_of(layers, adapters=False):
    model = LigerLlama.from_config(LlamaConfig(**SIZES, num_hidden_layers=layers))
    if adapters:
        quantize_base(apply_lora(model, LoRAConfig(r=2)), dtype="nf4")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    train = Step(model, model, optimizer)
    ids = torch.arange(8)[None]
    train({"input_ids": ids, "labels": ids})
    return train


@pytest.mark.parametrize(("mode", "copies"), [("ours+full+offload", 4), ("ours+adamw+inbackward+full+offload", 3)])
def test_a_block_holds_parameters_gradients_and_moments(monkeypatch, mode, copies):
    """On the CPU all of them count as the host's."""
    train = step_of(2)
    parameters = sum(each.nbytes for each in train.model.layers[0].parameters())
    assert longest.block_bytes(train, Mode.parse(mode)) == (0, copies * parameters)


def test_weights_in_four_bits_count_as_they_are_stored():
    pytest.importorskip("torchao")
    train = step_of(1, adapters=True)
    of_adapters = sum(each.nbytes for each in train.model.layers[0].parameters() if each.requires_grad)
    weights = sum(each.numel() for each in step_of(1).model.layers[0].parameters())
    _, host = longest.block_bytes(train, Mode.parse("ours+lora+nf4+full+offload"))
    assert 0.5 * weights < host - 4 * of_adapters < 0.8 * weights


@pytest.mark.parametrize("mode", ["ours+full", "ours+full+offload12", "hf+liger+ac", "ours+offload"])
def test_few_blocks_stand_for_all_only_where_these_take_nothing_else(mode, tmp_path):
    options = argparse.Namespace(model="llama-3-8b", modes=[mode], lengths=["128"], gpus=1, layers=2, memory=None)
    with pytest.raises(argparse.ArgumentError, match=r"--layers is for modes of ours with \+full\+offload"):
        longest.run(options)


def test_table():
    names = {"model": "llama-3-8b", "mode": "ours+lora+nf4+full+offload", "memory_gb": 80, "layers": 2}
    rows = [
        names | {"batch": "1x500000", "peak_gib": 60.0, "of_layers": 32},
        names | {"batch": "1x900000", "error": "torch.OutOfMemoryError: no"},
        {"model": "llama-3-8b", "mode": "hf", "batch": "1x128", "peak_gib": 3.0},
    ]
    lines = longest.table(rows).splitlines()
    assert "| 80 GB | liger_models, LoRA on 4-bit weights, " in lines[2]
    assert "computed from 2 of 32 blocks | 500,000 | 60.0 | 900,000 |" in lines[2]
    assert "| 1 | all | transformers | 128 | 3.0 |  |" in lines[3]
