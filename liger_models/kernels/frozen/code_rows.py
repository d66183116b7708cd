"""Kernels in PTX that multiply an x with few rows by a weight with four-bit codes.

A kernel in plain Triton takes about ten instructions for each weight: it splits a byte, computes the number, applies
the scale, rounds, and multiplies by x. If an H200 reads 4-bit weights at its full bandwidth, there is time for only
four instructions per weight. The kernels in this file take three to five instructions per weight. The matrix units
(tensor cores) multiply the weights by x and add the products. The operands of the matrix units hold neighboring weights
as pairs, so the kernels dequantize pairs. Shared memory holds a table with the pair of numbers for each byte. There are
32 copies of the table, one in each bank, so that all lanes of a warp read in one access. One instruction turns a byte
into an address, and another instruction reads the pair. There are three kinds of scales, which differ in how a pair is
multiplied by its scale:

- "one_scale": one instruction multiplies the pair by a scale in bfloat16, and rounds the products.
- "two_scales": the codes are in e2m1, and bfloat16 cannot represent their scale s exactly. The absolute value of each
  e2m1 number except 0 is a power of 2, or 1.5 times a power of 2. Up to its sign, each rounded weight is therefore t =
  bf16(s) or u = bf16(1.5 · s), multiplied by a power of 2. Let n be the e2m1 number, and let p be n without its
  mantissa: a power of 2 with the sign of n. The rounded weight is n · 2 (u - t) + p · (3 t - 2 u). All factors in this
  formula are exact in bfloat16, and so is its result. Computing this formula for a pair takes three instructions.
- "products": the numbers or the scales are in fp32, and each number is multiplied by its scale in fp32 and rounded. The
  pairs are in fp32, so each lane reads eight bytes per pair, and shared memory holds only 16 copies of the table.
  Multiplying both numbers of a pair and rounding the products takes three instructions.

One instruction of the matrix units multiplies A [16, 16] by B [16, 8], and adds the product to 16 · 8 sums. If x has
several rows, the rows of A are rows of W, and the columns of B are rows of x. With a single row of x, this layout would
leave seven columns of B unused. A warp would also read only 64 contiguous bytes at a time from each of eight rows of W,
instead of 512 bytes from one row. For a single row, the columns of W are therefore split among eight groups, each of
which consists of four lanes. For group n, rows n and n + 8 of A hold the group's columns of two rows of W, and column n
of B holds the corresponding elements of x. The diagonals of the upper and the lower half of the result then hold the
sums that are needed, and the other elements are not used. The columns that a group handles can be chosen freely, so a
warp can read 512 contiguous bytes of a row of W.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma.
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import has_ptx, num_programs, on_device_of, tl, triton
from liger_models.kernels.matmul.row_linear import (
    LowRank,
    load_B,
    low_rank_arguments,
    low_rank_row,
    store_row,
    store_rows,
)
from liger_models.kernels.overlap import end_previous, start_next
from liger_models.kernels.tiles import cdiv

MOST_ROWS = 16
"""Maximum number of rows of x that the kernels of this file support."""

ROW_TILE = 8
ROW_WARPS, ROW_PROGRAMS = 4, 4
"""If x has a single row, W is divided into tiles of `ROW_TILE` rows. The tiles are distributed among `ROW_PROGRAMS`
programs per multiprocessor, each of which has `ROW_WARPS` warps."""

TILE, WARPS = 16, 4
"""If x has several rows, a program multiplies `TILE` rows of W, and divides the columns of W among `WARPS` warps."""

VECTOR = 16
"""The addresses of x and W, and the number of bytes of a row of W, must be multiples of this number."""

CONSTANTS = ("none", 0x80008000), ("minus", 0xBF80BF80), ("two", 0x40004000), ("minus2", 0xC000C000)
"""Pairs of -0, -1, 2 and -2 in bfloat16. A product is computed as a multiply-add with -0, because GPUs before Hopper
have no instruction that only multiplies pairs."""


def fill(*, first_is_upper: bool, size: int = 2) -> str:
    """Return PTX that builds all pairs of numbers in shared memory from the table of numbers at address $1.

    ``size`` is the number of bytes of each number, 2 or 4. $0 is set to the address of the first pair in this lane's
    copy. If a number has 4 bytes, lanes n and n + 16 share a copy of the table. Consecutive pairs of a copy are 128
    bytes apart. A byte has 256 possible values. Each thread handles the 16 values that have the same lower four bits.
    For each of these values, the thread fills 16 bytes with copies of the pair. With more than 128 threads, several
    threads write the same bytes. With ``first_is_upper``, the first number of a pair belongs to the upper half of the
    byte, and otherwise to the lower half.
    """
    bits = f"b{8 * size}"
    ptx = f"{{.shared .align 128 .b8 pairs[32768];\n.reg .b32 n, a, v; .reg .b64 p; .reg .{bits} upper, lower;\n"
    ptx += f"mov.u32 a, pairs; mov.u32 n, %laneid; and.b32 n, n, {64 // size - 1}; mad.lo.u32 $0, n, {2 * size}, a;\n"
    ptx += "mov.u32 n, %tid.x; and.b32 n, n, 127; mad.lo.u32 a, n, 16, a;\n"
    ptx += f"shr.u32 n, n, 3; mad.wide.u32 p, n, {size}, $1; ld.global.nc.{bits} lower, [p];\n"
    pair = "upper, lower" if first_is_upper else "lower, upper"
    for i in range(16):
        ptx += f"ld.global.nc.{bits} upper, [$1+{size * i}];\n"
        ptx += f"mov.b32 v, {{{pair}}};\n" if size == 2 else ""
        ptx += f"st.shared.v4.b32 [a+{2048 * i}], {{{'v, v, v, v' if size == 2 else f'{pair}, {pair}'}}};\n"
    return ptx + "bar.sync 0;\n}"


def listed(name: str, first: int, count: int = 4) -> str:
    """Return the PTX operand that names ``count`` registers with consecutive numbers, such as ``{a0, a1, a2, a3}``."""
    return "{" + ", ".join(f"{name}{first + i}" for i in range(count)) + "}"


def _load(name: str, first: int, count: int, at: str, predicate: str = "", cached: str = "") -> str:
    """Return PTX that loads 32-bit values from the address ``at`` into ``count`` registers with consecutive numbers.

    If a predicate is given and is false, the registers are set to 0.
    """
    zeros = "".join(f"mov.b32 {name}{first + i}, 0; " for i in range(count)) if predicate else ""
    guard = f"@{predicate} " if predicate else ""
    return f"{zeros}{guard}ld.global{cached}.v{count}.b32 {listed(name, first, count)}, [{at}];\n"


def _prepare(kind: str, scale: str, to: int) -> str:
    """Return PTX that computes, from a scale in fp32, the factors by which `_pair` multiplies.

    For the kind "one_scale", the factor s is the scale. For "two_scales", the factors are s = 3 t - 2 u and d = 2 (u -
    t). For these two kinds, each factor is stored twice, as a pair in bf16. For "products", the factor s is the scale,
    in fp32.
    """
    if kind == "products":
        return f"mov.b32 s{to}, {scale};\n"
    ptx = f"cvt.rn.bf16x2.f32 s{to}, {scale}, {scale};\n"
    if kind == "two_scales":  # s is 3 t - 2 u, and d is 2 (u - t)
        ptx += f"mul.rn.f32 e, {scale}, 0f3FC00000; cvt.rn.bf16x2.f32 m, e, e;\n"
        ptx += f"fma.rn.bf16x2 m, s{to}, minus, m; fma.rn.bf16x2 d{to}, m, two, none;\n"
        ptx += f"fma.rn.bf16x2 s{to}, m, minus2, s{to};\n"
    return ptx


def _pair(kind: str, to: str, word: str, byte: int, scale: int, table: str) -> str:
    """Return PTX that dequantizes the two codes in one byte of a word.

    Args:
        kind: see the module's docstring.
        to: the register of the result.
        word: the register of the codes.
        byte: index of the byte in the word, from 0 to 3.
        scale: i, where the registers s{i} and d{i} hold the factors that `_prepare` has computed from the scale.
        table: the register with the address from `fill`.
    """
    ptx = f"dp4a.u32.u32 m, {word}, {128 << 8 * byte}, {table};\n"
    if kind == "products":
        ptx += f"ld.shared.v2.b32 {{e, f}}, [m]; mul.rn.f32 e, e, s{scale}; mul.rn.f32 f, f, s{scale};\n"
        return ptx + f"cvt.rn.bf16x2.f32 {to}, f, e;\n"
    ptx += "ld.shared.b32 m, [m];\n"
    if kind == "one_scale":
        return ptx + f"fma.rn.bf16x2 {to}, m, s{scale}, none;\n"
    ptx += f"and.b32 n, m, 0xFFBFFFBF; fma.rn.bf16x2 n, n, s{scale}, none;\n"
    return ptx + f"fma.rn.bf16x2 {to}, m, d{scale}, n;\n"


REGISTERS = (
    ".reg .b32 a<4>, s<8>, d<8>, m, n, none, minus, two, minus2; .reg .f32 c<16>, e, f; .reg .b64 at;\n"
    ".reg .pred p<2>, odd;\n" + "".join(f"mov.b32 {name}, {bits}; " for name, bits in CONSTANTS)
)
PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {0}, {{a0, a1, a2, a3}}, {{x{1}, x{2}}}, {3};\n"


def _several_step(kind: str, tiles: int) -> str:
    """Return the PTX of one step: it multiplies 16 rows of W by 8 · ``tiles`` rows of x, and adds the products to the
    sums.

    In a warp, the lane with index 4 · ``group`` + ``quarter`` reads 16 of every 64 bytes of the rows ``group`` and
    ``group + 8`` of W. The lane also reads row ``group`` of x and, with two tiles, row ``group + 8`` of x. The lane
    holds the sums of the columns 2 · ``quarter`` and 2 · ``quarter`` + 1 of each tile. A step processes four chunks of
    64 bytes of each row, or only two chunks if a lane needs two scales for a chunk.

    The operands are, in this order::

        new sums      four for each tile, where the sums of row ``group`` of W come first
        old sums      in the same order
        addresses     of the codes in both rows of W, then of each row of x
        bytes left    of codes, then the same number again for each row of x, or 0 for a row that x does not have
        scales        four for each of the two rows of W
        table         the address from `fill`
    """
    per, sums = 2 if kind == "two_scales" else 1, 4 * tiles
    chunks, codes, left, scales = 4 // per, 2 * sums, 2 * sums + tiles + 2, 2 * sums + 2 * tiles + 3
    ptx = f"{{.reg .b32 w<{8 * chunks}>, x<{16 * chunks * tiles}>;\n{REGISTERS}\n"

    # Load all codes and all numbers of x, so that the loads are in flight together.
    for chunk in range(chunks):
        ptx += f"setp.gt.s32 p0, ${left}, {64 * chunk};\n"
        for row in range(2):
            ptx += _load("w", 8 * chunk + 4 * row, 4, f"${codes + row}+{64 * chunk}", "p0", ".L1::no_allocate")
    for tile in range(tiles):
        for chunk in range(chunks):
            ptx += f"setp.gt.s32 p0, ${left + 1 + tile}, {64 * chunk};\n"
            for i in range(4):
                ptx += _load(
                    "x", 16 * (tile * chunks + chunk) + 4 * i, 4, f"${codes + 2 + tile}+{256 * chunk + 16 * i}", "p0"
                )

    # A product takes two neighboring bytes of both rows of W. Consecutive products are added to different sums, so that
    # a product does not wait for the one before it.
    ptx += "".join(_prepare(kind, f"${scales + i}", i) for i in range(8))
    ptx += "".join(f"mov.f32 c{i}, ${sums + i}; mov.f32 c{sums + i}, 0f00000000;\n" for i in range(sums))
    for chunk in range(chunks):
        for product in range(8):
            for i in range(4):
                row, scale = i % 2, per * chunk + per * product // 8
                word, number = f"w{8 * chunk + 4 * row + product // 2}", 4 * row + scale
                byte = 2 * (product % 2) + i // 2
                ptx += _pair(kind, f"a{i}", word, byte, number, f"${scales + 8}")
            for tile in range(tiles):
                c, x = listed("c", 4 * tile + sums * (product % 2)), 16 * (tile * chunks + chunk) + 2 * product
                ptx += PRODUCT.format(c, x, x + 1, c)
    return ptx + "".join(f"add.f32 ${i}, c{i}, c{sums + i};\n" for i in range(sums)) + "}"


def _single_step(kind: str, *, whole: bool) -> str:
    """Return the PTX of one step: it multiplies 512 bytes from each of eight rows of W by a single row of x.

    A lane reads 16 contiguous bytes of each row of W. For the kind "two_scales", 16 contiguous bytes could have two
    scales, so a lane reads 8 bytes from the first half of the 512 bytes and 8 bytes from the second half. ``whole``
    means that in each step, either all lanes of a warp have bytes to process, or none of them has any.

    The operands are, in this order::

        new sums      one for each of the eight rows; in each group, only the lane with the diagonal has valid sums
        old sums      in the same order
        codes         the address of the codes in the first row, and the distance between rows
        x             the address of x
        bytes left    the number of bytes that are left
        odd           whether the lane's group is odd
        scales        one or two for each row
        table         the address from `fill`
    """
    chunks, words = (2, 2) if kind == "two_scales" else (1, 4)
    size, rows = 4 * words, ROW_TILE  # bytes of a chunk
    codes, stride, x_at, left, odd, scales = (2 * rows + i for i in range(6))
    table = f"${scales + rows * chunks}"
    ptx = f"{{.reg .b32 w<{rows * chunks * words}>, x<{4 * chunks * words}>;\n{REGISTERS}\n"
    ptx += "".join(f"mov.f32 ${row}, ${rows + row}; " for row in range(rows))
    if whole:
        ptx += f"setp.le.s32 p0, ${left}, 0;\n@p0 bra.uni done;\n"
    predicates = ["", ""] if whole else ["p0", "p1"]
    for chunk in range(0 if whole else chunks):
        ptx += f"setp.gt.s32 p{chunk}, ${left}, {32 * size * chunk};\n"
    ptx += f"setp.ne.s32 odd, ${odd}, 0; mov.b64 at, ${codes};\n"

    # Load all codes and all numbers of x, so that the loads are in flight together.
    for row in range(rows):
        for chunk in range(chunks):
            at, first = f"at+{32 * size * chunk}", (row * chunks + chunk) * words
            ptx += _load("w", first, words, at, predicates[chunk], ".L1::no_allocate")
        ptx += f"add.s64 at, at, ${stride};\n"
    for chunk in range(chunks):
        for i in range(0, 4 * words, 4):
            at = f"${x_at}+{128 * size * chunk + 4 * i}"
            ptx += _load("x", 4 * words * chunk + i, 4, at, predicates[chunk])

    # A product takes two neighboring bytes of each of two rows.
    for first in range(0, rows, 2):
        for chunk in range(chunks):
            ptx += "".join(_prepare(kind, f"${scales + (first + i) * chunks + chunk}", i) for i in range(2))
            for product in range(2 * words):
                for i in range(4):
                    word = f"w{((first + i % 2) * chunks + chunk) * words + product // 2}"
                    ptx += _pair(kind, f"a{i}", word, 2 * (product % 2) + i // 2, i % 2, table)
                before = listed("c", 0) if product or chunk else "{" + ", ".join(["0f00000000"] * 4) + "}"
                x = 4 * words * chunk + 2 * product
                ptx += PRODUCT.format(listed("c", 0), x, x + 1, before)
        for i in range(2):
            ptx += f"selp.f32 e, c{2 * i + 1}, c{2 * i}, odd; add.f32 ${first + i}, ${first + i}, e;\n"
    return ptx + ("done:\n}" if whole else "}")


def _gather() -> str:
    """Return PTX that computes the sums of eight rows of W from the partial sums that the lanes of a warp hold.

    Only the partial sums of one lane in each group are used: the lane that holds the diagonals that the module's
    docstring describes. The inputs $1 to $8 are a lane's partial sums of the eight rows. In the four lanes of group n,
    $0 becomes the complete sum of row n. In each step, two lanes whose group numbers differ in one bit exchange partial
    sums: each lane keeps its sums for one half of the rows, and sends its sums for the other half.
    """
    ptx = "{.reg .f32 v<8>, k, s; .reg .pred p; .reg .b32 group, quarter, t;\n"
    ptx += "mov.u32 t, %laneid; shr.u32 group, t, 2; and.b32 quarter, t, 3;\n"
    ptx += "shr.u32 t, group, 1; setp.eq.u32 p, t, quarter;\n"
    ptx += "".join(f"selp.f32 v{i}, ${1 + i}, 0f00000000, p;\n" for i in range(8))
    for half in (4, 2, 1):
        ptx += f"and.b32 t, group, {half}; setp.ne.u32 p, t, 0;\n"
        for i in range(half):
            ptx += f"selp.f32 k, v{i + half}, v{i}, p; selp.f32 s, v{i}, v{i + half}, p;\n"
            ptx += f"shfl.sync.bfly.b32 s, s, {4 * half}, 0x1f, -1; add.f32 v{i}, k, s;\n"
    for lane in (1, 2):
        ptx += f"shfl.sync.bfly.b32 s, v0, {lane}, 0x1f, -1; add.f32 v0, v0, s;\n"
    return ptx + "mov.f32 $0, v0;\n}"


FILL, FILL_FP32 = (tl.constexpr(fill(first_is_upper=False, size=size)) for size in (2, 4))
GATHER = tl.constexpr(_gather())
ONE_SCALE_1, ONE_SCALE_2 = (tl.constexpr(_several_step("one_scale", tiles)) for tiles in (1, 2))
TWO_SCALES_1, TWO_SCALES_2 = (tl.constexpr(_several_step("two_scales", tiles)) for tiles in (1, 2))
PRODUCTS_1, PRODUCTS_2 = (tl.constexpr(_several_step("products", tiles)) for tiles in (1, 2))
WHOLE_ONE_SCALE, PART_ONE_SCALE = (tl.constexpr(_single_step("one_scale", whole=whole)) for whole in (True, False))
WHOLE_TWO_SCALES, PART_TWO_SCALES = (tl.constexpr(_single_step("two_scales", whole=whole)) for whole in (True, False))
WHOLE_PRODUCTS, PART_PRODUCTS = (tl.constexpr(_single_step("products", whole=whole)) for whole in (True, False))


@triton.jit
def group_scale(
    scale_ptr, whole_ptr, group, row, inside, SCALES: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Load the scales of groups and convert them to fp32. With WHOLE, also apply the scales of rows.

    ``group`` holds the indices of the groups, which are numbered consecutively over all rows. ``row`` holds the row to
    which each group belongs.
    """
    if SCALES == "e8m0":
        byte = tl.load(scale_ptr + group, mask=inside, other=0).to(tl.int32)
        scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        # The bits of the byte are rearranged, because older GPUs cannot convert float8. The exponent biases of e4m3 and
        # fp32 differ by 120, so the result is multiplied by 2^120.
        byte = tl.load(scale_ptr + group, mask=inside, other=0).to(tl.int32)
        bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
        scale = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        scale = tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)
    if WHOLE == "times":
        scale *= tl.load(whole_ptr + row, mask=inside, other=1.0)
    elif WHOLE == "over":
        scale = tl.div_rn(scale, tl.load(whole_ptr + row, mask=inside, other=1.0))
    return scale


@triton.jit
def add_warps(t0, t1, t2, t3, WARPS: tl.constexpr):
    """Return the sums [16, 8] over all warps of the program, each of which has handled some columns of W.

    Each thread holds four of the sums of its warp, in the layout in which the matrix units return them.
    """
    low = tl.sum(tl.reshape(tl.join(t0, t1), [WARPS, 8, 8]), 0)
    high = tl.sum(tl.reshape(tl.join(t2, t3), [WARPS, 8, 8]), 0)
    return tl.reshape(tl.permute(tl.join(low, high), [2, 0, 1]), [16, 8])


@triton.jit
def _scales_of_row(
    loads, row, byte, left, KIND: tl.constexpr, PAIRS: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Load the scales that a lane needs in `_single_step` for one row of W: one scale for each chunk of the lane.

    The bytes of a lane form one chunk or two chunks. ``loads`` consists of the pointer to the scales, the pointer to
    the scales of whole rows, and the number of scales of a row. PAIRS is the number of bytes of codes that share a
    scale.
    """
    scale_ptr, whole_ptr, G = loads
    first, rows = row * G + byte // PAIRS, row + tl.zeros_like(byte)
    s = group_scale(scale_ptr, whole_ptr, first, rows, left > 0, SCALES, WHOLE)
    t = s
    if KIND == "two_scales":
        t = group_scale(scale_ptr, whole_ptr, first + 256 // PAIRS, rows, left > 256, SCALES, WHOLE)
    return s, t


@triton.jit
def _single_row_kernel(
    x_ptr, code_ptr, scale_ptr, whole_ptr, table_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, N, K, G, R,
    KIND: tl.constexpr, PAIRS: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, LOW: tl.constexpr, WARPS: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Multiply W by a single row of x, in tiles of eight rows of W. Every tensor in the kernel has one element per
    thread; see `_single_step`. Program p of P programs computes the tiles p, p + P, p + 2 P and so on. ALIKE means that
    the number of bytes of a row of W is a multiple of 512, the number of bytes that a warp processes per step.
    """
    start_next(OVERLAPS)
    TWO: tl.constexpr = KIND == "two_scales"  # whether the bytes of a lane form two chunks
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    odd = lane // 4 % 2
    BUILD: tl.constexpr = FILL_FP32 if KIND == "products" else FILL
    pairs = tl.inline_asm_elementwise(BUILD, "=&r,l", [table_ptr.to(tl.uint64, bitcast=True)], tl.int32, False, 1)
    if LOW != "awaited":
        end_previous(OVERLAPS)
    size = K // 2  # bytes of a row of W
    loads = (scale_ptr, whole_ptr, G)
    stride = tl.zeros([32 * WARPS], tl.int64) + size
    tiles = tl.cdiv(N, 8)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        begin = tl.minimum(tile * 8, N - 8).to(tl.int64)  # the last tile may repeat results
        if RANKS:
            B = load_B(B_ptr, begin + tl.arange(0, 8), N, R, RANKS)
        t0 = tl.zeros([32 * WARPS], tl.float32)
        t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
        for start in range(0, size, 512 * WARPS):
            byte = start + warp * 512 + lane * (8 if TWO else 16)
            left = size - byte
            codes = (code_ptr + begin * size + byte).to(tl.uint64, bitcast=True)
            x = (x_ptr + 2 * byte).to(tl.uint64, bitcast=True)
            s0, r0 = _scales_of_row(loads, begin, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s1, r1 = _scales_of_row(loads, begin + 1, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s2, r2 = _scales_of_row(loads, begin + 2, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s3, r3 = _scales_of_row(loads, begin + 3, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s4, r4 = _scales_of_row(loads, begin + 4, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s5, r5 = _scales_of_row(loads, begin + 5, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s6, r6 = _scales_of_row(loads, begin + 6, byte, left, KIND, PAIRS, SCALES, WHOLE)
            s7, r7 = _scales_of_row(loads, begin + 7, byte, left, KIND, PAIRS, SCALES, WHOLE)
            if TWO:
                PTX2: tl.constexpr = WHOLE_TWO_SCALES if ALIKE else PART_TWO_SCALES
                t0, t1, t2, t3, t4, t5, t6, t7 = tl.inline_asm_elementwise(
                    PTX2, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,l,l,l,r,r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,r",
                    [t0, t1, t2, t3, t4, t5, t6, t7, codes, stride, x, left, odd,
                     s0, r0, s1, r1, s2, r2, s3, r3, s4, r4, s5, r5, s6, r6, s7, r7, pairs],
                    (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
                    False, 1,
                )  # fmt: skip
            else:
                ONE_SCALE: tl.constexpr = WHOLE_ONE_SCALE if ALIKE else PART_ONE_SCALE
                PRODUCTS: tl.constexpr = WHOLE_PRODUCTS if ALIKE else PART_PRODUCTS
                PTX1: tl.constexpr = PRODUCTS if KIND == "products" else ONE_SCALE
                t0, t1, t2, t3, t4, t5, t6, t7 = tl.inline_asm_elementwise(
                    PTX1, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,l,l,l,r,r,f,f,f,f,f,f,f,f,r",
                    [t0, t1, t2, t3, t4, t5, t6, t7, codes, stride, x, left, odd,
                     s0, s1, s2, s3, s4, s5, s6, s7, pairs],
                    (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
                    False, 1,
                )  # fmt: skip
        # Each warp now has a sum for each row of the tile: the sum of row n is in the four lanes of group n.
        sums = tl.inline_asm_elementwise(
            GATHER, "=f,f,f,f,f,f,f,f,f", [t0, t1, t2, t3, t4, t5, t6, t7], tl.float32, True, 1
        )
        lanes = tl.sum(tl.reshape(sums, [WARPS, 8, 4]), 0)
        y = tl.sum(tl.where(tl.arange(0, 4)[None, :] == 0, lanes, 0.0), 1)
        if RANKS:
            y += low_rank_row(B, low_ptr, R, RANKS, LOW)
        store_row(y, begin, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, 8)


@triton.jit
def _scales_at(
    scale_ptr, whole_ptr, row, G, byte, left, PAIRS: tl.constexpr, PER: tl.constexpr, SCALES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Load the four scales that a lane needs for a row of W: PER scales (1 or 2) for each of 4 / PER chunks.

    PAIRS bytes of codes share a scale.
    """
    # a0 to a3 are offsets, from ``byte``, of bytes to which the four scales apply. A chunk has 64 bytes, of which this
    # lane has 16.
    a0: tl.constexpr = 0
    a1: tl.constexpr = 8 if PER == 2 else 64
    a2: tl.constexpr = 64 if PER == 2 else 128
    a3: tl.constexpr = 72 if PER == 2 else 192
    first = row * G
    s0 = group_scale(scale_ptr, whole_ptr, first + (byte + a0) // PAIRS, row, left > a0, SCALES, WHOLE)
    s1 = group_scale(scale_ptr, whole_ptr, first + (byte + a1) // PAIRS, row, left > a1, SCALES, WHOLE)
    s2 = group_scale(scale_ptr, whole_ptr, first + (byte + a2) // PAIRS, row, left > a2, SCALES, WHOLE)
    s3 = group_scale(scale_ptr, whole_ptr, first + (byte + a3) // PAIRS, row, left > a3, SCALES, WHOLE)
    return s0, s1, s2, s3


@triton.jit
def _several_rows_kernel(
    x_ptr, code_ptr, scale_ptr, whole_ptr, table_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, K, G, R,
    KIND: tl.constexpr, PAIRS: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows of W (ROWS) by up to 8 · TILES rows of x.

    Every tensor has one element per thread; see `_several_step`. PAIRS is the number of bytes of codes that share a
    scale.
    """
    start_next(OVERLAPS)
    PER: tl.constexpr = 2 if KIND == "two_scales" else 1
    STEP: tl.constexpr = 256 // PER  # bytes of a row of W per warp
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    group, quarter = lane // 4, lane % 4
    row = tl.minimum(tl.program_id(0) * ROWS + group, N - 1).to(tl.int64)
    row8 = tl.minimum(tl.program_id(0) * ROWS + group + 8, N - 1).to(tl.int64)
    BUILD: tl.constexpr = FILL_FP32 if KIND == "products" else FILL
    pairs = tl.inline_asm_elementwise(BUILD, "=&r,l", [table_ptr.to(tl.uint64, bitcast=True)], tl.int32, False, 1)
    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    size = K // 2  # bytes of a row of W
    for start in range(0, size, STEP * WARPS):
        byte = start + warp * STEP + quarter * 16
        left = size - byte
        s0, s1, s2, s3 = _scales_at(scale_ptr, whole_ptr, row, G, byte, left, PAIRS, PER, SCALES, WHOLE)
        s4, s5, s6, s7 = _scales_at(scale_ptr, whole_ptr, row8, G, byte, left, PAIRS, PER, SCALES, WHOLE)
        codes = (code_ptr + row * size + byte).to(tl.uint64, bitcast=True)
        codes8 = (code_ptr + row8 * size + byte).to(tl.uint64, bitcast=True)
        x = (x_ptr + group * K + 2 * byte).to(tl.uint64, bitcast=True)
        x_left = tl.where(group < M, left, 0)
        if TILES == 1:
            EXACT1: tl.constexpr = ONE_SCALE_1 if KIND == "one_scale" else TWO_SCALES_1
            PTX1: tl.constexpr = PRODUCTS_1 if KIND == "products" else EXACT1
            t0, t1, t2, t3 = tl.inline_asm_elementwise(
                PTX1, "=&f,=&f,=&f,=&f,f,f,f,f,l,l,l,r,r,f,f,f,f,f,f,f,f,r",
                [t0, t1, t2, t3, codes, codes8, x, left, x_left, s0, s1, s2, s3, s4, s5, s6, s7, pairs],
                (tl.float32, tl.float32, tl.float32, tl.float32), False, 1,
            )  # fmt: skip
        else:
            EXACT2: tl.constexpr = ONE_SCALE_2 if KIND == "one_scale" else TWO_SCALES_2
            PTX2: tl.constexpr = PRODUCTS_2 if KIND == "products" else EXACT2
            x8 = (x_ptr + (group + 8) * K + 2 * byte).to(tl.uint64, bitcast=True)
            x8_left = tl.where(group + 8 < M, left, 0)
            t0, t1, t2, t3, t4, t5, t6, t7 = tl.inline_asm_elementwise(
                PTX2,
                "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,l,l,l,l,r,r,r,f,f,f,f,f,f,f,f,r",
                [t0, t1, t2, t3, t4, t5, t6, t7, codes, codes8, x, x8, left, x_left, x8_left, s0, s1, s2, s3, s4, s5,
                 s6, s7, pairs],
                (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
                False, 1,
            )  # fmt: skip
    y = add_warps(t0, t1, t2, t3, WARPS)  # [ROWS, 8]
    if TILES == 2:
        both = tl.join(y, add_warps(t4, t5, t6, t7, WARPS))
        y = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, 16])
    store_rows(y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, 8 * TILES)


def takes_code_rows(x: Tensor, codes: Tensor) -> bool:
    """Return whether `code_rows` can multiply x [..., C] by contiguous codes [O, C / 2].

    x must be in bfloat16 and have at most `MOST_ROWS` rows. The codes must be aligned (see `VECTOR`), O must be at
    least `ROW_TILE`, and the GPU must support the PTX.
    """
    return (
        0 < x.numel() // x.shape[-1] <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and codes.shape[1] % VECTOR == codes.data_ptr() % VECTOR == 0
        and codes.shape[0] >= ROW_TILE
        and has_ptx(x)
    )


def code_rows(
    kind: str, x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor | None, table: Tensor, bias: Tensor | None,
    act: str = "", low_rank: LowRank | None = None, **constants: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply x [..., C], for which `takes_code_rows` must be True, by the weight.

    Args:
        kind: the kind of scales; see the module's docstring.
        x: [..., C], with up to `MOST_ROWS` rows.
        codes: [O, C / 2].
        scales: [O, G], one scale for each C / G columns of a row. C / G is at least 32, or 16 for the kind
            "two_scales".
        whole: [O, 1] fp32, a scale for each row, or None.
        table: [16], the numbers that the codes stand for: in fp32 for the kind "products", otherwise in bfloat16.
        bias: [O] or None.
        act: the activation of a packed gate and up projection, or "".
        low_rank: a low-rank term in the dtype of x, or None.
        constants: the constants SCALES and WHOLE for `group_scale`.

    Returns:
        y [..., O] and act(gate) · up [..., O / 2], which is empty without an activation.
    """
    (N, size), G, K = codes.shape, scales.shape[1], x.shape[-1]
    y, M, x = x.new_empty(*x.shape[:-1], N), x.numel() // K, x.contiguous()
    x = x.clone() if x.data_ptr() % VECTOR else x
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    bias = None if bias is None else bias.contiguous()
    (low, B, R), options = low_rank_arguments(x, low_rank)
    constants |= {"KIND": kind, "PAIRS": size // G, "HAS_BIAS": bias is not None, "ACT": act, **options}
    whole, ends = scales if whole is None else whole, (bias, y, product, low, B)
    with on_device_of(x):
        if M == 1:
            _single_row_kernel[(min(cdiv(N, ROW_TILE), num_programs(x, ROW_PROGRAMS)),)](
                x, codes, scales, whole, table, *ends, N, K, G, R, WARPS=ROW_WARPS, ALIKE=size % 512 == 0, **constants,
                num_warps=ROW_WARPS,
            )  # fmt: skip
        else:
            _several_rows_kernel[(cdiv(N, TILE),)](
                x, codes, scales, whole, table, *ends, M, N, K, G, R, TILES=cdiv(M, 8), ROWS=TILE, WARPS=WARPS,
                **constants, num_warps=WARPS,
            )  # fmt: skip
    return y, product
