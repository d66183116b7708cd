"""The training loops of docs/training.md and docs/parallel.md run by torchrun; the first stops, and goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from .models import TINY, mixture, tiny

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, folder: Path) -> list[str]:
    """The lines that the first rank prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=100)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def scripts(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_loop(tmp_path):
    script = scripts("training.md")[0]
    tiny().save_pretrained(tmp_path / "checkpoint")
    torch.save(torch.randint(TINY["vocab_size"], (6 * 2 * 2 * 2 * 32,)), tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(script)

    whole = torchrun(2, tmp_path)
    assert [line.split(":")[0] for line in whole] == [f"step {step}" for step in range(1, 7)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000004", "step-00000006"]
    trained = {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")

    (tmp_path / "run" / "latest").write_text("step-00000004")  # as if it had stopped after step 5
    assert torchrun(2, tmp_path) == whole[4:]
    assert {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()} == trained


def test_tensor_parallel(tmp_path):
    model = tiny(initializer_range=0.02)
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.randint(TINY["vocab_size"], (3 * 2 * 2 * 32,))
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(scripts("parallel.md")[0])
    lines = torchrun(4, tmp_path)
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    ids = tokens[: 2 * 2 * 32].view(4, 32)
    loss = model(ids, labels=ids).loss.item()
    assert abs(float(re.search(r"loss ([\d.]+)", lines[0])[1]) - loss) < 0.01 * loss  # computed in bf16
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


def test_expert_parallel(tmp_path):
    model = mixture()
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.randint(TINY["vocab_size"], (2 * 2 * 2 * 32,))
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "train.py").write_text(scripts("parallel.md")[1])
    lines = torchrun(2, tmp_path)
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1"]
    ids = tokens[: 2 * 2 * 32].view(4, 32)
    loss = model(ids, labels=ids).loss.item()
    assert abs(float(re.search(r"loss ([\d.]+)", lines[0])[1]) - loss) < 0.01 * loss
