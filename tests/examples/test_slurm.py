"""examples/train.slurm, where scontrol, srun and torchrun say what they were called with."""

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"',
    "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"',
    "torchrun": 'printf "%s\\n" torchrun "$@"; echo >> calls; [ "$(wc -l < calls)" -gt "$FAILURES" ]',
}


@pytest.mark.parametrize("failures", [0, 2, 9])
def test_each_machine_starts_an_agent(tmp_path, failures):
    (tmp_path / "bin").mkdir()
    for name, script in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"JOB_ID": "77", "JOB_NODELIST": "node[3-4]", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8"}
    environment = {f"SLURM_{name}": value for name, value in job.items()} | {"FAILURES": str(failures)}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    script = ROOT / "examples" / "train.slurm"
    assert os.access(script, os.X_OK)
    command = ["bash", str(script), "examples/train.yaml", "--output", "a run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == (failures < 4), done.stderr
    calls = done.stdout.split("torchrun\n")[1:]
    assert len(calls) == min(failures + 1, 4)
    for attempt, call in enumerate(calls, 1):
        options = parse_args(call.splitlines())
        assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 0)
        assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "node3:29500")
        assert options.rdzv_id == f"77-{attempt}"
        assert (ROOT / options.training_script).is_file()
        assert options.training_script_args == ["examples/train.yaml", "--output", "a run"]

    del environment["SLURM_JOB_NODELIST"]
    again = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode != 0
    assert again.stdout == ""
