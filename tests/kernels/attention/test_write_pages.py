import pytest
import torch

from liger_models.kernels.attention import write_pages as module
from liger_models.kernels.attention.write_pages import write_pages, write_pages_reference

from ..oracle import opcheck
from ..rope.test_rope import draw, dtypes


def make(device, dtype=torch.float32, G=2, D=6, V=None):
    V = D if V is None else V
    pages = [draw(5, 16, G, width, dtype=dtype, device=device, seed=seed) for seed, width in enumerate((D, V))]
    packed = draw(7, G, 3 * D, dtype=dtype, device=device)  # of which keys and values are parts
    slots = torch.tensor([3, -1, 79, 0, 16, -1, 40], device=device)
    return *pages, packed[..., :D], packed[..., D : D + V], slots


@pytest.mark.parametrize("sizes", [(2, 6), (1, 2), (3, 40), (2, 6, 12), (1, 70, 3), (1, 40, 0)], ids=str)
def test_writes_what_the_reference_writes(backend, sizes, monkeypatch):
    """Each token to its slot, padding nowhere, and nothing else."""
    monkeypatch.setattr(module, "BLOCK", 64)
    for dtype in dtypes(backend):
        keys, values, k, v, slots = make(backend, dtype, *sizes)
        wanted = [x.clone() for x in (keys, values)]
        for pages, new in zip(wanted, (k, v), strict=True):
            for row, slot in zip(new, slots.tolist(), strict=True):
                if slot >= 0:
                    pages[slot // 16, slot % 16] = row
        references = [x.clone() for x in (keys, values)]
        write_pages(keys, values, k, v, slots)
        write_pages_reference(*references, k, v, slots)
        for got, reference, want in zip((keys, values), references, wanted, strict=True):
            assert torch.equal(got, want)
            assert torch.equal(reference, want)


def test_heads_in_any_order(backend):
    keys, values, k, v, slots = make(backend)
    wanted = [x.clone() for x in (keys, values)]
    write_pages(*wanted, k, v, slots)
    write_pages(keys, values, k.transpose(0, 2).contiguous().transpose(0, 2), v, slots)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


def test_no_tokens(backend):
    keys, values, k, v, slots = make(backend)
    before = keys.clone()
    write_pages(keys, values, k[:0], v[:0], slots[:0])
    assert torch.equal(keys, before)


def test_opcheck(kernel_device):
    opcheck(torch.ops.liger_models.write_pages, make(kernel_device))


@pytest.mark.gpu
def test_slots_beyond_two_billion_elements():
    keys = torch.zeros(2**31 // (64 * 8 * 128) + 8, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = draw(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    write_pages(keys, keys, k, k, torch.tensor([keys.shape[0] * 64 - 1], device="cuda"))
    assert torch.equal(keys[-1, -1], k[0])


def test_bad_arguments():
    keys, values, k, v, slots = make("cpu")
    for bad, error, message in (
        ((keys, values[:1], k, v, slots), ValueError, r"keys and values must be \[pages, P, G, D\]"),
        ((keys, values, k, v, slots[:2]), ValueError, r"and slots \[N\], got .* and \[2\]"),
        ((keys.transpose(0, 1), values.transpose(0, 1), k, v, slots), ValueError, "must be contiguous, got strides"),
        ((keys, values, k.half(), v, slots), TypeError, "must have one dtype"),
        ((keys, values, k, v, slots.int()), TypeError, "slots must be int64, got .* and torch.int32"),
    ):
        with pytest.raises(error, match=message):
            write_pages(*bad)
