"""The loss of every step in a run. All modes start from the same weights and see the same tokens."""

import argparse
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from .options import add_batch, add_model, add_modes, add_steps
from .processes import common_start, measure_all, plan_batch
from .rows import Row, Rows, grouped
from .tables import markdown, tokens
from .training.batches import draw_chain
from .training.job import Job
from .training.models import read_config, text_part
from .training.modes import title
from .training.step import Step, make_step

HELP = "the loss of every step, from the same weights and data"
WARMUP = 20
"""Number of steps in which the learning rate rises."""

START_STEPS = 600
START_LOSS = 4.0
"""All modes start from weights that were trained for `START_STEPS` steps, or until the loss fell below `START_LOSS`.
The loss has a plateau at 6.2, and a run ends at 1.4.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-1b")
    add_modes(parser, "hf,hf+compile,hf+liger,ours,ours+fp8")
    add_batch(parser, "8x2048")
    add_steps(parser, 200, "steps of the run")


def run(options: argparse.Namespace) -> Rows:
    with common_start("curves:start", options.model, options.batch, START_STEPS):
        return measure_all(plan_batch("curves", options))


def learn(step: Step, data: Tensor) -> Iterator[Tensor]:
    """Train on the batches of ``data`` [steps, B, T], and yield the loss of every step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda done: min((done + 1) / WARMUP, 1.0))
    for ids in data.to("cuda"):
        yield step({"input_ids": ids, "labels": ids})
        schedule.step()


def start(job: Job) -> Row:
    """Train until the loss falls below the plateau, and save the weights in $SAVE.

    A model with random weights first learns the frequencies of tokens, and then learns nothing for a while. The step
    at which this plateau ends depends on rounding, so runs that start before it cannot be compared.
    """
    config = read_config(job.model)
    step = make_step(job.mode, config, lr=3e-4)
    losses = []
    for loss in learn(step, draw_chain(text_part(config)["vocab_size"], *job.shape, job.steps, seed=1)):
        losses.append(loss.item())
        if losses[-1] < START_LOSS:
            break
    step.model.save_pretrained(os.environ["SAVE"])
    return {"losses": losses}


def measure(job: Job) -> Row:
    """Train from the weights in $START."""
    config = read_config(job.model)
    step = make_step(job.mode, config, lr=1e-4)
    data = draw_chain(text_part(config)["vocab_size"], *job.shape, job.steps, seed=2)
    losses = torch.stack(list(learn(step, data)))
    return {"losses": [round(loss, 5) for loss in losses.float().tolist()]}


def table(rows: Rows) -> str:
    """One line per mode, with the distance between its losses and those of the first mode, which is due to rounding."""
    lines = []
    for (model, batch), group in sorted(grouped(rows, "model", "batch").items()):
        base = group[0].get("losses")
        for row in group:
            losses = row.get("losses")
            if not losses:
                lines.append((model, tokens(batch), title(row["mode"]), row["error"], "", "", ""))
                continue
            # The end of the curve, and the distance to the first mode's curve.
            tail = losses[-20:]
            gaps = [abs(a - b) for a, b in zip(losses, base or [], strict=False)]
            lines.append((
                model, tokens(batch), title(row["mode"]), f"{losses[0]:.4f}", f"{sum(tail) / len(tail):.4f}",
                f"{sum(gaps) / len(gaps):.4f}" if gaps else "", f"{max(gaps):.4f}" if gaps else "",
            ))  # fmt: skip
    return markdown(
        "model|tokens/step||first loss|mean of the last 20|mean distance to the first mode|largest distance", lines
    )
