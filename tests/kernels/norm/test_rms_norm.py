import pytest
import torch

from liger_models.kernels.norm import row_norm as module
from liger_models.kernels.norm.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

from ..oracle import assert_close_to_truth, opcheck, run

FLAVORS = [
    pytest.param({"eps": 1e-6}, id="llama"),
    pytest.param({"eps": 1e-5, "scale_in_fp32": True}, id="olmo2"),
    pytest.param({"eps": 1e-6, "weight_offset": 1.0, "scale_in_fp32": True}, id="gemma"),
]
SHAPES = [(1, 2), (3, 7), (15, 16), (2, 3, 64), (5, 200), (4, 1, 129)]
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def make(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)
    return draw(*shape), draw(*shape), draw(shape[-1]), [draw(*shape), draw(*shape)]


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_matches_fp64(backend, shape, flavor, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "BACKWARD_TILE", 64)  # several programs, and several tiles of rows for each
    for dtype in dtypes(backend):
        x, _, weight, upstream = make(shape, dtype, backend)
        assert_close_to_truth(
            lambda x, w: rms_norm(x, w, **flavor), lambda x, w: rms_norm_reference(x, w, **flavor),
            [x, weight], upstream[:1],
        )  # fmt: skip


@pytest.mark.cases(17)
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_matches_fp64(backend, shape, flavor, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "BACKWARD_TILE", 64)
    for dtype in dtypes(backend):
        x, residual, weight, upstream = make(shape, dtype, backend)
        assert_close_to_truth(
            lambda x, r, w: add_rms_norm(x, r, w, **flavor),
            lambda x, r, w: add_rms_norm_reference(x, r, w, **flavor),
            [x, residual, weight], upstream,
        )  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [16385, 20000])
def test_rows_wider_than_a_tile(kernel_device, width, poisoned_empty):
    for dtype in dtypes(kernel_device):
        x, residual, weight, upstream = make((3, width), dtype, kernel_device)
        assert_close_to_truth(rms_norm, rms_norm_reference, [x, weight], upstream[:1])
        assert_close_to_truth(add_rms_norm, add_rms_norm_reference, [x, residual, weight], upstream)


def test_strided_inputs_and_gradients(backend):
    x, _, weight, (dy, _) = make((6, 5, 32), torch.float32, backend)
    assert_close_to_truth(rms_norm, rms_norm_reference, [x.transpose(0, 1), weight], [dy.transpose(0, 1)])
    assert_close_to_truth(rms_norm, rms_norm_reference, [x[::2], weight], [dy[:1].expand(3, 5, 32)])
    x, r, weight, (dy, dh) = make((6, 32), torch.float32, backend)
    assert_close_to_truth(
        add_rms_norm,
        add_rms_norm_reference,
        [x[:, ::2], r[:, 1::2], weight[::2]],
        [dy[:, ::2], dh[:1, :16].expand(6, 16)],
    )


@pytest.mark.parametrize("flavor", FLAVORS)
def test_column_slices_are_read_without_a_copy(kernel_device, flavor, poisoned_empty):
    packed, _, _, (upstream, _) = make((2, 5, 72), torch.float32, kernel_device)
    for x in (packed[..., :40], packed[..., 40:64], packed[0, ::2, 8:40]):
        assert module._spaced_rows(x)[0] is x
        weight, dy = packed[0, 0, : x.shape[-1]], upstream[..., : x.shape[-1]].expand_as(packed[..., : x.shape[-1]])
        dy = dy if x.dim() == 3 else dy[0, ::2]
        assert_close_to_truth(
            lambda x, w: rms_norm(x, w, **flavor), lambda x, w: rms_norm_reference(x, w, **flavor), [x, weight], [dy]
        )
        slices, copies = (run(lambda x, w: rms_norm(x, w, **flavor), [each, weight], [dy]) for each in (x, x.clone()))
        assert all(torch.equal(a, b) for a, b in zip(slices, copies, strict=True))


def test_mixed_dtypes(backend):
    """Under autocast the stream is fp32, the branch fp16; norms are often kept in fp32 in a half-precision model."""
    x, residual, weight, upstream = make((4, 64), torch.float32, backend)
    assert_close_to_truth(add_rms_norm, add_rms_norm_reference, [x.half(), residual, weight], upstream)
    assert_close_to_truth(rms_norm, rms_norm_reference, [x.half(), weight], [upstream[0].half()])


def test_only_one_of_two_outputs_is_used(backend):
    x, residual, weight, (dy, dh) = make((4, 16), torch.float32, backend)
    for pick, upstream in ((0, dy), (1, dh)):
        got = run(lambda *a, pick=pick: add_rms_norm(*a)[pick], [x, residual, weight], [upstream])
        want = run(lambda *a, pick=pick: add_rms_norm_reference(*a)[pick], [x, residual, weight], [upstream])
        torch.testing.assert_close(got, want)


def test_extreme_values(backend):
    x = torch.tensor([[1e4, -6e4, 3e4, 0.0], [1e-6, 2e-7, -1e-6, 6e-8], [0.0] * 4], device=backend, dtype=torch.float16)
    weight = torch.ones(4, device=backend, dtype=torch.float16)
    assert rms_norm(x, weight).isfinite().all()
    torch.testing.assert_close(rms_norm(x, weight), rms_norm_reference(x, weight))


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    x, residual, weight, (dy, dh) = make((5, 48), torch.float32, backend)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    outputs = add_rms_norm(*leaves)
    copies = [t.clone() for t in (dy, dh, *outputs)]
    first = torch.autograd.grad(outputs, leaves, (dy, dh), retain_graph=True)
    first = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves, (dy, dh))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((dy, dh, *outputs), copies, strict=True))


def test_empty_and_single_rows(backend):
    weight = torch.randn(8, device=backend, requires_grad=True)
    x = torch.empty(0, 8, device=backend, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()


def test_frozen_weight_and_no_grad(kernel_device):
    x, _, weight, (dy, _) = make((4, 16), torch.float32, kernel_device)
    x.requires_grad_()
    rms_norm(x, weight).backward(dy)
    assert x.grad is not None
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    x = torch.zeros(1_048_577, 2048, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(2048, device="cuda")
    weight = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(rms_norm(x, weight)[-1], rms_norm_reference(x[-1], weight))


def test_opcheck(kernel_device):
    x, residual, weight, _ = make((3, 24), torch.float32, kernel_device)
    for tensor in (x, residual, weight):
        tensor.requires_grad_()
    opcheck(torch.ops.liger_models.norm, (x, weight, None, "rms_norm", 1e-6, 0.0, False))
    opcheck(torch.ops.liger_models.add_norm, (x, residual, weight, None, "rms_norm", 1e-6, 1.0, True))


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"weight must have the shape of x's last dimension, got weight \[3\] for x \[2, 4\]"
    ):
        rms_norm(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"one shape, got \[2, 4\] and \[1, 4\]"):
        add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4))
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch.int64"):
        rms_norm(torch.ones(2, 4, dtype=torch.int64), torch.ones(4))
