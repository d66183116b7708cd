"""Run a benchmark: ``python -m benchmarks train --model llama-3-8b --batch 1x8192``."""

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from . import train

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "liger-kernel")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the code measured: from $COMMIT where the tree travels without its repository, else from git."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def measure(mode: str, model: str, batch: str, steps: int) -> dict:
    """One mode in a process of its own; the result is the last line that it prints."""
    command = [sys.executable, "-m", "benchmarks.train", mode, model, batch, str(steps)]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return {"error": run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]}
    return json.loads(lines[-1])


def table(rows: list[dict]) -> str:
    head = f"{'mode':<22}{'tokens/s':>10}{'ms/step':>9}{'peak GiB':>10}{'MFU':>7}  losses of the first steps"
    lines = [head]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['mode']:<22}{row['error']}")
            continue
        losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
        lines.append(
            f"{row['mode']:<22}{row['tokens_per_s']:>10.0f}{row['step_ms']:>9.1f}{row['peak_gib']:>10.1f}"
            f"{row['mfu']:>7.3f}  {losses}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="a full fine-tuning step: tokens/s, peak memory, losses")
    command.add_argument("--model", default="llama-3-8b", choices=train.MODELS)
    command.add_argument("--batch", default="1x8192", help="rows x tokens per row")
    command.add_argument("--modes", default="hf,hf+liger,ours", help=f"comma-separated, of {', '.join(train.MODES)}")
    command.add_argument("--steps", type=int, default=10, help="timed steps, after 5 whose losses are kept")
    command.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args()

    rows = []
    for mode in options.modes.split(","):
        row = {
            "benchmark": "train", "model": options.model, "batch": options.batch, "mode": mode,
            "date": datetime.date.today().isoformat(), "commit": commit(), "versions": versions(),
        } | measure(mode, options.model, options.batch, options.steps)  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"train-{options.model}-{options.batch}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


if __name__ == "__main__":
    main()
