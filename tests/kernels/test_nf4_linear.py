import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.nf4_linear import BLOCK, nf4_linear

from ..late import Late
from .oracle import opcheck

quantization = Late("torchao.quantization", "4-bit weights need torchao")

SIZES = [((3, 64), 1), ((5, 128), 2), ((96, 192), 36), ((2 * BLOCK // 64 + 1, 64), 1)]
"""[O, C], and scales with one factor."""


def make(shape, per_factor, dtype, device):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None]).to(device, dtype)
    return quantization.to_nf4(weight, 64, per_factor)


@pytest.mark.parametrize(("shape", "per_factor"), SIZES, ids=str)
def test_the_weight_is_torchaos_bit_for_bit(kernel_device, shape, per_factor, poisoned_empty):
    # The interpreter truncates bfloat16 where hardware rounds.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        weight = make(shape, per_factor, dtype, kernel_device)
        eye = torch.eye(shape[1], device=kernel_device, dtype=dtype)
        assert nf4_linear(eye, weight).equal(weight.get_original_weight().T)


@pytest.mark.parametrize(("shape", "per_factor"), SIZES, ids=str)
def test_a_single_row_is_multiplied_by_the_same_weight(kernel_device, shape, per_factor, poisoned_empty):
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        weight = make(shape, per_factor, dtype, kernel_device)
        original = weight.get_original_weight()
        for column in (0, 17, shape[1] - 1):
            x = torch.zeros(1, 1, shape[1], device=kernel_device, dtype=dtype)
            x[..., column] = 1
            assert nf4_linear(x, weight).equal(original[:, column].view(1, 1, -1))
        generator = torch.Generator().manual_seed(1)
        x, bias = (torch.randn(size, generator=generator).to(kernel_device, dtype) for size in reversed(shape))
        for b in (None, bias):
            exact, terms = (
                F.linear(f(x.double()), f(original.double()), None if b is None else f(b.double()))
                for f in (torch.Tensor.clone, torch.abs)
            )
            assert ((nf4_linear(x, weight, b).double() - exact).abs() <= torch.finfo(dtype).eps * terms).all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_fp64(backend, with_bias):
    weight = make((96, 192), 36, torch.float32, backend)
    dense = weight.get_original_weight().double()
    x = torch.randn(2, 3, 192, device=backend, requires_grad=True)
    bias = torch.randn(96, device=backend, requires_grad=True) if with_bias else None
    dy = torch.randn(2, 3, 96, device=backend)
    inputs = [x] if bias is None else [x, bias]
    y = nf4_linear(x, weight, bias)
    truth = F.linear(x.double(), dense, None if bias is None else bias.double())
    torch.testing.assert_close(y, truth.float(), rtol=1e-4, atol=1e-4)
    for got, want in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(truth, inputs, dy.double()), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_but_the_codes(kernel_device):
    weight = make((96, 192), 36, torch.float32, kernel_device)
    x = torch.randn(7, 192, device=kernel_device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nf4_linear(x, weight)
    held = {t.data_ptr() for t in (weight.quantized_data, weight.quantized_scalers, weight.quantization_factor,
                                   weight.scaler_mean, weight.nf4)}  # fmt: skip
    assert {t.data_ptr() for t in kept} == held


def test_autocast(backend):
    weight = make((96, 192), 36, torch.float32, backend)
    x = torch.randn(7, 192, device=backend, requires_grad=True)
    with torch.autocast(backend, torch.float16 if backend == "cuda" else torch.bfloat16):
        y = nf4_linear(x, weight, torch.ones(96, device=backend))
    assert y.dtype == (torch.float16 if backend == "cuda" else torch.bfloat16)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, weight.get_original_weight().sum(0).expand(7, -1), rtol=0.02, atol=0.2)


def test_opcheck(kernel_device):
    weight = make((5, 128), 2, torch.float32, kernel_device)
    x = torch.randn(3, 128, device=kernel_device, requires_grad=True)
    packed = (weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean,
              weight.nf4)  # fmt: skip
    opcheck(torch.ops.liger_models.nf4_linear, (x, None, *packed, 5, 128, 64, 2))


def test_bad_input(backend):
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 128\]"):
        nf4_linear(torch.randn(3, 64, device=backend), make((5, 128), 2, torch.float32, backend))
