"""Preference losses against fp64 implementations written down from the papers."""

import pytest
import torch
from torch import Tensor

from liger_models import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_models.losses.preference import DPO_LOSSES, log_odds

from .plain import T, assert_matches, assert_matches_in_fp64, inputs, plain_log_probs, plain_logits, results, targets

ROWS, PAIRS = 8, 4
HEADS = [{}, {"softcap": 3.0, "logit_scale": 1.5}]


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def sequences(log_probs, target, ignore_index, average):
    totals = log_probs.sum(1)
    counts = (target != ignore_index).sum(1)
    return totals / counts.clamp(min=1) if average else totals


def plain_dpo_losses(kind, chosen, rejected, beta, e, tau=0.05):
    w, l, m = beta * chosen, beta * rejected, beta * (chosen - rejected)  # noqa: E741
    log = torch.log
    return {
        "sigmoid": lambda: -(1 - e) * log(sigma(m)) - e * log(sigma(-m)),
        "hinge": lambda: torch.clamp(1 - m, min=0),
        "ipo": lambda: ((chosen - rejected) - 1 / (2 * beta)) ** 2,
        "robust": lambda: (-(1 - e) * log(sigma(m)) + e * log(sigma(-m))) / (1 - 2 * e),
        "exo_pair": lambda: sigma(m) * log(sigma(m) / (1 - e)) + sigma(-m) * log(sigma(-m) / e),
        "nca_pair": lambda: -log(sigma(w)) - log(sigma(-w)) / 2 - log(sigma(-l)) / 2,
        "bco_pair": lambda: -log(sigma(w)) - log(sigma(-l)),
        "sppo_hard": lambda: (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigma(w) + sigma(l),
        "apo_down": lambda: sigma(w) + 1 - sigma(m),
        "discopop": lambda: -log(sigma(m)) * (1 - sigma(m / tau)) + torch.exp(-m) * sigma(m / tau),
    }[kind]()


def plain_paired(
    pair_losses, target, *, beta, average, alpha=None, reference=None, nll_target=None, ignore_index=-100, extra=None,
    **head,
):  # fmt: skip
    """``(x, weight, bias) -> (loss, metrics)``; ``alpha`` None for no NLL; ``reference`` [rows] log-probabilities."""

    def function(x, weight, bias=None):
        log_probs = plain_log_probs(x, weight, bias, target, ignore_index, **head)
        logps = sequences(log_probs, target, ignore_index, average)
        ratios = logps if reference is None else logps - reference
        loss = pair_losses(ratios[:PAIRS], ratios[PAIRS:]).mean()
        nll = torch.zeros((), dtype=torch.float64)
        if alpha is not None:
            chosen = target[:PAIRS] if nll_target is None else nll_target[:PAIRS]
            tokens = plain_log_probs(x[:PAIRS], weight, bias, chosen, ignore_index, **head)
            nll = -tokens.sum() / max((chosen != ignore_index).sum().item(), 1)
            loss = loss + alpha * nll
        raw = plain_logits(x, weight, bias, logit_scale=head.get("logit_scale", 1.0))
        metrics = [
            logps[:PAIRS], logps[PAIRS:], raw[:PAIRS].mean(), raw[PAIRS:].mean(), nll,
            beta * ratios[:PAIRS], beta * ratios[PAIRS:],
        ]  # fmt: skip
        if extra is not None:
            metrics += extra(logps[:PAIRS], logps[PAIRS:])
        return loss, [metric.detach() for metric in metrics]

    return function


def bound(loss, target, *rest, **kwargs):
    """``(x, weight, bias) -> (loss, metrics)`` of a module that takes the weight first."""

    def function(x, weight, bias=None):
        moved = {k: v.to(x) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return loss(weight, x, target.to(x.device), bias, *(r.to(x) for r in rest), **moved)

    return function


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_dpo_loss_types(kind, average):
    e = 0.2 if kind in ("sigmoid", "robust", "exo_pair") else 0.0
    target = targets(ROWS)
    reference_inputs = inputs(ROWS, hidden=5, seed=3)
    reference = sequences(plain_log_probs(*(t.double() for t in reference_inputs), target), target, -100, average)
    options = {"beta": 0.3, "loss_type": kind, "label_smoothing": e, "average_log_prob": average}
    if kind == "discopop":
        options["discopop_tau"] = 0.5
    pair_losses = lambda c, r: plain_dpo_losses(kind, c, r, 0.3, e, 0.5)
    for alpha in (None, 0.6):
        loss = LigerFusedLinearDPOLoss(
            **options, **({} if alpha is None else {"alpha": alpha, "compute_nll_loss": True})
        )
        plain = plain_paired(pair_losses, target, beta=0.3, average=average, alpha=alpha, reference=reference)
        ours = bound(loss, target, *reference_inputs)
        assert_matches_in_fp64(ours, plain, inputs(ROWS))
        assert_matches(ours, plain, inputs(ROWS), tolerance=4e-6 if kind == "exo_pair" else 1e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reference", ["none", "model", "tokens", "sequences"])
def test_dpo_head_and_reference(backend, reference, with_bias, head):
    target = targets(ROWS, ignore_index=4, empty=(1, 6))
    weights = inputs(ROWS, hidden=5, seed=3)
    if not with_bias:
        weights[2] = None
    wide = [None if t is None else t.double() for t in weights]
    ref_tokens = plain_log_probs(*wide, target, 4, **head)
    ref = None if reference == "none" else ref_tokens.sum(1)
    loss = LigerFusedLinearDPOLoss(4, 0.3, use_ref_model=ref is not None, compute_nll_loss=True, **head)
    kwargs = {
        "none": {},
        "model": dict(zip(("ref_input", "ref_weight", "ref_bias"), weights, strict=True)),
        "tokens": {"ref_log_probs": ref_tokens},
        "sequences": {"ref_log_probs": ref},
    }[reference]
    plain = plain_paired(
        lambda c, r: plain_dpo_losses("sigmoid", c, r, 0.3, 0.0), target,
        beta=0.3, average=False, alpha=1.0, reference=ref, ignore_index=4, **head,
    )  # fmt: skip
    assert_matches(bound(loss, target, **kwargs), plain, inputs(ROWS)[: 2 + with_bias], backend, 2e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("average", [False, True])
def test_cpo(backend, kind, average):
    e = 0.1 if kind == "sigmoid" else 0.0
    target = targets(ROWS, empty=(0,))
    for alpha in (None, 0.5):
        loss = LigerFusedLinearCPOLoss(
            beta=0.4, alpha=alpha or 1.0, label_smoothing=e, compute_nll_loss=alpha is not None,
            average_log_prob=average, loss_type=kind,
        )  # fmt: skip
        pair_losses = lambda c, r: plain_dpo_losses(kind, c, r, 0.4, e)
        plain = plain_paired(pair_losses, target, beta=0.4, average=average, alpha=alpha)
        assert_matches(bound(loss, target), plain, inputs(ROWS), backend, 2e-6)


@pytest.mark.parametrize("head", HEADS)
def test_simpo(backend, head):
    target = targets(ROWS, empty=(5,))
    for e, alpha in ((0.0, None), (0.1, 0.7)):
        loss = LigerFusedLinearSimPOLoss(
            beta=2.0, alpha=alpha or 1.0, label_smoothing=e, compute_nll_loss=alpha is not None, gamma=0.9, **head
        )

        def pair_losses(chosen, rejected, e=e):
            m = 2.0 * (chosen - rejected) - 0.9
            return -(1 - e) * torch.log(sigma(m)) - e * torch.log(sigma(-m))

        plain = plain_paired(pair_losses, target, beta=2.0, average=True, alpha=alpha, **head)
        assert_matches(bound(loss, target), plain, inputs(ROWS), backend, 2e-6)


def plain_orpo_odds(chosen, rejected):
    odds = lambda log_p: torch.exp(log_p) / (1 - torch.exp(log_p))
    both = (chosen != 0) & (rejected != 0)
    ratios = odds(chosen.where(both, -1)) / odds(rejected.where(both, -1))
    return torch.where(both, torch.log(ratios), 0), both


def plain_orpo_losses(chosen, rejected):
    log_ratio, both = plain_orpo_odds(chosen, rejected)
    return torch.where(both, -0.3 * torch.log(sigma(log_ratio)), 0)


def plain_orpo_extra(chosen, rejected):
    log_ratio, both = plain_orpo_odds(chosen, rejected)
    return [torch.where(both, torch.log(sigma(log_ratio)), 0).mean(), log_ratio.mean()]


@pytest.mark.parametrize("empty", [(), (1, 6)])
@pytest.mark.parametrize("nll", ["none", "target", "other"])
def test_orpo(backend, nll, empty):
    target = targets(ROWS, empty=empty)
    nll_target = targets(ROWS).roll(1, 0) if nll == "other" else None
    loss = LigerFusedLinearORPOLoss(beta=0.3, compute_nll_loss=nll != "none")
    plain = plain_paired(
        plain_orpo_losses, target, beta=0.3, average=True, alpha=None if nll == "none" else 1.0,
        nll_target=nll_target, extra=plain_orpo_extra,
    )  # fmt: skip

    def ours(x, weight, bias):
        rest = () if nll_target is None else (nll_target.to(x.device),)
        return loss(weight, x, target.to(x.device), bias, *rest)

    assert_matches(ours, plain, inputs(ROWS), backend, 2e-6)


def test_log_odds_keep_their_digits():
    log_p = torch.tensor([-1e-3, -1e-6, -0.5, -0.69, -0.7, -5.0, -90.0])
    want = log_p.double() - torch.log(-torch.expm1(log_p.double()))
    torch.testing.assert_close(log_odds(log_p).double(), want, rtol=1e-6, atol=1e-7)
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("name", ["apo_zero", "apo_down", "discopop", "kto"])
def test_far_from_the_margin_gradients_keep_their_digits(name):
    def gradient(dtype):
        log_probs = torch.tensor([[-24.0], [-200.0], [-4.0], [-4.0]], dtype=dtype, requires_grad=True)
        target = torch.zeros(4, 1, dtype=torch.int64)
        if name == "kto":
            loss = LigerFusedLinearKTOLoss(beta=0.5)
            value, _ = loss.from_log_probs(log_probs, target, torch.tensor([True, True, False, False]), kl=0.3)
        else:
            value, _ = LigerFusedLinearDPOLoss(beta=0.5, use_ref_model=False, loss_type=name).from_log_probs(
                log_probs, target
            )
        value.backward()
        return log_probs.grad.double()

    got, want = gradient(torch.float32), gradient(torch.float64)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("kl", ["none", "number", "scalar", "each"])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("with_reference", [False, True])
def test_kto(backend, with_reference, average, kl):
    rows = 5
    target = targets(rows, empty=(3,))
    labels = torch.tensor([True, False, True, True, False])
    z = {
        "none": None,
        "number": 0.7,
        "scalar": torch.tensor(0.7),
        "each": torch.rand(rows, generator=torch.Generator().manual_seed(2)),
    }
    z = z[kl]
    ref_inputs = inputs(rows, hidden=5, seed=3)
    ref_tokens = plain_log_probs(*(t.double() for t in ref_inputs), target)
    loss = LigerFusedLinearKTOLoss(
        beta=0.4, use_ref_model=with_reference, average_log_prob=average, desirable_weight=1.3, undesirable_weight=0.6
    )

    def plain(x, weight, bias):
        logps = sequences(plain_log_probs(x, weight, bias, target), target, -100, average)
        r = logps - sequences(ref_tokens, target, -100, average) if with_reference else logps
        gain = r - (0 if z is None else torch.as_tensor(z).double())
        each = torch.where(labels, 1.3 * (1 - sigma(0.4 * gain)), 0.6 * (1 - sigma(-0.4 * gain)))
        logits = plain_logits(x, weight, bias).sum((1, 2))
        sums = [logps[labels], logps[~labels], logits[labels], logits[~labels], 0.4 * r[labels], 0.4 * r[~labels]]
        return each.mean(), [s.sum().detach() for s in sums]

    def ours(x, weight, bias):
        move = lambda tensors: [t.to(x) for t in tensors] if with_reference else []
        ref = dict(zip(("ref_input", "ref_weight", "ref_bias"), move(ref_inputs), strict=False))
        args = (target.to(x.device), bias, labels.to(x.device))
        return loss(x, weight, *args, **ref, kl=z.to(x) if isinstance(z, Tensor) else z)

    assert_matches(ours, plain, inputs(rows), backend, 2e-6)


def all_losses():
    yield "dpo", LigerFusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True), ()
    yield "cpo", LigerFusedLinearCPOLoss(), ()
    yield "simpo", LigerFusedLinearSimPOLoss(), ()
    yield "orpo", LigerFusedLinearORPOLoss(), ()
    yield "kto", LigerFusedLinearKTOLoss(), (torch.arange(ROWS) % 2 == 0,)


@pytest.mark.parametrize(("name", "loss", "rest"), [pytest.param(*each, id=each[0]) for each in all_losses()])
def test_from_log_probs(name, loss, rest):
    target = targets(ROWS)
    x, weight, bias = inputs(ROWS)
    order = (x, weight) if name == "kto" else (weight, x)
    want, want_metrics = loss(*order, target, bias, *rest)
    got, metrics = loss.from_log_probs(plain_log_probs(x, weight, bias, target), target, *rest)
    torch.testing.assert_close(got, want)
    without = [field for field in metrics._fields if "logits" not in field]
    torch.testing.assert_close([getattr(metrics, f) for f in without], [getattr(want_metrics, f) for f in without])
    assert [field for field in metrics._fields if getattr(metrics, field) is None] == [
        field for field in metrics._fields if "logits" in field
    ]


@pytest.mark.parametrize(("name", "loss", "rest"), [pytest.param(*each, id=each[0]) for each in all_losses()])
def test_no_targets_at_all(backend, name, loss, rest):
    target = torch.full((ROWS, 3), -100, device=backend)
    x, weight, bias = (t.to(backend).requires_grad_() for t in inputs(ROWS))
    order = (x[:, :3], weight) if name == "kto" else (weight, x[:, :3])
    value, metrics = loss(*order, target, bias, *(r.to(backend) for r in rest))
    value.backward()
    assert value.isfinite()
    assert all(metric.isfinite().all() for metric in metrics)
    assert all(t.grad.eq(0).all() for t in (x, weight, bias))


@pytest.mark.parametrize(("name", "loss", "rest"), [pytest.param(*each, id=each[0]) for each in all_losses()])
@pytest.mark.parametrize(("rows", "length"), [(0, T), (ROWS, 0)])
def test_a_batch_of_nothing(name, loss, rest, rows, length):
    x, weight, bias = (t.requires_grad_() for t in inputs(ROWS))
    part, target = x[:rows, :length], targets(ROWS)[:rows, :length]
    order = (part, weight) if name == "kto" else (weight, part)
    value, metrics = loss(*order, target, bias, *(r[:rows] for r in rest))
    value.backward()
    assert value.isfinite()
    assert all(metric.isfinite().all() for metric in metrics)
    assert all(t.grad.eq(0).all() for t in (x, weight, bias))


@pytest.mark.parametrize("average", [False, True])
def test_compiled(average):
    target = targets(ROWS)
    loss = LigerFusedLinearDPOLoss(average_log_prob=average, compute_nll_loss=True)
    ref = inputs(ROWS, hidden=5, seed=3)
    want = results(bound(loss, target, *ref), inputs(ROWS), torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = results(bound(compiled, target, *ref), inputs(ROWS), torch.float32)
    torch.testing.assert_close(got, want)


def test_accuracies_are_of_the_rewards():
    target = targets(ROWS)
    x, weight, _ = inputs(ROWS)
    for loss in (LigerFusedLinearDPOLoss(use_ref_model=False), LigerFusedLinearORPOLoss()):
        _, metrics = loss(weight, x, target)
        assert metrics.accuracies.tolist() == (metrics.chosen_rewards > metrics.rejected_rewards).float().tolist()


def test_the_reference_and_frozen_parts_get_no_gradient():
    target = targets(ROWS)
    x, weight, _ = inputs(ROWS)
    ref_x, ref_weight, _ = (t.requires_grad_() for t in inputs(ROWS, seed=3))
    value, _ = LigerFusedLinearDPOLoss()(weight, x.requires_grad_(), target, None, ref_x, ref_weight)
    value.backward()
    assert x.grad is not None
    assert weight.grad is None
    assert ref_x.grad is None
    assert ref_weight.grad is None


def test_half_precision_and_small_workspace(backend):
    target = targets(ROWS).to(backend)
    leaves = [t.half().to(backend).requires_grad_() for t in inputs(ROWS)]
    x, weight, bias = leaves
    got, _ = LigerFusedLinearCPOLoss(workspace_mib=1)(weight, x, target, bias)
    wide = [t.detach().double().cpu().requires_grad_() for t in leaves]
    plain = plain_paired(lambda c, r: plain_dpo_losses("sigmoid", c, r, 0.1, 0), target.cpu(), beta=0.1, average=False,
                         alpha=1.0)  # fmt: skip
    want, _ = plain(*wide)
    torch.testing.assert_close(got.double().cpu(), want, rtol=2e-3, atol=0)
    for ours, exact in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, wide), strict=True):
        assert (ours.double().cpu() - exact).norm() <= 3e-3 * exact.norm()


def call(loss, **changes):
    x, weight, bias = inputs(ROWS)
    return loss(**{"lin_weight": weight, "_input": x, "target": targets(ROWS), "bias": bias, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: LigerFusedLinearDPOLoss(loss_type="aot"),
        lambda: LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1),
        lambda: LigerFusedLinearDPOLoss(loss_type="robust", label_smoothing=0.5),
        lambda: LigerFusedLinearDPOLoss(loss_type="exo_pair"),
        lambda: LigerFusedLinearDPOLoss(label_smoothing=-0.1),
        lambda: LigerFusedLinearDPOLoss(discopop_tau=0.1),
        lambda: LigerFusedLinearDPOLoss(loss_type="discopop", discopop_tau=0.0),
        lambda: LigerFusedLinearDPOLoss(alpha=0.5),
        lambda: LigerFusedLinearCPOLoss(alpha=0.5, compute_nll_loss=False),
        lambda: LigerFusedLinearDPOLoss(beta=-0.1),
        lambda: LigerFusedLinearDPOLoss(beta=0.0, loss_type="sppo_hard"),
        lambda: LigerFusedLinearCPOLoss(beta=0.0, loss_type="ipo"),
        lambda: LigerFusedLinearKTOLoss(beta=-0.1),
        lambda: LigerFusedLinearCPOLoss(loss_type="robust"),
        lambda: LigerFusedLinearCPOLoss(loss_type="ipo", label_smoothing=0.1),
        lambda: LigerFusedLinearSimPOLoss(label_smoothing=2.0),
        lambda: call(LigerFusedLinearDPOLoss()),
        lambda: call(LigerFusedLinearDPOLoss(), ref_input=inputs(ROWS)[0]),
        lambda: call(LigerFusedLinearDPOLoss(use_ref_model=False), ref_log_probs=torch.zeros(ROWS)),
        lambda: call(LigerFusedLinearDPOLoss(), ref_log_probs=torch.zeros(ROWS), ref_bias=torch.zeros(23)),
        lambda: call(LigerFusedLinearDPOLoss(), ref_log_probs=torch.zeros(PAIRS)),
        lambda: call(LigerFusedLinearCPOLoss(), target=targets(ROWS)[:-1]),
        lambda: call(LigerFusedLinearCPOLoss(), target=targets(7), _input=inputs(7)[0]),
        lambda: call(LigerFusedLinearCPOLoss(softcap=-1.0)),
        lambda: call(LigerFusedLinearORPOLoss(compute_nll_loss=False), nll_target=targets(ROWS)),
        lambda: call(LigerFusedLinearKTOLoss()),
        lambda: call(LigerFusedLinearKTOLoss(), preference_labels=[True] * ROWS),
        lambda: call(LigerFusedLinearKTOLoss(), preference_labels=torch.ones(ROWS).bool(), kl=torch.ones(PAIRS)),
        lambda: call(LigerFusedLinearKTOLoss(), preference_labels=torch.ones(ROWS).bool(), kl=torch.ones(ROWS, 1)),
        lambda: call(LigerFusedLinearKTOLoss(), preference_labels=torch.ones(PAIRS, dtype=torch.bool)),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match=r"Liger|linear"):
        make()


def test_labels_of_kto_are_bool():
    with pytest.raises(TypeError, match="bool"):
        call(LigerFusedLinearKTOLoss(), preference_labels=torch.ones(ROWS))
