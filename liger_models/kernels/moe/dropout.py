"""Dropout for the inputs of the experts' low-rank terms.

    out_j = rows_j · m_j / (1 − p)      each element of m_j is 1 with probability 1 − p, otherwise 0

Each token has one copy for each of its experts, and each row belongs to one copy. For gate and up, the random numbers
of a row depend only on the seed and on the token, so the same elements are dropped in all copies of a token. For down,
the random numbers depend on the seed and on the copy. Only the seed is saved. The backward generates the same m_j from
the seed, and multiplies the gradient by m_j / (1 − p).
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton
from liger_models.kernels.tiles import cdiv, next_power_of_2

BLOCK = 512
"""A program draws random numbers for up to this many elements of each quarter of a row at a time. The generator returns
four numbers per call, one for each quarter."""


@triton.jit
def _dropout_kernel(rows_ptr, order_ptr, seed_ptr, out_ptr, W, K, number, dropout, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * W
    quarter = tl.cdiv(W, 4)
    start_of_row = (tl.load(order_ptr + tl.program_id(0)) // K) * quarter
    seed = tl.load(seed_ptr + number)
    for start in range(0, quarter, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        draws = tl.rand4x(seed, start_of_row + lanes)
        for part in tl.static_range(4):
            columns = part * quarter + lanes
            mask = (lanes < quarter) & (columns < W)
            x = tl.load(rows_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
            kept = tl.where(draws[part] >= dropout, x / (1 - dropout), 0.0)
            tl.store(out_ptr + row + columns, kept.to(out_ptr.dtype.element_ty), mask=mask)


def draw_seed(device: torch.device) -> Tensor:
    """Draw two int64 seeds, [2], from the generator of the device.

    The first seed is for gate and up, and the second seed is for down.
    """
    return torch.randint(2**63 - 1, (2,), device=device)


def drop(rows: Tensor, order: Tensor, seed: Tensor, dropout: float, K: int, number: int) -> Tensor:
    """Apply dropout to rows [S, W].

    Args:
        rows: [S, W], sorted by expert.
        order: [S] int32, for each row, the index of the copy that the row holds, from `sort_by_expert`.
        seed: [2], from `draw_seed`.
        dropout: the probability p.
        K: number of copies with consecutive indices in which the same elements are dropped.
        number: index in ``seed`` of the seed to use.
    """
    out = torch.empty_like(rows)
    S, W = rows.shape
    block = min(next_power_of_2(cdiv(W, 4)), BLOCK)
    with on_device_of(rows):
        _dropout_kernel[(S,)](rows, order, seed, out, W, K, number, dropout, BLOCK=block, num_warps=4)
    return out
