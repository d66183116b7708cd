"""The gated activation (see `gated_act`) of the sum of a matrix and a low-rank term.

The sum ``u + l @ r``, with l [N, R] and r [R, 2 F], is neither stored nor rounded: each program computes the term for a
tile, and adds it in fp32 to the tile of u that it has loaded. A separate product that adds the term would read and
write all of u. Such a term is the one that LoRA adds to a gate and up projection. In the backward, the gradient dy may
have a low-rank term, too, as the gradient of the input of an adapted down projection has::

    u' = u + l @ r,    dy' = dy + dl @ dr

    y = gated_act(u')
    du                                       the gradient of y with respect to u', multiplied by dy'

The forward can also store u' in 8 bits, for a backward that then reads the codes instead of u. A row's gates, and its
ups, share a scale in groups of `GROUP`::

    scale = max |u'| / 126                   of the group, rounded to bfloat16
    code = round(u' / scale)                 an integer from -127 to 127

A number that is read back differs from u' by at most half a scale, which is 0.4% of the largest number of the group.
Numbers below 1e-35 may be read back as zeros. NaN and infinities have no codes; y contains them.

Source: https://arxiv.org/abs/2002.05202, https://arxiv.org/abs/2106.09685, and https://arxiv.org/abs/2410.19313 for
saving activations in 8 bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.activation.gated_act import _activation
from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, dot_precision, dot_tile

ROWS, COLUMNS, NUM_WARPS = 64, 32, 4
"""Number of rows and columns of the results per program, and number of warps per program."""

CODE_ROWS, CODE_WARPS = 16, 1
"""Number of rows and warps per program of a backward from codes. With a single warp, threads need not wait for each
other when they exchange codes."""

GROUP = COLUMNS
"""Number of gates, or of ups, that share a scale in `Codes`. A program computes the scales of whole groups."""

MOST_RANKS = 64
"""Maximum R for which the kernels run. A program holds its part of l and r in registers and shared memory."""

Term = tuple[Tensor, Tensor]
"""The matrices l [N, R] and r [R, O] of a low-rank term ``l @ r``, with any strides."""


@triton.jit
def _load_term(
    left_ptr, right_ptr, row, column, N, width, R, left_n, left_r, right_r, right_o, RANKS: tl.constexpr
):  # fmt: skip
    """Load the tiles of l [rows, RANKS] and r [RANKS, columns] whose product is a tile of the term."""
    rank = tl.arange(0, RANKS)
    inside = rank < R
    left = tl.load(
        left_ptr + row[:, None] * left_n + rank[None, :] * left_r, mask=(row < N)[:, None] & inside[None, :], other=0.0
    )
    right = tl.load(
        right_ptr + rank[:, None] * right_r + column[None, :] * right_o,
        mask=inside[:, None] & (column < width)[None, :],
        other=0.0,
    )
    return left, right


@triton.jit
def _tile(F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of the program's tile of the results, and its first column."""
    # The grid has one dimension, because the others have at most 65,535 programs.
    across = tl.cdiv(F, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(0) % across * COLUMNS


@triton.jit
def _encode(x):
    """Return the int8 codes of x [rows, columns], and the scales of the rows as fp32."""
    # The codes belong to the rounded scale, which the backward reads. Rounding adds at most 0.8% to the code of 126.
    scale = (tl.max(tl.abs(x), 1) / 126).to(tl.bfloat16).to(tl.float32)
    inverse = tl.where(scale > 1e-37, 1 / tl.maximum(scale, 1e-37), 0.0)  # the inverse of smaller numbers is infinite
    # The sum with 1.5 · 2²³ is rounded to an integer, whose last eight bits are the code. A conversion takes longer.
    bits = (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    return bits.to(tl.int8), scale


@triton.jit
def _scale_position(row, first, F, COLUMNS: tl.constexpr):
    """Return the positions of the scales of the gates of a tile. The scales of the ups follow them."""
    return (row * tl.cdiv(F, COLUMNS) + first // COLUMNS) * 2


@triton.jit
def _low_rank_gated_act_kernel(
    u_ptr, y_ptr, left_ptr, right_ptr, code_ptr, scale_ptr, N, F, R, left_n, left_r, right_r, right_o,
    ACT: tl.constexpr, HAS_TERM: tl.constexpr, HAS_CODES: tl.constexpr, RANKS: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    row, first = _tile(F, ROWS, COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    pair = 2 * first + tl.arange(0, 2 * COLUMNS)
    if HAS_TERM:
        left, right = _load_term(left_ptr, right_ptr, row, pair, N, 2 * F, R, left_n, left_r, right_r, right_o, RANKS)
    inside_u = (row < N)[:, None] & (pair < 2 * F)[None, :]
    position_u = row[:, None] * (2 * F) + pair[None, :]
    u = tl.load(u_ptr + position_u, mask=inside_u, other=0.0)

    u = u.to(tl.float32)
    if HAS_TERM:
        u = tl.dot(left, right, u, input_precision=DOT)
    gate, up = tl.split(tl.reshape(u, [ROWS, COLUMNS, 2]))
    if HAS_CODES:
        gate_code, gate_scale = _encode(gate)
        up_code, up_scale = _encode(up)
        code = tl.reshape(tl.join(gate_code, up_code), [ROWS, 2 * COLUMNS])
        tl.store(code_ptr + position_u, code, mask=inside_u)
        scale = tl.join(gate_scale, up_scale).to(tl.bfloat16)  # [ROWS, 2]
        position = _scale_position(row, first, F, COLUMNS)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(scale_ptr + position, scale, mask=(row < N)[:, None])
    a, _ = _activation(gate, ACT)
    dtype = y_ptr.dtype.element_ty
    inside = (row < N)[:, None] & (column < F)[None, :]
    tl.store(y_ptr + row[:, None] * F + column[None, :], (a.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@triton.jit
def _low_rank_gated_act_backward_kernel(
    dy_ptr, u_ptr, scale_ptr, du_ptr, y_ptr, left_ptr, right_ptr, d_left_ptr, d_right_ptr, N, F, R, left_n, left_r,
    right_r, right_o, d_R, d_left_n, d_left_r, d_right_r, d_right_o, ACT: tl.constexpr, HAS_TERM: tl.constexpr,
    HAS_D_TERM: tl.constexpr, HAS_CODES: tl.constexpr, STORE_Y: tl.constexpr, RANKS: tl.constexpr,
    D_RANKS: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, first = _tile(F, ROWS, COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    pair = 2 * first + tl.arange(0, 2 * COLUMNS)

    # Load everything before the first product, because the threads wait for each other in products.
    if HAS_TERM:
        left, right = _load_term(
            left_ptr, right_ptr, row, pair, N, 2 * F, R, left_n, left_r, right_r, right_o, RANKS
        )  # fmt: skip
    if HAS_D_TERM:
        d_left, d_right = _load_term(
            d_left_ptr, d_right_ptr, row, column, N, F, d_R, d_left_n, d_left_r, d_right_r, d_right_o, D_RANKS
        )
    inside_u = (row < N)[:, None] & (pair < 2 * F)[None, :]
    position_u = row[:, None] * (2 * F) + pair[None, :]
    u = tl.load(u_ptr + position_u, mask=inside_u, other=0.0)
    inside = (row < N)[:, None] & (column < F)[None, :]
    position = row[:, None] * F + column[None, :]
    dy = tl.load(dy_ptr + position, mask=inside, other=0.0).to(tl.float32)
    if HAS_CODES:
        scale_position = _scale_position(row, first, F, COLUMNS)
        gate_scale = tl.load(scale_ptr + scale_position, mask=row < N, other=0.0).to(tl.float32)
        up_scale = tl.load(scale_ptr + scale_position + 1, mask=row < N, other=0.0).to(tl.float32)
        u = u.to(tl.int32)  # an extension of integers, before which the compiler changes the layout

    u = u.to(tl.float32)
    if HAS_TERM:
        u = tl.dot(left, right, u, input_precision=DOT)
    if HAS_D_TERM:
        # Compute each column of the term twice. Splitting the pairs of columns then gives the term the same layout as
        # gate and up, without an exchange between threads.
        twice = tl.reshape(tl.join(d_right, d_right), [D_RANKS, 2 * COLUMNS])
        term = tl.dot(d_left, twice, input_precision=DOT)
        if HAS_CODES:
            # The compiler then gives u the layout of the term before it converts the codes to fp32. Later it would
            # exchange four times as many bytes between threads.
            u += 0.0 * term
    gate, up = tl.split(tl.reshape(u, [ROWS, COLUMNS, 2]))
    if HAS_CODES:
        gate *= gate_scale[:, None]
        up *= up_scale[:, None]
    if HAS_D_TERM:
        term, _ = tl.split(tl.reshape(term, [ROWS, COLUMNS, 2]))
        dy += term

    a, slope = _activation(gate, ACT)
    dtype = du_ptr.dtype.element_ty
    a = a.to(dtype).to(tl.float32)
    gradient = tl.reshape(tl.join((dy * up * slope).to(dtype), (dy * a).to(dtype)), [ROWS, 2 * COLUMNS])
    tl.store(du_ptr + position_u, gradient, mask=inside_u)
    if STORE_Y:
        tl.store(y_ptr + position, (a * up).to(dtype), mask=inside)


class Codes(NamedTuple):
    """The sums u' in 8 bits.

    Attributes:
        codes: [N, 2 F] int8. Gates and ups are interleaved, as in u.
        scales: [N, G, 2] bfloat16, the scales of the gates and of the ups of each group, where G is F / `GROUP`,
            rounded up.
    """

    codes: Tensor
    scales: Tensor


def empty_codes(u: Tensor) -> Codes:
    """Return uninitialized codes for u [N, 2 F], which may be fake."""
    N, F = u.shape[0], u.shape[1] // 2
    return Codes(u.new_empty(N, 2 * F, dtype=torch.int8), u.new_empty(N, cdiv(F, GROUP), 2, dtype=torch.bfloat16))


def takes_term(low_rank: tuple[Tensor, Tensor] | None) -> bool:
    """Return whether the kernels can add the low-rank term of a projection, ``(A [R, C], B [O, R])``, or None."""
    return low_rank is None or low_rank[0].shape[0] <= MOST_RANKS


def low_rank_gated_act(u: Tensor, act: str, term: Term | None, codes: Codes | None = None) -> Tensor:
    """Compute ``gated_act(u + l @ r)`` inside an op.

    Args:
        u: [N, 2 F] float32, float16 or bfloat16, contiguous. Gates and ups are interleaved.
        act: one of `gated_act.ACTIVATIONS`.
        term: ``(l [N, R], r [R, 2 F])`` in the dtype of u, where R is at most `MOST_RANKS`; None if nothing is added.
        codes: where to store ``u + l @ r`` in 8 bits, as `empty_codes` returns it; None to store nothing.

    Returns:
        [N, F] in the dtype of u.
    """
    N, F = u.shape[0], u.shape[1] // 2
    y = u.new_empty(N, F)
    # Arguments that the kernel does not use must also be tensors and numbers.
    left, right = term or (u, u)
    if y.numel():
        with on_device_of(u):
            _low_rank_gated_act_kernel[_grid(N, F, ROWS)](
                u, y, left, right, *(codes or (u, u)), N, F, *_sizes((left, right)), ACT=act,
                HAS_TERM=term is not None, HAS_CODES=codes is not None, RANKS=_ranks(term),
                **_constants(u, ROWS, NUM_WARPS), **overlap(u),
            )  # fmt: skip
    return y


def low_rank_gated_act_backward(
    dy: Tensor,
    u: Tensor | Codes,
    act: str,
    need_product: bool,
    term: Term | None,
    dy_term: Term | None,
    *,
    overwrite_u: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradient of u and, with ``need_product``, `low_rank_gated_act` of u, inside an op.

    Args:
        dy: [N, F], contiguous. It is overwritten with the second result.
        u: as in `low_rank_gated_act`, or the codes that `low_rank_gated_act` stored.
        act: as in `low_rank_gated_act`.
        need_product: whether the second result is needed.
        term: as in `low_rank_gated_act`; None if nothing is added to u, as codes hold the sum.
        dy_term: ``(l [N, R], r [R, F])``, which is added to dy; None if nothing is added to dy.
        overwrite_u: whether to write the gradient into u, which must not be codes.

    Returns:
        ``(du, product)``, [N, 2 F] and [N, F] in the dtype of dy, where the product is None without ``need_product``.
    """
    N, F = dy.shape
    has_codes = isinstance(u, Codes)
    assert not (has_codes and (term is not None or overwrite_u))
    values, scales = u if isinstance(u, Codes) else (u, u)
    rows, warps = (CODE_ROWS, CODE_WARPS) if has_codes else (ROWS, NUM_WARPS)
    du = values if overwrite_u else dy.new_empty(N, 2 * F)
    terms = term or (dy, dy), dy_term or (dy, dy)
    if dy.numel():
        with on_device_of(dy):
            _low_rank_gated_act_backward_kernel[_grid(N, F, rows)](
                dy, values, scales, du, dy, *terms[0], *terms[1], N, F, *_sizes(terms[0]), *_sizes(terms[1]), ACT=act,
                HAS_TERM=term is not None, HAS_D_TERM=dy_term is not None, HAS_CODES=has_codes,
                STORE_Y=need_product, RANKS=_ranks(term), D_RANKS=_ranks(dy_term), **_constants(dy, rows, warps),
            )  # fmt: skip
    return du, dy if need_product else None


def _grid(N: int, F: int, rows: int) -> tuple[int]:
    return (cdiv(F, COLUMNS) * cdiv(N, rows),)


def _sizes(term: Term) -> tuple[int, ...]:
    left, right = term
    return left.shape[1], *left.stride(), *right.stride()


def _ranks(term: Term | None) -> int:
    return dot_tile(0 if term is None else term[0].shape[1])


def _constants(u: Tensor, rows: int, warps: int) -> dict[str, object]:
    return {"DOT": dot_precision(u), "ROWS": rows, "COLUMNS": COLUMNS, "num_warps": warps}
