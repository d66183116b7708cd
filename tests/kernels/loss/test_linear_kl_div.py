import pytest
import torch

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss.linear_kl_div import linear_kl_div, linear_kl_div_reference

from ..oracle import assert_close_to_truth, opcheck, run
from .test_divergence import N, V, draw, student, targets

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.0, "reduction": "mean"},
    "caps": {"softcap": 3.0, "logit_scale": 1.5, "temperature": 0.5, "reduction": "sum", "eps": 1e-2},
}


@pytest.fixture
def four_rows_a_chunk(monkeypatch):
    monkeypatch.setattr("liger_models.kernels.loss.linear_kl_div.chunk_rows", lambda *_, **__: 4)


def stored(rows=N, scale=1.0):
    """Probabilities [rows, V]; some are 0, those of a few rows do not sum to 1, and one row has a single word."""
    p = (2 * draw(rows, V, seed=4)).softmax(-1)
    p[::2, 3:9] = 0
    p[2::5] *= scale
    p[4:5] = torch.eye(V)[7]
    return p


def of(function, target=None, p=None, **options):
    def loss(x, w, b):
        probabilities = (stored(len(x), 0.7) if p is None else p).to(x.device)
        return function(x, w, probabilities, None if target is None else target.to(x.device), bias=b, **options)

    return loss


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ignored", [False, True])
def test_matches_fp64(backend, options, ignored, poisoned_empty, four_rows_a_chunk):
    upstream = [torch.tensor(0.37, device=backend)]
    target = targets() if ignored else None
    for dtype in (torch.float32, torch.float16):
        ours, theirs = (of(f, target, **options) for f in (linear_kl_div, linear_kl_div_reference))
        # half precision: the reference's own gradient is rounded once, ours also before the products
        factor = 1.5 if dtype == torch.float32 else 3.0
        assert_close_to_truth(ours, theirs, student(backend, dtype), upstream, factor)


def test_the_reference_is_torchs():
    x, w, b = (t.double() for t in student())
    p = stored().double()
    log_q = (torch.nn.functional.linear(x, w, b) / 1.7).log_softmax(-1)
    total = torch.nn.functional.kl_div(log_q, p, reduction="sum")
    for reduction, want in {"sum": total, "batchmean": total / N, "mean": total / (N * V)}.items():
        got = linear_kl_div_reference(x, w, p, bias=b, temperature=1.7, reduction=reduction)
        torch.testing.assert_close(got, want)


def test_gradcheck_in_fp64(four_rows_a_chunk):
    with reference_backend():
        leaves = [t.double().requires_grad_() for t in student(rows=5)]
        torch.autograd.gradcheck(of(linear_kl_div, targets(5), temperature=0.8, softcap=3.0), leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_probabilities_of_any_dtype_and_layout(backend, dtype):
    p = stored().to(backend, dtype)
    leaves = student(backend)
    want = of(linear_kl_div_reference, p=p.double())(*(t.double() for t in leaves))
    for layout in (p, p.t().contiguous().t(), torch.cat([p, p], -1)[:, :V]):
        torch.testing.assert_close(of(linear_kl_div, p=layout)(*leaves).double(), want, rtol=1e-5, atol=1e-6)


def test_words_that_the_student_rules_out(backend):
    """A logit of −inf where p is 0 counts for nothing; where p is not, the divergence is enormous."""
    x, w, b = student(backend)
    b[3], p = float("-inf"), stored()
    p[:, 3] = 0
    x.requires_grad_()
    loss = of(linear_kl_div, p=p)(x, w, b)
    keep = [i for i in range(V) if i != 3]
    want = of(linear_kl_div_reference, p=p[:, keep])(x, w[keep], b[keep])
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (loss, want)))


def test_a_student_that_is_the_teacher(backend):
    x, w, b = (t.requires_grad_() for t in student(backend))
    p = torch.nn.functional.linear(x, w, b).detach().softmax(-1)
    loss = linear_kl_div(x, w, p, bias=b)
    assert loss.abs() < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in torch.autograd.grad(loss, (x, w, b)))


def test_no_rows_and_ignored_rows(backend):
    for rows in (0, 3):
        x, w, b = (t.requires_grad_() for t in student(backend, rows=rows))
        loss = of(linear_kl_div, torch.full((rows,), -100), p=torch.rand(rows, V))(x, w, b)
        loss.backward()
        assert loss == 0
        assert all(t.grad.eq(0).all() for t in (x, w, b))


def test_frozen_parts_and_a_second_backward(backend):
    x, w, b = (t.requires_grad_() for t in student(backend))
    p = stored().to(backend).requires_grad_()
    loss = linear_kl_div(x, w, p, bias=b)
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    *second, of_p = torch.autograd.grad(loss, (x, w, b, p), allow_unused=True)
    torch.testing.assert_close(tuple(second), first)
    assert of_p is None
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, w, b))]
        of(linear_kl_div, targets())(*leaves).backward()
        assert [t.grad is not None for t in leaves] == [i != frozen for i in range(3)]
    with torch.no_grad():
        assert not of(linear_kl_div)(x, w, b).requires_grad


def test_batched_shapes_and_autocast(backend):
    x, w, b = student(backend, rows=12)
    p, target = stored(12).to(backend), targets(12).to(backend)
    flat = linear_kl_div(x, w, p, target, bias=b)
    args = x.view(3, 4, -1), w, p.view(3, 4, V), target.view(3, 4)
    torch.testing.assert_close(linear_kl_div(*args, bias=b), flat)
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        torch.testing.assert_close(linear_kl_div(*args, bias=b), flat, rtol=2e-2, atol=2e-2)


def test_op_is_registered_in_full():
    x, w, b = (t.requires_grad_() for t in student())
    args = (x, w, targets(), b, stored(), torch.rand(N), 2.0, 1e-10, -100, 3.0, 1.0, 4, True, True, True)
    opcheck(torch.ops.liger_models.linear_kl_div, args)


@pytest.mark.compile
def test_compiled():
    p, target = stored(), targets()
    function = lambda x, w, b: linear_kl_div(x, w, p, target, bias=b, temperature=2.0)
    upstream = [torch.tensor(0.37)]
    want = run(function, student(), upstream)
    got = run(torch.compile(function, fullgraph=True, backend="aot_eager"), student(), upstream)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"reduction": "none"}, ValueError),
        ({"temperature": 0.0}, ValueError),
        ({"eps": 0.0}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"workspace_mib": 0}, ValueError),
        ({"probabilities": stored(N + 1)}, ValueError),
        ({"probabilities": stored()[:, 1:]}, ValueError),
        ({"probabilities": stored().long()}, TypeError),
        ({"bias": draw(V + 1)}, ValueError),
        ({"bias": draw(V).double()}, TypeError),
        ({"target": targets()[1:]}, ValueError),
    ],
)
def test_wrong_arguments(change, error):
    x, w, _ = student()
    with pytest.raises(error, match="linear_kl_div"):
        linear_kl_div(**{"x": x, "weight": w, "probabilities": stored(), **change})


@pytest.mark.gpu
def test_memory_stays_within_the_workspace():
    N, V, C, budget = 8192, 128256, 1024, 1024
    x, w = (torch.randn(n, C, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (N, V))
    p = torch.rand(N, V, device="cuda", dtype=torch.bfloat16) / V
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_kl_div(x, w, p, workspace_mib=budget)
    held = x.numel() * 2 + w.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= held + (budget + 300) * 2**20
    assert loss.isfinite()
