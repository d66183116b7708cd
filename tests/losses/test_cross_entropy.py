import pytest
import torch

from liger_models import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy_reference

OPTIONS = {"ignore_index": 3, "lse_square_scale": 0.01, "label_smoothing": 0.1, "softcap": 5.0}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_reach_the_op(reduction):
    torch.manual_seed(0)
    x, w, b, classes = torch.randn(6, 8), torch.randn(10, 8), torch.randn(10), torch.rand(10) + 0.5
    target = torch.tensor([0, 3, 9, 1, 2, 3])
    want = linear_cross_entropy_reference(
        x, w, target, bias=b, class_weight=classes, ignore_index=3, z_loss=0.01, label_smoothing=0.1, softcap=5.0,
        reduction=reduction,
    )  # fmt: skip
    flags = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    # By name, as in Liger-Kernel.
    fused = LigerFusedLinearCrossEntropyLoss(classes, **OPTIONS, reduction=reduction, **flags)(
        lin_weight=w, _input=x, target=target, bias=b
    )
    plain = LigerCrossEntropyLoss(classes, **OPTIONS, reduction=reduction, **flags)(_input=x @ w.T + b, target=target)
    for got in (fused, plain):
        torch.testing.assert_close((got.loss, got.z_loss), (want.loss, want.z_loss))
        assert got.token_accuracy == want.token_accuracy
        assert torch.equal(got.predicted_tokens, want.predicted_tokens)
    assert want.predicted_tokens[target == 3].tolist() == [-1, -1]
    only = LigerFusedLinearCrossEntropyLoss(classes, **OPTIONS, reduction=reduction)(w, x, target, b)
    assert torch.equal(only, fused.loss)


def test_options_of_liger_kernel_that_are_not_here():
    LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"accum_dtype must be None or torch\.float32, got torch\.bfloat16"):
        LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="use_token_scaling must be False"):
        LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)


def test_class_weights_follow_the_module_and_stay_out_of_the_checkpoint():
    loss = LigerCrossEntropyLoss(torch.ones(4)).double()
    assert loss.weight.dtype == torch.float64
    assert not loss.state_dict()
