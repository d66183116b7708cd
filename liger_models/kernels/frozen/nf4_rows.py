"""A linear layer with a 4-bit weight (NF4) that is not dequantized in memory, for an x with few rows (decoding).

The kernels multiply x by the numbers that the codes stand for, and multiply the sum over each block by the block's
scale::

    y_n = Σ_blocks scale_n · (Σ_block table[code] · x) + b_n

`nf4_dense` rounds the products table · scale. The kernels in this file do not round these products, so y is closer to
the exact result.

A byte holds two codes. For up to `MOST_LOOKUPS` rows of x, a kernel in PTX looks up the numbers of both codes with two
instructions: one instruction turns the byte into an address, and the other reads the pair of numbers. The numbers are
in the order in which the matrix units take them. Shared memory holds each of the 256 pairs 32 times, once in each bank.
All lanes of a warp can therefore read their pairs in one access, no matter which bytes they look up. The matrix units
compute products with eight columns. If x has more than two rows, each of these columns is a row of x. If x has one or
two rows, the matrix units multiply several blocks at a time. Each column is then a row of x in which the elements of
all these blocks except one are replaced by zeros.

If the kernel in PTX does not support the number of rows, the GPU or the dtype, a kernel in plain Triton runs. On NVIDIA
GPUs from Ampere on, the Triton kernel looks the numbers up in registers.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels.dispatch import has_ptx, on_device_of, tl, triton
from liger_models.kernels.frozen.code_rows import add_warps, fill
from liger_models.kernels.matmul.row_linear import (
    LowRank,
    are_few,
    load_B,
    low_rank_arguments,
    low_rank_row,
    store_row,
    store_rows,
)
from liger_models.kernels.overlap import start_next
from liger_models.kernels.tiles import cdiv, next_power_of_2

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""A weight in NF4: codes, scales, factors, mean, table."""

MOST_LOOKUPS = 8
"""Maximum number of rows of x for the kernel that looks up pairs of numbers in shared memory."""
LOOKUP_BLOCK = 64
LOOKUP_ROWS, LOOKUP_WARPS = 16, 4
STEP_BLOCKS = 8
"""The kernel that looks up pairs requires blocks of `LOOKUP_BLOCK` codes. A program multiplies `LOOKUP_ROWS` rows of W,
and divides the columns of W among `LOOKUP_WARPS` warps. A warp reads `STEP_BLOCKS` blocks of each row per step."""

MOST_ROWS = 32
"""Maximum number of rows of x that are multiplied by the codes. An x with more rows is multiplied by the dequantized
weight."""
TILES = ((16, 32, 2, 2), (32, 64, 2, 2))
"""Tiles of the kernel in plain Triton. Each entry consists of the maximum number of rows of x, the number of rows of W
per program, the number of blocks that each step reads of each row of W, and the number of warps."""


def _step(kind: str, columns: int) -> str:
    """Return the PTX of one step: it multiplies STEP_BLOCKS blocks from each of 16 rows of W by up to ``columns`` (1, 2
    or 8) rows of x.

    A matrix product has eight columns. Each column belongs to one of ``columns`` rows of x and, within this row, to one
    of ``slots`` (8 / ``columns``) blocks. In a warp, the lane with index 4 · ``group`` + ``quarter`` holds codes of the
    rows ``group`` and ``group + 8`` of W. For column ``group`` of the product, the lane also holds the elements of x by
    which these codes are multiplied. The lane holds the sums of the columns 2 · ``quarter`` and 2 · ``quarter`` + 1.
    Two lanes hold the codes of a block, or four lanes if ``columns`` is 8.

    The operands are::

        $0 to $3      new sums; the sums of row ``group`` come first
        $4 to $7      old sums, in the same order
        $8, $9        addresses of the codes of the two rows
        $10           address of x
        $11, $12      number of blocks of codes and of x that follow the blocks at these addresses
        $13           selects the codes by which x is multiplied; -1 selects no codes
        $14 to $17    two scales for each of the two rows
        $18           address from `fill`
    """
    slots, lanes = 8 // columns, 4 if columns == 8 else 2
    loads, words, numbers = max(slots * lanes // 4, 1), 8 // lanes, 32 // lanes
    repeats = STEP_BLOCKS // slots
    ptx = "{.reg .b32 o, s, y<2>, a<4>; .reg .b64 p, q; .reg .pred loads, uses; .reg .f32 c<8>, u, v;\n"
    ptx += f".reg .b32 w<{2 * words * loads * repeats}>, x<{numbers * repeats}>;\nsetp.ge.s32 loads, $13, 0;\n"
    names = lambda name, start, count: "{" + ", ".join(f"{name}{start + i}" for i in range(count)) + "}"
    # Load the codes of all blocks, then all numbers of x, so that the loads are in flight together. The minimum keeps
    # addresses inside the tensors.
    for load in range(loads * repeats):
        ptx += f"min.s32 o, $11, {load * 4 // lanes}; mad.wide.s32 p, o, 32, $8; mad.wide.s32 q, o, 32, $9;\n"
        for i, at in enumerate("pq"):
            target = names("w", words * (2 * load + i), words)
            ptx += f"ld.global.L1::no_allocate.v{words}.b32 {target}, [{at}];\n"
    for repeat in range(repeats):
        ptx += f"min.s32 o, $12, {slots * repeat}; mad.wide.s32 p, o, 128, $10;\n"
        for i in range(0, numbers, 4):
            ptx += f"@loads ld.global.v4.b32 {names('x', numbers * repeat + i, 4)}, [p+{4 * i}];\n"
    # Look up the two numbers of each byte in shared memory, and multiply. The first product of each sum is added to 0.
    for repeat in range(repeats):
        chains = 4 // lanes  # independent sums
        for load in range(loads):
            ptx += f"setp.eq.s32 uses, $13, {load};\n" if loads > 1 else ""
            for j in range(2 * words):  # two bytes of each row
                for k in range(4):
                    byte, row = 2 * j + k // 2, k % 2
                    word = f"w{words * (2 * (loads * repeat + load) + row) + byte // 4}"
                    ptx += f"dp4a.u32.u32 s, {word}, {128 << 8 * (byte % 4)}, $18; ld.shared.b32 a{k}, [s];\n"
                x = [f"x{numbers * repeat + 2 * j + i}" for i in range(2)]
                if loads > 1:
                    ptx += f"selp.b32 y0, {x[0]}, 0, uses; selp.b32 y1, {x[1]}, 0, uses;\n"
                    x = ["y0", "y1"]
                c = names("c", 4 * (j % chains), 4)
                before = c if load or j >= chains else "{" + ", ".join(["0f00000000"] * 4) + "}"
                ptx += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {c}, {names('a', 0, 4)}, "
                ptx += f"{{{x[0]}, {x[1]}}}, {before};\n"
        # Multiply the sums of a block by the block's scales. If ``columns`` is 8, other lanes hold the scales.
        scales = ["$14", "$15", "$16", "$17"]
        if columns == 2:
            scales = [f"${14 + repeat}"] * 2 + [f"${16 + repeat}"] * 2
        elif columns == 8:
            for scale, first in (("u", 14), ("v", 16)):
                ptx += f"shfl.sync.idx.b32 {scale}, ${first + repeat % 2}, {repeat // 2}, 0x1c1f, -1;\n"
            scales = ["u", "u", "v", "v"]
        for i, scale in enumerate(scales):
            ptx += f"add.f32 c{i}, c{i}, c{i + 4};\n" if chains == 2 else ""
            ptx += f"fma.rn.f32 ${i}, c{i}, {scale}, ${i if repeat else i + 4};\n"
    return ptx + "}"


FILL = tl.constexpr(fill(first_is_upper=True))
STEP1_BF16, STEP2_BF16, STEP8_BF16 = (tl.constexpr(_step("bf16", columns)) for columns in (1, 2, 8))
STEP1_F16, STEP2_F16, STEP8_F16 = (tl.constexpr(_step("f16", columns)) for columns in (1, 2, 8))

PLANES = tl.constexpr(
    """{
.reg .b32 p, q, n; .reg .b64 at;
mov.u32 n, %laneid; and.b32 n, n, 3; mad.wide.u32 at, n, 8, $8;
ld.global.nc.b32 p, [at]; ld.global.nc.b32 q, [at+4];
prmt.b32 n, p, q, 0x7531; prmt.b32 p, p, q, 0x6420;
"""
    + "".join(
        f"shfl.sync.idx.b32 ${i}, n, {i}, 0x1c1f, -1; shfl.sync.idx.b32 ${i + 4}, p, {i}, 0x1c1f, -1;\n"
        for i in range(4)
    )
    + "}"
)
"""PTX that loads the table at address $8. The registers $0 to $3 are set to the upper bytes of the table's numbers, and
$4 to $7 to the lower bytes. A lane gets these bytes from other lanes. If all lanes loaded the same bytes, ptxas would
keep the bytes in uniform registers, and would copy them for each `prmt`."""


def _pairs() -> str:
    """Return PTX that looks up both numbers of each of the four bytes in $4.

    $0 and $1 are set to the first numbers of the bytes, and $2 and $3 to the second numbers. A `prmt` instruction
    chooses four bytes out of eight. One instruction can therefore look up four numbers, but only one of the two bytes
    of each number, and only in one half of the table.
    """
    ptx = "{\n.reg .b32 s, m, a, b, h, l;\nand.b32 s, $4, 0x77777777;\n"
    ptx += "shr.u32 m, $4, 1; lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;\n"
    for half in range(2):
        for to, plane in (("h", 5), ("l", 21)):
            t0, t1, t2, t3 = (f"${plane + 4 * i}" for i in range(4))  # an operand of four bytes each
            ptx += f"prmt.b32 a, {t0}, {t1}, s; prmt.b32 b, {t2}, {t3}, s; prmt.b32 {to}, a, b, m;\n"
        ptx += f"prmt.b32 ${half}, l, h, 0x7351; prmt.b32 ${2 + half}, l, h, 0x6240;\n"
        ptx += "" if half else "shr.u32 s, s, 16; shr.u32 m, m, 16;\n"
    return ptx + "}"


PAIRS = tl.constexpr(_pairs())


@triton.jit
def nf4_scale(scale_ptr, factor_ptr, mean, block, inside, dtype: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr):
    """Compute the scales of the blocks with indices ``block``. The scales are rounded to ``dtype``, but returned as
    fp32.
    """
    code = tl.load(scale_ptr + block, mask=inside, other=0).to(tl.float32)
    factor = tl.load(factor_ptr + block // SCALES_PER_FACTOR, mask=inside, other=1.0).to(tl.float32)
    # The code has at most 7 significant bits, and a factor in bfloat16 has 8. The quotient of such numbers is never so
    # close to a rounding tie of bfloat16 that an inexact division would be rounded to another result.
    quotient = code / factor if dtype == tl.bfloat16 else tl.div_rn(code, factor)
    return (quotient.to(dtype).to(tl.float32) + mean).to(dtype).to(tl.float32)


@triton.jit
def _lookup_scale(
    scale_ptr, factor_ptr, mean, row, block, blocks, dtype: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr
):
    """Compute the scales of the blocks with the indices ``block`` in the rows with the indices ``row``.

    Beyond a row's last block, the scale is 0.
    """
    inside = block < blocks
    scale = nf4_scale(scale_ptr, factor_ptr, mean, row * blocks + block, inside, dtype, SCALES_PER_FACTOR)
    return tl.where(inside, scale, 0.0)


@triton.jit
def _nf4_lookup_kernel(
    x_ptr, bias_ptr, code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, y_ptr, product_ptr, low_ptr, B_ptr,
    M, N, blocks, R, SCALES_PER_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows of W (ROWS) by up to COLUMNS rows of x.

    Every tensor in this kernel has one element per thread, because `_step` takes its operands per thread.
    """
    start_next(OVERLAPS)
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    BF16: tl.constexpr = STEP1_BF16 if COLUMNS == 1 else STEP2_BF16 if COLUMNS == 2 else STEP8_BF16
    F16: tl.constexpr = STEP1_F16 if COLUMNS == 1 else STEP2_F16 if COLUMNS == 2 else STEP8_F16
    STEP: tl.constexpr = BF16 if dtype == tl.bfloat16 else F16
    LANES: tl.constexpr = 4 if COLUMNS == 8 else 2  # lanes that share a block
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    group, quarter = lane // 4, lane % 4
    row = tl.minimum(tl.program_id(0) * ROWS + group, N - 1).to(tl.int64)
    row8 = tl.minimum(tl.program_id(0) * ROWS + group + 8, N - 1).to(tl.int64)
    if COLUMNS == 2:
        first, second = quarter, quarter + 4  # the blocks whose scales this thread loads
    else:
        first, second = 2 * quarter, 2 * quarter + 1
    slot = group // COLUMNS
    turn = tl.zeros_like(slot) if COLUMNS == 8 else tl.where(slot % 2 == quarter // 2, slot // 2, -1)
    mean = tl.load(mean_ptr).to(tl.float32)
    if RANKS and COLUMNS == 1:
        B = load_B(B_ptr, tl.program_id(0) * ROWS + tl.arange(0, ROWS), N, R, RANKS)
    pairs = tl.inline_asm_elementwise(FILL, "=&r,l", [table_ptr.to(tl.uint64, bitcast=True)], tl.int32, False, 1)
    part = (quarter % LANES) * (32 // LANES)  # offset in bytes within the codes of a block
    ahead = quarter // LANES  # offset in blocks
    codes = code_ptr + row * blocks * 32 + ahead * 32 + part
    codes8 = code_ptr + row8 * blocks * 32 + ahead * 32 + part
    x = x_ptr + (tl.minimum(group % COLUMNS, M - 1) * blocks + slot) * 64 + part * 2
    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1 = t0
    t2 = t0
    t3 = t0
    for start in range(0, blocks, BLOCKS * WARPS):
        at = start + warp * BLOCKS
        s0 = _lookup_scale(scale_ptr, factor_ptr, mean, row, at + first, blocks, dtype, SCALES_PER_FACTOR)
        s1 = _lookup_scale(scale_ptr, factor_ptr, mean, row, at + second, blocks, dtype, SCALES_PER_FACTOR)
        s2 = _lookup_scale(scale_ptr, factor_ptr, mean, row8, at + first, blocks, dtype, SCALES_PER_FACTOR)
        s3 = _lookup_scale(scale_ptr, factor_ptr, mean, row8, at + second, blocks, dtype, SCALES_PER_FACTOR)
        t0, t1, t2, t3 = tl.inline_asm_elementwise(
            STEP, "=&f,=&f,=&f,=&f,f,f,f,f,l,l,l,r,r,r,f,f,f,f,r",
            [t0, t1, t2, t3, (codes + at * 32).to(tl.uint64, bitcast=True),
             (codes8 + at * 32).to(tl.uint64, bitcast=True), (x + at * 64).to(tl.uint64, bitcast=True),
             blocks - 1 - at - ahead, blocks - 1 - at - slot, turn, s0, s1, s2, s3, pairs],
            (tl.float32, tl.float32, tl.float32, tl.float32), False, 1,
        )  # fmt: skip
    y = add_warps(t0, t1, t2, t3, WARPS)  # [ROWS, 8]
    if COLUMNS == 1:
        total = tl.sum(y, 1)
        if RANKS:
            total += low_rank_row(B, low_ptr, R, RANKS, "")
        first = tl.program_id(0).to(tl.int64) * ROWS
        store_row(total, first, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)
    else:
        if COLUMNS == 2:  # add the sums of the slots; `store_rows` takes eight columns
            y = tl.sum(tl.reshape(y, [ROWS, 4, 2]), 1)
            y = tl.reshape(tl.broadcast_to(y[:, None, :], [ROWS, 4, 2]), [ROWS, 8])
        store_rows(y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, 8)


@triton.jit
def _nf4_rows_kernel(
    pair_ptr, bias_ptr, code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, y_ptr, product_ptr, low_ptr, B_ptr,
    M, N, pairs, R, PAIRS_PER_SCALE: tl.constexpr, SCALES_PER_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of W by up to COLUMNS rows of x.

    Each step reads SCALES blocks of each of these rows of W. A byte holds the codes of an even column and of the odd
    column after it. The even and the odd columns of x are therefore multiplied separately.
    """
    start_next(OVERLAPS)
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr).to(tl.float32)
    if PTX:
        # Load the upper and lower bytes of the table into eight registers, in which `prmt` looks numbers up.
        h0, h1, h2, h3, l0, l1, l2, l3 = tl.inline_asm_elementwise(
            PLANES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l", [table_ptr.to(tl.uint64, bitcast=True)],
            (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    # Each scale has its own sums of products: [SCALES, ROWS, COLUMNS].
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
        # Load pairs of elements of x as one integer each, [SCALES, PAIRS_PER_SCALE, COLUMNS]. The pairs are split
        # below.
        there = (block < blocks)[:, None, None] & (column < M)[None, None, :]
        x = tl.load(pair_ptr + column[None, None, :] * pairs + pair[:, :, None], mask=there, other=0)
        scale = nf4_scale(scale_ptr, factor_ptr, mean, at * blocks + block[:, None], some, dtype, SCALES_PER_FACTOR)
        if PTX:
            first, second = tl.inline_asm_elementwise(
                PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [codes, h0, h1, h2, h3, l0, l1, l2, l3],
                (table_ptr.dtype.element_ty, table_ptr.dtype.element_ty), True, 4,
            )  # fmt: skip
        else:
            first = tl.load(table_ptr + (codes >> 4).to(tl.int32))
            second = tl.load(table_ptr + (codes & 15).to(tl.int32))
        half: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
        even, odd = x.to(half).to(dtype, bitcast=True), (x >> BITS).to(half).to(dtype, bitcast=True)
        part = tl.dot(second, odd, tl.dot(first, even, input_precision="ieee"), input_precision="ieee")
        total += part * scale[:, :, None]
    y = tl.sum(total, 0)
    store_rows(y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


def takes_nf4_rows(x: Tensor, packed: Packed, layout: Sequence[int]) -> bool:
    """Return whether `nf4_rows` can multiply x.

    x must have few rows and the dtype of the table, and each row of the weight must consist of whole blocks.
    """
    _, columns, codes_per_scale, _ = layout
    return (
        codes_per_scale & (codes_per_scale - 1) == 0 == columns % codes_per_scale
        and codes_per_scale >= 32
        and x.dtype == packed[-1].dtype
        and are_few(x, MOST_ROWS)
    )


def nf4_rows(
    x: Tensor, bias: Tensor | None, packed: Packed, layout: Sequence[int], act: str = "",
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply x [..., columns], which has few rows, by the quantized weight, which is not dequantized in memory.

    The results are y [..., rows] and act(gate) · up [..., rows / 2]. Without an activation, the second result is empty.
    ``low_rank`` must have the dtype of x.
    """
    N, K, codes_per_scale, per_factor = layout
    y, M = x.new_empty(*x.shape[:-1], N), x.numel() // K
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    ptx = has_ptx(x) and x.dtype != torch.float32
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    constants = {"SCALES_PER_FACTOR": per_factor, "HAS_BIAS": bias is not None, "ACT": act}
    bias = x if bias is None else bias.contiguous()
    (low, B, R), options = low_rank_arguments(x, low_rank)
    # These kernels would be slower if they started early, because their programs would be distributed unevenly over the
    # multiprocessors.
    constants |= {name: options[name] for name in ("RANKS", "OVERLAPS")}
    looks_up = ptx and M <= MOST_LOOKUPS and codes_per_scale == LOOKUP_BLOCK and packed[0].data_ptr() % 16 == 0
    *others, table = packed
    # A table that is a slice of another tensor may be unaligned, but `PLANES` reads two of its numbers at once.
    table = table.clone() if ptx and not looks_up and table.data_ptr() % 4 else table
    arguments = bias, *others, table, y, product, low, B, M, N
    with on_device_of(x):
        if looks_up:
            _nf4_lookup_kernel[(cdiv(N, LOOKUP_ROWS),)](
                x, *arguments, K // LOOKUP_BLOCK, R, COLUMNS=M if M <= 2 else 8, ROWS=LOOKUP_ROWS, BLOCKS=STEP_BLOCKS,
                WARPS=LOOKUP_WARPS, **constants, num_warps=LOOKUP_WARPS,
            )  # fmt: skip
        else:
            rows, scales, warps = next(tile for most, *tile in TILES if most >= M)
            _nf4_rows_kernel[(cdiv(N, rows),)](
                x.view(torch.int64 if x.dtype == torch.float32 else torch.int32), *arguments, K // 2, R, PTX=ptx,
                PAIRS_PER_SCALE=codes_per_scale // 2, COLUMNS=max(next_power_of_2(M), 8), ROWS=rows,
                SCALES=scales, **constants, num_warps=warps,
            )  # fmt: skip
    return y, product
