import math

import pytest
import torch

from liger_models.kernels.attention import decode_attention as decode_module
from liger_models.kernels.attention import scaled_pages as module
from liger_models.kernels.attention.decode_attention import (
    SharedKeys,
    decode_attention,
    decode_attention_reference,
)
from liger_models.kernels.attention.scaled_pages import ScaledPages
from liger_models.kernels.attention.write_pages import write_pages
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE, SMALLEST_SCALE

from ..oracle import wide
from ..rope.test_rope import draw, dtypes
from .test_decode_attention import GROUPS, LENGTHS, SHARED_LENGTHS, make, many_groups, share

# (H, G, D), and V if values have another width
SHAPES = [(4, 2, 16), (6, 1, 24), (10, 2, 40), (4, 2, 40, 16), (6, 1, 24, 40)]
GPU_SHAPES = [(24, 8, 128), (32, 8, 64), (8, 1, 256), (8, 2, 512), (71, 1, 64), (16, 16, 80), (16, 2, 192, 128)]


def quantize(pages):
    """Quantize pages [pages, P, G, D]. Some tokens are smaller than others by powers of two, and NaN stays NaN."""
    exponents = torch.arange(pages.shape[0] * pages.shape[1], device=pages.device) * 5 % 7 - 6
    pages = pages.float() * 2.0 ** exponents.view(pages.shape[:2])[..., None, None]
    scales = 2 ** (pages.abs().amax(-1) / 448).log2().ceil()
    return ScaledPages((pages / scales[..., None]).to(DTYPE), scales.transpose(1, 2).contiguous())


def check(shape, dtype, device, *, sinks=False, lengths=LENGTHS, page=16, groups=None, spread=1.0, **options):
    """Compare with attention in fp64 to the dequantized pages."""
    q, keys, values, table, lengths = make(shape, torch.float32, device, lengths, page)
    q, keys, values = (spread * q).to(dtype), quantize(keys), quantize(values)
    shared = None if groups is None else share(table, lengths, groups, page)
    extra = {"sinks": draw(shape[0], dtype=dtype, device=device)} if sinks else {}
    options = {"scale": 0.1 / spread, **options}
    rows = lengths > 0
    got = decode_attention(q, keys, values, table, lengths, shared, **options, **extra)[rows]
    plain = decode_attention_reference(q, keys, values, table, lengths, **options, **extra)[rows]
    pages = (wide(x.codes.float()) * wide(x.scales).transpose(1, 2)[..., None] for x in (keys, values))
    inputs = (wide(q), *pages, table.cpu(), lengths.cpu())
    exact = decode_attention_reference(*inputs, **options, **{name: wide(x) for name, x in extra.items()})[rows.cpu()]
    assert got.dtype == plain.dtype == dtype
    error, theirs = ((wide(x) - exact).norm() / exact.norm() for x in (got, plain))
    # The reference computes in fp32, but kernels for half precision round weights to fp16.
    rounding = max(2.4e-7, 2e-8 * shape[2] ** 0.5) if dtype == torch.float32 else 2**-11
    assert error <= 1.5 * theirs + max(0.1 * torch.finfo(dtype).eps, rounding)


@pytest.mark.cases(8)
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.5, "sinks": True}, {"chunk": 16}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matches_fp64(backend, shape, options, poisoned_empty, monkeypatch):
    """With rows whose keys are divided, and with many rows, whose keys are not."""
    for rows_per_sm in (10**6, 0):
        monkeypatch.setattr(decode_module, "ROWS_PER_SM", rows_per_sm)
        for dtype in dtypes(backend):
            check(shape, dtype, backend, **options)


@pytest.mark.cases(6)
@pytest.mark.parametrize("options", [{}, {"softcap": 0.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (20, 1, 24)], ids=str)
def test_keys_that_rows_share(backend, shape, options, poisoned_empty):
    for dtype in dtypes(backend):
        check(shape, dtype, backend, lengths=SHARED_LENGTHS, groups=GROUPS, **options)


def test_many_parts_and_larger_pages(backend, monkeypatch, poisoned_empty):
    monkeypatch.setattr(decode_module, "num_programs", lambda x, per_sm: 1000)
    monkeypatch.setattr(decode_module, "SCALED_STEP_BYTES", 16 * 16)
    for options in ({}, {"window": 70}):
        check(SHAPES[0], torch.float32, backend, page=64, lengths=[200, 64, 1, 130], **options)


@pytest.mark.parametrize("spread", [1e-30, 1e30])
def test_queries_outside_of_the_range_of_fp16(backend, spread):
    """bf16 represents numbers for which the products in fp16 have no room."""
    options = {"scale": 0.1 / spread}
    q, keys, values, table, lengths = make((4, 2, 16), torch.float32, backend)
    q, keys, values = (spread * q).bfloat16(), quantize(keys), quantize(values)
    rows = lengths > 0
    got = decode_attention(q, keys, values, table, lengths, **options)[rows].float()
    want = decode_attention_reference(q.float(), keys, values, table, lengths, **options)[rows]
    assert (got - want).norm() / want.norm() < torch.finfo(torch.bfloat16).eps


def test_values_outside_of_the_range_of_fp16(backend):
    """Tokens whose values are zeros or as large as fp32 allows, and queries of zeros."""
    q, keys, values, table, lengths = make((4, 2, 16), torch.float32, backend, [20, 33])
    keys, values = quantize(keys), quantize(values)
    values.scales.copy_(torch.where(values.scales.isnan(), values.scales, 2.0**100))
    q[0, 0] = 0
    for codes in (values.codes, keys.codes):
        codes.view(torch.uint8)[table[1].long()] = 0
    for scales in (values.scales, keys.scales):
        scales[table[1].long()] = 2.0**-39
    for dtype in (torch.float32, torch.bfloat16):
        got = decode_attention(q.to(dtype), keys, values, table, lengths, scale=0.1).double()
        want = decode_attention_reference(q.to(dtype).double(), keys, values, table, lengths, scale=0.1)
        assert (got - want).norm() / want.norm() < max(torch.finfo(dtype).eps, 2.4e-7)
        assert not got[1].any()


def make_pages(device, dtype=torch.float32, G=2, D=6, V=None, seed=0):
    V = D if V is None else V
    pages = [quantize(draw(5, 16, G, width, device=device, seed=seed)) for width in (D, V)]
    packed = draw(7, G, 3 * max(D, V), dtype=dtype, device=device, seed=seed)
    slots = torch.tensor([3, -1, 79, 0, 16, -1, 40], device=device)
    return *pages, packed[..., :D], packed[..., D : D + V], slots


def bits(pages):
    return pages.codes.view(torch.uint8), pages.scales


@pytest.mark.parametrize("sizes", [(2, 6), (1, 2), (3, 40), (2, 6, 12), (1, 70, 4), (5, 8)], ids=str)
def test_writing_quantizes_each_head(backend, sizes, monkeypatch):
    """The codes and scales are those of each head alone, bit for bit, and other slots keep theirs."""
    monkeypatch.setattr(module, "BLOCK", 32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        keys, values, k, v, slots = make_pages(backend, dtype, *sizes)
        k[0, 0] = 0
        k[2] *= 1e4
        v[3] *= 1e-4
        wanted = [ScaledPages(*(x.clone() for x in pages)) for pages in (keys, values)]
        largest = torch.tensor(448.0, device=backend)
        for pages, new in zip(wanted, (k, v), strict=True):
            for token, slot in enumerate(slots.tolist()):
                for head in range(sizes[0] if slot >= 0 else 0):
                    x = new[token, head].float()
                    least = max((x.abs().max() / largest).item(), SMALLEST_SCALE)
                    scale = 2.0 ** math.ceil(math.log2(least))
                    pages.scales[slot // 16, head, slot % 16] = scale
                    pages.codes[slot // 16, slot % 16, head] = (x / scale).to(DTYPE)
        write_pages(keys, values, k, v, slots)
        for got, want in zip((keys, values), wanted, strict=True):
            for x, y in zip(bits(got), bits(want), strict=True):
                assert torch.equal(x, y)
            assert got.codes.float().isfinite().all()


def test_an_element_is_rounded_to_four_bits(backend):
    keys, values, k, v, slots = make_pages(backend, D=64)
    write_pages(keys, values, k, v, slots)
    for pages, new in ((keys, k), (values, v)):
        got = pages.select(torch.arange(5, device=backend), torch.float32).flatten(0, 1)[slots[slots >= 0]]
        want = new[slots >= 0]
        step = torch.maximum(want.abs() / 16, want.abs().amax(-1, keepdim=True) / 224 * 2**-10)
        assert ((got - want).abs() <= step * 1.0001).all()
        assert not torch.equal(got, want)


def test_heads_in_any_order_and_no_tokens(backend):
    keys, values, k, v, slots = make_pages(backend)
    wanted = [ScaledPages(*(x.clone() for x in pages)) for pages in (keys, values)]
    write_pages(*wanted, k, v, slots)
    write_pages(keys, values, k.transpose(0, 2).contiguous().transpose(0, 2), v, slots)
    write_pages(keys, values, k[:0], v[:0], slots[:0])
    for got, want in zip((keys, values), wanted, strict=True):
        for x, y in zip(bits(got), bits(want), strict=True):
            assert torch.equal(x, y)


def test_opcheck(kernel_device):
    """Without the test of the schema, which would compute differences of float8 numbers."""
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    keys, values, k, v, slots = make_pages(kernel_device)
    write = torch.ops.liger_models.write_scaled_pages
    torch.library.opcheck(write, (*keys, *values, k, v, slots), test_utils=tests)
    q, keys, values, table, lengths = make((2, 1, 16), torch.float32, kernel_device, [19, 17])
    shared = share(table, lengths, [([0, 1], 1)], 16)
    pages = (quantize(draw(*x.shape, device=kernel_device)) for x in (keys, values))
    (keys, key_scales), (values, value_scales) = pages
    options = 0.3, None, None, None, None, *shared, key_scales, value_scales
    attend = torch.ops.liger_models.decode_attention
    torch.library.opcheck(attend, (q, keys, values, table, lengths, *options), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, poisoned_empty):
    # One row, rows whose keys are divided, and so many rows that their keys are not divided.
    for lengths in ([1000], [3, 700, 64, 65, 1500, 1, 128, 2000] * 3, [3, 700, 64, 65] * 100):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check(shape, dtype, "cuda", page=64, lengths=lengths)
        for options in ({"window": 300, "softcap": 30.0}, {"sinks": True}, {"chunk": 300}):
            check(shape, torch.bfloat16, "cuda", page=64, lengths=lengths, **options)
        check(shape, torch.bfloat16, "cuda", page=64, lengths=lengths, spread=1e20)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24, 8, 128), (32, 8, 64), (8, 1, 256), (71, 1, 64), (16, 16, 80)], ids=str)
def test_keys_that_rows_share_on_gpu(shape):
    lengths, groups = many_groups()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for options in ({}, {"sinks": True, "softcap": 30.0}):
            check(shape, dtype, "cuda", lengths=lengths, page=64, groups=groups, **options)


@pytest.mark.gpu
def test_pages_beyond_two_billion_elements():
    G, D, page = 8, 128, 64
    count = 2**31 // (page * G * D) + 8
    pages = ScaledPages(
        torch.zeros(count, page, G, D, dtype=DTYPE, device="cuda"),
        torch.zeros(count, G, page, dtype=torch.float32, device="cuda"),
    )
    k = torch.full((page, G, D), 0.5, dtype=torch.bfloat16, device="cuda")
    write_pages(pages, pages, k, k, torch.arange((count - 1) * page, count * page, device="cuda"))
    table = torch.full((1, 4), count - 1, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([200], dtype=torch.int32, device="cuda")
    out = decode_attention(k.new_ones(1, 32, D), pages, pages, table, lengths, scale=0.1)
    assert torch.equal(out, torch.full_like(out, 0.5))


def test_bad_arguments(monkeypatch):
    q, keys, values, table, lengths = make((4, 2, 16), torch.float32, "cpu")
    keys, values, plain = quantize(keys), quantize(values), values
    good = {"q": q, "keys": keys, "values": values, "table": table, "lengths": lengths, "scale": 1.0}
    small = [ScaledPages(x.codes[:, :8], x.scales[:, :, :8]) for x in (keys, values)]
    for bad, error, message in (
        ({"values": plain}, TypeError, "must both be ScaledPages or both be tensors, got ScaledPages and Tensor"),
        ({"keys": plain}, TypeError, "got Tensor and ScaledPages. Quantize both"),
        ({"keys": keys._replace(codes=plain)}, TypeError, "keys must have codes in .*e4m3fn .* got torch.float32"),
        ({"values": values._replace(scales=values.scales.half())}, TypeError, "scales in torch.float32, got .*float16"),
        ({"keys": keys._replace(scales=keys.scales[:1])}, ValueError, r"and scales \[pages, G, P\], got"),
        ({"keys": small[0], "values": small[1]},
         ValueError, "at least 16, got 8. Make other pages"),
        ({"q": q[:, :3]}, ValueError, r"H a multiple of G, got \[6, 3, 16\]"),
        ({"q": q.long()}, TypeError, "q must be a floating-point tensor"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            decode_attention(**{**good, **bad})

    keys, values, k, v, slots = make_pages("cpu")
    empty = ScaledPages(values.codes[..., :0], values.scales)
    strided = [ScaledPages(x.codes, x.scales.transpose(0, 1).contiguous().transpose(0, 1)) for x in (keys, values)]
    for bad, error, message in (
        ((keys, plain, k, v, slots), TypeError, "write_pages: keys and values must both be ScaledPages"),
        (
            (keys, empty, k, v[..., :0], slots),
            ValueError,
            "values in float8 must have an even number of columns, got 0",
        ),
        ((keys, values, k, v.half(), slots), TypeError, "k and v must have one dtype"),
        ((keys, values, k.long(), v.long(), slots), TypeError, "k must be a floating-point tensor"),
        ((keys, values, k, v, slots.int()), TypeError, "slots must be int64, got .* and torch.int32"),
        ((keys, values, k[:, :1], v, slots), ValueError, r"keys and values must be \[pages, P, G, D\]"),
        ((*strided, k, v, slots), ValueError, "scales must be contiguous, got strides"),
    ):
        with pytest.raises(error, match=message):
            write_pages(*bad)

    monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(module, "converts", lambda device: False)
    with pytest.raises(ValueError, match=r"write_pages: float8 needs a GPU .* 8\.9 or higher, got cpu. Use pages"):
        write_pages(keys, values, k, v, slots)


def test_shared_groups_are_read_once(kernel_device):
    """The kernel for groups reads only the pages of a group's first row."""
    q, keys, values, table, lengths = make(SHAPES[0], torch.float32, kernel_device, SHARED_LENGTHS)
    keys, values = quantize(keys), quantize(values)
    shared = share(table, lengths, GROUPS, 16)
    assert isinstance(shared, SharedKeys)
    want = decode_attention(q, keys, values, table, lengths, shared, scale=0.1)
    table[[2, 3, 5, 6, 7, 9, 10], :3] = 10**9
    table[8, 0] = 10**9
    assert torch.equal(decode_attention(q, keys, values, table, lengths, shared, scale=0.1), want)
