"""The benchmarks shard models of both libraries, whole ones and those that are drawn in shards."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.training import build
from benchmarks.training.models import keep_layers, read_config
from benchmarks.training.modes import Mode
from benchmarks.training.step import make_step

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip


def losses_of(model: str, mode_text: str, whole: float) -> list[float]:
    build.DEVICE, build.WHOLE = "cpu", whole
    config, mode = read_config(model), Mode.parse(mode_text)
    keep_layers(config, 2)
    config |= {key: value for key, value in SIZES.items() if key in config}
    step = make_step(mode, config, lr=1e-3, sharded=True)
    norms = [each for name, each in step.model.named_parameters() if "norm" in name]
    assert all(isinstance(each, DTensor) for each in step.model.parameters())
    assert {each.dtype for each in step.model.parameters()} == {torch.bfloat16 if "bf16" in mode else torch.float32}
    assert {value for each in norms for value in each.full_tensor().tolist()} == {1}
    rank = dist.get_rank() // mode.extras.get("tp", 1)
    ids = torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(rank))
    return [step({"input_ids": ids, "labels": ids}).item() for _ in range(3)]


MODES = ["hf", "ours", "ours+adamw+inbackward+selective", "ours+hsdp2", "ours+tp2"]


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore")  # transformers about itself
@pytest.mark.parametrize("whole", [0, pytest.param(1e9, marks=pytest.mark.matrix)], ids=["in shards", "whole"])
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *(("llama-3-70b-8-layers", mode) for mode in MODES),
        *(("qwen3-30b-a3b", mode) for mode in ("ours+ep4", "ours+adamw+bf16+inbackward+selective+ep2")),
        pytest.param("qwen3-30b-a3b", "hf+bf16", marks=pytest.mark.matrix),
    ],
)
def test_models_are_sharded(four, model, mode, whole):
    for first, *_, last in four(losses_of, model, mode, whole):
        assert 4 < first < 5.5  # log(97) is 4.6
        assert last < first


def test_what_shards_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr(build, "WHOLE", 0)
    with pytest.raises(ValueError, match=r"fp8\+warm: is not for models that are drawn in shards"):
        build.build_sharded(read_config("llama"), Mode.parse("ours+warm+adamw+fp8"))
