"""How one op of one peer is checked and timed: `Peer`, `Op` and `measure`; the ops themselves are in ``ops.py``.

Before a shape is timed, outputs and gradients are compared with plain torch in fp64 (`Op.truth`) on the sizes in
`Op.check`. A peer whose error exceeds `LIMIT` times that of plain torch in bf16 is refused: its row says "wrong".

A time is the median of `REPEATS` runs between two CUDA events. Before each run the inputs and upstream gradients are
copied anew (some peers write into them) and `FLUSH_BYTES` of other memory are read: the L2 cache holds neither, and the
host is ahead of the device, so that times are the device's unless the op itself waits. A forward is that of training.
Memory is the allocator's peak over forward and backward, above inputs and upstream gradients.

`Op.work` is the least that a pass has to move or to compute. As a fraction of what a copy or a matmul, measured by the
process ``ceilings`` of the same run, does in that time it says how near its limit a peer is.
"""

import functools
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LIMIT = 5.0
LEAST_ERROR = torch.finfo(torch.bfloat16).eps / 8
"""The error of plain torch counts as at least this, about half of what rounding a result to bf16 costs."""

WARM_UP, REPEATS, SLOW_REPEATS, SLOW_MS = 3, 25, 8, 100.0
FLUSH_BYTES = 2**31
STEPS = 3
"""Of an optimizer, in the comparison with fp64."""

Sizes = dict[str, int]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """An implementation: ``run`` takes what ``enter`` makes of the op's inputs, which is differentiable and not timed.

    It is left out without ``needs`` (``module`` or ``module:attribute``). ``truth`` is what it computes, if not the op.
    """

    run: Function
    enter: Function = lambda *inputs: inputs
    needs: str = ""
    truth: Function | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """``make`` gives the inputs by name for the sizes of a shape, ``truth`` is the op in plain torch.

    Args:
        check: sizes that the comparison with fp64 replaces, to be fast enough.
        limit, work: "bytes" or "flops", and how many of them for the sizes: of forward and backward, or one total.
        fixed: names of the floating-point inputs without a gradient.
        stateful: an optimizer: ``run`` and ``truth`` return the function to call, nothing has a gradient.
    """

    name: str
    shapes: tuple[Sizes, ...]
    make: Callable[..., dict[str, Tensor]]
    truth: Function
    peers: dict[str, Peer]
    check: Sizes
    limit: str
    work: Callable[..., tuple[float, ...]]
    fixed: tuple[str, ...] = ()
    stateful: bool = False

    def available(self) -> list[str]:
        """The peers that are installed; "compile" is torch.compile of "torch", in its layout."""
        names = [name for name, peer in self.peers.items() if installed(peer.needs)]
        if "torch" in names and not self.stateful:
            names.insert(names.index("torch") + 1, "compile")
        return names

    def peer(self, name: str) -> Peer:
        if name != "compile":
            return self.peers[name]
        torch.compiler.reset()  # every shape is compiled as the first one
        return replace(self.peers["torch"], run=torch.compile(self.peers["torch"].run, dynamic=False))

    def ideal(self, sizes: Sizes) -> dict[str, float]:
        """The work of each pass."""
        parts = self.work(**sizes)
        passes = ("forward", "backward", "total") if len(parts) == 2 else ("total",)
        return dict(zip(passes, (*parts, sum(parts)), strict=False))

    def leaves(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the inputs; those that shall have a gradient require one."""
        copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        for name, copy in copies.items():
            copy.requires_grad_(copy.is_floating_point() and name not in self.fixed and not self.stateful)
        return copies

    def start(self, run: Function, inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
        """The function to call, and to time."""
        call = run(*inputs) if self.stateful else functools.partial(run, *inputs)
        return lambda: out if isinstance(out := call(), tuple) else (out,)


def installed(needs: str) -> bool:
    module, _, attribute = needs.partition(":")
    try:
        found = not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
    return found and (not attribute or hasattr(importlib.import_module(module), attribute))


def upstream_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """A gradient for each output, the same in every dtype: random, or 1 for a scalar loss."""
    torch.manual_seed(1)
    random = [torch.randn(out.shape, dtype=torch.bfloat16, device=out.device) for out in outputs]
    return [
        grad.to(out.dtype) if out.dim() else torch.ones_like(out) for out, grad in zip(outputs, random, strict=True)
    ]


def results(op: Op, peer: Peer, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs (``out 0``, ...) and gradients (``d x``, ...)."""
    leaves = op.leaves(inputs)
    call = op.start(peer.run, peer.enter(*leaves.values()))
    for _ in range(STEPS if op.stateful else 1):
        outputs = call()
    found = {f"out {i}": out.detach().clone() for i, out in enumerate(outputs)}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if wanted:
        grads = torch.autograd.grad(outputs, list(wanted.values()), upstream_of(outputs))
        found |= {f"d {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return found


def errors(op: Op, peer: Peer, inputs: dict[str, Tensor]) -> dict[str, list[float]]:
    """Relative error of each result against fp64, of the peer and of plain torch in bf16: {name: [peer, torch]}."""
    plain = Peer(peer.truth or op.truth)
    exact = results(op, plain, {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()})
    found: dict[str, list[float]] = {name: [] for name in exact}
    for who in (peer, plain):
        for name, got in results(op, who, inputs).items():
            true = exact[name]
            found[name].append(((got.double() - true).norm() / true.norm().clamp_min(1e-30)).item())
    return found


def verdict(found: dict[str, list[float]]) -> str | None:
    for name, (mine, theirs) in found.items():
        if not mine <= LIMIT * max(theirs, LEAST_ERROR):  # NaN is wrong, too
            return f"wrong: {name} errs by {mine:.1e}, plain torch by {theirs:.1e}"
    return None


def milliseconds(prepare: Callable[[], Any], run: Callable[[Any], Any], device: str) -> list[float]:
    """Times of ``run(prepare())`` without the preparation."""

    def mark() -> Any:
        if device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def once() -> tuple[Any, Any]:
        state = prepare()
        begun = mark()
        made = run(state)
        ended = mark()
        del made  # not before the mark
        return begun, ended

    def elapsed(begun: Any, ended: Any) -> float:
        if device == "cpu":
            return (ended - begun) * 1e3
        ended.synchronize()
        return begun.elapsed_time(ended)

    for _ in range(WARM_UP):
        last = elapsed(*once())
    marks = [once() for _ in range(REPEATS if last < SLOW_MS else SLOW_REPEATS)]
    return [elapsed(*pair) for pair in marks]


def measure(op: Op, name: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """The row of one shape: errors, and unless they are too large times, memory and work."""

    def make(sizes: Sizes) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with torch.device(device):
            return op.make(**sizes)

    peer = op.peer(name)
    row: dict[str, Any] = {"errors": errors(op, peer, make(sizes | op.check))}
    wrong = verdict(row["errors"])
    if wrong:
        return row | {"error": wrong}
    gc.collect()
    entered = peer.enter(*op.leaves(make(sizes)).values())
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in entered]
    pristine = [tensor.detach() for tensor in entered]
    del entered
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    call = op.start(peer.run, leaves)
    fresh = upstream_of(call()) if wanted else []
    upstream = [grad.clone() for grad in fresh]
    flush = torch.zeros(FLUSH_BYTES // 4 if device == "cuda" else 1, device=device)

    @torch.no_grad()
    def refresh() -> None:
        for copy, source in zip((*leaves, *upstream), (*pristine, *fresh), strict=True):
            copy.copy_(source)
        flush.sum()

    def outputs() -> tuple[Tensor, ...]:
        refresh()
        made = call()
        flush.sum()
        return made

    def backward(made: tuple[Tensor, ...]) -> Any:
        return torch.autograd.grad(made, wanted, upstream)

    def total(_: None) -> Any:
        made = call()
        return (made, backward(made)) if wanted else made

    passes = {"forward": (refresh, lambda _: call()), "backward": (outputs, backward), "total": (refresh, total)}
    row |= {"limit": op.limit, "work": op.ideal(sizes)}
    times = {name: milliseconds(*passes[name], device) for name in row["work"]}
    row["ms"] = {name: round(statistics.median(found), 4) for name, found in times.items()}
    row["ms_range"] = {name: [round(min(found), 4), round(max(found), 4)] for name, found in times.items()}
    if device == "cuda":
        refresh()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total(None)
        peak = torch.cuda.max_memory_allocated() - before
        row["peak_mib"] = round(peak / 2**20, 1)
        row["above_gradients_mib"] = round((peak - sum(leaf.nbytes for leaf in wanted)) / 2**20, 1)
    return row


def randn(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16).mul_(scale)


def ceilings(device: str, copied: int = 2**32, width: int = 8192) -> dict[str, float]:
    """What the device sustains: a copy (read + write) in GB/s, a bf16 matmul of random numbers in TFLOP/s."""
    with torch.device(device):
        source = torch.ones(copied, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = statistics.median(milliseconds(lambda: None, lambda _: target.copy_(source), device))
        left, right = randn(width, width), randn(width, width)
        product = statistics.median(milliseconds(lambda: None, lambda _: left @ right, device))
    return {"copy_gbs": round(2 * copied / copy / 1e6, 1), "matmul_tflops": round(2 * width**3 / product / 1e9, 1)}


def fraction(row: dict[str, Any], ceiling: dict[str, float]) -> dict[str, float]:
    """Of its limit, for each pass of a row."""
    rate = ceiling["copy_gbs"] * 1e6 if row["limit"] == "bytes" else ceiling["matmul_tflops"] * 1e9
    return {name: round(work / row["ms"][name] / rate, 4) for name, work in row["work"].items()}
