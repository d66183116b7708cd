"""LayerNorm, alone and with the residual addition in front of it.

Forward, per row of width C, in fp32::

    h = residual + x                                  (add_layer_norm; otherwise h = x), rounded to the input dtype
    μ = mean(h),   r = 1 / sqrt(mean((h − μ)²) + eps),   n = (h − μ) · r
    y = cast(w · n + b)

Backward, with g = dy · w and dh the gradient of the new residual stream::

    dx = r · (g − mean(g) − n · mean(g · n)) + dh,   dw = Σ_rows dy · n,   db = Σ_rows dy

Saved: h in its own dtype, μ and r in fp32. The gradients of w and b are summed in fp32: a partial row of each per
program, then a sum.

Source: https://arxiv.org/abs/1607.06450.
"""

import torch
from torch import Tensor

from .dispatch import LIBRARY, check, check_floating, num_programs, on_device_of, tl, triton, use_triton

MAX_WIDTH = 65536
"""A program holds a row in registers."""

BACKWARD_PROGRAMS_PER_SM = 2


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """What `layer_norm` computes, in plain torch (differentiable; fp64 stays fp64)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = torch.nn.functional.layer_norm(x.to(compute), weight.shape, weight.to(compute), bias.to(compute), eps)
    return wide.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """What `add_layer_norm` computes, in plain torch."""
    residual = (residual + x).to(residual.dtype)
    return layer_norm_reference(residual, weight, bias, eps), residual


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, C, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
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
    centred = tl.where(inside, wide - mean, 0.0)  # lanes outside the row must not count in the variance
    left = tl.sum(centred, 0) / C  # what rounding left of the mean, where that is far from zero
    centred = tl.where(inside, centred - left, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = centred * rstd * w + b
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + tl.program_id(0), mean + left)
    tl.store(rstd_ptr + tl.program_id(0), rstd)


@triton.jit
def _backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, N, C,
    ADD: tl.constexpr, STORE_DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64) * C
    for index in range(tl.program_id(0), N, tl.num_programs(0)):
        h = tl.load(h_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + index)
        n = tl.where(inside, (h - tl.load(mean_ptr + index)) * rstd, 0.0)
        g = dy * w
        dx = rstd * (g - tl.sum(g, 0) / C - n * (tl.sum(g * n, 0) / C))
        if ADD:
            dx += tl.load(dh_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if STORE_DW:
            dw += dy * n
            db += dy
        row += tl.num_programs(0).to(tl.int64) * C
    if STORE_DW:
        partial = tl.program_id(0).to(tl.int64) * C
        tl.store(dw_ptr + partial + columns, dw, mask=inside)
        tl.store(db_ptr + partial + columns, db, mask=inside)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 32)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel: ``(y, h, mean, rstd)``; without a residual h is x made contiguous."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    C = x.shape[-1]
    N = x.numel() // C
    stream = x if residual is None else residual.contiguous()
    y = torch.empty_like(stream)
    h = x if residual is None else torch.empty_like(stream)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(C)
    if N:
        with on_device_of(x):
            _forward_kernel[(N,)](
                x, stream, weight, bias, y, h, mean, rstd, C, eps,
                ADD=residual is not None, BLOCK=block, num_warps=_num_warps(block),
            )  # fmt: skip
    return y, h, mean, rstd


def layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_dw: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the backward kernel: ``(dx, dw or None, db or None)``."""
    dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
    dh = None if dh is None else dh.contiguous()
    C = h.shape[-1]
    N = h.numel() // C
    dx = torch.empty_like(h)
    if N == 0:
        return dx, *((torch.zeros_like(weight), torch.zeros_like(weight)) if need_dw else (None, None))
    programs = min(N, num_programs(h, BACKWARD_PROGRAMS_PER_SM))
    partial = torch.empty(2 if need_dw else 0, programs, C, dtype=torch.float32, device=h.device)
    dw, db = partial if need_dw else (h, h)  # a pointer argument that the constants switch off has to be a tensor
    block = triton.next_power_of_2(C)
    with on_device_of(h):
        _backward_kernel[(programs,)](
            dy, h if dh is None else dh, h, weight, mean, rstd, dx, dw, db, N, C,
            ADD=dh is not None, STORE_DW=need_dw, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    if not need_dw:
        return dx, None, None
    total_dw, total_db = partial.sum(1).to(weight.dtype)
    return dx, total_dw, total_db


LIBRARY.define("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "layer_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool need_dw)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "layer_norm", "CompositeExplicitAutograd")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = layer_norm_forward(x, None, weight, bias, eps)
    return y, mean, rstd


@torch.library.impl(LIBRARY, "add_layer_norm", "CompositeExplicitAutograd")
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return layer_norm_forward(x, residual, weight, bias, eps)


@torch.library.impl(LIBRARY, "layer_norm_backward", "CompositeExplicitAutograd")
def _layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_dw: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = layer_norm_backward(dy, dh, h, weight, mean, rstd, need_dw)
    if dw is None or db is None:
        return dx, weight.new_empty(0), weight.new_empty(0)
    return dx, dw, db.clone()  # both are rows of one sum, and an op's outputs may not share memory


@torch.library.register_fake("liger_models::layer_norm", lib=LIBRARY)
def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("liger_models::add_layer_norm", lib=LIBRARY)
def _add_layer_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _layer_norm_fake(residual, weight, bias, eps)
    return y, torch.empty_like(y), mean, rstd


@torch.library.register_fake("liger_models::layer_norm_backward", lib=LIBRARY)
def _layer_norm_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_dw: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    dw, db = (weight.new_empty(weight.shape if need_dw else 0) for _ in range(2))
    return dx, dw, db


def _setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 4
    _, need_weight, need_bias, _ = ctx.needs_input_grad
    dx, dw, db = torch.ops.liger_models.layer_norm_backward(dy, None, *ctx.saved_tensors, need_weight or need_bias)
    return dx, dw if need_weight else None, db.to(ctx.bias_dtype) if need_bias else None, None


def _add_setup(ctx, inputs, output):
    x, _, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.x_dtype, ctx.bias_dtype = x.dtype, bias.dtype
    ctx.save_for_backward(output[1], weight, *output[2:])


def _add_backward(ctx, dy, dh, *_):
    if dy is None:  # only the residual stream is used further on
        return None if dh is None else dh.to(ctx.x_dtype), dh, None, None, None
    _, _, need_weight, need_bias, _ = ctx.needs_input_grad
    dx, dw, db = torch.ops.liger_models.layer_norm_backward(dy, dh, *ctx.saved_tensors, need_weight or need_bias)
    return (
        dx.to(ctx.x_dtype),
        dx,
        dw if need_weight else None,
        db.to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd("liger_models::layer_norm", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("liger_models::add_layer_norm", _add_backward, setup_context=_add_setup, lib=LIBRARY)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    check_floating(op, x=x, weight=weight, bias=bias)
    check(
        x.dim() > 0 and weight.shape == x.shape[-1:] == bias.shape,
        f"{op}: weight and bias must have the shape of x's last dimension, "
        f"got weight {list(weight.shape)} and bias {list(bias.shape)} for x {list(x.shape)}.",
    )
    check(x.shape[-1] <= MAX_WIDTH, f"{op}: rows must be at most {MAX_WIDTH} wide, got {x.shape[-1]}.")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """``weight · (x − mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension.

    Args:
        x: [..., C], float32, float16 or bfloat16; C is at most 65536.
        weight: [C].
        bias: [C].
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
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``residual = residual + x``, then `layer_norm` of it, in one kernel; the backward adds the residual's gradient.

    Args:
        x: [..., C], what a branch adds to the stream.
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
    check(
        x.shape == residual.shape,
        f"add_layer_norm: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}.",
    )
    if not use_triton(x):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    y, h, _, _ = torch.ops.liger_models.add_layer_norm(x, residual, weight, bias, eps)
    return y, h
