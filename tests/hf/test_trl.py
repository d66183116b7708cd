"""TRL's trainers on the models of `liger_models.hf`, beside the same trainers on the models of transformers."""

import pytest
import torch

from ..arch.families import FIRST_CASES, LIMIT, assert_same_gradients, error, text_sizes, tokens
from ..late import Late

trl = Late("trl", needs="TRL is not installed")
datasets = Late("datasets", needs="datasets is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and transformers'


@pytest.mark.parametrize("hf", FIRST_CASES, indirect=True, ids="-".join)
def test_the_head_that_trl_gives_a_model(hf):
    """It calls the body, and computes the loss from the head's weight and the configuration."""
    from trl.trainer.utils import add_fused_lm_head

    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    ids = tokens(arch, variant, 2, 12)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[1, -3:], mask[1, -3:] = -100, 0
    routed = {"output_router_logits": True} if "num_experts_per_tok" in text_sizes(arch, variant) else {}
    outs = []
    for model in (theirs, ours.train()):
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        outs.append(model(ids, attention_mask=mask, labels=labels, fused_lm_head=True, **routed))
        outs[-1].loss.backward()
    want, got = outs
    for name in ("loss", "log_probs", "entropy", "aux_loss"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None and other is None) or error(one, other) <= LIMIT, name
    assert torch.equal(got.is_top1, want.is_top1)
    del theirs.forward, ours.forward
    assert_same_gradients(ours.model.decoder, theirs)
