"""Record a step's kernels on fake tensors, and compare them with the launches of a step on tensors with values.

Runs without a GPU and without Triton's interpreter: what a kernel would compute is left undefined. The arguments are
the options of the model's configuration as JSON, and a policy of `set_checkpointing`. With the third argument
"compile", the recorded kernels are compiled, and the launches of the step must find all of them, while they are being
compiled and later. With "early", the step that is recorded is one of a model without weights.
"""

import json
import sys
import threading
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from liger_models import AutoLigerModel
from liger_models.kernels import dispatch
from liger_models.kernels.loss import cross_entropy
from liger_models.layers.compile_ahead import _step_of_text, record_step, start_compilation
from liger_models.train.optimizer import LigerAdamW


class Compiler:
    """What Triton asks of a driver when it only compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


driver.set_active(Compiler())
dispatch.INTERPRET = True  # ops on the CPU take the way of the kernels
cross_entropy.is_traced = lambda: True  # on the CPU targets are checked, which are undefined here
torch.manual_seed(0)
model = AutoLigerModel.from_config(json.loads(sys.argv[1]), dtype=torch.bfloat16)
model.train().set_checkpointing(sys.argv[2])
weights = {name: weight.clone() for name, weight in model.state_dict().items()}
compiles, early = (name in sys.argv[3:] for name in ("compile", "early"))
ids = torch.randint(256, (2, 128))
batch = {"input_ids": ids, "labels": ids}
embeds, layout = model.prepare(ids)

optimizer = LigerAdamW(model.parameters(), stochastic_rounding=True)

random, run, hook = torch.get_rng_state(), JITFunction.run, knobs.runtime.jit_cache_hook
kernels = {}
if early:
    batch |= {"cu_seqlens": torch.tensor([0, 100, 128, 256]), "num_items_in_batch": torch.tensor(250.0)}
    twin = AutoLigerModel.from_config(json.loads(sys.argv[1]), dtype=torch.bfloat16, device="meta")
    twin.train().set_checkpointing(sys.argv[2])
    record_step(twin, *_step_of_text(twin, (2, 128), ids.device), kernels, ids.device)
    assert all(parameter.is_meta and parameter.grad is None for parameter in twin.parameters())
else:
    packed = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        record_step(model, embeds, layout, {"labels": ids}, kernels)
    assert not packed
assert JITFunction.run is run
assert knobs.runtime.jit_cache_hook is hook
assert torch.equal(torch.get_rng_state(), random)
assert all(parameter.grad is None for parameter in model.parameters())
assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
assert type(model.embed_tokens.weight) is torch.nn.Parameter
assert {type(value) for tensors in layout.tables.values() for value in tensors} == {torch.Tensor}

if compiles:
    torch.cuda.device = lambda device: nullcontext()
    threads = []
    knobs.compilation.listener = lambda **_: threads.append(threading.current_thread().name)
    compiling = start_compilation(kernels)

launched = {}


def record(**about: object) -> bool:
    kernel, made = about["fn"].jit_function, about["compile"]
    launched[kernel, made["device"], made["key"]] = kernel.__name__
    return True


knobs.runtime.jit_cache_hook = record
JITFunction.run = lambda kernel, *args, grid, warmup, **options: run(kernel, *args, grid=(1,), warmup=True, **options)
model(**batch).loss.backward()
if not early:  # the optimizer is none of the twin's
    optimizer.step()
if compiles:
    assert not launched, launched  # although the kernels are still being compiled
    compiling.join()
    model(**batch).loss.backward()
    assert not launched, launched
    assert len(threads) == len(kernels)
    assert threading.main_thread().name not in threads
else:
    assert launched.keys() == kernels.keys(), {key[0].__name__ for key in launched.keys() ^ kernels.keys()}
print(len(kernels))
