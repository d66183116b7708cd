"""Products of a few rows with their experts' matrices. The products take about as long as reading the matrices.

These kernels are for decoding steps, and compute no gradients. Copy k of token n has the index s = n · K + k, as in
`permutation`. e is the expert of this copy, and A is one of the activations of `expert_act`. Three kernels compute::

    g_s = A(Wgu_e · x_n + bgu_e)          one kernel
    o_s = Wd_e · g_s                      one kernel
    y_n = Σ_k w_nk · (o_s + bd_e)         `permutation.unpermute`

The copies are not sorted. The matrix of each expert is divided into blocks of rows. Each copy has one program for every
block of its expert's matrix. All copies with the same expert are grouped in tiles of up to `FEW_ROWS` copies. Only the
programs of the first copy in a tile do any work: they find the other copies in the tile, and multiply all copies of the
tile together. If there is only one token, all its copies have different experts. Each copy is then multiplied
separately, without matrix units, as in `row_linear`.

If a backward follows, the copies are sorted by expert. `few_product` then multiplies the sorted rows by frozen
matrices, also in tiles of up to `FEW_ROWS` rows. All these kernels read matrices in their stored form (dense, float8,
or 4 bits), and read only the matrices of experts that have rows.
"""

from typing import Any

from torch import Tensor

from liger_models.kernels.dispatch import fitting_stages, on_device_of, tl, triton
from liger_models.kernels.frozen.code_rows import group_scale
from liger_models.kernels.frozen.float8_blocks import _numbers, takes_width
from liger_models.kernels.frozen.frozen_float8_linear import converts
from liger_models.kernels.frozen.groups import Groups, bytes_of, group_number, group_rounded, table_of, takes_group
from liger_models.kernels.frozen.nf4_rows import nf4_scale
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.moe.expert_act import _expert_act, inputs_of
from liger_models.kernels.moe.grouped_mm import _rows_of_tile, _tile, most_tiles
from liger_models.kernels.moe.permutation import unpermute
from liger_models.kernels.overlap import await_previous, end_previous, overlap, start_next
from liger_models.kernels.tiles import cdiv, dot_tile, next_power_of_2

FEW_ROWS = 16
"""Number of rows per tile. The kernels of this file run if the experts have at most this many rows on average."""

FEW_COPIES = 128, 512
"""To find the copies of one expert, a program reads the experts of all copies in one block, which has one of these two
sizes. A launch uses the smaller block if all copies fit into it. If there are too many copies for the larger block, the
copies are sorted, and other kernels run."""

FEW_BLOCKS = {"nf4": (64, 64), "float8": (64, 128), "blocks": (64, 128), "groups": (128, 64), "dense": (64, 128)}
MANY_BLOCKS = {**FEW_BLOCKS, "dense": (64, 64)}
FEW_WARPS = 4
FEW_STAGES = 4
"""Options for several rows. `FEW_BLOCKS` maps a storage format to the number of results per tile and the number of
columns per step. `FEW_WARPS` and `FEW_STAGES` are the numbers of warps and of pipeline stages for all formats.
`MANY_BLOCKS` replaces `FEW_BLOCKS` if there are more than `FEW_COPIES[0]` copies. Most programs then have nothing to
compute. If programs need less shared memory, more of them run at the same time, which makes the kernel 3 % faster on an
H200."""

ROW_TILES = {"gate_up": (8, 256, 2, 3), "biased": (16, 256, 4, 1), "down": (8, 128, 1, 4), "frozen": (4, 256, 1, 3)}
"""Options for a single row: number of results per tile, number of columns per step, number of warps, and number of
steps in flight. "gate_up" and "down" are for dense matrices, and "frozen" is for all frozen matrices. "biased" is for
dense gate and up matrices with biases. With the options of "gate_up", the kernel for matrices with biases would be 8 %
faster on its own, but whole decoding steps have not been measured with these options."""


@triton.jit
def _few_tile(
    tile, where_ptr, COUNT, SORTED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Return the expert of a tile, the first row of the tile, the end of the expert's rows, and whether the tile has
    rows to compute.

    If rows are sorted, ``where_ptr`` holds COUNT numbers: for each expert, the index of the end of its rows. If rows
    are not sorted, ``where_ptr`` holds COUNT indices: the expert of each copy. There is then one tile for each copy,
    and a copy's row is the number of earlier copies with the same expert. Only some of these tiles have rows to
    compute: the tiles whose copy is the first of up to BLOCK_ROWS copies with the same expert.
    """
    if SORTED:
        expert, first, end = _rows_of_tile(tile, where_ptr, COUNT, BLOCK, BLOCK_ROWS)
        return expert.to(tl.int64), first, end, expert < COUNT
    else:
        expert = tl.load(where_ptr + tile)
        if BLOCK_ROWS == 1:
            return expert, 0, 1, True
        else:
            lanes = tl.arange(0, BLOCK)
            mine = tl.load(where_ptr + lanes, mask=lanes < COUNT, other=-1) == expert
            first = tl.sum((mine & (lanes < tile)).to(tl.int32), 0)
            return expert, first, tl.sum(mine.to(tl.int32), 0), first % BLOCK_ROWS == 0


@triton.jit
def _few_rows(
    tile, where_ptr, COUNT, expert, first, end, SORTED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Return the indices of the rows (or, if rows are not sorted, of the copies) in a tile, and a mask.

    The mask is True where the tile has a row.
    """
    wanted = first + tl.arange(0, BLOCK_ROWS)
    if SORTED:
        rows = wanted
    elif BLOCK_ROWS == 1:
        rows = tile + wanted
    else:
        lanes = tl.arange(0, BLOCK)
        mine = tl.load(where_ptr + lanes, mask=lanes < COUNT, other=-1) == expert
        # ``place`` is the position of each copy among the copies of the expert. The tile consists of the copies whose
        # position is in ``wanted``. All [BLOCK_ROWS, BLOCK] pairs are compared at once.
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
        rows = tl.sum(tl.where(mine[None, :] & (place[None, :] == wanted[:, None]), lanes[None, :], 0), 1)
    return rows.to(tl.int64), wanted < end


@triton.jit
def _few_store(
    total, expert, rows, inside, bias_ptr, out_ptr, OUT, limit, ACT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums. If there is an activation ACT, instead add the bias to the sums, and store the activation of
    the results. Rounding is as in `moe_mlp`.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    start = (tl.program_id(0) % tl.cdiv(OUT, BLOCK_OUT)) * BLOCK_OUT
    total = total.to(dtype)
    if ACT == "":
        columns = start + tl.arange(0, BLOCK_OUT)
        mask = inside[:, None] & (columns < OUT)[None, :]
        tl.store(out_ptr + rows[:, None] * OUT + columns[None, :], total, mask=mask)
    else:
        pairs = total.to(tl.float32)
        if BIAS:
            columns = start + tl.arange(0, BLOCK_OUT)
            bias = tl.load(bias_ptr + expert * OUT + columns, mask=columns < OUT, other=0.0)
            pairs += bias.to(tl.float32)[None, :]
        INPUTS: tl.constexpr = 1 if ACT == "relu2" else 2
        if INPUTS == 1:
            gate, up = pairs, tl.zeros_like(pairs) + 1.0
        else:
            # Split the interleaved [BLOCK_ROWS, BLOCK_OUT] into gate and up, [BLOCK_ROWS, BLOCK_OUT / 2] each.
            gate, up = tl.split(tl.reshape(pairs, [BLOCK_ROWS, BLOCK_OUT // 2, 2]))
        a, u, _, _ = _expert_act(gate, up, limit, ACT)
        results = start // INPUTS + tl.arange(0, BLOCK_OUT // INPUTS)
        mask = inside[:, None] & (INPUTS * results < OUT)[None, :]
        product = (a.to(dtype).to(tl.float32) * u).to(dtype)
        tl.store(out_ptr + rows[:, None] * (OUT // INPUTS) + results[None, :], product, mask=mask)


@triton.jit
def _few_nf4_kernel(
    rows_ptr, code_ptr, scale_ptr, factor_ptr, mean_ptr, table_ptr, where_ptr, bias_ptr, out_ptr, COUNT, IN, OUT, K,
    limit, PRECISION: tl.constexpr, SORTED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Compute the same results as `_few_kernel`, but from matrices that are stored in NF4.

    Each step reads BLOCK_IN codes that share a scale from each of BLOCK_OUT rows of the expert's matrix.
    """
    await_previous(OVERLAPS)
    tiles_out = tl.cdiv(OUT, BLOCK_OUT)
    tile = tl.program_id(0) // tiles_out
    expert, first, end, found = _few_tile(tile, where_ptr, COUNT, SORTED, BLOCK, BLOCK_ROWS)
    if found:
        rows, inside = _few_rows(tile, where_ptr, COUNT, expert, first, end, SORTED, BLOCK, BLOCK_ROWS)
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        stored: tl.constexpr = table_ptr.dtype.element_ty
        columns = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        known = columns < OUT
        pairs = tl.arange(0, BLOCK_IN // 2)
        # The rows of all experts' matrices are numbered consecutively. Each byte holds the codes of two numbers.
        matrix_row = expert * OUT + columns
        mean = tl.load(mean_ptr + expert).to(tl.float32)
        a_ptrs = rows_ptr + (rows // K)[:, None] * IN + 2 * pairs[None, :]
        code_ptrs = code_ptr + matrix_row[:, None] * (IN // 2) + pairs[None, :]
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for step in range(0, IN // BLOCK_IN):
            block = matrix_row * (IN // BLOCK_IN) + step
            scale = nf4_scale(scale_ptr, factor_ptr, mean, block, known, stored, SCALES_PER_FACTOR)[:, None]
            pair = tl.load(code_ptrs + step * (BLOCK_IN // 2), mask=known[:, None], other=0).to(tl.int32)
            # Dequantize both numbers of a byte exactly as `FrozenWeight.dense` does. x is read with a stride of 2, so
            # that its columns match either the first or the second numbers of the bytes.
            upper = (tl.load(table_ptr + (pair >> 4)).to(tl.float32) * scale).to(stored).to(dtype)
            lower = (tl.load(table_ptr + (pair & 15)).to(tl.float32) * scale).to(stored).to(dtype)
            a = tl.load(a_ptrs + step * BLOCK_IN, mask=inside[:, None], other=0.0)
            total = tl.dot(a, tl.trans(upper), total, input_precision=PRECISION)
            a = tl.load(a_ptrs + step * BLOCK_IN + 1, mask=inside[:, None], other=0.0)
            total = tl.dot(a, tl.trans(lower), total, input_precision=PRECISION)
        _few_store(total, expert, rows, inside, bias_ptr, out_ptr, OUT, limit, ACT, BIAS, BLOCK_ROWS, BLOCK_OUT)


@triton.jit
def _few_groups_kernel(
    rows_ptr, code_ptr, scale_ptr, whole_ptr, table_ptr, where_ptr, bias_ptr, out_ptr, COUNT, IN, OUT, K, limit, G,
    PRECISION: tl.constexpr, SORTED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the same results as `_few_kernel`, but from matrices that are stored in a format of `frozen.groups`.

    Each step reads GROUPS groups of PAIRS bytes of codes from each of BLOCK_OUT rows of the expert's matrix.
    """
    await_previous(OVERLAPS)
    tiles_out = tl.cdiv(OUT, BLOCK_OUT)
    tile = tl.program_id(0) // tiles_out
    expert, first, end, found = _few_tile(tile, where_ptr, COUNT, SORTED, BLOCK, BLOCK_ROWS)
    if found:
        rows, inside = _few_rows(tile, where_ptr, COUNT, expert, first, end, SORTED, BLOCK, BLOCK_ROWS)
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        STEP: tl.constexpr = GROUPS * PAIRS
        columns = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        known = (columns < OUT)[:, None]
        matrix_row = (expert * OUT + columns)[:, None]
        a_starts = rows_ptr + (rows // K)[:, None] * IN
        total = tl.zeros([BLOCK_OUT, STEP] if BLOCK_ROWS == 1 else [BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in range(0, G, GROUPS):
            group = start + tl.arange(0, GROUPS)[None, :]
            there = known & (group < G)
            scale = group_scale(scale_ptr, whole_ptr, matrix_row * G + group, matrix_row, there, SCALES, WHOLE)
            k = (start * PAIRS + tl.arange(0, STEP))[None, :]
            pair = tl.load(code_ptr + matrix_row * (IN // 2) + k, mask=known & (k < IN // 2), other=0).to(tl.int32)
            # Dequantize both numbers of a byte exactly as `FrozenWeight.dense` does. x is read with a stride of 2.
            pair = tl.reshape(pair, [BLOCK_OUT, GROUPS, PAIRS])
            lower = group_rounded(group_number(pair & 15, table_ptr, CODES) * scale[:, :, None], HALF).to(dtype)
            upper = group_rounded(group_number(pair >> 4, table_ptr, CODES) * scale[:, :, None], HALF).to(dtype)
            lower, upper = tl.reshape(lower, [BLOCK_OUT, STEP]), tl.reshape(upper, [BLOCK_OUT, STEP])
            mask = inside[:, None] & (k < IN // 2)
            even = tl.load(a_starts + 2 * k, mask=mask, other=0.0)
            odd = tl.load(a_starts + 2 * k + 1, mask=mask, other=0.0)
            if BLOCK_ROWS == 1:
                total += even.to(tl.float32) * lower.to(tl.float32) + odd.to(tl.float32) * upper.to(tl.float32)
            else:
                total = tl.dot(even, tl.trans(lower), total, input_precision=PRECISION)
                total = tl.dot(odd, tl.trans(upper), total, input_precision=PRECISION)
        sums = tl.sum(total, 1)[None, :] if BLOCK_ROWS == 1 else total
        _few_store(sums, expert, rows, inside, bias_ptr, out_ptr, OUT, limit, ACT, BIAS, BLOCK_ROWS, BLOCK_OUT)


@triton.jit
def _few_kernel(
    rows_ptr, weight_ptr, scale_ptr, where_ptr, bias_ptr, out_ptr, COUNT, IN, OUT, K, limit, PRECISION: tl.constexpr,
    SORTED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply row s // K by the matrix of the expert of copy s, for each copy s. Each step reads BLOCK_IN columns of
    BLOCK_OUT rows of the expert's matrix.

    With SCALED, each row of a matrix has one scale or, if WIDTH is not 0, one scale for every WIDTH columns. WIDTH is a
    multiple of BLOCK_IN.

    With EARLY, the kernel loads the part of the matrix for its first step while the previous kernel is still running.
    EARLY is allowed only if there is a single token, and if the previous launch ran this kernel for the same token
    without EARLY. The previous launch has then already waited for the kernel that writes the experts.
    """
    if EARLY:
        start_next(OVERLAPS)
    elif BLOCK_ROWS == 1:  # the kernel that writes the experts has ended, so the next kernel can read them
        end_previous(OVERLAPS)
        start_next(OVERLAPS)
    else:
        await_previous(OVERLAPS)
    tiles_out = tl.cdiv(OUT, BLOCK_OUT)
    tile = tl.program_id(0) // tiles_out
    expert, first, end, found = _few_tile(tile, where_ptr, COUNT, SORTED, BLOCK, BLOCK_ROWS)
    if found:
        rows, inside = _few_rows(tile, where_ptr, COUNT, expert, first, end, SORTED, BLOCK, BLOCK_ROWS)
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        columns = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        known = (columns < OUT)[:, None]
        matrix_row = (expert * OUT + columns)[:, None]
        # The K copies of a token read the same row.
        a_starts = rows_ptr + (rows // K)[:, None] * IN
        if SCALED and not WIDTH:
            scale = tl.load(scale_ptr + matrix_row, mask=known, other=0.0)
        if EARLY:
            i = tl.arange(0, BLOCK_IN)[None, :]
            early = tl.load(weight_ptr + matrix_row * IN + i, mask=known & (i < IN), other=0.0)
            end_previous(OVERLAPS)
        # With a single row, products are computed elementwise and summed at the end. With several rows, matrix units
        # compute the sums.
        total = tl.zeros([BLOCK_OUT, BLOCK_IN] if BLOCK_ROWS == 1 else [BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in tl.range(BLOCK_IN if EARLY else 0, IN, BLOCK_IN, num_stages=STAGES):
            i = (start + tl.arange(0, BLOCK_IN))[None, :]
            a = tl.load(a_starts + i, mask=inside[:, None] & (i < IN), other=0.0)
            weight = tl.load(weight_ptr + matrix_row * IN + i, mask=known & (i < IN), other=0.0)
            # Dequantize exactly as `FrozenWeight.dense` does, which rounds blocks to bf16.
            if WIDTH:
                scale = tl.load(scale_ptr + matrix_row * tl.cdiv(IN, WIDTH) + start // WIDTH, mask=known, other=0.0)
                weight = _numbers(weight, scale).to(tl.bfloat16).to(dtype)
            elif SCALED:
                weight = (weight.to(tl.float32) * scale).to(dtype)
            if BLOCK_ROWS == 1:
                total += a.to(tl.float32) * weight.to(tl.float32)
            else:
                total = tl.dot(a, tl.trans(weight), total, input_precision=PRECISION)
        # The step that was loaded early is added last.
        if EARLY:
            i = tl.arange(0, BLOCK_IN)[None, :]
            a = tl.load(a_starts + i, mask=inside[:, None] & (i < IN), other=0.0)
            total += a.to(tl.float32) * early.to(tl.float32)
        sums = tl.sum(total, 1)[None, :] if BLOCK_ROWS == 1 else total
        _few_store(sums, expert, rows, inside, bias_ptr, out_ptr, OUT, limit, ACT, BIAS, BLOCK_ROWS, BLOCK_OUT)


def _fits(weight: Weight) -> bool:
    """Return whether the kernels support the experts' matrices ``weight``.

    The kernels support dense matrices, NF4 with whole blocks per row, 4-bit codes in groups of a supported width
    (`takes_group`), and float8 if the GPU can convert float8. If float8 matrices have one scale per block,
    `float8_blocks` must support the width of the blocks. Other formats are not supported.
    """
    if isinstance(weight, Tensor):
        return True
    if isinstance(weight.format, Groups):
        return takes_group(weight.layout[0])
    if weight.format.name == "nf4":
        codes_per_scale, _ = weight.layout
        return codes_per_scale == FEW_BLOCKS["nf4"][1] and weight.shape[2] % codes_per_scale == 0
    takes = weight.format.name == "float8" or (weight.format.name == "blocks" and takes_width(weight.layout[0]))
    return takes and converts(weight.device)


def takes_few(rows: Tensor, weight: Weight) -> bool:
    """Return whether `few_product` runs for rows [S, C] and matrices [X, O, C].

    `few_product` requires few rows per expert, and frozen matrices in a supported format.
    """
    few = len(rows) <= FEW_ROWS * weight.shape[0]
    return few and isinstance(weight, FrozenWeight) and _fits(weight) and not is_batch_invariant()


def takes_few_copies(experts: Tensor, gate_up_weight: Weight, down_weight: Weight) -> bool:
    """Return whether `few_experts` can process K copies of each of N tokens. ``experts`` [N, K] holds the copies'
    experts.

    `few_experts` requires few copies, and matrices in a supported format.
    """
    few = 0 < experts.numel() <= min(FEW_COPIES[-1], FEW_ROWS * gate_up_weight.shape[0])
    return few and _fits(gate_up_weight) and _fits(down_weight) and not is_batch_invariant()


def _launch(
    rows: Tensor, weight: Any, where: Tensor, results: int, K: int, *, is_sorted: bool, one_row: bool = False,
    act: str = "", limit: float = 0.0, bias: Tensor | None = None, is_early: bool = False,
) -> Tensor:  # fmt: skip
    """Launch a kernel that multiplies rows by the transposed matrices of their experts.

    Result s is the product of row s // K and the matrix of the expert of copy s. With ``is_early``, the weight must be
    dense, and the previous launch must have been for the same token and for dense matrices.
    """
    (X, out, width), frozen = weight.shape, isinstance(weight, FrozenWeight)
    storage = weight.format.name if frozen else "dense"
    stored: Any = weight.tensors if frozen else (weight, None)
    if frozen and isinstance(weight.format, Groups):
        storage = "groups"

    # For groups of 4-bit codes, a step reads whole groups. In all other formats, the columns of a step must share a
    # scale. In NF4 and "blocks", the columns of a step therefore belong to one block. In the remaining formats, a step
    # may read any columns of a row.
    one_row = one_row and storage != "nf4"
    block_rows, warps, most_stages = FEW_ROWS, FEW_WARPS, FEW_STAGES
    block_out, block_in = (FEW_BLOCKS if results <= FEW_COPIES[0] else MANY_BLOCKS)[storage]
    if one_row:
        kind = "frozen" if frozen else "down" if not act else "gate_up" if bias is None else "biased"
        block_rows, (block_out, block_in, warps, most_stages) = 1, ROW_TILES[kind]
    blocks = (weight.layout[0] or dot_tile(width)) if storage == "blocks" else 0
    block_in = min(block_in, blocks or block_in)
    stages = fitting_stages(
        rows, most_stages, block_in * (block_rows * rows.element_size() + block_out * stored[0].element_size())
    )
    if is_sorted:
        # If rows are sorted, all rows of a tile have the same expert. The kernel finds this expert from the ends of the
        # X experts' rows.
        tiles, count, block = most_tiles(results, X, FEW_ROWS), X, max(next_power_of_2(X), 2)
    else:
        # Otherwise, there is one tile per copy. If tiles have several rows, the kernel compares the experts of all
        # copies to find the copies in a tile.
        tiles = count = results
        block = next(most for most in FEW_COPIES if results <= most)
    constants = {
        "PRECISION": _tile(rows)[1]["PRECISION"], "SORTED": is_sorted, "ACT": act, "BIAS": bias is not None,
        "BLOCK": block, "BLOCK_ROWS": block_rows, "BLOCK_OUT": block_out,
        "num_warps": warps, "num_stages": stages,
        **overlap(rows),
    }  # fmt: skip
    sizes: tuple[Any, ...] = count, width, out, K, limit
    if storage == "groups":
        pairs, groups = weight.layout[0] // 2, width // weight.layout[0]
        codes, scales, *whole = stored
        stored = codes, bytes_of(scales), whole[0] if whole else codes, table_of(weight.format.codes_kind, codes.device)
        kernel, sizes = _few_groups_kernel, (*sizes, groups)
        constants |= {"PAIRS": pairs, "GROUPS": max(block_in // (2 * pairs), 1)}
        constants |= weight.format.constants(weight.layout)._asdict()
    elif storage == "nf4":
        kernel, constants["SCALES_PER_FACTOR"], constants["BLOCK_IN"] = _few_nf4_kernel, weight.layout[1], block_in
    else:
        kernel, constants["BLOCK_IN"] = _few_kernel, block_in
        constants |= {"SCALED": frozen, "WIDTH": blocks, "EARLY": is_early, "STAGES": stages}
    result = rows.new_empty(results, out // inputs_of(act) if act else out)
    with on_device_of(rows):
        kernel[(tiles * cdiv(out, block_out),)](rows, *stored, where, bias, result, *sizes, **constants)
    return result


def few_product(rows: Tensor, weight: Any, ends: Tensor) -> Tensor:
    """Multiply each sorted row by the transposed matrix of its expert: [S, C] -> [S, O].

    ``ends`` [X] int32 holds the index after the last row of each expert.
    """
    return _launch(rows, weight, ends, len(rows), 1, is_sorted=True)


def few_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Weight, down_weight: Weight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, limit: float, addend: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `moe_mlp` for a few tokens, without gradients.

    All tensors must be contiguous, and x [N, C] must have the dtype of ``gate_up_weight``.
    """
    N, K = experts.shape
    options: dict[str, Any] = {"is_sorted": False, "one_row": N == 1}
    gated = _launch(x, gate_up_weight, experts, N * K, K, act=act, limit=limit, bias=gate_up_bias, **options)
    is_early = N == 1 and not any(isinstance(weight, FrozenWeight) for weight in (gate_up_weight, down_weight))
    rows = _launch(gated, down_weight, experts, N * K, 1, is_early=is_early, **options)
    return unpermute(rows, None, weights, N, x.dtype, down_bias, experts, addend)
