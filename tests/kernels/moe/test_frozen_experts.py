"""Experts in 4 bits and in float8: torchao's numbers, and the op with them is the op with the dense matrices."""

import copy
import math

import pytest
import torch

from liger_models.kernels.frozen.products import dense
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.moe import experts as experts_module
from liger_models.kernels.moe import moe_mlp, moe_mlp_reference
from liger_models.kernels.moe.experts import FORWARD, ExpertProjection, MoEInputs
from liger_models.layers.frozen import freeze

from ...late import Late
from ..oracle import opcheck_named, run
from .cases import BLOCK, KINDS, RECOMPUTE, STORED, dtypes, make, quantize, stored, with_biases, with_low_ranks

quantization = Late("torchao.quantization", "4-bit weights need torchao")

SHAPE = 10, 2, 5, 64, 64
"""N, K, X, C, F. Rows of the matrices are whole blocks of NF4, so that the kernel for few rows takes them."""


@KINDS
@pytest.mark.parametrize("size", [(3, 5, 64), (2, 12, 48), (1, 64, 8)], ids=str)
def test_each_expert_has_the_numbers_of_a_linear_layer(backend, size, kind, poisoned_empty):
    for dtype in dtypes(backend):
        matrices = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(backend, dtype)
        if kind == "nf4" and size[1] * size[2] % 64:
            with pytest.raises(ValueError, match=rf"multiple of 64 elements, got \[{size[1]}, {size[2]}\]"):
                FrozenWeight.quantize(matrices, kind)
            continue
        found = FrozenWeight.quantize(matrices, kind)
        assert found.nbytes == FORMATS[kind].nbytes(size, dtype) == sum(each.nbytes for each in found.tensors)
        for ours, matrix in zip(found.dense(), matrices, strict=True):
            if kind == "float8":
                wide = matrix.float()
                scale = wide.abs().amax(1, keepdim=True) / wide.new_tensor(448)
                assert torch.equal(ours, ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(dtype))
                assert (ours.float() - wide).norm() <= 0.04 * wide.norm()
            else:
                want = quantization.to_nf4(matrix, 64, math.gcd(size[1] * size[2] // 64, 256)).get_original_weight()
                assert torch.equal(ours, want)
        torch.testing.assert_close(found.to(torch.float32).dense(), found.dense().float(), rtol=1e-2, atol=1e-6)


@STORED
def test_it_is_the_parameters_of_a_module(kind):
    weight = stored((4, 6, 64), kind)
    module = torch.nn.Module()
    module.weight = None
    freeze(module, "weight", weight)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert (weight.shape, weight.dtype, dense(weight).shape) == ((4, 6, 64), torch.float32, (4, 6, 64))
    other = copy.deepcopy(module)
    join = lambda module: module.stored.join(module.weight)
    assert isinstance(other.weight, torch.nn.Parameter)
    assert isinstance(join(other), FrozenWeight)
    want = weight.dense()
    assert torch.equal(torch.cat([each.dense() for each in weight.split(2)]), want)
    if weight.format.is_kept:
        with pytest.raises(NotImplementedError):
            other.stored.quantize(other.weight, lambda first, last: torch.zeros(last - first, 6, 64))
        other.stored.scales.detach().zero_()
        if kind == "mxfp4":  # whose scale 0 is 2^-127
            other.weight.detach().zero_()
    else:
        other.stored.quantize(other.weight, lambda first, last: torch.zeros(last - first, 6, 64))
    assert not join(other).dense().any()
    assert torch.equal(weight.dense(), want)
    other.load_state_dict(module.state_dict())
    assert torch.equal(join(other).dense(), want)
    module.to(torch.bfloat16)
    assert join(module).dtype == torch.bfloat16
    assert torch.equal(join(module).dense(), want.bfloat16())
    assert repr(join(module)) == f"FrozenWeight({kind}, [4, 6, 64], dtype=torch.bfloat16, device='cpu')"
    with pytest.raises(TypeError, match=r"got FrozenWeight|unsupported operand|must be Tensor"):
        torch.mul(weight, 2)


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(3, 12, 64), (2, 5, 40), (1, 64, 8)], ids=str)
def test_blocks_are_those_of_a_linear_layer(backend, size, number):
    """The numbers of a checkpoint, rounded to bfloat16, in any dtype."""
    for dtype in dtypes(backend):
        found = stored(size, "blocks", backend, dtype)
        found = found._replace(tensors=(found.codes, found.scales.to(number)))
        for ours, codes, scales in zip(found.dense(), found.codes, found.scales, strict=True):
            want = FrozenWeight(FORMATS["blocks"], (codes, scales), torch.Size(size[1:]), [BLOCK], dtype).dense()
            assert torch.equal(ours, want)
            assert want.any()
        assert found.nbytes == math.prod(size[:2]) * (size[2] + -(-size[2] // BLOCK) * number.itemsize)


@pytest.mark.cases(4)
@RECOMPUTE
@STORED
@pytest.mark.parametrize("few", [True, False])
def test_the_op_is_that_of_the_dense_matrices(backend, few, kind, recompute, monkeypatch, poisoned_empty):
    """Forward and the gradients of x, routing weights, biases, A and B, in fp32; and with one matrix dense."""
    biased = few ^ recompute ^ (kind == "nf4")  # each three of the four in every combination
    inputs, experts, dy = make(SHAPE, torch.float32, backend, kind="some")
    options = {"act": "clamped_swiglu", "limit": 0.75} if biased else {}
    x, weights, gate_up, down, *low_ranks = with_low_ranks(inputs)
    biases = with_biases(inputs)[4:] if biased else ()
    quantized = [quantize(each, kind) for each in (gate_up, down)]
    if not few:
        monkeypatch.setattr(experts_module, "takes_few", lambda *_: False)

    def call(function, matrices, **more):
        def inner(x, weights, A, B, down_A, down_B, *biases):
            pairs = {"gate_up_low_rank": (A, B), "down_low_rank": (down_A, down_B)}
            return function(x, weights, experts, *matrices, *biases, **pairs, **options, **more)

        return run(inner, [x, weights, *low_ranks, *biases], [dy])

    got = call(moe_mlp, quantized, recompute=recompute)
    for want in (
        call(moe_mlp_reference, [each.dense() for each in quantized]),
        call(moe_mlp, [each.dense() for each in quantized], recompute=recompute),
        call(moe_mlp, [quantized[0].dense(), quantized[1]], recompute=recompute),
    ):
        for a, b in zip(got, want, strict=True):  # sums in another order
            assert (a - b).abs().max() <= 2e-5 * b.abs().max().clamp(min=1)
            assert (a - b).norm() <= 5e-6 * b.norm()


@pytest.mark.cases(2)
@STORED
def test_chunks_of_tokens_dequantize_once(kernel_device, kind, monkeypatch, poisoned_empty):
    """They give the results of all tokens at once."""
    inputs, experts, dy = make(SHAPE, torch.float32, kernel_device, kind="some")
    x, weights, *matrices, A, B, down_A, down_B = with_low_ranks(inputs)
    quantized = [quantize(each, kind) for each in matrices]
    made, original = [], FrozenWeight.dense
    monkeypatch.setattr(FrozenWeight, "dense", lambda weight: made.append(weight.shape) or original(weight))
    monkeypatch.setattr(experts_module, "takes_few", lambda *_: False)

    def all_of(x, weights, A, B, down_A, down_B):
        pairs = {"gate_up_low_rank": (A, B), "down_low_rank": (down_A, down_B)}
        return moe_mlp(x, weights, experts, *quantized, **pairs, recompute=True)

    leaves = [x, weights, A, B, down_A, down_B]
    want = run(all_of, leaves, [dy])
    for name, value in (("WORKSPACE_MIB", 0), ("MIN_ROWS", 1), ("_copies_worth", lambda *_: 0)):
        monkeypatch.setattr(experts_module, name, value)
    made.clear()
    for got, whole in zip(run(all_of, leaves, [dy]), want, strict=True):  # sums in another order
        assert (got - whole).norm() <= 5e-6 * whole.norm()
    assert len(made) == 2 * 2  # in the forward and in the backward


@pytest.mark.cases(5)
@STORED
@RECOMPUTE
def test_only_what_is_stored_is_saved(kernel_device, recompute, kind):
    inputs, experts, _ = make(SHAPE, torch.float32, kernel_device)
    x, weights, gate_up, down, *low_ranks = with_low_ranks(inputs)
    quantized = [quantize(each, kind) for each in (gate_up, down)]
    saved, leaves = [], [each.requires_grad_() for each in (x, weights, *low_ranks)]
    x, weights, A, B, *pair = leaves
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        options = {"gate_up_low_rank": (A, B), "down_low_rank": pair, "recompute": recompute, "dropout": 0.5}
        moe_mlp(x, weights, experts, *quantized, **options)
    known = {each.data_ptr() for each in (*leaves, *quantized[0].tensors, *quantized[1].tensors)}
    others = [tuple(each.shape) for each in saved if each.data_ptr() not in known]
    kept = [] if recompute else [(20, 128)]
    # Order, slot, ends, gate and up, seeds of the dropout.
    assert others == [(20,), (20,), (len(gate_up),), *kept, (2,)]


@RECOMPUTE
def test_the_backward_dequantizes_each_matrix_once(kernel_device, recompute, monkeypatch):
    """Also gate and up, which it multiplies twice if it recomputes them."""
    inputs, experts, dy = make(SHAPE, torch.float32, kernel_device)
    quantized = [quantize(each, "float8") for each in inputs[2:]]
    monkeypatch.setattr(experts_module, "takes_few", lambda *_: False)
    y = moe_mlp(inputs[0].requires_grad_(), inputs[1], experts, *quantized, recompute=recompute)
    dense, shapes = FrozenWeight.dense, []
    monkeypatch.setattr(FrozenWeight, "dense", lambda weight: shapes.append(weight.shape) or dense(weight))
    y.backward(dy)
    assert shapes == [quantized[1].shape, quantized[0].shape]


@STORED
def test_decoding_dequantizes_no_matrix(kernel_device, kind, monkeypatch):
    inputs, experts, _ = make(SHAPE, torch.float32, kernel_device)
    quantized = [quantize(each, kind) for each in inputs[2:]]
    want = moe_mlp(*inputs[:2], experts, *(each.dense() for each in quantized))
    monkeypatch.setattr(FrozenWeight, "dense", lambda _: pytest.fail("a matrix was dequantized"))
    with torch.no_grad():
        torch.testing.assert_close(moe_mlp(*inputs[:2], experts, *quantized), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4"])  # PyTorch's check multiplies its inputs, which CPUs can't in float8
def test_opcheck(kernel_device, kind):
    inputs, experts, _ = make((3, 2, 3, 64, 64), torch.float32, kernel_device)
    x, weights, *matrices = inputs
    projections = (ExpertProjection(FrozenWeight.quantize(each, kind)) for each in matrices)
    leaves = x.requires_grad_(), weights.requires_grad_(), experts
    opcheck_named(FORWARD, MoEInputs(*leaves, *projections, "silu", 0.0, False, None, 0.0))


@STORED
def test_no_token(kernel_device, kind):
    inputs, experts, _ = make((0, 2, 3, 64, 64), torch.float32, kernel_device)
    x, weights, *matrices = inputs
    assert moe_mlp(x, weights, experts, *(quantize(each, kind) for each in matrices)).shape == (0, 64)


@pytest.mark.gpu
@STORED
@pytest.mark.parametrize("tokens", [3, 700])
def test_on_a_gpu_in_half_precision(kind, tokens):
    inputs, experts, dy = make((tokens, 4, 16, 256, 192), torch.bfloat16, "cuda")
    quantized = [quantize(each, kind) for each in inputs[2:]]
    call = lambda *matrices: lambda x, w: moe_mlp(x, w, experts, *matrices)
    got, want = (run(call(*each), inputs[:2], [dy]) for each in (quantized, [each.dense() for each in quantized]))
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()
