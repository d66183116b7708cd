"""The training command in float16: the losses of float32, a loss scale that finds its size, and runs that go on."""

import itertools
import math
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from liger_models import LigerAdamW, LigerLlama, LlamaConfig
from liger_models.parallel import apply_fsdp, apply_tp, load_state
from liger_models.train.loop import TrainOptions, computing_dtype
from liger_models.train.objective_options import make_objective
from liger_models.train.objectives import Objective

from ..data.conftest import tokenizer  # noqa: F401
from ..parallel.conftest import two  # noqa: F401
from .runs import log, no_group_is_left  # noqa: F401
from .test_objectives import folder, result, train_on  # noqa: F401

pytestmark = pytest.mark.slow

SIZES = {"intermediate_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 2}

PREFERENCES = [("dpo", "pairs"), ("orpo", "pairs"), ("cpo", "pairs"), ("simpo", "pairs"), ("kto", "marked")]


class Multiplied(Objective):
    """An objective whose loss is multiplied, as a mean over more tokens would divide it."""

    def __init__(self, objective, factor):
        self.__dict__ = vars(objective)
        self.__class__ = type("Multiplied", (type(objective),), {"loss": Multiplied.loss})
        self.factor = factor

    def loss(self, model, batch, num_items):
        loss, metrics = super(type(self), self).loss(model, batch, num_items)
        return loss * self.factor, metrics


def run_in(folder, name, objective, data, computed="float16", *, factor=1.0, scaler=None, **options):  # noqa: F811
    """A run that computes in float16 or, as no option of the command does, in float32."""
    place = "liger_models.train.loop"
    multiplied = lambda options: Multiplied(make_objective(options), factor)
    with (
        mock.patch(f"{place}.make_objective", multiplied),
        mock.patch("torch.amp.GradScaler", partial(torch.amp.GradScaler, **(scaler or {}))),
        mock.patch(f"{place}.computing_dtype", return_value=getattr(torch, computed)),
    ):
        train_on(folder, name, objective, data, dtype="float16", **options)
    return log(folder / name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"lora_r": 4, "lr": 3e-2}, {"accumulate": 2, "batch_size": 2}])
def test_losses_are_those_of_float32(folder, tmp_path, options):  # noqa: F811
    half, single = (
        run_in(folder, str(tmp_path / name), "sft", "text", name, **options) for name in ("float16", "float32")
    )
    for got, want in zip(half, single, strict=True):
        assert got["loss_scale"] == 2**16
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
    assert half[0]["norm"] == pytest.approx(single[0]["norm"], rel=2e-3)
    assert half[-1]["loss"] < half[0]["loss"] - 0.05
    kind = "adapter" if options.get("lora_r") else "model"
    assert (tmp_path / "float16" / kind).is_dir()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("objective", "data", "options"),
    [("sft", "text", {}), *((*each, {}) for each in PREFERENCES), ("distill", "text", {"teacher": "teacher"})],
)
def test_no_gradient_is_lost_before_the_scale(folder, tmp_path, objective, data, options):  # noqa: F811
    """Losses of 2**-16 times the size, as of means over millions of tokens: their gradients are below float16's."""
    run = partial(run_in, folder, objective=objective, data=data, factor=2.0**-16, steps=1, **options)
    norms = {name: run(str(tmp_path / name), computed=name)[0]["norm"] for name in ("float16", "float32")}
    assert norms["float16"] == pytest.approx(norms["float32"], rel=5e-3)
    lost = run(str(tmp_path / "unscaled"), scaler={"init_scale": 1.0})[0]["norm"]
    assert abs(lost - norms["float32"]) > 0.05 * norms["float32"]


def test_an_overflow_leaves_a_step_out(folder, tmp_path):  # noqa: F811
    given = {"steps": 6, "save_every": 1, "keep": 6, "warmup": 0.0, "lr": 1e-3}
    lines = run_in(folder, str(tmp_path / "run"), "sft", "text", scaler={"init_scale": 2.0**21}, **given)
    norms = [math.isfinite(line["norm"]) for line in lines]
    first = norms.index(True)
    assert first > 0
    assert all(norms[first:])
    scales = [line["loss_scale"] for line in lines]
    assert scales == [2.0 ** (20 - min(step, first - 1)) for step in range(6)]
    model, before = (LigerLlama.from_pretrained(folder / "checkpoint", progress=False) for _ in range(2))
    for step in range(6):
        load_state(tmp_path / "run", model, step=step + 1)
        same = all(one.equal(other) for one, other in zip(model.parameters(), before.parameters(), strict=True))
        assert same == (step < first), step


def test_a_loss_that_is_no_number_ends_the_run(folder, tmp_path):  # noqa: F811
    """A scale below 1 would not cure it."""
    given = {"factor": math.nan, "steps": 9, "save_every": 3, "scaler": {"init_scale": 16.0}}
    with pytest.raises(ValueError, match="norm of the gradients must be finite, got infinity or nan in step 5 on"):
        run_in(folder, str(tmp_path / "run"), "sft", "text", **given)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000003\n"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [{"lora_r": 4, "lora_dropout": 0.1}, {"accumulate": 2}, {"tensor_parallel": 2, "batch_size": 8}]
)
def test_two_ranks_go_on_with_their_scale(folder, two, options):  # noqa: F811
    """With the bits of a run that nothing stopped, though the scale had an overflow and grows every two steps."""
    scaler = {"init_scale": 2.0**22, "growth_interval": 2}
    run = partial(run_in, folder, objective="sft", data="text", scaler=scaler, save_every=3, keep=3, steps=9, **options)
    name, again = f"fp16-{next(iter(options))}", f"fp16-{next(iter(options))}-again"
    two(run, name)
    lines = log(folder / name)
    scales = [line["loss_scale"] for line in lines]
    assert scales[0] < 2**22
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))
    left_out = shutil.ignore_patterns("adapter", "model", "step-00000006", "step-00000009")
    shutil.copytree(folder / name, folder / again, ignore=left_out)
    (folder / again / "latest").write_text("step-00000003\n")
    two(run, again)
    assert log(folder / again) == lines
    assert result(folder / again) == result(folder / name)


def overflow_on_one_rank(options):
    """Sharded parameters with which an infinity in the second rank's gradient did not leave the step out on a rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (1, 2) if options else (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LigerLlama.from_config(LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, **SIZES))
    apply_fsdp(apply_tp(model, mesh["tp"], **options) if options else model, mesh["dp"], param_dtype=torch.float16)
    ids = torch.arange(16)[None]
    optimizer, scaler = LigerAdamW(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    moved = []
    for name, parameter in model.named_parameters():
        if not any(
            place.is_shard() and size == 2 for place, size in zip(parameter.placements, mesh.shape, strict=False)
        ):
            continue
        before = [each.to_local().clone() for each in model.parameters()]
        scale = scaler.get_scale()
        scaler.scale(model(ids, labels=ids).loss).backward()
        if rank == 1:
            parameter.grad.to_local().view(-1)[-1] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() != scale / 2:
            moved.append(name)
        moved += [name for each, old in zip(model.parameters(), before, strict=True) if not each.to_local().equal(old)]
    scaler.update(4.0)
    scaler.scale(model(ids, labels=ids).loss).backward()
    scaler.step(optimizer)
    changed = all(not each.to_local().equal(old) for each, old in zip(model.parameters(), before, strict=True))
    return moved, changed


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["fsdp", "tp"])
def test_an_overflow_on_one_rank_is_one_on_all(two, options):  # noqa: F811
    assert two(overflow_on_one_rank, options) == [([], True)] * 2


def test_which_dtype_is_computed_in(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    made = lambda dtype: TrainOptions(model="m", data="d", output="o", dtype=dtype)
    for has, name, want in (
        (True, "float32", torch.bfloat16), (True, "bf16", torch.bfloat16), (True, "fp16", torch.float16),
        (False, "float32", torch.float16), (False, "float16", torch.float16),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert computing_dtype(made(name), gpu) == want
        assert computing_dtype(made(name), cpu) == (
            torch.float16 if name == "fp16" or name == "float16" else torch.bfloat16
        )
    with pytest.raises(ValueError, match="dtype must be float16 or float32 on a GPU without bfloat16, got bfloat16"):
        computing_dtype(made("bfloat16"), gpu)


@pytest.mark.filterwarnings("ignore:NF4Tensor does not implement:UserWarning")
def test_adapters_beside_4_bits(folder, tmp_path):  # noqa: F811
    """Frozen weights and the computation are in float16, without FSDP; adapters are in float32."""
    pytest.importorskip("torchao")
    given = {"lora_r": 4, "lora_4bit": True}
    half, single = (str(tmp_path / name) for name in ("float16", "float32"))
    train_on(folder, half, "sft", "text", dtype="float16", **given)
    train_on(folder, single, "sft", "text", dtype="float32", **given)
    losses = [[line["loss"] for line in log(Path(run))] for run in (half, single)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert log(Path(half))[-1]["loss_scale"] == 2**16


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "data", "options"), [("sft", "text", {}), ("dpo", "pairs", {"lora_r": 4})])
def test_float16_on_a_gpu(folder, tmp_path, objective, data, options):  # noqa: F811
    """Losses as in bfloat16, up to its rounding."""
    for dtype in ("float16", "float32"):
        train_on(folder, str(tmp_path / dtype), objective, data, dtype=dtype, gpu=True, **options)
    half, wide = (log(tmp_path / dtype) for dtype in ("float16", "float32"))
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in wide], rel=2e-2)
    assert half[-1]["loss_scale"] == 2**16
