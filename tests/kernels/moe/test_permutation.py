import pytest
import torch

from liger_models.kernels.moe.permutation import permute, sort_by_expert, unpermute

from .cases import choose


@pytest.mark.parametrize(("N", "K", "X"), [(1, 1, 1), (3, 2, 80), (19, 3, 7), (48, 1, 2), (11, 5, 5)])
def test_sort(kernel_device, N, K, X, many_blocks):
    for kind in ("any", "some", "same"):
        experts = choose(N, K, X, kind).to(kernel_device)
        order, slot, ends = sort_by_expert(experts, X)
        want = experts.reshape(-1).argsort(stable=True)
        assert torch.equal(order.long(), want)
        assert torch.equal(slot.long(), want.argsort())
        assert torch.equal(ends.long(), torch.bincount(experts.reshape(-1), minlength=X).cumsum(0))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_copies_without_an_expert(kernel_device, share, many_blocks, poisoned_empty):
    """They are sorted behind the others, and nothing is read or written for them."""
    N, K, X, C = 19, 3, 7, 5
    generator = torch.Generator().manual_seed(0)
    there = torch.rand(N, K, generator=generator) < share
    experts, S = torch.where(there, choose(N, K, X), X).to(kernel_device), int(there.sum())
    order, slot, ends = sort_by_expert(experts, X, S)
    want = experts.reshape(-1).argsort(stable=True)
    assert torch.equal(order.long(), want[:S])
    assert torch.equal(slot.long(), want.argsort())
    assert torch.equal(ends.long(), torch.bincount(experts.reshape(-1), minlength=X + 1)[:X].cumsum(0))
    x = torch.randn(N, C, generator=generator).to(kernel_device)
    rows = permute(x, slot, S, x.dtype)
    assert torch.equal(rows, x[order.long() // K])
    total = unpermute(rows, slot, None, N, x.dtype)
    torch.testing.assert_close(total, x * there.sum(1, keepdim=True).to(x))
