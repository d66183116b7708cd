"""KTO against an fp64 implementation written down from the paper."""

import pytest
import torch
from torch import Tensor

from liger_models import LigerFusedLinearKTOLoss

from .plain import assert_matches, inputs, plain_log_probs, plain_logits, targets
from .plain_pairs import ROWS, sequences, sigma


@pytest.mark.cases(15)
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_labels_of_0_and_1(dtype):
    x, weight, bias = inputs(ROWS)
    labels = torch.arange(ROWS) % 2 == 0
    got, want = (LigerFusedLinearKTOLoss()(x, weight, targets(ROWS), bias, each) for each in (labels.to(dtype), labels))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("label", [-1, 2])
def test_other_labels_are_refused(label):
    x, weight, bias = inputs(ROWS)
    with pytest.raises(ValueError, match=rf"preference_labels must be 0 or 1, got \[{label}\]"):
        LigerFusedLinearKTOLoss()(x, weight, targets(ROWS), bias, torch.full((ROWS,), label))
