"""The product of a few hundred rows and a weight with few rows, such as x @ Aᵀ of a low-rank term (LoRA).

::

    y = x @ Wᵀ                            sums in fp32, one cast at the end

y is so small that its tiles do not occupy the device. A library therefore divides the columns of W among several
programs, and adds the sums of the programs in a second launch. In this kernel, a program computes all sums of a tile of
y. The tiles are as small as matrix units allow, so that many multiprocessors read x and W at the same time. The columns
of W are divided among the warps of the program, because a single warp would wait for each product before the next. At
the end, the sums of the warps are added in a fixed order. On an H200, 256 rows of 3,072 columns and 32 rows of W take
3.8 us, and two launches of cuBLAS take 6.2 us.
"""

import math

import torch
from torch import Tensor

from liger_models.kernels.dispatch import fitting_stages, on_device_of, tl, triton, use_triton
from liger_models.kernels.matmul.row_linear import MOST_SMALL_ROWS
from liger_models.kernels.overlap import end_previous, overlap, start_next
from liger_models.kernels.tiles import cdiv

MOST_ROWS, MOST_OUTPUTS, MOST_INPUTS, MOST_MIB = 1023, 64, 4096, 14
"""The kernel runs if x has at most `MOST_ROWS` rows, W has at most `MOST_OUTPUTS` rows and `MOST_INPUTS` columns, and
all programs together read at most `MOST_MIB` MiB. With more, a second launch takes less time than the repeated reads of
x and W."""

TILE_OUTPUTS, TILE_ROWS = 16, 8
"""Number of columns and rows of a tile of y."""

WARPS, WARP_COLUMNS, STAGES = 8, 64, 4
"""A program has `WARPS` warps and `STAGES` steps in flight. In each step, a warp multiplies `WARP_COLUMNS` columns."""


@triton.jit
def _narrow_linear_kernel(
    x_ptr, weight_ptr, y_ptr, M, N, K, weight_n,
    OVERLAPS: tl.constexpr, WARPS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply OUTPUTS rows of W by ROWS rows of x. In each step, each of the WARPS multiplies COLUMNS columns."""
    start_next(OVERLAPS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WARPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    weights = weight_ptr + output[None, :, None] * weight_n + column[:, None, :]  # [WARPS, OUTPUTS, COLUMNS]
    rows = x_ptr + row[None, None, :] * K + column[:, :, None]  # [WARPS, COLUMNS, ROWS]
    known, inside = (output < N)[None, :, None], (row < M)[None, None, :]
    # The first step of W is loaded before the previous kernel ends, because no kernel writes to weights.
    weight = tl.load(weights, mask=known & (column < K)[:, None, :], other=0.0)
    end_previous(OVERLAPS)
    x = tl.load(rows, mask=inside & (column < K)[:, :, None], other=0.0)
    total = tl.dot(weight, x)
    for start in range(WARPS * COLUMNS, K, WARPS * COLUMNS):
        weight = tl.load(weights + start, mask=known & (start + column < K)[:, None, :], other=0.0)
        x = tl.load(rows + start, mask=inside & (start + column < K)[:, :, None], other=0.0)
        total = tl.dot(weight, x, total)
    y = tl.sum(total, 0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[None, :] * N + output[:, None], y, mask=(output < N)[:, None] & (row < M)[None, :])


def _grid(M: int, N: int) -> tuple[int, int]:
    return cdiv(N, TILE_OUTPUTS), cdiv(M, TILE_ROWS)


def takes_narrow(x: Tensor, weight: Tensor) -> bool:
    """Return whether `narrow_linear` supports the product of x [..., K] and weight.

    If x has so few rows that `row_linear_forward` supports the product, the result is False.
    """
    N, K = weight.shape
    return (
        MOST_SMALL_ROWS * K < x.numel() <= MOST_ROWS * K
        and N <= MOST_OUTPUTS
        and K <= MOST_INPUTS
        and math.prod(_grid(x.numel() // K, N)) * (TILE_OUTPUTS + TILE_ROWS) * K * x.itemsize <= MOST_MIB * 2**20
        and x.dtype == weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.stride(1) == 1
        and use_triton(x)
    )


def narrow_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weightᵀ`` [M, N] from x [..., K] and weight [N, K], for which `takes_narrow` is True."""
    (N, K), x = weight.shape, x.contiguous()
    M = x.numel() // K
    y = x.new_empty(M, N)
    stage = WARPS * WARP_COLUMNS * (TILE_OUTPUTS + TILE_ROWS) * x.itemsize
    with on_device_of(x):
        _narrow_linear_kernel[_grid(M, N)](
            x, weight, y, M, N, K, weight.stride(0), **overlap(x), WARPS=WARPS, OUTPUTS=TILE_OUTPUTS, ROWS=TILE_ROWS,
            COLUMNS=WARP_COLUMNS, num_warps=WARPS, num_stages=fitting_stages(x, STAGES, stage),
        )  # fmt: skip
    return y
