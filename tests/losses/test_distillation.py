"""Distillation losses against fp64 implementations written down from the definitions."""

import pytest
import torch

from liger_models import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearForwardKLLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearReverseKLLoss,
    LigerFusedLinearTVDLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)

from .plain import assert_matches, assert_matches_in_fp64, inputs, plain_log_probs, plain_logits, targets

ROWS = 4
HEAD = {"softcap": 3.0, "logit_scale": 1.5}
FUSED = {
    "forward kl": (LigerFusedLinearForwardKLLoss, {}),
    "reverse kl": (LigerFusedLinearReverseKLLoss, {}),
    "tvd": (LigerFusedLinearTVDLoss, {}),
    "cosine": (LigerFusedLinearCosineSimilarityLoss, {"beta": 0.7}),
    "jsd": (LigerFusedLinearJSDLoss, {}),
    "jsd 0.2": (LigerFusedLinearJSDLoss, {"beta": 0.2}),
    "jsd 0": (LigerFusedLinearJSDLoss, {"beta": 0.0}),
    "jsd 1": (LigerFusedLinearJSDLoss, {"beta": 1.0}),
}


def kl(p, q):
    """KL(p || q) of probabilities, 0 log 0 = 0."""
    return torch.xlogy(p, p).sum(-1) - (p * torch.log(q)).sum(-1)


def plain_divergence(name, z, u, temperature, beta):
    q, p = torch.softmax(z / temperature, -1), torch.softmax(u / temperature, -1)
    m = beta * p + (1 - beta) * q
    return {
        "forward kl": lambda: kl(p, q),
        "reverse kl": lambda: kl(q, p),
        "tvd": lambda: (p - q).abs().sum(-1) / 2,
        "cosine": lambda: beta * (1 - (z * u).sum(-1) / (z.norm(dim=-1) * u.norm(dim=-1))),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
        "jsd 0": lambda: kl(p, q),
        "jsd 1": lambda: kl(q, p),
    }[name]()


def teacher():
    return inputs(ROWS, hidden=5, seed=3)


def plain_loss(name, target, *, hard=0.5, soft=0.5, temperature=1.0, beta=0.5, ignore_index=-100, head=(), t_head=()):
    name = "jsd" if name == "jsd 0.2" else name
    u = plain_logits(*(t.double() for t in teacher()), **dict(t_head))

    def function(x, weight, bias):
        z = plain_logits(x, weight, bias, **dict(head))
        valid = target != ignore_index
        soft_loss = (plain_divergence(name, z, u, temperature, beta) * valid).sum() / max(valid.sum(), 1)
        hard_loss = -plain_log_probs(x, weight, bias, target, ignore_index, **dict(head)).sum() / max(valid.sum(), 1)
        return hard * hard_loss + soft * soft_loss, [soft_loss.detach(), hard_loss.detach()]

    return function


def bound(loss, target):
    def function(x, weight, bias):
        tx, tw, tb = (t.to(x) for t in teacher())
        value, *parts = loss(x, weight, tx, tw, target.to(x.device), bias, tb)
        return value, parts

    return function


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (0.8, 0.3)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("name", "make"), FUSED.items(), ids=FUSED)
def test_fused(name, make, temperature, weights):
    hard, soft = weights
    target = targets(ROWS, ignore_index=4, empty=(2,))
    cls, options = make
    options = {**options, "temperature": temperature, "ignore_index": 4}
    loss = cls(hard, soft, **options, return_soft_hard_loss=True)
    plain = plain_loss(name, target, hard=hard, soft=soft, **{"beta": 0.5, **options})
    assert_matches_in_fp64(bound(loss, target), plain, inputs(ROWS))
    assert_matches(bound(loss, target), plain, inputs(ROWS), tolerance=2e-6)


@pytest.mark.cases(8)
@pytest.mark.parametrize(("name", "make"), FUSED.items(), ids=FUSED)
def test_heads_of_the_two_models(backend, name, make):
    target = targets(ROWS)
    cls, options = make
    t_head = {"softcap": 4.0, "logit_scale": 0.5}
    loss = cls(
        **options, temperature=1.5, return_soft_hard_loss=True, **HEAD, teacher_softcap=4.0, teacher_logit_scale=0.5
    )
    plain = plain_loss(name, target, temperature=1.5, head=HEAD, t_head=t_head, **{"beta": 0.5, **options})
    assert_matches(bound(loss, target), plain, inputs(ROWS), backend, 3e-6)
    alone = cls(**options)(*inputs(ROWS)[:2], *teacher()[:2], target)
    assert isinstance(alone, torch.Tensor)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("labels", [False, True])
def test_fused_linear_jsd(backend, beta, labels):
    x, weight, _ = (t.to(backend).requires_grad_() for t in inputs(ROWS))
    tx, tw, _ = (t.to(backend) for t in teacher())
    target = targets(ROWS).to(backend) if labels else None
    got = LigerFusedLinearJSD(beta, temperature=2.0)(x.flatten(0, 1), weight, tx.flatten(0, 1), tw,
                                                     None if target is None else target.flatten())  # fmt: skip
    z, u = (plain_logits(a.double(), b.double(), None) for a, b in ((x, weight), (tx, tw)))
    each = plain_divergence({0.0: "jsd 0", 1.0: "jsd 1"}.get(beta, "jsd"), z, u, 2.0, beta)
    valid = torch.ones_like(each, dtype=torch.bool) if target is None else target != -100
    want = (each * valid).sum() / valid.sum()
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)
    for ours, theirs in zip(torch.autograd.grad(got, (x, weight)), torch.autograd.grad(want, (x, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.parametrize("labels", [False, True])
def test_fused_kl_of_stored_probabilities(backend, reduction, labels):
    x, weight, bias = (t.to(backend).requires_grad_() for t in inputs(ROWS))
    p = plain_logits(*(t.double() for t in teacher())).softmax(-1)
    target = targets(ROWS) if labels else None
    loss = LigerFusedLinearKLDivLoss(reduction, temperature=2.0, softcap=3.0)
    got = loss(x, weight, p.float().to(backend), None if target is None else target.to(backend), student_bias=bias)
    leaves = [t.detach().double().cpu().requires_grad_() for t in (x, weight, bias)]
    each = kl(p, (plain_logits(*leaves, softcap=3.0) / 2).softmax(-1))
    valid = torch.ones_like(each, dtype=torch.bool) if target is None else target != -100
    want = (each * valid).sum() / {"batchmean": valid.sum(), "mean": valid.sum() * p.shape[-1], "sum": 1}[reduction]
    torch.testing.assert_close(got.double().cpu(), want, rtol=2e-6, atol=0)
    ours, theirs = torch.autograd.grad(got, (x, weight, bias)), torch.autograd.grad(want, leaves)
    torch.testing.assert_close([t.double().cpu() for t in ours], [*theirs], rtol=1e-4, atol=1e-7)


def distributions(vocabulary=7, rows=5, dtype=torch.float32, zeros=False):
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(rows, vocabulary, generator=generator).softmax(-1).to(dtype) for _ in range(2))
    if zeros:
        q[0, 1] = q[1] = p[0, 1] = 0  # q and p both 0; both rows one-hot
        q[1, 2] = 1
        p[1] = q[1]
        p[2, 3] = 0  # only p is 0
    return q, p


LABELS = torch.tensor([3, -100, 0, 6, -100])
REDUCED = {
    "none": lambda each, rows: each,
    "sum": lambda each, rows: each.sum(),
    "mean": lambda each, rows: each.sum() / (rows * each.shape[-1]),
    "batchmean": lambda each, rows: each.sum() / rows,
}


def compare(got, want, leaf):
    """Values are close, and so are the gradients under a non-uniform upstream gradient."""
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-8)
    upstream = torch.linspace(0.2, 1.3, got.numel()).view(got.shape)
    ours, theirs = (torch.autograd.grad(each, leaf, upstream.to(each))[0] for each in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(reduction, log_target):
    q, p = distributions()
    log_q = q.log().requires_grad_()
    got = LigerKLDIVLoss(reduction=reduction, log_target=log_target)(log_q, p.log() if log_target else p)
    p = p.double()
    compare(got, REDUCED[reduction](p * (p.log() - log_q.double()), 5), log_q)
    name = reduction if reduction != "mean" else "sum"
    torch.testing.assert_close(
        LigerKLDIVLoss(reduction=name)(log_q, p.float()), torch.nn.KLDivLoss(reduction=name)(log_q, p.float())
    )


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd(beta, labels):
    q, p = distributions()
    log_q = q.log().requires_grad_()
    got = LigerJSD(beta)(log_q, p.log(), labels)
    q, p = log_q.double().exp(), p.double()
    m = beta * p + (1 - beta) * q
    each = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
    valid = torch.ones(5, dtype=torch.bool) if labels is None else labels != -100
    # p has been through log and exp, which costs about 1e-7 relative
    want = (each * valid).sum() / valid.sum()
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)
    ours, theirs = (torch.autograd.grad(each, log_q)[0] for each in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("reduction", REDUCED)
def test_tvd(reduction, labels):
    q, p = distributions()
    q.requires_grad_()
    got = LigerTVDLoss(reduction)(q, p, labels)
    valid = torch.ones(5, 1) if labels is None else (labels != -100)[:, None]
    compare(got, REDUCED[reduction]((q.double() - p.double()).abs() / 2 * valid, int(valid.sum())), q)


@pytest.mark.parametrize("loss", [LigerKLDIVLoss(), LigerKLDIVLoss(log_target=True), LigerJSD(), LigerJSD(0.0)])
def test_probabilities_of_zero(loss):
    q, p = distributions(zeros=True)
    log_q = q.log().requires_grad_()
    value = loss(log_q, p if isinstance(loss, LigerKLDIVLoss) and not loss.log_target else p.log())
    (gradient,) = torch.autograd.grad(value, log_q)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
    if isinstance(loss, LigerJSD):
        q, p = q.double(), p.double()
        m = loss.beta * p + (1 - loss.beta) * q
        part = lambda a, b: (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(-1)
        jsd = part(p, q) if loss.beta == 0 else loss.beta * part(p, m) + (1 - loss.beta) * part(q, m)
        torch.testing.assert_close(value.double(), jsd.mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", [LigerJSD(), LigerTVDLoss(), LigerTVDLoss("mean")])
def test_all_rows_ignored(loss):
    q, p = distributions(zeros=True)
    q = (q.log() if isinstance(loss, LigerJSD) else q).requires_grad_()
    value = loss(q, p.log() if isinstance(loss, LigerJSD) else p, torch.full((5,), -100))
    assert value == 0
    assert torch.autograd.grad(value, q)[0].eq(0).all()


def test_only_the_student_gets_gradients_and_half_precision_is_widened():
    for loss in (LigerKLDIVLoss(), LigerJSD(), LigerTVDLoss()):
        q, p = (t.half().requires_grad_() for t in distributions())
        value = loss(q, p)
        assert value.dtype == torch.float32
        value.backward()
        assert q.grad.dtype == torch.float16
        assert p.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: LigerFusedLinearJSDLoss(beta=1.5),
        lambda: LigerFusedLinearJSDLoss(temperature=0.0),
        lambda: LigerFusedLinearTVDLoss(beta=0.3),
        lambda: LigerFusedLinearForwardKLLoss(beta=0.0),
        lambda: LigerFusedLinearJSD(jsd_beta=-0.1),
        lambda: LigerFusedLinearJSD(temperature=0.0),
        lambda: LigerFusedLinearJSD(accum_dtype=torch.bfloat16),
        lambda: LigerFusedLinearKLDivLoss("none"),
        lambda: LigerFusedLinearKLDivLoss(temperature=0.0),
        lambda: LigerFusedLinearKLDivLoss(eps=0.0),
        lambda: LigerFusedLinearKLDivLoss(accum_dtype=torch.bfloat16),
        lambda: LigerKLDIVLoss(reduction="max"),
        lambda: LigerKLDIVLoss(size_average=True),
        lambda: LigerKLDIVLoss(1e-3, log_target=True),
        lambda: LigerTVDLoss("max"),
        lambda: LigerJSD(beta=2.0),
        lambda: LigerJSD()(torch.zeros(2, 3), torch.zeros(2, 4)),
        lambda: LigerTVDLoss()(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3)),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match="Liger"):
        make()
