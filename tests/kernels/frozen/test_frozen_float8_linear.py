import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.activation.gated_act import gated_act_reference
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen import frozen_float8_linear as module
from liger_models.kernels.frozen.frozen_float8_linear import (
    DTYPE,
    MOST_ROWS,
    float8_dense,
    float8_product,
    frozen_float8_linear,
    quantize_rows,
    quantize_rows_reference,
    takes_float8_rows,
    transposed,
)
from liger_models.kernels.frozen.products import weight_for_op
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.row_linear import row_linear_forward

from ...late import Late

quantization = Late("torchao.quantization", "float8 weights need torchao")

ODD = torch.float32, torch.float16
"""Dtypes whose products are computed with the dequantized weight."""


@pytest.fixture
def casts(kernel_device, monkeypatch):
    """Casts to float8 by torch: those of the interpreter lose carries into the exponent."""
    if kernel_device == "cpu":
        monkeypatch.setattr(module, "quantize_rows", quantize_rows_reference)


def draw(*size, device="cpu", dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def make(shape, dtype=torch.bfloat16, device="cpu"):
    return quantization.Float8Tensor.from_hp(draw(*shape, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(1, 3), (5, 96), (3, 4096), (2, 14337)], ids=str)
def test_rows_are_quantized(kernel_device, shape, poisoned_empty):
    for dtype in (torch.float32, torch.bfloat16):
        x = (draw(*shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(kernel_device, dtype)
        x[-1, 0] = 0
        for factors in (None, torch.rand(shape[1], device=kernel_device) + 0.5):
            (codes, scales), (want, want_scales) = quantize_rows(x, factors), quantize_rows_reference(x, factors)
            assert torch.equal(scales, want_scales)
            wide, expected = codes.float(), want.float()
            if kernel_device == "cuda":
                assert torch.equal(wide, expected)
                continue
            # The interpreter loses carries into the exponent, truncates subnormals, and rounds ties away from zero.
            known = (torch.frexp(expected).mantissa.abs() != 0.5) & (expected.abs() >= 2**-6)
            assert known.any()
            assert ((wide - expected).abs() <= expected.abs() / 8)[known].all()
            assert (wide == expected)[known].float().mean() > 0.9


def test_rows_of_zeros_and_strided_rows(kernel_device):
    x = torch.zeros(4, 64, device=kernel_device)
    codes, scales = quantize_rows(x)
    assert not codes.float().any()
    assert (scales > 0).all()
    wide = draw(4, 128, device=kernel_device)
    for x in (wide[:, :64], wide[:, ::2], draw(64, 4, device=kernel_device).t()):
        got, want = quantize_rows(x), quantize_rows(x.contiguous())
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (256, 128), (7, 129)], ids=str)
def test_codes_are_transposed(kernel_device, shape, poisoned_empty):
    codes = draw(*shape, device=kernel_device).to(DTYPE)
    copy, ones = transposed(codes)
    assert torch.equal(copy.view(torch.uint8), codes.view(torch.uint8).t())
    assert torch.equal(ones, torch.ones_like(ones))


def test_the_dense_weight_is_torchaos(backend):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = make((48, 80), dtype, backend)
        if dtype == torch.bfloat16 and use_triton(weight.scale) and backend == "cpu":
            dtype = torch.float16  # the interpreter truncates bfloat16 where hardware rounds
        ours = float8_dense(weight.qdata, weight.scale.view(-1), dtype)
        exact = weight.qdata.double() * weight.scale.double()
        assert ((ours.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-7).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("shape", "out"), [((37, 64), 48), ((2, 17, 128), 16)], ids=str)
def test_float8_products_match_fp64(kernel_device, casts, shape, out, with_bias, poisoned_empty):
    """Those of the operands that are rounded to float8: the rest is one rounding to bfloat16."""
    weight = make((out, shape[-1]), device=kernel_device)
    x = draw(*shape, device=kernel_device, dtype=torch.bfloat16).requires_grad_()
    bias = draw(out, device=kernel_device, dtype=torch.bfloat16).requires_grad_() if with_bias else None
    dy = draw(*shape[:-1], out, device=kernel_device, dtype=torch.bfloat16)
    y = frozen_float8_linear(x, weight, bias)
    y.backward(dy)
    scales, of = weight.scale.view(-1), lambda codes, scales: codes.double() * scales.double()[..., None]
    rounded = of(*quantize_rows_reference(x.detach()))
    exact = rounded @ of(weight.qdata, scales).T + (0 if bias is None else bias.detach().double())
    gradient = of(*quantize_rows_reference(dy, scales)) @ weight.qdata.double()
    for got, want in ((y, exact), (x.grad, gradient)):
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).norm() / want.norm()) < 4e-3
    dense = F.linear(x.detach().double(), of(weight.qdata, scales))
    error = (y.detach().double() - (0 if bias is None else bias.detach().double()) - dense).norm() / dense.norm()
    assert 1e-3 < error < 0.06  # of rounding x to three bits
    if bias is not None:
        torch.testing.assert_close(bias.grad, dy.flatten(0, -2).sum(0))


@pytest.mark.cases(4)
@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize("shape", [(5, 7), (48, 96), (20, 1100)], ids=str)
def test_few_rows_match_fp64(kernel_device, shape, act, poisoned_empty):
    """No activation is rounded: what is left is the sum in fp32 and one rounding of the result."""
    codes, scales = draw(*shape, device=kernel_device).to(DTYPE), draw(shape[0], device=kernel_device).abs()
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        limits = torch.finfo(dtype)
        for rows in (1,) if dtype == torch.float32 else (1, 2, 9, MOST_ROWS):
            if act and shape[0] % 2:
                continue
            x, bias = ((draw(*size, device=kernel_device) / 8).to(dtype) for size in ((rows, 1, shape[1]), shape[:1]))
            assert takes_float8_rows(x, codes)
            for b in (None, bias):
                want, terms = (
                    F.linear(f(x.double()), f(codes.double()) * scales.double()[:, None],
                             None if b is None else f(b.double()))
                    for f in (torch.Tensor.clone, torch.abs)
                )  # fmt: skip
                y, product = row_linear_forward(x, codes, b, act, scales)
                assert ((y.double() - want).abs() <= limits.eps / 2 * want.abs() + 2e-6 * terms + limits.tiny).all()
                assert torch.equal(y, float8_product(x, codes, scales, b))
                if act:
                    torch.testing.assert_close(product, gated_act_reference(y, act), rtol=2 * limits.eps, atol=1e-6)


def test_few_rows_are_not_taken_where_bits_must_not_depend_on_the_batch(kernel_device):
    codes, x = draw(48, 96, device=kernel_device).to(DTYPE), draw(2, 96, device=kernel_device, dtype=torch.float16)
    assert takes_float8_rows(x, codes)
    assert not takes_float8_rows(draw(MOST_ROWS + 1, 96, device=kernel_device, dtype=torch.float16), codes)
    assert not takes_float8_rows(x.float(), codes)
    with batch_invariant():
        assert not takes_float8_rows(x, codes)
        assert not takes_float8_rows(x[:1], codes)


def test_other_products_are_those_of_the_dequantized_weight(backend):
    """Other dtypes, odd sizes, no rows; and the reference backend, always."""
    cases = [((35, 64), 48, dtype) for dtype in ODD] + [((35, 60), 48, torch.bfloat16), ((0, 64), 48, torch.bfloat16)]
    for shape, out, dtype in cases:
        weight = make((out, shape[1]), dtype, backend)
        dense = float8_dense(weight.qdata, weight.scale.view(-1), dtype)
        x, other = (draw(*shape, device=backend, dtype=dtype).requires_grad_() for _ in range(2))
        bias = draw(out, device=backend, dtype=dtype)
        y, want = frozen_float8_linear(x, weight, bias), F.linear(other, dense, bias)
        y.backward(torch.ones_like(y))
        want.backward(torch.ones_like(want))
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(x.grad, other.grad)


def test_nothing_is_kept_but_the_weight(kernel_device, casts):
    weight = make((96, 192), device=kernel_device)
    x = draw(7, 192, device=kernel_device, dtype=torch.bfloat16).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_float8_linear(x, weight)
    assert {t.data_ptr() for t in kept} == {weight.qdata.data_ptr(), weight.scale.data_ptr()}


def test_autocast(backend):
    weight = make((96, 192), torch.float32, backend)
    x = draw(7, 192, device=backend).requires_grad_()
    with torch.autocast(backend, torch.bfloat16):
        y = frozen_float8_linear(x, weight, torch.ones(96, device=backend))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_opcheck(kernel_device):
    for dtype in (torch.float32, torch.bfloat16):
        weight = make((48, 64), dtype, kernel_device)
        x = draw(3, 64, device=kernel_device, dtype=dtype).requires_grad_()
        # The check of schemas compares tensors before and after, which torch cannot do in float8.
        utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
        codes, *rest = weight_for_op(FrozenWeight.of(weight).to(dtype))
        arguments = x, codes, None, *rest
        torch.library.opcheck(torch.ops.liger_models.quantized_linear, arguments, test_utils=utils)


def test_bad_input(backend):
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 128\]"):
        frozen_float8_linear(torch.randn(3, 64, device=backend), make((5, 128), torch.float32, backend))
    whole = quantization.Float8Tensor.from_hp(draw(5, 128, device=backend), granularity=quantization.PerTensor())
    with pytest.raises(ValueError, match=r"weight must be in torch.float8_e4m3fn with 5 scales, got .* with 1\."):
        frozen_float8_linear(torch.randn(3, 128, device=backend), whole)
