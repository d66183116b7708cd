"""Runs a tool's module as its command does, and prints where the language models that it called come from."""

import importlib.util
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

SEEN: set[str] = set()


def note(module: torch.nn.Module, _: Any) -> None:
    if type(module).__name__.endswith("ForCausalLM"):
        SEEN.add(type(module).__module__.split(".")[0])


if importlib.util.find_spec("torchaudio") is None:
    # LLaMA-Factory imports it for audio. PyPI has no build of it for the CPU, and here is no audio.
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

if __name__ == "__main__":
    torch.nn.modules.module.register_module_forward_pre_hook(note)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        print("models of:", *sorted(SEEN), flush=True)
