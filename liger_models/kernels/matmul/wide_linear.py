"""A linear layer for router logits. Its inputs are in bf16, and its results are as accurate as those of an fp32
product.

::

    y = x @ Wᵀ                            in fp32
    dx = dy @ W,   dW = dyᵀ @ x           rounded to bf16, from dy in fp32

A product of two bf16 numbers is exact in fp32, so x and W need not be cast to fp32. The difficulty is the sum: the
tensor cores of Hopper truncate their sums, whereas an fp32 addition rounds. A long sum on a tensor core therefore has
about ten times the error of a sum in fp32. For this reason, the forward kernel starts a new sum on the tensor core
after every `COLUMNS` columns, and adds up all these sums with fp32 additions.

In the backward, dy is split into three bf16 numbers, ``dy = h + m + l``. A bf16 number has 8 significant bits and an
fp32 number has 24, so the split is exact. dx and dW are rounded to bf16. This rounding error is far larger than the
error of truncated sums, so no new sums are started in the backward. Programs write partial sums of dW over parts of the
rows, and `sum_partials` adds these sums in order.

x and W are saved for the backward in their own dtypes. If there are only a few rows, if x is in fp16, or if W is in
fp32, then x and W are cast to fp32 in the forward, and again in the backward.

Source: https://arxiv.org/abs/2412.19437, section 3.3.2 (sums on tensor cores, continued in fp32).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import fitting_stages, on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.tiles import cdiv, contiguous_rows, dot_tile

ROWS, COLUMNS = 64, 64
"""A tile has `ROWS` rows of x. The forward sums `COLUMNS` columns on tensor cores before each fp32 addition."""

MOST_OUTPUTS = 128
"""Maximum number of rows of W per tile."""

MIN_ROWS = 256
"""Minimum number of rows of x for which the kernels run. With fewer rows, too few programs would run to occupy a
GPU."""

PROGRAMS, MOST_PARTS = 512, 16
"""For dW, the rows are divided into so many parts that about `PROGRAMS` programs run, but into at most `MOST_PARTS`
parts. These numbers do not depend on the device, so the order of the sum is the same on all devices."""


def wide_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `wide_linear` in plain PyTorch. If x is fp64, so are all computations."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


@triton.jit(do_not_specialize=["N"])
def _wide_linear_kernel(
    x_ptr, weight_ptr, y_ptr, N, X, C, x_n, weight_m, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile [ROWS, OUTPUTS] of y [N, X]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    x_ptr += row[:, None] * x_n + column[None, :]
    weight_ptr += output.to(tl.int64)[None, :] * weight_m + column[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, C, COLUMNS):
        x_inside, weight_inside = (row < N)[:, None], (output < X)[None, :]
        if not WHOLE:
            x_inside = x_inside & (start + column < C)[None, :]
            weight_inside = weight_inside & (start + column < C)[:, None]
        x = tl.load(x_ptr + start, mask=x_inside, other=0.0)
        weight = tl.load(weight_ptr + start, mask=weight_inside, other=0.0)
        # Without the last argument, the compiler would accumulate the products of all columns on the tensor core.
        total += tl.dot(x, weight, max_num_imprecise_acc=COLUMNS)
    inside = (row < N)[:, None] & (output < X)[None, :]
    tl.store(y_ptr + row[:, None] * X + output[None, :], total, mask=inside)


@triton.jit
def _split(x):
    """Split each fp32 number into three bf16 numbers whose sum is the fp32 number."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["N"])
def _wide_linear_input_kernel(
    dy_ptr, weight_ptr, dx_ptr, N, X, C, weight_m, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write a tile [ROWS, COLUMNS] of dx [N, C]. The tile is computed as the transpose of a tile of Wᵀ @ dyᵀ.

    In this product, dy (split into three bf16 numbers) is the right factor, and is therefore read from shared memory.
    If dy were the left factor, it would be read from registers. With Triton 3.6, the loop might then overwrite these
    registers while the asynchronous product of the previous step still reads them.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, X, OUTPUTS):
        output = start + tl.arange(0, OUTPUTS)
        at = output.to(tl.int64)[:, None] * weight_m + column[None, :]
        weight = tl.load(weight_ptr + at, mask=(output < X)[:, None] & (column < C)[None, :], other=0.0)
        inside = (row < N)[:, None] & (output < X)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * X + output[None, :], mask=inside, other=0.0)  # [ROWS, OUTPUTS]
        high, middle, low = _split(dy)
        total = tl.dot(tl.trans(weight), tl.trans(low), total)
        total = tl.dot(tl.trans(weight), tl.trans(middle), total)
        total = tl.dot(tl.trans(weight), tl.trans(high), total)
    at = row[:, None] * C + column[None, :]
    tl.store(dx_ptr + at, tl.trans(total).to(dx_ptr.dtype.element_ty), mask=(row < N)[:, None] & (column < C)[None, :])


@triton.jit(do_not_specialize=["N", "part"])
def _wide_linear_weight_kernel(
    dy_ptr, x_ptr, partial_ptr, N, X, C, part, x_n, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write a tile [OUTPUTS, COLUMNS] of a partial sum of dW [X, C].

    The sum is over ``part`` rows. The tile is computed as the transpose of xᵀ @ dy.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(2) * part
    total = tl.zeros([COLUMNS, OUTPUTS], tl.float32)
    for start in range(first, tl.minimum(first + part, N), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < N)[:, None] & (column < C)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_n + column[None, :], mask=inside, other=0.0)  # [ROWS, COLUMNS]
        inside = (row < N)[:, None] & (output < X)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * X + output[None, :], mask=inside, other=0.0)  # [ROWS, OUTPUTS]
        high, middle, low = _split(dy)
        total = tl.dot(tl.trans(x), low, total)
        total = tl.dot(tl.trans(x), middle, total)
        total = tl.dot(tl.trans(x), high, total)
    at = (tl.program_id(2) * X + output).to(tl.int64)[None, :] * C + column[:, None]
    tl.store(partial_ptr + at, total, mask=(output < X)[None, :] & (column < C)[:, None])


def _outputs(X: int) -> int:
    """Return the number of rows of W per tile."""
    return min(dot_tile(X), MOST_OUTPUTS)


def _runs(x: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernels run. Otherwise, the op casts x and the weight to fp32, and multiplies them."""
    return x.dtype == weight.dtype == torch.bfloat16 and use_triton(x) and len(x) >= MIN_ROWS


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    if not _runs(x, weight):
        return wide_linear_reference(x, weight)
    x, weight = contiguous_rows(x), contiguous_rows(weight)
    (N, C), X = x.shape, len(weight)
    outputs = _outputs(X)
    y = x.new_empty(N, X, dtype=torch.float32)
    with on_device_of(x):
        _wide_linear_kernel[(cdiv(N, ROWS), cdiv(X, outputs))](
            x, weight, y, N, X, C, x.stride(0), weight.stride(0), WHOLE=C % COLUMNS == 0, ROWS=ROWS, OUTPUTS=outputs,
            COLUMNS=COLUMNS, num_warps=4 if outputs <= 64 else 8,
            num_stages=fitting_stages(x, 5, (ROWS + outputs) * COLUMNS * 2),
        )  # fmt: skip
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    if not _runs(x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = (dy @ weight.to(wide)).to(x.dtype) if need_x else x.new_empty(0)
        return dx, (dy.t() @ x.to(wide)).to(weight.dtype) if need_weight else weight.new_empty(0)

    dy, x, weight = dy.contiguous(), contiguous_rows(x), contiguous_rows(weight)
    (N, C), X = x.shape, len(weight)
    outputs, columns = min(_outputs(X), 64), 128
    dx = x.new_empty(x.shape if need_x else 0)
    d_weight = weight.new_empty(weight.shape if need_weight else 0)
    with on_device_of(x):
        if need_x:
            _wide_linear_input_kernel[(cdiv(N, ROWS), cdiv(C, columns))](
                dy, weight, dx, N, X, C, weight.stride(0), ROWS=ROWS, OUTPUTS=outputs, COLUMNS=columns, num_warps=4,
                num_stages=2,
            )  # fmt: skip
        if need_weight:
            tiles = cdiv(C, columns) * cdiv(X, outputs)
            part = cdiv(cdiv(N, min(max(PROGRAMS // tiles, 1), MOST_PARTS)), ROWS) * ROWS
            partial = dy.new_empty(cdiv(N, part), X, C)
            _wide_linear_weight_kernel[(cdiv(C, columns), cdiv(X, outputs), len(partial))](
                dy, x, partial, N, X, C, part, x.stride(0), ROWS=ROWS, OUTPUTS=outputs, COLUMNS=columns, num_warps=4,
                num_stages=fitting_stages(x, 3, ROWS * (2 * columns + 4 * outputs)),
            )  # fmt: skip
            sum_partials(partial, d_weight)
    return dx, d_weight


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if need_x else 0), weight.new_empty(weight.shape if need_weight else 0)


BACKWARD = define_op("wide_linear_backward", _backward, _backward_fake)
FORWARD = define_op(
    "wide_linear", _wide_linear, lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
    backward=BACKWARD, gradients="x weight",
)  # fmt: skip


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weightᵀ`` in fp32 from bf16 inputs, as accurately as after a cast of the inputs to fp32.

    Args:
        x: [N, C]. Unless x and weight are both bfloat16, they are cast to fp32, or to fp64 if x is fp64.
        weight: [X, C].

    Returns:
        [N, X] in fp32 (fp64 for fp64 inputs). The gradients have the dtypes of the inputs.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not floating-point.
    """
    op = "wide_linear"
    check_floating(op, x=x, weight=weight)
    if not (x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] > 0):
        raise ValueError(f"{op}: x must be [N, C] and weight [X, C], got {list(x.shape)} and {list(weight.shape)}.")
    # If x is fp32 or fp64, x need not be cast. Autograd then saves x itself, as the op would, so the op is not needed.
    if x.dtype not in (torch.bfloat16, torch.float16) or not use_triton(x):
        return wide_linear_reference(x, weight)
    return FORWARD(x, weight)
