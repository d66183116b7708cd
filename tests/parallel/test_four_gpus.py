"""Every way to use four ranks, on GPUs over NCCL: training is that of one process on the same device, in fp32."""

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from liger_models.parallel import apply_cp, apply_ep, apply_fsdp, apply_tp

from .comparison import assert_same_on_device, build, experts_case, run_config, train
from .models import init_device_mesh

WAYS = {
    "fsdp": (("dp",), (4,)),
    "copies of shards": (("copies", "dp"), (2, 2)),
    "tensor": (("dp", "tp"), (2, 2)),
    "tensor over four": (("dp", "tp"), (1, 4)),
    "copies of tensor": (("copies", "dp", "tp"), (2, 1, 2)),
    "context": (("dp", "cp"), (2, 2)),
    "context over four": (("dp", "cp"), (1, 4)),
    "experts": (("dp", "ep"), (2, 2)),
    "experts over four": (("dp", "ep"), (1, 4)),
}


def trains_as_one(way: str, device: str) -> None:
    names, shape = WAYS[way]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    if names[-1] == "ep":
        arch, config = experts_case("qwen3_moe", balanced=True)
    else:
        arch, config = run_config("qwen3")
        config = dataclasses.replace(config, hidden_size=64, head_dim=16, num_key_value_heads=4)
    expected = train(build(arch, config).to(device))
    model: Any = build(arch, config).to(device)
    if names[-1] == "tp":
        apply_tp(model, mesh, sequence_parallel=True)
    elif names[-1] == "cp":
        apply_cp(model, mesh)
    elif names[-1] == "ep":
        apply_ep(model, mesh)
    apply_fsdp(model, mesh, param_dtype=None)
    share = shape[-1] if names[-1] in ("tp", "cp") else 1  # ranks with the same batch
    got = train(model, dp=(dist.get_rank() // share, 4 // share))
    assert_same_on_device(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_gpus(four_gpus, way):
    four_gpus(trains_as_one, way, "cuda")


FIRST, *OTHERS = WAYS


@pytest.mark.parametrize("way", [FIRST, *(pytest.param(way, marks=pytest.mark.matrix) for way in OTHERS)])
def test_what_the_gpus_are_to_run(four, way):
    """On the CPU, so that the function itself is right."""
    four(trains_as_one, way, "cpu")
