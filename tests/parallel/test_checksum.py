"""The checksum of weights is the same on any number of ranks, and that of no other weights."""

import pytest
import torch
import torch.distributed as dist

from liger_models.adapters import quantize_base
from liger_models.adapters.lora import apply_lora
from liger_models.adapters.lora_config import LoRAConfig
from liger_models.parallel import apply_fsdp, apply_tp
from liger_models.parallel.checksum import frozen_checksum, weight_checksum

from .comparison import mesh_of
from .models import tiny

SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 101}


def checksum(kind: str | None, how: str | None = None) -> str:
    """Of the weights under adapters, quantized and sharded as they are in a run."""
    model = apply_lora(tiny(**SIZES), LoRAConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj"]))
    if kind is not None:
        quantize_base(model, dtype=kind)
    if how == "tp":
        model = apply_tp(model, mesh_of(2))
    if how == "fsdp":
        model = apply_fsdp(model, param_dtype=torch.float32)
    return frozen_checksum(model)


@pytest.mark.parametrize(
    ("kind", "how"),
    [(None, "fsdp"), (None, "tp"), ("nf4", "fsdp"), ("float8", "fsdp"), ("nf4", "tp"), ("float8", "tp")],
)
def test_on_any_number_of_ranks(two, kind, how):
    if kind is not None:
        pytest.importorskip("torchao")
    assert two(checksum, kind, how) == [checksum(kind)] * 2


def test_every_weight_counts():
    model = tiny()
    before = weight_checksum(model.named_parameters())
    for name, weight in model.named_parameters():
        with torch.no_grad():
            old = weight.view(-1)[-1].clone()
            weight.view(-1)[-1] += 1
        assert weight_checksum(model.named_parameters()) != before, name
        with torch.no_grad():
            weight.view(-1)[-1] = old
    assert weight_checksum(model.named_parameters()) == before


def unchanged_weights_are_read_once() -> int:
    model = apply_fsdp(tiny()) if dist.is_initialized() else tiny()
    reads = 0
    from liger_models.parallel import checksum as module

    summed = module.sum_bits

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return summed(tensor)

    module.sum_bits = count
    try:
        first = weight_checksum(model.named_parameters())
        assert weight_checksum(model.named_parameters()) == first
    finally:
        module.sum_bits = summed
    return reads - len([*model.parameters()])


def test_unchanged_weights_are_read_once(two):
    assert unchanged_weights_are_read_once() == 0
    assert two(unchanged_weights_are_read_once) == [0, 0]
