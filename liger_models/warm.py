"""The Triton kernels of a training step, compiled ahead and many at a time."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from .kernels.dispatch import HAS_TRITON, INTERPRET, check


def warm_up(model: nn.Module, **batch: Any) -> int:
    """Compile every kernel of this package that ``model(**batch)`` and its backward launch, and have not before.

    Triton compiles kernels when they are first launched, one by one, while the GPU waits. Here a first pass finds out
    which they are, without launching them, and threads compile them together. Triton's cache on disk keeps them for
    later processes. Kernels of other packages run as ever.

    Args:
        model: in the mode, and with the precision, compilation and sharding, that it will train with. Weights and
            random number generators are left as they are; not so buffers that a forward writes: no model here has any.
        batch: what the model is called with, of the sizes to come; with labels, or there is no backward. Results would
            be wrong, so there are none.

    Returns:
        How many kernels were compiled: 0 on a CPU, or a second time.

    Raises:
        ValueError: a parameter has a gradient, which the backward would add to, or a hook that takes a step with it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    check(
        all(parameter.grad is None for parameter in trained),
        "warm_up: a parameter has a gradient. Call zero_grad() first.",
    )
    check(
        not any(parameter._post_accumulate_grad_hooks for parameter in trained),
        "warm_up: a parameter has hooks that would act on its gradient. Call warm_up before step_in_backward.",
    )
    if not HAS_TRITON or INTERPRET or not torch.cuda.is_available():
        return 0
    from triton import AsyncCompileMode, knobs

    found: dict[Any, tuple[Any, int, str]] = {}

    def find(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        # Of others' kernels nobody here knows which decide where the next ones read; an autotuner would time nothing.
        if not fn.module.startswith("liger_models.") or getattr(kernel, "decides", False):
            return False
        found[kernel, compile["device"], compile["key"]] = kernel, compile["device"], compile["specialization_data"]
        return True  # neither compile nor launch

    computing = torch.device("cuda", torch.cuda.current_device())  # on which the weights need not be
    devices = {computing, *(parameter.device for parameter in trained if parameter.is_cuda)}
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, find
    try:
        with torch.random.fork_rng(devices):
            loss = model(**batch).loss
            if loss is not None and loss.requires_grad:
                loss.backward()
    finally:
        knobs.runtime.jit_cache_hook = before
        for parameter in trained:
            parameter.grad = None

    def compile_all(wanted: int) -> None:
        with AsyncCompileMode(pool), torch.cuda.device(wanted):
            for kernel, device, specialization in found.values():
                if device == wanted:
                    kernel.preload(specialization)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # A mode would give all devices one kernel, which the first of them loads; one that is interrupted stays active.
        for wanted in sorted({device for _, device, _ in found.values()}):
            copy_context().run(compile_all, wanted)
    return len(found)
