import pytest
import torch

from liger_models.kernels.moe import experts as experts_module
from liger_models.kernels.moe import grouped_mm as grouped_mm_module
from liger_models.kernels.moe import library_runs

from ..oracle import opcheck
from .cases import GPU_DTYPES, check, make


@pytest.mark.parametrize("kind", ["any", "some", "same"])
def test_products_of_the_library(kernel_device, monkeypatch, kind):
    """What is asked of PyTorch's grouped_mm is within its limits, and right, whatever the experts' row counts."""
    calls = []

    def grouped_mm(a, b, *, offs):
        calls.append(b.dim())
        assert offs.dtype == torch.int32
        assert offs.is_contiguous()
        for matrix in (a, b):
            one, other = sorted(matrix.stride()[-2:])
            assert one == 1
            assert other % 8 == 0
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        if b.dim() == 3:
            assert a.stride(1) == 1
            return torch.cat([rows @ matrix for rows, matrix in zip(a.split(counts), b, strict=True)])
        assert (a.stride(0), b.stride(1)) == (1, 1)  # the only layout without conditions on the row counts
        return torch.stack([x @ y for x, y in zip(a.split(counts, 1), b.split(counts), strict=True)])

    monkeypatch.setattr(grouped_mm_module, "_library_mm", grouped_mm)
    monkeypatch.setattr(
        experts_module, "library_runs", lambda *weights: all(weight.is_contiguous() for weight in weights)
    )
    inputs, experts, dy = make((13, 2, 6, 24, 16), torch.float32, kernel_device, kind=kind)
    inputs[2] = inputs[2].transpose(1, 2).contiguous().transpose(1, 2)
    check(inputs, experts, dy)
    assert sorted(calls) == [2, 2, 3, 3, 3, 3]


def test_library_runs_nowhere_on_the_cpu():
    for dtype in GPU_DTYPES:
        assert not library_runs(torch.empty(4, 16, 8, dtype=dtype), torch.empty(4, 8, 8, dtype=dtype))


@pytest.mark.gpu
def test_where_the_library_runs():
    make = lambda X, F, C: (torch.empty(X, 2 * F, C, **bf16), torch.empty(X, C, F, **bf16))
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert library_runs(*make(4, 24, 16)) == hopper
    assert not library_runs(*make(4, 20, 16))
    assert not library_runs(*make(4, 24, 20))
    assert not library_runs(*make(1024, 8, 8))
    assert not library_runs(*(weight.half() for weight in make(4, 24, 16)))
    unaligned = torch.empty(4 * 48 * 16 + 1, **bf16)[1:].view(4, 48, 16)
    assert not library_runs(unaligned, make(4, 24, 16)[1])


def test_opcheck_of_the_reference():
    rows = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, 6, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([1, 1, 4])
    opcheck(torch.ops.liger_models.grouped_product, (rows, weight.transpose(1, 2), ends))
    opcheck(torch.ops.liger_models.grouped_outer, (rows.detach(), rows.detach(), ends))


def test_second_derivatives_of_the_reference():
    rows, weight, ends = torch.randn(7, 3).double(), torch.randn(3, 3, 4).double(), torch.tensor([2, 2, 7])
    product = lambda rows, weight: grouped_mm_module.GROUPED_PRODUCT(rows, weight, ends)
    assert torch.autograd.gradgradcheck(product, (rows.requires_grad_(), weight.requires_grad_()))
