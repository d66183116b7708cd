"""Linear layers for tensor parallelism, and access to the local shards of weights.

A layer that can be sharded implements `Layer.shard`, which turns it into one rank's shard and returns the dimension
along which each of its parameters is sharded. `liger_models.parallel.apply_tp` then shards these parameters, and
replicates all other parameters, also as DTensors. Code that reads a parameter directly calls `local`, or `replicated`
if each rank computes the gradient from only its own tokens.

Source: https://arxiv.org/abs/1909.08053.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, copy_to_region, reduce_from_region, sum_gradient
from liger_models.layers.layer import Layer

if TYPE_CHECKING:
    from typing_extensions import Self


def is_sharded(weight: Any) -> bool:
    """Whether the weight is a DTensor; `local` then returns its local shard."""
    if type(weight) in (nn.Parameter, Tensor):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build of PyTorch

    return isinstance(weight, DTensor)


def local(weight: Tensor) -> Tensor:
    """The calling rank's shard of a DTensor; any other weight unchanged."""
    part: Tensor = weight.to_local() if is_sharded(weight) else weight  # type: ignore[attr-defined]
    return part


def sharded_as(like: Any, part: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Make a tensor that is distributed like ``like`` from this rank's part; without a DTensor it is the part itself.

    Args:
        like: any tensor.
        part: this rank's shard.
        shape: shape of the whole tensor; by default the shape of ``like``.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # slow to import

    stride = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    shape = like.shape if shape is None else shape
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_or_none(weight: Tensor | None) -> Tensor | None:
    """`local` of a bias that may be missing."""
    return None if weight is None else local(weight)


def replicated(weight: Tensor, group: Group | None) -> Tensor:
    """A replicated weight, whose gradient is summed over the ranks if they have different tokens."""
    return sum_gradient(local(weight), group) if group is not None and group.sequence_parallel else local(weight)


def check_divisible(where: str, name: str, count: int, group: Group, more: str = ".") -> None:
    """Raise ValueError unless ``count`` is a multiple of the number of ranks; ``more`` ends the message."""
    if count % group.size != 0:
        raise ValueError(f"{where}: {name} ({count}) must be a multiple of {group.size} ranks{more}")


class PartialLinear(nn.Linear, Layer):
    """Base class of linear layers with collectives in their forward."""

    group: Group | None
    """The process group of the collectives; None for no communication."""

    @classmethod
    def of(cls, linear: nn.Linear, group: Group | None) -> "Self":
        """Convert a linear layer, reusing its parameters.

        Args:
            linear: an `nn.Linear`, or a layer with adapters, whose ``parallel_kinds`` map this class to its adapted
                class.
            group: the process group of the collectives; None for no communication.

        Raises:
            ValueError: ``linear`` is another wrapper or replacement of a linear layer, or has hooks.
        """
        # A layer with adapters or a frozen weight stays one: its class names the parallel class for each kind.
        kinds: dict[type, Any] = {cls: cls} if type(linear) is nn.Linear else getattr(linear, "parallel_kinds", {})
        if cls not in kinds or (linear._forward_hooks or linear._forward_pre_hooks):
            raise ValueError(
                f"{cls.__name__}: the layer must be an nn.Linear without hooks, got {type(linear).__name__}. Shard the "
                "model first, and do not wrap or replace its linear layers, except by apply_lora."
            )
        # The attributes are shared, so the parameters keep their identity for an optimizer.
        layer: Self = kinds[cls].__new__(kinds[cls])
        layer.__dict__ = dict(linear.__dict__)
        layer.group = group
        return layer

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias`` with this rank's shard of the weight."""
        return F.linear(x, local(self.weight), bias)

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because the forward sums the gradients of replicated parameters."""
        return True


class ColumnParallelLinear(PartialLinear):
    """A linear layer whose outputs are sharded over ranks: [..., C] -> [..., O / R] for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        return self.product(copy_to_region(x, self.group), local_or_none(self.bias))


class RowParallelLinear(PartialLinear):
    """A linear layer whose inputs are sharded over ranks: [..., I / R] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I / R] of all tokens; the result has only this rank's tokens under sequence parallelism."""
        return self.sum(self.product(x, None))

    def sum(self, parts: Tensor) -> Tensor:
        """Compute the output of the layer from this rank's partial sum over the inputs."""
        # The bias is added after the sum, so that it is added once.
        y = reduce_from_region(parts, self.group)
        return y if self.bias is None else y + replicated(self.bias, self.group).to(y.dtype)


class ReplicatedLinear(PartialLinear):
    """A replicated linear layer among sharded ones: [..., C] -> [..., O]."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias``; the gradient of W is summed over ranks with different tokens."""
        return F.linear(x, replicated(self.weight, self.group), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        return self.product(x, None if self.bias is None else replicated(self.bias, self.group))


def ranks_of(linear: nn.Linear) -> Group | None:
    """The process group of a linear layer's collectives; None for a layer without any."""
    return linear.group if isinstance(linear, PartialLinear) else None


def row_parallel(linear: nn.Linear) -> RowParallelLinear | None:
    """The layer if its inputs are sharded; a fused op must then call `RowParallelLinear.sum`. None otherwise."""
    return linear if isinstance(linear, RowParallelLinear) else None
