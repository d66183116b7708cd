"""What the tests of training runs share: a tiny checkpoint, the log of a run, and a process group that is not left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liger_models import LigerLlama, LlamaConfig

TIMED = ("tokens_per_s", "mfu", "memory_gib")


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A run that fails leaves its process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def on_the_cpu(tmp_path, monkeypatch):
    """On the CPU, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)


def save_llama(folder: Path, tokenizer: str, *, seed: int = 0, **sizes: int) -> None:
    """A Llama with random weights, and a tokenizer of bytes that begins with <s> and </s>, by its tokenizer.json."""
    torch.manual_seed(seed)
    default = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    model = LigerLlama.from_config(LlamaConfig(vocab_size=258, bos_token_id=0, eos_token_id=1, **{**default, **sizes}))
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    model.assets = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": config.encode()}
    model.save_pretrained(folder)


@pytest.fixture
def sharing(monkeypatch):
    """Answers share the tokens of their prompt on the CPU, too."""
    monkeypatch.setattr("liger_models.train.objectives.SHARING_DEVICES", ("cpu", "cuda"))


def log(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, without what depends on the machine."""
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]
