import pytest
import torch

from liger_models.kernels.matmul import wide_linear as module
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.wide_linear import wide_linear, wide_linear_reference

from ..oracle import assert_close_to_truth, opcheck, run
from ..rope.test_rope import draw, dtypes

SHAPES = [(37, 16, 24), (5, 8, 8), (3, 7, 5), (0, 8, 8)]
"""N, C and E. Of the second and third, one has kernels and the other has not."""


def make(shape, dtype, device="cpu"):
    N, C, E = shape
    x, weight = draw(N, C, dtype=dtype, device=device), draw(E, C, dtype=dtype, device=device, seed=1)
    return [x, weight], [draw(N, E, dtype=torch.float32, device=device, seed=2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)
    for dtype in (*dtypes(backend), torch.bfloat16):
        assert_close_to_truth(wide_linear, wide_linear_reference, *make(shape, dtype, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4000, 2688, 128), (1000, 7168, 256)], ids=str)
def test_real_sizes(shape, poisoned_empty):
    assert_close_to_truth(wide_linear, wide_linear_reference, *make(shape, torch.bfloat16, "cuda"))


def test_gradients_have_the_digits_of_fp32(kernel_device):
    """The gradients of bf16 inputs are those of products in fp32, rounded at the end."""
    (x, weight), (dy,) = make(SHAPES[0], torch.bfloat16, kernel_device)
    dy = dy * torch.logspace(-20, 10, dy.numel(), device=dy.device).view_as(dy)
    _, dx, dw = run(wide_linear, [x, weight], [dy])
    want = dy.double() @ weight.double(), dy.double().T @ x.double()
    for got, exact in zip((dx, dw), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=2e-6 * exact.abs().max().item())


def test_rows_alone_in_batch_invariant_mode(kernel_device):
    (x, weight), _ = make(SHAPES[0], torch.bfloat16, kernel_device)
    with batch_invariant():
        assert torch.equal(wide_linear(x, weight)[3:], wide_linear(x[3:], weight))


def test_op(kernel_device):
    (x, weight), _ = make(SHAPES[0], torch.bfloat16, kernel_device)
    opcheck(torch.ops.liger_models.wide_linear, (x.requires_grad_(), weight.requires_grad_()))


def test_errors():
    with pytest.raises(ValueError, match=r"wide_linear: x must be \[N, C\] and weight \[E, C\], got \[3, 4\] and"):
        wide_linear(draw(3, 4), draw(2, 5))
    with pytest.raises(TypeError, match="weight must be a floating-point tensor"):
        wide_linear(draw(3, 4), draw(2, 4).int())
