"""Kernels and ops of RMSNorm and LayerNorm, which norm each row of width C.

`rms_norm.py` and `layer_norm.py` have the formulas. Both norms run the same kernels: with CENTERED (LayerNorm) a row's
mean is subtracted first, and a bias may be added. A pointer that a launch doesn't need is None, and the kernel is then
compiled without it.

Saved: h, the input of the norm, in its own dtype, and the statistics of each row in fp32: r for RMSNorm, [μ, r] for
LayerNorm. The gradients of weight and bias are summed in fp32: each program writes a partial row of both, and
`sum_partials` adds the rows.

All functions take a norm as its weight [C], its bias [C] or None, and the constants ``kind, eps, weight_offset,
scale_in_fp32``, in the order of `FusedNorm`'s fields. LayerNorm ignores the last two constants.
"""

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import num_warps

MAX_TILE = 16384
"""Widest row that a program of RMSNorm holds in registers; it walks wider rows in tiles."""

MAX_WIDTH = 65536
"""Widest row of a LayerNorm, whose programs always hold a row in registers."""

LEAST_TILE = 128
"""Narrowest tile of the forward: at least two numbers for each thread of a warp. With one number each, compilers fuse
the square of a thread's own number into its first sum with another thread's square. The two sums then differ by a
rounding, and so does the r that each thread norms by. Only one r is saved, so the rows could not be recomputed."""

STAGES = 3
"""Tiles of rows that a program of the backward has in flight, as far as shared memory holds them."""

BACKWARD_TILE = 4096
"""Minimum number of elements in such a tile, which holds several rows if they are narrow."""

WIDE_ROW_SPLITS = 64
WIDE_ROW_COLUMNS = 1024
"""Partial sums of a weight gradient of wide rows, and columns that a program adds."""

ELEMENTWISE_BLOCK = 4096
"""Columns per program where saved statistics make a norm elementwise: a row of a 7B model, 16 elements per thread."""


@triton.jit
def scale_rows(n, w, weight_offset, SCALE_IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm's last step: n times the weight, in fp32, or after n and the weight are rounded to ``dtype``."""
    if SCALE_IN_FP32:
        return (w.to(tl.float32) + weight_offset) * n
    scale = (w.to(tl.float32) + weight_offset).to(w.dtype)
    return scale.to(tl.float32) * n.to(dtype).to(tl.float32)


@triton.jit
def _scale(n, w, b, weight_offset, CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """The last step of both norms; b is None without a bias."""
    if CENTERED:
        y = n * w.to(tl.float32)
        if b is not None:
            y += b.to(tl.float32)
        return y
    return scale_rows(n, w, weight_offset, SCALE_IN_FP32, dtype)


@triton.jit
def _load_bias(b_ptr, columns, inside):
    """Load entries of the bias; None without a bias."""
    b = None
    if b_ptr is not None:
        b = tl.load(b_ptr + columns, mask=inside, other=0.0)
    return b


@triton.jit
def _add_residual(h, residual_ptr, h_ptr, start, columns, inside):
    """``h = residual + x``, rounded to the dtype of the residual stream and stored; without a residual h is x."""
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + start + columns, mask=inside, other=0.0)
        h = (residual.to(tl.float32) + h.to(tl.float32)).to(residual.dtype)
        tl.store(h_ptr + start + columns, h, mask=inside)
    return h


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, h_ptr, statistics_ptr, C, eps, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, ONE_TILE: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm one row of x [N, C] per program."""
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * C
    columns = tl.arange(0, BLOCK)  # [BLOCK]

    if ONE_TILE:
        # h = residual + x, in registers until it is normed.
        inside = columns < C
        h = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
        h = _add_residual(h, residual_ptr, h_ptr, row, columns, inside)

        # Statistics of the row.
        wide = h.to(tl.float32)
        if CENTERED:
            mean = tl.sum(wide, 0) / C
            # A second pass corrects the rounding error of a mean far from zero. Lanes outside the row count as zeros.
            mean += tl.sum(tl.where(inside, wide - mean, 0.0), 0) / C
            wide = tl.where(inside, wide - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)

        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        b = _load_bias(b_ptr, columns, inside)
        y = _scale(wide * rstd, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype)
        tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        # A first walk along the row adds the residual and sums the squares.
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            h = tl.load(x_ptr + row + start + columns, mask=inside, other=0.0)
            h = _add_residual(h, residual_ptr, h_ptr, row + start, columns, inside)
            wide = h.to(tl.float32)
            square += wide * wide
        rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / C + eps)

        # A second walk norms. With a residual, each thread reads back just what it stored itself above.
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            h = tl.load((x_ptr if residual_ptr is None else h_ptr) + row + start + columns, mask=inside, other=0.0)
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
    h_ptr, w_ptr, b_ptr, statistics_ptr, y_ptr, C, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute BLOCK columns of a row [C] of the forward's result from the saved statistics."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < C
    h = tl.load(h_ptr + index * C + columns, mask=inside, other=0.0)
    if CENTERED:
        n = (h.to(tl.float32) - tl.load(statistics_ptr + 2 * index)) * tl.load(statistics_ptr + 2 * index + 1)
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    else:
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        n = h.to(tl.float32) * tl.load(statistics_ptr + tl.program_id(0))
    b = _load_bias(b_ptr, columns, inside)

    # Rounded to the dtype of h first, as in the forward.
    y = _scale(n, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype).to(h.dtype)
    tl.store(y_ptr + index * C + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, statistics_ptr, dx_ptr, partial_ptr, y_ptr, N, C, weight_offset,
    CENTERED: tl.constexpr, SCALE_IN_FP32: tl.constexpr, STORE_DW: tl.constexpr, STORE_DB: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx and, if requested, y in tiles of ROWS rows, and a program's part of dw and db [C]."""
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
        h = tl.load(h_ptr + at, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)

        # The normed rows n, [ROWS, BLOCK], from the saved statistics.
        if CENTERED:
            mean = tl.load(statistics_ptr + 2 * rows, mask=rows < N, other=0.0)[:, None]
            rstd = tl.load(statistics_ptr + 2 * rows + 1, mask=rows < N, other=0.0)[:, None]
            n = tl.where(mask, (h.to(tl.float32) - mean) * rstd, 0.0)
        else:
            rstd = tl.load(statistics_ptr + rows, mask=rows < N, other=0.0)[:, None]
            n = h.to(tl.float32) * rstd

        # dx = r · (g − mean(g) − n · mean(g · n)) + dh; RMSNorm has no mean(g).
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
            # The weight was multiplied by n as the forward rounded it.
            dw += tl.sum(dy * (n if CENTERED or SCALE_IN_FP32 else n.to(h.dtype).to(tl.float32)), 0)
        if STORE_DB:
            db += tl.sum(dy, 0)
        if y_ptr is not None:
            y = _scale(n, w, b, weight_offset, CENTERED, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)

    # Every program writes its own row, so no atomic addition is needed and the sum has the same bits in every run.
    # The program's row of partial sums: dw, then db, as far as they are wanted.
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
    """Compute dx and y of a row wider than a tile; `_rms_norm_weight_gradient_kernel` computes dw."""
    row = tl.program_id(0).to(tl.int64) * C
    rstd = tl.load(rstd_ptr + tl.program_id(0))

    # A first walk along the row: mean(g · n).
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < C
        n = tl.load(h_ptr + row + columns, mask=inside, other=0.0).to(tl.float32) * rstd
        w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
        dot += n * w * tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(dot, 0) / C

    # A second walk: dx and y.
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
    """Sum BLOCK columns of dw over every ``num_programs(1)``-th row."""
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
    """Whether the norm subtracts the mean, as LayerNorm does."""
    return kind == "layer_norm"


def _tile(kind: str, width: int) -> tuple[int, int]:
    """How many numbers of a row a program holds in registers, and its number of warps."""
    widest, most_warps = (MAX_WIDTH, 32) if is_centered(kind) else (MAX_TILE, 16)
    block = min(triton.next_power_of_2(width), widest)
    return block, num_warps(block, most_warps)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm ``h = residual + x`` and return ``(y, h, statistics)``; without a residual h is x made contiguous."""
    x, weight = x.contiguous(), weight.contiguous()
    residual, bias = _contiguous(residual, bias)
    C = x.shape[-1]
    N = x.numel() // C
    y = torch.empty_like(x if residual is None else residual)
    h = x if residual is None else torch.empty_like(residual)
    shape = (*x.shape[:-1], 2) if is_centered(kind) else x.shape[:-1]
    statistics = torch.empty(shape, dtype=torch.float32, device=x.device)
    # The statistics must be reproducible from the saved rows, which a tile below LEAST_TILE would not allow.
    block, warps = _tile(kind, max(C, LEAST_TILE))
    launch = {"OVERLAPS": False} if is_centered(kind) else overlap(x)
    if N:
        with on_device_of(x):
            _norm_kernel[(N,)](
                x, residual, weight, bias, y, h, statistics, C, eps, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, ONE_TILE=block >= C, BLOCK=block,
                num_warps=warps, **launch,
            )  # fmt: skip
    return y, h, statistics


def normed_rows(
    h: Tensor, statistics: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, kind: str, eps: float,
    weight_offset: float, scale_in_fp32: bool,
) -> Tensor:  # fmt: skip
    """Recompute the forward's normed rows bit for bit from the saved statistics, and cast them to ``dtype``."""
    h, weight = h.contiguous(), weight.contiguous()
    C = h.shape[-1]
    y = torch.empty_like(h, dtype=dtype)
    block = min(triton.next_power_of_2(C), ELEMENTWISE_BLOCK)
    if h.numel():
        with on_device_of(h):
            _normed_kernel[(h.numel() // C, triton.cdiv(C, block))](
                h, weight, *_contiguous(bias), statistics, y, C, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, BLOCK=block, num_warps=num_warps(block),
            )  # fmt: skip
    return y


def norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor | None, kind: str,
    eps: float, weight_offset: float, scale_in_fp32: bool, *,
    need_dw: bool, need_db: bool = False, sum_dtype: torch.dtype | None = None, need_y: bool = False,
    y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return ``(dx, dw, db, y)``, with None for results that are not needed; y is the recomputed forward output.

    Args:
        dy: gradient of the normed rows.
        dh: gradient of h from elsewhere, which is added to dx.
        need_dw, need_db, need_y: which results are needed. Only y depends on the bias.
        sum_dtype: dtype of dw and db; None for the weight's.
        y_dtype: dtype of y; None for the dtype of h.
    """
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    dh, bias = _contiguous(dh, bias)
    C = h.shape[-1]
    N = h.numel() // C
    dx = torch.empty_like(h)
    y = torch.empty_like(h, dtype=y_dtype) if need_y else None
    dw, db = (torch.empty_like(weight, dtype=sum_dtype) if need else None for need in (need_dw, need_db))
    sums = [total for total in (dw, db) if total is not None]
    block, warps = _tile(kind, C)

    if block >= C:
        # Programs walk over tiles of rows, as many as keep the device busy, and sum dw and db on their way.
        rows = max(BACKWARD_TILE // block, 1)
        in_flight = rows * block * sum(tensor.element_size() for tensor in (h, dy, dh) if tensor is not None)
        programs = min(triton.cdiv(N, rows), num_programs(h, max(2 * BACKWARD_TILE // block // rows, 1)))
    else:
        # Rows too wide for registers: dx by row, then dw by columns, over a share of the rows per program.
        programs = min(N, WIDE_ROW_SPLITS)
    # The programs' sums [programs, C] of dw and db, side by side, in fp32.
    partial = torch.empty(programs, len(sums) * C, dtype=torch.float32, device=h.device) if sums else None

    with on_device_of(h):
        if N and block >= C:
            _norm_backward_kernel[(programs,)](
                dy, dh, h, weight, bias, statistics, dx, partial, y, N, C, weight_offset,
                CENTERED=is_centered(kind), SCALE_IN_FP32=scale_in_fp32, STORE_DW=need_dw, STORE_DB=need_db,
                ROWS=rows, BLOCK=block, STAGES=fitting_stages(h, STAGES, in_flight), num_warps=max(warps, 4),
            )  # fmt: skip
        elif N:
            _rms_norm_backward_wide_kernel[(N,)](
                dy, dh, h, weight, statistics, dx, y, C, weight_offset,
                SCALE_IN_FP32=scale_in_fp32, BLOCK=block, num_warps=warps,
            )  # fmt: skip
            if need_dw:
                _rms_norm_weight_gradient_kernel[(triton.cdiv(C, WIDE_ROW_COLUMNS), programs)](
                    dy, h, statistics, partial, N, C,
                    SCALE_IN_FP32=scale_in_fp32, BLOCK=WIDE_ROW_COLUMNS, num_warps=4,
                )  # fmt: skip
    if partial is not None:
        sum_partials(partial, *sums)
    return dx, dw, db, y


_NORM = "Tensor weight, Tensor? bias, str kind, float eps, float weight_offset, bool scale_in_fp32"
LIBRARY.define(f"norm(Tensor x, {_NORM}) -> (Tensor, Tensor)")
LIBRARY.define(f"add_norm(Tensor x, Tensor residual, {_NORM}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor statistics, {_NORM}, bool need_dw, bool need_db)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "norm", "CompositeExplicitAutograd")
def _norm(x, *norm) -> tuple[Tensor, Tensor]:
    y, _, statistics = norm_forward(x, None, *norm)
    return y, statistics


@torch.library.impl(LIBRARY, "add_norm", "CompositeExplicitAutograd")
def _add_norm(x, residual, *norm) -> tuple[Tensor, Tensor, Tensor]:
    return norm_forward(x, residual, *norm)


@torch.library.impl(LIBRARY, "norm_backward", "CompositeExplicitAutograd")
def _norm_backward(dy, dh, h, statistics, weight, *norm_and_needs) -> tuple[Tensor, Tensor, Tensor]:
    *norm, need_dw, need_db = norm_and_needs
    dx, dw, db, _ = norm_backward(dy, dh, h, statistics, weight, *norm, need_dw=need_dw, need_db=need_db)
    return dx, weight.new_empty(0) if dw is None else dw, weight.new_empty(0) if db is None else db


@torch.library.register_fake("liger_models::norm", lib=LIBRARY)
def _norm_fake(x, weight, bias, kind, *_) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], 2) if is_centered(kind) else x.shape[:-1]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("liger_models::add_norm", lib=LIBRARY)
def _add_norm_fake(x, residual, *norm) -> tuple[Tensor, Tensor, Tensor]:
    y, statistics = _norm_fake(residual, *norm)
    return y, torch.empty_like(y), statistics


@torch.library.register_fake("liger_models::norm_backward", lib=LIBRARY)
def _norm_backward_fake(dy, dh, h, statistics, weight, *norm_and_needs) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    dw, db = (weight.new_empty(weight.shape if need else 0) for need in norm_and_needs[-2:])
    return dx, dw, db


def _save(ctx, x, h, statistics, weight, bias, *constants) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.constants, ctx.x_dtype, ctx.bias_dtype = constants, x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(h, statistics, weight)


def _setup(ctx, inputs, output):
    x, *norm = inputs
    _save(ctx, x, x, output[1], *norm)


def _add_setup(ctx, inputs, output):
    x, _, *norm = inputs
    _save(ctx, x, *output[1:], *norm)


def _gradients(ctx, dy, dh) -> tuple[Tensor | None, ...]:
    """Gradients of h, weight, bias, and None for the constants."""
    if dy is None:  # only the residual stream is used further on
        return dh, *(None,) * 6
    need_weight, need_bias = ctx.needs_input_grad[-6:-4]
    dx, dw, db = torch.ops.liger_models.norm_backward(
        dy, dh, *ctx.saved_tensors, None, *ctx.constants, need_weight, need_bias
    )
    return dx, dw if need_weight else None, db.to(ctx.bias_dtype) if need_bias else None, *(None,) * 4


def _backward(ctx, dy, _d_statistics):
    return _gradients(ctx, dy, None)


def _add_backward(ctx, dy, dh, _d_statistics):
    d_residual, *others = _gradients(ctx, dy, dh)
    return None if d_residual is None else d_residual.to(ctx.x_dtype), d_residual, *others


register_autograd("norm", _backward, _setup)
register_autograd("add_norm", _add_backward, _add_setup)
