import pytest
import torch

from liger_models.kernels.frozen.products import dense
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.low_rank_linear import (
    BACKWARD,
    FORWARD,
    LowRankLinearGradients,
    LowRankLinearInputs,
    LowRankLinearSaved,
    LowRankLinearUpstream,
    low_rank_linear,
)
from liger_models.kernels.linear.projection import Projection, ProjectionGradients, linear
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.row_linear import MOST_RANKS

from ...late import Late
from ..frozen.test_nf4_linear import unrounded
from ..frozen.test_weight import blocks, draw
from ..oracle import assert_close_to_truth, opcheck_named, run

quantization = Late("torchao.quantization", "4-bit weights need torchao")

KINDS = pytest.mark.parametrize("kind", ["dense", "float8", "blocks", "nf4"])


def make(kind, rows, R, device, dtype, shape=(20, 128)):
    """x, W, bias and the low-rank pair; W as its kernel multiplies it, in fp64."""
    (N, K), options = shape, {"device": device, "dtype": dtype}
    x, weight, A = (draw(*size, **options) / K**0.5 for size in ((rows, 1, K), (N, K), (R, K)))
    exact, low_rank = weight.double(), (A, draw(N, R, **options) / (8 * R))
    if kind == "nf4":
        stored = quantization.to_nf4(weight, 64, 1)
        weight, exact = FrozenWeight.of(stored), unrounded(stored)
    elif kind == "blocks":
        weight = blocks(N, K, device=device, dtype=dtype, width=32)
        exact = dense(weight.to(torch.float32)).double()
    elif kind == "float8":
        weight = FrozenWeight.of(quantization.Float8Tensor.from_hp(weight))
        exact = weight.codes.double() * weight.scales.double()[:, None]
    return (x, weight, draw(N, **options), low_rank), exact


def terms(x, W, bias, low_rank):
    """The exact result, the sum of the magnitudes in it, and that of the low-rank term's in its second product."""
    x, b, (A, B) = x.double(), bias.double(), [each.double() for each in low_rank]
    low = x @ A.T
    magnitudes = x.abs() @ W.abs().T + b.abs() + x.abs() @ A.abs().T @ B.abs().T
    return x @ W.T + b + low @ B.T, magnitudes, low.abs() @ B.abs().T


@pytest.mark.cases(4)
@pytest.mark.parametrize("R", [3, 48])
@KINDS
def test_few_rows_are_rounded_once(kernel_device, kind, R, poisoned_empty):
    """The term is added before the result is rounded: only x @ Aᵀ and y are, and sums are in fp32."""
    for dtype in (torch.float16, torch.bfloat16) if kernel_device == "cuda" else (torch.float16,):
        for rows in (1,) if kind == "dense" else (1, 3, 32):
            (x, weight, bias, low_rank), exact = make(kind, rows, R, kernel_device, dtype)
            want, magnitudes, low = terms(x, exact, bias, low_rank)
            error = (low_rank_linear(x, weight, bias, low_rank).double() - want).abs()
            assert (error <= torch.finfo(dtype).eps / 2 * (want.abs() + low) + 2e-6 * magnitudes + 1e-7).all()


@KINDS
def test_matches_fp64(backend, kind):
    """Single rows in fp32; more rows or ranks than the kernels take; no rows."""
    for rows, R in ((1, 5), (1, MOST_RANKS + 1), (33, 5), (0, 5)):
        (x, weight, bias, low_rank), exact = make(kind, rows, R, backend, torch.float32)
        want, magnitudes, _ = terms(x, exact, bias, low_rank)
        y = low_rank_linear(x, weight, bias, low_rank)
        assert y.shape == want.shape
        assert ((y.double() - want).abs() <= 2e-6 * magnitudes).all()


@pytest.mark.parametrize("many_rows", [1, 1024])
@KINDS
def test_gradients_match_fp64(backend, kind, many_rows, monkeypatch, poisoned_empty):
    """With few rows and with many, for which the forward keeps x @ Aᵀ."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
    (x, weight, bias, low_rank), exact = make(kind, 33, 5, backend, torch.float32)
    inputs = [x, bias, *low_rank]
    dy = draw(33, 1, 20, device=backend, dtype=torch.float32)
    ours = lambda x, bias, A, B: low_rank_linear(x, weight, bias, (A, B))
    theirs = lambda x, bias, A, B: linear(x, exact.to(x), bias, (A, B))
    assert_close_to_truth(ours, theirs, inputs, [dy])
    if kind == "dense":  # a trained weight
        ours, theirs = (
            lambda x, bias, A, B, W, function=function: function(x, W, bias, (A, B))
            for function in (low_rank_linear, linear)
        )
        assert_close_to_truth(ours, theirs, [*inputs, weight], [dy])


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (3,), (0, 3)], ids=str)
def test_only_needed_gradients_are_computed(kernel_device, trained, monkeypatch):
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    (x, weight, bias, low_rank), _ = make("dense", 5, 4, kernel_device, torch.float32)
    call = lambda x, bias, A, B: low_rank_linear(x, weight, bias, (A, B))
    inputs = [x, bias, *low_rank]
    dy = torch.randn(5, 1, 20, device=kernel_device)
    everything = run(call, inputs, [dy])[1:]
    leaves = [tensor.clone().requires_grad_(i in trained) for i, tensor in enumerate(inputs)]
    call(*leaves).backward(dy)
    for i, leaf in enumerate(leaves):
        assert torch.equal(leaf.grad, everything[i]) if i in trained else leaf.grad is None


@KINDS
def test_bits_do_not_depend_on_the_batch(backend, kind):
    (x, *others), _ = make(kind, 3, 5, backend, torch.float16)
    with batch_invariant():
        want = linear(x, *others)
        for rows in (slice(1), slice(None)):
            assert torch.equal(low_rank_linear(x[rows], *others), want[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
@KINDS
def test_real_sizes(kind, shape):
    for rows in (1, 2, 16, 32):
        (x, weight, bias, (A, B)), exact = make(kind, rows, 48, "cuda", torch.bfloat16, shape)
        B = B * 8 * 48
        want, _, _ = terms(x, exact, bias, (A, B))
        for _ in range(20):  # two kernels overlap
            assert (low_rank_linear(x, weight, bias, (A, B)).double() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_opcheck(kernel_device, kind):
    (x, weight, bias, low_rank), _ = make(kind, 3, 4, kernel_device, torch.float32)
    projection = Projection(weight, bias, low_rank)
    for keeps_low in (False, True):
        opcheck_named(FORWARD, LowRankLinearInputs(x, projection, keeps_low))
        every = ProjectionGradients(False, True, True, True)
        low = x.flatten(0, -2) @ low_rank[0].t() if keeps_low else None
        saved = LowRankLinearSaved(x, projection.without_bias(), low, x.dtype)
        for needs in (LowRankLinearGradients(True, every), LowRankLinearGradients(False, every._replace(bias=False))):
            opcheck_named(BACKWARD, LowRankLinearUpstream(torch.randn(3, 1, 20, device=x.device), saved, needs))


@pytest.mark.compile
def test_a_compiled_graph_serves_several_numbers_of_rows(kernel_device, monkeypatch):
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 4)
    (x, weight, bias, low_rank), _ = make("dense", 9, 4, kernel_device, torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(low_rank_linear, fullgraph=True, backend=backend)
    for rows in (5, 6, 7, 8, 9):
        torch.testing.assert_close(
            compiled(x[:rows], weight, bias, low_rank), low_rank_linear(x[:rows], weight, bias, low_rank)
        )
    assert len(graphs) == 2  # for one number, and then for any number


def test_bad_arguments():
    (x, weight, bias, (A, B)), _ = make("dense", 1, 4, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"low_rank_linear: weight must be \[out, 128\], got \[20, 127\]"):
        low_rank_linear(x, weight[:, 1:], bias, (A, B))
    with pytest.raises(ValueError, match=r"low_rank must be A \[R, 128\] and B \[20, R\], got \[3, 128\]"):
        low_rank_linear(x, weight, bias, (A[1:], B))
    with pytest.raises(TypeError, match=r"low_rank must have the weight's dtype, torch.float32, got torch.float16"):
        low_rank_linear(x, weight, bias, (A.half(), B))
