"""Changes of a sharded model's weights: those of a single process, on all ranks or on one."""

import pytest
import torch
import torch.distributed as dist

from liger_models import apply_delta, get_hf_state_dict, hf_delta
from liger_models.parallel import apply_fsdp
from liger_models.train.optimizer import LigerAdamW

from ..convert.conftest import assert_same_bits
from .models import batch, share
from .test_hf_tensors import build, ep, fsdp, tp
from .test_lora import adapted


def sharded(name: str):
    if name == "lora":
        return apply_fsdp(adapted(), param_dtype=None)
    return {"fsdp": fsdp, "tp": tp, "ep": ep}[name](build(name))


def followed(name: str) -> None:
    model = sharded(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = LigerAdamW(trained, lr=3e-5)
    bases = {rank: get_hf_state_dict(model, torch.bfloat16, rank=rank) for rank in (None, 1)}
    receiver = get_hf_state_dict(model, torch.bfloat16)
    ranks = 1 if name == "tp" else 2  # that have their own rows
    for step in range(2):
        model(**share(batch(step), dist.get_rank() % ranks, ranks)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        deltas = {rank: hf_delta(model, base, rank=rank) for rank, base in bases.items()}
        apply_delta(receiver, deltas[None])
        assert_same_bits(receiver, get_hf_state_dict(model, torch.bfloat16))
        assert any(part.endswith(":indices") for part in deltas[None].tensors)
        asked = dist.get_rank() == 1
        assert_same_bits(deltas[1].tensors, deltas[None].tensors if asked else {})
        assert deltas[1].metadata == (deltas[None].metadata if asked else {})

    # An error on one rank, before the others wait for its shards.
    if asked:
        del bases[1]["model.norm.weight"]
    with pytest.raises(ValueError, match=r"hf_delta: base must hold the tensors of the .*: model.norm.weight"):
        hf_delta(model, bases[1], rank=1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["lora", "tp", "fsdp", "ep"])
def test_a_receiver_of_a_sharded_model(two, name):
    two(followed, name)
