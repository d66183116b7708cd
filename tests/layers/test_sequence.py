import itertools
import sys

import pytest
import torch

from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.layers import kv_cache
from liger_models.layers.batch import BatchLayout
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.masks import (
    BLOCK,
    _block_mask,
    _document_block_mask,
    _parts_block_mask,
    document_mask,
    parts_mask,
    text_mask,
)
from liger_models.layers.patches import ends_of_runs
from liger_models.layers.rope import RotaryEmbedding

CPU = torch.device("cpu")


def packed(bounds=(0, 1, 3), **options):
    return {"cu_seqlens": torch.tensor(bounds), **options}


def build(B, T, **options):
    return BatchLayout.build((B, T), CPU, {"default": RotaryEmbedding(4)}, **options)


def test_plain():
    layout = build(2, 3)
    assert layout.position_ids.tolist() == [[0, 1, 2]]
    assert layout.masks[None].dense is None
    assert layout.shift(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]


def test_packed():
    layout = build(2, 4, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32))
    assert layout.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]  # document 1 is cut by the end of its row
    assert layout.documents.tolist() == [[0, 0, 0, 1], [1, 1, 2, 2]]
    assert layout.shift(torch.arange(8).view(2, 4)).tolist() == [[1, 2, -100, -100], [5, -100, 7, -100]]
    mask = layout.masks[None].dense[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]


def test_documents_that_continue_others():
    bounds, parents = torch.tensor([0, 2, 4, 5, 6]), torch.tensor([-1, 0, 0, -1])
    layout = build(1, 7, cu_seqlens=bounds, parents=parents)  # the last token belongs to no document
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 0]]
    assert layout.masks[None].dense[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1],
    ]  # fmt: skip
    assert layout.shift(torch.arange(7)[None]).tolist() == [[1, -100, 3, -100, -100, -100, -100]]
    windowed = build(1, 7, cu_seqlens=bounds, parents=parents, windows={2: False}).masks[2]
    assert windowed.dense[0, 0].sum(1).tolist() == [1, 2, 2, 2, 2, 1, 1]
    assert windowed.dense[0, 0, 4].tolist() == [False, True, False, False, True, False, False]

    # Bounds after the last token, no tokens, and an empty document of an empty parent at the end of a row.
    assert build(1, 3, **packed([0, 2, 70], parents=torch.tensor([-1, 0]))).position_ids.tolist() == [[0, 1, 2]]
    assert build(1, 0, **packed([0, 0, 0], parents=torch.tensor([-1, 0]))).position_ids.shape == (1, 0)
    layout = build(2, 4, **packed([0, 4, 4, 4, 8], parents=torch.tensor([-1, -1, 1, -1])))
    assert layout.position_ids.tolist() == [[0, 1, 2, 3]] * 2

    # Rows of a batch, an empty document, an empty parent.
    layout = build(2, 4, cu_seqlens=torch.tensor([0, 2, 2, 4, 4, 7, 8]), parents=torch.tensor([-1, 0, 0, -1, 3, -1]))
    assert layout.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert layout.masks[None].dense[:, 0].int().sum(2).tolist() == [[1, 2, 3, 4], [1, 2, 3, 1]]
    assert layout.parents.segments.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert layout.parents.copies.segments.lengths == [2, 4, 3, 1]


def test_empty_documents_are_allowed():
    layout = build(1, 4, cu_seqlens=torch.tensor([0, 2, 2, 4]))
    assert layout.position_ids.tolist() == [[0, 1, 0, 1]]


def test_padding():
    layout = build(1, 4, attention_mask=torch.tensor([[0, 1, 1, 0]]))
    assert layout.position_ids.tolist() == [[0, 1, 2, 3]]
    assert layout.masks[None].dense[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    assert layout.shift(torch.tensor([[4, 5, 6, 7]])).tolist() == [[-100, 6, -100, -100]]
    layout = build(2, 5, attention_mask=torch.tensor([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0]]))
    want = [[-100, -100, -100, 8, -100], [5, -100, -100, -100, -100]]
    assert layout.shift(torch.tensor([[4, 5, 6, 7, 8]] * 2)).tolist() == want
    assert build(1, 2, attention_mask=torch.ones(1, 2, dtype=torch.bool)).masks[None].dense is None


def test_cache():
    cache = DecodeCache(4)
    k = torch.randn(2, 3, 1, 4)
    assert torch.equal(cache.extend(0, k, k)[0], k)
    cache.length = 3
    assert build(2, 1, cache=cache).position_ids.tolist() == [[3]]
    keys, values = cache.extend(0, k[:, :1], 2 * k[:, :1])
    assert torch.equal(keys, torch.cat([k, k[:, :1]], 1))
    assert torch.equal(values[:, 3:], 2 * k[:, :1])
    with pytest.raises(ValueError, match=r"capacity \(4\) must hold all tokens, got 6"):
        cache.extend(0, k, k)
    cache.select(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.extend(0, k[:1, :1].expand(3, 1, 1, 4), k[:1, :1].expand(3, 1, 1, 4))[0][0, :3], k[1])


def test_a_cache_takes_memory_for_its_tokens(monkeypatch):
    """Whatever its capacity; after a quarter more, it holds the same."""
    monkeypatch.setattr(kv_cache, "LEAST_GROWTH", 3)
    k = torch.randn(2, 100, 1, 4)
    for capacity in (sys.maxsize, 10**15, 105):
        cache = DecodeCache(capacity)
        for start, end in ((0, 0), (0, 0), (0, 20), (20, 21), (21, 60), (60, 100)):
            keys, values = cache.extend(0, k[:, start:end], -k[:, start:end])
            cache.advance(end - start)
            assert torch.equal(keys, k[:, :end])
            assert torch.equal(values, -k[:, :end])
            assert cache._layers[0][0].shape[1] <= max(1.25 * end, end + 3)
        assert cache._layers[0][0].shape[1] == min(125, capacity)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 3).long(), "cu_seqlens": torch.tensor([0, 3])},
            "exclude each other, got both",
        ),
        ({"cu_seqlens": torch.tensor([0, 3]), "cache": DecodeCache(4)}, "can't be used with a decode cache"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, r"n \+ 1 >= 2 integers, got \[2\] torch.float32"),
        ({"cu_seqlens": torch.tensor([3])}, r"n \+ 1 >= 2 integers, got \[1\]"),
        ({"cu_seqlens": torch.tensor([False, True])}, r"n \+ 1 >= 2 integers, got \[2\] torch.bool"),
        ({"cu_seqlens": torch.tensor([1, 3])}, "cu_seqlens must start with 0 and not fall"),
        ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "cu_seqlens must start with 0 and not fall"),
        ({"attention_mask": torch.ones(1, 2).long()}, r"attention_mask must be \[1, 3\].*got \[1, 2\]"),
        (
            {"attention_mask": torch.tensor([[0.0, 0.0, -torch.inf]])},
            "must be integers or bool.*float32",
        ),
        ({"position_ids": torch.tensor([0, 1, 0])}, "position_ids must rise along each row, got a restart"),
        ({"position_ids": torch.tensor([[0, 0, 1]])}, "position_ids must rise along each row"),
        (
            {"position_ids": torch.tensor([[0, 1, 0]]), "attention_mask": torch.ones(1, 3).long()},
            "position_ids must rise along each row",
        ),
        ({"parents": torch.tensor([-1])}, "parents needs cu_seqlens, and can't be combined with a decode cache"),
        (packed(parents=[-1, 0]), "parents must be a tensor, got list"),
        (
            packed(parents=torch.tensor([-1, 0]), visible_until=torch.arange(3)[None]),
            "parents can't be combined with tokens that attend to later tokens",
        ),
        (packed(parents=torch.tensor([-1])), r"one integer for each of the 2 documents .* got \[1\] torch.int64"),
        (packed(parents=torch.tensor([-1.0, 0.0])), r"one integer for each of .* got \[2\] torch.float32"),
        (packed(parents=torch.tensor([0, -1])), "document 0 follows in its row, .* got 0. Put the documents"),
        (packed(parents=torch.tensor([-1, 1])), "document 1 follows in its row, .* got 1. Put the documents"),
        (packed(parents=torch.tensor([-1, -2])), "document 1 follows in its row, .* got -2. Put the documents"),
        (packed([0, 1, 2, 3], parents=torch.tensor([-1, 0, 1])), "document 2 follows in its row, .* got 1"),
        (packed([0, 1, 2, 3], parents=torch.tensor([-1, -1, 0])), "document 2 follows in its row, .* got 0"),
        ({"position_ids": torch.arange(4)}, r"position_ids must be \[3\], \[1, 3\] or \[1, 3\], got \[4\]"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        build(1, 3, **options)


def test_a_parent_in_another_row():
    with pytest.raises(ValueError, match="document 1 follows in its row"):
        build(2, 3, cu_seqlens=torch.tensor([0, 2, 4, 6]), parents=torch.tensor([-1, 0, -1]))
    with batch_invariant(), pytest.raises(ValueError, match=r"can't be combined with .* deterministic_forward"):
        build(1, 3, **packed(parents=torch.tensor([-1, 0])))


def test_positions_that_restart_are_allowed_where_something_else_separates():
    restarts = torch.tensor([[0, 1, 0]])
    build(1, 3, position_ids=restarts, cu_seqlens=torch.tensor([0, 2, 3]))
    build(1, 3, position_ids=torch.tensor([[0, 0, 1]]), attention_mask=torch.tensor([[0, 1, 1]]))
    build(1, 3, position_ids=restarts.expand(3, 1, 3))  # time, height and width of image tokens


@pytest.mark.cases(21)
@pytest.mark.parametrize("past", [0, 5, 128])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("kind", ["causal", "packed", "padded"])
def test_block_mask_says_what_the_dense_mask_says(kind, window, past):
    """A block that is left out hides all its pairs, a full one none, and in the others mask_mod decides."""
    B, T, generator = 2, 517, torch.Generator().manual_seed(0)
    S = past + T
    documents = {
        "causal": None,
        "packed": torch.randint(0, 90, (B, S), generator=generator).eq(0).cumsum(1),
        "padded": (torch.arange(S) >= torch.tensor([[0], [200]])).long(),
    }[kind]
    mask = _block_mask(documents, past, window, B, T, CPU)
    q, k = torch.arange(T)[:, None], torch.arange(S)
    dense = (q + past >= k) & (q + past - k < (window or S))
    if documents is not None:
        dense = dense & (documents[:, past:, None] == documents[:, None, :])
    assert_block_mask(mask, dense, exact=kind != "padded")


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_block_mask_of_documents_that_continue_others(window):
    bounds = torch.tensor([0, 200, 240, 300, 700, 701, 900, 901, 1034])
    parents = torch.tensor([-1, 0, 0, 0, -1, -1, 5, 5])
    rows = {"cu_seqlens": torch.tensor([0, 60, 300, 310, 517, 1034]), "parents": torch.tensor([-1, 0, 0, 0, -1])}
    for made in (build(2, 517, **rows), build(1, 1034, cu_seqlens=bounds, parents=parents)):
        (B, T), reach = made.documents.shape, 2000 if window is None else window
        mask = _block_mask(made.documents, 0, window, B, T, CPU, parents=made.parents)
        related = made.documents[:, :, None] == made.documents[:, None]
        related |= made.parents.documents[:, :, None] == made.documents[:, None]
        places = made.parents.places
        dense = torch.ones(T, T, dtype=torch.bool).tril() & related & (places[:, :, None] - places[:, None] < reach)
        assert_block_mask(mask, dense, exact=False)
        built = text_mask(made.documents, 0, window, B, T, CPU, False, parents=made.parents)
        assert torch.equal(built.dense[:, 0], dense)


@pytest.mark.parametrize("past", [0, 100])
@pytest.mark.parametrize("window", [None, 100])
def test_block_mask_of_images_in_a_text(past, window):
    T = 517
    inside = torch.zeros(2, T, dtype=torch.bool)
    for row, start, end in ((0, 10, 266), (0, 300, 301), (1, 120, 136), (1, 250, 517)):
        inside[row, start:end] = True
    until = ends_of_runs(inside)
    q, k = torch.arange(T)[:, None], torch.arange(past + T)
    dense = (until[:, :, None] + past >= k) & (q + past - k < (window or past + T))
    assert_block_mask(_block_mask(None, past, window, 2, T, CPU, until), dense, exact=False)
    made = BatchLayout.build(
        (2, T), CPU, {}, windows={window: False}, visible_until=until, cache=None if past == 0 else cached(past, T)
    )
    assert torch.equal(made.masks[window].dense[:, 0], dense)


def cached(past, new):
    cache = DecodeCache(past + new)
    cache.length = past
    return cache


@pytest.mark.parametrize("sizes", [[517], [64] * 8 + [5], [1, 127, 128, 129, 100, 32], [300, 217]], ids=str)
def test_segments_of_patches(sizes):
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * 3
    segments = BatchLayout.bidirectional(numbers[None], {}, numbers).masks[None].segments
    assert segments.lengths == sizes
    assert segments.cu_seqlens.tolist() == [0, *itertools.accumulate(sizes)]
    assert segments.cu_seqlens.dtype == torch.int32
    dense = numbers[None, :, None] == numbers[None, None, :]
    assert_block_mask(_document_block_mask(numbers[None]), dense, exact=True)
    assert torch.equal(document_mask(numbers[None]).dense[:, 0], dense)


@pytest.mark.parametrize("lengths", [[517], [128, 256, 128], [401, 7] * 3, [5, 300, 30, 100, 82]], ids=str)
@pytest.mark.parametrize("T", [1, 256, 300])
def test_block_mask_of_parts(lengths, T):
    """Tiles of images: a query sees all keys of a part or none."""
    part = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(T)
    visible = torch.rand(2, -(-T // 100), len(lengths), generator=generator).repeat_interleave(100, 1)[:, :T] < 0.5
    dense = visible[:, :, part]
    assert_block_mask(_parts_block_mask(visible, part), dense, exact=True)
    assert torch.equal(parts_mask(visible, part).dense[:, 0], dense)


def assert_block_mask(mask, dense, exact):
    T, S = dense.shape[-2:]
    q, k = torch.arange(T)[:, None], torch.arange(S)
    batch = torch.arange(mask.shape[0])[:, None, None]
    assert torch.equal(mask.mask_mod(batch, torch.tensor(0), q, k).expand(dense.shape), dense)

    queries, keys = -(-T // BLOCK), -(-S // BLOCK)
    listed = torch.zeros(2, mask.shape[0], queries, keys, dtype=torch.int64)
    for kind_of, (count, index) in enumerate(
        ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    ):
        among = torch.arange(keys) < count[:, 0, :, None]
        listed[kind_of].scatter_(2, index[:, 0].long(), among.long())
    assert listed.sum(0).max() == 1
    partial, full = (x.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :T, :S].bool() for x in listed)
    assert dense.expand(partial.shape)[full].all()
    assert not dense.expand(partial.shape)[~full & ~partial].any()
    if exact:  # nothing is listed in vain
        blocks = torch.nn.functional.pad(dense.reshape(-1, T, S), (0, keys * BLOCK - S, 0, queries * BLOCK - T))
        blocks = blocks.view(-1, queries, BLOCK, keys, BLOCK)
        assert torch.equal(listed.sum(0).bool(), blocks.any(4).any(2))
        assert torch.equal(listed[1].bool(), blocks.all(4).all(2))
