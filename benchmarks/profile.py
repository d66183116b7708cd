"""The time of a training step, divided by kernel class."""

import argparse
import re
import statistics

import torch

from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, tokens
from .training.batches import draw
from .training.job import Job
from .training.models import read_config
from .training.modes import title
from .training.step import make_step, step_times

HELP = "where a training step's time goes, by class of kernel"
WARM_UP, PROFILED = 5, 2
"""Number of untimed steps before the timed steps, and number of profiled steps after them."""

KERNEL_CLASSES = {
    "attention": r"cudnn|sdpa|flash|fmha|flex|attention",
    "matmul": r"gemm|nvjet|cutlass|cublas|splitk|_mm_|_product_kernel|_outer_kernel",
    "optimizer": r"adam|multi_tensor",
    "loss": r"cross_entropy|element_mul|_scale_kernel|softmax|nll_loss",
    "rope": r"rope",
    "gated activation": r"swiglu|geglu|gated_act",
    "norm": r"rms_norm|layer_norm",
    "copies": r"memcpy|memset",
}
"""Maps a class to a case-insensitive regular expression for kernel names. The first class that matches counts. Kernels
that match none are "elementwise".
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf+liger,ours")
    add_batch(parser)
    add_steps(parser, 8, f"timed steps; {PROFILED} further ones are profiled")


def run(options: argparse.Namespace) -> Rows:
    return measure_all(plan_batch("profile", options))


def kernel_class(name: str) -> str:
    return next((c for c, words in KERNEL_CLASSES.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def measure(job: Job) -> Row:
    """The milliseconds per step of each kernel class. "gaps" is the time in which no kernel runs."""
    config = read_config(job.model)
    train, generator = make_step(job.mode, config, lr=1e-5), torch.Generator("cuda").manual_seed(0)
    step = lambda: train(draw(config, *job.shape, generator))
    for _ in range(WARM_UP):
        step()
    wall = statistics.median(step_times(step, job.steps))

    # The profiler slows steps down, so the profiled steps are not timed.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()

    # The time of each class and of each kernel.
    spent = dict.fromkeys(("matmul", "attention", *KERNEL_CLASSES, "elementwise"), 0.0)
    kernels: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            milliseconds = event.device_time_total / 1e3 / PROFILED
            spent[kernel_class(event.name)] += milliseconds
            kernels[event.name] = kernels.get(event.name, 0.0) + milliseconds
    # Kernels may overlap, so limit the remaining time of the step to at least 0.
    spent["gaps"] = max(wall - sum(spent.values()), 0.0)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:30]
    return {
        "step_ms": round(wall, 2),
        "class_ms": {c: round(milliseconds, 2) for c, milliseconds in spent.items()},
        "kernel_ms": {kernel[:80]: round(milliseconds, 2) for kernel, milliseconds in longest},
    }


def table(rows: Rows) -> str:
    """One line per mode: milliseconds of each kernel class, and the share of matrix products and attention."""
    classes = list(dict.fromkeys(name for row in rows for name in row.get("class_ms", {})))
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], *[""] * (len(classes) + 1)))
            continue
        spent = row["class_ms"]
        share = (spent["matmul"] + spent["attention"]) / row["step_ms"]
        cells = [f"{spent.get(name, 0.0):.1f}" for name in classes]
        lines.append((*names, f"{row['step_ms']:.1f}", *cells, f"{share:.3f}"))
    return markdown("|".join(["model|tokens/step||ms/step", *classes, "matmul and attention"]), lines)
