import pytest
import torch

from liger_models.kernels.moe import Routing, route, route_reference

from ...late import transformers
from ..oracle import assert_close_to_truth, opcheck
from .cases import dtypes

SHAPES = [(1, 1, 1), (19, 8, 2), (4, 21, 8), (2, 300, 6), (4, 6, 6)]  # N, X, K
FORMS = [
    {},
    {"normalize": True},
    {"round_weights": True, "score": "sigmoid"},
    {"normalize": True, "round_weights": True},
    {"normalize": True, "score": "sigmoid", "scale": 2.5, "epsilon": 0.5},
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
GROUPED = [
    ((19, 8, 2), {"groups": 2, "top_groups": 1}),
    ((5, 60, 6), {"groups": 3, "top_groups": 2, "group_score": "top2", "score": "sigmoid", "normalize": True}),
    ((3, 24, 4), {"groups": 4, "top_groups": 3, "group_score": "top2", "normalize": True, "scale": 0.5}),
    ((3, 256, 8), {"groups": 8, "top_groups": 4, "score": "sigmoid"}),
]
every_grouped = pytest.mark.parametrize(("shape", "form"), GROUPED, ids=str)


def distinct_logits(N, X, dtype, device):
    """Logits that stay different when rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(X, generator=generator) - X // 2 for _ in range(N)]).div(20).to(device, dtype)


@pytest.mark.cases(30)
@every_form
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_matches_fp64(backend, shape, biased, form, many_blocks, poisoned_empty):
    N, X, K = shape
    assert_matches_fp64(backend, N, X, Routing(K, **form), biased)


@pytest.mark.cases(12)
@every_grouped
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_groups_match_fp64(backend, shape, biased, form, many_blocks, poisoned_empty):
    N, X, K = shape
    routing = Routing(K, **form)
    assert_matches_fp64(backend, N, X, routing, biased)
    # No token has experts from more groups than allowed, and another number of groups allows other experts.
    logits = distinct_logits(N, X, torch.float32, backend)
    chosen = [route(logits, other)[1] for other in (routing, routing._replace(groups=1))]
    groups = chosen[0] // (X // routing.groups)
    assert all(len(set(row)) <= routing.top_groups for row in groups.tolist())
    assert not torch.equal(*chosen)


def assert_matches_fp64(device, N, X, routing, biased):
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(N, routing.top_k, generator=generator).to(device)
    bias = (torch.randperm(X, generator=generator) / (3 * X)).to(device) if biased else None
    for dtype in dtypes(device):
        logits = distinct_logits(N, X, dtype, device)
        weights, experts = route(logits, routing, bias)
        assert weights.dtype == torch.float32
        # Choice scores may be equal in fp32 where they differ in fp64.
        wide = route_reference(logits.double(), routing, bias)[1]
        scores = logits.double().softmax(-1) if routing.score == "softmax" else logits.double().sigmoid()
        choice = scores if bias is None else scores + bias
        torch.testing.assert_close(choice.gather(1, experts), choice.gather(1, wide), rtol=1e-6, atol=1e-7)
        given = experts.short()  # so that the order of equals does not matter
        ours, plain = (
            (lambda t, f=f, g=given: f(t, routing, None if bias is None else bias.to(t.device), g.to(t.device))[0])
            for f in (route, route_reference)
        )
        assert_close_to_truth(ours, plain, [logits], [upstream])
        assert torch.equal(route(logits, routing, bias, given)[0], weights)


def test_a_bias_takes_part_in_the_choice_alone(backend):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=backend)
    bias = torch.tensor([10.0, 0.0, 5.0, 0.0], device=backend)
    for score in ("softmax", "sigmoid"):
        routing = Routing(2, score=score)
        weights, experts = route(logits, routing, bias)
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        assert experts.tolist() == [[0, 2]]
        torch.testing.assert_close(weights, scores[:, [0, 2]])


@pytest.mark.cases(23)
@every_form
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given_experts_are_taken(backend, shape, form, many_blocks, poisoned_empty):
    """Of every second token, in the given order; the others get their own choice."""
    (N, X, K), routing = shape, Routing(shape[2], **form)
    generator = torch.Generator().manual_seed(2)
    given = torch.stack([torch.randperm(X, generator=generator)[:K] for _ in range(N)]).to(backend, torch.int16)
    given[1::2] = -1
    upstream = torch.randn(N, K, generator=generator).to(backend)
    for dtype in dtypes(backend):
        logits = distinct_logits(N, X, dtype, backend)
        weights, experts = route(logits, routing, given=given)
        free, own = route(logits, routing)
        assert experts.dtype == torch.int64
        assert torch.equal(experts[::2], given[::2].long())
        assert torch.equal(experts[1::2], own[1::2])
        assert torch.equal(weights[1::2], free[1::2])
        scores = logits.double().softmax(-1) if routing.score == "softmax" else logits.double().sigmoid()
        want = scores.gather(1, experts)
        want = want / (want.sum(1, keepdim=True) + routing.epsilon) if routing.normalize else want
        want = want * routing.scale
        want = (want.to(dtype) if routing.round_weights else want).float()
        torch.testing.assert_close(weights, want, rtol=1e-2, atol=1e-6)
        ours, plain = (
            (lambda t, f=f: f(t, routing, given=given.to(t.device))[0]) for f in (route, route_reference)
        )  # fmt: skip
        assert_close_to_truth(ours, plain, [logits], [upstream])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_own_choice_given_back_changes_no_bit(backend, score):
    generator = torch.Generator().manual_seed(0)
    logits, upstream = (torch.randn(9, n, generator=generator).to(backend) for n in (6, 3))

    def run(given):
        leaf = logits.clone().requires_grad_()
        weights, experts = route(leaf, Routing(3, normalize=True, score=score), given=given)
        weights.backward(upstream)
        return weights, experts, leaf.grad

    free = run(None)
    assert all(map(torch.equal, run(free[1]), free))


def test_route_of_strided_logits_and_gradients(backend):
    logits = torch.randn(12, 18, generator=torch.Generator().manual_seed(0)).to(backend)
    ours, plain = ((lambda t, f=f: f(t, Routing(3))[0]) for f in (route, route_reference))
    upstream = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(backend).t()
    for strided in (logits[::2, ::2], logits[:9, :6].t()):
        for gradient in (upstream, upstream[:1].expand(6, 3), upstream[:1, :1].expand(6, 3)):
            assert_close_to_truth(ours, plain, [strided], [gradient])


def test_route_of_no_token(backend):
    logits = torch.zeros(0, 5, device=backend, requires_grad=True)
    weights, experts = route(logits, Routing(2, normalize=True))
    assert weights.shape == experts.shape == (0, 2)
    weights.sum().backward()
    assert logits.grad.shape == (0, 5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "form",
    [{}, {"normalize": True}, {"score": "sigmoid"}, {"groups": 2, "top_groups": 1}, {"score": "sparsemixer"}],
    ids=str,
)
def test_route_always_chooses_different_experts(kernel_device, form):
    """Also of equal logits, of infinite ones and of NaN: a wrong index would be a wrong address."""
    inf, nan = float("inf"), float("nan")
    rows = [[0.0] * 6, [-inf] * 6, [nan] * 6, [inf] * 6, [0.0, -inf, -inf, -inf, -inf, -inf], [-0.0, 0.0, nan, 1, 2, 3]]
    weights, experts = route(torch.tensor(rows, device=kernel_device), Routing(3, **form))
    assert all(len(set(chosen)) == 3 and set(chosen) <= set(range(6)) for chosen in experts.tolist())
    assert experts[0].tolist() == [0, 1, 2]  # of equals the first
    assert weights[2].isnan().all()
    if "groups" not in form:
        assert experts[5].tolist() == [2, 5, 4]
    if "score" not in form:
        torch.testing.assert_close(weights[4], torch.tensor([1.0, 0.0, 0.0], device=kernel_device))


MIXER = {"score": "sparsemixer", "tolerance": 0.02}
"""The routing of Phi-3.5-MoE."""


def mixer_logits(N, X, dtype, device):
    """Logits of both signs, many of them within the tolerance of the largest, and different when rounded to bf16."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.stack([torch.randperm(X, generator=generator) for _ in range(N)]).float()
    return ((steps - X / 2) / 128 + torch.tensor([1.0, -1.0, 0.0, 3.0]).repeat(N)[:N, None]).to(device, dtype)


@pytest.mark.cases(20)
@pytest.mark.parametrize("options", [{}, {"tolerance": 0.5, "scale": 2.5}, {"round_weights": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sparsemixer_matches_fp64(backend, shape, options, many_blocks, poisoned_empty):
    """Also for given experts in an order that the router would not choose."""
    (N, X, K), routing = shape, Routing(shape[2], **{**MIXER, **options})
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(N, K, generator=generator).to(backend)
    other = torch.stack([torch.randperm(X, generator=generator)[:K] for _ in range(N)]).to(backend, torch.int16)
    other[1::3] = -1
    for dtype in dtypes(backend):
        logits = mixer_logits(N, X, dtype, backend)
        weights, experts = route(logits, routing)
        wide = route_reference(logits.double(), routing._replace(round_weights=False))
        assert torch.equal(experts, wide[1])
        assert torch.equal(experts[:, 0], logits.argmax(1))
        torch.testing.assert_close(weights.double(), wide[0], rtol=1e-2 if routing.round_weights else 1e-5, atol=1e-6)
        assert torch.equal(route(logits, routing, given=other)[1][::3], other[::3].long())
        for given in (None, experts, other):
            ours, plain = (
                (lambda t, f=f, g=given: f(t, routing, None, None if g is None else g.to(t.device))[0])
                for f in (route, route_reference)
            )
            assert_close_to_truth(ours, plain, [logits], [upstream])
        assert torch.equal(route(logits, routing, given=experts)[0], weights)


def test_sparsemixer_is_that_of_transformers(backend):
    """Experts, weights and gradients of both choices; of logits near each other, far from each other, and negative."""
    sparsemixer = transformers.models.phimoe.modeling_phimoe.sparsemixer
    logits = (
        torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.02, 1.0]).repeat(32)[:, None]
    )
    logits = torch.cat([logits, logits - 1, logits + 1])
    upstream = torch.randn(len(logits), 2, generator=torch.Generator().manual_seed(1))
    wide = logits.double().requires_grad_()
    want, chosen = sparsemixer(wide, jitter_eps=0.01, training=False)
    want.backward(upstream.double())
    leaf = logits.to(backend).requires_grad_()
    weights, experts = route(leaf, Routing(2, **MIXER))
    weights.backward(upstream.to(backend))
    assert torch.equal(experts.cpu(), chosen)
    torch.testing.assert_close(weights.cpu().double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.cpu().double(), wide.grad, rtol=1e-4, atol=1e-6)
    assert ((want > 0.999).any(1) & (want.sum(1) > 1.999)).any()  # far from each other: the weights are not shares of 1
    assert (want[:, 0] < 0.5).any()


def test_a_given_expert_has_a_weight_however_far_its_logit_is(backend):
    """Its softmax is over itself and the experts near the largest; without it the gradient would vanish."""
    logits = torch.tensor([[5.0, 4.99, 1.0, 0.0]], device=backend, requires_grad=True)
    weights, _ = route(logits, Routing(2, **MIXER), given=torch.tensor([[2, 0]], device=backend))
    kept = torch.tensor([5.0, 4.99, 1.0]).softmax(0)
    torch.testing.assert_close(weights[0].cpu(), torch.stack([kept[2], torch.tensor([5.0, 4.99]).softmax(0)[0]]))
    weights[:, 0].sum().backward()
    assert logits.grad[0, 2] > 0
    assert logits.grad[0, 3] == 0


@pytest.mark.parametrize("form", [FORMS[1], GROUPED[2][1]], ids=str)
def test_route_opcheck(kernel_device, form):
    logits = distinct_logits(7, 12, torch.float16, kernel_device).requires_grad_()
    ops, routing, bias = torch.ops.liger_models, Routing(3, **form), torch.rand(12, device=kernel_device)
    given = torch.arange(21, device=kernel_device).view(7, 3) % 12
    opcheck(ops.route, (logits, None, None, *routing))
    opcheck(ops.route, (logits, bias, given, *routing))
    weights, experts = route(logits.detach(), routing)
    fields = routing.normalize, routing.score, routing.scale, routing.epsilon, routing.tolerance
    opcheck(ops.route_backward, (weights, logits.detach(), experts, *fields))


@pytest.mark.parametrize("form", [*FORMS, MIXER], ids=str)
def test_the_reference_in_fp64(form):
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    routing = Routing(2, **{**form, "round_weights": False})
    torch.autograd.gradcheck(lambda t: route_reference(t, routing)[0], [logits])


@pytest.mark.compile
def test_the_number_of_experts_may_be_symbolic():
    compiled = torch.compile(lambda t, k: route(t, Routing(k, normalize=True)), fullgraph=True, backend="eager")
    for top_k in (2, 3):
        logits = torch.randn(4, 8)
        torch.testing.assert_close(compiled(logits, top_k), route(logits, Routing(top_k, normalize=True)))


def test_bad_arguments():
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=rf"top_k must be in 1 to 4 \(the number of experts\), got {top_k}"):
            route(torch.ones(2, 4), Routing(top_k))
    with pytest.raises(ValueError, match=r"logits must be \[N, X\], got \[4\]"):
        route(torch.ones(4), Routing(1))
    with pytest.raises(TypeError, match=r"logits must be a floating-point tensor"):
        route(torch.zeros(2, 3, dtype=torch.int64), Routing(1))
    with pytest.raises(ValueError, match=r"bias must be \[4\], one number for each expert, got \[3\]"):
        route(torch.ones(2, 4), Routing(1), torch.ones(3))
    for given in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"given must be \[2, 1\] integers, got \[2, .\] .*recorded with these"):
            route(torch.ones(2, 4), Routing(1), given=given)
    for wrong in ([[0, 4]], [[0, -1]]):
        with pytest.raises(ValueError, match="given must name experts below 4, or begin with a negative number"):
            route(torch.ones(1, 4), Routing(2), given=torch.tensor(wrong))
    for form, message in (
        ({"score": "tanh"}, "score must be 'softmax', 'sigmoid' or 'sparsemixer', got 'tanh'"),
        ({"score": "sparsemixer", "normalize": True}, "normalize must be False and groups 1 .*, got True and 1"),
        ({"score": "sparsemixer", "groups": 2, "top_groups": 2}, "groups 1 .*, got False and 2"),
        ({"group_score": "mean"}, "group_score must be 'max' or 'top2', got 'mean'"),
        ({"groups": 3}, "groups must divide the 4 experts, .* got groups 3 and top_groups 1"),
        ({"groups": 2, "top_groups": 3}, "top_groups must be in 1 to groups, got groups 2 and top_groups 3"),
        ({"groups": 4, "top_groups": 1}, "1 groups of 1 experts must hold top_k experts, .* got top_k 2"),
        ({"groups": 4, "top_groups": 4, "group_score": "top2"}, "two each for the group score 'top2'"),
    ):
        with pytest.raises(ValueError, match=message):
            route(torch.ones(2, 4), Routing(2, **form))
    with pytest.raises(ValueError, match="bias must be None with the score 'sparsemixer', got a bias"):
        route(torch.ones(2, 4), Routing(2, score="sparsemixer"), torch.zeros(4))
