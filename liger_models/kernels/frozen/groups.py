"""Kernels for all formats of frozen weights that have groups of four-bit codes.

Each row of W is divided into groups of columns that share a scale.

    W = rounded(number(code) · scale)

A byte holds the codes of two neighboring columns, with the code of the first column in the lower half. The formats
differ in the numbers that the 16 codes stand for, and in how scales are stored. The product of number and scale is
computed in fp32 and rounded once, to bfloat16 (or to float16, see `GroupConstants`). The dequantized W is identical to
the weight of a model that loads the checkpoint as dense weights.

W is dequantized in one pass before each product, and freed after the product. If x has few rows, as in a decoding step,
the forward does not dequantize W in memory. A kernel reads the codes, and dequantizes each tile of W in registers right
before the product. The elements of these tiles are identical to those of a W that is dequantized in memory. Only the
order in which the products with x are summed differs.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.code_rows import code_rows, group_scale, takes_code_rows
from liger_models.kernels.frozen.weight import Format, FrozenWeight
from liger_models.kernels.matmul.row_linear import (
    LowRank,
    are_few,
    load_B,
    low_rank_arguments,
    low_rank_row,
    store_row,
    store_rows,
)
from liger_models.kernels.overlap import end_previous, start_next
from liger_models.kernels.tiles import cdiv, next_power_of_2

NUMBERS = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "int4": tuple(float(number) for number in range(-8, 8)),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip
"""The numbers that the codes 0 to 15 stand for: floating-point numbers of four bits, integers, and quantiles (NF4)."""

MOST_BYTES = 4
PIECES, NUM_WARPS = 512, 4
"""The codes are dequantized in pieces of up to `MOST_BYTES` bytes. A program dequantizes `PIECES` pieces, and has
`NUM_WARPS` warps."""

MOST_ROWS = 32
"""Maximum number of rows of x that are multiplied by the codes. An x with more rows is multiplied by the dequantized
weight."""

WIDTHS = 16, 256
"""Minimum and maximum width of groups, in columns, that the kernels for an x with few rows support. The width must also
be a power of 2."""

ROW_TILE = (4, 512, 4)
TILES = ((8, 16, 128, 4), (32, 32, 128, 4))
"""`ROW_TILE` is the tile of the kernel for one row of x: number of results per program, number of columns per step, and
number of warps. `TILES` is for several rows of x. Each of its entries has the maximum number of rows of x, followed by
the same three numbers."""


class GroupConstants(NamedTuple):
    """Constants that tell kernels what the codes stand for, and how to apply the scales of groups and of whole rows.

    Attributes:
        CODES: name of an entry of `NUMBERS`.
        SCALES: "e8m0" for bytes that are exponents of 2, "e4m3" for bytes in float8, or "float" for floating-point
            scales.
        WHOLE: whether the scale of a group is multiplied ("times") or divided ("over") by the scale of its row; "" if
            rows have no scales.
        HALF: whether the elements of W are rounded to float16 instead of bfloat16.
    """

    CODES: str
    SCALES: str
    WHOLE: str = ""
    HALF: bool = False


@triton.jit
def group_number(code, table_ptr, CODES: tl.constexpr):
    """Return the fp32 numbers that the codes stand for. ``code`` is an int32 tensor of values from 0 to 15."""
    if CODES == "e2m1":
        # Move the code's sign, exponent and mantissa to the fields of an fp32 number. The exponent bias of fp32 is
        # larger by 126, so the fp32 number is then multiplied by 2^126.
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif CODES == "int4":
        # From 2^23 to 2^24, the last mantissa bit of an fp32 number stands for 1. The fp32 number is thus 2^23 + code.
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        return tl.load(table_ptr + code)


@triton.jit
def group_rounded(numbers, HALF: tl.constexpr):
    """Round numbers in fp32 to the dtype of the dequantized weight."""
    return numbers.to(tl.float16) if HALF else numbers.to(tl.bfloat16)


@triton.jit
def load_pieces(code_ptr, pieces, NUMBERS: tl.constexpr, PIECES: tl.constexpr, LARGE: tl.constexpr):
    """Load the codes of PIECES pieces. A piece is an integer that holds NUMBERS codes with the same scale.

    Each thread has whole pieces, so threads exchange no data. Neighboring threads have neighboring pieces, so together
    they read and write contiguous memory. The results are::

        first     index of the program's first piece
        lane      index of each piece among the program's pieces
        piece     index of each piece in the weight, in int64 if LARGE
        inside    whether the weight has this piece
        codes     the codes of each piece, [PIECES, 1] int32
    """
    # Without the hint, a thread would load several neighboring pieces at once.
    lane = tl.max_contiguous(tl.arange(0, PIECES), 1)
    first = tl.program_id(0).to(tl.int64) * PIECES
    piece = first + lane if LARGE else tl.program_id(0) * PIECES + lane
    inside = piece < pieces
    dtype: tl.constexpr = tl.uint8 if NUMBERS == 2 else tl.int16 if NUMBERS == 4 else tl.int32
    codes = tl.load(code_ptr.to(tl.pointer_type(dtype)) + first + lane, mask=inside, other=0)
    return first, lane, piece, inside, codes.to(tl.int32)[:, None]


@triton.jit
def _group_weight_kernel(
    code_ptr, scale_ptr, whole_ptr, table_ptr, w_ptr, pieces, G: tl.constexpr, PIECES_PER_SCALE: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr, NUMBERS: tl.constexpr,
    PIECES: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Dequantize PIECES pieces per program. The pieces are divided among the threads; see `load_pieces`."""
    first, lane, piece, inside, codes = load_pieces(code_ptr, pieces, NUMBERS, PIECES, LARGE)
    group = piece // PIECES_PER_SCALE
    scale = group_scale(scale_ptr, whole_ptr, group, group // G, inside, SCALES, WHOLE)[:, None]
    number = tl.arange(0, NUMBERS)[None, :]
    numbers = group_number((codes >> (4 * number)) & 15, table_ptr, CODES) * scale
    numbers = group_rounded(numbers, HALF).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + first * NUMBERS + lane[:, None] * NUMBERS + number, numbers, mask=inside[:, None])


@triton.jit
def _group_rows_kernel(
    x_ptr, code_ptr, scale_ptr, whole_ptr, table_ptr, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, K, G, R,
    PAIRS: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, RANKS: tl.constexpr, OVERLAPS: tl.constexpr, LOW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of W by up to COLUMNS rows of x.

    Each step reads GROUPS groups of PAIRS bytes from each of these rows of W.

    A byte holds the codes of an even column and of the odd column after it. The even and the odd columns of x are
    therefore multiplied separately.
    """
    start_next(OVERLAPS)
    STEP: tl.constexpr = GROUPS * PAIRS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None]
    known = (row < N)[:, None]
    column = tl.arange(0, COLUMNS)
    if RANKS and COLUMNS == 1:
        B = load_B(B_ptr, row, N, R, RANKS)
    if COLUMNS == 1 and LOW != "awaited":
        end_previous(OVERLAPS)
    total = tl.zeros([ROWS, STEP] if COLUMNS == 1 else [ROWS, COLUMNS], tl.float32)
    for start in range(0, G, GROUPS):
        group = start + tl.arange(0, GROUPS)[None, :]
        inside = known & (group < G)
        scale = group_scale(scale_ptr, whole_ptr, at * G + group, at, inside, SCALES, WHOLE)  # [ROWS, GROUPS]
        k = start * PAIRS + tl.arange(0, STEP)
        there = k < K // 2
        pair = tl.load(
            code_ptr + at * (K // 2) + k[None, :], mask=known & there[None, :], other=0, eviction_policy="evict_first"
        ).to(tl.int32)
        # Dequantize both codes of each byte, [ROWS, GROUPS, PAIRS], with the rounding of `groups_dense`.
        pair = tl.reshape(pair, [ROWS, GROUPS, PAIRS])
        first = group_rounded(group_number(pair & 15, table_ptr, CODES) * scale[:, :, None], HALF)
        second = group_rounded(group_number(pair >> 4, table_ptr, CODES) * scale[:, :, None], HALF)
        first, second = tl.reshape(first, [ROWS, STEP]), tl.reshape(second, [ROWS, STEP])
        if COLUMNS == 1:
            even = tl.load(x_ptr + 2 * k, mask=there, other=0.0).to(tl.float32)
            odd = tl.load(x_ptr + 2 * k + 1, mask=there, other=0.0).to(tl.float32)
            total += first.to(tl.float32) * even[None, :] + second.to(tl.float32) * odd[None, :]
        else:
            x = x_ptr + column[None, :] * K + 2 * k[:, None]
            mask = there[:, None] & (column < M)[None, :]
            even, odd = tl.load(x, mask=mask, other=0.0), tl.load(x + 1, mask=mask, other=0.0)
            total = tl.dot(first.to(even.dtype), even, total)
            total = tl.dot(second.to(odd.dtype), odd, total)
    if COLUMNS == 1:
        y = tl.sum(total, 1)
        if RANKS:
            y += low_rank_row(B, low_ptr, R, RANKS, LOW)
        first = tl.program_id(0).to(tl.int64) * ROWS
        store_row(y, first, bias_ptr, y_ptr, product_ptr, N, HAS_BIAS, ACT, ROWS)
    else:
        store_rows(total, bias_ptr, y_ptr, product_ptr, low_ptr, B_ptr, M, N, R, HAS_BIAS, ACT, RANKS, ROWS, COLUMNS)


_tables: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}


def table_of(codes: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the 16 numbers of the entry ``codes`` of `NUMBERS`, as a tensor on the device."""
    key = codes, device, dtype
    if key not in _tables:
        table = torch.tensor(NUMBERS[codes], dtype=dtype, device=device)
        if type(table) is not Tensor:  # a fake tensor of `layers.compile_ahead` has no values for later calls
            return table
        _tables[key] = table
    return _tables[key]


def _scales_reference(scales: Tensor, whole: Tensor | None, constants: GroupConstants) -> Tensor:
    """Return the scales [..., O, G] in fp32."""
    if constants.SCALES == "e8m0":
        numbers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    else:
        numbers = scales.float()
    if whole is None:
        return numbers
    return numbers * whole if constants.WHOLE == "times" else numbers / whole


def groups_dense_reference(
    codes: Tensor, scales: Tensor, whole: Tensor | None, constants: GroupConstants, dtype: torch.dtype
) -> Tensor:
    """Compute `groups_dense` in plain PyTorch, also for stacked matrices."""
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    rows, G = out.view(-1, out.shape[-1]), scales.shape[-1]
    codes, scales = codes.reshape(len(rows), -1), scales.reshape(len(rows), G)
    whole = None if whole is None else whole.reshape(len(rows), 1)
    rounded = torch.float16 if constants.HALF else torch.bfloat16
    # Build the two numbers of each byte, [256, 2].
    table = torch.tensor(NUMBERS[constants.CODES], dtype=torch.float32, device=codes.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], 1)
    step = max(2**22 // max(out.shape[-1], 1), 1)  # some rows at a time, to save memory
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        scale = _scales_reference(scales[part], None if whole is None else whole[part], constants)
        numbers = pairs[codes[part].int()].flatten(-2).unflatten(-1, (G, -1))
        rows[part] = (numbers * scale[..., None]).flatten(-2).to(rounded).to(dtype)
    return out


def groups_dense(
    codes: Tensor, scales: Tensor, whole: Tensor | None, constants: GroupConstants, dtype: torch.dtype
) -> Tensor:
    """Dequantize the weight [..., O, C], round it, and cast it to ``dtype``.

    The weight is rounded to bfloat16 or, with ``constants.HALF``, to float16.

    Args:
        codes: [..., O, C / 2] uint8, contiguous.
        scales: [..., O, G], contiguous, one scale for each C / G columns of a row.
        whole: [..., O, 1] fp32, contiguous, a scale for each row, or None.
        constants: the meaning of codes and scales.
        dtype: float32, float16 or bfloat16.
    """
    *rows, half = codes.shape
    G = scales.shape[-1]
    weight = torch.empty(*rows, 2 * half, dtype=dtype, device=codes.device)
    if not use_triton(weight):
        return groups_dense_reference(codes, scales, whole, constants, dtype)
    pieces, launch = in_pieces(codes, half // G)
    with on_device_of(codes):
        _group_weight_kernel[(cdiv(pieces, PIECES),)](
            codes, bytes_of(scales), codes if whole is None else whole, table_of(constants.CODES, codes.device), weight,
            pieces, G=G if constants.WHOLE else 1, CODES=constants.CODES, SCALES=constants.SCALES,
            WHOLE=constants.WHOLE, HALF=constants.HALF, **launch,
        )  # fmt: skip
    return weight


def in_pieces(codes: Tensor, width: int) -> tuple[int, dict[str, Any]]:
    """Return the number of pieces into which the codes are split, and the constants that a launch of the kernel needs.

    The codes of a piece share a scale, and the address of a piece is a multiple of its size. A piece is as large as
    these two conditions allow, but has at most `MOST_BYTES` bytes. ``width`` is the number of bytes of codes that share
    a scale.
    """
    aligned = codes.data_ptr() | width | MOST_BYTES
    size = aligned & -aligned  # bytes of a piece: a power of 2 that divides all three numbers
    pieces = codes.numel() // size
    constants = {"NUMBERS": 2 * size, "PIECES_PER_SCALE": width // size, "PIECES": PIECES, "num_warps": NUM_WARPS}
    return pieces, constants | {"LARGE": pieces >= 2**31 - PIECES}


def bytes_of(scales: Tensor) -> Tensor:
    """Return float8 scales viewed as bytes, and all other scales unchanged."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def takes_group(width: int) -> bool:
    """Return whether the kernels for an x with few rows support groups of ``width`` columns."""
    return WIDTHS[0] <= width <= WIDTHS[1] and width & (width - 1) == 0


def kind_of(scales: Tensor, pairs: int, constants: GroupConstants) -> str | None:
    """Return the ``kind`` to pass to `code_rows` for groups of ``pairs`` bytes, or None if `code_rows` does not support
    them.
    """
    if constants.HALF:
        return None
    exact = constants.SCALES == "e8m0" or (scales.dtype == torch.bfloat16 and not constants.WHOLE)
    if exact and pairs >= 16 and constants.CODES != "nf4":  # bfloat16 can't represent the numbers of nf4
        return "one_scale"
    if constants.CODES == "e2m1" and pairs >= 8:
        return "two_scales"
    return "products" if pairs >= 16 else None


def group_rows(
    x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor | None, constants: GroupConstants, bias: Tensor | None,
    act: str = "", low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply x [..., C], which has few rows, by the quantized weight, which is not dequantized in memory.

    The results are y [..., O] and act(gate) · up [..., O / 2]. Without an activation, the second result is empty.
    ``low_rank`` must have the dtype of x.
    """
    (N, half), G = codes.shape, scales.shape[1]
    K, pairs = 2 * half, half // G
    kind = kind_of(scales, pairs, constants)
    if kind is not None and takes_code_rows(x, codes):
        table = table_of(constants.CODES, codes.device, torch.float32 if kind == "products" else torch.bfloat16)
        return code_rows(
            kind, x, codes, bytes_of(scales), whole, table, bias, act, low_rank, SCALES=constants.SCALES,
            WHOLE=constants.WHOLE,
        )  # fmt: skip
    y, M, x = x.new_empty(*x.shape[:-1], N), x.numel() // K, x.contiguous()
    product = x.new_empty(*x.shape[:-1], N // 2) if act else x.new_empty(0)
    bias = None if bias is None else bias.contiguous()
    (low, B, R), options = low_rank_arguments(x, low_rank)
    rows, columns, warps = ROW_TILE if M == 1 else next(tile for most, *tile in TILES if most >= M)
    options |= {"HAS_BIAS": bias is not None, "ACT": act, **constants._asdict(), "num_warps": warps}
    if M > 1:
        options.setdefault("LOW", "")
    with on_device_of(x):
        _group_rows_kernel[(cdiv(N, rows),)](
            x, codes, bytes_of(scales), codes if whole is None else whole, table_of(constants.CODES, codes.device),
            bias, y, product, low, B, M, N, K, G, R, PAIRS=pairs, ROWS=rows,
            COLUMNS=1 if M == 1 else max(next_power_of_2(M), 8),
            GROUPS=max(min(columns // (2 * pairs), next_power_of_2(G)), 1), **options,
        )  # fmt: skip
    return y, product


class Groups(Format):
    """A format with codes [O, C / 2] and scales [O, G] from a checkpoint.

    The first number of the layout is C / G, the number of columns per scale.
    """

    is_kept = True
    by_column = ("scales",)
    remedy = "keep_quantized=False"
    codes_kind: ClassVar[str]
    scales_kind: ClassVar[str]

    def constants(self, layout: Sequence[int]) -> GroupConstants:
        """Return the constants with which kernels dequantize a weight of this layout."""
        return GroupConstants(self.codes_kind, self.scales_kind)

    def rows_of(self, weight: FrozenWeight) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes, the scales of groups, and the scales of whole rows (or None). The rows of all experts are
        concatenated.
        """
        codes, scales, *whole = (tensor.flatten(0, -2) for tensor in weight.tensors)
        return codes, scales, whole[0] if whole else None

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight; see `groups_dense`."""
        codes, scales, *whole = (tensor.contiguous() for tensor in weight.tensors)
        return groups_dense(codes, scales, whole[0] if whole else None, self.constants(weight.layout), weight.dtype)

    def reference(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight in plain PyTorch; see `groups_dense_reference`."""
        codes, scales, *whole = weight.tensors
        constants = self.constants(weight.layout)
        return groups_dense_reference(codes, scales, whole[0] if whole else None, constants, weight.dtype)

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply x, which has few rows, by the weight; see `group_rows`."""
        codes, scales, whole = self.rows_of(weight)
        contiguous = all(tensor is None or tensor.is_contiguous() for tensor in (codes, scales, whole))
        if not (takes_group(weight.layout[0]) and contiguous and are_few(x, MOST_ROWS)):
            return None
        return group_rows(x, codes, scales, whole, self.constants(weight.layout), bias, act, low_rank)

    def block(self, layout: Sequence[int], *, rows: bool) -> int:
        """Return the block size. The size of a slice must be a multiple of the block size.

        A slice of columns must consist of whole groups. A slice of rows may have any size.
        """
        return 1 if rows else layout[0]


def check_width(where: str, columns: int, width: int) -> None:
    """Raise ValueError unless a row of ``columns`` columns consists of whole groups of ``width`` columns."""
    if width < 2 or width % 2 or columns % width or math.prod((columns, width)) == 0:
        raise ValueError(
            f"{where}: columns must be a multiple of those that share a scale, an even number, got {columns} and "
            f"{width}. Load the checkpoint without quantization instead."
        )
