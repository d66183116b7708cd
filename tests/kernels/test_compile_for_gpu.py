import json
from pathlib import Path

import pytest

from ..processes import ROOT, run

pytest.importorskip("triton", reason="no wheel for this platform")

PTX = [
    "liger_models.kernels.frozen.code_rows._several_rows_kernel",
    "liger_models.kernels.frozen.code_rows._single_row_kernel",
    "liger_models.kernels.frozen.nf4_rows._nf4_lookup_kernel",
]
"""Kernels that only GPUs of NVIDIA have."""


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "variants"),
    [
        ("sm_90", 1),
        pytest.param("gfx942", 1, marks=pytest.mark.matrix),
        pytest.param("gfx950", 2, marks=pytest.mark.matrix),
        pytest.param("sm_90", 1000, marks=pytest.mark.matrix),
        pytest.param("gfx942", 2, marks=pytest.mark.matrix),
    ],
)
def test_every_kernel_compiles_for_a_gpu(target, variants):
    script = Path(__file__).with_name("compile_for_gpu.py")
    found = json.loads(run(script, target, str(variants), cwd=ROOT, seconds=1200).stdout.splitlines()[-1])
    assert found["refused"] == {}
    assert found["pending"] == []
    assert found["lost"] == []
    assert found["never"] == ([] if target == "sm_90" else PTX)
    assert all(found["compiled"].values())
