"""Nemotron-H: published sizes, kinds of layers, limits of step sizes, and packed documents."""

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.nemotron_h import LigerNemotronH, NemotronHConfig, from_json

from .families import LIMIT, error, hf_model, load, make_folder, tokens

LENGTHS = [1, 2, 63, 64, 65, 130]
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip


def test_published_sizes():
    """Nemotron 3 Super without its layers for multi-token prediction."""
    config = NemotronHConfig(
        hybrid_override_pattern=SUPER, num_hidden_layers=88, num_key_value_heads=2, n_routed_experts=512,
        num_experts_per_tok=22, moe_intermediate_size=2688, moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
    )  # fmt: skip
    model = LigerNemotronH.from_config(config, device="meta")
    assert model.num_parameters(only_trainable=True) == 120_668_687_360


@pytest.mark.parametrize("latent", [None, 16])
def test_packed_documents_equal_documents_alone(latent):
    torch.manual_seed(0)
    sizes = {**TINY, "hybrid_override_pattern": "ME*-", "moe_latent_size": latent}
    model = AutoLigerModel.from_config({"model_type": "nemotron_h", **sizes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("A_log"):  # states that last
                parameter.sub_(4)
    ids, weights = torch.randint(64, (1, sum(LENGTHS))), torch.randn(1, sum(LENGTHS), 64)
    packed = model(ids, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)).logits
    (packed * weights).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.clone() for parameter in trained]
    model.zero_grad()
    for document, factor, logits in zip(*(x.split(LENGTHS, 1) for x in (ids, weights, packed)), strict=True):
        alone = model(document).logits
        assert (alone - logits).norm() <= 1e-5 * alone.norm()
        (alone * factor).sum().backward()
    for parameter, gradient in zip(trained, gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()


def test_step_sizes_have_the_limits_of_the_configuration(root):
    """Transformers raises step sizes to ``time_step_min`` in a prefill, and not when it decodes."""
    folder = make_folder("nemotron_h", "latents", root)
    theirs, ours = hf_model(folder), load("nemotron_h", folder)
    ids = tokens("nemotron_h", "latents", 1, 12)
    with torch.no_grad():
        for model in (theirs, ours):
            for name, parameter in model.named_parameters():
                if name.endswith("dt_bias"):
                    parameter.fill_(-12.0)  # far below the smallest step size of a new model
    assert ours.config.time_step_min == 0.001
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.001, float("inf"))
    assert error(ours(ids).logits, theirs(ids).logits) > 10 * LIMIT


def test_given_experts_replace_the_choice(root, monkeypatch):
    """Their weights are the sigmoids of their logits, and get gradients."""
    model = load("nemotron_h", make_folder("nemotron_h", "latents", root))
    ids = tokens("nemotron_h", "latents", 1, 12)
    given = torch.stack([torch.randperm(6)[:2] for _ in range(12)])[None, :, None]
    got = model(ids, labels=ids, routed_experts=given).loss
    got.backward()
    (router,) = model.routers
    gradient = router.gate.weight.grad.clone()

    def route(self, logits, experts=None):
        chosen = given.view(12, 2)
        return self.routing.scale * logits.sigmoid().gather(1, chosen), chosen, logits

    monkeypatch.setattr(type(router), "_route", route)
    model.zero_grad()
    want = model(ids, labels=ids).loss
    want.backward()
    assert error(got, want) <= LIMIT
    assert error(gradient, router.gate.weight.grad) <= LIMIT


def test_kinds_of_layers():
    words = ["linear_attention", "moe", "attention", "mlp"]
    for hf in ({"layers_block_type": words}, {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 7}, {}):
        flat = from_json(hf)
        assert (flat["hybrid_override_pattern"], flat["num_hidden_layers"]) == ("ME*-", 4)
    assert from_json({"mamba_d_conv": 3, "conv_kernel": 4})["conv_kernel"] == 3
    with pytest.raises(ValueError, match=r"layers_block_type must hold linear_attention, .* got conv"):
        from_json({"layers_block_type": ["conv"]})
    with pytest.raises(ValueError, match=r"must hold 4 \(num_hidden_layers\) of M, \*, - and E, got 'MX\*-'"):
        NemotronHConfig(hybrid_override_pattern="MX*-")
    with pytest.raises(ValueError, match=r"top_groups must be in 1 to groups, got groups 2 and top_groups 3"):
        NemotronHConfig(n_group=2, topk_group=3)
