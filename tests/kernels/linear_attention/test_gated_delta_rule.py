from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.linear_attention import gated_delta_rule as module
from liger_models.kernels.linear_attention.gated_delta_rule import (
    CHUNK,
    STEP_TOKENS,
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_transition,
    states_before,
)

from ...late import Late
from ..oracle import opcheck, run, wide
from ..rope.test_rope import draw, dtypes

qwen3_next = Late("transformers.models.qwen3_next.modeling_qwen3_next")

# (B, T, Hk, Hv, Dk, Dv), and the bounds of packed documents
SHAPES = [
    ((2, 66, 1, 1, 16, 16), None),
    ((2, 1, 2, 4, 24, 20), None),
    ((1, 130, 1, 1, 16, 40), None),
    ((1, 20, 2, 4, 24, 20), None),
    ((1, 17, 1, 1, 40, 8), None),
    ((1, 20, 1, 2, 72, 24), None),
    ((1, 80, 1, 1, 16, 16), [0, 3, 3, 69, 80]),
    ((1, 80, 1, 3, 16, 64), [0, 3, 3, 69, 80]),
]
GPU_SHAPES = [
    ((1, 1091, 2, 4, 128, 128), None),
    ((2, 1024, 2, 2, 128, 128), None),
    ((1, 1300, 2, 4, 128, 128), [0, 1, 65, 64 * 5, 64 * 5, 900, 1300]),
    ((1, 300, 1, 2, 64, 256), None),
    ((1, 200, 1, 3, 256, 64), None),
    ((1, 333, 2, 2, 96, 80), None),
]
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error of a result: the norm of the difference over the norm of the truth. Half precision has twice epsilon,
because the products are of rounded numbers, and of sums of such products."""

HALF = torch.float16, torch.bfloat16


def recurrence(q, k, v, g, beta, initial_state, *, scale=None, normalize=True, cu_seqlens=None):
    """Token by token, from the definition."""
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    B, T = v.shape[:2]
    outs, states = [], []
    documents = [(row, 0, T) for row in range(B)]
    if cu_seqlens is not None:
        documents = [(0, *pair) for pair in pairwise(cu_seqlens.tolist())]
    for n, (row, start, end) in enumerate(documents):
        state = initial_state[n]
        for t in range(start, end):
            state = state * g[row, t, :, None, None].exp()
            d = beta[row, t, :, None] * (v[row, t] - (k[row, t, :, None] @ state)[:, 0])
            state = state + k[row, t, :, :, None] * d[:, None]
            outs.append((q[row, t, :, None] @ state)[:, 0])
        states.append(state)
    return torch.stack(outs).view(v.shape), torch.stack(states)


def fused_dtype(device: str) -> torch.dtype:
    """A dtype whose kernels the device runs; on a GPU fp32 runs the reference."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def make(shape, bounds=None, dtype=torch.float32, device="cpu", decay=0.5, state=True):
    """Inputs, upstream gradients and options."""
    B, T, Hk, Hv, Dk, Dv = shape
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    documents = B if bounds is None else len(bounds) - 1
    q, k = (draw(B, T, Hk, Dk, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    v = draw(B, T, Hv, Dv, dtype=dtype, device=device, seed=2)
    g = -decay * F.softplus(draw(B, T, Hv, device=device, seed=3))
    beta = draw(B, T, Hv, device=device, seed=4).sigmoid().to(dtype)
    initial = draw(documents, Hv, Dk, Dv, device=device, seed=5) * (0.3 if state else 0)
    upstream = [
        draw(B, T, Hv, Dv, dtype=dtype, device=device, seed=6),
        draw(documents, Hv, Dk, Dv, device=device, seed=7),
    ]
    return [q, k, v, g, beta, initial], upstream, {"cu_seqlens": cu_seqlens}


def ours(q, k, v, g, beta, initial_state, **options):
    return gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, return_state=True, **options)


def on_cpu(options):
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def check(inputs, upstream, options, limit=None, truth=recurrence):
    """Outputs and gradients of `gated_delta_rule` against the recurrence in fp64."""
    before = [x.clone() for x in inputs]
    got = run(partial(ours, **options), inputs, upstream)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was written to"
    want = run(partial(truth, **on_cpu(options)), [wide(x) for x in inputs], [wide(x) for x in upstream])
    names = ["out", "state", "dq", "dk", "dv", "dg", "dbeta", "d initial"]
    dtype = inputs[0].dtype
    errors = {}
    for name, mine, exact in zip(names, got, want, strict=True):
        assert mine.shape == exact.shape, name
        # Half precision cannot hold what is far below the other numbers, as the last result is after a strong decay.
        least = 1e-4 * exact.numel() ** 0.5 if name == "d initial" and dtype in HALF else 1e-30
        errors[name] = ((wide(mine) - exact).norm() / exact.norm().clamp_min(least)).item()
    assert max(errors.values()) <= (LIMITS[dtype] if limit is None else limit), errors
    return errors


@pytest.mark.cases(4)
@pytest.mark.parametrize(("shape", "bounds"), SHAPES, ids=str)
def test_reference_is_the_recurrence(shape, bounds):
    for changed in ({}, {"normalize": False, "scale": 0.7}):
        inputs, upstream, options = make(shape, bounds)
        if changed:
            inputs[1] = F.normalize(inputs[1], dim=-1)
        check([x.double() for x in inputs], [x.double() for x in upstream], options | changed)


@pytest.mark.cases(8)
@pytest.mark.parametrize(("shape", "bounds"), SHAPES, ids=str)
def test_matches_fp64(backend, shape, bounds, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "SCAN_COLUMNS", 16)  # several programs for a head, and several parts of v
    monkeypatch.setattr(module, "GRADIENT_COLUMNS", 16)
    monkeypatch.setattr(module, "QUERY_COLUMNS", 16)
    for dtype in dtypes(backend):
        check(*make(shape, bounds, dtype, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.001, 0.1, 20.0])
@pytest.mark.parametrize(("shape", "bounds"), GPU_SHAPES, ids=str)
def test_real_sizes(shape, bounds, decay, poisoned_empty):
    for dtype in (torch.bfloat16, torch.float16):
        check(*make(shape, bounds, dtype, "cuda", decay), truth=gated_delta_rule_in_order)


def gated_delta_rule_in_order(*inputs, **options):
    *inputs, initial_state = inputs
    return gated_delta_rule_reference(*inputs, initial_state=initial_state, **options)


@pytest.mark.parametrize("decay", [0.0, 30.0, 1e4])
def test_no_decay_and_complete_decay(backend, decay):
    # Sums of large g have an absolute error, and what passes from token to token is tiny.
    check(*make((1, 80, 1, 1, 16, 16), None, device=backend, decay=decay), limit=1e-3 if decay else None)


@pytest.mark.cases(8)
@pytest.mark.parametrize("decay", [1e2, 1e4, 1e6, float("inf")])
@pytest.mark.parametrize("bounds", [None, [0, 20, 66]])
def test_a_large_decay_leaves_small_ones_exact(backend, decay, bounds):
    """One token forgets everything; the tokens after it forget little, as much as without it."""
    inputs, upstream, options = make((1, 66, 1, 2, 16, 16), bounds, fused_dtype(backend), backend, decay=0.1)
    inputs[3][:, 7 if bounds is None else 30] = -decay
    check(inputs, upstream, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_with_many_large_decays(dtype):
    inputs, upstream, options = make((1, 130, 1, 2, 16, 16), [0, 20, 130], decay=0.1)
    inputs[3][:, [3, 30, 31, 70, 100]] = -torch.tensor([1e2, 1e4, 1e6, 1e30, torch.inf])[:, None]
    with reference_backend():
        check([x.to(dtype) for x in inputs], [x.to(dtype) for x in upstream], options)


def test_equal_keys(backend):
    """(I + M)⁻¹ is then a difference of neighbors, and the powers of M have entries of up to 1e17."""
    inputs, upstream, options = make((1, 64, 1, 1, 16, 16), device=backend)
    inputs[1] = inputs[1][:, :1].expand(-1, 64, -1, -1).contiguous()
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.full_like(inputs[4], 0.999)
    check(inputs, upstream, options, limit=1e-4)


def test_beta_of_zero(backend):
    inputs, upstream, options = make((1, 20, 1, 2, 16, 16), device=backend)
    inputs[4] = torch.where(torch.arange(20, device=backend)[:, None] % 3 == 0, 0.0, inputs[4])
    check(inputs, upstream, options)


def test_unnormalized_with_a_scale(backend):
    inputs, upstream, options = make((1, 66, 1, 1, 16, 16), device=backend)
    inputs[1] = F.normalize(inputs[1], dim=-1)
    check(inputs, upstream, options | {"normalize": False, "scale": 0.7})


def test_views_and_strided_gradients(backend):
    """q, k and v of one packed tensor, as the convolution returns them; gradients of another layout."""
    (_, _, _, g, beta, initial), upstream, _ = make((2, 20, 1, 2, 16, 16), device=backend)
    packed = draw(2, 20, 64, device=backend)

    def split(function, packed, *rest, **options):
        q, k, v = packed.split([16, 16, 32], -1)
        return function(q.unflatten(2, (1, 16)), k.unflatten(2, (1, 16)), v.unflatten(2, (2, 16)), *rest, **options)

    upstream[0] = upstream[0].transpose(1, 2).contiguous().transpose(1, 2)
    inputs = [packed, g.transpose(1, 2).contiguous().transpose(1, 2), beta, initial]
    got = run(partial(split, ours), inputs, upstream)
    want = run(partial(split, recurrence), [wide(x) for x in inputs], [wide(x) for x in upstream])
    for mine, exact in zip(got, want, strict=True):
        assert (wide(mine) - exact).norm() <= LIMITS[torch.float32] * exact.norm()
    one = torch.ones((), device=backend).expand(got[0].shape)
    alike = [run(partial(split, ours), inputs, [grad, upstream[1]]) for grad in (one, one.contiguous())]
    assert all(torch.equal(a, b) for a, b in zip(*alike, strict=True))


def test_documents_do_not_see_each_other(kernel_device):
    """Another first document changes no bit of the second, and the second's loss gives the first no gradient.

    The reference sums the decay over documents and subtracts, so there both hold up to rounding.
    """
    inputs, _, options = make(
        (1, 90, 1, 1, 16, 16), [0, 67, 90], dtype=fused_dtype(kernel_device), device=kernel_device
    )
    other = [torch.cat([x[:, :67].flip(1) * 3, x[:, 67:]], 1) for x in inputs[:5]]
    outs = [gated_delta_rule(*x, **options)[:, 67:] for x in (inputs, other) for x in [x[:5]]]
    assert torch.equal(*outs)
    leaves = [x.requires_grad_() for x in inputs[:5]]
    out = gated_delta_rule(*leaves, **options)
    alone = gated_delta_rule(*(x[:, 67:] for x in leaves))
    torch.testing.assert_close(out[:, 67:], alone, rtol=1e-5, atol=1e-6)
    for grad in torch.autograd.grad(out[:, 67:].square().sum(), leaves):
        assert not grad[:, :67].any()
        assert grad[:, 67:].any()


@pytest.mark.parametrize(("parts", "bounds"), [(4, None), (2, [0, 30, 70])])
def test_parts_of_a_sequence_make_the_whole(backend, parts, bounds):
    """As ranks compute it: each from its own tokens, and from what the others exchange."""
    inputs, upstream, _ = make((1, 70, 1, 1, 16, 24), device=backend)
    options = {"cu_seqlens": None if bounds is None else torch.tensor(bounds, device=backend)}
    cuts = [round(70 * part / parts) for part in range(parts + 1)]

    def whole(*inputs):
        return gated_delta_rule(*inputs, **options)

    def split(*inputs):
        shards, edges = [], []
        for start, end in pairwise(cuts):
            shards.append([x[:, start:end] for x in inputs])
            edges.append(None if bounds is None else (options["cu_seqlens"] - start).clamp(0, end - start))
        pairs = [gated_delta_transition(*x[1:], cu_seqlens=e) for x, e in zip(shards, edges, strict=True)]
        A, b = (torch.stack(x) for x in zip(*pairs, strict=True))
        outs = []
        for shard, edge, state in zip(shards, edges, states_before(A, b), strict=True):
            if edge is not None:
                continues = (edge[:-1] == 0) & (edge[1:] > 0) & (cuts[len(outs)] not in bounds)
                state = state * continues[:, None, None, None]
            outs.append(gated_delta_rule(*shard, initial_state=state, cu_seqlens=edge))
        return torch.cat(outs, 1)

    got, want = (run(function, inputs[:5], upstream[:1]) for function in (split, whole))
    for mine, exact in zip(got, want, strict=True):
        assert (mine - exact).norm() <= 2e-5 * exact.norm()


def test_decoding_continues_the_sequence(backend):
    """In pieces of a few tokens, from state to state, without gradients."""
    (*inputs, initial), _, _ = make((1, 70, 1, 1, 16, 24), device=backend)
    want, end = gated_delta_rule(*inputs, initial_state=initial, return_state=True)
    with torch.no_grad():
        outs, state, start = [], initial, 0
        for length in (50, STEP_TOKENS, 1, 1, 2):
            piece = [x[:, start : start + length] for x in inputs]
            before = state.clone()
            out, after = gated_delta_rule(*piece, initial_state=state, return_state=True)
            assert torch.equal(state, before)
            outs.append(out)
            state, start = after, start + length
        first = gated_delta_rule(*(x[:, :1] for x in inputs), normalize=False, scale=0.5)
        exact, _ = gated_delta_rule_reference(*(x[:, :1].double() for x in inputs), normalize=False, scale=0.5)
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["out", "state"])
def test_only_one_result_has_a_gradient(backend, which):
    inputs, upstream, _ = make((1, 66, 1, 1, 16, 16), device=backend)
    index = ["out", "state"].index(which)
    got = run(lambda *x: ours(*x)[index], inputs, [upstream[index]])
    want = run(lambda *x: recurrence(*x)[index], [wide(x) for x in inputs], [wide(upstream[index])])
    for mine, exact in zip(got, want, strict=True):
        assert (wide(mine) - exact).norm() <= LIMITS[torch.float32] * exact.norm()


def test_only_inputs_and_inverses_are_saved(kernel_device):
    inputs, _, _ = make((1, 20, 1, 1, 16, 24), dtype=fused_dtype(kernel_device), device=kernel_device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_delta_rule(*(x.requires_grad_() for x in inputs[:5]))
    more = [t for t in saved if all(t.data_ptr() != x.data_ptr() for x in inputs[:5])]
    assert len(saved) == 6
    assert [(t.shape, t.dtype) for t in more] == [((1, 20, CHUNK), inputs[0].dtype)]


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    inputs, upstream, _ = make((1, 66, 1, 1, 16, 16), device=backend)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = ours(*leaves)
    kept = [t.clone() for t in (*leaves, *outputs, *upstream)]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*leaves, *outputs, *upstream), kept, strict=True))


def test_no_tokens_and_empty_documents(backend, poisoned_empty):
    for shape, bounds in (
        ((2, 0, 1, 2, 16, 16), None),
        ((0, 3, 1, 2, 16, 16), None),
        ((1, 3, 1, 2, 16, 16), [0, 0, 3, 3]),
    ):
        inputs, upstream, options = make(shape, bounds, device=backend)
        leaves = [x.requires_grad_() for x in inputs]
        out, state = ours(*leaves, **options)
        grads = torch.autograd.grad((out, state), leaves, upstream, materialize_grads=True)
        assert out.shape == inputs[2].shape
        assert all(grad.shape == x.shape and grad.isfinite().all() for grad, x in zip(grads, inputs, strict=True))
        empty = [True] * len(inputs[5]) if bounds is None else [True, False, True]
        assert torch.equal(state[empty] if shape[1] == 0 or bounds else state, inputs[5][empty])
        assert torch.equal(grads[5][empty], upstream[1][empty])


def test_transformers(backend):
    inputs, _, _ = make((1, 70, 1, 2, 16, 16), device=backend, state=False)
    want, state = qwen3_next.torch_chunk_gated_delta_rule(
        *inputs[:5], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    got, after = gated_delta_rule(*inputs[:5], return_state=True)
    assert (got - want).norm() <= LIMITS[torch.float32] * want.norm()
    assert (after - state).norm() <= LIMITS[torch.float32] * state.norm()


def test_opcheck(kernel_device):
    ops = torch.ops.liger_models
    inputs, upstream, _ = make((1, 18, 1, 1, 16, 16), [0, 2, 18], fused_dtype(kernel_device), kernel_device)
    cu_seqlens = torch.tensor([0, 2, 18], device=kernel_device)
    leaves = [x.requires_grad_() for x in inputs]
    opcheck(ops.gated_delta_rule, (*leaves, cu_seqlens, 0.25, True, True))
    inputs = [x.detach() for x in leaves]
    inverse = ops.gated_delta_rule(*inputs, cu_seqlens, 0.25, True, True)[2]
    opcheck(ops.gated_delta_rule_backward, (*upstream, *inputs, cu_seqlens, inverse, 0.25, True))
    opcheck(ops.gated_delta_step, (*(x[:, :2].detach() for x in inputs[:5]), None, 0.25, True))


@pytest.mark.cases(2)
@pytest.mark.compile
@pytest.mark.parametrize("bounds", [None, [0, 20, 66]])
def test_compiles_without_graph_breaks(backend, bounds):
    inputs, upstream, options = make((1, 66, 1, 1, 16, 16), bounds, device=backend)
    function = partial(ours, **options)
    compiler = "inductor" if backend == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    got = run(compiled, inputs, upstream)
    if compiler == "aot_eager":
        torch.testing.assert_close(got, run(function, inputs, upstream), rtol=1e-6, atol=1e-6)
        return
    # Inductor fuses the reference's formulas, which fp32 runs on a GPU, and so rounds otherwise.
    want = run(partial(recurrence, **on_cpu(options)), [wide(x) for x in inputs], [wide(x) for x in upstream])
    for mine, exact in zip(got, want, strict=True):
        assert (wide(mine) - exact).norm() <= LIMITS[torch.float32] * exact.norm()


def test_bad_arguments():
    inputs, _, _ = make((1, 5, 2, 4, 8, 8))
    q, k, v, g, beta, _ = inputs
    with pytest.raises(ValueError, match=r"number of value heads \(3\) must be a multiple of that of key heads \(2\)"):
        gated_delta_rule(q, k, v[:, :, :3], g[..., :3], beta[..., :3])
    with pytest.raises(ValueError, match=r"g and beta must be \[1, 5, 4\], got \[1, 5, 2\] and \[1, 5, 4\]"):
        gated_delta_rule(q, k, v, g[..., :2], beta)
    with pytest.raises(ValueError, match=r"q and k must be \[B, T, Hk, Dk\] and v \[B, T, Hv, Dv\], got"):
        gated_delta_rule(q, k[:, :4], v, g, beta)
    with pytest.raises(ValueError, match=r"initial_state must be \[1, 4, 8, 8\], got \[1, 4, 8, 7\]"):
        gated_delta_rule(*inputs[:5], initial_state=torch.zeros(1, 4, 8, 7))
    with pytest.raises(TypeError, match=r"initial_state must be float32, got torch.bfloat16"):
        gated_delta_rule(*inputs[:5], initial_state=torch.zeros(1, 4, 8, 8).bfloat16())
    with pytest.raises(TypeError, match=r"q, k and v must have one dtype, got torch.float16, torch.float32"):
        gated_delta_rule(q.half(), k, v, g, beta)
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[documents \+ 1\] .* got \[2\] and 2 rows"):
        gated_delta_rule(*(x.expand(2, *x.shape[1:]) for x in inputs[:5]), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 to the number of tokens \(5\)"):
        gated_delta_rule(*inputs[:5], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(TypeError, match=r"cu_seqlens must be int32 or int64, got torch.float32"):
        gated_delta_rule(*inputs[:5], cu_seqlens=torch.tensor([0.0, 5.0]))
