"""The definition of an op: its inputs, its specification in plain torch, and the implementations to compare."""

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
"""Smallest error of plain torch that counts, about half the error of rounding a result to bf16."""


@dataclass(frozen=True)
class Peer:
    """One implementation of an op.

    Args:
        run: the implementation. Its arguments are the result of ``enter``.
        enter: function that brings the op's inputs into the peer's layout. It is differentiable and not timed.
        needs: ``module`` or ``module:attribute``. If it is missing, the peer is left out.
        truth: specification of the peer, if it differs from the op's.
    """

    run: Function
    enter: Function = lambda *inputs: inputs
    needs: str = ""
    truth: Function | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op with its shapes and peers.

    Args:
        shapes: the measured sizes.
        make: function of sizes. It returns the inputs by name.
        truth: the op in plain torch.
        check: smaller sizes, which replace those of a shape in the comparison with fp64.
        limit: the bound of the op's speed, "bytes" or "flops".
        work: function of sizes. It returns the least bytes or FLOPs of forward and backward, or one number for both
            together. Each tensor that must be read or written counts once. Vectors do not count.
        fixed: names of floating-point inputs without a gradient.
        stateful: whether the op is an optimizer. Then ``run`` and ``truth`` return the step to call, and no input has a
            gradient.
        least_error: smallest error of plain torch that counts. It is larger where plain torch computes products in fp32
            that all kernels compute in bf16.
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
        """The names of the installed peers. "compile" is torch.compile of "torch", in the same layout."""
        names = [name for name, peer in self.peers.items() if installed(peer.needs)]
        if "torch" in names and not self.stateful:
            names.insert(names.index("torch") + 1, "compile")
        return names

    def peer(self, name: str) -> Peer:
        if name != "compile":
            return self.peers[name]
        torch.compiler.reset()  # compile each shape as if it were the first
        return replace(self.peers["torch"], run=torch.compile(self.peers["torch"].run, dynamic=False))

    def ideal(self, sizes: Sizes) -> dict[str, float]:
        """Pass -> its least work."""
        # Forward, backward and their sum, or the sum alone.
        parts = self.work(**sizes)
        passes = ("forward", "backward", "total") if len(parts) == 2 else ("total",)
        return dict(zip(passes, (*parts, sum(parts)), strict=False))

    def leaves(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the inputs. They require gradients if the op has gradients of them."""
        copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        for name, copy in copies.items():
            copy.requires_grad_(copy.is_floating_point() and name not in self.fixed and not self.stateful)
        return copies

    def start(self, run: Function, inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
        """The function to time. It returns a tuple of outputs."""
        call = run(*inputs) if self.stateful else functools.partial(run, *inputs)
        return lambda: out if isinstance(out := call(), tuple) else (out,)


def installed(needs: str) -> bool:
    module, _, attribute = needs.partition(":")
    try:
        exists = not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
    return exists and (not attribute or hasattr(importlib.import_module(module), attribute))


def named(path: str, *rest: Any, **options: Any) -> Function:
    """The function at ``module:attribute``, imported on its first call. ``rest`` follows its arguments."""
    return lambda *inputs, **others: load(path)(*inputs, *rest, **options, **others)


def liger(name: str, *rest: Any) -> Function:
    return named(f"liger_kernel.transformers.functional:{name}", *rest)


def liger_peer(run: Function, enter: Function = Peer.enter) -> Peer:
    return Peer(run, enter, needs="liger_kernel")


def randn(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16).mul_(scale)
