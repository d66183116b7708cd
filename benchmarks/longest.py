"""The longest sequence that a training step has memory for."""

import argparse
import os
import time

import torch

from .options import add_gpus, add_model, add_modes, several
from .processes import measure_all, measure_on_gpus, plan_modes
from .rows import Row, Rows, grouped
from .tables import markdown
from .training.batches import draw
from .training.job import Job
from .training.models import read_config
from .training.modes import title
from .training.step import make_step

HELP = "sequences of growing length, until one has no room"
LENGTHS = "65536,98304,131072,163840,196608,262144,327680,393216"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf+liger+ac,ours+adamw+inbackward+full+offload")
    parser.add_argument("--lengths", type=several("[1-9][0-9]*"), default=LENGTHS, help="tokens, comma-separated")
    add_gpus(parser, default=1, help="more than one: sharded as by fsdp; with +cp they share a sequence")


def run(options: argparse.Namespace) -> Rows:
    # PyTorch's own advice for out-of-memory errors: free memory in pieces can then be used.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    file = options.out / f"longest-{options.model}.jsonl"
    rows: Rows = []
    for mode in options.modes:
        for length in options.lengths:
            plans = plan_modes("longest", [options.model], [mode], f"1x{length}", 1, file)
            rows += measure_on_gpus(plans, options.gpus) if options.gpus > 1 else measure_all(plans)
            if "error" in rows[-1]:
                break
    return rows


def measure(job: Job) -> Row:
    """Steps of one length, after a short step that allocates the optimizer's state."""
    config = read_config(job.model)
    train = make_step(job.mode, config, lr=1e-5, sharded=job.sharded)
    generator = torch.Generator("cuda").manual_seed(0)
    train(draw(config, 1, 128, generator))
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    losses = [train(draw(config, *job.shape, generator)).item() for _ in range(job.steps)]
    return {
        "seconds": round(time.monotonic() - begun, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses,
    }


def table(rows: Rows) -> str:
    """One line per mode: the longest sequence that fits, and the next one, with its error unless that is memory."""
    lines = []
    for (model, mode, gpus), group in grouped([{"gpus": 1} | row for row in rows], "model", "mode", "gpus").items():
        length = lambda row: int(row["batch"].rpartition("x")[2])
        fit = max((row for row in group if "error" not in row), key=length, default={})
        failed = min((row for row in group if "error" in row), key=length, default={})
        shown = [f"{length(row):,}" if row else "" for row in (fit, failed)]
        error = failed.get("error", "")
        if error and "OutOfMemory" not in error and "out of memory" not in error:
            shown[1] += f": {error}"
        lines.append((model, gpus, title(mode), shown[0], fit.get("peak_gib", ""), shown[1]))
    return markdown("model|GPUs||longest sequence|peak GiB|too long", lines)
