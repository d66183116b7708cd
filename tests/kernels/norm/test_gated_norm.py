from functools import partial

import pytest
import torch

from liger_models.kernels.norm import gated_norm as module
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference

from ...late import Late
from ..oracle import assert_close_to_truth, opcheck, run
from ..rope.test_rope import draw, dtypes

mamba2 = Late("transformers.models.mamba2.modeling_mamba2")
qwen3_next = Late("transformers.models.qwen3_next.modeling_qwen3_next")

SHAPES = [(2, 3, 4, 8), (5, 20), (7,), (1, 33, 2, 16)]
GPU_SHAPES = [(1, 1000, 32, 128), (3, 70, 48, 100), (4, 4000)]


def make(shape, dtype=torch.float32, device="cpu", weight_dtype=None):
    x, gate, dy = (draw(*shape, dtype=dtype, device=device, seed=seed) for seed in range(3))
    return [x, gate, draw(shape[-1], dtype=weight_dtype or dtype, device=device)], [dy]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "TILE", 64)  # several programs, and several tiles for each
    for dtype in dtypes(backend):
        for weight_dtype in {dtype, torch.float32}:
            assert_close_to_truth(gated_norm, gated_norm_reference, *make(shape, dtype, backend, weight_dtype))


@pytest.mark.parametrize("options", [{"act": "sigmoid"}, {"gate_first": True}, {"act": "sigmoid", "gate_first": True}])
@pytest.mark.parametrize("groups", [1, 3])
def test_orders_and_gates(backend, options, groups, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "TILE", 64)
    for dtype in dtypes(backend):
        (x, gate, weight), upstream = make((2, 17, 3, 10), dtype, backend)
        weight = weight if groups == 1 else draw(3, 10, dtype=dtype, device=backend)
        functions = (partial(function, eps=1e-5, **options) for function in (gated_norm, gated_norm_reference))
        assert_close_to_truth(*functions, [x, gate, weight], upstream)


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_without_a_norm(backend, act, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "TILE", 64)
    for dtype in dtypes(backend):
        (x, gate, _), upstream = make((2, 17, 3, 10), dtype, backend)
        functions = (partial(function, weight=None, act=act) for function in (gated_norm, gated_norm_reference))
        assert_close_to_truth(*functions, [x, gate], upstream)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, poisoned_empty):
    for dtype in (torch.bfloat16, torch.float32):
        assert_close_to_truth(gated_norm, gated_norm_reference, *make(shape, dtype, "cuda"))
        if len(shape) > 2:
            (x, gate, _), upstream = make(shape, dtype, "cuda")
            functions = (partial(function, gate_first=True) for function in (gated_norm, gated_norm_reference))
            assert_close_to_truth(*functions, [x, gate, draw(*shape[-2:], dtype=dtype, device="cuda")], upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers(dtype):
    (x, gate, weight), _ = make((2, 3, 4, 8), dtype)
    theirs = qwen3_next.Qwen3NextRMSNormGated(8, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(gated_norm(x, gate, weight, 1e-5), theirs(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_with_groups(dtype):
    (x, gate, _), _ = make((2, 3, 4, 8), dtype)
    theirs = mamba2.MambaRMSNormGated(32, group_size=8, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(draw(32, dtype=dtype))
    got = gated_norm(x, gate, theirs.weight.view(4, 8), 1e-5, gate_first=True)
    assert torch.equal(got.flatten(2), theirs(x.flatten(2), gate.flatten(2)))


def test_views(backend):
    """x and gate as parts of wider rows, without a copy, and with one where heads are far apart."""
    (_, _, weight), (dy,) = make((2, 3, 4, 8), device=backend)
    packed = draw(2, 3, 4, 30, device=backend)
    upstream = dy.transpose(1, 2).contiguous().transpose(1, 2)
    for x, gate in ((packed[..., :8], packed[..., 8:16]), (packed[..., ::3][..., :8], packed[..., 1:9])):
        got = run(partial(gated_norm, eps=1e-5), [x, gate, weight], [upstream])
        want = run(partial(gated_norm_reference, eps=1e-5), [x.contiguous(), gate.contiguous(), weight], [dy])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        weights = draw(4, 8, device=backend)
        got = run(partial(gated_norm, gate_first=True), [x, gate, weights], [upstream])
        want = run(partial(gated_norm_reference, gate_first=True), [x.contiguous(), gate.contiguous(), weights], [dy])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_no_rows(backend, poisoned_empty):
    inputs, upstream = make((2, 0, 4, 8), device=backend)
    out, dx, d_gate, dw = run(gated_norm, inputs, upstream)
    assert out.shape == dx.shape == d_gate.shape == (2, 0, 4, 8)
    assert torch.equal(dw, torch.zeros_like(dw))


def test_nothing_but_inputs_is_saved(kernel_device):
    inputs, _ = make((2, 3, 4, 8), device=kernel_device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        gated_norm(*(x.requires_grad_() for x in inputs))
    assert sorted(saved) == sorted(x.data_ptr() for x in inputs)


def test_opcheck(kernel_device):
    inputs, (dy,) = make((2, 3, 4, 8), device=kernel_device)
    opcheck(torch.ops.liger_models.gated_norm, (*(x.requires_grad_() for x in inputs), 1e-6))
    opcheck(torch.ops.liger_models.gated_norm_backward, (dy, *(x.detach() for x in inputs), 1e-6))


@pytest.mark.compile
def test_compiles_without_graph_breaks(kernel_device):
    inputs, upstream = make((2, 3, 4, 8), device=kernel_device)
    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(gated_norm, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, inputs, upstream), run(gated_norm, inputs, upstream), rtol=0, atol=0)


def test_bad_arguments():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"x and gate must have one shape, got \[2, 8\] and \[2, 7\]"):
        gated_norm(x, x[:, :7], torch.ones(8))
    with pytest.raises(
        ValueError, match=r"weight must have the shape of x's last dimension, or of its last two, got weight \[7\]"
    ):
        gated_norm(x, x, torch.ones(7))
    with pytest.raises(ValueError, match=r"act must be one of silu, sigmoid, got 'gelu'"):
        gated_norm(x, x, torch.ones(8), act="gelu")
    with pytest.raises(TypeError, match=r"gate must be a floating-point tensor, got torch.int64"):
        gated_norm(x, x.long(), torch.ones(8))
