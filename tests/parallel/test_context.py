"""A model whose tokens are shared among ranks computes and trains as in one process."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.adapters.medusa import LigerMedusa
from liger_models.arch import list_archs
from liger_models.distributed.collectives import Group
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.parallel import apply_cp, apply_ep, apply_fsdp, apply_tp, compile_blocks

from ..arch.families import of_each_kind
from .comparison import (
    RUNS,
    assert_close,
    assert_same,
    assert_same_on_device,
    assert_same_once,
    assert_same_run,
    beyond_kinds_of_run,
    build,
    configs_of,
    mesh_of,
    once,
    run_config,
    train,
)
from .images import FAMILIES, image_batch, image_config
from .models import batch, gradients, init_device_mesh, mean, tiny


def spread(model: Any) -> Any:
    """With gradients that the caller averages."""
    return apply_cp(model, init_device_mesh("cpu", (dist.get_world_size(),)), averaged=True)


def averaged(results: dict[str, Any]) -> dict[str, Any]:
    return results | {"gradients": {name: mean(gradient) for name, gradient in results["gradients"].items()}}


def spread_once(cases: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [averaged(once(spread(build(*case)))) for case in cases]


@pytest.mark.cases(3)
@pytest.mark.parametrize("arch", of_each_kind(list_archs()))
def test_every_architecture(two, arch):
    cases = [(arch, config) for config in configs_of(arch)[:2]]
    expected = [once(build(*case)) for case in cases]
    for results in two(spread_once, cases):
        for got, right in zip(results, expected, strict=True):
            assert_same_once(got, right)


def train_spread(case: tuple[str, Any], policy: str, packed: bool, dp: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "cp"))
    model = build(*case)
    model.set_checkpointing(policy)
    apply_cp(model, mesh["cp"])
    apply_fsdp(model, mesh if dp > 1 else None, param_dtype=None)
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())  # over all ranks
    return train(model, packed=packed, dp=(mesh["dp"].get_local_rank(), dp))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "policy", "packed"),
    [
        *(
            pytest.param(name, CHECKPOINTING_POLICIES[index % 3], index % 2 == 1, marks=beyond_kinds_of_run(name))
            for index, name in enumerate(RUNS)
        ),
        ("gemma2", "none", True),
        ("qwen3_next", "full", True),
    ],
)
def test_trains_as_one_process(two, name, policy, packed):
    case = run_config(name)
    expected = train(build(*case), packed=packed)
    for got in two(train_spread, case, policy, packed, 1):
        assert_same_run(got, expected)


def test_data_parallel_around_it(four):
    case = run_config("llama, tied, biases")
    expected = train(build(*case), packed=True)
    for got in four(train_spread, case, "none", True, 2):
        assert_same_run(got, expected)


def log_probs(model: Any, *, compiled: bool) -> dict[str, Any]:
    """Of a batch's targets, a function of them, and its gradients."""
    if compiled:
        compile_blocks(model, backend="aot_eager")
    multiple = 1 if dist.is_initialized() else 1000  # each rank leaves out its rows without targets
    with mock.patch("liger_models.layers.lm_head.ROW_MULTIPLE", multiple):
        result = model(**batch(0, packed=True), return_log_probs=True).log_probs
    result.sin().sum().backward()
    return {"log_probs": result.detach(), "gradients": gradients(model)}


def log_probs_spread() -> dict[str, Any]:
    return averaged(log_probs(spread(tiny()), compiled=True))


@pytest.mark.matrix
@pytest.mark.compile
def test_log_probs_of_compiled_blocks(two):
    expected = log_probs(tiny(), compiled=False)
    for got in two(log_probs_spread):
        assert_close(got["log_probs"], expected["log_probs"])
        assert_same(got["gradients"], expected["gradients"])


def adapted(name: str) -> Any:
    model = apply_lora(build(*run_config(name)), LoRAConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def adapted_once(model: Any) -> dict[str, Any]:
    results = once(model)
    return results | {"logits": None}


def adapted_spread(name: str) -> dict[str, Any]:
    return averaged(adapted_once(spread(adapted(name))))


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_adapters(two, name):
    expected = adapted_once(adapted(name))
    assert all("lora" in parameter for parameter in expected["gradients"])
    for got in two(adapted_spread, name):
        assert_close(got["loss"], expected["loss"])
        assert_same(got["gradients"], expected["gradients"])


def with_images(name: str, *, shared: bool) -> dict[str, Any]:
    arch, config = image_config(name)
    model = build(arch, config)
    model.set_checkpointing("full" if name == "mllama" else "none")
    loss = (spread(model) if shared else model)(**image_batch(config, 0)).loss
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients(model)}


def with_images_spread(name: str) -> dict[str, Any]:
    return averaged(with_images(name, shared=True))


@pytest.mark.parametrize("name", of_each_kind(FAMILIES))
def test_images(two, name):
    """Their tokens stand on both ranks, of which each computes the whole tower."""
    expected = with_images(name, shared=False)
    assert expected["gradients"]["visual.patch_embed.weight"].any()
    for got in two(with_images_spread, name):
        assert_close(got["loss"], expected["loss"])
        assert_same(got["gradients"], expected["gradients"])


def nothing_to_learn() -> torch.Tensor:
    return spread(tiny())(**batch(0) | {"labels": torch.full((4, 12), -100)}).loss


def test_a_batch_without_targets(two):
    expected = tiny()(**batch(0) | {"labels": torch.full((4, 12), -100)}).loss
    for got in two(nothing_to_learn):
        assert_close(got, expected)


def refused() -> None:
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=r"LigerCrossAttention: num_key_value_heads \(1\) must be a multiple of 2"):
        apply_cp(build(*image_config("mllama", num_key_value_heads=1, cross_attention_layers=[0])), mesh)
    with pytest.raises(ValueError, match=r"num_key_value_heads \(1\) must be a multiple of 2 ranks"):
        apply_cp(tiny(num_key_value_heads=1), mesh)
    with pytest.raises(ValueError, match="apply_cp: LigerLlama must not be sharded yet"):
        apply_cp(apply_tp(tiny(), mesh), mesh)
    with pytest.raises(ValueError, match="apply_cp: FSDPLigerLlama must not be sharded yet"):
        apply_cp(apply_fsdp(tiny()), mesh)
    model = spread(tiny())
    for again in (apply_cp, apply_tp, apply_ep):
        with pytest.raises(ValueError, match="must have all tokens on each rank, got one after apply_cp"):
            again(model, mesh)
    with pytest.raises(ValueError, match="must not be sharded by apply_tp or apply_cp"):
        LigerMedusa(model)
    ids = torch.arange(11)[None]
    with pytest.raises(ValueError, match=r"T must be a multiple of the 2 ranks that share the tokens, got 11"):
        model(ids)
    for options in ({"logits_to_keep": 1}, {"labels": ids[:, :10], "loss_function": lambda *_: 0.0}):
        with pytest.raises(ValueError, match="need all tokens on one rank"):
            model(ids[:, :10], **options)


def test_refused(two):
    two(refused)


def on_devices(name: str, device: str) -> None:
    """As one process on the same device, in fp32 to its rounding."""
    arch, config = run_config(name)
    config = dataclasses.replace(config, hidden_size=64, head_dim=16)
    expected = train(build(arch, config).to(device), packed=True)
    model = apply_cp(build(arch, config).to(device), init_device_mesh(device, (2,)))
    got = train(apply_fsdp(model, param_dtype=None), packed=True)
    assert_same_on_device(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama, tied, biases", "gemma2", "olmo2", "mixtral"])
def test_on_gpus(two_gpus, name):
    two_gpus(on_devices, name, "cuda")


def test_what_the_gpus_are_to_run(two):
    """On the CPU, so that the function itself is right."""
    two(on_devices, "olmo2", "cpu")


def test_one_rank_is_as_none(monkeypatch):
    monkeypatch.setattr("liger_models.parallel.context.group_of", lambda _: Group("", 1, 0))
    model = apply_cp(tiny(), SimpleNamespace(ndim=1, get_group=lambda: None))  # type: ignore[arg-type]
    assert model.groups.context is None
