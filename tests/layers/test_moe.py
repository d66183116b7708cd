import pytest
import torch

from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.moe import Routing, moe_mlp, route_reference
from liger_models.layers import moe as module
from liger_models.layers.frozen import FrozenParameters, freeze
from liger_models.layers.moe import MATRICES, LigerMoE, LigerSharedExpertMoE

from ..late import Late, transformers

mixtral_modeling = Late("transformers.models.mixtral.modeling_mixtral")
qwen3_modeling = Late("transformers.models.qwen3_moe.modeling_qwen3_moe")

C, F, X, K = 32, 24, 6, 3
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])


def mixtral(**options):
    config = transformers.MixtralConfig(
        hidden_size=C, intermediate_size=F, num_local_experts=X, num_experts_per_tok=K, **options
    )
    return mixtral_modeling.MixtralSparseMoeBlock, config, Routing(K, normalize=True)


def qwen3(norm_topk_prob):
    config = transformers.Qwen3MoeConfig(
        hidden_size=C, moe_intermediate_size=F, num_experts=X, num_experts_per_tok=K, norm_topk_prob=norm_topk_prob
    )
    routing = Routing(K, normalize=norm_topk_prob, round_weights=True)
    return qwen3_modeling.Qwen3MoeSparseMoeBlock, config, routing


CASES = {"mixtral": mixtral, "qwen3": lambda: qwen3(True), "qwen3-plain": lambda: qwen3(False)}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def pair(build, config, routing, **options):
    """transformers' block and ours, with the same weights."""
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block, moe = build(config), LigerMoE(C, F, X, routing, **options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
        gate, up = block.experts.gate_up_proj.chunk(2, dim=1)
        moe.gate.weight.copy_(block.gate.weight)
        moe.gate_up_weight.copy_(torch.stack([gate, up], dim=2).flatten(1, 2))
        moe.down_weight.copy_(block.experts.down_proj)
    return block, moe


def error(ours, theirs):
    return ((ours.detach().cpu() - theirs.detach()).norm() / theirs.norm()).item()


@pytest.mark.cases(11)
@RECOMPUTE
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@every_case
def test_matches_transformers(backend, case, kernel, recompute):
    block, moe = pair(*case(), kernel=kernel)
    moe.to(backend).recompute = recompute
    x, dy = torch.randn(2, 2, 5, C)
    theirs, ours = x.clone().requires_grad_(), x.to(backend).requires_grad_()
    want = block(theirs)
    want.backward(dy)
    got, logits = moe(ours)
    got.backward(dy.to(backend))
    assert got.shape == x.shape
    assert error(got, want) <= 1e-6
    assert error(logits, block.gate(x)[0]) <= 1e-6
    d_gate_up = block.experts.gate_up_proj.grad
    d_gate_up = torch.stack(d_gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
    wanted = theirs.grad, block.gate.weight.grad, d_gate_up, block.experts.down_proj.grad
    gotten = ours.grad, moe.gate.weight.grad, moe.gate_up_weight.grad, moe.down_weight.grad
    for a, b in zip(gotten, wanted, strict=True):
        assert error(a, b) <= 1e-6


@every_case
def test_routing_weights_in_bf16_are_transformers(case):
    """The order of the casts: Mixtral keeps the weights in fp32, Qwen3-MoE rounds them."""
    block, moe = pair(*case())
    x = torch.randn(9, C, dtype=torch.bfloat16)
    logits, want, experts = block.gate.to(torch.bfloat16)(x)
    weights, chosen = route_reference(logits, moe.routing)
    assert want.dtype == (torch.bfloat16 if moe.routing.round_weights else torch.float32)
    assert torch.equal(weights, want.float())
    assert torch.equal(chosen, experts)


def test_jitter_in_training_only():
    block, moe = pair(*mixtral(router_jitter_noise=0.3), router_jitter=0.3)
    x = torch.randn(2, 5, C)
    torch.manual_seed(1)
    want = block(x.clone())
    torch.manual_seed(1)
    assert error(moe(x)[0], want) <= 1e-6
    block.eval()
    moe.eval()
    assert error(moe(x)[0], block(x.clone())) <= 1e-6


def test_autocast(backend):
    """The experts compute in autocast's dtype, and the parameters keep fp32 gradients."""
    _, moe = pair(*mixtral())
    moe.to(backend)
    x = torch.randn(1, 3, C, device=backend, requires_grad=True)
    want, _ = moe(x)
    with torch.autocast(torch.device(backend).type, dtype=torch.float16):
        got, logits = moe(x)
    assert got.dtype == logits.dtype == torch.float16
    assert error(got.float(), want.cpu()) <= 2e-3
    got.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in moe.parameters())
    assert x.grad.dtype == torch.float32


@pytest.mark.compile
@RECOMPUTE
def test_compiles_in_one_graph(backend, recompute):
    """Also on the reference backend, where the experts are a loop over row counts that no compiler knows."""
    _, moe = pair(*qwen3(True))
    moe.to(backend).recompute = recompute
    x = torch.randn(2, 5, C, device=backend)
    want, _ = moe(x)
    want.sum().backward()
    gradients = [parameter.grad for parameter in moe.parameters()]
    moe.zero_grad()
    compiler = "inductor" if backend == "cuda" else "aot_eager"
    got, _ = torch.compile(moe, fullgraph=True, backend=compiler)(x)
    got.sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close([parameter.grad for parameter in moe.parameters()], gradients)


def test_the_plain_path_recomputes_the_experts_alone():
    _, moe = pair(*mixtral(), kernel=False)
    moe.recompute = True
    saved = []
    x = torch.randn(7, C)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, _ = moe(x)
    assert not {(7 * K, 2 * F), (7 * K, F), (7 * K, C)} & {tuple(t.shape) for t in saved}
    calls = []
    moe.gate.register_forward_hook(lambda *_: calls.append(1))
    y.sum().backward()
    assert not calls


def test_parameters_and_initialization():
    moe = LigerMoE(40, 30, 5, Routing(2, normalize=True))
    shapes = {name: tuple(parameter.shape) for name, parameter in moe.named_parameters()}
    assert shapes == {"gate_up_weight": (5, 60, 40), "down_weight": (5, 40, 30), "gate.weight": (5, 40)}
    torch.manual_seed(0)
    moe.reset_parameters(std=0.5)
    for weight in (moe.gate_up_weight, moe.down_weight):
        assert 0.48 < weight.std().item() < 0.52
        assert abs(weight.mean().item()) < 0.02
    assert "40, 30, num_experts=5, Routing(top_k=2, normalize=True" in repr(moe)


def test_printing_gathers_no_stored_matrices(monkeypatch):
    moe = LigerMoE(40, 30, 5, Routing(2, normalize=True))
    for name in MATRICES:
        freeze(moe, name, FrozenWeight.quantize(getattr(moe, name).detach(), "float8"))
    monkeypatch.delattr(FrozenParameters, "join")
    assert "40, 30, num_experts=5, Routing(top_k=2, normalize=True" in repr(moe)


def test_any_leading_shape_and_no_token(backend):
    _, moe = pair(*mixtral())
    moe.to(backend)
    x = torch.randn(2, 3, 2, C, device=backend)
    y, logits = moe(x)
    assert logits.shape == (12, X)
    torch.testing.assert_close(moe(x[1, 2, 0])[0], y[1, 2, 0])
    torch.testing.assert_close(moe(x.transpose(0, 1))[0], y.transpose(0, 1))
    assert moe(x[:0])[0].shape == (0, 3, 2, C)


def test_bad_arguments():
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=rf"LigerMoE: top_k must be in 1 to 4 .*, got {top_k}"):
            LigerMoE(8, 8, 4, Routing(top_k))
    with pytest.raises(ValueError, match=r"LigerMoE: act must be one of"):
        LigerMoE(8, 8, 4, Routing(2), act="relu")
    with pytest.raises(ValueError, match=r"top_k must be 1 if routing weights multiply the input of experts, got 2"):
        LigerMoE(8, 8, 4, Routing(2), weights_input=True)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_a_correction_bias_changes_the_choice_alone_and_stays_in_fp32(backend, kernel):
    torch.manual_seed(0)
    moe = LigerMoE(C, F, X, Routing(K, score="sigmoid", normalize=True), correction_bias=True, kernel=kernel)
    moe.reset_parameters()
    bias = torch.randn(X) + 1e-4  # bf16 could not hold it
    with torch.no_grad():
        moe.correction.bias.copy_(bias)
    moe = moe.to(backend).bfloat16()
    assert moe.gate.weight.dtype == torch.bfloat16
    assert torch.equal(moe.correction.bias.cpu(), bias)
    x = torch.randn(5, C, device=backend, dtype=torch.bfloat16)
    y, logits = moe(x)
    scores = logits.float().sigmoid()
    chosen = (scores + moe.correction.bias).topk(K).indices
    assert torch.equal(moe.choose(logits).sort().values, chosen.sort().values)
    assert not torch.equal(chosen.sort().values, scores.topk(K).indices.sort().values)
    y.sum().backward()
    assert moe.correction.bias.grad is None
    assert moe.gate.weight.grad is not None


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_a_routing_weight_may_multiply_the_input(backend, kernel):
    """One expert by hand, with gradients of the router through the input."""
    torch.manual_seed(0)
    moe = LigerMoE(C, F, X, Routing(1, score="sigmoid"), weights_input=True, kernel=kernel)
    moe.reset_parameters(0.3)
    moe.to(backend)
    x = torch.randn(7, C, device=backend)
    y, _ = moe(x)
    y.square().sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    moe.zero_grad()
    weights, experts = moe.gate(x).sigmoid().max(-1, keepdim=True)
    rows = []
    for row, (e,) in zip(x * weights, experts.tolist(), strict=True):
        gate, up = (moe.gate_up_weight[e] @ row).unflatten(0, (-1, 2)).unbind(-1)
        rows.append(moe.down_weight[e] @ (torch.nn.functional.silu(gate) * up))
    want = torch.stack(rows)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    want.square().sum().backward()
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.cases(4)
@pytest.mark.parametrize("tokens", [1, 5, 400])
@pytest.mark.parametrize("gated", [False, True])
def test_without_gradients_the_sum_of_the_experts_takes_the_shared_one(gated, tokens, kernel_device, monkeypatch):
    """The numbers are those with gradients, where the shared expert is added by an op of its own."""
    torch.manual_seed(0)
    layer = LigerSharedExpertMoE(C, F, X, Routing(K), shared_size=2 * F, gated=gated, fp32_router=True)
    layer, x, addends = layer.to(kernel_device), torch.randn(1, tokens, C, device=kernel_device), []
    want, logits = layer(x)
    spy = lambda *args, addend=None, **options: addends.append(addend) or moe_mlp(*args, addend=addend, **options)
    monkeypatch.setattr(module, "moe_mlp", spy)
    with torch.no_grad():
        got, logits_of_few = layer(x)
    assert addends[0].shape == (tokens, C)
    torch.testing.assert_close(logits_of_few, logits)
    torch.testing.assert_close(got, want)
