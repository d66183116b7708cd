from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.linear_attention.gated_delta_rule import states_before
from liger_models.kernels.linear_attention.ssd_scan import (
    STEP_TOKENS,
    ssd_scan,
    ssd_scan_packed,
    ssd_scan_packed_reference,
    ssd_scan_reference,
    ssd_transition,
)
from liger_models.kernels.linear_attention.step_sizes import step_sizes

from ...late import Late
from ..oracle import opcheck, run, wide
from ..rope.test_rope import draw, dtypes
from .test_gated_delta_rule import LIMITS, fused_dtype, on_cpu

mamba2 = Late("transformers.models.mamba2.modeling_mamba2")

# (B, T, H, P, G, N), and the bounds of packed documents
SHAPES = [
    ((2, 130, 1, 16, 1, 16), None),
    ((2, 1, 4, 8, 2, 16), None),
    ((1, 300, 2, 40, 1, 24), None),
    ((1, 20, 4, 8, 2, 16), None),
    ((1, 17, 3, 16, 1, 160), None),
    ((1, 20, 9, 72, 1, 16), None),
    ((1, 260, 2, 16, 2, 16), [0, 3, 3, 132, 260]),
]
GPU_SHAPES = [
    ((1, 1091, 16, 64, 2, 128), None),
    ((2, 1024, 8, 64, 8, 128), None),
    ((1, 1300, 10, 64, 1, 128), [0, 1, 65, 320, 320, 900, 1300]),
    ((1, 300, 6, 128, 1, 256), None),
    ((1, 333, 4, 80, 2, 96), None),
]
NAMES = ["out", "state", "dx", "dB", "dC", "d delta", "dg", "dD", "d initial"]


def recurrence(x, B, C, delta, g, D, initial_state, *, cu_seqlens=None):
    """Token by token, from the definition."""
    group = x.shape[2] // B.shape[2]
    B, C = (shared.repeat_interleave(group, 2) for shared in (B, C))
    outs, states = [], []
    documents = [(row, 0, x.shape[1]) for row in range(len(x))]
    if cu_seqlens is not None:
        documents = [(0, *pair) for pair in pairwise(cu_seqlens.tolist())]
    for n, (row, start, end) in enumerate(documents):
        state = initial_state[n]
        for t in range(start, end):
            written = B[row, t, :, :, None] * (delta[row, t, :, None] * x[row, t])[:, None]
            state = state * g[row, t, :, None, None].exp() + written
            outs.append((C[row, t, :, None] @ state)[:, 0] + D[:, None] * x[row, t])
        states.append(state)
    return torch.stack(outs).view(x.shape), torch.stack(states)


def make(shape, bounds=None, dtype=torch.float32, device="cpu", decay=0.5):
    """Inputs, upstream gradients and options."""
    rows, T, H, P, G, N = shape
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    documents = rows if bounds is None else len(bounds) - 1
    x, B, C = (
        draw(rows, T, *size, dtype=dtype, device=device, seed=seed)
        for seed, size in enumerate([(H, P), (G, N), (G, N)])
    )
    delta = F.softplus(draw(rows, T, H, device=device, seed=3))
    g = -decay * F.softplus(draw(rows, T, H, device=device, seed=4))
    D, initial = draw(H, device=device, seed=5), draw(documents, H, N, P, device=device, seed=6) * 0.3
    upstream = [
        draw(rows, T, H, P, dtype=dtype, device=device, seed=7),
        draw(documents, H, N, P, device=device, seed=8),
    ]
    return [x, B, C, delta, g, D, initial], upstream, {"cu_seqlens": cu_seqlens}


def ours(*inputs, **options):
    *inputs, initial_state = inputs
    return ssd_scan(*inputs, initial_state=initial_state, return_state=True, **options)


def reference(*inputs, **options):
    *inputs, initial_state = inputs
    return ssd_scan_reference(*inputs, initial_state=initial_state, **options)


def check(inputs, upstream, options, limit=None, truth=recurrence, skip=()):
    """Outputs and gradients of `ssd_scan` against the recurrence in fp64."""
    before = [x.clone() for x in inputs]
    got = run(partial(ours, **options), inputs, upstream)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was written to"
    want = run(partial(truth, **on_cpu(options)), [wide(x) for x in inputs], [wide(x) for x in upstream])
    dtype, errors = inputs[0].dtype, {}
    for name, mine, exact in zip(NAMES, got, want, strict=True):
        assert mine.shape == exact.shape, name
        assert mine.isfinite().all(), name
        # Half precision cannot hold what is far below the other numbers, as results through a strong decay are.
        least = 1e-30 if dtype not in (torch.float16, torch.bfloat16) else 1e-4 * exact.numel() ** 0.5
        errors[name] = ((wide(mine) - exact).norm() / exact.norm().clamp_min(least)).item()
    assert max(error for name, error in errors.items() if name not in skip) <= (limit or LIMITS[dtype]), errors


@pytest.mark.parametrize(("shape", "bounds"), SHAPES, ids=str)
def test_reference_is_the_recurrence(shape, bounds):
    inputs, upstream, options = make(shape, bounds)
    check([x.double() for x in inputs], [x.double() for x in upstream], options)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("shape", "bounds"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, bounds, poisoned_empty):
    for dtype in dtypes(backend):
        check(*make(shape, bounds, dtype, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.001, 0.1, 20.0])
@pytest.mark.parametrize(("shape", "bounds"), GPU_SHAPES, ids=str)
def test_real_sizes(shape, bounds, decay, poisoned_empty):
    for dtype in (torch.bfloat16, torch.float16):
        # After complete decays the gradient of g is a difference of large terms.
        skip = ("dg",) if decay == 20 else ()
        check(*make(shape, bounds, dtype, "cuda", decay), truth=reference, skip=skip)


def test_no_decay(backend):
    check(*make((1, 140, 1, 16, 1, 16), None, device=backend, decay=0.0))


@pytest.mark.cases(8)
@pytest.mark.parametrize("decay", [1e2, 1e4, 1e6, float("inf")])
@pytest.mark.parametrize("bounds", [None, [0, 20, 140]])
def test_a_large_decay_leaves_small_ones_exact(backend, decay, bounds):
    """One token forgets everything; the tokens after it forget little, as much as without it."""
    inputs, upstream, options = make((1, 140, 2, 16, 1, 16), bounds, fused_dtype(backend), backend, decay=0.1)
    inputs[4][:, 7 if bounds is None else 30] = -decay
    check(inputs, upstream, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_with_many_large_decays(dtype):
    inputs, upstream, options = make((1, 130, 2, 16, 1, 16), [0, 20, 130], decay=0.1)
    inputs[4][:, [3, 30, 31, 70, 100]] = -torch.tensor([1e2, 1e4, 1e6, 1e30, torch.inf])[:, None]
    with reference_backend():
        check([x.to(dtype) for x in inputs], [x.to(dtype) for x in upstream], options)


def test_views_and_strided_gradients(backend):
    """x, B and C of one packed tensor, as the convolution returns them; gradients of another layout; no D."""
    (_, _, _, delta, g, _, initial), upstream, _ = make((2, 20, 2, 16, 1, 16), device=backend)
    packed = draw(2, 20, 64, device=backend)

    def split(function, packed, delta, g, initial):
        x, B, C = packed.split([32, 16, 16], -1)
        shared = (part.unflatten(2, (1, 16)) for part in (B, C))
        return function(x.unflatten(2, (2, 16)), *shared, delta, g, None, initial)

    upstream[0] = upstream[0].transpose(1, 2).contiguous().transpose(1, 2)
    inputs = [packed, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (delta, g)), initial]
    got = run(partial(split, ours), inputs, upstream)
    want = run(partial(split, reference), [wide(x) for x in inputs], [wide(x) for x in upstream])
    for mine, exact in zip(got, want, strict=True):
        assert (wide(mine) - exact).norm() <= LIMITS[torch.float32] * exact.norm()


def test_documents_do_not_see_each_other(backend):
    """Another first document changes no bit of the second, and the second's loss gives the first no gradient."""
    inputs, _, options = make((1, 200, 2, 16, 1, 16), [0, 67, 200], fused_dtype(backend), backend)
    tokens, D = inputs[:5], inputs[5]
    other = [torch.cat([x[:, :67].flip(1) * 3, x[:, 67:]], 1) for x in tokens]
    first, second = (ssd_scan(*x, D, **options)[:, 67:] for x in (tokens, other))
    assert torch.equal(first, second)
    leaves = [x.requires_grad_() for x in tokens]
    out = ssd_scan(*leaves, D, **options)
    torch.testing.assert_close(out[:, 67:], ssd_scan(*(x[:, 67:] for x in leaves), D), rtol=1e-5, atol=1e-5)
    for grad in torch.autograd.grad(out[:, 67:].square().sum(), leaves):
        assert not grad[:, :67].any()
        assert grad[:, 67:].any()


def test_a_packed_document_has_the_bits_of_the_document_alone(kernel_device):
    inputs, _, _ = make((1, 261, 2, 16, 1, 16), None, fused_dtype(kernel_device), kernel_device)
    tokens, D, bounds = [x.requires_grad_() for x in inputs[:5]], inputs[5], [0, 1, 3, 66, 131, 261]
    packed = ssd_scan(*tokens, D, cu_seqlens=torch.tensor(bounds, device=kernel_device))
    gradients = torch.autograd.grad(packed.square().sum(), tokens)
    for start, end in pairwise(bounds):
        alone = [x[:, start:end].detach().requires_grad_() for x in tokens]
        out = ssd_scan(*alone, D)
        assert torch.equal(out, packed[:, start:end])
        mine = torch.autograd.grad(out.square().sum(), alone)
        assert all(torch.equal(a, b[:, start:end]) for a, b in zip(mine, gradients, strict=True))


@pytest.mark.cases(4)
@pytest.mark.parametrize(("parts", "bounds"), [(4, None), (2, [0, 70]), (2, [0, 30, 70]), (2, [0, 50, 70])])
def test_parts_of_a_sequence_make_the_whole(backend, parts, bounds):
    """As ranks compute it: each from its own tokens, and from what the others exchange."""
    inputs, upstream, _ = make((1, 70, 2, 24, 1, 16), device=backend)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=backend)
    cuts = [round(70 * part / parts) for part in range(parts + 1)]

    def whole(*inputs):
        return ssd_scan(*inputs, cu_seqlens=cu_seqlens)

    def split(x, B, C, delta, g, D):
        shards, edges = [], []
        for start, end in pairwise(cuts):
            shards.append([t[:, start:end] for t in (x, B, C, delta, g)])
            edges.append(None if bounds is None else (cu_seqlens - start).clamp(0, end - start).unique())
        pairs = [
            ssd_transition(x, B, delta, g, cu_seqlens=edge)
            for (x, B, _, delta, g), edge in zip(shards, edges, strict=True)
        ]
        a, b = (torch.stack(t) for t in zip(*pairs, strict=True))
        outs = []
        for shard, edge, state in zip(shards, edges, states_before(a, b), strict=True):
            if edge is not None:
                begins = torch.arange(len(edge) - 1, device=backend) > 0
                begins = begins | (cuts[len(outs)] in bounds)
                state = state.expand(len(edge) - 1, -1, -1, -1).masked_fill(begins[:, None, None, None], 0)
            outs.append(ssd_scan(*shard, D, initial_state=state, cu_seqlens=edge))
        return torch.cat(outs, 1)

    got, want = (run(function, inputs[:6], upstream[:1]) for function in (split, whole))
    for mine, exact in zip(got, want, strict=True):
        assert (mine - exact).norm() <= 2e-5 * exact.norm()


def test_decoding_continues_the_sequence(backend):
    """In pieces of a few tokens, from state to state, without gradients."""
    (*tokens, D, initial), _, _ = make((1, 70, 4, 24, 2, 16), device=backend)
    want, end = ssd_scan(*tokens, D, initial_state=initial, return_state=True)
    with torch.no_grad():
        outs, state, start = [], initial, 0
        for length in (50, STEP_TOKENS, 1, 1, 2):
            piece = [x[:, start : start + length] for x in tokens]
            before = state.clone()
            out, after = ssd_scan(*piece, D, initial_state=state, return_state=True)
            assert torch.equal(state, before)
            outs.append(out)
            state, start = after, start + length
        first = ssd_scan(*(x[:, :1] for x in tokens))
        exact, _ = ssd_scan_reference(*(x[:, :1].double() for x in tokens))
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["out", "state"])
def test_only_one_result_has_a_gradient(backend, which):
    inputs, upstream, _ = make((1, 130, 1, 16, 1, 16), device=backend)
    index = ["out", "state"].index(which)
    got = run(lambda *x: ours(*x)[index], inputs, [upstream[index]])
    want = run(lambda *x: recurrence(*x)[index], [wide(x) for x in inputs], [wide(upstream[index])])
    for mine, exact in zip(got, want, strict=True):
        assert (wide(mine) - exact).norm() <= LIMITS[torch.float32] * exact.norm()


def test_only_inputs_are_saved(kernel_device):
    inputs, _, _ = make((1, 20, 2, 16, 1, 24), dtype=fused_dtype(kernel_device), device=kernel_device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ssd_scan(*(x.requires_grad_() for x in inputs[:6]))
    assert len(saved) == 6
    assert all(any(t.data_ptr() == x.data_ptr() for x in inputs) for t in saved)


def test_no_tokens_and_empty_documents(backend, poisoned_empty):
    for shape, bounds in (
        ((2, 0, 2, 16, 1, 16), None),
        ((0, 3, 2, 16, 1, 16), None),
        ((1, 3, 2, 16, 1, 16), [0, 0, 3, 3]),
    ):
        inputs, upstream, options = make(shape, bounds, device=backend)
        leaves = [x.requires_grad_() for x in inputs]
        out, state = ours(*leaves, **options)
        grads = torch.autograd.grad((out, state), leaves, upstream, materialize_grads=True)
        assert out.shape == inputs[0].shape
        assert all(grad.shape == x.shape and grad.isfinite().all() for grad, x in zip(grads, inputs, strict=True))
        empty = [True] * len(inputs[6]) if bounds is None else [True, False, True]
        assert torch.equal(state[empty], inputs[6][empty])
        assert torch.equal(grads[6][empty], upstream[1][empty])


@pytest.mark.cases(4)
@pytest.mark.parametrize(("shape", "bounds"), [SHAPES[2], SHAPES[4], SHAPES[5]], ids=str)
def test_one_tensor_of_all_inputs(backend, shape, bounds, poisoned_empty):
    """The results and gradients of `ssd_scan_packed` have the bits of `ssd_scan`."""
    _, _, _, P, G, _ = shape
    dtype = fused_dtype(backend)
    inputs, upstream, options = make(shape, bounds, dtype, backend)
    packed = torch.cat([x.flatten(2) for x in inputs[:3]], -1)

    def in_one(packed, delta, g, D, initial_state):
        options_ = {**options, "head_dim": P, "groups": G, "initial_state": initial_state}
        reference = ssd_scan_packed_reference(packed, delta, g, D, **options_)
        results = ssd_scan_packed(packed, delta, g, D, return_state=True, **options_)
        if backend == "reference":
            assert torch.equal(results[0], reference[0])
        return results

    out, state, d_packed, *others = run(in_one, [packed, *inputs[3:]], upstream)
    want = run(partial(ours, **options), inputs, upstream)
    d_packed_wanted = torch.cat([x.flatten(2) for x in want[2:5]], -1)
    for got, exact in zip((out, state, d_packed, *others), (*want[:2], d_packed_wanted, *want[5:]), strict=True):
        assert torch.equal(got, exact)
    with pytest.raises(ValueError, match=rf"ssd_scan_packed: packed must be .*, where P is {P} and G is {G}, got \["):
        ssd_scan_packed(packed[..., 1:], *inputs[3:6], head_dim=P, groups=G)


def test_transformers(backend):
    """The chunked scan of transformers, which applies dt's bias, softplus and limits itself."""
    shapes = [(4, 16), (2, 16), (2, 16), (4,)]
    x, B, C, dt = (draw(1, 70, *size, device=backend, seed=seed) for seed, size in enumerate(shapes))
    A_log, bias, D = (draw(4, device=backend, seed=seed) for seed in (5, 6, 7))
    limits = (0.1, 1.0)
    want, state = mamba2.mamba2_chunk_scan(
        x, dt, -A_log.exp(), B, C, 32, D, bias, dt_softplus=True, dt_limit=limits, return_final_states=True
    )
    got, after = ssd_scan(x, B, C, *step_sizes(dt, A_log, bias, limits), D, return_state=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, state.mT, rtol=1e-4, atol=1e-4)


def test_opcheck(kernel_device):
    ops = torch.ops.liger_models
    inputs, upstream, options = make((1, 18, 2, 16, 1, 16), [0, 2, 18], fused_dtype(kernel_device), kernel_device)
    opcheck(ops.ssd_scan, (*(x.requires_grad_() for x in inputs), options["cu_seqlens"]))
    inputs = [x.detach() for x in inputs]
    opcheck(ops.ssd_scan_backward, (*upstream, *inputs, options["cu_seqlens"]))
    packed = torch.cat([x.flatten(2) for x in inputs[:3]], -1).requires_grad_()
    opcheck(ops.ssd_scan_packed, (packed, *inputs[3:], options["cu_seqlens"], 16, 1))
    opcheck(ops.ssd_step, (*(x[:, :2] for x in inputs[:5]), inputs[5], None))


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize("bounds", [[0, 20, 66], None])
def test_compiles_without_graph_breaks(backend, bounds):
    inputs, upstream, options = make((1, 66, 2, 16, 1, 16), bounds, fused_dtype(backend), backend)
    function = partial(ours, **options)
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "cuda" else "aot_eager")
    got, want = run(compiled, inputs, upstream), run(function, inputs, upstream)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_bad_arguments():
    x, B, C, delta, g, D, _ = make((1, 5, 4, 8, 2, 8))[0]
    with pytest.raises(ValueError, match=r"number of heads \(3\) must be a multiple of the number of groups \(2\)"):
        ssd_scan(x[:, :, :3], B, C, delta[..., :3], g[..., :3])
    with pytest.raises(ValueError, match=r"delta and g must be \[1, 5, 4\], got \[1, 5, 2\] and \[1, 5, 4\]"):
        ssd_scan(x, B, C, delta[..., :2], g)
    with pytest.raises(ValueError, match=r"x must be \[B, T, H, P\] and B and C \[B, T, G, N\], got"):
        ssd_scan(x, B[:, :4], C, delta, g)
    with pytest.raises(ValueError, match=r"D must be \[4\], got \[3\]"):
        ssd_scan(x, B, C, delta, g, D[:3])
    with pytest.raises(ValueError, match=r"initial_state must be \[1, 4, 8, 8\], got \[1, 4, 8, 7\]"):
        ssd_scan(x, B, C, delta, g, initial_state=torch.zeros(1, 4, 8, 7))
    with pytest.raises(TypeError, match=r"initial_state must be float32, got torch.bfloat16"):
        ssd_scan(x, B, C, delta, g, initial_state=torch.zeros(1, 4, 8, 8).bfloat16())
    with pytest.raises(TypeError, match=r"x, B and C must have one dtype, got torch.float16, torch.float32"):
        ssd_scan(x.half(), B, C, delta, g)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 to the number of tokens \(5\)"):
        ssd_scan(x, B, C, delta, g, cu_seqlens=torch.tensor([0, 4]))
