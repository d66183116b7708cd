"""`examples/demo.py` as a user starts it, with few steps on a part of the standard library."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from ..late import transformers
from ..processes import run

ROOT = Path(__file__).parents[2]


PART = """
import sysconfig
from examples import demo

sysconfig.get_path = lambda _: "library"
demo.EVAL_BATCHES, demo.VOCAB = 4, 1024
demo.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_second_run_trains_saves_and_generates(device, tmp_path):
    (tmp_path / "trained").mkdir()
    for name in ("config.json", "model.safetensors"):  # as an earlier run leaves them
        (tmp_path / "trained" / name).write_text("old")

    for name in ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml"):
        shutil.copytree(Path(sysconfig.get_path("stdlib"), name), tmp_path / "library" / name)
    (tmp_path / "part.py").write_text(PART)
    done = run("part.py", "--output", str(tmp_path), "--steps", "10", "--device", device, cwd=tmp_path)
    assert done.stderr == ""
    for text in ("step   10 of 10", "same loss", "--- def __init__(self"):
        assert text in done.stdout
    before, after = (line.split() for line in done.stdout.splitlines() if line.startswith("loss on files"))
    assert float(after[9].rstrip(",")) < float(before[-1]) - 0.3

    for folder in (tmp_path / "initial", tmp_path / "trained"):
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    ids = torch.tensor([tokenizer.encode("def __init__(self")])
    assert ids[0, 0] == model.config.bos_token_id
    assert model(ids).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "Makefile"], "Makefile"),
        (["--output", "Makefile/inside"], "Makefile"),
        (["--steps", "0"], "must be positive, got 0"),
        (["--device", "gameboy"], "gameboy"),
    ],
)
def test_a_failure_says_what_and_why(options, message):
    done = run("examples/demo.py", *options, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
