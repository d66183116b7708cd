import pytest
import torch

from liger_models.kernels.attention.write_latents import write_latents, write_latents_reference
from liger_models.kernels.norm.fused_norm import FusedNorm

from ..oracle import opcheck, wide
from ..rope.test_rope import draw, dtypes, tables

SLOTS = [3, -1, 79, 0, 16, -1, 40]
SIZES = [(24, 8, 8, 40), (7, 2, 2, 0), (130, 10, 0, 33), (512, 64, 32, 1536)]
"""Widths L of latents and R of the shared part of keys, rotated columns, and widths Q of the queries' latents."""


def make(size, dtype, device, offset=0.0, fp32=False, weight_dtype=None):
    """The arguments of the op, whose latents are columns of one packed projection."""
    L, R, rotated, Q = size
    N = len(SLOTS)
    packed = draw(N, Q + L + R, dtype=dtype, device=device)
    q, c, rope = packed.split([Q, L, R], 1)
    pages = draw(5, 16, 1, L + R, dtype=dtype, device=device)
    c_weight, q_weight = (draw(width, dtype=weight_dtype or dtype, device=device) for width in (L, Q))
    angles = (None, None)
    if rotated:  # the tables of the tokens, or one for all of them
        angles = [table.transpose(0, 1) for table in tables(1, N, rotated, device)]
        angles = angles if dtype == torch.float32 else [table[:1] for table in angles]
    norm = FusedNorm(c_weight, None, "rms_norm", 1e-5, offset, fp32)
    queries = (q, q_weight) if Q else (None, None)
    return pages, torch.tensor(SLOTS, device=device), c, rope, norm, *angles, *queries


def wide_arguments(arguments):
    pages, slots, c, rope, norm, *others = arguments
    weight = wide(norm.weight)
    others = [None if x is None else wide(x) for x in others]
    return wide(pages), slots.cpu(), wide(c), wide(rope), norm._replace(weight=weight), *others


@pytest.mark.cases(15)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize(("offset", "fp32"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_fp64(backend, size, offset, fp32, interleaved, poisoned_empty):
    """Each token's row in its slot, and every other slot as it was."""
    for dtype in (*dtypes(backend), torch.bfloat16):
        weight_dtype = torch.float32 if fp32 else None
        arguments = make(size, dtype, backend, offset, fp32, weight_dtype)
        pages, slots = arguments[:2]
        before = pages.clone()
        exact, plain = wide_arguments(arguments), (pages.clone(), *arguments[1:])
        results = [
            write_latents(*arguments, interleaved=interleaved),
            write_latents_reference(*plain, interleaved=interleaved),
            write_latents_reference(*exact, interleaved=interleaved),
        ]
        written = torch.zeros(80, dtype=torch.bool, device=backend)
        written[slots[slots >= 0]] = True
        assert torch.equal(pages.flatten(0, 2)[~written], before.flatten(0, 2)[~written])
        # The interpreter truncates bfloat16 where hardware rounds.
        limit = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 0.5)
        rows = [wide(x[0].flatten(0, 2)[written.to(x[0].device)]) for x in (arguments, plain, exact)]
        for got, reference, truth in (rows, results) if size[3] else (rows,):
            error, plain_error = (wide(got) - truth).norm(), (wide(reference) - truth).norm()
            assert error <= 1.5 * plain_error + limit * truth.norm()
        assert results[0] is None if size[3] == 0 else results[0].dtype == dtype


def test_no_tokens(backend):
    pages, slots, c, rope, norm, *_ = make(SIZES[0], torch.float32, backend)
    before = pages.clone()
    write_latents(pages, slots[:0], c[:0], rope[:0], norm)
    assert torch.equal(pages, before)


def test_opcheck(kernel_device):
    for size in SIZES[:2]:
        *tensors, norm, cos, sin, q, q_weight = make(size, torch.float32, kernel_device)
        arguments = *tensors, norm.weight, cos, sin, q, q_weight, 1e-6, 0.0, False, True
        opcheck(torch.ops.liger_models.write_latents, arguments)


def test_bad_arguments():
    pages, slots, c, rope, norm, cos, sin, q, q_weight = make(SIZES[0], torch.float32, "cpu")
    for bad, error, message in (
        ((pages, slots.int(), c, rope, norm), TypeError, "slots must be int64, got .* and torch.int32"),
        ((pages.half(), slots, c, rope, norm), TypeError, "must have one dtype"),
        ((pages, slots[:2], c, rope, norm), ValueError, r"and slots \[N\], got .* and \[2\]"),
        ((pages[..., :-1], slots, c, rope, norm), ValueError, r"pages must be \[pages, P, 1, L \+ R\]"),
        ((pages.transpose(0, 1), slots, c, rope, norm), ValueError, "and contiguous"),
        ((pages, slots, c, rope[:, 1:], norm), ValueError, "head_dim must be even, got 7"),
        ((pages, slots, c, rope, norm._replace(kind="layer_norm")), ValueError, "must be an RMSNorm with a weight"),
        ((pages, slots, c, rope, norm, cos[:2], sin[:2]), ValueError, "cos and sin must be"),
        ((pages, slots, c, rope, norm, cos, sin, q), ValueError, "q_weight must have the width of q"),
        ((pages, slots, c, rope, norm, cos, sin, q, q_weight[1:]), ValueError, "q_weight must have the width of q"),
    ):
        with pytest.raises(error, match=message):
            write_latents(*bad)
