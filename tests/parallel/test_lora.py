"""Adapters on a sharded frozen model: the gradients, steps and files of a single process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_models import LigerLlama, LigerMixtral
from liger_models.adapters import (
    LoRAConfig,
    apply_lora,
    load_adapter,
    lora_config,
    merge_lora,
    quantize_base,
    save_adapter,
)
from liger_models.convert import get_hf_state_dict
from liger_models.layers.moe import MATRICES
from liger_models.parallel import (
    apply_ep,
    apply_fsdp,
    apply_tp,
    compile_blocks,
    load_state,
    save_state,
    targets_per_rank,
)

from .models import batch, gradients, init_device_mesh, mixture, share, stir, tiny, whole

CONFIG: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "lm_head"]}


def adapted(**config: Any):
    return stir(apply_lora(tiny(num_hidden_layers=2), LoRAConfig(**CONFIG, **config)))


def trained(model) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def run(model, rank: int, ranks: int, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        rows = share(batch(step), rank, ranks)
        model(**rows, num_items_in_batch=targets_per_rank([rows])).loss.backward()
        optimizer.step()
    return gradients(model)


def sharded(config: dict[str, Any], policy: str, compiled: bool, folder: str) -> tuple[dict[str, Tensor], bool]:
    model = apply_fsdp(adapted(**config), param_dtype=None)
    model.set_checkpointing(policy)
    if compiled:
        compile_blocks(model, backend="eager")
    got = run(model, dist.get_rank(), dist.get_world_size())
    save_adapter(model, folder)
    return got, all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.compile
@pytest.mark.parametrize(
    ("config", "policy", "compiled"),
    [
        ({}, "none", False),
        ({"use_dora": True}, "full", False),
        pytest.param({}, "selective", True, marks=pytest.mark.matrix),  # as on a quantized base
    ],
)
def test_two_ranks_are_one(two, config, policy, compiled, tmp_path):
    one = adapted(**config)
    want = run(one, 0, 1)
    for got, all_sharded in two(sharded, config, policy, compiled, str(tmp_path)):
        assert all_sharded
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
    loaded = load_adapter(tiny(num_hidden_layers=2), tmp_path)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def loaded_in_parts(
    folder: str, reads: str, tensor_parallel: bool, config: dict[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and logits; the ranks' generators differ."""

    def shard(model):
        apply_lora(model, LoRAConfig(**CONFIG, **config))
        if tensor_parallel:
            return apply_tp(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        return apply_fsdp(model, param_dtype=None)

    model = LigerLlama.from_pretrained(reads, progress=False, shard=shard)
    assert [parameter.requires_grad for parameter in model.parameters()].count(True) == len(trained(model)) > 0
    save_adapter(model, folder)
    ids = batch(0)["input_ids"]
    return whole(model.named_parameters()), model(ids).logits.detach()


@pytest.mark.parametrize(
    ("tensor_parallel", "config"),
    [pytest.param(False, {}, marks=pytest.mark.matrix), *((each, {"use_dora": True}) for each in (False, True))],
    ids=str,
)
def test_each_rank_reads_its_part_and_all_have_the_same_adapters(two, tensor_parallel, config, tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    folders = str(tmp_path / "adapter"), str(tmp_path / "model")
    (first, logits), (second, _) = two(loaded_in_parts, *folders, tensor_parallel, config)
    one = load_adapter(tiny(), tmp_path / "adapter")
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(first[name], parameter.detach(), rtol=1e-6, atol=1e-7)
        assert first[name].equal(second[name]), name
    A = one.layers[0].self_attn.qkv_proj.lora.q_proj.lora_A
    assert 0 < A.abs().max() <= 32**-0.5
    assert A.unique(dim=0).shape == A.shape
    torch.testing.assert_close(
        tiny()(batch(0)["input_ids"]).logits, logits, rtol=1e-4, atol=1e-5
    )  # nothing adapted yet


def goes_on(folder: str, make: Callable[[], Any]) -> bool:
    """Whether a run of two steps, and one that starts from the state after the first, end with the same parameters."""
    results = []
    for start in (None, 1):
        model = make()
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        assert load_state(Path(folder), model, optimizer) == start
        for step in range(start or 0, 2):
            model(**share(batch(step), dist.get_rank(), 2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if start is None and step == 0:
                save_state(Path(folder), 1, model, optimizer)
        results.append(whole(model.named_parameters()))
    return all(value.equal(results[1][name]) for name, value in results[0].items())


def resumed(folder: str) -> bool:
    return goes_on(folder, lambda: apply_fsdp(adapted(), param_dtype=None))


def test_a_run_goes_on_from_its_state(two, tmp_path):
    assert all(two(resumed, str(tmp_path)))


def merge_sharded() -> str:
    try:
        merge_lora(apply_fsdp(adapted()))
    except ValueError as error:
        return str(error)
    return ""


def test_merging_asks_for_whole_weights(two):
    assert all("must not be sharded" in message for message in two(merge_sharded))


EXPERTS: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "target_parameters": lora_config.EXPERTS}


def adapted_experts(**config: Any):
    return stir(apply_lora(mixture(), LoRAConfig(**EXPERTS, **config)))


def over_experts(model, ranks: int):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "ep"))
    return apply_fsdp(
        apply_ep(model, mesh["ep"]) if ranks > 1 else model, mesh if ranks > 1 else None, param_dtype=None
    )


def run_experts(model, rank: int, ranks: int) -> dict[str, Tensor]:
    """As `run`, with experts that are given: every expert has tokens of every rank."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-4)
    for step in range(2):
        optimizer.zero_grad()
        rows = batch(step)
        scores = torch.rand(*rows["input_ids"].shape, 3, 4, generator=torch.Generator().manual_seed(step))
        rows = share(rows | {"routed_experts": scores.topk(2).indices.short()}, rank, ranks)
        model(**rows, num_items_in_batch=targets_per_rank([rows])).loss.backward()
        optimizer.step()
    return gradients(model)


def sharded_experts(ep: int, policy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    model = over_experts(adapted_experts(), ep)
    model.set_checkpointing(policy)
    got = run_experts(model, dist.get_rank(), dist.get_world_size())
    save_adapter(model, folder)
    A = model.layers[0].mlp.lora.down_weight.lora_A
    return got, get_hf_state_dict(model), A.to_local().shape[0] == 4 // dist.get_world_size()


@pytest.mark.parametrize(
    ("ep", "ranks", "policy"),
    [(1, 2, "none"), (2, 2, "selective"), pytest.param(2, 4, "none", marks=pytest.mark.matrix)],
)
def test_experts_on_ranks_are_one(two, four, ep, ranks, policy, tmp_path):
    """Sharded as parameters, over the ranks of experts, and both; merged tensors and files are those of one process."""
    one = adapted_experts()
    want = run_experts(one, 0, 1)
    for got, tensors, is_part in (two if ranks == 2 else four)(sharded_experts, ep, policy, str(tmp_path)):
        assert is_part
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
        for name, tensor in get_hf_state_dict(one).items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5)
    loaded = load_adapter(mixture(), tmp_path)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def experts_loaded_in_parts(folder: str, reads: str, ep: int) -> tuple[dict[str, Tensor], Tensor]:
    model = LigerMixtral.from_pretrained(
        reads, progress=False, shard=lambda model: over_experts(apply_lora(model, LoRAConfig(**EXPERTS)), ep)
    )
    save_adapter(model, folder)
    return whole(model.named_parameters()), model(batch(0)["input_ids"]).logits.detach()


@pytest.mark.parametrize(("ep", "ranks"), [(1, 2), (2, 2), pytest.param(2, 4, marks=pytest.mark.matrix)])
def test_each_rank_reads_its_experts_and_draws_its_adapters(two, four, ep, ranks, tmp_path):
    mixture().save_pretrained(tmp_path / "model")
    folders = str(tmp_path / "adapter"), str(tmp_path / "model")
    results = (two if ranks == 2 else four)(experts_loaded_in_parts, *folders, ep)
    one = load_adapter(mixture(), tmp_path / "adapter")
    for found, logits in results:
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mixture()(batch(0)["input_ids"]).logits, logits, rtol=1e-4, atol=1e-5)
    A = one.layers[0].mlp.lora.gate_up_weight.lora_A.flatten(0, 1)
    assert 0 < A.abs().max() <= 32**-0.5
    assert A.unique(dim=0).shape == A.shape


def experts_resumed(folder: str) -> bool:
    return goes_on(folder, lambda: over_experts(adapted_experts(), 2))


def test_a_run_with_experts_goes_on_from_its_state(two, tmp_path):
    assert all(two(experts_resumed, str(tmp_path)))


def quantized_experts(dtype: str, quantize_first: bool, policy: str, folder: str) -> tuple[dict[str, Tensor], Any, Any]:
    """Experts alone have adapters: linear layers in fewer bits are not sharded."""
    model = stir(apply_lora(mixture(), LoRAConfig(**EXPERTS | {"target_modules": []})))
    if quantize_first:
        quantize_base(model, dtype=dtype)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
        apply_ep(model, mesh["ep"])
    if not quantize_first:
        quantize_base(model, dtype=dtype)
    if ranks > 1:
        apply_fsdp(model, mesh, param_dtype=None)
    model.set_checkpointing(policy)
    got = run_experts(model, dist.get_rank() if ranks > 1 else 0, ranks)
    save_adapter(model, folder)
    stored = [model.layers[0].mlp.matrices(name).shape[0] for name in MATRICES]
    return got, get_hf_state_dict(model), stored


@pytest.mark.parametrize(("dtype", "first"), [pytest.param("nf4", True, marks=pytest.mark.matrix), ("float8", False)])
def test_quantized_experts_on_ranks_are_one(two, dtype, first, tmp_path):
    """Quantized before they are distributed, or on each rank: gradients, files and merged tensors of one process."""
    pytest.importorskip("torchao")
    want, merged, stored = quantized_experts(dtype, True, "none", str(tmp_path / "one"))
    assert stored == [4, 4]
    for got, tensors, part in two(quantized_experts, dtype, first, "selective", str(tmp_path / "two")):
        assert part == [2, 2]
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
        for name, tensor in merged.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5)
    one, other = (load_adapter(mixture(), tmp_path / name) for name in ("one", "two"))
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
