import pytest
import torch

from liger_models.kernels.optimizer.newton_schulz import (
    newton_schulz,
    newton_schulz_reference,
    symmetric_product,
    symmetric_product_reference,
)

from ..oracle import wide
from ..rope.test_rope import draw, dtypes

# Smaller than a tile, of several tiles, whole tiles, one row, nothing.
SHAPES = [(2, 5, 7), (1, 37, 50), (3, 32, 16), (2, 1, 40), (0, 3, 3), (2, 0, 5), (2, 3, 0)]
GPU_SHAPES = [(3, 200, 1000), (1, 512, 512), (2, 1000, 257)]


def check(function, reference, x, *factors):
    """As near to fp64 as plain torch is, or as the rounding of what is returned."""
    before = x.clone()
    got, plain, exact = function(x, *factors), reference(x, *factors), reference(wide(x), *factors)
    assert torch.equal(x, before)
    assert got.dtype == x.dtype
    assert got.shape == exact.shape
    scale = exact.norm().clamp_min(1e-30)
    error, theirs = ((wide(each) - exact).norm() / scale for each in (got, plain))
    assert error <= 1.5 * theirs + max(0.1 * torch.finfo(x.dtype).eps, 2.4e-7)


@pytest.mark.cases(7)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, poisoned_empty):
    for dtype in dtypes(backend):
        x = draw(*shape, dtype=dtype, device=backend)
        for alpha in (1.0, -0.3):
            check(symmetric_product, symmetric_product_reference, x, alpha)
        check(symmetric_product, symmetric_product_reference, x @ x.mT, 2.0, -4.7)
        check(newton_schulz, newton_schulz_reference, x)
        check(newton_schulz, newton_schulz_reference, x.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_on_a_gpu(shape):
    for dtype in dtypes("cuda"):
        x = draw(*shape, dtype=dtype, device="cuda")
        check(symmetric_product, symmetric_product_reference, x)
        square = symmetric_product(x / x.shape[2] ** 0.5)
        assert torch.equal(square, square.mT)
        check(symmetric_product, symmetric_product_reference, square, 2.0, -4.7)
        check(newton_schulz, newton_schulz_reference, x)


@pytest.mark.usefixtures("sums_without_order")
def test_the_product_is_symmetric_bit_for_bit(kernel_device):
    x = draw(2, 75, 40, device=kernel_device)
    square = symmetric_product(x)
    assert torch.equal(square, square.mT)
    again = symmetric_product(square, 0.1, 2.0)
    assert torch.equal(again, again.mT)


def test_singular_values_become_about_one():
    u, s, v = torch.linalg.svd(draw(2, 30, 20, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(0, -2, s.shape[1], dtype=torch.float64).expand_as(s)
    for x in (u * s[:, None] @ v, (u * s[:, None] @ v).mT):
        singular = torch.linalg.svdvals(newton_schulz(1e3 * x))
        assert singular.min() > 0.6
        assert singular.max() < 1.25
    assert not newton_schulz(torch.zeros(1, 4, 5)).any()


def test_errors():
    with pytest.raises(ValueError, match=r"newton_schulz: x must be \[B, N, K\], got \[3, 4\]"):
        newton_schulz(torch.ones(3, 4))
    with pytest.raises(TypeError, match=r"newton_schulz: x must be a floating-point tensor, got torch\.int64"):
        newton_schulz(torch.ones(1, 3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"symmetric_product: x must be \[B, N, K\], and square with a beta"):
        symmetric_product(torch.ones(1, 3, 4), beta=1.0)
