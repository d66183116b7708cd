"""Kernels and ops of RMSNorm and LayerNorm. Both norms normalize each row of width C.

The formulas are in `rms_norm.py` and `layer_norm.py`. Both norms run the same kernels. With CENTERED (LayerNorm), the
mean of the row is subtracted first, and a bias may be added. If a launch does not need a pointer, the pointer is None,
and the kernel is compiled without it.

The forward saves the norm's input h in its own dtype, and the statistics of each row in fp32. The statistics are r for
RMSNorm and [μ, r] for LayerNorm. The gradients of weight and bias are summed in fp32: each program writes a partial sum
of each gradient, and `sum_partials` adds the partial sums.

A norm is described by its weight [C], its bias [C] or None, and the constants
``kind, eps, weight_offset, scale_in_fp32``. All functions take these six arguments in this order, which is the order of
`FusedNorm`'s fields. LayerNorm ignores ``weight_offset`` and ``scale_in_fp32``.
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2, num_warps

MAX_TILE = 16384
"""Width of the widest row that a program of RMSNorm holds in registers. Wider rows are processed in tiles."""

MAX_WIDTH = 65536
"""Maximum row width of a LayerNorm. Its programs always hold the whole row in registers."""

LEAST_TILE = 128
"""Minimum width of a tile of the forward, so that each thread of a warp has at least two elements. If each thread had
one element, compilers would fuse the square of this element with the first addition of another thread's square. The
fused sums of two threads differ in rounding, so the threads would normalize by different r. Because only one r is
saved, the rows could not be recomputed exactly."""

STAGES = 3
"""Number of tiles of rows that a program of the backward has in flight if shared memory can hold them."""

BACKWARD_TILE = 4096
"""Minimum number of elements in a tile of the backward. If rows are narrow, a tile has several rows."""

WIDE_ROW_SPLITS = 64
WIDE_ROW_COLUMNS = 1024
"""For rows wider than a tile: number of partial sums of the weight gradient, and number of columns per program."""

ELEMENTWISE_BLOCK = 4096
"""Number of columns per program of the kernel that recomputes normalized rows elementwise from saved statistics. Rows
of this width are typical of 7B models. With this number, a thread processes 16 elements."""


@triton.jit
def scale_rows(n, w, weight_offset, SCALE_IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """Perform the last step of RMSNorm: multiply n by the weight.

    With SCALE_IN_FP32 the product is in fp32. Otherwise, n is first rounded to ``dtype``, and the sum of weight and
    offset is rounded to the weight's dtype.
    """
    if SCALE_IN_FP32:
        return (w.to(tl.float32) + weight_offset) * n
    scale = (w.to(tl.float32) + weight_offset).to(w.dtype)
    return scale.to(tl.float32) * n.to(dtype).to(tl.float32)


@triton.jit
def _scale(n, w, b, weight_offset, CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """Perform the last step of RMSNorm or LayerNorm: multiply by the weight, and add the bias b unless b is None."""
    if CENTERED:
        y = n * w.to(tl.float32)
        if b is not None:
            y += b.to(tl.float32)
        return y
    return scale_rows(n, w, weight_offset, SCALE_IN_FP32, dtype)


@triton.jit
def _load_bias(b_ptr, columns, inside):
    """Load elements of the bias, or return None if there is no bias."""
    b = None
    if b_ptr is not None:
        b = tl.load(b_ptr + columns, mask=inside, other=0.0)
    return b


@triton.jit
def _add_residual(h, residual_ptr, h_ptr, start, columns, inside):
    """Return the sum of x, which is passed as ``h``, and the residual, and store this sum in the dtype of the residual.

    Without a residual, return x, and store nothing.
    """
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + start + columns, mask=inside, other=0.0)
        h = (residual.to(tl.float32) + h.to(tl.float32)).to(residual.dtype)
        tl.store(h_ptr + start + columns, h, mask=inside)
    return h


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, h_ptr, statistics_ptr, C, x_n, eps, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, ONE_TILE: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program normalizes one row of x [N, C]. ``x_n`` is the stride of the rows of x."""
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * C
    x_ptr += tl.program_id(0).to(tl.int64) * x_n
    columns = tl.arange(0, BLOCK)  # [BLOCK]

    if ONE_TILE:
        # h = residual + x stays in registers until it is normalized.
        inside = columns < C
        h = tl.load(x_ptr + columns, mask=inside, other=0.0)
        h = _add_residual(h, residual_ptr, h_ptr, row, columns, inside)

        # Compute the statistics of the row.
        wide = h.to(tl.float32)
        if CENTERED:
            mean = tl.sum(wide, 0) / C
            # The mean of the differences corrects the rounding error of a mean far from 0. Lanes outside the row are 0.
            mean += tl.sum(tl.where(inside, wide - mean, 0.0), 0) / C
            wide = tl.where(inside, wide - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)

        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        b = _load_bias(b_ptr, columns, inside)
        y = _scale(wide * rstd, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype)
        tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        # A first loop over the row adds the residual and sums the squares.
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            h = tl.load(x_ptr + start + columns, mask=inside, other=0.0)
            h = _add_residual(h, residual_ptr, h_ptr, row + start, columns, inside)
            wide = h.to(tl.float32)
            square += wide * wide
        rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / C + eps)

        # A second loop normalizes. With a residual, each thread reads only elements that it has stored itself above.
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            h = tl.load((x_ptr if residual_ptr is None else h_ptr + row) + start + columns, mask=inside, other=0.0)
            w = tl.load(w_ptr + start + columns, mask=inside, other=0.0)
            y = scale_rows(h.to(tl.float32) * rstd, w, weight_offset, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + row + start + columns, y.to(y_ptr.dtype.element_ty), mask=inside)

    if CENTERED:
        tl.store(statistics_ptr + 2 * tl.program_id(0).to(tl.int64), mean)
        tl.store(statistics_ptr + 2 * tl.program_id(0).to(tl.int64) + 1, rstd)
    else:
        tl.store(statistics_ptr + tl.program_id(0), rstd)


@triton.jit
def _normed_kernel(
    h_ptr, w_ptr, b_ptr, statistics_ptr, y_ptr, C, h_n, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute BLOCK columns of a normalized row [C] from the saved statistics."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < C
    h = tl.load(h_ptr + index * h_n + columns, mask=inside, other=0.0)
    if CENTERED:
        n = (h.to(tl.float32) - tl.load(statistics_ptr + 2 * index)) * tl.load(statistics_ptr + 2 * index + 1)
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    else:
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        n = h.to(tl.float32) * tl.load(statistics_ptr + tl.program_id(0))
    b = _load_bias(b_ptr, columns, inside)

    # The row is first rounded to the dtype of h, as in the forward.
    y = _scale(n, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype).to(h.dtype)
    tl.store(y_ptr + index * C + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, statistics_ptr, dx_ptr, partial_ptr, y_ptr, N, C, h_n, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, STORE_DW: tl.constexpr, STORE_DB: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx of a program's rows in tiles of ROWS rows, and the program's partial sums of dw and db [C].

    If a pointer for y is given, the kernel also recomputes y.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)[None, :]  # [1, BLOCK]
    b = _load_bias(b_ptr, columns, inside)  # [BLOCK]
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * C + columns[None, :]  # [ROWS, BLOCK]
        mask = (rows < N)[:, None] & inside[None, :]
        h = tl.load(h_ptr + rows[:, None] * h_n + columns[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)

        # Recompute the normalized rows n [ROWS, BLOCK] from the saved statistics.
        if CENTERED:
            mean = tl.load(statistics_ptr + 2 * rows, mask=rows < N, other=0.0)[:, None]
            rstd = tl.load(statistics_ptr + 2 * rows + 1, mask=rows < N, other=0.0)[:, None]
            n = tl.where(mask, (h.to(tl.float32) - mean) * rstd, 0.0)
        else:
            rstd = tl.load(statistics_ptr + rows, mask=rows < N, other=0.0)[:, None]
            n = h.to(tl.float32) * rstd

        # Compute dx = r · (g − mean(g) − n · mean(g · n)) + dh. For RMSNorm, the term mean(g) is left out.
        if CENTERED:
            g = dy * w.to(tl.float32)
            dx = rstd * (g - (tl.sum(g, 1) / C)[:, None] - n * (tl.sum(g * n, 1) / C)[:, None])
        else:
            g = dy * (w.to(tl.float32) + weight_offset)
            dx = rstd * (g - n * (tl.sum(g * n, 1) / C)[:, None])
        if dh_ptr is not None:
            dx += tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)

        if STORE_DW:
            # The forward multiplied the weight by the rounded n, so the gradient also uses the rounded n.
            dw += tl.sum(dy * (n if CENTERED or SCALE_IN_FP32 else n.to(h.dtype).to(tl.float32)), 0)
        if STORE_DB:
            db += tl.sum(dy, 0)
        if y_ptr is not None:
            y = _scale(n, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)

    # Every program writes its own row of partial sums: dw if it is requested, then db if it is requested. There are no
    # atomic additions, so the sum is bitwise identical in every run.
    if STORE_DW or STORE_DB:
        partial_ptr += tl.program_id(0).to(tl.int64) * (C * (STORE_DW + STORE_DB)) + columns
    if STORE_DW:
        tl.store(partial_ptr, dw, mask=inside)
    if STORE_DB:
        tl.store(partial_ptr + C * STORE_DW, db, mask=inside)


@triton.jit
def _rms_norm_backward_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, y_ptr, C, weight_offset,
    SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx and y of a row that is wider than a tile. `_rms_norm_weight_gradient_kernel` computes dw."""
    row = tl.program_id(0).to(tl.int64) * C
    rstd = tl.load(rstd_ptr + tl.program_id(0))

    # A first loop over the row computes mean(g · n).
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < C
        n = tl.load(h_ptr + row + columns, mask=inside, other=0.0).to(tl.float32) * rstd
        w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
        dot += n * w * tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(dot, 0) / C

    # A second loop computes dx and y.
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < C
        h = tl.load(h_ptr + row + columns, mask=inside, other=0.0)
        n = h.to(tl.float32) * rstd
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        g = tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32) * (w.to(tl.float32) + weight_offset)
        dx = rstd * (g - n * mean)
        if dh_ptr is not None:
            dx += tl.load(dh_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if y_ptr is not None:
            y = scale_rows(n, w, weight_offset, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_weight_gradient_kernel(
    dy_ptr, h_ptr, rstd_ptr, dw_ptr, N, C, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute BLOCK columns of a partial sum of dw. The rows are divided among n programs (``num_programs(1)``), each
    of which sums over every n-th row.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    dw = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(1).to(tl.int64) * C
    for index in range(tl.program_id(1), N, tl.num_programs(1)):
        h = tl.load(h_ptr + row + columns, mask=inside, other=0.0)
        n = h.to(tl.float32) * tl.load(rstd_ptr + index)
        dy = tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        dw += dy * (n if SCALE_IN_FP32 else n.to(h.dtype).to(tl.float32))
        row += tl.num_programs(1).to(tl.int64) * C
    tl.store(dw_ptr + tl.program_id(1).to(tl.int64) * C + columns, dw, mask=inside)


def is_centered(kind: str) -> bool:
    """Return whether the norm subtracts the mean, as LayerNorm does."""
    return kind == "layer_norm"


def _tile(kind: str, width: int) -> tuple[int, int]:
    """Return the number of elements of a row that a program holds in registers, and the number of warps per program."""
    widest, most_warps = (MAX_WIDTH, 32) if is_centered(kind) else (MAX_TILE, 16)
    block = min(next_power_of_2(width), widest)
    return block, num_warps(block, most_warps)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _spaced_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., C] with contiguous, equally spaced rows, and the distance between the starts of adjacent rows.

    If the rows of x are not contiguous or not equally spaced, a contiguous copy is returned. A column slice of
    contiguous rows, such as a part of the output of a packed projection, is not copied.
    """
    shape, strides = x.shape, x.stride()
    if x.is_contiguous():
        return x, shape[-1]
    spaced = x.dim() > 1 and strides[-1] == 1 and shape[-1] <= MAX_TILE  # kernels for wider rows take no distance
    if spaced and all(strides[i] == shape[i + 1] * strides[i + 1] for i in range(x.dim() - 2)):
        return x, strides[-2]
    return x.contiguous(), shape[-1]


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize ``h = residual + x``, and return ``(y, h, statistics)``.

    If the residual is None, h is x itself, or the contiguous copy of x that `_spaced_rows` has made.
    """
    weight = weight.contiguous()
    x, x_n = _spaced_rows(x)
    residual, bias = _contiguous(residual, bias)
    C = x.shape[-1]
    N = x.numel() // C
    y = torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)
    h = x if residual is None else torch.empty_like(residual)
    shape = (*x.shape[:-1], 2) if is_centered(kind) else x.shape[:-1]
    statistics = torch.empty(shape, dtype=torch.float32, device=x.device)
    # With a tile narrower than LEAST_TILE, the backward could not recompute the rows exactly.
    block, warps = _tile(kind, max(C, LEAST_TILE))
    launch = {"OVERLAPS": False} if is_centered(kind) else overlap(x)
    if N:
        with on_device_of(x):
            _norm_kernel[(N,)](
                x, residual, weight, bias, y, h, statistics, C, x_n, eps, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, ONE_TILE=block >= C, BLOCK=block,
                num_warps=warps, **launch,
            )  # fmt: skip
    return y, h, statistics


def normed_rows(
    h: Tensor, statistics: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool,
) -> Tensor:  # fmt: skip
    """Recompute the normalized rows from the saved statistics, and cast them to ``dtype``.

    Before the cast, the rows are bitwise identical to the rows of the forward.
    """
    weight = weight.contiguous()
    h, h_n = _spaced_rows(h)
    C = h.shape[-1]
    y = torch.empty_like(h, dtype=dtype, memory_format=torch.contiguous_format)
    block = min(next_power_of_2(C), ELEMENTWISE_BLOCK)
    if h.numel():
        with on_device_of(h):
            _normed_kernel[(h.numel() // C, cdiv(C, block))](
                h, weight, *_contiguous(bias), statistics, y, C, h_n, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, BLOCK=block, num_warps=num_warps(block),
            )  # fmt: skip
    return y


def norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor | None, kind: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, *,
    need_dw: bool, need_db: bool = False, sum_dtype: torch.dtype | None = None, need_y: bool = False,
    y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the backward of the norm, and return ``(dx, dw, db, y)``, where y is the recomputed output of the
    forward.

    Results that are not needed are None.

    Args:
        dy: gradient of the normalized rows.
        dh: gradient that reaches h by other paths, which is added to dx; None if there is no such gradient.
        bias: the bias, which affects only y.
        need_dw, need_db, need_y: whether dw, db and y are needed.
        sum_dtype: dtype of dw and db; None for the dtype of the weight.
        y_dtype: dtype of y; None for the dtype of h.
    """
    dy, weight = dy.contiguous(), weight.contiguous()
    h, h_n = _spaced_rows(h)
    dh, bias = _contiguous(dh, bias)
    C = h.shape[-1]
    N = h.numel() // C
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    y = torch.empty_like(dx, dtype=y_dtype) if need_y else None
    dw, db = (torch.empty_like(weight, dtype=sum_dtype) if need else None for need in (need_dw, need_db))
    sums = [total for total in (dw, db) if total is not None]
    block, warps = _tile(kind, C)

    if block >= C:
        # Only as many programs are launched as occupy the device. Each program sums dw and db over several tiles of
        # rows.
        rows = max(BACKWARD_TILE // block, 1)
        in_flight = rows * block * sum(tensor.element_size() for tensor in (h, dy, dh) if tensor is not None)
        programs = min(cdiv(N, rows), num_programs(h, max(2 * BACKWARD_TILE // block // rows, 1)))
    else:
        # Rows are too wide for registers. One kernel computes dx, with one row per program. Another kernel computes dw,
        # and each of its programs sums some columns over a part of the rows.
        programs = min(N, WIDE_ROW_SPLITS)
    # Allocate the programs' fp32 partial sums of dw and db, side by side: [programs, C] or [programs, 2 · C].
    partial = torch.empty(programs, len(sums) * C, dtype=torch.float32, device=h.device) if sums else None

    with on_device_of(h):
        if N and block >= C:
            _norm_backward_kernel[(programs,)](
                dy, dh, h, weight, bias, statistics, dx, partial, y, N, C, h_n, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, STORE_DW=need_dw, STORE_DB=need_db,
                ROWS=rows, BLOCK=block, STAGES=fitting_stages(h, STAGES, in_flight), num_warps=max(warps, 4),
            )  # fmt: skip
        elif N:
            _rms_norm_backward_wide_kernel[(N,)](
                dy, dh, h, weight, statistics, dx, y, C, weight_offset,
                SCALE_IN_FP32=scale_in_fp32, BLOCK=block, num_warps=warps,
            )  # fmt: skip
            if need_dw:
                _rms_norm_weight_gradient_kernel[(cdiv(C, WIDE_ROW_COLUMNS), programs)](
                    dy, h, statistics, partial, N, C,
                    SCALE_IN_FP32=scale_in_fp32, BLOCK=WIDE_ROW_COLUMNS, num_warps=4,
                )  # fmt: skip
    if partial is not None:
        sum_partials(partial, *sums)
    return dx, dw, db, y


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    y, _, statistics = norm_forward(x, None, weight, bias, kind, eps, weight_offset, scale_in_fp32)
    return y, statistics


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return norm_forward(x, residual, weight, bias, kind, eps, weight_offset, scale_in_fp32)


def _norm_fake(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], 2) if is_centered(kind) else x.shape[:-1]
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _add_norm_fake(x: Tensor, residual: Tensor, *norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, statistics = _norm_fake(residual, *norm)
    return y, torch.empty_like(y), statistics


def _norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor | None, kind: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db, _ = norm_backward(
        dy, dh, h, statistics, weight, bias, kind, eps, weight_offset, scale_in_fp32, need_dw=need_dw, need_db=need_db
    )
    return dx, weight.new_empty(0) if dw is None else dw, weight.new_empty(0) if db is None else db


def _norm_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, weight: Tensor, *norm_and_needs: Any
) -> tuple[Tensor, ...]:
    dw, db = (weight.new_empty(weight.shape if need else 0) for need in norm_and_needs[-2:])
    return h.new_empty(h.shape), dw, db


def _gradients(
    dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, kind: str, eps: float, weight_offset: float,
    scale_in_fp32: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return BACKWARD(
        dy, None, x, statistics, weight, None, kind, eps, weight_offset, scale_in_fp32, need_weight, need_bias
    )


def _add_gradients(
    dy: Tensor | None, dh: Tensor | None, h: Tensor, statistics: Tensor, weight: Tensor, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if dy is None:  # the loss depends only on the residual stream
        return dh, dh, None, None
    dx, dw, db = BACKWARD(
        dy, dh, h, statistics, weight, None, kind, eps, weight_offset, scale_in_fp32, need_weight, need_bias
    )
    return dx, dx, dw, db


BACKWARD = define_op("norm_backward", _norm_backward, _norm_backward_fake)
NORM = define_op(
    "norm", _norm, _norm_fake,
    outputs="y statistics", constants="statistics", backward=_gradients, gradients="x weight bias",
)  # fmt: skip
ADD_NORM = define_op(
    "add_norm", _add_norm, _add_norm_fake,
    outputs="y h statistics", constants="statistics", backward=_add_gradients, gradients="x residual weight bias",
)  # fmt: skip
