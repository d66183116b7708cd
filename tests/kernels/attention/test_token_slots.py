import torch

from liger_models.kernels.attention.token_slots import token_slots, token_slots_reference

from ..oracle import opcheck


def rows(device):
    """The tables of three rows. The second row is idle."""
    table = torch.arange(1, 13, dtype=torch.int32, device=device).view(3, 4).flip(1)
    lengths = torch.tensor([15, 3, 40], dtype=torch.int32, device=device)
    return table, lengths, torch.tensor([5, 0, 2], device=device)


def test_matches_plain_torch(kernel_device, poisoned_empty):
    for n, offset in ((1, 0), (1, 2), (3, 0), (2, 1)):
        options = {"n": n, "offset": offset, "page": 16}
        for x, y in zip(
            token_slots(*rows(kernel_device), **options), token_slots_reference(*rows(kernel_device), **options),
            strict=True,
        ):  # fmt: skip
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_slots_of_rows(backend):
    positions, slots, ends, pages = token_slots(*rows(backend), n=2, offset=0, page=16)
    assert positions.flatten().tolist() == [15, 16, 0, 0, 40, 41]
    assert slots.tolist() == [4 * 16 + 15, 3 * 16, 0, 0, 10 * 16 + 8, 10 * 16 + 9]
    assert ends.tolist() == [16, 17, 1, 1, 41, 42]
    assert pages[:, 0].tolist() == [4, 4, 8, 8, 12, 12]


def test_opcheck(kernel_device):
    opcheck(torch.ops.liger_models.token_slots, (*rows(kernel_device), 2, 0, 16))
