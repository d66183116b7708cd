"""Frozen weights in 4 bits and in float8 inside the ops: the numbers are those of the ops with the dense weight."""

import functools

import pytest
import torch

from liger_models.kernels.activation.gated_act import gated_act
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.frozen.float8_blocks import blocks_dense_reference
from liger_models.kernels.frozen.frozen_float8_linear import frozen_float8_linear, quantize_rows_reference
from liger_models.kernels.frozen.products import dense, quantized_linear, weight_for_op
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.linear import gated_mlp as module
from liger_models.kernels.linear import norm_linear, projection
from liger_models.kernels.linear.gated_mlp import gated_mlp
from liger_models.kernels.linear.norm_linear import layer_norm_linear, rms_norm_linear
from liger_models.kernels.linear.projection import Projection
from liger_models.kernels.matmul.row_linear import MOST_SMALL_ROWS
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.rms_norm import add_rms_norm

from ...late import Late
from ..oracle import opcheck, opcheck_named, run

quantization = Late("torchao.quantization", "4-bit weights need torchao")

C, F, R = 64, 96, 4
MODES = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])


def draw(*size, device="cpu", dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def of(weight):
    """A tensor of torchao's as ops take it."""
    frozen = FrozenWeight.of(weight)
    assert frozen is not None
    return frozen


def nf4(*size, device="cpu", dtype=torch.float32, block=64):
    weight = draw(*size, device=device, dtype=dtype) / size[-1] ** 0.5
    return of(quantization.to_nf4(weight, block, 1))


def float8(*size, device="cpu", dtype=torch.float32):
    weight = draw(*size, device=device, dtype=dtype) / size[-1] ** 0.5
    return of(quantization.Float8Tensor.from_hp(weight))


def blocks(*size, device="cpu", dtype=torch.float32, width=24):
    """Scales are powers of 2, so that nothing is rounded to bfloat16: the interpreter truncates."""
    codes = draw(*size, device=device).mul_(64).to(torch.float8_e4m3fn)
    scales = draw(size[0], -(-size[1] // width), device=device).mul_(2).floor().exp2() / 512
    return FrozenWeight(FORMATS["blocks"], (codes, scales), torch.Size(size), [width], dtype)


MAKERS = pytest.mark.parametrize("make", [nf4, float8, blocks])


def pair(out, width, device, dtype=torch.float32):
    return draw(R, width, device=device, dtype=dtype), draw(out, R, device=device, dtype=dtype) / 4


@pytest.mark.parametrize(("size", "block"), [((3, 64), 64), ((96, 192), 64), ((70, 96), 96), ((5, 512), 16)], ids=str)
def test_dense_weight_is_torchaos_bit_for_bit(backend, size, block, poisoned_empty):
    # The interpreter truncates bfloat16 where hardware rounds.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if backend == "cuda" else [])):
        weight = quantization.to_nf4(draw(*size, device=backend, dtype=dtype), block, 1)
        ours = of(weight)
        assert torch.equal(dense(ours), weight.get_original_weight())
        for other in (torch.float16, torch.float32):
            assert torch.equal(dense(ours.to(other)), weight.get_original_weight().to(other))


@pytest.mark.parametrize("size", [(3, 24), (9, 100), (5, 2050)], ids=str)
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
def test_dense_weight_of_blocks(backend, size, number, poisoned_empty):
    weight = blocks(*size, device=backend)
    weight = weight._replace(tensors=(weight.codes, weight.scales.to(number)))
    exact = weight.codes.double() * weight.scales.double().repeat_interleave(24, 1)[:, : size[1]]
    for dtype in (torch.float32, torch.bfloat16):
        assert dense(weight.to(dtype)).dtype == dtype
        assert torch.equal(dense(weight.to(dtype)).double(), exact)
    if backend == "cuda":  # which rounds as the reference does
        weight = weight._replace(tensors=(weight.codes, draw(*weight.scales.shape, device=backend)))
        wanted = blocks_dense_reference(weight.codes, weight.scales, 24, torch.float32)
        assert torch.equal(dense(weight.to(torch.float32)), wanted)


def norm_linear_case(op, device):
    """The op of x, residual, A and B, with the weight bound; its inputs and upstream gradients."""
    norms = [draw(C, device=device)] + ([draw(C, device=device)] if op is layer_norm_linear else [])
    bias = draw(F, device=device)
    call = lambda weight, x, residual, *low_rank: op(x, residual, *norms, weight, bias, low_rank=low_rank)
    inputs = [draw(2, 3, C, device=device), draw(3, 2, C, device=device).view(2, 3, C), *pair(F, C, device)]
    return call, inputs, [draw(2, 3, F, device=device), draw(2, 3, C, device=device)]


def gated_mlp_case(device, recompute):
    norm = draw(C, device=device)

    def call(weights, x, residual, *low_ranks):
        pairs = {"gate_up_low_rank": low_ranks[:2], "down_low_rank": low_ranks[2:]}
        return gated_mlp(x, residual, norm, *weights, recompute=recompute, **pairs)

    stream = [draw(2, 3, C, device=device), draw(3, 2, C, device=device).view(2, 3, C)]
    inputs = [*stream, *pair(2 * F, C, device), *pair(C, F, device)]
    return call, inputs, [draw(2, 3, C, device=device), draw(2, 3, C, device=device)]


def same(call, weights, inputs, upstream):
    """Outputs and all gradients are those with the dense weights, bit for bit."""
    whole = [*map(dense, weights)] if isinstance(weights, list) else dense(weights)
    given = weights, whole
    got, want = (run(functools.partial(call, each), inputs, upstream) for each in given)
    assert all(map(torch.equal, got, want))


@MAKERS
@pytest.mark.parametrize("op", [rms_norm_linear, layer_norm_linear])
def test_norm_linear(backend, op, make, poisoned_empty):
    call, inputs, upstream = norm_linear_case(op, backend)
    same(call, make(F, C, device=backend), inputs, upstream)
    same(call, make(F, C, device=backend, dtype=torch.float16).to(torch.float32), inputs, upstream)


@MAKERS
def test_linear(backend, make, poisoned_empty):
    weight, inputs = make(F, C, device=backend), [draw(2, 3, C, device=backend), draw(F, device=backend)]
    whole, upstream = dense(weight), draw(2, 3, F, device=backend)
    got = run(lambda x, bias: quantized_linear(x, weight, bias), inputs, [upstream])
    want = run(lambda x, bias: torch.nn.functional.linear(x, whole, bias), inputs, [upstream])
    doubles, up = [x.double() for x in inputs], [upstream.double()]
    exact = run(lambda x, bias: torch.nn.functional.linear(x, whole.double(), bias), doubles, up)
    for found, expected, true in zip(got, want, exact, strict=True):
        assert torch.equal(found, expected)
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5)
    message = r"quantized_linear: x must be \[..., 64\] for a weight \[96, 64\], got \[2, 5\]"
    with pytest.raises(ValueError, match=message):
        quantized_linear(draw(2, 5, device=backend), weight)


@pytest.mark.cases(8)
@pytest.mark.parametrize("chunk", [None, 2])
@MAKERS
@MODES
def test_gated_mlp(backend, recompute, chunk, make, poisoned_empty, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("liger_models.kernels.linear.gated_mlp.WORKSPACE_MIB", 0)
        monkeypatch.setattr("liger_models.kernels.linear.gated_mlp.MIN_CHUNK", chunk)
    call, inputs, upstream = gated_mlp_case(backend, recompute)
    for weights in (
        [make(2 * F, C, device=backend), make(C, F, device=backend)],
        [make(2 * F, C, device=backend), draw(C, F, device=backend)],
    ):
        same(call, weights, inputs, upstream)


@pytest.mark.parametrize("op", [rms_norm_linear, layer_norm_linear])
def test_without_a_low_rank_term_and_gradients(backend, op):
    """A single row, as in decoding, is multiplied as the weight is dequantized: only the order of the sum differs."""
    call, (x, residual, *_), _ = norm_linear_case(op, backend)
    weight, call = nf4(F, C, device=backend), functools.partial(op, norm_weight=draw(C, device=backend))
    call = functools.partial(call, norm_bias=None) if op is layer_norm_linear else call
    with torch.no_grad():
        for rows in (slice(None), slice(1)):
            stream = x[rows, rows], residual[rows, rows]
            got, want = (call(*stream, weight=each)[0] for each in (weight, dense(weight)))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            weights = nf4(2 * F, C, device=backend), nf4(C, F, device=backend)
            norm = draw(C, device=backend)
            got, want = (gated_mlp(*stream, norm, *each)[0] for each in (weights, map(dense, weights)))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(4)
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("make", [nf4, float8, functools.partial(blocks, width=32)], ids=["nf4", "float8", "blocks"])
@MODES
def test_few_rows_are_multiplied_with_codes(kernel_device, make, adapted, recompute, monkeypatch, poisoned_empty):
    """As in decoding: no weight is made dense, and the activation is in the same kernel."""
    half = {"device": kernel_device, "dtype": torch.bfloat16 if kernel_device == "cuda" else torch.float16}
    weights = make(2 * 128, C, **half), make(C, 128, **half)
    rounded, norm, bias = [dense(each) for each in weights], draw(C, **half), draw(2 * 128, **half)
    wide = [each.float() for each in rounded]
    pairs = [pair(2 * 128, C, **half), pair(C, 128, **half)] if adapted else [None, None]
    wide_pairs = [each and tuple(one.float() for one in each) for each in pairs]
    names = "gate_up_low_rank", "down_low_rank"
    low_ranks, wide_low_ranks = (dict(zip(names, each, strict=True)) for each in (pairs, wide_pairs))
    for name in ("nf4_linear.nf4_dense", "nf4_linear.nf4_dense_reference", "frozen_float8_linear.float8_dense"):
        monkeypatch.delattr(f"liger_models.kernels.frozen.{name}")
    monkeypatch.delattr("liger_models.kernels.frozen.float8_blocks.blocks_dense")
    activations = []
    original = projection.gated_act_forward
    monkeypatch.setattr(projection, "gated_act_forward", lambda *args: activations.append(1) or original(*args))
    for rows in (1, 2, 5):
        x, residual = draw(1, rows, C, **half), draw(rows, 1, C, **half).view(1, rows, C)
        y, _ = gated_mlp(x, residual, norm, *weights, bias, recompute=recompute, **low_ranks)
        given = x.float(), residual.float(), norm.float()
        want, _ = gated_mlp(*given, *wide, bias.float(), recompute=recompute, **wide_low_ranks)
        assert len(activations) == (0 if rows == 1 else 1)  # of several rows in fp32
        activations.clear()
        with reference_backend():
            plain, _ = gated_mlp(x, residual, norm, *rounded, bias, **low_ranks)
        error, plain_error = ((each.double() - want.double()).norm() for each in (y, plain))
        assert error <= 1.5 * plain_error
        out, _ = rms_norm_linear(x, residual, norm, weights[0], bias, low_rank=pairs[0])
        want, _ = rms_norm_linear(*given, wide[0], bias.float(), low_rank=wide_pairs[0])
        assert (out.double() - want.double()).norm() <= 8e-3 * want.double().norm()


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_float8_products_in_ops_are_those_of_the_layers(kernel_device, recompute, monkeypatch, poisoned_empty):
    """In bfloat16 the ops multiply in float8, as norm, `frozen_float8_linear`, activation and adapters do in turn."""
    if kernel_device == "cpu":  # the interpreter's casts to float8 are not those of the hardware
        monkeypatch.setattr("liger_models.kernels.frozen.frozen_float8_linear.quantize_rows", quantize_rows_reference)
        monkeypatch.setattr(projection, "takes_narrow", lambda *_: False)  # it would truncate
    half = {"device": kernel_device, "dtype": torch.bfloat16}
    make = lambda *size: quantization.Float8Tensor.from_hp(draw(*size, **half) / size[-1] ** 0.5)
    first, second, norm = make(2 * F, C), make(C, F), draw(C, **half)
    rows = MOST_SMALL_ROWS + 2  # too many for the kernels for few rows
    inputs = [draw(rows, C, **half), *pair(2 * F, C, **half), *pair(C, F, **half)]
    upstream = [draw(rows, C, **half), draw(2, rows // 2, C, **half).view(rows, C)]
    low_rank = lambda x, A, B: torch.nn.functional.linear(torch.nn.functional.linear(x, A), B)

    def fused(x, *low_ranks):
        weights = of(first), of(second)
        pairs = {"gate_up_low_rank": low_ranks[:2], "down_low_rank": low_ranks[2:]}
        return gated_mlp(x, x, norm, *weights, recompute=recompute, **pairs)

    def layers(x, *low_ranks):
        normed, stream = add_rms_norm(x, x, norm)
        product = gated_act(frozen_float8_linear(normed, first) + low_rank(normed, *low_ranks[:2]), "silu")
        return frozen_float8_linear(product, second) + low_rank(product, *low_ranks[2:]), stream

    got, want = run(fused, inputs, upstream), run(layers, inputs, upstream)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()
    of_dense = run(lambda *tensors: gated_mlp(tensors[0], tensors[0], norm, first.dequantize(), second.dequantize(),
                   gate_up_low_rank=tensors[1:3], down_low_rank=tensors[3:]), inputs, upstream)  # fmt: skip
    for a, b in zip(got, of_dense, strict=True):
        assert (a.double() - b.double()).norm() <= 0.03 * b.double().norm()
    assert not torch.equal(got[0], of_dense[0])


@MAKERS
def test_only_what_is_stored_is_saved(kernel_device, make):
    """No dense weight and no normed rows; what is dequantized exists during a product alone."""
    weight = make(F, C, device=kernel_device)
    weights = make(2 * F, C, device=kernel_device), make(C, F, device=kernel_device)
    norm_call, inputs, upstream = norm_linear_case(rms_norm_linear, kernel_device)
    mlp_call, mlp_inputs, mlp_upstream = gated_mlp_case(kernel_device, True)
    for call, given, held, stored in (
        (norm_call, weight, inputs, weight.tensors),
        (mlp_call, weights, mlp_inputs, (*weights[0].tensors, *weights[1].tensors)),
    ):
        saved: list[torch.Tensor] = []
        leaves = [each.clone().requires_grad_() for each in held]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            outputs = call(given, *leaves)
        known = {each.data_ptr() for each in stored}
        others = [tuple(each.shape) for each in saved if each.data_ptr() not in known]
        assert known <= {each.data_ptr() for each in saved}
        pairs = [tuple(each.shape) for each in held[2:]]
        assert sorted(others) == sorted([(2, 3, C), (2, 3), (C,), *pairs])
        torch.autograd.grad(outputs, leaves, mlp_upstream if call is mlp_call else upstream)


@pytest.mark.gpu
def test_a_dense_weight_is_freed_after_its_product():
    weights = tuple(nf4(*size, device="cuda", dtype=torch.bfloat16) for size in ((2 * 8192, 2048), (2048, 8192)))
    tensor = lambda *size: draw(*size, device="cuda", dtype=torch.bfloat16)
    pairs = {
        "gate_up_low_rank": (tensor(R, 2048), tensor(2 * 8192, R)),
        "down_low_rank": (tensor(R, 8192), tensor(2048, R)),
    }
    x, norm = tensor(16, 2048).requires_grad_(), tensor(2048)
    y, _ = gated_mlp(None, x, norm, *weights, **pairs)
    torch.autograd.grad(y, x, y.detach())  # cuBLAS takes its workspace once
    del y
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, _ = gated_mlp(None, x, norm, *weights, **pairs)
    assert torch.cuda.memory_allocated() - before < 2**22
    torch.autograd.grad(y, x, y.detach())
    assert torch.cuda.max_memory_allocated() - before < 2 * 2 * 8192 * 2048 + 2**23  # gate and up alone


@MODES
def test_opcheck(kernel_device, recompute):
    weight = nf4(F, C, device=kernel_device)
    codes, *stored = weight_for_op(weight)
    stream = [draw(3, C, device=kernel_device).requires_grad_() for _ in range(2)]
    norm = FusedNorm(draw(C, device=kernel_device))
    low_rank = tuple(each.requires_grad_() for each in pair(F, C, kernel_device))
    opcheck_named(norm_linear.FORWARD, norm_linear.NormLinearInputs(*stream, norm, Projection(weight, None, low_rank)))
    opcheck(torch.ops.liger_models.quantized_linear, (stream[0], codes, None, *stored))
    gate_up, down = (
        Projection(
            nf4(*size, device=kernel_device), None, tuple(each.requires_grad_() for each in pair(*size, kernel_device))
        )
        for size in ((2 * F, C), (C, F))
    )
    opcheck_named(module.FORWARD, module.GatedMLPInputs(*stream, norm, gate_up, down, "silu", recompute, True))


@pytest.mark.compile
@MAKERS
def test_compiles_without_graph_breaks(kernel_device, make):
    weight = make(C, C, device=kernel_device)
    weights = make(2 * F, C, device=kernel_device), make(C, F, device=kernel_device)
    norm = draw(C, device=kernel_device)

    def function(x, residual, A, B):
        y, residual = rms_norm_linear(x, residual, norm, weight, low_rank=(A, B))
        return gated_mlp(quantized_linear(y, weight), residual, norm, *weights)

    inputs = [
        draw(6, C, device=kernel_device),
        draw(3, 2, C, device=kernel_device).view(6, C),
        *pair(C, C, kernel_device),
    ]
    upstream = [draw(6, C, device=kernel_device)] * 2
    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


def test_bad_arguments():
    weight, stream = nf4(F, C), draw(2, C)
    with pytest.raises(ValueError, match=r"rms_norm_linear: weight must be \[out, 32\], got \[96, 64\]"):
        rms_norm_linear(None, draw(2, 32), draw(32), weight)
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32 and torch.float16"):
        gated_mlp(None, stream, draw(C), nf4(2 * F, C), nf4(C, F, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"low_rank must have the weight's dtype, torch.float16, got torch.float32"):
        rms_norm_linear(None, stream, draw(C), weight.to(torch.float16), low_rank=pair(F, C, "cpu"))
