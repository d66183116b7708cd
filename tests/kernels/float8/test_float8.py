import pytest
import torch
from torch import Tensor

from liger_models.kernels.activation.gated_act import ACTIVATIONS, gated_act_backward, gated_act_forward
from liger_models.kernels.float8.float8 import (
    RECIPES,
    Float8,
    Matrix,
    add_amax,
    float8_dtype,
    normed_matrix,
    plain,
    rms_norm_round,
    round_gradient,
    round_known,
    round_matrix,
    round_reference,
    round_rows,
    round_tiles,
    scaled_product,
    tensor_scale,
    transposed,
)
from liger_models.kernels.norm.fused_norm import FusedNorm

SHAPES = [(1, 16), (37, 48), (130, 80), (3, 2064)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(*size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, with a row of zeros and a column of zeros."""
    generator = torch.Generator().manual_seed(sum(size))
    x = torch.randn(*size, generator=generator) * torch.randn(size[0], 1, generator=generator).exp()
    x[-1] = 0
    x[:, 3] = 0
    return x.clamp(-8, 8).to(device, dtype)


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32, torch.float16]


def assert_equal(got: Float8, want: Float8, dtype: torch.dtype) -> None:
    """Bit for bit; zeros of columns that were padded do not count."""
    assert got.data.dtype == want.data.dtype == dtype
    K = want.data.shape[1]
    assert torch.equal(got.data.view(torch.uint8)[:, :K], want.data.view(torch.uint8))
    assert not got.data.view(torch.uint8)[:, K:].any()
    assert torch.equal(got.inverse, want.inverse)


def matrices(N: int, C: int, device: str, dtype: torch.dtype):
    """Matrices that kernels compute, and the same as tensors that other kernels compute; of large ones not all."""
    x = draw(N, C, device=device, dtype=dtype)
    yield plain(x), x
    weight = draw(1, C, device=device, dtype=dtype)[0] + 1
    for offset, scale_in_fp32 in ((0.0, False), (1.0, True))[: 2 if N * C < 2000 else 1]:
        norm = FusedNorm(weight, weight_offset=offset, scale_in_fp32=scale_in_fp32)
        _, h, rstd = norm.forward(None, x)
        yield (
            normed_matrix(h, weight, rstd, offset, scale_in_fp32),
            norm.again(h, rstd, dtype),
        )
    gate_up = draw(N, 2 * C, device=device, dtype=dtype)
    for act in ACTIVATIONS if N * C < 2000 else ["silu"]:
        yield Matrix("product", gate_up, act=act), gated_act_forward(gate_up, act)
        yield Matrix("gradient", gate_up, x, act=act), gated_act_backward(x, gate_up, act, False)[0]


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rounded_bit_for_bit(kernel_device, size, recipe, poisoned_empty):
    """By rows and by columns, whatever the kernel computes on the way."""
    options = RECIPES[recipe]
    for dtype in dtypes(kernel_device)[: 1 if kernel_device == "cpu" and size[0] * size[1] > 2000 else 2]:
        for matrix, x in matrices(*size, kernel_device, dtype):
            assert matrix.shape == x.shape
            for gradient in {False, options.wide_gradients}:
                float8 = float8_dtype(x.device, gradient and options.wide_gradients)
                reference = lambda x: round_reference(x, float8, options.by_row, options.power_of_2)  # noqa: B023
                rows, columns = round_matrix(matrix, options, gradient=gradient, columns=True)
                assert_equal(rows, reference(x), float8)
                assert_equal(columns, reference(x.t()), float8)


def test_parts_and_known_maxima(kernel_device, poisoned_empty):
    x = draw(21, 48, device=kernel_device, dtype=torch.float32)
    matrix, recipe = plain(x.view(3, 7, 48)), RECIPES["tensorwise"]
    amax = torch.full((1,), 1.5 * x.abs().max().item(), device=kernel_device)
    rows, columns = round_matrix(matrix, recipe, amax=amax.clone())
    assert columns is None
    larger = torch.cat([x, amax.expand(1, 48)])
    assert_equal(rows, Float8(*(t[:21] if t.dim() else t for t in round_reference(larger, E4M3, False, False))), E4M3)
    nothing, columns = round_matrix(matrix, recipe, rows=False, columns=True, amax=amax, known=True)
    assert nothing is None
    assert torch.equal(columns.data.view(torch.uint8)[:, :21], rows.data.view(torch.uint8).t())
    assert columns.data.shape == (48, 32)
    per_column = torch.zeros(48, device=kernel_device)
    add_amax(matrix, per_column)
    assert torch.equal(per_column, x.abs().amax(0))


def test_a_part_rounded_with_the_scale_of_the_whole_and_transposed(kernel_device, poisoned_empty):
    for dtype in dtypes(kernel_device):
        x = draw(48, 272, device=kernel_device, dtype=dtype)
        want, columns = round_matrix(plain(x), RECIPES["tensorwise"], columns=True)
        amax = x.abs().max()[None].float()
        parts = torch.cat([round_known(part, E4M3, amax).view(torch.uint8) for part in x.split(16)])
        assert torch.equal(parts, want.data.view(torch.uint8))
        assert torch.equal(tensor_scale(amax, E4M3).reciprocal()[0], want.inverse)
        assert_equal(transposed(want), columns, E4M3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("C", [16, 272])
def test_norm_rounds_its_rows(kernel_device, recipe, C, poisoned_empty):
    options = RECIPES[recipe]
    for dtype in dtypes(kernel_device):
        x, residual = draw(9, C, device=kernel_device, dtype=dtype), draw(9, C, device=kernel_device, dtype=dtype)
        weight = draw(1, C, device=kernel_device, dtype=dtype)[0] + 1
        for branch in (x, None):
            amax = torch.zeros(1, device=kernel_device)
            rows, h, rstd = rms_norm_round(branch, residual, weight, 1e-6, 1.0, True, options, amax)
            norm = FusedNorm(weight, weight_offset=1.0, scale_in_fp32=True)
            want, stream, _ = norm.forward(branch, residual)
            assert torch.equal(h, stream)
            again = norm.again(h, rstd, dtype)
            torch.testing.assert_close(again, want)
            assert_equal(rows, round_reference(again, E4M3, options.by_row, options.power_of_2), E4M3)
            assert options.by_row or amax == again.abs().max()


@pytest.mark.cases(4)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("known", [False, True])
def test_gradient_and_product_in_one_pass(kernel_device, recipe, known, poisoned_empty):
    options = RECIPES[recipe]
    for dtype in dtypes(kernel_device):
        gate_up = draw(37, 96, device=kernel_device, dtype=dtype)
        dy = draw(37, 48, device=kernel_device, dtype=dtype)
        du, p = gated_act_backward(dy, gate_up, "silu", True)
        amax = p.abs().max()[None].float() if known else None
        parts = round_gradient(gate_up, dy, "silu", options, amax, rows=True, columns=True, product=True)
        formats = [float8_dtype(p.device, options.wide_gradients)] * 2 + [float8_dtype(p.device)]
        for part, want, float8 in zip(parts, (du, du.t(), p.t()), formats, strict=True):
            assert_equal(part, round_reference(want, float8, options.by_row, options.power_of_2), float8)
        parts = round_gradient(gate_up, dy, "silu", options, amax, rows=True, columns=False, product=False)
        assert_equal(parts[0], round_reference(du, formats[0], options.by_row, options.power_of_2), formats[0])
        assert parts[1:] == (None, None)


def test_nan_and_infinity_stay(kernel_device):
    """A loss that diverges must show."""
    bad_numbers = [float("nan")] if kernel_device == "cpu" else [float("nan"), float("inf")]  # NumPy warns of 1 / 0
    for bad in bad_numbers:
        x = torch.ones(16, 16, device=kernel_device)
        x[2, 3] = bad
        for recipe in RECIPES.values():
            for part in round_matrix(plain(x), recipe, columns=True):
                assert part.data.float().isnan().any()


@pytest.mark.parametrize("by_row", [False, True])
def test_products_are_those_of_what_was_rounded(backend, by_row):
    x = draw(37, 64, device=backend, dtype=torch.float32)
    weight = draw(48, 64, device=backend, dtype=torch.float32)
    a, b = (round_reference(t, E4M3, by_row, False) for t in (x, weight))
    exact = lambda t: t.data.double().cpu() * t.inverse.double().cpu().reshape(-1, 1)
    for dtype in (torch.float32, torch.bfloat16):
        y = scaled_product(a, b, dtype)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double().cpu(), exact(a) @ exact(b).t(), rtol=2**-8, atol=1e-2)
    assert scaled_product(Float8(a.data[:0], a.inverse[:0] if by_row else a.inverse), b, torch.float32).shape == (0, 48)


def test_recipes_are_torchaos():
    """Formats, scales and what is left unrounded."""
    config = pytest.importorskip("torchao.float8").Float8LinearConfig
    utils = pytest.importorskip("torchao.float8.float8_utils")
    for name, recipe in RECIPES.items():
        theirs = config.from_recipe_name(name)
        axiswise = lambda cast: cast.scaling_granularity.value == "axiswise"
        for cast in (theirs.cast_config_input, theirs.cast_config_weight, theirs.cast_config_grad_output):
            assert axiswise(cast) == recipe.by_row
        assert theirs.cast_config_grad_output.target_dtype == (E5M2 if recipe.wide_gradients else E4M3)
        assert theirs.round_scales_to_power_of_2 == recipe.power_of_2
        assert (theirs.cast_config_input_for_grad_weight.scaling_type.value == "dynamic") == recipe.rounds_dw
        assert axiswise(theirs.cast_config_weight_for_grad_input) == (recipe.by_row and recipe.rounds_dw)
        x = draw(37, 48, device="cpu", dtype=torch.bfloat16)
        options = {"scaling_granularity": theirs.cast_config_input.scaling_granularity, "axiswise_dim": -1}
        scale = utils.tensor_to_scale(x, E4M3, round_scales_to_power_of_2=recipe.power_of_2, **options)
        ours = round_reference(x, E4M3, recipe.by_row, recipe.power_of_2)
        assert torch.equal(ours.inverse.view_as(scale), scale.reciprocal())
        assert torch.equal(ours.data.float(), utils.to_fp8_saturated(x.float() * scale, E4M3).float())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4096, 4096), (1000, 28672)])
def test_real_sizes(size):
    for recipe in RECIPES.values():
        x = draw(*size, device="cuda", dtype=torch.bfloat16)
        rows, columns = round_matrix(plain(x), recipe, columns=True)
        want = [round_reference(t, E4M3, recipe.by_row, recipe.power_of_2) for t in (x, x.t())]
        assert_equal(rows, want[0], E4M3)
        assert_equal(columns, want[1], E4M3)
        assert round_rows(plain(x), E4M3, False).data.shape == size
    assert round_tiles(plain(x), x.abs().max()[None].float(), E4M3, False, rows=True, columns=False)[1] is None
