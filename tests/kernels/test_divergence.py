import pytest
import torch

from liger_models.kernels import dispatch
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.divergence import (
    DISTRIBUTION_KINDS,
    KINDS,
    REDUCTIONS,
    distribution_divergence,
    distribution_divergence_reference,
    linear_divergence,
    linear_divergence_reference,
    logits_divergence,
    logits_divergence_reference,
)
from liger_models.losses import LigerFusedCETVDLoss, LigerJSD, LigerKLDIVLoss, LigerTVDLoss

from .oracle import assert_close_to_truth, opcheck, run
from .test_rms_norm import dtypes

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
    monkeypatch.setattr("liger_models.kernels.divergence.chunk_rows", lambda *_: 4)
    monkeypatch.setattr("liger_models.kernels.divergence.TOGETHER", 2)


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


def logits(dtype=torch.float32, device="cpu", rows=N):
    return [draw(rows, V, seed=seed).mul(2).to(device, dtype) for seed in (0, 5)]


@pytest.mark.parametrize("kind", [*KINDS, "jsd 0.1", "jsd 0", "jsd 1"])
def test_logits_match_fp64(backend, kind, poisoned_empty, monkeypatch):
    """Both losses of each token, with an upstream gradient of its own for each."""
    monkeypatch.setattr("liger_models.kernels.divergence.MAX_BLOCK", 16)  # 37 words are two blocks and a part of one
    kind, _, beta = kind.partition(" ")
    options = {"divergence": kind, "beta": float(beta or 0.5), "temperature": 1.5, "ignore_index": 7}
    target = targets(ignore_index=7)
    for dtype in dtypes(backend):
        student, teacher = logits(dtype, backend)

        def bound(function, teacher=teacher):
            return lambda x: function(x, teacher.to(x.device, x.dtype), target.to(x.device), **options)

        upstream = [draw(N, 2)[:, i].to(backend) for i in range(2)]
        assert_close_to_truth(bound(logits_divergence), bound(logits_divergence_reference), [student], upstream)


@pytest.mark.parametrize("shape", [(3, 4), (12,)])
def test_fused_cross_entropy_and_tvd(backend, shape):
    """Strided logits, one upstream gradient at a time, ignored rows of NaN, and a second backward."""
    x, u = (each.t().contiguous().t().view(*shape, V).requires_grad_() for each in logits(device=backend, rows=12))
    target = targets(12).view(shape).to(backend)
    ce, tvd = LigerFusedCETVDLoss()(x, u, target)
    valid = target != -100
    want = torch.nn.functional.cross_entropy(x.view(-1, V), target.flatten(), reduction="none").view(shape)
    distance = ((x.softmax(-1) - u.detach().softmax(-1)).abs().sum(-1) / 2).where(valid, 0)
    torch.testing.assert_close((ce, tvd), (want, distance))
    for ours, theirs in ((ce, want), (tvd, distance), (ce.mean() + 2 * tvd.sum(), want.mean() + 2 * distance.sum())):
        got, truth = (torch.autograd.grad(each.sum(), (x, u), retain_graph=True, allow_unused=True)
                      for each in (ours, theirs))  # fmt: skip
        torch.testing.assert_close(got, truth)
        assert got[1] is None
    with torch.no_grad():
        x[~valid] = float("nan")
        torch.testing.assert_close(LigerFusedCETVDLoss()(x, u, target), (ce, tvd))


def test_op_of_logits_is_registered_in_full(backend):
    if not dispatch.use_triton(torch.zeros(1, device=backend)):
        pytest.skip("the reference is not an op")
    student, teacher = logits(device=backend)
    args = (student.requires_grad_(), teacher, targets().to(backend), "tvd", 0.5, 1.0, -100)
    opcheck(torch.ops.liger_models.logits_divergence, args)


@pytest.mark.compile
def test_compiled_logits(backend):
    student, teacher = logits(device=backend)
    loss, target = LigerFusedCETVDLoss(), targets().to(backend)
    function = lambda x: loss(x, teacher, target)
    upstream = [draw(N).to(backend)] * 2
    want = run(function, [student], upstream)
    torch.testing.assert_close(
        run(torch.compile(function, fullgraph=True, backend="aot_eager"), [student], upstream), want
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"divergence": "kl"}, ValueError),
        ({"beta": 1.5}, ValueError),
        ({"temperature": 0.0}, ValueError),
        ({"teacher": draw(N, V + 1)}, ValueError),
        ({"target": torch.zeros(N + 1, dtype=torch.int64)}, ValueError),
        ({"target": torch.full((N,), V)}, ValueError),
        ({"target": torch.zeros(N)}, TypeError),
        ({"teacher": torch.zeros(N, V, dtype=torch.int64)}, TypeError),
    ],
)
def test_wrong_arguments_of_logits(change, error):
    x, u = logits()
    with pytest.raises(error, match="logits_divergence"):
        logits_divergence(**{"student": x, "teacher": u, "target": targets(), **change})


def distributions(kind, dtype=torch.float32, device="cpu", rows=N, words=V):
    """Of student and teacher, as ``kind`` takes them: log-probabilities or probabilities."""
    made = [draw(rows, words, seed=seed).mul(2).log_softmax(-1).to(device) for seed in (0, 5)]
    exponentiated = {"tvd": (0, 1), "kl": (1,)}.get(kind, ())
    return [(x.exp() if i in exponentiated else x).to(dtype) for i, x in enumerate(made)]


@pytest.fixture
def three_blocks_a_row(monkeypatch):
    """37 words are two blocks and a part of one."""
    monkeypatch.setattr("liger_models.kernels.divergence.TERMS_BLOCK", 16)


@pytest.mark.parametrize("labelled", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [*DISTRIBUTION_KINDS, "jsd 0.1"])
def test_distributions_match_fp64(backend, kind, reduction, labelled, poisoned_empty, three_blocks_a_row):
    kind, _, beta = kind.partition(" ")
    options = {"beta": float(beta or 0.5), "eps": 1e-3, "reduction": reduction, "ignore_index": 7}
    labels = targets(ignore_index=7).to(backend) if labelled else None
    upstream = draw(N, V).to(backend) if reduction == "none" else torch.tensor(0.37, device=backend)
    for dtype in dtypes(backend):
        student, teacher = distributions(kind, dtype, backend)

        def bound(function, teacher=teacher):
            def loss(x):
                at = labels if labels is None else labels.to(x.device)
                return function(x, teacher.to(x.device, torch.promote_types(x.dtype, teacher.dtype)), kind,
                                labels=at, **options)  # fmt: skip

            return loss

        # half precision: as above, ours is rounded a second time where the upstream gradient is no power of two
        factor = 1.5 if dtype == torch.float32 or reduction == "none" else 3.0
        assert_close_to_truth(
            bound(distribution_divergence), bound(distribution_divergence_reference), [student], [upstream], factor
        )


@pytest.mark.parametrize("kind", DISTRIBUTION_KINDS)
def test_distributions_of_strided_tensors(backend, kind, three_blocks_a_row):
    student, teacher = (x.t().contiguous().t() for x in distributions(kind, device=backend))
    upstream = torch.randn(V, N, device=backend).t()
    results = []
    for f in (distribution_divergence, distribution_divergence_reference):
        leaf = student.detach().requires_grad_()
        out = f(leaf, teacher, kind, reduction="none")
        results.append((out.detach(), *torch.autograd.grad(out, leaf, upstream)))
        scalar = f(leaf, teacher, kind, reduction="mean")
        results[-1] += (scalar.detach(), *torch.autograd.grad(scalar, leaf))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["none", "batchmean"])
@pytest.mark.parametrize("kind", [*DISTRIBUTION_KINDS, "jsd 0.1"])
def test_distributions_with_probabilities_of_zero(backend, kind, reduction, three_blocks_a_row):
    """Of both models, of one of them, and one-hot rows."""
    kind, _, beta = kind.partition(" ")
    options = {"beta": float(beta or 0.5), "reduction": reduction}
    zero = [{"tvd": (0.0, 0.0), "kl": (float("-inf"), 0.0)}.get(kind, (float("-inf"),) * 2)[i] for i in range(2)]
    one = [{"tvd": (1.0, 1.0), "kl": (0.0, 1.0)}.get(kind, (0.0, 0.0))[i] for i in range(2)]
    student, teacher = distributions(kind, device=backend)
    student[0, 1], teacher[0, 1], teacher[2, 3] = zero[0], zero[1], zero[1]
    if kind not in ("kl", "kl_log", "forward_kl"):  # these are infinite or huge where only q is 0
        student[3, 20] = zero[0]
    student[1], teacher[1] = zero
    student[1, 2], teacher[1, 2] = one
    results = []
    for f in (distribution_divergence, distribution_divergence_reference):
        leaf = student.clone().requires_grad_()
        out = f(leaf, teacher, kind, **options)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    assert all(x.isfinite().all() for x in results[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["forward_kl", "kl", "kl_log"])
def test_a_word_that_only_the_student_rules_out(backend, kind):
    student, teacher = distributions(kind, device=backend)
    student[2, 5] = float("-inf")
    results = []
    for f in (distribution_divergence, distribution_divergence_reference):
        leaf = student.clone().requires_grad_()
        out = f(leaf, teacher, kind)
        results.append((out.detach(), *torch.autograd.grad(out, leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", DISTRIBUTION_KINDS)
def test_nan_is_not_hidden_but_where_it_is_ignored(backend, kind):
    student, teacher = distributions(kind, device=backend)
    student[4] = float("nan")
    labels = torch.zeros(N, dtype=torch.int64, device=backend)
    assert distribution_divergence(student, teacher, kind, labels=labels).isnan()
    labels[4] = -100
    leaf = student.requires_grad_()
    for reduction in REDUCTIONS:
        out = distribution_divergence(leaf, teacher, kind, labels=labels, reduction=reduction)
        want = distribution_divergence_reference(leaf, teacher, kind, labels=labels, reduction=reduction)
        torch.testing.assert_close(out, want)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.isfinite().all()
        assert gradient[4].eq(0).all()


@pytest.mark.parametrize("kind", DISTRIBUTION_KINDS)
def test_no_distributions_and_only_ignored_ones(backend, kind):
    for rows in (0, 3):
        student, teacher = distributions(kind, device=backend, rows=rows)
        leaf = student.requires_grad_()
        labels = torch.full((rows,), -100, device=backend)
        for reduction in REDUCTIONS:
            out = distribution_divergence(leaf, teacher, kind, labels=labels, reduction=reduction)
            assert out.eq(0).all()
            assert torch.autograd.grad(out.sum(), leaf)[0].eq(0).all()
        assert distribution_divergence(leaf, teacher, kind).isfinite()


def test_distributions_without_gradients_and_a_second_backward(backend):
    student, teacher = distributions("jsd", device=backend)
    student, teacher = student.view(1, N, V).requires_grad_(), teacher.view(1, N, V).requires_grad_()
    loss = distribution_divergence(student, teacher, "jsd")
    first = torch.autograd.grad(loss, student, retain_graph=True)
    second = torch.autograd.grad(loss, (student, teacher), allow_unused=True)
    torch.testing.assert_close(second[:1], first)
    assert second[1] is None
    for reduction in REDUCTIONS:
        with torch.no_grad():
            without = distribution_divergence(student, teacher, "jsd", reduction=reduction)
        assert not without.requires_grad
        torch.testing.assert_close(without, distribution_divergence(student, teacher, "jsd", reduction=reduction))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (LigerJSD(0.3), "jsd"),
        (LigerJSD(0.0), "jsd"),
        (LigerJSD(1.0), "jsd"),
        (LigerKLDIVLoss(eps=1e-2), "kl"),
        (LigerKLDIVLoss(log_target=True, reduction="none"), "kl_log"),
        (LigerTVDLoss("mean"), "tvd"),
    ],
)
def test_the_losses_run_the_kernel(backend, loss, kind):
    student, teacher = distributions(kind, device=backend)
    labels = () if kind.startswith("kl") else (targets().to(backend),)
    results = []
    for reference in (False, True):
        leaf = student.clone().requires_grad_()
        if reference:
            with reference_backend():
                out = loss(leaf, teacher, *labels)
        else:
            out = loss(leaf, teacher, *labels)
        kernel = "HandOver" in str(out.grad_fn) or "distribution_divergence" in str(out.grad_fn.next_functions)
        assert kernel == (not reference and dispatch.use_triton(student))
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("each", [False, True])
def test_op_of_distributions_is_registered_in_full(backend, each):
    if not dispatch.use_triton(torch.zeros(1, device=backend)):
        pytest.skip("the reference is not an op")
    student, teacher = distributions("jsd", device=backend)
    args = (student.requires_grad_(), teacher, torch.rand(N, device=backend), "jsd", 0.3, 1e-10, each)
    opcheck(torch.ops.liger_models.distribution_divergence, args)


@pytest.mark.compile
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_compiled_distributions(backend, reduction):
    student, teacher = distributions("jsd", device=backend)
    labels = targets().to(backend)
    function = lambda x: distribution_divergence(x, teacher, "jsd", labels=labels, reduction=reduction)
    upstream = [torch.randn(N, V, device=backend) if reduction == "none" else torch.tensor(0.37, device=backend)]
    want = run(function, [student], upstream)
    got = run(torch.compile(function, fullgraph=True, backend="aot_eager"), [student], upstream)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cosine"},
        {"reduction": "max"},
        {"teacher": draw(N, V + 1)},
        {"labels": torch.zeros(N + 1)},
    ],
)
def test_wrong_arguments_of_distributions(change):
    with pytest.raises(ValueError, match="distribution_divergence"):
        distribution_divergence(**{"student": draw(N, V), "teacher": draw(N, V), "kind": "jsd", **change})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DISTRIBUTION_KINDS)
def test_memory_of_distributions_is_one_gradient(kind):
    student, teacher = distributions(kind, torch.bfloat16, "cuda", rows=2048, words=128256)
    student.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = distribution_divergence(student, teacher, kind)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * student.nbytes  # the gradient alone is 1.0
    assert loss.isfinite()


@pytest.mark.gpu
def test_memory_of_logits_is_one_gradient():
    student, teacher = (torch.randn(2048, 128256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target = torch.randint(0, 128256, (2048,), device="cuda")
    student.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ce, tvd = LigerFusedCETVDLoss()(student, teacher, target)
    (ce.mean() + tvd.mean()).backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * student.nbytes  # the gradient alone is 1.0
    assert ce.isfinite().all()


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
