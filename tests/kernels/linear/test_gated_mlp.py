import functools
import sys

import pytest
import torch

from liger_models.kernels.activation.gated_act import ACTIVATIONS, gated_act_reference
from liger_models.kernels.activation.low_rank_gated_act import empty_codes, low_rank_gated_act
from liger_models.kernels.dispatch import INTERPRET
from liger_models.kernels.linear.gated_mlp import (
    BACKWARD,
    FORWARD,
    GatedMLPInputs,
    GatedMLPNeeds,
    GatedMLPSaved,
    GatedMLPUpstream,
    gated_mlp,
    gated_mlp_reference,
)
from liger_models.kernels.linear.projection import NormNeeds, Product, Projection, ProjectionNeeds
from liger_models.kernels.norm.fused_norm import FusedNorm

from ..activation.test_low_rank_gated_act import decode
from ..oracle import assert_close_to_truth, opcheck_named, run

FLAVORS = [
    pytest.param({"act": "silu", "eps": 1e-6}, id="llama"),
    pytest.param({"act": "gelu", "eps": 1e-5, "scale_in_fp32": True}, id="erf"),
    pytest.param({"act": "gelu_tanh", "eps": 1e-6, "weight_offset": 1.0, "scale_in_fp32": True}, id="gemma"),
    pytest.param({"act": "gelu_tanh", "eps": 1e-5, "norm": "layer_norm"}, id="layer"),
]
# The stream, F, O.
SHAPES = [((1, 130), 200, 70), ((3, 67), 51, 47), ((2, 3, 64), 40, 64), ((4, 1, 129), 33, 50), ((11, 72), 36, 40)]
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ORDER = ("x", "residual", "norm_weight", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")
NORMS = pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
MODES = pytest.mark.parametrize(
    ("recompute", "chunk"),
    [(False, None), (True, None), (True, 5)],
    ids=["keep", "recompute", "chunked"],
    indirect=["chunk"],
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes as long for a program of many rows of a weight as for one of few."""
    if INTERPRET:
        monkeypatch.setattr("liger_models.kernels.matmul.row_linear.ROWS", 128)


@pytest.fixture
def chunk(request, monkeypatch):
    """Up to so many rows per chunk; None for the usual number. (BLAS is less exact with three rows or fewer.)"""
    if request.param is not None:
        monkeypatch.setattr(sys.modules[gated_mlp.__module__], "WORKSPACE_MIB", 0)
        monkeypatch.setattr(sys.modules[gated_mlp.__module__], "MIN_CHUNK", request.param)
    return request.param


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, width, out, dtype, device, weight_dtype=None):
    """The seven tensors in order, and the upstream gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    C = shape[-1]
    stream = [draw(*shape), draw(*shape), draw(C)]
    weights = [draw(2 * width, C) / C**0.5, draw(out, width) / width**0.5, draw(2 * width), draw(out)]
    upstream = [draw(*shape[:-1], out).to(weight_dtype or dtype), draw(*shape).to(dtype)]
    return [t.to(dtype) for t in stream] + [t.to(weight_dtype or dtype) for t in weights], upstream


def with_norm_bias(inputs, names=ORDER, norm="layer_norm"):
    """The inputs and their names, and for a LayerNorm a bias of its own and its name."""
    if norm != "layer_norm":
        return inputs, names
    return [*inputs, torch.randn_like(inputs[names.index("norm_weight")])], (*names, "norm_bias")


def with_names(function, names=ORDER, outputs=None, **constants):
    """``function`` of the arguments named, in that order, the other tensors None; ``outputs`` picks one result."""

    def call(*tensors):
        out = function(**{**dict.fromkeys(ORDER), **dict(zip(names, tensors, strict=True))}, **constants)
        return out if outputs is None else out[outputs]

    return call


def check(inputs, upstream, names=ORDER, recompute=False, **kwargs):
    ours = with_names(gated_mlp, names, recompute=recompute, **kwargs)
    assert_close_to_truth(ours, with_names(gated_mlp_reference, names, **kwargs), inputs, upstream)


def without(inputs, *missing):
    """The inputs left, and their names."""
    names = tuple(name for name in ORDER if name not in missing)
    return [inputs[ORDER.index(name)] for name in names], names


@pytest.mark.cases(20)
@MODES
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(("shape", "width", "out"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, width, out, flavor, recompute, chunk, poisoned_empty):
    for dtype in dtypes(backend):
        inputs, upstream = make(shape, width, out, dtype, backend)
        for missing in ((), ("gate_up_bias", "down_bias"), ("x", "down_bias"), ("norm_weight",), ("x", "norm_weight")):
            left, names = without(inputs, *missing)
            check(left, upstream, names, recompute, **flavor)
            if "norm" in flavor and "norm_weight" in names:
                left, names = with_norm_bias(left, names)
                check(left, upstream, names, recompute, **flavor)


@pytest.mark.gpu
@RECOMPUTE
@pytest.mark.parametrize("flavor", FLAVORS)
def test_real_sizes(flavor, recompute, poisoned_empty):
    for dtype in GPU_DTYPES[1:]:
        inputs, upstream = make((2, 32, 2048), 5632, 2048, dtype, "cuda")
        check(inputs, upstream, recompute=recompute, **flavor)


@pytest.mark.cases(6)
@MODES
@pytest.mark.parametrize(("stream", "weights"), [("float32", "float16"), ("float16", "float32")])
def test_weights_of_another_dtype(backend, stream, weights, recompute, chunk, poisoned_empty):
    """An fp32 stream with half-precision weights is what autocast makes of a model."""
    stream, weights = getattr(torch, stream), getattr(torch, weights)
    inputs, upstream = make((3, 5, 32), 24, 32, stream, backend, weights)
    for missing in ((), ("norm_weight",)):
        left, names = without(inputs, *missing)
        check(left, upstream, names, recompute)
    check(inputs, upstream, recompute=recompute, scale_in_fp32=True)
    left, names = with_norm_bias(inputs)
    check(left, upstream, names, recompute, norm="layer_norm")
    x, residual, norm_weight, gate_up_weight, down_weight, *biases = inputs
    biases = [bias.to(stream) for bias in biases]
    inputs = [x.to(weights), residual, norm_weight.float(), gate_up_weight, down_weight, *biases]
    check(inputs, upstream, recompute=recompute)
    left, names = with_norm_bias(inputs)
    check([*left[:-1], left[-1].to(weights)], upstream, names, recompute, norm="layer_norm")


@NORMS
def test_recomputation_gives_the_same_bits(kernel_device, norm):
    for dtype in dtypes(kernel_device):
        for stream in {torch.float32, dtype}:
            inputs, upstream = make((1, 33, 32), 24, 32, stream, kernel_device, dtype)
            for act in ACTIVATIONS:
                for missing in ((), ("x", "norm_weight")):
                    left, names = without(inputs, *missing)
                    if "norm_weight" in names:
                        left, names = with_norm_bias(left, names, norm)
                    kept = run(with_names(gated_mlp, names, act=act, norm=norm), left, upstream)
                    again = run(with_names(gated_mlp, names, act=act, norm=norm, recompute=True), left, upstream)
                    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@MODES
def test_strided_inputs_and_gradients(backend, recompute, chunk):
    inputs, (dy, dh) = make((6, 5, 32), 12, 32, torch.float32, backend)
    t = lambda tensor: tensor.transpose(0, 1)
    x, residual, norm_weight, gate_up_weight, down_weight, *biases = inputs
    columns = [weight.t().contiguous().t() for weight in (gate_up_weight, down_weight)]
    inputs = [t(x), t(residual), norm_weight, *columns, *biases]
    for missing in ((), ("x",), ("norm_weight",), ("x", "norm_weight")):
        left, names = without(inputs, *missing)
        check(left, [t(dy), t(dh)], names, recompute)
    inputs = [x[::2, :, ::2], residual[::2, :, 1::2], norm_weight[::2], gate_up_weight[:, ::2], down_weight, *biases]
    check(inputs, [dy[:1].expand(3, 5, 32), dh[:1, :1, :1].expand(3, 5, 16)], recompute=recompute)


def test_only_one_of_two_outputs_is_used(backend):
    inputs, upstream = make((4, 16), 8, 16, torch.float32, backend)
    for missing in ((), ("x",), ("norm_weight",), ("x", "norm_weight")):
        left, names = without(inputs, *missing)
        for pick in (0, 1):
            check(left, upstream[pick : pick + 1], names, outputs=pick)


def test_without_x_the_residual_is_returned_as_it_is(backend):
    (_, residual, *rest), _ = make((4, 16), 8, 16, torch.float32, backend)
    assert gated_mlp(None, residual, *rest)[1] is residual


@MODES
@NORMS
def test_second_backward_agrees_and_nothing_is_overwritten(backend, norm, recompute, chunk):
    inputs, upstream = make((12, 48), 20, 48, torch.float32, backend)
    inputs, names = with_norm_bias(inputs, norm=norm)
    leaves = [t.requires_grad_() for t in inputs]
    outputs = with_names(gated_mlp, names, recompute=recompute, norm=norm)(*leaves)
    tensors = [*upstream, *outputs, *leaves]
    kept = [t.clone() for t in tensors]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@MODES
@NORMS
def test_empty_and_single_rows(backend, norm, recompute, chunk):
    for shape, width in (((0, 8), 4), ((1, 8), 1), ((2, 0, 8), 4), ((8,), 4), ((12, 8), 4)):
        inputs, upstream = make(shape, width, 8, torch.float32, backend)
        inputs, names = with_norm_bias(inputs, norm=norm)
        got = run(with_names(gated_mlp, names, recompute=recompute, norm=norm), inputs, upstream)
        want = run(with_names(gated_mlp_reference, names, norm=norm), inputs, upstream)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("with_x", [True, False])
@NORMS
def test_what_is_saved(kernel_device, norm, with_x):
    inputs, names = with_norm_bias(make((6, 32), 10, 8, torch.float32, kernel_device)[0], norm=norm)
    x, *rest = (t.requires_grad_() for t in inputs)
    of_norm, statistics = ([(32,), (32,)], (6, 2)) if norm == "layer_norm" else ([(32,)], (6,))
    weights = [*of_norm, (20, 32), (8, 10)]
    for recompute, expected in ((False, [(6, 20), *weights]), (True, [*weights[:-1], (20,), weights[-1]])):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            call = with_names(gated_mlp, names, norm=norm, recompute=recompute)
            _, stream = call(x if with_x else None, *rest)
        assert [tuple(t.shape) for t in saved] == [(6, 32), statistics, *expected]
        assert saved[0].data_ptr() == stream.data_ptr()


def with_pairs(function, names, **constants):
    """`with_names`, where the last four tensors are A and B of both low-rank terms."""
    return lambda *tensors: with_names(
        function, names, gate_up_low_rank=tensors[-4:-2], down_low_rank=tensors[-2:], **constants
    )(*tensors[:-4])


def low_ranks(shape, width, out, dtype, device):
    generator = torch.Generator().manual_seed(1)
    sizes = (6, shape[-1]), (2 * width, 6), (4, width), (out, 4)
    return [torch.randn(*size, generator=generator).mul(0.25).to(device, dtype) for size in sizes]


@pytest.mark.parametrize("many_rows", [1, 1024])
@pytest.mark.cases(5)
@MODES
@NORMS
@pytest.mark.parametrize("shape", [(11, 72), (2, 3, 64), (1, 130)], ids=str)
def test_low_rank_terms_match_fp64(backend, shape, norm, recompute, chunk, poisoned_empty, monkeypatch, many_rows):
    """Products with few rows, and with many, which are added to the low-rank term."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
    for dtype in dtypes(backend):
        inputs, upstream = make(shape, 36, 40, dtype, backend)
        pairs = low_ranks(shape, 36, 40, dtype, backend)
        for missing in ((), ("x", "gate_up_bias", "down_bias"), ("norm_weight",)):
            left, names = without(inputs, *missing)
            ours = with_pairs(gated_mlp, names, norm=norm, recompute=recompute)
            theirs = with_pairs(gated_mlp_reference, names, norm=norm)
            assert_close_to_truth(ours, theirs, [*left, *pairs], upstream)


@pytest.mark.parametrize("missing", ["gate_up", "down"])
@RECOMPUTE
def test_one_of_the_projections_has_a_low_rank_term(backend, monkeypatch, missing, recompute):
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    for dtype in dtypes(backend):
        inputs, upstream = make((11, 72), 36, 40, dtype, backend)
        pairs = low_ranks((11, 72), 36, 40, dtype, backend)
        pair, name = (pairs[2:], "down_low_rank") if missing == "gate_up" else (pairs[:2], "gate_up_low_rank")

        def call(function, *tensors, name=name, **options):
            return with_names(function, ORDER, **{name: tensors[-2:]}, **options)(*tensors[:-2])

        ours = functools.partial(call, gated_mlp, recompute=recompute)
        assert_close_to_truth(ours, functools.partial(call, gated_mlp_reference), [*inputs, *pair], upstream)


def test_wide_low_rank_terms_are_added_by_products(kernel_device, monkeypatch):
    """The activation's kernel does not add a term of a rank above `MOST_RANKS`."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    monkeypatch.setattr("liger_models.kernels.activation.low_rank_gated_act.MOST_RANKS", 5)
    module, calls = sys.modules[gated_mlp.__module__], []
    kernel = module.low_rank_gated_act
    monkeypatch.setattr(module, "low_rank_gated_act", lambda *given: calls.append(1) or kernel(*given))
    inputs, upstream = make((11, 72), 36, 40, torch.float32, kernel_device)
    pairs = low_ranks((11, 72), 36, 40, torch.float32, kernel_device)  # the ranks are 6 and 4
    ours, theirs = with_pairs(gated_mlp, ORDER), with_pairs(gated_mlp_reference, ORDER)
    assert_close_to_truth(ours, theirs, [*inputs, *pairs], upstream)
    assert not calls
    monkeypatch.setattr("liger_models.kernels.activation.low_rank_gated_act.MOST_RANKS", 6)
    assert_close_to_truth(ours, theirs, [*inputs, *pairs], upstream)
    assert calls


@pytest.mark.parametrize("many_rows", [1, 1024])
@RECOMPUTE
@pytest.mark.parametrize("trained", [(0, 1, 2, 3), (0, 1), (2, 3), (1,), (2,)], ids=str)
def test_frozen_weights_under_low_rank_terms(kernel_device, trained, recompute, many_rows, monkeypatch):
    """With few rows, nothing is saved beyond what frozen weights save alone. With many rows, the two products of rows
    and A are saved, too. The gradients are those with everything trained.
    """
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
    shape, of_rows = (11, 72), lambda saved: [tuple(t.shape) for t in saved if t.shape[:1] == (11,)]
    inputs, upstream = make(shape, 36, 40, torch.float32, kernel_device)
    pairs = low_ranks(shape, 36, 40, torch.float32, kernel_device)
    call = with_pairs(gated_mlp, ORDER, recompute=recompute)
    everything = run(call, [*inputs, *pairs], upstream)[-4:]
    leaves, saved = [each.clone().requires_grad_(i in trained) for i, each in enumerate(pairs)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, _ = call(*inputs, *leaves)
    y.backward(upstream[0])
    low = [(11, 6), *[(11, 4)] * (3 in trained)] if many_rows == 1 else []  # the down projection's only for its B
    assert sorted(of_rows(saved)) == sorted([(11, 72), (11,), *([] if recompute else [(11, 72), *low])])
    for i, leaf in enumerate(leaves):
        assert torch.equal(leaf.grad, everything[i]) if i in trained else leaf.grad is None


def integers(shape, width, out, dtype, device):
    """As `make` and `low_ranks` without norm weight and x, with small integers, so that gate and up are exact."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randint(-1, 2, size, generator=generator).to(device, dtype)
    C = shape[-1]
    inputs = [draw(*shape), draw(2 * width, C), draw(out, width), draw(2 * width), draw(out)]
    pairs = [draw(3, C), draw(2 * width, 3), draw(3, width), draw(out, 3)]
    return inputs, pairs, [draw(*shape[:-1], out), draw(*shape)]


def rounded_reference(residual, gate_up_weight, down_weight, gate_up_bias, down_bias, *pairs):
    """`gated_mlp_reference` of SiLU whose backward reads gate and up from 8 bits."""
    exact = [residual, gate_up_weight, down_weight, gate_up_bias, down_bias, *pairs]
    names = ("residual", *ORDER[3:])
    call = with_pairs if pairs else with_names
    y, _ = call(gated_mlp_reference, names)(*(t.detach() for t in exact))
    u = residual @ gate_up_weight.t() + gate_up_bias
    if pairs:
        A, B, down_A, down_B = pairs
        u = u + residual @ A.t() @ B.t()
    codes = empty_codes(u)
    low_rank_gated_act(u.detach(), "silu", None, codes)
    product = gated_act_reference(u + (decode(codes) - u).detach(), "silu")
    again = product @ down_weight.t() + down_bias
    if pairs:
        again = again + product @ down_A.t() @ down_B.t()
    return y + again - again.detach(), residual


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("ranks", [0, 3, "wide"])
def test_gate_and_up_in_8_bits(kernel_device, monkeypatch, ranks, frozen, poisoned_empty):
    """The result is the same. The gradients are those of the rounded gate and up, also in chunks."""
    module = sys.modules[gated_mlp.__module__]
    monkeypatch.setattr(module, "FROZEN_ROWS", 9)
    if ranks == "wide":
        monkeypatch.setattr("liger_models.kernels.activation.low_rank_gated_act.MOST_RANKS", 2)
    inputs, pairs, upstream = integers((13, 40), 45, 24, torch.float32, kernel_device)
    names, pairs = ("residual", *ORDER[3:]), pairs if ranks else []
    trained = [t for i, t in enumerate(inputs) if not (frozen and i)]

    def call(function, *tensors, **options):
        given = [*tensors[: len(trained)], *(t.to(tensors[0]) for t in inputs[len(trained) :])]
        if function is rounded_reference:
            return function(*given, *tensors[len(trained) :])
        with_terms = with_pairs if ranks else with_names
        return with_terms(function, names, **options)(*given, *tensors[len(trained) :])

    for many_rows in (1, 1024):  # with few rows, products add the low-rank terms to gate and up
        monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
        ours = functools.partial(call, gated_mlp, gate_up_8bit=True)
        saves_low, left = many_rows == 1 and ranks == 3, [*trained, *pairs]
        others = (functools.partial(call, function) for function in (gated_mlp, rounded_reference))
        results, exact, truth = (run(each, left, upstream) for each in (ours, *others))
        assert torch.equal(results[0], exact[0])
        assert torch.equal(results[1], exact[1])
        for index, (got, expected, full) in enumerate(zip(results[2:], truth[2:], exact[2:], strict=True)):
            # dB of the down projection reads the product of the forward, if it is saved.
            is_last = index == len(left) - 1 and saves_low
            assert (got - (full if is_last else expected)).norm() <= 2e-6 * expected.norm()
            assert (got - full).norm() <= 0.02 * full.norm()
        assert any(not torch.equal(got, full) for got, full in zip(results[2:], exact[2:], strict=True))


def test_memory_of_gate_and_up_in_8_bits(kernel_device):
    inputs, _ = make((6, 32), 40, 8, torch.float16, kernel_device)
    for tensor in inputs:
        tensor.requires_grad_()
    for recompute, expected in ((False, [((6, 80), torch.int8), ((6, 2, 2), torch.bfloat16)]), (True, [])):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            with_names(gated_mlp, ORDER, gate_up_8bit=True, recompute=recompute)(*inputs)
        found = [(tuple(t.shape), t.dtype) for t in saved]
        assert [each for each in found if each[1] in (torch.int8, torch.bfloat16)] == expected
        assert ((6, 80), torch.float16) not in found


def with_frozen(function, *weights):
    """`with_pairs` without the two weights, which get no gradients."""
    call = with_pairs(function, ORDER)
    return lambda *tensors: call(*tensors[:3], *(weight.to(tensors[0]) for weight in weights), *tensors[3:])


def test_the_backward_of_frozen_weights_takes_some_rows_at_a_time(kernel_device, monkeypatch):
    module = sys.modules[gated_mlp.__module__]
    monkeypatch.setattr(module, "FROZEN_ROWS", 9)
    rows, backward = [], module._backward_rows
    count = lambda part, *others: rows.append(len(part.dy)) or backward(part, *others)
    monkeypatch.setattr(module, "_backward_rows", count)
    for dtype in dtypes(kernel_device):
        inputs, upstream = make((2, 11, 72), 36, 40, dtype, kernel_device)
        weights, trained = inputs[3:5], [*inputs[:3], *inputs[5:], *low_ranks((11, 72), 36, 40, dtype, kernel_device)]
        ours, theirs = (with_frozen(function, *weights) for function in (gated_mlp, gated_mlp_reference))
        assert_close_to_truth(ours, theirs, trained, upstream)
        assert rows == [8, 8, 6]
        rows.clear()


FROZEN = [
    ((*ORDER, "norm_bias"), 4, 1, 1),
    (("x", "residual"), 2, 0, 0),  # frozen weights
    (("norm_weight",), 2, 0, 0),
    (("norm_bias",), 2, 0, 0),
    (("gate_up_weight",), 2, 1, 0),  # a frozen trunk
    (("down_weight",), 1, 0, 1),
    (("gate_up_bias",), 1, 0, 0),
    (("down_bias",), 0, 0, 0),
    (("x", "down_weight"), 3, 0, 1),
]


@pytest.mark.cases(16)
@RECOMPUTE
@pytest.mark.parametrize(
    ("norm", "trained", "matmuls", "rows", "products"),
    [
        *(("layer_norm", *case) for case in FROZEN),
        ("rms_norm", ORDER, *FROZEN[0][1:]),
        *(("rms_norm", *case) for case in FROZEN[1:] if "norm_bias" not in case[0]),
    ],
    ids=str,
)
def test_frozen_inputs_cost_nothing(kernel_device, monkeypatch, norm, trained, matmuls, rows, products, recompute):
    inputs, (dy, _) = make((6, 32), 10, 8, torch.float32, kernel_device)
    inputs, names = with_norm_bias(inputs, norm=norm)
    want = dict(zip(names, run(with_names(gated_mlp, names, outputs=0, norm=norm), inputs, [dy])[1:], strict=True))
    named = dict(zip(names, inputs, strict=True))
    for name in trained:
        named[name].requires_grad_()
    y, stream = gated_mlp(**named, norm=norm, recompute=recompute)
    assert stream.requires_grad == bool({"x", "residual"} & set(trained))

    module = sys.modules[Product.__module__]
    made = {}  # what the backward made, by the function that made it

    def spy(place, name, pick):
        original = getattr(place, name)
        call = lambda *args, **kwargs: made.setdefault(name, []).append(pick(out := original(*args, **kwargs))) or out
        monkeypatch.setattr(place, name, call)

    spy(FusedNorm, "backward", lambda out: out[3])
    spy(FusedNorm, "again", lambda out: out)
    spy(module, "gated_act_backward", lambda out: out[1])
    spy(module, "gated_act_forward", lambda out: out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy)
    again = recompute and trained != ("down_bias",)  # the projection with its bias is the one addmm
    assert sum(event.name == "aten::mm" for event in profile.events()) == matmuls
    assert sum(event.name == "aten::addmm" for event in profile.events()) == again
    count = lambda *names: sum(out is not None for name in names for out in made.get(name, []))
    assert count("backward", "again") == rows + again
    assert count("gated_act_backward", "gated_act_forward") == products
    for name, tensor in named.items():
        assert (tensor.grad is not None) == (name in trained)
        if name in trained:
            torch.testing.assert_close(tensor.grad, want[name])


def test_chunks_are_as_even_and_as_few_as_the_workspace_allows(monkeypatch):
    module = sys.modules[gated_mlp.__module__]
    row = 2 * 2 * 14336  # Llama-3-8B in bf16
    assert [module._chunk_rows(N, row) for N in (0, 1, 16384, 18724)] == [1, 1, 16384, 18724]
    assert [module._chunk_rows(N, row) for N in (18725, 500_000)] == [9363, 18519]
    assert [module._chunk_rows(N, 4 * row) for N in (16384, 16385)] == [16384, 8193]


@pytest.mark.parametrize("chunk", [4], indirect=True)
def test_several_chunks_round_the_weights_gradients_once(kernel_device, chunk):
    """bf16 or fp16 sums of 16 chunks would lose more than half precision's own rounding."""
    dtype = torch.bfloat16 if kernel_device == "cuda" else torch.float16
    inputs, upstream = make((64, 32), 24, 32, dtype, kernel_device)
    whole = run(with_names(gated_mlp), inputs, upstream)
    chunked = run(with_names(gated_mlp, recompute=True), inputs, upstream)
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours.dtype == dtype
        # Half a unit in the last place for each of the two roundings.
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_no_grad_keeps_nothing(kernel_device):
    inputs, _ = make((6, 32), 10, 8, torch.float32, kernel_device)
    want = [t.detach() for t in gated_mlp(*inputs)]
    with torch.no_grad():
        got = gated_mlp(*(t.requires_grad_() for t in inputs))
    assert not any(t.requires_grad for t in got)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [2048], indirect=True)
def test_memory_of_chunks(chunk):
    """Gate, up and their product exist for one chunk: beside it y, the stream and its gradient, and the fp32 sums."""
    N, C, F = 32768, 1024, 4096
    inputs, upstream = make((N, C), F, C, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in inputs[:-2]]
    torch.autograd.grad(gated_mlp(*leaves, recompute=True), leaves, upstream)  # cuBLAS takes its workspace once
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = gated_mlp(*leaves, recompute=True)
    own_chunk = chunk * (3 * F + 3 * C)
    assert torch.cuda.max_memory_allocated() - before <= 2 * (2 * N * C + own_chunk) + 2**23
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(outputs, leaves, upstream)
    sums = 3 * F * C * (2 + 1)  # in units of bf16, and the rounded ones
    assert torch.cuda.max_memory_allocated() - before <= 2 * (3 * N * C + own_chunk + sums) + 2**23


@pytest.mark.gpu
@RECOMPUTE
def test_memory(recompute):
    """Between forward and backward: the stream, y, and gate and up unless they are recomputed; and the peak."""
    N, C, F = 8192, 1024, 4096
    inputs, upstream = make((N, C), F, C, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in inputs[:-2]]
    torch.autograd.grad(gated_mlp(*leaves, recompute=recompute), leaves, upstream)  # cuBLAS takes its workspace once
    before = torch.cuda.memory_allocated()
    outputs = gated_mlp(*leaves, recompute=recompute)
    units = 2 * N * C + (0 if recompute else 2 * N * F)
    assert torch.cuda.memory_allocated() - before <= 2 * units + 2**21
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(outputs, leaves, upstream)
    # In backward: gate and up and their gradient (one buffer if recomputed), the product's gradient or the product, dW.
    peak = 2 * N * C + (3 if recompute else 5) * N * F + 3 * F * C
    assert torch.cuda.max_memory_allocated() - before <= 2 * peak + 2**23


@pytest.mark.gpu
def test_memory_of_frozen_weights():
    """The backward needs the gradients of the gates, the ups and their product for one chunk at a time."""
    N, C, F = 16384, 1024, 4096
    inputs, upstream = make((N, C), F, C, torch.bfloat16, "cuda")
    inputs[0].requires_grad_(), inputs[1].requires_grad_()
    torch.autograd.grad(gated_mlp(*inputs), inputs[:2], upstream)  # cuBLAS takes its workspace once
    outputs = gated_mlp(*inputs)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(outputs, inputs[:2], upstream)
    rows = sys.modules[gated_mlp.__module__].FROZEN_ROWS
    assert torch.cuda.max_memory_allocated() - before <= 2 * (N * C + rows * (3 * F + 2 * C)) + 2**23


def test_opcheck(kernel_device):
    inputs, _ = make((3, 24), 8, 24, torch.float32, kernel_device)
    for tensor in inputs:
        tensor.requires_grad_()
    x, residual, norm_weight, *weights = inputs
    norm_bias = torch.randn(24, device=kernel_device, requires_grad=True)
    gate_up, down = Projection(weights[0], weights[2]), Projection(weights[1], weights[3])
    sizes = (2, 24), (16, 2), (2, 8), (24, 2)
    pairs = [torch.randn(*size, device=kernel_device, requires_grad=True) for size in sizes]
    rms, layer, none = FusedNorm(norm_weight), FusedNorm(norm_weight, norm_bias, "layer_norm"), FusedNorm(None)

    def check(x, residual, norm, gate_up=gate_up, down=down, recompute=True, keeps_low=False, in_8bit=False):
        inputs = GatedMLPInputs(x, residual, norm, gate_up, down, "silu", recompute, True, None, keeps_low, in_8bit)
        opcheck_named(FORWARD, inputs)

    check(x, residual, rms, recompute=False)
    check(x, residual, rms, recompute=False, in_8bit=True)
    for recompute in (False, True):
        low_ranks = gate_up._replace(low_rank=tuple(pairs[:2])), down._replace(low_rank=tuple(pairs[2:]))
        for keeps_low in (False, True):
            check(x, residual, rms, *low_ranks, recompute=recompute, keeps_low=keeps_low)
    check(x, residual, rms)
    check(x, residual, layer, recompute=False)
    check(None, residual, FusedNorm(norm_weight, None, "layer_norm"))
    check(None, residual, none, gate_up._replace(bias=None), down._replace(bias=None), recompute=False)
    strided = [t.detach()[:, None].expand(3, 2, 24).transpose(0, 1).requires_grad_() for t in inputs[:2]]
    for stream in (strided, (None, strided[1])):
        check(*stream, none)
        check(*stream, layer)


def test_opcheck_backward(kernel_device):
    inputs, (dy, dh) = make((3, 24), 8, 24, torch.float32, kernel_device)
    _, residual, norm_weight, gate_up_weight, down_weight, *_ = inputs
    norm_bias, u = torch.randn(24, device=kernel_device), torch.ones(3, 16, device=kernel_device).half()
    weights = gate_up_weight.half(), down_weight.half()
    sizes = (2, 24), (16, 2), (2, 8), (24, 2)
    pairs = [torch.randn(*size, device=kernel_device).half() for size in sizes]
    low_ranks = tuple(pairs[:2]), tuple(pairs[2:])
    for norm in (FusedNorm(norm_weight), FusedNorm(norm_weight, norm_bias, "layer_norm")):
        statistics = torch.ones(norm.statistics_shape((3,)), device=kernel_device)
        of_norm = NormNeeds(True, norm.bias is not None)
        dense, pair = ProjectionNeeds(True, True, False, False), ProjectionNeeds(False, False, True, True)
        weight, every = ProjectionNeeds(True, False, False, False), ProjectionNeeds(True, True, True, True)
        nothing = ProjectionNeeds(False, False, False, False)
        for kept, needs, given in (
            (u, GatedMLPNeeds(True, True, of_norm, dense, dense), (None, None)),
            (None, GatedMLPNeeds(False, False, NormNeeds(False, False), weight, nothing), (None, None)),
            (None, GatedMLPNeeds(True, True, of_norm, every, every), low_ranks),
            (u, GatedMLPNeeds(False, False, NormNeeds(False, False), pair, pair), low_ranks),
        ):
            gate_up, down = (Projection(w, None, low_rank) for w, low_rank in zip(weights, given, strict=True))
            saved = GatedMLPSaved(residual, statistics, kept, norm, gate_up, down, "gelu")
            opcheck_named(BACKWARD, GatedMLPUpstream(dy.half(), dh, saved, needs))
            if kept is not None:
                coded = saved._replace(u=kept.to(torch.int8), u_scales=torch.ones(3, 1, 2).to(kept).bfloat16())
                opcheck_named(BACKWARD, GatedMLPUpstream(dy.half(), dh, coded, needs))
            if given == low_ranks:
                low = (None, None) if kept is None else (torch.ones(3, 2, device=kernel_device).half(),) * 2
                saved = GatedMLPSaved(residual, statistics, kept, norm, gate_up, down, "gelu", None, True, *low)
                opcheck_named(BACKWARD, GatedMLPUpstream(dy.half(), dh, saved, needs))


@pytest.mark.compile
@MODES
def test_compiles_without_graph_breaks(kernel_device, recompute, chunk):
    inputs, upstream = make((7, 24), 8, 24, torch.float32, kernel_device)

    def function(x, residual, norm_weight, *weights):
        y, residual = gated_mlp(None, residual, None, *weights, recompute=recompute)
        y, residual = gated_mlp(
            x + y, residual, norm_weight, *weights, norm="layer_norm", norm_bias=norm_weight, recompute=recompute
        )
        return gated_mlp(x + y, residual, norm_weight, *weights, act="gelu_tanh", recompute=recompute)

    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


def test_bad_arguments():
    ones = torch.ones
    good = [ones(2, 4), ones(2, 4), ones(4), ones(6, 4), ones(5, 3), ones(6), ones(5)]

    def bad(index, tensor, **constants):
        gated_mlp(*good[:index], tensor, *good[index + 1 :], **constants)

    with pytest.raises(ValueError, match=r"one shape, got \[1, 4\] and \[2, 4\]"):
        bad(0, ones(1, 4))
    with pytest.raises(ValueError, match=r"shape of residual's last dimension, got \[3\] for residual \[2, 4\]"):
        bad(2, ones(3))
    with pytest.raises(ValueError, match=r"gate_up_weight must be \[out, 4\], got \[6, 3\]"):
        bad(3, ones(6, 3))
    with pytest.raises(ValueError, match=r"gate_up_weight holds pairs of rows, got \[7, 4\]"):
        gated_mlp(*good[:3], ones(7, 4), ones(5, 3))
    with pytest.raises(ValueError, match=r"down_weight must be \[out, 3\], got \[5, 6\]"):
        bad(4, ones(5, 6))
    with pytest.raises(ValueError, match=r"gate_up_weight's bias must be \[6\], got \[3\]"):
        bad(5, ones(3))
    with pytest.raises(ValueError, match=r"act must be one of silu, gelu_tanh, gelu, got 'relu'"):
        bad(6, None, act="relu")
    with pytest.raises(ValueError, match=r"norm must be one of rms_norm, layer_norm, got 'batch_norm'"):
        bad(6, None, norm="batch_norm")
    with pytest.raises(ValueError, match=r"norm_bias must be None without a LayerNorm"):
        bad(6, None, norm_bias=ones(4))
    with pytest.raises(ValueError, match=r"norm_bias must be None without a LayerNorm"):
        bad(2, None, norm="layer_norm", norm_bias=ones(4))
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32 and torch.float16"):
        bad(4, ones(5, 3).half())
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch.int64"):
        bad(0, ones(2, 4).long())
