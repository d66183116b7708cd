"""The loops for preferences, rewards and distillation as a user starts them, and that they learn."""

import re
from pathlib import Path

import pytest

from .. import processes

ROOT = Path(__file__).parents[2]
NUMBER = r"(-?\d+\.\d+)"


def run(example: str, steps: int, ranks: int, gpu: bool = False) -> dict[str, tuple[float, float]]:
    """What the example measures, before and after."""
    variables = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    done = processes.run(f"examples/{example}.py", "--steps", str(steps), cwd=ROOT, ranks=ranks, **variables)
    lines = re.findall(rf"^(.*): {NUMBER} -> {NUMBER}$", done.stdout, re.MULTILINE)
    return {name.removeprefix("pairs not trained on, "): (float(old), float(new)) for name, old, new in lines}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "ranks", "gpu"),
    [
        ("orpo", 0, False),
        pytest.param("kto", 0, False, marks=pytest.mark.matrix),
        # They differ in what the ranks exchange: pairs, generation, a sharded teacher. On a GPU they run alone.
        ("dpo", 2, False),
        *(pytest.param(example, 2, False, marks=pytest.mark.matrix) for example in ("grpo", "distillation")),
        *(
            pytest.param(example, 0, True, marks=pytest.mark.gpu)
            for example in ("dpo", "kto", "orpo", "grpo", "distillation")
        ),
    ],
)
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
