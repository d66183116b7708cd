"""Kimi Linear: published sizes, packed documents, padding, and what other models of its type are refused for."""

import json

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.kimi_linear import KimiLinearConfig, LigerKimiLinear, from_json, to_json
from liger_models.convert.config_map import read_config
from liger_models.layers.layer import wide_parameters
from liger_models.layers.linear_attention import LinearAttention

from .families import DATA, error, hf_model, load, make_folder, tiny, tokens

LENGTHS = [1, 2, 63, 64, 65, 130]
PUBLISHED = json.loads((DATA / "kimi_linear" / "Kimi-Linear-48B-A3B-Instruct.json").read_text())


def test_published_sizes():
    config = read_config(KimiLinearConfig, PUBLISHED, strict=True)
    assert [layer for layer in range(27) if not config.is_linear(layer)] == [3, 7, 11, 15, 19, 23, 26]
    assert [layer for layer in range(27) if not config.is_sparse(layer)] == [0]
    model = LigerKimiLinear.from_config(config, device="meta")
    assert model.num_parameters(only_trainable=True) == 49_122_675_072
    assert {name.rpartition(".")[2] for name in wide_parameters(model)} == {"A_log", "dt_bias", "bias"}


def test_packed_documents_equal_documents_alone(root):
    model = load("kimi_linear", make_folder("kimi_linear", "experts", root))
    ids, weights = torch.randint(64, (1, sum(LENGTHS))), torch.randn(1, sum(LENGTHS), 101)
    packed = model(ids, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)).logits
    (packed * weights).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.clone() for parameter in trained]
    model.zero_grad()
    for document, factor, logits in zip(*(x.split(LENGTHS, 1) for x in (ids, weights, packed)), strict=True):
        alone = model(document).logits
        assert error(logits, alone) <= 1e-5
        (alone * factor).sum().backward()
    for parameter, gradient in zip(trained, gradients, strict=True):
        assert error(parameter.grad, gradient) <= 1e-5


@pytest.mark.parametrize(("arch", "variant"), [("kimi_linear", "experts"), ("qwen3_next", "mixed")])
def test_padding_after_tokens_leaves_the_state(root, arch, variant):
    """The states of linear attention after a row with padding are those of the row without it."""
    model = load(arch, make_folder(arch, variant, root))
    layer = next(module for module in model.modules() if isinstance(module, LinearAttention))
    projected = torch.randn(1, 7, layer.in_proj.out_features)
    padding = (torch.arange(7) >= 5)[None, :, None]
    options = {"cu_seqlens": None, "kernel": False, "stateful": True}
    with torch.no_grad():
        _, (_, padded) = layer.mix(projected.masked_fill(padding, 0), None, padding, options)
        _, (_, alone) = layer.mix(projected[:, :5], None, None, options)
        _, (_, unmasked) = layer.mix(projected.masked_fill(padding, 0), None, None, options)
    assert error(padded, alone) <= 1e-6
    assert error(unmasked, alone) > 1e-2


def test_yarn_changes_nothing(root):
    """Nothing is rotated, so the temperature of YaRN does not apply, either."""
    folder, ids = make_folder("kimi_linear", "experts", root), torch.randint(64, (2, 17))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7}
    yarn = {**yarn, "mscale_all_dim": 0.5, "rope_theta": 10_000.0}
    settings = json.loads((folder / "config.json").read_text())
    theirs = hf_model(folder)
    changed = type(theirs)(type(theirs.config).from_pretrained(folder, rope_scaling=yarn, rope_parameters=yarn))
    changed.load_state_dict(theirs.state_dict())
    ours = LigerKimiLinear.from_config(read_config(KimiLinearConfig, {**settings, "rope_scaling": yarn}))
    ours.load_state_dict(load("kimi_linear", folder).state_dict())
    with torch.no_grad():
        assert error(ours(ids).logits, changed.eval()(ids).logits) <= 1e-5


def test_layer_types_of_both_spellings():
    flat = from_json(PUBLISHED)
    assert from_json(to_json({**flat, "rope_theta": 1e4, "rope_scaling": None})) == {
        key: value for key, value in flat.items() if not key.startswith("rope_")
    }
    types = ["linear_attention", "full_attention", "linear_attention"]
    mlps = ["sparse", "dense", "sparse"]
    sizes = {"num_hidden_layers": 3, "layer_types": types, "mlp_layer_types": mlps}
    config = read_config(KimiLinearConfig, {"model_type": "kimi_linear", **sizes}, strict=True)
    again = from_json(to_json({**from_json(PUBLISHED), **sizes}))
    assert {key: again[key] for key in sizes} == sizes
    assert [config.is_linear(layer) for layer in range(3)] == [True, False, True]
    # As transformers: without any numbers, layers 4, 8, ... have latent attention.
    assert [layer for layer in range(27) if not KimiLinearConfig().is_linear(layer)] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope must be True, got False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid', got 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "gate_lower_bound": -5.0}},
            "linear_attn_config may have head_dim, .* got gate_lower_bound. Other kinds of linear attention",
        ),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "kda_layers": [1, 2, 4]}},
            r"must have each number from 1 to 27 \(num_hidden_layers\) once, got \[4, .*\] and \[1, 2, 4\]",
        ),
        ({"hidden_act": "situ"}, "hidden_act must be 'silu' or 'swish', got 'situ'"),
    ],
)
def test_other_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(KimiLinearConfig, {**PUBLISHED, **changes}, strict=True)


def test_heads_that_share_no_divisor_with_the_width():
    """All rows are then in one unit, and one rank has all heads."""
    sizes = {**tiny("kimi_linear")["experts"], "linear_num_heads": 3}
    model = AutoLigerModel.from_config({"model_type": "kimi_linear", **sizes})
    layer = model.layers[0].self_attn
    assert (layer.units, layer.can_shard(3)) == (1, False)
    assert model(tokens("kimi_linear", "experts", 1, 5)).logits.shape == (1, 5, 101)
