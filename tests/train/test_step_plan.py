"""A run takes the fastest plan that fits, and a smaller one if a step runs out of memory, without changed results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from liger_models.arch.llama import LlamaBlock
from liger_models.train import step_plan
from liger_models.train.loop import train
from liger_models.train.restart import REQUEST
from liger_models.train.train_options import TrainOptions

from .. import processes
from ..processes import run
from .runs import log, no_group_is_left, on_the_cpu  # noqa: F401
from .test_loop import files, folder  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_cpu")]

WEIGHTS = 34_080 * 4
"""Bytes of the weights of the tiny model in fp32."""
Start = Callable[..., Path]


@pytest.fixture
def start(folder, tmp_path) -> Start:  # noqa: F811
    """A function that starts a run of a name, and returns its folder."""

    def start(name: str, **options: Any) -> Path:
        given: dict[str, Any] = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")]}
        given |= {"length": 64, "workers": 0, "batch_size": 2, "log_every": 1, "lr": 1e-2, "steps": 3, "save_every": 2}
        train(TrainOptions(**{**given, "output": str(tmp_path / name), **options}))
        return tmp_path / name

    return start


def plan(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "memory.json").read_text()))


@pytest.fixture
def free(monkeypatch) -> Callable[[int], None]:
    """A function that sets how many bytes are free beside the weights."""

    def set_free(size: int) -> None:
        monkeypatch.setattr(step_plan, "free_memory", lambda device: size)

    return set_free


def test_the_fastest_plan_that_fits_is_taken_and_kept(start, free, capfd):
    plain = start("plain")
    assert not (plain / "memory.json").exists()
    assert "memory      nothing is recomputed or offloaded\n" in capfd.readouterr().out

    free(10**9 - WEIGHTS)
    roomy = start("roomy")
    assert plan(roomy)["policies"] == ["none", "none"]
    assert plan(roomy)["budget"] == 10**9
    shown = capfd.readouterr().out
    assert "of 1 GB that the device has free (estimate)" in shown
    assert "nothing is recomputed or offloaded: it needs nothing else" in shown
    assert "half of it (--memory 0.5GB): 1.00 of the time of a step (expected)" in shown

    free(760_000 - WEIGHTS)
    tight = start("tight", steps=2)
    assert plan(tight)["policies"] == ["selective", "none"]
    shown = capfd.readouterr().out
    assert 'recomputation "selective" in 1 blocks: the fastest plan that fits' in shown
    assert "half of it (--memory 0.00038GB): does not fit" in shown

    # A run that resumes keeps its plan, unless what the plan depends on has changed.
    free(10**9 - WEIGHTS)
    start("tight")
    assert plan(tight)["policies"] == ["selective", "none"]
    assert f"(the plan of the run, {tight / 'memory.json'})" in capfd.readouterr().out
    assert log(tight) == log(roomy) == log(plain)
    assert files(tight) == files(roomy) == files(plain)
    start("tight", steps=4, batch_size=1)
    assert plan(tight)["policies"] == ["none", "none"]
    assert plan(start("chosen", checkpointing="full", memory="1GB"))["policies"] == ["full", "full"]


def test_an_error_names_the_words_that_make_a_step_fit(start, free):
    free(560_000 - WEIGHTS)
    with pytest.raises(
        ValueError, match=r"train: a step must fit into the 0\.00056 GB that the device has free"
    ) as error:
        start("full")
    assert "--dtype bfloat16" in str(error.value)
    assert "--lora-r 16" in str(error.value)
    assert "--length 32" not in str(error.value)  # the weights are too large, whatever the rows


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fail()
        return gradient, None


@pytest.fixture
def fail(monkeypatch) -> Callable[..., list[str]]:
    """A function that makes calls of blocks run out of memory; it returns the policies that those blocks had."""

    def arrange(calls: set[int], *, backward: bool = False) -> list[str]:
        failed, count, forward = [], 0, LlamaBlock.forward

        def run_out(block: Any) -> None:
            nonlocal count
            count += 1
            if count in calls:
                failed.append("full" if block.mlp.recompute else "none")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        def failing(block: Any, x: Any, residual: Any, layout: Any) -> Any:
            if isinstance(residual, FakeTensor):  # the estimate
                return forward(block, x, residual, layout)
            if not backward and torch.is_grad_enabled():
                run_out(block)
            x, residual = forward(block, x, residual, layout)
            if backward and torch.is_grad_enabled():
                residual = FailingBackward.apply(residual, lambda: run_out(block))
            return x, residual

        monkeypatch.setattr(LlamaBlock, "forward", failing)
        return failed

    return arrange


@pytest.mark.cases(2)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "max_norm": float("inf")}, {"lora_r": 4, "lora_dropout": 0.2}, {"dtype": "bfloat16"}],
    ids=["one batch", "two batches", "adapters with dropout", "bfloat16"],
)
def test_a_step_that_runs_out_of_memory_is_repeated(start, fail, capfd, options, backward):
    """In the second batch or step, twice."""
    whole = start("whole", **options)
    fail({4, 6}, backward=backward)
    failed = start("failed", **options)
    shown = capfd.readouterr().out
    assert 'ran out of memory, and is repeated with a smaller plan: recomputation "selective" in 2 blocks.' in shown
    assert 'ran out of memory, and is repeated with a smaller plan: recomputation "full" in 2 blocks.' in shown
    assert log(failed) == log(whole)
    assert plan(failed)["policies"] == ["full", "full"]
    exported = "adapter" if "lora_r" in options else "model"
    for path in (whole / exported).iterdir():
        assert (failed / exported / path.name).read_bytes() == path.read_bytes()


def test_planned_steps_fall_back_to_what_is_free(start, fail, free, capfd):
    whole = start("whole")
    free(10**9 - WEIGHTS)
    fail({4})
    failed = start("failed")
    assert "Step 2 ran out of memory, and is repeated with a smaller plan: " in capfd.readouterr().out
    assert plan(failed)["peak"] < plan(start("roomy"))["peak"]
    assert log(failed) == log(whole)
    assert files(failed) == files(whole)


def test_a_step_that_never_fits(start, fail):
    fail({*range(1, 100)})
    with pytest.raises(torch.OutOfMemoryError, match="but does not with the smallest plan") as error:
        start("failed")
    assert "Use --batch-size 1 or --length 32 or --dtype bfloat16 or --lora-r 16 or --lora-r 16 --lora-4bit" in str(
        error.value
    )
    dist.destroy_process_group()
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        start("chosen", checkpointing="selective")


def test_pairs_fall_back(start, fail, tmp_path):
    pair = {"prompt": "1 times 2 is", "chosen": " 2.", "rejected": " 3."}
    (tmp_path / "pairs.jsonl").write_text(8 * (json.dumps(pair) + "\n"))
    options: dict[str, Any] = {"data": [str(tmp_path / "pairs.jsonl")], "objective": "dpo", "steps": 2}
    whole = start("whole", **options)
    failed_with = fail({2})
    failed = start("failed", **options)
    assert failed_with == ["none"]
    assert log(failed) == log(whole)
    assert plan(failed)["policies"] == ["selective", "selective"]


OUT_OF_MEMORY = """
import os
import sys

import torch

import liger_models.arch.llama as llama
from liger_models.train import restart
from liger_models.train.loop import main

restart.POLL = 0.1
forward, calls = llama.LlamaBlock.forward, 0

def failing(*arguments):
    global calls
    calls += torch.is_grad_enabled()
    is_first = "LIGER_MODELS_ATTEMPT" not in os.environ and "--checkpointing" not in sys.argv
    if calls == 14 and os.environ["RANK"] == "1" and is_first:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
    return forward(*arguments)

llama.LlamaBlock.forward = failing
main()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_two_ranks_start_again_with_a_smaller_plan(torchrun, folder, tmp_path):  # noqa: F811
    """One of them runs out of memory in step 4, after a checkpoint of step 2, while the other one waits for it.

    The store of the process group belongs to torchrun or, without torchrun, to rank 0.
    """
    (folder / "out_of_memory.py").write_text(OUT_OF_MEMORY)
    place: dict[str, Any] = {"cwd": folder, "XDG_CACHE_HOME": str(folder / "cache")}
    words = ["out_of_memory.py", "config.yaml", "--steps", "4", "--output"]
    run(*words, str(tmp_path / "whole"), "--checkpointing", "none", **place, ranks=2)
    words += [str(tmp_path / "failed")]
    done = processes.torchrun(2, *words, **place) if torchrun else run(*words, **place, ranks=2)
    assert "ran out of memory on rank 1" in done.stderr
    assert log(tmp_path / "failed") == log(tmp_path / "whole")
    assert files(tmp_path / "failed") == files(tmp_path / "whole")
    assert plan(tmp_path / "failed")["policies"] == ["selective", "selective"]
    assert not (tmp_path / "failed" / REQUEST).exists()
