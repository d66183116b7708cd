"""What an op is: its inputs, its specification in plain torch, and the implementations to compare."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Sizes = dict[str, int]
Function = Callable[..., Any]

load = functools.cache(pkgutil.resolve_name)
"""The object at ``module:attribute``."""


LEAST_ERROR = torch.finfo(torch.bfloat16).eps / 8
"""The error of plain torch counts as at least this, about half the error of rounding a result to bf16."""


@dataclass(frozen=True)
class Peer:
    """One implementation of an op.

    Args:
        run: takes what ``enter`` returns.
        enter: brings the op's inputs into the peer's layout. It is differentiable and not timed.
        needs: ``module`` or ``module:attribute``; without it the peer is left out.
        truth: what the peer computes, if it is not the op itself.
    """

    run: Function
    enter: Function = lambda *inputs: inputs
    needs: str = ""
    truth: Function | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op with its shapes and peers.

    Args:
        shapes: the sizes that are measured.
        make: sizes -> the inputs by name.
        truth: the op in plain torch.
        check: sizes that replace those of a shape in the comparison with fp64, to make it fast enough.
        limit: what bounds the op, "bytes" or "flops".
        work: sizes -> how many bytes or FLOPs at least: of forward and backward, or one number for both together. Bytes
            count each tensor that must be read or written once; vectors do not count.
        fixed: names of floating-point inputs without a gradient.
        stateful: the op is an optimizer: ``run`` and ``truth`` return the step to call, and nothing has a gradient.
        least_error: the error of plain torch counts as at least this; larger where plain torch computes in fp32 what
            every kernel multiplies in bf16.
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
    least_error: float = LEAST_ERROR

    def available(self) -> list[str]:
        """The peers that are installed; "compile" is torch.compile of "torch", in its layout."""
        names = [name for name, peer in self.peers.items() if installed(peer.needs)]
        if "torch" in names and not self.stateful:
            names.insert(names.index("torch") + 1, "compile")
        return names

    def peer(self, name: str) -> Peer:
        if name != "compile":
            return self.peers[name]
        torch.compiler.reset()  # each shape is compiled as if it were the first
        return replace(self.peers["torch"], run=torch.compile(self.peers["torch"].run, dynamic=False))

    def ideal(self, sizes: Sizes) -> dict[str, float]:
        """The least work of each pass."""
        parts = self.work(**sizes)
        passes = ("forward", "backward", "total") if len(parts) == 2 else ("total",)
        return dict(zip(passes, (*parts, sum(parts)), strict=False))

    def leaves(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the inputs, which require a gradient where the op has one."""
        copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        for name, copy in copies.items():
            copy.requires_grad_(copy.is_floating_point() and name not in self.fixed and not self.stateful)
        return copies

    def start(self, run: Function, inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
        """The function that is timed."""
        call = run(*inputs) if self.stateful else functools.partial(run, *inputs)
        return lambda: out if isinstance(out := call(), tuple) else (out,)


def installed(needs: str) -> bool:
    module, _, attribute = needs.partition(":")
    try:
        found = not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
    return found and (not attribute or hasattr(importlib.import_module(module), attribute))


def named(path: str, *rest: Any, **options: Any) -> Function:
    """The function at ``module:attribute``, imported when it is first called; ``rest`` follows its arguments."""
    return lambda *inputs: load(path)(*inputs, *rest, **options)


def liger(name: str, *rest: Any) -> Function:
    return named(f"liger_kernel.transformers.functional:{name}", *rest)


def liger_peer(run: Function, enter: Function = Peer.enter) -> Peer:
    return Peer(run, enter, needs="liger_kernel")


def randn(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16).mul_(scale)
