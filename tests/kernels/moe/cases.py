"""Inputs and checks that the tests of the mixture of experts share."""

import pytest
import torch

from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.moe import moe_mlp, moe_mlp_reference

from ..frozen.test_groups import make as four_bits
from ..oracle import assert_close_to_truth

GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
KINDS = pytest.mark.parametrize("kind", ["nf4", "float8"])
STORED = pytest.mark.parametrize("kind", ["nf4", "float8", "blocks", "mxfp4", "nvfp4"])
BLOCK = 32
"""Columns that share a scale in "blocks"."""


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def choose(N, K, X, kind="any", seed=0):
    """Experts [N, K], different ones for a token: any of them, of every second, or the same for all tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(N, X, generator=generator)
    if kind == "some":
        scores[:, :: 2 if X >= 2 * K + 1 else X + 1] -= 1
    elif kind == "same":
        scores = scores[:1].expand(N, X)
    return scores.topk(K, -1).indices


def make(shape, dtype, device, weight_dtype=None, kind="any"):
    """The four tensors in order, the experts, and the upstream gradient."""
    N, K, X, C, F = shape
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    weight_dtype = weight_dtype or dtype
    inputs = [draw(N, C).to(dtype), draw(N, K).abs().float()]
    inputs += [(draw(X, 2 * F, C) / C**0.5).to(weight_dtype), (draw(X, C, F) / F**0.5).to(weight_dtype)]
    return inputs, choose(N, K, X, kind).to(device), draw(N, C).to(weight_dtype)


def stored(size, kind, device="cpu", dtype=torch.float32):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(sum(size))) / size[-1] ** 0.5
    return quantize(weight.to(device, dtype), kind)


def quantize(weight, kind):
    """Matrices in NF4, in float8, or in a format of checkpoints with such scales; "dense" as they are."""
    if kind == "dense":
        return weight
    if kind in ("mxfp4", "nvfp4", "int4", "bnb_nf4"):
        return four_bits(kind, weight.shape, weight.device.type, weight.dtype, exponents=(-8, -4))
    if kind != "blocks":
        return FrozenWeight.quantize(weight, kind)
    columns = weight.shape[2]
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax(3) / 448
    if not weight.is_cuda:  # Triton's interpreter truncates where torch rounds the numbers to bfloat16
        scales = scales.log2().ceil().exp2()
    codes = (blocks / scales[..., None]).flatten(2)[..., :columns].to(torch.float8_e4m3fn).contiguous()
    return FrozenWeight(FORMATS["blocks"], (codes, scales), weight.shape, [BLOCK], weight.dtype)


def without_gates(inputs):
    """The four tensors, of which gate and up is only up."""
    return [*inputs[:2], inputs[2][:, : inputs[2].shape[1] // 2].contiguous(), inputs[3]]


def with_biases(inputs, generator=0):
    """The four tensors and the biases of both projections."""
    X, width, C = inputs[2].shape
    generator = torch.Generator().manual_seed(generator)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    return [*inputs, *(draw(X, size).to(inputs[2].device, inputs[2].dtype) for size in (width, C))]


def with_experts(function, experts, **constants):
    """``function`` of the four tensors, and the biases if there are any; the truth is computed on the CPU."""

    def call(x, weights, gate_up_weight, down_weight, *biases):
        return function(x, weights, experts.to(x.device), gate_up_weight, down_weight, *biases, **constants)

    return call


def with_low_ranks(inputs, R=3):
    """The four tensors, and A and B of gate and up, and of down."""
    (X, width, C), F = inputs[2].shape, inputs[3].shape[2]
    generator = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    sizes = (X, R, C), (X, width, R), (X, R, F), (X, C, R)
    return [*inputs, *((draw(*size) / size[2] ** 0.5).to(inputs[2].device, inputs[2].dtype) for size in sizes)]


def low_ranked(function, experts, **constants):
    """As `with_experts`, of what `with_low_ranks` returns, and biases."""

    def call(x, weights, gate_up_weight, down_weight, gate_up_A, gate_up_B, down_A, down_B, *biases):
        inputs = x, weights, experts.to(x.device), gate_up_weight, down_weight, *biases
        return function(*inputs, gate_up_low_rank=(gate_up_A, gate_up_B), down_low_rank=(down_A, down_B), **constants)

    return call


def check(inputs, experts, dy, act="silu", limit=0.0, **kwargs):
    ours = with_experts(moe_mlp, experts, act=act, limit=limit, **kwargs)
    reference = with_experts(moe_mlp_reference, experts, act=act, limit=limit)
    # The weights' gradient sums other rounded numbers than the reference's does, and few of them in the small shapes.
    assert_close_to_truth(ours, reference, inputs, [dy], factor=2.0)
