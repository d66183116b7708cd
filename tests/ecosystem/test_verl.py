"""verl's FSDP engine, with the lines that the page shows: how it builds a model, and what vLLM gets from it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from .tools import ROOT, make_files


def test_fsdp_engine(tmp_path):
    """Two ranks: the second one loads no values, and gets them from the first. The rest is asserted on the ranks."""
    make_files(tmp_path)
    page = (ROOT / "docs" / "in-your-tools.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (lines,) = [block for block in blocks if "EngineRegistry" in block]
    (tmp_path / "liger_engine.py").write_text(lines)
    path = os.pathsep.join(filter(None, [str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    script = str(Path(__file__).with_name("verl_ranks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, "."]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-6000:]

    trained = LlamaForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ids = torch.arange(3, 20)[None]
    before = trained(ids, labels=ids).loss
    trained.load_state_dict(load_file(tmp_path / "exported.safetensors"))
    assert trained(ids, labels=ids).loss < before - 0.1
