"""The parameters of a layer whose weight is frozen and quantized, in any format of ``kernels/frozen/weight.py``.

The layer's parameter holds the codes, and the submodule ``stored`` holds the other tensors of the format, as bytes.
FSDP shards, gathers and offloads all of these tensors like other parameters, but without casts. For the formats NF4 and
float8, these tensors are::

    layer.weight             codes     NF4 [blocks, bytes of a block]    float8 [O, C]
    layer.stored.scales                NF4 [blocks, 1]                   float8 [O, bytes of the scales of a row]
    layer.stored.factors               NF4: factors, mean and table, [elements, bytes per element]

The matrices of routed experts are stored in the same way, with the experts in the first dimension. ``stored`` then
holds the tensors for ``gate_up_weight`` and for ``down_weight``, under these names::

    layer.gate_up_weight                     codes     NF4 [X, O, C / 2]    float8 [X, O, C]
    layer.stored.gate_up_weight.scales                 [X, bytes of an expert's scales]
    layer.stored.gate_up_weight.factors      ...       NF4 [X, bytes of an expert's factors]

If `apply_fsdp` can't give at least one expert to every rank, the codes are sharded along O instead of X.

`apply_fsdp` shards each tensor along its first dimension, and gathers all tensors before the weight is used, so the
weight does not depend on the number of ranks. After `apply_tp`, each rank uses its own slice without gathering.
After `apply_ep`, each rank uses its own experts. A slice never divides a block of elements that share a scale, so its
values are the same as in the whole weight.

When a checkpoint is loaded, each rank reads and quantizes only its part. In NF4, the scales of the whole weight are
quantized together. To do so, the ranks exchange the largest absolute value of each block of 64 elements.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels.frozen.weight import Format, FrozenWeight
from liger_models.layers.linear import is_sharded, local, sharded_as


class FrozenParameters(nn.Module):
    """The format and shape of a frozen weight, and parameters with the bytes of all its tensors (such as the scales)
    except the quantized codes.

    `freeze` adds an instance of this class to a layer. In all methods, the argument ``codes`` is the layer's parameter
    that holds the codes.

    Args:
        weight: the weight, with which the parameters share memory. If the layer is loaded later, the weight is on the
            meta device.
        like: a dense weight that `apply_ep` has sharded. ``weight`` then has only this rank's experts. If ``like`` is
            None, ``weight`` is the whole weight.
    """

    def __init__(self, weight: FrozenWeight, like: Tensor | None = None) -> None:
        super().__init__()
        self.format, self.layout, self.dtype = weight.format, list(weight.layout), weight.dtype
        self.shape = weight.shape if like is None else like.shape
        """Global (unsharded) shape of the weight: ``[O, C]``, or ``[X, O, C]`` for experts."""
        self.sharded: tuple[int, int] | None = None
        """Dimension along which `apply_tp` or `apply_ep` sharded the weight, and number of ranks; None if unsharded.
        """
        # `shard` may change the layout, and `apply_fsdp` the dtype. Quantizing again uses the original layout and
        # dtype.
        self._quantized_dtype, self._quantized_layout = weight.dtype, self.layout
        self._statistics: Tensor | None = None
        """[n, m], the statistics that `Format.quantize_part` returned for this rank; None after `finish`."""
        self._views: dict[str, tuple[torch.dtype, bool]] = {}
        """Maps the name of each tensor to (its dtype, whether it has one dimension)."""
        for name, parameter in self._as_parameters(self.format.pack(weight)).items():
            # `apply_ep` has sharded the dense weight, so the tensors of the frozen weight are sharded in the same way.
            if is_sharded(like) and name not in self.format.shared:
                self.sharded = 0, like.device_mesh.size()  # type: ignore[union-attr]
                whole = torch.Size([self.shape[0], *parameter.shape[1:]])
                parameter = nn.Parameter(sharded_as(like, parameter.detach(), whole), requires_grad=False)
            self.register_parameter(name, parameter)

    def _as_parameters(self, tensors: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        self._views = {name: (tensor.dtype, tensor.dim() == 1) for name, tensor in tensors.items()}
        return {name: nn.Parameter(_bytes_of(tensor), requires_grad=False) for name, tensor in tensors.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenParameters":
        """Implement ``model.to``: move the bytes, and change the dtype of the dequantized weight."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return the format, shape and dtype for ``print(model)``."""
        return f"{self.format.name}, {list(self.shape)}, dtype={self.dtype}"

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the weight, or of this rank's part of the weight after `apply_tp` or `apply_ep`."""
        sizes = list(self.shape)
        if self.sharded is not None:
            sizes[self.sharded[0]] //= self.sharded[1]
        return torch.Size(sizes)

    def join(self, codes: Tensor) -> FrozenWeight:
        """Return the weight as a `FrozenWeight`, which ops take. If FSDP has sharded the weight, it is gathered from
        all ranks. After `apply_tp` or `apply_ep`, the result is this rank's part."""
        # The device mesh has more dimensions if FSDP has also sharded the parameters. Such parameters are gathered
        # in the forward.
        if self.sharded is None or not is_sharded(codes) or codes.device_mesh.ndim > 1:  # type: ignore[attr-defined]
            return self.whole(codes)
        return self._weight_of({name: local(tensor) for name, tensor in self.tensors(codes).items()}, self.local_shape)

    def whole(self, codes: Tensor) -> FrozenWeight:
        """Return the whole weight as a `FrozenWeight`, gathered from all ranks if the weight is sharded."""
        return self.of_gathered({name: _whole(tensor) for name, tensor in self.tensors(codes).items()})

    def of_gathered(self, tensors: Mapping[str, Tensor]) -> FrozenWeight:
        """Return the whole weight as a `FrozenWeight`. The argument ``tensors`` has the weight's unsharded tensors,
        under the names that the method `tensors` gives them."""
        return self._weight_of(tensors, self.shape)

    def tensors(self, codes: Tensor) -> dict[str, Tensor]:
        """Return the parameters of the weight, including ``codes``, by the names that the format gives its tensors."""
        parameters: Any = {"codes": codes, **self._parameters}
        return {name: parameters[name] for name in self._views}

    def _weight_of(self, parameters: Mapping[str, Tensor], shape: torch.Size) -> FrozenWeight:
        # These are views of the bytes; nothing is copied.
        tensors = {name: parameters[name].view(dtype) for name, (dtype, _) in self._views.items()}
        tensors = {name: tensor.flatten() if self._views[name][1] else tensor for name, tensor in tensors.items()}
        return FrozenWeight(
            self.format, self.format.unpack(tensors, shape, self.layout), shape, self.layout, self.dtype
        )

    @torch.no_grad()
    def shard(self, layer: nn.Module, name: str, dim: int, ranks: int) -> dict[str, int]:
        """Prepare the parameters for sharding by `apply_tp` or `apply_ep`.

        Args:
            layer: the layer with the weight.
            name: name of the layer's parameter with the codes, including the path of the layer.
            dim: dimension along which the weight is sharded.
            ranks: number of slices.

        Returns:
            A dict from the path of each parameter that must be sharded to the dimension along which it is sharded.

        Raises:
            ValueError: a slice would end inside a block of elements that share a scale.
        """
        path, _, attribute = name.rpartition(".")
        # The elements of a block share a scale, so a slice must not end inside a block.
        *_, rows, columns = self.shape
        by_rows, by_columns = dim == len(self.shape) - 2, dim == len(self.shape) - 1
        if by_rows or by_columns:  # a slice of whole experts always has whole blocks
            size = rows * columns // ranks if by_rows else columns // ranks
            block = self.format.block(self.layout, rows=by_rows)
            rank_slice = f"{rows // ranks} rows of {columns} numbers" if by_rows else f"{size} of {columns} columns"
            if size % block != 0:
                raise ValueError(
                    f"apply_tp: each rank's slice of a quantized weight must have a multiple of {block} "
                    f"{'numbers' if by_rows else 'columns'}, which share a scale, got {rank_slice} of "
                    f"{name if len(self.shape) == 3 else path} on each of {ranks} ranks. Use fewer ranks for tensor "
                    f"parallelism, {self.format.remedy}, or apply_fsdp alone."
                )

        # Rearrange the tensors so that an equal split of each new parameter gives every rank its slice.
        tensors = self.format.pack(self.whole(getattr(layer, attribute)))
        tensors, self.layout, dims = self.format.slices(tensors, self.shape, self.layout, dim, ranks)
        parameters = self._as_parameters(tensors)
        setattr(layer, attribute, parameters.pop("codes"))
        for tensor_name, parameter in parameters.items():
            self.register_parameter(tensor_name, parameter)
        self.sharded = dim, ranks

        stored = f"{path}.stored" if attribute == "weight" else f"{path}.stored.{attribute}"
        return {
            name if tensor_name == "codes" else f"{stored}.{tensor_name}": dims[tensor_name] for tensor_name in dims
        }

    @torch.no_grad()
    def quantize(self, codes: Tensor, read: Callable[[int, int], Tensor]) -> None:
        """Quantize this rank's part of the weight. All ranks must call `finish` afterwards.

        Args:
            codes: the layer's parameter with the codes.
            read: function ``(first, last)`` that returns the rows ``first:last`` of the dense weight, [n, C]. For
                stacked experts, it returns the experts ``first:last``, [n, O, C].
        """
        first, count = offset_of(codes)[0], len(local(codes))

        # In some formats, the ranks quantize a matrix together: each rank computes its codes now. `finish` computes the
        # other tensors.
        if self.format.in_common and len(self.shape) == 2:
            numbers = self._numbers(codes, read)
            rank_codes, self._statistics = self.format.quantize_part(numbers, self._quantized_layout)
            local(codes).copy_(rank_codes.view(torch.uint8))
            return

        # A rank with whole experts quantizes all of them at once. A rank with a part of every expert reads and
        # quantizes one whole expert at a time. A rank without experts quantizes zeros, because it must still fill its
        # part of the tensors that all experts share.
        has_sliced_experts = len(self.shape) == 3 and local(codes).shape[1] < codes.shape[1]
        step = 1 if has_sliced_experts else max(count, 1)
        parameters: dict[str, Any] = {"codes": codes, **self._parameters}
        for start in range(first, first + max(count, 1), step):
            if count == 0:
                numbers = torch.zeros(1, *self.shape[1:], dtype=self._quantized_dtype, device=local(codes).device)
            else:
                numbers = read(start, start + step)
            weight = FrozenWeight.quantize(numbers.to(self._quantized_dtype), self.format.name)
            self._copy_own_part(parameters, weight, start)

    def _copy_own_part(self, parameters: dict[str, Any], weight: FrozenWeight, first: int = 0) -> None:
        """Copy this rank's part of the weight into the parameters. The argument ``weight`` may be a slice of the whole
        weight, which begins at the row (or expert) ``first``."""
        tensors = self.format.pack(weight)
        if self.sharded is not None:
            # Rearrange the tensors in the same way as the parameters, so that this rank's slice is contiguous.
            tensors, *_ = self.format.slices(tensors, weight.shape, list(weight.layout), *self.sharded)
        for name, parameter in parameters.items():
            target, source = local(parameter), _bytes_of(tensors[name])
            # Find the rows of the whole parameter at which the target and the source begin. In tensors that all experts
            # share, the first dimension does not index experts.
            target_first, *offsets = offset_of(parameter)
            source_first = 0 if name in self.format.shared else first

            # Copy the rows [start, end) that both source and target have. In the other dimensions, copy the indices
            # that the target has.
            start, end = max(target_first, source_first), min(target_first + len(target), source_first + len(source))
            if start >= end:
                continue
            target = target[start - target_first : end - target_first]
            source = source[start - source_first : end - source_first]
            for dim, offset in enumerate(offsets, 1):
                source = source.narrow(dim, offset, target.shape[dim])
            target.copy_(source)

    def _numbers(self, codes: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
        """Return the elements of the dense weight that belong to this rank's rows of ``codes``, [n, K].

        A row of codes covers contiguous elements of the dense weight or, if this rank has only some columns, contiguous
        elements of these columns. For example, a weight [4, 96] has 6 rows of codes if each row covers 64 elements.
        Rows 1 and 2 of the codes cover the elements 64 to 191. To get these elements, rows 0 and 1 of the weight are
        read, and the first 64 of the 192 elements in these rows are dropped.
        """
        # This rank has the rows ``first`` to ``first + count − 1`` of the codes, and ``width`` bytes of each row.
        (first, column), (count, width) = offset_of(codes), local(codes).shape
        columns, numbers_per_byte = self.shape[1], self.shape.numel() // codes.numel()
        # A row of the codes may cover more or fewer elements than a row of the dense weight has.
        row_numbers = codes.shape[1] * numbers_per_byte

        # Read the rows of the weight that have these elements. Parts of the first and last row may belong to other
        # ranks.
        first_number, num_numbers = first * row_numbers, count * row_numbers
        start, end = first_number // columns, -(-(first_number + num_numbers) // columns)
        numbers = read(start, end).to(self._quantized_dtype).flatten()
        numbers = numbers[first_number - start * columns :][:num_numbers].view(count, row_numbers)
        return numbers[:, column * numbers_per_byte : (column + width) * numbers_per_byte]

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the tensors for which `quantize` needs statistics of all ranks, such as the scales of NF4. Do nothing
        for formats without such tensors."""
        if self._statistics is None:
            return
        statistics, self._statistics = self._statistics, None

        # Gather the statistics of all ranks. They are sharded in the same way as the scales.
        sharded: Any = self.scales
        if is_sharded(sharded):
            own_bytes = statistics.view(torch.uint8).to(sharded.device_mesh.device_type)
            shape = torch.Size([len(sharded), sharded.shape[1] * statistics.itemsize])
            statistics = _whole(sharded_as(sharded, own_bytes, shape)).view(statistics.dtype)

        # The codes are already in the parameter, so a meta tensor takes their place.
        codes_shape, codes_dtype = self.format.tensors_like(self.shape, self.dtype)["codes"]
        tensors = (
            torch.empty(codes_shape, dtype=codes_dtype, device="meta"),
            *self.format.finish(statistics, self._quantized_layout),
        )
        weight = FrozenWeight(self.format, tensors, self.shape, self._quantized_layout, self.dtype)
        self._copy_own_part(self._parameters, weight)


def freeze(layer: nn.Module, name: str, weight: FrozenWeight) -> None:
    """Replace a layer's parameter by the codes of a frozen weight, and add the weight's other tensors as ``stored``.

    Args:
        layer: a linear layer, or a layer with routed experts.
        name: name of the parameter: "weight", or the name of the experts' matrices, which may be sharded by `apply_ep`.
        weight: the whole weight or, if the parameter is sharded, only this rank's experts.
    """
    former = layer._parameters.get(name)
    frozen = FrozenParameters(weight, former if is_sharded(former) else None)
    codes = frozen._parameters.pop("codes")
    if name == "weight":
        layer.stored = frozen
    else:
        stored: Any = layer._modules.get("stored") or nn.ModuleDict()
        stored[name] = frozen
        layer.stored = stored
    setattr(layer, name, codes)


def frozen_parts(layer: nn.Module) -> dict[str, FrozenParameters]:
    """Return the frozen weights of a layer as a dict, whose keys are the names of the parameters that hold the
    codes."""
    stored = layer._modules.get("stored")
    parts = {"weight": stored} if isinstance(stored, FrozenParameters) else getattr(stored, "_modules", {})
    return {name: frozen for name, frozen in parts.items() if isinstance(frozen, FrozenParameters)}


def frozen_weights(model: nn.Module) -> dict[str, FrozenParameters]:
    """Return the frozen weights of a model as a dict, whose keys are the full names of the parameters that hold the
    codes."""
    return {
        f"{path}.{name}": frozen
        for path, layer in model.named_modules()
        for name, frozen in frozen_parts(layer).items()
    }


@contextmanager
def dequantized_to(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager within which frozen weights are dequantized to ``dtype``."""
    dtypes = {frozen: frozen.dtype for frozen in frozen_weights(model).values()}
    try:
        for frozen in dtypes:
            frozen.dtype = dtype
        yield
    finally:
        for frozen, former in dtypes.items():
            frozen.dtype = former


def frozen_format(linear: nn.Linear) -> Format | None:
    """Return the format of a linear layer's frozen weight, which may be a torchao tensor; None for a dense weight."""
    frozen = frozen_parts(linear).get("weight")
    if frozen is not None:
        return frozen.format
    weight = None if type(linear.weight) in (nn.Parameter, Tensor) else FrozenWeight.of(linear.weight)
    return None if weight is None else weight.format


def dtype_of(linear: nn.Linear) -> torch.dtype:
    """Return the dtype of a layer's weight. If ``weight`` holds codes, this is the dtype of the dequantized weight."""
    frozen = frozen_parts(linear).get("weight")
    return linear.weight.dtype if frozen is None else frozen.dtype


def own_parameters(module: nn.Module) -> dict[nn.Parameter, int]:
    """Map each of a module's own parameters to its number of elements.

    For codes, this is the number of elements of the dense weight.
    """
    if isinstance(module, FrozenParameters):
        return {}
    frozen = frozen_parts(module)
    return {
        parameter: frozen[name].shape.numel() if name in frozen else parameter.numel()
        for name, parameter in module.named_parameters(recurse=False)
    }


def offset_of(parameter: Any) -> tuple[int, ...]:
    """For each dimension of a parameter, return the index at which this rank's part begins."""
    if not is_sharded(parameter):
        return (0,) * int(parameter.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    with torch.device("cpu"):  # PyTorch reads numbers from tensors that it creates on the default device
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(int(start) for start in offset)


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor as bytes. A tensor [rows] becomes [rows, bytes per element]. In any other tensor, the size of the
    last dimension is multiplied by the bytes per element."""
    tensor = tensor.detach()
    return (tensor[:, None] if tensor.dim() == 1 else tensor).contiguous().view(torch.uint8)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole
