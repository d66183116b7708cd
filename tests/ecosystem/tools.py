"""What the tests of tools that fine-tune have in common: a tiny model, a tokenizer, rows, and the tool's command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from liger_models import AutoLigerModel

ROOT = Path(__file__).parents[2]


def settings(tool: str) -> dict[str, Any]:
    """The configuration file that the page shows for a tool."""
    page = (ROOT / "docs" / "in-your-tools.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(tool)}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    block = re.search(r"^```yaml\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert block is not None
    found: dict[str, Any] = yaml.safe_load(block[1])
    return found


def make_files(folder: Path) -> None:
    """In a folder: ``theirs``, a checkpoint without ``auto_map``; ``portable``, the same with it; ``rows.jsonl``."""
    words = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(125))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    model = AutoLigerModel.from_pretrained(folder / "theirs", dtype=torch.float32)
    model.save_pretrained(folder / "portable", auto_map=True)
    rows = [{"instruction": f"w{n} w7 w8", "input": "", "output": f"w{n} w{n + 1} w{n % 5}"} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, module: str, *arguments: str) -> str:
    """Run a tool's module in a folder, without a network; returns what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    variables |= {"HF_HOME": str(folder / "cache"), "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "COLUMNS": "200"}
    variables |= {"TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions")}  # which DeepSpeed compiles
    command = [sys.executable, str(Path(__file__).with_name("run_cli.py")), module, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\{'loss': '?([0-9.]+)", printed)]


def assert_trained_alike(folder: Path, theirs: str, ours: str, output: str) -> None:
    """The model of this package ran, with the losses of transformers' own; its output is a checkpoint for both.

    Args:
        folder: where the files are.
        theirs: what the tool printed with transformers' model.
        ours: what it printed with that of this package.
        output: folder that the second wrote.
    """
    assert_models(theirs, ours)
    assert len(losses(ours)) == 3
    torch.testing.assert_close(torch.tensor(losses(ours)), torch.tensor(losses(theirs)), rtol=0, atol=2e-3)
    assert_is_a_checkpoint(folder, output)


def assert_models(theirs: str, ours: str) -> None:
    """By what the tool printed, the one ran transformers' model, and the other that of this package."""
    assert "models of: transformers\n" in theirs
    assert "models of: liger_models\n" in ours


def assert_is_a_checkpoint(folder: Path, output: str) -> None:
    """The folder that the tool wrote loads in transformers and here, and its weights were trained."""
    ids = torch.arange(3, 20)[None]
    trained, before = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in (output, "theirs")
    )
    assert type(trained).__module__.startswith("transformers.")
    own = AutoLigerModel.from_pretrained(folder / output, dtype=torch.float32).eval()
    torch.testing.assert_close(own(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained(ids).logits, before(ids).logits, atol=1e-2)
