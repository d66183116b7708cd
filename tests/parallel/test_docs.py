"""The scripts of docs/training.md, parallel.md and custom.md run on several ranks; the first stops, and goes on."""

import io
import os
import re
import runpy
import shutil
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from liger_models.base import causal_lm

from ..late import transformers
from ..processes import run, scripts
from .models import TINY, mixture, tiny
from .test_custom import make

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def follow(folder: Path) -> list[str]:
    """What a rank prints in ``train.py``. The process group, which torchrun and the script would start, is running."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            redirect_stdout(io.StringIO()) as printed,
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
            mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("default")
            runpy.run_path("train.py", run_name="__main__")
    finally:
        os.chdir(before)
    return printed.getvalue().splitlines()


def test_the_loop(two, tmp_path):
    script = scripts("training.md")[1]
    tiny().save_pretrained(tmp_path / "checkpoint")
    torch.save(torch.randint(TINY["vocab_size"], (6 * 2 * 2 * 2 * 32,)), tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(script)

    whole = run("train.py", cwd=tmp_path, ranks=2).stdout.splitlines()
    assert [line.split(":")[0] for line in whole] == [f"step {step}" for step in range(1, 7)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000004", "step-00000006"]
    trained = {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")

    (tmp_path / "run" / "latest").write_text("step-00000004")  # as if it had stopped after step 5
    assert two(follow, tmp_path) == [whole[4:], []]
    assert {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()} == trained


def shard_as_documented(script: str, checkpoint: str) -> list[tuple]:
    with mock.patch.object(causal_lm, "download", return_value=Path(checkpoint)):
        namespace: dict = {}
        exec(script, namespace)
    return [parameter.placements for parameter in namespace["model"].parameters()]


def test_sharding(four, tmp_path):
    tiny().save_pretrained(tmp_path / "checkpoint")
    script = scripts("training.md")[2].replace('"cuda"', '"cpu"').replace("(2, 8)", "(2, 2)")
    for placements in four(shard_as_documented, script, str(tmp_path / "checkpoint")):
        assert set(placements) == {(Replicate(), Shard(0))}


def test_tensor_parallel(four, tmp_path):
    model = tiny(initializer_range=0.02)
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.randint(TINY["vocab_size"], (3 * 2 * 2 * 32,))
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(scripts("parallel.md")[0])
    lines, *others = four(follow, tmp_path)
    assert not any(others)
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    ids = tokens[: 2 * 2 * 32].view(4, 32)
    loss = model(ids, labels=ids).loss.item()
    assert abs(float(re.search(r"loss ([\d.]+)", lines[0])[1]) - loss) < 0.01 * loss  # computed in bf16
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


def test_expert_parallel(two, tmp_path):
    model = mixture()
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.randint(TINY["vocab_size"], (2 * 2 * 2 * 32,))
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(scripts("parallel.md")[1])
    lines, others = two(follow, tmp_path)
    assert not others
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1"]
    ids = tokens[: 2 * 2 * 32].view(4, 32)
    loss = model(ids, labels=ids).loss.item()
    assert abs(float(re.search(r"loss ([\d.]+)", lines[0])[1]) - loss) < 0.01 * loss


def test_context_parallel(two, tmp_path):
    model = tiny(initializer_range=0.02)
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.randint(TINY["vocab_size"], (2 * 1 * 64,))
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(scripts("parallel.md")[2])
    lines, others = two(follow, tmp_path)
    assert not others
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1"]
    ids = tokens[None, :64]
    loss = model(ids, labels=ids).loss.item()
    assert abs(float(re.search(r"loss ([\d.]+)", lines[0])[1]) - loss) < 0.01 * loss


@pytest.mark.distributed
def test_an_architecture_of_ones_own(tmp_path):
    make().save_pretrained(tmp_path / "my-model")
    shutil.copy(ROOT / "examples" / "custom.py", tmp_path / "side_by_side.py")
    (tmp_path / "train.py").write_text(scripts("custom.md")[0])
    run("train.py", cwd=tmp_path, ranks=2)
    files, again = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("my-model", "again")
    )
    assert again == files
