"""The time from the start of a process to the end of its first training step.

``python -m benchmarks.user.start MODE MODEL BATCH FILE`` trains with TRL, and creates the file after the first step.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..clock import now
from ..rows import Row
from ..training.job import Job
from ..training.modes import Mode
from . import command
from .trainers import train

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "HF_HOME", "XDG_CACHE_HOME")
"""Environment variables that name the cache folders which a first step fills for later processes."""


def measure_start(job: Job) -> Row:
    """Start a process with empty caches, and then another process with the caches that the first process has filled."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in CACHES}
        cold, warm = (first_step_s(job, Path(folder, name), caches) for name in ("cold", "warm"))
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 1)}


def first_step_s(job: Job, folder: Path, caches: dict[str, str]) -> float:
    """Seconds from the start of a process to the end of its first step. The process is then killed."""
    folder.mkdir()
    start, done = os.environ["START"], folder / "done"
    mode = "+".join((job.mode.library, *job.mode.extras))
    arguments = ["-m", "benchmarks.user.start", mode, job.model, job.batch, str(done)]
    if "train" in job.mode:
        done = folder / "run" / "log.jsonl"
        arguments = ["-m", "liger_models", *command.arguments(job, start, str(folder / "run"))]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=os.environ | caches, stdout=sys.stderr, start_new_session=True
    )
    try:
        while not has_line(done):
            status = process.poll()
            if status is not None and not has_line(done):
                raise RuntimeError(f"start: the process must make a step, but it ended with status {status}")
            time.sleep(0.01)
        return time.perf_counter() - begun
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # together with its workers
        process.wait()


def has_line(file: Path) -> bool:
    """Whether the process has finished its first step."""
    return file.is_file() and file.read_text().endswith("\n")


def main(mode: str, model: str, batch: str, file: str) -> None:
    job = Job(Mode.parse(mode), model, batch, 1, sharded=False, imported_s=0.0)

    def after_step() -> None:
        now()  # the step has ended
        Path(file).write_text(json.dumps({"step": 1}) + "\n")

    train(job, after_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
