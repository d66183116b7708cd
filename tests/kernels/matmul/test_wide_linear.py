import pytest
import torch

from liger_models.kernels.matmul import wide_linear as module
from liger_models.kernels.matmul.wide_linear import wide_linear, wide_linear_reference

from ..oracle import opcheck, run

SHAPES = [(8192, 2048, 64), (8192, 7168, 256), (8192, 2688, 128)]
"""Tokens, hidden size and experts of GLM-4.7-Flash, DeepSeek V3 and Nemotron 3 Nano."""


def make(N, C, X, device, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    x, weight, dy = draw(N, C) + 0.1, draw(X, C) / 50 + 0.01, draw(N, X) * torch.exp(3 * draw(N, 1))
    return x.to(device, dtype), weight.to(device, dtype), dy.to(device, torch.float32)


def truths(x, weight, dy):
    return run(wide_linear_reference, [x.double(), weight.double()], [dy.double()])


@pytest.mark.parametrize(
    ("N", "C", "X"), [(64, 64, 64), (70, 136, 20), (3, 40, 5), (200, 200, 150), (1, 520, 1)], ids=str
)
def test_matches_fp64(kernel_device, N, C, X, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    inputs = make(N, C, X, kernel_device)
    y, dx, d_weight = run(wide_linear, inputs[:2], inputs[2:])
    assert (y.dtype, dx.dtype, d_weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    truth, dx_truth, d_weight_truth = truths(*inputs)
    torch.testing.assert_close(y.double(), truth, rtol=3e-7, atol=1e-6 * truth.abs().max().item())
    # The interpreter truncates bfloat16 where hardware rounds.
    rtol = 2**-8 if kernel_device == "cuda" else 2**-7
    for got, want in ((dx, dx_truth), (d_weight, d_weight_truth)):
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=1e-5 * want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C", "X"), SHAPES, ids=str)
def test_logits_are_as_accurate_as_in_fp32(N, C, X):
    x, weight, _ = make(N, C, X, "cuda")
    truth = x.double() @ weight.double().t()
    ours, theirs = (f(x, weight).double() - truth for f in (wide_linear, wide_linear_reference))
    assert ours.norm() <= 2 * theirs.norm()
    assert ours.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C", "X"), SHAPES, ids=str)
def test_gradients_are_as_accurate_as_in_fp32(N, C, X):
    inputs = make(N, C, X, "cuda")
    ours, theirs = (run(f, inputs[:2], inputs[2:])[1:] for f in (wide_linear, wide_linear_reference))
    for got, other, want in zip(ours, theirs, truths(*inputs)[1:], strict=True):
        got, other = got.double() - want, other.double() - want
        assert got.norm() <= 1.001 * other.norm()  # both are rounded to bf16
        assert got.abs().max() <= 1.01 * other.abs().max()


def test_strided_inputs_and_gradients(kernel_device, monkeypatch):
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    x, weight, dy = make(80, 96, 48, kernel_device)
    plain = [x[:, :64].clone(), weight[:24, 32:].clone(), dy[:, ::2].clone()]
    strided = [x[:, :64], weight[:24, 32:], dy[:, ::2]]
    turned = [plain[0].t().contiguous().t(), plain[1].t().contiguous().t(), plain[2].t().contiguous().t()]
    want = run(wide_linear, plain[:2], plain[2:])
    for inputs in (strided, turned):
        assert all(torch.equal(a, b) for a, b in zip(run(wide_linear, inputs[:2], inputs[2:]), want, strict=True))


def test_few_rows_and_other_dtypes_are_cast(kernel_device):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight, dy = make(7, 32, 6, kernel_device, dtype)
        ours, theirs = (run(f, [x, weight], [dy]) for f in (wide_linear, wide_linear_reference))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_copy_in_fp32_is_saved(kernel_device, dtype, wide_weight):
    x, weight, dy = make(7, 32, 6, kernel_device, dtype)
    weight = weight.float() if wide_weight else weight
    ours, theirs = (run(f, [x, weight], [dy]) for f in (wide_linear, wide_linear_reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        wide_linear(x.requires_grad_(), weight.requires_grad_())
    assert set(saved) == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(kernel_device, monkeypatch, frozen):
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    *inputs, dy = make(70, 40, 12, kernel_device)
    want = run(wide_linear, inputs, [dy])[2 - frozen]
    inputs[1 - frozen].requires_grad_()
    wide_linear(*inputs).backward(dy)
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, want)


def test_no_rows(kernel_device):
    x, weight, dy = make(0, 32, 6, kernel_device)
    y, dx, d_weight = run(wide_linear, [x, weight], [dy])
    assert (y.shape, dx.shape) == ((0, 6), (0, 32))
    assert not d_weight.any()


def test_opcheck(kernel_device, monkeypatch):
    x, weight, _ = make(7, 32, 6, kernel_device)
    opcheck(torch.ops.liger_models.wide_linear.default, (x.requires_grad_(), weight.requires_grad_()))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"wide_linear: x must be \[N, C\]"):
        wide_linear(torch.randn(2, 3), torch.randn(4, 5))
    with pytest.raises(TypeError, match="wide_linear"):
        wide_linear(torch.ones(2, 3, dtype=torch.long), torch.randn(4, 3))
