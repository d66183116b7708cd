import sys

import pytest
import torch

from liger_models.kernels.rms_norm import rms_norm_forward
from liger_models.kernels.rms_norm_linear import (
    norm_backward,
    normed_again,
    rms_norm_linear,
    rms_norm_linear_reference,
)

from .oracle import assert_close_to_truth, opcheck, run

FLAVOURS = [
    pytest.param({"eps": 1e-6}, id="llama"),
    pytest.param({"eps": 1e-5, "scale_in_fp32": True}, id="olmo2"),
    pytest.param({"eps": 1e-6, "weight_offset": 1.0, "scale_in_fp32": True}, id="gemma"),
]
SHAPES = [
    ((1, 34), 19),
    ((3, 37), 21),
    ((2, 3, 64), 24),
    ((4, 1, 129), 8),
]  # the stream, and the linear layer's outputs
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ORDER = ("x", "residual", "norm_weight", "weight", "bias")


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, out, dtype, device, weight_dtype=None):
    """x, residual, norm weight, weight and bias, and the upstream gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device)
    C = shape[-1]
    stream = [draw(*shape), draw(*shape), draw(C)]
    weights = [draw(out, C) / C**0.5, draw(out)]
    upstream = [draw(*shape[:-1], out).to(weight_dtype or dtype), draw(*shape).to(dtype)]
    return [t.to(dtype) for t in stream] + [t.to(weight_dtype or dtype) for t in weights], upstream


def with_names(function, names=ORDER, outputs=None, **constants):
    """``function`` of the arguments named, in that order, the other tensors None; ``outputs`` picks one result."""

    def call(*tensors):
        out = function(**{**dict.fromkeys(ORDER), **dict(zip(names, tensors, strict=True))}, **constants)
        return out if outputs is None else out[outputs]

    return call


def check(inputs, upstream, names=ORDER, **kwargs):
    ours, theirs = (with_names(f, names, **kwargs) for f in (rms_norm_linear, rms_norm_linear_reference))
    assert_close_to_truth(ours, theirs, inputs, upstream)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, out, flavour, poisoned_empty):
    for dtype in dtypes(backend):
        inputs, upstream = make(shape, out, dtype, backend)
        check(inputs, upstream, **flavour)
        check(inputs[:-1], upstream, ORDER[:-1], **flavour)
        check(inputs[1:], upstream, ORDER[1:], **flavour)


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_real_sizes(flavour, poisoned_empty):
    for dtype in GPU_DTYPES[1:]:
        inputs, upstream = make((2, 32, 4096), 6144, dtype, "cuda")
        check(inputs, upstream, **flavour)


@pytest.mark.parametrize(("stream", "weights"), [("float32", "float16"), ("float16", "float32")])
def test_weight_of_another_dtype(backend, stream, weights, poisoned_empty):
    """An fp32 stream with half-precision weights is what autocast makes of a model."""
    inputs, upstream = make((3, 5, 32), 16, getattr(torch, stream), backend, getattr(torch, weights))
    for scale_in_fp32 in (False, True):
        check(inputs, upstream, scale_in_fp32=scale_in_fp32)
    inputs[4] = inputs[4].to(getattr(torch, stream))
    check(inputs, upstream)
    inputs[0] = inputs[0].to(upstream[0].dtype)
    inputs[2] = inputs[2].float()
    check(inputs, upstream)


def test_autocast_does_not_change_the_weights_dtype(backend):
    inputs, upstream = make((3, 32), 16, torch.float32, backend)
    want = run(rms_norm_linear, inputs, upstream)
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        got = [t.detach() for t in rms_norm_linear(*inputs)]
    assert all(torch.equal(a, b) for a, b in zip(got, want[:2], strict=True))


def test_strided_inputs_and_gradients(backend):
    (x, residual, norm_weight, weight, bias), (dy, dh) = make((6, 5, 32), 16, torch.float32, backend)
    t = lambda tensor: tensor.transpose(0, 1)
    check([t(x), t(residual), norm_weight, weight.t().contiguous().t(), bias], [t(dy), t(dh)])
    inputs = [x[::2, :, ::2], residual[::2, :, 1::2], norm_weight[::2], weight[:, ::2], bias]
    check(inputs, [dy[:1].expand(3, 5, 16), dh[:1, :1, :1].expand(3, 5, 16)])
    check([t(residual), norm_weight, weight, bias], [t(dy), t(dh)], ORDER[1:])


def test_only_one_of_two_outputs_is_used(backend):
    inputs, upstream = make((4, 16), 8, torch.float32, backend)
    for pick in (0, 1):
        check(inputs, upstream[pick : pick + 1], outputs=pick)
        check(inputs[1:], upstream[pick : pick + 1], ORDER[1:], outputs=pick)


def test_without_x_the_residual_is_returned_as_it_is(backend):
    (_, residual, *weights), _ = make((4, 16), 8, torch.float32, backend)
    assert rms_norm_linear(None, residual, *weights)[1] is residual


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    inputs, upstream = make((5, 48), 16, torch.float32, backend)
    leaves = [t.requires_grad_() for t in inputs]
    outputs = rms_norm_linear(*leaves)
    tensors = [*upstream, *outputs, *leaves]
    kept = [t.clone() for t in tensors]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_empty_and_single_rows(backend):
    for shape in ((0, 8), (1, 2), (2, 0, 8), (8,)):
        inputs, upstream = make(shape, 4, torch.float32, backend)
        got = run(rms_norm_linear, inputs, upstream)
        want = run(rms_norm_linear_reference, inputs, upstream)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("width", [65, 5000])
def test_normed_activations_are_recomputed_bit_for_bit(kernel_device, flavour, width, poisoned_empty):
    eps, offset, in_fp32 = (flavour.get(name, 0) for name in ("eps", "weight_offset", "scale_in_fp32"))
    for stream in dtypes(kernel_device):
        (x, residual, norm_weight, *_), (dn, dh) = make((5, width), width, stream, kernel_device)
        normed, h, rstd = rms_norm_forward(x, residual, norm_weight, eps, offset, bool(in_fp32))
        for dtype in dtypes(kernel_device):
            again = normed_again(h, norm_weight, rstd, offset, bool(in_fp32), dtype)
            _, _, beside = norm_backward(dn, dh, h, norm_weight, rstd, offset, bool(in_fp32), True, dtype)
            assert again.dtype == beside.dtype == dtype
            assert torch.equal(again, normed.to(dtype))
            assert torch.equal(beside, normed.to(dtype))


@pytest.mark.parametrize("with_x", [True, False])
def test_normed_activations_are_not_saved(kernel_device, with_x):
    inputs, _ = make((6, 32), 8, torch.float32, kernel_device)
    x, residual, norm_weight, weight, bias = (t.requires_grad_() for t in inputs)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, stream = rms_norm_linear(x if with_x else None, residual, norm_weight, weight, bias)
    assert [tuple(t.shape) for t in saved] == [(6, 32), (6,), (32,), (8, 32)]
    assert saved[0].data_ptr() == stream.data_ptr()


@pytest.mark.parametrize(
    ("trained", "matmuls", "with_rows"),
    [
        (ORDER, 2, True),
        (("x", "residual"), 1, False),  # frozen weights
        (("norm_weight",), 1, False),
        (("weight",), 1, True),  # a frozen trunk
        (("bias",), 0, False),
        (("x", "bias"), 1, False),
    ],
    ids=str,
)
def test_frozen_inputs_cost_nothing(kernel_device, monkeypatch, trained, matmuls, with_rows):
    inputs, (dy, _) = make((6, 32), 8, torch.float32, kernel_device)
    want = dict(zip(ORDER, run(with_names(rms_norm_linear, outputs=0), inputs, [dy])[1:], strict=True))
    module = sys.modules[rms_norm_linear.__module__]
    rows = []  # normed activations that the backward made

    def spy(name, pick):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: rows.append(pick(out := original(*args))) or out)

    spy("norm_backward", lambda out: out[2])
    spy("normed_again", lambda out: out)
    named = dict(zip(ORDER, inputs, strict=True))
    for name in trained:
        named[name].requires_grad_()
    y, stream = rms_norm_linear(**named)
    assert stream.requires_grad == bool({"x", "residual"} & set(trained))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy)
    assert sum(event.name == "aten::mm" for event in profile.events()) == matmuls
    assert any(made is not None for made in rows) == with_rows
    for name, tensor in named.items():
        assert (tensor.grad is not None) == (name in trained)
        if name in trained:
            torch.testing.assert_close(tensor.grad, want[name])


def test_no_grad(kernel_device):
    inputs, _ = make((6, 32), 8, torch.float32, kernel_device)
    with torch.no_grad():
        assert not any(out.requires_grad for out in rms_norm_linear(*(t.requires_grad_() for t in inputs)))


def test_opcheck(kernel_device):
    (x, residual, *weights), (dy, dh) = make((3, 24), 8, torch.float32, kernel_device)
    inputs = [t.requires_grad_() for t in (x, residual, *weights)]
    opcheck(torch.ops.liger_models.rms_norm_linear, (*inputs, 1e-6, 0.0, False))
    opcheck(torch.ops.liger_models.rms_norm_linear, (None, *inputs[1:-1], None, 1e-6, 1.0, True))
    residual, norm_weight, weight, _ = (t.detach() for t in inputs[1:])
    rstd = torch.ones(3, device=kernel_device)
    for needs in ([True] * 4, [False, False, True, False], [True, False, False, False]):
        args = (dy, dh, residual, rstd, norm_weight, weight.half(), 0.0, False, needs)
        opcheck(torch.ops.liger_models.rms_norm_linear_backward, (dy.half(), *args[1:]))


def test_compiles_without_graph_breaks(kernel_device):
    inputs, upstream = make((3, 24), 24, torch.float32, kernel_device)

    def function(x, residual, norm_weight, weight, bias):
        y, residual = rms_norm_linear(None, residual, norm_weight, weight)
        y, residual = rms_norm_linear(x + y, residual, norm_weight, weight, bias)
        return y, residual

    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


def test_bad_arguments():
    ones = torch.ones
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
