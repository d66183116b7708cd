"""Dropout of the experts' low-rank inputs inside of the op."""

import pytest
import torch

from liger_models.kernels.moe import experts as experts_module
from liger_models.kernels.moe import moe_mlp
from liger_models.kernels.moe.dropout import draw_seed, drop
from liger_models.kernels.moe.permutation import sort_by_expert

from ..oracle import run
from .cases import RECOMPUTE, make, with_low_ranks


@pytest.mark.parametrize("width", [1, 37, 2100])
def test_copies_of_a_token_drop_the_same_elements(kernel_device, width, poisoned_empty):
    experts = torch.tensor([[1, 0], [0, 2], [2, 1]], device=kernel_device)
    order, _, _ = sort_by_expert(experts, 3)
    seed, rows = draw_seed(order.device), torch.ones(6, width, device=kernel_device)
    masks = drop(rows, order, seed, 0.25, 2, 0)[order.long().argsort()].view(3, 2, width)
    assert torch.equal(masks[:, 0], masks[:, 1])
    assert set(masks.unique().tolist()) <= {0.0, masks.max().item()}
    torch.testing.assert_close(masks.max(), masks.new_tensor(4 / 3)) if width > 1 else None
    assert torch.equal(drop(rows, order, seed, 0.25, 2, 0), drop(rows, order, seed, 0.25, 2, 0))
    if width == 2100:
        assert abs((masks[:, 0] == 0).double().mean() - 0.25) < 0.02
        each = drop(rows, order, seed, 0.25, 1, 1)
        assert len({*map(tuple, each.ne(0).tolist())}) == 6  # every copy its own, and of another seed


@RECOMPUTE
def test_gradients_are_those_of_the_same_elements(kernel_device, recompute, monkeypatch):
    """The elements that the kernel drops, in plain torch: outputs and all gradients of x, routing weights, A and B."""
    inputs, experts, dy = make((9, 2, 3, 24, 20), torch.float32, kernel_device)
    inputs, seed = with_low_ranks(inputs), draw_seed(dy.device)
    monkeypatch.setattr(experts_module, "draw_seed", lambda _: seed)
    order, _, _ = sort_by_expert(experts, 3)
    back = order.long().argsort()
    ones = lambda width: torch.ones(18, width, device=kernel_device)
    first = drop(ones(24), order, seed, 0.4, 2, 0)[back].view(9, 2, 24)
    second = drop(ones(20), order, seed, 0.4, 1, 1)[back].view(9, 2, 20)

    def ours(x, weights, gate_up, down, A, B, down_A, down_B):
        pairs = {"gate_up_low_rank": (A, B), "down_low_rank": (down_A, down_B)}
        return moe_mlp(x, weights, experts, gate_up, down, **pairs, recompute=recompute, dropout=0.4)

    def plain(x, weights, gate_up, down, A, B, down_A, down_B):
        of = lambda matrices, rows: torch.einsum("nkoc,nkc->nko", matrices[experts], rows)
        rows = x[:, None].expand(-1, 2, -1)
        u = of(gate_up, rows) + of(B, of(A, rows * first))
        gated = torch.nn.functional.silu(u[..., ::2]) * u[..., 1::2]
        return ((of(down, gated) + of(down_B, of(down_A, gated * second))) * weights[..., None]).sum(1)

    for got, want in zip(run(ours, inputs, [dy]), run(plain, inputs, [dy]), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
