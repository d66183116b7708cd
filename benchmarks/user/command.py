"""Runs the training command, with its own defaults, in this process."""

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..grpo import GROUP
from ..rows import Row
from ..training.build import LORA
from ..training.job import Job
from .path import shape_of
from .trainers import WARM_UP, WORKERS

LOG_EVERY = 4
GRPO_STEPS, GRPO_WARM_UP = 3, 1
"""Number of GRPO steps, and how many of them are untimed first steps in which kernels compile."""


def arguments(job: Job, start: str, output: str) -> list[str]:
    """The arguments of ``liger-models train`` for a path."""
    path, (rows, length) = job.mode.library, shape_of(job.mode.library, job)
    options: dict[str, Any] = {
        "model": start, "data": f"{start}/texts.jsonl", "output": output, "length": length, "batch-size": rows,
        "steps": job.steps, "log-every": LOG_EVERY, "dtype": "bfloat16", "lr": 1e-5,
    }  # fmt: skip
    if path not in ("full", "start"):
        options["lora-r"] = LORA["r"]
    if path == "dpo":
        options |= {"data": f"{start}/pairs.jsonl", "objective": "dpo"}
    if path == "grpo":
        options |= {
            "data": f"{start}/prompts.jsonl", "objective": "grpo", "reward": f"{start}/rewards.py:even",
            "num-generations": GROUP, "batch-size": rows // GROUP, "length": length + job.steps,
            "max-new-tokens": job.steps, "beta": 0, "steps": GRPO_STEPS, "log-every": 1,
        }  # fmt: skip
    if path == "vision":  # as many tokens, with packed examples
        options |= {"data": f"{start}/chats.jsonl", "length": rows * length, "batch-size": 1, "workers": WORKERS}
    return ["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@contextmanager
def counted_images() -> Iterator[list[dict[str, Any]]]:
    """Context manager with a list, to which each step of the training command adds its numbers of tokens and images."""
    from liger_models.train.metrics import Log

    counts: list[dict[str, Any]] = []
    original = Log.count

    def count(self: Any, batches: Any, operations: float) -> None:
        # Do not count padding: a row of several examples ends with padding documents of one token.
        for batch in batches:
            ids = batch["input_ids"].flatten()
            tokens = (torch.arange(1, len(ids) + 1, device=ids.device) * (ids != ids[-1])).amax()
            counts.append({"tokens": tokens, "images": len(batch["image_grid_thw"])})
        original(self, batches, operations)

    Log.count = count  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Log.count = original  # type: ignore[method-assign]


def measure_command(job: Job) -> Row:
    """Run the training command, which logs its tokens per second and its memory."""
    from liger_models.cli.commands import app

    path, (rows, length) = job.mode.library, shape_of(job.mode.library, job)
    counting = counted_images() if path == "vision" else nullcontext([])
    with tempfile.TemporaryDirectory() as folder, counting as counts:
        app(["--debug", *arguments(job, os.environ["START"], f"{folder}/run")], standalone_mode=False)
        lines = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
    warm_up = GRPO_WARM_UP if path == "grpo" else WARM_UP
    timed = [line for line in lines if "tokens_per_s" in line and line["step"] > warm_up]
    speed = statistics.median(line["tokens_per_s"] for line in timed)
    row: Row = {"tokens_per_s": round(speed), "peak_gib": round(max(line.get("memory_gib", 0.0) for line in timed), 2)}
    if path == "vision":
        steps_per_s = speed / (rows * length)  # from the log, which counts padding
        for name in ("tokens", "images"):
            row[f"{name}_per_s"] = round(steps_per_s * statistics.mean(int(c[name]) for c in counts[warm_up:]), 2)
    if path == "grpo":
        row["step_s"] = round(rows * (length + job.steps) / speed, 2)
    return row
