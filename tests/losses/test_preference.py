"""What holds for every preference loss."""

import pytest
import torch

from liger_models import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_models.kernels.loss import linear_logprobs
from liger_models.losses.dpo import DPO_LOSSES

from .plain import T, inputs, plain_log_probs, targets
from .plain_pairs import PAIRS, ROWS


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


def losses_of_a_unit():
    """Losses, and how many sequences one pair or one sequence has."""
    for name, loss, _ in all_losses():
        yield name, loss, 1 if name == "kto" else 2
    for kind in DPO_LOSSES:
        smooth = {"label_smoothing": 0.1} if kind in ("robust", "exo_pair") else {}
        yield kind, LigerFusedLinearDPOLoss(use_ref_model=False, loss_type=kind, **smooth), 2


@pytest.mark.cases(15)
@pytest.mark.parametrize(("name", "loss", "rows"), [pytest.param(*each, id=each[0]) for each in losses_of_a_unit()])
def test_a_single_pair_computes_its_logits_once(backend, name, loss, rows, monkeypatch):
    """All its logits are more than what is kept."""
    target = targets(ROWS)[:rows].to(backend)
    rest = (torch.ones(1, dtype=torch.bool, device=backend),) if name == "kto" else ()

    def run():
        x, weight, bias = (t.detach().to(backend) for t in inputs(ROWS))
        leaves = [t.requires_grad_() for t in (x[:rows].contiguous(), weight, bias)]
        order = leaves[:2] if name == "kto" else leaves[1::-1]
        value, metrics = loss(*order, target, leaves[2], *rest)
        return value, metrics, torch.autograd.grad(value, leaves)

    want = run()
    seen, write = [], linear_logprobs.write_logits
    monkeypatch.setattr(linear_logprobs, "write_logits", lambda x, *more: seen.append(len(x)) or write(x, *more))
    monkeypatch.setattr(linear_logprobs, "chunk_rows", lambda *_, **__: 2)
    got = run()
    assert sum(seen) == rows * T
    assert len(seen) > rows
    torch.testing.assert_close(got, want)


def test_accuracies_are_of_the_rewards():
    target = targets(ROWS)
    x, weight, _ = inputs(ROWS)
    for loss in (LigerFusedLinearDPOLoss(use_ref_model=False), LigerFusedLinearORPOLoss()):
        _, metrics = loss(weight, x, target)
        assert metrics.accuracies.tolist() == (metrics.chosen_rewards > metrics.rejected_rewards).float().tolist()


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
