import pytest
import torch

from liger_models.kernels.frozen import float8_tiles as module
from liger_models.kernels.frozen.float8_tiles import STEP, TILE, takes_tiles, tile_product
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE, rounded_product


def draw(*size, device):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device)


def operands(N, out, K, device):
    codes, weight = draw(N, K, device=device).to(DTYPE), draw(out, K, device=device).to(DTYPE)
    return codes, draw(N, device=device).abs(), weight, draw(out, device=device).abs()


def fp64(codes, scales, weight, weight_scales, bias):
    y = (codes.double() @ weight.double().T) * scales.double()[:, None] * weight_scales.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 16), (33, 48, STEP + 16), (TILE + 1, 2 * TILE + 16, 2 * STEP)], ids=str)
def test_the_product_matches_fp64(kernel_device, shape, with_bias, poisoned_empty):
    given = operands(*shape, kernel_device)
    bias = draw(shape[1], device=kernel_device).bfloat16() if with_bias else None
    y, want = tile_product(*given, bias), fp64(*given, bias)
    assert y.dtype == torch.bfloat16
    # The hardware adds products with fewer bits than fp32, and y is rounded to bfloat16.
    terms = fp64(given[0].double().abs(), given[1], given[2].double().abs(), given[3], None)
    eps = torch.finfo(torch.bfloat16).eps / (2 if kernel_device == "cuda" else 1)  # the interpreter truncates
    assert ((y.double() - want).abs() <= eps * want.abs() + 5e-4 * terms).all()


def test_there_may_be_no_rows(kernel_device):
    assert tile_product(*operands(0, 48, 64, kernel_device), None).shape == (0, 48)


def test_small_products_are_computed_by_tiles_and_large_ones_by_the_library(kernel_device, monkeypatch):
    taken = []
    monkeypatch.setattr(module, "num_programs", lambda x, per_sm: 3)
    monkeypatch.setattr(
        "liger_models.kernels.frozen.frozen_float8_linear.tile_product",
        lambda *operands: taken.append(len(operands[0])) or tile_product(*operands),
    )
    for N, out, is_small in ((TILE, 3 * TILE, True), (TILE + 1, 2 * TILE, False), (2 * TILE, TILE, True)):
        given = operands(N, out, 64, kernel_device)
        y, want = rounded_product(*given, None), fp64(*given, None)
        assert takes_tiles(given[0], given[2]) == is_small
        assert ((y.double() - want).norm() / want.norm()) < 5e-3
    assert taken == [TILE, 2 * TILE]


def test_operands_need_not_be_contiguous(kernel_device, monkeypatch):
    codes, scales, weight, weight_scales = operands(33, 48, 64, kernel_device)
    wide = torch.cat([weight.view(torch.uint8)] * 2, 1).view(DTYPE)[:, :64]
    assert takes_tiles(codes, weight)
    assert not takes_tiles(codes, wide)
    spaced = [torch.stack([x, x], 1)[:, 0] for x in (scales, weight_scales, draw(48, device=kernel_device).bfloat16())]
    y = tile_product(codes, spaced[0], weight, *spaced[1:])
    assert torch.equal(y, tile_product(codes, scales, weight, weight_scales, spaced[2].contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [64, 200, 256])
@pytest.mark.parametrize("shape", [(3072, 3072), (3072, 8192), (5120, 3072)], ids=str)
def test_projections_of_a_model_match_fp64(N, shape):
    given = operands(N, *shape, "cuda")
    y, want = tile_product(*given, None), fp64(*given, None)
    assert ((y.double() - want).norm() / want.norm()) < 3e-3
