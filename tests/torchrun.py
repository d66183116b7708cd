"""Scripts as torchrun starts them: those of a page, a function to call, and what each of the processes runs."""

import os
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def scripts(page: str) -> list[str]:
    """The scripts of a page of docs/ that are run on several ranks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def torchrun(
    ranks: int, script: str | Path, *arguments: str, cwd: Path, check: bool = True, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` in so many processes, 0: in one without torchrun; ``check`` that they succeed.

    ``variables`` are put into their environment.
    """
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__] if ranks else []
    return _end(_start([*start, str(script), *arguments], cwd, variables), check)


def agents(
    nodes: int, script: str | Path, *arguments: str, cwd: Path, check: bool = True, **variables: str
) -> "list[subprocess.CompletedProcess[str]]":
    """As `torchrun` on so many machines with a process each: an agent for each, which find each other by a port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    start = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
    start += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    running = [_start([*start, __file__, str(script), *arguments], cwd, variables) for _ in range(nodes)]
    try:
        return [_end(each, check) for each in running]
    finally:
        for each in running:
            each.terminate()  # an agent ends its processes


def _start(command: list[str], cwd: Path, variables: dict[str, str]) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment, **output)


def _end(process: "subprocess.Popen[str]", check: bool) -> "subprocess.CompletedProcess[str]":
    try:
        out, err = process.communicate(timeout=300)
    except BaseException:
        process.terminate()
        raise
    assert not check or process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    # A thread of gloo that still lets go of a tensor when Python (before 3.14) ends would abort the process.
    time.sleep(0.2)
