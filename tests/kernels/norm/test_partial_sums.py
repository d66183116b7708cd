import pytest
import torch

from liger_models.kernels.norm import partial_sums as module
from liger_models.kernels.norm.partial_sums import sum_partials

from ..rope.test_rope import draw, dtypes


@pytest.mark.parametrize("split", [37, 5, 0])
@pytest.mark.parametrize("programs", [0, 1, 9])
def test_adds_the_partial_sums(kernel_device, programs, split, monkeypatch, poisoned_empty):
    """One or two results, also where a block of columns holds parts of both, and zeros of no program."""
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "COLUMNS", 16)
    partial = draw(programs, 37, device=kernel_device)
    for dtype in dtypes(kernel_device):
        outs = [torch.empty(size, dtype=dtype, device=kernel_device) for size in (split, 37 - split)]
        sum_partials(partial, *(outs if split < 37 else outs[:1]))
        want = partial.double().sum(0).to(dtype)
        torch.testing.assert_close(torch.cat(outs), want)


def test_takes_partial_sums_of_any_shape(kernel_device):
    partial = draw(3, 2, 4, device=kernel_device)
    first, second = torch.empty(2, 4, device=kernel_device).unbind()
    sum_partials(partial, first, second)
    torch.testing.assert_close(torch.stack([first, second]), partial.sum(0))
