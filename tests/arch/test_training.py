"""Short training runs of every architecture beside transformers, in fp32: the same losses and the same weights."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from .families import LIMIT, error, one_case_of_each_kind, taken_apart, tokens

STEPS = 24
LENGTHS = (13, 6, 9)
"""Lengths of the documents of a step."""


def documents(arch: str, variant: str, pad: int, step: int) -> list[torch.Tensor]:
    """Four batches take turns. The padding token also occurs within the documents, as where it ends turns (Phi-3)."""
    ids = tokens(arch, variant, 1, sum(LENGTHS), seed=step % 4)[0]
    ids[4::5] = pad
    return list(ids.split(LENGTHS))


def padded(rows: list[torch.Tensor], pad: int) -> dict[str, torch.Tensor]:
    """A row for each document."""
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def packed(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """All documents in one row."""
    ids = torch.cat(rows)[None]
    return {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}


class Training:
    """AdamW with warm-up. Its eps is far above the gradients' rounding errors: with the usual 1e-8, an element whose
    gradient is zero but for rounding would take whole steps in random directions."""

    def __init__(self, model) -> None:
        self.model, self.losses = model, []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min((step + 1) / 10, 1))

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.cases(4)
@pytest.mark.slow
@one_case_of_each_kind
def test_training_as_transformers(pair, tmp_path):
    """transformers trains on padded rows, we on padded rows and packed documents by turns."""
    arch, variant, theirs, ours = pair
    pad = ours.config.pad_token_id
    theirs.save_pretrained(tmp_path / "before")
    before = load_file(tmp_path / "before" / "model.safetensors")
    expected, got = Training(theirs), Training(ours)
    for step in range(STEPS):
        rows = documents(arch, variant, pad, step)
        expected.step(padded(rows, pad))
        got.step(packed(rows) if step % 2 else padded(rows, pad))
    theirs.save_pretrained(tmp_path / "after")
    after = load_file(tmp_path / "after" / "model.safetensors")
    weights = taken_apart(ours, after, lambda parameter: parameter.detach())
    assert expected.losses[20] < 0.95 * expected.losses[0]  # the same batch
    torch.testing.assert_close(got.losses, expected.losses, rtol=0, atol=1e-4)
    for name, weight in after.items():
        # The gradient of each step may be off by LIMIT, a hundred roundings in fp32, and the steps add up.
        assert error(weights[name] - before[name], weight - before[name]) <= STEPS * LIMIT, name
