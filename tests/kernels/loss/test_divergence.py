import pytest
import torch

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss.divergence import KINDS, linear_divergence, linear_divergence_reference

from ..oracle import assert_close_to_truth, opcheck, run

N, V, C, C_TEACHER = 11, 37, 8, 5
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "hard": {"hard_weight": 0.3, "soft_weight": 0.7, "temperature": 0.5},
    "caps": {
        "softcap": 3.0,
        "logit_scale": 1.5,
        "teacher_softcap": 4.0,
        "teacher_logit_scale": 0.5,
        "hard_weight": 1.0,
    },
}


@pytest.fixture
def four_rows_a_chunk(monkeypatch):
    """11 rows; of two chunks and then of one the gradients go through the products together."""
    monkeypatch.setattr("liger_models.kernels.loss.divergence.chunk_rows", lambda *_, **__: 4)
    monkeypatch.setattr("liger_models.kernels.loss.divergence.TOGETHER", 2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def student(device="cpu", dtype=torch.float32, rows=N):
    return [t.to(device, dtype) for t in (draw(rows, C), draw(V, C), draw(V))]


def teacher(x, rows=N):
    """Tensors beside x, [teacher_x, teacher_weight] and the bias as a keyword."""
    tensors = [t.to(x.device, x.dtype) for t in (draw(rows, C_TEACHER), draw(V, C_TEACHER), draw(V, seed=9))]
    return tensors[:2], {"teacher_bias": tensors[2]}


def targets(rows=N, ignore_index=-100):
    target = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(1))
    target[1::5] = ignore_index
    return target


def of(function, target, **options):
    def loss(x, w, b):
        positional, named = teacher(x, len(x))
        y = None if target is None else target.to(x.device)
        return function(x, w, *positional, y, bias=b, **named, **options).loss

    return loss


@pytest.mark.cases(19)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [*KINDS, "jsd 0.1", "jsd 0", "jsd 1"])
def test_matches_fp64(backend, kind, options, poisoned_empty, four_rows_a_chunk):
    name, _, beta = kind.partition(" ")
    options = {"divergence": name, "beta": float(beta or 0.5), **options}
    upstream = [torch.tensor(0.37, device=backend)]
    for dtype in (torch.float32, torch.float16):
        ours, theirs = (of(f, targets(), **options) for f in (linear_divergence, linear_divergence_reference))
        # half precision: the reference's own gradient is rounded once, ours also before the products
        factor = 1.5 if dtype == torch.float32 else 3.0
        assert_close_to_truth(ours, theirs, student(backend, dtype), upstream, factor)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_loss(backend, kind):
    x, w, b = student(backend)
    positional, named = teacher(x)
    options = {"divergence": kind, "hard_weight": 0.3, "soft_weight": 0.7, "bias": b, **named}
    got, want = (f(x, w, *positional, targets().to(backend), **options)
                 for f in (linear_divergence, linear_divergence_reference))  # fmt: skip
    torch.testing.assert_close(tuple(got), tuple(want))
    torch.testing.assert_close(got.loss, 0.7 * got.soft_loss + 0.3 * got.hard_loss)
    without = linear_divergence(x, w, *positional, bias=b, divergence=kind, **named)
    want = linear_divergence_reference(x, w, *positional, bias=b, divergence=kind, **named)
    torch.testing.assert_close(tuple(without), tuple(want))
    ignoring_0 = linear_divergence(x, w, *positional, bias=b, divergence=kind, ignore_index=0, **named)
    torch.testing.assert_close(ignoring_0.loss, want.loss)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_in_fp64(kind):
    with reference_backend():
        leaves = [t.double().requires_grad_() for t in student(rows=5)]
        function = of(linear_divergence, targets(5), divergence=kind, beta=0.3, temperature=0.8, hard_weight=0.2)
        torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_the_teacher(backend, kind):
    x, w, b = (t.requires_grad_() for t in student(backend))
    loss = linear_divergence(x, w, x, w, bias=b, teacher_bias=b, divergence=kind).loss
    gradients = torch.autograd.grad(loss, (x, w, b))
    assert loss.abs() < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_words_that_both_models_rule_out(backend, kind):
    x, w, b = student(backend)
    positional, named = teacher(x)
    b[3] = named["teacher_bias"][3] = float("-inf")
    loss = linear_divergence(x.requires_grad_(), w, *positional, bias=b, divergence=kind, **named).loss
    keep = [i for i in range(V) if i != 3]
    want = linear_divergence_reference(
        x, w[keep], positional[0], positional[1][keep], bias=b[keep], teacher_bias=named["teacher_bias"][keep],
        divergence=kind,
    ).loss  # fmt: skip
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (loss, want)))


def test_confident_models(backend):
    """Probabilities that underflow."""
    x, w, b = student(backend)
    positional, named = teacher(x)
    for kind in KINDS:
        leaf = (100 * x).requires_grad_()
        args = (leaf, w, 100 * positional[0], positional[1])
        got, want = (f(*args, bias=b, divergence=kind, **named).loss
                     for f in (linear_divergence, linear_divergence_reference))  # fmt: skip
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(each, leaf)[0] for each in (got, want)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_ignored_rows(backend, kind):
    for rows in (0, 3):
        x, w, b = (t.requires_grad_() for t in student(backend, rows=rows))
        target = torch.full((rows,), -100)
        loss = of(linear_divergence, target, divergence=kind, hard_weight=0.5)(x, w, b)
        loss.backward()
        assert loss == 0
        assert all(t.grad.eq(0).all() for t in (x, w, b))


def test_only_the_student_gets_gradients_and_a_second_backward_agrees(backend):
    x, w, b = (t.requires_grad_() for t in student(backend))
    positional, named = teacher(x.detach())
    teachers = [t.requires_grad_() for t in (*positional, named["teacher_bias"])]
    loss = linear_divergence(x, w, *positional, bias=b, **named).loss
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w, b, *teachers), allow_unused=True)
    torch.testing.assert_close(second[:3], first)
    assert second[3:] == (None, None, None)
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, w, b))]
        of(linear_divergence, targets())(*leaves).backward()
        assert [t.grad is not None for t in leaves] == [i != frozen for i in range(3)]
    with torch.no_grad():
        assert not of(linear_divergence, targets())(x, w, b).requires_grad


def test_batched_shapes_and_autocast(backend):
    x, w, b = student(backend, rows=12)
    positional, named = teacher(x, 12)
    flat = linear_divergence(x, w, *positional, targets(12).to(backend), bias=b, **named).loss
    args = (x.view(3, 4, C), w, positional[0].view(3, 4, -1), positional[1], targets(12).view(3, 4).to(backend))
    torch.testing.assert_close(linear_divergence(*args, bias=b, **named).loss, flat)
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        torch.testing.assert_close(linear_divergence(*args, bias=b, **named).loss, flat, rtol=2e-2, atol=2e-2)


def test_op_is_registered_in_full():
    x, w, b = (t.requires_grad_() for t in student())
    (tx, tw), named = teacher(x.detach())
    args = (x, w, targets(), b, tx, tw, named["teacher_bias"], torch.rand(N), "jsd", 0.3, 2.0, 0.7, 0.3, -100,
            3.0, 1.0, None, 1.0, 4, True, True, True)  # fmt: skip
    opcheck(torch.ops.liger_models.linear_divergence, args)


@pytest.mark.compile
def test_compiled():
    positional, named = teacher(student()[0])
    target = targets()
    function = lambda x, w, b: linear_divergence(x, w, *positional, target, bias=b, hard_weight=0.5, **named).loss
    upstream = [torch.tensor(0.37)]
    want = run(function, student(), upstream)
    got = run(torch.compile(function, fullgraph=True, backend="aot_eager"), student(), upstream)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"divergence": "kl"}, ValueError),
        ({"beta": 1.5}, ValueError),
        ({"temperature": 0.0}, ValueError),
        ({"hard_weight": 0.5}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"teacher_softcap": -1.0}, ValueError),
        ({"workspace_mib": 0}, ValueError),
        ({"teacher_weight": draw(V + 1, C_TEACHER)}, ValueError),
        ({"teacher_weight": draw(V, C)}, ValueError),
        ({"teacher_x": draw(N + 1, C_TEACHER)}, ValueError),
        ({"bias": draw(V + 1)}, ValueError),
        ({"target": torch.full((N,), V)}, ValueError),
        ({"teacher_bias": draw(V).double()}, TypeError),
    ],
)
def test_wrong_arguments(change, error):
    x, w, _ = student()
    (tx, tw), _ = teacher(x)
    with pytest.raises(error, match="linear_divergence"):
        linear_divergence(**{"x": x, "weight": w, "teacher_x": tx, "teacher_weight": tw, **change})


@pytest.mark.gpu
def test_memory_stays_within_the_workspace():
    N, V, C, budget = 8192, 128256, 1024, 1024
    tensors = [torch.randn(n, C, device="cuda", dtype=torch.bfloat16) for n in (N, V, N, V)]
    x, w = (t.requires_grad_() for t in tensors[:2])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_divergence(*tensors, torch.randint(0, V, (N,), device="cuda"), workspace_mib=budget).loss
    held = x.numel() * 2 + w.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= held + (budget + 300) * 2**20
    assert loss.isfinite()
