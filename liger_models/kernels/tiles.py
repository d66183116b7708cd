"""Helpers for kernels and their launches, shared by several folders."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels.dispatch import tl, triton


@triton.jit
def exp(x):
    """Compute exp(x) with the exp2 instruction, which flushes subnormal results to 0.

    tl.exp takes additional instructions to keep subnormal results.
    """
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def log2(x, PTX: tl.constexpr):
    """Compute log2(x) of normal numbers, with a relative error of at most 2⁻²² or, from ½ to 2, an absolute error of at
    most 2⁻²².

    On NVIDIA GPUs, tl.log2 takes about twenty instructions. With PTX (see `has_ptx`), this function takes one.
    """
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.log2(x)


@triton.jit
def scale_and_cap(x, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Compute ``softcap · tanh(x · logit_scale / softcap)`` or, without a softcap, ``x · logit_scale``, in fp32."""
    z = x.to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        u = z * (1.0 / softcap)
        if x.dtype == tl.float32:
            v = u * u  # for small u, use Cephes' polynomial, because the formula for large u would lose digits
            small = ((-5.70498872745e-3 * v + 2.06390887954e-2) * v - 5.37397155531e-2) * v + 1.33314422036e-1
            large = 1.0 - 2.0 / (exp(2.0 * tl.abs(u)) + 1.0)
            tanh = tl.where(v < 0.39, u + u * v * (small * v - 3.33332819422e-1), tl.where(u < 0.0, -large, large))
        else:
            root = tl.rsqrt(exp(2.0 * u) + 1.0)  # a square and rsqrt are cheaper than a division
            tanh = 1.0 - 2.0 * root * root
        z = softcap * tanh
    return z


def cdiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up.

    This function and `next_power_of_2` take a tenth of the time of Triton's functions with these names, which also
    support kernel constants. A forward calls the two functions hundreds of times.
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def dot_tile(size: int) -> int:
    """Return the length of a tile's dimension that holds ``size`` elements. Matrix units require at least 16."""
    return max(next_power_of_2(size), 16)


def num_warps(block: int, most: int = 16) -> int:
    """Return the number of warps for a program that holds ``block`` elements in registers.

    Each thread holds 16 elements, or more if that would take more than ``most`` warps.
    """
    return min(max(block // 512, 1), most)


def dot_precision(x: Tensor) -> str:
    """Return the input precision of matrix products: "tf32" for fp32 if the user enabled TF32, otherwise "ieee"."""
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # the attribute exists since PyTorch 2.9
    return "tf32" if x.element_size() == 4 and chosen == "tf32" else "ieee"


def contiguous_rows(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if the last dimension of ``x`` is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def accumulate(sums: Sequence[Tensor], gradient: Tensor, x: Tensor, beta: int) -> None:
    """Set ``sums = beta · sums + gradientᵀ @ x`` in the dtype of ``sums``.

    Args:
        sums: consecutive blocks of rows of one matrix [V, C].
        gradient: [N, V].
        x: [N, C].
        beta: 0 to overwrite ``sums``, or 1 to add to ``sums``.
    """
    for total, columns in zip(sums, gradient.split([len(block) for block in sums], 1), strict=True):
        if x.dtype == total.dtype:
            total.addmm_(columns.t(), x, beta=beta)
        elif x.device.type == "cuda":
            torch.addmm(total, columns.t(), x, beta=beta, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(columns.t().to(total.dtype), x.to(total.dtype), beta=beta)
