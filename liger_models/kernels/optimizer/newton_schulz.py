"""Orthogonalization of matrices by five Newton-Schulz steps, which compute only half of each symmetric product.

The steps move the singular values σ of a matrix close to 1, and keep its singular vectors::

    X = X / max(‖X‖, 1e-7)                          with the Frobenius norm, so that σ <= 1
    five times:  A = X Xᵀ,   X = a X + (b A + c A²) X          a, b, c = 3.4445, -4.7750, 2.0315

The coefficients are chosen so that a small σ grows fast: the map from σ to the new σ is steep at σ = 0. As a
consequence, σ = 1 is not a fixed point of this map. After the five steps, a σ that was above 0.002 is between 0.68 and
1.21. A matrix with more rows than columns is first transposed, which makes X Xᵀ smaller.

The matrices A and b A + c A² are symmetric. `symmetric_product` therefore computes only the tiles on and below the
diagonal, and stores each tile and its mirror image. Products are accumulated in fp32, and rounded to the dtype of the
matrices.

Source: https://kellerjordan.github.io/posts/muon, https://github.com/nil0x9/flash-muon (symmetric products).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.dispatch import INTERPRET, TRITON_DTYPES, fitting_stages, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
BLOCK = 16 if INTERPRET else 128
BLOCK_K = 16 if INTERPRET else 64
STAGES, NUM_WARPS = 3, 8
"""Number of rows and number of columns of a tile (both BLOCK), number of columns of X per step of the sum (BLOCK_K),
number of pipeline stages, and number of warps."""
SPAN = 2 * BLOCK_K
"""Number of columns of an fp32 X over which products are summed before the sum is added to the total. A single long sum
would have larger rounding errors than library products."""


def symmetric_product_reference(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Compute `symmetric_product` in plain PyTorch."""
    return torch.baddbmm(x, x, x.mT, beta=beta, alpha=alpha) if beta else torch.bmm(x, x.mT).mul_(alpha)


@triton.jit
def _sum_of_products(left, right, K, left_exists, right_exists, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the dot product of each row at ``left`` with each row at ``right``, [BLOCK, BLOCK], over K columns.

    Rows beyond the matrix count as 0.
    """
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = step[None, :] < K - start
        a = tl.load(left + start, mask=left_exists & inside, other=0.0)
        b = tl.load(right + start, mask=right_exists & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def _symmetric_product_kernel(
    x_ptr, out_ptr, N, K, alpha, beta, ADDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile on or below the diagonal, and store its mirror image.

    If SPAN is not 0, the sum is split into partial sums over SPAN columns each.
    """
    tiles = tl.cdiv(N, BLOCK)
    i = tl.program_id(0) // tiles
    j = tl.program_id(0) % tiles
    if j > i:
        return
    x_ptr += tl.program_id(1).to(tl.int64) * N * K
    out_ptr += tl.program_id(1).to(tl.int64) * N * N
    row = i * BLOCK + tl.arange(0, BLOCK)
    column = j * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, BLOCK_K)
    left = x_ptr + row[:, None].to(tl.int64) * K + step[None, :]
    right = x_ptr + column[:, None].to(tl.int64) * K + step[None, :]
    row_exists, column_exists = (row < N)[:, None], (column < N)[:, None]

    # Compute the tile [BLOCK, BLOCK] of X Xᵀ.
    if SPAN:
        total = tl.zeros([BLOCK, BLOCK], tl.float32)
        for first in range(0, K, SPAN):
            columns = tl.minimum(K - first, SPAN)
            total += _sum_of_products(left + first, right + first, columns, row_exists, column_exists, BLOCK, BLOCK_K)
    else:
        total = _sum_of_products(left, right, K, row_exists, column_exists, BLOCK, BLOCK_K)
    total *= alpha

    at = row[:, None].to(tl.int64) * N + column[None, :]
    inside = (row < N)[:, None] & (column < N)[None, :]
    if ADDS:  # X is square and symmetric
        total += beta * tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)

    # Store the tile, and its mirror image above the diagonal.
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    if i != j:
        mirrored = column[:, None].to(tl.int64) * N + row[None, :]
        tl.store(out_ptr + mirrored, tl.trans(out), mask=(column < N)[:, None] & (row < N)[None, :])


def symmetric_product(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Compute alpha · X Xᵀ + beta · X for each matrix X. The function is not differentiable.

    The Triton kernel's result is exactly symmetric.

    Args:
        x: [B, N, K], floating-point. If ``beta`` is not 0, x must be [B, N, N] and symmetric.
        alpha: coefficient of X Xᵀ.
        beta: coefficient of X.

    Returns:
        [B, N, N] in the dtype of ``x``.

    Raises:
        ValueError: ``x`` does not have three dimensions, or its matrices are not square and ``beta`` is not 0.
        TypeError: ``x`` is not floating-point.
    """
    check_floating("symmetric_product", x=x)
    if x.dim() != 3 or (beta and x.shape[1] != x.shape[2]):
        raise ValueError(f"symmetric_product: x must be [B, N, K], and square with a beta, got {list(x.shape)}.")
    if x.dtype not in TRITON_DTYPES or not use_triton(x):
        return symmetric_product_reference(x, alpha, beta)
    B, N, K = x.shape
    x, out = x.contiguous(), x.new_empty(B, N, N)
    if out.numel():
        with on_device_of(x):
            _symmetric_product_kernel[(cdiv(N, BLOCK) ** 2, B)](
                x, out, N, K, float(alpha), float(beta), ADDS=bool(beta), BLOCK=BLOCK, BLOCK_K=BLOCK_K,
                SPAN=SPAN if x.dtype == torch.float32 else 0,
                num_warps=NUM_WARPS, num_stages=fitting_stages(x, STAGES, 2 * BLOCK * BLOCK_K * x.itemsize),
            )  # fmt: skip
    return out


def newton_schulz_reference(x: Tensor) -> Tensor:
    """Compute `newton_schulz` in plain PyTorch."""
    return _iterate(x, symmetric_product_reference)


@torch.no_grad()
def newton_schulz(x: Tensor) -> Tensor:
    """For each matrix, approximate the nearest orthogonal matrix. The function is not differentiable.

    Args:
        x: [B, N, K], floating-point. The products are computed in the dtype of x.

    Returns:
        [B, N, K] in the dtype of ``x``: matrices whose singular values are about 1. A zero matrix stays zero.

    Raises:
        ValueError: ``x`` does not have three dimensions.
        TypeError: ``x`` is not floating-point.
    """
    check_floating("newton_schulz", x=x)
    if x.dim() != 3:
        raise ValueError(f"newton_schulz: x must be [B, N, K], got {list(x.shape)}. Stack equal matrices.")
    return _iterate(x, symmetric_product)


def _iterate(x: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Iterate X ← a · X + (b · A + c · A²) X with A = X Xᵀ. ``product``, which is `symmetric_product` or its reference,
    computes A, and then b · A + c · A².

    A matrix with more rows than columns is transposed before and after the iteration.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).contiguous()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = product(x)
        x = torch.baddbmm(x, product(gram, c, b), x, beta=a)
    return x.mT if tall else x
