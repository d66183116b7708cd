"""The frozen weight of a linear layer in fewer bits, as parameters of bytes, which FSDP shards and gathers as they are.

    layer.weight             codes    NF4 [blocks, bytes of a block]    float8 [O, C]
    layer.stored.scales               NF4 [blocks, 1]                   float8 [O, bytes of the scales of a row]
    layer.stored.factors              NF4: factors, mean and table, [numbers, bytes of one]

Each is sharded by its own rows. All are gathered before the weight is used, so that it is the same on any number of
ranks. A rank that reads its part of a checkpoint quantises that part alone. The scales of NF4 are quantised together:
the ranks exchange the largest number of each block, which is 1/64 of the weight.

Under tensor parallelism a rank uses its slice of the weight as it is, without gathering. The slice is made of whole
blocks, so its numbers are those of the weight. The slices of NF4 by columns have the parameters in another shape, and
mean and table, which every rank has, are a parameter of their own::

    layer.weight             [O, C / 2]
    layer.stored.scales      [O, C / 64]
    layer.stored.factors     [O, bytes of the factors of a row]
    layer.stored.constants   mean and table, [17, bytes of one]

If a slice has only a part of the scales of a factor, the factor is repeated for fewer scales.

The frozen matrices of routed experts are tensors of a kind of their own, `QuantizedExperts`. `apply_fsdp` alone turns
them into parameters of bytes, too, which are sharded by experts::

    layer.gate_up_weight                    codes    NF4 [X, O, C / 2]    float8 [X, O, C]
    layer.stored.gate_up_weight.scales               [X, bytes of an expert's scales], or for blocks [X, O, bytes]
    layer.stored.gate_up_weight.factors              NF4 [X, bytes of an expert's factors]
    layer.stored.gate_up_weight.means                NF4 [X, bytes of one]
    layer.stored.gate_up_weight.table                NF4 [16, bytes of one]
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import copy_to_region
from liger_models.kernels.frozen.nf4_linear import scales_per_factor
from liger_models.kernels.frozen.weight import QuantizedWeight, quantized_linear
from liger_models.kernels.moe.quantized import ATTRIBUTES, QuantizedExperts, quantize_experts
from liger_models.layers.layer import Layer
from liger_models.layers.linear import (
    ColumnParallelLinear,
    PartialLinear,
    ReplicatedLinear,
    RowParallelLinear,
    is_sharded,
    local,
    local_or_none,
    replicated,
    sharded_as,
)

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
        self.constants: nn.Parameter | None = None
        """Mean and table, where they are not the last of ``factors``."""
        self.sharded: tuple[int, int] | None = None
        """The dimension along which `apply_tp` has sharded the weight, and the number of ranks."""
        self._largest: Tensor | None = None
        if weight.factors is not None and weight.mean is not None and weight.table is not None:
            numbers = torch.cat([weight.factors, weight.mean.view(1), weight.table])
            self.own, self.factors = numbers.dtype, _as_bytes(numbers, len(numbers))
            self._per_factor = self.layout[3]  # as the scales are quantised

    @staticmethod
    def codes_of(weight: QuantizedWeight) -> nn.Parameter:
        """The parameter ``weight`` of the linear layer."""
        return _as_bytes(weight.codes, len(weight.codes if weight.factors is None else weight.scales))

    @property
    def has_blocks(self) -> bool:
        """Whether it is in float8 with the scales of a checkpoint, which is read as it is."""
        return self.factors is None and len(self.layout) == 3

    @property
    def is_float8(self) -> bool:
        """Whether it is in float8 with a scale for each row, and GPUs with float8 multiply in it."""
        return self.factors is None and not self.has_blocks

    @property
    def block(self) -> int:
        """Columns that share a scale if the weight `has_blocks`; 0 otherwise."""
        return self.layout[-1] if self.has_blocks else 0

    @property
    def shape(self) -> torch.Size:
        """``[O, C]``."""
        return torch.Size(self.layout[:2])

    def join(self, codes: Tensor) -> QuantizedWeight:
        """The weight as ops take it, from the parameter ``weight`` of the layer.

        It is gathered from all ranks if it is sharded, but by `apply_tp`, after which each rank uses its slice.
        """
        # Parameters that FSDP has sharded, too, have a dimension of the mesh more; in the forward they are gathered.
        if self.sharded is None or not is_sharded(codes) or codes.device_mesh.ndim > 1:  # type: ignore[attr-defined]
            return self.whole(codes)
        layout = [*self.layout]
        layout[self.sharded[0]] //= self.sharded[1]
        return self._join(local, codes, layout)

    def whole(self, codes: Tensor) -> QuantizedWeight:
        """As `join`, gathered from all ranks also after `apply_tp`."""
        return self._join(_whole, codes, self.layout)

    def _join(self, take: Callable[[Tensor], Tensor], codes: Tensor, layout: list[int]) -> QuantizedWeight:
        codes, scales = take(codes), take(self.scales)
        if self.factors is None:
            found = scales.view(self.own)
            found = found if self.has_blocks else found.flatten()
            return QuantizedWeight(codes.view(torch.float8_e4m3fn), found, None, None, None, layout, self.dtype)
        factors = take(self.factors).view(self.own).flatten()
        if self.constants is None:
            factors, constants = factors[: -TABLE - 1], factors[-TABLE - 1 :]
        else:
            constants = take(self.constants).view(self.own).flatten()
        return QuantizedWeight(
            codes.flatten(), scales.view(torch.int8).flatten(), factors, constants[0], constants[1:], layout, self.dtype
        )

    def parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight in float8, with their own dtypes; gathered from all ranks if sharded."""
        weight = self.whole(codes.detach())
        return weight.codes, weight.scales.detach()

    @torch.no_grad()
    def shard(self, path: str, layer: nn.Linear, dim: int, ranks: int) -> dict[str, int]:
        """Expect to be sharded by `apply_tp`, which then shards the parameters.

        Args:
            path: of the layer, for errors.
            layer: whose weight it is.
            dim: 0 for slices of rows, 1 for slices of columns.
            ranks: number of slices.

        Returns:
            As `Layer.shard`.

        Raises:
            ValueError: a slice would end within a block that shares a scale.
        """
        rows, columns, *blocks = self.layout
        own = [rows // ranks, columns] if dim == 0 else [rows, columns // ranks]
        nf4 = self.factors is not None
        check_blocks(path, [rows, columns], dim, ranks, blocks[0] if blocks and (nf4 or dim == 1) else 1, nf4)
        self.sharded = dim, ranks
        if self.factors is None:
            by_row = {"weight": dim, "stored.scales": dim}
            return by_row if dim == 0 or self.has_blocks else {"weight": dim}  # every rank has the scales of its rows
        numbers = self.factors.view(self.own).flatten()
        self.layout[3] = scales_per_factor(own, blocks[0], dim, self._per_factor)
        factors = numbers[: -TABLE - 1].repeat_interleave(self._per_factor // self.layout[3])
        self.constants = _as_bytes(numbers[-TABLE - 1 :], TABLE + 1)
        self.factors = _as_bytes(factors, rows if dim == 1 else len(factors))
        if dim == 1:
            layer.weight = _as_bytes(layer.weight, rows)
            self.scales = _as_bytes(self.scales, rows)
        return {"weight": dim, "stored.scales": dim, "stored.factors": dim}

    @torch.no_grad()
    def quantise(self, codes: Tensor, read: Callable[[int, int], Tensor]) -> None:
        """Quantise what this rank holds of a weight. `finish` must follow, on all ranks.

        Args:
            codes: the parameter ``weight`` of the layer.
            read: first row, last row + 1 -> these rows [n, C] of the dense weight.
        """
        import torchao.quantization as torchao

        (start, column), own = offset_of(codes), local(codes)
        count, (_, columns) = len(own), self.layout[:2]
        by_columns = self.sharded is not None and self.sharded[0] == 1
        if self.factors is None and count > 0:
            rows = QuantizedWeight.of_float8(torchao.Float8Tensor.from_hp(read(start, start + count)))
            own.copy_(self.codes_of(rows)[:, column : column + own.shape[1]])
            local(self.scales).copy_(_as_bytes(rows.scales, count))
        elif self.factors is not None:
            size = self.layout[2]
            if by_columns:
                numbers = read(start, start + count)[:, 2 * column : 2 * (column + own.shape[1])].to(self.own).flatten()
            else:
                first, last = start * size // columns, -(-(start + count) * size // columns)
                numbers = read(first, last).to(self.own).flatten()[start * size - first * columns :][: count * size]
            self._largest = numbers.view(-1, size).abs().amax(1)
            if count > 0:
                own.copy_(torchao.to_nf4(numbers, size, len(self._largest)).quantized_data.view(own.shape))

    @torch.no_grad()
    def finish(self) -> None:
        """Quantise the scales of NF4, which ranks do together."""
        if self._largest is None or self.factors is None:
            return
        largest, self._largest = self._largest, None
        if is_sharded(self.scales):
            sharded: Any = self.scales
            parts = largest.view(local(sharded).shape).view(torch.uint8).to(sharded.device_mesh.device_type)
            whole = sharded_as(sharded, parts, torch.Size([len(sharded), sharded.shape[1] * largest.itemsize]))
            largest = _whole(whole).view(self.own).flatten()
        mean = largest.mean()
        centred = (largest - mean).view(-1, self._per_factor)
        factors = 256 / (2 * centred.abs().amax(1))
        scales = (centred * factors[:, None]).round().clamp(-128, 127).to(torch.int8).flatten()
        numbers = [factors.repeat_interleave(self._per_factor // self.layout[3])]
        numbers.append(torch.cat([mean.view(1), nf4_table(factors)]))
        if self.constants is None:
            numbers = [torch.cat(numbers)]
        else:
            _copy_part(self.constants, numbers[1])
        _copy_part(self.scales, scales)
        _copy_part(self.factors, numbers[0])


class StoredExperts(StoredWeight):
    """Scales, factors, means and table of frozen matrices [X, O, C] of experts, in the submodule ``stored`` of a layer.

    Each expert is quantised by itself: a rank needs no others to quantise its experts.

    Args:
        weight: the matrices, whose tensors it shares; on the meta device for a layer that is to be loaded.
    """

    means: nn.Parameter | None
    table: nn.Parameter | None

    def __init__(self, weight: QuantizedExperts) -> None:
        nn.Module.__init__(self)
        self.layout, self.dtype = [*weight.shape, *([weight.block] if weight.block else [])], weight.dtype
        self.kinds = {name: each.dtype for name in ATTRIBUTES if (each := getattr(weight, name)) is not None}
        for name in ATTRIBUTES[1:]:
            each = getattr(weight, name)
            setattr(self, name, None if each is None else _bytes_of_rows(each))

    @staticmethod
    def codes_of(weight: QuantizedExperts) -> nn.Parameter:  # type: ignore[override]
        """The parameter of the layer."""
        return _bytes_of_rows(weight.codes)

    @property
    def has_blocks(self) -> bool:
        """As of `StoredWeight`."""
        return len(self.layout) == 4

    @property
    def shape(self) -> torch.Size:
        """``[X, O, C]``."""
        return torch.Size(self.layout[:3])

    def join(self, codes: Tensor) -> QuantizedExperts:  # type: ignore[override]
        """The matrices as ops take them, from the parameter of the layer; gathered from all ranks if it is sharded."""
        parts = {"codes": codes, **self._parameters}
        found = {name: _whole(parts[name]).view(kind) for name, kind in self.kinds.items()}
        found |= {name: found[name].flatten() for name in ("means", "table") if name in found}
        return QuantizedExperts.__tensor_unflatten__(found, (self.dtype, self.block))

    def whole(self, codes: Tensor) -> QuantizedExperts:  # type: ignore[override]
        """As `join`."""
        return self.join(codes)

    @torch.no_grad()
    def quantise(self, codes: Tensor, read: Callable[[int, int], Tensor]) -> None:
        """Quantise this rank's experts.

        Args:
            codes: the parameter of the layer.
            read: first expert, last expert + 1 -> their dense matrices [n, O, C].
        """
        start, count = offset_of(codes)[0], len(local(codes))
        if self.table is not None:
            table = nf4_table(torch.empty((), dtype=self.kinds["table"], device=local(self.table).device))
            _copy_part(self.table, table)
        if count == 0:
            return
        dense = read(start, start + count)
        made = quantize_experts(dense if self.table is None else dense.to(self.kinds["factors"]), self.kind)
        local(codes).copy_(_bytes_of_rows(made.codes))
        for name in ("scales", "factors", "means"):
            if name in self.kinds:
                local(getattr(self, name)).copy_(_bytes_of_rows(getattr(made, name)))

    @property
    def kind(self) -> str:
        """As of `QuantizedExperts`."""
        return "float8" if self.table is None else "nf4"

    def finish(self) -> None:
        """Nothing: no experts are quantised together."""


class StoredLinear(nn.Linear, Layer):
    """A linear layer with a frozen weight [O, C] in fewer bits.

    Args:
        linear: the layer that it replaces, whose bias it takes.
        weight: its weight.
    """

    is_low_rank = True
    """Fused ops take the weight, see `QuantizedWeight`."""
    parallel_kinds: ClassVar[dict[type, type[PartialLinear]]] = {}
    """Kind of parallel layer -> the class that `PartialLinear.of` converts the layer into."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.stored = StoredWeight.codes_of(weight), linear.bias, StoredWeight(weight)

    @property
    def is_float8(self) -> bool:
        """As of `StoredWeight`."""
        return self.stored.is_float8

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The weight as fused ops take it."""
        return self.stored.join(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O]."""
        return quantized_linear(x, self.quantized_weight, self.bias)


class StoredColumnParallelLinear(StoredLinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with a weight in fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        return quantized_linear(copy_to_region(x, self.group), self.quantized_weight, local_or_none(self.bias))


class StoredRowParallelLinear(StoredLinear, RowParallelLinear):
    """`RowParallelLinear` with a weight in fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I / R] of all tokens; the result has only this rank's tokens under sequence parallelism."""
        return self.sum(quantized_linear(x, self.quantized_weight))


class StoredReplicatedLinear(StoredLinear, ReplicatedLinear):
    """`ReplicatedLinear` with a weight in fewer bits."""

    is_low_rank = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] of all tokens, or of this rank's tokens under sequence parallelism."""
        bias = None if self.bias is None else replicated(self.bias, self.group)
        return quantized_linear(x, self.quantized_weight, bias)


StoredLinear.parallel_kinds = {
    ColumnParallelLinear: StoredColumnParallelLinear,
    RowParallelLinear: StoredRowParallelLinear,
    ReplicatedLinear: StoredReplicatedLinear,
}


def stored_weight(layer: nn.Module) -> StoredWeight | None:
    """The submodule ``stored`` of a linear layer; None for other layers."""
    found = layer._modules.get("stored")
    return found if isinstance(found, StoredWeight) else None


def dtype_of(linear: nn.Linear) -> torch.dtype:
    """The dtype of a layer's weight, also if the parameter ``weight`` holds codes."""
    stored = stored_weight(linear)
    return linear.weight.dtype if stored is None else stored.dtype


def stored_linears(model: nn.Module) -> list[StoredLinear]:
    """All of a model."""
    return [each for each in model.modules() if isinstance(each, StoredLinear)]


def stored_parts(layer: nn.Module) -> dict[str, StoredWeight]:
    """The stored weights of a layer, by the names of its parameters that hold their codes."""
    found = layer._modules.get("stored")
    if isinstance(found, StoredWeight):
        return {"weight": found}
    each = found._modules.items() if isinstance(found, nn.ModuleDict) else ()
    return {name: one for name, one in each if isinstance(one, StoredExperts)}


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """All of a model, by the names of the parameters that hold their codes."""
    found = ((path, stored_parts(layer)) for path, layer in model.named_modules())
    return {f"{path}.{name}": stored for path, parts in found for name, stored in parts.items()}


def has_blocks(parameter: Tensor, stored: StoredWeight | None) -> bool:
    """Whether a parameter is in float8 with the scales of a checkpoint: codes of ``stored``, or experts' matrices."""
    if stored is not None:
        return stored.has_blocks
    own = local(parameter)
    return isinstance(own, QuantizedExperts) and own.block > 0


def own_parameters(module: nn.Module) -> dict[nn.Parameter, int]:
    """A module's own parameters, and the number of elements of each: of one that holds codes, those of the weight."""
    stored, found = stored_parts(module), {}
    for name, each in module.named_parameters(recurse=False):
        if not isinstance(module, StoredWeight):
            found[each] = stored[name].shape.numel() if name in stored else each.numel()
    return found


def nf4_table(like: Tensor) -> Tensor:
    """The numbers of the codes of NF4 [16], as torchao has them, in the dtype and on the device of ``like``."""
    numbers = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    numbers += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def _as_bytes(values: Tensor, rows: int) -> nn.Parameter:
    """The bytes of a tensor [rows, ...] or, in as many parts, of a flat one: [rows, bytes of one]."""
    return nn.Parameter(values.detach().reshape(rows, -1).view(torch.uint8), requires_grad=False)


def _bytes_of_rows(values: Tensor) -> nn.Parameter:
    """The bytes of a tensor [rows, ...], which keeps its dimensions; of a flat one: [rows, bytes of one]."""
    values = values.detach()
    return nn.Parameter((values[:, None] if values.dim() == 1 else values).view(torch.uint8), requires_grad=False)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def offset_of(parameter: Any) -> tuple[int, ...]:
    """Where this rank's part of a parameter starts in each dimension."""
    if not is_sharded(parameter):
        return (0,) * int(parameter.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(int(each) for each in offset)


def _copy_part(parameter: Tensor, values: Tensor) -> None:
    """Copy this rank's part of a tensor into a parameter that holds its bytes."""
    (row, column), own = offset_of(parameter), local(parameter)
    rows = _as_bytes(values, len(parameter))[row : row + len(own)]
    own.copy_(rows[:, column : column + own.shape[1]])


def check_blocks(path: str, shape: Sequence[int], dim: int, ranks: int, block: int, nf4: bool) -> None:
    """Raise ValueError unless each rank's slice of a matrix [O, C] has whole blocks that share a scale.

    Args:
        path: of the layer or of the parameter, for the error.
        shape: of the matrix.
        dim: 0 for slices of rows, 1 for slices of columns.
        ranks: number of slices.
        block: numbers of a block, which go over the ends of rows if ``nf4``.
        nf4: whether the matrix is in NF4.
    """
    count = math.prod(shape) // ranks if dim == 0 else shape[1] // ranks
    what = f"{shape[0] // ranks} rows of {shape[1]} numbers" if dim == 0 else f"{count} of {shape[1]} columns"
    other = 'dtype="float8" in quantize_base' if nf4 else "keep_float8=False"
    if count % block != 0:
        raise ValueError(
            f"apply_tp: each rank's slice of a quantised weight must have a multiple of {block} "
            f"{'numbers' if dim == 0 else 'columns'}, which share a scale, got {what} of {path} on each of {ranks} "
            f"ranks. Use fewer ranks for tensor parallelism, {other}, or apply_fsdp alone."
        )
