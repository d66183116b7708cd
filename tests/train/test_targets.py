"""A run says when nothing can be learned from a step."""

import pytest
import torch

from liger_models.train.targets import TargetChecks

from ..data.conftest import tokenizer  # noqa: F401
from ..data.examples import write
from .runs import log, no_group_is_left  # noqa: F401
from .test_objectives import folder, train_on  # noqa: F401

pytestmark = pytest.mark.slow


def test_a_step_without_labels_is_reported_once(folder, capsys):  # noqa: F811
    """The prompts are longer than rows."""
    write(folder / "long.jsonl", [{"prompt": "p" * 150, "completion": "c"}] * 2)
    train_on(folder, "targets", "sft", "long", steps=6, length=32, batch_size=1)
    shown = capsys.readouterr().out
    losses = [line["loss"] for line in log(folder / "targets")]
    assert losses.count(0.0) > 1
    assert f"warning: no token of step {losses.index(0.0) + 1} has a label" in shown
    assert shown.count("warning: no token") == 1
    assert "of the first 10 pieces have no token with a label" in shown


def test_steps_are_counted_from_the_last_check():
    checks, device = TargetChecks(64), torch.device("cpu")
    learned, unlearned = ({"labels": torch.tensor([[-100, label]])} for label in (5, -100))
    for batches in ([learned], [unlearned, learned], [{"input_ids": learned["labels"]}]):
        checks.watch(batches)
    assert checks.check(3, device) is None
    for batches in ([learned], [unlearned, unlearned], [unlearned]):
        checks.watch(batches)
    assert checks.check(6, device).startswith("warning: no token of step 5 has a label")
    checks.watch([unlearned])
    assert checks.check(7, device) is None
