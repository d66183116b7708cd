"""Full fine-tuning steps of one model: speed, peak memory and losses."""

import argparse
import os
import re
import statistics
import time
from contextlib import nullcontext

import torch
from torch import Tensor

from .clock import peak_gib
from .options import add_batch, add_model, add_modes, add_steps
from .processes import common_start, measure_all, plan_batch
from .rows import Row, Rows, grouped, of_ours, of_transformers
from .tables import Bar, markdown, mfu, ratios, tokens
from .training.batches import draw
from .training.job import Job
from .training.models import flops_per_token, read_config
from .training.modes import MODES, title
from .training.step import make_step, step_times

HELP = "a full fine-tuning step: tokens/s, peak memory, losses"
KEPT_LOSSES = 5
"""Number of untimed steps at the beginning. Their losses are part of the row."""

STEPS_HELP = f"timed steps, after {KEPT_LOSSES} whose losses are kept"
PEAK_FLOPS = 989e12
"""Peak dense bf16 FLOPS of an H100 or H200, from the vendor's datasheet. MFU is a fraction of this peak."""

SHORT_MODES = """
hf hf+liger hf+liger+ac ours ours+adamw ours+adamw+offload10+selective12
ours+adamw+inbackward+moments16+offload12+selective5 ours+adamw+plan80 ours+adamw+plan30 ours+adamw+fp8
"""
SHORT = ("llama-3-8b", tuple(SHORT_MODES.split()))
"""Model and modes of the short table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf,hf+liger,ours", help=f"comma-separated, of {', '.join(MODES)}")
    add_batch(parser)
    add_steps(parser, 10, STEPS_HELP)


def run(options: argparse.Namespace) -> Rows:
    from_files = any(mode.startswith("unsloth") for mode in options.modes)
    start = common_start("training.unsloth:save", options.model, variable="CHECKPOINT")
    with start if from_files else nullcontext():
        return measure_all(plan_batch("train", options))


def measure(job: Job) -> Row:
    """Measure the time and memory of a mode's steps.

    ``first_step_s`` is the time from the start of the process to the end of its first step.
    """
    begun = time.monotonic()
    config = read_config(job.model)
    B, T = job.shape
    together = job.mode.extras.get("tp") or 1  # number of GPUs that share their rows

    # GPUs that share rows draw the same tokens.
    train = make_step(job.mode, config, lr=1e-5, sharded=job.sharded, shape=job.shape)
    generator = torch.Generator("cuda").manual_seed(int(os.environ.get("RANK", 0)) // together)

    def step() -> Tensor:
        return train(draw(config, B * together, T, generator))

    if "warm" in job.mode:
        from liger_models import warm_up  # not imported by processes of transformers

        warm_up(train.model, **draw(config, B, T, torch.Generator("cuda")))

    # Run the first steps, whose losses are kept, and then the timed steps.
    losses = [step().item()]
    first_step_s = job.imported_s + time.monotonic() - begun
    losses += [step().item() for _ in range(KEPT_LOSSES - 1)]
    torch.cuda.reset_peak_memory_stats()
    times = step_times(step, job.steps)
    milliseconds = statistics.median(times)
    rate = B * T / milliseconds * 1e3

    # FLOPs are counted only for dense models without images and adapters, in which only attention mixes tokens.
    other_products = (
        "vision_config", "num_experts_per_tok", "top_k_experts", "linear_num_key_heads", "mamba_d_state",
        "conv_L_cache",
    )  # fmt: skip
    counted = not any(config.get(key) for key in other_products) and not {"lora", "medusa"} & job.mode.extras.keys()
    return {
        "tokens_per_s": round(rate, 1),
        "step_ms": round(milliseconds, 2),
        "step_ms_range": [round(min(times), 2), round(max(times), 2)],
        "peak_gib": peak_gib(),
        **({"mfu": round(rate * flops_per_token(config, T) / PEAK_FLOPS, 4)} if counted else {}),
        "first_step_s": round(first_step_s, 1),
        "trained": sum(weight.numel() for weight in train.model.parameters() if weight.requires_grad),
        **({"plan": str(train.plan)} if train.plan else {}),
        "losses": losses,
    }


def table(rows: Rows) -> str:
    lines = []
    for (model, batch, _), group in sorted(grouped(rows, "model", "batch", "run").items(), key=lambda run: run[0][:2]):
        for row in sorted(group, key=lambda row: row["mode"]):
            names = (model, tokens(batch), row["commit"], title(row["mode"]))
            if "error" in row:
                lines.append((*names, row["error"], "", "", "", "", "", ""))
                continue
            losses = " → ".join(f"{row['losses'][at]:.3f}" for at in (0, -1))
            lines.append((
                *names, f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.1f}", f"{row['peak_gib']:.1f}",
                mfu(row), *ratios(row, group), losses,
            ))  # fmt: skip
    return markdown(
        "model|tokens/step|run||tokens/s|ms/step|peak GiB|MFU|speed ratio|memory ratio|loss, steps 1 → 5", lines
    )


def short_table(rows: Rows) -> str:
    """A table of only the modes in `SHORT`, each compared with transformers in the same run."""
    model, modes = SHORT
    lines = []
    shown = [row for row in rows if row["model"] == model and "error" not in row]
    for (batch, _), group in sorted(grouped(shown, "batch", "run").items(), key=lambda run: run[0][0]):
        by_mode = {row["mode"]: row for row in group}
        if not any(mode.startswith("ours") for mode in modes if mode in by_mode):
            continue
        for index, row in enumerate(by_mode[mode] for mode in modes if mode in by_mode):
            where = "" if index else tokens(batch)
            rate, speed, memory = f"{row['tokens_per_s']:,.0f}", *ratios(row, group)
            lines.append((where, title(row["mode"]), rate, speed, f"{row['peak_gib']:.1f}", memory))
    return markdown("tokens/step||tokens/s|speed ratio|peak GiB|memory ratio", lines)


UNPLOTTED = re.compile(r"\+(graph|inbackward|medusa|moments|offload|peft|plan|selective)")
"""The plot leaves out modes with these words, because they trade time for memory or measure something else."""


def bars(rows: Rows) -> list[Bar]:
    """A bar for each mode, from the newest run of each step that has measured both transformers and this package."""
    bars = []
    for (model, batch), group in sorted(grouped(rows, "model", "batch").items()):
        measured = [row for row in group if "error" not in row and not UNPLOTTED.search(row["mode"])]
        runs = [
            run
            for run in grouped(measured, "run").values()
            if any(map(of_transformers, run)) and any(map(of_ours, run))
        ]
        newest = max(runs, key=lambda run: max(row["date"] for row in run), default=[])
        for row in sorted(newest, key=lambda row: row["mode"]):
            text = f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.0f} GiB"
            bars.append((f"{model} {tokens(batch)}, {title(row['mode'])}", row["tokens_per_s"], text))
    return bars
