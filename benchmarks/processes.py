"""Starts a process for each measurement, and appends the rows that the process prints to a file of JSON lines."""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import ROOT
from .rows import Row, Rows

ERRORS_AT_ONCE = 3
"""Number of processes of mode "error", which are not timed, that run at the same time."""

REASON = re.compile(r"(?P<rank>\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b")
"""Matches the last line of a traceback, which is not always the last line of the output."""
LAUNCHER = "torch.distributed.elastic."
"""Prefix of errors that torchrun itself raises. They only say that a rank has failed."""

PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "quack-kernels", "mamba-ssm",
    "torchao", "peft", "bitsandbytes", "unsloth", "torchtitan", "trl", "sentence-transformers", "lm_eval",
)  # fmt: skip


def versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """The commit of the measured code, from git or, without a repository, from $COMMIT.

    "-dirty" means that the code differs from the commit. Results and pages do not count, because every run changes
    them.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    git = ["git", "-C", str(ROOT)]
    try:
        described = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    code = ["benchmarks", "liger_models", "tests/fixtures", ":!benchmarks/results"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code]).returncode
    return described.stdout.strip() + ("-dirty" if changed else "")


@functools.cache
def device() -> str:
    """The name of the GPU. A short-lived process queries it, so that this process takes no GPU memory."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Plan:
    """A planned measurement.

    Args:
        row: the first keys of the measurement's rows, with their values.
        command: the module to run, and the arguments of the module.
        file: the file to which the rows are appended.
    """

    row: Row
    command: tuple[str, ...]
    file: Path


def worker_command(measure: str, mode: str, model: str, batch: str, steps: int) -> tuple[str, ...]:
    """The command of a new process that calls ``measure``, a function of this package, written "MODULE:FUNCTION"."""
    return "benchmarks.worker", measure, mode, model, batch, str(steps)


def plan_modes(
    benchmark: str, models: Sequence[str], modes: Sequence[str], batch: str, steps: int, file: Path
) -> list[Plan]:
    """A plan for each mode of each model."""
    return [
        Plan(
            {"benchmark": benchmark, "model": model, "batch": batch, "mode": mode},
            worker_command(f"{benchmark}:measure", mode, model, batch, steps),
            file,
        )
        for model in models
        for mode in modes
    ]


def plan_batch(benchmark: str, options: argparse.Namespace) -> list[Plan]:
    """A plan for each of ``options.modes``, for one model and batch."""
    file = options.out / f"{benchmark}-{options.model}-{options.batch}.jsonl"
    return plan_modes(benchmark, [options.model], options.modes, options.batch, options.steps, file)


def on_gpus(plan: Plan, gpus: int) -> Plan:
    """The plan of the same measurement with one process per GPU."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m")
    return Plan(plan.row | {"gpus": gpus}, torchrun + plan.command, plan.file)


class Measurement:
    """A started process. It imports its libraries at once, but uses the GPU only after `finish` is called.

    The process starts with empty caches of compiled kernels, so ``first_step_s`` is the time of a first use.
    """

    def __init__(self, plan: Plan) -> None:
        date = datetime.date.today().isoformat()
        self.file = plan.file
        self.row = plan.row | {"date": date, "commit": commit(), "versions": versions(), "device": device()}
        self.folder = tempfile.TemporaryDirectory()
        # Create empty caches of compiled kernels, which are deleted after the measurement.
        caches = {name: f"{self.folder.name}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *plan.command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | caches,
        )  # fmt: skip

    def finish(self) -> Rows:
        """Run the measurement. Each printed line of JSON becomes a row. A failure becomes a row with the reason.

        Raises:
            subprocess.CalledProcessError: a process of `common_start` has failed.
        """
        for start in STARTS:
            if start.wait():
                raise subprocess.CalledProcessError(start.returncode, start.args)
        out, err = self.process.communicate("go\n" * self.row.get("gpus", 1))  # a line for each rank
        self.folder.cleanup()
        rows = [self.row | json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if self.process.returncode:
            rows.append(self.row | {"error": reason_of(err, self.process.returncode)})
        print(self.row.get("model") or self.row["op"], self.row["mode"], file=sys.stderr, flush=True)
        return rows

    def cancel(self) -> None:
        """End a process that is not measured."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.folder.cleanup()


def reason_of(err: str, status: int) -> str:
    """Find the line of a process's standard error that says why it failed.

    The first rank that fails has the reason. Other ranks fail because of it, and torchrun's own report comes last.
    """
    # Prefer errors of ranks, then errors that are not torchrun's, then any errors.
    lines = err.strip().splitlines()
    reasons = [reason for line in lines if (reason := REASON.match(line))]
    candidates = [reason.string for reason in reasons if reason["rank"]][:1]
    candidates = candidates or [reason.string for reason in reasons if not reason.string.startswith(LAUNCHER)]
    candidates = candidates or [reason.string for reason in reasons]
    if not candidates and status > 0:  # a negative status is a signal, which the last line does not mention
        candidates = lines
    return (candidates or [f"exit status {status}"])[-1]


def measure_all(
    plans: list[Plan], complete: Callable[[Row], Row] = lambda row: row, *, until_error: bool = False
) -> Rows:
    """Run all measurements. ``complete`` gets every row before it is appended to its file.

    Timed processes measure one after the other. Each process is started while the previous process measures. With
    ``until_error``, the first error ends the measurements. Processes of mode "error" follow, `ERRORS_AT_ONCE` at a
    time.
    """

    def finish(measurement: Measurement) -> Rows:
        rows = [complete(row) for row in measurement.finish()]
        with measurement.file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        return rows

    # Timed processes. The next process imports its libraries while the current process measures.
    timed = [plan for plan in plans if plan.row["mode"] != "error"]
    rows, started = [], [Measurement(plan) for plan in timed[:1]]
    try:
        for plan in (*timed[1:], None) if timed else ():
            if plan is not None:
                started.append(Measurement(plan))
            rows += finish(started[0])
            del started[0]
            if until_error and "error" in rows[-1]:
                break
    finally:
        for measurement in started:
            measurement.cancel()

    # All other processes run in parallel.
    errors = [plan for plan in plans if plan.row["mode"] == "error"]
    with ThreadPoolExecutor(ERRORS_AT_ONCE) as pool:
        return rows + [row for group in pool.map(lambda plan: finish(Measurement(plan)), errors) for row in group]


def measure_on_gpus(plans: list[Plan], gpus: int, *, until_error: bool = False) -> Rows:
    """Like `measure_all`, with one process per GPU for each plan."""
    return measure_all([on_gpus(plan, gpus) for plan in plans], until_error=until_error)


STARTS: list[subprocess.Popen[str]] = []
"""The processes of `common_start`. Each measurement waits until they have ended."""


@contextmanager
def common_start(save: str, model: str, batch: str = "", steps: int = 0, variable: str = "START") -> Iterator[None]:
    """Context manager with a checkpoint in $START. ``save`` writes it to $SAVE in another process.

    In the meantime, the first measurement imports its libraries.

    Args:
        variable: the environment variable that holds the checkpoint's path. All modes read START, the default.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *worker_command(save, "ours+adamw", model, batch, steps)]
        start = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=os.environ | {"SAVE": folder})
        assert start.stdin is not None
        with start.stdin:
            start.stdin.write("go\n")
        STARTS.append(start)
        os.environ[variable] = folder
        try:
            yield
        finally:
            start.wait()
            STARTS.remove(start)
            del os.environ[variable]
