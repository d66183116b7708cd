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

if importlib.util.find_spec("openrlhf") is not None:
    # OpenRLHF imports flash-attn, which cannot be built without CUDA, for packed batches. It asks PyTorch for the GPU.
    import deepspeed  # noqa: F401  after the lines below these two would take flash-attn for installed
    import transformers.modeling_utils  # noqa: F401

    parts = {"": "", ".bert_padding": "index_first_axis pad_input rearrange unpad_input", ".utils": ""}
    for part, names in (parts | {".utils.distributed": "all_gather"}).items():
        sys.modules[f"flash_attn{part}"] = ModuleType(f"flash_attn{part}")
        vars(sys.modules[f"flash_attn{part}"]).update(dict.fromkeys(names.split()))
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None

if __name__ == "__main__":
    torch.nn.modules.module.register_module_forward_pre_hook(note)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        print("models of:", *sorted(SEEN), flush=True)
