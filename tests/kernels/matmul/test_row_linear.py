import itertools

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.activation.gated_act import ACTIVATIONS, gated_act_reference
from liger_models.kernels.linear.gated_mlp import gated_mlp
from liger_models.kernels.linear.norm_linear import norm_linear
from liger_models.kernels.matmul import row_linear as row_linear_file
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.row_linear import (
    LOW_COLUMNS,
    MOST_ROWS,
    MOST_SMALL_ROWS,
    row_linear,
    row_linear_forward,
    row_linear_reference,
    wide_inference_linear,
)
from liger_models.kernels.norm.fused_norm import FusedNorm

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes

SIZES = [(5, 7), (4, 1024), (130, 1500), (1, 2048), (66, 64)]
ROWS = [(1, True), (9, True), (MOST_SMALL_ROWS, True), (2, False), (MOST_ROWS, False)]
"""Numbers of rows, and whether the weight is small. The columns of other weights are divided among programs."""
GPU_SIZES = [(5120, 3072), (4096, 14336), (3072, 8192), (28672, 4096)]


def error(got, exact):
    return (wide(got) - exact).norm() / exact.norm()


def check(N, K, dtype, device, monkeypatch):
    for rows, is_small in ROWS if dtype != torch.float32 else ROWS[:1]:
        monkeypatch.setattr(row_linear_file, "SMALL", N * K if is_small else 0)
        x, weight, bias = (draw(*size, dtype=dtype, device=device) for size in ((rows, 1, K), (N, K), (N,)))
        for b in (None, bias):
            got = row_linear(x, weight, b)
            exact = F.linear(wide(x), wide(weight), None if b is None else wide(b))
            assert got.shape == (rows, 1, N)
            assert got.dtype == dtype
            plain = error(row_linear_reference(x, weight, b), exact)
            assert error(got, exact) <= 1.5 * plain + torch.finfo(dtype).eps


@pytest.mark.cases(5)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_fp64(backend, size, monkeypatch):
    for dtype in dtypes(backend):
        check(*size, dtype, backend, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_real_sizes(size, monkeypatch):
    for dtype in dtypes("cuda"):
        check(*size, dtype, "cuda", monkeypatch)


def check_float8(N, K, device, monkeypatch):
    halves = [dtype for dtype in dtypes(device) if dtype != torch.float32]
    for dtype, (rows, is_small) in itertools.product(halves, ROWS):
        monkeypatch.setattr(row_linear_file, "SMALL", N * K if is_small else 0)
        x, weight, scales = (draw(*size, dtype=dtype, device=device) for size in ((rows, 1, K), (N, K), (N,)))
        codes, scales = weight.to(torch.float8_e4m3fn), scales.float().abs()
        got, _ = row_linear_forward(x, codes, None, scales=scales)
        exact = F.linear(wide(x), wide(codes.double()) * wide(scales)[:, None])
        assert error(got, exact) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float8_weights(kernel_device, size, monkeypatch):
    check_float8(*size, kernel_device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_float8_weights_of_real_sizes(size, monkeypatch):
    """With more tiles than the GPU has multiprocessors, one program takes all columns of a tile."""
    check_float8(*size, "cuda", monkeypatch)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activation(kernel_device, act):
    for dtype, rows in ((dtype, rows) for dtype in dtypes(kernel_device) for rows in (1, 5)):
        if rows > 1 and dtype == torch.float32:
            continue
        x, weight, bias = (draw(*size, dtype=dtype, device=kernel_device) for size in ((rows, 70), (26, 70), (26,)))
        x /= 8  # gates of ordinary size
        for b in (None, bias):
            gate_up, product = row_linear_forward(x, weight, b, act)
            assert torch.equal(gate_up, row_linear(x, weight, b))
            exact = gated_act_reference(wide(gate_up), act)
            assert error(product, exact) <= 2 * torch.finfo(dtype).eps


def test_rows_of_a_larger_weight(backend):
    x, weight = draw(1, 33, device=backend), draw(20, 90, device=backend)
    assert torch.equal(row_linear(x, weight[2:9, 5:38]), row_linear(x, weight[2:9, 5:38].contiguous()))


@pytest.mark.parametrize("recompute", [None, False, True])
def test_fused_ops_take_a_row(kernel_device, recompute):
    """`norm_linear` (None) and `gated_mlp` of one row, against those of the same row among others."""
    for dtype in dtypes(kernel_device):
        x, residual = (draw(3, 1, 48, dtype=dtype, device=kernel_device, seed=seed) for seed in (0, 1))
        weight, up, down = (draw(*size, dtype=dtype, device=kernel_device) for size in ((48,), (80, 48), (48, 40)))
        results = []
        for rows in (slice(1, 2), slice(None)):
            if recompute is None:
                y, _ = norm_linear(x[rows], residual[rows], FusedNorm(weight), up)
            else:
                y, _ = gated_mlp(x[rows], residual[rows], weight, up, down, act="silu", recompute=recompute)
            results.append(y)
        assert error(results[0], wide(results[1][1:2])) <= 4 * torch.finfo(dtype).eps


@pytest.mark.cases(4)
@torch.no_grad()
@pytest.mark.parametrize("size", [*SIZES, (3, LOW_COLUMNS + 3)], ids=str)
def test_wide_results(backend, size, monkeypatch):
    """Results in fp32 from x and weight of any dtypes, without a copy of either, and strided ones, too."""
    N, K = size
    dtypes_of_both = list(itertools.product(dtypes(backend), repeat=2))
    for (dtype, weight_dtype), rows in itertools.product(dtypes_of_both, (1, 3 if backend == "cpu" else MOST_ROWS - 1)):
        x = draw(rows, 2 * K, dtype=dtype, device=backend)[:, :K]
        weight = draw(N, K + 3, dtype=weight_dtype, device=backend)[:, 3:]
        with torch.autocast(torch.device(backend).type, torch.bfloat16):
            got = wide_inference_linear(x, weight)
        exact = F.linear(wide(x), wide(weight))
        assert got.shape == (rows, N)
        assert got.dtype == torch.float32
        terms = F.linear(wide(x).abs(), wide(weight).abs())  # may be far larger than their sum
        assert ((wide(got) - exact).abs() <= 4 * torch.finfo(got.dtype).eps * terms).all()


def test_what_takes_wide_results(kernel_device, monkeypatch):
    """Few rows without gradients, outside of `batch_invariant`."""
    calls, x, weight = [], draw(1, 20, device=kernel_device), draw(6, 20, device=kernel_device)
    monkeypatch.setattr(row_linear_file, "WIDE", lambda x, weight: calls.append(x))
    wide_inference_linear(x, weight)
    with torch.no_grad():
        wide_inference_linear(x.expand(MOST_ROWS + 1, 20), weight)
        wide_inference_linear(x.double(), weight)
        with batch_invariant():
            wide_inference_linear(x, weight)
        assert not calls
        wide_inference_linear(x.expand(MOST_ROWS, 20), weight)
    assert len(calls) == 1


def test_opcheck(kernel_device):
    x, weight, bias = (draw(*size, device=kernel_device) for size in ((1, 20), (6, 20), (6,)))
    opcheck(torch.ops.liger_models.row_linear, (x, weight, bias))
    opcheck(torch.ops.liger_models.wide_row_linear, (x.half(), weight))


def test_bad_arguments():
    x, weight = torch.zeros(1, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"x must have 1 to 1 rows in torch.float32, got \[2, 8\]"):
        row_linear(x.expand(2, 8), weight)
    with pytest.raises(ValueError, match=r"x must have 1 to 64 rows in torch.float16, got \[65, 8\]"):
        row_linear(x.half().expand(65, 8), weight.half())
    with pytest.raises(ValueError, match=r"x must have rows of the width of weight, got \[1, 7\] and \[6, 8\]"):
        row_linear(x[:, :7], weight)
    with pytest.raises(ValueError, match=r"bias must be \[6\], got \[8\]"):
        row_linear(x, weight, x[0])
    with pytest.raises(ValueError, match=r"weight must be stored by rows, got strides \(1, 6\)"):
        row_linear(x, torch.zeros(8, 6).t())
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float16 and torch.float32"):
        row_linear(x.half(), weight)
