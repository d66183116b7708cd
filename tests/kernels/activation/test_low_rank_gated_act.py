"""The gated activation that adds a low-rank term, and its codes. `gated_mlp`'s tests cover the terms, too."""

import pytest
import torch

from liger_models.kernels.activation.gated_act import ACTIVATIONS, gated_act_reference
from liger_models.kernels.activation.low_rank_gated_act import (
    GROUP,
    Codes,
    empty_codes,
    low_rank_gated_act,
    low_rank_gated_act_backward,
)


def decode(codes: Codes) -> torch.Tensor:
    """The numbers that the codes stand for, [N, 2 F] fp32."""
    F = codes.codes.shape[1] // 2
    scales = codes.scales.float().repeat_interleave(GROUP, 1)[:, :F]  # [N, F, 2]
    return (codes.codes.float().unflatten(1, (F, 2)) * scales).flatten(1)


def make(N, F, R, dtype, device):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator).mul(0.5).to(device, dtype)
    return draw(N, 2 * F), draw(N, F), (draw(N, R), draw(2 * F, R).t()), (draw(N, R), draw(R, F))


def dtypes(device):
    # The interpreter truncates bfloat16 where hardware rounds.
    return [torch.float32, torch.float16, torch.bfloat16] if device == "cuda" else [torch.float32, torch.float16]


@pytest.mark.parametrize("with_term", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("N", "F"), [(1, 1), (3, 32), (70, 77)])
def test_codes_are_the_nearest_numbers(kernel_device, N, F, act, with_term, poisoned_empty):
    """The result does not change, and a number that is read back is as near as its group's scale allows."""
    for dtype in dtypes(kernel_device):
        u, _, term, _ = make(N, F, 5, dtype, kernel_device)
        term = term if with_term else None
        codes = empty_codes(u)
        y = low_rank_gated_act(u, act, term, codes)
        assert torch.equal(y, low_rank_gated_act(u, act, term))
        exact = u.double() + (0 if term is None else term[0].double() @ term[1].double())
        truth = gated_act_reference(exact, act)
        assert (y - truth).norm() <= torch.finfo(dtype).eps * 4 * truth.norm()

        groups = torch.nn.functional.pad(exact.abs().unflatten(1, (F, 2)), (0, 0, 0, -F % GROUP))
        largest = groups.unflatten(1, (-1, GROUP)).amax(2)  # [N, groups, 2]
        scales = codes.scales.double()
        assert (scales - largest / 126).abs().le(largest / 126 * 2**-7).all()
        half = scales.repeat_interleave(GROUP, 1)[:, :F].flatten(1) / 2
        assert (decode(codes) - exact).abs().le(half * 1.001).all()
        assert codes.codes.abs().max() in (126, 127)


@pytest.mark.parametrize("need_product", [False, True])
@pytest.mark.parametrize("with_term", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_backward_reads_codes(kernel_device, act, with_term, need_product, poisoned_empty):
    """The backward from codes is the backward from the numbers that the codes stand for."""
    for dtype in dtypes(kernel_device):
        u, dy, term, dy_term = make(70, 77, 5, dtype, kernel_device)
        dy_term = dy_term if with_term else None
        codes = empty_codes(u)
        low_rank_gated_act(u, act, term, codes)
        rounded = decode(codes)
        du, product = low_rank_gated_act_backward(dy.clone(), codes, act, need_product, None, dy_term)
        assert du.dtype == dtype
        wide_term = None if dy_term is None else tuple(factor.float() for factor in dy_term)
        expected = low_rank_gated_act_backward(dy.float(), rounded, act, need_product, None, wide_term)
        tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        assert (du - expected[0]).norm() <= tolerance * expected[0].norm()
        if need_product:
            assert product.dtype == dtype
            assert (product - expected[1]).norm() <= tolerance * expected[1].norm()
        else:
            assert product is None


def test_codes_of_zeros_and_tiny_numbers(kernel_device):
    u = torch.zeros(2, 64, device=kernel_device)
    u[1, ::2] = 1e-38  # the inverse of the scale is infinite
    codes = empty_codes(u)
    low_rank_gated_act(u, "silu", None, codes)
    assert not codes.codes.any()
    du, product = low_rank_gated_act_backward(torch.ones(2, 32, device=kernel_device), codes, "silu", True, None, None)
    assert not du.any()
    assert not product.any()
