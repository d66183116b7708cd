import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_models import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.norm import add_norm_linear

from .test_mlp import Doubled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [True, False])
def test_bit_for_bit_as_transformers(dtype, kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    for theirs, options in ((LlamaRMSNorm, {}), (GemmaRMSNorm, {"offset": 1.0, "casting_mode": "gemma"})):
        ours = LigerRMSNorm(64, **options, kernel=kernel).to(dtype)
        theirs = theirs(64, eps=1e-6).to(dtype)
        ours.weight.data, theirs.weight.data = weight, weight
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("x", [None, torch.full((3, 8), 0.5)], ids=["first", "add"])
def test_add_norm_linear(x, kernel_device):
    torch.manual_seed(0)
    norm, linear = LigerRMSNorm(8).to(kernel_device), nn.Linear(8, 5).to(kernel_device)
    residual = torch.randn(3, 8, device=kernel_device)
    x = None if x is None else x.to(kernel_device)
    total = residual if x is None else residual + x

    def check():
        y, new = add_norm_linear(norm, linear, x, residual)
        torch.testing.assert_close(new, total)
        torch.testing.assert_close(y, linear(norm(total)))

    check()
    seen = []
    hook = linear.register_forward_hook(lambda *_: seen.append(1))
    check()
    assert len(seen) == 2  # here and in the comparison
    hook.remove()
    linear.__class__ = Doubled
    check()
    norm.kernel = False
    check()
    y, new = add_norm_linear(None, linear, x, residual)
    torch.testing.assert_close(new, total)
    torch.testing.assert_close(y, linear(total))


@pytest.mark.parametrize("cls", [LigerRMSNorm, LigerLayerNorm])
@pytest.mark.parametrize("x", [None, torch.full((3, 8), 0.5)], ids=["first", "add"])
def test_hooks_of_a_norm_are_called(cls, x, kernel_device):
    """Wherever it stands: the sum before it is then made by itself."""
    torch.manual_seed(0)
    norm, linear = cls(8).to(kernel_device), nn.Linear(8, 5).to(kernel_device)
    residual = torch.randn(3, 8, device=kernel_device)
    x = None if x is None else x.to(kernel_device)
    total = residual if x is None else residual + x
    expected = norm(total)
    norm.register_forward_hook(lambda module, args, out: 2 * out)
    y, new = norm.add(x, residual)
    torch.testing.assert_close((y, new), (2 * expected, total))
    y, new = add_norm_linear(norm, linear, x, residual)
    torch.testing.assert_close((y, new), (linear(2 * expected), total))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"casting_mode must be one of .* got 'none'"):
        LigerRMSNorm(4, casting_mode="none")
    with pytest.raises(ValueError, match="init_fn must be 'ones' or 'zeros', got 'random'"):
        LigerRMSNorm(4, init_fn="random")
    assert not LigerRMSNorm(4, init_fn="zeros").weight.any()
