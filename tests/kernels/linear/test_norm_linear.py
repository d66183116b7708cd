import functools

import pytest
import torch

from liger_models.kernels.linear.norm_linear import (
    BACKWARD,
    FORWARD,
    NormLinearInputs,
    NormLinearNeeds,
    NormLinearSaved,
    NormLinearUpstream,
    layer_norm_linear,
    layer_norm_linear_reference,
    rms_norm_linear,
    rms_norm_linear_reference,
)
from liger_models.kernels.linear.projection import NormNeeds, Projection, ProjectionNeeds
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.layer_norm import MAX_WIDTH

from ..oracle import assert_close_to_truth, opcheck_named, run

RMS = (rms_norm_linear, rms_norm_linear_reference, ("x", "residual", "norm_weight", "weight", "bias"))
LAYER = (
    layer_norm_linear,
    layer_norm_linear_reference,
    ("x", "residual", "norm_weight", "norm_bias", "weight", "bias"),
)
PLAIN = (*LAYER[:2], RMS[2])  # a LayerNorm without bias
OPS = pytest.mark.parametrize("op", [RMS, LAYER, PLAIN], ids=["rms", "layer", "layer-no-bias"])
FLAVORS = [
    pytest.param(RMS, {"eps": 1e-6}, id="llama"),
    pytest.param(RMS, {"eps": 1e-5, "scale_in_fp32": True}, id="olmo2"),
    pytest.param(RMS, {"eps": 1e-6, "weight_offset": 1.0, "scale_in_fp32": True}, id="gemma"),
    pytest.param(LAYER, {"eps": 1e-5}, id="layer"),
    pytest.param(PLAIN, {"eps": 1e-5}, id="layer-no-bias"),
]
SHAPES = [
    ((1, 34), 19),
    ((3, 37), 21),
    ((2, 3, 64), 24),
    ((4, 1, 129), 8),
]  # the stream, and the linear layer's outputs
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(op, shape, out, dtype, device, weight_dtype=None):
    """The op's tensors by name, and the upstream gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    C = shape[-1]
    drawn = {"x": draw(*shape), "residual": draw(*shape), "norm_weight": draw(C)}
    drawn |= {"weight": draw(out, C) / C**0.5, "bias": draw(out)}
    upstream = [draw(*shape[:-1], out).to(weight_dtype or dtype), draw(*shape).to(dtype)]
    drawn["norm_bias"] = draw(C)
    of_linear = ("weight", "bias")
    return {n: drawn[n].to((weight_dtype or dtype) if n in of_linear else dtype) for n in op[2]}, upstream


def with_names(function, names, outputs=None, **constants):
    """``function`` of the arguments named, in that order, the other tensors None; ``outputs`` picks one result."""
    absent = {"x": None}
    if function in (layer_norm_linear, layer_norm_linear_reference):
        absent["norm_bias"] = None

    def call(*tensors):
        out = function(**absent | dict(zip(names, tensors, strict=True)), **constants)
        return out if outputs is None else out[outputs]

    return call


def check(op, named, upstream, without=(), **kwargs):
    names = [name for name in named if name not in without]
    ours, theirs = (with_names(f, names, **kwargs) for f in op[:2])
    assert_close_to_truth(ours, theirs, [named[name] for name in names], upstream)


def run_named(op, named, upstream, **kwargs):
    """Results by `run`: outputs, then gradients by name."""
    outputs = 2 if kwargs.get("outputs") is None else 1
    got = run(with_names(op[0], list(named), **kwargs), list(named.values()), upstream)
    return got[:outputs], dict(zip(named, got[outputs:], strict=True))


def norm_of(op, named, eps=1e-6, weight_offset=0.0, scale_in_fp32=False):
    kind = "rms_norm" if op is RMS else "layer_norm"
    return FusedNorm(named["norm_weight"], named.get("norm_bias"), kind, eps, weight_offset, scale_in_fp32)


@pytest.mark.cases(18)
@pytest.mark.parametrize(("op", "flavor"), FLAVORS)
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, out, op, flavor, poisoned_empty):
    for dtype in dtypes(backend):
        named, upstream = make(op, shape, out, dtype, backend)
        check(op, named, upstream, **flavor)
        check(op, named, upstream, ("bias",), **flavor)
        check(op, named, upstream, ("x",), **flavor)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "flavor"), FLAVORS)
def test_real_sizes(op, flavor, poisoned_empty):
    for dtype in GPU_DTYPES[1:]:
        named, upstream = make(op, (2, 32, 4096), 6144, dtype, "cuda")
        check(op, named, upstream, **flavor)


@OPS
@pytest.mark.parametrize(("stream", "weights"), [("float32", "float16"), ("float16", "float32")])
def test_weight_of_another_dtype(backend, op, stream, weights, poisoned_empty):
    """An fp32 stream with half-precision weights is what autocast makes of a model."""
    named, upstream = make(op, (3, 5, 32), 16, getattr(torch, stream), backend, getattr(torch, weights))
    for options in ({}, {"scale_in_fp32": True})[: 2 if op is RMS else 1]:
        check(op, named, upstream, **options)
    named["bias"] = named["bias"].to(getattr(torch, stream))
    check(op, named, upstream)
    named["x"] = named["x"].to(upstream[0].dtype)
    named["norm_weight"] = named["norm_weight"].float()
    check(op, named, upstream)


@OPS
def test_autocast_does_not_change_the_weights_dtype(backend, op):
    named, upstream = make(op, (3, 32), 16, torch.float32, backend)
    want, _ = run_named(op, named, upstream)
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        got = [t.detach() for t in with_names(op[0], list(named))(*named.values())]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@OPS
def test_strided_inputs_and_gradients(backend, op):
    named, (dy, dh) = make(op, (6, 5, 32), 16, torch.float32, backend)
    t = lambda tensor: tensor.transpose(0, 1)
    turned = {"x": t(named["x"]), "residual": t(named["residual"]), "weight": named["weight"].t().contiguous().t()}
    check(op, named | turned, [t(dy), t(dh)])
    check(op, named | turned, [t(dy), t(dh)], ("x",))
    halves = {name: named[name][::2] for name in named if name.startswith("norm")}
    halves |= {
        "x": named["x"][::2, :, ::2],
        "residual": named["residual"][::2, :, 1::2],
        "weight": named["weight"][:, ::2],
    }
    check(op, named | halves, [dy[:1].expand(3, 5, 16), dh[:1, :1, :1].expand(3, 5, 16)])
    # A part of the output of a packed projection, whose rows are further apart than they are wide.
    packed, _ = make(op, (6, 5, 80), 16, torch.float32, backend)
    check(op, named | {"residual": packed["residual"][..., 8:40]}, [dy, dh], ("x",))


@OPS
def test_only_one_of_two_outputs_is_used(backend, op):
    named, upstream = make(op, (4, 16), 8, torch.float32, backend)
    for pick in (0, 1):
        check(op, named, upstream[pick : pick + 1], outputs=pick)
        check(op, named, upstream[pick : pick + 1], ("x",), outputs=pick)


@OPS
def test_without_x_the_residual_is_returned_as_it_is(backend, op):
    named, _ = make(op, (4, 16), 8, torch.float32, backend)
    assert with_names(op[0], list(named))(None, *[*named.values()][1:])[1] is named["residual"]


@OPS
def test_second_backward_agrees_and_nothing_is_overwritten(backend, op):
    named, upstream = make(op, (5, 48), 16, torch.float32, backend)
    leaves = [t.requires_grad_() for t in named.values()]
    outputs = with_names(op[0], list(named))(*leaves)
    tensors = [*upstream, *outputs, *leaves]
    kept = [t.clone() for t in tensors]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@OPS
def test_empty_and_single_rows(backend, op):
    for shape in ((0, 8), (1, 2), (2, 0, 8), (8,)):
        named, upstream = make(op, shape, 4, torch.float32, backend)
        got, want = (run(with_names(f, list(named)), list(named.values()), upstream) for f in op[:2])
        torch.testing.assert_close(got, want)


@pytest.mark.cases(5)
@pytest.mark.parametrize(("op", "flavor"), FLAVORS)
@pytest.mark.parametrize(("rows", "width"), [(40, 32), (5, 65), (5, 5000)])
def test_normed_activations_are_recomputed_bit_for_bit(kernel_device, op, flavor, rows, width, poisoned_empty):
    for stream in dtypes(kernel_device):
        named, (dn, dh) = make(op, (rows, width), width, stream, kernel_device)
        norm = norm_of(op, named, **flavor)
        for x in (named["x"], named["x"] + 20):  # and with a mean far from zero
            normed, h, statistics = norm.forward(x, named["residual"])
            assert tuple(statistics.shape) == norm.statistics_shape((rows,))
            for dtype in dtypes(kernel_device):
                again = norm.again(h, statistics, dtype)
                needs = {"need_weight": True, "need_bias": norm.bias is not None}
                *_, beside = norm.backward(dn, dh, h, statistics, **needs, rows_dtype=dtype)
                assert again.dtype == beside.dtype == dtype
                assert torch.equal(again, normed.to(dtype))
                assert torch.equal(beside, normed.to(dtype))


@OPS
@pytest.mark.parametrize("with_x", [True, False])
def test_normed_activations_are_not_saved(kernel_device, op, with_x):
    named, _ = make(op, (6, 32), 8, torch.float32, kernel_device)
    x, *rest = (t.requires_grad_() for t in named.values())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, stream = with_names(op[0], list(named))(x if with_x else None, *rest)
    statistics = (6,) if op is RMS else (6, 2)
    of_norm = [(32,)] * (2 if op is LAYER else 1)
    assert [tuple(t.shape) for t in saved] == [(6, 32), statistics, *of_norm, (8, 32)]
    assert saved[0].data_ptr() == stream.data_ptr()
    assert saved[1].dtype == torch.float32


FROZEN = [
    (None, 2, True),  # all are trained
    (("x", "residual"), 1, False),  # frozen weights
    (("norm_weight",), 1, False),
    (("norm_bias",), 1, False),
    (("weight",), 1, True),  # a frozen trunk
    (("bias",), 0, False),
    (("x", "bias"), 1, False),
]


@pytest.mark.parametrize(
    ("op", "trained", "matmuls", "with_rows"),
    [
        pytest.param(op, case[0] or op[2], *case[1:], id=f"{name} {case[0]}")
        for name, op in {"rms": RMS, "layer": LAYER, "layer-no-bias": PLAIN}.items()
        for case in FROZEN
        if case[0] is None or set(case[0]) <= set(op[2])
    ],
)
def test_frozen_inputs_cost_nothing(kernel_device, monkeypatch, op, trained, matmuls, with_rows):
    named, (dy, _) = make(op, (6, 32), 8, torch.float32, kernel_device)
    _, want = run_named(op, named, [dy], outputs=0)
    rows = []  # normed activations that the backward made

    def spy(name, pick):
        original = getattr(FusedNorm, name)
        call = lambda *args, **kwargs: rows.append(pick(out := original(*args, **kwargs))) or out
        monkeypatch.setattr(FusedNorm, name, call)

    spy("backward", lambda out: out[3])
    spy("again", lambda out: out)
    for name in trained:
        named[name].requires_grad_()
    y, stream = with_names(op[0], list(named))(*named.values())
    assert stream.requires_grad == bool({"x", "residual"} & set(trained))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy)
    assert sum(event.name == "aten::mm" for event in profile.events()) == matmuls
    assert any(made is not None for made in rows) == with_rows
    for name, tensor in named.items():
        assert (tensor.grad is not None) == (name in trained)
        if name in trained:
            torch.testing.assert_close(tensor.grad, want[name])


@OPS
def test_no_grad(kernel_device, op):
    named, _ = make(op, (6, 32), 8, torch.float32, kernel_device)
    with torch.no_grad():
        outputs = with_names(op[0], list(named))(*(t.requires_grad_() for t in named.values()))
        assert not any(out.requires_grad for out in outputs)


@pytest.mark.cases(1)
@OPS
def test_opcheck(kernel_device, op):
    named, (dy, dh) = make(op, (3, 24), 8, torch.float32, kernel_device)
    norm = norm_of(op, {name: t.requires_grad_() for name, t in named.items()})
    x, residual, weight, bias = (named[name] for name in ("x", "residual", "weight", "bias"))
    pair = [torch.randn(*size, device=kernel_device, requires_grad=True) for size in ((2, 24), (8, 2))]
    opcheck_named(FORWARD, NormLinearInputs(x, residual, norm, Projection(weight, bias)))
    for keeps_low in (False, True):
        projection = Projection(weight, bias, tuple(pair))
        opcheck_named(FORWARD, NormLinearInputs(x, residual, norm, projection, None, keeps_low))
    other = norm._replace(eps=1e-6, weight_offset=1.0, scale_in_fp32=True) if op is RMS else norm
    opcheck_named(FORWARD, NormLinearInputs(None, residual, other, Projection(weight)))

    bias = None if norm.bias is None else norm.bias.detach()
    norm = norm._replace(weight=norm.weight.detach(), bias=bias)
    statistics = torch.ones(norm.statistics_shape((3,)), device=kernel_device)
    low_rank = tuple(each.detach().half() for each in pair)
    every, nothing = NormNeeds(True, bias is not None), NormNeeds(False, False)
    for stream, of_norm, of_projection, of_pair in (
        (True, every, ProjectionNeeds(True, True, False, False), None),
        (True, every, ProjectionNeeds(True, True, True, True), low_rank),
        (False, nothing, ProjectionNeeds(True, False, False, False), None),
        (False, nothing, ProjectionNeeds(False, False, True, False), low_rank),
        (True, nothing, ProjectionNeeds(False, False, False, False), low_rank),
    ):
        saved = NormLinearSaved(residual.detach(), statistics, norm, Projection(weight.detach().half(), None, of_pair))
        needs = NormLinearNeeds(stream, stream, of_norm, of_projection)
        for low in (None, torch.ones(3, 2, device=kernel_device).half())[: 1 + (of_pair is not None)]:
            opcheck_named(BACKWARD, NormLinearUpstream(dy.half(), dh, saved._replace(low=low), needs))


def with_pair(function, names, **constants):
    """`with_names`, where the last two tensors are A and B of the low-rank term."""
    return lambda *tensors: with_names(function, names, low_rank=tensors[-2:], **constants)(*tensors[:-2])


@pytest.mark.parametrize("many_rows", [1, 1024])
@pytest.mark.cases(9)
@OPS
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 64), (1, 1, 64)], ids=str)
def test_low_rank_term_matches_fp64(backend, op, shape, poisoned_empty, monkeypatch, many_rows):
    """Products with few rows, and with many, which are added to the low-rank term."""
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", many_rows)
    for dtype in dtypes(backend):
        for weights in {dtype, torch.float32}:
            named, upstream = make(op, shape, 24, dtype, backend, weights)
            generator = torch.Generator().manual_seed(1)
            pair = [torch.randn(*size, generator=generator) / 4 for size in ((6, shape[-1]), (24, 6))]
            pair = [each.to(backend, weights) for each in pair]
            for missing in ((), ("x", "bias")):
                names = [name for name in named if name not in missing]
                ours, theirs = (with_pair(f, names) for f in op[:2])
                assert_close_to_truth(ours, theirs, [*(named[name] for name in names), *pair], upstream)


@OPS
def test_frozen_weight_under_a_low_rank_term_saves_no_normed_rows(kernel_device, op):
    """Gradients of A and B are those with a trained weight, and what is saved is the stream and its statistics."""
    named, upstream = make(op, (5, 64), 24, torch.float32, kernel_device)
    pair = [torch.randn(*size, device=kernel_device) for size in ((6, 64), (24, 6))]
    names, tensors = list(named), [*named.values(), *pair]
    trained = run(with_pair(op[0], names), tensors, upstream)[-2:]
    saved, leaves = [], [each.clone().requires_grad_() for each in pair]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, _ = with_pair(op[0], names)(*named.values(), *leaves)
    y.backward(upstream[0])
    assert [tuple(t.shape) for t in saved if t.shape[:1] == (5,)] in ([(5, 64), (5,)], [(5, 64), (5, 2)])
    assert all(torch.equal(leaf.grad, expected) for leaf, expected in zip(leaves, trained, strict=True))


@pytest.mark.compile
@OPS
def test_compiles_without_graph_breaks(kernel_device, op):
    named, upstream = make(op, (3, 24), 24, torch.float32, kernel_device)
    call = with_names(op[0], list(named))

    def function(x, residual, *weights):
        y, residual = call(None, residual, *weights[:-1], None)
        return call(x + y, residual, *weights)

    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    inputs = list(named.values())
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


def test_bad_arguments():
    ones = torch.ones
    low_rank = functools.partial(rms_norm_linear, None, ones(2, 4), ones(4), ones(3, 4))
    with pytest.raises(ValueError, match=r"low_rank must be A \[R, 4\] and B \[3, R\], got \[2, 4\] and \[3, 1\]"):
        low_rank(low_rank=(ones(2, 4), ones(3, 1)))
    with pytest.raises(TypeError, match=r"low_rank must have the weight's dtype, torch.float32, got torch.float16"):
        low_rank(low_rank=(ones(2, 4).half(), ones(3, 2)))
    with pytest.raises(ValueError, match=r"one shape, got \[2, 4\] and \[1, 4\]"):
        rms_norm_linear(ones(2, 4), ones(1, 4), ones(4), ones(3, 4))
    with pytest.raises(ValueError, match=r"shape of residual's last dimension, got \[3\] for residual \[2, 4\]"):
        rms_norm_linear(None, ones(2, 4), ones(3), ones(3, 4))
    with pytest.raises(ValueError, match=r"weight must be \[out, 4\], got \[4, 3\]"):
        rms_norm_linear(None, ones(2, 4), ones(4), ones(4, 3))
    with pytest.raises(ValueError, match=r"weight's bias must be \[3\], got \[4\]"):
        rms_norm_linear(None, ones(2, 4), ones(4), ones(3, 4), ones(4))
    with pytest.raises(TypeError, match=r"residual must be a floating-point tensor, got torch.int64"):
        rms_norm_linear(None, ones(2, 4, dtype=torch.int64), ones(4), ones(3, 4))
    with pytest.raises(ValueError, match=r"layer_norm_linear: norm_bias must .* got \[3\] for residual \[2, 4\]"):
        layer_norm_linear(None, ones(2, 4), ones(4), ones(3), ones(3, 4))
    with pytest.raises(TypeError, match=r"layer_norm_linear: norm_bias must be a floating-point tensor"):
        layer_norm_linear(None, ones(2, 4), ones(4), ones(4).long(), ones(3, 4))
    wide = ones(MAX_WIDTH + 1)
    with pytest.raises(ValueError, match=r"at most 65536 wide, got 65537"):
        layer_norm_linear(None, wide, wide, None, ones(1, MAX_WIDTH + 1))
    norm = FusedNorm(ones(4), ones(4))
    with pytest.raises(ValueError, match=r"norm_bias must be None without a LayerNorm"):
        norm.check("op", None, ones(2, 4))
    with pytest.raises(ValueError, match=r"norm must be one of rms_norm, layer_norm, got 'batch_norm'"):
        norm._replace(kind="batch_norm").check("op", None, ones(2, 4))
