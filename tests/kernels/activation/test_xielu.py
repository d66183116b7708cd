import pytest
import torch

from liger_models.kernels.activation.xielu import BLOCK, FORWARD, XieluInputs, xielu, xielu_reference
from liger_models.kernels.linear.act_linear import FORWARD as LINEAR
from liger_models.kernels.linear.act_linear import ActLinearInputs, act_linear, act_linear_reference

from ..oracle import assert_close_to_truth, opcheck_named, run

GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, dtype, device, out=None):
    """x, the coefficients and the upstream gradient; or x, weight, bias, coefficients and the gradient."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    x, coefficients = 2 * draw(*shape).to(dtype), torch.tensor([0.8, 1.1, 0.5, -1e-6], device=device)
    if out is None:
        return [x, coefficients], [draw(*shape).to(dtype)]
    weights = draw(out, shape[-1]).to(dtype) / shape[-1] ** 0.5, draw(out).to(dtype)
    return [x, *weights, coefficients], [draw(*shape[:-1], out).to(dtype)]


def linear(function):
    return lambda x, weight, bias, coefficients: function(x, weight, bias, "xielu", coefficients)


def check_linear(inputs, upstream):
    assert_close_to_truth(linear(act_linear), linear(act_linear_reference), inputs, upstream)


def test_the_reference_is_transformers():
    from transformers.activations import XIELUActivation

    theirs = XIELUActivation(alpha_p_init=0.7, alpha_n_init=1.3, dtype=torch.float32)
    (x, _), (dy,) = make((5, 300), torch.float32, "cpu")
    x[0, :4] = torch.tensor([0.0, -1e-7, 1e-7, -1e-5])
    alphas = torch.cat([theirs.alpha_p, theirs.alpha_n]).detach().requires_grad_()
    p, n = torch.nn.functional.softplus(alphas)
    coefficients = torch.stack([p, theirs.beta + n, theirs.beta, theirs.eps])
    assert coefficients.tolist() == pytest.approx([0.7, 1.3, 0.5, -1e-6])
    x, other = x.requires_grad_(), x.detach().clone().requires_grad_()
    want, got = theirs(x), xielu_reference(other, coefficients)
    torch.testing.assert_close(got, want)
    want.backward(dy)
    got.backward(dy)
    torch.testing.assert_close(other.grad, x.grad)
    torch.testing.assert_close(alphas.grad, torch.cat([theirs.alpha_p.grad, theirs.alpha_n.grad]))


@pytest.mark.parametrize("shape", [(1, 2), (3, 37), (2, 3, 64), (5, 1000), (3, BLOCK)], ids=str)
def test_matches_fp64(backend, shape, poisoned_empty):
    for dtype in dtypes(backend):
        assert_close_to_truth(xielu, xielu_reference, *make(shape, dtype, backend))


@pytest.mark.parametrize(("shape", "out"), [((1, 2), 3), ((3, 37), 21), ((2, 3, 64), 24), ((5, 1000), 8)], ids=str)
def test_the_projection_after_it_matches_fp64(backend, shape, out, poisoned_empty):
    for dtype in dtypes(backend):
        check_linear(*make(shape, dtype, backend, out))


def test_strided_inputs_and_gradients(backend):
    (x, coefficients), (dy,) = make((6, 5, 32), torch.float32, backend)
    assert_close_to_truth(xielu, xielu_reference, [x.transpose(0, 1), coefficients], [dy.transpose(0, 1)])
    assert_close_to_truth(xielu, xielu_reference, [x[::2, :, ::2], coefficients], [dy[:1, :1, :1].expand(3, 5, 16)])
    (x, weight, bias, coefficients), (dy,) = make((6, 5, 32), torch.float32, backend, 16)
    check_linear([x.transpose(0, 1), weight.t().contiguous().t(), bias, coefficients], [dy.transpose(0, 1)])


def test_small_negative_inputs_keep_their_digits(kernel_device):
    """exp(x) − 1 − x is 5e-9 for the largest of them, of which a difference in fp32 would keep no digit."""
    x = -torch.logspace(-5.5, -4, 64, device=kernel_device)[None]
    coefficients = torch.tensor([0.8, 1.1, 0.0, -1e-6], device=kernel_device)
    got = run(xielu, [x, coefficients], [torch.ones_like(x)])
    want = run(xielu_reference, [x.double(), coefficients.double()], [torch.ones_like(x).double()])
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
def test_extreme_values(backend):
    x = torch.tensor([[-6e4, -100.0, -30.0, -0.5, -1e-6, -1e-7, 0.0, 1e-7, 1.0, 30.0, 6e4]], device=backend)
    coefficients = torch.tensor([0.8, 1.1, 0.5, -1e-3], device=backend)
    got, want = (run(f, [x, coefficients], [torch.ones_like(x)]) for f in (xielu, xielu_reference))
    assert all(t.isfinite().all() for t in got)
    torch.testing.assert_close(got, want)


def test_frozen_parts(backend):
    """Each gradient alone is the one that it is among the others."""
    inputs, (dy,) = make((4, 16), torch.float32, backend, 8)
    every = torch.autograd.grad(linear(act_linear)(*[t.requires_grad_() for t in inputs]), inputs, dy)
    for index, want in enumerate(every):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(inputs)]
        (got,) = torch.autograd.grad(linear(act_linear)(*leaves), [leaves[index]], dy)
        torch.testing.assert_close(got, want)
    x, coefficients = make((4, 16), torch.float32, backend)[0]
    for leaves in ((x.requires_grad_(), coefficients), (x.detach(), coefficients.requires_grad_())):
        leaf = next(t for t in leaves if t.requires_grad)
        got, want = (torch.autograd.grad(f(*leaves).sum(), [leaf]) for f in (xielu, xielu_reference))
        torch.testing.assert_close(got, want)


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    for function, (inputs, (dy,)) in (
        (xielu, make((5, 48), torch.float32, backend)),
        (linear(act_linear), make((5, 48), torch.float32, backend, 8)),
    ):
        leaves = [t.requires_grad_() for t in inputs]
        y = function(*leaves)
        copies = [t.detach().clone() for t in (dy, y, *leaves)]
        first = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        second = torch.autograd.grad(y, leaves, dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip((dy, y, *leaves), copies, strict=True))


def test_only_the_input_is_kept(kernel_device):
    inputs, _ = make((16, BLOCK), torch.float32, kernel_device, 8)
    leaves = [t.requires_grad_() for t in inputs]
    for function, count in ((linear(act_linear), 2), (lambda x, w, b, c: xielu(x, c), 1)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            function(*leaves)
        assert sum(t.numel() for t in kept) == 4 + sum(t.numel() for t in inputs[:count])


def test_empty(backend):
    coefficients = torch.ones(4, device=backend, requires_grad=True)
    x = torch.empty(0, 16, device=backend, requires_grad=True)
    xielu(x, coefficients).sum().backward()
    assert x.grad.shape == (0, 16)
    assert not coefficients.grad.any()


def test_opcheck(kernel_device):
    inputs, _ = make((3, 24), torch.float32, kernel_device, 8)
    x, weight, bias, coefficients = (t.requires_grad_() for t in inputs)
    opcheck_named(FORWARD, XieluInputs(x, coefficients))
    opcheck_named(LINEAR, ActLinearInputs(x, weight, bias, "xielu", coefficients))


def test_bad_arguments():
    x, weight, coefficients = torch.ones(2, 4), torch.ones(3, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"xielu: coefficients must be \[4\] \(p, n, beta and eps\), got \[3\]"):
        xielu(x, coefficients[:3])
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        xielu(x.long(), coefficients)
    with pytest.raises(ValueError, match="act_linear: coefficients must be given for xielu alone, got none for xielu"):
        act_linear(x, weight, None, "xielu")
    with pytest.raises(ValueError, match="coefficients must be given for xielu alone, got some for gelu"):
        act_linear(x, weight, None, "gelu", coefficients)
