import pytest
import torch

from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.head_linear import MOST_COLUMNS, head_linear, head_linear_reference, takes_heads
from liger_models.kernels.matmul.row_linear import MOST_ROWS

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes, tables

SIZES = [(3, 12, 24, 8, 8), (1, 7, 5, 6, 2), (5, 64, 130, 0, 0), (2, 130, 33, 10, 0), (4, 192, 300, 64, 64)]
"""Numbers of heads H, columns K, results N, other columns R, and of these the rotated columns."""
GPU_SIZES = [(20, 192, 512, 64, 64), (128, 128, 512, 64, 64), (20, 512, 256, 0, 0), (128, 512, 128, 0, 0)]
ROWS = [(1, 1), (2, 1), (1, 3), (3, 3), (MOST_ROWS, 1)]


def make(size, rows, dtype, device, by_columns):
    """x, a part of a larger weight whose rows or columns are contiguous, and the tables."""
    (H, K, N, R, rotated), (B, T) = size, rows
    x = draw(B, T, H, K + R, dtype=dtype, device=device)
    weight = draw(H, 3 + K, N, dtype=dtype, device=device)[:, 3:].transpose(1, 2)
    if not by_columns:
        weight = draw(H, 3 + N, K, dtype=dtype, device=device)[:, 3:]
    return x, weight, tables(B if dtype == torch.float32 else 1, T, rotated, device) if rotated else (None, None)


def check(size, device, rows, interleaved):
    for dtype in (*dtypes(device), torch.bfloat16):
        for by_columns in (True, False):
            x, weight, angles = make(size, (1, 1) if dtype == torch.float32 else rows, dtype, device, by_columns)
            got = head_linear(x, weight, *angles, interleaved=interleaved)
            plain = head_linear_reference(x, weight, *angles, interleaved=interleaved)
            angles = [None if table is None else wide(table) for table in angles]
            exact = head_linear_reference(wide(x), wide(weight), *angles, interleaved=interleaved)
            assert got.shape == exact.shape
            assert got.dtype == dtype
            # The interpreter truncates bfloat16 where hardware rounds.
            limit = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 0.5)
            for part in (slice(0, weight.shape[1]), slice(weight.shape[1], None)):  # products, and rotated columns
                error, plain_error = ((wide(y) - exact)[..., part].norm() for y in (got, plain))
                assert error <= 1.5 * plain_error + limit * exact[..., part].norm()


@pytest.mark.cases(5)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_fp64(backend, size, interleaved, poisoned_empty):
    for rows in ROWS:
        check(size, backend, rows, interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_real_sizes(size, poisoned_empty):
    for rows in ROWS:
        check(size, "cuda", rows, True)


def test_what_is_taken(kernel_device):
    x, weight, _ = make(SIZES[0], (1, 1), torch.float32, kernel_device, True)
    assert not takes_heads(x, weight)  # gradients
    with torch.no_grad():
        assert takes_heads(x, weight)
        assert takes_heads(x.half().expand(MOST_ROWS, -1, -1, -1), weight.half())
        assert not takes_heads(x.half().expand(MOST_ROWS + 1, -1, -1, -1), weight.half())
        assert not takes_heads(x.expand(2, -1, -1, -1), weight)
        assert not takes_heads(x, weight.half())
        assert not takes_heads(x, weight[..., :1].expand(-1, -1, MOST_COLUMNS + 1))
        with batch_invariant():
            assert not takes_heads(x, weight)


def test_opcheck(kernel_device):
    for size, by_columns in ((SIZES[0], True), (SIZES[2], False)):
        x, weight, angles = make(size, (1, 1), torch.float32, kernel_device, by_columns)
        opcheck(torch.ops.liger_models.head_linear, (x, weight, *angles, True))


def test_bad_arguments(kernel_device):
    x, weight, (cos, sin) = make(SIZES[0], (1, 1), torch.float32, kernel_device, True)
    for bad, error, message in (
        ((x.half(), weight), TypeError, "must have one dtype, got torch.float16 and torch.float32"),
        ((x[..., :2, :], weight), ValueError, r"weight \[H, N, K\], got \[1, 1, 2, 20\] and \[3, 24, 12\]"),
        ((x[..., :-1], weight), ValueError, "head_dim must be even, got 7"),
        ((x, weight, cos[:, :, :0], sin), ValueError, r"cos and sin must be \[B or 1, T, R / 2\]"),
        ((x.expand(2, -1, -1, -1), weight, cos[:1], sin[:1]), ValueError, "x must have 1 to 1 rows"),
    ):
        with pytest.raises(error, match=message):
            head_linear(*bad)
