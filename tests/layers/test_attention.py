import math

import pytest
import torch

from liger_models.layers.attention import LigerAttention, attention
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.sequence import DecodeCache, Sequence


def sequence(B, T, **options):
    return Sequence.build((B, T), torch.device("cpu"), RotaryEmbedding(8), **options)


def naive(q, k, v, visible, scale):
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
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


@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_in_any_pieces_equals_one_pass(H, G, padded):
    torch.manual_seed(0)
    layer = LigerAttention(16, H, G, 8, layer=0)
    x = torch.randn(2, 7, 16)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]) if padded else None
    want = layer(x, sequence(2, 7, attention_mask=mask))
    for pieces in ([1] * 7, [4, 1, 2], [3, 4]):
        cache, got = DecodeCache(7), []
        for piece in x.split(pieces, 1):
            end = cache.length + piece.shape[1]
            part = None if mask is None else mask[:, :end]
            got.append(layer(piece, sequence(2, piece.shape[1], cache=cache, attention_mask=part)))
            cache.length = end
        torch.testing.assert_close(torch.cat(got, 1), want)


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
def test_cudnn_runs_where_nothing_but_causality_is_asked():
    from torch.profiler import ProfilerActivity, profile

    q, k = (torch.randn(1, 1024, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2))
    s = Sequence.build((1, 1024), torch.device("cuda"), RotaryEmbedding(128))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        attention(q, k, k, s, scale=0.1).sum().backward()
    names = {event.key for event in trace.key_averages()}
    assert any("cudnn_attention" in name for name in names), names
