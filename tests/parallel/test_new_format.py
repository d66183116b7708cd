"""A new format of frozen weights is one file: linear layers and experts in it load, train, shard, save, are counted."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora, quantize_base, unmerge_lora
from liger_models.adapters.lora_config import EXPERTS
from liger_models.adapters.lora_layers import LoRALinear
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.kernels.frozen.weight import FORMATS
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.linear import local
from liger_models.memory.estimate import training_memory
from liger_models.parallel import apply_ep, apply_fsdp, apply_tp, load_state, save_state
from liger_models.train.report import estimate

from ..convert.conftest import assert_same_bits
from ..late import Late
from .comparison import assert_same, mesh_of
from .models import gradients, init_device_mesh, mixture, stir
from .test_lora import trained

quantization = Late("torchao.quantization", "quantize_base needs torchao")
IDS = torch.arange(2, 14).view(2, 6)
SHARDINGS = ["", "fsdp", "tp", "tp and fsdp", "ep and fsdp"]


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    """The format is known in this module alone: others test the names of all formats."""
    quantization.to_nf4  # noqa: B018  skips without torchao
    others = dict(FORMATS)
    with_int8()
    yield
    FORMATS.clear()
    FORMATS.update(others)


def with_int8() -> None:
    """Make the format known, also in the processes of ranks, and again where an import has been followed by `clear`."""
    kind = importlib.import_module("tests.parallel.int8").Int8Rows
    FORMATS.setdefault(kind.name, kind())


def plain() -> Any:
    """A mixture: attention has linear layers."""
    return mixture()


def with_adapters(model: Any) -> Any:
    return apply_lora(model, LoRAConfig(r=4, target_parameters=EXPERTS))


def shard(model: Any, how: str) -> Any:
    """Shard a model over the ranks of this process group."""
    ranks = dist.get_world_size() if how else 1
    if how.startswith("tp"):
        mesh = mesh_of(ranks) if how == "tp" else mesh_of(2, ranks // 2)
        apply_tp(model, mesh["tp"])
        return apply_fsdp(model, mesh["dp"], param_dtype=None) if how == "tp and fsdp" else model
    if how.startswith("ep"):
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
        return apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    return apply_fsdp(model, param_dtype=None) if how == "fsdp" else model


def dense_twin(model: Any) -> Any:
    """A model with dense weights that have the numbers of the frozen ones."""
    twin = stir(with_adapters(plain()))
    for path, layer in model.named_modules():
        for name in frozen_parts(layer):
            weight = layer.dense_weight() if isinstance(layer, LoRALinear) else layer.matrices(name).dense()
            twin.get_submodule(path).get_parameter(name).data.copy_(weight)
    return twin


def step(model: Any, device: str = "cpu") -> dict[str, Tensor]:
    """Gradients and the loss."""
    model.to(device).zero_grad()
    loss = model(IDS.to(device), labels=IDS.to(device)).loss
    loss.backward()
    return {**gradients(model), "loss": loss.detach()}


def test_everything_is_in_it() -> None:
    model = quantize_base(with_adapters(plain()), dtype="int8")
    names = {name.rpartition(".")[2] for name in frozen_weights(model)}
    assert names == {"weight", "gate_up_weight", "down_weight"}
    assert {weight.format.name for weight in frozen_weights(model).values()} == {"int8"}
    dense, stored = (get_hf_state_dict(each, merge=False) for each in (plain(), model))
    for name, tensor in stored.items():
        if "proj" in name or "experts" in name:
            assert 0 < (tensor - dense[name]).norm() < 0.01 * dense[name].norm()
        else:
            assert tensor.equal(dense[name])


@pytest.mark.parametrize(
    "policy", ["none", *(pytest.param(x, marks=pytest.mark.matrix) for x in ("selective", "full"))]
)
def test_adapters_train_as_on_dense_weights(policy: str, kernel_device: str) -> None:
    """In the fused ops, whose few rows and experts have no kernel of the format."""
    model = stir(quantize_base(with_adapters(plain()), dtype="int8"))
    twin = dense_twin(model)
    for each in (model, twin):
        each.set_checkpointing(policy)
    assert_same(step(model, kernel_device), step(twin, kernel_device))
    tokens = [each.generate(IDS.to(kernel_device), max_new_tokens=3, eos_token_id=[]) for each in (model, twin)]
    assert tokens[0].equal(tokens[1])


def test_merged_saved_and_loaded_again(tmp_path: Path) -> None:
    model = stir(quantize_base(with_adapters(plain()), dtype="int8"))
    logits, base = model(IDS).logits, get_hf_state_dict(model, merge=False)
    merge_lora(model, reversible=True).save_pretrained(tmp_path)
    saved = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    torch.testing.assert_close(saved(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert unmerge_lora(model)(IDS).logits.equal(logits)
    load_hf_tensors(model, {name: tensor * 2 for name, tensor in base.items()})
    for name, tensor in get_hf_state_dict(model, merge=False).items():
        torch.testing.assert_close(tensor, 2 * base[name])
    assert model.to(torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


def test_it_is_counted() -> None:
    dense, model = with_adapters(plain()), quantize_base(with_adapters(plain()), dtype="int8")
    weights = frozen_weights(model)
    stored = sum(weight.shape.numel() + 4 * weight.shape[:-1].numel() for weight in weights.values())
    former = sum(dense.get_parameter(name).nbytes for name in weights)
    assert stored == sum(weight.format.nbytes(weight.shape, torch.float32) for weight in weights.values())
    assert estimate(dense, 64).weights - estimate(model, 64).weights == former - stored
    assert model.num_parameters() == dense.num_parameters()
    planned, other = training_memory(dense, 64), training_memory(model, 64)
    assert planned.weights - other.weights == former // 2 - stored  # the estimate is of a model in bfloat16
    assert other.activations == planned.activations


def run(folder: str, how: str) -> dict[str, Any]:
    """A model that ranks read and quantize in parts, or one process does: a step, its files, its state."""
    with_int8()

    def prepare(model: Any) -> None:
        shard(quantize_base(with_adapters(model), dtype="int8"), how)

    model = AutoLigerModel.from_pretrained(folder, progress=False, shard=prepare)
    with torch.no_grad():
        for parameter in trained(model):
            parameter.fill_(0.03)
    found: dict[str, Any] = {"base": get_hf_state_dict(model, merge=False), "run": step(model)}
    found["merged"] = get_hf_state_dict(model)
    load_hf_tensors(model, {name: tensor * 2 for name, tensor in found["base"].items()})
    found["twice"] = get_hf_state_dict(model, merge=False)
    names = frozen_weights(model)
    found["bytes"] = sum(local(model.get_parameter(name)).nbytes for name in names)
    if how:
        assert estimate(model, 64).weights == sum(local(each).nbytes for each in model.parameters())
    optimizer = torch.optim.AdamW(trained(model))
    save_state(f"{folder}/{how} state", 1, model, optimizer)
    assert load_state(f"{folder}/{how} state", model, optimizer) == 1
    return found


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.matrix if " and " in how else ()) for how in SHARDINGS[1:]]
)
def test_ranks_are_one(two: Any, four: Any, how: str, tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path)
    want = run(str(tmp_path), "")
    ranks, group = (4, four) if how == "tp and fsdp" else (2, two)
    for got in group(run, str(tmp_path), how):
        assert got["bytes"] * ranks == want["bytes"] or how in ("tp and fsdp", "ep and fsdp")
        assert got["bytes"] < want["bytes"]
        assert_same_bits(got["base"], want["base"])
        assert_same_bits(got["twice"], want["twice"])
        assert_same(got["merged"], want["merged"])
        assert_same(got["run"], want["run"])


def test_a_name_and_a_number_belong_to_one_format() -> None:
    from liger_models.kernels.frozen.weight import Format, register

    with pytest.raises(ValueError, match="register: name and number of a format must be new, got 'int8'"):
        register(type("Other", (Format,), {"name": "int8", "number": 1001}))
