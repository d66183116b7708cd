"""ORPO against an fp64 implementation written down from the paper."""

import pytest
import torch

from liger_models import LigerFusedLinearORPOLoss
from liger_models.losses.orpo import log_odds

from .plain import assert_matches, inputs, targets
from .plain_pairs import ROWS, plain_paired, sigma


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
