"""The two matrices of a linear layer's low-rank term, from the adapters of the checkpoint matrices in its weight.

A layer may have several adapters, each for some rows of its packed weight. All of them are one low-rank term::

    A [R, C]     the A of all adapters, one below the other, where R is r times the number of adapters
    B [O, R]     s · B of each adapter, in the rows of its checkpoint matrix and in r columns of its own; 0 elsewhere

`pack_factors` computes both with few launches, and so does its backward. The general way in `LinearAdapters.factors`
launches several kernels for each adapter. With a few thousand tokens, the host then takes longer to launch the kernels
of a block than the GPU takes to run them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The rows of a checkpoint matrix in a packed weight [O, C]: the same part of each of several groups of rows.

    Gates and ups, for example, are in groups of two rows. Queries, keys and values are in a group for each KV head.

    Attributes:
        groups: number of groups, each of ``O / groups`` rows.
        first, last: the matrix has the rows ``first`` to ``last - 1`` of each group.
    """

    groups: int
    first: int
    last: int

    def of(self, matrix: Tensor) -> Tensor:
        """Return a view of the rows of a matrix [O, R], [groups, last - first, R]."""
        part: Tensor = matrix.unflatten(0, (self.groups, -1))[:, self.first : self.last]
        return part


def find_rows(indices: Tensor, size: int) -> Rows | None:
    """Return the `Rows` of a checkpoint matrix, or None if they are not the same part of each of several groups.

    Args:
        indices: for each row of the checkpoint matrix, its index in the packed weight.
        size: O, the number of rows of the packed weight.
    """
    first = int(indices[0])
    breaks = (indices.diff() != 1).nonzero()
    length = int(breaks[0]) + 1 if len(breaks) else len(indices)
    groups = len(indices) // length
    rows = Rows(groups, first, first + length)
    if size % groups or rows.last > size // groups:
        return None
    expected = rows.of(torch.arange(size, device=indices.device)).flatten()
    return rows if expected.equal(indices) else None


class _PackFactors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Sequence[Rows], size: int, scaling: float, dtype: torch.dtype, *matrices: Tensor
    ) -> Any:
        As, Bs = matrices[: len(rows)], matrices[len(rows) :]
        r, C = As[0].shape
        ctx.rows, ctx.scaling, ctx.r, ctx.wide = rows, scaling, r, As[0].dtype

        A = As[0].new_empty(len(As) * r, C, dtype=dtype)
        torch._foreach_copy_(A.split(r), As)  # casts
        B = As[0].new_zeros(size, len(As) * r, dtype=dtype)
        scaled = torch._foreach_mul(Bs, scaling)
        blocks = _blocks(B, rows, r)
        torch._foreach_copy_(blocks, [part.view(block.shape) for part, block in zip(scaled, blocks, strict=True)])
        return A, B

    @staticmethod
    def backward(ctx: Any, dA: Tensor | None, dB: Tensor | None) -> Any:
        count = len(ctx.rows)
        dAs: list[Tensor | None] = [None] * count
        dBs: list[Tensor | None] = [None] * count
        if dA is not None and any(ctx.needs_input_grad[4 : 4 + count]):
            dAs = _copies(dA.split(ctx.r), ctx.wide)
        if dB is not None and any(ctx.needs_input_grad[4 + count :]):
            copies = _copies(_blocks(dB, ctx.rows, ctx.r), ctx.wide)
            torch._foreach_mul_(copies, ctx.scaling)
            dBs = [copy.flatten(0, 1) for copy in copies]
        return None, None, None, None, *dAs, *dBs


def _blocks(B: Tensor, rows: Sequence[Rows], r: int) -> list[Tensor]:
    """Return a view of B [O, R] for each adapter, [groups, rows, r]: the rows of its matrix, and its r columns."""
    return [place.of(columns) for place, columns in zip(rows, B.split(r, 1), strict=True)]


def _copies(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Any]:
    # Each gradient gets its own memory, because a view would keep the memory of all of them.
    copies = [part.new_empty(part.shape, dtype=dtype) for part in parts]
    torch._foreach_copy_(copies, list(parts))
    return copies


def pack_factors(
    As: Sequence[Tensor], Bs: Sequence[Tensor], rows: Sequence[Rows], size: int, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute A [R, C] and B [O, R] of a layer's low-rank term, with gradients.

    Args:
        As: A [r, C] of each adapter.
        Bs: B of each adapter, [rows of its checkpoint matrix, r].
        rows: for each adapter, the rows of its checkpoint matrix in the packed weight.
        size: O, the number of rows of the packed weight.
        scaling: s, by which B is multiplied before it is rounded to ``dtype``.
        dtype: dtype of the results.
    """
    packed: tuple[Tensor, Tensor] = _PackFactors.apply(rows, size, scaling, dtype, *As, *Bs)  # type: ignore[no-untyped-call]
    return packed
