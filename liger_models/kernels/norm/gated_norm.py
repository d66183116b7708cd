"""RMSNorm and a gate: the output norms of Gated DeltaNet, Mamba-2 and Kimi Delta Attention. The norm is optional.

The forward computes each row of width D in fp32, with r(u) = 1 / sqrt(mean(u²) + eps), and with ``a = gate · σ(gate)``
or ``a = σ(gate)``::

    y = cast((w · cast(x · r(x))) · a)        or, with the gate first, u = x · a,   y = cast(w · cast(u · r(u)))

The function cast rounds to the dtype of x. The product with w has the dtype that PyTorch's type promotion gives. In the
backward, let n = x · r(x) and v = dy · a · w::

    dx = r · (v − n · mean(v · n)),   dw = Σ_rows dy · a · n,   dgate = dy · w · n · a'

With the gate first, let n = u · r(u) and v = dy · w::

    du = r · (v − n · mean(v · n)),   dx = du · a,   dw = Σ_rows dy · n,   dgate = du · x · a'

If there is no weight, the norm is left out: y = cast(x · a), dx = dy · a, and dgate = dy · x · a'.

The forward saves x, the gate and the weight, and the backward recomputes r. dw is summed in fp32: each program writes a
partial sum, and `sum_partials` adds the partial sums. If the groups of a token have different weights, each program
processes rows of only one group.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import fitting_stages, num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.tiles import cdiv, next_power_of_2

TILE, WARPS, STAGES = 2048, 4, 3
"""Number of elements in the tile of rows that a program processes at a time, number of warps per program, and number of
tiles that a program of the backward has in flight."""

WARPS_PER_SM = 16
"""Number of warps per multiprocessor in the backward, where each program sums the weight gradient over its rows."""


GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-6, *, act: str = "silu", gate_first: bool = False
) -> Tensor:
    """Compute `gated_norm` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = GATES[act](gate.to(wide.dtype))
    if weight is None:
        return (wide * factor).to(x.dtype)
    wide = wide * factor if gate_first else wide
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * (1.0 if gate_first else factor)).to(x.dtype)


@triton.jit
def _gate(gate, SILU: tl.constexpr):
    """Return the activation of the gate, and the derivative of this activation."""
    s = tl.sigmoid(gate)
    if SILU:
        return gate * s, s * (1.0 + gate * (1.0 - s))
    return s, s * (1.0 - s)


@triton.jit
def _rows(ptr, rows, H, outer, inner, D: tl.constexpr, BLOCK: tl.constexpr, N):
    """Load rows of a strided tensor [N / H, H, D] as fp32 [ROWS, BLOCK]."""
    columns = tl.arange(0, BLOCK)[None, :]
    at = (rows // H * outer + rows % H * inner)[:, None] + columns
    return tl.load(ptr + at, mask=(rows < N)[:, None] & (columns < D), other=0.0).to(tl.float32)


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, N, H, x_outer, x_inner, gate_outer, gate_inner, eps, GROUPS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr, SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Each program multiplies ROWS rows [D] of one group by the gate. With NORM, the rows are also normalized."""
    rows, group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    x = _rows(x_ptr + group * x_inner, rows, H, x_outer, x_inner, D, BLOCK, N)
    gate = _rows(gate_ptr + group * gate_inner, rows, H, gate_outer, gate_inner, D, BLOCK, N)

    # Compute y with the casts of the formula in the module's docstring.
    dtype = y_ptr.dtype.element_ty
    factor, _ = _gate(gate, SILU)
    if GATE_FIRST:
        x *= factor
    y = x
    if NORM:
        w = tl.load(w_ptr + group * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        y = w * (x * rstd[:, None]).to(dtype).to(tl.float32)
    if not GATE_FIRST:
        if NORM and ROUND:
            y = y.to(dtype).to(tl.float32)
        y *= factor
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    at = (rows * GROUPS + group)[:, None] * D + columns[None, :]
    tl.store(y_ptr + at, y.to(dtype), mask=mask)


@triton.jit
def _gated_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, dx_ptr, d_gate_ptr, dw_ptr, N, H, dy_outer, dy_inner, x_outer, x_inner,
    gate_outer, gate_inner, eps, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx and dgate of a program's rows in tiles of ROWS rows, and the program's partial sum of dw [D]."""
    columns, group = tl.arange(0, BLOCK), tl.program_id(1)
    w = tl.zeros([1, BLOCK], tl.float32)
    if NORM:
        w = tl.load(w_ptr + group * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        dy = _rows(dy_ptr + group * dy_inner, rows, H, dy_outer, dy_inner, D, BLOCK, N)
        x = _rows(x_ptr + group * x_inner, rows, H, x_outer, x_inner, D, BLOCK, N)
        gate = _rows(gate_ptr + group * gate_inner, rows, H, gate_outer, gate_inner, D, BLOCK, N)

        # The formulas are in the module's docstring. All tensors are [ROWS, BLOCK].
        factor, slope = _gate(gate, SILU)
        if NORM:
            u = x * factor if GATE_FIRST else x
            d_normed = dy if GATE_FIRST else dy * factor
            rstd = (1.0 / tl.sqrt(tl.sum(u * u, 1) / D + eps))[:, None]
            n = u * rstd
            dw += d_normed * n
            v = d_normed * w
            du = rstd * (v - n * (tl.sum(v * n, 1) / D)[:, None])
            if GATE_FIRST:
                d_gate = du * x * slope
                du *= factor
            else:
                d_gate = dy * w * n * slope
        else:
            du, d_gate = dy * factor, dy * x * slope

        at = (rows * GROUPS + group)[:, None] * D + columns[None, :]
        mask = (rows < N)[:, None] & (columns < D)[None, :]
        tl.store(dx_ptr + at, du.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(d_gate_ptr + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if NORM:
        at_partial = (tl.program_id(0).to(tl.int64) * GROUPS + group) * D + columns
        tl.store(dw_ptr + at_partial, tl.sum(dw, 0), mask=columns < D)


def _as_rows(groups: int, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors [..., D] as [outer, H, D] with contiguous rows, without a copy where possible.

    H is 1 if there is a single group and all tensors are contiguous or one-dimensional. In all other cases, H is the
    size of the second to last dimension, which is the number of groups if there are several groups.
    """
    tensors = tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)
    shape = tensors[0].shape
    is_flat = groups == 1 and (len(shape) == 1 or all(x.is_contiguous() for x in tensors))
    return [x.reshape(-1, 1 if is_flat else shape[-2], shape[-1]) for x in tensors]


def _groups(x: Tensor, weight: Tensor | None) -> int:
    """Return the number of groups of rows that have different weights.

    If all rows share one weight, or if there is no weight, the result is 1.
    """
    return 1 if weight is None else weight.numel() // x.shape[-1]


def _gradients_like(x: Tensor, gate: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients. The gradient of a missing weight is empty."""
    dw = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), dw


def _rows_of(x: Tensor, groups: int) -> tuple[int, int]:
    """For x [outer, H, D], return two numbers: the number of rows that share a weight, and how many of these rows have
    the same index in the first dimension.
    """
    inner = 1 if groups > 1 else x.shape[1]
    return x.shape[0] * inner, inner


def _constants(D: int) -> dict[str, int]:
    """Return the constants of the forward and backward kernels, such as the columns per row (BLOCK) and the rows per
    tile (ROWS).
    """
    block = next_power_of_2(D)
    return {"D": D, "BLOCK": block, "ROWS": max(TILE // block, 1), "num_warps": max(min(block // 512, 16), WARPS)}


def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, silu: bool = True, gate_first: bool = False
) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        constants, groups = _constants(x.shape[-1]), _groups(x, weight)
        x, gate = _as_rows(groups, x, gate)
        N, H = _rows_of(x, groups)
        with on_device_of(x):
            _gated_norm_kernel[(cdiv(N, constants["ROWS"]), groups)](
                x, gate, x if weight is None else weight.contiguous(), y, N, H, *x.stride()[:2], *gate.stride()[:2],
                eps, GROUPS=groups, ROUND=weight is None or torch.promote_types(x.dtype, weight.dtype) == x.dtype,
                SILU=silu, GATE_FIRST=gate_first, NORM=weight is not None, **constants,
            )  # fmt: skip
    return y


def _gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, silu: bool = True, gate_first: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_gate, dw = _gradients_like(x, gate, weight)
    if not x.numel():
        return dx, d_gate, dw.zero_()

    # Only as many programs are launched as occupy the device. Each program sums dw over several tiles of rows.
    constants, groups = _constants(x.shape[-1]), _groups(x, weight)
    dy, x, gate = _as_rows(groups, dy, x, gate)
    N, H = _rows_of(x, groups)
    most = cdiv(num_programs(x, max(WARPS_PER_SM // constants["num_warps"], 1)), groups)
    programs = min(cdiv(N, constants["ROWS"]), most)
    # Compute the size of a tile in bytes. Shared memory holds one tile per pipeline stage.
    in_flight = constants["ROWS"] * constants["BLOCK"] * sum(tensor.element_size() for tensor in (dy, x, gate))
    stages = fitting_stages(x, STAGES, in_flight)
    partial = torch.empty(programs, dw.numel(), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _gated_norm_backward_kernel[(programs, groups)](
            dy, x, gate, x if weight is None else weight.contiguous(), dx, d_gate, partial, N, H, *dy.stride()[:2],
            *x.stride()[:2], *gate.stride()[:2], eps, GROUPS=groups, SILU=silu, GATE_FIRST=gate_first,
            NORM=weight is not None, STAGES=stages, **constants,
        )  # fmt: skip
    if weight is not None:
        sum_partials(partial, dw)
    return dx, d_gate, dw


BACKWARD = define_op("gated_norm_backward", _gated_norm_backward, "x gate weight")
FORWARD = define_op("gated_norm", _gated_norm, "x", backward=BACKWARD, gradients="x gate weight")


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-6, *, act: str = "silu", gate_first: bool = False
) -> Tensor:
    """Compute ``weight · x / sqrt(mean(x²) + eps) · act(gate)`` with the mean over the last dimension.

    Args:
        x: [..., D], float32, float16 or bfloat16.
        gate: [..., D].
        weight: [D], or [G, D] for x [..., G, D] whose G groups have different weights. None to compute
            ``x · act(gate)`` without a norm.
        eps: added to the mean of squares.
        act: "silu" or "sigmoid".
        gate_first: whether x is multiplied by the gate before the norm, as in Mamba-2.

    Returns:
        [..., D] in the dtype of x.

    Raises:
        ValueError: x and gate differ in shape, the weight's shape does not match, or the activation is unknown.
        TypeError: a tensor is not floating-point.
    """
    op = "gated_norm"
    check_floating(op, x=x, gate=gate, weight=weight)
    if act not in GATES:
        raise ValueError(f"{op}: act must be one of {', '.join(GATES)}, got {act!r}.")
    if x.shape != gate.shape:
        raise ValueError(f"{op}: x and gate must have one shape, got {list(x.shape)} and {list(gate.shape)}.")
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension.")
    if weight is not None and (weight.dim() not in (1, 2) or weight.shape != x.shape[-weight.dim() :]):
        raise ValueError(
            f"{op}: weight must have the shape of x's last dimension, or of its last two, got weight "
            f"{list(weight.shape)} for x {list(x.shape)}."
        )
    if not use_triton(x):
        return gated_norm_reference(x, gate, weight, eps, act=act, gate_first=gate_first)
    return FORWARD(x, gate, weight, eps, act == "silu", gate_first)
