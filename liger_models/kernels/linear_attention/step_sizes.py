"""Step sizes and decays of recurrences with one decay per head.

For each token and head, the step size δ and the logarithm g of the decay are computed in fp32 from one number d, which
is an element of ``dt``::

    δ = clamp(softplus(d + bias), limits),   g = −exp(A) · δ

A is the logarithm of the head's decay rate. If gradients are needed, δ and g are computed in plain PyTorch. If no
gradients are needed, as in decoding, one kernel computes δ and g.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import TRITON_DTYPES, is_differentiable, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

BLOCK, WARPS = 256, 2
"""Number of elements per program, and number of warps per program."""

NO_LIMITS = (0.0, float("inf"))


@triton.jit
def _step_sizes_kernel(
    dt_ptr, rate_ptr, bias_ptr, delta_ptr, g_ptr, count, least, most, H: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, head = element < count, element % H
    x = tl.load(dt_ptr + element, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + head, mask=inside, other=0.0).to(tl.float32)
    # softplus(x) = log(1 + e), where e = exp(x). The quotient corrects the rounding of 1 + e. For x ≥ 20, softplus(x)
    # is x.
    e = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + e
    small = rounded == 1.0
    softplus = tl.where(small, e, tl.log(rounded) * (e / tl.where(small, 1.0, rounded - 1.0)))
    delta = tl.where(x > 20.0, x, softplus)
    if LIMITS:
        delta = tl.minimum(tl.maximum(delta, least), most)
    rate = tl.exp(tl.load(rate_ptr + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(delta_ptr + element, delta, mask=inside)
    tl.store(g_ptr + element, -rate * delta, mask=inside)


def _step_sizes(dt: Tensor, A_log: Tensor, dt_bias: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    delta, g = (dt.new_empty(dt.shape, dtype=torch.float32) for _ in range(2))
    if dt.numel():
        with on_device_of(dt):
            _step_sizes_kernel[(cdiv(dt.numel(), BLOCK),)](
                dt.contiguous(), A_log.contiguous(), dt_bias.contiguous(), delta, g, dt.numel(), least, most,
                H=dt.shape[-1], LIMITS=(least, most) != NO_LIMITS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return delta, g


def _step_sizes_fake(dt: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return dt.new_empty(dt.shape, dtype=torch.float32), dt.new_empty(dt.shape, dtype=torch.float32)


FORWARD = define_op("step_sizes", _step_sizes, _step_sizes_fake)


def step_sizes(
    dt: Tensor, A_log: Tensor, dt_bias: Tensor, limits: tuple[float, float] = NO_LIMITS
) -> tuple[Tensor, Tensor]:
    """Compute the step sizes δ = clamp(softplus(dt + dt_bias), limits) and the log decays g = −exp(A_log) · δ in fp32.

    Args:
        dt: [..., H].
        A_log, dt_bias: [H].
        limits: the smallest and the largest step size.

    Returns:
        δ and g, [..., H] each, in float32, or in float64 if ``dt`` is float64.

    Raises:
        TypeError: a tensor is not floating-point.
    """
    check_floating("step_sizes", dt=dt, A_log=A_log, dt_bias=dt_bias)
    inputs = dt, A_log, dt_bias
    # Check the dtypes first, because use_triton() raises an error for fp64.
    if {x.dtype for x in inputs} <= set(TRITON_DTYPES) and use_triton(dt) and not is_differentiable(*inputs):
        return FORWARD(*inputs, *limits)
    dtype = torch.promote_types(dt.dtype, torch.float32)
    delta = F.softplus(dt.to(dtype) + dt_bias.to(dtype))
    if limits != NO_LIMITS:
        delta = delta.clamp(*limits)
    return delta, -A_log.to(dtype).exp() * delta
