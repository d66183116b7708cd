"""The architecture of `examples/custom.py` over ranks: nothing in it knows of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.parallel import apply_ep, apply_fsdp, apply_tp

from .models import TINY, batch, gradients, init_device_mesh, make_optimizer, mean, share, whole


def make() -> Any:
    from examples.custom import SideBySide, SideBySideConfig

    torch.manual_seed(7)
    sizes = TINY | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 24, "sliding_window": 5}
    return SideBySide.from_config(SideBySideConfig(**sizes, initializer_range=0.1, router_aux_loss_coef=0.0))


def train(model: nn.Module, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Losses of three packed steps, gradients of the first, weights after the last."""
    optimizer = make_optimizer("liger", model)
    result: dict[str, Any] = {"losses": []}
    for step in range(3):
        loss = model(**share(batch(step, packed=True), rank, ranks), num_items_in_batch=30 / ranks).loss
        loss.backward()
        result["losses"].append(mean(loss))
        if step == 0:
            result["gradients"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return result | {"weights": whole(model.named_parameters())}


def cut(name: str, model: nn.Module) -> tuple[nn.Module, int, int]:
    """The model over ranks, and which rows of a batch this one takes: its number, out of how many."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name == "tensor":
        return apply_tp(model, init_device_mesh("cpu", (ranks,))), 0, 1
    if name == "experts":
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "ep"))
        return apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None), rank, ranks
    return apply_fsdp(model, param_dtype=None), rank, ranks


def train_over_ranks(name: str, policy: str, folder: Path) -> dict[str, Any]:
    model = make()
    model.set_checkpointing(policy)
    model, rank, ranks = cut(name, model)
    result = train(model, rank, ranks)
    model.save_pretrained(folder, max_shard_size=20_000)
    return result


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "policy"), [("fsdp", "none"), ("fsdp", "full"), ("tensor", "none"), ("experts", "selective")]
)
def test_it_trains_as_in_one_process(two, name, policy, tmp_path):
    expected = train(make())
    for got in two(train_over_ranks, name, policy, tmp_path / "model"):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)
    again = AutoLigerModel.from_pretrained(tmp_path / "model", progress=False, strict=True)
    saved = {name: parameter.detach() for name, parameter in again.named_parameters()}
    torch.testing.assert_close(saved, got["weights"], rtol=0, atol=0)


def adapted() -> nn.Module:
    model = make()
    torch.manual_seed(8)
    return apply_lora(model, LoRAConfig(r=4))


def train_adapters_over_ranks() -> dict[str, Any]:
    return train(apply_fsdp(adapted(), param_dtype=None), dist.get_rank(), dist.get_world_size())


def test_adapters_train_as_in_one_process(two):
    expected = train(adapted())
    assert all("lora_" in name for name in expected["gradients"])
    for got in two(train_adapters_over_ranks):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def load_parts(folder: Path, again: Path) -> dict[str, Any]:
    make()  # imports the module that registers the class
    model = AutoLigerModel.from_pretrained(folder, shard=apply_fsdp, progress=False, strict=True)
    model.save_pretrained(again, max_shard_size=20_000)
    return whole(model.named_parameters())


def test_each_rank_loads_its_part(two, tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "model", max_shard_size=20_000)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for got in two(load_parts, tmp_path / "model", tmp_path / "again"):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert len(files) > 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files
