"""Block sizes for the interpreter. Imports are inside: this file is read before TRITON_INTERPRET is set."""

import pytest


@pytest.fixture(autouse=True)
def _quick_sums(monkeypatch):
    """Add partial sums in wide blocks, because the interpreter's time grows with the number of programs."""
    from liger_models.kernels import dispatch
    from liger_models.kernels.norm import partial_sums

    if dispatch.INTERPRET:
        monkeypatch.setattr(partial_sums, "ROWS", 8)
        monkeypatch.setattr(partial_sums, "COLUMNS", 256)
