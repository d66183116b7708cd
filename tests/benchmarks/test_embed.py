"""The benchmark of models of embeddings."""

import pytest
import torch

from benchmarks import embed
from benchmarks.training import build
from benchmarks.training.job import Job
from benchmarks.training.modes import Mode

CONFIG = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip


def measured(monkeypatch, mode):
    monkeypatch.setattr(embed, "read_config", lambda _: dict(CONFIG))
    monkeypatch.setattr(build, "DEVICE", "cpu")
    return embed.measure(Job(Mode.parse(mode), "qwen3-0.6b", "8x32", 2, False, 0.0), device="cpu")


def test_cached_gradients_have_the_same_losses(monkeypatch):
    rows = [measured(monkeypatch, mode) for mode in ("ours", "ours+cached")]
    assert len(rows[0]["losses"]) == embed.WARM_UP + 2
    torch.testing.assert_close(*(torch.tensor(row["losses"]) for row in rows), atol=0.02, rtol=0)  # bf16
    assert all(row["examples_per_s"] > 0 for row in rows)


def test_both_libraries_have_the_same_losses(monkeypatch):
    pytest.importorskip("sentence_transformers")
    for extra in ("", "+cached"):
        rows = [measured(monkeypatch, mode + extra) for mode in ("ours", "st")]
        torch.testing.assert_close(*(torch.tensor(row["losses"]) for row in rows), atol=0.05, rtol=0)  # bf16


def test_table():
    common = {"model": "qwen3-0.6b", "batch": "64x256", "tokens_per_s": 1000}
    rows = [
        common | {"mode": "st", "examples_per_s": 10.0, "peak_gib": 8.0},
        common | {"mode": "st+cached", "error": "OutOfMemoryError"},
        common | {"mode": "ours", "examples_per_s": 15.0, "peak_gib": 4.0},
        common | {"mode": "ours+cached", "examples_per_s": 9.0, "peak_gib": 2.0},
    ]
    lines = embed.table(rows).splitlines()[2:]
    assert lines[2].endswith("| 15.0 | 1,000 | 4.0 | 1.500 | 0.500 |")
    assert "OutOfMemoryError" in lines[1]
    assert lines[3].endswith("| 2.0 |  |  |")
