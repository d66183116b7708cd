import pytest
import torch

from liger_models.kernels.linear_attention import unit_parts as module
from liger_models.kernels.linear_attention.unit_parts import unit_parts, unit_parts_reference

from ..oracle import assert_close_to_truth, opcheck
from ..rope.test_rope import draw, dtypes

# (B, T, U), the numbers of columns of the parts of each output, and the scales
CASES = [
    ((2, 37, 3), ((4,), (4, 2, 2), (1,)), None),
    ((1, 33, 2), ((4,), (4, 2, 2), (1,)), (0.5, 1.0, -3.0, 0.1, 7.0)),
    ((2, 3, 2), ((3, 3, 5), (5,), (2,), (2,)), None),
    ((1, 1, 1), ((7,),), (0.25,)),
]
GPU_CASES = [
    ((1, 2000, 64), ((64,), (64, 16, 16), (1,)), (1.25, 0.5, 2.0, 1.0, 0.3)),
    ((2, 300, 16), ((128, 128, 256), (256,), (2,), (2,)), None),
]


def make(case, dtype=torch.float32, device="cpu"):
    (B, T, U), outputs, _ = case
    x = draw(B, T, U * sum(map(sum, outputs)), dtype=dtype, device=device)
    return x, [draw(B, T, U * sum(sizes), dtype=dtype, device=device, seed=1) for sizes in outputs]


def on(function, case):
    (_, _, units), outputs, scales = case
    return lambda x: function(x, units, outputs, scales)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_fp64(backend, case, poisoned_empty, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)  # several programs for a part
    module._constants.cache_clear()
    for dtype in dtypes(backend):
        x, upstream = make(case, dtype, backend)
        assert_close_to_truth(on(unit_parts, case), on(unit_parts_reference, case), [x], upstream)
    module._constants.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_real_sizes(case, poisoned_empty):
    for dtype in (torch.bfloat16, torch.float32):
        x, upstream = make(case, dtype, "cuda")
        assert_close_to_truth(on(unit_parts, case), on(unit_parts_reference, case), [x], upstream)


def test_where_each_part_is(backend):
    """One unit after the other in the projection; one part after the other, and in it all units, in an output."""
    case = CASES[1]
    x, _ = make(case, device=backend)
    gate, inputs, steps = on(unit_parts, case)(x)
    units = x.view(1, 33, 2, 13)
    assert torch.equal(gate[..., 4:], 0.5 * units[:, :, 1, :4])  # of the second unit
    assert torch.equal(inputs[..., 4:8], units[:, :, 1, 4:8])
    assert torch.equal(inputs[..., 10:12], -3.0 * units[:, :, 1, 8:10])
    assert torch.equal(steps[..., 0], 7.0 * units[:, :, 0, 12])


def test_strided_projection(kernel_device):
    x, _ = make(CASES[0], device=kernel_device)
    wide = torch.cat([x, x], -1)[..., : x.shape[-1]]
    for ours, theirs in zip(on(unit_parts, CASES[0])(wide), on(unit_parts, CASES[0])(x), strict=True):
        assert torch.equal(ours, theirs)


def test_op(kernel_device):
    x, _ = make(CASES[2], device=kernel_device)
    opcheck(torch.ops.liger_models.unit_parts, (x.requires_grad_(), 2, [3, 3, 5, 5, 2, 2], [3, 1, 1, 1], []))


def test_errors():
    x, _ = make(CASES[0])
    with pytest.raises(ValueError, match=r"unit_parts: x must be \[B, T, 36\], got \[2, 37, 39\]"):
        unit_parts(x, 3, ((4,), (4, 2, 2)))
    with pytest.raises(ValueError, match="unit_parts: scales must have a number for each of the 5 parts, got 1"):
        unit_parts(x, 3, ((4,), (4, 2, 2), (1,)), (2.0,))
    with pytest.raises(ValueError, match="unit_parts: outputs must have 1 to 4 entries, got 5"):
        unit_parts(x, 3, ((4,), (4,), (2,), (2,), (1,)))
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        unit_parts(x.int(), 3, ((4,), (4, 2, 2), (1,)))
