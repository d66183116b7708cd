import pytest
import torch

from liger_models.kernels.moe import load_balancing_loss

from ...late import Late

mixtral = Late("transformers.models.mixtral.modeling_mixtral")


@pytest.mark.parametrize("masked", [False, True])
def test_matches_transformers(backend, masked):
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(12, 6, generator=generator).to(backend).requires_grad_() for _ in range(3)]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], device=backend) if masked else None
    want = mixtral.load_balancing_loss_func(tuple(layers), 6, 2, mask)
    got = load_balancing_loss(layers, 2, mask)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(3 * loss, layers) for loss in (got, want)]
    torch.testing.assert_close(*grads)
    stacked = torch.stack(layers).view(3, 2, 6, 6)
    torch.testing.assert_close(load_balancing_loss(stacked, 2, None if mask is None else mask.bool()), want)


def test_without_a_row():
    logits = torch.randn(4, 5, requires_grad=True)
    for loss in (load_balancing_loss(logits[:0], 2), load_balancing_loss([logits], 2, torch.zeros(2, 2))):
        assert loss.item() == 0
        loss.backward()
        assert not logits.grad.any()


def test_of_uniform_routing_is_top_k():
    logits = 1e-4 * torch.stack([torch.eye(6).roll(i, 0)[0] + torch.eye(6).roll(i + 1, 0)[0] for i in range(6)])
    assert load_balancing_loss(logits, 2).item() == pytest.approx(2)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"must hold a tensor, got none"):
        load_balancing_loss([], 1)
    with pytest.raises(ValueError, match=r"the 4 rows of router_logits must be a multiple of attention_mask's 3"):
        load_balancing_loss([torch.ones(4, 2)], 1, torch.ones(1, 3))
