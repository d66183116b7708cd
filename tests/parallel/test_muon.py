"""Muon on sharded matrices: each is computed once, on one of the ranks, with the result of one process."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_models import LigerMuon
from liger_models.arch.mixtral import LigerMixtral, MixtralConfig
from liger_models.convert.sharded import Part
from liger_models.parallel import apply_ep, apply_fsdp, apply_tp, load_state, save_state
from liger_models.parallel import matrices as matrices_module
from liger_models.train import muon as muon_module

from .models import TINY, init_device_mesh, tiny, whole

STEPS = 3
UNEVEN = {"hidden_size": 35, "head_dim": 6, "intermediate_size": 38}
"""The rows of two projections are no multiple of two."""
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"shape": (4,)},
    "fsdp, uneven": {"shape": (4,), "config": {**UNEVEN, "intermediate_size": 37}},
    "hsdp": {"shape": (2, 2), "names": ("copies", "dp"), "config": UNEVEN},
    "tp": {"shape": (1, 4), "names": ("dp", "tp"), "config": {"num_key_value_heads": 4}},
    "tp and fsdp": {"shape": (2, 2), "names": ("dp", "tp"), "config": {"intermediate_size": 38}},
    "experts": {"shape": (4,), "experts": 4},
    "experts, parts of rows": {"shape": (4,), "experts": 5},
    "experts, parts of columns": {"shape": (4,), "experts": 2, "config": {"intermediate_size": 21}},
    "experts, none on a rank": {
        "shape": (4,),
        "experts": 5,
        "config": {"hidden_size": 30, "head_dim": 6, "intermediate_size": 21},
    },
    "experts, hsdp": {"shape": (2, 2), "names": ("copies", "dp"), "experts": 4},
    "experts, tp and fsdp": {"shape": (2, 2), "names": ("dp", "tp"), "experts": 4},
    "ep": {"shape": (1, 4), "names": ("dp", "ep"), "experts": 4},
    "ep and fsdp": {"shape": (2, 2), "names": ("dp", "ep"), "experts": 4},
    "on the CPU": {"shape": (4,), "cpu_offload": True},
}


def build(case: dict[str, Any], *, sharded: bool) -> Any:
    if "experts" in case:
        torch.manual_seed(7)
        model: Any = LigerMixtral.from_config(
            MixtralConfig(**{**TINY, **case.get("config", {})}, num_local_experts=case["experts"])
        )
    else:
        model = tiny(**case.get("config", {}))
    device = case.get("device", "cpu")
    model.to(device)
    if sharded:
        mesh = init_device_mesh(device, case["shape"], mesh_dim_names=case.get("names"))
        if "tp" in case.get("names", ()):
            apply_tp(model, mesh)
        if "ep" in case.get("names", ()):
            apply_ep(model, mesh)
        if case["shape"] != (1, 4) or "ep" in case["names"]:
            apply_fsdp(model, mesh, param_dtype=None, cpu_offload=case.get("cpu_offload", False))
    return model


def give_gradients(model: Any, step: int) -> None:
    """The same to one process and, in shards, to several."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            for dim, (start, size) in enumerate(zip(*Part.of(parameter), strict=True)):
                gradient = gradient.narrow(dim, start, size)
            shape = {"shape": parameter.shape, "stride": parameter.stride()}
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = DTensor.from_local(gradient.contiguous(), mesh, placements, run_check=False, **shape)
        parameter.grad = gradient


def train(model: Any, optimizer: LigerMuon, steps: range) -> dict[str, Tensor]:
    """Weights and momentum."""
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
    held = {name: parameter for name, parameter in model.named_parameters() if parameter in optimizer._rows}
    momentum = {f"{name} momentum": optimizer.state[each]["momentum_buffer"] for name, each in held.items()}
    return whole((dict(model.named_parameters()) | momentum).items())


def run(case: dict[str, Any], *, sharded: bool) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Weights and momentum, and the stacks that this rank has orthogonalized in the last step."""
    stacks: list[tuple[int, ...]] = []

    def count(x: Tensor) -> Tensor:
        stacks.append(tuple(x.shape))
        return orthogonal(x)

    orthogonal = muon_module.newton_schulz
    model = build(case, sharded=sharded)
    optimizer = LigerMuon(model, lr=0.02)
    with mock.patch.object(muon_module, "newton_schulz", count):
        for step in range(STEPS):
            stacks.clear()
            result = train(model, optimizer, range(step, step + 1))
    return result, stacks


def run_in_small_buckets(case: dict[str, Any]) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    with mock.patch.object(matrices_module, "BUCKET", 1500):
        return run(case, sharded=True)


def cost(stacks: list[tuple[int, ...]]) -> int:
    return sum(k * small**2 * (2 * large + small) for k, small, large in stacks)


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_one_process(four, case):
    """To rounding; each matrix on one rank, and no rank with much more than its share."""
    expected, every = run(case, sharded=False)
    results = four(run_in_small_buckets, case)
    for got, _ in results:
        assert_close(got, expected)
    stacks = [stacks for _, stacks in results]
    assert sum(k for each in stacks for k, *_ in each) == sum(k for k, *_ in every)
    assert sum(map(cost, stacks)) == cost(every)
    assert max(map(cost, stacks)) < (1.3 if case.get("experts") != 5 else 1.5) * cost(every) / 4


def compare(device: str) -> float:
    """The largest relative difference of what two ranks and one get."""
    case = {"shape": (2,), "device": device, "config": UNEVEN}
    got, expected = (run(case, sharded=sharded)[0] for sharded in (True, False))
    return max(((got[name] - each).norm() / each.norm()).item() for name, each in expected.items())


@pytest.mark.gpu
def test_two_gpus(two_gpus):
    assert max(two_gpus(compare, "cuda")) < 1e-2  # products in bf16


def test_what_the_gpus_are_to_run(two):
    assert max(two(compare, "cpu")) < 1e-5


def go_on(case: dict[str, Any], folder: Path, *, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Steps after a checkpoint, and again from it."""
    made = []
    for again in (False, True):
        model = build(case, sharded=sharded)
        optimizer = LigerMuon(model, lr=0.02, state_dtype=torch.bfloat16)
        if again:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert load_state(folder, model, optimizer) == 2
        else:
            train(model, optimizer, range(2))
            save_state(folder, 2, model, optimizer)
        made.append(train(model, optimizer, range(2, STEPS)))
    return made[0], made[1]


def load_and_go_on(case: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    model = build(case, sharded=dist.is_initialized())
    optimizer = LigerMuon(model, lr=0.02, state_dtype=torch.bfloat16)
    assert load_state(folder, model, optimizer) == 2
    return train(model, optimizer, range(2, STEPS))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["fsdp, uneven", "ep and fsdp"])
def test_resumes_bit_for_bit_and_on_another_number_of_ranks(two, name, tmp_path):
    case = CASES[name] | {"shape": (2,) if name == "fsdp, uneven" else (1, 2)}
    results = two(_go_on_sharded, case, tmp_path)
    for first, again in results:
        torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert_close(load_and_go_on(case, tmp_path), results[0][0])


def _go_on_sharded(case: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return go_on(case, folder, sharded=True)
