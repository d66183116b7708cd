"""RMSNorm, alone and with the residual addition in front of it.

Forward, per row of width C, in fp32::

    h = residual + x                                  (add_rms_norm; otherwise h = x), rounded to the input dtype
    r = 1 / sqrt(mean(h²) + eps),   n = h · r
    y = (weight_offset + w) · cast(n)                 scale_in_fp32=False: cast to the input dtype, then scale (Llama)
    y = cast((weight_offset + w) · n)                 scale_in_fp32=True: scale in fp32, then cast (Gemma, OLMo2)

Backward, with g = dy · (weight_offset + w) and dh the gradient of the new residual stream::

    dx = r · (g − n · mean(g · n)) + dh,   dw = Σ_rows dy · n

Saved: h in its own dtype and r in fp32. The weight gradient is summed in fp32: a partial row per program, then
`sum_partials`.

Source: https://arxiv.org/abs/1910.07467.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.overlap import await_previous, overlap

MAX_TILE = 16384
"""Widest row that a program holds in registers; wider rows are walked in tiles."""

LEAST_TILE = 128
"""Narrowest tile of the forward: at least two numbers for each thread of a warp. With one number each, compilers fuse
the square of a thread's own number into its first sum with another thread's square. The two sums then differ by a
rounding, and so does the r that each thread norms by. Only one r is saved, so the rows could not be recomputed."""

STAGES = 3
"""Tiles of rows that a program of the backward has in flight, as far as shared memory holds them."""

BACKWARD_TILE = 4096
"""Least size of such a tile: narrow rows are taken several at a time."""

WIDE_ROW_SPLITS = 64

ELEMENTWISE_BLOCK = 4096
"""Columns per program where saved statistics make a norm elementwise: a row of a 7B model, 16 elements per thread."""


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, scale_in_fp32: bool = False
) -> Tensor:
    """What `rms_norm` computes, in plain torch (differentiable; fp64 stays fp64)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scale_normed(normed, weight, x.dtype, weight_offset, scale_in_fp32)


def scale_normed(
    normed: Tensor, weight: Tensor, dtype: torch.dtype, weight_offset: float, scale_in_fp32: bool
) -> Tensor:
    """The last step of the norm: rows that are normed already, in fp32, times the weight; in ``dtype``."""
    if scale_in_fp32:
        return ((weight.to(normed.dtype) + weight_offset) * normed).to(dtype)
    scale = weight + weight_offset if weight_offset else weight
    return (scale * normed.to(dtype)).to(dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `add_rms_norm` computes, in plain torch."""
    residual = (residual + x).to(residual.dtype)
    return rms_norm_reference(residual, weight, eps, weight_offset, scale_in_fp32), residual


@triton.jit
def _scaled(n, w, weight_offset, SCALE_IN_FP32: tl.constexpr, dtype: tl.constexpr):
    if SCALE_IN_FP32:
        return (w.to(tl.float32) + weight_offset) * n
    scale = (w.to(tl.float32) + weight_offset).to(w.dtype)
    return scale.to(tl.float32) * n.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rstd_ptr, C, eps, weight_offset,
    ADD: tl.constexpr, SCALE_IN_FP32: tl.constexpr, ONE_TILE: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * C
    columns = tl.arange(0, BLOCK)
    if ONE_TILE:
        inside = columns < C
        h = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
            h = (residual.to(tl.float32) + h.to(tl.float32)).to(residual.dtype)
            tl.store(h_ptr + row + columns, h, mask=inside)
        wide = h.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        y = _scaled(wide * rstd, w, weight_offset, SCALE_IN_FP32, h.dtype)
        tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            h = tl.load(x_ptr + row + start + columns, mask=inside, other=0.0)
            if ADD:
                residual = tl.load(residual_ptr + row + start + columns, mask=inside, other=0.0)
                h = (residual.to(tl.float32) + h.to(tl.float32)).to(residual.dtype)
                tl.store(h_ptr + row + start + columns, h, mask=inside)
            wide = h.to(tl.float32)
            square += wide * wide
        rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / C + eps)
        for start in range(0, C, BLOCK):
            inside = start + columns < C
            # With ADD, each thread reads back just what it stored itself above.
            h = tl.load((h_ptr if ADD else x_ptr) + row + start + columns, mask=inside, other=0.0)
            w = tl.load(w_ptr + start + columns, mask=inside, other=0.0)
            y = _scaled(h.to(tl.float32) * rstd, w, weight_offset, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + row + start + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + tl.program_id(0), rstd)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, y_ptr, N, C, weight_offset,
    ADD: tl.constexpr, SCALE_IN_FP32: tl.constexpr, STORE_DW: tl.constexpr, STORE_Y: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)[None, :]
    dw = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * C + columns[None, :]
        mask = (rows < N)[:, None] & inside[None, :]
        h = tl.load(h_ptr + at, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < N, other=0.0)[:, None]
        n = h.to(tl.float32) * rstd
        g = dy * (w.to(tl.float32) + weight_offset)
        dx = rstd * (g - n * (tl.sum(g * n, 1) / C)[:, None])
        if ADD:
            dx += tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if STORE_DW:
            dw += tl.sum(dy * (n if SCALE_IN_FP32 else n.to(h.dtype).to(tl.float32)), 0)
        if STORE_Y:
            y = _scaled(n, w, weight_offset, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if STORE_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * C + columns, dw, mask=inside)


@triton.jit
def _rms_norm_backward_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, y_ptr, C, weight_offset,
    ADD: tl.constexpr, SCALE_IN_FP32: tl.constexpr, STORE_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C
    rstd = tl.load(rstd_ptr + tl.program_id(0))
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < C
        n = tl.load(h_ptr + row + columns, mask=inside, other=0.0).to(tl.float32) * rstd
        w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
        dot += n * w * tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(dot, 0) / C
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < C
        h = tl.load(h_ptr + row + columns, mask=inside, other=0.0)
        n = h.to(tl.float32) * rstd
        w = tl.load(w_ptr + columns, mask=inside, other=0.0)
        g = tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32) * (w.to(tl.float32) + weight_offset)
        dx = rstd * (g - n * mean)
        if ADD:
            dx += tl.load(dh_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if STORE_Y:
            y = _scaled(n, w, weight_offset, SCALE_IN_FP32, h.dtype)
            tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_weight_gradient_kernel(
    dy_ptr, h_ptr, rstd_ptr, dw_ptr, N, C, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
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


@triton.jit
def _rms_normed_kernel(
    h_ptr, w_ptr, rstd_ptr, y_ptr, C, weight_offset, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    h = tl.load(h_ptr + row + columns, mask=inside, other=0.0)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    n = h.to(tl.float32) * tl.load(rstd_ptr + tl.program_id(0))
    y = _scaled(n, w, weight_offset, SCALE_IN_FP32, h.dtype).to(h.dtype)
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def backward_launch(N: int, warps: int, block: int, h: Tensor, *gradients: Tensor | None) -> tuple[int, dict[str, int]]:
    """Programs and constants of a norm's backward over N rows of h and of gradients, with ``warps`` for a row."""
    rows = max(BACKWARD_TILE // block, 1)
    in_flight = rows * block * sum(x.element_size() for x in (h, *gradients) if x is not None)
    programs = min(triton.cdiv(N, rows), num_programs(h, max(2 * BACKWARD_TILE // block // rows, 1)))
    stages = fitting_stages(h, STAGES, in_flight)
    return programs, {"ROWS": rows, "BLOCK": block, "STAGES": stages, "num_warps": max(warps, 4)}


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel: ``(y, h, rstd)``; without a residual h is x made contiguous."""
    x, weight = x.contiguous(), weight.contiguous()
    C = x.shape[-1]
    N = x.numel() // C
    stream = x if residual is None else residual.contiguous()
    y = torch.empty_like(stream)
    h = x if residual is None else torch.empty_like(stream)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = min(max(triton.next_power_of_2(C), LEAST_TILE), MAX_TILE)
    if N:
        with on_device_of(x):
            _rms_norm_kernel[(N,)](
                x, stream, weight, y, h, rstd, C, eps, weight_offset,
                ADD=residual is not None, SCALE_IN_FP32=scale_in_fp32, ONE_TILE=block >= C, BLOCK=block,
                **overlap(x), num_warps=_num_warps(block),
            )  # fmt: skip
    return y, h, rstd


def rms_normed(
    h: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, scale_in_fp32: bool, dtype: torch.dtype
) -> Tensor:
    """The forward's normed rows, bit for bit, from the saved rstd; cast to ``dtype``."""
    h, weight = h.contiguous(), weight.contiguous()
    C = h.shape[-1]
    y = torch.empty_like(h, dtype=dtype)
    block = min(triton.next_power_of_2(C), ELEMENTWISE_BLOCK)
    if h.numel():
        with on_device_of(h):
            _rms_normed_kernel[(h.numel() // C, triton.cdiv(C, block))](
                h, weight, rstd, y, C, weight_offset, SCALE_IN_FP32=scale_in_fp32, BLOCK=block,
                num_warps=max(block // 512, 1),
            )  # fmt: skip
    return y


def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float,
    scale_in_fp32: bool,
    *,
    need_dw: bool,
    dw_dtype: torch.dtype | None = None,
    need_y: bool = False,
    y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the backward kernels: ``(dx, dw or None, y or None)``, y being the forward's output made again.

    dw comes in ``dw_dtype``, by default the weight's.
    """
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    dh = None if dh is None else dh.contiguous()
    C = h.shape[-1]
    N = h.numel() // C
    dx = torch.empty_like(h)
    y = torch.empty_like(h, dtype=y_dtype) if need_y else None
    if N == 0:
        return dx, torch.zeros_like(weight, dtype=dw_dtype) if need_dw else None, y
    block = min(triton.next_power_of_2(C), MAX_TILE)
    constants = {"ADD": dh is not None, "SCALE_IN_FP32": scale_in_fp32, "STORE_Y": need_y}
    # A pointer argument that the constants switch off still has to be a tensor.
    dh_arg, y_arg = h if dh is None else dh, h if y is None else y
    partial = None
    with on_device_of(h):
        if block >= C:
            programs, launch = backward_launch(N, _num_warps(block), block, h, dy, dh)
            if need_dw:
                partial = torch.empty(programs, C, dtype=torch.float32, device=h.device)
            _rms_norm_backward_kernel[(programs,)](
                dy, dh_arg, h, weight, rstd, dx, h if partial is None else partial, y_arg, N, C, weight_offset,
                STORE_DW=need_dw, **constants, **launch,
            )  # fmt: skip
        else:
            _rms_norm_backward_wide_kernel[(N,)](
                dy, dh_arg, h, weight, rstd, dx, y_arg, C, weight_offset, BLOCK=block, num_warps=_num_warps(block),
                **constants,
            )  # fmt: skip
            if need_dw:
                splits = min(N, WIDE_ROW_SPLITS)
                partial = torch.empty(splits, C, dtype=torch.float32, device=h.device)
                _rms_norm_weight_gradient_kernel[(triton.cdiv(C, 1024), splits)](
                    dy, h, rstd, partial, N, C, SCALE_IN_FP32=scale_in_fp32, BLOCK=1024, num_warps=4
                )
    if partial is None:
        return dx, None, y
    dw = torch.empty_like(weight, dtype=dw_dtype)
    sum_partials(partial, dw)
    return dx, dw, y


LIBRARY.define(
    "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset, bool scale_in_fp32) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset, bool scale_in_fp32)"
    " -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor rstd, float weight_offset,"
    " bool scale_in_fp32, bool need_dw) -> (Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "rms_norm", "CompositeExplicitAutograd")
def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    y, _, rstd = rms_norm_forward(x, None, weight, eps, weight_offset, scale_in_fp32)
    return y, rstd


@torch.library.impl(LIBRARY, "add_rms_norm", "CompositeExplicitAutograd")
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return rms_norm_forward(x, residual, weight, eps, weight_offset, scale_in_fp32)


@torch.library.impl(LIBRARY, "rms_norm_backward", "CompositeExplicitAutograd")
def _rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float,
    scale_in_fp32: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx, dw, _ = rms_norm_backward(dy, dh, h, weight, rstd, weight_offset, scale_in_fp32, need_dw=need_dw)
    return dx, weight.new_empty(0) if dw is None else dw


@torch.library.register_fake("liger_models::rms_norm", lib=LIBRARY)
def _rms_norm_fake(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("liger_models::add_rms_norm", lib=LIBRARY)
def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, scale_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _rms_norm_fake(residual, weight, eps, weight_offset, scale_in_fp32)
    return y, torch.empty_like(y), rstd


@torch.library.register_fake("liger_models::rms_norm_backward", lib=LIBRARY)
def _rms_norm_backward_fake(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float,
    scale_in_fp32: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h, memory_format=torch.contiguous_format), weight.new_empty(weight.shape if need_dw else 0)


def _setup(ctx, inputs, output):
    x, weight, _, ctx.weight_offset, ctx.scale_in_fp32 = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _drstd):
    if dy is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    need_dw = ctx.needs_input_grad[1]
    dx, dw = torch.ops.liger_models.rms_norm_backward(
        dy, None, x, weight, rstd, ctx.weight_offset, ctx.scale_in_fp32, need_dw
    )
    return dx, dw if need_dw else None, None, None, None


def _add_setup(ctx, inputs, output):
    x, _, weight, _, ctx.weight_offset, ctx.scale_in_fp32 = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(output[1], weight, output[2])


def _add_backward(ctx, dy, dh, _drstd):
    h, weight, rstd = ctx.saved_tensors
    if dy is None:  # only the residual stream is used further on
        return None if dh is None else dh.to(ctx.x_dtype), dh, None, None, None, None
    need_dw = ctx.needs_input_grad[2]
    dx, dw = torch.ops.liger_models.rms_norm_backward(
        dy, dh, h, weight, rstd, ctx.weight_offset, ctx.scale_in_fp32, need_dw
    )
    return dx.to(ctx.x_dtype), dx, dw if need_dw else None, None, None, None


register_autograd("rms_norm", _backward, _setup)
register_autograd("add_rms_norm", _add_backward, _add_setup)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    check_floating(op, x=x, weight=weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have the shape of x's last dimension, got weight {list(weight.shape)} for x "
            f"{list(x.shape)}."
        )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, scale_in_fp32: bool = False
) -> Tensor:
    """``(weight_offset + weight) · x / sqrt(mean(x²) + eps)`` over the last dimension.

    Args:
        x: [..., C], float32, float16 or bfloat16.
        weight: [C].
        eps: added to the mean of squares.
        weight_offset: added to the weight (Gemma stores ``w − 1``: 1.0).
        scale_in_fp32: multiply by the weight before the cast back to x's dtype (Gemma, OLMo2) instead of after (Llama).

    Returns:
        [..., C] in the dtype of x.

    Raises:
        ValueError: the weight's shape is not [C].
        TypeError: a tensor that is not floating-point.
    """
    _check("rms_norm", x, weight)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps, weight_offset, scale_in_fp32)
    y: Tensor = torch.ops.liger_models.rms_norm(x, weight, eps, weight_offset, scale_in_fp32)[0]
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then `rms_norm` of it, in one kernel; the backward folds the residual's gradient in.

    Args:
        x: [..., C], what a branch adds to the stream.
        residual: [..., C], the residual stream; its dtype is that of both results.
        weight, eps, weight_offset, scale_in_fp32: as in `rms_norm`.

    Returns:
        ``(normed, residual)``: both [..., C] in the dtype of the residual.

    Raises:
        ValueError: x and residual differ in shape, or the weight's shape is not [C].
        TypeError: a tensor that is not floating-point.
    """
    _check("add_rms_norm", x, weight)
    check_floating("add_rms_norm", residual=residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}."
        )
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps, weight_offset, scale_in_fp32)
    y, h, _ = torch.ops.liger_models.add_rms_norm(x, residual, weight, eps, weight_offset, scale_in_fp32)
    return y, h
