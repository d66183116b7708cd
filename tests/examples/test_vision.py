"""`examples/vision.py` as a user starts it, with few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ..late import transformers

ROOT = Path(__file__).parents[2]


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/vision.py", *options]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_saves_and_describes(device, tmp_path):
    run = run_example("--output", str(tmp_path), "--steps", "12", "--device", device)
    assert run.returncode == 0, run.stderr
    (report,) = (line.split() for line in run.stdout.splitlines() if line.startswith("step"))
    assert report[:4] == ["step", "12", "of", "12"]
    assert 0 < float(report[5]) < 3.2  # the mean over the steps; log(24) at the first
    assert "new images described right: " in run.stdout
    assert run.stdout.splitlines()[-7].endswith("unseen.png, from left to right:")
    with Image.open(tmp_path / "unseen.png") as picture:
        assert picture.size == (6 * 50 * 3, 48 * 3)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "trained")
    assert config.model_type == "qwen2_vl"
    transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"), [(["--steps", "0"], "must be positive, got 0"), (["--output", "Makefile"], "Makefile")]
)
def test_a_failure_says_what_and_why(options, message):
    run = run_example(*options)
    assert run.returncode != 0
    assert message in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
