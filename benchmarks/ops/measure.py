"""Checks and times one peer of one op.

Before a shape is timed, outputs and gradients are compared with plain torch in fp64 (`Op.truth`) at the sizes in
`Op.check`. If a peer's error exceeds `LIMIT` times the error of plain torch in bf16, the peer is refused, and its row
says "wrong".

A time is the median of `REPEATS` runs between two CUDA events. Before each run, the inputs and upstream gradients are
copied again, because some peers overwrite them, and `FLUSH_BYTES` of other memory are read. Therefore, no input is in
the L2 cache, and the host runs ahead of the device: unless the op itself waits, only the device's time is measured.
The forward is a training forward. Memory is the allocator's peak in forward and backward, without inputs and upstream
gradients.

`Op.work` is the minimum work of a pass, in bytes or operations. The process "ceilings" in the same run measures how
fast the device copies and multiplies. The "fraction" of a row is the time that the minimum work takes at this speed,
divided by the measured time.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .op import LEAST_ERROR, Op, Peer, Sizes, randn

LIMIT = 5.0
WARM_UP, REPEATS, SLOW_REPEATS, SLOW_MS = 3, 25, 8, 100.0
FLUSH_BYTES = 2**31
STEPS = 3
"""Number of optimizer steps in the comparison with fp64."""


def upstream_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the outputs: random values that are exact in every dtype, or 1 for a scalar loss."""
    torch.manual_seed(1)
    random = [torch.randn(out.shape, dtype=torch.bfloat16, device=out.device) for out in outputs]
    return [
        grad.to(out.dtype) if out.dim() else torch.ones_like(out) for out, grad in zip(outputs, random, strict=True)
    ]


def results(op: Op, peer: Peer, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a peer. Returns outputs (``out 0``, ...) and gradients (``d x``, ...) by name."""
    leaves = op.leaves(inputs)
    call = op.start(peer.run, peer.enter(*leaves.values()))
    for _ in range(STEPS if op.stateful else 1):
        outputs = call()

    # Gradients of all inputs that have a gradient.
    tensors = {f"out {i}": out.detach().clone() for i, out in enumerate(outputs)}
    differentiated = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if differentiated:
        grads = torch.autograd.grad(outputs, list(differentiated.values()), upstream_of(outputs))
        tensors |= {f"d {name}": grad for name, grad in zip(differentiated, grads, strict=True)}
    return tensors


def errors(op: Op, peer: Peer, inputs: dict[str, Tensor]) -> dict[str, list[float]]:
    """Map the name of each result to two errors relative to fp64: of the peer, and of plain torch in bf16."""
    plain = Peer(peer.truth or op.truth)
    exact = results(op, plain, {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()})
    pairs: dict[str, list[float]] = {name: [] for name in exact}
    for who in (peer, plain):
        for name, got in results(op, who, inputs).items():
            true = exact[name]
            pairs[name].append(((got.double() - true).norm() / true.norm().clamp_min(1e-30)).item())
    return pairs


def verdict(pairs: dict[str, list[float]], least: float = LEAST_ERROR) -> str | None:
    """A text about the first error that is too large; None if there is none.

    Args:
        pairs: the result of `errors`.
        least: `Op.least_error`.
    """
    for name, (mine, theirs) in pairs.items():
        if not mine <= LIMIT * max(theirs, least):  # also wrong if it is NaN
            return f"wrong: {name} errs by {mine:.1e}, plain torch by {theirs:.1e}"
    return None


def milliseconds(prepare: Callable[[], Any], run: Callable[[Any], Any], device: str) -> list[float]:
    """Milliseconds of each ``run(prepare())``, without the time of ``prepare``."""

    def mark() -> Any:
        if device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def once() -> tuple[Any, Any]:
        state = prepare()
        begun = mark()
        result = run(state)
        ended = mark()
        del result  # after the mark, because freeing it takes time
        return begun, ended

    def elapsed(begun: Any, ended: Any) -> float:
        if device == "cpu":
            return (ended - begun) * 1e3
        ended.synchronize()
        return begun.elapsed_time(ended)

    # The time of the last warm-up run determines how often a slow op is run.
    for _ in range(WARM_UP):
        last = elapsed(*once())
    marks = [once() for _ in range(REPEATS if last < SLOW_MS else SLOW_REPEATS)]
    return [elapsed(*pair) for pair in marks]


def measure(op: Op, name: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """Measure one shape. The row contains errors and, unless these are too large, work, times and memory."""

    def make(sizes: Sizes) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with torch.device(device):
            return op.make(**sizes)

    # Measure the errors with smaller sizes.
    peer = op.peer(name)
    row: dict[str, Any] = {"errors": errors(op, peer, make(sizes | op.check))}
    wrong = verdict(row["errors"], op.least_error)
    if wrong:
        return row | {"error": wrong}
    gc.collect()

    # The inputs in the peer's layout: leaves that the peer may overwrite, and copies to restore the leaves.
    entered = peer.enter(*op.leaves(make(sizes)).values())
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in entered]
    pristine = [tensor.detach() for tensor in entered]
    del entered
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    call = op.start(peer.run, leaves)
    fresh = upstream_of(call()) if differentiated else []
    upstream = [grad.clone() for grad in fresh]
    flush = torch.zeros(FLUSH_BYTES // 4 if device == "cuda" else 1, device=device)

    @torch.no_grad()
    def refresh() -> None:
        for copy, source in zip((*leaves, *upstream), (*pristine, *fresh), strict=True):
            copy.copy_(source)
        flush.sum()

    def outputs() -> tuple[Tensor, ...]:
        refresh()
        result = call()
        flush.sum()
        return result

    def backward(result: tuple[Tensor, ...]) -> Any:
        return torch.autograd.grad(result, differentiated, upstream)

    def total(_: None) -> Any:
        result = call()
        return (result, backward(result)) if differentiated else result

    # Measure times, and the memory of forward and backward.
    passes = {"forward": (refresh, lambda _: call()), "backward": (outputs, backward), "total": (refresh, total)}
    row |= {"limit": op.limit, "work": op.ideal(sizes)}
    times = {name: milliseconds(*passes[name], device) for name in row["work"]}
    row["ms"] = {name: round(statistics.median(runs), 4) for name, runs in times.items()}
    row["ms_range"] = {name: [round(min(runs), 4), round(max(runs), 4)] for name, runs in times.items()}
    if device == "cuda":
        refresh()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total(None)
        peak = torch.cuda.max_memory_allocated() - before
        row["peak_mib"] = round(peak / 2**20, 1)
        row["above_gradients_mib"] = round((peak - sum(leaf.nbytes for leaf in differentiated)) / 2**20, 1)
    return row


def ceilings(device: str, copied: int = 2**32, width: int = 8192) -> dict[str, float]:
    """The speed of the device: GB/s of a copy (read + write), and TFLOP/s of a bf16 matmul of random values."""
    with torch.device(device):
        source = torch.ones(copied, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = statistics.median(milliseconds(lambda: None, lambda _: target.copy_(source), device))
        left, right = randn(width, width), randn(width, width)
        product = statistics.median(milliseconds(lambda: None, lambda _: left @ right, device))
    return {"copy_gbs": round(2 * copied / copy / 1e6, 1), "matmul_tflops": round(2 * width**3 / product / 1e9, 1)}


def fraction(row: dict[str, Any], ceiling: dict[str, float]) -> dict[str, float]:
    """Map each pass, such as the forward, to the fraction of the device's limit that the pass reaches."""
    rate = ceiling["copy_gbs"] * 1e6 if row["limit"] == "bytes" else ceiling["matmul_tflops"] * 1e9
    return {name: round(work / row["ms"][name] / rate, 4) for name, work in row["work"].items()}
