import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.matmul.invariant_linear import each_row, invariant_linear

from ..oracle import assert_close_to_truth, opcheck
from ..rope.test_rope import draw, dtypes

# (N, O, C): several tiles and parts of them, a single row, columns that are no whole step
SIZES = [(3, 5, 7), (1, 130, 64), (70, 33, 96), (130, 67, 40)]
GPU_SIZES = [(1000, 5120, 3072), (777, 2048, 8192), (64, 130, 100)]


def inputs(N, M, C, dtype, device):
    return [draw(*size, dtype=dtype, device=device) for size in ((1, N, C), (M, C), (M,))]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_fp64(backend, size):
    for dtype in dtypes(backend):
        x, weight, bias = inputs(*size, dtype, backend)
        dy = draw(1, *size[:2], dtype=dtype, device=backend)
        assert_close_to_truth(invariant_linear, F.linear, [x, weight, bias], [dy])
        assert_close_to_truth(invariant_linear, F.linear, [x[0], weight], [dy[0]])


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_real_sizes(size):
    for dtype in dtypes("cuda"):
        check_rows(*size, dtype, "cuda", [1, 2, 17, 64, 65, 128, size[0] - 3])


@pytest.mark.cases(4)
@pytest.mark.usefixtures("sums_without_order")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(backend, size):
    for dtype in [*dtypes(backend), torch.bfloat16]:
        check_rows(*size, dtype, backend, [1, 2, size[0] // 2])


def check_rows(N, M, C, dtype, device, counts):
    x, weight, bias = inputs(N, M, C, dtype, device)
    x = x[0]
    for b in (None, bias):
        whole = invariant_linear(x, weight, b)
        for count in counts:
            for start in {0, N // 3, N - count}:
                part = slice(start, start + count)
                assert torch.equal(invariant_linear(x[part], weight, b), whole[part])
        order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).to(device)
        assert torch.equal(invariant_linear(x[order], weight, b), whole[order])


def test_element_wise_functions_of_each_row():
    x = torch.randn(5, 37)
    whole = each_row(F.silu, x)
    torch.testing.assert_close(whole, F.silu(x))
    assert torch.equal(each_row(F.silu, x[2:4]), whole[2:4])
    assert each_row(F.silu, x[:0]).shape == (0, 0)


def test_empty(backend):
    for size in ((0, 5, 7), (3, 0, 7)):
        x, weight, bias = (each.requires_grad_() for each in inputs(*size, torch.float32, backend))
        y = invariant_linear(x, weight, bias)
        y.sum().backward()
        assert y.shape == (1, *size[:2])


@pytest.mark.compile
def test_opcheck(kernel_device):
    tensors = [x.requires_grad_() for x in inputs(3, 6, 8, torch.float32, kernel_device)]
    opcheck(torch.ops.liger_models.invariant_linear, tuple(tensors))


def test_refuses():
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"x must be \[..., C\] and weight \[O, C\], got \[2, 3\] and \[4, 2\]"):
        invariant_linear(x, weight[:, :2])
    with pytest.raises(ValueError, match=r"bias must be \[4\], got \[3\]"):
        invariant_linear(x, weight, torch.zeros(3))
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32 and torch.bfloat16"):
        invariant_linear(x, weight.bfloat16())
