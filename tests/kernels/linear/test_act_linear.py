import pytest
import torch

from liger_models.kernels.linear.act_linear import ACTIVATIONS, BLOCK, act_linear, act_linear_reference

from ..oracle import assert_close_to_truth, opcheck, run

GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_act = pytest.mark.parametrize("act", ACTIVATIONS)


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, out, dtype, device, weight_dtype=None):
    """x, weight, bias and the upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    weights = [draw(out, shape[-1]) / shape[-1] ** 0.5, draw(out)]
    dy = draw(*shape[:-1], out).to(weight_dtype or dtype)
    return [2 * draw(*shape).to(dtype), *(w.to(weight_dtype or dtype) for w in weights)], [dy]


def check(inputs, upstream, act):
    bias = [] if len(inputs) == 3 else [None]
    assert_close_to_truth(
        lambda *a: act_linear(*a, *bias, act), lambda *a: act_linear_reference(*a, *bias, act), inputs, upstream
    )


def test_the_reference_is_transformers():
    from transformers.activations import ACT2FN

    (x, weight, bias), _ = make((5, 12), 7, torch.float32, "cpu")
    for act, name in (
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu2", "relu2"),
    ):
        want = torch.nn.functional.linear(ACT2FN[name](x), weight, bias)
        torch.testing.assert_close(act_linear_reference(x, weight, bias, act), want)


@pytest.mark.cases(15)
@every_act
@pytest.mark.parametrize(("shape", "out"), [((1, 2), 3), ((3, 37), 21), ((2, 3, 64), 24), ((5, 1000), 8)], ids=str)
def test_matches_fp64(backend, shape, out, act, poisoned_empty):
    for dtype in dtypes(backend):
        inputs, upstream = make(shape, out, dtype, backend)
        check(inputs, upstream, act)
        check(inputs[:2], upstream, act)


@every_act
def test_weight_of_another_dtype(backend, act, poisoned_empty):
    for stream, weights in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        check(*make((3, 5, 32), 16, stream, backend, weights), act)


@every_act
def test_strided_inputs_and_gradients(backend, act):
    (x, weight, bias), (dy,) = make((6, 5, 32), 16, torch.float32, backend)
    t = lambda tensor: tensor.transpose(0, 1)
    check([t(x), weight.t().contiguous().t(), bias], [t(dy)], act)
    check([x[::2, :, ::2], weight[:, ::2], bias], [dy[:1, :1, :1].expand(3, 5, 16)], act)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter's: 1 / inf is 0
@every_act
def test_extreme_values(backend, act):
    x = torch.tensor([[-6e4, -30.0, -1.0, 0.0, 1.0, 30.0, 6e4, 5.0]], device=backend)
    weight = torch.eye(8, device=backend)
    got, want = (run(lambda x, f=f: f(x, weight, None, act), [x], [torch.ones_like(x)])
                 for f in (act_linear, act_linear_reference))  # fmt: skip
    assert all(t.isfinite().all() for t in got)
    torch.testing.assert_close(got, want)


def test_frozen_parts(backend):
    """Each gradient alone is the one that it is among the others."""
    inputs, (dy,) = make((4, 16), 8, torch.float32, backend)
    every = torch.autograd.grad(act_linear(*[t.requires_grad_() for t in inputs], "gelu"), inputs, dy)
    for index, want in enumerate(every):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(inputs)]
        (got,) = torch.autograd.grad(act_linear(*leaves, "gelu"), [leaves[index]], dy)
        torch.testing.assert_close(got, want)


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    inputs, (dy,) = make((5, 48), 8, torch.float32, backend)
    leaves = [t.requires_grad_() for t in inputs]
    y = act_linear(*leaves, "quick_gelu")
    copies = [t.detach().clone() for t in (dy, y, *leaves)]
    first = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
    second = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((dy, y, *leaves), copies, strict=True))


def test_only_the_input_is_kept(kernel_device):
    inputs, _ = make((16, BLOCK), 8, torch.float32, kernel_device)
    leaves = [t.requires_grad_() for t in inputs]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        act_linear(*leaves, "gelu")
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in inputs[:2])


def test_empty(backend):
    (_, weight, bias), _ = make((1, 16), 8, torch.float32, backend)
    x = torch.empty(0, 16, device=backend, requires_grad=True)
    weight.requires_grad_()
    act_linear(x, weight, bias, "gelu").sum().backward()
    assert x.grad.shape == (0, 16)
    assert not weight.grad.any()


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    x = torch.zeros(1_048_577, 2048, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(2048, device="cuda")
    weight = torch.randn(8, 2048, device="cuda").bfloat16() / 45
    torch.testing.assert_close(
        act_linear(x, weight, None, "gelu")[-1], act_linear_reference(x[-1], weight, None, "gelu")
    )


def test_opcheck(kernel_device):
    inputs, _ = make((3, 24), 8, torch.float32, kernel_device)
    for tensor in inputs:
        tensor.requires_grad_()
    opcheck(torch.ops.liger_models.act_linear, (*inputs, "gelu_tanh", None))


def test_bad_arguments():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match="act must be one of gelu, gelu_tanh, quick_gelu, relu2, xielu, got 'relu'"):
        act_linear(x, weight, None, "relu")
    with pytest.raises(ValueError, match=r"weight must be \[out, 4\], got \[3, 5\]"):
        act_linear(x, torch.ones(3, 5), None, "gelu")
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        act_linear(x.long(), weight, None, "gelu")
