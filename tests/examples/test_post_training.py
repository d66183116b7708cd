"""The loops for preferences, rewards and distillation as a user starts them, and that they learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = r"(-?\d+\.\d+)"


def run(example: str, steps: int, ranks: int, gpu: bool = False) -> dict[str, tuple[float, float]]:
    """What the example measures, before and after."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, f"examples/{example}.py", "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = re.findall(rf"^(.*): {NUMBER} -> {NUMBER}$", done.stdout, re.MULTILINE)
    return {name.removeprefix("pairs not trained on, "): (float(old), float(new)) for name, old, new in lines}


@pytest.mark.parametrize(
    ("ranks", "gpu"), [(1, False), (2, False), pytest.param(1, True, marks=pytest.mark.gpu)], ids=["1", "2", "gpu"]
)
@pytest.mark.parametrize("example", ["dpo", "kto", "orpo", "grpo", "distillation"])
def test_it_learns(example, ranks, gpu):
    if example == "dpo":
        found = run(example, 12, ranks, gpu)
        assert found["loss"][0] == pytest.approx(0.693, abs=1e-3)  # log 2: the policy is the reference
        assert found["loss"][1] < 0.4
        assert found["reward accuracy"][0] == 0.0
        assert found["reward accuracy"][1] > 0.9
        assert found["reward margin"][1] > 0.5
    elif example == "kto":
        found = run(example, 15, ranks, gpu)
        assert found["mean reward of good answers"][0] == found["mean reward of bad answers"][0] == 0.0
        assert found["mean reward of good answers"][1] > 0.3
        assert found["mean reward of bad answers"][1] < -0.3
    elif example == "orpo":
        found = run(example, 25, ranks, gpu)
        assert found["NLL"][1] < 0.5 * found["NLL"][0]
        assert found["accuracy"][0] < 0.8 < 0.95 < found["accuracy"][1]
    elif example == "grpo":
        found = run(example, 15, ranks, gpu)
        assert found["mean reward"][0] < 0.2
        assert found["mean reward"][1] > 0.35
    else:
        found = run(example, 25, ranks, gpu)
        name = "KL divergence of the teacher from the student"
        assert found[name][1] < 0.6 * found[name][0]
