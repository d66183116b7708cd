"""DeepSpeed: its engine with the script that the page shows, and Trainer with it. Two ranks train as one process."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from liger_models import LigerLlama

from ..arch.families import error, make_folder
from ..data.conftest import tokenizer  # noqa: F401
from ..hf.test_trainer import load, losses, trainer
from ..processes import environment, scripts, torchrun
from ..train.test_engines import dataset, folder, plain_losses  # noqa: F401

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]  # DeepSpeed's


CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
}


@cache
def compile_extension() -> None:
    """What ranks on the CPU sum by, once for the environment: it takes minutes, and ranks would wait for each other."""
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", code], env=environment(**CPU), check=True, timeout=1500)


def run(ranks: int, *arguments: str, cwd: Path, device: str = "cpu") -> str:
    """What the ranks of ``run.py`` print."""
    if device == "cpu":
        compile_extension()
    return torchrun(ranks, "run.py", *arguments, cwd=cwd, **(CPU if device == "cpu" else {})).stdout


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_page(folder, stage, device):  # noqa: F811
    """Trains in shards, writes them, goes on from them in new processes, and writes a checkpoint for transformers."""
    ranks = 2
    if device == "cuda":
        assert torch.cuda.is_available(), "a gpu test was asked for on a machine without a GPU"
        ranks = torch.cuda.device_count()
    (script,) = [script for script in scripts("engines.md") if "deepspeed" in script]
    (folder / "run.py").write_text(script)
    printed = [run(ranks, stage, cwd=folder, device=device) for _ in range(2)]
    lines = [line for line in "".join(printed).splitlines() if line.startswith("step ")]
    found = [float(line.split()[-1]) for line in lines]
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in range(1, 9)]
    assert found[-1] < found[0] - 1
    if device == "cpu":
        assert found == pytest.approx(plain_losses(8), rel=1e-4)
    shards = [name for name in (folder / "run" / "global_step8").glob("*_optim_states.pt") if "zero_pp" in name.name]
    assert len(shards) == ranks
    trained = LigerLlama.from_pretrained("trained", dtype=torch.float32, progress=False)
    batch = next(iter(dataset(trained)))
    assert trained(**batch).loss < found[0] - 1
    ids = batch["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.float32)
    torch.testing.assert_close(trained(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


TRAINER = """
import json
import sys
import torch.distributed as dist
from pathlib import Path
from tests.hf.test_trainer import load, losses, trainer

zero = {"stage": int(sys.argv[1]), "stage3_gather_16bit_weights_on_model_save": sys.argv[2] == "whole"}
auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
options = {"deepspeed": {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **auto}}
options |= {"per_device_train_batch_size": 1, "optim": "adamw_torch", "output": "two"}
whole = trainer(load(Path("model")), **options)
whole.train()
whole.save_model("trained")
resumed = trainer(load(Path("model")), **options)
resumed.train(resume_from_checkpoint="two/checkpoint-2")
if whole.is_world_process_zero():
    found = {"stage": whole.deepspeed.zero_optimization_stage(), "whole": losses(whole), "resumed": losses(resumed)}
    print("found", json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("stage", "saved"), [(1, "whole"), (2, "whole"), (3, "whole"), (3, "shards")])
def test_trainer(tmp_path, monkeypatch, stage, saved):
    """Two ranks train, save and go on as one process does; ZeRO-3 leaves the weights in shards unless it is told to."""
    monkeypatch.chdir(tmp_path)
    make_folder("llama", "gqa", tmp_path).rename("model")
    one = trainer(load(Path("model")), optim="adamw_torch")
    one.train()
    Path("run.py").write_text(TRAINER)
    (line,) = [line for line in run(2, str(stage), saved, cwd=tmp_path).splitlines() if line.startswith("found ")]
    found: dict[str, Any] = json.loads(line.partition(" ")[2])
    assert found.pop("stage") == stage
    for each in found.values():
        assert each == pytest.approx(losses(one), rel=1e-4)
    if saved == "whole":
        trained = load(Path("trained"))
    else:
        assert not [*Path("trained").glob("*.safetensors")]
        trained = type(one.model)(AutoConfig.from_pretrained("trained"))
        trained.load_state_dict(get_fp32_state_dict_from_zero_checkpoint("trained"))
        trained.eval().save_pretrained("trained")
    for name, parameter in trained.named_parameters():
        assert error(parameter, one.model.get_parameter(name)) < 1e-3, name
    ids = torch.arange(3, 14)[None]
    assert error(load(Path("trained"), ours=False)(ids).logits, trained(ids).logits) <= 1e-5
