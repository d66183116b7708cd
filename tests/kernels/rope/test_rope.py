from functools import partial

import pytest
import torch

from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope
from liger_models.kernels.rope.rope import (
    liger_rotary_pos_emb,
    rope,
    rope_qkv,
    rope_qkv_reference,
    rope_reference,
)

from ..oracle import assert_close_to_truth, opcheck, run

# (B, T, H, G, D, R): grouped, multi-head and multi-query; odd sizes; partial rotary widths
SHAPES = [(2, 3, 4, 2, 8, 8), (1, 1, 1, 1, 2, 2), (2, 5, 7, 1, 6, 2), (1, 3, 6, 6, 20, 10), (3, 2, 40, 8, 96, 48)]
GPU_SHAPES = [(2, 33, 32, 8, 128, 128), (2, 17, 28, 4, 128, 128), (1, 9, 8, 1, 256, 256), (2, 7, 32, 32, 80, 32)]
GLM = (2, 17, 32, 2, 128, 64)
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return GPU_DTYPES if device == "cuda" else GPU_DTYPES[:2]


def draw(*size, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)


def tables(batch, length, width, device="cpu"):
    positions = torch.arange(length) + 100 * torch.arange(batch)[:, None]
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return angles.cos().to(device), angles.sin().to(device)


def on(function, cos, sin, *sizes):
    """``function`` of the activations alone: tables get no gradient."""
    return lambda x: function(x, cos.to(x.device), sin.to(x.device), *sizes)


def packed(B, T, H, G, D):
    return (B, T, (H + 2 * G) * D)


def upstream_of(B, T, H, G, D, dtype, device):
    return [draw(B, T, n, D, dtype=dtype, device=device, seed=n + i) for i, n in enumerate((H, G, G))]


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_matches_fp64(backend, shape, interleaved, poisoned_empty):
    B, T, H, _, D, R = shape
    ours, reference = partial(rope, interleaved=interleaved), partial(rope_reference, interleaved=interleaved)
    for dtype in dtypes(backend):
        cos, sin = tables(B if dtype == torch.float32 else 1, T, R, backend)
        x, dy = (draw(B, T, H, D, dtype=dtype, device=backend, seed=s) for s in (0, 1))
        assert_close_to_truth(on(ours, cos, sin), on(reference, cos, sin), [x], [dy])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_qkv_matches_fp64(backend, shape, interleaved, poisoned_empty):
    B, T, H, G, D, R = shape
    ours, reference = partial(rope_qkv, interleaved=interleaved), partial(rope_qkv_reference, interleaved=interleaved)
    for dtype in dtypes(backend):
        cos, sin = tables(B if dtype == torch.float32 else 1, T, R, backend)
        qkv = draw(*packed(B, T, H, G, D), dtype=dtype, device=backend)
        assert_close_to_truth(
            on(ours, cos, sin, H, G, D), on(reference, cos, sin, H, G, D), [qkv],
            upstream_of(B, T, H, G, D, dtype, backend),
        )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_tables_heads_are_only_sorted(backend, shape, poisoned_empty):
    B, T, H, G, D, _ = shape
    for dtype in dtypes(backend):
        qkv = draw(*packed(B, T, H, G, D), dtype=dtype, device=backend)
        upstream = upstream_of(B, T, H, G, D, dtype, backend)
        got, want = (
            run(partial(function, cos=None, sin=None, num_heads=H, num_kv_heads=G, head_dim=D), [qkv], upstream)
            for function in (rope_qkv, rope_qkv_reference)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "interleaved"), [(shape, False) for shape in GPU_SHAPES] + [(GPU_SHAPES[0], True), (GLM, True)], ids=str
)
def test_real_sizes(shape, interleaved, poisoned_empty):
    B, T, H, G, D, R = shape
    cos, sin = tables(1, T, R, "cuda")
    for dtype in GPU_DTYPES:
        qkv = draw(*packed(B, T, H, G, D), dtype=dtype, device="cuda")
        upstream = upstream_of(B, T, H, G, D, dtype, "cuda")
        ours, reference = (
            on(partial(f, interleaved=interleaved), cos, sin, H, G, D) for f in (rope_qkv, rope_qkv_reference)
        )
        assert_close_to_truth(ours, reference, [qkv], upstream)
        x = draw(B, H, T, D, dtype=dtype, device="cuda").transpose(1, 2)
        ours, reference = (on(partial(f, interleaved=interleaved), cos, sin) for f in (rope, rope_reference))
        assert_close_to_truth(ours, reference, [x], upstream[:1])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_packed_layout_and_direction(backend, interleaved):
    """Against a head by head loop, so that the reference itself is pinned: which entries are a pair, and which way."""
    B, T, H, G, D, R = 1, 3, 6, 2, 10, 4
    cos, sin = tables(1, T, R, backend)
    qkv = draw(*packed(B, T, H, G, D), device=backend)
    q, k, v = rope_qkv(qkv, cos, sin, H, G, D, interleaved=interleaved)
    heads = qkv.view(B, T, -1, D)

    def turned(head):
        result = head.clone()
        for i in range(R // 2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
            pair = torch.complex(head[..., first], head[..., second]) * torch.complex(cos[..., i], sin[..., i])
            result[..., first], result[..., second] = pair.real, pair.imag
        return result

    for group in range(G):
        first = group * (H // G + 2)
        for member in range(H // G):
            torch.testing.assert_close(q[:, :, group * 3 + member], turned(heads[:, :, first + member]))
        torch.testing.assert_close(k[:, :, group], turned(heads[:, :, first + 3]))
        assert torch.equal(v[:, :, group], heads[:, :, first + 4])
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert v.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()


def test_strided_inputs_and_gradients(backend):
    B, T, H, G, D = 2, 5, 4, 2, 8
    cos, sin = tables(B, T, D, backend)
    x, dy = (draw(B, H, T, D, device=backend, seed=s) for s in (0, 1))
    check = lambda x, dy, c=cos, s=sin: assert_close_to_truth(on(rope, c, s), on(rope_reference, c, s), [x], [dy])
    check(x.transpose(1, 2), dy.transpose(1, 2))  # the attention's layout
    check(draw(B, T, H, 2 * D, device=backend)[..., ::2], dy[:1, :1, :1].expand(B, T, H, D))
    check(x.transpose(1, 2), dy[..., :1].transpose(1, 2).expand(B, T, H, D))
    one = draw(1, 1, H, D, device=backend).expand(B, T, H, D)
    assert torch.equal(rope(one, cos, sin), rope(one.contiguous(), cos, sin))
    wide = tables(B, 2 * T, 2 * D, backend)
    check(x.transpose(1, 2), dy.transpose(1, 2), wide[0][:, ::2, ::2], wide[1][:, ::2, ::2])
    check(x.transpose(1, 2), dy.transpose(1, 2), cos.contiguous(), sin.transpose(0, 1).contiguous().transpose(0, 1))
    check(x.transpose(1, 2), dy.transpose(1, 2), cos[:1].expand(B, T, D // 2), sin[:1].expand(B, T, D // 2))

    function, reference = on(rope_qkv, cos, sin, H, G, D), on(rope_qkv_reference, cos, sin, H, G, D)
    qkv = draw(*packed(B, T, H, G, D), device=backend)
    dq, dk, dv = draw(B, H, T, D, device=backend), draw(B, G, T, D, device=backend), draw(T, B, G, D, device=backend)
    upstream = [dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(0, 1)]
    assert_close_to_truth(function, reference, [qkv.transpose(0, 1).contiguous().transpose(0, 1)], upstream)
    split = lambda f: lambda qkv: f(qkv, None, None, H, G, D, interleaved=True)
    assert_close_to_truth(split(rope_qkv), split(rope_qkv_reference), [qkv], upstream)
    upstream = [dq[..., :1].transpose(1, 2).expand(B, T, H, D), dk[:1, :, :1].transpose(1, 2).expand(B, T, G, D), dv]
    double = draw(B, T, 2 * qkv.shape[-1], device=backend)
    assert_close_to_truth(function, reference, [double[..., ::2]], [*upstream[:2], dv.transpose(0, 1)])


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_missing_gradients_are_zero(backend, given, poisoned_empty):
    B, T, H, G, D = 2, 3, 4, 2, 8
    cos, sin = tables(1, T, D, backend)
    qkv = draw(*packed(B, T, H, G, D), device=backend)
    upstream = [upstream_of(B, T, H, G, D, torch.float32, backend)[i] for i in given]
    pick = lambda function: lambda x: tuple(on(function, cos, sin, H, G, D)(x)[i] for i in given)
    assert_close_to_truth(pick(rope_qkv), pick(rope_qkv_reference), [qkv], upstream)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_what_is_not_rotated_is_copied_bit_for_bit(backend, interleaved):
    B, T, H, G, D, R = 1, 2, 2, 1, 8, 4
    cos, sin = tables(1, T, R, backend)
    heads = draw(B, T, H + 2 * G, D, device=backend)
    odd = torch.tensor([float("inf"), -0.0, 1e-45, 3e38], device=backend)
    heads[..., R:] = odd
    heads[:, :, -1, :R] = -odd
    q, k, v = rope_qkv(heads.flatten(2), cos, sin, H, G, D, interleaved=interleaved)
    bits = lambda x: x.contiguous().view(torch.int32)
    assert torch.equal(bits(v), bits(heads[:, :, -1:]))
    assert torch.equal(bits(q[..., R:]), bits(heads[:, :, :H, R:]))
    assert torch.equal(bits(k[..., R:]), bits(heads[:, :, H : H + 1, R:]))


def test_half_precision_tables(backend):
    """transformers' rotary embeddings return their tables in the activations' dtype."""
    cos, sin = (table.half() for table in tables(2, 3, 8, backend))
    x, dy = (draw(2, 3, 4, 8, dtype=torch.float16, device=backend, seed=s) for s in (0, 1))
    assert_close_to_truth(on(rope, cos, sin), on(rope_reference, cos, sin), [x], [dy])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_liger_rotary_pos_emb_equals_transformers(backend, unsqueeze_dim):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for batch in (1, 2):
        cos, sin = (torch.cat([table, table], -1) for table in tables(batch, 5, 8, backend))
        q, k = draw(2, 6, 5, 8, device=backend), draw(2, 2, 5, 8, device=backend)
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        upstream = [torch.randn_like(q), torch.randn_like(k)]
        ours = partial(liger_rotary_pos_emb, cos=cos, sin=sin, unsqueeze_dim=unsqueeze_dim)
        theirs = partial(apply_rotary_pos_emb, cos=cos, sin=sin, unsqueeze_dim=unsqueeze_dim)
        torch.testing.assert_close(run(ours, [q, k], upstream), run(theirs, [q, k], upstream))


@pytest.mark.parametrize("width", [8, 4])
def test_tables_of_liger_rotary_pos_emb(backend, width):
    """[T, R] as [1, T, R], and tables of R / 2 with their rotary_dim; fewer entries than a head has leave the rest."""
    cos, sin = tables(1, 5, width, backend)
    q, k = draw(2, 6, 5, 8, device=backend), draw(2, 2, 5, 8, device=backend)
    full = [torch.cat([table, table], -1) for table in (cos, sin)]
    want = liger_rotary_pos_emb(q, k, *full)
    assert width == 8 or torch.equal(want[0][..., width:], q[..., width:])
    for made in ((full[0][0], full[1][0]), (cos, sin, None, 1, width), (cos[0], sin[0], None, 1, width)):
        torch.testing.assert_close(liger_rotary_pos_emb(q, k, *made), want, rtol=0, atol=0)
    torch.testing.assert_close(liger_rotary_pos_emb(q, k, *full, rotary_dim=width), want, rtol=0, atol=0)


def test_interleaved_equals_transformers_glm(backend):
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    cos, sin = tables(2, 5, 4, backend)
    q, k = draw(2, 6, 5, 8, device=backend), draw(2, 2, 5, 8, device=backend)
    upstream = [torch.randn_like(q), torch.randn_like(k)]
    turned = lambda x: rope(x.transpose(1, 2), cos, sin, interleaved=True).transpose(1, 2)
    full = {"cos": torch.cat([cos, cos], -1), "sin": torch.cat([sin, sin], -1)}
    got = run(lambda q, k: (turned(q), turned(k)), [q, k], upstream)
    torch.testing.assert_close(got, run(partial(apply_rotary_pos_emb, **full), [q, k], upstream))


def test_second_backward_agrees_and_nothing_is_overwritten(backend):
    B, T, H, G, D = 2, 3, 4, 2, 8
    cos, sin = tables(1, T, D, backend)
    qkv = draw(*packed(B, T, H, G, D), device=backend).requires_grad_()
    outputs = rope_qkv(qkv, cos, sin, H, G, D)
    upstream = upstream_of(B, T, H, G, D, torch.float32, backend)
    kept = [t.clone() for t in (qkv, cos, sin, *outputs, *upstream)]
    (first,) = torch.autograd.grad(outputs, qkv, upstream, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(outputs, qkv, upstream)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((qkv, cos, sin, *outputs, *upstream), kept, strict=True))


def test_only_tables_are_saved(kernel_device):
    cos, sin = tables(1, 3, 8, kernel_device)
    qkv = draw(*packed(2, 3, 4, 2, 8), device=kernel_device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)), lambda t: t):
        rope_qkv(qkv, cos, sin, 4, 2, 8)
        rope(qkv.view(2, 3, 8, 8), cos, sin)
        rope_qkv(qkv, None, None, 4, 2, 8)
    assert saved == [(1, 3, 4)] * 4


def test_empty_batch(backend):
    for B, T in ((0, 3), (2, 0)):
        cos, sin = (torch.ones(1, T, 4, device=backend) for _ in range(2))
        qkv = torch.empty(B, T, 64, device=backend, requires_grad=True)
        sum(part.sum() for part in rope_qkv(qkv, cos, sin, 4, 2, 8)).backward()
        assert qkv.grad.shape == qkv.shape
        assert [part.shape for part in rope_qkv(qkv, None, None, 4, 2, 8)] == [(B, T, n, 8) for n in (4, 2, 2)]
        x = torch.empty(B, T, 4, 8, device=backend, requires_grad=True)
        rope(x, cos, sin).sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    T, H, G, D = 350_001, 32, 8, 128
    tokens = torch.arange(T, device="cuda")
    angles = tokens[:, None] * 10000.0 ** (-torch.arange(0, D, 2, device="cuda") / D)
    cos, sin = angles.cos()[None], angles.sin()[None]
    qkv = torch.zeros(packed(1, T, H, G, D), dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    qkv[:, -2:] = torch.randn(2, qkv.shape[-1], device="cuda")
    qkv.requires_grad_()
    outputs = rope_qkv(qkv, cos, sin, H, G, D)
    end = lambda t: t.detach()[:, -2:]
    for got, want in zip(outputs, rope_qkv_reference(end(qkv), cos[:, -2:], sin[:, -2:], H, G, D), strict=True):
        torch.testing.assert_close(end(got), want)
    # Rotations are orthogonal: the outputs, sent back as their own gradient in the attention's layout, give the input.
    back = [out.detach().transpose(1, 2).contiguous().transpose(1, 2) for out in outputs]
    (dqkv,) = torch.autograd.grad(outputs, qkv, back)
    torch.testing.assert_close(end(dqkv), end(qkv), rtol=2e-2, atol=2e-2)
    assert not dqkv[:, : T // 2].any()


def test_opcheck(kernel_device):
    cos, sin = tables(1, 3, 8, kernel_device)
    x = draw(2, 3, 4, 8, device=kernel_device).requires_grad_()
    qkv = draw(*packed(2, 3, 4, 2, 8), device=kernel_device).requires_grad_()
    opcheck(torch.ops.liger_models.rope, (x, cos, sin, False, False))
    opcheck(torch.ops.liger_models.rope_qkv, (qkv, cos, sin, 4, 2, 8, True))
    opcheck(torch.ops.liger_models.rope_qkv, (qkv, None, None, 4, 2, 8, False))
    dq = draw(2, 4, 3, 8, device=kernel_device).transpose(1, 2)
    opcheck(torch.ops.liger_models.rope_qkv_backward, (dq, None, None, cos, sin, 4, 2, 8, False))


@pytest.mark.compile
def test_compiles_without_graph_breaks(kernel_device):
    cos, sin = tables(1, 3, 8, kernel_device)
    full = [torch.cat([table, table], -1) for table in (cos, sin)]

    def function(qkv):
        q, k, v = rope_qkv(qkv, None, None, 4, 2, 8)
        q, k, v = rope_qkv(torch.cat([q, k, v], 2).flatten(2), cos, sin, 4, 2, 8, interleaved=True)
        q, k = liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *full)
        return q, k, v

    qkv = draw(*packed(2, 3, 4, 2, 8), device=kernel_device)
    upstream = [draw(2, n, 3, 8, device=kernel_device) for n in (4, 2)] + [draw(2, 3, 2, 8, device=kernel_device)]
    backend = "inductor" if kernel_device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, [qkv], upstream), run(function, [qkv], upstream), rtol=0, atol=0)


@pytest.mark.cases(2)
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("changed", [(6, 2, 8), (4, 2, 12)], ids=["heads", "head_dim"])
@pytest.mark.parametrize("op", ["rope_qkv", "qk_norm_rope"])
def test_sizes_may_be_symbolic(op, changed):
    """Dynamo makes integers symbolic that change between calls, as those of models under FSDP do."""
    cos, sin = tables(1, 5, 8)

    def function(qkv, heads, kv_heads, head_dim, weight):
        if op == "rope_qkv":
            return rope_qkv(qkv, cos, sin, heads, kv_heads, head_dim)
        return qk_norm_rope(qkv, cos, sin, heads, kv_heads, head_dim, weight, weight)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for heads, kv_heads, head_dim in ((4, 2, 8), changed):
        args = (draw(2, 5, (heads + 2 * kv_heads) * head_dim), heads, kv_heads, head_dim, draw(head_dim))
        torch.testing.assert_close(compiled(*args), function(*args))


def test_bad_arguments():
    x, table = torch.ones(2, 3, 4, 8), torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match=r"x must be \[B, T, H, D\], got \[3, 4, 8\]"):
        rope(x[0], table, table)
    for cos in (torch.ones(3, 4), torch.ones(1, 5, 4), torch.ones(3, 3, 4)):
        with pytest.raises(ValueError, match=r"cos and sin must be \[B or 1, T, R / 2\] with B 2 and T 3, got"):
            rope(x, cos, cos)
    with pytest.raises(ValueError, match=r"cos and sin must be .* got \[1, 3, 4\] and \[1, 3, 2\]"):
        rope(x, table, table[..., :2])
    with pytest.raises(ValueError, match=r"at most head_dim \(8\) / 2, got 8"):
        rope(x, torch.ones(1, 3, 8), torch.ones(1, 3, 8))
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        rope_qkv(torch.ones(2, 3, 80), table, table, 4, 3, 8)
    with pytest.raises(ValueError, match=r"last dimension of 64, got \[2, 3, 80\]"):
        rope_qkv(torch.ones(2, 3, 80), table, table, 4, 2, 8)
    with pytest.raises(ValueError, match=r"both be given, or both be None for no rotation"):
        rope_qkv(torch.ones(2, 3, 64), table, None, 4, 2, 8)
    with pytest.raises(ValueError, match=r"head_dim must be even, got 7"):
        rope(x[..., :7], table[..., :3], table[..., :3])
    with pytest.raises(ValueError, match=r"unsqueeze_dim must be 1 or 2, got 3"):
        liger_rotary_pos_emb(x, x, table, table, unsqueeze_dim=3)
    for width in (3, 10, 0):
        with pytest.raises(ValueError, match=rf"rotary_dim must be even and at most 8 .*, got {width}"):
            liger_rotary_pos_emb(x, x, table, table, rotary_dim=width)
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch.int64"):
        rope(x.long(), table, table)
