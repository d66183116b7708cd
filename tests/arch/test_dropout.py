"""Families that drop elements of the embeddings or of the output of each branch in training."""

import dataclasses

import pytest
import torch

from liger_models.layers.layer import CHECKPOINTING_POLICIES

from .families import DATA, error, load, make_folder, tokens, variants

NAMES = ("residual_dropout", "embedding_dropout")


CASES = sorted(
    {(file.parent.name, name) for file in DATA.glob("*/tiny.json") for name in NAMES if f'"{name}"' in file.read_text()}
)


@pytest.fixture(params=CASES, ids="-".join)
def model(request, tmp_path):
    arch, name = request.param
    variant = next(iter(variants(arch)))
    plain = load(arch, make_folder(arch, variant, tmp_path))
    dropping = type(plain)(dataclasses.replace(plain.config, **{name: 0.3}))
    dropping.load_state_dict(plain.state_dict())
    return plain, dropping, tokens(arch, variant, 2, 12)


def test_elements_are_dropped_in_training_alone(model):
    plain, dropping, ids = model
    assert torch.equal(dropping.eval()(ids).logits, plain.eval()(ids).logits)
    first, second = (dropping.train()(ids).logits for _ in range(2))
    assert error(first, second) > 1e-2
    assert error(first, plain(ids).logits) > 1e-2


def test_recomputation_drops_the_same_elements(model):
    _, dropping, ids = model
    gradients = []
    for policy in CHECKPOINTING_POLICIES:
        dropping.train().set_checkpointing(policy)
        dropping.zero_grad()
        torch.manual_seed(1)
        dropping(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in dropping.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
