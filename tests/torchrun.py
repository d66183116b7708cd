"""Scripts as torchrun starts them: those of a page, a function to call, and what each of the processes runs."""

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

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
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__] if ranks else []
    command = [sys.executable, *start, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
    assert not check or done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    # A thread of gloo that still lets go of a tensor when Python (before 3.14) ends would abort the process.
    time.sleep(0.2)
