"""The longest sequence with which a training step fits into memory.

A step of a whole model on a long sequence takes minutes. ``--layers`` measures a model with a few blocks, and adds the
weights, moments and gradients of the missing blocks to its peak memory. Use ``--layers`` only for modes that keep the
saved activations of all blocks in host memory. In other modes, the missing blocks would need more device memory than is
added.
"""

import argparse
import dataclasses
import os
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .options import add_gpus, add_model, add_modes, count, several
from .processes import common_start, measure_all, measure_on_gpus, plan_modes
from .rows import Row, Rows, grouped
from .tables import markdown
from .training.batches import draw
from .training.job import Job
from .training.models import keep_layers, read_config, text_part
from .training.modes import Mode, title
from .training.step import Step, make_step

HELP = "sequences of growing length, until one has no room"
LENGTHS = "65536,98304,131072,163840,196608,262144,327680,393216"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_modes(parser, "hf+liger+ac,ours+adamw+inbackward+full+offload")
    parser.add_argument("--lengths", type=several("[1-9][0-9]*"), default=LENGTHS, help="tokens, comma-separated")
    add_gpus(parser, default=1, help="more than one: sharded as by fsdp; with +cp they share a sequence")
    parser.add_argument("--memory", type=count, help="GB of a smaller GPU, CUDA's own memory included")
    parser.add_argument("--layers", type=count, help="measure so many blocks, and compute the peak of the whole model")


def run(options: argparse.Namespace) -> Rows:
    if options.layers:
        for mode in map(Mode.parse, options.modes):
            whole = all(extra in mode and mode.extras[extra] is None for extra in ("full", "offload"))
            if not whole or mode.library != "ours" or options.gpus > 1:
                raise argparse.ArgumentError(None, "--layers is for modes of ours with +full+offload on one GPU")

    # PyTorch recommends this setting for out-of-memory errors: the allocator can then use fragmented memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    extra = {"memory_gb": options.memory, "layers": options.layers}
    extra = {name: value for name, value in extra.items() if value}
    os.environ |= {f"LONGEST_{name.upper()}": str(value) for name, value in extra.items()}

    # Measure growing lengths of each mode until a length fails.
    file = options.out / f"longest-{options.model}.jsonl"
    rows: Rows = []
    from_files = any(mode.startswith("unsloth") for mode in options.modes)
    start = common_start("training.unsloth:save", options.model, variable="CHECKPOINT")
    with start if from_files else nullcontext():
        for mode in options.modes:
            plans = [
                dataclasses.replace(plan, row=plan.row | extra)
                for length in options.lengths
                for plan in plan_modes("longest", [options.model], [mode], f"1x{length}", 1, file)
            ]
            if options.gpus > 1:
                rows += measure_on_gpus(plans, options.gpus, until_error=True)
            else:
                rows += measure_all(plans, until_error=True)
    return rows


def measure(job: Job) -> Row:
    """Run steps of one length. A short step before them allocates the optimizer's state."""
    # Build the model, with all or only a few of its blocks.
    config = read_config(job.model)
    layers, missing = text_part(config)["num_hidden_layers"], 0
    if "LONGEST_LAYERS" in os.environ:
        missing = layers - int(os.environ["LONGEST_LAYERS"])
        keep_layers(config, layers - missing)
    train = make_step(job.mode, config, lr=1e-5, sharded=job.sharded, shape=job.shape)
    generator = torch.Generator("cuda").manual_seed(0)
    train(draw(config, 1, 128, generator))

    # The missing blocks reduce the memory that the step may take.
    device, host = block_bytes(train, job.mode) if missing else (0, 0)
    limit = limit_memory(missing * device)
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    losses = [train(draw(config, *job.shape, generator)).item() for _ in range(job.steps)]
    seconds, peak = time.monotonic() - begun, torch.cuda.max_memory_allocated()
    if peak > limit:
        raise torch.OutOfMemoryError(f"the peak is {peak / 2**30:.2f} GiB, of {limit / 2**30:.2f}")
    row = {"seconds": round(seconds, 1), "peak_gib": round((peak + missing * device) / 2**30, 2), "losses": losses}
    # In host memory, every block has its saved input in bf16 and its offloaded state.
    if missing:
        saved = job.shape[0] * job.shape[1] * text_part(config)["hidden_size"] * 2
        row |= {"measured_peak_gib": round(peak / 2**30, 2), "of_layers": layers}
        row["host_gib"] = round(layers * (saved + host) / 2**30, 1)
    return row


def block_bytes(train: Step, mode: Mode) -> tuple[int, int]:
    """Bytes of the last block's parameters, moments and accumulated gradients, on the device and on the host."""
    held = {"device": 0, "cpu": 0}
    for parameter in train.model.layers[-1].parameters():
        state = train.optimizer.state.get(parameter, {}).values()
        gradient = [parameter.detach()] if parameter.requires_grad and "inbackward" not in mode else []
        for tensor in [parameter, *gradient, *(part for part in state if isinstance(part, Tensor) and part.dim())]:
            held["cpu" if tensor.device.type == "cpu" else "device"] += stored_bytes(tensor)
    return held["device"], held["cpu"]


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of all tensors inside a quantized tensor."""
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if not hasattr(inner, "__tensor_flatten__"):
        return inner.nbytes
    names, _ = inner.__tensor_flatten__()
    return sum(stored_bytes(getattr(inner, name)) for name in names)


def limit_memory(reserve: int) -> float:
    """Limit PyTorch to $LONGEST_MEMORY_GB minus CUDA's own memory and ``reserve`` bytes. Returns the limit in bytes."""
    if "LONGEST_MEMORY_GB" not in os.environ:
        return float("inf")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    limit = int(os.environ["LONGEST_MEMORY_GB"]) * 10**9 - outside - reserve
    if limit < torch.cuda.memory_reserved():
        raise torch.OutOfMemoryError(f"the model alone takes {torch.cuda.memory_reserved() / 2**30:.2f} GiB")
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
    return limit


def table(rows: Rows) -> str:
    """One line per mode: the longest length that fits, and the shortest that fails. Memory errors are not named."""
    lines = []
    names = ("model", "mode", "gpus", "memory_gb", "layers")
    # Old rows do not contain the number of GPUs, which was 1.
    for (model, mode, gpus, memory, layers), group in grouped([{"gpus": 1} | row for row in rows], *names).items():
        length = lambda row: int(row["batch"].rpartition("x")[2])
        # Find the longest length that fits, and the shortest length that does not fit.
        fit = max((row for row in group if "error" not in row), key=length, default={})
        failed = min((row for row in group if "error" in row), key=length, default={})
        shown = [f"{length(row):,}" if row else "" for row in (fit, failed)]
        error = failed.get("error", "")
        if error and "OutOfMemory" not in error and "out of memory" not in error:
            shown[1] += f": {error}"
        within = f"{memory} GB" if memory else "all"
        name = title(mode) + (f", computed from {layers} of {fit.get('of_layers', '?')} blocks" if layers else "")
        lines.append((model, gpus, within, name, shown[0], fit.get("peak_gib", ""), shown[1]))
    return markdown("model|GPUs|memory||longest sequence|peak GiB|too long", lines)
