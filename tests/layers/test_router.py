"""Routers that choose experts within groups, against transformers' routers."""

import copy

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.kernels.matmul import row_linear, wide_linear
from liger_models.kernels.moe import Routing, route
from liger_models.layers.layer import wide_parameters
from liger_models.layers.moe import CorrectionBias, WideRouter, update_correction_biases

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
    got = route(logits, Routing(K, groups=chosen, top_groups=top, scale=1.7))
    torch.testing.assert_close(by_expert(*got), by_expert(*want))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_deepseek_v3(groups, normalize):
    config = configurations.DeepseekV3Config(**sizes(n_group=groups[0], topk_group=groups[1], norm_topk_prob=normalize))
    theirs, x = v3.DeepseekV3TopkRouter(config), torch.randn(N, C)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    logits, *want = theirs(x)
    routing = Routing(
        K, normalize, score="sigmoid", groups=groups[0], top_groups=groups[1], group_score="top2", scale=1.7,
        epsilon=1e-20,
    )  # fmt: skip
    got = route(logits, routing, theirs.e_score_correction_bias)
    torch.testing.assert_close(by_expert(*got), by_expert(*want))
    assert not torch.equal(by_expert(*route(logits, routing)), by_expert(*got))


def test_logits_are_computed_in_fp32():
    router, x = WideRouter(C, X).to(torch.bfloat16), torch.randn(N, C).bfloat16()
    assert router.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        logits = router(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ router.weight.float().T)


@pytest.mark.parametrize("rows", [1, 200])
def test_without_kernels_logits_are_computed_by_torch(kernel_device, monkeypatch, rows):
    router, x = WideRouter(C, X, kernel=False).to(kernel_device), torch.randn(rows, C, device=kernel_device)
    for module in (row_linear, wide_linear):
        monkeypatch.setattr(module, "use_triton", lambda _: pytest.fail("a kernel would run"))
    with torch.no_grad():
        assert torch.equal(router(x), x @ router.weight.T)
    assert torch.equal(router(x), x @ router.weight.T)


def test_the_bias_stays_in_fp32():
    correction = CorrectionBias(X)
    correction.bias.data.normal_()
    bias = correction.bias.detach().clone()
    correction.bfloat16()
    assert torch.equal(correction.bias, bias)
    assert not correction.bias.requires_grad
    assert copy.deepcopy(correction).double().bias.dtype == torch.float64
    assert correction.half().to("meta").bias.dtype == torch.float32
    assert correction.to_empty(device="cpu").bias.dtype == torch.float32


def test_a_model_in_bf16_is_saved_and_read_with_its_bias(tmp_path):
    model = AutoLigerModel.from_config({"model_type": "deepseek_v3", **tiny("deepseek_v3")["yarn"]})
    names = wide_parameters(model)
    assert names == ["layers.1.mlp.experts.correction.bias"]
    for name in names:
        model.get_parameter(name).data.normal_()
    biases = {name: model.get_parameter(name).detach().clone() for name in names}
    model.bfloat16().save_pretrained(tmp_path)
    read = AutoLigerModel.from_pretrained(tmp_path, dtype=torch.bfloat16, progress=False)
    assert read.dtype == torch.bfloat16
    for name, bias in biases.items():
        assert torch.equal(read.get_parameter(name), bias)
        assert not read.get_parameter(name).requires_grad


def test_biases_move_towards_experts_with_few_tokens():
    model = AutoLigerModel.from_config({"model_type": "deepseek_v3", **tiny("deepseek_v3")["yarn"]})
    (name,) = wide_parameters(model)
    X, K = model.get_parameter(name).numel(), model.routers[0].top_k
    experts = torch.zeros(4, 1, K, dtype=torch.int16) + torch.arange(K)  # all tokens have the first K
    update_correction_biases(model, experts, rate=0.25)
    want = torch.full((X,), 0.25)
    want[:K] = -0.25
    assert torch.equal(model.get_parameter(name).detach(), want)
    update_correction_biases(model, torch.arange(X).view(-1, 1, K), rate=0.25)
    assert torch.equal(model.get_parameter(name).detach(), want)  # the load is even
    with pytest.raises(ValueError, match=r"experts must be \[tokens, 1, experts of a token\], got \[4, 3\]"):
        update_correction_biases(model, experts[:, 0])
