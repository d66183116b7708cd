"""Block sizes for the interpreter. Imports are inside: this file is read before TRITON_INTERPRET is set."""

import pytest


@pytest.fixture
def many_blocks(monkeypatch):
    """The interpreter sees small shapes only: blocks are smaller still, so that no loop ends after one step."""
    from liger_models.kernels import dispatch
    from liger_models.kernels.moe import experts, grouped_mm, permutation, routing

    if dispatch.INTERPRET:
        monkeypatch.setattr(grouped_mm, "PRODUCT_BLOCKS", {2: (32, 64, 32), 4: (16, 64, 32)})
        monkeypatch.setattr(grouped_mm, "SUM_BLOCK", (2, 16))
        monkeypatch.setattr(permutation, "SORT_BLOCK", 16)
        monkeypatch.setattr(permutation, "ROW_BLOCK", 32)
        monkeypatch.setattr(experts, "ACT_BLOCK", 128)
        monkeypatch.setattr(routing, "ROUTE_TILE", 64)
        monkeypatch.setattr(routing, "FEW_TOKENS", 2)


@pytest.fixture(autouse=True)
def _quick_blocks(monkeypatch):
    """One tile size in the interpreter: its time grows with the number of programs and of masked elements."""
    from liger_models.kernels import dispatch
    from liger_models.kernels.frozen import float8_blocks
    from liger_models.kernels.moe import grouped_mm

    if dispatch.INTERPRET:
        monkeypatch.setitem(grouped_mm.PRODUCT_BLOCKS, 2, grouped_mm.PRODUCT_BLOCKS[4])
        monkeypatch.setattr(float8_blocks, "ROWS", 32)
        monkeypatch.setattr(float8_blocks, "PIECES", 8)
