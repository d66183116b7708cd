"""The last step of a sum over rows: adding the fp32 partial sums that the programs of another kernel have written.

One launch adds the partial sums in a fixed order, and rounds the result to the result's dtype. A launch can compute two
results: the gradient of a weight and the gradient of a bias.
"""

from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.tiles import cdiv

ROWS, COLUMNS = 256, 16
"""Number of partial sums and number of columns that a program loads at a time. A program has only a few columns, so
that there are many programs."""


@triton.jit
def _sum_partials_kernel(
    partial_ptr, first_ptr, second_ptr, programs, split, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum COLUMNS columns of partial sums [programs, width]. Column ``split`` and all later columns belong to the
    second result.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + at, mask=(rows < programs)[:, None] & (columns < width)[None, :], other=0.0)

    out = tl.sum(total, 0)  # [COLUMNS]
    tl.store(first_ptr + columns, out.to(first_ptr.dtype.element_ty), mask=columns < split)
    later = (columns >= split) & (columns < width)
    tl.store(second_ptr + columns - split, out.to(second_ptr.dtype.element_ty), mask=later)


def sum_partials(partial: Tensor, *outs: Tensor) -> None:
    """Sum ``partial`` [programs, ...] over the programs, and write the sum to one or two contiguous tensors.

    With two tensors, the sum is split between them: its first elements are written to the first tensor, and the other
    elements to the second tensor.
    """
    width = sum(out.numel() for out in outs)
    with on_device_of(partial):
        _sum_partials_kernel[(cdiv(width, COLUMNS),)](
            partial, outs[0], outs[-1], len(partial), outs[0].numel(), width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
