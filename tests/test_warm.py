import os
import subprocess
import sys

import pytest
import torch

from liger_models import LigerAdamW, LigerLlama, LlamaConfig, step_in_backward, warm_up

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def batch(device="cpu"):
    ids = torch.arange(64, device=device).view(2, 32)
    return {"input_ids": ids, "labels": ids}


def test_nothing_to_compile_on_a_cpu():
    model = LigerLlama.from_config(LlamaConfig(**SIZES))
    assert warm_up(model, **batch()) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_not_added_to():
    model = LigerLlama.from_config(LlamaConfig(**SIZES))
    model(**batch()).loss.backward()
    with pytest.raises(ValueError, match=r"a parameter has a gradient. Call zero_grad\(\) first"):
        warm_up(model, **batch())
    model.zero_grad()
    step_in_backward(LigerAdamW(model.parameters()))
    with pytest.raises(ValueError, match="Call warm_up before step_in_backward"):
        warm_up(model, **batch())


PROGRAM = """
import os
import sys
import torch
from triton import knobs
from liger_models import AutoLigerModel, warm_up

sizes = {sizes}
sizes |= {{"model_type": sys.argv[1], "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}}
if "moe" in sys.argv[1]:
    sizes |= {{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
torch.manual_seed(0)
model = AutoLigerModel.from_config(sizes, device="cuda", dtype=torch.bfloat16)
model.train()
if "sharded" in sys.argv:
    from liger_models import apply_fsdp

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    apply_fsdp(model)
ids = torch.randint(256, (2, 256), device="cuda")
batch = {{"input_ids": ids, "labels": ids}}
weights = {{name: value.clone() for name, value in model.state_dict().items()}}
random = torch.cuda.get_rng_state()

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
found = warm_up(model, **batch)
assert found > 8, found
assert len(compiled) >= found, (found, compiled)
assert all(parameter.grad is None for parameter in model.parameters())
assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
assert torch.equal(random, torch.cuda.get_rng_state())

compiled.clear()
loss = model(**batch).loss
loss.backward()
assert not compiled, compiled
assert warm_up(model.zero_grad() or model, **batch) == 0
print(loss.item(), flush=True)
os._exit(0)  # a process group would have to be taken down
"""


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "llama sharded", "qwen3", "qwen3_moe"])
def test_a_step_compiles_nothing_more(family, tmp_path):
    """In a process of its own, whose cache of kernels is empty."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(sizes=SIZES), *family.split()],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert abs(float(run.stdout) - torch.tensor(256.0).log()) < 0.5
