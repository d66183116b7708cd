"""Linear layers for tensor parallelism, and access to the local shards of weights.

A layer that can be sharded implements `Layer.shard`, which turns the layer into one rank's shard and returns the
dimension along which each parameter is sharded. `liger_models.parallel.apply_tp` then shards these parameters and
replicates all others. All parameters become DTensors, so code that reads a parameter directly must call `local`. If
each rank computes the gradient of a replicated parameter only from its own tokens, the code must call `replicated`
instead.

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
    """Whether a weight is a DTensor, of which `local` returns this rank's shard."""
    if type(weight) in (nn.Parameter, Tensor):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build of PyTorch

    return isinstance(weight, DTensor)


def local(weight: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged."""
    part: Tensor = weight.to_local() if is_sharded(weight) else weight  # type: ignore[attr-defined]
    return part


def sharded_as(like: Any, part: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Make a tensor from this rank's shard, with the device mesh and placements of ``like``.

    If ``like`` is not a DTensor, the result is ``part`` itself.

    Args:
        like: any tensor.
        part: this rank's shard.
        shape: global (unsharded) shape of the result; by default the shape of ``like``.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # slow to import

    stride = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    shape = like.shape if shape is None else shape
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter. If the parameter is sharded, each rank's shard gets its part of the first rank's
    ``values``."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor  # slow to import

        sharded: Any = parameter
        values = distribute_tensor(values.to(parameter.dtype), sharded.device_mesh, sharded.placements)
    parameter.copy_(values)


def local_or_none(weight: Tensor | None) -> Tensor | None:
    """Return `local` of a bias, or None if there is no bias."""
    return None if weight is None else local(weight)


def replicated(weight: Tensor, group: Group | None) -> Tensor:
    """Return a replicated weight.

    If the ranks have different tokens, the weight's gradient is summed over the ranks.
    """
    return sum_gradient(local(weight), group) if group is not None and group.sequence_parallel else local(weight)


def check_divisible(where: str, name: str, count: int, group: Group, more: str = ".") -> None:
    """Raise ValueError unless ``count`` is a multiple of the number of ranks. The error message ends with ``more``."""
    if count % group.size != 0:
        raise ValueError(f"{where}: {name} ({count}) must be a multiple of {group.size} ranks{more}")


class PartialLinear(nn.Linear, Layer):
    """Base class of linear layers with collectives in their forward."""

    group: Group | None
    """The process group of the collectives; None for no communication."""

    @classmethod
    def of(cls, linear: nn.Linear, group: Group | None) -> "Self":
        """Convert a linear layer to this class, reusing the layer's parameters.

        Args:
            linear: an `nn.Linear`, or a layer (with adapters or a frozen weight) whose ``parallel_kinds`` has this
                class as a key.
            group: the process group of the collectives; None for no communication.

        Raises:
            ValueError: ``linear`` is any other module, or has hooks.
        """
        # A layer with adapters or a frozen weight is converted to a parallel class that keeps them. The layer's
        # `parallel_kinds` lists this class.
        kinds: dict[type, Any] = {cls: cls} if type(linear) is nn.Linear else getattr(linear, "parallel_kinds", {})
        if cls not in kinds or (linear._forward_hooks or linear._forward_pre_hooks):
            raise ValueError(
                f"{cls.__name__}: the layer must be an nn.Linear without hooks, got {type(linear).__name__}. Shard the "
                "model first, and do not wrap or replace its linear layers, except by apply_lora."
            )
        # The new layer takes over all attributes, so the parameters stay the same objects for an optimizer.
        layer: Self = kinds[cls].__new__(kinds[cls])
        layer.__dict__ = dict(linear.__dict__)
        layer.group = group
        return layer

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias`` with this rank's shard of the weight."""
        return F.linear(x, local(self.weight), bias)

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because the forward already makes sure that gradients of replicated parameters
        are summed."""
        return True


class ColumnParallelLinear(PartialLinear):
    """A linear layer whose output features are sharded over R ranks: [..., C] -> [..., O / R] for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        return self.product(copy_to_region(x, self.group), local_or_none(self.bias))


class RowParallelLinear(PartialLinear):
    """A linear layer whose input features are sharded over R ranks: [..., I / R] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I / R] of all tokens to [..., O] of all tokens.

        Under sequence parallelism, the result has only this rank's tokens.
        """
        return self.sum(self.product(x, None))

    def sum(self, parts: Tensor) -> Tensor:
        """Sum the partial products of all ranks, and add the bias."""
        # The bias is added after the sum, so that it is added only once.
        y = reduce_from_region(parts, self.group)
        return y if self.bias is None else y + replicated(self.bias, self.group).to(y.dtype)


class ReplicatedLinear(PartialLinear):
    """A replicated linear layer in a model with sharded layers: [..., C] -> [..., O]."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias``. If the ranks have different tokens, the backward sums the gradient of W over the
        ranks."""
        return F.linear(x, replicated(self.weight, self.group), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        return self.product(x, None if self.bias is None else replicated(self.bias, self.group))


def ranks_of(linear: nn.Linear) -> Group | None:
    """Return the process group of a linear layer's collectives; None for a layer without collectives."""
    return linear.group if isinstance(linear, PartialLinear) else None


def row_parallel(linear: nn.Linear) -> RowParallelLinear | None:
    """Return the layer itself if its input features are sharded over ranks; otherwise return None.

    A fused op that reads the weight of such a layer computes only this rank's partial product. The caller of the op
    must pass the partial product to `RowParallelLinear.sum`.
    """
    return linear if isinstance(linear, RowParallelLinear) else None
