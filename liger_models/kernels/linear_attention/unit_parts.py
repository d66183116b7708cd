"""Splits a packed projection into its parts. The columns of the projection are grouped by unit.

The projection x [B, T, U · R] has R columns for each of U units, such as heads. A part consists of the same slice of
the R columns in every unit. An output holds one part, or several parts one after the other. Within a part, the columns
of unit 0 come first, then the columns of unit 1, and so on. Each part can be multiplied by its own factor, in fp32.
Column i of unit u of a part is::

    y[part, u, i] = cast(scale · x[u, start of the part in a unit + i])

One kernel writes all outputs. In the backward, the same kernel moves the gradients in the other direction, so nothing
is saved for the backward. A program moves consecutive elements of one part, for a few tokens. Programs for the same
tokens have adjacent indices, because the columns of different parts share cache lines of x.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.linear_attention.documents import flat
from liger_models.kernels.tiles import cdiv

TOKENS, BLOCK, WARPS = 32, 2048, 4
"""Number of tokens that a group of programs processes, number of elements per program, and number of warps per
program."""

MOST_OUTPUTS = 4


def unit_parts_reference(
    x: Tensor, units: int, outputs: Sequence[Sequence[int]], scales: Sequence[float] | None = None
) -> tuple[Tensor, ...]:
    """Compute `unit_parts` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    sizes = [size for sizes in outputs for size in sizes]
    parts = [part.flatten(2) for part in x.unflatten(-1, (units, -1)).split(sizes, -1)]
    if scales is not None:
        parts = [part if scale == 1.0 else part * scale for part, scale in zip(parts, scales, strict=True)]
    rest = iter(parts)
    joined = [[next(rest) for _ in sizes] for sizes in outputs]
    return tuple(several[0] if len(several) == 1 else torch.cat(several, -1) for several in joined)


@triton.jit
def _unit_parts_kernel(
    x_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, tokens, x_t, R: tl.constexpr, SIZES: tl.constexpr, STARTS: tl.constexpr,
    WIDTHS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TOTALS: tl.constexpr, SCALES: tl.constexpr,
    FIRST: tl.constexpr, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For TOKENS tokens, move BLOCK elements of one part from x to the output that holds the part or, with BACK, back
    to x.

    In x, part p has SIZES[p] columns per unit, beginning at column STARTS[p] of the unit. In output OUTPUTS[p], part p
    has WIDTHS[p] columns for all units together, beginning at column COLUMNS[p]. This output has TOTALS[p] columns.
    PROGRAMS programs share a group of TOKENS tokens. Among these programs, FIRST[p] is the index of the first one that
    moves part p.
    """
    group, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    token = group.to(tl.int64) * TOKENS
    left = tokens - token
    for p in tl.static_range(len(SIZES)):
        if (program >= FIRST[p]) & (program < FIRST[p + 1]):
            # The elements of a part [TOKENS, WIDTH] are numbered row by row.
            element = (program - FIRST[p]) * BLOCK + tl.arange(0, BLOCK)
            row, column = element // WIDTHS[p], element % WIDTHS[p]
            mask = (row < left) & (row < TOKENS)
            at_x = x_ptr + token * x_t + row * x_t + column // SIZES[p] * R + STARTS[p] + column % SIZES[p]
            y_ptr = y0_ptr if OUTPUTS[p] == 0 else y1_ptr if OUTPUTS[p] == 1 else y2_ptr if OUTPUTS[p] == 2 else y3_ptr
            column_y = row * TOTALS[p] + COLUMNS[p] + column
            if not BACK:
                # Let a thread write only two consecutive elements. A thread that wrote more would read elements of x
                # that are far apart, because units are unaligned.
                column_y = tl.max_contiguous(column_y, 2)
            at_y = y_ptr + token * TOTALS[p] + column_y
            value = tl.load(at_y if BACK else at_x, mask=mask, other=0.0)
            if SCALES[p] != 1.0:
                value = (value.to(tl.float32) * SCALES[p]).to(x_ptr.dtype.element_ty)
            tl.store(at_x if BACK else at_y, value, mask=mask)


@functools.lru_cache(maxsize=256)
def _constants(
    units: int, sizes: tuple[int, ...], counts: tuple[int, ...], scales: tuple[float, ...], tokens: int
) -> dict[str, object]:
    """Return the constants of the kernel if a group of programs processes ``tokens`` tokens."""
    widths = [units * size for size in sizes]
    outputs = [output for output, count in enumerate(counts) for _ in range(count)]
    firsts, starts, columns = [0], [0], []
    totals = [sum(width for width, other in zip(widths, outputs, strict=True) if other == n) for n in outputs]
    for part, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        firsts.append(firsts[-1] + cdiv(tokens * width, BLOCK))
        starts.append(starts[-1] + size)
        columns.append(sum(widths[other] for other in range(part) if outputs[other] == outputs[part]))
    named = {"STARTS": starts[:-1], "WIDTHS": widths, "OUTPUTS": outputs, "COLUMNS": columns, "TOTALS": totals}
    tables = {name: tuple(numbers) for name, numbers in named.items()}
    return {
        **tables, "R": starts[-1], "SIZES": sizes, "SCALES": scales, "FIRST": tuple(firsts), "PROGRAMS": firsts[-1],
        "TOKENS": tokens, "BLOCK": BLOCK, "num_warps": WARPS,
    }  # fmt: skip


def _move(
    x: Tensor, outputs: Sequence[Tensor], units: int, sizes: Sequence[int], counts: Sequence[int],
    scales: Sequence[float], back: bool,
) -> None:  # fmt: skip
    """Launch the kernel that moves parts from x [N, U · R] to the outputs or, with ``back``, from the outputs to x."""
    tokens = len(x)
    if not x.numel():
        return
    scaled = tuple(map(float, scales)) if scales else (1.0,) * len(sizes)
    group = TOKENS if tokens >= TOKENS else 1
    constants = _constants(units, tuple(sizes), tuple(counts), scaled, group)
    programs = cdiv(tokens, group) * constants["PROGRAMS"]  # type: ignore[operator]
    with on_device_of(x):
        _unit_parts_kernel[(programs,)](x, *outputs, tokens, x.stride(0), BACK=back, **constants)


def _empty(x: Tensor, units: int, sizes: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Allocate the op's `MOST_OUTPUTS` outputs. Outputs without parts are empty."""
    rest = iter(sizes)
    widths = [units * sum(next(rest) for _ in range(count)) for count in counts]
    widths += [0] * (MOST_OUTPUTS - len(widths))
    return tuple(x.new_empty(*x.shape[:2], width) for width in widths)


def _unit_parts(x: Tensor, units: int, sizes: list[int], counts: list[int], scales: list[float]) -> tuple[Tensor, ...]:
    outputs = _empty(x, units, sizes, counts)
    _move(flat(x), outputs, units, sizes, counts, scales, False)
    return outputs


def _unit_parts_backward(
    d0: Tensor, d1: Tensor, d2: Tensor, d3: Tensor, units: int, sizes: list[int], counts: list[int],
    scales: list[float],
) -> Tensor:  # fmt: skip
    dx = d0.new_empty(*d0.shape[:2], units * sum(sizes))
    _move(dx.flatten(0, 1), [d.contiguous() for d in (d0, d1, d2, d3)], units, sizes, counts, scales, True)
    return dx


BACKWARD = define_op(
    "unit_parts_backward", _unit_parts_backward,
    lambda d0, d1, d2, d3, units, sizes, *_: d0.new_empty(*d0.shape[:2], units * sum(sizes)),
)  # fmt: skip
FORWARD = define_op(
    "unit_parts", _unit_parts, lambda x, units, sizes, counts, scales: _empty(x, units, sizes, counts),
    outputs="y0 y1 y2 y3", backward=BACKWARD, gradients="x",
)  # fmt: skip


def unit_parts(
    x: Tensor, units: int, outputs: Sequence[Sequence[int]], scales: Sequence[float] | None = None
) -> tuple[Tensor, ...]:
    """Split a packed projection, whose columns are grouped by unit, into outputs. Each output has one or several parts.

    Args:
        x: [B, T, U · R], float32, float16 or bfloat16.
        units: U.
        outputs: the widths of each output's parts, for at most four outputs. The width of a part is its number of
            columns per unit. In each unit of x, the parts come in this order. R is the sum of all widths.
        scales: a factor for each part; None if all factors are 1.

    Returns:
        The outputs, [B, T, U · W] each, where W is the sum of the widths of the output's parts.

    Raises:
        ValueError: the shapes do not match, or there are more than four outputs.
        TypeError: the tensor is not floating-point.
    """
    op = "unit_parts"
    check_floating(op, x=x)
    sizes = [size for sizes in outputs for size in sizes]
    if not 1 <= len(outputs) <= MOST_OUTPUTS:
        raise ValueError(f"{op}: outputs must have 1 to {MOST_OUTPUTS} entries, got {len(outputs)}.")
    if x.dim() != 3 or x.shape[2] != units * sum(sizes):
        raise ValueError(f"{op}: x must be [B, T, {units * sum(sizes)}], got {list(x.shape)}.")
    if scales is not None and len(scales) != len(sizes):
        raise ValueError(f"{op}: scales must have a number for each of the {len(sizes)} parts, got {len(scales)}.")
    if not use_triton(x):
        return unit_parts_reference(x, units, outputs, scales)
    counts = [len(sizes) for sizes in outputs]
    results: tuple[Tensor, ...] = FORWARD(x, units, sizes, counts, [] if scales is None else [*scales])
    return results[: len(outputs)]
