import pytest
import torch

from liger_models.kernels.moe.permutation import sort_by_expert

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
