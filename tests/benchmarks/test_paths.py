"""What a user types: the checkpoint and texts that all ways share, and the training command on them."""

import argparse
import re

import pytest

from benchmarks import paths
from benchmarks.tables import TIMES
from benchmarks.training import build
from benchmarks.training.job import Job
from benchmarks.training.modes import Mode
from liger_models import AutoLigerModel

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["full+train", "lora+train"])
def test_the_command_is_timed(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "DEVICE", "cpu")
    monkeypatch.setattr(paths, "read_config", lambda _: dict(CONFIG))
    monkeypatch.setattr(paths, "WARM_UP", 4)
    job = Job(Mode.parse(mode), "tiny", "2x64", 12, sharded=False, imported_s=0.0)
    monkeypatch.setenv("SAVE", str(tmp_path))
    paths.save(job)
    monkeypatch.setenv("START", str(tmp_path))
    model = AutoLigerModel.from_pretrained(tmp_path, device="cpu")
    assert model.tokenizer.decode([model.config.eos_token_id], skip_special_tokens=False) == "<eos>"
    row = paths.measure(job)
    assert row["tokens_per_s"] > 0
    assert row["peak_gib"] == 0.0  # of a GPU


def test_every_default_is_a_mode():
    modes = paths.DEFAULT.split(",")
    assert len(modes) == 11
    assert all(re.fullmatch(paths.MODES, mode) for mode in modes)
    titles = [paths.title(mode) for mode in modes]
    assert len({*titles}) == 11
    assert titles[1] == "full fine-tuning: TRL, transformers + Liger Kernel, activation checkpointing"


def test_too_few_steps_are_refused():
    with pytest.raises(argparse.ArgumentError, match="--steps must be more than 9, got 9"):
        paths.run(argparse.Namespace(steps=9))


def test_table():
    row = {"model": "llama-3.2-1b", "batch": "8x2048"}
    rows = [
        row | {"mode": "full+trl+liger", "tokens_per_s": 60000, "peak_gib": 20.0},
        row | {"mode": "full+trl+liger+ac", "tokens_per_s": 50000, "peak_gib": 10.0},
        row | {"mode": "full+train", "tokens_per_s": 75000, "peak_gib": 15.0},
        row | {"mode": "generate+hf", "first_ms": 15.0, "step_ms": 30.0, "peak_gib": 5.0},
        row | {"mode": "generate+door", "first_ms": 5.0, "step_ms": 1.5, "peak_gib": 4.0},
        row | {"mode": "lora+train", "error": "out of memory"},
    ]
    lines = paths.table(rows).splitlines()[2:]
    start = f"| llama-3.2-1b | 8 {TIMES} 2048 | full fine-tuning: liger-models train | "
    assert lines[2] == start + "75,000 |  |  | 15.0 | 1.250 | 0.750 |"
    assert lines[4].endswith("| generate: liger_models.hf |  | 5.0 | 1.5 | 4.0 | 20.000 | 0.800 |")
    assert "out of memory" in lines[5]
    assert len({line.count("|") for line in lines}) == 1
