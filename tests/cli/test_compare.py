"""What a difference from transformers is said to be: the tensors, and the block and the part in it."""

import pytest
import torch

from liger_models.cli.compare import PART_LIMIT, tensor_differences, where_it_differs

from ..arch.families import hf_model, load, make_folder, tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("compared")


@pytest.fixture
def llama(root):
    """Ours, transformers', and a batch."""
    folder = make_folder("llama", "gqa", root)
    return load("llama", folder), hf_model(folder), tokens("llama", "gqa", 2, 20)


def wrong_theta(model):
    rotary = model.rotary["default"]
    rotary.inv_freq = rotary.inv_freq * 0.5


def wrong_scale(model):
    model.layers[1].self_attn.scale *= 2


def wrong_activation(model):
    model.layers[1].mlp.act = "gelu"


def swapped_norms(model):
    block = model.layers[1]
    block.input_layernorm, block.post_attention_layernorm = block.post_attention_layernorm, block.input_layernorm


def wrong_eps(model):
    model.norm.eps = 0.5


def scaled_stream(model):
    forward = model.layers[0].forward
    model.layers[0].forward = lambda x, residual, layout: tuple(y * 2 for y in forward(x, residual, layout))


@pytest.mark.parametrize(
    ("damage", "place", "wrong"),
    [
        (wrong_theta, "layers.0", {"self_attn"}),
        (wrong_scale, "layers.1", {"self_attn"}),
        (wrong_activation, "layers.1", {"mlp"}),
        (swapped_norms, "layers.1", {"input_layernorm", "post_attention_layernorm"}),
        (wrong_eps, "norm", {"output"}),
        (scaled_stream, "layers.0", {"output"}),
    ],
)
def test_the_first_part_that_differs_is_named(llama, damage, place, wrong):
    ours, theirs, ids = llama
    damage(ours)
    message = where_it_differs(ours, theirs, input_ids=ids)
    assert message.startswith(f"{place}: "), message
    parts = dict(part.split() for part in message.removeprefix(f"{place}: ").partition(" (")[0].split(", "))
    assert {part for part, error in parts.items() if float(error) > PART_LIMIT} == wrong, message


def test_tensors_are_named_with_their_shapes():
    expected = {"a": torch.zeros(2), "b": torch.zeros(3, 4), "c": [5]}
    stored = {"b": torch.zeros(4, 3), "c": torch.zeros(5), "d": torch.zeros(1)}
    assert [*map(str, tensor_differences(expected, stored))] == [
        "missing a [2]",
        "extra d [1]",
        "wrong shape b [4, 3], expected [3, 4]",
    ]
