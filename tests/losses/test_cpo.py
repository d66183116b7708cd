"""CPO against an fp64 implementation written down from the paper."""

import pytest
import torch

from liger_models import LigerFusedLinearCPOLoss

from .plain import assert_matches, inputs, targets
from .plain_pairs import ROWS, bound, plain_dpo_losses, plain_paired


@pytest.mark.cases(6)
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
