"""The floor of a family's step: its operations, its bytes, and the modes that are planned."""

from argparse import Namespace

import pytest
import torch

from benchmarks import families
from benchmarks.training.job import Job
from benchmarks.training.models import read_config
from benchmarks.training.modes import Mode

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
B, T = 2, 24
ATTENTION = 3 * 2 * (4 * 64) * B * T**2 / 2
"""Both layers: 2 products of 2 operations for each pair and channel, and twice that in the backward."""
MIXER = 4 * 64 * 64


def test_work_of_a_dense_model():
    work = families.work_of_step({"model_type": "llama", **SIZES}, B, T)
    matrices = 2 * (MIXER + 3 * 64 * 80) + 96 * 64  # and no embedding
    assert work["attention"] == ATTENTION
    assert work["products"] == 6 * matrices * B * T
    assert work["optimizer_bytes"] == 7 * 2 * (matrices + 96 * 64 + 5 * 64)


def test_work_counts_the_experts_of_a_token_alone():
    config = {"model_type": "qwen3_moe", **SIZES, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 16}
    two, three = (families.work_of_step(config | {"num_experts_per_tok": k}, B, T)["products"] for k in (2, 3))
    assert three - two == 6 * 2 * (3 * 64 * 16) * B * T


def test_work_of_windows():
    config = {"model_type": "mistral", **SIZES, "num_key_value_heads": 4, "sliding_window": 8}
    assert families.work_of_step(config, B, T)["attention"] == 3 * 2 * (4 * 64) * B * (8 * 8 / 2 + 16 * 8)


def test_the_floor_is_the_sum_of_its_parts(monkeypatch):
    monkeypatch.setattr(families, "read_config", lambda name: {"model_type": "llama", **SIZES})
    monkeypatch.setattr(families, "ceilings", lambda device: {"copy_gbs": 2e-3, "matmul_tflops": 1e-6})
    monkeypatch.setattr(families, "attention_tflops", lambda *_: 5e-7)
    row = families.measure(Job(Mode.parse("floor"), "llama", f"{B}x{T}", 1, False, 0.0))
    work = families.work_of_step({"model_type": "llama", **SIZES}, B, T)
    expected = (work["products"] / 1e3, work["attention"] / 500, work["optimizer_bytes"] / 2e3)
    assert [row[f"{part}_ms"] for part in ("products", "attention", "optimizer")] == pytest.approx(expected, abs=0.01)
    assert row["floor_ms"] == pytest.approx(sum(expected), abs=0.01)


def test_the_rate_of_attention_is_of_its_operations(monkeypatch):
    monkeypatch.setattr(families, "milliseconds", lambda prepare, run, device: [len(run(prepare())), 3.0, 3.0])
    assert families.attention_tflops(1, 64, "cpu") == round(3 * 4 * 32 * 128 * 64**2 / 2 / 3e9, 1)


def test_families_with_images_have_no_floor(monkeypatch, tmp_path):
    monkeypatch.setattr(families, "measure_all", lambda plans: [plan.row for plan in plans])
    options = Namespace(families=["qwen3", "qwen3_vl"], modes=["floor", "ours"], batch="1x8", steps=1, out=tmp_path)
    rows = families.run(options)
    assert [(row["model"], row["mode"]) for row in rows] == [
        ("qwen3", "floor"),
        ("qwen3", "ours"),
        ("qwen3_vl", "ours"),
    ]
    assert not torch.cuda.is_initialized()
    assert "vision_config" in read_config("qwen3_vl")
