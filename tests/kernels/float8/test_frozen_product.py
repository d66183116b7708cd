"""Projections with a frozen weight in float8, whose input rows are rounded by the kernel that computes them."""

import pytest
import torch

from liger_models.kernels.float8 import frozen_product as module
from liger_models.kernels.frozen import frozen_float8_linear as frozen
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE, MOST_ROWS, quantize_rows_reference, round_weight
from liger_models.kernels.linear.gated_mlp import gated_mlp
from liger_models.kernels.linear.norm_linear import layer_norm_linear, rms_norm_linear
from liger_models.kernels.linear.projection import Product

C, F, OUT = 64, 96, 48
MANY = MOST_ROWS + 3


def draw(*size, device, dtype=torch.bfloat16):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


@pytest.fixture
def roundings(kernel_device, monkeypatch):
    """The names of the kernels that round rows. The interpreter's own casts to float8 lose carries."""
    found = []
    for place, name in ((module, "rms_norm_round"), (module, "round_rows"), (frozen, "quantize_rows")):
        kernel = getattr(place, name)
        kernel = quantize_rows_reference if kernel_device == "cpu" and name == "quantize_rows" else kernel
        monkeypatch.setattr(
            place, name, lambda *args, name=name, kernel=kernel, **more: found.append(name) or kernel(*args, **more)
        )
    return found


def separate(monkeypatch):
    """Without rows that the norm or the activation rounds."""
    for name in ("norm_linear", "gated_mlp"):
        place = f"liger_models.kernels.linear.{name}.product_of"
        monkeypatch.setattr(place, lambda projection, ranks: Product(projection))


def assert_near(got, want, kernel_device):
    # A value that lies near the middle of two codes may be rounded to either. The interpreter loses carries, too.
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (0.01 if kernel_device == "cuda" else 0.05)


@pytest.mark.parametrize("shape", [(MANY, C), (2, MANY, C)], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_the_norm_rounds_its_rows(kernel_device, roundings, monkeypatch, shape, adds):
    weight, residual = round_weight(draw(OUT, C, device=kernel_device)), draw(*shape, device=kernel_device)
    x = draw(*shape, device=kernel_device) / 2 if adds else None
    norm, bias = draw(C, device=kernel_device), draw(OUT, device=kernel_device)
    roundings.clear()
    y, h = rms_norm_linear(x, residual, norm, weight, bias, weight_offset=1.0)
    assert roundings == ["rms_norm_round"]
    separate(monkeypatch)
    want, stream = rms_norm_linear(x, residual, norm, weight, bias, weight_offset=1.0)
    assert roundings == ["rms_norm_round", "quantize_rows"]
    assert y.shape == want.shape == (*shape[:-1], OUT)
    torch.testing.assert_close(h, stream, rtol=0, atol=0)
    assert_near(y, want, kernel_device)


@pytest.mark.parametrize("many_rows", [1, MANY + 1])
def test_a_low_rank_term_reads_exact_rows(kernel_device, roundings, monkeypatch, many_rows):
    """The norm writes rounded rows for the product with the weight, and exact rows for the product with A."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
    pair = [draw(*size, device=kernel_device).div(8).requires_grad_() for size in ((4, C), (OUT, 4))]
    weight, bias = round_weight(draw(OUT, C, device=kernel_device)), 8 * draw(OUT, device=kernel_device)
    zero = round_weight(torch.zeros_like(weight.dense()))
    residual, norm = draw(2, MANY, C, device=kernel_device), draw(C, device=kernel_device)
    results = []
    for _ in range(2):
        roundings.clear()
        y, _ = rms_norm_linear(None, residual, norm, weight, bias, low_rank=pair)
        term, _ = rms_norm_linear(None, residual, norm, zero, low_rank=pair)
        results.append((y, term, *torch.autograd.grad(y.sum(), pair), [*roundings]))
        separate(monkeypatch)
    (y, term, dA, dB, fused), (want, *exact, plain) = results
    assert fused == ["rms_norm_round"] * 2
    assert plain == ["quantize_rows"] * 2
    assert_near(y, want, kernel_device)
    for got, expected in zip((term, dA, dB), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("gate_up_8bit", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_with_low_rank_terms(kernel_device, roundings, monkeypatch, recompute, gate_up_8bit):
    """Only the norm rounds its rows, because the product with the second A reads the activation's exact rows."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    mlp = round_weight(draw(2 * F, C, device=kernel_device)), round_weight(draw(OUT, F, device=kernel_device))
    sizes = (4, C), (2 * F, 4), (4, F), (OUT, 4)
    leaves = [draw(*size, device=kernel_device).div(8).requires_grad_() for size in ((MANY, C), *sizes)]
    norm, dy = draw(C, device=kernel_device), draw(MANY, OUT, device=kernel_device)
    results = []
    for _ in range(2):
        roundings.clear()
        residual, *pairs = leaves
        y, _ = gated_mlp(
            None, residual, norm, *mlp, recompute=recompute, gate_up_8bit=gate_up_8bit, gate_up_low_rank=pairs[:2],
            down_low_rank=pairs[2:],
        )  # fmt: skip
        results.append((y, *torch.autograd.grad(y, leaves, dy), [*roundings]))
        separate(monkeypatch)
    (*got, fused), (*want, plain) = results
    assert fused == ["rms_norm_round", "quantize_rows", *["round_rows"] * recompute, "quantize_rows", "quantize_rows"]
    assert plain == ["quantize_rows"] * (4 + recompute)
    for tensor, expected in zip(got, want, strict=True):
        assert_near(tensor, expected, kernel_device)


@pytest.mark.parametrize("missing", ["gate_up_low_rank", "down_low_rank"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"gate_up_8bit": True}], ids=str)
def test_an_mlp_with_one_low_rank_term(kernel_device, monkeypatch, options, missing):
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    mlp = round_weight(draw(2 * F, C, device=kernel_device)), round_weight(draw(OUT, F, device=kernel_device))
    sizes = {"gate_up_low_rank": ((4, C), (2 * F, 4)), "down_low_rank": ((4, F), (OUT, 4))}
    del sizes[missing]
    ((name, shapes),) = sizes.items()
    leaves = [draw(*size, device=kernel_device).div(8).requires_grad_() for size in ((MANY, C), *shapes)]
    norm, dy = draw(C, device=kernel_device), draw(MANY, OUT, device=kernel_device)
    results = []
    for _ in range(2):
        residual, *pair = leaves
        y, _ = gated_mlp(None, residual, norm, *mlp, **{name: pair}, **options)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
        separate(monkeypatch)
    for got, want in zip(*results, strict=True):
        assert_near(got, want, kernel_device)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_activation_rounds_its_rows(kernel_device, roundings, monkeypatch, recompute):
    mlp = round_weight(draw(2 * F, C, device=kernel_device)), round_weight(draw(OUT, F, device=kernel_device))
    residual, norm = draw(MANY, C, device=kernel_device).requires_grad_(), draw(C, device=kernel_device)
    dy = draw(MANY, OUT, device=kernel_device)
    results = []
    for _ in range(2):
        roundings.clear()
        y, _ = gated_mlp(None, residual, norm, *mlp, recompute=recompute)
        results.append((y, *torch.autograd.grad(y, residual, dy), [*roundings]))
        separate(monkeypatch)
    (y, dx, fused), (want, d_want, plain) = results
    # The backward rounds two gradients, and with recomputation the normalized rows again.
    assert fused == ["rms_norm_round", "round_rows", *["round_rows"] * recompute, "quantize_rows", "quantize_rows"]
    assert plain == ["quantize_rows"] * (4 + recompute)
    assert_near(y, want, kernel_device)
    assert_near(dx, d_want, kernel_device)


def test_other_rows_are_not_rounded_early(kernel_device, roundings):
    weight, norm = round_weight(draw(OUT, C, device=kernel_device)), draw(C, device=kernel_device)
    odd = round_weight(draw(OUT + 1, C, device=kernel_device))
    many, few = draw(MANY, C, device=kernel_device), draw(MOST_ROWS, C, device=kernel_device)
    roundings.clear()
    if kernel_device == "cuda":  # the interpreter multiplies few rows in fp16 only
        rms_norm_linear(None, few, norm, weight)
    rms_norm_linear(None, many, norm, odd)
    assert roundings == []
    layer_norm_linear(None, many, norm, None, weight)
    rms_norm_linear(None, many.float(), norm, weight)
    assert roundings == ["quantize_rows"] * 2


def test_a_weight_is_rounded_by_rows(kernel_device):
    weight = draw(OUT, C, device=kernel_device, dtype=torch.float32)
    rounded = round_weight(weight)
    assert (rounded.codes.dtype, rounded.scales.shape, rounded.shape) == (DTYPE, (OUT,), weight.shape)
    error = (rounded.dense() - weight).norm() / weight.norm()
    assert 1e-3 < error < 0.05


def test_residuals_need_not_be_contiguous(kernel_device, roundings):
    weight, norm = round_weight(draw(OUT, C, device=kernel_device)), draw(C, device=kernel_device)
    residual = draw(MANY, 2, C, device=kernel_device).transpose(0, 1)
    roundings.clear()
    y, _ = rms_norm_linear(None, residual, norm, weight)
    want, _ = rms_norm_linear(None, residual.contiguous(), norm, weight)
    assert roundings == ["rms_norm_round"] * 2
    assert torch.equal(y, want)


def test_the_backward_of_rounded_rows(kernel_device, roundings, monkeypatch):
    weight, norm = round_weight(draw(OUT, C, device=kernel_device)), draw(C, device=kernel_device).requires_grad_()
    residual, dy = draw(2, MANY, C, device=kernel_device).requires_grad_(), draw(2, MANY, OUT, device=kernel_device)
    got = torch.autograd.grad(rms_norm_linear(None, residual, norm, weight)[0], (residual, norm), dy)
    separate(monkeypatch)
    want = torch.autograd.grad(rms_norm_linear(None, residual, norm, weight)[0], (residual, norm), dy)
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)  # both round only the gradient
