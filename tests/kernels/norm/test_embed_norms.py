import pytest
import torch

from liger_models.kernels.norm.embed_norms import embed_norms, embed_norms_reference

from ..oracle import opcheck
from ..rope.test_rope import draw, dtypes


def tensors(C, dtype, device):
    table, hidden = draw(11, C, dtype=dtype, device=device), draw(3, 2, C, dtype=dtype, device=device)[:, 1]
    tokens = torch.tensor([[3, 1], [0, 2], [10, 5]], device=device)[:, 0]  # rows and tokens of slices
    return table, tokens, hidden, draw(C, dtype=dtype, device=device), draw(C, dtype=dtype, device=device, seed=1)


@pytest.mark.parametrize("C", [7, 300])
def test_matches_fp64(kernel_device, C, poisoned_empty):
    for dtype in dtypes(kernel_device):
        for options in ((1e-6, 0.0, False), (1e-3, 1.0, True)):
            table, tokens, *others = tensors(C, dtype, kernel_device)
            found = embed_norms(table, tokens, *others, *options)
            exact = embed_norms_reference(table.double(), tokens, *(x.double() for x in others), *options)
            plain = embed_norms_reference(table, tokens, *others, *options)
            assert found.dtype == dtype
            error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (found, plain))
            assert error <= 1.5 * allowed + torch.finfo(dtype).eps


def test_opcheck(kernel_device):
    opcheck(torch.ops.liger_models.embed_norms, (*tensors(20, torch.float32, kernel_device), 1e-6, 0.0, False))


def test_bad_arguments():
    table, tokens, hidden, *weights = tensors(8, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"hidden \[N, C\], and the weights \[C\], got \[11, 8\], \[3\], \[3, 7\]"):
        embed_norms(table, tokens, hidden[:, 1:], *weights)
    with pytest.raises(TypeError, match=r"table and hidden must have one dtype, got torch.float64 and torch.float32"):
        embed_norms(table.double(), tokens, hidden, *weights)
