import pytest
import torch

from liger_models.kernels.loss import choose_tokens as file
from liger_models.kernels.loss.choose_tokens import choose_tokens, choose_tokens_reference

from ..oracle import opcheck
from ..rope.test_rope import dtypes


@pytest.mark.parametrize("V", [1, 70, 8 * 16 + 3])
def test_matches_plain_torch(kernel_device, V, monkeypatch, poisoned_empty):
    """Greedy and seeded, from logits or from scores with excluded tokens, and with a row in several parts."""
    monkeypatch.setattr(file, "BLOCK", 32)
    for dtype in dtypes(kernel_device):
        logits = (3 * torch.randn(3, 2, V, device=kernel_device)).to(dtype)[:, 1]  # rows of a slice
        scores = (logits / 0.7).float()
        scores[:, 1::3] = -torch.inf
        draws = {"seeds": torch.tensor([0, 5, 2**40 + 5]), "steps": torch.tensor([0, 70, 2**31])}
        draws = {name: numbers.to(kernel_device) for name, numbers in draws.items()}
        for options in ({}, {"scores": scores}, draws, {"scores": scores, **draws}):
            tokens, log_probs = choose_tokens(logits, **options)
            want, _ = choose_tokens_reference(logits.double(), **options)
            assert torch.equal(tokens, want)
            exact = logits.double().log_softmax(1).gather(1, want[:, None])[:, 0]
            torch.testing.assert_close(log_probs.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_large_vocabulary(kernel_device, poisoned_empty):
    """With the default block, a part without finite logits, a part of a few tokens, and large negative logits."""
    V = 2 * file.BLOCK + 5
    logits = 3 * torch.randn(3, V, device=kernel_device) - torch.tensor([[0], [40], [400]], device=kernel_device)
    logits[:, file.BLOCK : 2 * file.BLOCK] = -torch.inf
    numbers = torch.arange(3, device=kernel_device)
    for draws in ((), (numbers, numbers)):
        tokens, log_probs = choose_tokens(logits, None, *draws)
        want, _ = choose_tokens_reference(logits.double(), None, *draws)
        assert torch.equal(tokens, want)
        exact = logits.double().log_softmax(1).gather(1, want[:, None])[:, 0]
        torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=1e-6)


def test_the_first_of_equal_scores_is_chosen(backend, monkeypatch):
    monkeypatch.setattr(file, "BLOCK", 32)
    logits = torch.zeros(3, 100, device=backend)
    logits[0, 20:] = logits[1, 77:] = 1
    logits[2] = -torch.inf
    assert choose_tokens(logits)[0].tolist() == [20, 77, 0]


def test_a_logit_that_is_no_number_shows(kernel_device):
    """In the log-probability of its row, even if another token is chosen."""
    logits = torch.randn(3, 20000, device=kernel_device)
    logits[1, 9999] = float("nan")
    for draws in ((), (torch.arange(3, device=kernel_device), torch.zeros(3, dtype=torch.int64, device=kernel_device))):
        _, log_probs = choose_tokens(logits, None, *draws)
        assert log_probs.isnan().tolist() == [False, True, False]


def test_opcheck(kernel_device):
    logits, numbers = torch.randn(2, 9, device=kernel_device), torch.tensor([3, 4], device=kernel_device)
    opcheck(torch.ops.liger_models.choose_tokens, (logits, logits * 2, numbers, numbers))


def test_bad_arguments():
    logits = torch.zeros(2, 9)
    with pytest.raises(ValueError, match=r"must be \[N, V\] with V > 0, got \[2, 9\] and \[2, 8\]"):
        choose_tokens(logits, logits[:, 1:])
    with pytest.raises(ValueError, match=r"seeds and steps must both be \[2\], or None, got \[2\] and none"):
        choose_tokens(logits, seeds=torch.zeros(2))
