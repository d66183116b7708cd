"""One measurement in this process: ``python -m benchmarks.worker MODULE:FUNCTION MODE MODEL BATCH STEPS``.

The process imports its libraries, and waits for a line on its standard input before it touches the GPU. So it can start
while another process measures. ``imported_s`` does not include the wait. Processes of torchrun do not wait.
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


def import_libraries(mode: Mode) -> None:
    if mode.library == "unsloth":  # before transformers, which it patches
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
        import unsloth  # noqa: F401
    if mode.library == "trl":
        import trl  # noqa: F401
    if mode.library == "titan":
        import torchtitan.models.llama3  # noqa: F401
    if mode.library in ("hf", "titan", "trl", "error"):
        from transformers import AutoModelForCausalLM  # noqa: F401
    if mode.library in ("ours", "error", "floor"):
        from liger_models import AutoLigerModel  # noqa: F401
    if "liger" in mode:
        import liger_kernel.transformers  # noqa: F401


def main(function: str, mode_text: str, model: str, batch: str, steps: str) -> None:
    measure = pkgutil.resolve_name(f"benchmarks.{function}")
    mode = Mode.parse(mode_text)
    import_libraries(mode)
    job = Job(mode, model, batch, int(steps), sharded="LOCAL_RANK" in os.environ, imported_s=process_age_s())
    if job.sharded:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    else:
        sys.stdin.readline()
    with contextlib.redirect_stdout(sys.stderr):  # lines of a library are not rows
        row = {"device": torch.cuda.get_device_name()} | measure(job)
    if not job.sharded or torch.distributed.get_rank() == 0:
        print(json.dumps(row))
    if job.sharded:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
