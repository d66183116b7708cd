"""Full fine-tuning steps under FSDP2, with weights, gradients and optimizer state in fp32 and computation in bf16.

Some modes change these dtypes.
"""

import argparse

from . import train
from .options import add_batch, add_gpus, add_model, add_modes, add_steps
from .processes import measure_on_gpus, plan_batch
from .rows import Row, Rows, grouped
from .tables import markdown, mfu, ratios, tokens
from .training.job import Job
from .training.modes import title

HELP = "training on all GPUs of this machine, with weights in fp32"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf+liger,hf+liger+ac,ours,ours+selective")
    add_batch(parser, help="rows x tokens per row, of each GPU")
    add_steps(parser, 10, train.STEPS_HELP)
    add_gpus(parser)


def run(options: argparse.Namespace) -> Rows:
    return measure_on_gpus(plan_batch("fsdp", options), options.gpus)


def measure(job: Job) -> Row:
    return train.measure(job)


def table(rows: Rows) -> str:
    """One line per mode. Speed and memory are per GPU."""
    lines = []
    runs = grouped(rows, "model", "gpus", "batch", "run")
    for (model, gpus, batch, _), group in sorted(runs.items(), key=lambda run: run[0][:3]):
        for row in sorted(group, key=lambda row: row["mode"]):
            names = (model, gpus, tokens(batch), row["commit"], title(row["mode"]))
            if "error" in row:
                lines.append((*names, row["error"], "", "", "", ""))
                continue
            lines.append((
                *names, f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}", mfu(row), *ratios(row, group),
            ))  # fmt: skip
    return markdown("model|GPUs|tokens/step|run||tokens/s|peak GiB|MFU|speed ratio|memory ratio", lines)
