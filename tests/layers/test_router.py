"""The choice of experts within groups, against transformers' routers."""

import copy

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.layers.layer import fp32_parameters
from liger_models.layers.router import LigerRoutedMoE, LigerRouter, Routing, choose_experts

from ..arch.families import tiny
from ..late import Late

v2 = Late("transformers.models.deepseek_v2.modeling_deepseek_v2")
v3 = Late("transformers.models.deepseek_v3.modeling_deepseek_v3")
configurations = Late("transformers")

N, X, K, C = 37, 12, 3, 16


def sizes(**more):
    return {
        "hidden_size": C,
        "num_attention_heads": 2,
        "n_routed_experts": X,
        "num_experts_per_tok": K,
        "routed_scaling_factor": 1.7,
        **more,
    }


def by_expert(weights, experts):
    """[N, X], because the order of a token's experts does not matter."""
    return torch.zeros(len(weights), X, dtype=weights.dtype).scatter_add(1, experts, weights)


@pytest.mark.parametrize("groups", [None, (4, 2)])
def test_deepseek_v2(groups):
    config = configurations.DeepseekV2Config(**sizes())
    if groups:
        config.topk_method, (config.n_group, config.topk_group) = "group_limited_greedy", groups
    theirs, x = v2.DeepseekV2TopkRouter(config), torch.randn(N, C)
    torch.nn.init.normal_(theirs.weight)
    logits, *want = theirs(x)
    chosen, top = groups or (1, 1)
    got = choose_experts(logits, K, Routing(groups=chosen, top_groups=top, factor=1.7))
    torch.testing.assert_close(by_expert(*got), by_expert(*want))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_deepseek_v3(groups, normalize):
    config = configurations.DeepseekV3Config(**sizes(n_group=groups[0], topk_group=groups[1], norm_topk_prob=normalize))
    theirs, x = v3.DeepseekV3TopkRouter(config), torch.randn(N, C)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    logits, *want = theirs(x)
    routing = Routing("sigmoid", *groups, 2, normalize, 1.7)
    got = choose_experts(logits, K, routing, theirs.e_score_correction_bias)
    torch.testing.assert_close(by_expert(*got), by_expert(*want))
    without = choose_experts(logits, K, routing)
    assert not torch.equal(by_expert(*without), by_expert(*got))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gradients_in_fp64(scoring):
    logits = torch.randn(5, X, dtype=torch.float64, requires_grad=True)
    routing = Routing(scoring, 4, 2, 2, True, 1.7)
    experts = choose_experts(logits, K, routing)[1]
    assert torch.autograd.gradcheck(lambda x: choose_experts(x, K, routing, given=experts)[0], logits)


def test_given_experts_replace_the_choice_of_tokens_that_have_some():
    logits, routing = torch.randn(4, X), Routing("sigmoid")
    given = torch.tensor([[5, 1, 2], [-1, -1, -1], [0, 1, 2], [-1, 0, 0]], dtype=torch.int16)
    weights, experts = choose_experts(logits, K, routing, given=given)
    free = choose_experts(logits, K, routing)[1]
    assert torch.equal(experts[[0, 2]], given[[0, 2]].long())
    assert torch.equal(experts[[1, 3]], free[[1, 3]])
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, experts))


def test_logits_are_computed_in_fp32():
    router, x = LigerRouter(C, X, correction=True, fp32=True).to(torch.bfloat16), torch.randn(N, C).bfloat16()
    assert router.weight.dtype == torch.bfloat16
    logits = router(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ router.weight.float().T)
    assert LigerRouter(C, X, correction=False, fp32=False).to(torch.bfloat16)(x).dtype == torch.bfloat16


def test_the_bias_stays_in_fp32():
    router = LigerRouter(C, X, correction=True, fp32=True)
    router.e_score_correction_bias.data.normal_()
    bias = router.e_score_correction_bias.detach().clone()
    router.bfloat16()
    assert torch.equal(router.e_score_correction_bias, bias)
    assert not router.e_score_correction_bias.requires_grad
    assert copy.deepcopy(router).double().e_score_correction_bias.dtype == torch.float64
    assert router.half().to("meta").e_score_correction_bias.dtype == torch.float32
    assert router.to_empty(device="cpu").e_score_correction_bias.dtype == torch.float32


def test_a_model_in_bf16_is_saved_and_read_with_its_bias(tmp_path):
    model = AutoLigerModel.from_config({"model_type": "deepseek_v3", **tiny("deepseek_v3")["yarn"]})
    names = fp32_parameters(model)
    assert names == {"layers.1.mlp.experts.gate.e_score_correction_bias"}
    for name in names:
        model.get_parameter(name).data.normal_()
    biases = {name: model.get_parameter(name).detach().clone() for name in names}
    model.bfloat16().save_pretrained(tmp_path)
    read = AutoLigerModel.from_pretrained(tmp_path, dtype=torch.bfloat16, progress=False)
    assert read.dtype == torch.bfloat16
    for name, bias in biases.items():
        assert torch.equal(read.get_parameter(name), bias)
        assert not read.get_parameter(name).requires_grad


def test_wrong_groups_are_named():
    make = lambda *groups, best=2: LigerRoutedMoE(C, 8, X, K, routing=Routing("sigmoid", *groups, best))
    with pytest.raises(ValueError, match=r"n_group \(5\) must divide the 12 experts"):
        make(5, 2)
    with pytest.raises(ValueError, match=r"topk_group \(1\) groups must have at least top_k \(3\)"):
        make(6, 1)
    with pytest.raises(ValueError, match=r"n_group \(12\) groups of 12 experts must have at least 2 experts each"):
        make(12, 12)
