"""What a user types: the checkpoint and data that all ways share, and each way with a tiny model on the CPU."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grpo, paths
from benchmarks.tables import TIMES
from benchmarks.training import build
from benchmarks.training.job import Job
from benchmarks.training.modes import Mode
from benchmarks.user import command, files, inference, start, trainers
from benchmarks.user.path import PATHS
from liger_models import AutoLigerModel

from ..arch.families import tiny

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "eos_token_id": None,
}  # fmt: skip
BATCHES = {"vision": "2x256", "grpo": "8x16"}
STEPS = {"grpo": 4, "generate": 4, "lmeval": 4}


def job_of(mode: str) -> Job:
    path = Mode.parse(mode).library
    return Job(Mode.parse(mode), "tiny", BATCHES.get(path, "8x16"), STEPS.get(path, 5), sharded=False, imported_s=0.0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few and small steps on the CPU. Afterwards transformers' auto classes return its own classes again."""
    monkeypatch.setattr(build, "DEVICE", "cpu")
    monkeypatch.setattr(files, "read_config", lambda _: dict(CONFIG))
    for path, settings in PATHS.items():
        monkeypatch.setitem(PATHS, path, settings._replace(steps=1))
    for module in (command, trainers):
        monkeypatch.setattr(module, "WARM_UP", 2)
        monkeypatch.setattr(module, "WORKERS", 0)
    monkeypatch.setattr(command, "LOG_EVERY", 1)
    for module in (command, grpo):
        monkeypatch.setattr(module, "GROUP", 4)
    monkeypatch.setattr(grpo, "MICRO_BATCH", 4)
    monkeypatch.setattr(grpo, "REPEATS", 1)
    monkeypatch.setattr(inference, "REPEATS", 2)
    monkeypatch.setattr(inference, "FIRST", ((1, 4), (2, 8)))
    yield
    if "liger_models.hf.auto" in sys.modules:
        sys.modules["liger_models.hf.auto"].unregister()


def measured(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch, save: Any = paths.save) -> dict[str, Any]:
    monkeypatch.setenv("SAVE", str(folder))
    save(job_of(mode))
    monkeypatch.setenv("START", str(folder))
    return paths.measure(job_of(mode))


@pytest.mark.parametrize("mode", ["full+train", "lora+train", "dpo+train", "grpo+train"])
def test_the_command_is_timed(mode, few, tmp_path, monkeypatch):
    row = measured(mode, tmp_path, monkeypatch)
    assert row["tokens_per_s"] > 0
    assert row["peak_gib"] == 0.0  # of a GPU
    model = AutoLigerModel.from_pretrained(tmp_path, device="cpu")
    assert model.tokenizer.decode([model.config.eos_token_id], skip_special_tokens=False) == "<eos>"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # names that TRL's and transformers' next versions drop
@pytest.mark.parametrize("mode", ["lora+trl+door", "dpo+trl+door", "dpo+trl+ac", "grpo+trl", "grpo+door"])
def test_trl_is_timed(mode, few, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    assert measured(mode, tmp_path, monkeypatch)["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("way", ["train", "trl"])
def test_images_are_counted(way, arch, few, tmp_path, monkeypatch):
    """A picture of 32 x 48 pixels has 24 tokens; an answer has 10 words or more, and the first ones have 10 to 80."""
    pytest.importorskip("trl")
    from transformers import AutoConfig

    sizes = next(iter(tiny(arch).values()))
    changes = {"text_config": {**sizes["text_config"], "vocab_size": 140}}
    changes |= {"image_token_id": 138, "video_token_id": 139}
    config = AutoConfig.for_model(arch, **{**sizes, **changes}).to_dict()
    monkeypatch.setattr(files, "read_config", lambda _: config)
    monkeypatch.setattr(files, "PHOTOS", 2)
    monkeypatch.setattr(files, "SIZE", (48, 32))
    row = measured(f"vision+{way}", tmp_path, monkeypatch, paths.save_vision)
    assert row["images_per_s"] > 0
    assert 24 + 10 < row["tokens_per_s"] / row["images_per_s"] < 24 + 110


@pytest.mark.parametrize("way", ["hf", "door", "ours"])
def test_generation_is_timed(way, few, tmp_path, monkeypatch):
    assert measured(f"generate+{way}", tmp_path, monkeypatch)["first_ms"] > 0
    prompts = paths.measure(job_of(f"first+{way}"))["prompts"]
    assert prompts.keys() == {"1x4", "2x8"}
    assert all(time > 0 for times in prompts.values() for time in times.values())


@pytest.mark.parametrize("way", ["hf", "door"])
def test_requests_of_the_harness_are_timed(way, few, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    row = measured(f"lmeval+{way}", tmp_path, monkeypatch)
    assert row["generate_until_s"] > 0
    assert row["loglikelihood_s"] > 0


@pytest.mark.matrix  # the test below times a process, too, with the training left out
@pytest.mark.slow
def test_the_first_step_of_a_process(few, tmp_path, monkeypatch):
    """With empty caches and with full ones; a process that makes no step is an error."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = measured("start+train", tmp_path, monkeypatch)
    assert row["cold_s"] > 1
    assert row["warm_s"] > 1
    monkeypatch.setattr(command, "arguments", lambda *_: ["nothing"])
    with pytest.raises(RuntimeError, match="start: the process must make a step, but it ended with status 2"):
        paths.measure(job_of("start+train"))


def test_a_process_of_trl_writes_after_its_first_step(tmp_path, monkeypatch):
    caches = {name: str(tmp_path / name) for name in start.CACHES}
    monkeypatch.setenv("START", "a")
    (tmp_path / "script.py").write_text(
        "import os, sys, pathlib\n"
        "assert sys.argv[1:4] == ['-m', 'benchmarks.user.start', 'start+trl+door'], sys.argv\n"
        f"assert os.environ['HF_HOME'] == {caches['HF_HOME']!r}\n"
        "pathlib.Path(sys.argv[-1]).write_text('done\\n')\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/script.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(start.sys, "executable", str(tmp_path / "python"))
    assert start.first_step_s(job_of("start+trl+door"), tmp_path / "folder", caches) > 0

    # What that process does: a step by TRL, and then the file.
    monkeypatch.setattr(start, "train", lambda job, after_step: after_step())
    start.main("start+trl+door", "tiny", "8x16", str(tmp_path / "done"))
    assert start.has_line(tmp_path / "done")
    assert json.loads((tmp_path / "done").read_text()) == {"step": 1}


def test_paths_stand_for_their_modes():
    modes = paths.modes_of(",".join(PATHS))
    assert all(re.fullmatch(paths.MODES, mode) for mode in modes)
    assert len({paths.title(mode) for mode in modes}) == len(modes) == 27
    assert paths.modes_of("dpo,full+train") == ["dpo+trl+liger", "dpo+trl+door", "dpo+train", "full+train"]
    title = "full fine-tuning: TRL, transformers + Liger Kernel, activation checkpointing"
    assert paths.title("full+trl+liger+ac") == title
    with pytest.raises(argparse.ArgumentTypeError, match=r"got 'dpo.ours'"):
        paths.modes_of("dpo+ours")


def test_each_path_has_its_sizes(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    paths.add_options(parser)
    options = parser.parse_args(["--modes", "first,dpo+train,vision+trl"])
    options.out = tmp_path
    plans = [paths.plan(options, "llama-3.2-1b", mode) for mode in options.modes]
    assert [(plan.row["batch"], plan.command[-1]) for plan in plans[-2:]] == [("8x1024", "24"), ("4x2048", "24")]
    assert {plan.file.name for plan in plans[:3]} == {"paths-llama-3.2-1b.jsonl"}
    options = parser.parse_args(["--modes", "dpo+train", "--batch", "2x64", "--steps", "9"])
    with pytest.raises(argparse.ArgumentError, match="--steps must be more than 9, got 9"):
        paths.run(options)
    options = parser.parse_args(["--modes", "vision,full", "--model", "qwen3-vl-8b"])
    with pytest.raises(argparse.ArgumentError, match="--modes must be vision for --model qwen3-vl-8b"):
        paths.run(options)


def test_tables():
    row = {"benchmark": "paths", "model": "llama-3.2-1b", "batch": "8x2048", "commit": "abc"}
    times = {"1x16": {"forward_ms": 10.0, "generate_ms": 20.0}}
    fast = {"1x16": {"forward_ms": 5.0, "generate_ms": 4.0}}
    rows = [
        row | {"mode": "full+trl+liger", "tokens_per_s": 60000, "peak_gib": 20.0},
        row | {"mode": "full+trl+liger+ac", "tokens_per_s": 50000, "peak_gib": 10.0},
        row | {"mode": "full+train", "tokens_per_s": 75000, "peak_gib": 15.0},
        row | {"mode": "vision+trl", "tokens_per_s": 6000.0, "images_per_s": 4.0, "peak_gib": 15.0},
        row | {"mode": "vision+train", "tokens_per_s": 9000.0, "images_per_s": 8.0, "peak_gib": 15.0},
        row | {"mode": "lora+train", "error": "out of memory"},
        row | {"mode": "generate+hf", "first_ms": 15.0, "step_ms": 30.0, "peak_gib": 5.0},
        row | {"mode": "generate+door", "first_ms": 5.0, "step_ms": 1.5, "peak_gib": 4.0},
        row | {"mode": "first+hf", "prompts": times, "peak_gib": 4.0},
        row | {"mode": "first+ours", "prompts": fast, "peak_gib": 4.0},
        row | {"mode": "start+trl+liger", "cold_s": 60.0, "warm_s": 30.0},
        row | {"mode": "start+train", "cold_s": 30.0, "warm_s": 10.0},
        row | {"mode": "lmeval+hf", "error": "no lm_eval"},
    ]
    tables = paths.table(rows).split("\n\n")
    assert [text for text in tables if not text.startswith("|")] == [f"{name}:" for name in paths.TABLES]
    training, generation, first, harness, begun = (text.splitlines()[2:] for text in tables if text.startswith("|"))
    name = f"| llama-3.2-1b | 8 {TIMES} 2048 | abc | "
    assert training[2] == name + "full fine-tuning: liger-models train | 75,000 |  | 15.0 | 1.250 | 0.750 |"
    assert training[4] == name + "images, LoRA: liger-models train | 9,000 | 8.0 | 15.0 | 2.000 | 1.000 |"
    assert "out of memory" in training[5]
    assert generation[1] == name + "generate: liger_models.hf | 5.0 | 1.5 | 4.0 | 20.000 | 0.800 |"
    assert first[1] == name + f"first token: liger_models | 1 {TIMES} 16 | 5.0 | 4.0 | 2.000 | 5.000 |"
    assert begun[1] == name + "first step: liger-models train | 30.0 | 10.0 | 2.000 | 3.000 |"
    for lines in (training, generation, first, harness, begun):
        assert len({line.count("|") for line in lines}) == 1
