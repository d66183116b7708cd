"""Run one measurement in this process: ``python -m benchmarks.worker MODULE:FUNCTION MODE MODEL BATCH STEPS``.

The process imports its libraries, and then waits for a line on its standard input before it uses the GPU. It can
therefore start while another process measures. ``imported_s`` does not include the waiting time. The processes of
torchrun share one standard input, from which each process takes one line.
"""

import contextlib
import json
import os
import pkgutil
import sys
import time
from pathlib import Path

import torch

from .training.job import Job
from .training.modes import Mode


def process_age_s() -> float:
    """Seconds since the start of this process, from /proc."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


GO = b"go\n"
"""The line for which a process waits."""

LIBRARIES = {
    "unsloth": ("unsloth",),  # before transformers, which it patches
    "titan": ("torchtitan.models.llama3", "transformers:AutoModelForCausalLM"),
    "trl": ("trl", "peft", "datasets"),
    "hf": ("transformers:AutoModelForCausalLM", "transformers.modeling_layers"),
    "ours": ("liger_models:AutoLigerModel", "liger_models.layers.attention"),
    "train": ("liger_models.cli.commands", "liger_models.train:train"),
    "liger": ("liger_kernel.transformers",),
    "st": ("sentence_transformers",),
}
"""Maps a word of a mode to the modules or names that processes of this mode import, in this order."""

IMPLIED = {
    "st": ("ours",),
    "error": ("hf", "ours"),
    "floor": ("ours",),
    "trl": ("hf",),
    "door": ("hf", "ours"),
    "train": ("ours",),
}
"""Maps a word of a mode to other words whose libraries the mode needs, too."""

TRAINERS = {
    **dict.fromkeys(("full", "lora", "vision"), ("trl:SFTTrainer",)),
    "dpo": ("trl:DPOTrainer",),
    **dict.fromkeys(("grpo", "trl"), ("trl:GRPOTrainer",)),
    "lmeval": ("lm_eval.models.huggingface",),
}
"""Maps the first word of a mode to further names to import, if the mode or `IMPLIED` has the word "hf"."""


def libraries(mode: Mode) -> list[str]:
    """The modules and names that a mode needs, in the order of import."""
    words = {mode.library, *mode.extras}
    if mode.library == "start":  # other processes are measured
        return []
    if words >= {"grpo", "door"}:
        words.add("trl")
    words |= {implied for word in words for implied in IMPLIED.get(word, ())}
    names = [name for word, group in LIBRARIES.items() if word in words for name in group]
    return [*names, *TRAINERS.get(mode.library, ())] if "hf" in words else names


def import_libraries(mode: Mode) -> None:
    """Import all libraries that the mode needs, without initializing CUDA."""
    if mode.library == "unsloth":
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    for name in libraries(mode):
        pkgutil.resolve_name(name)


def main(function: str, mode_text: str, model: str, batch: str, steps: str) -> None:
    measure = pkgutil.resolve_name(f"benchmarks.{function}")
    mode = Mode.parse(mode_text)
    import_libraries(mode)
    job = Job(mode, model, batch, int(steps), sharded="LOCAL_RANK" in os.environ, imported_s=process_age_s())
    # Read without a buffer, which would consume the lines of other ranks. If the parent process has failed, there is
    # no line.
    if os.read(sys.stdin.fileno(), len(GO)) != GO:
        sys.exit("worker: no line on the standard input")
    if job.sharded:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    with contextlib.redirect_stdout(sys.stderr):  # lines that a library prints are not rows
        row = {"device": torch.cuda.get_device_name()} | measure(job)
    if not job.sharded or torch.distributed.get_rank() == 0:
        print(json.dumps(row))
    if job.sharded:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
