"""The last step of a sum over rows, after each program of a kernel has written a partial sum in fp32.

One launch adds the partial sums in a fixed order and rounds to the dtype of the result. It can fill two results, the
gradients of a weight and of a bias.
"""

from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton

ROWS, COLUMNS = 256, 16
"""Partial sums and columns that a program takes at a time: few columns, so that there are many programs."""


@triton.jit
def _sum_partials_kernel(
    partial_ptr, first_ptr, second_ptr, programs, split, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum COLUMNS columns of partial [programs, width]. Columns from ``split`` on belong to the second result."""
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
    """Fill one or two contiguous tensors in turn with the sum of ``partial`` [programs, ...]."""
    width = sum(out.numel() for out in outs)
    with on_device_of(partial):
        _sum_partials_kernel[(triton.cdiv(width, COLUMNS),)](
            partial, outs[0], outs[-1], len(partial), outs[0].numel(), width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
