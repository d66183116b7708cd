import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.frozen.groups import PIECES
from liger_models.kernels.frozen.nf4_linear import nf4_linear
from liger_models.kernels.frozen.nf4_rows import MOST_ROWS
from liger_models.kernels.frozen.products import quantized_linear, weight_for_op
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.invariant_linear import invariant_linear

from ...late import Late
from ..oracle import opcheck

quantization = Late("torchao.quantization", "4-bit weights need torchao")

SIZES = [((3, 64), 1), ((5, 128), 2), ((96, 192), 36), ((8 * PIECES // 64 + 1, 64), 1)]
"""[O, C], and scales with one factor."""


def make(shape, per_factor, dtype, device):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None]).to(device, dtype)
    return quantization.to_nf4(weight, 64, per_factor)


@pytest.mark.parametrize(("shape", "per_factor"), SIZES, ids=str)
def test_the_weight_is_torchaos_bit_for_bit(kernel_device, shape, per_factor, poisoned_empty):
    # The interpreter truncates bfloat16 where hardware rounds.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        weight = make(shape, per_factor, dtype, kernel_device)
        eye = torch.eye(shape[1], device=kernel_device, dtype=dtype)
        assert nf4_linear(eye, weight).equal(weight.get_original_weight().T)


@pytest.mark.parametrize(("shape", "per_factor"), SIZES, ids=str)
def test_a_single_row_is_multiplied_by_the_same_weight(kernel_device, shape, per_factor, poisoned_empty):
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        weight = make(shape, per_factor, dtype, kernel_device)
        original = weight.get_original_weight()
        for column in (0, 17, shape[1] - 1):
            x = torch.zeros(1, 1, shape[1], device=kernel_device, dtype=dtype)
            x[..., column] = 1
            assert nf4_linear(x, weight).equal(original[:, column].view(1, 1, -1))


def unrounded(weight):
    """The weight in fp64, whose scales are rounded as torchao's, and the products with the table are not."""
    codes, per_factor = weight.quantized_data, weight.scaler_block_size
    scales = weight.quantized_scalers.view(-1, per_factor) / weight.quantization_factor[:, None]
    scales = (scales.to(weight.dtype) + weight.scaler_mean).double().view(-1, 1)
    numbers = weight.nf4.double()[torch.stack([codes >> 4, codes & 15], -1).long()]
    return (numbers.view(-1, weight.block_size) * scales).view(weight.shape)


@pytest.mark.parametrize(("shape", "per_factor"), [*SIZES[:3], ((20, 1088), 20)], ids=str)
def test_few_rows_match_fp64(kernel_device, shape, per_factor, poisoned_empty):
    """Numbers of the weight are not rounded: what is left is the sum in fp32 and one rounding of the result."""
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernel_device == "cuda" else [])):
        weight = make(shape, per_factor, dtype, kernel_device)
        exact, limits = unrounded(weight), torch.finfo(dtype)
        for rows in (1,) if dtype == torch.float32 else (1, 2, 3, 9, MOST_ROWS):
            generator = torch.Generator().manual_seed(rows)
            sizes = (rows, 1, shape[1]), shape[:1]
            x, bias = (torch.randn(size, generator=generator).to(kernel_device, dtype) for size in sizes)
            for b in (None, bias):
                want, terms = (
                    F.linear(f(x.double()), f(exact), None if b is None else f(b.double()))
                    for f in (torch.Tensor.clone, torch.abs)
                )
                error = (nf4_linear(x, weight, b).double() - want).abs()
                assert (error <= limits.eps / 2 * want.abs() + 2e-6 * terms + limits.tiny).all()


def test_many_rows_are_multiplied_by_the_dense_weight(kernel_device):
    dtype = torch.float16
    weight = make((96, 192), 36, dtype, kernel_device)
    x = torch.randn(MOST_ROWS + 1, 192, device=kernel_device).to(dtype)
    dense = weight.get_original_weight()
    assert torch.equal(nf4_linear(x, weight), F.linear(x, dense))
    with batch_invariant():
        for rows in (1, 3):
            assert torch.equal(nf4_linear(x[:rows], weight), invariant_linear(x[:rows], dense))


@pytest.mark.gpu
def test_ptx_looks_up_what_other_devices_do(monkeypatch):
    for dtype in (torch.float16, torch.bfloat16):
        weight = make((96, 1088), 102, dtype, "cuda")
        for rows in (1, 2, 3, 8, 16, MOST_ROWS):
            x = torch.randn(rows, 1088, device="cuda").to(dtype)
            got = nf4_linear(x, weight)
            with monkeypatch.context() as patch:
                patch.setattr("liger_models.kernels.frozen.nf4_rows.has_ptx", lambda x: False)
                torch.testing.assert_close(got, nf4_linear(x, weight))
            eye = torch.eye(1088, device="cuda", dtype=dtype)
            for start in (0, 512, 1088 - rows):
                got = nf4_linear(eye[start : start + rows], weight)
                assert torch.equal(got, weight.get_original_weight()[:, start : start + rows].T)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_table_may_begin_anywhere(rows):
    """As the end of the tensor that a layer stores it in, with factors and mean before it."""
    weight = FrozenWeight.of(make((96, 1088), 102, torch.bfloat16, "cuda"))
    *others, mean, table = weight.tensors
    numbers = torch.cat([mean.view(1), table])
    moved = weight._replace(tensors=(*others, numbers[0], numbers[1:]))
    x = torch.randn(rows, 1088, device="cuda", dtype=torch.bfloat16)
    assert moved.tensors[-1].data_ptr() % 4 == 2
    assert torch.equal(quantized_linear(x, moved), quantized_linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (3072, 2048)], ids=str)
def test_real_sizes(shape):
    weight = make(shape, 256, torch.bfloat16, "cuda")
    exact = unrounded(weight)
    for rows in (1, 2, 3, 8, 16, MOST_ROWS):
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        want = x.double() @ exact.T
        assert (nf4_linear(x, weight).double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_fp64(backend, with_bias):
    weight = make((96, 192), 36, torch.float32, backend)
    dense = weight.get_original_weight().double()
    x = torch.randn(2, 3, 192, device=backend, requires_grad=True)
    bias = torch.randn(96, device=backend, requires_grad=True) if with_bias else None
    dy = torch.randn(2, 3, 96, device=backend)
    inputs = [x] if bias is None else [x, bias]
    y = nf4_linear(x, weight, bias)
    truth = F.linear(x.double(), dense, None if bias is None else bias.double())
    torch.testing.assert_close(y, truth.float(), rtol=1e-4, atol=1e-4)
    for got, want in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(truth, inputs, dy.double()), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_but_the_codes(kernel_device):
    weight = make((96, 192), 36, torch.float32, kernel_device)
    x = torch.randn(7, 192, device=kernel_device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nf4_linear(x, weight)
    held = {t.data_ptr() for t in (weight.quantized_data, weight.quantized_scalers, weight.quantization_factor,
                                   weight.scaler_mean, weight.nf4)}  # fmt: skip
    assert {t.data_ptr() for t in kept} == held


def test_autocast(backend):
    weight = make((96, 192), 36, torch.float32, backend)
    x = torch.randn(7, 192, device=backend, requires_grad=True)
    with torch.autocast(backend, torch.float16 if backend == "cuda" else torch.bfloat16):
        y = nf4_linear(x, weight, torch.ones(96, device=backend))
    assert y.dtype == (torch.float16 if backend == "cuda" else torch.bfloat16)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, weight.get_original_weight().sum(0).expand(7, -1), rtol=0.02, atol=0.2)


def test_opcheck(kernel_device):
    weight = make((5, 128), 2, torch.float32, kernel_device)
    x = torch.randn(3, 128, device=kernel_device, requires_grad=True)
    codes, *rest = weight_for_op(FrozenWeight.of(weight))
    opcheck(torch.ops.liger_models.quantized_linear, (x, codes, None, *rest))


def test_bad_input(backend):
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 128\]"):
        nf4_linear(torch.randn(3, 64, device=backend), make((5, 128), 2, torch.float32, backend))
