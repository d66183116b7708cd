"""Objectives of the training command: each learns, from the loss that a loop of one's own has, and resumes exactly."""

import json
import math
import os
import shutil
import sys
import types
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from liger_models import (
    AutoLigerModel,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerLlama,
    PackedDataset,
    preference_batch,
)
from liger_models.adapters import apply_lora
from liger_models.arch.mixtral import LigerMixtral, MixtralConfig
from liger_models.data.answers import AnswerDataset
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation import deterministic_forward
from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.layers.lm_head import select_tokens
from liger_models.parallel import apply_fsdp
from liger_models.train import grpo as grpo_module
from liger_models.train.loop import TrainOptions, train
from liger_models.train.objective_options import make_objective
from liger_models.train.objectives import Metrics, add_metrics, with_pixels
from liger_models.train.options import read_options

from ..arch.families import tiny
from ..data.conftest import tokenizer  # noqa: F401
from ..parallel.conftest import two  # noqa: F401
from .runs import log, no_group_is_left, save_llama, sharing  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_tokens_reach_the_head(monkeypatch):
    """The losses by hand take all tokens, and the objectives those of the answers."""
    monkeypatch.setattr("liger_models.layers.lm_head.TOKEN_MULTIPLE", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:  # noqa: F811
    """A checkpoint, a larger one as its teacher, and data of each kind."""
    folder = tmp_path_factory.mktemp("objectives")
    for seed, (name, size) in enumerate({"checkpoint": 32, "teacher": 48}.items()):
        save_llama(folder / name, tokenizer.backend.to_str(), hidden_size=size, seed=seed)
    good, bad = "{}, gladly".format, "Why {}?".format
    rows = {
        "text": [{"text": f"{n} + {n} = {2 * n}"} for n in range(30)],
        "pairs": [{"prompt": f"{n}+{n}=", "chosen": good(2 * n), "rejected": bad(n)} for n in range(30)],
        "prompts": [{"prompt": f"{n}+{n}=", "want": "e", "id": n} for n in range(12)],
        "marked": [
            {"prompt": f"{n}+{n}=", "completion": (good if n % 3 else bad)(n), "label": n % 3 > 0} for n in range(30)
        ],
    }
    for name, examples in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    (folder / "reward.py").write_text(REWARD)
    return folder


REWARD = """
def share(prompts, completions, completion_ids, want, **columns):
    assert list(columns) == ["id"]
    assert [prompt.partition("+")[0] for prompt in prompts] == list(map(str, columns["id"]))
    return [text.count(letter) / len(ids) for text, ids, letter in zip(completions, completion_ids, want, strict=True)]

def short(prompts, completions, **columns):
    return [1.0]
"""


def train_on(folder: Path, output: str, objective: str, data: str | list[str], **options: Any) -> None:
    """As the command, on a rank of a process group or alone."""
    files = [str(folder / f"{data}.jsonl")] if isinstance(data, str) else data
    given = {"model": str(folder / "checkpoint"), "data": files, "length": 128, "workers": 0}
    given |= {"steps": 6, "lr": 3e-3, "save_every": 3, "log_every": 1, "batch_size": 4, "checkpointing": "none"}
    given |= {"objective": objective, "output": str(folder / output), "export_dtype": "float32"}
    if objective == "grpo":
        given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6, "length": 32}
    if options.get("teacher"):
        options["teacher"] = str(folder / options["teacher"])
    place, cpu = {"XDG_CACHE_HOME": str(folder / "cache")}, not options.pop("gpu", False)
    alone = mock.patch("torch.accelerator.current_accelerator", return_value=None) if cpu else nullcontext()
    with mock.patch.dict(os.environ, place), alone:
        train(TrainOptions(**{**given, **options}))


def result(run: Path) -> dict[str, bytes]:
    place = next(path for path in (run / "adapter", run / "model") if path.is_dir())
    return {path.name: path.read_bytes() for path in place.iterdir()}


def by_hand(folder: Path, objective: str, options: dict[str, Any]) -> torch.Tensor:
    """The loss of the first batch, as the examples compute it; in bfloat16, as FSDP does."""
    load = partial(LigerLlama.from_pretrained, dtype=torch.bfloat16, progress=False)
    model, place = load(folder / "checkpoint"), {"cache_dir": folder / "cache", "progress": False}
    source = {"kto": "marked", "distill": "text", "pretrain": "text"}.get(objective, "pairs")
    sized = {"length": 128, "batch_size": 4, "seed": 0, **place}
    if source == "text":
        batch = next(iter(PackedDataset(folder / "text.jsonl", model.tokenizer, **sized)))
        if objective == "pretrain":
            return model(**batch).loss
        hidden, head, _ = load(folder / "teacher")(**batch, loss_function=lambda *given: given).loss
        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.2, weight_soft_loss=0.8, beta=0.3, temperature=1.5)
        return model(**batch, loss_function=lambda x, w, target: loss(x, w, hidden, head, target)).loss
    formats = ("kto",) if objective == "kto" else ("preference",)
    batch = next(iter(AnswerDataset(folder / f"{source}.jsonl", model.tokenizer, formats=formats, **sized)))
    losses = {
        "dpo": LigerFusedLinearDPOLoss(beta=0.3, label_smoothing=0.1),
        "orpo": LigerFusedLinearORPOLoss(beta=0.3),
        "cpo": LigerFusedLinearCPOLoss(beta=0.3, alpha=0.5, label_smoothing=0.1),
        "simpo": LigerFusedLinearSimPOLoss(beta=0.3, gamma=0.7, compute_nll_loss=False),
        "kto": LigerFusedLinearKTOLoss(beta=0.3, desirable_weight=1.5, use_ref_model=True),
    }
    answers = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens")}
    reference = {}
    if objective in ("dpo", "kto"):
        frozen = load(folder / ("teacher" if "ref_model" in options else "checkpoint"))
        reference = {"ref_log_probs": frozen(**answers, return_log_probs=True).log_probs}
    if objective == "kto":
        unrelated = {name: batch[f"kl_{name}"] for name in answers}
        moved = (each(**unrelated, return_log_probs=True).log_probs.sum(-1) for each in (model, frozen))
        reference |= {
            "preference_labels": batch["preference_labels"],
            "kl": (next(moved) - next(moved)).mean().clamp(0),
        }
        return model(**answers, loss_function=lambda x, w, target: losses["kto"](x, w, target, **reference)).loss[0]
    return model(**answers, loss_function=lambda x, w, target: losses[objective](w, x, target, **reference)).loss[0]


@pytest.mark.parametrize(
    ("objective", "data", "options", "metrics"),
    [
        ("pretrain", "text", {}, set()),
        ("dpo", "pairs", {"beta": 0.3, "label_smoothing": 0.1}, {"rewards/margins", "rewards/accuracies"}),
        ("dpo", "pairs", {"beta": 0.3, "label_smoothing": 0.1, "ref_model": "teacher"}, {"logps/chosen"}),
        ("orpo", "pairs", {"beta": 0.3}, {"nll_loss", "log_odds_ratio"}),
        ("cpo", "pairs", {"beta": 0.3, "cpo_alpha": 0.5, "label_smoothing": 0.1}, {"nll_loss"}),
        ("simpo", "pairs", {"beta": 0.3, "simpo_gamma": 0.7}, {"rewards/rejected"}),
        ("kto", "marked", {"beta": 0.3, "desirable_weight": 1.5, "ref_model": "teacher"}, {"rewards/margins", "kl"}),
        (
            "distill",
            "text",
            {"teacher": "teacher", "weight_hard_loss": 0.2, "weight_soft_loss": 0.8, "beta": 0.3, "temperature": 1.5},
            {"soft_loss", "hard_loss"},
        ),
    ],
)
def test_each_objective_learns(folder, tmp_path, objective, data, options, metrics):
    given = dict(options, ref_model=str(folder / "teacher")) if "ref_model" in options else options
    output = str(tmp_path / "run")
    train_on(
        folder,
        output,
        objective,
        data,
        **given,
        eval_data=[str(folder / f"{data}.jsonl")],
        eval_every=5,
        steps=8,
        save_every=99,
    )
    lines = log(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(by_hand(folder, objective, options).item(), rel=1e-4)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert metrics <= lines[-2].keys()
    first, last = (line for line in lines if "eval_loss" in line)
    assert last["eval_loss"] < first["eval_loss"]
    assert {f"eval_{name}" for name in metrics} <= last.keys()
    before, after = (
        LigerLlama.from_pretrained(place, progress=False).state_dict()
        for place in (folder / "checkpoint", tmp_path / "run" / "model")
    )
    assert all(not tensor.equal(before[name]) for name, tensor in after.items())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("objective", "data", "options"),
    [
        *((name, "pairs", {}) for name in ("dpo", "orpo", "cpo", "simpo")),
        ("kto", "marked", {"lora_r": 4}),
        ("distill", "text", {"teacher": "teacher"}),
        ("grpo", "prompts", {"beta": 0.1, "num_iterations": 3}),
    ],
)
def test_each_objective_on_a_gpu(folder, tmp_path, objective, data, options):
    """As on the CPU: the first losses are equal up to the rounding of bfloat16."""
    given = {**options, "steps": 3, "workers": 1, "eval_data": [str(folder / f"{data}.jsonl")], "eval_every": 3}
    for name in ("gpu", "cpu"):
        train_on(folder, str(tmp_path / name), objective, data, **given, gpu=name == "gpu")
    gpu, cpu = (log(tmp_path / name) for name in ("gpu", "cpu"))
    assert [line["step"] for line in gpu] == [1, 2, 3, 3]
    if objective != "grpo":  # whose samples differ
        assert gpu[0]["loss"] == pytest.approx(cpu[0]["loss"], rel=2e-2)


def test_distillation_into_adapters_on_quantized_weights(folder, tmp_path):
    """They compute in float32 on one device, unlike the teacher."""
    losses = []
    for name, options in (("plain", {"dtype": "float32"}), ("quantized", {"lora_float8": True})):
        train_on(folder, str(tmp_path / name), "distill", "text", teacher="teacher", lora_r=4, steps=2, **options)
        losses.append(log(tmp_path / name)[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("objective", "data", "options"),
    [
        ("dpo", "pairs", {"accumulate": 2}),
        ("kto", "marked", {"lora_r": 4, "lora_dropout": 0.1}),
        ("distill", "text", {"teacher": "teacher", "lora_r": 4}),
        ("grpo", "prompts", {"num_iterations": 2, "beta": 0.1, "accumulate": 2, "batch_size": 1}),
    ],
)
def test_two_ranks_go_on(folder, two, objective, data, options):  # noqa: F811
    """With exactly the bits of a run that nothing stopped."""
    run = partial(train_on, objective=objective, data=data, eval_data=[str(folder / f"{data}.jsonl")], **options)
    run = partial(run, eval_every=2, steps=4, save_every=2)
    name, again = f"two-{objective}", f"two-{objective}-again"
    two(run, folder, name)
    shutil.copytree(folder / name, folder / again, ignore=shutil.ignore_patterns("adapter", "model", "step-00000004"))
    before = sorted(path.name for path in (folder / again).glob("step-*"))[-1]
    (folder / again / "latest").write_text(before)
    two(run, folder, again)
    assert log(folder / again) == log(folder / name)
    assert result(folder / again) == result(folder / name)
    if objective not in ("kto", "grpo"):  # whose batches of a rank are compared within
        run(folder, f"{name}-alone", batch_size=8)
        alone, losses = (
            [line["loss"] for line in log(folder / each) if "loss" in line] for each in (f"{name}-alone", name)
        )
        assert alone == pytest.approx(losses, rel=2e-3)


def test_an_evaluation_counts_each_pair_once(folder, tmp_path):
    """Whatever the batch size and the number of ranks, of which one may have none in the last step."""
    model = LigerLlama.from_pretrained(folder / "checkpoint", dtype=torch.float64, progress=False).eval()
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join((folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:7]))
    found = []
    for batch_size, ranks in ((7, 1), (1, 1), (2, 1), (5, 1), (9, 1), (2, 2), (3, 3), (5, 3)):
        options = TrainOptions(model="m", data="d", output="o", objective="simpo", batch_size=batch_size)
        objective, total = make_objective(options), Metrics()
        sizes = {"length": 128, "batch_size": batch_size, "overflow": None, "ranks": ranks, "cache_dir": tmp_path}
        for rank in range(ranks):
            data = objective.eval_dataset([str(pairs)], model, rank=rank, progress=False, **sizes)
            batches = list(data)
            assert len(batches) == len(data)
            for batch in batches:
                with torch.no_grad():
                    add_metrics(total, objective.evaluate(model, batch))
        assert all(int(number) == 7 for _, number in total.values())
        found.append({name: (added / number).item() for name, (added, number) in total.items()})
    assert all(each == pytest.approx(found[0], rel=1e-5) for each in found)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "cpo", "simpo"])
def test_answers_of_a_pair_share_their_prompt(folder, tmp_path, objective, sharing):  # noqa: F811
    """The loss, its gradients and the metrics are those of rows that each have a prompt and one answer."""
    options = TrainOptions(model="m", data="d", output="o", objective=objective, batch_size=4, lora_r=4)
    made = make_objective(options)
    model = LigerLlama.from_pretrained(folder / "checkpoint", dtype=torch.float64, progress=False)
    made.prepare(model, partial(LigerLlama.from_pretrained, progress=False))
    apply_lora(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(parameter, std=0.1)
    given = {"length": 128, "batch_size": 4, "overflow": None, "cache_dir": tmp_path, "progress": False}
    # In an evaluation by two ranks, the last batch of a rank may have examples without labels.
    files = [str(folder / "pairs.jsonl")]
    evaluated = made.eval_dataset(files, model, rank=1, ranks=2, **given)
    batches = [next(iter(made.dataset(files, model, **given))), [*evaluated][-1]]
    for batch in batches:
        found = []
        shared = made.batch(model, batch)
        assert shared["input_ids"].shape[0] == 1
        assert shared["input_ids"].numel() < batch["input_ids"].numel()
        assert (shared["labels"] != -100).sum() == (batch["labels"] != -100).sum()
        for each in (batch, shared):
            model.zero_grad()
            loss, metrics = made.loss(model, each, None)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((loss, metrics, made.evaluate(model, each), gradients))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)
    # An image must not be divided between a prompt and its answers.
    shared, pixels = made.batch(model, batches[0]), {"pixel_values": torch.zeros(1)}
    divided = SimpleNamespace(image_token_id=int(shared["input_ids"][0, shared["cu_seqlens"][1]]))
    assert with_pixels(SimpleNamespace(config=divided), shared, pixels) is None
    assert with_pixels(SimpleNamespace(config=SimpleNamespace(image_token_id=999)), shared, pixels) == shared | pixels
    model.bidirectional = True  # such a model does not take parents
    assert made.batch(model, batches[0]) is batches[0]


def test_prompts_are_not_shared_on_a_cpu(folder, tmp_path):
    made = make_objective(TrainOptions(model="m", data="d", output="o", objective="orpo", batch_size=4))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    given = {"length": 128, "batch_size": 4, "overflow": None, "cache_dir": tmp_path, "progress": False}
    batch = next(iter(made.dataset([str(folder / "pairs.jsonl")], model, **given)))
    assert made.batch(model, batch) is batch


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "distill"])
def test_the_loss_gets_the_tokens_of_answers_only(folder, tmp_path, objective):
    options = {"teacher": str(folder / "teacher")} if objective == "distill" else {"lora_r": 4}
    options |= {"model": "m", "data": "d", "output": "o", "objective": objective, "batch_size": 4}
    made = make_objective(TrainOptions(**options))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    made.prepare(model, partial(LigerLlama.from_pretrained, progress=False))
    if objective != "distill":
        apply_lora(model)
    path = folder / ("marked.jsonl" if objective == "kto" else "pairs.jsonl")
    if objective == "distill":
        path = tmp_path / "answers.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{n} + {n} = ", "completion": "e"}) + "\n" for n in range(30)))
    given = {"length": 128, "batch_size": 4, "overflow": None, "shuffle": False, "cache_dir": tmp_path}
    batch = next(iter(made.dataset([str(path)], model, progress=False, **given)))
    shapes = []
    made.function.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[-1].shape))  # the targets
    made.loss(model, batch, (batch["labels"] != -100).sum())
    (B, T), most = batch["labels"].shape, (batch["labels"] != -100).sum(1).amax().item()
    assert shapes == [(B, (most + 3) // 4 * 4)]
    assert shapes[0][1] < T


def train_without_room(folder: Path, output: str) -> None:
    with mock.patch.object(grpo_module, "free_memory", return_value=0):
        train_on(folder, output, "grpo", "prompts", steps=2, batch_size=1)


def test_ranks_without_room_for_gathered_weights_sample_the_same(folder, two):  # noqa: F811
    """They gather the weights in each forward."""
    two(train_without_room, folder, "no-room")
    two(partial(train_on, steps=2, batch_size=1), folder, "room", "grpo", "prompts")
    assert log(folder / "no-room") == log(folder / "room")
    assert result(folder / "no-room") == result(folder / "room")


def test_the_reference_of_adapters_is_the_base(folder):
    train_on(folder, "adapters", "dpo", "pairs", lora_r=4, lr=3e-2)
    lines = log(folder / "adapters")
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[0]["rewards/margins"] == 0
    assert lines[-1]["loss"] < 0.69
    assert lines[-1]["rewards/margins"] > 0


def test_answers_are_those_of_preference_batch(folder, tokenizer):  # noqa: F811
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    place = {"cache_dir": folder / "cache", "progress": False, "formats": ("preference",)}
    data = AnswerDataset(folder / "pairs.jsonl", tokenizer, length=64, batch_size=4, shuffle=False, **place)
    assert len(data) == 8
    batches = [*data]
    for index in (0, 7):
        chosen = [pairs[i if i < 30 else i - 28] for i in range(4 * index, 4 * index + 4)]  # two are seen again
        want = preference_batch(chosen, tokenizer)
        for row, (ids, labels, mask) in enumerate(zip(*want.values(), strict=True)):
            size = int(mask.sum())
            assert batches[index]["input_ids"][row, :size].tolist() == ids[:size].tolist()
            assert batches[index]["labels"][row, :size].tolist() == labels[:size].tolist()
            assert (batches[index]["labels"][row, size:] == -100).all()
            assert batches[index]["cu_seqlens"][2 * row : 2 * row + 3].tolist() == [
                64 * row,
                64 * row + size,
                64 * row + 64,
            ]
    half = AnswerDataset(folder / "pairs.jsonl", tokenizer, length=64, batch_size=2, rank=1, ranks=2, **place)
    whole = AnswerDataset(folder / "pairs.jsonl", tokenizer, length=64, batch_size=4, **place)
    for ours, all_rows in zip(half, whole, strict=True):
        T = ours["input_ids"].shape[1]
        assert all_rows["input_ids"][[2, 3, 6, 7], :T].equal(ours["input_ids"])
    described = data.describe()
    assert described.startswith("30 examples, format preference: pairs.jsonl\nchosen:\n    <s>0+0=«0, gladly</s>»")
    short = AnswerDataset(folder / "pairs.jsonl", tokenizer, length=8, batch_size=4, shuffle=False, **place)
    assert next(iter(short))["input_ids"].shape == (8, 8)
    assert short.describe().endswith("\n60 sequences are longer than 8 tokens and are cut.")
    assert "are cut" not in described


def test_labeled_answers(folder, tokenizer):  # noqa: F811
    place = {"cache_dir": folder / "cache", "progress": False, "formats": ("kto",), "shuffle": False}
    data = AnswerDataset(folder / "marked.jsonl", tokenizer, length=64, batch_size=3, **place)
    batch = next(iter(data))
    assert batch["preference_labels"].tolist() == [False, True, True]
    read = lambda name: [tokenizer.decode(row[row != -100].tolist()) for row in batch[name]]
    assert read("labels") == ["Why 0?", "1, gladly", "2, gladly"]
    assert read("kl_labels") == ["1, gladly", "2, gladly", "Why 0?"]
    starts = [tokenizer.decode(row[:4].tolist()) for row in batch["kl_input_ids"]]
    assert starts == ["0+0", "1+1", "2+2"]
    assert "label: False" in data.describe()


def test_options_that_an_objective_does_not_read(folder):
    def options(**given: Any) -> None:
        TrainOptions(**{"model": "m", "data": "d", "output": "o", **given})

    for given, message in (
        ({"objective": "ppo"}, "objective must be one of sft, pretrain, dpo, .*, got 'ppo'"),
        ({"beta": 0.1}, r"beta is an option of objective dpo, orpo, .*, got 0\.1 with sft\. Leave it out"),
        (
            {"objective": "orpo", "loss_type": "ipo"},
            "loss_type is an option of objective dpo, cpo, grpo, got 'ipo' with orpo",
        ),
        ({"objective": "dpo", "beta": -1.0}, r"beta must not be negative, got -1\.0"),
        ({"objective": "dpo", "loss_type": "ppo"}, "loss_type must be one of .*, got 'ppo'"),
        ({"objective": "dpo", "field": "text"}, "field must be left out with objective dpo, got 'text'"),
        ({"objective": "dpo", "overflow": "split"}, "overflow must be left out with objective dpo, got 'split'"),
        (
            {"objective": "dpo", "tensor_parallel": 2},
            "tensor_parallel and context_parallel must be 1 with objective dpo",
        ),
        ({"objective": "kto", "batch_size": 1}, "batch_size must be at least 2 with objective kto"),
        ({"objective": "distill"}, "objective distill needs a teacher, got none"),
        ({"objective": "distill", "teacher": "t", "divergence": "x"}, "divergence must be one of jsd, .*, got 'x'"),
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            options(**given)
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl, line 1: .* got format preference\. Pairs train with objective dpo"
    ):
        train_on(folder, "nothing", "sft", "pairs")
    dist.destroy_process_group()
    with pytest.raises(
        ValueError, match=r"text\.jsonl, line 1: .* format preference, got format text\. .* objective sft"
    ):
        train_on(folder, "nothing", "dpo", "text")


def test_the_most_samples(folder, capfd):
    train_on(folder, "few", "dpo", "pairs", max_samples=5, steps=None, epochs=2)
    assert "5 examples, format preference" in capfd.readouterr().out
    assert [line["epoch"] for line in log(folder / "few")] == [0, 0, 1, 1]


def test_grpo_learns(folder):
    train_on(folder, "grpo", "grpo", "prompts", lr=3e-2, steps=20, save_every=99, num_generations=8, workers=1)
    lines = log(folder / "grpo")
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert lines[0].keys() >= {"reward_std", "completions/mean_length", "clip_ratio"}
    assert all(1 <= line["completions/mean_length"] <= 6 for line in lines)


def answers_in(batch) -> tuple[list[torch.Tensor], list[list[int]]]:
    """The documents of a packed row, and the labels of those that have any."""
    sizes = batch["cu_seqlens"].diff().tolist()
    documents, labels = (batch[name].flatten().split(sizes) for name in ("input_ids", "labels"))
    answers = [part[part != -100].tolist() for part in labels]
    return [*documents], [answer for answer in answers if answer]


@pytest.mark.parametrize(("loss_type", "beta"), [("dapo", 0.0), ("grpo", 0.2)])
def test_a_batch_of_grpo(folder, loss_type, beta, sharing):  # noqa: F811
    """Rows, advantages and loss, as examples/grpo.py computes them."""
    name = f"{folder}/reward.py:share"
    given = {"model": str(folder / "teacher"), "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": name, "num_generations": 4, "max_new_tokens": 6, "loss_type": loss_type, "beta": beta}
    objective = make_objective(TrainOptions(**given, accumulate=2))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    frozen = LigerLlama.from_pretrained(folder / "teacher", progress=False)
    objective.prepare(model, lambda name: frozen)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    rows = next(iter(data))
    batch = objective.batch(model, rows)
    documents, answers = answers_in(batch)
    assert all(1 not in answer[:-1] for answer in answers)  # cut at the end token
    assert max(map(len, answers)) == 6
    # The answers to a prompt share its tokens, except the last one.
    prompts = [model.tokenizer.decode(documents[number].tolist()) for number in (0, 5)]
    assert prompts == ["0+0", "1+1"]
    assert batch["parents"].tolist()[:10] == [-1, 0, 0, 0, 0, -1, 5, 5, 5, 5]
    assert [documents[number].tolist()[1:] for number in (1, 2, 3, 4, 6, 7, 8, 9)] == answers
    assert {model.tokenizer.decode(documents[number].tolist()[:1]) for number in (1, 9)} == {"="}
    texts = [model.tokenizer.decode(answer) for answer in answers]
    rewards = torch.tensor([text.count("e") / len(answer) for text, answer in zip(texts, answers, strict=True)])
    assert batch["rewards"].equal(rewards)
    groups = rewards.view(2, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    torch.testing.assert_close(batch["advantages"], advantages)
    # The same loss of rows that each have a prompt and one answer.
    rows = [[*documents[5 * (row // 4)].tolist(), *documents[1 + row + row // 4].tolist()] for row in range(8)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor(
        [[-100] * (len(row) - len(answer)) + answer + [-100] * (longest - len(row))
         for row, answer in zip(rows, answers, strict=True)]
    )  # fmt: skip
    inputs = {"input_ids": ids, "labels": labels}
    function = LigerFusedLinearGRPOLoss(beta=beta, loss_type=loss_type)
    reference = frozen(**inputs, return_log_probs=True).log_probs if beta else None
    want, metrics = model(
        **inputs,
        loss_function=lambda x, w, target: function(
            x, w, target, target != -100, advantages, ref_per_token_logps=reference
        ),
    ).loss
    loss, found = objective.loss(model, batch, objective.num_items([batch, batch]))
    torch.testing.assert_close(loss, want / 2)
    assert (found["reward"][0] / found["reward"][1]).item() == pytest.approx(rewards.mean().item())
    if beta:
        assert (found["kl"][0] / found["kl"][1]).item() == pytest.approx(metrics[0].item())

    # A multi-token prediction block predicts tokens beyond the first one of an answer from the prompt.
    objective._answers = lambda *_: (answers, [], [], None)
    assert "parents" in objective.batch(model, next(iter(data)))
    objective.block = mock.Mock()
    assert "parents" not in objective.batch(model, next(iter(data)))


def test_rewards_that_are_large_or_equal(folder):
    """Rewards that fp32 does not tell apart have advantages, and equal ones have none."""
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": f"{folder}/reward.py:short", "num_generations": 2, "max_new_tokens": 2}
    objective = make_objective(TrainOptions(**given))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    objective.prepare(model, lambda name: None)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    rows = next(iter(data))

    def batch(*rewards):
        objective.reward = lambda **columns: rewards if len(rewards) > 1 else rewards[0]
        return objective.batch(model, rows)

    for scale in (1.0, 1e9, 1e30):
        found = batch(scale, scale * (1 + 1e-9), 0.1, 0.1)["advantages"]
        want = 2**-0.5 / (1 + 1e-4 / (scale * 1e-9 * 2**-0.5))
        torch.testing.assert_close(found, torch.tensor([-want, want, 0, 0]), rtol=1e-4, atol=1e-12)
    parts = {"correct": 1.0, "short": 0.0, "polite": 1.0, "brief": 0.5}
    for wrong in (
        (1.0, 2.0, math.nan, 0.0), (1.0, 2.0, 3.0, 1e39), (1.0, 2.0, None, 0.0), (None,), (0.5,), (parts,), ("1234",),
        ({1.0, 2.0, 3.0, 4.0},), ([[1.0]] * 4,),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"reward\.py:short: must return 4 finite numbers"):
            batch(*wrong)
    loss, _ = objective.loss(model, batch(1.0, 1.0, 0.0, 0.0), None)
    loss.backward()
    assert all(float(each.grad.abs().max()) == 0 for each in model.parameters())


def test_a_reward_that_changes_the_ids_changes_no_data(folder):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": f"{folder}/reward.py:short", "num_generations": 2, "max_new_tokens": 4}
    objective = make_objective(TrainOptions(**given))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    objective.prepare(model, lambda name: None)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    rows = next(iter(data))

    def batch(reward):
        torch.manual_seed(0)
        objective.reward = reward
        return objective.batch(model, rows)

    def clear(completion_ids, **columns):
        for ids in completion_ids:
            ids.clear()
        return [1.0] * len(completion_ids)

    plain, changed = batch(lambda completion_ids, **columns: [1.0] * len(completion_ids)), batch(clear)
    assert all(plain[name].equal(changed[name]) for name in plain)


@pytest.mark.parametrize("name", ["completion_ids", "completions", "prompts"])
def test_a_column_that_the_reward_gets_about_the_answers(folder, tmp_path, name):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", name: "2"}) + "\n")
    with pytest.raises(ValueError, match=f"must have no column prompts or completions or .* got {name}. Rename it"):
        train_on(folder, "clash", "grpo", [str(tmp_path / "prompts.jsonl")])


def test_grpo_draws_from_the_model_itself(folder, monkeypatch):
    """Whatever the checkpoint says of drawing. Each prompt is run once."""
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6}
    objective = make_objective(TrainOptions(**given))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    objective.prepare(model, lambda name: None)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    rows = next(iter(data))
    torch.manual_seed(5)
    want = objective.batch(model, rows)
    stored = {"min_p": 1.0, "typical_p": 0.1, "no_repeat_ngram_size": 1, "suppress_tokens": [5], "stop_strings": "e"}
    old = json.loads(model.assets.get("generation_config.json", b"{}"))
    model.assets = model.assets | {"generation_config.json": json.dumps(old | stored).encode()}
    sizes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **inputs: sizes.append([*ids.shape]) or forward(ids, **inputs))
    torch.manual_seed(5)
    got = objective.batch(model, rows)
    assert torch.equal(got["input_ids"], want["input_ids"])
    # A token shows what the layers cache. The last token of a prompt is left to the first step.
    assert sizes[:3] == [[1, 1], [1, 8], [8, 1]]


@pytest.mark.parametrize("kind", ["gathered", "no room", "refused"])
def test_answers_are_sampled_from_gathered_weights_if_there_is_room(folder, monkeypatch, kind):
    """From the sharded ones if there is none, and by `generate` where `rollout` refuses the model.

    The rows are those of a model that is not sharded.
    """
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6}
    objective = make_objective(TrainOptions(**given))
    alone = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    data = objective.dataset(folder / "prompts.jsonl", alone, length=32, overflow=None, batch_size=2, shuffle=False)
    rows = next(iter(data))
    used, rolled, generate = [], LigerLlama.rollout, LigerLlama.generate

    def watched(method):
        return lambda model, *args, **given: used.append((method, model)) or method(model, *args, **given)

    monkeypatch.setattr(LigerLlama, "rollout", watched(rolled))
    monkeypatch.setattr(LigerLlama, "generate", watched(generate))
    if kind == "no room":
        monkeypatch.setattr(grpo_module, "free_memory", lambda device: 0)
    if kind == "refused":
        monkeypatch.setattr(grpo_module, "refusal", lambda *_: "recurrent")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = apply_fsdp(LigerLlama.from_pretrained(folder / "checkpoint", progress=False), param_dtype=None)
    torch.manual_seed(5)
    got = objective.batch(model, rows)
    (method, sampled), *more = used
    assert (method is rolled, sampled is model, more) == (kind != "refused", kind == "no room", [])
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.manual_seed(5)
    assert torch.equal(got["input_ids"], objective.batch(alone, rows)["input_ids"])


@pytest.mark.parametrize(("repeats", "beta"), [(1, 0.0), (2, 0.2)])
def test_grpo_trains_through_the_experts_that_sampled(folder, repeats, beta, sharing):  # noqa: F811
    """The recorded choice goes with the tokens, padded; the policy takes it, and the reference routes by itself."""
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32, "beta": beta}
    given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6, "replay_routing": True}
    objective = make_objective(TrainOptions(**given, num_iterations=repeats, save_every=2))
    dense = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    torch.manual_seed(0)
    sizes = {name: getattr(dense.config, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = MixtralConfig(
        **sizes, intermediate_size=40, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4
    )
    model, frozen = LigerMixtral.from_config(config), LigerMixtral.from_config(config)
    for each in (model, frozen):
        each.assets = dense.assets
    objective.prepare(model, lambda name: frozen)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    batch = objective.batch(model, next(iter(data)))
    ids, experts = batch["input_ids"], batch["routed_experts"]
    assert experts.shape == (*ids.shape, 2, 2)
    inputs = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "parents")}
    own = model.choose_experts(model(**inputs).router_logits).unflatten(0, ids.shape)
    known = experts[..., 0, 0] >= 0
    # The model has not run on the last token of an answer.
    last = batch["answer_tokens"][:, -1]
    real = torch.arange(ids.shape[1]) < last.max()
    assert torch.equal(known[0], real.index_fill(0, last, False))
    assert torch.equal(experts[known], own[known])

    batch["routed_experts"] = torch.where(known[..., None, None], (experts + 1) % 4, -1)
    passed = []
    for each in (model, frozen):
        forward = each.forward
        each.forward = lambda *args, each=each, forward=forward, **more: (
            passed.append((each, more.get("routed_experts"))) or forward(*args, **more)
        )
    loss, _ = objective.loss(model, batch, objective.num_items([batch]))
    loss.backward()
    assert [experts is batch["routed_experts"] for each, experts in passed if each is model] == [True] * repeats
    assert [experts for each, experts in passed if each is frozen] == [None] * (beta > 0)


def test_routing_that_cannot_be_replayed(folder, monkeypatch):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32, "replay_routing": True}
    objective = make_objective(TrainOptions(**given, reward=f"{folder}/reward.py:share", max_new_tokens=6))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    with pytest.raises(ValueError, match=r"replay_routing needs routed experts in blocks .* got LigerLlama"):
        objective.prepare(model, lambda name: None)
    monkeypatch.setattr(grpo_module, "refusal", lambda *_: "model must not be compiled")
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    with pytest.raises(ValueError, match=r"replay_routing needs rollout, but model must not be compiled"):
        objective.batch(model, next(iter(data)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_grpo_trains_on_the_bits_that_were_sampled(folder, temperature):
    """The log-probabilities of the rollout are those of the policy before its first step, so they are not computed."""
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32, "temperature": temperature}
    given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6, "num_iterations": 2}
    objective = make_objective(TrainOptions(**given, deterministic_rollouts=True, save_every=2))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    objective.prepare(model, lambda name: None)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    batch = objective.batch(model, next(iter(data)))
    assert ("old" in batch) == (temperature == 1)
    passed, forward = [], model.forward
    model.forward = lambda *args, **more: passed.append(is_batch_invariant()) or forward(*args, **more)
    loss, _ = objective.loss(model, batch, objective.num_items([batch]))
    loss.backward()
    assert passed == [True] if temperature == 1 else [True, True]
    inputs = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens")}
    with torch.no_grad(), deterministic_forward(model):
        want = model(**inputs, loss_function=objective._log_probs).loss
    assert "parents" not in batch  # each answer has its own copy of the prompt
    for row, labels, old in zip(want, batch["labels"], batch["old"], strict=True):
        answer = (labels != -100).roll(-1)
        assert torch.equal(old[: answer.sum()], row[answer])
        assert (old[answer.sum() :] == 0).all()


@pytest.mark.parametrize("repeats", [1, 2])
def test_grpo_corrects_for_rollouts_in_float8(folder, repeats, sharing):  # noqa: F811
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32, "rollout_dtype": "float8"}
    given |= {"reward": f"{folder}/reward.py:share", "num_generations": 4, "max_new_tokens": 6}
    objective = make_objective(TrainOptions(**given, num_iterations=repeats, save_every=repeats))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False, dtype=torch.bfloat16)
    objective.prepare(model, lambda name: None)
    passed, rollout = [], model.rollout
    model.rollout = lambda *args, **more: passed.append(more) or rollout(*args, **more)
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    batch = objective.batch(model, next(iter(data)))
    assert passed[0]["weight_dtype"] == passed[0]["cache_dtype"] == "float8"

    # The loss of the log-probabilities that the forward computes, whose tokens the rollout has sampled with others.
    answers, sampling = batch["answer_tokens"], batch["sampling"]
    inputs = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "parents")}

    def head(x, weight, target):
        x, target = select_tokens(x, target, answers)
        return torch.stack([fused_linear_logprobs(x, weight, target), (target != -100).float()])

    with torch.no_grad():
        log_probs, mask = model(**inputs, loss_function=head).loss
    difference = (log_probs - sampling) * mask
    assert 1e-4 < difference.abs().max() < 1
    advantages = batch["advantages"][:, None]
    want = -(difference.exp().clamp(max=3.0) * advantages * mask).sum() / mask.sum()
    loss, metrics = objective.loss(model, batch, objective.num_items([batch]))
    torch.testing.assert_close(loss.detach(), want, rtol=1e-3, atol=1e-5)
    total, count = metrics["sampling_logp_difference"]
    torch.testing.assert_close(total / count, difference.abs().sum() / mask.sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2"])
def test_latents_and_sharded_weights_are_not_rounded(arch):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "rollout_dtype": "float8"}
    objective = make_objective(TrainOptions(**given, reward="json:dumps"))
    sizes = {"model_type": arch, **next(iter(tiny(arch).values()))}
    model = AutoLigerModel.from_config(sizes, device="meta", dtype=torch.bfloat16)
    cache_dtype = "float8" if arch == "llama" else None
    assert objective._dtypes(model) == {"weight_dtype": "float8", "cache_dtype": cache_dtype}
    model.groups = ParallelGroups(data=(Group("", 2, 0),))
    assert objective._dtypes(model) == {"weight_dtype": None, "cache_dtype": cache_dtype}


def test_rollouts_that_cannot_be_in_float8(folder, monkeypatch):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32, "rollout_dtype": "float8"}
    given |= {"reward": f"{folder}/reward.py:share", "max_new_tokens": 6}
    for more in ({"temperature": 0.7}, {"deterministic_rollouts": True}):
        with pytest.raises(ValueError, match="rollout_dtype needs temperature 1 and no deterministic_rollouts"):
            make_objective(TrainOptions(**given, **more))
    objective = make_objective(TrainOptions(**given))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    with pytest.raises(ValueError, match=r"model must be in bfloat16, .* got torch\.float32"):
        objective.prepare(model, lambda name: None)
    monkeypatch.setattr(grpo_module, "refusal", lambda *_: "model must not be compiled")
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    with pytest.raises(ValueError, match=r"rollout_dtype needs rollout, but model must not be compiled"):
        objective.batch(model, next(iter(data)))


def test_rollouts_that_cannot_be_deterministic(folder, monkeypatch):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo", "length": 32}
    given |= {"reward": f"{folder}/reward.py:share", "max_new_tokens": 6, "deterministic_rollouts": True}
    objective = make_objective(TrainOptions(**given))
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    monkeypatch.setattr(grpo_module, "refusal", lambda *_: "model must not be compiled")
    data = objective.dataset(folder / "prompts.jsonl", model, length=32, overflow=None, batch_size=2, shuffle=False)
    with pytest.raises(ValueError, match=r"deterministic_rollouts needs rollout, but model must not be compiled"):
        objective.batch(model, next(iter(data)))
    model.compile()
    with pytest.raises(ValueError, match=r"TrainOptions: deterministic_rollouts: model must not be compiled"):
        objective.prepare(model, lambda name: None)


def test_rewards_that_cannot_be(folder, monkeypatch):
    given = {"model": "m", "data": "d", "output": "o", "objective": "grpo"}
    for reward, message in (
        (None, "objective grpo needs a reward, got none"),
        ("share", "reward: must be module:function or file.py:function, got 'share'"),
        ("nothing.py:share", r"reward: nothing\.py must be a file, got nothing there"),
        (f"{folder}/reward.py:long", r"reward\.py must have a function long, got none"),
        ("no_such_module:share", "reward: no_such_module must be a module, got: No module named"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainOptions(**given, reward=reward)
    monkeypatch.chdir(folder)
    assert make_objective(TrainOptions(**given, reward="reward:short")).reward([], []) == [1.0]
    for options, message in (
        ({"num_generations": 1}, "num_generations must be at least 2, got 1"),
        ({"num_iterations": 3}, "save_every must be a multiple of num_iterations, got 500 and 3"),
        ({"length": 256}, "length must be more than max_new_tokens, got 256 and 256"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainOptions(**given, reward="reward:short", **options)
    with pytest.raises(ValueError, match=r"reward\.py:short: must return 16 finite numbers, .* got \[1\.0\]"):
        train_on(folder, "nothing", "grpo", "prompts", reward=f"{folder}/reward.py:short")
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"text\.jsonl, line 1: .* of format prompt, got format text"):
        train_on(folder, "nothing", "grpo", "text")


def test_lora_plus(folder):
    """The first step of AdamW moves every element by its learning rate."""
    moved = {}
    for name, options in {"plain": {}, "plus": {"lora_plus_ratio": 8.0}}.items():
        options |= {"lora_r": 4, "steps": 1, "lr": 1e-3, "warmup": 0, "save_every": 1, "weight_decay": 0.0}
        train_on(folder, name, "sft", "text", **options)
        moved[name] = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    for key, tensor in moved["plus"].items():
        ratio = 8 if "lora_B" in key else 1
        if "lora_B" in key:
            assert tensor.abs().max().item() == pytest.approx(8e-3, rel=1e-2)
            assert moved["plain"][key].abs().max().item() == pytest.approx(8e-3 / ratio, rel=1e-2)
        else:
            assert tensor.equal(moved["plain"][key])
    with pytest.raises(ValueError, match=r"lora_plus_ratio needs lora_r, got 2\.0 and 0"):
        TrainOptions(model="m", data="d", output="o", lora_plus_ratio=2.0)


def test_another_lora_plus_ratio_when_a_run_resumes(folder):
    """The matrices B move by the new ratio times what they would have moved; a ratio may begin, change and end."""
    options = {"lora_r": 4, "lr": 1e-3, "warmup": 0, "save_every": 1, "weight_decay": 0.0, "min_lr": 0.5}
    first, adapters = folder / "ratio", {}
    train_on(folder, "ratio", "sft", "text", steps=1, **options)
    before = load_file(first / "adapter" / "adapter_model.safetensors")
    for name, ratio in {"ratio-none": None, "ratio-8": 8.0}.items():
        shutil.copytree(first, folder / name)
        train_on(folder, name, "sft", "text", steps=2, lora_plus_ratio=ratio, **options)
        adapters[name] = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    for key, start in before.items():
        moved, plain = (adapters[name][key] - start for name in ("ratio-8", "ratio-none"))
        assert plain.abs().max() > 1e-4
        torch.testing.assert_close(moved, plain * (8 if "lora_B" in key else 1), rtol=1e-3, atol=1e-6)
    for steps, ratio in ((3, 4.0), (4, None)):
        train_on(folder, "ratio-8", "sft", "text", steps=steps, lora_plus_ratio=ratio, **options)
    assert [line["step"] for line in log(folder / "ratio-8")] == [1, 2, 3, 4]


def test_shares_of_several_files(folder):
    files = [str(folder / "text.jsonl"), str(folder / "text.jsonl")]
    train_on(folder, "shares", "pretrain", files, length=16, data_shares=[0.7, 0.3])
    shutil.copytree(folder / "shares", folder / "shares-again", ignore=shutil.ignore_patterns("model", "step-00000006"))
    (folder / "shares-again" / "latest").write_text("step-00000003")
    train_on(folder, "shares-again", "pretrain", files, length=16, data_shares=[0.7, 0.3])
    assert log(folder / "shares-again") == log(folder / "shares")
    assert read_options(
        TrainOptions, ["--model=m", "--data", "a", "b", "--output=o", "--data-shares", "0.7", "0.3"]
    ).data_shares == [0.7, 0.3]
    with pytest.raises(
        ValueError, match=r"data_shares must be 1 positive numbers, one for each of data, got \[0\.5, 0\.5\]"
    ):
        TrainOptions(model="m", data="d", output="o", data_shares=[0.5, 0.5])


def test_names_of_modelscope(folder, tmp_path, monkeypatch):
    client = types.ModuleType("modelscope.hub.snapshot_download")
    asked = []

    def download(name: str) -> str:
        asked.append(name)
        return str(folder / "checkpoint")

    (tmp_path / "data").mkdir()
    shutil.copy(folder / "text.jsonl", tmp_path / "data")
    client.snapshot_download = download
    client.dataset_snapshot_download = lambda name: asked.append(name) or str(tmp_path / "data")
    names = ["modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"]
    given = {"model": "modelscope:org/name", "steps": 1, "save_every": 9}
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"modelscope:org/texts needs ModelScope's client, .* pip install modelscope"):
        train_on(folder, str(tmp_path / "run"), "sft", ["modelscope:org/texts"], **given)
    dist.destroy_process_group()
    for name in names:
        monkeypatch.setitem(sys.modules, name, client)
    train_on(folder, str(tmp_path / "run"), "sft", ["modelscope:org/texts"], **given)
    assert asked == ["org/texts", "org/name"]
    assert len(log(tmp_path / "run")) == 1
