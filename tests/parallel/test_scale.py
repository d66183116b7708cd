"""What a rank of 1,024 holds and exchanges: FSDP on the meta device, in a process group that sends nothing."""

import json
from pathlib import Path

import pytest

from ..processes import run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCRIPT = """
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from liger_models import AutoLigerModel
from liger_models.layers.linear import local
from liger_models.parallel import apply_ep, apply_fsdp
from torch.distributed.device_mesh import init_device_mesh

config, rank, expert_ranks = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
RANKS = 1024
dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
mesh = init_device_mesh("cpu", (RANKS // expert_ranks, expert_ranks), mesh_dim_names=("dp", "ep"))
model = AutoLigerModel.from_config(config, device="meta")
model = apply_fsdp(apply_ep(model, mesh), mesh) if expert_ranks > 1 else apply_fsdp(model)

experts = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
groups = [module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)]
sharded = [parameter for group in groups if group for parameter in group.fsdp_params]
print(json.dumps({
    "parameters": model.num_parameters(),
    "held": sum(local(parameter).numel() for parameter in model.parameters()),
    "held experts": sum(local(parameter).numel() for name, parameter in model.named_parameters() if name in experts),
    "gathered experts": sum(
        parameter.padded_sharded_param_size.numel() * parameter.mesh_info.shard_mesh_size
        for parameter in sharded
        if parameter.sharded_param.dim() == 3
    ),
    "experts": sum(parameter.numel() for name, parameter in model.named_parameters() if name in experts),
}))
"""

LLAMA = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
QWEN = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # fmt: skip


def of_rank(folder: Path, config: dict[str, object], rank: int, expert_ranks: int = 1) -> dict[str, int]:
    (folder / "scale.py").write_text(SCRIPT)
    done = run("scale.py", json.dumps(config), str(rank), str(expert_ranks), cwd=folder)
    return json.loads(done.stdout)


def test_a_dense_model_is_distributed_evenly(tmp_path):
    """Each rank holds a 1,024th, and the last one less: the rows of the vocabulary do not divide."""
    first, last = (of_rank(tmp_path, LLAMA, rank) for rank in (0, 1023))
    assert first["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert last["held"] < first["parameters"] / 1024 < first["held"] < 1.01 * first["parameters"] / 1024


@pytest.mark.parametrize("expert_ranks", [1, 64])
def test_ranks_beyond_experts_hold_parts_of_them(tmp_path, expert_ranks):
    """128 experts on 1,024 ranks: each has a 1,024th, and gathers no padding."""
    for rank in (0, 1023):
        found = of_rank(tmp_path, QWEN, rank, expert_ranks)
        assert found["held experts"] == found["experts"] / 1024
        assert found["gathered experts"] == found["experts"] / expert_ranks


def test_experts_that_cannot_be_divided_are_held_whole(tmp_path):
    """As docs/parallel.md says: neither 1,440 nor 2,880 is a multiple of 1,024."""
    first, last = (
        of_rank(tmp_path, {**QWEN, "hidden_size": 2880, "moe_intermediate_size": 720}, rank) for rank in (0, 1023)
    )
    assert first["held experts"] == first["experts"] / 128
    assert last["held experts"] == 0
    assert first["gathered experts"] == 8 * first["experts"]
