"""`examples/vision.py` as a user starts it, with few steps."""

from pathlib import Path

import pytest
from PIL import Image

from ..late import transformers
from ..processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_saves_and_describes(device, tmp_path):
    done = run("examples/vision.py", "--output", str(tmp_path), "--steps", "12", "--device", device, cwd=ROOT)
    (report,) = (line.split() for line in done.stdout.splitlines() if line.startswith("step"))
    assert report[:4] == ["step", "12", "of", "12"]
    assert 0 < float(report[5]) < 3.2  # the mean over the steps; log(24) at the first
    assert "new images described right: " in done.stdout
    assert done.stdout.splitlines()[-8].endswith("unseen.png, from left to right:")
    assert done.stdout.splitlines()[-1].endswith(f"--image {tmp_path / 'unseen' / '0.png'}")
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
    done = run("examples/vision.py", *options, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
