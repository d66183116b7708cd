"""Blocks of which only the input is kept."""

import pytest
import torch
from torch.nn import functional as F

from liger_models import LigerGemma2, LigerGranite, LigerLlama
from liger_models.kernels import gated_mlp

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}


def build(cls, device):
    config = cls.config_class(**SIZES, num_key_value_heads=2, num_hidden_layers=3)
    return cls.from_config(config, device=device)


def gradients(model, policy, device):
    model.set_checkpointing(policy)
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 9), device=device)
    model(ids, labels=ids).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("cls", "again"), [(LigerLlama, 0), (LigerGemma2, 3), (LigerGranite, 0)])
@pytest.mark.parametrize("workspace", [1024, 0])
def test_a_last_projection_is_made_again_only_where_something_keeps_its_result(
    kernel_device, monkeypatch, cls, again, workspace
):
    """Gemma 2 norms it, which Granite's factor, a constant, does not need. What is left out holds NaN here."""
    made = []
    linear, op = gated_mlp.linear, gated_mlp._forward_rows
    monkeypatch.setattr(gated_mlp, "linear", lambda x, *weights: (made.append(x.shape[-1]), linear(x, *weights))[1])

    def forward_rows(*args):
        y, *kept = op(*args)
        result = args[-2]
        return y if result else y.fill_(float("nan")), *kept

    monkeypatch.setattr(gated_mlp, "_forward_rows", forward_rows)
    monkeypatch.setattr(gated_mlp, "WORKSPACE_MIB", workspace)
    monkeypatch.setattr(gated_mlp, "MIN_CHUNK", 7)
    model = build(cls, kernel_device)
    want = gradients(model, "selective", kernel_device)
    made.clear()
    got = gradients(model, "full", kernel_device)
    chunks = 1 if workspace else 3
    assert made.count(SIZES["intermediate_size"]) == (3 + again) * chunks
    torch.testing.assert_close(got, want)


def test_what_uses_the_last_result_besides(kernel_device):
    """A hook that keeps the block's result as it is, and a loss of its own on it."""
    model, losses = build(LigerLlama, kernel_device), []
    for block in model.layers:
        block.register_forward_hook(lambda block, args, out: losses.append(out[0].square().sum()))

    def gradients_of_all(policy):
        model.set_checkpointing(policy)
        model.zero_grad()
        losses.clear()
        ids = torch.arange(9, device=kernel_device)[None]
        loss = model(ids, labels=ids).loss
        (loss + sum(losses)).backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients_of_all("full"), gradients_of_all("none"))


@pytest.mark.parametrize("training", [True, False])
def test_what_a_hook_draws_is_drawn_again(backend, training):
    model = build(LigerLlama, backend).train(training)
    model.layers[1].register_forward_hook(lambda block, args, out: (F.dropout(out[0], 0.5, training), out[1]))
    want = gradients(model, "none", backend)
    torch.testing.assert_close(gradients(model, "full", backend), want)


def test_a_second_backward(backend):
    model = build(LigerLlama, backend)
    want = gradients(model, "none", backend)
    model.set_checkpointing("full")
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 9), device=backend)
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([parameter.grad / 2 for parameter in model.parameters()], want)
