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
"""Smaller errors of plain torch count as this value, which is about half the error of rounding to bf16."""


@dataclass(frozen=True)
class Peer:
    """One implementation of an op.

    Args:
        run: the implementation. Its arguments are the result of ``enter``.
        enter: differentiable function that converts the op's inputs to the peer's layout. It is not timed.
        needs: ``module`` or ``module:attribute`` that the peer needs. If it is missing, the peer is left out.
        truth: specification of the peer, if it differs from the op's specification.
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
        check: smaller sizes, which replace the sizes of a shape in the comparison with fp64.
        limit: what limits the op's speed, "bytes" or "flops".
        work: function of sizes. It returns the minimum bytes or FLOPs of forward and of backward, or one number for
            both together. Each tensor that must be read or written counts once. Vectors do not count.
        fixed: names of floating-point inputs without a gradient.
        stateful: whether the op is an optimizer. In this case, ``run`` and ``truth`` return the step to call, and no
            input has a gradient.
        least_error: smaller errors of plain torch count as this value. It is larger for ops in which plain torch
            computes products in fp32 and all kernels compute them in bf16.
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
        """The names of the installed peers. "compile" is "torch" with torch.compile, in the same layout."""
        names = [name for name, peer in self.peers.items() if installed(peer.needs)]
        if "torch" in names and not self.stateful:
            names.insert(names.index("torch") + 1, "compile")
        return names

    def peer(self, name: str) -> Peer:
        if name != "compile":
            return self.peers[name]
        torch.compiler.reset()  # compile each shape as if it were the first shape
        return replace(self.peers["torch"], run=torch.compile(self.peers["torch"].run, dynamic=False))

    def ideal(self, sizes: Sizes) -> dict[str, float]:
        """Map each pass, such as the forward, to its minimum work."""
        # Forward, backward and their sum, or only the sum.
        parts = self.work(**sizes)
        passes = ("forward", "backward", "total") if len(parts) == 2 else ("total",)
        return dict(zip(passes, (*parts, sum(parts)), strict=False))

    def leaves(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the inputs. A copy requires a gradient if the op has a gradient for the input."""
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
    """The function at ``module:attribute``, imported on the first call. ``rest`` follows the other arguments."""
    return lambda *inputs, **others: load(path)(*inputs, *rest, **options, **others)


def liger(name: str, *rest: Any) -> Function:
    return named(f"liger_kernel.transformers.functional:{name}", *rest)


def liger_peer(run: Function, enter: Function = Peer.enter) -> Peer:
    return Peer(run, enter, needs="liger_kernel")


def randn(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16).mul_(scale)
