"""Run a benchmark: ``python -m benchmarks train --model llama-3-8b``, or ``python -m benchmarks families``."""

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import train

RESULTS = Path(__file__).parent / "results"
ERRORS_AT_ONCE = 3
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


class Measurement:
    """One mode in a process of its own, which is started at once and touches the GPU when it is told to.

    Its caches of compiled kernels are its own and empty, so that ``first_step_s`` is that of a first use.
    """

    def __init__(self, benchmark: str, mode: str, model: str, batch: str, steps: int) -> None:
        self.row = {
            "benchmark": benchmark, "model": model, "batch": batch, "mode": mode,
            "date": datetime.date.today().isoformat(), "commit": commit(), "versions": versions(),
        }  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()
        caches = {name: f"{self.folder.name}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.train", mode, model, batch, str(steps)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | caches,
        )  # fmt: skip

    def finish(self) -> dict:
        """Let it run; the result is the last line that it prints."""
        out, err = self.process.communicate("go\n")
        self.folder.cleanup()
        if self.process.returncode:
            last = err.strip().splitlines() or [f"exit status {self.process.returncode}"]
            self.row["error"] = last[-1]
        else:
            self.row |= json.loads(out.strip().splitlines()[-1])
        print(f"{self.row['model']} {self.row['mode']}", file=sys.stderr, flush=True)
        return self.row


def measure_all(planned: list[tuple], file: Path) -> list[dict]:
    """The timed ones one after the other, each started while the one before it runs; then the errors, some at once.

    Every row is appended to ``file`` as soon as it is there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)

    def finish(measurement: Measurement) -> dict:
        row = measurement.finish()
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        return row

    timed = [arguments for arguments in planned if arguments[1] != "error"]
    rows, waiting = [], [Measurement(*arguments) for arguments in timed[:1]]
    for following in [*timed[1:], None]:
        if following is not None:
            waiting.append(Measurement(*following))
        if waiting:
            rows.append(finish(waiting.pop(0)))
    errors = [arguments for arguments in planned if arguments[1] == "error"]
    with ThreadPoolExecutor(ERRORS_AT_ONCE) as pool:
        return rows + list(pool.map(lambda arguments: finish(Measurement(*arguments)), errors))


def train_table(rows: list[dict]) -> str:
    lines = [f"{'mode':<22}{'tokens/s':>10}{'ms/step':>9}{'peak GiB':>10}{'MFU':>7}  losses of the first steps"]
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


def family_table(rows: list[dict]) -> str:
    """One row per family; ratios to the faster and to the smaller of the two peers."""
    lines = [
        "| family | HF ms | HF + Liger ms | ours ms | speed ratio | HF GiB | HF + Liger GiB | ours GiB | memory ratio "
        "| first step s, HF / HF + Liger / ours | logits error, HF / ours | gradients error, HF / ours |",
        "| --- " * 12 + "|",
    ]
    for family in dict.fromkeys(row["model"] for row in rows):
        by_mode = {row["mode"]: row for row in rows if row["model"] == family}
        peers = [row for mode, row in by_mode.items() if mode.startswith("hf") and "error" not in row]
        ours, error = by_mode.get("ours", {}), by_mode.get("error", {})

        def show(mode: str, key: str, by_mode: dict = by_mode) -> str:
            return str(by_mode.get(mode, {}).get(key, "failed"))

        def ratio(key: str, invert: bool, peers: list = peers, ours: dict = ours) -> str:
            if key not in ours or not peers:
                return ""
            best = min(peer[key] for peer in peers)
            return f"{best / ours[key] if invert else ours[key] / best:.3f}"

        def pair(what: str, error: dict = error) -> str:
            found = [error.get(f"{who}_{what}") for who in ("hf", "ours")]
            return " / ".join("failed" if value is None else f"{value:.2e}" for value in found)

        times = " | ".join(show(mode, "step_ms") for mode in ("hf", "hf+liger", "ours"))
        sizes = " | ".join(show(mode, "peak_gib") for mode in ("hf", "hf+liger", "ours"))
        first = " / ".join(show(mode, "first_step_s") for mode in ("hf", "hf+liger", "ours"))
        lines.append(
            f"| {family} | {times} | {ratio('step_ms', True)} | {sizes} | {ratio('peak_gib', False)} "
            f"| {first} | {pair('logits')} | {pair('gradients')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="a full fine-tuning step: tokens/s, peak memory, losses")
    one.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    one.add_argument("--modes", default="hf,hf+liger,ours", help=f"comma-separated, of {', '.join(train.MODES)}")
    every = commands.add_parser("families", help="a few layers of each family: speed, memory, error against fp32")
    every.add_argument("--families", default=",".join(train.FAMILIES), help="comma-separated")
    every.add_argument("--modes", default="hf,hf+liger,ours,error", help="comma-separated, of these")
    for command in (one, every):
        command.add_argument("--batch", default="1x8192", help="rows x tokens per row")
        command.add_argument("--steps", type=int, default=10, help="timed steps, after 5 whose losses are kept")
        command.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args()

    if options.command == "train":
        models, file = [options.model], f"train-{options.model}-{options.batch}.jsonl"
    else:
        models, file = options.families.split(","), f"families-{options.batch}.jsonl"
    modes = options.modes.split(",")
    planned = [(options.command, mode, model, options.batch, options.steps) for model in models for mode in modes]
    rows = measure_all(planned, options.out / file)
    print(train_table(rows) if options.command == "train" else family_table(rows))


if __name__ == "__main__":
    main()
