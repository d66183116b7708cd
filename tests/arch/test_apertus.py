"""Apertus: the coefficients of its activation, and the rotation if config.json has no parameters for it."""

import copy

import pytest
import torch

from liger_models import ApertusConfig, AutoLigerModel
from liger_models.convert.config_map import read_config
from liger_models.convert.format import format_of

from ..late import transformers
from .families import LIMIT, error, tokens

first_case = pytest.mark.parametrize("pair", [("apertus", "released")], indirect=True, ids="-".join)


@first_case
def test_the_coefficients_are_trained_and_the_constants_are_not(pair):
    arch, variant, theirs, ours = pair
    frozen = [name for name, parameter in ours.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"layers.{i}.mlp.xielu.constants" for i in range(2)]
    ids = tokens(arch, variant, 2, 9)
    for block, layer in zip(ours.layers, theirs.model.layers, strict=True):
        act = layer.mlp.act_fn
        assert torch.equal(block.mlp.xielu.constants.detach(), torch.stack([act.beta, act.eps]))
    with torch.no_grad():  # other constants than those of a new model count, too
        for block, layer in zip(ours.layers, theirs.model.layers, strict=True):
            block.mlp.xielu.constants.copy_(torch.tensor([0.7, -0.5]))
            layer.mlp.act_fn.beta.fill_(0.7)
            layer.mlp.act_fn.eps.fill_(-0.5)
    before = ours(ids).logits
    assert error(before, theirs(ids).logits) <= LIMIT
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    ours(ids, labels=ids).loss.backward()
    alphas = copy.deepcopy([block.mlp.xielu.alphas for block in ours.layers])
    optimizer.step()
    assert all((block.mlp.xielu.alphas != old).all() for block, old in zip(ours.layers, alphas, strict=True))


def test_a_new_model_has_transformers_coefficients():
    sizes = {"model_type": "apertus", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 12}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    ours = AutoLigerModel.from_config(sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**sizes))
    act, xielu = theirs.model.layers[0].mlp.act_fn.float(), ours.layers[0].mlp.xielu
    torch.testing.assert_close(xielu.alphas, torch.cat([act.alpha_p, act.alpha_n]), rtol=0.01, atol=0)
    torch.testing.assert_close(xielu.constants, torch.stack([act.beta, act.eps]), rtol=0.01, atol=0)
    assert xielu.coefficients().tolist() == pytest.approx([0.8, 0.8, 0.5, -1e-6])


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5.0},
        {"rope_theta": 5.0, "rope_scaling": None},
        {"rope_theta": 5.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
    ],
    ids=str,
)
def test_which_rope_parameters_count(rope):
    want = transformers.AutoConfig.for_model("apertus", **copy.deepcopy(rope)).rope_parameters
    got = read_config(ApertusConfig, rope)
    assert got.rope_theta == want["rope_theta"]
    kind = None if got.rope_scaling is None else type(got.rope_scaling).__name__.removesuffix("Scaling").lower()
    assert kind == {"default": None}.get(want["rope_type"], want["rope_type"])
    assert kind is None or got.rope_scaling.factor == want["factor"]


def test_the_released_model_has_as_many_parameters_as_published():
    """8B, with its sizes."""
    config = ApertusConfig(intermediate_size=21504, num_key_value_heads=8)
    model = AutoLigerModel.from_config({"model_type": "apertus", "intermediate_size": 21504, "num_key_value_heads": 8},
                                       device="meta")  # fmt: skip
    shapes = format_of(type(model)).weight_map(config).shapes(dict(model.named_parameters()))
    assert round(sum(tensor.numel() for tensor in shapes.values()) / 1e9, 3) == 8.053
    act = "model.layers.31.mlp.act_fn"
    names = {name: list(shapes[f"{act}.{name}"].shape) for name in ("alpha_p", "alpha_n", "beta", "eps")}
    assert names == {"alpha_p": [1], "alpha_n": [1], "beta": [], "eps": []}
