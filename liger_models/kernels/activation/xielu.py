"""xIELU, an activation with two trained coefficients. The forward saves only the input and the coefficients.

With the coefficients p and n, and the constants β and ε, the forward computes in fp32 (cast rounds to the dtype of x)::

    y = cast(p · x² + β · x)                               for x > 0
    y = cast(n · (exp(min(x, ε)) − 1 − x) + β · x)         otherwise

The backward computes::

    dx = dy · (2 · p · x + β)                 dp = Σ dy · x²                           for x > 0
    dx = dy · (n · (exp(x) − 1) + β)          dn = Σ dy · (exp(min(x, ε)) − 1 − x)     for x < ε
    dx = dy · (β − n)                         dn as above                              otherwise

The sums Σ run over all elements. Each program of the kernel writes a partial sum in fp32.

For x close to 0, ``exp(x) − 1 − x`` is close to x² / 2. Subtracting 1 and x from a rounded exp(x) would lose all
significant digits. For x from −1/2 to 0, the kernel therefore evaluates a Taylor polynomial instead.

Source: https://arxiv.org/abs/2411.13010; ε is from the implementation in transformers.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import Op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

BLOCK = 2048
NUM_WARPS = 8
"""Number of elements per program, and number of warps per program. In bf16, each thread loads one 16-byte vector."""


def xielu_reference(x: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `xielu` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    p, n = coefficients[:2].to(wide.dtype)
    beta, eps = coefficients[2:].detach().to(wide.dtype)
    negative = torch.expm1(torch.minimum(wide, eps)) - wide
    return torch.where(wide > 0, p * wide * wide + beta * wide, n * negative + beta * wide).to(x.dtype)


@triton.jit
def _remainder(x):
    """Compute exp(x) − 1 − x for x ≤ 0 in fp32."""
    series = 1.0 / 40320 + x * (1.0 / 362880)
    series = 1.0 / 720 + x * (1.0 / 5040 + x * series)
    series = 1.0 / 24 + x * (1.0 / 120 + x * series)
    series = 0.5 + x * (1.0 / 6 + x * series)
    return tl.where(x > -0.5, x * x * series, tl.exp(tl.minimum(x, 0.0)) - 1.0 - x)


@triton.jit
def _parts(x, eps):
    """Return the factor of p in y, the factor of n in y, and exp(min(x, ε)) − 1.

    For each x, the formula for y contains only one of p and n. The factor of the other coefficient is 0.
    """
    bounded = tl.minimum(x, eps)
    remainder = _remainder(bounded)
    positive = x > 0.0
    return tl.where(positive, x * x, 0.0), tl.where(positive, 0.0, remainder + (bounded - x)), remainder + bounded


@triton.jit
def _xielu_kernel(x_ptr, y_ptr, coefficients_ptr, count, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    elements = tl.arange(0, BLOCK)
    inside = elements < count - start
    p, n = tl.load(coefficients_ptr), tl.load(coefficients_ptr + 1)
    beta, eps = tl.load(coefficients_ptr + 2), tl.load(coefficients_ptr + 3)
    x = tl.load(x_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    of_p, of_n, _ = _parts(x, eps)
    y = p * of_p + n * of_n + beta * x
    tl.store(y_ptr + start + elements, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _xielu_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, y_ptr, coefficients_ptr, partial_ptr, count,
    STORE_Y: tl.constexpr, STORE_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    elements = tl.arange(0, BLOCK)
    inside = elements < count - start
    p, n = tl.load(coefficients_ptr), tl.load(coefficients_ptr + 1)
    beta, eps = tl.load(coefficients_ptr + 2), tl.load(coefficients_ptr + 3)
    x = tl.load(x_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    of_p, of_n, minus_one = _parts(x, eps)
    slope = tl.where(x > 0.0, 2.0 * p * x, tl.where(x < eps, n * minus_one, -n)) + beta
    tl.store(dx_ptr + start + elements, (dy * slope).to(dx_ptr.dtype.element_ty), mask=inside)
    if STORE_Y:
        y = p * of_p + n * of_n + beta * x
        tl.store(y_ptr + start + elements, y.to(y_ptr.dtype.element_ty), mask=inside)
    if STORE_SUMS:
        tl.store(partial_ptr + 2 * program, tl.sum(dy * of_p, 0))
        tl.store(partial_ptr + 2 * program + 1, tl.sum(dy * of_n, 0))


def xielu_forward(x: Tensor, coefficients: Tensor) -> Tensor:
    """Launch the forward kernel and return y."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        with on_device_of(x):
            _xielu_kernel[(cdiv(x.numel(), BLOCK),)](
                x, y, coefficients.float(), x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS
            )
    return y


def xielu_backward(
    dy: Tensor, x: Tensor, coefficients: Tensor, *, need_y: bool = False, need_sums: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the backward kernel.

    Args:
        dy, x: [...] in any floating-point dtype.
        coefficients: as in `xielu`.
        need_y: whether to recompute the forward's output y. If so, y is written into dy. dy must then have the dtype of
            x, and its values must no longer be needed.
        need_sums: whether to compute the gradient of the coefficients.

    Returns:
        ``(dx, y, d_coefficients)``. y and d_coefficients are None if they are not requested.
    """
    x = x.contiguous()
    dy = dy.contiguous().to(x.dtype)
    dx, programs = torch.empty_like(x), cdiv(x.numel(), BLOCK)
    partial = torch.empty(programs if need_sums else 0, 2, dtype=torch.float32, device=x.device)
    if x.numel():
        with on_device_of(x):
            _xielu_backward_kernel[(programs,)](
                dy, x, dx, dy, coefficients.float(), partial, x.numel(),
                STORE_Y=need_y, STORE_SUMS=need_sums, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    sums = torch.nn.functional.pad(partial.sum(0), (0, 2)).to(coefficients.dtype) if need_sums else None
    return dx, dy if need_y else None, sums


class XieluInputs(NamedTuple):
    """Inputs of the op `xielu`."""

    x: Tensor
    coefficients: Tensor


class XieluGradients(NamedTuple):
    """The gradients of the op's inputs. `XieluNeeds` has bools that say which gradients are needed."""

    x: Any
    coefficients: Any


XieluNeeds = Annotated[XieluGradients, bool]


class XieluUpstream(NamedTuple):
    """Inputs of the op `xielu_backward`."""

    dy: Tensor
    saved: XieluInputs
    needs: XieluNeeds


def _forward(inputs: XieluInputs) -> Tensor:
    return xielu_forward(*inputs)


def _backward(inputs: XieluUpstream) -> XieluGradients:
    dx, _, sums = xielu_backward(inputs.dy, *inputs.saved, need_sums=inputs.needs.coefficients)
    return XieluGradients(dx if inputs.needs.x else None, sums)


def _forward_fake(inputs: XieluInputs) -> Tensor:
    return inputs.x.new_empty(inputs.x.shape)


def _backward_fake(inputs: XieluUpstream) -> XieluGradients:
    (x, coefficients), needs = inputs.saved, inputs.needs
    return XieluGradients(
        x=x.new_empty(x.shape) if needs.x else None,
        coefficients=coefficients.new_empty(4) if needs.coefficients else None,
    )


def _save(ctx: Any, inputs: XieluInputs, y: Tensor, needs: XieluNeeds) -> XieluInputs:
    return inputs


def _gradients(saved: XieluInputs, needs: XieluNeeds, dy: Tensor) -> XieluGradients:
    return BACKWARD(XieluUpstream(dy, saved, needs))


FORWARD = Op("xielu", _forward, _forward_fake)
BACKWARD = Op("xielu_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


def check_coefficients(op: str, coefficients: Tensor) -> None:
    """Raise an error unless the coefficients of xIELU are four floating-point numbers."""
    check_floating(op, coefficients=coefficients)
    if tuple(coefficients.shape) != (4,):
        raise ValueError(f"{op}: coefficients must be [4] (p, n, beta and eps), got {list(coefficients.shape)}.")


def xielu(x: Tensor, coefficients: Tensor) -> Tensor:
    """Compute xIELU. Only x and the coefficients are saved for the backward.

    Args:
        x: [...], float32, float16 or bfloat16.
        coefficients: [4], the values of p, n, beta and eps. Only p and n are trained; beta and eps get zero gradients.

    Returns:
        [...] in the dtype of x.

    Raises:
        ValueError: the coefficients are not four numbers.
        TypeError: a tensor is not floating-point.
    """
    check_floating("xielu", x=x)
    check_coefficients("xielu", coefficients)
    if not use_triton(x):
        return xielu_reference(x, coefficients)
    return FORWARD(XieluInputs(x, coefficients))
