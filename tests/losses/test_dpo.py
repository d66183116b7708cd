"""DPO and related losses against fp64 implementations written down from the papers."""

import pytest
import torch

from liger_models import LigerFusedLinearDPOLoss
from liger_models.losses.dpo import DPO_LOSSES

from .plain import assert_matches, assert_matches_in_fp64, inputs, plain_log_probs, results, targets
from .plain_pairs import HEADS, ROWS, bound, plain_dpo_losses, plain_paired, sequences


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


@pytest.mark.cases(15)
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


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize("average", [False, True])
def test_compiled(average):
    target = targets(ROWS)
    loss = LigerFusedLinearDPOLoss(average_log_prob=average, compute_nll_loss=True)
    ref = inputs(ROWS, hidden=5, seed=3)
    want = results(bound(loss, target, *ref), inputs(ROWS), torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = results(bound(compiled, target, *ref), inputs(ROWS), torch.float32)
    torch.testing.assert_close(got, want)


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
