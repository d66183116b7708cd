import pytest
import torch

from liger_models.kernels.loss import verify_drafts as file
from liger_models.kernels.loss.choose_tokens import choose_tokens
from liger_models.kernels.loss.verify_drafts import verify_drafts, verify_drafts_reference

from ..oracle import opcheck
from ..rope.test_rope import dtypes


def arguments(rows, k, V, dtype, device):
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(rows * (k + 1), 2, V, generator=generator).to(device, dtype)[:, 1]  # rows of a slice
    near = logits.view(rows, k + 1, V)[:, :k] + torch.randn(rows, k, V, generator=generator).to(device)
    near[0] = logits.view(rows, k + 1, V)[0, :k]  # the distributions of the first row are equal
    tokens = torch.randint(V, (rows, k + 1), generator=generator).to(device)
    drafts = tokens[:, 1:]
    log_probs = near.log_softmax(2).gather(2, drafts[..., None])[..., 0]
    seeds = torch.randint(2**62, (len(logits),), generator=generator).to(device)
    return logits, drafts, near, log_probs, seeds


@pytest.mark.parametrize("k", [1, 3])
def test_matches_plain_torch(kernel_device, k, monkeypatch, poisoned_empty):
    """With a vocabulary in several steps, and with scores that exclude tokens."""
    monkeypatch.setattr(file, "BLOCK", 16)
    for dtype in dtypes(kernel_device):
        logits, *others = arguments(9, k, 50, dtype, kernel_device)
        scores = (logits / 0.7).float()
        scores[:, 1::3] = -torch.inf
        for chosen_from in (None, scores):
            chosen, agree, log_probs = verify_drafts(logits, chosen_from, *others)
            wants = verify_drafts_reference(logits.double(), chosen_from, *others)
            assert torch.equal(chosen, wants[0])
            assert torch.equal(agree, wants[1])
            assert agree.any()
            assert not agree.all()
            torch.testing.assert_close(log_probs.double(), wants[2], rtol=1e-5, atol=1e-5)


def test_tokens_have_the_distribution_of_the_model():
    """The chi-square statistic of the first token, for drafts from another distribution."""
    V, rows = 5, 20000
    p, q = (torch.tensor(x).log() for x in ([0.1, 0.3, 0.2, 0.0, 0.4], [0.3, 0.3, 0.1, 0.1, 0.2]))
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(2**62, (3, rows), generator=generator)
    proposed = q.expand(rows, V).contiguous()
    drafts, log_probs = choose_tokens(proposed, None, seeds[0], torch.zeros_like(seeds[0]))
    chosen, agree, _ = verify_drafts(
        p.repeat(2 * rows, 1), None, drafts[:, None], proposed[:, None], log_probs[:, None], seeds[1:].flatten()
    )
    counts = torch.bincount(chosen[:, 0], minlength=V)
    assert counts[3] == 0
    expected = (rows * p.exp())[counts > 0]
    assert ((counts[counts > 0] - expected) ** 2 / expected).sum() < 18  # less in 99.9% of cases
    assert 0.6 * rows < agree.sum() < 0.8 * rows  # Σ min(p, q) = 0.7


def test_opcheck(kernel_device):
    logits, *others = arguments(2, 1, 9, torch.float32, kernel_device)
    opcheck(torch.ops.liger_models.verify_drafts, (logits, logits * 2, *others))


def test_bad_arguments():
    logits, *others = arguments(2, 1, 9, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"drafts \[2, 1\], logits and scores must be \[4, V\].* got \[4, 8\], none"):
        verify_drafts(logits[:, 1:], None, *others)
