"""Functions that read one rank's shard of a parameter.

These functions read only the checkpoint rows that the shard needs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from einops import EinopsError
from torch import Tensor

from liger_models.convert.weight_map import Cat, Expression, Name, Rearrange, Split, Stack, _same_dtype
from liger_models.layers.frozen import FrozenParameters, offset_of
from liger_models.layers.linear import local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MAX_RUNS = 64
"""Maximum number of contiguous runs of rows in a tensor that are read separately.

If there are more runs, all rows from the first to the last are read at once.
"""


class Part(NamedTuple):
    """The offset and the length of a rank's shard of a parameter along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Any) -> "Part":
        """Return the calling rank's part of a parameter: its shard of a DTensor, or all of any other tensor."""
        return cls(offset_of(parameter), tuple(local(parameter).shape))


class Rows(NamedTuple):
    """The rows of the checkpoint's tensors that form a shard of a parameter, and their order in the shard.

    Attributes:
        runs: maps the name of a tensor to its contiguous runs of rows, in order. A run is (first row, last row + 1).
        units: number of trailing dimensions that the parameter's expression in the weight map does not change. A slice
            spans these dimensions, and the expression moves each slice as a whole.
        order: [n] int64, the index of each slice of the shard among the slices that are read; None if the slices are
            read in the order of the shard.
    """

    runs: Mapping[str, list[tuple[int, int]]]
    units: int
    order: Tensor | None


def gather_to(rank: int, tensor: "DTensor") -> Tensor | None:
    """Gather a DTensor on one rank. Every rank of the default process group must call this function.

    Args:
        rank: the rank in the default process group that gets the tensor.
        tensor: a DTensor that is sharded or replicated over any mesh. A rank whose mesh does not contain ``rank``
            sends nothing.

    Returns:
        On ``rank``, the unsharded tensor on the device of the mesh. On all other ranks, None; these ranks need no
        memory for the unsharded tensor.
    """
    mesh, me = tensor.device_mesh, dist.get_rank()
    shard = tensor.to_local().detach().to(mesh.device_type).contiguous()
    parts = _parts_to(rank, tensor.shape, mesh, tensor.placements)
    if parts is None:
        everywhere: Any = tensor.to(mesh.device_type)
        whole: Tensor = everywhere.full_tensor()
        return whole if me == rank else None

    # All ranks send their parts to one rank in one exchange. The parts are sent as bytes, because backends do not
    # support all dtypes.
    sent, received = [0] * dist.get_world_size(), [0] * dist.get_world_size()
    sends = me in parts
    if sends:
        sent[rank] = shard.nbytes
    if me == rank:
        received = [math.prod(parts[r].shape) * shard.itemsize if r in parts else 0 for r in range(len(received))]
    out = torch.empty(sum(received), dtype=torch.uint8, device=shard.device)
    data = shard.flatten().view(torch.uint8) if sends else out[:0]
    dist.all_to_all_single(out, data, received, sent)
    if me != rank:
        return None
    gathered = torch.empty(tensor.shape, dtype=shard.dtype, device=shard.device)
    for sender, piece in enumerate(out.split(received)):
        if sender in parts:
            target, part = gathered, parts[sender]
            for dim, (start, size) in enumerate(zip(*part, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(piece.view(shard.dtype).view(part.shape))
    return gathered


@functools.lru_cache(maxsize=256)  # equal layers have equal results
def _parts_to(rank: int, shape: torch.Size, mesh: Any, placements: Any) -> dict[int, Part] | None:
    """Return the parts of a DTensor that are sent to ``rank``, as a dict from the sending rank to its part.

    If several ranks hold equal parts, only one of them is a sender. The result is None if a dimension is sharded twice
    and unevenly, because PyTorch computes wrong offsets for such shards.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # slow to import

    along: dict[int, int] = {}  # dimension -> number of its shards
    dims = [getattr(placement, "dim", None) for placement in placements]
    for dim, size in zip(dims, mesh.shape, strict=True):
        if dim is not None:
            along[dim] = along.get(dim, 1) * size
    if any(dims.count(dim) > 1 and shape[dim] % shards != 0 for dim, shards in along.items()):
        return None
    senders: dict[Part, int] = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        member = int(mesh.mesh[coordinate])
        size, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), placements)
        part = Part(tuple(offset), tuple(size))
        if math.prod(part.shape) > 0 and (part not in senders or member == rank):
            senders[part] = member
    members = mesh.mesh.flatten().tolist()
    return {sender: part for part, sender in senders.items()} if rank in members else {}


def fill_part(
    parameter: Tensor,
    frozen: FrozenParameters | None,
    expression: Expression,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str, int, int], Tensor],
    read_whole: Callable[[], Tensor],
) -> None:
    """Read this rank's shard into a parameter. If the parameter holds the codes of a quantized weight, call
    `FrozenParameters.finish` afterwards.

    Args:
        parameter: a DTensor, or the codes of ``frozen``.
        frozen: the other tensors of the quantized weight; None for a dense parameter.
        expression, shapes, read, read_whole: arguments of `read_part` for the dense parameter.
    """

    def rows(first: int, last: int) -> Tensor:
        assert frozen is not None
        shape = last - first, *frozen.shape[1:]
        part = Part((first, *[0] * (len(shape) - 1)), shape)
        return read_part(expression, part, shapes, read, read_whole)

    if frozen is None:
        local(parameter).copy_(read_part(expression, Part.of(parameter), shapes, read, read_whole))
    else:
        frozen.quantize(parameter, rows)


def read_part(
    expression: Expression,
    part: Part,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str, int, int], Tensor],
    read_whole: Callable[[], Tensor],
) -> Tensor:
    """Read a shard of a parameter. If the expression moves whole rows, only the rows of the shard are read.

    Args:
        expression: the parameter's expression in the weight map.
        part: the shard to read.
        shapes: the shape of each tensor of the expression, by name.
        read: function that takes the name of a tensor, the first row and the last row + 1, and returns these rows in
            the final dtype on the final device.
        read_whole: function that returns the whole parameter. It is called if the expression splits rows.

    Returns:
        A tensor of shape ``part.shape``.
    """
    first, last = part.offset[0], part.offset[0] + part.shape[0]
    rows, planned = plan_rows(expression, part, shapes), 1
    if rows is None and keeps_rows(expression):
        # Row i of the parameter consists of row i of each tensor.
        shard = expression.pack({name: read(name, first, last) for name in expression.names()})
    elif rows is None:
        shard = read_whole()[first:last]
    else:
        # Read runs of rows, flatten them to slices, and bring the slices into the order of the parameter.
        pieces = [read(name, *run) for name, runs in rows.runs.items() for run in runs]
        if not pieces:
            pieces = [read(name, 0, 0) for name in expression.names()[:1]]
        pieces = [piece.reshape(-1, *piece.shape[piece.dim() - rows.units :]) for piece in pieces]
        shard = torch.cat(_same_dtype(expression, pieces)) if len(pieces) > 1 else pieces[0]
        if rows.order is not None:
            shard = shard[rows.order.to(shard.device)]
        planned = len(part.shape) - rows.units
        shard = shard.reshape(*part.shape[:planned], *shape_of(expression, shapes)[planned:])

    # All other dimensions were read completely. Select this rank's part of these dimensions.
    for dim in range(planned, len(part.shape)):
        shard = shard.narrow(dim, part.offset[dim], part.shape[dim])
    return shard


def moves_rows(expression: Expression, weight: Tensor) -> bool:
    """Return whether a weight [O, C] or [X, O, C] consists of whole rows of the checkpoint's matrices.

    The result is False for a patch embedding, which is stored as a convolution.
    """
    # Unpack a weight with one element per row. If rows stay whole, the results also have one element per row.
    rows = weight.new_empty(len(weight)) if weight.dim() == 2 else weight.new_empty(*weight.shape[:2], 1)
    try:
        parts = expression.unpack(rows).values()
        return all(part.dim() == 1 if rows.dim() == 1 else part.shape[-1] == 1 for part in parts)
    except (EinopsError, IndexError):
        return False


def keeps_rows(expression: Expression) -> bool:
    """Return whether every row ``i`` of a parameter consists of the elements in row ``i`` of its checkpoint tensors.

    Within a row, the elements may be in any order.
    """
    if expression.by_rows:
        return True
    if not isinstance(expression, Rearrange) or not isinstance(expression.child, Name):
        return False
    theirs, ours = (_axes(side)[0] for side in expression.pattern.split("->"))
    return theirs == ours and "(" not in ours


def shape_of(expression: Expression, shapes: Mapping[str, Sequence[int]]) -> torch.Size:
    """Return the shape of the parameter that an expression describes."""
    return expression.pack({name: torch.empty(shapes[name], device="meta") for name in expression.names()}).shape


def plan_rows(expression: Expression, part: Part, shapes: Mapping[str, Sequence[int]]) -> Rows | None:
    """Return which rows of the checkpoint's tensors make up a shard of a parameter.

    To find these rows, the function gives each row of the checkpoint a number, and packs tensors of these numbers in
    the same way as the weights. The shard of the packed tensor then contains the numbers of the rows that form the
    shard of the parameter.

    Args:
        expression: the parameter's expression in the weight map.
        part: the shard. Its last dimension is treated as unsharded.
        shapes: maps the name of each tensor of the expression to its shape.

    Returns:
        The rows, or None if the expression leaves no trailing dimension unchanged or if a tensor is a scalar.
    """
    # Trailing dimensions stay together if the expression leaves them unchanged and they are not sharded.
    ndim, whole = len(part.shape), shape_of(expression, shapes)
    sharded = max((dim for dim in range(ndim) if part.shape[dim] != whole[dim]), default=0)
    units = min(untouched(expression, ndim, shapes), ndim - 1, *(len(shapes[name]) - 1 for name in expression.names()))
    if units < 0 or (units == 0 and ndim > 1):
        return None
    units = min(units, max(ndim - 1 - sharded, 1))

    # Number the slices of all tensors, one after the other.
    numbers, starts, count = {}, {}, 0
    for name in expression.names():
        lead = list(shapes[name][: len(shapes[name]) - units])
        starts[name] = count
        end = count + math.prod(lead)
        numbers[name] = torch.arange(count, end, device="cpu").view(*lead, *[1] * units)
        count = end
    required = expression.pack(numbers)
    for dim in range(ndim - units):
        required = required.narrow(dim, part.offset[dim], part.shape[dim])
    required = required.flatten()

    # For each tensor, find the runs of rows that contain required slices, and the numbers of all slices in these runs.
    runs: dict[str, list[tuple[int, int]]] = {}
    available = []
    for name, start in starts.items():
        size = numbers[name].numel()
        inside = required[(required >= start) & (required < start + size)] - start
        if not len(inside):
            continue

        # A run ends if the next row is not required.
        row_slices = size // shapes[name][0]
        rows = (inside // row_slices).unique()
        gaps = (rows.diff() > 1).nonzero().flatten()
        if len(gaps) >= MAX_RUNS:
            gaps = gaps[:0]
        lows = torch.cat([rows[:1], rows[gaps + 1]]).tolist()
        highs = (torch.cat([rows[gaps], rows[-1:]]) + 1).tolist()
        runs[name] = list(zip(lows, highs, strict=True))
        available += [
            torch.arange(start + low * row_slices, start + high * row_slices, device="cpu") for low, high in runs[name]
        ]
    if not available:
        return Rows({}, units, None)

    # Find the index of each required slice among the slices that are read. The numbers of the read slices ascend.
    slices = torch.cat(available)
    return Rows(runs, units, None if torch.equal(slices, required) else torch.searchsorted(slices, required))


def matrix_rows(expression: Expression, shape: Sequence[int]) -> list[Tensor]:
    """Find the rows of a parameter that belong to each matrix of the checkpoint.

    To find these rows, the function gives each row of the parameter a number, and unpacks a tensor of these numbers in
    the same way as the parameter. Each unpacked matrix then contains the numbers of the rows that belong to it.

    Args:
        expression: the parameter's expression in the weight map.
        shape: shape of the parameter, [N, K] or, for a stack of experts, [X, N, K].

    Returns:
        A list of tensors [k, n] int64. Each tensor covers the ``k`` matrices that have ``n`` rows, and row ``i`` of the
        tensor holds the row numbers of the ``i``-th of these matrices. The row numbers count the rows of the parameter
        after its leading dimensions are flattened. Each row is in exactly one matrix. If the matrices do not consist of
        whole rows of the parameter, the parameter is treated as one matrix or, for a stack of experts, as X matrices.
    """
    numbers = torch.arange(math.prod(shape[:-1]), device="cpu").view(*shape[:-1], 1)
    if len(shape) == 3:
        unpacked = expression.unpack(numbers).values()  # [X, n, 1], transposed, or [n, 1] of each expert
        matrices = [rows.flatten() for tensor in unpacked for rows in (tensor if tensor.dim() == 3 else [tensor])]
    else:
        matrices = [tensor.flatten(1)[:, 0] for tensor in expression.unpack(numbers.expand(*shape)).values()]

    # If the matrices consist of whole rows, each number appears exactly once.
    if not torch.equal(torch.cat(matrices).sort().values, numbers.flatten()):
        return [numbers.view(-1, shape[-2])]

    by_size: dict[int, list[Tensor]] = {}
    for rows in matrices:
        by_size.setdefault(len(rows), []).append(rows)
    return [torch.stack(rows) for rows in by_size.values()]


def untouched(expression: Expression, ndim: int, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many trailing dimensions of a tensor with ``ndim`` dimensions the expression leaves unchanged."""
    match expression:
        case Name():
            return ndim
        case Cat():
            return min(ndim - 1 - expression.dim, *(untouched(child, ndim, shapes) for child in expression.children))
        case Stack():
            children = (untouched(child, ndim - 1, shapes) for child in expression.children)
            return min(ndim - 1 - expression.dim, *children)
        case Split() if isinstance(expression.child, Name):
            theirs = len(shapes[expression.child.name])
            return min(theirs - 1 - expression.dim, untouched(expression.parts, ndim, shapes))
        case Rearrange():
            theirs_axes, ours_axes = (_axes(side) for side in expression.pattern.split("->"))
            dots = ndim - len(ours_axes) + 1  # dimensions that "..." stands for
            # Count the axes that are the same on both sides, starting with the last one.
            unchanged = 0
            for their_axis, our_axis in zip(reversed(theirs_axes), reversed(ours_axes), strict=False):
                if their_axis != our_axis or "(" in their_axis:
                    break
                unchanged += dots if their_axis == "..." else 1
            theirs = len(theirs_axes) + (dots - 1 if "..." in theirs_axes else 0)
            return min(unchanged, untouched(expression.child, theirs, shapes))
    return 0


def _axes(side: str) -> list[str]:
    """Return the axes on one side of an einops pattern. A group in parentheses is one axis."""
    axes: list[str] = []
    depth = 0
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if depth:
            axes[-1] += f" {token}"
        else:
            axes.append(token)
        depth += {"(": 1, ")": -1}.get(token, 0)
    return axes
