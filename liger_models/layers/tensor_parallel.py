"""Linear layers of which each rank has a part, and the part that a rank has of a weight.

A layer that can be cut over ranks has a method ``cut(ranks)``: it becomes a rank's part of itself, and says along which
dimension its own parameters and those of its linear layers are to be cut. `liger_models.parallel.apply_tp` cuts them.
All other parameters are whole on every rank, as DTensors too: code that uses one itself takes it by `own`, or, where
its gradient is of the rank's own tokens only, by `whole`.

Source: https://arxiv.org/abs/1909.08053.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.kernels.collectives import Ranks, enter, leave, sum_gradient
from liger_models.kernels.dispatch import check

if TYPE_CHECKING:
    from typing_extensions import Self


def is_cut(weight: Any) -> bool:
    """True for a DTensor, which `own` takes a part of."""
    if type(weight) in (nn.Parameter, Tensor):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build of PyTorch

    return isinstance(weight, DTensor)


def own(weight: Tensor) -> Tensor:
    """The calling rank's part of a weight that is cut over ranks; any other itself."""
    part: Tensor = weight.to_local() if is_cut(weight) else weight  # type: ignore[attr-defined]
    return part


def own_or_none(weight: Tensor | None) -> Tensor | None:
    """`own`, of a bias that may be missing."""
    return None if weight is None else own(weight)


def whole(weight: Tensor, ranks: Ranks | None) -> Tensor:
    """A weight that every rank has whole; its gradient is of all tokens, also where each rank has its own."""
    return sum_gradient(own(weight), ranks) if ranks is not None and ranks.sequence else own(weight)


def check_parts(where: str, name: str, count: int, ranks: Ranks, more: str = ".") -> None:
    """Raise ValueError unless each rank can have as many of ``count``; ``more`` ends the message."""
    check(count % ranks.size == 0, f"{where}: {name} ({count}) must be a multiple of {ranks.size} ranks{more}")


class _PartialLinear(nn.Linear):
    ranks: Ranks | None
    """Those with which something is exchanged; None for nothing."""

    @classmethod
    def of(cls, linear: nn.Linear, ranks: Ranks | None) -> "Self":
        """The layer with the parameters of another.

        Raises:
            ValueError: something that wraps, replaces or is hooked to a linear layer.
        """
        check(
            type(linear) is nn.Linear and not (linear._forward_hooks or linear._forward_pre_hooks),
            f"{cls.__name__}: the layer must be an nn.Linear without hooks, got {type(linear).__name__}. Cut the model "
            "first, and don't wrap or replace its linear layers (adapters, float8).",
        )
        layer = cls.__new__(cls)
        layer.__dict__ = dict(linear.__dict__)
        layer.ranks = ranks
        return layer


class ColumnParallelLinear(_PartialLinear):
    """A linear layer of which each rank has some outputs: [..., C] -> [..., O / R], of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C], of the rank's own tokens where it has its own."""
        return F.linear(enter(x, self.ranks), own(self.weight), own_or_none(self.bias))


class RowParallelLinear(_PartialLinear):
    """A linear layer of which each rank has some inputs: [..., I / R] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I / R], of all tokens; the result is of the rank's own where it has its own."""
        return self.sum(F.linear(x, own(self.weight)))

    def sum(self, parts: Tensor) -> Tensor:
        """The result, from the rank's part of the sum over all inputs."""
        y = leave(parts, self.ranks)
        return y if self.bias is None else y + whole(self.bias, self.ranks).to(y.dtype)


class WholeLinear(_PartialLinear):
    """A linear layer that every rank has whole, among others of which it has a part: [..., C] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C], of the rank's own tokens where it has its own."""
        bias = None if self.bias is None else whole(self.bias, self.ranks)
        return F.linear(x, whole(self.weight, self.ranks), bias)
