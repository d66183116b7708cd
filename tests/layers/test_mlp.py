from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_models import (
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerMLP,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
)
from liger_models.layers.mlp import GatedMLP

from ..late import Late, transformers

falcon_h1 = Late("transformers.models.falcon_h1.modeling_falcon_h1")

CONFIG = SimpleNamespace(hidden_size=8, intermediate_size=12)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(
    ("build", "hidden_act", "act"),
    [
        (LigerSwiGLUMLP, "silu", F.silu),
        (LigerSwiGLUMLP, "swish", F.silu),
        (LigerGEGLUMLP, "gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
        (LigerGEGLUMLP, "gelu_new", lambda x: F.gelu(x, approximate="tanh")),
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


def with_act(hidden_act):
    return SimpleNamespace(**vars(CONFIG), hidden_act=hidden_act)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu", "quick_gelu", "none", None])
def test_swiglu_refuses_other_activations(hidden_act):
    with pytest.raises(ValueError, match=rf"LigerSwiGLUMLP: hidden_act must be .*, got {hidden_act!r}"):
        LigerSwiGLUMLP(with_act(hidden_act))


@pytest.mark.parametrize("hidden_act", ["silu", "swish", "relu", "quick_gelu", "none", None])
def test_geglu_refuses_other_activations(hidden_act):
    with pytest.raises(ValueError, match=rf"LigerGEGLUMLP: hidden_act must be .*, got {hidden_act!r}"):
        LigerGEGLUMLP(with_act(hidden_act))


@pytest.mark.parametrize("kernel", [True, False])
def test_unknown_activations_of_mlps(kernel):
    with pytest.raises(ValueError, match=r"GatedMLP: act must be one of .*, got 'gelu_pytorch_tanh'"):
        GatedMLP(8, 12, act="gelu_pytorch_tanh", kernel=kernel)
    with pytest.raises(ValueError, match=r"LigerMLP: act must be one of .*, got 'silu'"):
        LigerMLP(8, 12, act="silu", kernel=kernel)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [LigerSwiGLUMLP, LigerTiledSwiGLUMLP])
def test_multipliers_of_falcon_h1(build, recompute, backend):
    """Alone and after a norm: results and gradients of transformers' module."""
    config = transformers.FalconH1Config(hidden_size=8, intermediate_size=12, mlp_multipliers=[0.3, 1.7], mlp_bias=True)
    theirs = falcon_h1.FalconH1MLP(config).to(backend)
    mlp, norm = build(config).to(backend), LigerRMSNorm(8).to(backend)
    mlp.set_policy("full" if recompute else "none")
    for kind in ("weight", "bias"):
        rows = [getattr(layer, kind).data for layer in (theirs.gate_proj, theirs.up_proj)]
        getattr(mlp.gate_up_proj, kind).data = torch.stack(rows, 1).flatten(0, 1)
        getattr(mlp.down_proj, kind).data = getattr(theirs.down_proj, kind).data.clone()
    x, residual = (torch.randn(3, 8, device=backend, requires_grad=True) for _ in range(2))
    for got, want in (
        (mlp(x), theirs(x)),
        (mlp.add_norm(norm, x, residual)[0], theirs(norm(residual + x))),
    ):
        torch.testing.assert_close(got, want)
        ours = torch.autograd.grad(got.square().sum(), (x, *mlp.parameters()))
        expected = torch.autograd.grad(want.square().sum(), (x, *theirs.parameters()))
        dx, gate, gate_bias, up, up_bias, down, down_bias = expected
        pairs = [torch.stack(each, 1).flatten(0, 1) for each in ((gate, up), (gate_bias, up_bias))]
        torch.testing.assert_close(ours, (dx, *pairs, down, down_bias))


@pytest.mark.parametrize("kernel", [True, False])
def test_the_square_of_relu(kernel):
    mlp = LigerMLP(8, 12, act="relu2", bias=False, kernel=kernel)
    x = torch.randn(3, 8)
    torch.testing.assert_close(mlp(x), mlp.fc2(F.relu(mlp.fc1(x)).square()))


@pytest.mark.parametrize("build", [LigerSwiGLUMLP, LigerGEGLUMLP])
def test_another_intermediate_size(build):
    """Liger-Kernel's second argument, for experts and for layers of double width."""
    mlp = build(CONFIG, 20)
    assert mlp.gate_up_proj.weight.shape == (40, 8)
    assert mlp(torch.randn(3, 8)).shape == (3, 8)
    assert build(CONFIG, intermediate_size=None).down_proj.weight.shape == (8, 12)


TILED = [(LigerTiledSwiGLUMLP, LigerSwiGLUMLP), (LigerTiledGEGLUMLP, LigerGEGLUMLP)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tiled", "whole"), TILED)
def test_a_tiled_mlp_computes_what_the_whole_one_does(tiled, whole, bias, backend, monkeypatch):
    """In chunks of four of eleven rows, saving its input alone, whatever the policy; against the whole one in fp64."""
    monkeypatch.setattr("liger_models.kernels.linear.gated_mlp._chunk_rows", lambda *_: 4)
    config = SimpleNamespace(**vars(CONFIG), mlp_bias=bias)
    mlp, truth = tiled(config, 4).to(backend), whole(config, kernel=False).double()
    truth.load_state_dict(mlp.state_dict())
    mlp.set_policy("none")
    x, dy = torch.randn(2, 1, 11, 8, device=backend).unbind()
    leaf, wide = x.clone().requires_grad_(), x.double().cpu().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = mlp(leaf)
    weights = {parameter.data_ptr() for parameter in mlp.parameters()}
    assert {t.data_ptr() for t in saved if t.numel() and t.data_ptr() not in weights} <= {leaf.data_ptr()}
    want = truth(wide)
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(got, [leaf, *mlp.parameters()], dy)
    theirs = torch.autograd.grad(want, [wide, *truth.parameters()], dy.double().cpu())
    torch.testing.assert_close([t.double().cpu() for t in ours], [*theirs], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), got)


@pytest.mark.parametrize(("tiled", "whole"), TILED)
def test_a_tiled_mlp_in_a_block(tiled, whole, backend):
    torch.manual_seed(0)
    mlp, other, norm = tiled(CONFIG).to(backend), whole(CONFIG).to(backend), LigerRMSNorm(8).to(backend)
    other.load_state_dict(mlp.state_dict())
    x, residual = torch.randn(2, 3, 8, device=backend).unbind()
    for call in (lambda mlp: mlp.add_norm(norm, x, residual)[0], lambda mlp: mlp(norm(x))):
        got, want = ((y := call(each), *torch.autograd.grad(y.sum(), [*each.parameters()])) for each in (mlp, other))
        torch.testing.assert_close(got, want)
        hook = mlp.down_proj.register_forward_hook(lambda module, args, out: 2 * out)
        torch.testing.assert_close(call(mlp), 2 * want[0])
        hook.remove()
    with pytest.raises(ValueError, match="hidden_act"):
        tiled(with_act("relu"))


class Doubled(nn.Linear):
    """Stands for an adapter or a quantized linear: another computation behind the same weight."""

    def forward(self, x):
        return 2 * super().forward(x)


NORMS = {
    "rms": lambda: LigerRMSNorm(8),
    "layer": lambda: LigerLayerNorm(8, bias=True),
    "layer-no-bias": lambda: LigerLayerNorm(8, use_bias=False),
    "no-norm": lambda: None,
}
by_norm = pytest.mark.parametrize("make_norm", NORMS.values(), ids=NORMS)


@pytest.mark.cases(9)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make_norm", [*NORMS.values(), lambda: LigerLayerNorm(8, offset=1.0)], ids=[*NORMS, "offset"])
@pytest.mark.parametrize("plain", [False, True], ids=["gated", "plain"])
def test_norm_and_mlp_together(plain, make_norm, recompute, kernel_device):
    """The fused path, hooks, a replaced forward, a replaced linear: each is what the modules say."""
    torch.manual_seed(0)
    norm = make_norm()
    mlp = LigerMLP(8, 12, act="gelu") if plain else LigerSwiGLUMLP(CONFIG)
    normed = (norm or nn.Identity()).to(kernel_device)
    mlp.to(kernel_device)
    first, second = ("fc1", "fc2") if plain else ("gate_up_proj", "down_proj")
    last = getattr(mlp, second)
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
    hook = last.register_forward_hook(lambda *_: calls.append(1))
    check()
    assert calls
    hook.remove()
    hook = last.register_full_backward_pre_hook(lambda module, gradients: (3 * gradients[0],))
    check()
    hook.remove()
    forward = last.forward
    last.forward = lambda x: 2 * forward(x)
    check()
    del last.forward
    getattr(mlp, first).__class__ = Doubled
    check()


def test_gate_and_up_are_saved_in_8_bits(kernel_device, monkeypatch):
    torch.manual_seed(0)
    mlp, norm = LigerSwiGLUMLP(CONFIG).to(kernel_device), LigerRMSNorm(8).to(kernel_device)
    x, residual = torch.randn(2, 3, 8, device=kernel_device).unbind()
    exact, dtypes = mlp.add_norm(norm, x, residual)[0], []
    assert mlp.set_gate_up_8bit(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.append(t.dtype) or t, lambda t: t):
        y, _ = mlp.add_norm(norm, x, residual)
    assert torch.equal(y, exact)
    assert dtypes.count(torch.int8) == 1
    got, expected = (torch.autograd.grad(each.sum(), list(mlp.parameters())) for each in (y, exact))
    for ours, theirs in zip(got, expected, strict=True):
        assert 0 < (ours - theirs).norm() < 0.01 * theirs.norm()

    monkeypatch.setattr("liger_models.layers.mlp.float8_recipe", lambda *_: "rowwise")
    with pytest.raises(ValueError, match="set_gate_up_8bit: an MLP with float8 products saves gate and up in full"):
        mlp.add_norm(norm, x, residual)


@pytest.mark.parametrize("recompute", [False, True])
def test_hooks_of_a_plain_mlp_are_called(recompute, backend):
    norm, mlp = LigerLayerNorm(8).to(backend), LigerMLP(8, 12, act="gelu").to(backend)
    residual = torch.randn(3, 8, device=backend)
    expected = mlp(norm(residual))
    mlp.register_forward_hook(lambda module, args, out: 2 * out)
    mlp.recompute = recompute
    torch.testing.assert_close(mlp.add_norm(norm, None, residual)[0], 2 * expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("base", [LigerSwiGLUMLP, LigerTiledSwiGLUMLP, LigerMLP])
def test_a_forward_of_a_derived_class_and_hooks_are_called(base, recompute, backend):
    class Scaled(base):
        def forward(self, x):
            return 3 * super().forward(x)

    def build(mlp_class):
        torch.manual_seed(0)
        mlp = LigerMLP if base is LigerMLP else LigerSwiGLUMLP
        layer = mlp_class(8, 12, act="gelu") if mlp is LigerMLP else mlp_class(CONFIG)
        layer.recompute = recompute
        return layer.to(backend)

    norm, residual = LigerRMSNorm(8).to(backend), torch.randn(2, 3, 8, device=backend)
    plain, scaled, hooked = build(base), build(Scaled), build(base)
    hooked.register_forward_hook(lambda module, args, out: 3 * out)
    want = 3 * plain(norm(residual))
    for mlp in (scaled, hooked):
        y, _ = mlp.add_norm(norm, None, residual)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(mlp(norm(residual)), want)
        weights = [norm.weight, *mlp.parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), weights),
            torch.autograd.grad(3 * plain(norm(residual)).sum(), [norm.weight, *plain.parameters()]),
        )


@by_norm
@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_mlp_keeps_no_normed_activations(make_norm, bias, kernel_device):
    norm, mlp = make_norm(), LigerMLP(8, 12, act="gelu", bias=bias).to(kernel_device)
    assert (mlp.fc1.bias is not None) == (mlp.fc2.bias is not None) == bias
    if norm is not None:
        norm.to(kernel_device)
    x, residual = torch.randn(2, 3, 8, device=kernel_device, requires_grad=True).unbind()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, total = mlp.add_norm(norm, x, residual)
    weights = {parameter.data_ptr() for module in (norm, mlp) if module for parameter in module.parameters()}
    kept = [t for t in saved if t.data_ptr() not in weights]
    statistics = {LigerRMSNorm: [(3,)], LigerLayerNorm: [(3, 2)], type(None): []}[type(norm)]
    assert [tuple(t.shape) for t in kept] == [(3, 8), *statistics, (3, 12)]
    assert kept[0].data_ptr() == total.data_ptr()
