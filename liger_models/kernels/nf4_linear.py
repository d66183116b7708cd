"""A linear layer whose frozen weight is stored in 4 bits (NF4, in torchao's layout).

    W = table[code] · scale,   scale = cast(code of the scale / factor) + mean        y = x · Wᵀ + b,   dx = dy · W

W is dequantised in one pass, in the weight's dtype, by the forward and again by the backward, and freed after the
product. It equals torchao's ``get_original_weight`` bit for bit: every step is rounded to the weight's dtype. The
forward of few rows, as in a step of decoding, multiplies numbers of the table with x and each sum over a block with the
block's scale, so only the codes are read::

    y_n = Σ_blocks scale_n · (Σ_block table[code] · x) + b_n

The products table · scale are not rounded there, so y is nearer to the product in real numbers.

    codes      two per byte, the first in the upper half
    scales     one int8 per block of 64 codes
    factors    one per block of at most 256 scales; one mean for all

Saved: only the quantised weight, which exists anyway.

Source: https://arxiv.org/abs/2305.14314.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch_invariance import is_batch_invariant, product
from .checks import check
from .dispatch import LIBRARY, cuda_capability, on_device_of, tl, triton, use_triton
from .overlap import end_previous, start_next
from .row_linear import LowRank, load_B, low_rank_arguments, low_rank_row, store_row, store_rows

NF4_BLOCK, MOST_SCALES = 64, 256
"""Numbers with one scale, and at most so many scales with one factor."""

BLOCK = 1024
NUM_WARPS = 4
"""Bytes of codes that a program reads, and its warps. A thread stores the numbers of the bytes that it has read, so
nothing is exchanged between threads."""

ROWS = 8
ROW_WORDS = 128
ROW_WARPS = 1
NARROW, NARROW_WARPS = 16384, 4
"""Results of a program for a single row of x, words of eight codes of each that a warp reads in a step, and warps. For
less than NARROW results there are few programs, so that more warps share one. One warp alone waits at no barrier."""

MOST_ROWS = 32
"""Up to so many rows of x are multiplied with codes, more with the dense weight."""

TILES = ((16, 32, 2, 2), (32, 64, 2, 2))
"""Tiles of the kernel for several rows, each up to a number of rows of x: that number, the results of a program, the
scales of each result that a step reads, and the warps of a program, each of which has scales of its own."""

PLANES = """{
.reg .b16 a, b, c, d; .reg .b32 p, q, n; .reg .b64 at; .reg .f32 e, f, g, h;
mov.u32 n, %laneid; and.b32 n, n, 3; mad.wide.u32 at, n, 8, $8;
ld.global.nc.b32 p, [at]; ld.global.nc.b32 q, [at+4];
CAST
prmt.b32 n, p, q, 0x7531; prmt.b32 p, p, q, 0x6420;
""" + "".join(
    f"shfl.sync.idx.b32 ${i}, n, {i}, 0x1c1f, -1; shfl.sync.idx.b32 ${i + 4}, p, {i}, 0x1c1f, -1;\n" for i in range(4)
) + "}"  # fmt: skip
CAST = """mov.b32 {a, b}, p; mov.b32 {c, d}, q;
cvt.f32.bf16 e, a; cvt.f32.bf16 f, b; cvt.f32.bf16 g, c; cvt.f32.bf16 h, d;
cvt.rn.f16x2.f32 p, f, e; cvt.rn.f16x2.f32 q, h, g;"""
"""PTX. $0 to $3 are the upper bytes of the table, whose address is $8, and $4 to $7 the lower bytes. A lane gets them
from others, since ptxas would keep what is the same in all lanes in uniform registers, and copy it for each `prmt`. In
float16 the numbers of NF4 are exact, and one instruction converts them to float32."""


def _lookups(code: str, table: list[str], use: Callable[[int], str]) -> str:
    """PTX that looks up eight codes; ``use`` of each half finds the bytes of four numbers in l and h.

    One `prmt` looks up a byte of four numbers in eight entries. For eight numbers that makes 12, and 5 instructions
    for what selects. These run at half rate, so that 2.6 instructions for a number take as long as 5.25 others.
    """
    ptx = f"{{\n.reg .b32 s, m, a, b, h, l, p; .reg .b16 u, v; .reg .f32 f;\nand.b32 s, {code}, 0x77777777;\n"
    ptx += f"shr.u32 m, {code}, 1; lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;\n"
    for half in range(2):
        for to, (t0, t1, t2, t3) in (("h", table[:4]), ("l", table[4:])):
            ptx += f"prmt.b32 a, {t0}, {t1}, s; prmt.b32 b, {t2}, {t3}, s; prmt.b32 {to}, a, b, m;\n"
        ptx += use(half) + ("" if half else "shr.u32 s, s, 16; shr.u32 m, m, 16;\n")
    return ptx + "}"


def _products(half: int) -> str:
    """PTX that adds the products with four x, $10 to $17, to $0. The lower half of a byte is its second number."""
    ptx = ""
    for x, both in ((10 + 4 * half, "0x4051"), (12 + 4 * half, "0x6273")):
        ptx += f"prmt.b32 p, l, h, {both}; mov.b32 {{u, v}}, p;\n"
        first = "mul.f32 $0, f, $10" if x == 10 else f"fma.rn.f32 $0, f, ${x}, $0"
        ptx += f"cvt.f32.f16 f, u; {first};\ncvt.f32.f16 f, v; fma.rn.f32 $0, f, ${x + 1}, $0;\n"
    return ptx


PLANES_BF16 = tl.constexpr(PLANES.replace("CAST", CAST))
PLANES_16 = tl.constexpr(PLANES.replace("CAST", ""))
DOT = tl.constexpr(_lookups("$1", [f"${i}" for i in range(2, 10)], _products))
"""PTX: $0 is the sum of eight numbers of $1 times eight x."""
PAIRS = tl.constexpr(
    _lookups(
        "$4", [f"${i}" for i in range(5, 37, 4)],
        lambda half: f"prmt.b32 ${half}, l, h, 0x7351; prmt.b32 ${2 + half}, l, h, 0x6240;\n",
    )
)  # fmt: skip
"""PTX: $0 and $1 are the first numbers of four bytes, $2 and $3 the second ones."""


@triton.jit
def _planes(table_ptr, PTX: tl.constexpr):
    """The bytes of the table, in eight registers."""
    return tl.inline_asm_elementwise(
        PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l", [table_ptr.to(tl.uint64, bitcast=True)],
        (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
    )  # fmt: skip


@triton.jit
def _scale(scale_ptr, factor_ptr, mean, block, inside, dtype: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr):
    """The scales of these blocks, rounded to dtype, in fp32."""
    code = tl.load(scale_ptr + block, mask=inside, other=0).to(tl.float32)
    factor = tl.load(factor_ptr + block // SCALES_PER_FACTOR, mask=inside, other=1.0).to(tl.float32)
    # Between 7 and 8 significant bits a quotient is never so near to a tie of bfloat16 that division must be exact.
    quotient = code / factor if dtype == tl.bfloat16 else tl.div_rn(code, factor)
    return (quotient.to(dtype).to(tl.float32) + mean).to(dtype).to(tl.float32)


@triton.jit
def _nf4_weight_kernel(
    code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, w_ptr, pieces,
    PAIRS: tl.constexpr, PIECES_PER_SCALE: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr,
    PIECES_PER_MEAN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A piece is PAIRS bytes of codes with one scale, which is read and computed once for the piece."""
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    pairs, numbers = tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    piece = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    inside = piece < pieces
    mask = inside[:, None]
    if PIECES_PER_MEAN:
        mean_ptr += piece // PIECES_PER_MEAN
    mean = tl.load(mean_ptr, mask=inside if PIECES_PER_MEAN else None).to(tl.float32)
    scale = _scale(scale_ptr, factor_ptr, mean, piece // PIECES_PER_SCALE, inside, dtype, SCALES_PER_FACTOR)
    pair = tl.load(code_ptr + piece[:, None] * PAIRS + pairs[None, :], mask=mask, other=0).to(tl.int32)
    first = tl.load(table_ptr + (pair >> 4)).to(tl.float32) * scale[:, None]
    second = tl.load(table_ptr + (pair & 15)).to(tl.float32) * scale[:, None]
    both = tl.interleave(first, second).to(dtype).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + piece[:, None] * (2 * PAIRS) + numbers[None, :], both, mask=mask)


@triton.jit
def _eighths(x, COUNT: tl.constexpr):
    """The columns of x [COUNT, 8]."""
    even, odd = tl.split(tl.reshape(x, [COUNT, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _term(table_ptr, word, x, SHIFT: tl.constexpr):
    return tl.load(table_ptr + ((word >> SHIFT) & 15)).to(tl.float32) * x[None, :]


@triton.jit
def _load_words(word_ptr, row, known, start, words, WORDS: tl.constexpr):
    """The codes of rows [ROWS, 1] from a word on, [ROWS, WORDS]; zeros beyond the last."""
    word = start + tl.arange(0, WORDS)[None, :]
    return tl.load(word_ptr + row * words + word, mask=known & (word < words), other=0, eviction_policy="evict_first")


@triton.jit
def _nf4_row_kernel(
    x_ptr, bias_ptr, word_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, y_ptr, product_ptr, low_ptr, B_ptr,
    N, words, R, WORDS_PER_SCALE: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr, LOW: tl.constexpr, OVERLAPS: tl.constexpr,
    ROWS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """ROWS results; a step reads the codes of SCALES scales of each of their rows, eight in a word."""
    start_next(OVERLAPS)
    WORDS: tl.constexpr = SCALES * WORDS_PER_SCALE
    RUN: tl.constexpr = min(4, WORDS_PER_SCALE)  # words that a thread reads at once, and adds up
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr).to(tl.float32)
    if PTX:
        h0, h1, h2, h3, l0, l1, l2, l3 = _planes(table_ptr, PLANES_BF16 if dtype == tl.bfloat16 else PLANES_16)
    total = tl.zeros([ROWS, SCALES, WORDS_PER_SCALE // RUN], tl.float32)
    blocks = words // WORDS_PER_SCALE
    known = (row < N)[:, None]
    at = row.to(tl.int64)[:, None]
    if RANKS:
        B = load_B(B_ptr, row, N, R, RANKS)
    codes = _load_words(word_ptr, at, known, 0, words, WORDS)
    if LOW != "awaited":
        end_previous(OVERLAPS)
    for start in range(0, blocks, SCALES):
        word = start * WORDS_PER_SCALE + tl.arange(0, WORDS)
        block = start + tl.arange(0, SCALES)
        inside = word < words
        some = known & (block < blocks)[None, :]
        scale = _scale(scale_ptr, factor_ptr, mean, at * blocks + block[None, :], some, dtype, SCALES_PER_FACTOR)
        x = tl.load(x_ptr + 8 * word[:, None] + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0.0)
        x0, x1, x2, x3, x4, x5, x6, x7 = _eighths(x.to(tl.float32), WORDS)
        if PTX:
            part = tl.inline_asm_elementwise(
                DOT, "=&f,r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
                [codes, h0, h1, h2, h3, l0, l1, l2, l3, x0[None, :], x1[None, :], x2[None, :], x3[None, :],
                 x4[None, :], x5[None, :], x6[None, :], x7[None, :]], tl.float32, True, 1,
            )  # fmt: skip
        else:
            part = _term(table_ptr, codes, x0, 4) + _term(table_ptr, codes, x1, 0)
            part += _term(table_ptr, codes, x2, 12) + _term(table_ptr, codes, x3, 8)
            part += _term(table_ptr, codes, x4, 20) + _term(table_ptr, codes, x5, 16)
            part += _term(table_ptr, codes, x6, 28) + _term(table_ptr, codes, x7, 24)
        total += tl.sum(tl.reshape(part, [ROWS, SCALES, WORDS_PER_SCALE // RUN, RUN]), 3) * scale[:, :, None]
        codes = _load_words(word_ptr, at, known, start * WORDS_PER_SCALE + WORDS, words, WORDS)
    y = tl.sum(tl.sum(total, 2), 1)
    if RANKS:
        y += low_rank_row(B, low_ptr, R, RANKS, LOW)
    store_row(y, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)


@triton.jit
def _nf4_rows_kernel(
    pair_ptr, bias_ptr, code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, y_ptr, product_ptr, low_ptr, B_ptr,
    M, N, pairs, R, PAIRS_PER_SCALE: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """ROWS results of each of up to COLUMNS rows of x; a step reads the codes of SCALES scales of each row of W.

    Numbers with even and with odd index are multiplied separately: a byte of codes and a pair of x have one of each.
    """
    start_next(OVERLAPS)
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr).to(tl.float32)
    if PTX:
        h0, h1, h2, h3, l0, l1, l2, l3 = _planes(table_ptr, PLANES_16)
    total = tl.zeros([SCALES, ROWS, COLUMNS], tl.float32)
    blocks = pairs // PAIRS_PER_SCALE
    known = (row < N)[None, :]
    at = row.to(tl.int64)[None, :]
    column = tl.arange(0, COLUMNS)
    for start in range(0, blocks, SCALES):
        block = start + tl.arange(0, SCALES)
        some = (block < blocks)[:, None] & known
        pair = block[:, None] * PAIRS_PER_SCALE + tl.arange(0, PAIRS_PER_SCALE)[None, :]
        codes = tl.load(
            code_ptr + at[:, :, None] * pairs + pair[:, None, :], mask=some[:, :, None], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        there = (block < blocks)[:, None, None] & (column < M)[None, None, :]
        x = tl.load(pair_ptr + column[None, None, :] * pairs + pair[:, :, None], mask=there, other=0)
        scale = _scale(scale_ptr, factor_ptr, mean, at * blocks + block[:, None], some, dtype, SCALES_PER_FACTOR)
        if PTX:
            first, second = tl.inline_asm_elementwise(
                PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [codes, h0, h1, h2, h3, l0, l1, l2, l3],
                (table_ptr.dtype.element_ty, table_ptr.dtype.element_ty), True, 4,
            )  # fmt: skip
        else:
            first = tl.load(table_ptr + (codes >> 4).to(tl.int32))
            second = tl.load(table_ptr + (codes & 15).to(tl.int32))
        even, odd = x.to(tl.int16).to(dtype, bitcast=True), (x >> 16).to(tl.int16).to(dtype, bitcast=True)
        part = tl.dot(second, odd, tl.dot(first, even))
        total += part * scale[:, :, None]
    y = tl.sum(total, 0)
    store_rows(y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def nf4_layout(shape: Sequence[int]) -> list[int]:
    """How a matrix is quantised: rows, columns, codes for each scale, scales for each factor.

    Raises:
        ValueError: its numbers are not a multiple of 64.
    """
    size = math.prod(shape)
    check(
        size % NF4_BLOCK == 0,
        f"quantize_base: weights must have a multiple of {NF4_BLOCK} elements, got {list(shape)}.",
    )
    return [*shape, NF4_BLOCK, math.gcd(size // NF4_BLOCK, MOST_SCALES)]


def scales_per_factor(shape: Sequence[int], block: int, dim: int, per_factor: int) -> int:
    """Successive scales of a slice of a matrix that have the same factor, in each of equal slices.

    Args:
        shape: of the slice: rows, columns.
        block: numbers with one scale. The slice has whole blocks.
        dim: 0 for slices of rows, 1 for slices of columns.
        per_factor: scales of the whole matrix that have the same factor.
    """
    return math.gcd((math.prod(shape) if dim == 0 else shape[1]) // block, per_factor)


def nf4_dense(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Launch the kernel: the weight [rows, columns], rounded to the dtype of the table and then cast to ``dtype``.

    Args:
        packed: codes, scales, factors, mean, table. Several means are those of equal parts of the rows.
        layout: rows, columns, codes for each scale, scales for each factor.
        dtype: float32, float16 or bfloat16.
    """
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    weight = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    bytes_ = codes_per_scale // 2
    pairs = min(bytes_ & -bytes_, BLOCK)  # a power of two that divides the bytes of a scale
    pieces, step = codes.numel() // pairs, BLOCK // pairs
    with on_device_of(codes):
        _nf4_weight_kernel[(triton.cdiv(pieces, step),)](
            codes, scales, factors, mean, table, weight, pieces, PAIRS=pairs, PIECES_PER_SCALE=bytes_ // pairs,
            SCALES_PER_FACTOR=per_factor, PIECES_PER_MEAN=pieces // mean.numel() if mean.numel() > 1 else 0,
            PIECES=step, num_warps=NUM_WARPS,
        )  # fmt: skip
    return weight


def nf4_dense_reference(packed: Packed, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `nf4_dense` computes, in plain torch."""
    codes, scales, factors, mean, table = packed
    rows, columns, codes_per_scale, per_factor = layout
    scale = (scales.view(-1, per_factor) / factors.view(-1, 1)).to(table.dtype)
    scale = scale.view(mean.numel(), -1) + mean.view(-1, 1)
    numbers = table[torch.stack([codes >> 4, codes & 15], -1).long()]
    return (numbers.view(-1, codes_per_scale) * scale.view(-1, 1)).view(rows, columns).to(dtype)


def takes_nf4_rows(x: Tensor, packed: Packed, layout: Sequence[int]) -> bool:
    """Whether `nf4_rows` takes x: few rows, of which the codes of each scale are a part, outside of `batch_invariant`.

    Several rows are multiplied by tensor cores, in the dtype of the table.
    """
    _, columns, codes_per_scale, _ = layout
    codes, table, rows = packed[0], packed[-1], x.numel() // max(columns, 1)
    return (
        codes_per_scale & (codes_per_scale - 1) == 0 == columns % codes_per_scale
        and codes.storage_offset() % 4 == 0
        and not is_batch_invariant()
        and (
            (rows == 1 and codes_per_scale >= 8)
            or (1 < rows <= MOST_ROWS and codes_per_scale >= 32 and x.dtype == table.dtype != torch.float32)
        )
    )


def has_ptx(x: Tensor) -> bool:
    """Whether kernels on the device of x may have PTX."""
    return cuda_capability(x.device) > (0, 0)


def nf4_rows(
    x: Tensor, bias: Tensor | None, packed: Packed, layout: Sequence[int], act: str = "",
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch a kernel for few rows x [..., columns]: ``(y [..., rows], act(gate) · up [..., rows / 2])``.

    The second is empty without an activation. ``low_rank`` has the dtype of x.
    """
    codes, *_, table = packed
    N, K, codes_per_scale, per_factor = layout
    y, M = x.new_empty(*x.shape[:-1], N), x.numel() // K
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    ptx = has_ptx(x) and table.dtype != torch.float32
    x = x.contiguous()
    x = x.clone() if M > 1 and x.storage_offset() % 2 else x
    constants = {"SCALES_PER_FACTOR": per_factor, "HAS_BIAS": bias is not None, "ACT": act, "PTX": ptx}
    bias = x if bias is None else bias.contiguous()
    (low, B, R), options = low_rank_arguments(x, low_rank)
    constants |= options
    with on_device_of(x):
        if M == 1:
            warps = max(min(NARROW_WARPS if N < NARROW else ROW_WARPS, triton.next_power_of_2(K // 8) // ROW_WORDS), 1)
            _nf4_row_kernel[(triton.cdiv(N, ROWS),)](
                x, bias, codes.view(torch.int32), *packed[1:], y, product, low, B, N, K // 8, R,
                WORDS_PER_SCALE=codes_per_scale // 8, SCALES=max(8 * ROW_WORDS * warps // codes_per_scale, 1),
                ROWS=ROWS, **constants, num_warps=warps,
            )  # fmt: skip
        else:
            rows, scales, warps = next(tile for most, *tile in TILES if most >= M)
            columns = max(triton.next_power_of_2(M), 8)
            _nf4_rows_kernel[(triton.cdiv(N, rows),)](
                x.view(torch.int32), bias, *packed, y, product, low, B, M, N, K // 2, R,
                PAIRS_PER_SCALE=codes_per_scale // 2, COLUMNS=columns, ROWS=rows, SCALES=scales, **constants,
                num_warps=warps,
            )  # fmt: skip
    return y, product


_PACKED = (
    "Tensor codes, Tensor scales, Tensor factors, Tensor mean, Tensor table, int rows, int columns, "
    "int codes_per_scale, int scales_per_factor"
)
LIBRARY.define(f"nf4_linear(Tensor x, Tensor? bias, {_PACKED}) -> Tensor")
LIBRARY.define(f"nf4_linear_backward(Tensor dy, {_PACKED}) -> Tensor")


@torch.library.impl(LIBRARY, "nf4_linear", "CompositeExplicitAutograd")
def _nf4_linear(x, bias, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    packed, sizes = (codes, scales, factors, mean, table), (rows, columns, codes_per_scale, scales_per_factor)
    if takes_nf4_rows(x, packed, sizes):
        return nf4_rows(x, bias, packed, sizes)[0]
    return product(x, nf4_dense(packed, sizes, x.dtype), bias)


@torch.library.impl(LIBRARY, "nf4_linear_backward", "CompositeExplicitAutograd")
def _nf4_linear_backward(dy, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    packed, sizes = (codes, scales, factors, mean, table), (rows, columns, codes_per_scale, scales_per_factor)
    return dy @ nf4_dense(packed, sizes, dy.dtype)


@torch.library.register_fake("liger_models::nf4_linear", lib=LIBRARY)
def _nf4_linear_fake(x, bias, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor):
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.register_fake("liger_models::nf4_linear_backward", lib=LIBRARY)
def _nf4_linear_backward_fake(
    dy, codes, scales, factors, mean, table, rows, columns, codes_per_scale, scales_per_factor
):
    return dy.new_empty(*dy.shape[:-1], columns)


def _setup(ctx, inputs, output):
    _, bias, *packed, ctx.rows, ctx.columns, ctx.codes_per_scale, ctx.scales_per_factor = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(*packed)


def _backward(ctx, dy):
    sizes = ctx.rows, ctx.columns, ctx.codes_per_scale, ctx.scales_per_factor
    needs_x, needs_bias = ctx.needs_input_grad[:2]
    dx = torch.ops.liger_models.nf4_linear_backward(dy, *ctx.saved_tensors, *sizes) if needs_x else None
    d_bias = dy.flatten(0, -2).sum(0) if ctx.has_bias and needs_bias else None
    return dx, d_bias, *[None] * 9


torch.library.register_autograd("liger_models::nf4_linear", _backward, setup_context=_setup, lib=LIBRARY)


def nf4_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """``x @ Wᵀ + bias`` with a frozen weight in NF4.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: torchao's ``NF4Tensor`` of shape [O, C]. It gets no gradient.
        bias: [O] or None.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        ValueError: the shapes do not match.
    """
    rows, columns = weight.shape
    check(
        x.shape[-1] == columns,
        f"nf4_linear: x must be [..., {columns}] for a weight {list(weight.shape)}, got {list(x.shape)}.",
    )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if bias is None else bias.to(x.dtype)
    if not use_triton(x):
        return F.linear(x, weight.get_original_weight().to(x.dtype), bias)
    y: Tensor = torch.ops.liger_models.nf4_linear(
        x, bias, weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean,
        weight.nf4, rows, columns, weight.block_size, weight.scaler_block_size,
    )  # fmt: skip
    return y
