"""Compilation of a training step's Triton kernels in parallel, before the first step launches them.

Triton compiles a kernel at its first launch, so the kernels of the first step would be compiled one after the other.
`compile_ahead` first runs the step on fake tensors, which have no values, and records the kernels that the step
launches. The recording takes a few milliseconds per block, and no memory on the GPU. Threads then compile and load
these kernels in parallel, while the real step begins. A launch waits if its kernel is still being compiled. The threads
compile at the same time, because Triton's compiler releases Python's global interpreter lock.

If the step cannot run on fake tensors, some kernels are not recorded. Triton then compiles these kernels at their first
launch. The results are the same.

`compile_early` starts the compilation before the model has weights, for a caller who knows the shape of the batches.

Triton keeps compiled kernels in a cache on the disk. When all kernels of a model are compiled, a marker file for the
model's settings is created in this cache. If a later process finds the marker file, it does not record the step again.
"""

import copy
import hashlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models.common.errors import is_traced
from liger_models.common.ops import LIBRARY
from liger_models.kernels.dispatch import HAS_TRITON, INTERPRET, cuda_capability
from liger_models.kernels.embedding import embedding
from liger_models.layers.recompute import is_compiled, is_hooked

LOG = logging.getLogger(__name__)

_done: WeakSet[nn.Module] = WeakSet()
"""The models that `compile_ahead` ignores, because their kernels already are, or must not be, compiled ahead."""

_optimizers: WeakSet[Any] = WeakSet()
"""The optimizers whose kernels are compiled together with the kernels of a step."""

_early: WeakKeyDictionary[nn.Module, threading.Thread] = WeakKeyDictionary()
"""Maps a model that is being loaded to the thread that records the kernels of the model's first step."""


class Launch(NamedTuple):
    """A launch of a kernel that is not compiled yet.

    Attributes:
        kernel: the `triton.JITFunction`.
        device: index of the device.
        specialization: the argument of `triton.JITFunction.preload`.
    """

    kernel: Any
    device: int
    specialization: str


Kernels = dict[tuple[Any, int, str], Launch]
"""Maps (kernel, device, key of the specialization) to a launch. Launches with equal keys share one compilation."""


def compile_ahead(model: nn.Module, embeds: Tensor, layout: Any, options: Mapping[str, Any]) -> None:
    """Start to compile the kernels of ``model.run(embeds, layout, **options)`` and its backward.

    Only the first call of this function for a model has an effect. Nothing is compiled ahead unless the step runs on an
    NVIDIA GPU, with gradients and without a decode cache. Nothing is compiled ahead either if the model has hooks, is
    distributed, or has parameters that are instances of tensor subclasses, such as DTensor.

    Args:
        model: the `Decoder`.
        embeds, layout, options: the arguments of `Decoder.run`.
    """
    if not embeds.is_cuda or is_traced() or not torch.is_grad_enabled():
        return
    if model in _early:
        _early.pop(model).join()
    if model in _done or not _has_kernels() or layout.cache is not None:  # fake tensors would be cached
        return
    if not _runs_on_fakes(model, embeds, options):
        return
    _done.add(model)
    marker = marker_of(model, embeds.dtype, embeds.device)
    if marker.exists():
        return
    kernels: Kernels = {}
    try:
        with torch.random.fork_rng([embeds.device]):
            record_step(model, embeds, layout, options, kernels)
    except Exception:  # the kernels that were recorded before the exception are compiled anyway
        LOG.debug("The step does not run on tensors without values.", exc_info=True)
    LOG.debug("%d kernels are compiled ahead.", len(kernels))
    if len(kernels) > 1:
        start_compilation(kernels, marker)


def compile_with_steps(optimizer: Any) -> None:
    """Make `compile_ahead` also compile the kernels of an optimizer that updates the model's parameters.

    Args:
        optimizer: an optimizer with a method ``launch``. This method takes parameters, creates placeholder tensors, and
            launches the kernels of a parameter update on the placeholder tensors.
    """
    _optimizers.add(optimizer)


def compile_early(model: Any, shape: tuple[int, int], device: torch.device) -> None:
    """Start to compile the kernels of a training step on packed text, while the weights of the model are being read.

    A thread records the kernels that the step launches; see `record_step`. If the recording fails, `compile_ahead`
    records the kernels when the first step begins. If a layer has dropout, `compile_early` does nothing, because
    recording sets the states of random number generators, and a thread must not set them.

    Args:
        model: the `Decoder` on the meta device, with the dtypes, adapters and policies of the training.
        shape: number of rows and number of tokens per row.
        device: the device of the training.
    """
    dropout = [x for module in model.modules() for x in (getattr(module, "dropout", 0), getattr(module, "p", 0))]
    if device.type != "cuda" or not _has_kernels() or any(isinstance(x, float) and x > 0 for x in dropout):
        return
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    twin = copy.deepcopy(model)  # a copy with the same layers, whose parameters never get values

    def record() -> None:
        kernels: Kernels = {}
        try:
            with torch.cuda.device(device):
                embeds, layout, options = _step_of_text(twin, shape, device)
                marker = marker_of(twin, embeds.dtype, device)
                if not _runs_on_fakes(twin, embeds, options):
                    return
                if not marker.exists():
                    record_step(twin, embeds, layout, options, kernels, device)
                    start_compilation(kernels, marker)
                _done.add(model)
        except Exception:
            LOG.debug("The step of a model that is being loaded can't be recorded.", exc_info=True)

    _early[model] = threading.Thread(target=record, name="compile_early")
    _early[model].start()


def _step_of_text(model: Any, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Any, dict[str, Any]]:
    """Return arguments of `Decoder.run` for a step on packed text: the embeddings, the `BatchLayout` and the options.

    The model is on the meta device.
    """
    B, T = shape
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    embeds, _ = model.embed(ids.to("meta"), None)
    on_device = torch.empty(0, dtype=embeds.dtype, device=device)
    layout = model.layout(
        shape, on_device, cu_seqlens=torch.arange(B + 1, device=device) * T, **model.layout_inputs(ids, on_device, T)
    )
    return embeds, layout, {"labels": ids, "num_items_in_batch": torch.ones((), device=device)}


def marker_of(model: Any, dtype: torch.dtype, device: torch.device) -> Path:
    """Return the path of the marker file. If this file exists, Triton's disk cache has all kernels of the model.

    The path does not depend on the number of tokens, because this number affects few kernels.

    Args:
        model: the `Decoder`.
        dtype, device: dtype and device of the embeddings.
    """
    import triton

    version = sys.modules[__name__.partition(".")[0]].__version__  # of this package
    trained = [(name, tensor.dtype) for name, tensor in model.named_parameters() if tensor.requires_grad]
    about = version, triton.__version__, cuda_capability(device), model.config, dtype, trained
    digest = hashlib.sha256(repr(about).encode()).hexdigest()
    return Path(triton.knobs.cache.dir, f"liger_models-{digest[:32]}")


def never_ahead(model: nn.Module) -> None:
    """Make `compile_ahead` ignore the modules of ``model``, because their kernels are compiled in another way."""
    _done.update(model.modules())


def _has_kernels() -> bool:
    capturing = torch.cuda.is_current_stream_capturing()
    return HAS_TRITON and not INTERPRET and torch.version.hip is None and not capturing


def _runs_on_fakes(model: Any, embeds: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether the step can run on fake tensors without side effects."""
    if hasattr(embeds, "fake_mode") or options.get("loss_function") is not None or any(vars(model.groups).values()):
        return False
    tensors = [*model.parameters(), *model.buffers()]
    return (
        all(type(tensor) in (nn.Parameter, Tensor) and tensor.device == embeds.device for tensor in tensors)
        and any(tensor.requires_grad for tensor in tensors)
        and not any(is_hooked(module) or is_compiled(module) or _is_fsdp1(module) for module in model.modules())
    )


def _is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is wrapped by FSDP1, whose forward replaces the storage of parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def record_step(
    model: Any,
    embeds: Tensor,
    layout: Any,
    options: Mapping[str, Any],
    kernels: Kernels,
    device: torch.device | None = None,
) -> None:
    """Record the kernels of ``model.run(embeds, layout, **options)``, its backward and the optimizer step.

    The step runs on fake tensors. Neither the model nor its gradients change.

    Args:
        device: the device that replaces the meta device of parameters and embeddings.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports torch's compiler, which takes a second
    from torch.nn.utils.stateless import _reparametrize_module

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            leaf = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            leaf = mode.from_tensor(tensor.detach())
        return leaf.requires_grad_(tensor.requires_grad)

    # The caller's hooks on saved tensors must not see fake tensors. Autograd calls only the innermost hooks.
    no_hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with mode, _Implementations(), recording(kernels), torch.enable_grad(), no_hooks:
        # A parameter that has several names becomes one fake tensor.
        weights = {parameter: fake(parameter) for parameter in model.parameters()}
        named = {name: weights[tensor] for name, tensor in model.named_parameters(remove_duplicate=False)}
        x = fake(embeds)
        options = {name: fake(value) if isinstance(value, Tensor) else value for name, value in options.items()}
        layout = replace(layout, masks=dict(layout.masks))  # layers may add masks
        with _reparametrize_module(model, named):
            results = model.run(x, layout, **options)._asdict()
        # The backward starts from the first result that is not None: a loss or, if the loss is computed outside of the
        # model, a tensor from which it is computed.
        names = ("loss", "log_probs", "logits", "hidden_states")
        result = next(results[name] for name in names if results[name] is not None)
        total = (result[-1] if isinstance(result, tuple) else result).sum()
        # The embedding lookup is not part of `run`, so its backward is added.
        table = weights.get(getattr(model.embed_tokens, "weight", None))
        if table is not None and table.requires_grad and x.requires_grad:
            ids = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
            total = total + embedding(table, ids, model.embed_tokens.padding_idx).sum()
        # Unlike `backward`, `grad` does not set ``.grad`` of any tensor.
        inputs = [tensor for tensor in (x, *weights.values()) if tensor.requires_grad]
        torch.autograd.grad(total, inputs, allow_unused=True)
        for optimizer in [*_optimizers]:
            optimizer.launch(weights)


class _Implementations(TorchDispatchMode):
    """While this context manager is active, this package's ops run their real implementations on fake tensors, so that
    they launch their kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != LIBRARY.ns:
            return func(*args, **(kwargs or {}))
        keys = torch._C.DispatchKey
        has_own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), keys.CUDA)
        on_cuda = any(isinstance(x, Tensor) and x.is_cuda for x in args)
        with self:  # the op may call other ops
            return func._op_dk(keys.CUDA if has_own and on_cuda else keys.CompositeExplicitAutograd, *args)


@contextmanager
def recording(kernels: Kernels) -> Iterator[None]:
    """Context manager within which a launch on fake tensors runs no kernel. If the kernel of the launch is not compiled
    yet, the kernel is added to ``kernels``. Launches on other tensors run as usual, in all threads."""
    from torch._subclasses import fake_tensor
    from triton import knobs
    from triton.runtime import jit

    FakeTensor: Any = fake_tensor.FakeTensor
    JITFunction: Any = jit.JITFunction
    launching = threading.local()  # autograd runs the backward in another thread
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run_or_record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not any(isinstance(value, FakeTensor) for value in (*args, *options.values())):
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        launching.fake = True
        try:
            return run(kernel, *args, grid=(1,), warmup=True, **options)
        finally:
            launching.fake = False

    def record(**about: Any) -> bool:
        if not getattr(launching, "fake", False):
            return hook is not None and bool(hook(**about))
        kernel, device = about["fn"].jit_function, about["compile"]["device"]
        launch = Launch(kernel, device, about["compile"]["specialization_data"])
        kernels[kernel, device, about["compile"]["key"]] = launch
        return True  # tells Triton not to compile the kernel

    def address(x: Tensor) -> int:
        # A kernel's specialization depends on the alignment of addresses. Real storages start at multiples of 512
        # bytes.
        return 512 + int(x.storage_offset()) * x.element_size()

    JITFunction.run, knobs.runtime.jit_cache_hook, FakeTensor.data_ptr = run_or_record, record, address
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
        del FakeTensor.data_ptr


def start_compilation(kernels: Kernels, marker: Path | None = None) -> threading.Thread:
    """Start to compile kernels in parallel, and return the thread that waits for them.

    A launch of one of these kernels waits until the kernel is compiled, and raises an error if the compilation has
    failed.

    Args:
        kernels: the kernels.
        marker: file that is created when all kernels are compiled.
    """
    submitted = threading.Event()

    def compile_in_thread() -> None:
        try:
            compile_all(kernels, submitted=submitted, ignore_errors=True)
            if marker is not None:
                marker.touch()
        except Exception:
            LOG.debug("Kernels are compiled when they are launched.", exc_info=True)
        finally:
            submitted.set()

    thread = threading.Thread(target=compile_in_thread, name="compile_ahead")
    thread.start()
    submitted.wait()  # a launch before this would compile its kernel a second time
    return thread


def compile_all(kernels: Kernels, *, submitted: threading.Event | None = None, ignore_errors: bool = False) -> None:
    """Compile kernels in parallel, and wait for all of them.

    Args:
        kernels: the kernels, on any number of devices.
        submitted: event that is set when the kernels of the first device have been submitted to the threads.
        ignore_errors: if True, this function raises no error if a compilation fails. The launch of the kernel then
            raises the error.
    """
    from triton import AsyncCompileMode

    def compile_for(device: int) -> None:
        threads = _Threads(pool, device)
        with AsyncCompileMode(threads, ignore_errors=ignore_errors), torch.cuda.device(device):
            for (kernel, _, key), launch in slowest_first:
                if launch.device == device:
                    future = kernel.preload(launch.specialization)
                    # Before version 3.7, Triton stores only compiled kernels in this cache, so a launch would not wait
                    # for a kernel that is still being compiled.
                    kernel.device_caches[device][0].setdefault(key, future)
            if submitted is not None:
                submitted.set()

    slowest_first = sorted(kernels.items(), key=lambda item: -num_products(item[0][0]))
    with _parsing_in_turn(), ThreadPoolExecutor(compile_threads()) as pool:
        # Each device has its own `AsyncCompileMode`, because a mode loads a kernel only on the first device that needs
        # it. A mode that ends with an error may stay set in the context variables, so each mode gets its own copy of
        # them.
        for device in sorted({launch.device for launch in kernels.values()}):
            copy_context().run(compile_for, device)


def num_products(function: Any, *callers: Any) -> int:
    """Return the number of ``tl.dot`` products in a `triton.JITFunction` and in the functions that it calls.

    The more matrix products a kernel has, the longer its compilation takes: 0.1 to 0.8 s without products, and 6 s
    with 14 products.
    """
    path, names = (*callers, function), function.fn.__globals__
    called = [names.get(name) for name in re.findall(r"(\w+)\(", function.src)]
    own: int = function.src.count("tl.dot(")
    return own + sum(num_products(each, *path) for each in called if hasattr(each, "src") and each not in path)


class _Threads(NamedTuple):
    """An executor for `triton.AsyncCompileMode`. Its threads compile kernels and also load them.

    Without this executor, Triton loads a kernel at its first launch. Before version 3.7, Triton then also compiles a C
    function that launches the kernel. Loading takes about 0.1 s per kernel, so a step with 30 kernels would wait for
    seconds.

    Attributes:
        pool: the threads.
        device: index of the device on which the kernels are loaded.
    """

    pool: ThreadPoolExecutor
    device: int

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(self._compile_and_load, compile_kernel)

    def _compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        # Errors are ignored here: if loading fails, the launch loads the kernel again and raises the error.
        with suppress(Exception), torch.cuda.device(self.device):
            _ = kernel.run
        return kernel


@contextmanager
def _parsing_in_turn() -> Iterator[None]:
    """Context manager within which only one thread at a time parses a kernel.

    Python may raise "AST constructor recursion depth mismatch" if two threads parse at the same time (cpython#106905).
    """
    from triton.runtime.jit import JITFunction

    owner: Any = next(kind for kind in JITFunction.__mro__ if "parse" in vars(kind))
    parse, lock = owner.parse, threading.Lock()

    def parse_in_turn(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    owner.parse = parse_in_turn
    try:
        yield
    finally:
        owner.parse = parse


def compile_threads() -> int:
    """Return the number of threads that compile: this process's cores, divided by the number of ranks on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(cores // max(int(ranks) if ranks.isdigit() else 1, 1), 1)
