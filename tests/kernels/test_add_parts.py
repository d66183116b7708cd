import pytest
import torch

from liger_models.kernels.add_parts import add_parts


@pytest.mark.parametrize("count", [0, 1, 5, 2048, 5003])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_sum_is_that_in_fp32(backend, ranks, count, poisoned_empty):
    generator = torch.Generator().manual_seed(ranks)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        parts = torch.randn(ranks, count, generator=generator).to(backend, dtype)
        out = torch.empty(count, device=backend)
        add_parts(parts, out, 3)
        torch.testing.assert_close(out, (parts.double().sum(0) / 3).float(), rtol=1e-6, atol=1e-6)
        if ranks == 2:  # one addition and a power of two: one rounding
            add_parts(parts, out, 2)
            assert torch.equal(out, (parts[0].float() + parts[1].float()) / 2)


def test_other_dtypes_of_the_result(backend):
    parts = torch.randn(3, 10).to(backend, torch.bfloat16)
    for dtype in (torch.float64, torch.bfloat16):
        out = torch.empty(10, dtype=dtype, device=backend)
        add_parts(parts, out, 2)
        torch.testing.assert_close(out, (parts.double().sum(0) / 2).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_more_than_two_gibibytes(ranks):
    parts = torch.randn(ranks, 1_200_000_003, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(parts.shape[1], device="cuda")
    add_parts(parts, out)
    for part in (slice(None, 999), slice(-999, None)):
        torch.testing.assert_close(out[part], parts[:, part].float().sum(0))
