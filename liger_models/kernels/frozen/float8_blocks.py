"""A frozen weight in float8 (e4m3) with the scales of a checkpoint: one per block, per row, or for the whole matrix.

    W = bf16(code · scale)        one scale per block of 128 columns and several rows, or for all columns

In the checkpoint, several rows share the same scales. In memory, each row has its own copy of these scales, so that a
packed projection can interleave the rows of several matrices. W is dequantized in one pass before each product, and
freed after the product. The dequantized W is identical to the weight of a model that loads the checkpoint in bfloat16.

If x has few rows, as in a decoding step, the forward does not dequantize W in memory. A kernel reads the codes, and
dequantizes each tile of W in registers right before the product. The elements of these tiles are identical to those of
a W that is dequantized in memory. Only the order in which the products with x are summed differs.

Source: https://arxiv.org/abs/2412.19437, section 3.3.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels.dispatch import has_ptx, on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.frozen_float8_linear import takes_float8_rows
from liger_models.kernels.frozen.weight import Format, FrozenWeight, register
from liger_models.kernels.matmul.row_linear import (
    LowRank,
    load_B,
    low_rank_arguments,
    low_rank_row,
    store_row,
    store_rows,
)
from liger_models.kernels.overlap import end_previous, start_next
from liger_models.kernels.tiles import cdiv, next_power_of_2

MOST_NUMBERS = 8
ROWS, PIECES = 16, 32
NUM_WARPS = 4
"""The weight is dequantized in pieces of up to `MOST_NUMBERS` columns of a row. A program dequantizes `PIECES` pieces
of each of `ROWS` rows, and has `NUM_WARPS` warps."""

WIDTHS = 16, 1024
"""Minimum and maximum width of blocks that the kernels for an x with few rows support. If a row has several scales, the
width must be a power of 2."""

ROW_WIDTH = 128
"""If all columns of a row share a scale, the kernel for one row of x treats this number of columns as a block."""

ROW_TILE = (4, 1024, 2)
"""Tile of the kernel for one row of x: number of results per program, number of columns per step, and number of
warps."""

RUN = tl.constexpr(16)
"""Number of columns that a thread of the kernel for one row of x reads and sums at once."""

TILES = ((8, 16, 128, 4), (32, 32, 128, 4))
"""Tiles of the kernel for several rows. Each entry consists of the maximum number of rows of x, the number of results
per program, the number of columns that a warp reads per step, and the number of warps, among which the columns are
divided."""

ROUND = tl.constexpr("""{
.reg .b32 pair;
cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000;
}""")
"""PTX that rounds two float32 numbers to bfloat16 with one instruction. Compilers would round the two numbers one after
the other, which is slower."""


@triton.jit
def _numbers(codes, scales):
    """Compute the products of codes and scales in float32. The caller rounds the products to bfloat16."""
    return codes.to(tl.float32) * scales.to(tl.float32)


@triton.jit
def _block_weight_kernel(
    code_ptr, scale_ptr, w_ptr, N, K, G, WIDTH: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Each program dequantizes PIECES pieces of each of ROWS rows.

    A piece is NUMBERS columns of a row that share a scale. A thread dequantizes whole pieces, and needs one scale for
    each piece.
    """
    piece = tl.arange(0, ROWS * PIECES)
    row = tl.program_id(0).to(tl.int64) * ROWS + piece // PIECES
    column = (tl.program_id(1) * PIECES + piece % PIECES) * NUMBERS
    inside = (row < N) & (column < K)
    scales = tl.load(scale_ptr + row * G + column // WIDTH, mask=inside, other=0.0)[:, None]
    at = (row * K + column)[:, None] + tl.arange(0, NUMBERS)[None, :]
    codes = tl.load(code_ptr + at, mask=inside[:, None], other=0.0)
    numbers = _numbers(codes, scales).to(tl.bfloat16).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + at, numbers, mask=inside[:, None])


def blocks_dense_reference(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Compute `blocks_dense` in plain PyTorch."""
    columns = codes.shape[-1]
    factors = scales.float().repeat_interleave(width or columns, -1)[..., :columns]
    return (codes.float() * factors).bfloat16().to(dtype)


def blocks_dense(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the weight [..., O, C], round it to bfloat16, and cast it to ``dtype``.

    Args:
        codes: [..., O, C] in float8_e4m3fn, contiguous.
        scales: [..., O, ceil(C / width)], contiguous, in a floating-point dtype.
        width: number of columns that share a scale; 0 for all columns of a row.
        dtype: float32, float16 or bfloat16.
    """
    if not use_triton(scales):
        return blocks_dense_reference(codes, scales, width, dtype)
    K, G = codes.shape[-1], scales.shape[-1]
    N = codes.numel() // K
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    numbers = math.gcd(width or K, K, MOST_NUMBERS)
    with on_device_of(codes):
        _block_weight_kernel[(cdiv(N, ROWS), cdiv(K, PIECES * numbers))](
            codes, scales, weight, N, K, G, WIDTH=width or K, ROWS=ROWS, PIECES=PIECES, NUMBERS=numbers,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return weight


@triton.jit
def _block_row_kernel(
    x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, N, K, G, R, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr, LOW: tl.constexpr,
    OVERLAPS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of W by a single row of x. Each step reads BLOCKS blocks of each of these rows of W.

    BY_ROW means that each row has a single scale, which all of its blocks share. The next kernel may start only when
    all programs of this kernel have read their rows of W. If the next kernel had many small programs and could start
    earlier, its programs would be distributed unevenly over the multiprocessors.
    """
    COLUMNS: tl.constexpr = BLOCKS * WIDTH
    RUNS: tl.constexpr = COLUMNS // RUN
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None]
    known = (row < N)[:, None]
    if RANKS:
        B = load_B(B_ptr, row, N, R, RANKS)
    # Each run of RUN columns has its own sum, so that a thread adds only its own products in the loop. Sums of several
    # threads are added only after the loop.
    total = tl.zeros([ROWS, RUNS], tl.float32)
    if LOW != "awaited":
        end_previous(OVERLAPS)
    for start in range(0, G, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        column = start * WIDTH + tl.arange(0, COLUMNS)
        codes = tl.load(
            code_ptr + at * K + column[None, :], mask=known & (column < K)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        if BY_ROW:
            scales = tl.load(scale_ptr + at + tl.zeros_like(block)[None, :], mask=known, other=0.0)
        else:
            scales = tl.load(scale_ptr + at * G + block[None, :], mask=known & (block < G)[None, :], other=0.0)
        # A thread needs RUN elements of x, and loads half of them at a time. After two loads, the thread has all of
        # them, so threads need not exchange elements.
        half = start * WIDTH + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN // 2)[None, :]
        first = tl.load(x_ptr + half, mask=half < K, other=0.0)
        second = tl.load(x_ptr + half + RUN // 2, mask=half + RUN // 2 < K, other=0.0)
        x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [RUNS, RUN]).to(tl.float32)
        # Dequantize W in registers, rounded to bfloat16 as in `blocks_dense`: [ROWS, BLOCKS, WIDTH].
        numbers = _numbers(tl.reshape(codes, [ROWS, BLOCKS, WIDTH]), scales[:, :, None])
        if PTX:
            numbers = tl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [numbers], tl.float32, True, 2)
        else:
            numbers = numbers.to(tl.bfloat16).to(tl.float32)
        total += tl.sum(tl.reshape(numbers, [ROWS, RUNS, RUN]) * x[None, :, :], 2)
    start_next(OVERLAPS)
    y = tl.sum(total, 1)
    if RANKS:
        y += low_rank_row(B, low_ptr, R, RANKS, LOW)
    first = tl.program_id(0).to(tl.int64) * ROWS
    store_row(y, first, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)


@triton.jit
def _block_rows_kernel(
    x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, K, G, R, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of W by up to COLUMNS rows of x.

    Each step reads PARTS · BLOCK columns of each of these rows of W. BLOCK columns share a scale.
    """
    start_next(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[None, :]
    known = (row < N)[None, :]
    # There are PARTS products of BLOCK columns each, one for each warp. These products are added at the end.
    total = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    for start in range(0, K, BLOCK * PARTS):
        first = start + tl.arange(0, PARTS) * BLOCK
        # Load codes [PARTS, ROWS, BLOCK], scales [PARTS, ROWS] and x [PARTS, BLOCK, COLUMNS].
        k = first[:, None] + tl.arange(0, BLOCK)[None, :]
        inside = (k < K)[:, None, :] & known[:, :, None]
        codes = tl.load(
            code_ptr + at[:, :, None] * K + k[:, None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )
        scales = tl.load(scale_ptr + at * G + (first // WIDTH)[:, None], mask=(first < K)[:, None] & known, other=0.0)
        there = (k < K)[:, :, None] & (column < M)[None, None, :]
        x = tl.load(x_ptr + column[None, None, :] * K + k[:, :, None], mask=there, other=0.0)
        numbers = _numbers(codes, scales[:, :, None]).to(tl.bfloat16).to(x.dtype)
        total = tl.dot(numbers, x, total)
    y = tl.sum(total, 0)
    store_rows(y, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


def takes_width(width: int) -> bool:
    """Return whether the kernels for an x with few rows support blocks of ``width`` columns.

    A width of 0 stands for all columns of a row.
    """
    return width == 0 or (WIDTHS[0] <= width <= WIDTHS[1] and width & (width - 1) == 0)


def takes_block_rows(x: Tensor, codes: Tensor, scales: Tensor, width: int) -> bool:
    """Return whether `block_rows` can multiply x by the weight.

    The width of the blocks must be supported, the scales must be contiguous, and `takes_float8_rows` must be True.
    """
    return takes_width(width) and scales.is_contiguous() and takes_float8_rows(x, codes)


def block_rows(
    x: Tensor, codes: Tensor, scales: Tensor, width: int, bias: Tensor | None, act: str = "",
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply x [..., C], which has few rows, by the quantized weight, which is not dequantized in memory.

    The results are y [..., O] and act(gate) · up [..., O / 2]. Without an activation, the second result is empty.
    ``low_rank`` must have the dtype of x.
    """
    (N, K), G = codes.shape, scales.shape[1]
    y, M, x = x.new_empty(*x.shape[:-1], N), x.numel() // K, x.contiguous()
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    bias = None if bias is None else bias.contiguous()
    (low, B, R), constants = low_rank_arguments(x, low_rank)
    constants |= {"HAS_BIAS": bias is not None, "ACT": act}
    with on_device_of(x):
        # One row is multiplied without matrix units, and several rows are multiplied with matrix units.
        if M == 1:
            rows, columns, warps = ROW_TILE
            by_row = width == 0
            width, G = (ROW_WIDTH, cdiv(K, ROW_WIDTH)) if by_row else (width, G)
            blocks = max(min(columns // width, next_power_of_2(G)), 1)
            _block_row_kernel[(cdiv(N, rows),)](
                x, codes, scales, bias, y, product, low, B, N, K, G, R, PTX=has_ptx(x), ROWS=rows,
                BLOCKS=blocks, BY_ROW=by_row, WIDTH=width, **constants, num_warps=warps,
            )  # fmt: skip
        else:
            width = width or max(next_power_of_2(K), WIDTHS[0])
            rows, block, warps = next(tile for most, *tile in TILES if most >= M)
            _block_rows_kernel[(cdiv(N, rows),)](
                x, codes, scales, bias, y, product, low, B, M, N, K, G, R, ROWS=rows,
                COLUMNS=max(next_power_of_2(M), 8), BLOCK=min(block, width), PARTS=warps, WIDTH=width, **constants,
                num_warps=warps,
            )  # fmt: skip
    return y, product


@register
class Float8Blocks(Format):
    """The format with e4m3 codes [O, C] and scales [O, ceil(C / width)] from a checkpoint.

    The layout is ``[width]``, the number of columns that share a scale, or ``[0]`` if all columns of a row share one
    scale.
    """

    name = "blocks"
    number = 3
    by_column = ("scales",)
    is_kept = True
    remedy = "keep_quantized=False"

    def reference(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight in plain PyTorch; see `blocks_dense_reference`."""
        return blocks_dense_reference(weight.codes, weight.scales, weight.layout[0], weight.dtype)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight; see `blocks_dense`."""
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        return blocks_dense(codes, scales, weight.layout[0], weight.dtype)

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply x, which has few rows, by the weight; see `block_rows`."""
        codes, scales, width = weight.codes, weight.scales, weight.layout[0]
        if not takes_block_rows(x, codes, scales, width):
            return None
        return block_rows(x, codes, scales, width, bias, act, low_rank)

    def block(self, layout: Sequence[int], *, rows: bool) -> int:
        """Return the block size. The size of a slice must be a multiple of the block size.

        A slice of columns must consist of whole blocks. A slice of rows may have any size, because each row has its own
        scales.
        """
        return 1 if rows else max(layout[0], 1)

    def slices(
        self, tensors: dict[str, Tensor], shape: torch.Size, layout: list[int], dim: int, ranks: int
    ) -> tuple[dict[str, Tensor], list[int], dict[str, int]]:
        """Rearrange the tensors for slicing; see `Format.slices`.

        If each row has one scale, all slices of columns have the same scales.
        """
        tensors, layout, dims = super().slices(tensors, shape, layout, dim, ranks)
        if layout[0] == 0 and dim == len(shape) - 1:
            del dims["scales"]
        return tensors, layout, dims
