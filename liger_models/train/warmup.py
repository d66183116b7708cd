"""Compilation of a training step's Triton kernels ahead of time and in parallel."""

from typing import Any

import torch
from torch import nn

from liger_models.kernels.dispatch import HAS_TRITON, INTERPRET
from liger_models.layers.compile_ahead import Kernels, Launch, compile_all, never_ahead


def warm_up(model: nn.Module, **batch: Any) -> int:
    """Compile the kernels of this package that ``model(**batch)`` and its backward launch.

    For most models, the first training step compiles these kernels by itself in the same way
    (`layers/compile_ahead.py`). Only distributed, quantized and compiled models, and models with hooks, need `warm_up`.
    `warm_up` first runs the model and records the kernels without launching them. Then threads compile the recorded
    kernels in parallel. Triton's cache on disk keeps the compiled kernels for later processes. Kernels that are already
    compiled are skipped, and kernels of other packages run as usual.

    Args:
        model: the model, with the mode, precision, compilation and sharding that the training uses. Its weights and
            the random number generators do not change. Buffers that a forward writes would change, but the models
            of this package have no buffers.
        batch: arguments of the model, with the sizes that the training uses. Without labels, there is no backward.
            The results are discarded, because the recorded kernels have not run.

    Returns:
        The number of compiled kernels. It is 0 on a CPU and in a second call.

    Raises:
        ValueError: a parameter has a hook that would use its gradient, or already has a gradient, which the backward
            would change.
    """
    # The gradients of this pass are garbage, so nothing may use them.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not all(parameter.grad is None for parameter in trained):
        raise ValueError("warm_up: a parameter has a gradient. Call zero_grad() first.")
    if any(parameter._post_accumulate_grad_hooks for parameter in trained):
        raise ValueError(
            "warm_up: a parameter has hooks that would act on its gradient. Call warm_up before step_in_backward."
        )
    if not HAS_TRITON or INTERPRET or not torch.cuda.is_available():
        return 0
    from triton import knobs

    kernels: Kernels = {}
    never_ahead(model)

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        # Kernels of other packages are run, because later kernels may need their results, and autotuners must measure
        # their run times.
        if not fn.module.startswith("liger_models.") or getattr(kernel, "decides", False):
            return False
        device, specialization = compile["device"], compile["specialization_data"]
        kernels[kernel, device, compile["key"]] = Launch(kernel, device, specialization)
        return True  # tells Triton to neither compile nor launch it

    computing = torch.device("cuda", torch.cuda.current_device())  # the weights may be on another device
    devices = {computing, *(parameter.device for parameter in trained if parameter.is_cuda)}
    # Run the model with the hook. Whatever fails, the hook and the gradients are removed.
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        with torch.random.fork_rng(devices):
            loss = model(**batch).loss
            if loss is not None and loss.requires_grad:
                loss.backward()
    finally:
        knobs.runtime.jit_cache_hook = before
        for parameter in trained:
            parameter.grad = None

    compile_all(kernels)
    return len(kernels)
