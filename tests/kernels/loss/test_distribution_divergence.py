import pytest
import torch

from liger_models.kernels import dispatch
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss.distribution_divergence import (
    DISTRIBUTION_KINDS,
    REDUCTIONS,
    distribution_divergence,
    distribution_divergence_reference,
)
from liger_models.losses import LigerJSD, LigerKLDIVLoss, LigerTVDLoss

from ..norm.test_rms_norm import dtypes
from ..oracle import assert_close_to_truth, opcheck, run
from .test_divergence import N, V, draw, targets


def distributions(kind, dtype=torch.float32, device="cpu", rows=N, words=V):
    """The distributions of student and teacher, as ``kind`` takes them: log-probabilities or probabilities."""
    made = [draw(rows, words, seed=seed).mul(2).log_softmax(-1).to(device) for seed in (0, 5)]
    exponentiated = {"tvd": (0, 1), "kl": (1,)}.get(kind, ())
    return [(x.exp() if i in exponentiated else x).to(dtype) for i, x in enumerate(made)]


@pytest.fixture
def three_blocks_a_row(monkeypatch):
    """37 words are two blocks and a part of one."""
    monkeypatch.setattr("liger_models.kernels.loss.distribution_divergence.TERMS_BLOCK", 16)


@pytest.mark.cases(34)
@pytest.mark.parametrize("labeled", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [*DISTRIBUTION_KINDS, "jsd 0.1"])
def test_matches_fp64(backend, kind, reduction, labeled, poisoned_empty, three_blocks_a_row):
    kind, _, beta = kind.partition(" ")
    options = {"beta": float(beta or 0.5), "eps": 1e-3, "reduction": reduction, "ignore_index": 7}
    labels = targets(ignore_index=7).to(backend) if labeled else None
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
def test_strided_tensors(backend, kind, three_blocks_a_row):
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
def test_probabilities_of_zero(backend, kind, reduction, three_blocks_a_row):
    """In both models, in one of them, and in one-hot rows."""
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
def test_no_rows_and_only_ignored_ones(backend, kind):
    for rows in (0, 3):
        student, teacher = distributions(kind, device=backend, rows=rows)
        leaf = student.requires_grad_()
        labels = torch.full((rows,), -100, device=backend)
        for reduction in REDUCTIONS:
            out = distribution_divergence(leaf, teacher, kind, labels=labels, reduction=reduction)
            assert out.eq(0).all()
            assert torch.autograd.grad(out.sum(), leaf)[0].eq(0).all()
        assert distribution_divergence(leaf, teacher, kind).isfinite()


def test_without_gradients_and_a_second_backward(backend):
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
def test_op_is_registered_in_full(backend, each):
    if not dispatch.use_triton(torch.zeros(1, device=backend)):
        pytest.skip("the reference is not an op")
    student, teacher = distributions("jsd", device=backend)
    args = (student.requires_grad_(), teacher, torch.rand(N, device=backend), "jsd", 0.3, 1e-10, each)
    opcheck(torch.ops.liger_models.distribution_divergence, args)


@pytest.mark.compile
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_compiled(backend, reduction):
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
def test_wrong_arguments(change):
    with pytest.raises(ValueError, match="distribution_divergence"):
        distribution_divergence(**{"student": draw(N, V), "teacher": draw(N, V), "kind": "jsd", **change})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DISTRIBUTION_KINDS)
def test_memory_is_one_gradient(kind):
    student, teacher = distributions(kind, torch.bfloat16, "cuda", rows=2048, words=128256)
    student.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = distribution_divergence(student, teacher, kind)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * student.nbytes  # the gradient alone is 1.0
    assert loss.isfinite()
