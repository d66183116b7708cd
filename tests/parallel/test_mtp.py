"""A model with its multi-token prediction block trains under DistributedDataParallel as in one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from liger_models import LigerMTP
from liger_models.arch.qwen3_5.text import LigerQwen3_5Text, Qwen3_5TextConfig

from .models import TINY, batch, gradients, mean, share


def make(rank: int) -> LigerMTP:
    """As `from_pretrained` leaves it: rank 0 alone holds the tensors of the block."""
    torch.manual_seed(7)
    config = Qwen3_5TextConfig(
        **TINY, head_dim=32, mrope_section=[2, 1, 1], layer_types=["linear_attention"] * 2 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        initializer_range=0.1,
    )  # fmt: skip
    model = LigerQwen3_5Text.from_config(config)
    block = LigerMTP(model).tensors()
    if rank == 0:
        model.kept_tensors = block
    return LigerMTP(model, loss_weight=0.5)


def train(rank: int, ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    mtp = make(rank)
    module = mtp if ranks == 1 else DistributedDataParallel(mtp)
    rows = share(batch(0, packed=True), rank, ranks)
    loss = module(**rows, num_items_in_batch=30 / ranks).loss
    loss.backward()
    torch.optim.SGD(mtp.parameters(), lr=0.1).step()
    mtp.save_pretrained(folder)
    return {"loss": mean(loss), **gradients(mtp)}


def train_replica(folder: Path) -> dict[str, torch.Tensor]:
    return train(dist.get_rank(), dist.get_world_size(), folder)


def test_training_is_that_of_one_process(two, tmp_path):
    expected = train(0, 1, tmp_path / "one")
    for found in two(train_replica, tmp_path / "two"):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    one, several = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert any(name.startswith("mtp.") for name in one)
    torch.testing.assert_close(several, one, rtol=1e-4, atol=2e-5)
