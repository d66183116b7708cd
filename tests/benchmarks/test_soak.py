"""Random work on a tiny model: what it holds does not grow, and a leak is found."""

import pytest
import torch

from benchmarks import soak
from liger_models import LigerLlama, LlamaConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_nothing_grows():
    row = soak.soak(LigerLlama.from_config(LlamaConfig(**SIZES)), 64, 2, 24, rounds=10, new=5)
    assert row["rounds"] == soak.WARM_ROUNDS + 10
    assert row["tensors_growth"] <= 0  # nothing at all, where no library has workspaces
    assert row["out_of_memory"] > 0
    names = {"model": "tiny", "batch": "2x24", "mode": "ours"}
    lines = soak.table([names | row, names | {"error": "AssertionError: soak: held after round 20"}]).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_a_leak_is_found():
    kept = []

    def leak():
        kept.extend(torch.zeros(soak.ALLOWED["tensors"] + 1).unbind())

    with pytest.raises(AssertionError, match=r"held after round \d+ \(leak\) more than after 12: {'tensors'"):
        soak.soak(LigerLlama.from_config(LlamaConfig(**SIZES)), 64, 2, 24, rounds=200, new=5, tasks=(leak,))
