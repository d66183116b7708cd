from functools import partial

import pytest
import torch
from torch import nn

from liger_models import LigerLayerNorm, LigerLlama, LigerMLP, LigerRMSNorm
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import add_norm_linear
from liger_models.layers.qk_norm_attention import LigerQKNormAttention

from ..late import Late
from .test_mlp import Doubled

llama = Late("transformers.models.llama.modeling_llama")
gemma = Late("transformers.models.gemma.modeling_gemma")
NORMS = {
    "rms": LigerRMSNorm,
    "layer": partial(LigerLayerNorm, bias=True),
    "layer-no-bias": partial(LigerLayerNorm, use_bias=False),
}
by_norm = pytest.mark.parametrize("make_norm", NORMS.values(), ids=NORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [True, False])
def test_bit_for_bit_as_transformers(dtype, kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    for theirs, options in ((llama.LlamaRMSNorm, {}), (gemma.GemmaRMSNorm, {"offset": 1.0, "casting_mode": "gemma"})):
        ours = LigerRMSNorm(64, **options, kernel=kernel).to(dtype)
        theirs = theirs(64, eps=1e-6).to(dtype)
        ours.weight.data, theirs.weight.data = weight, weight
        assert torch.equal(ours(x), theirs(x))


@by_norm
@pytest.mark.parametrize("x", [None, torch.full((3, 8), 0.5)], ids=["first", "add"])
def test_add_norm_linear(x, make_norm, kernel_device):
    torch.manual_seed(0)
    norm, linear = make_norm(8).to(kernel_device), nn.Linear(8, 5).to(kernel_device)
    residual = torch.randn(3, 8, device=kernel_device)
    x = None if x is None else x.to(kernel_device)
    total = residual if x is None else residual + x

    def check():
        y, new = add_norm_linear(norm, linear, x, residual)
        torch.testing.assert_close(new, total)
        expected = linear(norm(total))
        torch.testing.assert_close(y, expected)
        weights = [*norm.parameters(), *linear.parameters()]
        got, want = (torch.autograd.grad(out.square().sum(), weights) for out in (y, expected))
        torch.testing.assert_close(got, want)

    assert norm.as_fused() is not None
    check()
    seen = []
    hook = linear.register_forward_hook(lambda *_: seen.append(1))
    check()
    assert len(seen) == 2  # here and in the comparison
    hook.remove()
    linear.__class__ = Doubled
    check()
    norm.kernel = False
    assert norm.as_fused() is None
    check()
    y, new = add_norm_linear(None, linear, x, residual)
    torch.testing.assert_close(new, total)
    torch.testing.assert_close(y, linear(total))


@by_norm
def test_autocast(make_norm, backend):
    """The stream stays in fp32, the linear layer computes in autocast's dtype, with and without the fused op."""
    torch.manual_seed(0)
    norm, linear = make_norm(8).to(backend), nn.Linear(8, 5).to(backend)
    x, residual = torch.randn(2, 3, 8, device=backend).unbind()
    with torch.autocast(torch.device(backend).type, torch.float16):
        y, new = add_norm_linear(norm, linear, x, residual)
        expected = linear(norm(residual + x))
    assert (y.dtype, new.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(y, expected)


class Centered(nn.Module):
    """A user's own norm: a module, and nothing else that fused ops know."""

    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True))


class DoubledNorm(LigerLayerNorm):
    """A subclass with another computation on the same weights."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("x", [None, torch.full((3, 8), 0.5)], ids=["first", "add"])
def test_any_module_is_a_norm(x, backend):
    torch.manual_seed(0)
    residual = torch.randn(3, 8, device=backend)
    x = None if x is None else x.to(backend)
    total = residual if x is None else residual + x
    norm, linear = Centered(8).to(backend), nn.Linear(8, 5).to(backend)
    mlps = LigerMLP(8, 12, act="gelu").to(backend), GatedMLP(8, 12).to(backend)
    for branch in (linear, *mlps):
        add_norm = partial(add_norm_linear, linear=linear) if branch is linear else branch.add_norm
        for recompute in (False, True):
            branch.recompute = recompute
            y, new = add_norm(norm, x=x, residual=residual)
            torch.testing.assert_close((y, new), (branch(norm(total)), total))
            assert all(g.any() for g in torch.autograd.grad(y.square().sum(), [*norm.parameters()]))


@pytest.mark.parametrize("x", [None, torch.full((3, 8), 0.5)], ids=["first", "add"])
def test_a_subclass_with_its_own_forward_is_called(x, kernel_device):
    norm, linear = DoubledNorm(8).to(kernel_device), nn.Linear(8, 5).to(kernel_device)
    residual = torch.randn(3, 8, device=kernel_device)
    x = None if x is None else x.to(kernel_device)
    total = residual if x is None else residual + x
    assert norm.as_fused() is None
    expected = 2 * LigerLayerNorm.forward(norm, total)
    torch.testing.assert_close(norm.add(x, residual), (expected, total))
    torch.testing.assert_close(add_norm_linear(norm, linear, x, residual), (linear(expected), total))


def bytes_kept(device, make_norm, plain_mlp, policy):
    """Activations that a decoder of one block, with norms of a kind, saves for its backward."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LigerLlama.config_class(**sizes, num_key_value_heads=2, num_hidden_layers=1)
    model = LigerLlama.from_config(config, device=device)
    (block,) = model.layers
    block.input_layernorm, block.post_attention_layernorm = (make_norm(32).to(device) for _ in range(2))
    if plain_mlp:
        block.mlp = LigerMLP(32, 48, act="gelu").to(device)
    model.set_checkpointing(policy)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes(), tensor  # which keeps its address its own
        return tensor

    ids = torch.randint(0, 64, (2, 9), device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(nbytes for address, (nbytes, _) in saved.items() if address not in parameters)


@pytest.mark.cases(4)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("plain_mlp", [False, True], ids=["gated", "plain"])
def test_a_block_with_layer_norm_keeps_what_one_with_rms_norm_keeps(plain_mlp, policy, kernel_device):
    """And a mean in fp32 for each row and norm."""
    kept = {name: bytes_kept(kernel_device, make_norm, plain_mlp, policy) for name, make_norm in NORMS.items()}
    means = {"none": 2, "selective": 1 if plain_mlp else 2, "full": 0}[policy] * 4 * 2 * 9
    assert kept["layer"] == kept["layer-no-bias"] == kept["rms"] + means


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


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_a_norm_without_weight(casting_mode, backend):
    """``x / sqrt(mean(x²) + eps)`` and its gradient, against fp64; wherever a norm stands."""
    torch.manual_seed(0)
    norm = LigerRMSNorm(8, 1e-5, casting_mode=casting_mode, elementwise_affine=False).to(backend)
    assert not [*norm.parameters(), *norm.buffers()]
    assert not norm.state_dict()
    assert "elementwise_affine=False" in repr(norm)
    norm.reset_parameters()
    x, dy = torch.randn(2, 3, 8, device=backend).unbind()

    def truth(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
        leaf = x.to(dtype).requires_grad_()
        wide = leaf.detach().double().requires_grad_()
        got, want = norm(hidden_states=leaf), truth(wide)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        grads = torch.autograd.grad(got, leaf, dy.to(dtype)), torch.autograd.grad(want, wide, dy.double())
        torch.testing.assert_close(grads[0][0].double(), grads[1][0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm.add(x, x), (norm(2 * x), 2 * x))
    linear, mlp = nn.Linear(8, 5).to(backend), GatedMLP(8, 12).to(backend)
    torch.testing.assert_close(add_norm_linear(norm, linear, x, x), (linear(norm(2 * x)), 2 * x))
    torch.testing.assert_close(mlp.add_norm(norm, x, x), (mlp(norm(2 * x)), 2 * x))


@pytest.mark.parametrize("whole_projection", [False, True])
def test_norms_of_queries_and_keys_without_weight(whole_projection, backend):
    """They are norms whose weight is 1."""

    def make(affine):
        norm = partial(LigerRMSNorm, elementwise_affine=affine)
        return LigerQKNormAttention(32, 4, 2, 8, layer=0, norm=norm, whole_projection=whole_projection).to(backend)

    torch.manual_seed(0)
    attentions = make(True), make(False)
    attentions[1].load_state_dict(attentions[0].state_dict(), strict=False)
    qkv, cos, sin = torch.randn(2, 3, 64, device=backend), *torch.randn(2, 1, 3, 4, device=backend)
    for attention in attentions:
        attention._tables = lambda layout: (cos, sin)
    torch.testing.assert_close(*(attention._split(qkv, None) for attention in attentions))


def test_the_mode_without_casts_computes_in_fp32(backend):
    """It equals "gemma": Liger-Kernel computes it in the dtype of the input, which is less accurate."""
    torch.manual_seed(0)
    x = torch.randn(3, 64, device=backend).half()
    norms = [LigerRMSNorm(64, offset=0.5, casting_mode=mode).to(backend).half() for mode in ("none", "gemma")]
    assert torch.equal(*(norm(x) for norm in norms))


def test_arguments_of_liger_kernel_that_change_nothing():
    """In its order: in_place, row_mode, elementwise_affine."""
    x = torch.randn(3, 4)
    before = x.clone()
    y = LigerRMSNorm(4, 1e-6, 0.0, "llama", "ones", True, True, True)(x)
    assert torch.equal(x, before)
    assert torch.equal(y, LigerRMSNorm(4)(x))
    assert torch.equal(LigerLayerNorm(4)(hidden_states=x), LigerLayerNorm(4)(x))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"casting_mode must be one of .* got 'fp16'"):
        LigerRMSNorm(4, casting_mode="fp16")
    with pytest.raises(ValueError, match=r"offset must be 0 without a weight to add it to, got 1\.0"):
        LigerRMSNorm(4, offset=1.0, elementwise_affine=False)
    with pytest.raises(ValueError, match="init_fn must be 'ones' or 'zeros', got 'random'"):
        LigerRMSNorm(4, init_fn="random")
    assert not LigerRMSNorm(4, init_fn="zeros").weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_offset_of_a_layer_norm_is_added_in_the_dtype_of_the_weight(dtype, backend):
    norm = LigerLayerNorm(8, offset=1.0).to(backend, dtype)
    torch.nn.init.normal_(norm.weight, std=0.01)
    x, residual = torch.randn(2, 3, 8, device=backend, dtype=dtype).unbind()
    want = torch.nn.functional.layer_norm(x, (8,), norm.weight + 1.0, norm.bias, norm.eps)
    torch.testing.assert_close(norm(x), want)
    plain = LigerLayerNorm(8).to(backend, dtype)
    plain.load_state_dict({"weight": norm.weight + 1.0, "bias": norm.bias})
    for ours, theirs in zip(norm.add(x, residual), plain.add(x, residual), strict=True):
        assert torch.equal(ours, theirs)
    norm(x).sum().backward()
    assert norm.weight.grad.any()


def test_where_a_layer_norms_weights_start():
    for make, options in ((torch.ones, {}), (torch.zeros, {"init_fn": "zeros"})):
        norm = LigerLayerNorm(4, **options)
        assert torch.equal(norm.weight, make(4))
        assert not norm.bias.any()
    assert LigerLayerNorm(4, bias=True).bias.all()
    norm = LigerLayerNorm(4, use_bias=False)
    assert norm.bias is None
    assert [*norm.state_dict()] == ["weight"]
    norm.reset_parameters()
