"""Option files and run states that version 0.1.0 wrote: the current version reads them and resumes the run.

``tests/fixtures/runs`` holds a tiny checkpoint, texts, an option file with every option, the state of its run
after step 2 of 4 (``run``), and the log and the adapters of the finished run (``finished``).
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from liger_models.train.loop import TrainOptions, train
from liger_models.train.options import read_options

from .runs import log, no_group_is_left, on_the_cpu  # noqa: F401

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"


def test_the_option_file_of_0_1_0_loads():
    options = read_options(TrainOptions, [str(RUNS / "options.yaml")])
    expected = TrainOptions(
        model="checkpoint", data=["texts.jsonl"], output="run", length=32, overflow="split", format="text",
        data_shares=[1.0], max_samples=48, batch_size=2, accumulate=2, workers=0, steps=4, lr=1e-2, warmup=0.25,
        lora_r=4, lora_alpha=8.0, lora_dropout=0.1, lora_targets=["down_proj"], lora_plus_ratio=4.0,
        checkpointing="selective", seed=3, log_every=1, save_every=2, export_dtype="float32", dtype="float32",
    )  # fmt: skip
    assert dataclasses.asdict(options) == dataclasses.asdict(expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_run_of_0_1_0_resumes(tmp_path, monkeypatch):
    """The last two steps and the exported adapters are those of the version that began the run."""
    shutil.copytree(RUNS, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    train(read_options(TrainOptions, ["options.yaml"]))
    lines, expected = log(tmp_path / "runs" / "run"), log(RUNS / "finished")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, wanted in zip(lines, expected, strict=True):
        assert line == pytest.approx(wanted, rel=0.02)  # norms of bfloat16 gradients differ between processors
    adapters = load_file("run/adapter/adapter_model.safetensors")
    wanted = load_file(RUNS / "finished" / "adapter_model.safetensors")
    assert adapters.keys() == wanted.keys()
    for name, tensor in adapters.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0.02, atol=1e-4)
