import pytest
import torch

from liger_models.kernels import dispatch
from liger_models.kernels.loss.divergence import KINDS
from liger_models.kernels.loss.logits_divergence import logits_divergence, logits_divergence_reference
from liger_models.losses import LigerFusedCETVDLoss

from ..norm.test_rms_norm import dtypes
from ..oracle import assert_close_to_truth, opcheck, run
from .test_divergence import N, V, draw, targets


def logits(dtype=torch.float32, device="cpu", rows=N):
    return [draw(rows, V, seed=seed).mul(2).to(device, dtype) for seed in (0, 5)]


@pytest.mark.cases(8)
@pytest.mark.parametrize("kind", [*KINDS, "jsd 0.1", "jsd 0", "jsd 1"])
def test_matches_fp64(backend, kind, poisoned_empty, monkeypatch):
    """Both losses of each token, with an upstream gradient of its own for each."""
    monkeypatch.setattr(
        "liger_models.kernels.loss.divergence.MAX_BLOCK", 16
    )  # 37 words are two blocks and a part of one
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


def test_op_is_registered_in_full(backend):
    if not dispatch.use_triton(torch.zeros(1, device=backend)):
        pytest.skip("the reference is not an op")
    student, teacher = logits(device=backend)
    args = (student.requires_grad_(), teacher, targets().to(backend), "tvd", 0.5, 1.0, -100)
    opcheck(torch.ops.liger_models.logits_divergence, args)


@pytest.mark.compile
def test_compiled(backend):
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
def test_wrong_arguments(change, error):
    x, u = logits()
    with pytest.raises(error, match="logits_divergence"):
        logits_divergence(**{"student": x, "teacher": u, "target": targets(), **change})


@pytest.mark.gpu
def test_memory_is_one_gradient():
    student, teacher = (torch.randn(2048, 128256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target = torch.randint(0, 128256, (2048,), device="cuda")
    student.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ce, tvd = LigerFusedCETVDLoss()(student, teacher, target)
    (ce.mean() + tvd.mean()).backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * student.nbytes  # the gradient alone is 1.0
    assert ce.isfinite().all()
