"""One rank's part of a checkpoint: which rows of its tensors a part of a parameter is made of."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from liger_models.convert.weight_map import Cat, Expression, Name, Rearrange, Split, Stack, _same_dtype

MAX_RUNS = 64
"""Of rows that are not neighbours in a tensor; beyond it all between the first and the last are read."""


class Part(NamedTuple):
    """What a rank holds of a parameter: for each dimension where it begins, and its length."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: DTensor) -> "Part":
        """The calling rank's part."""
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return cls(tuple(offset), tuple(shape))


class Rows(NamedTuple):
    """Rows of the checkpoint's tensors, and how a part of a parameter is made of them.

    Attributes:
        runs: name of a tensor -> first and last row + 1 of each run of rows, in order.
        units: number of dimensions at the end that stay together: what is moved are slices over these.
        order: [n] for each slice of the part its place among those read; None if that is the order they are read in.
    """

    runs: Mapping[str, list[tuple[int, int]]]
    units: int
    order: Tensor | None


def read_part(
    expression: Expression,
    part: Part,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str, int, int], Tensor],
    read_whole: Callable[[], Tensor],
) -> Tensor:
    """A part of a parameter, made of the rows of the checkpoint that it needs where the expression moves whole rows.

    Args:
        expression: the parameter's.
        part: what is wanted of it.
        shapes: name -> shape of each of the expression's tensors.
        read: name, first, last + 1 -> these rows of a tensor, in the wanted dtype and on the wanted device.
        read_whole: the whole parameter; what is read of an expression that takes rows apart.

    Returns:
        Tensor of shape ``part.shape``.
    """
    first, last = part.offset[0], part.offset[0] + part.shape[0]
    rows = plan_rows(expression, len(part.shape), shapes, first, last)
    if rows is None and keeps_rows(expression):
        taken = expression.pack({name: read(name, first, last) for name in expression.names()})
    elif rows is None:
        taken = read_whole()[first:last]
    else:
        pieces = [read(name, *run) for name, runs in rows.runs.items() for run in runs]
        if not pieces:
            pieces = [read(name, 0, 0) for name in expression.names()[:1]]
        pieces = [piece.reshape(-1, *piece.shape[piece.dim() - rows.units :]) for piece in pieces]
        taken = torch.cat(_same_dtype(expression, pieces)) if len(pieces) > 1 else pieces[0]
        if rows.order is not None:
            taken = taken[rows.order.to(taken.device)]
        taken = taken.reshape(last - first, *shape_of(expression, shapes)[1:])
    for dim in range(1, len(part.shape)):
        taken = taken.narrow(dim, part.offset[dim], part.shape[dim])
    return taken


def keeps_rows(expression: Expression) -> bool:
    """Whether row i of a parameter is made of row i of one tensor, which may be rearranged within."""
    if not isinstance(expression, Rearrange) or not isinstance(expression.child, Name):
        return False
    theirs, ours = (_axes(side)[0] for side in expression.pattern.split("->"))
    return theirs == ours and "(" not in ours


def shape_of(expression: Expression, shapes: Mapping[str, Sequence[int]]) -> torch.Size:
    """The shape of a parameter."""
    return expression.pack({name: torch.empty(shapes[name], device="meta") for name in expression.names()}).shape


def plan_rows(
    expression: Expression, ndim: int, shapes: Mapping[str, Sequence[int]], first: int, last: int
) -> Rows | None:
    """The rows that make up rows ``first`` to ``last`` of a parameter of ``ndim`` dimensions.

    Packs numbers instead of the rows' elements, and looks which numbers arrive.

    Returns:
        None if no dimension comes through the expression untouched.
    """
    units = min(untouched(expression, ndim, shapes), ndim - 1, *(len(shapes[name]) - 1 for name in expression.names()))
    if units == 0 and ndim > 1:
        return None
    numbers, starts, count = {}, {}, 0
    for name in expression.names():
        lead = list(shapes[name][: len(shapes[name]) - units])
        starts[name] = count
        end = count + math.prod(lead)
        numbers[name] = torch.arange(count, end).view(*lead, *[1] * units)
        count = end
    wanted = expression.pack(numbers)[first:last].flatten()
    runs: dict[str, list[tuple[int, int]]] = {}
    available = []
    for name, start in starts.items():
        size = numbers[name].numel()
        inside = wanted[(wanted >= start) & (wanted < start + size)] - start
        if not len(inside):
            continue
        each = size // shapes[name][0]  # slices in a row
        rows = (inside // each).unique()
        gaps = (rows.diff() > 1).nonzero().flatten()
        if len(gaps) >= MAX_RUNS:
            gaps = gaps[:0]
        lows = torch.cat([rows[:1], rows[gaps + 1]]).tolist()
        highs = (torch.cat([rows[gaps], rows[-1:]]) + 1).tolist()
        runs[name] = list(zip(lows, highs, strict=True))
        available += [torch.arange(start + low * each, start + high * each) for low, high in runs[name]]
    if not available:
        return Rows({}, units, None)
    found = torch.cat(available)
    return Rows(runs, units, None if torch.equal(found, wanted) else torch.searchsorted(found, wanted))


def untouched(expression: Expression, ndim: int, shapes: Mapping[str, Sequence[int]]) -> int:
    """How many dimensions at the end of a tensor of ``ndim`` are those of all tensors that it is made of."""
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
            kept = 0
            for a, b in zip(reversed(theirs_axes), reversed(ours_axes), strict=False):
                if a != b or "(" in a:
                    break
                kept += dots if a == "..." else 1
            theirs = len(theirs_axes) + (dots - 1 if "..." in theirs_axes else 0)
            return min(kept, untouched(expression.child, theirs, shapes))
    return 0


def _axes(side: str) -> list[str]:
    """The axes of one side of an einops pattern; those in parentheses are one."""
    axes: list[str] = []
    depth = 0
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if depth:
            axes[-1] += f" {token}"
        else:
            axes.append(token)
        depth += {"(": 1, ")": -1}.get(token, 0)
    return axes
