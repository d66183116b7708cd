"""Orthogonalize matrices by five Newton-Schulz steps that compute only half of each symmetric product.

A matrix with the singular values σ gets singular values near 1 and keeps its singular vectors::

    X = X / max(‖X‖, 1e-7)                          the Frobenius norm, so that σ <= 1
    five times:  A = X Xᵀ,   X = a X + (b A + c A²) X          a, b, c = 3.4445, -4.7750, 2.0315

The coefficients have a steep slope at 0 instead of a fixed point at 1: σ above 0.002 end between 0.68 and 1.21. A
matrix with more rows than columns is transposed first, so that A is the smaller of the two products.

A and b A + c A² are symmetric. `symmetric_product` computes the tiles on and below the diagonal, and stores each tile
and its mirror image. Products accumulate in fp32 and are rounded to the matrices' dtype.

Source: https://kellerjordan.github.io/posts/muon; halves of the products: https://github.com/nil0x9/flash-muon.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.dispatch import INTERPRET, TRITON_DTYPES, fitting_stages, on_device_of, tl, triton, use_triton

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
BLOCK = 16 if INTERPRET else 128
BLOCK_K = 16 if INTERPRET else 64
STAGES, NUM_WARPS = 3, 8
"""Rows and columns of a tile, columns of X in a step of its sum, steps in flight, and warps."""
SPAN = 2 * BLOCK_K
"""Columns of an fp32 X that are summed by themselves: one long sum would round more than the libraries' do."""


def symmetric_product_reference(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """`symmetric_product` in plain torch."""
    return torch.baddbmm(x, x, x.mT, beta=beta, alpha=alpha) if beta else torch.bmm(x, x.mT).mul_(alpha)


@triton.jit
def _sum_of_products(left, right, K, left_exists, right_exists, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products [BLOCK, BLOCK] of the rows at ``left`` and ``right``, summed over K columns; missing rows count as 0."""
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
    """Write one tile on or below the diagonal and its mirror image; SPAN splits the sum into runs of columns."""
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

    # X Xᵀ, [BLOCK, BLOCK].
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

    # The tile, and its mirror image above the diagonal.
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    if i != j:
        mirrored = column[:, None].to(tl.int64) * N + row[None, :]
        tl.store(out_ptr + mirrored, tl.trans(out), mask=(column < N)[:, None] & (row < N)[None, :])


def symmetric_product(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha · X Xᵀ + beta · X of each matrix; exactly symmetric if kernels compute it. Not differentiable.

    Args:
        x: [B, N, K], floating-point; [B, N, N] and symmetric unless ``beta`` is 0.
        alpha, beta: the factors.

    Returns:
        [B, N, N] in the dtype of ``x``.

    Raises:
        ValueError: ``x`` has other dimensions, or is not square and ``beta`` is not 0.
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
            _symmetric_product_kernel[(triton.cdiv(N, BLOCK) ** 2, B)](
                x, out, N, K, float(alpha), float(beta), ADDS=bool(beta), BLOCK=BLOCK, BLOCK_K=BLOCK_K,
                SPAN=SPAN if x.dtype == torch.float32 else 0,
                num_warps=NUM_WARPS, num_stages=fitting_stages(x, STAGES, 2 * BLOCK * BLOCK_K * x.itemsize),
            )  # fmt: skip
    return out


def newton_schulz_reference(x: Tensor) -> Tensor:
    """`newton_schulz` in plain torch."""
    return _iterate(x, symmetric_product_reference)


@torch.no_grad()
def newton_schulz(x: Tensor) -> Tensor:
    """The nearly orthogonal factor of each matrix. Not differentiable.

    Args:
        x: [B, N, K], floating-point; the products are computed in its dtype.

    Returns:
        [B, N, K] in the dtype of ``x``, with singular values of about 1; a zero matrix stays zero.

    Raises:
        ValueError: ``x`` does not have three dimensions.
        TypeError: ``x`` is not floating-point.
    """
    check_floating("newton_schulz", x=x)
    if x.dim() != 3:
        raise ValueError(f"newton_schulz: x must be [B, N, K], got {list(x.shape)}. Stack equal matrices.")
    return _iterate(x, symmetric_product)


def _iterate(x: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Iterate X ← a · X + (b · A + c · A²) X with A = X Xᵀ from ``product``, on the shorter side of X."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).contiguous()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = product(x)
        x = torch.baddbmm(x, product(gram, c, b), x, beta=a)
    return x.mT if tall else x
