"""y = x Wᵀ in fp32 for x and W in bf16, on tensor cores: the logits of routers.

A product of two bf16 numbers is exact in fp32, so y differs from the product of x and W in fp32 only in the order of
the sums. In the backward, dy is in fp32. It is split into three bf16 numbers, which have all of its digits::

    dy = d₁ + d₂ + d₃,   d₁ = cast(dy),   d₂ = cast(dy − d₁),   d₃ = cast(dy − d₁ − d₂)
    dx = [d₁ d₂ d₃] [W; W; W],   dW = d₁ᵀ x + d₂ᵀ x + d₃ᵀ x

All products are summed in fp32, so the gradients have the accuracy of products in fp32, too. One kernel splits dy.
x and W are saved.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.tiles import cdiv

BLOCK, WARPS = 1024, 4
"""Number of elements that a program splits, and number of its warps."""

PARTS = 3


def wide_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `wide_linear` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


@triton.jit
def _split_kernel(dy_ptr, parts_ptr, count, E: tl.constexpr, BLOCK: tl.constexpr):
    """Split BLOCK elements of dy [N, E] into three numbers each, and write them to the rows of ``parts`` [N, 3 E]."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    rest = tl.load(dy_ptr + element, mask=inside, other=0.0)
    dtype = parts_ptr.dtype.element_ty
    at = parts_ptr + element + element // E * (2 * E)
    for part in tl.static_range(3):
        rounded = rest.to(dtype)
        tl.store(at + part * E, rounded, mask=inside)
        rest -= rounded.to(tl.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight.t())


def _wide_linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    (N, C), E = x.shape, len(weight)
    parts = x.new_empty(N, PARTS * E)
    if parts.numel():
        with on_device_of(dy):
            _split_kernel[(cdiv(dy.numel(), BLOCK),)](
                dy.contiguous(), parts, dy.numel(), E=E, BLOCK=BLOCK, num_warps=WARPS
            )
    dx = torch.mm(parts, weight.repeat(PARTS, 1))
    return dx, _product(parts.t(), x).view(PARTS, E, C).sum(0).to(weight.dtype)


def _wide_linear_fake(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


BACKWARD = define_op("wide_linear_backward", _wide_linear_backward, "x weight")
FORWARD = define_op("wide_linear", _wide_linear, _wide_linear_fake, backward=BACKWARD, gradients="x weight")


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weightᵀ`` in fp32 from inputs of any floating-point dtype.

    Args:
        x: [N, C], float32, float16 or bfloat16. Products on tensor cores need bfloat16.
        weight: [E, C].

    Returns:
        [N, E] in float32, or float64 for float64 inputs.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not floating-point.
    """
    op = "wide_linear"
    check_floating(op, x=x, weight=weight)
    if not (x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]):
        raise ValueError(f"{op}: x must be [N, C] and weight [E, C], got {list(x.shape)} and {list(weight.shape)}.")
    # The rows of operands on tensor cores are multiples of 16 bytes.
    fits = x.dtype == weight.dtype == torch.bfloat16 and len(weight) % 8 == x.shape[1] % 8 == 0
    if not fits or is_batch_invariant() or not use_triton(x):
        return wide_linear_reference(x, weight)
    return FORWARD(x, weight)
