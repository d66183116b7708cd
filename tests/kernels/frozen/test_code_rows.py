"""Few rows times codes by PTX, which the CPU runs instruction by instruction, against plain torch."""

import pytest
import torch

from liger_models.kernels.activation.gated_act import gated_act_reference
from liger_models.kernels.frozen import code_rows, groups

from .test_groups import make


@pytest.fixture
def emulated(monkeypatch):
    """Kernels with PTX run on the CPU."""
    pytest.importorskip("triton", reason="no wheel for this platform")
    from .ptx import Assembly

    monkeypatch.setattr(code_rows.tl, "inline_asm_elementwise", Assembly())
    monkeypatch.setattr(code_rows, "has_ptx", lambda x: True)


@pytest.mark.cases(4)
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kind", "shape", "rows"),
    [
        ("mxfp4", (28, 1088), 1),
        ("nvfp4", (20, 1024), 1),
        ("nvfp4 over", (12, 352), 1),
        ("int4", (12, 2048), 1),
        ("mxfp4", (20, 1088), 3),
        ("nvfp4", (34, 352), 11),
        ("bnb_nf4", (12, 1088), 1),
        ("bnb_nf4", (20, 576), 11),
    ],
    ids=str,
)
def test_ptx_multiplies_by_the_dense_weight(emulated, kind, shape, rows, monkeypatch):
    """With whole and with partial steps, several tiles of a program, and rows that the last tile repeats.

    Scales are no powers of 2, so that weights are rounded. The interpreter truncates results to bfloat16.
    """
    weight = make(kind, shape, "cpu", torch.bfloat16)
    if kind != "mxfp4":
        scales = (weight.scales.float() * torch.linspace(1, 1.9, weight.scales.shape[1])).to(weight.scales.dtype)
        weight = weight._replace(tensors=(weight.codes, scales, *(t * 1.3 for t in weight.tensors[2:])))
    generator = torch.Generator().manual_seed(0)
    x, bias = ((torch.randn(size, generator=generator) / 64).bfloat16() for size in ((rows, shape[1]), shape[:1]))
    monkeypatch.setattr(groups, "_group_rows_kernel", None)  # the other kernel must not run
    y, product = weight.format.few_rows(weight, x, bias, "silu")
    dense = weight.format.reference(weight)
    want, terms = x.double() @ dense.double().T + bias, x.double().abs() @ dense.double().abs().T + bias.abs()
    assert ((y.double() - want).abs() <= 2**-7 * want.abs() + 2e-6 * terms).all()
    torch.testing.assert_close(product, gated_act_reference(y, "silu"), rtol=2**-6, atol=1e-6)
