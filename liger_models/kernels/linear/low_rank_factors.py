"""The two matrices of a linear layer's low-rank term, from the adapters of the checkpoint matrices in its weight.

A layer may have several adapters, each for some rows of its packed weight. All of them are one low-rank term::

    A [R, C]     the A of all adapters, one below the other, where R is r times the number of adapters
    B [O, R]     s · B of each adapter, in the rows of its checkpoint matrix and in r columns of its own; 0 elsewhere

One kernel computes both, and one kernel computes the gradients. With plain PyTorch, there would be several kernels for
each adapter. With a few thousand tokens, the host would then take longer to launch the kernels of a block than the GPU
takes to run them.

Source: https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.tiles import cdiv

MOST_ADAPTERS = 4
"""Maximum number of adapters of a layer. The kernel has an argument for A and an argument for B of each of them."""

BLOCK, NUM_WARPS = 1024, 4
"""Number of elements of A or B per program, and number of warps per program."""


class Rows(NamedTuple):
    """The rows of a checkpoint matrix in a packed weight [O, C]: the same part of each of several groups of rows.

    Gates and ups, for example, are in groups of two rows. Queries, keys and values are in a group for each KV head.

    Attributes:
        period: number of rows of a group.
        first: the first row of each group that belongs to the matrix.
        length: number of rows of each group that belong to the matrix.
    """

    period: int
    first: int
    length: int

    def of(self, matrix: Tensor) -> Tensor:
        """Return a view of the rows of a matrix [O, R], [groups, length, R]."""
        part: Tensor = matrix.unflatten(0, (-1, self.period))[:, self.first : self.first + self.length]
        return part


def find_rows(indices: Tensor, size: int) -> Rows | None:
    """Return the `Rows` of a checkpoint matrix, or None if they are not the same part of each of several groups.

    Args:
        indices: for each row of the checkpoint matrix, its index in the packed weight.
        size: O, the number of rows of the packed weight.
    """
    breaks = (indices.diff() != 1).nonzero()
    length = int(breaks[0]) + 1 if len(breaks) else len(indices)
    groups = len(indices) // length
    rows = Rows(size // groups, int(indices[0]), length)
    if size % groups or rows.first + length > rows.period:
        return None
    expected = rows.of(torch.arange(size, device=indices.device)).flatten()
    return rows if expected.equal(indices) else None


@triton.jit
def _of_adapter(adapter, a, b, c, d):
    """Return the number of an adapter."""
    return tl.where(adapter == 0, a, tl.where(adapter == 1, b, tl.where(adapter == 2, c, d)))


@triton.jit
def _factors_kernel(
    A_ptr, B_ptr, A0, A1, A2, A3, B0, B1, B2, B3, size, R, r, C, scaling, period0, period1, period2, period3, first0,
    first1, first2, first3, length0, length1, length2, length3, PACKS: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy some elements of A or s · B of an adapter to A or B of the layer.

    Without PACKS, copy their gradients from the layer to the adapter, multiplied by s in the case of B. If the grid has
    only one part, PART is 0 for A and 1 for B.
    """
    adapter = tl.program_id(2)
    A, B = A0, B0
    if adapter == 1:
        A = A1
        B = B1
    elif adapter == 2:
        A = A2
        B = B2
    elif adapter == 3:
        A = A3
        B = B3

    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) + PART == 0:
        inside = element < r * C
        packed = A_ptr + adapter * r * C + element
        if PACKS:
            tl.store(packed, tl.load(A + element, mask=inside).to(A_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(A + element, tl.load(packed, mask=inside).to(A.dtype.element_ty), mask=inside)
    else:
        row, column = element // r, element % r
        packed = B_ptr + row * R + adapter * r + column

        # Find the row of the adapter's checkpoint matrix, if the row of the layer's weight belongs to this matrix.
        period = _of_adapter(adapter, period0, period1, period2, period3)
        length = _of_adapter(adapter, length0, length1, length2, length3)
        within = row % period - _of_adapter(adapter, first0, first1, first2, first3)
        inside = (row < size) & (within >= 0) & (within < length)
        own = B + (row // period * length + within) * r + column
        if PACKS:
            value = tl.load(own, mask=inside, other=0.0).to(tl.float32) * scaling
            tl.store(packed, value.to(B_ptr.dtype.element_ty), mask=row < size)
        else:
            value = tl.load(packed, mask=inside, other=0.0).to(tl.float32) * scaling
            tl.store(own, value.to(B.dtype.element_ty), mask=inside)


def _copy(
    A: Tensor | None, B: Tensor | None, As: Sequence[Tensor], Bs: Sequence[Tensor], rows: Sequence[Rows], size: int,
    scaling: float, packs: bool,
) -> None:  # fmt: skip
    """Launch the kernel for A, for B, or for both."""
    missing = MOST_ADAPTERS - len(As)  # arguments that the kernel does not use must also be matrices and numbers
    r, C = As[0].shape
    layer = B if A is None else A
    assert layer is not None
    numbers = zip(*rows, *[rows[0]] * missing, strict=True)
    with on_device_of(layer):
        _factors_kernel[(cdiv(r * max(C, size), BLOCK), (A is not None) + (B is not None), len(As))](
            layer, layer if B is None else B, *As, *[As[0]] * missing, *Bs, *[Bs[0]] * missing, size, r * len(As), r, C,
            scaling, *(number for of_adapters in numbers for number in of_adapters), PACKS=packs, PART=int(A is None),
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


class _PackFactors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Sequence[Rows], size: int, scaling: float, dtype: torch.dtype, *matrices: Tensor
    ) -> Any:
        count = len(rows)
        As, Bs = matrices[:count], matrices[count:]
        r, C = As[0].shape
        A, B = As[0].new_empty(count * r, C, dtype=dtype), As[0].new_empty(size, count * r, dtype=dtype)
        _copy(A, B, [A.contiguous() for A in As], [B.contiguous() for B in Bs], rows, size, scaling, True)

        # If no A is trained, or no B, ops that use the result need not compute its gradient.
        ctx.set_materialize_grads(False)
        _, _, _, _, *trained = ctx.needs_input_grad
        untrained = [x for x, needs in ((A, trained[:count]), (B, trained[count:])) if not any(needs)]
        ctx.mark_non_differentiable(*untrained)
        ctx.rows, ctx.size, ctx.scaling = rows, size, scaling
        ctx.like = [(matrix.shape, matrix.dtype) for matrix in matrices]
        return A, B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dA: Tensor | None, dB: Tensor | None) -> Any:
        layer = dB if dA is None else dA
        if layer is None:
            return (None,) * (4 + len(ctx.like))
        gradients: list[Any] = [layer.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        dAs, dBs = gradients[: len(ctx.rows)], gradients[len(ctx.rows) :]
        dA, dB = (None if x is None else x.contiguous() for x in (dA, dB))
        _copy(dA, dB, dAs, dBs, ctx.rows, ctx.size, ctx.scaling, False)
        dAs = dAs if dA is not None else [None] * len(dAs)
        dBs = dBs if dB is not None else [None] * len(dBs)
        return None, None, None, None, *dAs, *dBs


def pack_factors(
    As: Sequence[Tensor], Bs: Sequence[Tensor], rows: Sequence[Rows], size: int, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute A [R, C] and B [O, R] of a layer's low-rank term, with gradients.

    Args:
        As: A [r, C] of each adapter, at most `MOST_ADAPTERS`, in float32, float16 or bfloat16.
        Bs: B of each adapter, [rows of its checkpoint matrix, r], in the dtype of A.
        rows: for each adapter, the rows of its checkpoint matrix in the packed weight.
        size: O, the number of rows of the packed weight.
        scaling: s, by which B is multiplied before it is rounded to ``dtype``.
        dtype: dtype of the results.

    Returns:
        A [R, C] and B [O, R], where R is r times the number of adapters. A result has no gradient if none of the
        matrices in it needs one. Second derivatives raise an error.
    """
    packed: tuple[Tensor, Tensor] = _PackFactors.apply(rows, size, scaling, dtype, *As, *Bs)
    return packed
