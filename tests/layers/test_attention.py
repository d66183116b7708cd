import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from liger_models.cli.compare import relative_error
from liger_models.distributed.collectives import Group
from liger_models.layers.attention import BaseAttention, LigerAttention
from liger_models.layers.attention_backends import MOST_SCORES, AttentionCall, _segments, attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.gated_conv import LigerGatedConv
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.masks import Mask, Segments
from liger_models.layers.norm import LigerRMSNorm, add_norm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention
from liger_models.layers.rope import RotaryEmbedding

from ..late import dynamo_testing


def sequence(B, T, **options):
    return BatchLayout.build((B, T), torch.device("cpu"), {"default": RotaryEmbedding(8)}, **options)


def naive(q, k, v, visible, scale, softcap=None):
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (4, 1)])
def test_against_the_formula(H, G):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, H, 8), torch.randn(2, 6, G, 8), torch.randn(2, 6, G, 8)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(q, k, v, sequence(2, 6), scale=0.3), naive(q, k, v, causal, 0.3))
    packed = sequence(2, 6, cu_seqlens=torch.tensor([0, 4, 6, 7, 12]))
    visible = (packed.documents[:, None, :, None] == packed.documents[:, None, None, :]) & causal
    torch.testing.assert_close(attention(q, k, v, packed, scale=0.3), naive(q, k, v, visible, 0.3))


@pytest.mark.parametrize(("most", "heads"), [(2 * 4 * 6 * 6 * 4, 2), (2 * 4 * 6 * 6 * 4 - 1, 4)])
def test_shared_heads_have_copies_where_all_scores_would_be_kept(monkeypatch, most, heads):
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    sdpa = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr("liger_models.layers.attention_backends.F.scaled_dot_product_attention", sdpa)
    monkeypatch.setattr("liger_models.layers.attention_backends.ACCELERATORS", ("cpu",))
    monkeypatch.setattr("liger_models.layers.attention_backends.MOST_SCORES", most)
    got = attention(q, k, v, sequence(2, 6), scale=0.3)
    torch.testing.assert_close(got, naive(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(), 0.3))
    assert [x.shape[1] for x in sdpa.call_args.args] == [4, heads, heads]


@pytest.mark.parametrize(
    ("most", "heads"), [(2 * 6 * 8 * 8, [8]), (2 * 6 * 8 * 8 - 1, [4, 4]), (2 * 6 * 8 * 3, [4, 4])]
)
def test_many_queries_are_taken_a_few_heads_at_a_time(monkeypatch, most, heads):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 6, each, 8, requires_grad=True) for each in (8, 2, 2)]
    want = naive(*inputs, torch.ones(6, 6, dtype=torch.bool).tril(), 0.3)
    sdpa = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr("liger_models.layers.attention_backends.F.scaled_dot_product_attention", sdpa)
    monkeypatch.setattr("liger_models.layers.attention_backends.MOST_QUERIES", most)
    got = attention(*inputs, sequence(2, 6), scale=0.3)
    assert [call.args[0].shape[1] for call in sdpa.call_args_list] == heads
    assert got.is_contiguous() or len(heads) == 1
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy))


def sees(T, window, documents=None):
    """[1 or B, 1, T, T]: causal, no further back than the window, in the same document."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = (distance >= 0) & (distance < window)
    return visible if documents is None else visible & (documents[:, None, :, None] == documents[:, None, None, :])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [3, 6, 100])
def test_windows_and_softcaps(window, softcap):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    options = {"scale": 0.5, "window": window, "softcap": softcap}
    needs = {window: softcap is not None}
    got = attention(q, k, v, sequence(2, 6, windows=needs), **options)
    torch.testing.assert_close(got, naive(q, k, v, sees(6, window), 0.5, softcap))
    packed = sequence(2, 6, windows=needs, cu_seqlens=torch.tensor([0, 5, 12]))
    got = attention(q, k, v, packed, **options)
    torch.testing.assert_close(got, naive(q, k, v, sees(6, window, packed.documents), 0.5, softcap))


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_sinks(window, packed, dropout):
    """A sink is a key of its own score, and of a value of zeros, that every token of a head sees."""
    torch.manual_seed(0)
    q, k, v, sinks = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8), torch.randn(4)
    layout = sequence(2, 6, windows={window: False}, cu_seqlens=torch.tensor([0, 5, 12]) if packed else None)
    got = attention(q, k, v, layout, scale=0.5, window=window, dropout=dropout, sinks=sinks)
    visible = sees(6, window or 6, layout.documents).expand(2, 4, 6, 6)
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = (torch.einsum("bthd,bshd->bhts", q, keys) * 0.5).masked_fill(~visible, -math.inf)
    every = torch.cat([scores, sinks[:, None, None].expand(2, 4, 6, 1)], 3).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("bhts,bshd->bthd", every[..., :-1], values))


@pytest.mark.parametrize("V", [4, 12])
@pytest.mark.parametrize("form", ["causal", "packed", "window", "softcap", "sinks", "packed sinks", "padding"])
def test_values_of_another_width(form, V):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, V)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    window, softcap = 3 if form == "window" else None, 2.0 if form == "softcap" else None
    sinks = torch.randn(4) if "sinks" in form else None
    packed = {"cu_seqlens": torch.tensor([0, 5, 12])} if "packed" in form else {}
    if form == "padding":
        packed = {"attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])}
    layout = sequence(2, 6, windows={window: softcap is not None}, **packed)
    options = {"scale": 0.5, "window": window, "softcap": softcap, "sinks": sinks}
    got = attention(q, k, v, layout, **options)
    assert got.shape == (2, 6, 4, V)
    # Values that are as wide as the keys, in parts: attention is linear in the values.
    wide = F.pad(v, (0, 4)).split(8, -1)
    layout = sequence(2, 6, windows={window: softcap is not None}, **packed)
    want = torch.cat([attention(q, k, part, layout, **options) for part in wide], -1)[..., :V]
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, (q, k, v), dy), torch.autograd.grad(want, (q, k, v), dy))


@pytest.mark.gpu
def test_no_dropout_beside_sinks_on_gpus():
    q, k = (torch.randn(1, 64, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2))
    layout = BatchLayout.build((1, 64), q.device, {}, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"dropout must be 0 with .* and sinks on cuda, got 0\.1"):
        attention(q, k, k, layout, scale=0.1, dropout=0.1, sinks=torch.zeros(4, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 12])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_on_gpus_are_those_on_the_cpu(padded, window, D, dtype):
    """In fp32 and with padding by flex_attention, otherwise by the flash kernels."""
    torch.manual_seed(0)
    T = 384
    tensors = [torch.randn(2, T, heads, D, dtype=dtype) for heads in (4, 2, 2)] + [torch.randn(4, dtype=dtype)]
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, 300:] = 0
    dy, results = torch.randn(2, T, 4, D, dtype=dtype) * mask[:, :, None, None], []
    for device, exact in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [each.to(device, exact).requires_grad_() for each in tensors]
        needed = {window: dtype == torch.float32 and device == "cuda"}
        layout = BatchLayout.build(
            (2, T), torch.device(device), {}, windows=needed, attention_mask=mask.to(device) if padded else None,
            dtype=exact,
        )  # fmt: skip
        y = attention(*leaves[:3], layout, scale=0.2, window=window, sinks=leaves[3])
        results.append([y * mask[:, :, None, None].to(device), *torch.autograd.grad(y, leaves, dy.to(device, exact))])
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for want, got in zip(*results, strict=True):
        assert (got.cpu().double() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 1.5}, {"window": 2, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_in_any_pieces_equals_one_pass(H, G, options, padded):
    torch.manual_seed(0)
    layer = LigerAttention(16, H, G, 8, layer=0, **options)
    windows = {layer.window: layer.softcap is not None}
    x = torch.randn(2, 7, 16)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]) if padded else None
    want = layer(x, sequence(2, 7, windows=windows, attention_mask=mask))
    for pieces in ([1] * 7, [4, 1, 2], [3, 4]):
        cache, got = DecodeCache(7), []
        for piece in x.split(pieces, 1):
            end = cache.length + piece.shape[1]
            part = None if mask is None else mask[:, :end]
            new = sequence(2, piece.shape[1], windows=windows, cache=cache, attention_mask=part)
            got.append(layer(piece, new))
            cache.length = end
        torch.testing.assert_close(torch.cat(got, 1), want)


def chunked(B, T, size, **options):
    """The layout of the layers whose attention has chunks of this size."""
    return sequence(B, T, chunks=[size], **options).chunks[size]


def chunks_seen(T, size, starts):
    """[B, 1, T, T]: causal, within chunks that are counted from the start of each token's document, [B, T]."""
    token = torch.arange(T)
    chunk = (token - starts).div(size, rounding_mode="floor")
    same = (starts[:, :, None] == starts[:, None]) & (chunk[:, :, None] == chunk[:, None])
    return (same & (token[:, None] >= token))[:, None]


@pytest.mark.parametrize("size", [1, 3, 4, 11, 12])
@pytest.mark.parametrize("batch", ["whole", "packed", "left", "right"])
def test_chunks(size, batch):
    """A token attends to its own chunk of its own document; padding is no part of a chunk."""
    torch.manual_seed(0)
    T, starts, kept, options = 12, torch.zeros(2, 12, dtype=torch.int64), torch.ones(2, 12, dtype=torch.bool), {}
    if batch == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 16])  # the second document is split at the end of the row
        starts[0, 5:], starts[1, 4:] = 5, 4
    elif batch != "whole":
        starts[1], kept[1, :5] = 5, False
        if batch == "right":
            starts, kept = starts * 0, kept.flip(1)
        options["attention_mask"] = kept.long()
    q, k, v = (torch.randn(2, T, heads, 8) for heads in (4, 2, 2))
    want = naive(q, k, v, chunks_seen(T, size, starts), 0.3)
    got = attention(q, k, v, chunked(2, T, size, **options), scale=0.3)
    torch.testing.assert_close(got[kept], want[kept])


def test_images_in_chunks():
    """Their tokens attend to later tokens of the same image, but not beyond the chunk."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 8) for heads in (4, 2, 2))
    until = torch.tensor([[0, 1, 6, 6, 6, 6, 6, 7, 8, 9, 10, 11]])
    chunk, key = torch.arange(12) // 5, torch.arange(12)
    visible = (key <= until[0, :, None]) & (chunk[:, None] == chunk)
    got = attention(q, k, v, chunked(1, 12, 5, visible_until=until), scale=0.3)
    torch.testing.assert_close(got, naive(q, k, v, visible, 0.3))


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_in_chunks_in_any_pieces_equals_one_pass(size, padded):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 8) for heads in (4, 2, 2))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options = {"attention_mask": mask} if padded else {}
    want = attention(q, k, v, chunked(2, 7, size, **options), scale=0.3)
    for pieces in ([1] * 7, [4, 1, 2], [3, 4]):
        cache, got = DecodeCache(7), []
        for parts in zip(*(x.split(pieces, 1) for x in (q, k, v)), strict=True):
            T, end = parts[0].shape[1], cache.length + parts[0].shape[1]
            part = {"attention_mask": mask[:, :end]} if padded else {}
            layout = chunked(2, T, size, cache=cache, **part)
            got.append(attention(parts[0], *cache.extend(0, *parts[1:]), layout, scale=0.3))
            cache.length = end
        kept = mask.bool() if padded else slice(None)
        torch.testing.assert_close(torch.cat(got, 1)[kept], want[kept])


def test_a_token_reads_no_keys_before_its_chunk_could_begin(monkeypatch):
    read = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr("liger_models.layers.attention_backends.F.scaled_dot_product_attention", read)
    cache = DecodeCache()
    x = torch.randn(1, 100, 2, 8)
    cache.extend(0, x, x)
    cache.length = 100
    attention(x[:, :1], *cache.extend(0, x[:, :1], x[:, :1]), chunked(1, 1, 30, cache=cache), scale=0.3)
    assert read.call_args.args[1].shape[2] == 30


@pytest.mark.parametrize(("T", "size"), [(12, 4), (12, 5), (1, 4), (7, 8)])
def test_segments_of_chunks(T, size):
    got = Segments.of_chunks(2, T, size, torch.device("cpu"))
    lengths = [len(part) for row in range(2) for part in torch.arange(T).split(size)]
    assert got.lengths == got.cu_seqlens.diff().tolist() == lengths
    assert got.max_seqlen == size


def test_segments_of_runs():
    numbers = torch.tensor([[0, 0, 0, 1, 2, 2], [2, 2, 5, 5, 5, 5]])
    for most in (5, 8):
        got = Segments.of_runs(numbers, most, 4)
        assert got.cu_seqlens.tolist() == [0, 3, 4, 6, 8] + [12] * (most - 4)


def test_the_segments_of_packed_chunks_are_those_of_the_mask(monkeypatch):
    monkeypatch.setattr("liger_models.layers.batch.takes_segments", lambda *_: True)
    bounds = torch.tensor([0, 5, 5, 16, 40])
    layout = chunked(2, 24, 4, cu_seqlens=bounds, dtype=torch.bfloat16)
    numbers = layout.documents + 100 * torch.arange(2)[:, None]  # a document does not continue in the next row
    want = Segments.of(numbers.flatten()).cu_seqlens
    got = layout.masks[None].segments
    assert got.cu_seqlens[: len(want)].tolist() == want.tolist()
    assert (got.cu_seqlens[len(want) :] == 48).all()
    assert chunked(2, 24, 4, dtype=torch.bfloat16).masks[None].segments.lengths == [4] * 12


def test_chunks_of_equal_lengths_are_rows_of_one_call(monkeypatch):
    """As on GPUs: the kernel for plainly causal attention computes the chunks of all rows, and a shorter last one."""
    torch.manual_seed(0)
    sdpa = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr("liger_models.layers.attention_backends.F.scaled_dot_product_attention", sdpa)
    inputs = [torch.randn(1, 14, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    layout = chunked(1, 14, 4)
    segments = Segments.of_chunks(1, 14, 4, torch.device("cpu"))
    got = _segments(AttentionCall(*inputs, layout, 0.3, None, None, 0.0, None, Mask(segments=segments)))
    assert [call.args[0].shape for call in sdpa.call_args_list] == [(3, 4, 4, 8), (1, 4, 2, 8)]
    want = attention(*inputs, layout, scale=0.3)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy))


def test_dropout_only_in_training():
    torch.manual_seed(0)
    layer = LigerAttention(16, 2, 2, 8, layer=0, dropout=0.5)
    x, s = torch.randn(1, 8, 16), sequence(1, 8)
    assert not torch.equal(layer(x, s), layer(x, s))
    layer.eval()
    assert torch.equal(layer(x, s), layer(x, s))


def test_head_counts():
    with pytest.raises(ValueError, match=r"num_heads \(6\) must be a multiple of num_kv_heads \(4\)"):
        LigerAttention(16, 6, 4, 8, layer=0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": 600}, {"softcap": 20.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("H", "G", "D", "V"), [(6, 2, 128, 128), (4, 4, 192, 128), (4, 2, 100, 100), (4, 1, 256, 256)])
def test_documents_that_continue_others_on_gpus(H, G, D, V, options):
    """By variable-length attention, or with sinks, softcaps or in fp32 by flex_attention."""
    lengths, parents = [255, 257, 300, 13, 100, 300, 1, 40], torch.tensor([-1, 0, 0, 0, -1, 4, 4, -1])
    bounds, options = torch.tensor([0, *lengths]).cumsum(0), dict(options)
    N, window, generator = int(bounds[-1]), options.get("window"), torch.Generator().manual_seed(0)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(H, generator=generator)
    shapes = [(H, D), (G, D), (G, V), (H, V)]
    inputs = [torch.randn(1, N, *shape, generator=generator).bfloat16() for shape in shapes]

    def run(device, dtype):
        *leaves, dy = (x.to(device, dtype).requires_grad_() for x in inputs)
        more = {name: x.to(device, dtype) if torch.is_tensor(x) else x for name, x in options.items()}
        needed = "softcap" in options or "sinks" in options
        layout = BatchLayout.build(
            (1, N), torch.device(device), {}, windows={window: needed}, cu_seqlens=bounds, parents=parents, dtype=dtype
        )
        y = attention(*leaves, layout, scale=D**-0.5, **more)
        assert (layout.masks[window].copies is not None) == (dtype == torch.bfloat16 and not needed)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    exact = run("cpu", torch.float64)
    for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float32, 2e-3)):  # flex_attention multiplies in tf32
        for x, want in zip(run("cuda", dtype), exact, strict=True):
            assert relative_error(x.cpu().double(), want) <= limit


@pytest.mark.gpu
def test_cudnn_runs_where_nothing_but_causality_is_asked():
    from torch.profiler import ProfilerActivity, profile

    q, k = (torch.randn(1, 1024, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2))
    s = BatchLayout.build((1, 1024), torch.device("cuda"), {"default": RotaryEmbedding(128)})
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        attention(q, k, k, s, scale=0.1).sum().backward()
    names = {event.key for event in trace.key_averages()}
    assert any("cudnn_attention" in name for name in names), names


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", [None, [0, 1024, 4096]], ids=str)
def test_shared_heads_have_no_scores_in_memory(dtype, bounds):
    """Of a long sequence."""
    T, H, G, D = 4096, 8, 2, 64
    q, k, v = (torch.randn(1, T, h, D, device="cuda", dtype=dtype, requires_grad=True) for h in (H, G, G))
    bounds = None if bounds is None else torch.tensor(bounds, device="cuda")
    s = BatchLayout.build((1, T), torch.device("cuda"), {}, windows={None: False}, cu_seqlens=bounds)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, s, scale=0.1).sum().backward()
    assert H * T * T * dtype.itemsize >= MOST_SCORES
    assert torch.cuda.max_memory_allocated() - before < H * T * T  # a byte of each


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize(
    ("window", "softcap", "bounds"),
    [(100, None, None), (None, 20.0, None), (100, 20.0, None), (100, None, [0, 170, 171, 600]), (None, None, [0, 300])],
)
def test_flex_attention_against_the_formula(dtype, H, G, D, window, softcap, bounds):
    torch.manual_seed(0)
    T = 600
    q, k, v = (torch.randn(2, T, h, D, device="cuda", dtype=dtype, requires_grad=True) for h in (H, G, G))
    dy = torch.randn(2, T, H, D, device="cuda", dtype=dtype)
    s = BatchLayout.build(
        (2, T), torch.device("cuda"), {}, windows={window: softcap is not None},
        cu_seqlens=None if bounds is None else torch.tensor(bounds, device="cuda"),
    )  # fmt: skip
    assert s.masks[window].block is not None
    assert_close_to_formula(q, k, v, dy, s, window, softcap)


@pytest.mark.compile
@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 160, 256])
def test_flex_attention_in_a_graph(D):
    q, k = (torch.randn(1, 600, h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2))
    s = BatchLayout.build((1, 600), q.device, {}, windows={100: True})
    dy, results = torch.randn_like(q), []
    for function in (attention, torch.compile(attention, fullgraph=True)):
        y = function(q, k, k, s, scale=0.1, window=100, softcap=20.0)
        results.append([y, *torch.autograd.grad(y, (q, k), dy)])
    for eager, compiled in zip(*results, strict=True):
        assert (eager - compiled).norm() <= 1e-2 * eager.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "G", "D"), [(4, 4, 64), (8, 2, 128), (4, 1, 256), (4, 2, 12)])
@pytest.mark.parametrize(("window", "bounds"), [(100, None), (100, [0, 170, 171, 600]), (None, [0, 300, 300, 1200])])
def test_half_precision_within_segments(H, G, D, window, bounds):
    torch.manual_seed(0)
    T = 600
    q, k, v = (torch.randn(2, T, h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (H, G, G))
    dy = torch.randn(2, T, H, D, device="cuda", dtype=torch.bfloat16)
    s = BatchLayout.build(
        (2, T), torch.device("cuda"), {}, windows={window: False}, dtype=torch.bfloat16,
        cu_seqlens=None if bounds is None else torch.tensor(bounds, device="cuda"),
    )  # fmt: skip
    assert s.masks[window].segments is not None
    assert_close_to_formula(q, k, v, dy, s, window, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "size"), [(600, 200), (4096, 1024), (600, 7), (600, 129)])
@pytest.mark.parametrize("batch", ["whole", "packed", "padded"])
def test_chunks_on_gpus(dtype, T, size, batch):
    """In one call for chunks of equal lengths, in the variable-length kernel, and in flex_attention."""
    torch.manual_seed(0)
    options = {"cu_seqlens": torch.tensor([0, 170, 171, T + 100], device="cuda")} if batch == "packed" else {}
    if batch == "padded":
        options = {"attention_mask": torch.ones(2, T, dtype=torch.int64, device="cuda")}
        options["attention_mask"][1, :77] = 0
    q, k, v = (torch.randn(2, T, h, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    dy = torch.randn(2, T, 4, 64, device="cuda", dtype=dtype)
    s = BatchLayout.build((2, T), q.device, {}, dtype=dtype, chunks=[size], **options).chunks[size]
    assert (s.masks[None].segments is not None) == (dtype == torch.bfloat16 and batch != "padded")
    if batch == "padded":  # what padding gets is nobody's business
        dy[1, :77] = 0
        q.data[1, :77] = k.data[1, :77] = v.data[1, :77] = 0
    assert_close_to_formula(q, k, v, dy, s, None, None)


def assert_close_to_formula(q, k, v, dy, s, window, softcap):
    T, D = q.shape[1], q.shape[3]
    out = attention(q, k, v, s, scale=D**-0.5, window=window, softcap=softcap)
    got = [out, *torch.autograd.grad(out, (q, k, v), dy)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    documents = None if s.documents is None else s.documents.cpu()
    out = naive(*wide, sees(T, window or T, documents).to(q.device), D**-0.5, softcap)
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    limit = 2e-2 if q.dtype == torch.bfloat16 else 1e-5
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("window", "bounds"), [(100, None), (100, [0, 170, 171, 600]), (None, [0, 300, 300, 600])])
def test_heads_that_no_kernel_for_segments_takes(device, window, bounds):
    """The mask was made for the embeddings' dtype, and heads turn out to be in fp32, as a block of a user's may."""
    q, k, v = (torch.randn(1, 600, 2, 16, device=device, requires_grad=True) for _ in range(3))
    dy = torch.randn_like(q)
    bounds = None if bounds is None else torch.tensor(bounds, device=device)
    s = BatchLayout.build((1, 600), torch.device(device), {}, windows={window: False}, cu_seqlens=bounds)
    s.masks[window] = Mask(segments=Segments.of_rows(1, 600, bounds, torch.device(device)))
    assert_close_to_formula(q, k, v, dy, s, window, None)


@pytest.mark.cases(9)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [12, 72, 80])
@pytest.mark.parametrize("sizes", [[600], [64] * 4 + [5, 5, 64], [1, 300, 17, 17, 129]], ids=str)
def test_segments_against_the_formula(device, dtype, D, sizes):
    torch.manual_seed(0)
    numbers = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
    s = BatchLayout.bidirectional(numbers[None], {}, numbers)
    N = sum(sizes)
    q, k, v = (torch.randn(1, N, 4, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    dy = torch.randn(1, N, 4, D, device=device, dtype=dtype)
    out = attention(q, k, v, s, scale=0.3)
    got = [out, *torch.autograd.grad(out, (q, k, v), dy)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = naive(*wide, numbers[:, None] == numbers, 0.3)
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.cases(6)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize(("T", "sizes"), [(90, [40, 8, 40, 8]), (375, [88, 88, 12]), (320, [160, 160])], ids=str)
def test_segments_of_parts_against_the_formula(device, dtype, recurring, T, sizes):
    """Queries that see the same parts of the keys stand anywhere in a row."""
    generator = torch.Generator().manual_seed(T)
    T, *sizes = (
        n * 8 if device == "cuda" else n for n in (T, *sizes)
    )  # in one kernel for all, or in calls of their own
    rows = torch.tensor([[1] * len(sizes), [0] * (len(sizes) - 1) + [1], [1] + [0] * (len(sizes) - 1)]).bool()
    visible = rows[torch.randint(3, (2, T), generator=generator)].to(device)
    visible[1] = True
    part = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
    segments = Segments.of_parts(visible, part, recurring)
    s = BatchLayout(torch.arange(T, device=device)[None], {}, masks={None: Mask(segments=segments)}, causal=False)
    q, k, v = (
        torch.randn(2, n, heads, 80, generator=generator).to(device, dtype).requires_grad_()
        for n, heads in ((T, 4), (sum(sizes), 2), (sum(sizes), 2))
    )
    dy = torch.randn(2, T, 4, 80, generator=generator).to(device, dtype)
    out = attention(q, k, v, s, scale=0.1)
    got = [out, *torch.autograd.grad(out, (q, k, v), dy)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = naive(*wide, visible[:, None, :, part], 0.1)
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.compile
@pytest.mark.parametrize("kernel", [False, True])
def test_layouts_with_any_number_of_segments_are_one_graph(monkeypatch, kernel):
    """The kernel for segments, which needs a GPU, is replaced. Without it, the graph has a mask."""
    if kernel:
        monkeypatch.setattr("liger_models.layers.batch.takes_segments", lambda *_: True)
        monkeypatch.setattr("liger_models.layers.attention_backends.takes_segments", lambda *_: True)
        monkeypatch.setattr("liger_models.layers.attention_backends._varlen", lambda call, q, *_: q * call.scale)
    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for sizes in ([5, 6], [7, 9, 3], [20], [4] * 7):
        numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        layout = BatchLayout.bidirectional(numbers[None], {}, numbers)
        q, k = torch.randn(1, sum(sizes), 4, 64), torch.randn(1, sum(sizes), 2, 64)
        got = compiled(q, k, k, layout, scale=0.1)
        torch.testing.assert_close(got, attention(q, k, k, layout, scale=0.1))
    assert counter.frame_count <= 2  # the second time sizes become variables


@pytest.mark.compile
@pytest.mark.gpu
def test_segments_of_any_lengths_are_one_graph():
    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for sizes in ([5, 6], [7, 9, 3], [2000], [4] * 7, [1100, 1200, 5], [300]):
        numbers = torch.arange(len(sizes), device="cuda").repeat_interleave(torch.tensor(sizes, device="cuda"))
        s = BatchLayout.bidirectional(numbers[None], {}, numbers)
        q = torch.randn(1, sum(sizes), 2, 64, device="cuda", dtype=torch.bfloat16)
        out = compiled(q, q, q, s, scale=0.1)
        assert (out - attention(q, q, q, s, scale=0.1)).norm() <= 1e-2 * out.norm()
    assert counter.frame_count <= 2  # the second time sizes become variables


class SharedProjection(BaseAttention):
    """An attention layer that defines only what every derived class must define: one projection for q, k and v."""

    def __init__(self):
        super().__init__(2, layer=0, scale=0.3, rotary=None)
        self.proj, self.o_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def _add_norm(self, norm, x, residual, layout):
        normed, residual = add_norm(norm, x, residual)
        return self._attend(self.proj(normed), layout), residual

    def _qkv(self, projected, layout):
        heads = projected.unflatten(-1, (2, 8))
        return heads, heads, heads


@pytest.mark.parametrize("policy", ["none", "full"])
def test_an_attention_layer_with_its_own_projection(policy):
    torch.manual_seed(0)
    layer, x = SharedProjection(), torch.randn(2, 6, 8, requires_grad=True)
    layer.set_policy(policy)
    y, _ = layer.add_norm(None, None, x, sequence(2, 6))
    heads = layer.proj(x).unflatten(-1, (2, 8))
    want = layer.o_proj(naive(heads, heads, heads, torch.ones(6, 6, dtype=torch.bool).tril(), 0.3).flatten(2))
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("base", [LigerAttention, LigerGatedConv])
def test_a_forward_of_a_derived_class_is_called(base, policy):
    class Scaled(base):
        def forward(self, x, layout):
            return 3 * super().forward(x, layout)

    def build(layer_class):
        torch.manual_seed(0)
        layer = layer_class(8, 2, 1, 4, layer=0, rotary=None) if base is LigerAttention else layer_class(8, 3, layer=0)
        layer.set_policy(policy)
        return layer

    norm, x, layout = LigerRMSNorm(8), torch.randn(2, 6, 8), sequence(2, 6)
    plain, scaled = build(base), build(Scaled)
    want, _ = plain.add_norm(norm, None, x, layout)
    y, _ = scaled.add_norm(norm, None, x, layout)
    torch.testing.assert_close(y, 3 * want)
    pairs = (y, scaled), (3 * want, plain)
    gradients = [torch.autograd.grad(out.sum(), [*layer.parameters()]) for out, layer in pairs]
    torch.testing.assert_close(*gradients)


def test_a_projection_that_nothing_knows_how_to_shard_is_refused():
    layer, group = SharedProjection(), Group("none", 2, 0)
    assert not layer.can_shard(2)
    with pytest.raises(ValueError, match="apply_tp: SharedProjection must define shard"):
        layer.shard(group)
    with pytest.raises(ValueError, match="apply_cp: SharedProjection must define shard_tokens"):
        layer.shard_tokens(group)


class DoubledNorm(LigerRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def _replace(layer):
    layer.q_norm = DoubledNorm(layer.q_norm.hidden_size)


def _replace_by_layer_norm(layer):
    layer.k_norm = nn.LayerNorm(layer.k_norm.hidden_size)


def _prune_and_train(layer):
    prune.l1_unstructured(layer.q_norm, "weight", amount=0.5)
    with torch.no_grad():
        layer.q_norm.weight_orig.mul_(3)


CHANGES = {
    "hook": lambda layer: layer.k_norm.register_forward_hook(lambda module, args, out: 2 * out),
    "replaced": _replace,
    "layer-norm": _replace_by_layer_norm,
    "pruned": _prune_and_train,
    "constants": lambda layer: setattr(layer.k_norm, "eps", 0.5),
}


@pytest.mark.parametrize("whole_projection", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_norms_of_queries_and_keys_that_changed_are_called(change, whole_projection, backend):
    torch.manual_seed(0)
    layer = LigerQKNormAttention(8, 2, 1, 4, layer=0, norm=LigerRMSNorm, whole_projection=whole_projection, rotary=None)
    change(layer)
    layer.to(backend)
    x = torch.randn(2, 6, 8, device=backend)
    y = layer(x, BatchLayout.build((2, 6), x.device, {}))
    q, k, v = layer.qkv_proj(x).split([8, 4, 4], -1)
    q, k, v = (heads.unflatten(-1, (-1, 4)) for heads in (q, k, v))
    if whole_projection:
        q, k = layer.q_norm(q.flatten(2)).view(q.shape), layer.k_norm(k.flatten(2)).view(k.shape)
    else:
        q, k = layer.q_norm(q), layer.k_norm(k)
    heads = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(y, layer.o_proj(heads.transpose(1, 2).flatten(2)))


def test_norms_of_queries_and_keys_that_would_not_be_called_are_refused():
    class Doubled(LigerRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class Precise(LigerRMSNorm):
        def __init__(self, width):
            super().__init__(width, eps=1e-12)

    for norm in (Doubled, nn.LayerNorm):
        with pytest.raises(ValueError, match=rf"must return a LigerRMSNorm with its own.*, got {norm.__name__}"):
            LigerQKNormAttention(8, 2, 1, 4, layer=0, norm=norm)
    assert LigerQKNormAttention(8, 2, 1, 4, layer=0, norm=Precise).q_norm.eps == 1e-12
