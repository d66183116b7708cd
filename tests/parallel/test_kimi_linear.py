"""Kimi Delta Attention over ranks, which exchange the latents of decays and gates, also with adapters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.parallel import apply_cp, apply_tp

from .comparison import assert_same_once, build, mesh_of, once, run_config
from .models import init_device_mesh, mean


def adapted() -> Any:
    """A model with adapters of all linear layers, whose A and B are not where they start."""
    model = apply_lora(build(*run_config("kimi_linear")), LoRAConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def make(adapters: bool) -> Any:
    return adapted() if adapters else build(*run_config("kimi_linear"))


def cut(adapters: bool, sequence_parallel: bool) -> dict[str, Any]:
    model = apply_tp(make(adapters), mesh_of(dist.get_world_size()), sequence_parallel=sequence_parallel)
    layer = model.layers[0].self_attn
    for parameter in (layer.in_proj.weight, layer.f_b_proj.weight, layer.conv_weight, layer.decay.dt_bias):
        assert parameter.to_local().numel() * dist.get_world_size() == parameter.numel()
    return once(model)


def spread(adapters: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = once(apply_cp(make(adapters), mesh, averaged=True))
    return results | {"gradients": {name: mean(gradient) for name, gradient in results["gradients"].items()}}


@pytest.mark.parametrize("adapters", [False, True])
def test_heads_over_ranks(two, adapters):
    expected = once(make(adapters))
    for sequence_parallel in (False, True):
        for got in two(cut, adapters, sequence_parallel):
            assert_same_once(got, expected)


@pytest.mark.parametrize("adapters", [False, True])
def test_tokens_over_ranks(two, adapters):
    expected = once(make(adapters))
    for got in two(spread, adapters):
        assert_same_once(got, expected)
