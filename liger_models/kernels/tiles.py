"""Helpers for kernels and launches that several packages share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels.dispatch import tl, triton


@triton.jit
def exp(x):
    """exp by the exp2 instruction, which flushes tiny results to 0; tl.exp keeps them with extra instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def scale_and_cap(x, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """``softcap · tanh(x · logit_scale / softcap)``, or ``x · logit_scale`` without a softcap, in fp32."""
    z = x.to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        u = z * (1.0 / softcap)
        if x.dtype == tl.float32:
            v = u * u  # Cephes' polynomial: for a small tanh the difference below would lose digits
            small = ((-5.70498872745e-3 * v + 2.06390887954e-2) * v - 5.37397155531e-2) * v + 1.33314422036e-1
            large = 1.0 - 2.0 / (exp(2.0 * tl.abs(u)) + 1.0)
            tanh = tl.where(v < 0.39, u + u * v * (small * v - 3.33332819422e-1), tl.where(u < 0.0, -large, large))
        else:
            root = tl.rsqrt(exp(2.0 * u) + 1.0)  # its square is cheaper than a division
            tanh = 1.0 - 2.0 * root * root
        z = softcap * tanh
    return z


def num_warps(block: int, most: int = 16) -> int:
    """Warps of a program that holds ``block`` numbers of a row in registers, with 16 numbers per thread."""
    return min(max(block // 512, 1), most)


def dot_precision(x: Tensor) -> str:
    """How fp32 is multiplied: as TF32 only if the user enabled TF32 for matrix products."""
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # from torch 2.9
    return "tf32" if x.element_size() == 4 and chosen == "tf32" else "ieee"


def contiguous_rows(x: Tensor) -> Tensor:
    """``x``, copied unless its last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def accumulate(sums: Sequence[Tensor], gradient: Tensor, x: Tensor, beta: int) -> None:
    """Set ``sums = beta · sums + gradientᵀ @ x`` in their dtype, with beta 0 or 1; ``sums`` are blocks of rows."""
    for total, columns in zip(sums, gradient.split([len(block) for block in sums], 1), strict=True):
        if x.dtype == total.dtype:
            total.addmm_(columns.t(), x, beta=beta)
        elif x.device.type == "cuda":
            torch.addmm(total, columns.t(), x, beta=beta, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(columns.t().to(total.dtype), x.to(total.dtype), beta=beta)
