import pytest
import torch

from liger_models.kernels.attention import sink_attention as module
from liger_models.kernels.attention.sink_attention import sink_attention, sink_attention_reference

from ..oracle import assert_close_to_truth, opcheck, run, wide

GPU_DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 5, 2, 2, 16), (2, 9, 4, 2, 8), (2, 7, 3, 1, 20), (1, 70, 2, 1, 32)]  # B, T, H, G, D
GPU_SHAPES = [(2, 256, 8, 2, 64), (1, 1024, 4, 4, 128), (2, 333, 4, 1, 64), (1, 200, 2, 1, 20)]


def make(shape, dtype, device):
    """q, k, v, the sinks and the upstream gradient."""
    B, T, H, G, D = shape
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)
    return [draw(B, T, H, D), draw(B, T, G, D), draw(B, T, G, D), 2 * draw(H)], draw(B, T, H, D)


def check(inputs, dy, **options):
    """As near to the truth as flash attention is: on the CPU, PyTorch's approximates exp in fp32."""
    factor = 3.0 if inputs[0].device.type == "cpu" else 2.0

    def ours(*tensors):
        return sink_attention(*tensors, scale=0.3, **options)

    def reference(*tensors):
        bounds = options.get("cu_seqlens")
        bounds = None if bounds is None else bounds.to(tensors[0].device)
        return sink_attention_reference(*tensors, scale=0.3, window=options.get("window"), cu_seqlens=bounds)

    slack = {4: rounding_of_sinks(reference, inputs, dy)} if inputs[0].dtype in GPU_DTYPES else None
    assert_close_to_truth(ours, reference, inputs, [dy], factor=factor, slack=slack)


def rounding_of_sinks(reference, inputs, dy) -> float:
    """What the rounding of y adds to the gradient of the sinks, which is a sum over the tokens of share · (dy · y)."""
    q, k, v, sinks = (wide(tensor) for tensor in inputs)
    share = 1 - reference(q, k, torch.ones_like(v), sinks)  # of the sink in the softmax
    terms = share * wide(dy) * reference(q, k, v, sinks)
    return torch.finfo(dy.dtype).eps * terms.norm().item()


def bounds(B, T, device):
    """Documents of odd lengths, one of them empty, and one of a single token."""
    cuts = {0, 1, T // 3, *(row * T for row in range(B + 1))}
    return torch.tensor([0, *sorted(cuts)], dtype=torch.int32, device=device)


def test_the_reference_is_transformers():
    from types import SimpleNamespace

    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    (q, k, v, sinks), _ = make((2, 6, 4, 2, 8), torch.float32, "cpu")
    added = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    want, _ = eager_attention_forward(module, *heads, added[None, None], scaling=0.3)
    torch.testing.assert_close(sink_attention_reference(q, k, v, sinks, scale=0.3), want)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, window, packed, kernel_device, poisoned_empty):
    cu_seqlens = bounds(*shape[:2], kernel_device) if packed else None
    for dtype in GPU_DTYPES if kernel_device == "cuda" else [torch.float32]:
        inputs, dy = make(shape, dtype, kernel_device)
        check(inputs, dy, window=window, cu_seqlens=cu_seqlens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_matches_fp64_on_every_kernel(shape, packed, window, dtype, poisoned_empty):
    """cuDNN's for whole multiples of its step, and the variable-length one."""
    inputs, dy = make(shape, dtype, "cuda")
    check(inputs, dy, window=window, cu_seqlens=bounds(*shape[:2], "cuda") if packed else None)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "calls"), [((1, 256, 9, 3, 64), 2), ((2, 100, 8, 4, 32), 4)], ids=str)
def test_many_queries_are_processed_by_heads(shape, calls, packed, window, kernel_device, monkeypatch, poisoned_empty):
    inputs, dy = make(shape, torch.bfloat16 if kernel_device == "cuda" else torch.float32, kernel_device)
    monkeypatch.setattr(module, "MOST_QUERIES", -(-inputs[0].numel() // calls))
    whole, sizes = module._flash_backward, []
    monkeypatch.setattr(module, "_flash_backward", lambda dy, *rest: sizes.append(dy.shape[2]) or whole(dy, *rest))
    check(inputs, dy, window=window, cu_seqlens=bounds(*shape[:2], kernel_device) if packed else None)
    assert len(sizes) == calls
    assert sum(sizes) == shape[2]


def test_large_and_small_sinks(kernel_device):
    """A sink far above all scores takes everything, one far below nothing; neither overflows."""
    dtype = torch.bfloat16 if kernel_device == "cuda" else torch.float32
    (q, k, v, sinks), dy = make((1, 6, 3, 1, 16), dtype, kernel_device)
    sinks = torch.tensor([200.0, -200.0, 0.0], dtype=dtype, device=kernel_device)
    y, *grads = run(lambda *x: sink_attention(*x, scale=0.3), [q, k, v, sinks], [dy])
    assert not y[..., 0, :].any()
    assert all(grad.isfinite().all() for grad in grads)
    want = run(lambda *x: sink_attention_reference(*x, scale=0.3), [q, k, v, sinks], [dy])
    for ours, theirs in zip([y, *grads], want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_sinks_of_another_dtype_and_strided_inputs(kernel_device):
    dtype = torch.bfloat16 if kernel_device == "cuda" else torch.float32
    (q, k, v, sinks), dy = make((2, 8, 4, 2, 16), dtype, kernel_device)
    packed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], 2)
    q, k, v = (x.unflatten(2, (-1, 16)) for x in packed.split([64, 32, 32], 2))
    check([q, k, v, sinks.float()], dy.transpose(0, 1).contiguous().transpose(0, 1))
    check([q, k, v, torch.stack([sinks.float()] * 2, 1)[:, 1]], dy[:1, :1].expand(2, 8, 4, 16))


def test_frozen_parts(kernel_device):
    """Each gradient alone is the one that it is among the others."""
    inputs, dy = make((1, 6, 4, 2, 16), torch.float16 if kernel_device == "cuda" else torch.float32, kernel_device)
    leaves = [t.detach().requires_grad_() for t in inputs]
    every = torch.autograd.grad(sink_attention(*leaves, scale=0.3), leaves, dy)
    for index, want in enumerate(every):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(inputs)]
        (got,) = torch.autograd.grad(sink_attention(*leaves, scale=0.3), [leaves[index]], dy)
        torch.testing.assert_close(got, want)


def test_second_backward_agrees_and_nothing_is_overwritten(kernel_device):
    inputs, dy = make((2, 6, 2, 1, 16), torch.float16 if kernel_device == "cuda" else torch.float32, kernel_device)
    leaves = [t.requires_grad_() for t in inputs]
    y = sink_attention(*leaves, scale=0.3)
    copies = [t.detach().clone() for t in (dy, y, *leaves)]
    first = [g.clone() for g in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
    second = torch.autograd.grad(y, leaves, dy)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip((dy, y, *leaves), copies, strict=True))


def test_what_is_saved(kernel_device):
    """No more than without sinks: the output is that with them, and so is the log-sum-exp."""
    inputs, _ = make((2, 6, 4, 2, 16), torch.float16 if kernel_device == "cuda" else torch.float32, kernel_device)
    leaves, kept = [t.requires_grad_() for t in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = sink_attention(*leaves, scale=0.3)
    shapes = [tuple(t.shape) for t in kept]
    assert shapes == [(2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16), (2, 6, 4, 16), (4, 12), (4,)]
    assert kept[3].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_no_token(backend):
    (q, k, v, sinks), _ = make((2, 6, 4, 2, 16), torch.float16 if backend == "cuda" else torch.float32, backend)
    leaves = [x.detach().requires_grad_() for x in (q[:0], k[:0], v[:0], sinks)]
    y = sink_attention(*leaves, scale=0.3)
    assert y.shape == (0, 6, 4, 16)
    y.sum().backward()
    assert not leaves[3].grad.any()


def test_opcheck(kernel_device):
    inputs, dy = make((2, 6, 4, 2, 16), torch.float16 if kernel_device == "cuda" else torch.float32, kernel_device)
    ops = torch.ops.liger_models
    leaves = [t.detach().requires_grad_() for t in inputs]
    cu_seqlens = bounds(2, 6, kernel_device)
    opcheck(ops.sink_attention, (*leaves, None, 6, 0.3, 0))
    opcheck(ops.sink_attention, (*leaves, cu_seqlens, 6, 0.3, 3))
    y, lse = ops.sink_attention(*inputs, cu_seqlens, 6, 0.3, 3)
    for needs in ([True, True], [False, True], [True, False]):
        opcheck(ops.sink_attention_backward, (dy, *inputs[:3], y, lse, inputs[3], cu_seqlens, 6, 0.3, 3, needs))


@pytest.mark.compile
def test_compiles_without_graph_breaks(backend):
    inputs, dy = make((2, 6, 4, 2, 16), torch.float16 if backend == "cuda" else torch.float32, backend)
    function = lambda *x: sink_attention(*x, scale=0.3, window=4, cu_seqlens=bounds(2, 6, backend))
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "cuda" else "aot_eager")
    for got, want in zip(run(compiled, inputs, [dy]), run(function, inputs, [dy]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 if backend == "cuda" else 1e-6)


@pytest.mark.gpu
def test_no_scores_in_memory():
    T, H, G, D = 8192, 8, 1, 64
    inputs, dy = make((1, T, H, G, D), torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in inputs]
    for window in (None, 128):
        cu_seqlens = None if window is None else torch.tensor([0, T], dtype=torch.int32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sink_attention(*leaves, scale=0.1, window=window, cu_seqlens=cu_seqlens).backward(dy)
        assert torch.cuda.max_memory_allocated() - before < H * T * T // 4


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    inputs, dy = make((2, 256, 8, 2, 64), torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in inputs]
    step = lambda: torch.autograd.grad(sink_attention(*leaves, scale=0.1), leaves, dy)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_arguments():
    (q, k, v, sinks), _ = make((2, 6, 4, 2, 16), torch.float32, "cpu")
    good = {"q": q, "k": k, "v": v, "sinks": sinks, "scale": 0.3}

    def bad(error, match, **changes):
        with pytest.raises(error, match=match):
            sink_attention(**{**good, **changes})

    sink_attention(**good)
    bad(ValueError, r"q must be \[B, T, H, D\], got \[6, 4, 16\]", q=q[0])
    bad(ValueError, r"k and v must be \[2, 6, G, 16\] with 4 a multiple of G, got \[2, 5, 2, 16\]", k=k[:, 1:])
    bad(ValueError, r"with 4 a multiple of G, got \[2, 6, 3, 16\]", k=q[:, :, :3], v=q[:, :, :3])
    bad(ValueError, r"sinks must be \[4\], got \[2\]", sinks=sinks[:2])
    bad(ValueError, r"window must be positive or None, got 0", window=0)
    bad(TypeError, r"one dtype, got torch.float32, torch.float16 and torch.float32", k=k.half())
    bad(TypeError, r"sinks must be a floating-point tensor, got torch.int64", sinks=sinks.long())
