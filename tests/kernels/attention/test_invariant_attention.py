import pytest
import torch

from liger_models.kernels.attention.causal_attention import causal_attention_reference
from liger_models.kernels.attention.invariant_attention import invariant_attention, invariant_attention_reference
from liger_models.kernels.dispatch import use_triton

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes

# (H, G, D), and V if values have another width: shared keys, one key for all heads, a key for each head, odd numbers
SHAPES = [(4, 2, 16), (6, 1, 24), (2, 2, 32), (10, 2, 40), (4, 2, 24, 16), (4, 4, 16, 40)]
GPU_SHAPES = [
    (24, 8, 128),
    (32, 8, 64),
    (8, 1, 256),
    (8, 2, 512),
    (64, 8, 64),
    (71, 1, 64),
    (16, 16, 80),
    (16, 16, 192, 128),
]
LENGTHS = [1, 45, 16, 3, 70]


def make(shape, dtype, device, lengths=LENGTHS):
    """q, k, v of packed documents, and the first and the last key of each token."""
    H, G, D, V = (*shape, shape[2])[:4]
    N = sum(lengths)
    sizes = enumerate(((H, D), (G, D), (G, V)))
    q, k, v = (draw(N, *size, dtype=dtype, device=device, seed=n) for n, size in sizes)
    counts = torch.tensor(lengths)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return q, k, v, first.int().to(device), torch.arange(N, dtype=torch.int32, device=device)


def options_of(shape, dtype, device, sinks=False, **options):
    extra = {"sinks": draw(shape[0], dtype=dtype, device=device)} if sinks else {}
    return {"scale": 0.3, **options, **extra}


OPTIONS = [
    {},
    {"window": 1},
    {"window": 20},
    {"softcap": 0.5},
    {"sinks": True},
    {"window": 33, "softcap": 30.0, "sinks": True},
]


def check(shape, dtype, device, lengths=LENGTHS, **options):
    """Against fp64; and a document alone, a part of one after cached keys, and pages give the same bits."""
    inputs, options = make(shape, dtype, device, lengths), options_of(shape, dtype, device, **options)
    q, k, v, first, last = inputs
    got = invariant_attention(*inputs, **options)
    plain = invariant_attention_reference(*inputs, **options)
    wide_options = {name: wide(x) if name == "sinks" else x for name, x in options.items()}
    exact = invariant_attention_reference(*(wide(x) for x in inputs), **wide_options)
    assert got.dtype == dtype
    error, theirs = ((wide(x) - exact).norm() / exact.norm() for x in (got, plain))
    # The kernel adds the products of q and k one after the other, and then those with v.
    rounding = max(2.4e-7, 2e-8 * (shape[2] ** 0.5 + max(lengths) ** 0.5))
    assert error <= 1.5 * theirs + max(0.1 * torch.finfo(dtype).eps, rounding)

    page, start = 16, 0
    for length in lengths:
        own = slice(start, start + length)
        mine = [x[own] for x in (q, k, v)] + [first[own] - start, last[own] - start]
        assert torch.equal(invariant_attention(*mine, **options), got[own]), "a document alone"
        part = slice(length // 2, length)
        chunk = [mine[0][part], mine[1], mine[2], mine[3][part], mine[4][part]]
        assert torch.equal(invariant_attention(*chunk, **options), got[own][part]), "a chunk after cached keys"
        start += length
    count = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * count + 3, generator=torch.Generator().manual_seed(0))
    table = table[: len(lengths) * count].view(-1, count).to(device)
    room = len(lengths) * count + 3, page
    pages = [torch.full((*room, *x.shape[1:]), float("nan"), dtype=dtype, device=device) for x in (k, v)]
    ends = torch.tensor(lengths).cumsum(0)
    for row, length, end in zip(table, lengths, ends, strict=True):
        place = torch.arange(length, device=device)
        for x, own in zip((k, v), pages, strict=True):
            own[row[place // page], place % page] = x[end - length : end]
    newest = (ends - 1).to(device)
    decoded = invariant_attention(
        q[newest], *pages, torch.zeros_like(first[newest]), last[newest] - first[newest], table=table.int(), **options
    )
    assert torch.equal(decoded, got[newest]), "pages"


@pytest.mark.usefixtures("sums_without_order")
@pytest.mark.cases(5)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_gives_the_same_bits(backend, shape, poisoned_empty):
    plain = not use_triton(torch.zeros(0, device=backend))
    for dtype in dtypes(backend) + [torch.bfloat16] * plain:
        check(shape, dtype, backend)


@pytest.mark.usefixtures("sums_without_order")
@pytest.mark.cases(5)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_options(backend, options, poisoned_empty):
    check(SHAPES[0], torch.float32, backend, **options)


def test_more_heads_than_a_product_has_rows(backend):
    check((70, 1, 16), torch.float32, backend, lengths=[3, 40])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_shapes(shape):
    for dtype in dtypes("cuda"):
        for options in OPTIONS:
            check(shape, dtype, "cuda", lengths=[1, 300, 77, 1000], **options)


def test_the_reference_is_attention():
    q, k, v, first, last = make((4, 2, 16), torch.float64, "cpu")
    for window in (None, 9):
        got = invariant_attention(q, k, v, first, last, scale=0.3, window=window)
        want = causal_attention_reference(*(x[None] for x in (q, k, v)), first[None], scale=0.3, window=window)
        torch.testing.assert_close(got, want[0])


@pytest.mark.compile
def test_opcheck(kernel_device):
    q, k, v, first, last = make((4, 2, 16), torch.float32, kernel_device, [2, 3])
    sinks = draw(4, device=kernel_device)
    opcheck(torch.ops.liger_models.invariant_attention, (q, k, v, first, last, 0.3, 2, 5.0, sinks, None))


def test_refuses():
    q, k, v, first, last = make((4, 2, 16), torch.float32, "cpu", [2, 3])
    for wrong, message in (
        ((q[:, :3], k, v, first, last), r"with H a multiple of G, got \[5, 3, 16\]"),
        ((q, k, v, first[:2], last), r"first and last must be \[5\] and table \[5, M\], got \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            invariant_attention(*wrong, scale=1.0)
    with pytest.raises(ValueError, match=r"window must be at least 1, got 0"):
        invariant_attention(q, k, v, first, last, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"sinks must be \[4\], got \[3\]"):
        invariant_attention(q, k, v, first, last, scale=1.0, sinks=torch.zeros(3))
    with pytest.raises(TypeError, match=r"must be int32, got torch.int64"):
        invariant_attention(q, k, v, first.long(), last, scale=1.0)
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32, torch.float16"):
        invariant_attention(q, k.half(), v, first, last, scale=1.0)
