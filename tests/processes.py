"""Scripts in new processes, and the scripts on the pages.

Importing PyTorch and the package takes most of the time of a short script. `FORKSERVER` imports them once and forks
processes.
"""

import itertools
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
FIRST = 10_000 + 100 * (os.getpid() % 200)  # so that the workers of pytest start 100 ports apart
PORTS = itertools.cycle(range(FIRST, FIRST + 100))
FORKSERVER = get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "tests.no_gpu", "pytest", "torch._inductor.compile_fx", "torch.export._trace", "torch.distributed.checkpoint",
        "torchao.quantization", "liger_models.train.loop", "tests.arch.families",
    ]
)  # fmt: skip


def scripts(page: str) -> list[str]:
    """The scripts on a page of docs/ that run on several ranks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that uses the reference backend and the package of this folder.

    PyTorch asks whether there is a GPU when its compiler is imported. The answer comes from NVML, because one from CUDA
    would keep the processes that the fork server forks from using CUDA.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return plain | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **variables}


def free_port() -> int:
    """A port that stays free until the caller listens on it, which may be seconds later.

    The system gives neither a server that asks for any port nor a client one below 32,768 (Linux) or 49,152 (macOS).
    """
    for port in PORTS:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")  # PORTS has no end


def start_forkserver() -> None:
    """Start the fork server without `TRITON_INTERPRET`, which Triton reads on import."""
    with mock.patch.dict(os.environ, environment(), clear=True):
        ensure_running()


def forget_forkserver() -> None:
    """Let a process of the fork server start others as Python does by default.

    It would start a fork server of its own for the workers of a `DataLoader`, which imports everything again.
    """
    multiprocessing.set_start_method(None, force=True)


def run(
    script: str | Path, *arguments: str, cwd: Path, ranks: int = 0, check: bool = True, seconds: float = 300,
    **variables: str,
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run a script as Python does, or as torchrun does on ``ranks`` ranks. ``check`` asserts that all ranks succeed.

    Ranks that wait for each other forever end after ``seconds``. ``variables`` are added to their environment.
    """
    start_forkserver()
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        processes = []
        for rank in range(max(ranks, 1)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place = {name: str(value) for name, value in place.items()} | rendezvous if ranks else {}
            options = (str(script), arguments, cwd, environment(**place, **variables), out, err)
            processes.append(FORKSERVER.Process(target=_run, args=options))
            processes[-1].start()
        end = time.monotonic() + seconds
        codes: list[int | None] = [None] * len(processes)
        while None in codes and not any(codes) and time.monotonic() < end:  # as torchrun does: if one fails, all end
            running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
            wait(running, end - time.monotonic())
            codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()

        # The first failure, or a kill for ranks that have not ended.
        code = next((status for status in codes if status), -signal.SIGKILL if None in codes else 0)
        done = subprocess.CompletedProcess([script, *arguments], code, out.read_text(), err.read_text())
    assert not check or done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def _run(script: str, arguments: tuple[str, ...], cwd: Path, variables: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    forget_forkserver()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # Ranks share the file, so a line must be one write, even where PYTHONUNBUFFERED made print write its parts.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:0] = [str(Path(script).absolute().parent), *variables["PYTHONPATH"].split(os.pathsep)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):  # multiprocessing would print it and end with 0
            print(ended.code, file=sys.stderr)
            sys.exit(1)
        raise
    finally:
        sys.stdout.flush()


def torchrun(
    ranks: int, script: str | Path, *arguments: str, cwd: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script with torchrun itself or, for 0 ranks, with Python itself."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__] if ranks else []
    return _end(_start([*start, str(script), *arguments], cwd, variables), check=True)


def agents(
    nodes: int, script: str | Path, *arguments: str, cwd: Path, check: bool = True, **variables: str
) -> "list[subprocess.CompletedProcess[str]]":
    """Run a script as on ``nodes`` machines with one process each. The agents of torchrun find each other by a port."""
    start = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    start += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    running = [_start([*start, __file__, str(script), *arguments], cwd, variables) for _ in range(nodes)]
    try:
        return [_end(agent, check) for agent in running]
    finally:
        for agent in running:
            agent.terminate()  # an agent ends its processes


def _start(command: list[str], cwd: Path, variables: dict[str, str]) -> "subprocess.Popen[str]":
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment(**variables), **output)


def _end(process: "subprocess.Popen[str]", check: bool) -> "subprocess.CompletedProcess[str]":
    try:
        out, err = process.communicate(timeout=300)
    except BaseException:
        process.terminate()
        raise
    assert not check or process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


if __name__ == "__main__":
    import tests.no_gpu  # noqa: F401

    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    # Before Python 3.14, a thread of gloo that frees a tensor at exit would abort the process.
    time.sleep(0.2)
