"""State-space layers over more ranks than they have groups, and over fewer: as in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from liger_models.arch.mamba2 import Mamba2Config
from liger_models.convert import get_hf_state_dict
from liger_models.parallel import apply_cp, apply_fsdp, apply_tp, compile_blocks
from liger_models.train import LigerAdamW

from .comparison import assert_same, assert_same_once, build, mesh_of, once
from .models import init_device_mesh, mean

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16,
    "layer_norm_epsilon": 0.05, "initializer_range": 0.1, "pad_token_id": None,
}  # fmt: skip
GROUPS = [1, 2, 8]
DECAYS = "A_log", "mixer.D", "dt_bias"


def case(groups: int) -> tuple[str, Any]:
    return "mamba2", Mamba2Config(**SIZES, n_groups=groups, use_bias=groups == 2)


def cut(groups: int, sequence_parallel: bool) -> dict[str, Any]:
    mesh = mesh_of(dist.get_world_size())
    model = apply_tp(build(*case(groups)), mesh, sequence_parallel=sequence_parallel)
    mixer = model.layers[0].mixer
    for parameter in (mixer.in_proj.weight, mixer.conv_weight, mixer.norm.weight, mixer.decay.A_log):
        assert parameter.to_local().numel() * dist.get_world_size() == parameter.numel()
    return once(model)


def spread(groups: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = once(apply_cp(build(*case(groups)), mesh, averaged=True))
    return results | {"gradients": {name: mean(gradient) for name, gradient in results["gradients"].items()}}


@pytest.mark.cases(2)
@pytest.mark.parametrize("groups", GROUPS)
def test_heads_over_ranks(four, groups):
    expected = once(build(*case(groups)))
    for sequence_parallel in (False, True):
        for got in four(cut, groups, sequence_parallel):
            assert_same_once(got, expected)


@pytest.mark.parametrize("groups", GROUPS)
def test_tokens_over_ranks(four, groups):
    expected = once(build(*case(groups)))
    for got in four(spread, groups):
        assert_same_once(got, expected)


def train(model: Any) -> dict[str, torch.Tensor]:
    """Two steps; returns the values of the checkpoint."""
    optimizer = LigerAdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_hf_state_dict(model)


def train_sharded() -> dict[str, torch.Tensor]:
    model = build(*case(2)).bfloat16()
    apply_fsdp(model)
    decay = model.layers[0].mixer.decay.A_log
    assert decay.dtype == torch.float32
    assert decay.to_local().numel() * 2 == decay.numel()
    return train(model)


def test_fsdp_trains_decays_in_fp32(two):
    """Beside weights in bf16; on both ranks with the same batch, whose mean is the batch."""
    expected = train(build(*case(2)).bfloat16())
    before = get_hf_state_dict(build(*case(2)))
    for got in two(train_sharded):
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype == (torch.float32 if name.endswith(DECAYS) else torch.bfloat16)
            moved = tensor.float() - before[name]
            if name.endswith(DECAYS):  # steps of 1e-3, of which bf16 would keep a digit or none
                assert (got[name] - tensor).norm() <= 0.02 * moved.norm()


def train_compiled() -> dict[str, torch.Tensor]:
    return train(compile_blocks(apply_fsdp(build(*case(2)), param_dtype=None), backend="aot_eager"))


@pytest.mark.compile
@pytest.mark.matrix
def test_compiled_blocks_with_decays_that_fsdp_gathers_separately(two):
    expected = train(build(*case(2)))
    for got in two(train_compiled):
        assert_same(got, expected)
