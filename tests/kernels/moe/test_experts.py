from functools import partial

import pytest
import torch

from liger_models.kernels.activation.gated_act import ACTIVATIONS
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.linear.projection import ProjectionNeeds
from liger_models.kernels.moe import Routing, load_balancing_loss, moe_mlp, moe_mlp_reference, route
from liger_models.kernels.moe import experts as experts_module
from liger_models.kernels.moe.experts import (
    BACKWARD,
    FORWARD,
    ExpertProjection,
    MoEInputs,
    MoENeeds,
    MoESaved,
    MoEUpstream,
    copies_per_chunk,
)
from liger_models.kernels.moe.grouped_mm import grouped_outer
from liger_models.kernels.moe.permutation import sort_by_expert

from ...late import dynamo_testing
from ..oracle import assert_close_to_truth, opcheck_named, run
from .cases import (
    GPU_DTYPES,
    RECOMPUTE,
    check,
    choose,
    dtypes,
    low_ranked,
    make,
    with_biases,
    with_experts,
    with_low_ranks,
    without_gates,
)

SHAPES = [(1, 1, 1, 64, 32), (30, 2, 3, 50, 33), (11, 3, 3, 35, 130), (3, 6, 9, 33, 16)]  # N, K, X, C, F
GPU_SHAPES = [(300, 2, 5, 200, 130), (517, 8, 40, 264, 136), (1000, 1, 3, 128, 72), (5, 4, 300, 96, 48)]
ORDER = ("x", "weights", "gate_up_weight", "down_weight")


@pytest.mark.cases(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, many_blocks, poisoned_empty):
    # With one token the weights' gradient is a single number, whose rounding in half precision is luck.
    for dtype in dtypes(backend) if shape[0] > 1 else [torch.float32]:
        check(*make(shape, dtype, backend))


@RECOMPUTE
@pytest.mark.parametrize("kind", ["some", "same"])
def test_uneven_experts(backend, kind, recompute, many_blocks, poisoned_empty):
    check(*make((10, 2, 7, 20, 12), torch.float32, backend, kind=kind), recompute=recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["any", "some", "same"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_matches_fp64_over_many_blocks(shape, kind, poisoned_empty):
    for dtype in GPU_DTYPES:
        for recompute in (False, True):
            check(*make(shape, dtype, "cuda", kind=kind), recompute=recompute)


@RECOMPUTE
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(backend, act, recompute, poisoned_empty):
    for dtype in dtypes(backend)[1:]:
        check(*make((8, 2, 3, 24, 16), dtype, backend), act=act, recompute=recompute)


@pytest.mark.cases(8)
@RECOMPUTE
@pytest.mark.parametrize("act", [*ACTIVATIONS, "clamped_swiglu"])
@pytest.mark.parametrize("kind", ["any", "some"])
def test_biases(backend, act, kind, recompute, many_blocks, poisoned_empty):
    """The limit of the clamped activation is one that many numbers exceed, on both sides."""
    for dtype in dtypes(backend):
        inputs, experts, dy = make((10, 2, 7, 20, 12), dtype, backend, kind=kind)
        check(with_biases(inputs), experts, dy, act=act, limit=0.75, recompute=recompute)


@pytest.mark.cases(4)
@RECOMPUTE
@pytest.mark.parametrize("biased", [False, True])
def test_without_gates(backend, biased, recompute, many_blocks, poisoned_empty):
    for dtype in dtypes(backend):
        inputs, experts, dy = make((10, 2, 7, 20, 130), dtype, backend, kind="some")
        inputs = without_gates(inputs)
        inputs = with_biases(inputs) if biased else inputs
        check(inputs, experts, dy, act="relu2", recompute=recompute)


def test_low_rank_terms_without_gates(backend):
    inputs, experts, dy = make((9, 2, 3, 16, 24), torch.float32, backend)
    inputs = with_low_ranks(without_gates(inputs))
    functions = (low_ranked(function, experts, act="relu2") for function in (moe_mlp, moe_mlp_reference))
    assert_close_to_truth(*functions, inputs, [dy], factor=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_without_gates_over_many_blocks(shape, poisoned_empty):
    for dtype in GPU_DTYPES:
        inputs, experts, dy = make(shape, dtype, "cuda")
        for recompute in (False, True):
            check(without_gates(inputs), experts, dy, act="relu2", recompute=recompute)


@RECOMPUTE
def test_the_clamped_activation_without_biases(backend, recompute, many_blocks, poisoned_empty):
    inputs, experts, dy = make((10, 2, 3, 20, 130), torch.float32, backend)
    check(inputs, experts, dy, act="clamped_swiglu", limit=0.75, recompute=recompute)
    one_bias = with_biases(inputs)[:5]
    check(one_bias, experts, dy, act="clamped_swiglu", limit=0.75, recompute=recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["any", "some", "same"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_biases_over_many_blocks(shape, kind, poisoned_empty):
    for dtype in GPU_DTYPES:
        inputs, experts, dy = make(shape, dtype, "cuda", kind=kind)
        for recompute in (False, True):
            check(with_biases(inputs), experts, dy, act="clamped_swiglu", limit=1.0, recompute=recompute)


def test_biases_and_clamped_activation_are_transformers():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    (x, weights, *matrices), experts, _ = make((9, 3, 7, 12, 10), torch.float32, "cpu")
    *_, gate_up_bias, down_bias = with_biases([x, weights, *matrices])
    config = GptOssConfig(hidden_size=12, intermediate_size=10, num_local_experts=7, swiglu_limit=0.5)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(matrices[0].transpose(1, 2))
        theirs.down_proj.copy_(matrices[1].transpose(1, 2))
        theirs.gate_up_proj_bias.copy_(gate_up_bias)
        theirs.down_proj_bias.copy_(down_bias)
    want = theirs(x, experts, weights)
    got = moe_mlp(x, weights, experts, *matrices, gate_up_bias, down_bias, act="clamped_swiglu", limit=0.5)
    torch.testing.assert_close(got, want)


@RECOMPUTE
def test_biases_save_nothing_more(kernel_device, recompute):
    inputs, experts, _ = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    saved, leaves = [], [t.requires_grad_() for t in with_biases(inputs)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with_experts(moe_mlp, experts, recompute=recompute, act="clamped_swiglu", limit=7.0)(*leaves)
    kept = [] if recompute else [(12, 20)]
    given = [(3, 20, 32), (3, 20), (3, 32, 10), (3, 32)]
    assert [tuple(t.shape) for t in saved] == [(6, 32), (6, 2), (12,), (12,), (3,), *kept, *given]


@RECOMPUTE
def test_frozen_biases(kernel_device, recompute):
    """Each gradient alone is the one that it is among the others."""
    inputs, experts, dy = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    function = with_experts(moe_mlp, experts, recompute=recompute, act="clamped_swiglu", limit=0.75)
    leaves = [t.detach().requires_grad_() for t in with_biases(inputs)]
    every = torch.autograd.grad(function(*leaves), leaves, dy)
    for index, want in enumerate(every):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(leaves)]
        (got,) = torch.autograd.grad(function(*leaves), [leaves[index]], dy)
        torch.testing.assert_close(got, want)


@RECOMPUTE
def test_no_token_has_biases_without_gradient(backend, recompute):
    inputs, experts, dy = make((0, 2, 3, 16, 8), torch.float32, backend)
    *_, d_gate_up_bias, d_down_bias = run(
        with_experts(moe_mlp, experts, recompute=recompute), with_biases(inputs), [dy]
    )
    assert d_gate_up_bias.shape == (3, 16)
    assert d_down_bias.shape == (3, 16)
    assert not d_gate_up_bias.any()
    assert not d_down_bias.any()


@RECOMPUTE
@pytest.mark.parametrize(("stream", "weights"), [("float32", "float16"), ("float16", "float32")])
def test_weights_of_another_dtype(backend, stream, weights, recompute, poisoned_empty):
    """An fp32 stream with half-precision weights is what autocast makes of a model; routing weights may be any."""
    inputs, experts, dy = make((16, 2, 3, 24, 16), getattr(torch, stream), backend, getattr(torch, weights))
    check(inputs, experts, dy, recompute=recompute)
    if recompute:
        check([inputs[0], inputs[1].half(), *inputs[2:]], experts, dy, recompute=recompute)


@RECOMPUTE
def test_an_expert_twice_for_one_token(backend, recompute):
    inputs, experts, dy = make((7, 3, 4, 16, 8), torch.float32, backend)
    check(inputs, experts // 2, dy, recompute=recompute)


@RECOMPUTE
def test_an_expert_without_tokens_gets_zeros(backend, recompute):
    inputs, _, dy = make((5, 2, 6, 16, 8), torch.float32, backend)
    experts = torch.tensor([[1, 4]] * 5, device=backend)
    _, _, _, d_gate_up, d_down = run(with_experts(moe_mlp, experts, recompute=recompute), inputs, [dy])
    for gradient in (d_gate_up, d_down):
        assert gradient.flatten(1).any(1).tolist() == [False, True, False, False, True, False]


@RECOMPUTE
def test_no_token(backend, recompute):
    inputs, experts, dy = make((0, 2, 3, 16, 8), torch.float32, backend)
    y, dx, d_weights, d_gate_up, d_down = run(with_experts(moe_mlp, experts, recompute=recompute), inputs, [dy])
    assert y.shape == dx.shape == (0, 16)
    assert d_weights.shape == (0, 2)
    assert d_gate_up.shape == (3, 16, 16)
    assert not d_gate_up.any()
    assert not d_down.any()


@RECOMPUTE
def test_strided_inputs_and_gradients(backend, recompute):
    inputs, experts, dy = make((6, 4, 4, 32, 16), torch.float32, backend)
    x, weights, gate_up_weight, down_weight = inputs
    columns = [weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (gate_up_weight, down_weight)]
    t = lambda tensor: tensor.t().contiguous().t()
    check([t(x), t(weights), *columns], t(experts), t(dy), recompute=recompute)
    sliced = [x[::2, ::2], weights[::2, 1:3], gate_up_weight[::2, 4:, 1::2], down_weight[::2, ::2, 2:]]
    experts = experts[1::2, ::2] // 2
    check(sliced, experts, dy[:1, :1].expand(3, 16), recompute=recompute)
    check(sliced, experts, dy[:3, :1].expand(3, 16), recompute=recompute)


@RECOMPUTE
def test_second_backward_agrees_and_nothing_is_overwritten(backend, recompute):
    inputs, experts, dy = make((9, 2, 4, 32, 20), torch.float32, backend)
    leaves = [t.requires_grad_() for t in inputs]
    y = with_experts(moe_mlp, experts, recompute=recompute)(*leaves)
    tensors = [dy, experts, y, *leaves]
    kept = [t.clone() for t in tensors]
    first = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
    second = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_recomputation_gives_the_same_bits(kernel_device):
    for dtype in dtypes(kernel_device):
        inputs, experts, dy = make((21, 2, 3, 40, 24), dtype, kernel_device)
        kept, again = (run(with_experts(moe_mlp, experts, recompute=flag), inputs, [dy]) for flag in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.fixture
def chunks(monkeypatch):
    """Sets chunks to one row per expert. The list gets the number of tokens of each chunk in each direction."""
    monkeypatch.setattr(experts_module, "WORKSPACE_MIB", 0)
    monkeypatch.setattr(experts_module, "MIN_ROWS", 1)
    monkeypatch.setattr(experts_module, "_copies_worth", lambda sum_bytes, copy_bytes: 0)
    processed = []
    for name, tokens_of in (("forward", lambda inputs: inputs.x), ("backward", lambda inputs: inputs.dy)):
        original = getattr(experts_module, f"_{name}_tokens")
        spy = lambda inputs, name=name, tokens_of=tokens_of, original=original: (
            processed.append((name, len(tokens_of(inputs)))) or original(inputs)
        )
        monkeypatch.setattr(experts_module, f"_{name}_tokens", spy)
    return processed


@pytest.mark.parametrize("biased", [False, True])
def test_chunks_of_tokens(kernel_device, biased, chunks, poisoned_empty):
    options = {"act": "clamped_swiglu", "limit": 0.75} if biased else {}
    for dtype in dtypes(kernel_device):
        inputs, experts, dy = make((11, 2, 7, 20, 16), dtype, kernel_device, kind="some")
        inputs = [*with_low_ranks(inputs), *(with_biases(inputs)[4:] if biased else ())]
        ours = low_ranked(moe_mlp, experts, recompute=True, **options)
        chunks.clear()
        assert_close_to_truth(ours, low_ranked(moe_mlp_reference, experts, **options), inputs, [dy], factor=2.0)
        assert chunks == [(name, size) for name in ("forward", "backward") for size in (3, 3, 3, 2)]
        with torch.no_grad():  # a long prompt
            y = ours(*inputs)
        torch.testing.assert_close(y, low_ranked(moe_mlp, experts, **options)(*inputs))


def test_chunks_of_tokens_save_no_more(kernel_device, chunks):
    inputs, experts, dy = make((11, 2, 7, 20, 16), torch.float32, kernel_device)
    for trained in ((), ("x",), ("down_weight",), ("weights", "gate_up_weight")):
        saved = []
        leaves = [t.detach().requires_grad_(name in trained) for name, t in zip(ORDER, inputs, strict=True)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            y = with_experts(moe_mlp, experts, recompute=True)(*leaves)
        sizes = [(11, 20), (11, 2), (22,), (22,), (28,), (7, 32, 20), (7, 20, 16)]
        assert [tuple(t.shape) for t in saved] == (sizes if trained else [])
        want = run(with_experts(moe_mlp_reference, experts), inputs, [dy])[1:]
        if trained:
            y.backward(dy)
        for name, leaf, gradient in zip(ORDER, leaves, want, strict=True):
            assert (leaf.grad is not None) == (name in trained)
            if name in trained:
                torch.testing.assert_close(leaf.grad, gradient)


def test_chunks_are_as_large_as_possible():
    """One GiB of gates and ups, or 512 rows for each expert."""

    def chunks(N, K, X, width, **options):
        weight = torch.empty(X, width, 8, dtype=torch.bfloat16, device="meta")
        inputs = MoEInputs(
            x=torch.empty(N, 8, device="meta"), weights=torch.empty(N, K, device="meta"),
            experts=torch.empty(N, K, device="meta"), gate_up=ExpertProjection(weight), down=ExpertProjection(weight),
            **{"act": "silu", "limit": 0.0, "recompute": True, "seed": None, "dropout": 0.0} | options,
        )  # fmt: skip
        return experts_module._count_chunks(inputs)

    assert [chunks(N, 4, 32, 5760) for N in (0, 1, 23301, 23302, 524288)] == [1, 1, 1, 2, 23]
    assert [chunks(N, 8, 256, 8192) for N in (16384, 16385)] == [1, 2]  # 512 rows for each expert
    assert chunks(524288, 4, 32, 5760, recompute=False) == 1
    assert chunks(524288, 4, 32, 5760, seed=torch.zeros(2)) == chunks(524288, 4, 32, 5760, copies=9) == 1


@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_chunks_of_trained_experts_need_no_more_memory_than_one(act):
    """With their sums in fp32, which is what a chunk has in addition."""
    X, C, F, K = 128, 2880, 2880, 4
    shape = (X, F if act == "relu2" else 2 * F, C)
    sums, row = 4 * X * C * (shape[1] + F), (shape[1] + F + 2 * C) * 2
    most = copies_per_chunk(shape, act, 2, sums)
    assert most > copies_per_chunk(shape, act, 2, 0)
    assert sums + (most + K) // 2 * row <= (most + K) * row  # one token more, in two chunks
    assert sums + (most - K) // 2 * row > (most - K) * row  # and they would not be worth it before


def test_sums_of_trained_parameters_are_counted(kernel_device, monkeypatch):
    inputs, experts, _ = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    seen = []
    monkeypatch.setattr(experts_module, "_copies_worth", lambda sum_bytes, copy_bytes: seen.append(sum_bytes) or 0)
    for trained in ((), ("x",), ("down_weight",), ("gate_up_weight", "down_weight")):
        seen.clear()
        leaves = [t.detach().requires_grad_(name in trained) for name, t in zip(ORDER, inputs, strict=True)]
        with_experts(moe_mlp, experts, recompute=True)(*leaves)
        sums = 4 * sum(t.numel() for name, t in zip(ORDER, leaves, strict=True) if name in trained and name != "x")
        assert {*seen} == {sums}
        with torch.no_grad():
            seen.clear()
            with_experts(moe_mlp, experts, recompute=True)(*leaves)
        assert {*seen} <= {0}


def test_a_repeated_forward_only_sorts(kernel_device, monkeypatch):
    inputs, experts, dy = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    want = run(with_experts(moe_mlp, experts, recompute=True), inputs, [dy])[1:]
    leaves = [t.detach().requires_grad_() for t in inputs]
    products = []
    original = experts_module.grouped_mm
    monkeypatch.setattr(experts_module, "grouped_mm", lambda *args: products.append(1) or original(*args))
    y = with_experts(moe_mlp, experts, recompute=True, need_y=False)(*leaves)
    assert y.shape == (6, 32)
    assert not products
    got = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_is_saved(kernel_device):
    inputs, experts, _ = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    routing, weights = [(6, 2), (12,), (12,), (3,)], [(3, 20, 32), (3, 32, 10)]
    for recompute, frozen, expected in (
        (False, (), [(6, 32), *routing, (12, 20), *weights]),
        (True, (), [(6, 32), *routing, *weights]),
        (False, ("gate_up_weight",), [*routing, (12, 20), *weights]),
        (True, ("gate_up_weight",), [(6, 32), *routing, *weights]),
    ):
        saved = []
        leaves = [t.detach().requires_grad_(name not in frozen) for name, t in zip(ORDER, inputs, strict=True)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            with_experts(moe_mlp, experts, recompute=recompute)(*leaves)
        assert [tuple(t.shape) for t in saved] == expected


@RECOMPUTE
@pytest.mark.parametrize(
    ("trained", "products", "outers", "spreads", "sums"),
    [
        (ORDER, 2, 2, 2, 1),
        (("x",), 2, 0, 1, 1),  # frozen experts and router
        (("x", "weights"), 2, 0, 1, 1),
        (("weights",), 1, 0, 1, 0),
        (("gate_up_weight",), 1, 1, 2, 0),  # a frozen trunk
        (("down_weight",), 0, 1, 1, 0),
        (("weights", "down_weight"), 1, 1, 1, 0),
    ],
    ids=str,
)
def test_frozen_inputs_cost_nothing(kernel_device, monkeypatch, trained, products, outers, spreads, sums, recompute):
    inputs, experts, dy = make((3, 2, 3, 16, 6), torch.float32, kernel_device)
    want = dict(zip(ORDER, run(with_experts(moe_mlp_reference, experts), inputs, [dy])[1:], strict=True))
    named = dict(zip(ORDER, inputs, strict=True))
    for name in trained:
        named[name].requires_grad_()
    y = moe_mlp(**named, experts=experts, recompute=recompute)
    calls = []
    for name in ("grouped_mm", "grouped_outer", "permute", "unpermute"):
        original = getattr(experts_module, name)
        spy = lambda *args, _name=name, _original=original: calls.append(_name) or _original(*args)
        monkeypatch.setattr(experts_module, name, spy)
    y.backward(dy)
    assert calls.count("grouped_mm") == products + recompute
    assert calls.count("grouped_outer") == outers
    assert calls.count("permute") == (2 if recompute else spreads)  # the copies of x serve twice
    assert calls.count("unpermute") == sums
    for name, tensor in named.items():
        assert (tensor.grad is not None) == (name in trained)
        if name in trained:
            torch.testing.assert_close(tensor.grad, want[name])


@pytest.mark.cases(4)
@RECOMPUTE
@pytest.mark.parametrize(("kind", "biased"), [("any", False), ("some", True)])
def test_low_ranks(backend, kind, biased, recompute, many_blocks, poisoned_empty):
    """Beside the weights, matrices of rank 3 and 8; all thirteen gradients."""
    options = {"act": "clamped_swiglu", "limit": 0.75} if biased else {}
    for dtype, R in zip(dtypes(backend), (3, 8, 8), strict=False):
        inputs, experts, dy = make((10, 2, 7, 20, 16), dtype, backend, kind=kind)
        inputs = [*with_low_ranks(inputs, R), *(with_biases(inputs)[4:] if biased else ())]
        ours = low_ranked(moe_mlp, experts, recompute=recompute, **options)
        assert_close_to_truth(ours, low_ranked(moe_mlp_reference, experts, **options), inputs, [dy], factor=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("R", [16, 5])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_low_ranks_over_many_blocks(shape, R, poisoned_empty):
    for dtype in GPU_DTYPES:
        inputs, experts, dy = make(shape, dtype, "cuda")
        inputs = with_low_ranks(inputs, R)
        for recompute in (False, True):
            ours = low_ranked(moe_mlp, experts, recompute=recompute)
            assert_close_to_truth(ours, low_ranked(moe_mlp_reference, experts), inputs, [dy], factor=2.0)


@RECOMPUTE
def test_low_ranks_are_added_to_the_weights(backend, recompute):
    inputs, experts, _ = make((9, 3, 7, 12, 10), torch.float32, backend)
    x, weights, gate_up, down, *low_ranks = with_low_ranks(inputs)
    got = low_ranked(moe_mlp, experts, recompute=recompute)(x, weights, gate_up, down, *low_ranks)
    A, B, down_A, down_B = low_ranks
    want = moe_mlp(x, weights, experts, gate_up + B @ A, down + down_B @ down_A)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@RECOMPUTE
def test_low_ranks_alone_are_trained(kernel_device, recompute, monkeypatch):
    """Frozen weights cost nothing, nothing more than x is saved, and each gradient is the one among the others."""
    inputs, experts, dy = make((6, 2, 3, 32, 16), torch.float32, kernel_device)
    inputs, function = with_low_ranks(inputs), low_ranked(moe_mlp, experts, recompute=recompute)
    leaves = [t.detach().requires_grad_() for t in inputs]
    every = torch.autograd.grad(function(*leaves), leaves, dy)
    for trained in [(4,), (5,), (6,), (7,), (0, 1, 4, 5, 6, 7)]:
        saved = []
        leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            y = function(*leaves)
        rows = [(6, 32)] if recompute or {4, 5} & {*trained} else []
        kept = [] if recompute else [(12, 32)]
        constants = [(3, 32, 32), (3, 32, 16), (3, 3, 32), (3, 32, 3), (3, 3, 16), (3, 32, 3)]
        assert [tuple(t.shape) for t in saved] == [*rows, (6, 2), (12,), (12,), (3,), *kept, *constants]
        outers = []
        spy = lambda *args, to=outers: to.append(1) or grouped_outer(*args)
        monkeypatch.setattr(experts_module, "grouped_outer", spy)
        got = torch.autograd.grad(y, [leaves[i] for i in trained], dy)
        monkeypatch.undo()
        assert len(outers) == len({4, 5, 6, 7} & {*trained})
        for gradient, i in zip(got, trained, strict=True):
            torch.testing.assert_close(gradient, every[i])


@RECOMPUTE
def test_low_ranks_without_tokens(backend, recompute):
    inputs, experts, dy = make((0, 2, 3, 16, 8), torch.float32, backend)
    inputs = with_low_ranks(inputs)
    _, *gradients = run(low_ranked(moe_mlp, experts, recompute=recompute), inputs, [dy])
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


def test_low_ranks_that_do_not_fit():
    inputs, experts, _ = make((4, 2, 3, 16, 8), torch.float32, "cpu")
    x, weights, gate_up, down, A, B, *_ = with_low_ranks(inputs)
    with pytest.raises(
        ValueError, match=r"gate_up_low_rank must be A \[3, R, 16\] and B \[3, 16, R\], got \[3, 3, 16\]"
    ):
        moe_mlp(x, weights, experts, gate_up, down, gate_up_low_rank=(A, B[:2]))
    with pytest.raises(TypeError, match="down_low_rank must have the weights' dtype"):
        moe_mlp(x, weights, experts, gate_up, down, down_low_rank=(A[:, :, :8].half(), B.half()))


def test_dropout_is_of_the_input_of_low_ranks(monkeypatch):
    """A token's copies drop the same elements, and those that are left are scaled."""
    inputs, experts, _ = make((4, 2, 3, 16, 8), torch.float32, "cpu")
    x, weights, _, down_weight = inputs
    seen, identity = [], torch.eye(16).expand(3, 16, 16)
    monkeypatch.setattr(experts_module, "expert_act_reference", lambda u, *_: seen.append(u) or u[:, ::2])
    options = {"gate_up_low_rank": (identity, identity), "dropout": 0.25}
    moe_mlp_reference(x, weights, torch.ones_like(experts), torch.zeros(3, 16, 16), down_weight, **options)
    first, second = seen[0].view(4, 2, 16).unbind(1)
    assert first.equal(second)
    kept = first != 0
    assert 24 < kept.sum() < 64
    torch.testing.assert_close(first[kept], (x / 0.75)[kept])


def test_no_grad_keeps_nothing(kernel_device, monkeypatch):
    monkeypatch.setattr(experts_module, "takes_few_copies", lambda *_: False)
    inputs, experts, _ = make((6, 2, 3, 32, 10), torch.float32, kernel_device)
    want = with_experts(moe_mlp, experts)(*inputs)
    with torch.no_grad():
        got = with_experts(moe_mlp, experts)(*(t.requires_grad_() for t in inputs))
    assert not got.requires_grad
    assert torch.equal(got, want)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_copies_without_an_expert(backend, share, many_blocks, poisoned_empty):
    """They are as copies with the weight 0, and their weights have the gradient 0."""
    for dtype in dtypes(backend):
        inputs, experts, dy = make((10, 3, 7, 20, 12), dtype, backend)
        there = (torch.rand(experts.shape, generator=torch.Generator().manual_seed(1)) < share).to(backend)
        given, copies = torch.where(there, experts, 7), int(there.sum())
        reference = lambda function, there=there: (
            lambda x, weights, *rest: function(x, weights * there.to(x.device), *rest)
        )
        for recompute in (False, True):
            ours = with_experts(moe_mlp, given, copies=copies, recompute=recompute)
            every = with_experts(moe_mlp_reference, experts)
            assert_close_to_truth(ours, reference(every), with_biases(inputs), [dy], factor=2.0)
            ours = low_ranked(moe_mlp, given, copies=copies, recompute=recompute)
            every = low_ranked(moe_mlp_reference, experts)
            assert_close_to_truth(ours, reference(every), with_low_ranks(inputs), [dy], factor=2.0)
        want = with_experts(moe_mlp, given, copies=copies)(*inputs)
        with torch.no_grad():
            assert torch.equal(with_experts(moe_mlp, given, copies=copies)(*inputs), want)


def test_opcheck(kernel_device):
    inputs, experts, _ = make((3, 2, 3, 16, 8), torch.float32, kernel_device)
    x, weights, *matrices = (t.requires_grad_() for t in inputs)
    gate_up, down = map(ExpertProjection, matrices)

    def check(x, weights, experts, gate_up, down, act, recompute, limit=0.0, copies=None):
        inputs = MoEInputs(x, weights, experts, gate_up, down, act, limit, recompute, None, 0.0, copies)
        opcheck_named(FORWARD, inputs)

    check(x, weights, experts, gate_up, down, "silu", False)
    check(x, weights, experts, gate_up, down, "gelu", True)
    check(x[:0], weights[:0], experts[:0], gate_up, down, "silu", True)
    some = torch.where(experts == 1, 3, experts)
    check(x, weights, some, gate_up, down, "silu", False, copies=int((some < 3).sum()))
    *_, gate_up_bias, down_bias = (t.requires_grad_() for t in with_biases(inputs))
    biased = gate_up._replace(bias=gate_up_bias), down._replace(bias=down_bias)
    check(x, weights, experts, *biased, "clamped_swiglu", False, limit=0.75)
    low_ranks = [t.requires_grad_() for t in with_low_ranks(inputs)[4:]]
    pairs = tuple(low_ranks[:2]), tuple(low_ranks[2:])
    check(x, weights, experts, gate_up._replace(low_rank=pairs[0]), down._replace(low_rank=pairs[1]), "silu", True)


def test_opcheck_backward(kernel_device):
    inputs, experts, dy = make((3, 2, 3, 16, 8), torch.float32, kernel_device)
    weights = inputs[1]
    low_ranks = [t.half() for t in with_low_ranks(inputs)[4:]]
    x, dy, *matrices = (t.half() for t in (inputs[0], dy, *inputs[2:]))
    sort = sort_by_expert(experts, 3)
    u, biases = torch.ones(6, 16, device=kernel_device).half(), torch.ones(3, 16, device=kernel_device).half()
    nothing, weight = ProjectionNeeds(False, False, False, False), ProjectionNeeds(True, False, False, False)
    every, pair = ProjectionNeeds(True, True, True, True), ProjectionNeeds(False, False, True, True)
    for rows, kept, bias, needs in (
        (x, None, None, MoENeeds(True, True, weight, weight)),
        (None, u, None, MoENeeds(True, True, nothing, ProjectionNeeds(True, False, True, True))),
        (x, None, None, MoENeeds(False, False, nothing, weight)),
        (x, None, biases, MoENeeds(True, True, every, every)),
        (x, u, biases, MoENeeds(False, True, ProjectionNeeds(False, True, True, False), nothing)),
        (x, u, None, MoENeeds(False, False, pair, pair)),
    ):
        gate_up = ExpertProjection(matrices[0], bias, tuple(low_ranks[:2]))
        down = ExpertProjection(matrices[1], bias, tuple(low_ranks[2:]))
        saved = MoESaved(rows, weights, *sort, kept, gate_up, down, "silu", 0.0, torch.float32, None, 0.0)
        opcheck_named(BACKWARD, MoEUpstream(dy, saved, needs))


def test_the_reference_in_fp64():
    """Its loop over the experts is an op with a derivative of its own."""
    inputs, experts, _ = make((4, 2, 3, 6, 4), torch.float64, "cpu")
    inputs[1] = inputs[1].double()
    leaves = [t.requires_grad_() for t in inputs]
    torch.autograd.gradcheck(with_experts(moe_mlp_reference, experts), leaves)


def test_the_reference_is_what_a_loop_over_the_experts_gives():
    (x, weights, gate_up_weight, down_weight), experts, _ = make((9, 3, 7, 12, 10), torch.float64, "cpu")
    want = torch.zeros_like(x)
    for e in range(7):
        token, k = torch.where(experts == e)
        gate, up = (x[token] @ gate_up_weight[e].t()).unflatten(-1, (10, 2)).unbind(-1)
        rows = (torch.nn.functional.silu(gate) * up) @ down_weight[e].t()
        want.index_add_(0, token, rows * weights[token, k, None])
    torch.testing.assert_close(moe_mlp_reference(x, weights, experts, gate_up_weight, down_weight), want)


def gate(X, C, device):
    return torch.randn(X, C, generator=torch.Generator().manual_seed(2)).to(device)


def layer(x, gate, gate_up_weight, down_weight, recompute=False):
    """Router (in fp32: no two logits are equal), experts and loss, with a gradient through all of them."""
    logits = x.float() @ gate.t()
    weights, experts = route(logits, Routing(2, normalize=True))
    y = moe_mlp(x, weights, experts, gate_up_weight, down_weight, recompute=recompute)
    return y, load_balancing_loss([logits, logits], 2)


@pytest.mark.compile
@RECOMPUTE
def test_compiles_without_graph_breaks(backend, recompute):
    (x, _, *matrices), _, dy = make((6, 2, 4, 24, 8), torch.float32, backend)
    inputs, upstream = [x, gate(4, 24, backend), *matrices], [dy, torch.ones((), device=backend)]
    function = lambda *args: layer(*args, recompute=recompute)
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "cuda" else "aot_eager")
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


@pytest.mark.cases(2)
@pytest.mark.compile
@RECOMPUTE
def test_one_graph_serves_all_numbers_of_tokens(backend, recompute):
    """The first number of tokens has a graph of its own."""
    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(layer, recompute=recompute), fullgraph=True, backend=counter)
    for N in (6, 9, 12, 7):
        (x, _, *matrices), _, dy = make((N, 2, 4, 24, 8), torch.float32, backend)
        run(compiled, [x, gate(4, 24, backend), *matrices], [dy, torch.ones((), device=backend)])
    assert counter.frame_count == 2


@pytest.mark.gpu
@RECOMPUTE
@pytest.mark.parametrize(
    "shape", [(333, 2, 8, 4096, 14336), (1111, 8, 128, 2048, 768), (1, 8, 128, 2048, 768)], ids=str
)
def test_real_sizes(shape, recompute):
    """bf16 against the reference in fp32: no further from it than the reference in bf16 is (few numbers scatter)."""
    N, K, X, C, F = shape
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    inputs = [draw(N, C), draw(N, K).abs().float(), draw(X, 2 * F, C) / C**0.5, draw(X, C, F) / F**0.5]
    experts, dy = choose(N, K, X).cuda(), draw(N, C)
    for size in (2**20, inputs[2].numel(), inputs[3].numel()):  # memory that is handed out again holds no zeros
        torch.full((size,), float("nan"), device="cuda", dtype=torch.bfloat16)
    got = run(with_experts(moe_mlp, experts, recompute=recompute), inputs, [dy])
    plain = run(with_experts(moe_mlp_reference, experts), inputs, [dy])
    truth = run(with_experts(moe_mlp_reference, experts), [t.float() for t in inputs], [dy.float()])
    for index, (ours, theirs, exact) in enumerate(zip(got, plain, truth, strict=True)):
        assert ours.dtype == theirs.dtype
        distance = lambda t, e=exact: ((t.float() - e).norm() / e.norm()).item()
        assert distance(ours) <= (1.2 if N > 1 else 3) * distance(theirs) + 1e-4, index


@pytest.mark.gpu
@RECOMPUTE
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype, recompute):
    (x, _, *matrices), _, dy = make((300, 2, 8, 64, 48), dtype, "cuda")
    leaves = [t.requires_grad_() for t in (x, gate(8, 64, "cuda"), *matrices)]

    def step():
        y, loss = layer(*leaves, recompute=recompute)
        return torch.autograd.grad([y, loss], leaves, [dy, torch.ones_like(loss)])

    want = step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_runs_in_a_cuda_graph():
    """With other tokens, which go to other experts, at replay."""
    (x, _, *matrices), _, _ = make((64, 2, 8, 64, 48), torch.bfloat16, "cuda")
    router = gate(8, 64, "cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x, router, *matrices)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = layer(x, router, *matrices)
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            want, _ = layer(x, router, *matrices)
            assert (y - want).float().norm() <= 1e-2 * want.float().norm()


@pytest.mark.gpu
@RECOMPUTE
def test_memory(recompute):
    """Between forward and backward: y and the order of the copies, gate and up unless recomputed; and the peak."""
    N, K, X, C, F = 8192, 4, 16, 1024, 512
    inputs, experts, dy = make((N, K, X, C, F), torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in inputs]
    function = with_experts(moe_mlp, experts, recompute=recompute)
    torch.autograd.grad(function(*leaves), leaves, dy)  # whatever is allocated once
    before = torch.cuda.memory_allocated()
    y = function(*leaves)
    S = N * K
    kept = 2 * N * C + 8 * S + (0 if recompute else 2 * S * 2 * F)
    assert torch.cuda.memory_allocated() - before <= kept + 2**20
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, leaves, dy)
    # In backward: the copies of dy (and if recomputed of x), the product or its gradient, the gradient of gate and up
    # (which if recomputed takes their place), then dW and dx.
    peak = (S * (2 * C + 3 * F) if recompute else S * (C + 3 * F)) + 3 * X * C * F + N * C
    assert torch.cuda.max_memory_allocated() - before <= kept + 2 * peak + 2**22


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
def test_more_than_two_to_the_31_elements(dtype):
    """Only the last tokens have a gradient, so that the weights' gradients, too, are those of the last tokens alone."""
    N, K, X, C, F, last = 2**17 + 5, 8, 12, 2056, 1032, 40
    assert N * K * C > 2**31
    assert N * K * 2 * F > 2**31
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", dtype=dtype)
    inputs = [draw(N, C), draw(N, K).abs().float(), draw(X, 2 * F, C) / C**0.5, draw(X, C, F) / F**0.5]
    experts, dy = choose(N, K, X).cuda(), draw(N, C)
    dy[:-last] = 0
    for recompute in (False, True):
        got = run(with_experts(moe_mlp, experts, recompute=recompute), inputs, [dy])
        ends = [inputs[0][-last:], inputs[1][-last:], *inputs[2:]]
        want = run(with_experts(moe_mlp_reference, experts[-last:]), ends, [dy[-last:]])
        for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            if index < 3:
                assert index == 0 or not ours[:-last].any()
                ours = ours[-last:]
            assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm(), index
        del got, want


@pytest.mark.gpu
def test_on_a_device_that_is_not_the_current_one():
    device = f"cuda:{torch.cuda.device_count() - 1}"
    (x, _, *matrices), _, dy = make((30, 2, 4, 64, 48), torch.bfloat16, device)
    inputs, upstream = [x, gate(4, 64, device), *matrices], [dy, torch.ones((), device=device)]
    with reference_backend():
        want = run(layer, inputs, upstream)
    for ours, theirs in zip(run(layer, inputs, upstream), want, strict=True):
        assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()


def test_bad_arguments():
    ones = torch.ones
    experts = torch.zeros(2, 3, dtype=torch.int64)
    good = {
        "x": ones(2, 4), "weights": ones(2, 3), "experts": experts, "gate_up_weight": ones(5, 6, 4),
        "down_weight": ones(5, 4, 3),
    }  # fmt: skip

    def bad(error, match, **changes):
        with pytest.raises(error, match=match):
            moe_mlp(**{**good, **changes})

    moe_mlp(**good)
    bad(ValueError, r"x must be \[N, C\], got \[4\]", x=ones(4))
    bad(ValueError, r"weights and experts must be \[2, K\], got \[3, 3\] and \[2, 3\]", weights=ones(3, 3))
    bad(ValueError, r"got \[2, 0\] and \[2, 0\]", weights=ones(2, 0), experts=experts[:, :0])
    bad(ValueError, r"gate_up_weight must be \[X, 2 F, 4\], got \[5, 6, 3\]", gate_up_weight=ones(5, 6, 3))
    bad(ValueError, r"gate_up_weight must be \[X, 2 F, 4\], got \[5, 7, 4\]", gate_up_weight=ones(5, 7, 4))
    bad(ValueError, r"down_weight must be \[5, 4, 3\], got \[5, 4, 6\]", down_weight=ones(5, 4, 6))
    bad(ValueError, r"act must be one of silu, gelu_tanh, gelu, clamped_swiglu, relu2, got 'relu'", act="relu")
    bad(ValueError, r"limit must be positive with act='clamped_swiglu', got 0.0", act="clamped_swiglu")
    bad(ValueError, r"gate_up_bias must be \[5, 6\], got \[5, 3\]", gate_up_bias=ones(5, 3))
    bad(ValueError, r"down_bias must be \[5, 4\], got \[4\]", down_bias=ones(4))
    bad(TypeError, r"must have one dtype, got torch.float32 and torch.float16", down_weight=ones(5, 4, 3).half())
    bad(TypeError, r"experts must be int64, got torch.int32", experts=experts.int())
    bad(TypeError, r"x must be a floating-point tensor, got torch.int64", x=ones(2, 4).long())
    many = torch.empty(2**16, 2, 1, device="meta"), torch.empty(2**16, 1, 1, device="meta")
    bad(ValueError, r"at most 32767 experts .* got 65536", x=ones(2, 1), gate_up_weight=many[0], down_weight=many[1])
