"""The frozen weight of a linear layer in fewer bits, as parameters of bytes, which FSDP shards and gathers as they are.

    layer.weight             codes    NF4 [blocks, bytes of a block]    float8 [O, C]
    layer.stored.scales               NF4 [blocks, 1]                   float8 [O, bytes of the scales of a row]
    layer.stored.factors              NF4: factors, mean and table, [numbers, bytes of one]

Each is sharded by its own rows. All are gathered before the weight is used, so that it is the same on any number of
ranks. A rank that reads its part of a checkpoint quantises that part alone. The scales of NF4 are quantised together:
the ranks exchange the largest number of each block, which is 1/64 of the weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels.quantized_weight import QuantizedWeight, quantized_linear
from liger_models.layers.layer import Layer
from liger_models.layers.linear import is_sharded, local, sharded_as

TABLE = 16
"""Number of different codes of NF4."""


class StoredWeight(nn.Module):
    """What a frozen weight [O, C] has besides its codes, as the submodule ``stored`` of its linear layer.

    Args:
        weight: the weight, whose tensors it shares; on the meta device for a layer that is to be loaded.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.layout, self.dtype = list(weight.layout), weight.dtype
        self.scales = _as_bytes(weight.scales, len(weight.scales))
        self.own = weight.scales.dtype
        self.factors: nn.Parameter | None = None
        self._largest: Tensor | None = None
        if weight.factors is not None and weight.mean is not None and weight.table is not None:
            numbers = torch.cat([weight.factors, weight.mean.view(1), weight.table])
            self.own, self.factors = numbers.dtype, _as_bytes(numbers, len(numbers))

    @staticmethod
    def codes_of(weight: QuantizedWeight) -> nn.Parameter:
        """The parameter ``weight`` of the linear layer."""
        return _as_bytes(weight.codes, len(weight.codes if weight.factors is None else weight.scales))

    @property
    def has_blocks(self) -> bool:
        """Whether it is in float8 with the scales of a checkpoint, which is read as it is."""
        return self.factors is None and len(self.layout) == 3

    @property
    def shape(self) -> torch.Size:
        """``[O, C]``."""
        return torch.Size(self.layout[:2])

    def join(self, codes: Tensor) -> QuantizedWeight:
        """The weight as ops take it, from the parameter ``weight`` of the layer; gathered from all ranks if sharded."""
        codes, scales = _whole(codes), _whole(self.scales)
        if self.factors is None:
            found = scales.view(self.own)
            found = found if self.has_blocks else found.flatten()
            return QuantizedWeight(codes.view(torch.float8_e4m3fn), found, None, None, None, self.layout, self.dtype)
        numbers = _whole(self.factors).view(self.own).flatten()
        return QuantizedWeight(
            codes.flatten(), scales.view(torch.int8).flatten(), numbers[: -TABLE - 1], numbers[-TABLE - 1],
            numbers[-TABLE:], self.layout, self.dtype,
        )  # fmt: skip

    def parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight in float8, with their own dtypes; gathered from all ranks if sharded."""
        weight = self.join(codes.detach())
        return weight.codes, weight.scales.detach()

    @torch.no_grad()
    def quantise(self, codes: Tensor, read: Callable[[int, int], Tensor]) -> None:
        """Quantise what this rank holds of a weight. `finish` must follow, on all ranks.

        Args:
            codes: the parameter ``weight`` of the layer.
            read: first row, last row + 1 -> these rows [n, C] of the dense weight.
        """
        import torchao.quantization as torchao

        start, own = first_row(codes), local(codes)
        count, (_, columns) = len(own), self.layout[:2]
        if self.factors is None and count > 0:
            rows = QuantizedWeight.of_float8(torchao.Float8Tensor.from_hp(read(start, start + count)))
            own.copy_(self.codes_of(rows))
            local(self.scales).copy_(_as_bytes(rows.scales, count))
        elif self.factors is not None:
            size = self.layout[2]
            first, last = start * size // columns, -(-(start + count) * size // columns)
            numbers = read(first, last).to(self.own).flatten()[start * size - first * columns :][: count * size]
            self._largest = numbers.view(count, size).abs().amax(1)
            if count > 0:
                own.copy_(torchao.to_nf4(numbers, size, count).quantized_data.view(count, -1))

    @torch.no_grad()
    def finish(self) -> None:
        """Quantise the scales of NF4, which ranks do together."""
        if self._largest is None or self.factors is None:
            return
        per_factor, largest, self._largest = self.layout[3], self._largest, None
        if is_sharded(self.scales):
            sharded: Any = self.scales
            parts = _as_bytes(largest, len(largest)).to(sharded.device_mesh.device_type)
            whole = sharded_as(sharded, parts, torch.Size([len(sharded), largest.itemsize]))
            largest = _whole(whole).view(self.own).flatten()
        mean = largest.mean()
        centred = (largest - mean).view(-1, per_factor)
        factors = 256 / (2 * centred.abs().amax(1))
        scales = (centred * factors[:, None]).round().clamp(-128, 127).to(torch.int8).flatten()
        numbers = torch.cat([factors, mean.view(1), nf4_table(factors)])
        for parameter, values in ((self.scales, scales), (self.factors, numbers)):
            start, own = first_row(parameter), local(parameter)
            own.copy_(_as_bytes(values, len(values))[start : start + len(own)])


class StoredLinear(nn.Linear, Layer):
    """A linear layer with a frozen weight [O, C] in fewer bits.

    Args:
        linear: the layer that it replaces, whose bias it takes.
        weight: its weight.
    """

    is_low_rank = True
    """Fused ops take the weight, see `QuantizedWeight`."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.stored = StoredWeight.codes_of(weight), linear.bias, StoredWeight(weight)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The weight as fused ops take it."""
        return self.stored.join(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O]."""
        return quantized_linear(x, self.quantized_weight, self.bias)


def stored_weight(layer: nn.Module) -> StoredWeight | None:
    """The submodule ``stored`` of a linear layer; None for other layers."""
    found = layer._modules.get("stored")
    return found if isinstance(found, StoredWeight) else None


def stored_linears(model: nn.Module) -> list[StoredLinear]:
    """All of a model."""
    return [each for each in model.modules() if isinstance(each, StoredLinear)]


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """All of a model, by the names of the parameters that hold their codes."""
    found = ((path, stored_weight(layer)) for path, layer in model.named_modules())
    return {f"{path}.weight": stored for path, stored in found if stored is not None}


def own_parameters(module: nn.Module) -> dict[nn.Parameter, int]:
    """A module's own parameters, and the number of elements of each: of one that holds codes, those of the weight."""
    stored, found = stored_weight(module), {}
    for name, each in module.named_parameters(recurse=False):
        if not isinstance(module, StoredWeight):
            found[each] = each.numel() if stored is None or name != "weight" else stored.shape.numel()
    return found


def nf4_table(like: Tensor) -> Tensor:
    """The numbers of the codes of NF4 [16], as torchao has them, in the dtype and on the device of ``like``."""
    numbers = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    numbers += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def _as_bytes(values: Tensor, rows: int) -> nn.Parameter:
    """The bytes of a tensor [rows, ...] or, in as many parts, of a flat one: [rows, bytes of one]."""
    return nn.Parameter(values.detach().reshape(rows, -1).view(torch.uint8), requires_grad=False)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def first_row(parameter: Any) -> int:
    """The first row of this rank's part of a parameter."""
    if not is_sharded(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])
