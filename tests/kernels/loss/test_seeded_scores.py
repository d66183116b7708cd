import pytest
import torch

from liger_models.kernels.loss.seeded_scores import (
    BLOCK,
    _hash,
    exponential_noise,
    seeded_scores,
    seeded_scores_reference,
)

SEEDS = [0, 5, 2**40 + 5, 2**63 - 1]


@pytest.mark.parametrize("step", [0, 3, [0, 1, 2**31 - 1, 70]], ids=str)
def test_matches_plain_torch(kernel_device, step, poisoned_empty):
    seeds = torch.tensor(SEEDS, device=kernel_device)
    step = step if isinstance(step, int) else torch.tensor(step, device=kernel_device)
    logits = torch.randn(len(SEEDS), 2 * BLOCK + 7, device=kernel_device)
    logits[:, 3::5] = -torch.inf
    torch.testing.assert_close(
        seeded_scores(logits, seeds, step), seeded_scores_reference(logits, seeds, step), rtol=2e-6, atol=2e-6
    )


def test_small_noise_is_accurate(kernel_device):
    """Tokens with small noise are drawn though they are unlikely."""
    V = 2**16 + 2**19 * (kernel_device == "cuda")
    scores = seeded_scores(torch.zeros(1, V, device=kernel_device), torch.tensor([7], device=kernel_device), 9)
    noise = exponential_noise(torch.tensor([7]), 9, V).double()
    u = -torch.expm1(-noise)
    assert u.min() < 1e-4
    torch.testing.assert_close((-scores.double().cpu()).exp(), noise, rtol=1e-5, atol=0)


def test_noise_is_accurate_near_the_end_of_the_polynomial(kernel_device):
    """The polynomial is used for u < ¼, and the logarithm for larger u."""
    step, V = 9, 2**16 + 3
    key = _hash(_hash(_hash(torch.tensor(7))) ^ step)
    bits = _hash(_hash(torch.arange(V) ^ key) ^ _hash(key ^ 0x9E3779B9))
    u = ((bits.float() + 0.5) * 2.0**-32).double()
    scores = seeded_scores(torch.zeros(1, V, device=kernel_device), torch.tensor([7], device=kernel_device), step)
    near = (u - 0.25).abs() < 0.02
    assert (near & (u < 0.25)).sum() > 1000 < (near & (u > 0.25)).sum()
    exact = -(-torch.log1p(-u)).log()
    torch.testing.assert_close(scores[0].double().cpu()[near], exact[near], rtol=0, atol=1e-6)


def test_rows_of_a_slice(kernel_device):
    """Logits of the last position, whose rows do not lie one after the other."""
    logits = torch.randn(2, 3, 100, device=kernel_device)[:, -1]
    seeds = torch.tensor([1, 2], device=kernel_device)
    torch.testing.assert_close(seeded_scores(logits, seeds, 0), seeded_scores_reference(logits, seeds, 0))
