"""Rounding of matrices to float8, and products of the rounded matrices.

A matrix x is rounded with one scale s, or with one scale per row::

    s = MAX / max(|x|)
    q = float8(x · s)

MAX is the largest number in the float8 format. max(|x|) is taken over the whole matrix or, if each row has its own
scale, over a row. With ``power_of_2``, s is rounded down to a power of 2.

The hardware multiplies two matrices that are both stored row by row. It sums over the last dimension of both, and
applies the scales to the sums::

    a @ bᵀ = cast((qa @ qbᵀ) / sa / sb)

A linear layer has three products, ``y = x @ Wᵀ``, ``dx = dy @ W`` and ``dW = dyᵀ @ x``. The second product needs the
columns of W as rows, and the third product needs the columns of dy and x as rows. Kernels therefore write a matrix by
rows, by columns (transposed), or both. Some matrices are computed by the same kernel that rounds them: a normalized
matrix, a gated product, or the gradient of gate and up. Such a matrix need not be stored unrounded.

The recipes are::

    tensorwise            one scale per operand; dy is in e5m2, and other operands are in e4m3
    rowwise               one scale per row of each operand, a power of 2; all operands are in e4m3
    rowwise_with_gw_hp    like rowwise, but W has one scale in the product for dx, and dW is not computed in float8

On devices other than CUDA and ROCm devices, the rounded matrices are multiplied in fp32.

Source: https://arxiv.org/abs/2209.05433 (formats). The recipes are the same as in torchao.float8.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.activation.gated_act import _activation, _load_pairs
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.row_norm import scale_rows
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2, num_warps

ROWS, COLUMNS, TILES = 64, 128, 4
"""For the kernel that finds the maximum of each column, or the maximum of a normalized matrix: number of rows and
number of columns of a tile, and number of tiles that a program processes one after the other."""

FLAT, FLAT_BLOCKS = 2048, 4
"""For the kernel that finds the maximum of any other matrix: number of adjacent elements in a block, and number of
blocks per program."""

WRITE_ROWS, WRITE_COLUMNS, WRITE_TILES = 128, 64, 8
"""For the kernel that rounds: number of rows and number of columns of a tile, and number of adjacent tiles that are
processed at the same time. When a tile is stored by columns, 128 bytes of each column are adjacent in memory."""

ROW_BLOCK = 2048
"""Number of columns of a row that a program rounds at a time. The program reads the row once to find the maximum, and
again, from the cache, to round it."""

NUM_WARPS = 8

MULTIPLE = 16
"""The hardware multiplies only float8 matrices whose sizes are multiples of this number."""

TINY = 1e-12
"""Lower bound of max(|x|). Because of this bound, the scale of an all-zero matrix is finite."""


class Recipe(NamedTuple):
    """The way in which a linear layer rounds the operands of its products.

    Attributes:
        by_row: whether each row of an operand has its own scale, instead of one scale for the whole operand.
        wide_gradients: whether gradients are in e5m2, which has a wider range but one mantissa bit less than e4m3.
        power_of_2: whether scales are powers of 2.
        rounds_dw: whether the product for the weight gradient is also in float8.
    """

    by_row: bool
    wide_gradients: bool
    power_of_2: bool
    rounds_dw: bool


RECIPES = {
    "tensorwise": Recipe(False, True, False, True),
    "rowwise": Recipe(True, False, True, True),
    "rowwise_with_gw_hp": Recipe(True, False, True, False),
}


class Float8(NamedTuple):
    """A matrix rounded to float8, and the inverse of its scales.

    Attributes:
        data: [R, K] in a float8 dtype.
        inverse: 1 / scale in fp32, [] for one scale or [R] for one scale per row.
    """

    data: Tensor
    inverse: Tensor


class Matrix(NamedTuple):
    """A matrix [N, C] that is to be rounded. It is represented by the tensors from which kernels compute the matrix.

    ======================  ==========================  =============================================
    kind                    x, other, rstd              matrix
    ======================  ==========================  =============================================
    ``plain``               [N, C]                      x
    ``rms_norm``            [N, C], [C], [N]            `rms_norm` of x with weight ``other``
    ``product``             [N, 2 C]                    `gated_act` of x
    ``gradient``            [N, C], [N, C / 2]          gradient of x, given the gradient ``other`` of `gated_act`
    ======================  ==========================  =============================================
    """

    kind: str
    x: Tensor
    other: Tensor | None = None
    rstd: Tensor | None = None
    act: str = ""
    weight_offset: float = 0.0
    scale_in_fp32: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows N and columns C."""
        return self.x.shape[0], self.x.shape[1] // (2 if self.kind == "product" else 1)


def plain(x: Tensor) -> Matrix:
    """Return a tensor [..., C] as a `Matrix` [N, C] of kind "plain"."""
    return Matrix("plain", x.reshape(-1, x.shape[-1]).contiguous())


def is_fnuz(device: torch.device) -> bool:
    """Return whether the device uses the float8 formats without negative zero or infinities, as AMD MI300 does."""
    if torch.version.hip is None or device.type != "cuda":
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith("gfx94")


def float8_dtype(device: torch.device, wide: bool = False) -> torch.dtype:
    """Return the device's float8 format with 3 mantissa bits or, if ``wide``, the format with 2 mantissa bits."""
    if is_fnuz(device):
        return torch.float8_e5m2fnuz if wide else torch.float8_e4m3fnuz
    return torch.float8_e5m2 if wide else torch.float8_e4m3fn


def round_reference(x: Tensor, dtype: torch.dtype, by_row: bool, power_of_2: bool) -> Float8:
    """Round a matrix [R, K] to float8 in plain PyTorch."""
    if x.numel() == 0:
        amax = x.new_zeros(x.shape[0] if by_row else ())
    else:
        amax = x.abs().amax(1) if by_row else x.abs().amax()
    limit = torch.finfo(dtype).max
    scale = (limit / amax.double().clamp_min(TINY)).float()
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    scaled = x.float() * (scale[:, None] if by_row else scale)
    return Float8(scaled.clamp(-limit, limit).to(dtype), scale.reciprocal())


@triton.jit
def _scale(amax, LIMIT: tl.constexpr, TINY: tl.constexpr, POWER_OF_2: tl.constexpr):
    scale = tl.div_rn(tl.zeros_like(amax) + LIMIT, tl.maximum(amax, TINY))
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _gated(gate, up, ACT: tl.constexpr, dtype: tl.constexpr):
    """Compute `gated_act` of gate and up.

    The result is rounded to ``dtype`` as in the op `gated_act`, and is then returned in fp32.
    """
    a, _ = _activation(gate, ACT)
    return (a.to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)


@triton.jit
def _gated_gradient(gate, up, dy, ACT: tl.constexpr, dtype: tl.constexpr):
    """Compute the backward of `gated_act`: the gradients of gate and of up, both in ``dtype``."""
    a, slope = _activation(gate, ACT)
    return (dy * up * slope).to(dtype), (dy * a.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _values(
    x_ptr, other_ptr, rstd_ptr, row, start, N, C, weight_offset,
    KIND: tl.constexpr, ACT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load or compute a tile [ROWS, COLUMNS] of a `Matrix`.

    The values are rounded to the dtype of x, but returned as fp32. Elements outside the matrix are 0.
    """
    dtype = x_ptr.dtype.element_ty
    exists = row < N
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = exists & (column < C)
    # Computed values are first rounded to the dtype of x, as if a separate op had computed and stored them.
    if KIND == "plain":
        return tl.load(x_ptr + row * C + column, mask=inside, other=0.0).to(tl.float32)
    elif KIND == "rms_norm":
        h = tl.load(x_ptr + row * C + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(other_ptr + column, mask=column < C, other=0.0)
        n = h * tl.load(rstd_ptr + row, mask=exists, other=0.0)
        return scale_rows(n, w, weight_offset, SCALE_IN_FP32, dtype).to(dtype).to(tl.float32)
    elif KIND == "product":
        element = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
        pairs = tl.load(x_ptr + row * (2 * C) + element, mask=exists & (element < 2 * C), other=0.0)
        gate, up = tl.split(tl.reshape(pairs, [ROWS, COLUMNS, 2]))
        return _gated(gate.to(tl.float32), up.to(tl.float32), ACT, dtype)
    else:
        pairs = tl.load(x_ptr + row * C + column, mask=inside, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, [ROWS, COLUMNS // 2, 2]))
        half = start // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        dy = tl.load(other_ptr + row * (C // 2) + half, mask=exists & (half < C // 2), other=0.0).to(tl.float32)
        d_gate, d_up = _gated_gradient(gate.to(tl.float32), up.to(tl.float32), dy, ACT, dtype)
        return tl.interleave(d_gate, d_up).to(tl.float32)


@triton.jit
def _amax_kernel(
    x_ptr, other_ptr, rstd_ptr, amax_ptr, N, C, weight_offset,
    KIND: tl.constexpr, ACT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, PER_COLUMN: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # The atomic maximum compares the bit patterns of the numbers as integers, because every device supports the atomic
    # maximum of integers. Nonnegative numbers have the same order as their bit patterns.
    start = tl.program_id(1) * COLUMNS
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        x = _values(
            x_ptr, other_ptr, rstd_ptr, row, start, N, C, weight_offset, KIND, ACT, SCALE_IN_FP32, ROWS, COLUMNS
        )  # fmt: skip
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(largest, 0)
    if PER_COLUMN:
        column = start + tl.arange(0, COLUMNS)
        tl.atomic_max(amax_ptr + column, amax.to(tl.int32, bitcast=True), mask=column < C)
    else:
        tl.atomic_max(amax_ptr, tl.max(amax, 0).to(tl.int32, bitcast=True))


@triton.jit
def _flat_amax_kernel(
    x_ptr, other_ptr, amax_ptr, count, KIND: tl.constexpr, ACT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # The elements are read in the order of memory, which is faster than tile by tile. BLOCK elements of x are BLOCK
    # values of a plain matrix, or BLOCK / 2 pairs of gate and up.
    dtype = x_ptr.dtype.element_ty
    amax = tl.zeros([BLOCK if KIND == "plain" else BLOCK // 2], tl.float32)
    for block in range(BLOCKS):
        start = (tl.program_id(0).to(tl.int64) * BLOCKS + block) * BLOCK
        if KIND == "plain":
            element = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + element, mask=element < count, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(x))
        else:
            gate, up = _load_pairs(x_ptr + start, (count - start) // 2, BLOCK // 2)
            if KIND == "product":
                amax = tl.maximum(amax, tl.abs(_gated(gate, up, ACT, dtype)))
            else:
                pair = start // 2 + tl.arange(0, BLOCK // 2)
                dy = tl.load(other_ptr + pair, mask=pair < count // 2, other=0.0).to(tl.float32)
                d_gate, d_up = _gated_gradient(gate, up, dy, ACT, dtype)
                larger = tl.maximum(tl.abs(d_gate.to(tl.float32)), tl.abs(d_up.to(tl.float32)))
                amax = tl.maximum(amax, larger)
    tl.atomic_max(amax_ptr, tl.max(amax, 0).to(tl.int32, bitcast=True))


@triton.jit
def _store_columns(pointer, q, row, column, C, padded):
    """Transpose the tile q [ROWS, COLUMNS], and store it in the transposed matrix [C, ``padded``]."""
    place = column.to(tl.int64)[:, None] * padded + tl.trans(row)
    tl.store(pointer + place, tl.trans(q), mask=(column < C)[:, None] & tl.trans(row < padded))


@triton.jit
def _round_kernel(
    x_ptr, other_ptr, rstd_ptr, amax_ptr, product_amax_ptr, rows_ptr, columns_ptr, product_ptr, inverse_ptr,
    product_inverse_ptr, N, C, padded, weight_offset,
    KIND: tl.constexpr, ACT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, PER_COLUMN: tl.constexpr,
    STORE_ROWS: tl.constexpr, STORE_COLUMNS: tl.constexpr, STORE_PRODUCT: tl.constexpr, LIMIT: tl.constexpr,
    PRODUCT_LIMIT: tl.constexpr, TINY: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time process adjacent tiles, so that they read adjacent memory.
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * COLUMNS
    is_first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
    column = start + tl.arange(0, COLUMNS)
    x = _values(x_ptr, other_ptr, rstd_ptr, row, start, N, C, weight_offset, KIND, ACT, SCALE_IN_FP32, ROWS, COLUMNS)
    if PER_COLUMN:
        scale = _scale(tl.load(amax_ptr + column, mask=column < C, other=0.0), LIMIT, TINY, POWER_OF_2)
        if tl.program_id(1) == 0:
            tl.store(inverse_ptr + column, _inverse(scale), mask=column < C)
        x *= scale[None, :]
    else:
        scale = _scale(tl.load(amax_ptr), LIMIT, TINY, POWER_OF_2)
        if is_first:
            tl.store(inverse_ptr, _inverse(scale))
        x *= scale
    q = x.to(rows_ptr.dtype.element_ty)
    if STORE_PRODUCT:  # also round the gated product of the same gate and up
        p = _values(
            x_ptr, other_ptr, rstd_ptr, row, start // 2, N, C // 2, weight_offset, "product", ACT, SCALE_IN_FP32,
            ROWS, COLUMNS // 2,
        )  # fmt: skip
        scale = _scale(tl.load(product_amax_ptr), PRODUCT_LIMIT, TINY, POWER_OF_2)
        if is_first:
            tl.store(product_inverse_ptr, _inverse(scale))
        half = start // 2 + tl.arange(0, COLUMNS // 2)
        _store_columns(product_ptr, (p * scale).to(product_ptr.dtype.element_ty), row, half, C // 2, padded)
    if STORE_ROWS:
        tl.store(rows_ptr + row * C + column[None, :], q, mask=(row < N) & (column < C)[None, :])
    if STORE_COLUMNS:
        _store_columns(columns_ptr, q, row, column, C, padded)


@triton.jit
def _round_rows_kernel(
    x_ptr, other_ptr, rstd_ptr, rows_ptr, inverse_ptr, N, C, weight_offset,
    KIND: tl.constexpr, ACT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    POWER_OF_2: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    largest = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, C, COLUMNS):
        x = _values(x_ptr, other_ptr, rstd_ptr, row, start, N, C, weight_offset, KIND, ACT, SCALE_IN_FP32, 1, COLUMNS)
        largest = tl.maximum(largest, tl.abs(x))
    scale = _scale(tl.max(tl.max(largest, 1), 0), LIMIT, TINY, POWER_OF_2)
    tl.store(inverse_ptr + tl.program_id(0), _inverse(scale))
    for start in range(0, C, COLUMNS):
        x = _values(x_ptr, other_ptr, rstd_ptr, row, start, N, C, weight_offset, KIND, ACT, SCALE_IN_FP32, 1, COLUMNS)
        column = start + tl.arange(0, COLUMNS)[None, :]
        tl.store(rows_ptr + row * C + column, (x * scale).to(rows_ptr.dtype.element_ty), mask=column < C)


@triton.jit
def _rms_norm_round_kernel(
    x_ptr, residual_ptr, w_ptr, h_ptr, rstd_ptr, y_ptr, amax_ptr, rows_ptr, inverse_ptr, C, eps, weight_offset,
    ADD: tl.constexpr, SCALE_IN_FP32: tl.constexpr, BY_ROW: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    POWER_OF_2: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * C
    column = tl.arange(0, BLOCK)
    inside = column < C
    h = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
    if ADD:
        x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
        h = (h.to(tl.float32) + x.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + row + column, h, mask=inside)
    wide = h.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    # The normalized row is first rounded to the dtype of the residual stream, as the separate op of the norm does.
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = scale_rows(wide * rstd, w, weight_offset, SCALE_IN_FP32, h.dtype).to(h.dtype)
    if y_ptr is not None:
        tl.store(y_ptr + row + column, y, mask=inside)
    y = y.to(tl.float32)
    amax = tl.max(tl.abs(y), 0)
    if BY_ROW:
        scale = _scale(amax, LIMIT, TINY, POWER_OF_2)
        tl.store(inverse_ptr + tl.program_id(0), _inverse(scale))
        tl.store(rows_ptr + row + column, (y * scale).to(rows_ptr.dtype.element_ty), mask=inside)
    else:
        tl.atomic_max(amax_ptr, amax.to(tl.int32, bitcast=True))


def _arguments(matrix: Matrix) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]:
    x = matrix.x
    # Arguments that the kernel does not use must also be tensors.
    pointers = x, x if matrix.other is None else matrix.other, x if matrix.rstd is None else matrix.rstd
    return pointers, {"KIND": matrix.kind, "ACT": matrix.act, "SCALE_IN_FP32": matrix.scale_in_fp32}


def _limits(dtype: torch.dtype, power_of_2: bool) -> dict[str, object]:
    return {"LIMIT": torch.finfo(dtype).max, "TINY": TINY, "POWER_OF_2": power_of_2}


def add_amax(matrix: Matrix, amax: Tensor) -> None:
    """Raise ``amax`` in place to the largest absolute value of the matrix, or of each column, if ``amax`` is smaller.

    Args:
        amax: fp32, [1] for one maximum, or [C] for a maximum per column.
    """
    N, C = matrix.shape
    pointers, constants = _arguments(matrix)
    count = matrix.x.numel()
    # If each element depends only on the same position in memory and only one maximum is needed, memory is read in
    # order, which is faster than tile by tile.
    if N * C and amax.numel() == 1 and matrix.rstd is None:
        with on_device_of(matrix.x):
            _flat_amax_kernel[(cdiv(count, FLAT * FLAT_BLOCKS),)](
                *pointers[:2], amax.view(torch.int32), count, KIND=matrix.kind, ACT=matrix.act, BLOCKS=FLAT_BLOCKS,
                BLOCK=FLAT, num_warps=NUM_WARPS,
            )  # fmt: skip
    elif N * C:
        with on_device_of(matrix.x):
            _amax_kernel[(cdiv(N, ROWS * TILES), cdiv(C, COLUMNS))](
                *pointers, amax.view(torch.int32), N, C, matrix.weight_offset, PER_COLUMN=amax.numel() > 1,
                TILES=TILES, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS, **constants,
            )  # fmt: skip


def round_tiles(
    matrix: Matrix, amax: Tensor, dtype: torch.dtype, power_of_2: bool, *, rows: bool, columns: bool,
    product_amax: Tensor | None = None,
) -> tuple[Float8 | None, Float8 | None, Float8 | None]:  # fmt: skip
    """Round a matrix whose largest absolute values, ``amax``, are known.

    Args:
        amax: fp32, [1] for the whole matrix, or [C] for its columns. With [C], only ``columns`` may be requested.
        rows: whether to return the matrix by rows, [N, C].
        columns: whether to return the matrix by columns, [C, N], with N padded with zeros to a multiple of 16.
        product_amax: [1], the amax of the gated product ``act(gate) · up`` of the same gate and up; only for a matrix
            of kind "gradient". If given, this product is also rounded by columns.

    Returns:
        The matrix by rows, the matrix by columns, and the gated product by columns. Results that are not requested are
        None.
    """
    N, C = matrix.shape
    x = matrix.x
    padded = cdiv(N, MULTIPLE) * MULTIPLE
    by_rows = torch.empty((N, C) if rows else 0, dtype=dtype, device=x.device)
    by_columns = torch.empty((C, padded) if columns else 0, dtype=dtype, device=x.device)
    per_column = amax.numel() > 1
    inverse = torch.ones(C if per_column else (), dtype=torch.float32, device=x.device)
    product, product_inverse, wants_product = by_columns, inverse, product_amax is not None
    if wants_product:
        product = torch.empty(C // 2, padded, dtype=float8_dtype(x.device), device=x.device)
        product_inverse = torch.ones((), dtype=torch.float32, device=x.device)
    pointers, constants = _arguments(matrix)
    # fp32 matrices are stored by rows and by columns in two launches. If both stores use the same conversion from fp32
    # to float8, the assembler of Triton 3.6 generates code that reads some of the converted values from a wrong
    # register.
    launches = [(True, False), (False, True)] if rows and columns and x.dtype == torch.float32 else [(rows, columns)]
    for store_rows, store_columns in launches if N * C else ():
        with on_device_of(x):
            tiles = cdiv(C, WRITE_COLUMNS)
            beside = min(tiles, WRITE_TILES)
            _round_kernel[(beside, cdiv(padded, WRITE_ROWS), cdiv(tiles, beside))](
                *pointers, amax, amax if product_amax is None else product_amax, by_rows, by_columns, product, inverse,
                product_inverse, N, C, padded, matrix.weight_offset, PER_COLUMN=per_column, STORE_ROWS=store_rows,
                STORE_COLUMNS=store_columns, STORE_PRODUCT=wants_product and store_columns == columns,
                PRODUCT_LIMIT=torch.finfo(product.dtype).max, ROWS=WRITE_ROWS, COLUMNS=WRITE_COLUMNS,
                num_warps=NUM_WARPS, **_limits(dtype, power_of_2), **constants,
            )  # fmt: skip
    return (
        Float8(by_rows, inverse) if rows else None,
        Float8(by_columns, inverse) if columns else None,
        Float8(product, product_inverse) if wants_product else None,
    )


def round_rows(matrix: Matrix, dtype: torch.dtype, power_of_2: bool) -> Float8:
    """Round the matrix by rows, with one scale per row."""
    N, C = matrix.shape
    rows = torch.empty(N, C, dtype=dtype, device=matrix.x.device)
    inverse = torch.empty(N, dtype=torch.float32, device=matrix.x.device)
    pointers, constants = _arguments(matrix)
    block = min(next_power_of_2(C), ROW_BLOCK)
    if N * C:
        with on_device_of(matrix.x):
            _round_rows_kernel[(N,)](
                *pointers, rows, inverse, N, C, matrix.weight_offset, COLUMNS=block, num_warps=max(block // 512, 1),
                **_limits(dtype, power_of_2), **constants, **overlap(matrix.x),
            )  # fmt: skip
    return Float8(rows, inverse)


def round_matrix(
    matrix: Matrix,
    recipe: Recipe,
    *,
    gradient: bool = False,
    rows: bool = True,
    columns: bool = False,
    amax: Tensor | None = None,
    known: bool = False,
) -> tuple[Float8, Float8]:
    """Round an operand as the recipe specifies, and return it by rows and by columns.

    ``rows`` and ``columns`` say which of these results are requested. The caller may use only requested results.

    Args:
        matrix: [N, C].
        recipe: one of `RECIPES`.
        gradient: whether the matrix is a gradient, which some recipes round to e5m2.
        rows: whether to round by rows, [N, C].
        columns: whether to round by columns, [C, N], with N padded to a multiple of 16.
        amax: [1] fp32, the largest absolute value of the matrices that were rounded before this one, such as earlier
            chunks; 0 or None if there were none. With one scale per operand, ``amax`` is raised in place to the largest
            absolute value of this matrix if that is larger. With one scale per row, ``amax`` is not used.
        known: whether amax is already at least the largest absolute value of this matrix.
    """
    dtype = float8_dtype(matrix.x.device, gradient and recipe.wide_gradients)
    by_rows = by_columns = None
    if recipe.by_row and rows:
        by_rows = round_rows(matrix, dtype, recipe.power_of_2)
    if recipe.by_row and columns:
        amax = torch.zeros(matrix.shape[1], dtype=torch.float32, device=matrix.x.device)
        add_amax(matrix, amax)
        _, by_columns, _ = round_tiles(matrix, amax, dtype, recipe.power_of_2, rows=False, columns=True)
    if not recipe.by_row and (rows or columns):
        amax = torch.zeros(1, dtype=torch.float32, device=matrix.x.device) if amax is None else amax
        if not known:
            add_amax(matrix, amax)
        by_rows, by_columns, _ = round_tiles(matrix, amax, dtype, recipe.power_of_2, rows=rows, columns=columns)
    return by_rows, by_columns  # type: ignore[return-value]


def round_columns(matrix: Matrix, recipe: Recipe, amax: Tensor | None = None) -> Float8:
    """Round an operand by columns only; see `round_matrix`.

    If amax is given, it must be at least the matrix's largest absolute value.
    """
    return round_matrix(matrix, recipe, rows=False, columns=True, amax=amax, known=amax is not None)[1]


def round_gradient(
    gate_up: Tensor, d_product: Tensor, act: str, recipe: Recipe, amax: Tensor | None, *,
    rows: bool, columns: bool, product: bool,
) -> tuple[Float8, Float8, Float8]:  # fmt: skip
    """Round the gradient of gate_up by rows and by columns, and the gated product by columns.

    Args:
        gate_up: [N, 2 F].
        d_product: [N, F], the gradient of the gated product.
        act: the activation.
        recipe: one of `RECIPES`.
        amax: [1], the largest absolute value of the gated product; None if it is not known.
        rows, columns, product: whether each result is requested. The caller may use only requested results.
    """
    gradient, of_product = Matrix("gradient", gate_up, d_product, act=act), Matrix("product", gate_up, act=act)
    parts: tuple[Float8 | None, ...]
    if recipe.by_row:
        parts = round_matrix(gradient, recipe, gradient=True, rows=rows, columns=columns)
        parts = *parts, round_columns(of_product, recipe) if product else None
    else:
        bounds = torch.zeros(2, dtype=torch.float32, device=gate_up.device)
        add_amax(gradient, bounds[:1])
        if amax is None and product:
            amax = bounds[1:]
            add_amax(of_product, amax)
        parts = round_tiles(
            gradient, bounds[:1], float8_dtype(gate_up.device, recipe.wide_gradients), recipe.power_of_2,
            rows=rows, columns=columns, product_amax=amax if product else None,
        )  # fmt: skip
    return parts  # type: ignore[return-value]


def round_known(x: Tensor, dtype: torch.dtype, amax: Tensor) -> Tensor:
    """Round x [R, K] to a float8 dtype with one scale. The scale is computed from the largest absolute value of x,
    which the caller passes as ``amax`` [1] in fp32.
    """
    if use_triton(x):
        by_rows, _, _ = round_tiles(plain(x), amax, dtype, False, rows=True, columns=False)
        assert by_rows is not None
        return by_rows.data
    limit = torch.finfo(dtype).max
    return (x.float() * tensor_scale(amax, dtype)).clamp(-limit, limit).to(dtype)


def tensor_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute fp32 scales, in the shape of ``amax``, for tensors whose largest absolute values are ``amax``.

    The scales are not rounded to powers of 2.
    """
    return (torch.finfo(dtype).max / amax.double().clamp_min(TINY)).float()


def transposed(matrix: Float8) -> Float8:
    """Transpose a rounded matrix [R, K] with one scale to [K, R]. R must be a multiple of 16."""
    codes = matrix.data
    if not use_triton(matrix.inverse):
        return Float8(codes.view(torch.uint8).t().contiguous().view(codes.dtype), matrix.inverse)
    # If amax is the largest number of the format, the scale is 1.
    amax = torch.full((1,), torch.finfo(codes.dtype).max, dtype=torch.float32, device=codes.device)
    _, by_columns, _ = round_tiles(plain(codes), amax, codes.dtype, False, rows=False, columns=True)
    assert by_columns is not None
    return Float8(by_columns.data, matrix.inverse)


def weight_rows(weight: Tensor, recipe: Recipe, amax: Tensor, gathered: Float8 | None = None) -> Float8:
    """Round a weight [O, C] by rows, for the product that computes y.

    With one scale per operand, ``amax`` [1] is raised in place to the largest absolute value of the weight.
    If the ranks rounded their shards of the weight before gathering them, ``gathered`` holds the rounded rows, which
    have a single scale. The values of ``weight`` are then not read.
    """
    return round_matrix(plain(weight), recipe, amax=amax)[0] if gathered is None else gathered


def weight_columns(weight: Tensor, recipe: Recipe, amax: Tensor, gathered: Float8 | None = None) -> Float8:
    """Round a weight [O, C] by columns, and return it as [C, O], for the product that computes dx. ``amax`` has the
    value that `weight_rows` set.
    """
    if gathered is not None:
        return transposed(gathered)
    if recipe.by_row and not recipe.rounds_dw:  # W has one scale in this product, and its maximum is not yet known
        return round_columns(plain(weight), recipe._replace(by_row=False))
    return round_columns(plain(weight), recipe, amax)


def float8_pair(codes: Tensor | None, inverse: Tensor | None) -> Float8 | None:
    """Rebuild a `Float8` from the two tensors by which ops represent it. If one of the tensors is None, return None."""
    return None if codes is None or inverse is None else Float8(codes, inverse)


def rms_norm_round(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool,
    recipe: Recipe, amax: Tensor, y: Tensor | None = None,
) -> tuple[Float8, Tensor, Tensor]:  # fmt: skip
    """Compute ``h = residual + x``, and round `rms_norm` of h to float8 by rows. Return ``(rows, h, rstd)``.

    If ``y`` [..., C] is given, `rms_norm` of h is also written to it, in the dtype of the residual. Rows must have at
    most `row_norm.MAX_TILE` columns. With one scale per row, a single kernel computes everything. Otherwise, a first
    kernel raises ``amax`` [1] to the largest absolute value, and a second kernel rounds.
    """
    # The kernel adds and normalizes. With one scale per row, it also rounds; otherwise, it finds the maximum.
    residual = residual.contiguous()
    C = residual.shape[-1]
    N = residual.numel() // C
    h = residual if x is None else torch.empty_like(residual)
    rstd = torch.empty(residual.shape[:-1], dtype=torch.float32, device=h.device)
    dtype = float8_dtype(h.device)
    rows = torch.empty((N, C) if recipe.by_row else 0, dtype=dtype, device=h.device)
    inverse = torch.empty(N if recipe.by_row else 0, dtype=torch.float32, device=h.device)
    block = max(next_power_of_2(C), 128)
    weight = weight.contiguous()
    if N:
        with on_device_of(h):
            _rms_norm_round_kernel[(N,)](
                residual if x is None else x.contiguous(), residual, weight, h, rstd, y, amax.view(torch.int32), rows,
                inverse, C, eps, weight_offset, ADD=x is not None, SCALE_IN_FP32=scale_in_fp32, BY_ROW=recipe.by_row,
                BLOCK=block, num_warps=num_warps(block), **_limits(dtype, recipe.power_of_2), **overlap(h),
            )  # fmt: skip
    if recipe.by_row:
        return Float8(rows, inverse), h, rstd
    # With one scale per operand, a second kernel recomputes the normalized rows from h, and rounds them.
    matrix = normed_matrix(h, weight, rstd, weight_offset, scale_in_fp32)
    return round_matrix(matrix, recipe, amax=amax, known=True)[0], h, rstd


def normed_matrix(h: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, scale_in_fp32: bool) -> Matrix:
    """Return a `Matrix` that stands for `rms_norm` of h [..., C]. Kernels compute its elements from h and the saved
    rstd.
    """
    rows = h.reshape(-1, h.shape[-1]).contiguous()
    return Matrix("rms_norm", rows, weight.contiguous(), rstd.reshape(-1), "", weight_offset, scale_in_fp32)


def pad_columns(data: Tensor) -> Tensor:
    """Pad a matrix [R, K] with zeros to a multiple of 16 columns."""
    missing = -data.shape[1] % MULTIPLE
    return F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype) if missing else data


def scaled_product(a: Float8, b: Float8, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute ``a @ bᵀ`` [M, N] in ``dtype`` from rounded matrices ``a`` [M, K] and ``b`` [N, K].

    N must be a multiple of 16. With ``fast``, NVIDIA's hardware accumulates the products with fewer bits, which is
    precise enough for the forward. If an operand has one scale per row, a GPU first rounds the result to bfloat16.
    """
    M, N = a.data.shape[0], b.data.shape[0]
    if M == 0 or a.data.shape[1] == 0:
        return a.inverse.new_zeros(M, N, dtype=dtype)
    if a.data.device.type != "cuda":
        with torch.autocast(a.data.device.type, enabled=False):
            y = a.data.float() @ b.data.float().t()
        return y.mul_(a.inverse.view(-1, 1)).mul_(b.inverse.view(1, -1)).to(dtype)
    by_row = a.inverse.dim() + b.inverse.dim() > 0
    scale_a, scale_b = a.inverse, b.inverse
    if by_row:  # the hardware takes scales per row for both operands or for neither
        scale_a, scale_b = scale_a.expand(M).contiguous()[:, None], scale_b.expand(N).contiguous()[None]
    left, right = (pad_columns(factor.data) for factor in (a, b))
    out_dtype = torch.bfloat16 if by_row else dtype
    y = torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    return y.to(dtype)
