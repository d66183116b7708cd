"""A model with random weights learns to sort. It is then evaluated on lists that it has not seen.

A list of `LENGTH` numbers below `NUMBERS` is followed by its answer, the same numbers in sorted order. All modes
start from the same weights and see the same lists. A list counts as sorted if each number of the answer is the most
probable number after the numbers before it. Greedy decoding then finds the answer.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, plan_batch
from .rows import Row, Rows, grouped, of_transformers
from .tables import markdown, ratio, smallest
from .training.job import Job
from .training.models import read_config
from .training.modes import title
from .training.step import Step, make_step

HELP = "learning to sort from random weights: accuracy, seconds, memory"
NUMBERS, LENGTH = 100, 16
FIRST = 10
"""Id of the number 0. The id before it separates a list from its answer."""

EVALUATED = 2048
WARMUP, SETTLE = 50, 5
"""Number of steps in which the learning rate rises before it falls to 0, and number of untimed first steps."""
MAX_NORM = 1.0
"""Maximum norm of the gradients. Without a limit, one bad step near the end could ruin a run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama")
    add_modes(parser, "hf,hf+liger,ours+adamw")
    add_batch(parser, f"512x{2 * LENGTH + 1}", f"lists x {2 * LENGTH + 1} tokens")
    add_steps(parser, 500, "steps of the run")


def run(options: argparse.Namespace) -> Rows:
    if int(options.batch.partition("x")[2]) != 2 * LENGTH + 1:
        raise argparse.ArgumentError(None, f"--batch must have {2 * LENGTH + 1} tokens per row, got {options.batch}")
    if options.steps <= SETTLE:
        raise argparse.ArgumentError(None, f"--steps must be more than {SETTLE}, got {options.steps}")
    return measure_all(plan_batch("task", options))


def draw_lists(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw lists with their answers, [count, 2 LENGTH + 1] int64. Only the answers have labels."""
    numbers = FIRST + torch.randint(NUMBERS, (count, LENGTH), generator=generator, device=generator.device)
    ids = torch.cat([numbers, torch.full_like(numbers[:, :1], FIRST - 1), numbers.sort(1).values], 1)
    return {"input_ids": ids, "labels": ids.clone().index_fill_(1, torch.arange(LENGTH + 1, device=ids.device), -100)}


def train_on_lists(train: Step, rows: int, steps: int, device: str) -> tuple[float, list[float]]:
    """Train. Returns the seconds of the steps after the first `SETTLE` steps, and the losses."""
    generator = torch.Generator(device).manual_seed(1)
    parameters = list(train.model.parameters())

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)

    train.optimizer.register_step_pre_hook(clip)

    # The learning rate rises, and then falls to 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        train.optimizer, lambda done: min((done + 1) / WARMUP, 1.0 - done / steps)
    )
    losses, begun = [], 0.0
    for index in range(steps):
        if index == SETTLE:
            torch.stack(losses).tolist()  # waits for the device
            begun = time.monotonic()
        losses.append(train(draw_lists(rows, generator)))
        schedule.step()
    values = torch.stack(losses).tolist()  # waits for the device
    return time.monotonic() - begun, values


@torch.no_grad()
def accuracy(model: Any, rows: int, ours: bool, device: str) -> float:
    """The share of `EVALUATED` new lists that the model sorts."""
    model.eval()
    generator, right = torch.Generator(device).manual_seed(2), 0
    for start in range(0, EVALUATED, rows):
        ids = draw_lists(min(rows, EVALUATED - start), generator)["input_ids"]
        # The answer is correct if each of its tokens is the argmax of the logits at the token before it.
        logits = model(ids, return_logits=True).logits if ours else model(input_ids=ids).logits
        right += int((logits[:, LENGTH:-1].argmax(-1) == ids[:, LENGTH + 1 :]).all(1).sum())
    return right / EVALUATED


def measure(job: Job) -> Row:
    train = make_step(job.mode, read_config(job.model), lr=3e-4)
    rows = job.shape[0]
    seconds, losses = train_on_lists(train, rows, job.steps, "cuda")
    peak = torch.cuda.max_memory_allocated()
    begun = time.monotonic()
    right = accuracy(train.model, rows, job.mode.library == "ours", "cuda")
    return {
        "accuracy": right,
        "seconds": round(seconds, 1),
        "evaluation_s": round(time.monotonic() - begun, 1),
        "peak_gib": round(peak / 2**30, 2),
        "losses": [round(loss, 4) for loss in losses[:: max(len(losses) // 50, 1)]],
    }


def table(rows: Rows) -> str:
    """One line per mode. Ratios are relative to the fastest mode of transformers."""
    lines = []
    for (model, _), group in sorted(grouped(rows, "model", "batch").items()):
        best = smallest([row for row in group if of_transformers(row)], lambda row: row.get("seconds"))
        for row in group:
            if "error" in row:
                lines.append((model, title(row["mode"]), row["error"], "", "", "", "", ""))
                continue
            ratios = ratio(best.get("seconds"), row["seconds"]), ratio(row["peak_gib"], best.get("peak_gib"))
            keys = ("seconds", "evaluation_s", "peak_gib")
            lines.append((model, title(row["mode"]), f"{row['accuracy']:.4f}", *(row[key] for key in keys), *ratios))
    return markdown("model||lists sorted|training s|evaluation s|peak GiB|speed ratio|memory ratio", lines)
