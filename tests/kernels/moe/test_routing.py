import pytest
import torch

from liger_models.kernels.moe import route, route_reference

from ..oracle import assert_close_to_truth, opcheck
from .cases import dtypes

SHAPES = [(1, 1, 1), (19, 8, 2), (4, 21, 8), (2, 300, 6), (4, 6, 6)]  # N, X, K
FLAGS = pytest.mark.parametrize(
    ("normalize", "round_weights"), [(True, False), (False, False), (True, True), (False, True)]
)


def distinct_logits(N, X, dtype, device):
    """Logits that stay different when rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(X, generator=generator) - X // 2 for _ in range(N)]).div(20).to(device, dtype)


@FLAGS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_matches_fp64(backend, shape, normalize, round_weights, many_blocks, poisoned_empty):
    N, X, K = shape
    upstream = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(backend)
    for dtype in dtypes(backend):
        logits = distinct_logits(N, X, dtype, backend)
        weights, experts = route(logits, K, normalize, round_weights)
        assert weights.dtype == torch.float32
        assert torch.equal(experts, route_reference(logits.double(), K, normalize)[1])
        ours, plain = ((lambda t, f=f: f(t, K, normalize, round_weights)[0]) for f in (route, route_reference))
        assert_close_to_truth(ours, plain, [logits], [upstream])


@FLAGS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given_experts_are_taken(backend, shape, normalize, round_weights, many_blocks, poisoned_empty):
    """Of every second token, in the given order; the others get their own choice."""
    N, X, K = shape
    generator = torch.Generator().manual_seed(2)
    given = torch.stack([torch.randperm(X, generator=generator)[:K] for _ in range(N)]).to(backend, torch.int16)
    given[1::2] = -1
    upstream = torch.randn(N, K, generator=generator).to(backend)
    for dtype in dtypes(backend):
        logits = distinct_logits(N, X, dtype, backend)
        weights, experts = route(logits, K, normalize, round_weights, given)
        free, own = route(logits, K, normalize, round_weights)
        assert experts.dtype == torch.int64
        assert torch.equal(experts[::2], given[::2].long())
        assert torch.equal(experts[1::2], own[1::2])
        assert torch.equal(weights[1::2], free[1::2])
        chosen = logits.double().softmax(-1).gather(1, experts)
        want = chosen / chosen.sum(1, keepdim=True) if normalize else chosen
        torch.testing.assert_close(weights, (want.to(dtype) if round_weights else want).float(), rtol=1e-2, atol=1e-6)
        ours, plain = (
            (lambda t, f=f: f(t, K, normalize, round_weights, given.to(t.device))[0]) for f in (route, route_reference)
        )  # fmt: skip
        assert_close_to_truth(ours, plain, [logits], [upstream])


def test_the_own_choice_given_back_changes_no_bit(backend):
    generator = torch.Generator().manual_seed(0)
    logits, upstream = (torch.randn(9, n, generator=generator).to(backend) for n in (6, 3))

    def run(given):
        leaf = logits.clone().requires_grad_()
        weights, experts = route(leaf, 3, True, False, given)
        weights.backward(upstream)
        return weights, experts, leaf.grad

    free = run(None)
    assert all(map(torch.equal, run(free[1]), free))


def test_route_of_strided_logits_and_gradients(backend):
    logits = torch.randn(12, 18, generator=torch.Generator().manual_seed(0)).to(backend)
    ours, plain = ((lambda t, f=f: f(t, 3, False)[0]) for f in (route, route_reference))
    upstream = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(backend).t()
    for strided in (logits[::2, ::2], logits[:9, :6].t()):
        for gradient in (upstream, upstream[:1].expand(6, 3), upstream[:1, :1].expand(6, 3)):
            assert_close_to_truth(ours, plain, [strided], [gradient])


def test_route_of_no_token(backend):
    logits = torch.zeros(0, 5, device=backend, requires_grad=True)
    weights, experts = route(logits, 2, True)
    assert weights.shape == experts.shape == (0, 2)
    weights.sum().backward()
    assert logits.grad.shape == (0, 5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("normalize", [True, False])
def test_route_always_chooses_different_experts(kernel_device, normalize):
    """Also of equal logits, of infinite ones and of NaN: a wrong index would be a wrong address."""
    inf, nan = float("inf"), float("nan")
    rows = [[0.0] * 6, [-inf] * 6, [nan] * 6, [inf] * 6, [0.0, -inf, -inf, -inf, -inf, -inf], [-0.0, 0.0, nan, 1, 2, 3]]
    weights, experts = route(torch.tensor(rows, device=kernel_device), 3, normalize)
    assert all(len(set(chosen)) == 3 and set(chosen) <= set(range(6)) for chosen in experts.tolist())
    assert experts[0].tolist() == [0, 1, 2]  # of equals the first
    assert experts[5].tolist() == [2, 5, 4]
    assert weights[2].isnan().all()
    torch.testing.assert_close(weights[4], torch.tensor([1.0, 0.0, 0.0], device=kernel_device))


@pytest.mark.parametrize(("normalize", "round_weights"), [(True, False), (False, True)])
def test_route_opcheck(kernel_device, normalize, round_weights):
    logits = distinct_logits(7, 10, torch.float16, kernel_device).requires_grad_()
    ops = torch.ops.liger_models
    opcheck(ops.route, (logits, 3, normalize, round_weights, None))
    opcheck(ops.route, (logits, 3, normalize, round_weights, torch.arange(21, device=kernel_device).view(7, 3) % 10))
    weights, experts = route(logits.detach(), 3, normalize, round_weights)
    opcheck(ops.route_backward, (weights, logits.detach(), experts, normalize))


def test_the_reference_in_fp64():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for normalize in (True, False):
        torch.autograd.gradcheck(lambda t, n=normalize: route_reference(t, 2, n)[0], [logits])


@pytest.mark.compile
def test_the_number_of_experts_may_be_symbolic():
    compiled = torch.compile(route, fullgraph=True, backend="eager")
    for top_k in (2, 3):
        logits = torch.randn(4, 8)
        torch.testing.assert_close(compiled(logits, top_k, normalize=True), route(logits, top_k, normalize=True))


def test_bad_arguments():
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=rf"top_k must be in 1 to 4 \(the number of experts\), got {top_k}"):
            route(torch.ones(2, 4), top_k, True)
    with pytest.raises(ValueError, match=r"logits must be \[N, X\], got \[4\]"):
        route(torch.ones(4), 1, True)
    with pytest.raises(TypeError, match=r"logits must be a floating-point tensor"):
        route(torch.zeros(2, 3, dtype=torch.int64), 1, True)
    for given in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"given must be \[2, 1\] integers, got \[2, .\] .*recorded with these"):
            route(torch.ones(2, 4), 1, True, given=given)
    for wrong in ([[0, 4]], [[0, -1]]):
        with pytest.raises(ValueError, match="given must name experts below 4, or begin with a negative number"):
            route(torch.ones(1, 4), 2, True, given=torch.tensor(wrong))
