from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_models import LigerGEGLUMLP, LigerRMSNorm, LigerSwiGLUMLP

CONFIG = SimpleNamespace(hidden_size=8, intermediate_size=12)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(
    ("build", "hidden_act", "act"),
    [
        (LigerSwiGLUMLP, "silu", F.silu),
        (LigerGEGLUMLP, "gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
        (LigerGEGLUMLP, "gelu", F.gelu),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_forward(build, hidden_act, act, bias, kernel):
    torch.manual_seed(0)
    mlp = build(SimpleNamespace(**vars(CONFIG), hidden_act=hidden_act, mlp_bias=bias), kernel=kernel)
    x = torch.randn(3, 8)
    gate, up = mlp.gate_up_proj(x).unflatten(-1, (12, 2)).unbind(-1)
    torch.testing.assert_close(mlp(x), mlp.down_proj(act(gate) * up))
    assert (mlp.down_proj.bias is not None) == bias


class Doubled(nn.Linear):
    """Stands for an adapter or a quantised linear: another computation behind the same weight."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "no-norm"])
def test_norm_and_mlp_together(with_norm, recompute, kernel_device):
    """The fused path, hooks, a replaced forward, a replaced linear: each is what the modules say."""
    torch.manual_seed(0)
    norm, mlp = LigerRMSNorm(8).to(kernel_device) if with_norm else None, LigerSwiGLUMLP(CONFIG).to(kernel_device)
    normed = norm or nn.Identity()
    x, residual = torch.randn(2, 3, 8, device=kernel_device).unbind()
    mlp.recompute = recompute

    def check():
        y, total = mlp.add_norm(norm, x, residual)
        torch.testing.assert_close(total, residual + x)
        torch.testing.assert_close(y, mlp(normed(residual + x)))
        weights = [*normed.parameters(), *mlp.parameters()]
        got = torch.autograd.grad(y.sum(), weights)
        torch.testing.assert_close(got, torch.autograd.grad(mlp(normed(residual + x)).sum(), weights))

    check()
    calls = []
    hook = mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    check()
    assert calls
    hook.remove()
    hook = mlp.down_proj.register_full_backward_pre_hook(lambda module, gradients: (3 * gradients[0],))
    check()
    hook.remove()
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: 2 * forward(x)
    check()
    del mlp.down_proj.forward
    mlp.gate_up_proj.__class__ = Doubled
    check()
