import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.linear_attention.step_sizes import NO_LIMITS, step_sizes

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes


def make(dtype, device):
    dt = torch.tensor([-50.0, -17.0, -9.0, 0.0, 1.0, 19.7, 19.9, 30.0]).view(2, 1, 4)
    inputs = torch.cat([dt, draw(2, 90, 4)], 1), torch.arange(4.0), torch.full([4], 0.25)
    return [x.to(device, dtype) for x in inputs]


@pytest.mark.parametrize("limits", [NO_LIMITS, (0.001, 0.1), (0.01, float("inf"))], ids=str)
def test_matches_fp64(backend, limits, poisoned_empty):
    for dtype in dtypes(backend):
        dt, A_log, bias = make(dtype, backend)
        want = F.softplus(wide(dt) + wide(bias)).clamp(*limits)
        for differentiable in (False, True):
            delta, g = step_sizes(dt.requires_grad_(differentiable), A_log, bias, limits)
            assert delta.dtype == g.dtype == torch.float32
            assert ((wide(delta) - want) / want).abs().max() < 2e-6
            assert ((wide(g) / (wide(A_log).exp() * want)) + 1).abs().max() < 2e-6


def test_without_the_kernel_it_is_the_formula():
    dt, A_log, bias = torch.tensor([[-50.0, 0.0, 1.0, 30.0]]), torch.arange(4.0), torch.full([4], 0.5)
    with reference_backend():
        for limits in (NO_LIMITS, (0.001, 0.1)):
            delta, g = step_sizes(dt, A_log, bias, limits)
            want = F.softplus(dt + bias).clamp(*limits)
            assert torch.equal(delta, want)
            assert torch.equal(g, -A_log.exp() * want)
        assert all(x.dtype == torch.float32 for x in step_sizes(dt.bfloat16(), A_log.bfloat16(), bias))
    assert all(x.dtype == torch.float32 for x in step_sizes(dt.bfloat16(), A_log.bfloat16(), bias))


def test_opcheck(kernel_device):
    opcheck(torch.ops.liger_models.step_sizes, (*make(torch.float32, kernel_device), 0.001, 0.1))


def test_fp64_stays_fp64(kernel_device):
    dt, A_log, bias = make(torch.float64, kernel_device)
    assert torch.equal(step_sizes(dt, A_log, bias)[0], F.softplus(dt + bias))
    with pytest.raises(TypeError, match="step_sizes: A_log must be a floating-point tensor"):
        step_sizes(dt, A_log.long(), bias)
