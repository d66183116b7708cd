import json
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from liger_models import LigerLlama, LlamaConfig
from liger_models.kernels.dispatch import HAS_TRITON
from liger_models.layers import compile_ahead as module
from liger_models.layers.compile_ahead import (
    Launch,
    compile_ahead,
    compile_early,
    compile_threads,
    marker_of,
    never_ahead,
    start_compilation,
)
from liger_models.layers.kv_cache import DecodeCache

from ..processes import ROOT, run

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
STEP = Path(__file__).with_name("compile_ahead_step.py")


def run_step(folder, policy, *more, **sizes):
    """Return the number of kernels that the script recorded."""
    script = run(STEP, json.dumps(SIZES | sizes), policy, *more, cwd=ROOT, TRITON_CACHE_DIR=str(folder))
    return int(script.stdout)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("family", "more", "policy"),
    [("llama", {}, "selective"), ("gemma3_text", {}, "none"), ("qwen3_5_text", LINEAR, "full")],
)
def test_the_recorded_kernels_are_those_of_the_step(family, more, policy, tmp_path):
    assert run_step(tmp_path, policy, model_type=family, **more) >= 12


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_5_text", LINEAR)])
def test_a_model_without_weights_has_the_kernels_of_the_step(family, more, tmp_path):
    assert run_step(tmp_path, "none", "early", model_type=family, **more) >= 12


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_the_launches_of_a_step_find_their_kernels(tmp_path):
    assert run_step(tmp_path, "none", "compile", model_type="llama") >= 12


@pytest.fixture
def model():
    return LigerLlama.from_config(LlamaConfig(**SIZES))


def runs(model, **options):
    return module._runs_on_fakes(model, torch.zeros(1, 4, 64), options)


def test_models_that_run_on_fakes(model):
    assert runs(model, labels=torch.zeros(1, 4))
    assert not runs(model, loss_function=lambda *_: 0)
    hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not runs(model)
    hook.remove()
    assert runs(model)
    model.layers[1].compile(backend="eager")
    assert not runs(model)


def test_frozen_and_distributed_models_do_not_run_on_fakes(model):
    model.groups.__dict__["tensor"] = object()
    assert not runs(model)
    model.groups.__dict__["tensor"] = None
    assert runs(model)
    with mock.patch.object(FullyShardedDataParallel, "__init__", torch.nn.Module.__init__):
        model.layers[0].wrapper = FullyShardedDataParallel()  # type: ignore[call-arg]
    assert not runs(model)
    del model.layers[0].wrapper
    assert not runs(model.requires_grad_(False))


class OnCuda:
    is_cuda = True
    device = torch.device("cuda", 0)
    dtype = torch.bfloat16


PLAIN = SimpleNamespace(cache=None)
"""The layout of a batch without a cache."""


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """The models whose steps are recorded, and what the recording raises."""
    models, errors, started = [], [], []

    def record(model, embeds, layout, options, kernels, device=None):
        models.append(model)
        kernels |= {index: Launch(None, 0, "") for index in range(2)}
        if errors:
            raise errors.pop()

    monkeypatch.setattr(module, "record_step", record)
    monkeypatch.setattr(module, "_has_kernels", lambda: True)
    monkeypatch.setattr(module, "_runs_on_fakes", lambda *_: True)
    monkeypatch.setattr(module, "start_compilation", lambda kernels, marker: started.append(len(kernels)))
    monkeypatch.setattr(module, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    return models, errors, started


def test_only_the_first_training_step_is_recorded(recorded, model):
    models, _, started = recorded
    with torch.no_grad():
        compile_ahead(model, OnCuda, PLAIN, {})
    compile_ahead(model, torch.zeros(1), PLAIN, {})
    compile_ahead(model, OnCuda, SimpleNamespace(cache=DecodeCache()), {})  # which would hold tensors without values
    assert not models
    for _ in range(2):
        compile_ahead(model, OnCuda, PLAIN, {})
    assert models == [model]
    assert started == [2]


@pytest.mark.parametrize("error", [None, ValueError("no values")])
def test_a_model_that_is_being_loaded(recorded, model, monkeypatch, error):
    """Its kernels are those of a copy without values; the first step waits for them, or records its own."""
    models, errors, started = recorded
    errors += [error] if error else []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(module, "_step_of_text", lambda twin, shape, device: (twin.embed_tokens.weight, None, {}))
    loading = LigerLlama.from_config(LlamaConfig(**SIZES), device="meta")
    compile_early(loading, (2, 8), torch.device("cpu"))
    loading.set_attention_dropout(0.1)
    compile_early(loading, (2, 8), torch.device("cuda"))
    assert loading not in module._early
    loading.set_attention_dropout(0.0)
    compile_early(loading, (2, 8), torch.device("cuda"))
    thread = module._early[loading]
    compile_ahead(loading, OnCuda, PLAIN, {})
    assert not thread.is_alive()
    assert loading not in module._early
    twin, *others = models
    assert twin is not loading
    assert next(twin.parameters()).is_meta
    assert others == ([loading] if error else [])
    assert started == [2]


def test_a_step_that_does_not_run_on_fakes_keeps_its_first_kernels(recorded, model):
    _, errors, started = recorded
    errors.append(ValueError("no values"))
    compile_ahead(model, OnCuda, PLAIN, {})
    assert started == [2]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_later_processes_do_not_record_a_model_whose_kernels_are_on_the_disk(recorded, model, monkeypatch):
    """The kernels of a frozen model, or of a model of another size, are others."""
    models, _, _ = recorded
    monkeypatch.setattr(module, "compile_all", lambda kernels, **options: options["submitted"].set())
    start_compilation({}, marker_of(model, OnCuda.dtype, OnCuda.device)).join()
    same = LigerLlama.from_config(LlamaConfig(**SIZES))
    compile_ahead(same, OnCuda, PLAIN, {})
    assert not models
    frozen, larger = (LigerLlama.from_config(LlamaConfig(**SIZES | {"vocab_size": size})) for size in (256, 257))
    frozen.norm.requires_grad_(False)
    for other in (frozen, larger):
        compile_ahead(other, OnCuda, PLAIN, {})
    assert models == [frozen, larger]


def test_warmed_up_models_are_not_recorded(recorded, model):
    models, _, _ = recorded
    never_ahead(torch.nn.Sequential(model))
    compile_ahead(model, OnCuda, PLAIN, {})
    assert not models


class Compiled:
    """As `triton.CompiledKernel`: is loaded when ``run`` is read. Loading fails."""

    def __init__(self):
        self.compiled_in, self.loaded_in = threading.current_thread(), None

    @property
    def run(self):
        self.loaded_in = threading.current_thread()
        raise RuntimeError("no driver")


class Kernel:
    """As `triton.JITFunction` of version 3.6: compiles through the active mode, when the test allows."""

    fn, src = staticmethod(lambda: None), ""

    def __init__(self, error=None):
        self.error, self.allowed, self.device_caches = error, threading.Event(), {0: ({},)}

    @property
    def kernel(self):
        """The entry of the cache that a launch reads: a compiled kernel, or a future."""
        return self.device_caches[0][0]["key"]

    def preload(self, specialization):
        from triton.runtime._async_compile import active_mode

        keep = self.device_caches[0][0].__setitem__
        return active_mode.get().submit(id(self), self.make, lambda made: keep("key", made))

    def make(self):
        self.allowed.wait()
        if self.error:
            raise self.error
        return Compiled()


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_launches_wait_for_their_own_kernel_and_raise_its_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(module, "compile_threads", lambda: 2)
    slow, good, bad = Kernel(), Kernel(), Kernel(RuntimeError("no registers"))
    thread = start_compilation({(kernel, 0, "key"): Launch(kernel, 0, "") for kernel in (slow, good, bad)})
    good.allowed.set()
    made = good.kernel  # a launch waits for it
    made = made if isinstance(made, Compiled) else made.result()
    assert made.compiled_in != threading.current_thread()
    assert made.loaded_in == made.compiled_in  # before the launch
    assert thread.is_alive()
    bad.allowed.set()
    with pytest.raises(RuntimeError, match="no registers"):
        bad.kernel.result()
    slow.allowed.set()
    thread.join()
    assert isinstance(slow.kernel, Compiled)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_kernels_with_the_most_products_are_compiled_first(monkeypatch):
    submitted = []

    class Source(Kernel):
        def preload(self, specialization):
            submitted.append(self.src)
            self.allowed.set()
            return super().preload(specialization)

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernels = {}
    for number in (0, 2, 1):
        kernel = Source()
        kernel.src = number * "tl.dot("
        kernels[kernel, 0, "key"] = Launch(kernel, 0, "")
    start_compilation(kernels).join()
    assert submitted == [2 * "tl.dot(", "tl.dot(", ""]


def test_products_of_a_kernel_include_those_of_the_functions_that_it_calls():
    names = {"exp": SimpleNamespace(src="def exp(x): return tl.exp(x)"), "other": len}
    names["inner"] = SimpleNamespace(src="def inner(x): return tl.dot(x, tl.dot(x, exp(x)))")
    names["kernel"] = SimpleNamespace(src="def kernel(x): inner(x), tl.dot(x, x), inner(x), other(x)")
    for function in (names["exp"], names["inner"], names["kernel"]):
        function.fn = SimpleNamespace(__globals__=names)
    assert [module.num_products(names[name]) for name in ("exp", "inner", "kernel")] == [0, 2, 5]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_one_thread_at_a_time_parses(monkeypatch):
    from triton.runtime.jit import JITFunction

    owner = next(kind for kind in JITFunction.__mro__ if "parse" in vars(kind))
    entered, parsing, most = threading.Barrier(2), [], []

    def parse(kernel):
        parsing.append(kernel)
        most.append(len(parsing))
        time.sleep(0.02)  # long enough for the other thread to enter
        parsing.pop()

    def enter(kernel):
        entered.wait()
        owner.parse(kernel)

    monkeypatch.setattr(owner, "parse", parse)
    with module._parsing_in_turn():
        threads = [threading.Thread(target=enter, args=(object(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1]
    assert owner.parse is parse


def test_ranks_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    assert compile_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert compile_threads() == 1


PROGRAM = """
import logging
import sys
import threading
import torch
from triton import knobs
from liger_models import AutoLigerModel
from liger_models.layers.compile_ahead import compile_early

logging.getLogger("liger_models.layers.compile_ahead").setLevel(logging.DEBUG)
logging.basicConfig()
threads = {{}}



def listen(*, src, **_):
    threads.setdefault(threading.current_thread().name, []).append(src.name)


knobs.compilation.listener = listen
early, batch = {early}, {{}}
model = AutoLigerModel.from_config({sizes}, device="meta" if early else "cuda", dtype=torch.bfloat16).train()
if early:
    compile_early(model, (2, 256), torch.device("cuda"))
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    batch = {{"cu_seqlens": torch.tensor([0, 100, 300, 512], device="cuda")}}
ids = torch.randint(256, (2, 256), device="cuda")
loss = model(input_ids=ids, labels=ids, **batch).loss
loss.backward()
print(threads, file=sys.stderr)
assert threading.main_thread().name not in threads
assert sum(map(len, threads.values())) > 8
print(loss.item())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True], ids=["with weights", "before the weights"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("gemma3_text", {"sliding_window": 64}),
        ("qwen3_5_text", LINEAR),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_the_first_step_compiles_nothing_one_after_the_other(family, more, early, tmp_path):
    program = tmp_path / "step.py"
    program.write_text(PROGRAM.format(sizes=SIZES | more | {"model_type": family}, early=early))
    loss = run(program, cwd=ROOT, TRITON_CACHE_DIR=str(tmp_path)).stdout
    assert abs(float(loss) - torch.tensor(256.0).log()) < 0.5
