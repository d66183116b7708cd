"""Loading a checkpoint onto all GPUs for training: time in seconds, and host memory."""

import argparse
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .clock import peak_gib
from .options import add_gpus, add_model, add_modes
from .processes import common_start, measure_on_gpus, plan_modes
from .rows import Row, Rows
from .tables import markdown
from .training.build import build_ours, shard
from .training.job import Job
from .training.models import read_config
from .training.modes import Mode, title

HELP = "a checkpoint onto all GPUs of this machine: seconds, host memory"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf,ours", allowed="hf|ours", help="comma-separated, of hf and ours")
    add_gpus(parser)


def run(options: argparse.Namespace) -> Rows:
    plans = plan_modes("load", [options.model], options.modes, "", 0, options.out / f"load-{options.model}.jsonl")
    with common_start("load:save", options.model):
        return measure_on_gpus(plans, options.gpus)


def save(job: Job) -> Row:
    """Save a model with random weights in $SAVE."""
    build_ours(read_config(job.model), Mode("ours", {})).save_pretrained(os.environ["SAVE"])
    return {}


@contextmanager
def host_memory() -> Iterator[list[float]]:
    """Context manager that records this process's peak memory in GiB: anonymous memory, and mapped files."""
    peaks, done = [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            sizes = dict(re.findall(r"(Rss\w+):\s+(\d+)", Path("/proc/self/status").read_text()))
            for i, key in enumerate(("RssAnon", "RssFile")):
                peaks[i] = max(peaks[i], int(sizes[key]) / 2**20)  # from KiB

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()


def measure(job: Job) -> Row:
    """Load the checkpoint in $START. With transformers, each process loads the whole model before it is sharded."""
    torch.zeros(1, device="cuda")  # creating the CUDA context is not timed
    torch.distributed.barrier()
    with host_memory() as peaks:
        begun = time.monotonic()
        if job.mode.library == "hf":
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(os.environ["START"], dtype=torch.bfloat16)
            shard(model.float(), job.mode)
        else:
            from liger_models import AutoLigerModel, apply_fsdp

            AutoLigerModel.from_pretrained(
                os.environ["START"], dtype=torch.float32, device="cuda", shard=apply_fsdp, progress=False
            )
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun

    # The time of the slowest rank, and the largest memory of any rank.
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (seconds, *peaks))
    longest, anonymous, mapped = (max(values) for values in zip(*every, strict=True))
    return {
        "checkpoint_gib": round(sum(f.stat().st_size for f in Path(os.environ["START"]).iterdir()) / 2**30, 2),
        "load_s": round(longest, 1),
        "host_gib": round(anonymous, 2),
        "mapped_gib": round(mapped, 2),
        "peak_gib": peak_gib(),
    }


def table(rows: Rows) -> str:
    """One line per mode. Host memory is per process, and GPU memory is the peak during loading."""
    keys = ("checkpoint_gib", "load_s", "host_gib", "mapped_gib", "peak_gib")
    lines = [
        (row["model"], row["gpus"], title(row["mode"]), *(row.get(key, row.get("error", "")) for key in keys))
        for row in rows
    ]
    return markdown("model|GPUs||checkpoint GiB|seconds|host GiB|mapped files GiB|GPU GiB", lines)
