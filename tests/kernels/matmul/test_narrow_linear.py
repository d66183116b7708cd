import pytest
import torch

from liger_models.kernels.linear import projection
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.linear.projection import low_forward
from liger_models.kernels.matmul import narrow_linear as file
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.narrow_linear import narrow_linear, takes_narrow
from liger_models.kernels.overlap import overlapping

from ..oracle import wide
from ..rope.test_rope import draw

SIZES = [(65, 3, 70), (131, 17, 512), (66, 64, 1001), (70, 16, 2049)]
GPU_SIZES = [(65, 16, 3072), (256, 16, 4096), (256, 48, 3072), (384, 32, 3072), (1023, 64, 512)]


def half(device):
    """The interpreter casts to bfloat16 without rounding."""
    return (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)


def error(got, exact):
    return (wide(got) - exact).norm() / exact.norm()


def check(M, N, K, dtype, device):
    x, weight = draw(M, K, dtype=dtype, device=device), draw(N, 2 * K, dtype=dtype, device=device)[:, :K]
    got, exact = narrow_linear(x, weight), wide(x) @ wide(weight).T
    assert got.shape == (M, N)
    assert got.dtype == dtype
    assert error(got, exact) <= 1.01 * error(exact.to(dtype), exact) + 2e-6  # rounded once
    return x, weight, got


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_fp64(kernel_device, size, poisoned_empty):
    for dtype in half(kernel_device):
        check(*size, dtype, kernel_device)


@pytest.mark.parametrize("rows", [64, 65, 1023, 1024])
def test_only_some_products_run_the_kernel(kernel_device, rows, monkeypatch):
    x, A = (draw(n, 16, dtype=torch.float16, device=kernel_device) for n in (rows, 8))
    assert takes_narrow(x, A) == (64 < rows < 1024)
    assert not takes_narrow(x.float(), A.float())
    assert not takes_narrow(x, A.repeat(9, 1))
    assert not takes_narrow(x, draw(16, 8, dtype=torch.float16, device=kernel_device).t())
    for name, most in (("MOST_INPUTS", 15), ("MOST_MIB", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(file, name, most)
            assert not takes_narrow(x, A)


def test_the_term_of_a_layer(kernel_device, monkeypatch):
    """A low-rank layer runs the kernel for x @ Aᵀ, but not within `batch_invariant`."""
    launches = []
    run = lambda *arguments: launches.append(arguments) or narrow_linear(*arguments)
    monkeypatch.setattr(projection, "narrow_linear", run)
    sizes = (5, 13, 40), (24, 40), (3, 40), (24, 3)
    x, W, A, B = (draw(*size, dtype=torch.float16, device=kernel_device) for size in sizes)
    y = low_rank_linear(x, W, None, (A, B))
    assert len(launches) == 1
    low = wide(low_forward(x, (A, B)))
    exact = wide(x) @ wide(W).T + (low @ wide(B).T).view(5, 13, 24)
    torch.testing.assert_close(wide(y), exact, rtol=2e-3, atol=2e-3 * exact.abs().max().item())
    del launches[:]
    with batch_invariant():
        low_rank_linear(x, W, None, (A, B))
        low_forward(x, (A, B))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_real_sizes(size):
    """Also in a CUDA graph, bit for bit."""
    for dtype in half("cuda"):
        x, weight, want = check(*size, dtype, "cuda")
        assert takes_narrow(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), overlapping():
            for _ in range(3):
                got = narrow_linear(x + 0, weight)
        for _ in range(3):
            graph.replay()
            assert torch.equal(got, want)
