"""RMSNorm whose result is multiplied by the SiLU of a gate (the output norm of Qwen3-Next and Qwen3.5).

The forward computes each row of width D in fp32, with r = 1 / sqrt(mean(x²) + eps) and n = x · r::

    y = cast((w · cast(n)) · gate · σ(gate))

cast rounds to the dtype of x. The product with w is rounded to the dtype that results from PyTorch's type promotion.
The backward, with a = gate · σ(gate) and u = dy · a · w, is::

    dx = r · (u − n · mean(u · n)),   dw = Σ_rows dy · a · n
    dgate = dy · w · n · σ(gate) · (1 + gate · (1 − σ(gate)))

x, the gate and the weight are saved, and the backward recomputes r from x. dw is summed in fp32: each program writes a
partial sum [D], and `sum_partials` adds these.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.tiles import cdiv, next_power_of_2

TILE, WARPS, STAGES = 2048, 4, 3
"""Number of elements in the tile of rows that a program processes at a time, number of its warps, and number of tiles
that a program of the backward has in flight."""

WARPS_PER_SM = 16
"""Number of warps per multiprocessor in the backward, where each program sums the weight gradient over its rows."""


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute `gated_norm` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.to(wide.dtype))).to(x.dtype)


@triton.jit
def _rows(ptr, rows, H, outer, inner, D: tl.constexpr, BLOCK: tl.constexpr, N):
    """Load rows [ROWS, BLOCK] of a strided tensor [N / H, H, D] in fp32."""
    columns = tl.arange(0, BLOCK)[None, :]
    at = (rows // H * outer + rows % H * inner)[:, None] + columns
    return tl.load(ptr + at, mask=(rows < N)[:, None] & (columns < D), other=0.0).to(tl.float32)


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, N, H, x_outer, x_inner, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows [D] per program, and multiply them by the gate."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    x = _rows(x_ptr, rows, H, x_outer, x_inner, D, BLOCK, N)
    gate = _rows(gate_ptr, rows, H, gate_outer, gate_inner, D, BLOCK, N)
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]

    # Compute y = w · n · silu(gate) with the casts of the formula in the module's docstring.
    dtype = y_ptr.dtype.element_ty
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    scaled = w * (x * rstd[:, None]).to(dtype).to(tl.float32)
    if ROUND:
        scaled = scaled.to(dtype).to(tl.float32)
    y = scaled * (gate * tl.sigmoid(gate))
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    tl.store(y_ptr + rows[:, None] * D + columns[None, :], y.to(dtype), mask=mask)


@triton.jit
def _gated_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, dx_ptr, d_gate_ptr, dw_ptr, N, H, dy_outer, dy_inner, x_outer, x_inner,
    gate_outer, gate_inner, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx and dgate of a program's rows in tiles of ROWS rows, and the program's partial sum of dw [D]."""
    columns = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        dy = _rows(dy_ptr, rows, H, dy_outer, dy_inner, D, BLOCK, N)
        x = _rows(x_ptr, rows, H, x_outer, x_inner, D, BLOCK, N)
        gate = _rows(gate_ptr, rows, H, gate_outer, gate_inner, D, BLOCK, N)

        # The formulas are in the module's docstring; d_scaled is dy · σ(gate). All tensors are [ROWS, BLOCK].
        rstd = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        n = x * rstd
        s = tl.sigmoid(gate)
        d_scaled = dy * s
        dw += d_scaled * gate * n
        u = d_scaled * w * gate
        dx = rstd * (u - n * (tl.sum(u * n, 1) / D)[:, None])
        d_gate = d_scaled * w * n * (1.0 + gate * (1.0 - s))

        at = rows[:, None] * D + columns[None, :]
        mask = (rows < N)[:, None] & (columns < D)[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(d_gate_ptr + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * D + columns, tl.sum(dw, 0), mask=columns < D)


LIBRARY.define("gated_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor")
LIBRARY.define(
    "gated_norm_backward(Tensor dy, Tensor x, Tensor gate, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)"
)


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors [..., D] as [outer, H, D] with contiguous rows, without a copy where possible.

    H is 1 if all tensors are contiguous.
    """
    tensors = tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)
    shape = tensors[0].shape
    H = 1 if len(shape) == 1 or all(x.is_contiguous() for x in tensors) else shape[-2]
    return [x.reshape(-1, H, shape[-1]) for x in tensors]


def _constants(D: int) -> dict[str, int]:
    """Return the constants of both kernels, such as the columns per row (BLOCK) and the rows per tile (ROWS)."""
    block = next_power_of_2(D)
    return {"D": D, "BLOCK": block, "ROWS": max(TILE // block, 1), "num_warps": max(min(block // 512, 16), WARPS)}


@torch.library.impl(LIBRARY, "gated_norm", "CompositeExplicitAutograd")
def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        constants = _constants(x.shape[-1])
        x, gate = _as_rows(x, gate)
        N = x.shape[0] * x.shape[1]
        with on_device_of(x):
            _gated_norm_kernel[(cdiv(N, constants["ROWS"]),)](
                x, gate, weight.contiguous(), y, N, x.shape[1], *x.stride()[:2], *gate.stride()[:2], eps,
                ROUND=torch.promote_types(x.dtype, weight.dtype) == x.dtype, **constants,
            )  # fmt: skip
    return y


@torch.library.impl(LIBRARY, "gated_norm_backward", "CompositeExplicitAutograd")
def _gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    if not x.numel():
        return dx, d_gate, torch.zeros_like(weight)

    # There are enough programs to occupy the device. Each program sums dw over several tiles of rows.
    constants = _constants(x.shape[-1])
    dy, x, gate = _as_rows(dy, x, gate)
    N = x.shape[0] * x.shape[1]
    programs = min(cdiv(N, constants["ROWS"]), num_programs(x, max(WARPS_PER_SM // constants["num_warps"], 1)))
    # Size of a tile in bytes. Shared memory holds one tile per pipeline stage.
    in_flight = constants["ROWS"] * constants["BLOCK"] * sum(tensor.element_size() for tensor in (dy, x, gate))
    stages = fitting_stages(x, STAGES, in_flight)
    partial = torch.empty(programs, x.shape[2], dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _gated_norm_backward_kernel[(programs,)](
            dy, x, gate, weight.contiguous(), dx, d_gate, partial, N, x.shape[1], *dy.stride()[:2], *x.stride()[:2],
            *gate.stride()[:2], eps, STAGES=stages, **constants,
        )  # fmt: skip
    dw = torch.empty_like(weight)
    sum_partials(partial, dw)
    return dx, d_gate, dw


@torch.library.register_fake("liger_models::gated_norm", lib=LIBRARY)
def _gated_norm_fake(x, gate, weight, eps):
    return x.new_empty(x.shape)


@torch.library.register_fake("liger_models::gated_norm_backward", lib=LIBRARY)
def _gated_norm_backward_fake(dy, x, gate, weight, eps):
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _setup(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    return *torch.ops.liger_models.gated_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None


register_autograd("gated_norm", _backward, _setup)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute ``weight · x / sqrt(mean(x²) + eps) · silu(gate)`` with the mean over the last dimension.

    Args:
        x: [..., D], float32, float16 or bfloat16.
        gate: [..., D].
        weight: [D].
        eps: added to the mean of squares.

    Returns:
        [..., D] in the dtype of x.

    Raises:
        ValueError: x and gate differ in shape, or the weight's shape is not [D].
        TypeError: a tensor is not floating-point.
    """
    op = "gated_norm"
    check_floating(op, x=x, gate=gate, weight=weight)
    if x.shape != gate.shape:
        raise ValueError(f"{op}: x and gate must have one shape, got {list(x.shape)} and {list(gate.shape)}.")
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have the shape of x's last dimension, got weight {list(weight.shape)} for x "
            f"{list(x.shape)}."
        )
    if not use_triton(x):
        return gated_norm_reference(x, gate, weight, eps)
    y: Tensor = torch.ops.liger_models.gated_norm(x, gate, weight, eps)
    return y
