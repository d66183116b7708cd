import pytest
import torch

from liger_models.kernels.linear.gated_mlp import gated_mlp
from liger_models.kernels.linear.norm_linear import rms_norm_linear
from liger_models.kernels.norm.rms_norm import add_rms_norm
from liger_models.kernels.overlap import can_overlap, overlap, overlapping

from .rope.test_rope import draw

LAYERS, C, F = 12, 512, 1280


def test_only_within_the_context_and_on_gpus_that_can(kernel_device):
    x = torch.zeros(1, device=kernel_device)
    early = {"OVERLAPS": True, "launch_pdl": True} if can_overlap(x.device) else {"OVERLAPS": False}
    with overlapping():
        assert overlap(x) == early
        with pytest.raises(ValueError, match="in the middle"), overlapping():
            raise ValueError("in the middle")
        assert overlap(x) == early
    assert overlap(x) == {"OVERLAPS": False}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_captured_chain_computes_the_same_bits(rows, adapted):
    """Each kernel reads what the one before it writes, and all buffers are used again and again."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = [(C, C), (2 * F, C), (C, F)]
    weights = [
        [draw(*size, seed=7 * i + j, **half) / size[1] ** 0.5 for j, size in enumerate(sizes)] for i in range(LAYERS)
    ]
    norm = torch.ones(C, **half)
    pairs = [(draw(4, k, seed=k, **half) / 16, draw(n, 4, seed=n, **half) / 16) if adapted else None for n, k in sizes]
    given = torch.empty(1, rows, C, **half)

    def run():
        x, residual = given, given
        for first, up, down in weights:
            y, residual = rms_norm_linear(x, residual, norm, first, low_rank=pairs[0])
            x, residual = gated_mlp(y, residual, norm, up, down, gate_up_low_rank=pairs[1], down_low_rank=pairs[2])
        return add_rms_norm(x, residual, norm)[0]

    with torch.no_grad():
        with overlapping():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), overlapping():
            result = run()
        for seed in range(30):
            given.copy_(draw(1, rows, C, seed=seed, **half))
            want = run()
            graph.replay()
            assert torch.equal(result, want)
