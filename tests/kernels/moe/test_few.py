"""Few rows: the numbers of many rows, without a sort of the tokens where no gradient is needed."""

import pytest
import torch

from liger_models.kernels.frozen.products import dense
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.moe import experts as experts_module
from liger_models.kernels.moe import moe_mlp, moe_mlp_reference
from liger_models.kernels.moe.experts import INFERENCE, ExpertProjection, MoEInputs
from liger_models.kernels.moe.few import few_product, takes_few, takes_few_copies
from liger_models.kernels.moe.permutation import sort_by_expert

from ..oracle import opcheck_named, wide
from .cases import STORED, choose, dtypes, make, quantize, stored, with_biases, with_low_ranks, without_gates


def no_sort(monkeypatch):
    monkeypatch.setattr(experts_module, "sort_by_expert", lambda *_: pytest.fail("the tokens were sorted"))


KINDS = "dense", "nf4", "float8", "blocks"
SHAPES = (1, 3, 7, 64, 192), (3, 3, 7, 128, 64), (43, 3, 9, 64, 64)
EVEN = 1, 2, 3, 1024, 1024
"""Widths that whole steps of the kernel for a single row of dense matrices divide."""


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("shape", "kind"), [(EVEN, "dense"), *((shape, kind) for shape in SHAPES for kind in KINDS)], ids=str
)
def test_few_tokens_are_not_sorted(kernel_device, shape, kind, monkeypatch, poisoned_empty):
    """An expert has no copy, one, or more than a tile of them, among fewer or more than a program looks at first."""
    no_sort(monkeypatch)
    for dtype, act in zip(dtypes(kernel_device), ("clamped_swiglu", "silu", "gelu_tanh"), strict=False):
        inputs, experts, _ = make(shape, dtype, kernel_device, kind="some")
        biases = with_biases(inputs)[4:] if act == "clamped_swiglu" else []
        if act == "silu":
            act, inputs = "relu2", without_gates(inputs)
        matrices = [quantize(each, kind) for each in inputs[2:]]
        with torch.no_grad():
            got = moe_mlp(*inputs[:2], experts, *matrices, *biases, act=act, limit=0.75)
            x, weights, *others = map(wide, (*inputs[:2], *map(dense, matrices), *biases))
            want = moe_mlp_reference(x, weights, experts.cpu(), *others, act=act, limit=0.75)
        assert got.dtype == dtype
        assert (wide(got) - want).norm() <= (torch.finfo(dtype).eps + 1e-6) * want.norm()


@pytest.mark.parametrize("kind", ["dense", "float8", "blocks"])
def test_odd_sizes_an_expert_twice_and_strides(kernel_device, kind, monkeypatch, poisoned_empty):
    no_sort(monkeypatch)
    (x, weights, *matrices), experts, _ = make((9, 2, 5, 37, 21), torch.float32, kernel_device)
    experts[0], matrices = experts[1, 0], [quantize(each, kind) for each in matrices]
    t = lambda tensor: tensor.t().contiguous().t()
    for N in (1, 9):
        with torch.no_grad():
            got = moe_mlp(t(x[:N]), t(weights[:N]), t(experts[:N]), *matrices)
        torch.testing.assert_close(got, moe_mlp_reference(x[:N], weights[:N], experts[:N], *matrices))


@pytest.mark.parametrize("kind", KINDS)
def test_one_expert_has_most_copies(kernel_device, kind, monkeypatch, poisoned_empty):
    """More than a tile of them, among fewer copies than experts and among more."""
    no_sort(monkeypatch)
    for tokens, X in ((18, 40), (18, 5)):
        (x, weights, *matrices), _, _ = make((tokens, 2, X, 64, 64), torch.float32, kernel_device)
        experts = torch.stack([torch.full((tokens,), 3), torch.arange(tokens) % 3 + X % 3], 1).to(kernel_device)
        matrices = [quantize(each, kind) for each in matrices]
        with torch.no_grad():
            got = moe_mlp(x, weights, experts, *matrices)
            want = moe_mlp_reference(*map(wide, (x, weights)), experts.cpu(), *map(wide, map(dense, matrices)))
        assert (wide(got) - want).norm() <= 2e-6 * want.norm()


def test_what_is_sorted_nevertheless(kernel_device, monkeypatch):
    """Copies with adapters, of a step with gradients, or within `batch_invariant`."""
    monkeypatch.setattr(experts_module, "few_experts", lambda *_: pytest.fail("the tokens were not sorted"))
    inputs, experts, _ = make((3, 2, 3, 64, 64), torch.float32, kernel_device)
    x, weights, gate_up, down, A, B, *_ = with_low_ranks(inputs)
    moe_mlp(x, weights, experts, gate_up, down)
    with torch.no_grad():
        moe_mlp(x, weights, experts, gate_up, down, gate_up_low_rank=(A, B))
        with batch_invariant():
            moe_mlp(x, weights, experts, gate_up, down)


@pytest.mark.cases(2)
@pytest.mark.parametrize("rows", [1, 5, 43])
@pytest.mark.parametrize("few", [True, False])
def test_an_addend_gives_the_bits_of_an_addition(kernel_device, rows, few, monkeypatch, poisoned_empty):
    """With few copies and with sorted ones, in the dtype of the result and in another, and with gradients."""
    monkeypatch.setattr(experts_module, "takes_few_copies", lambda *_: few)
    for dtype in dtypes(kernel_device):
        inputs, experts, dy = make((rows, 3, 7, 37, 64), dtype, kernel_device, kind="some")
        for addend in (dy.t().contiguous().t(), dy.double().float()):
            with torch.no_grad():
                want = moe_mlp(*inputs[:2], experts, *inputs[2:]) + addend
                got = moe_mlp(*inputs[:2], experts, *inputs[2:], addend=addend)
                reference = moe_mlp_reference(*inputs[:2], experts, *inputs[2:]) + addend
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got, reference, rtol=4 * eps, atol=4 * eps * float(reference.abs().max()))
        x = inputs[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(moe_mlp(x, inputs[1], experts, *inputs[2:], addend=x).sum(), x)
        (plain,) = torch.autograd.grad(moe_mlp(x, inputs[1], experts, *inputs[2:]).sum(), x)
        torch.testing.assert_close(grad, plain + 1)
    with pytest.raises(ValueError, match=r"addend must be \[\d+, 37\], got \[37\]"):
        moe_mlp(*inputs[:2], experts, *inputs[2:], addend=addend[0])


@pytest.mark.parametrize("tokens", [1, 3])
def test_opcheck(kernel_device, tokens):
    (x, weights, *matrices), experts, _ = make((tokens, 2, 3, 64, 64), torch.float32, kernel_device)
    inputs = MoEInputs(x, weights, experts, *map(ExpertProjection, matrices), "silu", 0.0, False, None, 0.0)
    opcheck_named(INFERENCE, inputs)
    opcheck_named(INFERENCE, inputs._replace(addend=x + 1))


@pytest.mark.cases(18)
@STORED
@pytest.mark.parametrize("size", [(7, 33, 64), (3, 130, 192), (1, 16, 128), (2, 8, 72)], ids=str)
def test_few_sorted_rows(backend, size, kind, poisoned_empty):
    """Each row times the same numbers, whether its expert has none, one or more than a tile of rows."""
    X, _, C = size
    if kind in ("nf4", "mxfp4", "nvfp4") and C % 64:  # which the kernel does not take
        return
    for dtype in dtypes(backend):
        weight = stored(size, kind, backend, dtype)
        experts = choose(20, 1, X, "some") if X > 1 else torch.zeros(20, 1, dtype=torch.int64)
        order, _, ends = sort_by_expert(experts.to(backend), X)
        rows = torch.randn(20, C, generator=torch.Generator().manual_seed(1)).to(backend, dtype)
        matrices = weight.dense().double()[experts.view(-1).to(backend)[order.long()]]
        got = few_product(rows, weight, ends)
        want = torch.einsum("sc,soc->so", rows.double(), matrices)
        rounding = torch.finfo(dtype).eps * want.abs().max() + 1e-5
        assert (got.double() - want).abs().max() <= rounding


def test_what_the_kernels_take():
    weight = stored((4, 6, 64), "nf4")
    rows = torch.zeros(65, 64)
    assert takes_few(rows[:64], weight)
    assert not takes_few(rows, weight)
    assert not takes_few(rows[:64], weight.dense())
    assert not takes_few(rows[:1, :48], stored((4, 4, 48), "nf4"))
    assert takes_few(rows[:1, :48], stored((4, 4, 48), "float8"))
    for block, takes in ((8, False), (16, True), (24, False), (2048, False), (0, True)):
        matrices = stored((4, 4, 48), "blocks")._replace(layout=[block])
        assert takes_few(rows[:1, :48], matrices) == takes
    assert takes_few(rows, stored((5, 4, 64), "mxfp4"))
    assert not takes_few(rows[:1], stored((4, 4, 64), "mxfp4")._replace(layout=[8]))
    copies = torch.zeros(32, 2)
    assert takes_few_copies(copies, weight, weight.dense())
    assert not takes_few_copies(torch.zeros(33, 2), weight, weight)
    assert not takes_few_copies(copies[:0], weight, weight)
    assert not takes_few_copies(copies, weight, stored((4, 4, 48), "nf4"))
    with batch_invariant():  # a row's bits would depend on how many rows there are
        assert not takes_few(rows[:1], weight)
        assert not takes_few_copies(copies, weight, weight)
