"""Layers with states: what padding and packed documents leave in them, and what a reader of errors is told."""

import pytest
import torch

from liger_models.arch.mamba2 import LigerMamba2ForCausalLM, Mamba2Config
from liger_models.distributed.collectives import Group
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.mamba2 import LigerMamba2

LENGTHS = [1, 2, 63, 64, 65, 130]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16}


def build(**changes):
    torch.manual_seed(0)
    model = LigerMamba2ForCausalLM.from_config(
        Mamba2Config(**SIZES, initializer_range=0.1, **{"n_groups": 2, **changes})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("A_log"):  # states that last
                parameter.sub_(4)
    return model


@pytest.mark.parametrize("biases", [{}, {"use_bias": True, "n_groups": 1}], ids=str)
def test_packed_documents_equal_documents_alone(biases):
    """Logits and gradients of documents whose lengths are around those of chunks."""
    model = build(**biases)
    ids = torch.randint(64, (1, sum(LENGTHS)))
    weights = torch.randn(1, sum(LENGTHS), 64)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = model(ids, cu_seqlens=bounds).logits
    (packed * weights).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for document, factor, logits in zip(*(x.split(LENGTHS, 1) for x in (ids, weights, packed)), strict=True):
        alone = model(document).logits
        assert (alone - logits).norm() <= 1e-5 * alone.norm()
        (alone * factor).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_tokens_nor_states(side):
    model = build(use_bias=True)
    ids = torch.randint(64, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 9) if side == "left" else slice(31, 40)] = 0
    kept = mask[1].bool()
    with torch.no_grad():
        caches = [DecodeCache(60), DecodeCache(60)]
        padded = model(ids, attention_mask=mask, cache=caches[0]).logits[1, kept]
        alone = model(ids[1:, kept], cache=caches[1]).logits[0]
    assert (padded - alone).norm() <= 1e-5 * alone.norm()
    for layer in range(2):
        state, want = (cache.states(layer)[1][-1] for cache in caches)
        assert (state - want).norm() <= 1e-5 * want.norm()


def test_new_models_decay_as_in_the_paper():
    mixer = LigerMamba2(32, 64, 2, 1, 16, 4, layer=0)
    assert torch.equal(mixer.decay.A_log, torch.arange(1.0, 65).log())
    steps = torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert 0.001 <= steps.min() < 0.01 < steps.max() <= 0.1
    assert torch.equal(mixer.decay.D, torch.ones(64))


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 7_285_403_648),
        (
            {
                "hidden_size": 2560,
                "num_heads": 80,
                "n_groups": 1,
                "vocab_size": 50288,
                "tie_word_embeddings": True,
            },
            2_702_599_680,
        ),
    ],
)
def test_published_sizes(changes, parameters):
    model = LigerMamba2ForCausalLM.from_config(Mamba2Config(**changes), device="meta")
    assert model.num_parameters() == parameters


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"number of heads \(4\) must be a multiple of the number of groups \(3\)"):
        LigerMamba2(32, 4, 16, 3, 16, 4, layer=0)
    with pytest.raises(ValueError, match=r"conv_size \(conv_kernel\) must be 2 to 4, got 5"):
        LigerMamba2(32, 4, 16, 2, 16, 5, layer=0)
    with pytest.raises(ValueError, match=r"time_step_min \(0\.5\) must be at most time_step_max \(0\.1\)"):
        LigerMamba2(32, 4, 16, 2, 16, 4, layer=0, initial_steps=(0.5, 0.1, 1e-4))
    with pytest.raises(ValueError, match=r"hidden_size times expand \(64\) must equal num_heads times head_dim \(80\)"):
        Mamba2Config(**{**SIZES, "num_heads": 5})
    mixer = LigerMamba2(32, 12, 16, 4, 16, 4, layer=0)
    for ranks in (3, 8):
        with pytest.raises(ValueError, match=rf"number of ranks must divide 4, .* got {ranks} ranks. Use fewer ranks"):
            mixer.shard(Group("none", ranks, 0))
    assert mixer.can_shard(2)
