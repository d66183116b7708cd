"""SimPO against an fp64 implementation written down from the paper."""

import pytest
import torch

from liger_models import LigerFusedLinearSimPOLoss

from .plain import assert_matches, inputs, targets
from .plain_pairs import HEADS, ROWS, bound, plain_paired, sigma


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
