"""The benchmark of weights in memory."""

import torch

from benchmarks import weights

from ..parallel.models import tiny


def test_weights_are_timed_and_the_model_stays(monkeypatch):
    monkeypatch.setattr(weights, "REPEATS", 2)
    model = tiny()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    row = weights.times(model, torch.device("cpu"))
    assert all(row[f"{name}_ms"] > 0 for name in ("copy", "read", "read_fp32", "load", "delta", "apply"))
    assert 0.02 < row["delta_share"] < 0.05  # 8 bytes for one element in 100 of 4 bytes, or more of small tensors
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    failed = {"model": "tiny", "mode": "ours", "error": "OutOfMemoryError"}
    lines = weights.table([{"model": "tiny", "mode": "ours", **row}, failed]).splitlines()
    assert f"| {row['read_ms']} (" in lines[2]
    assert "OutOfMemoryError" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
