"""A model with Medusa heads under FSDP2 trains as in one process, and its files are the same."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from liger_models import LigerMedusa
from liger_models.parallel import apply_fsdp, load_state, save_state

from .models import batch, gradients, make_optimizer, mean, share, tiny, whole

STEPS = 2
CASES = {
    "frozen": {},
    "trained": {"freeze": False},
    "trained, shared, tied": {"freeze": False, "share_lm_head": True, "tie_word_embeddings": True},
    "frozen, shared, the model sharded before": {"share_lm_head": True, "before": True},
    "trained, the model sharded before": {"freeze": False, "before": True},
}


def make(case, sharded: bool) -> LigerMedusa:
    model = tiny(tie_word_embeddings=case.get("tie_word_embeddings", False))
    if sharded and case.get("before"):
        apply_fsdp(model, param_dtype=None)
    options = {name: case[name] for name in ("freeze", "share_lm_head") if name in case}
    medusa = LigerMedusa(model, 2, **options)
    medusa.model.set_checkpointing("full")
    return apply_fsdp(medusa, param_dtype=None) if sharded else medusa


def train(medusa, rank: int, ranks: int, folder: Path):
    optimizer = make_optimizer("torch", medusa)
    result = {"losses": []}
    for step in range(STEPS):
        batch_of_rank = share(batch(step, packed=True), rank, ranks)
        loss = medusa(**batch_of_rank, num_items_in_batch=30 / ranks).loss
        loss.backward()
        result["losses"].append(mean(loss))
        if step == 0:
            result["gradients"] = gradients(medusa)
        optimizer.step()
        optimizer.zero_grad()
    medusa.save_pretrained(folder)
    return result | {"weights": whole(medusa.named_parameters())}


def train_sharded(case, folder: Path):
    medusa = make(case, sharded=True)
    assert all(isinstance(parameter, DTensor) for parameter in medusa.parameters())
    result = train(medusa, torch.distributed.get_rank(), torch.distributed.get_world_size(), folder / "heads")
    save_state(folder / "run", 1, medusa)
    other = make(case, sharded=True)
    assert load_state(folder / "run", other) == 1
    for (name, one), (_, two) in zip(medusa.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local()), name
    return result


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(two, case, tmp_path):
    expected = train(make(CASES[case], sharded=False), 0, 1, tmp_path / "one")
    found, other = two(train_sharded, CASES[case], tmp_path / "two")
    assert found["losses"] == other["losses"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    alone = LigerMedusa.from_pretrained(tmp_path / "two" / "heads", tiny())
    for name, parameter in alone.heads.named_parameters():
        assert torch.equal(parameter, found["weights"][f"heads.{name}"]), name
