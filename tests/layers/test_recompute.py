"""Blocks of which only the input is kept."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_models import AutoLigerModel, LigerGemma2, LigerGranite, LigerLlama, LigerMixtral
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch import get_arch
from liger_models.kernels.linear import gated_mlp, projection
from liger_models.kernels.moe import experts as experts_module
from liger_models.layers import moe
from liger_models.layers.compile_ahead import never_ahead
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import routed_layers

from ..arch.families import ARCHS, properties, tiny

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}


def build(cls, device, layers=3, **options):
    config = cls.config_class(**SIZES, num_key_value_heads=2, num_hidden_layers=layers, **options)
    return cls.from_config(config, device=device)


def gradients(model, policy, device, with_own=lambda loss: loss):
    model.set_checkpointing(policy)
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 9), device=device)
    with_own(model(ids, labels=ids).loss).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def nan_left_out(monkeypatch):
    """Results that are not made hold NaN."""
    op = gated_mlp._forward_rows

    def forward_rows(inputs, products):
        outputs = op(inputs, products)
        if not inputs.need_y:
            outputs.y.fill_(float("nan"))
        return outputs

    monkeypatch.setattr(gated_mlp, "_forward_rows", forward_rows)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("cls", "again", "workspace"),
    [(LigerLlama, 0, 0), (LigerGemma2, 3, 1024), (LigerGemma2, 3, 0), (LigerGranite, 0, 1024)],
)
def test_a_last_projection_is_made_again_only_where_something_keeps_its_result(
    kernel_device, nan_left_out, monkeypatch, cls, again, workspace
):
    """Gemma 2 norms it, which Granite's factor, a constant, does not need."""
    made = []
    linear = projection.linear_forward
    count = lambda x, *weights: (made.append(x.shape[-1]), linear(x, *weights))[1]
    monkeypatch.setattr(projection, "linear_forward", count)
    monkeypatch.setattr(gated_mlp, "WORKSPACE_MIB", workspace)
    monkeypatch.setattr(gated_mlp, "MIN_CHUNK", 7)
    model = build(cls, kernel_device)
    want = gradients(model, "selective", kernel_device)
    made.clear()
    got = gradients(model, "full", kernel_device)
    chunks = 1 if workspace else 3
    assert made.count(SIZES["intermediate_size"]) == (3 + again) * chunks
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("policy", "calls"), [("none", 3), ("selective", 3), ("full", 2 * 2 * 3)])
def test_attention_of_recomputed_blocks_takes_a_few_heads_at_a_time(monkeypatch, policy, calls):
    """In others the heads' results would be saved twice."""
    model = build(LigerLlama, "cpu")
    want = gradients(model, policy, "cpu")
    sdpa = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr("liger_models.layers.attention_backends.F.scaled_dot_product_attention", sdpa)
    monkeypatch.setattr("liger_models.layers.attention_backends.MOST_RECOMPUTED", 2 * 9 * 4 * 8 - 1)
    got = gradients(model, policy, "cpu")
    assert sdpa.call_count == calls
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("some", [False, True])
def test_experts_are_chosen_once(backend, monkeypatch, some):
    """A recomputed block is given the experts of its first run, also those of tokens that are given none."""
    model = build(LigerMixtral, backend)
    calls = []

    def choose(original, logits, routing, bias, given):
        weights, experts = original(logits, routing, bias, given)
        calls.append((given, experts))
        return weights, experts

    for name in ("route", "route_reference"):
        monkeypatch.setattr(moe, name, partial(choose, getattr(moe, name)))
    ids = torch.randint(0, 64, (2, 9), device=backend)
    experts = torch.arange(2, device=ids.device).expand(2, 9, 3, 2).to(torch.int16).clone()
    experts[:, 4:] = -1
    found = {}
    for policy in ("none", "full"):
        model.set_checkpointing(policy)
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids, routed_experts=experts if some else None).loss.backward()
        found[policy] = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found["full"], found["none"])
    firsts, seconds = calls[:3], calls[:2:-1]  # the last block is recomputed first
    assert len(firsts) == len(seconds) == 3
    for (_, chosen), (given, again) in zip(firsts, seconds, strict=True):
        assert given.dtype == torch.int16
        assert torch.equal(given, chosen.to(torch.int16))
        assert torch.equal(again, chosen)


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe"])
def test_a_recomputed_block_repeats_no_product_of_its_experts(kernel_device, monkeypatch, arch):
    """Except gate and up, which are recomputed under "selective", too. A shared expert runs before them."""
    options = {"num_experts": 4} if arch == "qwen2_moe" else {}
    model = build(get_arch(arch), kernel_device, **options)
    never_ahead(model)  # the recording of a first step would be counted, too
    original, products, found = experts_module.grouped_mm, [], {}
    monkeypatch.setattr(experts_module, "grouped_mm", lambda *args: products.append(1) or original(*args))
    for policy in ("selective", "full"):
        products.clear()
        found[policy] = gradients(model, policy, kernel_device)
        assert len(products) == 3 * 5
    torch.testing.assert_close(found["full"], found["selective"])


@pytest.mark.cases(4)
@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if "LigerMoE" in properties(arch)])
def test_recomputed_mixtures_have_the_same_gradients(kernel_device, arch, jitter):
    """On the CPU in a second backward, too, which compiled flex_attention forbids. The routers' noise is drawn once."""
    model = AutoLigerModel.from_config({"model_type": arch, **next(iter(tiny(arch).values()))}, device=kernel_device)
    for layer in routed_layers(model):
        layer.router_jitter = jitter
    ids = torch.arange(3, 27, device=kernel_device).view(2, 12) % 20
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {}
    for policy in ("none", "full"):
        model.set_checkpointing(policy)
        torch.manual_seed(5)
        loss = model(ids, labels=ids).loss
        retained = (True, False) if kernel_device == "cpu" else (False,)
        found[policy] = [torch.autograd.grad(loss, parameters, retain_graph=x, allow_unused=True) for x in retained]
    torch.testing.assert_close(found["full"], found["none"])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_what_experts_return_is_made_again_where_it_is_used_besides(kernel_device, dropout):
    """With the same elements dropped from the inputs of their adapters."""
    model, read = build(LigerMixtral, kernel_device), []
    apply_lora(model, LoRAConfig(r=2, lora_dropout=dropout, target_parameters=["experts.gate_up_proj"]))
    for layer in routed_layers(model):
        for parameter in layer.lora.parameters():
            nn.init.normal_(parameter, std=0.3)
    model.layers[1].register_forward_hook(lambda block, args, out: read.append(out[0].sin().mean()))
    found = {}
    for policy in ("none", "full"):
        model.set_checkpointing(policy)
        model.zero_grad()
        torch.manual_seed(1)
        ids = torch.arange(18, device=kernel_device).view(2, 9)
        loss = model(ids, labels=ids).loss + read[-1]
        loss.backward()
        found[policy] = [loss, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]
    torch.testing.assert_close(found["full"], found["none"])


def wrap(module):
    forward = module.forward
    module.forward = lambda *args: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.parametrize(
    ("change", "flips"),
    [
        (lambda block: block.mlp.compile(backend="eager"), True),
        (lambda block: setattr(block.mlp, "replayable", False), True),
        (lambda block: wrap(block.mlp), False),  # the user's own code runs the router again
        (wrap, False),
    ],
    ids=["compiled experts", "not replayable", "wrapped experts", "wrapped block"],
)
def test_experts_beside_other_code(monkeypatch, change, flips):
    """With ``flips``, a router would choose other experts in a second run that is not given the first choice."""
    torch._dynamo.reset()
    original, runs, found = moe.route_reference, [], {}

    @torch._dynamo.disable
    def choose(logits, routing, bias, given):
        runs.append(given)
        return original(-logits if flips and given is None and len(runs) > 3 else logits, routing, bias, given)

    monkeypatch.setattr(moe, "route_reference", choose)
    for policy in ("none", "full"):
        torch.manual_seed(0)
        model = build(LigerMixtral, "cpu")
        for block in model.layers if policy == "full" else ():
            change(block)
        runs.clear()
        found[policy] = gradients(model, policy, "cpu")
    torch.testing.assert_close(found["full"], found["none"])


class Twice(nn.Module):
    """A block that runs its MLP once more, and another behind it."""

    def __init__(self, block, other):
        super().__init__()
        self.block, self.mlp = block, other.mlp

    def forward(self, x, residual, layout):
        norm = self.block.post_attention_layernorm
        x, residual = self.block.mlp.add_norm(norm, *self.block(x, residual, layout))
        return self.mlp.add_norm(norm, x, residual)


def test_what_an_mlp_returns_is_made_again_where_it_is_used_besides(kernel_device, nan_left_out):
    """By MLPs behind it, by a hook."""
    model, other = (build(LigerLlama, kernel_device, layers=1) for _ in range(2))
    model.layers[0], read = Twice(model.layers[0], other.layers[0]), []
    model.layers[0].register_forward_hook(lambda block, args, out: read.append(out[0].sin().mean()))
    want = gradients(model, "none", kernel_device, lambda loss: loss + read[-1])
    got = gradients(model, "full", kernel_device, lambda loss: loss + read[-1])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_hook_draws_is_drawn_again(backend, training):
    """In evaluation, too, where only a dropout may be left on."""
    model = build(LigerLlama, backend).train(training)
    model.layers[1].register_forward_hook(lambda block, args, out: (F.dropout(out[0], 0.5), out[1]))
    want = gradients(model, "none", backend)
    torch.testing.assert_close(gradients(model, "full", backend), want)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_drawn_in_attention_is_drawn_again(training):
    """Where it is made again by itself: in a block with experts, in a compiled one."""
    model = build(LigerMixtral, "cpu").train(training)
    model.layers[1].self_attn.qkv_proj.register_forward_hook(lambda linear, args, out: F.dropout(out, 0.5))
    want = gradients(model, "none", "cpu")
    torch.testing.assert_close(gradients(model, "full", "cpu"), want)


class DropsQueries(nn.Linear):
    """A layer of one's own that draws without a module for it."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


def test_what_a_layer_of_ones_own_draws_is_drawn_again():
    model = build(LigerMixtral, "cpu").train()  # a block of experts recomputes its attention by itself
    for block in model.layers:
        block.self_attn.qkv_proj.__class__ = DropsQueries
    expected = gradients(model, "none", "cpu")
    for policy in ("selective", "full"):
        for got, want in zip(gradients(model, policy, "cpu"), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_keys_and_values_of_a_decode_cache_are_appended_once():
    model = build(LigerLlama, "cpu", layers=1)
    ids, found = torch.arange(6)[None], []
    for policy in ("none", "full"):
        model.set_checkpointing(policy)
        found.append(torch.autograd.grad(model(ids, cache=DecodeCache(6)).logits.sum(), list(model.parameters())))
    torch.testing.assert_close(found[1], found[0])


def test_a_second_backward(backend):
    model = build(LigerLlama, backend)
    want = gradients(model, "none", backend)

    def after_a_first(loss):
        loss.backward(retain_graph=True)
        return loss

    got = gradients(model, "full", backend, after_a_first)
    torch.testing.assert_close([gradient / 2 for gradient in got], want)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("part", ["mlp.gate_up_proj", "self_attn.qkv_proj"])
def test_a_weight_that_changes_before_the_backward_is_an_error(backend, policy, part):
    model = build(LigerLlama, backend, layers=1)
    ids = torch.randint(0, 64, (2, 9), device=backend)
    model.set_checkpointing(policy)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.layers[0].get_submodule(part).weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"must not be changed in place|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_weights_may_change_behind_the_backward_of_their_block(policy):
    """As an optimizer does that steps in hooks of the gradients."""
    model = build(LigerLlama, "cpu")
    want = gradients(model, policy, "cpu")
    for parameter in model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: torch.no_grad()(each.mul_)(2))
    torch.testing.assert_close(gradients(model, policy, "cpu"), want)
