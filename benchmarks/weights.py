"""Reading and loading a model's weights with Hugging Face's names, compared with copying every parameter."""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import nn

from .clock import now, seconds
from .options import add_model, add_modes
from .processes import measure_all, plan_modes
from .rows import Row, Rows
from .tables import markdown, ratio
from .training.build import build_ours
from .training.job import Job
from .training.models import read_config
from .training.modes import title

HELP = "hf_tensors and load_hf_tensors on one GPU against a copy of every parameter"
REPEATS = 5
UNCHANGED = 100
"""Before each `hf_delta`, one of every `UNCHANGED` elements of a parameter changes, as in reinforcement learning."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "ours,ours+lora", help='comma-separated, "ours" with any extras')


def run(options: argparse.Namespace) -> Rows:
    return measure_all(
        plan_modes("weights", [options.model], options.modes, "", 0, options.out / f"weights-{options.model}.jsonl")
    )


def measure(job: Job) -> Row:
    return times(build_ours(read_config(job.model), job.mode), torch.device("cuda"))


def times(model: nn.Module, device: torch.device) -> Row:
    """Milliseconds of each task's fastest repetition, and the GiB that the task needs in addition to the model.

    Like reading tensors one at a time, the copy frees each copied parameter before it copies the next parameter.
    """
    from liger_models import hf_tensors, load_hf_tensors

    def copy() -> None:
        for parameter in model.parameters():
            parameter.detach().clone()

    def read(dtype: torch.dtype | None = None) -> None:
        for _ in hf_tensors(model, dtype):
            pass

    # The copy is the minimum work that all other tasks must do.
    tasks: dict[str, Callable[[], object]] = {
        "copy": copy,
        "read": read,
        "read_fp32": lambda: read(torch.float32),
        "load": lambda: load_hf_tensors(model, hf_tensors(model, merge=False)),
    }
    row: Row = {"weights_gib": round(sum(parameter.nbytes for parameter in model.parameters()) / 2**30, 2)}
    for name, task in tasks.items():
        row |= {f"{name}_ms": measured(task), f"{name}_gib": extra_gib(task, device)}
    return row | delta_times(model)


@torch.no_grad()
def delta_times(model: nn.Module) -> Row:
    """Milliseconds of the fastest `hf_delta` and `apply_delta`, and the share of all bytes that is sent.

    Before each repetition, one in `UNCHANGED` elements is negated. All tensors are on the model's device.
    """
    from liger_models import apply_delta, get_hf_state_dict, hf_delta

    base, receiver = get_hf_state_dict(model), get_hf_state_dict(model)
    times = []
    for _ in range(2 * REPEATS):  # an even number, so that all signs are restored at the end
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.view(-1)[::UNCHANGED].neg_()
        marks = [now()]
        delta = hf_delta(model, base)
        marks.append(now())
        apply_delta(receiver, delta)
        marks.append(now())
        times.append([1000 * (end - begin) for begin, end in itertools.pairwise(marks)])
    sent = sum(tensor.nbytes for tensor in delta.tensors.values())
    delta_ms, apply_ms = (round(min(column), 2) for column in zip(*times, strict=True))
    share = sent / sum(tensor.nbytes for tensor in base.values())
    return {"delta_ms": delta_ms, "apply_ms": apply_ms, "delta_share": round(share, 4)}


def measured(task: Callable[[], object]) -> float:
    return round(1000 * min(seconds(task) for _ in range(REPEATS)), 2)


def extra_gib(task: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    task()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


def table(rows: Rows) -> str:
    """One line per mode: milliseconds, the ratio to the copy's time, and GPU memory in addition to the model."""
    lines = []
    for row in rows:
        if "error" in row:
            lines.append((row["model"], title(row["mode"]), row["error"], *[""] * 7))
            continue
        cells = [
            f"{row[f'{name}_ms']} ({ratio(row[f'{name}_ms'], row['copy_ms'])}), {row[f'{name}_gib']} GiB"
            for name in ("copy", "read", "read_fp32", "load")
        ]
        synced = (row.get(name, "") for name in ("delta_share", "delta_ms", "apply_ms"))
        lines.append((row["model"], title(row["mode"]), row["weights_gib"], *cells, *synced))
    columns = (
        "copy ms|hf_tensors ms|hf_tensors in fp32 ms|load_hf_tensors ms|share in hf_delta|hf_delta ms|apply_delta ms"
    )
    return markdown(f"model||GiB|{columns}", lines)
