"""Rollouts that multiply by float8 copies of the weights and cache keys and values in float8, for every family."""

import pytest
import torch
from torch import nn

from liger_models import AutoLigerModel
from liger_models.generation.rollout_checks import refusal
from liger_models.generation.rollouts import rollout
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.layer import layers_of

from .families import CASES, FIRST_CASES, of_each_kind, tiny

PROMPTS = [[5, 7, 9, 4, 6], [8, 3, 11, 12, 10, 5, 7, 4, 6], [9]]


def build(arch, variant, device="cpu"):
    torch.manual_seed(0)
    sizes = {"model_type": arch, **tiny(arch)[variant]}
    return AutoLigerModel.from_config(sizes, device=device, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_layers_name_the_linear_layers_that_they_have(case):
    """`convert_to_float8` and float8 rollouts read these names."""
    for layer in layers_of(build(*case, device="meta").layers):
        for name in layer.linears:
            assert isinstance(getattr(layer, name), nn.Linear), (type(layer).__name__, name)


@pytest.mark.cases(15)
@pytest.mark.parametrize("case", of_each_kind(FIRST_CASES), ids="-".join)
def test_rollouts_in_float8(case):
    """The kernels are tested elsewhere."""
    model = build(*case)
    for parameter in model.parameters():  # away from logits that are all alike
        parameter.data += 0.1 * torch.randn_like(parameter)
    options = {"max_new_tokens": 4, "eos_token_id": []}
    latents = any(layer.attention and layer.attention.caches_latents for layer in layers_of(model.layers))
    float8 = {"weight_dtype": "float8", "cache_dtype": None if latents else "float8"}
    with reference_backend():
        if refusal(model, 8, PROMPTS[0]):  # also without float8
            with pytest.raises(ValueError, match="Use generate"):
                rollout(model, PROMPTS, **float8, **options)
            return
        plain, found = rollout(model, PROMPTS, **options), rollout(model, PROMPTS, **float8, **options)
    differences = [(a.log_probs[0] - b.log_probs[0]).abs() for a, b in zip(plain, found, strict=True)]
    assert 0 < max(differences) < 0.7
