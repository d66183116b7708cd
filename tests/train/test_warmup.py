import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import liger_models.train.warmup
from liger_models import LigerAdamW, LigerLlama, LlamaConfig, step_in_backward, warm_up

try:
    from triton import knobs
    from triton.runtime._async_compile import active_mode
except ImportError:
    knobs = None

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


class Kernel:
    """As `triton.JITFunction`: asks the hook, then runs; compiles through what mode is active."""

    def __init__(self, module):
        self.module, self.device_caches, self.launched = module, {0: ({},), 1: ({},)}, 0
        self.fn, self.src = test_kernels_of_others_run, ""

    def __call__(self, device):
        compiling = {"device": device, "key": "key", "specialization_data": "data"}
        about = SimpleNamespace(module=self.module, jit_function=self)
        self.launched += not knobs.runtime.jit_cache_hook(fn=about, compile=compiling)

    def preload(self, specialization):
        (cache,) = self.device_caches[self.device()]
        return active_mode.get().submit(id(self), self.make, lambda made: cache.update(key=made))

    make = object


@pytest.fixture
def kernels(monkeypatch):
    """One of this package and one of another, and a function that warms them up on two devices."""
    if knobs is None:
        pytest.skip("needs triton")
    current = [0]

    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    def both(**_):
        for device in (1, 0):
            for kernel in made:
                kernel(device)
        return SimpleNamespace(loss=None)

    monkeypatch.setattr(Kernel, "device", lambda self: current[-1], raising=False)
    monkeypatch.setattr(liger_models.train.warmup, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    forked = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forked.append({*devices}) or nullcontext())
    made = Kernel("liger_models.kernels.rope.rope"), Kernel("another.package")
    model = torch.nn.Identity()
    model.forward = both
    return *made, partial(warm_up, model), forked


def test_kernels_of_others_run(kernels):
    own, other, warm, _ = kernels
    assert warm() == 2
    assert (own.launched, other.launched) == (0, 2)
    assert other.device_caches == {0: ({},), 1: ({},)}


def test_each_device_has_kernels_of_its_own(kernels):
    own, _, warm, _ = kernels
    warm()
    made = [cache["key"] for (cache,) in own.device_caches.values()]
    assert [type(each) for each in made] == [object, object]  # none is still to be waited for
    assert made[0] is not made[1]


def test_what_fails_to_compile_leaves_no_mode_active(kernels, monkeypatch):
    _, _, warm, _ = kernels
    monkeypatch.setattr(Kernel, "make", staticmethod(lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        warm()
    assert active_mode.get() is None


def test_generators_of_the_device_that_computes_are_kept(kernels):
    *_, warm, forked = kernels
    warm()
    assert forked == [{torch.device("cuda", 0)}]


def test_gradients_of_frozen_parameters_stay(kernels):
    *_, warm, _ = kernels
    frozen = warm.args[0].weight = torch.nn.Parameter(torch.ones(3))
    frozen.sum().backward()
    frozen.requires_grad_(False)
    warm()
    assert frozen.grad.tolist() == [1, 1, 1]


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
