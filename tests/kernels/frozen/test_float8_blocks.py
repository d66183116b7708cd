import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.activation.gated_act import gated_act_reference
from liger_models.kernels.frozen.float8_blocks import (
    WIDTHS,
    block_rows,
    blocks_dense,
    blocks_dense_reference,
    takes_block_rows,
)
from liger_models.kernels.frozen.frozen_float8_linear import MOST_ROWS
from liger_models.kernels.matmul.batch_invariance import batch_invariant


def draw(*size, device="cpu", dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def make(shape, width, device, number=torch.float32):
    """Codes and scales, which are powers of 2 on the CPU: the interpreter truncates to bfloat16."""
    codes = draw(*shape, device=device).mul_(64).to(torch.float8_e4m3fn)
    scales = draw(shape[0], -(-shape[1] // (width or shape[1])), device=device).abs() / 64
    return codes, (scales if device == "cuda" else scales.log2().floor().exp2()).to(number)


def dtypes(device, rows):
    """The dtypes of x that the kernels take; without bfloat16 on the CPU, where the interpreter truncates results."""
    return [*([torch.float32] if rows == 1 else []), torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


@pytest.mark.cases(5)
@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize(
    ("width", "shape"),
    [(16, (5, 7)), (128, (48, 96)), (16, (20, 1100)), (128, (20, 1100)), (0, (20, 1100))],
    ids=str,
)
def test_few_rows_match_fp64(kernel_device, shape, width, act, poisoned_empty):
    """W is rounded as documented, to bfloat16: what is left is the sum in fp32 and one rounding of the result."""
    codes, scales = make(shape, width, kernel_device, torch.bfloat16 if width == 16 else torch.float32)
    weight = blocks_dense_reference(codes, scales, width, torch.float64)
    for rows in (1, 2, 9, MOST_ROWS):
        for dtype in dtypes(kernel_device, rows):
            if act and shape[0] % 2:
                continue
            limits = torch.finfo(dtype)
            x, bias = ((draw(*size, device=kernel_device) / 8).to(dtype) for size in ((rows, 1, shape[1]), shape[:1]))
            assert takes_block_rows(x, codes, scales, width)
            for b in (None, bias):
                want, terms = (
                    F.linear(f(x.double()), f(weight), None if b is None else f(b.double()))
                    for f in (torch.Tensor.clone, torch.abs)
                )
                y, product = block_rows(x, codes, scales, width, b, act)
                assert y.shape == (rows, 1, shape[0])
                assert ((y.double() - want).abs() <= limits.eps / 2 * want.abs() + 2e-6 * terms + limits.tiny).all()
                if act:
                    torch.testing.assert_close(product, gated_act_reference(y, act), rtol=2 * limits.eps, atol=1e-6)


@pytest.mark.parametrize(("width", "columns"), [(32, 1100), (1024, 1100), (0, 1100), (128, 1152), (0, 1024)])
def test_numbers_are_those_of_the_dense_weight(kernel_device, width, columns, poisoned_empty):
    """Bit for bit, with scales that are no powers of 2: rows of the identity show each column."""
    codes, scales = (
        draw(9, columns, device=kernel_device).mul_(64).to(torch.float8_e4m3fn),
        draw(9, -(-columns // (width or columns))),
    )
    scales = scales.to(kernel_device) / 256
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight, rows = blocks_dense(codes, scales, width, dtype), torch.eye(columns, dtype=dtype, device=kernel_device)
        for first in (0, 17, 31, 1023, columns - 1):
            y, _ = block_rows(rows[first : first + 1], codes, scales, width, None)
            assert torch.equal(y, weight[:, first : first + 1].t())
        for first in (0, 990) if dtype != torch.float32 else ():
            y, _ = block_rows(rows[first : first + 30], codes, scales, width, None)
            assert torch.equal(y, weight[:, first : first + 30].t())


def test_rows_that_are_not_taken(kernel_device):
    """Where bits must not depend on the batch, many rows, several in fp32, and blocks that do not fit."""
    codes, scales = make((48, 96), 32, kernel_device)
    x = draw(2, 96, device=kernel_device, dtype=torch.float16)
    assert takes_block_rows(x, codes, scales, 32)
    assert takes_block_rows(x[:1].float(), codes, scales, 32)
    assert not takes_block_rows(x.float(), codes, scales, 32)
    assert not takes_block_rows(draw(MOST_ROWS + 1, 96, device=kernel_device, dtype=torch.float16), codes, scales, 32)
    for width in (24, WIDTHS[0] // 2):
        assert not takes_block_rows(x, *make((48, 96), width, kernel_device), width)
    wide = draw(2, 2100, device=kernel_device, dtype=torch.float16)
    assert not takes_block_rows(wide, *make((4, 2100), 2 * WIDTHS[1], kernel_device), 2 * WIDTHS[1])
    assert takes_block_rows(wide, *make((4, 2100), 0, kernel_device), 0)
    assert not takes_block_rows(x, codes, scales.t().contiguous().t(), 32)
    with batch_invariant():
        assert not takes_block_rows(x, codes, scales, 32)
        assert not takes_block_rows(x[:1], codes, scales, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (28672, 4096)], ids=str)
def test_real_sizes(shape):
    codes, scales = make(shape, 128, "cuda")
    weight = blocks_dense_reference(codes, scales, 128, torch.float64)
    for rows in (1, 2, 8, 16, 32):
        x = draw(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        want = x.double() @ weight.T
        assert (block_rows(x, codes, scales, 128, None)[0].double() - want).norm() <= 2e-3 * want.norm()
