import pytest
import torch

from liger_models.kernels.norm import row_norm
from liger_models.kernels.norm.layer_norm import (
    MAX_WIDTH,
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)

from ..oracle import assert_close_to_truth, opcheck, run

SHAPES = [(1, 3), (3, 7), (15, 16), (2, 3, 64), (5, 200), (4, 1, 129)]
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)
    C = shape[-1]
    return draw(*shape), draw(*shape), draw(C), draw(C), [draw(*shape), draw(*shape)]


def test_the_reference_is_torchs():
    x, _, weight, bias, _ = make((3, 7), torch.float32, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for bias_or_none in (bias.to(dtype), None):
            want = torch.nn.functional.layer_norm(x.to(dtype), (7,), weight.to(dtype), bias_or_none, 1e-5)
            assert torch.equal(layer_norm_reference(x.to(dtype), weight.to(dtype), bias_or_none, 1e-5), want)


@pytest.mark.cases(22)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, with_bias, eps, poisoned_empty, monkeypatch):
    monkeypatch.setattr(row_norm, "BACKWARD_TILE", 64)  # several programs, and several tiles of rows for each
    for dtype in dtypes(backend):
        x, residual, weight, bias, upstream = make(shape, dtype, backend)
        weights = [weight, bias] if with_bias else [weight]
        assert_close_to_truth(
            lambda *a: layer_norm(*a, eps=eps), lambda *a: layer_norm_reference(*a, eps=eps),
            [x, *weights], upstream[:1],
        )  # fmt: skip
        assert_close_to_truth(
            lambda *a: add_layer_norm(*a, eps=eps), lambda *a: add_layer_norm_reference(*a, eps=eps),
            [x, residual, *weights], upstream,
        )  # fmt: skip


def test_wide_rows(kernel_device, poisoned_empty):
    for dtype in dtypes(kernel_device):
        x, residual, weight, bias, upstream = make((3, 20000), dtype, kernel_device)
        for weights in ([weight, bias], [weight]):
            assert_close_to_truth(layer_norm, layer_norm_reference, [x, *weights], upstream[:1])
            assert_close_to_truth(add_layer_norm, add_layer_norm_reference, [x, residual, *weights], upstream)


def test_a_mean_far_from_zero(backend):
    """The variance is that of the centered row: no difference of two large numbers."""
    x, _, weight, bias, upstream = make((4, 96), torch.float32, backend)
    assert_close_to_truth(layer_norm, layer_norm_reference, [x + 50, weight, bias], upstream[:1])


def test_strided_inputs_and_gradients(backend):
    x, _, weight, bias, (dy, _) = make((6, 5, 32), torch.float32, backend)
    assert_close_to_truth(layer_norm, layer_norm_reference, [x.transpose(0, 1), weight, bias], [dy.transpose(0, 1)])
    assert_close_to_truth(layer_norm, layer_norm_reference, [x[::2], weight, bias], [dy[:1].expand(3, 5, 32)])
    x, r, weight, bias, (dy, dh) = make((6, 32), torch.float32, backend)
    assert_close_to_truth(
        add_layer_norm,
        add_layer_norm_reference,
        [x[:, ::2], r[:, 1::2], weight[::2], bias[::2]],
        [dy[:, ::2], dh[:1, :16].expand(6, 16)],
    )


def test_mixed_dtypes(backend):
    x, residual, weight, bias, upstream = make((4, 64), torch.float32, backend)
    inputs = [x.half(), residual, weight, bias.half()]
    assert_close_to_truth(add_layer_norm, add_layer_norm_reference, inputs, upstream)
    assert_close_to_truth(layer_norm, layer_norm_reference, [x.half(), weight, bias], [upstream[0].half()])


def test_only_one_of_two_outputs_is_used(backend):
    x, residual, weight, bias, (dy, dh) = make((4, 16), torch.float32, backend)
    inputs = [x, residual, weight, bias]
    for pick, upstream in ((0, dy), (1, dh)):
        got = run(lambda *a, pick=pick: add_layer_norm(*a)[pick], inputs, [upstream])
        want = run(lambda *a, pick=pick: add_layer_norm_reference(*a)[pick], inputs, [upstream])
        torch.testing.assert_close(got, want)


def test_constant_and_extreme_rows(backend):
    x = torch.tensor([[3.0] * 4, [1e4, -6e4, 3e4, 0.0], [0.0] * 4], device=backend, dtype=torch.float16)
    weight, bias = torch.ones(4, device=backend, dtype=torch.float16), torch.full((4,), 0.5, device=backend).half()
    torch.testing.assert_close(layer_norm(x, weight, bias), layer_norm_reference(x, weight, bias))
    assert (layer_norm(x, weight, bias)[0] == 0.5).all()


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    x, residual, weight, bias, (dy, dh) = make((5, 48), torch.float32, backend)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    outputs = add_layer_norm(*leaves)
    copies = [t.clone() for t in (dy, dh, *outputs)]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, (dy, dh), retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, (dy, dh))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((dy, dh, *outputs), copies, strict=True))


def test_empty_rows_and_frozen_weights(backend):
    weight, bias = (torch.randn(8, device=backend, requires_grad=True) for _ in range(2))
    x = torch.empty(0, 8, device=backend, requires_grad=True)
    layer_norm(x, weight, bias).sum().backward()
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()
    assert not bias.grad.any()
    x = torch.randn(3, 8, device=backend, requires_grad=True)
    layer_norm(x, weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None
    bias.grad = None
    layer_norm(x.detach(), weight.detach(), bias).sum().backward()
    assert (bias.grad == 3).all()
    layer_norm(x.detach(), weight).sum().backward()
    assert weight.grad.any()


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    x = torch.zeros(1_048_577, 2048, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(2048, device="cuda")
    weight, bias = torch.ones(2048, dtype=torch.bfloat16, device="cuda"), torch.zeros(2048, device="cuda").bfloat16()
    torch.testing.assert_close(layer_norm(x, weight, bias)[-1], layer_norm_reference(x[-1], weight, bias))


def test_opcheck(kernel_device):
    x, residual, weight, bias, _ = make((3, 24), torch.float32, kernel_device)
    for tensor in (x, residual, weight, bias):
        tensor.requires_grad_()
    constants = "layer_norm", 1e-6, 0.0, True
    for bias_or_none in (bias, None):
        opcheck(torch.ops.liger_models.norm, (x, weight, bias_or_none, *constants))
        opcheck(torch.ops.liger_models.add_norm, (x, residual, weight, bias_or_none, *constants))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"got weight \[3\] and bias \[4\] for x \[2, 4\]"):
        layer_norm(torch.ones(2, 4), torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match=r"got weight \[3\] and bias None for x \[2, 4\]"):
        layer_norm(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"one shape, got \[2, 4\] and \[1, 4\]"):
        add_layer_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match=r"at most 65536 wide, got 65537"):
        layer_norm(*[torch.ones(MAX_WIDTH + 1)] * 3)
    with pytest.raises(TypeError, match=r"bias must be a floating-point tensor, got torch.int64"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4, dtype=torch.int64))
