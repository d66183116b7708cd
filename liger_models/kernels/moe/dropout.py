"""Dropout of the inputs of experts' low-rank matrices, redrawn from a seed wherever it is needed.

    out_j = rows_j · m_j / (1 − p)      m_j: 1 with probability 1 − p for each element, otherwise 0

The random numbers follow from the seed and from the token that a row copies, so the copies of a token drop the same
elements. The map is diagonal, so the backward applies the same map. Only the seed is saved.
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import on_device_of, tl, triton

BLOCK = 512
"""Quarters of a row that a program draws at a time: the generator makes four numbers at once."""


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
    """Draw two seeds [2] int64 from the device's generator: for the inputs of gate and up, and of down."""
    return torch.randint(2**63 - 1, (2,), device=device)


def drop(rows: Tensor, order: Tensor, seed: Tensor, dropout: float, K: int, number: int) -> Tensor:
    """Apply the dropout: [S, W] -> [S, W].

    Args:
        rows: sorted by expert.
        order: [S] int32, the number of each row's copy, from `sort_by_expert`.
        seed: [2], from `draw_seed`.
        dropout: the probability p.
        K: number of copies that drop the same elements.
        number: index of the seed.
    """
    out = torch.empty_like(rows)
    S, W = rows.shape
    block = min(triton.next_power_of_2(triton.cdiv(W, 4)), BLOCK)
    with on_device_of(rows):
        _dropout_kernel[(S,)](rows, order, seed, out, W, K, number, dropout, BLOCK=block, num_warps=4)
    return out
