import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no wheel for this platform")


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_every_kernel_compiles_for_a_gpu(target):
    switches = ("TRITON_INTERPRET", "AMDGCN_")  # the compiler's own are left as they are for users
    environment = {name: value for name, value in os.environ.items() if not name.startswith(switches)}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for_gpu.py"), target],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["refused"] == {}
    assert found["never"] == []
    assert all(found["compiled"].values())
