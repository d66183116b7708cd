"""A run stops where its numbers stop being finite, and never saves or exports such weights."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import LigerAdamW
from liger_models.layers.linear import local
from liger_models.train.objective_options import make_objective

from ..data.conftest import tokenizer  # noqa: F401
from ..parallel.conftest import two  # noqa: F401
from .runs import log, no_group_is_left  # noqa: F401
from .test_objectives import folder, train_on  # noqa: F401

pytestmark = pytest.mark.slow


class Poison(torch.autograd.Function):
    """The identity, whose gradient is no number."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, dy: Tensor) -> Tensor:
        return dy * math.nan


def poisoned(step: int, *, in_loss: bool, options: Any) -> Any:
    """An objective whose loss, or the gradient of it, is no number in one step."""
    objective, calls = make_objective(options), 0
    loss = objective.loss

    def loss_of_step(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        value, metrics = loss(*arguments)
        if calls == step:
            value = value * math.nan if in_loss else Poison.apply(value)
        return value, metrics

    objective.loss = loss_of_step
    return objective


def run_poisoned(folder: Path, output: str, step: int, *, in_loss: bool = False, **options: Any) -> None:  # noqa: F811
    make = lambda given: poisoned(step, in_loss=in_loss, options=given)
    with mock.patch("liger_models.train.loop.make_objective", make):
        train_on(folder, output, "sft", "text", steps=6, save_every=2, **options)


IN_BACKWARD = {"max_norm": math.inf, "memory": "0.001GB", "checkpointing": None}


@pytest.mark.parametrize("in_loss", [True, False])
def test_the_line_of_the_log_after_a_bad_step_ends_the_run(folder, tmp_path, in_loss):  # noqa: F811
    message = r"train: the norm of the gradients must be finite, got infinity or nan in step 3 on data of .*text\.jsonl"
    with pytest.raises(ValueError, match=f"{message}.*The last finite checkpoint is {tmp_path}/run/step-00000002: run"):
        run_poisoned(folder, str(tmp_path / "run"), 3, in_loss=in_loss, log_every=4)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000002\n"
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("step", "in_loss", "noticed"), [(3, True, "loss"), (3, False, "weights"), (6, False, "weights")]
)
def test_a_plan_that_steps_in_the_backward(folder, tmp_path, step, in_loss, noticed):  # noqa: F811
    """Nobody has seen the gradients: the weights are looked at."""
    with pytest.raises(ValueError, match=f"{noticed} must be finite, got infinity or nan in step {step} on"):
        run_poisoned(folder, str(tmp_path / "run"), step, in_loss=in_loss, **IN_BACKWARD)
    assert '"in_backward": true' in (tmp_path / "run" / "memory.json").read_text()
    assert (tmp_path / "run" / "latest").read_text() == f"step-{(step - 1) // 2 * 2:08}\n"
    assert not (tmp_path / "run" / "model").exists()


def poison_on_one_rank(folder: Path, output: str) -> str:  # noqa: F811
    step = 3 if dist.get_rank() == 1 else 99
    with pytest.raises(ValueError, match="must be finite") as error:
        run_poisoned(folder, output, step, in_loss=True, **IN_BACKWARD | {"memory": "0.0008GB"})
    return str(error.value).partition(" on data")[0]


def test_all_ranks_stop_for_one(folder, two, tmp_path):  # noqa: F811
    one, other = two(poison_on_one_rank, folder, str(tmp_path / "run"))
    assert one == other
    assert "in step 3" in one


def test_weights_that_overflow_after_the_last_gradient(folder, tmp_path):  # noqa: F811
    """Loss and gradients of the last step are finite, and the weights after it are not."""
    step, calls = LigerAdamW.step, 0

    def overflow(optimizer: LigerAdamW, closure: Any = None) -> Any:
        nonlocal calls
        calls += 1
        step(optimizer, closure)
        if calls == 6:
            local(optimizer.param_groups[1]["params"][-1].data)[0] = math.inf

    with (
        mock.patch.object(LigerAdamW, "step", overflow),
        pytest.raises(ValueError, match=r"the trained weights must be finite, .* in step 6 on"),
    ):
        train_on(folder, str(tmp_path / "run"), "sft", "text", save_every=2)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000004\n"
    assert len(log(tmp_path / "run")) == 6
    dist.destroy_process_group()
    train_on(folder, str(tmp_path / "run"), "sft", "text")
    assert (tmp_path / "run" / "latest").read_text() == "step-00000006\n"
