import pytest
import torch

from liger_models.kernels.attention import decode_attention as module
from liger_models.kernels.attention.decode_attention import (
    GROUP_ROWS,
    SharedKeys,
    decode_attention,
    decode_attention_reference,
)

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes

# (H, G, D), and V if values have another width: shared keys, one key for all heads, a key for each head, odd numbers
SHAPES = [(4, 2, 16), (6, 1, 24), (2, 2, 32), (10, 2, 40)]
NARROW_SHAPES = [(4, 2, 40, 16), (6, 1, 24, 40)]
LATENT_SHAPES = [(6, 1, 40, 32), (3, 1, 24, 16), (20, 2, 28, 12)]
GPU_SHAPES = [(24, 8, 128), (32, 8, 64), (8, 1, 256), (8, 2, 512), (64, 8, 64), (71, 1, 64), (16, 16, 80)]
GPU_LATENT_SHAPES = [(128, 1, 576, 512), (16, 1, 576, 512), (20, 1, 576, 512), (32, 1, 320, 256)]
LENGTHS = [1, 45, 16, 64, 0, 17]


def make(shape, dtype, device, lengths=LENGTHS, page=16, latent=False):
    """Rows of these lengths, whose pages are in any order among others; what no row sees is NaN."""
    (H, G, D, V), B = (*shape, shape[2])[:4], len(lengths)
    count = -(-max(lengths) // page)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(B * count + 3, generator=generator)[: B * count].view(B, count)
    pages = torch.full((2, B * count + 3, page, G, max(D, V)), float("nan"), dtype=torch.float64)
    for row, length in zip(table, lengths, strict=True):
        for place in range(length):
            pages[:, row[place // page], place % page] = torch.randn(
                2, G, max(D, V), generator=generator, dtype=torch.float64
            )
    keys, values = (x[..., :width].contiguous() for x, width in zip(pages.to(device, dtype), (D, V), strict=True))
    if latent:
        values = keys[..., :V]
    numbers = table.int().to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    return draw(B, H, D, dtype=dtype, device=device), keys, values, *numbers


def check(shape, dtype, device, *, sinks=False, lengths=LENGTHS, page=16, latent=False, groups=None, **options):
    q, keys, values, table, lengths = make(shape, dtype, device, lengths, page, latent)
    shared = None if groups is None else share(table, lengths, groups, page)
    extra = {"sinks": draw(shape[0], dtype=dtype, device=device)} if sinks else {}
    options = {"scale": 0.3, **options}
    rows = lengths > 0  # what a row without tokens gets is nobody's business
    got = decode_attention(q, keys, values, table, lengths, shared, **options, **extra)[rows]
    plain = decode_attention_reference(q, keys, values, table, lengths, **options, **extra)[rows]
    inputs = (*(wide(x) for x in (q, keys, values)), table.cpu(), lengths.cpu())
    exact = decode_attention_reference(*inputs, **options, **{name: wide(x) for name, x in extra.items()})[rows.cpu()]
    assert got.dtype == dtype
    error, theirs = ((wide(x) - exact).norm() / exact.norm() for x in (got, plain))
    # The kernel adds the products of q and k one after the other, so the errors of the D sums are a random walk, and
    # the error of a score is some 0.2 · scale · D roundings.
    rounding = max(2.4e-7, 2e-8 * shape[2] ** 0.5, 0.25 * options["scale"] * shape[2] * 2**-23 if latent else 0.0)
    assert error <= 1.5 * theirs + max(0.1 * torch.finfo(dtype).eps, rounding)


@pytest.mark.cases(6)
@pytest.mark.parametrize("shape", SHAPES + NARROW_SHAPES, ids=str)
def test_matches_fp64(backend, shape, poisoned_empty):
    for dtype in dtypes(backend):
        check(shape, dtype, backend)


@pytest.mark.cases(6)
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("shape", LATENT_SHAPES, ids=str)
def test_values_that_are_the_first_columns_of_the_keys(backend, shape, options, poisoned_empty):
    for dtype in dtypes(backend):
        check(shape, dtype, backend, latent=True, **options)


def test_columns_of_keys_are_not_copied(kernel_device, monkeypatch):
    """A step's values would be a copy of all pages of a layer."""
    q, keys, values, table, lengths = make(LATENT_SHAPES[0], torch.float32, kernel_device, latent=True)
    want = decode_attention(q, keys, values.contiguous(), table, lengths, scale=0.3)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else pytest.fail("copied"))
    got = decode_attention(q, keys, values, table, lengths, scale=0.3)
    torch.testing.assert_close(got[lengths > 0], want[lengths > 0])


def test_the_reference_is_attention():
    """PyTorch's attention of each row alone to the keys that the table names is the same."""
    q, keys, values, table, lengths = make((4, 2, 16), torch.float64, "cpu")
    got = decode_attention(q, keys, values, table, lengths, scale=0.3)
    for row, length in enumerate(lengths.tolist()):
        if length:
            k, v = (x[table[row].long()].flatten(0, 1)[:length].repeat_interleave(2, 1) for x in (keys, values))
            want = (q[row, :, None] * 0.3 @ k.permute(1, 2, 0)).softmax(-1) @ v.transpose(0, 1)
            torch.testing.assert_close(got[row], want[:, 0])
    unused = table.new_full((len(table), 3), 10**9)  # pages that no row has reached are not read
    again = decode_attention(q, keys, values, torch.cat([table, unused], 1), lengths, scale=0.3)
    assert torch.equal(again[lengths > 0], got[lengths > 0])


@pytest.mark.cases(8)
@pytest.mark.parametrize("window", [1, 5, 16, 30, 1000])
def test_windows(backend, window, poisoned_empty):
    check(SHAPES[0], torch.float32, backend, window=window)
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, backend)
    got, whole = (decode_attention(q, keys, values, table, lengths, scale=0.3, window=w) for w in (window, None))
    assert torch.equal(got[0], whole[0])
    assert torch.allclose(got[3], whole[3]) == (window == 1000)


@pytest.mark.cases(6)
@pytest.mark.parametrize("chunk", [1, 5, 16, 45, 64, 1000])
def test_chunks(backend, chunk, poisoned_empty):
    """A token sees the last chunk of its row, which is a window of as many tokens."""
    check(SHAPES[0], torch.float32, backend, chunk=chunk)
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, backend)
    got = decode_attention(q, keys, values, table, lengths, scale=0.3, chunk=chunk)
    for row, length in enumerate(lengths.tolist()):
        part = slice(row, row + 1)
        if length:
            options = {"scale": 0.3, "window": (length - 1) % chunk + 1}
            want = decode_attention(q[part], keys, values, table[part], lengths[part], **options)
            torch.testing.assert_close(got[part], want)


def share(table, lengths, groups, page):
    """Let the rows of each group (rows, pages) share their first pages."""
    count = -(-len(lengths) // 2)
    lines, counts = torch.full((count, GROUP_ROWS + 1), -1), torch.zeros(len(lengths))
    lines[:, -1] = 0
    for line, (members, pages) in zip(lines, groups, strict=False):
        line[: len(members)] = torch.tensor(members)
        line[-1] = counts[members] = pages * page
        for member in members[1:]:
            table[member, :pages] = table[members[0], :pages]
    return SharedKeys(*(x.to(table.device, torch.int32) for x in (lines, counts)))


SHARED_LENGTHS = [70, 33, 100, 49, 1, 64, 65, 90, 34, 50, 120, 40]
GROUPS = [([0, 2, 3, 5, 6, 7, 9, 10], 3), ([11, 8], 1)]


@pytest.mark.cases(6)
@pytest.mark.parametrize("options", [{}, {"softcap": 0.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, NARROW_SHAPES[0], (20, 1, 24)], ids=str)
def test_keys_that_rows_share(backend, shape, options, poisoned_empty):
    for dtype in dtypes(backend):
        check(shape, dtype, backend, lengths=SHARED_LENGTHS, groups=GROUPS, **options)


def test_groups_that_change_nothing(kernel_device, poisoned_empty):
    """With a window, chunks or values that are columns of the keys, and for empty groups."""
    for options in ({"window": 20}, {"chunk": 16}):
        check(SHAPES[0], torch.float32, kernel_device, lengths=SHARED_LENGTHS, groups=GROUPS, **options)
    check(LATENT_SHAPES[0], torch.float32, kernel_device, lengths=SHARED_LENGTHS, groups=GROUPS, latent=True)
    check(SHAPES[0], torch.float32, kernel_device, lengths=SHARED_LENGTHS, groups=[])


def test_shared_keys_are_read_from_the_first_row_of_a_group(kernel_device):
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, kernel_device, SHARED_LENGTHS)
    shared = share(table, lengths, GROUPS, 16)
    want = decode_attention(q, keys, values, table, lengths, shared, scale=0.3)
    table[[2, 3, 5, 6, 7, 9, 10], :3] = 10**9
    table[8, 0] = 10**9
    got = decode_attention(q, keys, values, table, lengths, shared, scale=0.3)
    assert torch.equal(got, want)


def many_groups():
    """The lengths of 64 rows, and full and partial groups of them with the number of pages that each group shares."""
    lengths = torch.randint(330, 700, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [([*range(start, start + GROUP_ROWS)], 1 + start % 5) for start in range(0, 40, GROUP_ROWS)]
    return lengths, [*groups, ([41, 50, 45], 4), ([60, 63], 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24, 8, 128), (32, 8, 64), (8, 1, 256), (71, 1, 64), (16, 16, 80)], ids=str)
def test_keys_that_rows_share_on_gpu(shape):
    lengths, groups = many_groups()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        options = {"lengths": lengths, "page": 64, "groups": groups, "scale": shape[2] ** -0.5}
        check(shape, dtype, "cuda", **options)
        check(shape, dtype, "cuda", **options, sinks=True, softcap=30.0)


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": 4, "window": 3}], ids=str)
def test_a_chunk_and_a_window_exclude_each_other(options):
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match="chunk must be at least 1, and window None, got"):
        decode_attention(q, keys, values, table, lengths, scale=0.3, **options)


@pytest.mark.cases(6)
@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"softcap": 30.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_softcaps_and_sinks(backend, options, window, poisoned_empty):
    for dtype in dtypes(backend):
        check(SHAPES[1], dtype, backend, window=window, **options)


def test_more_heads_than_one_program_takes(backend, monkeypatch, poisoned_empty):
    monkeypatch.setattr(module, "MOST_QUERIES", 16 * 16)
    check((40, 2, 16), torch.float32, backend, sinks=True)


def test_many_parts_and_larger_pages(backend, monkeypatch, poisoned_empty):
    """More programs than there are keys, and steps within a page."""
    monkeypatch.setattr(module, "num_programs", lambda x, per_sm: 1000)
    monkeypatch.setattr(module, "STEP_BYTES", 16 * 16 * 4)
    check(SHAPES[0], torch.float32, backend, page=64, lengths=[200, 64, 1, 130])
    check(SHAPES[0], torch.float32, backend, page=64, lengths=[200, 64, 1, 130], window=70)


def test_large_scores(backend):
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, backend, [45, 16])
    arguments = 100 * q, 100 * keys, values, table, lengths
    out = decode_attention(*arguments, scale=0.3)
    torch.testing.assert_close(out, decode_attention_reference(*arguments, scale=0.3))


def test_strided_queries_and_tables(backend):
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, backend)
    want = decode_attention(q, keys, values, table, lengths, scale=0.3)[lengths > 0]
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    wider = torch.cat([table, table], 1)[:, : table.shape[1]]
    assert torch.equal(decode_attention(turned, keys, values, wider, lengths, scale=0.3)[lengths > 0], want)


def test_no_rows(backend):
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, backend)
    assert decode_attention(q[:0], keys, values, table[:0], lengths[:0], scale=1.0).shape == (0, *q.shape[1:])


def test_opcheck(kernel_device):
    q, keys, values, table, lengths = make((2, 1, 16), torch.float32, kernel_device, [3, 17])
    arguments = q, keys.nan_to_num(), values.nan_to_num(), table, lengths, 0.3, 20, None, 5.0, q[0, :, 0].contiguous()
    opcheck(torch.ops.liger_models.decode_attention, (*arguments, None, None))
    q, keys, values, table, lengths = make((2, 1, 16), torch.float32, kernel_device, [19, 17])
    shared = share(table, lengths, [([0, 1], 1)], 16)
    arguments = q, keys.nan_to_num(), values.nan_to_num(), table, lengths, 0.3, None, None, None, None, *shared
    opcheck(torch.ops.liger_models.decode_attention, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, poisoned_empty):
    for lengths in ([1000], [3, 700, 64, 65, 1500, 1, 128, 2000] * 3):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check(shape, dtype, "cuda", scale=shape[2] ** -0.5, page=64, lengths=lengths)
        check(shape, torch.bfloat16, "cuda", scale=shape[2] ** -0.5, page=64, lengths=lengths, window=300, softcap=30.0)
        check(shape, torch.bfloat16, "cuda", scale=shape[2] ** -0.5, page=64, lengths=lengths, sinks=True)
        check(shape, torch.bfloat16, "cuda", scale=shape[2] ** -0.5, page=64, lengths=lengths, chunk=300)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_LATENT_SHAPES, ids=str)
def test_real_sizes_of_latents(shape, poisoned_empty):
    for lengths in ([1000], [3, 700, 64, 65, 1500, 1, 128, 2000] * 3):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check(shape, dtype, "cuda", scale=0.1, page=64, lengths=lengths, latent=True)


@pytest.mark.gpu
def test_pages_beyond_two_billion_elements():
    G, D, page = 8, 128, 64
    count = 2**31 // (page * G * D) + 8
    keys = torch.zeros(count, page, G, D, dtype=torch.bfloat16, device="cuda")
    keys[-1] = 1
    table = torch.full((1, 4), count - 1, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([200], dtype=torch.int32, device="cuda")
    out = decode_attention(keys.new_ones(1, 32, D), keys, keys, table, lengths, scale=0.1)
    assert torch.equal(out, torch.ones_like(out))


def test_bad_arguments():
    q, keys, values, table, lengths = make((4, 2, 16), torch.float32, "cpu")
    good = {"q": q, "keys": keys, "values": values, "table": table, "lengths": lengths, "scale": 1.0}
    for bad, error, message in (
        ({"keys": keys[..., :8]}, ValueError, r"q must be \[B, H, D\], keys \[pages, P, G, D\]"),
        ({"q": q[:, :3]}, ValueError, r"H a multiple of G, got \[6, 3, 16\]"),
        ({"keys": keys[:, :8], "values": values[:, :8]}, ValueError, "at least 16, got 8. Make other pages"),
        ({"keys": keys[:, :3], "values": values[:, :3]}, ValueError, "a power of two of tokens"),
        ({"table": table[:2]}, ValueError, r"table must be \[6, N\] and lengths \[6\], got \[2, 4\]"),
        ({"lengths": lengths[:2]}, ValueError, r"and \[2\]"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"sinks": q[0, :2, 0]}, ValueError, r"sinks must be \[4\], got \[2\]"),
        ({"table": table.long()}, TypeError, "must be int32, got torch.int64 and torch.int32"),
        ({"keys": keys.half()}, TypeError, "must have one dtype, got torch.float32, torch.float16"),
        ({"q": q.long()}, TypeError, "q must be a floating-point tensor"),
    ):
        with pytest.raises(error, match=message):
            decode_attention(**{**good, **bad})
    wide_heads = torch.zeros(1, 16, 1, 577)
    with pytest.raises(ValueError, match="heads must be 1 to 576 wide, got 577"):
        decode_attention(wide_heads[0, :1], wide_heads, wide_heads, table[:1], lengths[:1], scale=1.0)
