"""Run a benchmark, or write tables and plots of all results into the pages (``report``)."""

import argparse
import tempfile
from pathlib import Path

import torch

from . import (
    curves,
    decode,
    embed,
    families,
    fsdp,
    grpo,
    images,
    load,
    longest,
    paths,
    profile,
    report,
    rollout,
    soak,
    task,
    train,
    weights,
)
from .ops import benchmark as ops
from .rows import RESULTS
from .training.modes import Mode

BENCHMARKS = {
    "paths": paths,
    "train": train,
    "families": families,
    "profile": profile,
    "longest": longest,
    "fsdp": fsdp,
    "load": load,
    "images": images,
    "embed": embed,
    "decode": decode,
    "rollout": rollout,
    "grpo": grpo,
    "soak": soak,
    "task": task,
    "weights": weights,
    "curves": curves,
    "ops": ops,
}


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    commands = parser.add_subparsers(dest="command", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.HELP)
        benchmark.add_options(command)
        command.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    pages = commands.add_parser("report", help="tables and plots of all results into the pages")
    pages.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    return parser.parse_args(arguments)


def check_modes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for text in getattr(options, "modes", ()):
        mode = Mode.parse(text)
        if ("moments" in mode or "8bit" in mode) and not ("adamw" in mode or "inbackward" in mode):
            parser.error(f"--modes: moments are LigerAdamW's, add +adamw or +inbackward, got {text!r}")

        # Each option of a mode is allowed only in some benchmarks.
        allowed = {"unsloth": ("train", "longest"), "titan": ("train", "fsdp")}.get(mode.library, (options.command,))
        if options.command not in allowed:
            parser.error(f"--modes: {mode.library} is for {' and '.join(allowed)}, got {text!r} for {options.command}")
        if "medusa" in mode and options.command != "train":
            parser.error(f"--modes: medusa is for train, got {text!r} for {options.command}")
        if "plan" in mode and options.command != "train":
            parser.error(f"--modes: plan is for train, got {text!r} for {options.command}")
        if "cp" in mode and (options.command != "longest" or options.gpus == 1):
            parser.error(f"--modes: cp is for longest with --gpus of 2 and more, got {text!r} for {options.command}")
        if "bf16" in mode and options.command != "fsdp":
            parser.error(f"--modes: bf16 is for fsdp, got {text!r} for {options.command}")

        # A mode may divide the GPUs in only one way, and by a number that divides the number of GPUs.
        parts = [mode.extras[word] for word in ("ep", "hsdp", "tp") if word in mode]
        fits = options.command == "fsdp" and len(parts) == 1 and parts[0] and options.gpus % parts[0] == 0
        if parts and not fits and options.command != "decode":
            parser.error(
                "--modes: ep, hsdp and tp are for fsdp, one of them in a mode, with a number that divides --gpus, and "
                f"tp is for decode, got {text!r} for {options.command}"
            )


def check_machine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error(f"{options.command} needs a GPU, and torch {torch.__version__} finds none")
    if getattr(options, "gpus", 1) > gpus:
        parser.error(f"--gpus must be at most {gpus}, which this machine has, got {options.gpus}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"--out must be a folder to write to, got {options.out}: {error}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options = parse(parser, arguments)

    # The pages need no GPU.
    if options.command == "report":
        if not any(options.results.glob("*.jsonl")):
            parser.error(f"--results must be a folder with JSON lines, {options.results} has none")
        try:
            report.write(options.results)
        except ValueError as error:
            parser.error(str(error))
        return

    # A benchmark prints its table. Its rows are in files.
    check_modes(parser, options)
    check_machine(parser, options)
    benchmark = BENCHMARKS[options.command]
    try:
        rows = benchmark.run(options)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    print(benchmark.table(rows))


if __name__ == "__main__":
    main()
