import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.linear_attention import short_conv as module
from liger_models.kernels.linear_attention.short_conv import short_conv, short_conv_reference

from ..oracle import assert_close_to_truth, opcheck, run
from ..rope.test_rope import draw, dtypes

# (B, T, C, K), and the bounds of packed documents
SHAPES = [
    ((2, 7, 6, 4), None),
    ((1, 1, 5, 4), None),
    ((2, 3, 4, 2), None),
    ((1, 19, 6, 4), [0, 1, 3, 3, 10, 19]),
    ((1, 9, 3, 3), [0, 0, 2, 9]),
]
GPU_SHAPES = [((2, 1000, 8192, 4), None), ((1, 1300, 1100, 4), [0, 1, 3, 300, 300, 813, 1300])]


def make(shape, bounds, dtype=torch.float32, device="cpu", bias=True, state=True):
    B, T, C, K = shape
    documents = B if bounds is None else len(bounds) - 1
    inputs = [draw(B, T, C, dtype=dtype, device=device), draw(C, K, dtype=dtype, device=device)]
    inputs += [draw(C, dtype=dtype, device=device, seed=1)] * bias
    inputs += [draw(documents, C, K - 1, dtype=dtype, device=device)] * state
    upstream = [
        draw(B, T, C, dtype=dtype, device=device, seed=2),
        draw(documents, C, K - 1, dtype=dtype, device=device),
    ]
    return inputs, upstream


def on(function, bounds, bias=True, state=True, activation="silu"):
    """``function`` of tensors alone; the output and the final states."""

    def call(x, weight, *rest):
        options = {"activation": activation} | ({"return_state": True} if function is short_conv else {})
        options |= {"cu_seqlens": None if bounds is None else torch.tensor(bounds, device=x.device)}
        options |= {"initial_state": rest[-1]} if state else {}
        return function(x, weight, rest[0] if bias else None, **options)

    return call


@pytest.mark.cases(9)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("shape", "bounds"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, bounds, activation, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 4)  # several programs for a document
    monkeypatch.setattr(module, "CHANNELS", 4)
    for dtype in dtypes(backend):
        for bias, state in ((True, True), (False, False)):
            inputs, upstream = make(shape, bounds, dtype, backend, bias, state)
            functions = [on(f, bounds, bias, state, activation) for f in (short_conv, short_conv_reference)]
            assert_close_to_truth(*functions, inputs, upstream)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "bounds"), GPU_SHAPES, ids=str)
def test_real_sizes(shape, bounds, poisoned_empty):
    for dtype in (torch.bfloat16, torch.float32):
        inputs, upstream = make(shape, bounds, dtype, "cuda")
        assert_close_to_truth(on(short_conv, bounds), on(short_conv_reference, bounds), inputs, upstream)


def test_is_the_convolution_of_torch(backend):
    (x, weight, bias), _ = make((2, 11, 6, 4), None, device=backend, state=False)
    padded = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], bias, groups=6)
    torch.testing.assert_close(short_conv(x, weight, bias), F.silu(padded).transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_pieces_make_the_whole(backend):
    """From state to state, with gradients through the states; also pieces that are shorter than the weights."""
    (x, weight, bias, initial), _ = make((2, 11, 6, 4), None, device=backend)

    def in_pieces(x, weight, bias, state):
        outs = []
        for piece in x.split([5, 1, 2, 3], 1):
            out, state = short_conv(piece, weight, bias, initial_state=state, return_state=True)
            outs.append(out)
        return torch.cat(outs, 1), state

    def whole(x, weight, bias, state):
        return short_conv(x, weight, bias, initial_state=state, return_state=True)

    upstream = [torch.randn_like(x), torch.randn_like(initial)]
    got, want = (run(f, [x, weight, bias, initial], upstream) for f in (in_pieces, whole))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_documents_do_not_see_each_other(backend):
    (x, weight, bias), (dy, _) = make((1, 19, 6, 4), [0, 7, 19], device=backend, state=False)
    bounds = torch.tensor([0, 7, 19], device=backend)
    together = run(lambda x: short_conv(x, weight, bias, cu_seqlens=bounds), [x], [dy])
    for start, end in ((0, 7), (7, 19)):
        alone = run(lambda x: short_conv(x, weight, bias), [x[:, start:end]], [dy[:, start:end]])
        torch.testing.assert_close([x[:, start:end] for x in together], alone, rtol=1e-6, atol=1e-6)


def test_views_and_strided_gradients(backend):
    (_, weight, bias), (dy, _) = make((2, 5, 6, 4), None, device=backend, state=False)
    packed = draw(2, 5, 20, device=backend)
    for x in (
        packed[..., 3:9],
        packed[..., ::3][..., :6],
        packed[:, :, :6].transpose(0, 1).contiguous().transpose(0, 1),
    ):
        upstream = dy.transpose(1, 2).contiguous().transpose(1, 2)
        got = run(lambda x: short_conv(x, weight, bias), [x], [upstream])
        want = run(lambda x: short_conv_reference(x, weight, bias)[0], [x.contiguous()], [dy])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_no_tokens(backend, poisoned_empty):
    for B, T in ((0, 3), (2, 0)):
        inputs, upstream = make((B, T, 6, 4), None, device=backend)
        out, state, dx, dw, db, d_initial = run(on(short_conv, None), inputs, upstream)
        assert out.shape == dx.shape == (B, T, 6)
        assert not dw.any()
        assert not db.any()
        if not T:
            assert torch.equal(state, inputs[3])
            assert torch.equal(d_initial, upstream[1])


def test_nothing_but_inputs_is_saved(kernel_device):
    (x, weight), _ = make((2, 7, 6, 4), None, device=kernel_device, bias=False, state=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        short_conv(x.requires_grad_(), weight.requires_grad_())
    assert sorted(saved) == sorted([x.data_ptr(), weight.data_ptr()])


def test_opcheck(kernel_device):
    (x, weight, bias, initial), (dy, _) = make((1, 9, 6, 4), [0, 4, 9], device=kernel_device)
    bounds = torch.tensor([0, 4, 9], device=kernel_device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, initial)]
    opcheck(torch.ops.liger_models.short_conv, (*leaves, bounds, True))
    opcheck(torch.ops.liger_models.short_conv_backward, (dy, *(t.detach() for t in leaves), bounds, True))


@pytest.mark.compile
@pytest.mark.parametrize("bounds", [None, [0, 4, 9]])
def test_compiles_without_graph_breaks(backend, bounds):
    inputs, upstream = make((1, 9, 6, 4), bounds, device=backend)
    edges = None if bounds is None else torch.tensor(bounds, device=backend)

    def function(x, weight, bias, state):
        return short_conv(x, weight, bias, initial_state=state, return_state=True, cu_seqlens=edges)

    compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "cuda" else "aot_eager")
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


def test_bad_arguments():
    x, weight = torch.ones(1, 3, 6), torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"x must be \[B, T, C\] and weight \[C, K\], got \[1, 3, 6\] and \[5, 4\]"):
        short_conv(x, weight[:5])
    with pytest.raises(ValueError, match=r"weight must have 2 to 4 columns, got 5"):
        short_conv(x, torch.ones(6, 5))
    with pytest.raises(ValueError, match=r"bias must be \[6\], got \[5\]"):
        short_conv(x, weight, torch.ones(5))
    with pytest.raises(ValueError, match=r"initial_state must be \[1, 6, 3\], got \[1, 6, 4\]"):
        short_conv(x, weight, initial_state=torch.ones(1, 6, 4))
    with pytest.raises(ValueError, match=r'activation must be "silu" or None, got \'relu\''):
        short_conv(x, weight, activation="relu")
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch.int64"):
        short_conv(x.long(), weight)


@pytest.mark.parametrize("size", [(3, 1, 5, 4), (1, 1, 300, 3), (2, 1, 6, 2)], ids=str)
@pytest.mark.parametrize("activation", ["silu", None])
def test_one_token_without_gradients(backend, size, activation, poisoned_empty):
    """The kernel of decoding gives the output of the other kernel, and the same state."""
    for dtype in dtypes(backend):
        for bias in (True, False):
            inputs, _ = make(size, None, dtype, backend, bias)
            call = on(short_conv, None, bias, activation=activation)
            want, after = call(*(x.requires_grad_() for x in inputs))
            with torch.no_grad():
                got, state = call(*inputs)
            torch.testing.assert_close(got, want)
            assert torch.equal(state, after)
            assert state.is_contiguous()


def test_opcheck_of_one_token(kernel_device):
    (x, weight, bias, state), _ = make((2, 1, 6, 4), None, device=kernel_device)
    opcheck(torch.ops.liger_models.short_conv_step, (x, weight, bias, state, True))
    opcheck(torch.ops.liger_models.short_conv_step, (x, weight, None, state, False))
