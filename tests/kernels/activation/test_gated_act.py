import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.activation.gated_act import (
    ACTIVATIONS,
    gated_act,
    gated_act_backward,
    gated_act_reference,
    geglu,
    swiglu,
)

from ..oracle import assert_close_to_truth, opcheck, run

SHAPES = [(2,), (3, 14), (2, 3, 64), (5, 1, 206), (2, 2052)]
GPU_SHAPES = [(33, 2 * 14336), (4, 16, 2 * 8960)]
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, dtype, device, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    return (scale * draw(*shape)).to(device, dtype), draw(*shape[:-1], shape[-1] // 2).to(device, dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_act_matches_fp64(backend, shape, act, poisoned_empty):
    for dtype in dtypes(backend):
        gate_up, dy = make(shape, dtype, backend)
        assert_close_to_truth(lambda x: gated_act(x, act), lambda x: gated_act_reference(x, act), [gate_up], [dy])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_scaled_gate_matches_fp64(backend, act, poisoned_empty):
    for dtype in dtypes(backend):
        gate_up, dy = make((5, 206), dtype, backend)
        ours, theirs = (lambda x, f=f: f(x, act, 0.37) for f in (gated_act, gated_act_reference))
        assert_close_to_truth(ours, theirs, [gate_up], [dy])
    halved = gate_up * torch.tensor([0.5, 1.0], device=gate_up.device, dtype=gate_up.dtype).repeat(103)
    torch.testing.assert_close(gated_act(gate_up, act, 0.5), gated_act(halved, act))


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, act, poisoned_empty):
    for dtype in GPU_DTYPES:
        gate_up, dy = make(shape, dtype, "cuda")
        assert_close_to_truth(lambda x: gated_act(x, act), lambda x: gated_act_reference(x, act), [gate_up], [dy])


def test_public_functions(backend):
    """Even elements are the gate, odd ones the projection that it scales."""
    gate_up, _ = make((3, 12), torch.float32, backend)
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    torch.testing.assert_close(swiglu(gate_up), F.silu(gate) * up)
    torch.testing.assert_close(geglu(gate_up), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(geglu(gate_up, approximate="none"), F.gelu(gate) * up)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_strided_inputs_and_gradients(backend, act):
    gate_up, dy = make((4, 6, 32), torch.float32, backend)
    check = lambda x, dy: assert_close_to_truth(
        lambda x: gated_act(x, act), lambda x: gated_act_reference(x, act), [x], [dy]
    )
    check(gate_up.transpose(0, 1), dy.transpose(0, 1))
    check(gate_up[..., ::2], dy[..., 8:])
    check(gate_up[:, ::2], dy[:1, :1, :1].expand(4, 3, 16))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_backward_recomputes_the_forwards_output(kernel_device, act, poisoned_empty):
    """Bit for bit: through the same cast, and by the same arithmetic."""
    for dtype in dtypes(kernel_device):
        gate_up, dy = make((7, 500), dtype, kernel_device)
        d_gate_up, product = gated_act_backward(dy, gate_up, act, need_product=True)
        assert torch.equal(product, gated_act(gate_up, act))
        alone, none = gated_act_backward(dy, gate_up, act, need_product=False)
        assert none is None
        assert torch.equal(d_gate_up, alone)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_results_in_place_of_the_arguments(kernel_device, act):
    shape = (1000, 2 * 14336) if kernel_device == "cuda" else (7, 500)
    for dtype in dtypes(kernel_device):
        gate_up, dy = make(shape, dtype, kernel_device)
        want = gated_act_backward(dy, gate_up, act, need_product=True)
        got = gated_act_backward(dy, gate_up, act, need_product=True, overwrite_dy=True, overwrite_gate_up=True)
        assert got[0] is gate_up
        assert got[1] is dy
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_extreme_values(backend, act):
    gate = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 12.0, -12.0, 90.0, -90.0, 6e4, -6e4], dtype=torch.float16)
    gate_up = torch.stack([gate, torch.ones_like(gate)], -1).flatten().to(backend)
    dy = torch.ones_like(gate, device=backend)
    got = run(lambda x: gated_act(x, act), [gate_up], [dy])
    want = run(lambda x: gated_act_reference(x, act), [gate_up], [dy])
    assert all(t.isfinite().all() for t in got)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    gate_up, dy = make((5, 48), torch.float32, backend)
    gate_up.requires_grad_()
    y = swiglu(gate_up)
    kept = [t.clone() for t in (gate_up, y, dy)]
    first = torch.autograd.grad(y, gate_up, dy, retain_graph=True)[0].clone()
    second = torch.autograd.grad(y, gate_up, dy)[0]
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((gate_up, y, dy), kept, strict=True))


def test_only_the_input_is_saved(kernel_device):
    gate_up, _ = make((5, 48), torch.float32, kernel_device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        swiglu(gate_up.requires_grad_())
    assert saved == [gate_up.data_ptr()]


def test_empty_batch(backend):
    gate_up = torch.empty(0, 8, device=backend, requires_grad=True)
    y = swiglu(gate_up)
    y.sum().backward()
    assert y.shape == (0, 4)
    assert gate_up.grad.shape == (0, 8)


def test_no_gradient_under_no_grad(kernel_device):
    gate_up, _ = make((2, 8), torch.float32, kernel_device)
    with torch.no_grad():
        assert not swiglu(gate_up.requires_grad_()).requires_grad


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """The results fit 32-bit offsets, the pairs don't."""
    gate_up = torch.zeros(75_001, 28672, dtype=torch.bfloat16, device="cuda")
    assert gate_up.numel() > 2**31
    gate_up[-2:] = torch.randn(2, 28672, device="cuda")
    gate_up.requires_grad_()
    y = swiglu(gate_up)
    dy = torch.ones_like(y)
    end = gate_up.detach()[-2:].clone()
    want = run(lambda x: gated_act_reference(x, "silu"), [end], [dy[-2:]])
    torch.testing.assert_close(y[-2:].detach(), want[0])
    (grad,) = torch.autograd.grad(y, gate_up, dy)
    torch.testing.assert_close(grad[-2:], want[1], rtol=2e-2, atol=1e-2)
    assert not y.detach()[:-2].any()


def test_opcheck(kernel_device):
    gate_up, dy = make((3, 24), torch.float32, kernel_device)
    for act in ACTIVATIONS:
        opcheck(torch.ops.liger_models.gated_act, (gate_up.requires_grad_(), act))
    opcheck(torch.ops.liger_models.gated_act_backward, (dy, gate_up.detach(), "silu"))


@pytest.mark.compile
def test_compiles_without_graph_breaks(kernel_device):
    gate_up, dy = make((3, 24), torch.float32, kernel_device)
    function = lambda x: geglu(x) + swiglu(x)
    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, [gate_up], [dy]), run(function, [gate_up], [dy]))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"act must be one of silu, gelu_tanh, gelu, got 'relu'"):
        gated_act(torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match=r"the last dimension of gate_up must be even .* got \[2, 3\]"):
        swiglu(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"approximate must be 'tanh' or 'none', got 'fast'"):
        geglu(torch.ones(2, 4), approximate="fast")
    with pytest.raises(TypeError, match=r"gate_up must be a floating-point tensor, got torch.int64"):
        swiglu(torch.ones(2, 4, dtype=torch.int64))
