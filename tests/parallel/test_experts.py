"""Experts on ranks: a mixture trains as in one process, and a token's exchange is what it should be."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from liger_models import get_hf_state_dict, load_hf_tensors
from liger_models.arch import get_arch
from liger_models.kernels import dispatch
from liger_models.kernels.moe import Routing, expert_parallel
from liger_models.layers import moe
from liger_models.layers.layer import routed_layers
from liger_models.layers.linear import local
from liger_models.parallel import (
    apply_cp,
    apply_ep,
    apply_fsdp,
    apply_tp,
    compile_blocks,
    load_state,
    save_state,
)

from .comparison import (
    assert_close,
    assert_same,
    assert_same_on_device,
    assert_same_run,
    build,
    experts_case,
    mesh_of,
    one_block,
    train,
)
from .models import TINY, batch, gradients, init_device_mesh, make_optimizer, mean, share, whole


def train_experts(case: tuple[str, Any], shape: tuple[int, int], policy: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = build(*case)
    model.set_checkpointing(policy)
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    assert not any(routed_layers(model.layers[index]) for index in model.recomputed)
    for name, parameter in model.named_parameters():
        assert parameter.to_local().numel() <= -(-parameter.shape[0] // mesh.size()) * parameter.shape[1:].numel(), name
    return train(model, dp=(dist.get_rank(), mesh.size()))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("arch", "shape", "policy"),
    [
        ("mixtral", (1, 2), "selective"),
        ("qwen3_moe", (2, 2), "none"),
        ("ernie4_5_moe", (1, 2), "full"),
        ("mixtral", (1, 4), "full"),
        ("gpt_oss", (1, 2), "none"),
        ("gemma4_text", (1, 2), "full"),
        ("qwen3_next", (1, 2), "full"),
        ("nemotron_h", (1, 2), "full"),
        ("kimi_linear", (1, 2), "selective"),
        ("llama4_text", (1, 2), "selective"),
    ],
)
def test_experts_on_ranks(two, four, arch, shape, policy):
    case = experts_case(arch, balanced=True)
    expected = train(build(*case))
    for got in (two if shape == (1, 2) else four)(train_experts, case, shape, policy):
        assert_same_run(got, expected)


def train_compiled(case: tuple[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = apply_fsdp(apply_ep(build(*case), mesh["ep"]), mesh, param_dtype=None)
    return train(compile_blocks(model, backend="aot_eager"), dp=(dist.get_rank(), 2))


@pytest.mark.compile
@pytest.mark.matrix
def test_compiled_blocks(two):
    case = experts_case("qwen3_moe", balanced=True)
    expected = train(build(*case))
    for got in two(train_compiled, case):
        assert_same_run(got, expected)


FEW: dict[str, dict[str, Any]] = {
    "rows": {"num_local_experts": 2},
    "columns": {"num_local_experts": 2, "intermediate_size": 21},  # 42 rows of gate and up
    "none": {
        "num_local_experts": 2, "intermediate_size": 21, "hidden_size": 30, "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "hsdp": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "ep": {"num_local_experts": 2},
    "tp": {"num_local_experts": 1, "num_experts_per_tok": 1},
}  # fmt: skip
"""Mixtures with fewer experts than ranks that share them, by the dimension that these can divide."""


def few_experts(case: str) -> Any:
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "initializer_range": 0.1}
    return build("mixtral", get_arch("mixtral").config_class(**{**TINY, **balance, **FEW[case]}))


def shard_few(model: Any, case: str) -> None:
    if case == "hsdp":
        apply_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")), param_dtype=None)
    elif case == "ep":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        apply_fsdp(apply_ep(model, mesh), mesh, param_dtype=None)
    elif case == "tp":
        apply_fsdp(apply_tp(model, mesh_of(2, 2)), mesh_of(2, 2), param_dtype=None)
    else:
        apply_fsdp(model, param_dtype=None)


def train_few(case: str, plain: Path, target: Path) -> dict[str, Any]:
    """A run; and a checkpoint and a state of it, read again."""
    shard, batches = partial(shard_few, case=case), {"hsdp": 4, "ep": 4, "tp": 2}.get(case, 4)
    place = dist.get_rank() // (4 // batches), batches
    model = few_experts(case)
    shard(model)
    experts = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    parts = 2 if case == "hsdp" or (case == "none" and dist.get_rank() < 2) else 4
    assert all(
        local(each).numel() == (0 if case == "none" and parts == 4 else each.numel() / parts) for each in experts
    )
    result = train(model, dp=place)

    # What is written and read, as parts or as a whole.
    save_state(target / "run", 1, model)
    loaded = get_arch("mixtral").from_pretrained(plain, progress=False, shard=shard)
    assert_close(whole(loaded.named_parameters()), whole(few_experts(case).named_parameters()), rtol=0, atol=0)
    loaded.save_pretrained(target / "saved")
    assert load_state(target / "run", loaded) == 1
    assert_close(whole(loaded.named_parameters()), result["weights"], rtol=0, atol=0)
    exported = get_hf_state_dict(loaded)
    load_hf_tensors(model, {name: torch.zeros_like(tensor) for name, tensor in exported.items()})
    load_hf_tensors(model, exported)
    assert_close(whole(model.named_parameters()), result["weights"], rtol=0, atol=0)
    return result


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", FEW)
def test_fewer_experts_than_ranks(four, tmp_path, case):
    """Each rank has an equal part of all of them, unless PyTorch cannot divide them."""
    model = few_experts(case)
    model.save_pretrained(tmp_path / "plain")
    expected = train(few_experts(case))
    for got in four(train_few, case, tmp_path / "plain", tmp_path):
        assert_same_run(got, expected)
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


def replay(kind: str) -> dict[str, Any]:
    """Gradients of one step through experts that are given, on ranks that share experts, tokens or both."""
    model, inputs = build(*experts_case("mixtral", balanced=True)), batch(0, packed=kind != "ep")
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(*inputs["input_ids"].shape, 3, 4, generator=generator)
    inputs["routed_experts"] = scores.topk(2).indices.short()
    if dist.is_initialized():
        if kind.startswith("tp"):
            apply_tp(model, mesh_of(2), sequence_parallel=kind == "tp, tokens")
        if kind == "cp":
            apply_cp(model, mesh_of(2), averaged=True)
        if kind == "ep":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
            apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
            inputs = share(inputs, dist.get_rank(), 2)
    loss = model(**inputs, num_items_in_batch=33 / (2 if kind == "ep" and dist.is_initialized() else 1)).loss
    loss.backward()
    found = gradients(model)
    return {name: mean(each) for name, each in found.items()} if kind == "cp" else found


@pytest.mark.parametrize("kind", ["tp", "tp, tokens", "cp", "ep"])
def test_replayed_routing(two, kind):
    expected = replay(kind)
    for got in two(replay, kind):
        assert_same(got, expected)


def load_experts(source: Path, target: Path, shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))

    def shard(model: Any) -> None:
        apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None if shape[0] == 1 else torch.bfloat16)
        assert isinstance(model.layers[0].mlp, FSDPModule) == (shape[0] > 1)  # else FSDP2 has nothing to do there

    model = get_arch("qwen3_moe").from_pretrained(source, progress=False, shard=shard)
    optimizer = make_optimizer("liger", model)
    weights = whole(model.named_parameters())
    model.save_pretrained(target / "saved")
    for step in range(2):
        model(**share(batch(step), dist.get_rank(), mesh.size())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            save_state(target / "run", 1, model, optimizer)
    trained = whole(model.named_parameters())
    assert load_state(target / "run", model, optimizer) == 1
    model(**share(batch(1), dist.get_rank(), mesh.size())).loss.backward()
    optimizer.step()
    assert_close(whole(model.named_parameters()), trained, rtol=0, atol=0)
    return weights


@pytest.mark.parametrize("shape", [pytest.param((2, 2), marks=pytest.mark.matrix), (1, 2)])
def test_experts_in_and_out_of_a_checkpoint(two, four, tmp_path, shape):
    model = build(*experts_case("qwen3_moe", balanced=False))
    model.save_pretrained(tmp_path / "plain")
    for got in (two if shape == (1, 2) else four)(load_experts, tmp_path / "plain", tmp_path, shape):
        assert_close(got, whole(model.named_parameters()), rtol=0, atol=0)
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


def to_the_first(logits: torch.Tensor, routing: Routing, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A router that sends all tokens to the experts of one rank."""
    top_k = routing.top_k
    return logits[:, :top_k].float().softmax(-1), torch.arange(top_k).expand(len(logits), top_k)


def run_expert_kernels() -> None:
    compare_experts()
    name = "route" if dispatch.INTERPRET else "route_reference"
    with mock.patch.object(moe, name, to_the_first):
        compare_experts()


def compare_experts() -> None:
    case = experts_case("mixtral", balanced=True)
    inputs = {key: value[:2, :6] for key, value in batch(0).items()}
    plain, model = one_block(*case), one_block(*case)
    plain(**inputs, num_items_in_batch=10).loss.backward()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    row = slice(dist.get_rank(), dist.get_rank() + 1)
    model(**{key: value[row] for key, value in inputs.items()}, num_items_in_batch=5).loss.backward()
    assert_same(gradients(model), gradients(plain))


def rows_that_are_sent() -> list[torch.Size]:
    """By one layer, where all tokens go to experts of rank 0."""
    model = one_block(*experts_case("mixtral", balanced=True))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    with (
        mock.patch.object(moe, "route_reference", to_the_first),
        mock.patch.object(expert_parallel, "all_to_all", wraps=expert_parallel.all_to_all) as sent,
    ):
        model(batch(0)["input_ids"][:1])
    return [call.args[0].shape for call in sent.call_args_list]


def test_a_token_is_sent_to_a_rank_once(two):
    """Both of a token's experts are on rank 0, which gets each of the 12 tokens of both ranks once."""
    first, second = two(rows_that_are_sent)
    counts, rows, routing, back = zip(first, second, strict=True)
    assert counts == ((2, 2), (2, 2))
    assert rows == ((12, TINY["hidden_size"]),) * 2
    assert routing == ((12, 4),) * 2
    assert back == ((24, TINY["hidden_size"]), (0, TINY["hidden_size"]))


def test_kernels_of_experts(two, two_with_kernels):
    two(run_expert_kernels)
    two_with_kernels(run_expert_kernels)


def experts_on_devices(device: str) -> None:
    case = experts_case("qwen3_moe", balanced=True)
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "ep"))
    expected = train(build(*case).to(device))
    model = apply_fsdp(apply_ep(build(*case).to(device), mesh["ep"]), mesh, param_dtype=None)
    got = train(model, dp=(dist.get_rank(), 2))
    assert_same_on_device(got, expected)


@pytest.mark.gpu
def test_experts_on_gpus(two_gpus):
    two_gpus(experts_on_devices, "cuda")


def test_what_the_gpus_are_to_run(two):
    """On the CPU, so that the function itself is right."""
    two(experts_on_devices, "cpu")
