import math

import pytest
import torch

from liger_models.kernels.attention import causal_attention as module
from liger_models.kernels.attention import workspace
from liger_models.kernels.attention.causal_attention import causal_attention, causal_attention_reference

from ..oracle import assert_close_to_truth, opcheck
from ..rope.test_rope import dtypes

# (B, T, S, H, G, D), and V if values have another width: fewer tokens than a tile; several queries for a key; tokens
# before the queries. The first rows of a causal mask, in which dP − δ cancels, would be all that five tokens have.
SHAPES = [(1, 13, 13, 1, 1, 16), (2, 36, 36, 2, 1, 24), (1, 17, 50, 2, 2, 16)]
NARROW_SHAPES = [(1, 13, 13, 1, 1, 24, 8), (2, 36, 36, 2, 1, 16, 40), (1, 17, 50, 2, 1, 40, 24)]
GPU_SHAPES = [
    (1, 1000, 1000, 8, 2, 512),  # Gemma 4 E4B
    (1, 1024, 1024, 16, 2, 512),  # 26B-A4B
    (2, 300, 420, 4, 4, 320),
    (1, 700, 700, 8, 1, 512),  # E2B
    (1, 1000, 1000, 16, 16, 192, 128),  # DeepSeek V2 Lite
    (1, 60, 1000, 16, 1, 576, 512),  # and a few of its tokens after a cache of latents
]


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles, and several launches, for few tokens."""
    for name in ("LARGE", "SMALL"):
        tiles = getattr(module, name)._replace(block_m=16, block_n=32, block_d=16, columns=16, step=16)
        monkeypatch.setattr(module, name, tiles)
    for name, value in {"PARTS": 2, "SUMS_PROGRAMS": 3}.items():
        monkeypatch.setattr(module, name, value)
    for name, value in {"PAIRS": 2048, "LEAST_ROWS": 16}.items():
        monkeypatch.setattr(workspace, name, value)


def make(shape, dtype, device):
    B, T, S, H, G, D, V = (*shape, *shape[5:])[:7]
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, T, H, D), (B, S, G, D), (B, S, G, V), (B, T, H, V)]
    *inputs, upstream = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return inputs, [upstream]


def on(function, documents=None, window=None, scale=0.3):
    def call(q, k, v):
        return function(q, k, v, None if documents is None else documents.to(q.device), scale=scale, window=window)

    return call


def check(shape, dtype, device, **options):
    inputs, upstream = make(shape, dtype, device)
    assert_close_to_truth(
        on(causal_attention, **options), on(causal_attention_reference, **options), inputs, upstream, factor=2
    )


def documents_of(kind, B, S):
    """Packed documents, padding on either side, and a document that goes on after a hole."""
    place = torch.arange(S).expand(B, -1)
    return {
        "packed": (place >= S // 3).long() + (place >= S // 3 + 1) + (place >= S - 5),
        "left": -(place < S // 2).long(),
        "right": -(place >= S - 3).long(),
        "hole": -((place > 3) & (place < S - 4)).long(),
    }[kind]


@pytest.mark.cases(6)
@pytest.mark.parametrize("shape", SHAPES + NARROW_SHAPES, ids=str)
def test_matches_fp64(backend, shape, small_tiles, poisoned_empty):
    for dtype in dtypes(backend):
        check(shape, dtype, backend)


@pytest.mark.parametrize("window", [2, 20, 100])
def test_windows(backend, window, small_tiles, poisoned_empty):
    check(SHAPES[2], torch.float32, backend, window=window)


@pytest.mark.parametrize(("kind", "window"), [("packed", None), ("left", 9), ("right", None), ("hole", None)])
def test_documents(backend, kind, window, small_tiles, poisoned_empty):
    B, _, S, *_ = SHAPES[2]
    check(SHAPES[2], torch.float32, backend, documents=documents_of(kind, B, S), window=window)


def test_each_row_has_its_documents(backend, small_tiles):
    documents = torch.cat([documents_of("packed", 1, 36), documents_of("left", 1, 36)])
    check(SHAPES[1], torch.float32, backend, documents=documents)


def test_the_real_tiles(backend, poisoned_empty):
    check((1, 70, 70, 2, 1, 32), torch.float16, backend)


def test_strided_inputs_and_gradients(backend, small_tiles):
    (q, k, v), (upstream,) = make(SHAPES[1], torch.float32, backend)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    functions = on(causal_attention), on(causal_attention_reference)
    assert_close_to_truth(*functions, turned, [upstream.transpose(0, 1).contiguous().transpose(0, 1)], factor=2)
    assert_close_to_truth(*functions, [q, k, v], [upstream[..., :1].expand_as(upstream)], factor=2)
    shared = [x[:, :1].expand_as(x) for x in (k, v)]  # with a stride of 0
    torch.testing.assert_close(causal_attention(q, *shared), causal_attention(q, *(x.contiguous() for x in shared)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("shape", [(1, 40, 40, 2, 1, 10), (2, 19, 50, 1, 1, 7), (1, 50, 50, 6, 2, 16)], ids=str)
def test_several_launches_and_heads_of_any_width(backend, shape, small_tiles, poisoned_empty, monkeypatch):
    """Rows of such heads don't begin at a multiple of 16 bytes, which loads of whole tiles need."""
    monkeypatch.setattr(workspace, "PAIRS", 256)
    monkeypatch.setattr(workspace, "LEAST_ROWS", 1)
    B, T, S, *_ = shape
    for matrices in (1, 2):
        _, parts = workspace.parts_of_queries(T, S, 16, 32, matrices)
        assert len(parts) > 1
        assert sum(tiles for _, tiles, _ in parts) == -(-T // 16)
    for dtype in dtypes(backend):
        check(shape, dtype, backend)
        check(shape, dtype, backend, documents=documents_of("packed", B, S), window=25)


def test_launches_of_some_heads_of_a_key(backend, small_tiles, poisoned_empty, monkeypatch):
    """The backward takes two of the three query heads of each KV head, and then the third."""
    monkeypatch.setattr(workspace, "PAIRS", 20000)
    assert workspace.parts_of_queries(90, 90, 16, 32, 2)[0] == 4
    for dtype in dtypes(backend):
        check((1, 90, 90, 6, 2, 16), dtype, backend)
        check((1, 90, 90, 6, 2, 16), dtype, backend, documents=documents_of("left", 1, 90))


def test_no_tokens(backend):
    q, k, v = (
        torch.zeros(size, device=backend).requires_grad_() for size in ((0, 3, 2, 8), (0, 3, 1, 8), (0, 3, 1, 8))
    )
    causal_attention(q, k, v).sum().backward()
    assert q.grad.shape == q.shape


def test_large_scores(backend, small_tiles):
    (q, k, v), _ = make(SHAPES[1], torch.float32, backend)
    out = causal_attention(100 * q, 100 * k, v)
    torch.testing.assert_close(out, causal_attention_reference(100 * q, 100 * k, v, scale=24**-0.5))


@pytest.mark.cases(4)
@pytest.mark.parametrize("sizes", [
    (-60, -90, 62, -62, 66, 1, -200, 90), (-62, -66, -300, -90, -66, -70), (0, -170, 62, -170, 62, -66),
    (150, 62, -62, 30),
], ids=str)  # fmt: skip
def test_scores_of_very_different_tiles(backend, sizes, small_tiles, poisoned_empty):
    """``sizes`` are the largest scores of tiles of keys, times log2 e, on both sides of what needs a factor."""
    block = 128
    q, k, v = make((1, 20, block * len(sizes), 1, 1, 16), torch.float32, backend)[0]
    largest = torch.tensor(sizes, device=backend).repeat_interleave(block)[None, :, None, None] * math.log(2)
    q[..., :1], k[..., :1] = 1, largest - k[..., :1].abs()
    for dtype in dtypes(backend):
        inputs, upstream = [x.to(dtype) for x in (q, k, v)], [v[:, :20].to(dtype)]
        functions = (on(function, scale=1.0) for function in (causal_attention, causal_attention_reference))
        assert_close_to_truth(*functions, inputs, upstream, factor=2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, poisoned_empty):
    B, _, S, *_ = shape
    for dtype in (torch.bfloat16, torch.float16):
        check(shape, dtype, "cuda", scale=0.06)
    check(shape, torch.bfloat16, "cuda", scale=0.06, documents=documents_of("packed", B, S))
    check(shape, torch.bfloat16, "cuda", scale=0.06, documents=documents_of("left", B, S), window=200)


@pytest.mark.gpu
def test_fp32_on_gpu():
    check((1, 150, 150, 4, 2, 512), torch.float32, "cuda", scale=0.06)


@pytest.mark.gpu
def test_many_keys(monkeypatch):
    """Beyond the keys of one workspace, and beyond 2^31 elements of it counted over all heads."""
    monkeypatch.setattr(workspace, "PAIRS", 2**18)
    monkeypatch.setattr(workspace, "LEAST_ROWS", 256)
    check((1, 2100, 2100, 4, 2, 512), torch.bfloat16, "cuda", scale=0.06)


def test_opcheck(backend, small_tiles):
    (q, k, v), _ = make((1, 7, 7, 1, 1, 16), torch.float32, backend)
    documents = documents_of("packed", 1, 7).to(backend)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    opcheck(torch.ops.liger_models.causal_attention, (*inputs, documents, 0.3, 3))


def test_errors():
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 2, 8)
    for bad, message in (
        ((q, k, k[:, :4]), r"must be \[B, T, H, D\], k \[B, S, G, D\] and v \[B, S, G, V\]"),
        ((q[:, :, :3], k, k), r"H a multiple of G, got \[2, 5, 3, 8\]"),
        ((q, k[:, :4], k[:, :4]), "S >= T"),
        ((q, k, k, torch.zeros(2, 4, dtype=torch.long)), r"documents must be \[2, 5\], got \[2, 4\]"),
        ((q.new_zeros(1, 1, 1, 577),) * 3, "heads must be 1 to 576 wide, got 577"),
    ):
        with pytest.raises(ValueError, match=message):
            causal_attention(*bad)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        causal_attention(q, k, k, window=0)
    with pytest.raises(TypeError, match="q, k and v must have one dtype"):
        causal_attention(q, k.half(), k)
    with pytest.raises(TypeError, match="documents must be integers"):
        causal_attention(q, k, k, torch.zeros(2, 5))
