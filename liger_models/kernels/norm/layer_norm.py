"""LayerNorm, alone and with the residual addition in front of it, with or without a bias.

Forward, per row of width C, in fp32::

    h = residual + x                                  (add_layer_norm; otherwise h = x), rounded to the input dtype
    μ = mean(h),   r = 1 / sqrt(mean((h − μ)²) + eps),   n = (h − μ) · r
    y = cast(w · n + b)

Backward, with g = dy · w and dh the gradient of the new residual stream::

    dx = r · (g − mean(g) − n · mean(g · n)) + dh,   dw = Σ_rows dy · n,   db = Σ_rows dy

Saved: h in its own dtype, and each row's statistics [μ, r] in fp32. The forward normalises by the rounded μ that it
saves, so that rows recomputed from the statistics have the same bits. The gradients of w and b are summed in fp32: each
program writes a partial row of both, and `sum_partials` adds the rows.

Source: https://arxiv.org/abs/1607.06450.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.norm.rms_norm import ELEMENTWISE_BLOCK, LEAST_TILE, backward_launch

MAX_WIDTH = 65536
"""Widest row: a program holds a row in registers."""


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """What `layer_norm` computes, in plain torch (differentiable; fp64 stays fp64)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide_bias = None if bias is None else bias.to(compute)
    wide = torch.nn.functional.layer_norm(x.to(compute), weight.shape, weight.to(compute), wide_bias, eps)
    return wide.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """What `add_layer_norm` computes, in plain torch."""
    residual = (residual + x).to(residual.dtype)
    return layer_norm_reference(residual, weight, bias, eps), residual


@triton.jit
def _scaled(n, w, b, HAS_BIAS: tl.constexpr):
    y = n * w.to(tl.float32)
    if HAS_BIAS:
        y += b.to(tl.float32)
    return y


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, h_ptr, statistics_ptr, C, eps,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    h = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        h = (residual.to(tl.float32) + h.to(tl.float32)).to(residual.dtype)
        tl.store(h_ptr + row + columns, h, mask=inside)
    wide = h.to(tl.float32)
    mean = tl.sum(wide, 0) / C
    # A second pass corrects the rounding error of a mean far from zero. Lanes outside the row count as zeros.
    mean += tl.sum(tl.where(inside, wide - mean, 0.0), 0) / C
    centred = tl.where(inside, wide - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    b = tl.load(b_ptr + columns, mask=inside, other=0.0)
    y = _scaled(centred * rstd, w, b, HAS_BIAS)
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(statistics_ptr + 2 * tl.program_id(0).to(tl.int64), mean)
    tl.store(statistics_ptr + 2 * tl.program_id(0).to(tl.int64) + 1, rstd)


@triton.jit
def _layer_normed_kernel(
    h_ptr, w_ptr, b_ptr, statistics_ptr, y_ptr, C, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    h = tl.load(h_ptr + index * C + columns, mask=inside, other=0.0)
    n = (h.to(tl.float32) - tl.load(statistics_ptr + 2 * index)) * tl.load(statistics_ptr + 2 * index + 1)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    b = tl.load(b_ptr + columns, mask=inside, other=0.0)
    y = _scaled(n, w, b, HAS_BIAS).to(h.dtype)
    tl.store(y_ptr + index * C + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, statistics_ptr, dx_ptr, partial_ptr, y_ptr, N, C,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_DW: tl.constexpr, STORE_DB: tl.constexpr, STORE_Y: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)[None, :]
    b = tl.load(b_ptr + columns, mask=inside, other=0.0)[None, :]
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * C + columns[None, :]
        mask = (rows < N)[:, None] & inside[None, :]
        h = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(statistics_ptr + 2 * rows, mask=rows < N, other=0.0)[:, None]
        rstd = tl.load(statistics_ptr + 2 * rows + 1, mask=rows < N, other=0.0)[:, None]
        n = tl.where(mask, (h - mean) * rstd, 0.0)
        g = dy * w.to(tl.float32)
        dx = rstd * (g - (tl.sum(g, 1) / C)[:, None] - n * (tl.sum(g * n, 1) / C)[:, None])
        if ADD:
            dx += tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if STORE_DW:
            dw += tl.sum(dy * n, 0)
        if STORE_DB:
            db += tl.sum(dy, 0)
        if STORE_Y:
            y = _scaled(n, w, b, HAS_BIAS)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0).to(tl.int64) * (C * (STORE_DW + STORE_DB)) + columns
    if STORE_DW:
        tl.store(partial_ptr, dw, mask=inside)
    if STORE_DB:
        tl.store(partial_ptr + C * STORE_DW, db, mask=inside)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 32)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel: ``(y, h, statistics [..., 2])``; without a residual h is x made contiguous."""
    x, weight = x.contiguous(), weight.contiguous()
    C = x.shape[-1]
    N = x.numel() // C
    stream = x if residual is None else residual.contiguous()
    y = torch.empty_like(stream)
    h = x if residual is None else torch.empty_like(stream)
    statistics = torch.empty(*x.shape[:-1], 2, dtype=torch.float32, device=x.device)
    block = max(triton.next_power_of_2(C), LEAST_TILE)
    if N:
        # A pointer argument that the constants switch off still has to be a tensor.
        bias_arg = weight if bias is None else bias.contiguous()
        with on_device_of(x):
            _layer_norm_kernel[(N,)](
                x, stream, weight, bias_arg, y, h, statistics, C, eps,
                ADD=residual is not None, HAS_BIAS=bias is not None, BLOCK=block, num_warps=_num_warps(block),
            )  # fmt: skip
    return y, h, statistics


def layer_normed(h: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, dtype: torch.dtype) -> Tensor:
    """The forward's normed rows, bit for bit, from the saved statistics; cast to ``dtype``."""
    h, weight = h.contiguous(), weight.contiguous()
    C = h.shape[-1]
    y = torch.empty_like(h, dtype=dtype)
    block = min(triton.next_power_of_2(C), ELEMENTWISE_BLOCK)
    if h.numel():
        with on_device_of(h):
            _layer_normed_kernel[(h.numel() // C, triton.cdiv(C, block))](
                h, weight, weight if bias is None else bias.contiguous(), statistics, y, C,
                HAS_BIAS=bias is not None, BLOCK=block, num_warps=max(block // 512, 1),
            )  # fmt: skip
    return y


def layer_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    *,
    need_dw: bool,
    need_db: bool,
    sum_dtype: torch.dtype | None = None,
    need_y: bool = False,
    y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the backward kernel: ``(dx, dw or None, db or None, y or None)``, y being the forward's output again.

    dw and db come in ``sum_dtype``, by default the weight's. Only y depends on the bias.
    """
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    dh = None if dh is None else dh.contiguous()
    C = h.shape[-1]
    N = h.numel() // C
    dx = torch.empty_like(h)
    y = torch.empty_like(h, dtype=y_dtype) if need_y else None
    block = triton.next_power_of_2(C)
    programs, launch = backward_launch(N, _num_warps(block), block, h, dy, dh)
    dw, db = (torch.empty_like(weight, dtype=sum_dtype) if need else None for need in (need_dw, need_db))
    sums = [t for t in (dw, db) if t is not None]
    partial = torch.empty(programs, len(sums) * C, dtype=torch.float32, device=h.device)
    with on_device_of(h):
        if N:
            # A pointer argument that the constants switch off still has to be a tensor.
            dh_arg, bias_arg, y_arg = (
                h if t is None else t for t in (dh, None if bias is None else bias.contiguous(), y)
            )
            _layer_norm_backward_kernel[(programs,)](
                dy, dh_arg, h, weight, bias_arg, statistics, dx, partial, y_arg, N, C,
                ADD=dh is not None, HAS_BIAS=bias is not None, STORE_DW=need_dw, STORE_DB=need_db, STORE_Y=need_y,
                **launch,
            )  # fmt: skip
    if sums:
        sum_partials(partial, *sums)
    return dx, dw, db, y


LIBRARY.define("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor)")
LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "layer_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor statistics, bool need_dw, bool need_db)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "layer_norm", "CompositeExplicitAutograd")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, _, statistics = layer_norm_forward(x, None, weight, bias, eps)
    return y, statistics


@torch.library.impl(LIBRARY, "add_layer_norm", "CompositeExplicitAutograd")
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return layer_norm_forward(x, residual, weight, bias, eps)


@torch.library.impl(LIBRARY, "layer_norm_backward", "CompositeExplicitAutograd")
def _layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, statistics: Tensor, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db, _ = layer_norm_backward(dy, dh, h, weight, None, statistics, need_dw=need_dw, need_db=need_db)
    return dx, weight.new_empty(0) if dw is None else dw, weight.new_empty(0) if db is None else db


@torch.library.register_fake("liger_models::layer_norm", lib=LIBRARY)
def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(*x.shape[:-1], 2, dtype=torch.float32)


@torch.library.register_fake("liger_models::add_layer_norm", lib=LIBRARY)
def _add_layer_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, statistics = _layer_norm_fake(residual, weight, bias, eps)
    return y, torch.empty_like(y), statistics


@torch.library.register_fake("liger_models::layer_norm_backward", lib=LIBRARY)
def _layer_norm_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, statistics: Tensor, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    dw, db = (weight.new_empty(weight.shape if need else 0) for need in (need_dw, need_db))
    return dx, dw, db


def _setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _dstatistics):
    if dy is None:
        return (None,) * 4
    _, need_weight, need_bias, _ = ctx.needs_input_grad
    dx, dw, db = torch.ops.liger_models.layer_norm_backward(dy, None, *ctx.saved_tensors, need_weight, need_bias)
    return dx, dw if need_weight else None, db.to(ctx.bias_dtype) if need_bias else None, None


def _add_setup(ctx, inputs, output):
    x, _, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(output[1], weight, output[2])


def _add_backward(ctx, dy, dh, _dstatistics):
    if dy is None:  # only the residual stream has a gradient
        return None if dh is None else dh.to(ctx.x_dtype), dh, None, None, None
    _, _, need_weight, need_bias, _ = ctx.needs_input_grad
    dx, dw, db = torch.ops.liger_models.layer_norm_backward(dy, dh, *ctx.saved_tensors, need_weight, need_bias)
    return (
        dx.to(ctx.x_dtype),
        dx,
        dw if need_weight else None,
        db.to(ctx.bias_dtype) if need_bias else None,
        None,
    )


register_autograd("layer_norm", _backward, _setup)
register_autograd("add_layer_norm", _add_backward, _add_setup)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating(op, x=x, weight=weight, bias=bias)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
        raise ValueError(
            f"{op}: weight and bias must have the shape of x's last dimension, got weight {list(weight.shape)} and "
            f"bias {None if bias is None else list(bias.shape)} for x {list(x.shape)}."
        )
    if not x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{op}: rows must be at most {MAX_WIDTH} wide, got {x.shape[-1]}.")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``weight · (x − mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension.

    Args:
        x: [..., C], float32, float16 or bfloat16; C is at most 65536.
        weight: [C].
        bias: [C], or None for no bias.
        eps: added to the variance.

    Returns:
        [..., C] in the dtype of x.

    Raises:
        ValueError: weight or bias are not [C], or rows are too wide.
        TypeError: a tensor that is not floating-point.
    """
    _check("layer_norm", x, weight, bias)
    if not use_triton(x):
        return layer_norm_reference(x, weight, bias, eps)
    y: Tensor = torch.ops.liger_models.layer_norm(x, weight, bias, eps)[0]
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then `layer_norm` of it, in one kernel; the backward adds the residual's gradient.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream.
        residual: [..., C], the residual stream; its dtype is that of both results.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        ``(normed, residual)``: both [..., C] in the dtype of the residual.

    Raises:
        ValueError: x and residual differ in shape, or as in `layer_norm`.
        TypeError: a tensor that is not floating-point.
    """
    _check("add_layer_norm", x, weight, bias)
    check_floating("add_layer_norm", residual=residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_layer_norm: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}."
        )
    if not use_triton(x):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    y, h, _ = torch.ops.liger_models.add_layer_norm(x, residual, weight, bias, eps)
    return y, h
