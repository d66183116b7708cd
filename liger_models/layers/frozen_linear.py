"""Linear layers with a frozen, quantized weight, on one device and under tensor parallelism."""

from typing import ClassVar

from torch import Tensor, nn

from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.layers.frozen import FrozenParameters, freeze
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ColumnParallelLinear, PartialLinear, ReplicatedLinear, RowParallelLinear


class FrozenLinear(nn.Linear, Layer):
    """A linear layer with a frozen, quantized weight [O, C].

    Args:
        linear: the layer to replace, whose bias is kept.
        weight: the frozen weight.
    """

    is_low_rank = True
    """Tells `is_fusible` that fused ops can compute the layer. The ops take the weight as a `FrozenWeight`."""
    stored: FrozenParameters
    parallel_kinds: ClassVar[dict[type, type[PartialLinear]]] = {}
    """Maps each class of parallel linear layers to the derived class for a frozen weight. `PartialLinear.of` converts a
    `FrozenLinear` to this derived class."""

    def __init__(self, linear: nn.Linear, weight: FrozenWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        freeze(self, "weight", weight)
        self.bias = linear.bias

    @property
    def frozen_weight(self) -> FrozenWeight:
        """The weight as a `FrozenWeight`, the form in which ops take it."""
        return self.stored.join(self.weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias``."""
        return quantized_linear(x, self.frozen_weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., O]."""
        return self.product(x, self.bias)


class FrozenColumnParallelLinear(FrozenLinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with a frozen, quantized weight."""

    forward = ColumnParallelLinear.forward


class FrozenRowParallelLinear(FrozenLinear, RowParallelLinear):
    """`RowParallelLinear` with a frozen, quantized weight."""

    forward = RowParallelLinear.forward


class FrozenReplicatedLinear(FrozenLinear, ReplicatedLinear):
    """`ReplicatedLinear` with a frozen, quantized weight."""

    is_low_rank = False
    forward = ReplicatedLinear.forward


FrozenLinear.parallel_kinds = {
    ColumnParallelLinear: FrozenColumnParallelLinear,
    RowParallelLinear: FrozenRowParallelLinear,
    ReplicatedLinear: FrozenReplicatedLinear,
}
