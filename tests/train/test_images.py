"""The training command on files with images: each family, whole, with adapters, and on ranks of which one has none."""

import json
import os
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from liger_models import AutoLigerModel, LigerFusedLinearORPOLoss, PackedDataset, preference_batch
from liger_models.adapters import load_adapter
from liger_models.base.vision_language import placeholder_ids
from liger_models.data import AnswerDataset, PromptDataset
from liger_models.train import TrainOptions, train
from liger_models.train.loop import add_adapters
from liger_models.train.objective_options import make_objective

from ..data.examples import write
from ..data.vision import chat, make_model, save_pictures
from ..parallel.conftest import two  # noqa: F401
from .runs import log, no_group_is_left, sharing  # noqa: F401

pytestmark = pytest.mark.slow

FAMILIES = (
    "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "gemma4", "llama4", "mllama", "mistral3", "muse_glimmer",
    "llava", "internvl", "llava_next", "idefics3", "lfm2_vl", "paligemma",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints with random weights, chats about images and without them."""
    folder = tmp_path_factory.mktemp("images")
    for family in FAMILIES:
        make_model(family).save_pretrained(folder / family)
    paths = [path.name for path in save_pictures(folder)]
    chats = [chat(*paths[n % 5 : n % 5 + n % 3], question="?" * (n % 7), answer=f"{n} a.") for n in range(10)]
    rows = {
        name: [{"messages": messages} for messages in share]
        for name, share in (("train", chats), ("texts", chats[::3]), ("eval", chats[:2]))
    }
    answers = [([{"role": "assistant", "content": text}]) for text in ("Noise.", "Who knows?")]
    asked = [{"prompt": messages[:1]} for messages in chats]
    asked[0] = {"prompt": [{"role": "user", "content": "<image>What?"}], "images": [paths[3]]}
    rows["pairs"] = [{**each, "chosen": answers[0], "rejected": answers[1]} for each in asked]
    rows["marked"] = [{**each, "completion": answers[n % 2], "label": n % 2 == 0} for n, each in enumerate(asked)]
    rows["asked"] = [{**each, "number": n} for n, each in enumerate(asked)]
    for name, examples in rows.items():
        write(folder / f"{name}.jsonl", examples)
    (folder / "reward.py").write_text(REWARD)
    return folder


REWARD = """
def short(completion_ids, number, **columns):
    return [1 / len(ids) for ids, _ in zip(completion_ids, number, strict=True)]
"""


def options(folder: Path, family: str, name: str, **given) -> TrainOptions:
    length = 256 if family == "llava_next" else 128  # an image has several tiles
    small = {"length": length, "batch_size": 2, "steps": 2, "lr": 1e-2, "log_every": 1, "workers": 0}
    whole = {"data": [str(folder / "train.jsonl")], "output": str(folder / family / name), **small, **given}
    return TrainOptions(model=str(folder / family), export_dtype="float32", **whole)


def load(folder: Path):
    return AutoLigerModel.from_pretrained(folder, progress=False)


def changed(before, after) -> set[str]:
    others = dict(after.named_parameters())
    return {name for name, parameter in before.named_parameters() if not torch.equal(parameter, others[name])}


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_images_train_the_whole_model(folder, family, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    given = {"eval_data": [str(folder / "eval.jsonl")], "eval_every": 2, "weight_decay": 0.0, "workers": 1}
    train(options(folder, family, "whole", **given))
    lines = [json.loads(line) for line in (folder / family / "whole" / "log.jsonl").read_text().splitlines()]
    assert all(torch.isfinite(torch.tensor(line.get("loss", line.get("eval_loss")))) for line in lines)
    before, after = load(folder / family), load(folder / family / "whole" / "model")
    names = changed(before, after)
    towers = {name for name, _ in before.named_parameters() if name.startswith("visual.blocks.")}
    assert towers
    assert len(towers - names) <= len(towers) // 4, "keys of attention, for one, have no gradient of their bias"
    assert "embed_tokens.weight" in names
    settings = "processor_config.json" if family in ("gemma4", "muse_glimmer") else "preprocessor_config.json"
    assert (folder / family / "whole" / "model" / settings).is_file()


def test_texts_leave_the_tower_as_it_is(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    lines = [json.dumps({"messages": chat(question="?" * n)}) + "\n" for n in range(8)]
    (folder / "plain.jsonl").write_text("".join(lines))
    for family in ("gemma3", "mllama"):
        train(options(folder, family, "texts", data=[str(folder / "plain.jsonl")]))
        names = changed(load(folder / family), load(folder / family / "texts" / "model"))
        assert names
        assert not any(name.startswith("visual.") or "cross_attn" in name for name in names)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_the_language_model_or_of_the_tower_as_well(folder, family, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    before = load(folder / family)
    for name, tower in (("lora", False), ("tower", True)):
        train(options(folder, family, name, lora_r=2, lora_tower=tower))
        after = load_adapter(load(folder / family), folder / family / name / "adapter")
        adapters = {path for path, _ in after.named_parameters() if ".lora." in path}
        assert any(path.startswith("layers.") for path in adapters)
        assert any(path.startswith("visual.") for path in adapters) == tower
        loras = dict(after.named_parameters())
        assert all(loras[path].any() for path in adapters if "lora_B" in path and path.startswith("layers."))
        assert set(dict(before.named_parameters())) <= set(loras)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        "mllama",
        *(pytest.param(family, marks=pytest.mark.matrix) for family in ("qwen3_vl", "gemma3")),  # gemma4 is like gemma3
    ],
)
@pytest.mark.parametrize(("objective", "data"), [("orpo", "pairs"), ("dpo", "pairs"), ("kto", "marked")])
def test_preferences_with_images(folder, family, objective, data, monkeypatch):
    """The tower is trained, and the first loss is that of the pairs by themselves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    files = {"data": [str(folder / f"{data}.jsonl")], "eval_data": [str(folder / f"{data}.jsonl")], "eval_every": 2}
    given = {"objective": objective, "weight_decay": 0.0, "workers": 1, "batch_size": 3, **files}
    train(options(folder, family, objective, **given))
    lines, before = log(folder / family / objective), load(folder / family)
    assert all(torch.isfinite(torch.tensor(line.get("loss", line.get("eval_loss")))) for line in lines)
    assert any(
        name.startswith("visual.blocks.") for name in changed(before, load(folder / family / objective / "model"))
    )
    if objective != "orpo":
        assert lines[0]["loss"] == pytest.approx(0.6931 if objective == "dpo" else 0.5, abs=1e-3)
        return
    place = {"cache_dir": folder, "progress": False}
    first = AnswerDataset(folder / "pairs.jsonl", before.processor, length=128, formats=("preference",), **place)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    monkeypatch.chdir(folder)
    batch = preference_batch([pairs[first.rows.number(n)] for n in range(3)], processor=before.processor)
    loss = LigerFusedLinearORPOLoss()
    model = before.bfloat16()
    pixels = {name: each.bfloat16() if name.startswith("pixel") else each for name, each in batch.items()}
    want = model(**pixels, loss_function=lambda x, weight, target: loss(weight, x, target)).loss[0]
    assert lines[0]["loss"] == pytest.approx(want.item(), rel=1e-2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama"])
def test_answers_about_images_are_sampled_and_rewarded(folder, family, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    given = {"reward": f"{folder}/reward.py:short", "num_generations": 2, "max_new_tokens": 4, "beta": 0.1}
    asked = [str(folder / "asked.jsonl")]
    train(options(folder, family, "grpo", objective="grpo", data=asked, weight_decay=0.0, **given))
    assert all(line["reward"] > 0 for line in log(folder / family / "grpo"))
    before = load(folder / family)
    rows = PromptDataset(folder / "asked.jsonl", before.processor, length=128, shuffle=False, progress=False).rows
    with_images = [bool(row["pixels"].get("pixel_values", torch.empty(0)).numel()) for row in rows]
    assert with_images == [True] + [n % 3 > 0 for n in range(1, 10)]
    monkeypatch.chdir(folder)
    alone = before.processor.apply_chat_template(rows[1]["example"]["prompt"], add_generation_prompt=True)
    assert rows[1]["ids"] == alone["input_ids"][0].tolist()
    assert rows[1]["pixels"]["pixel_values"].equal(alone["pixel_values"])


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_share_a_prompt_with_images(folder, family, monkeypatch, sharing):  # noqa: F811
    """The images of a prompt are seen once for all of its answers, with the same loss and gradients."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    given = {"num_generations": 3, "max_new_tokens": 4, "reward": f"{folder}/reward.py:short", "batch_size": 4}
    run = options(folder, family, "unused", objective="grpo", data=[str(folder / "asked.jsonl")], **given)
    made = make_objective(run)
    model = load(folder / family).double()
    assert model.takes_parents == (family not in ("gemma3", "llama4", "mllama", "lfm2_vl", "paligemma"))
    made.prepare(model, lambda name: model)
    made.reward = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]
    length = 256 if family == "llava_next" else 128
    data = made.dataset([str(folder / "asked.jsonl")], model, length=length, overflow=None, batch_size=4, shuffle=False)
    rows = next(iter(data))
    found = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr("liger_models.train.objectives.SHARING_DEVICES", ())
        torch.manual_seed(0)
        batch = made.batch(model, rows)
        assert ("parents" in batch) == (shares and model.takes_parents)
        model.zero_grad()
        loss, metrics = made.loss(model, batch, made.num_items([batch]))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert any(name.startswith("visual.") and gradient.any() for name, gradient in gradients.items())
        found.append((loss.detach(), metrics, gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "mllama"])
def test_answers_with_placeholders(folder, family):
    """Their images are missing in the training forward. The head prefers placeholders after every other token."""
    model = load(folder / family)
    placeholders = [token for token in placeholder_ids(model.config) if token < model.config.vocab_size]
    assert len(placeholders) == {"qwen2_5_vl": 2, "gemma3": 1, "mllama": 0}[family]
    with torch.no_grad():
        model.norm.weight.zero_()[0] = 1
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[placeholders, 0] = 99
    given = {"reward": f"{folder}/reward.py:short", "num_generations": 4, "max_new_tokens": 8}
    run = options(folder, family, "unused", objective="grpo", **given)
    objective = make_objective(run)
    objective.prepare(model, lambda name: None)
    for wanted in (True, False):
        rows = [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]
        rows = [row for row in rows if ("image" in str(row["prompt"])) == wanted]
        (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = objective.dataset(folder / "some.jsonl", model, length=128, overflow=None, batch_size=2)
        batch = objective.batch(model, next(iter(data)))
        sampled = torch.isin(batch["labels"], torch.tensor(placeholders, dtype=torch.int64))
        assert sampled.any() == bool(placeholders)
        assert (batch["input_ids"] == batch["labels"])[(batch["labels"] != -100) & ~sampled].all()
        loss, _ = objective.loss(model, batch, objective.num_items([batch]))
        assert loss.isfinite()


def test_pairs_with_broken_images(folder, tmp_path):
    processor = load(folder / "gemma3").processor
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    content = (folder / "1.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])
    at = lambda *names: chat(*(str(folder / name) for name in names))[:1]
    good = [{**pairs[0], "prompt": at("0.png"), "images": None}, {**pairs[1], "prompt": at("2.webp", "3.bmp")}]
    for bad, header in ((str(tmp_path / "half.jpg"), True), ("nowhere.png", False)):
        source = [good[0], {**pairs[1], "prompt": chat(bad)[:1]}, good[1]]
        given = {"length": 128, "batch_size": 3, "shuffle": False, "formats": ("preference",)}
        made = lambda given=given, source=source, **more: AnswerDataset(
            source, processor, cache_dir=tmp_path, progress=False, **given, **more
        )
        with pytest.raises(ValueError, match=r"example 2: an image must be a file that can be read"):
            next(iter(made()))
        message = "replaced by the next ones" if header else "1 examples have broken"
        with pytest.warns(UserWarning, match=message):
            batch = next(iter(data := made(broken_media="skip")))
        assert len(data.rows) == 2 + header
        assert data.broken == int(header)
        order = [good[0], good[1], good[1]] if header else [good[0], good[1], good[0]]
        want = preference_batch(order, processor=processor)
        assert batch["pixel_values"].equal(want["pixel_values"])


def test_pairs_longer_than_a_row(folder, tmp_path):
    """A pair fits with all its images, or is left out because none of its answers would remain."""
    model = load(folder / "gemma3")
    pair = json.loads((folder / "pairs.jsonl").read_text().splitlines()[2])
    pair["prompt"] = chat(question="?" * 40) + chat(*(str(folder / name) for name in ("0.png", "1.jpg")))[:1]
    whole = preference_batch([pair], processor=model.processor)
    places = (whole["input_ids"][0] == model.config.image_token_index).nonzero().flatten().tolist()
    source = [pair, {"prompt": chat()[:1], "chosen": pair["chosen"], "rejected": pair["rejected"]}]
    options = {"formats": ("preference",), "shuffle": False, "cache_dir": tmp_path, "progress": False}

    length = int(whole["attention_mask"].sum(1).max())
    batch = next(iter(AnswerDataset(source, model.processor, length=length, **options)))
    assert batch["pixel_values"].equal(whole["pixel_values"])
    assert int((batch["input_ids"] == model.config.image_token_index).sum()) == 2 * len(places)

    with pytest.warns(UserWarning, match="1 examples are left out"):
        shorter = AnswerDataset(source, model.processor, length=places[-1], **options)
    batch = next(iter(shorter))
    assert "pixel_values" not in batch
    assert not (batch["input_ids"] == model.config.image_token_index).any()


@pytest.mark.cases(1)
@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_two_ranks_of_which_one_has_no_image(folder, two, objective):  # noqa: F811
    two(compare_on_a_rank, folder, objective)
    assert len(log(folder / "qwen2_5_vl" / f"two-{objective}")) == 4


def compare_on_a_rank(folder: Path, objective: str) -> None:
    place = {"XDG_CACHE_HOME": str(folder)}
    with mock.patch.dict(os.environ, place), mock.patch("torch.accelerator.current_accelerator", return_value=None):
        given = {"data": [str(folder / ("pairs.jsonl" if objective == "dpo" else "asked.jsonl"))], "lora_r": 2}
        if objective == "grpo":
            given |= {"reward": f"{folder}/reward.py:short", "num_generations": 2, "max_new_tokens": 3}
        run = options(folder, "qwen2_5_vl", f"two-{objective}", objective=objective, batch_size=1, steps=4, **given)
        train(run)


def test_options_of_images(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with pytest.raises(ValueError, match="broken_media must be one of error, skip, got 'x'"):
        options(folder, "gemma3", "bad", broken_media="x")
    text = AutoLigerModel.from_config({"model_type": "llama"}, device="meta")
    with pytest.raises(
        ValueError, match=r"lora_tower needs a model with a vision tower, got LigerLlama\. Leave it out"
    ):
        add_adapters(text, options(folder, "gemma3", "bad", lora_r=2, lora_tower=True))
    with pytest.raises(ValueError, match="lora_tower needs lora_r"):
        options(folder, "gemma3", "bad", lora_tower=True)
    with pytest.raises(ValueError, match=r"max_pixels is a bound on images of Qwen-VL, got Gemma3Config"):
        train(options(folder, "gemma3", "bad", max_pixels=64))
    with pytest.raises(ValueError, match=r"max_pixels must be at least the checkpoint's min_pixels, 64, got 63"):
        train(options(folder, "qwen2_5_vl", "bad", max_pixels=63))
    dist.destroy_process_group()
    (folder / "missing.jsonl").write_text(json.dumps({"messages": chat("nowhere.png")}) + "\n")
    with pytest.raises(ValueError, match=r"missing.jsonl, line 1: an image must be a file .*nowhere\.png"):
        train(options(folder, "gemma3", "bad", data=[str(folder / "missing.jsonl")]))


def train_on_a_rank(folder: Path, family: str) -> None:
    place = {"XDG_CACHE_HOME": str(folder)}
    with mock.patch.dict(os.environ, place), mock.patch("torch.accelerator.current_accelerator", return_value=None):
        train(options(folder, family, "ranks", length=80, batch_size=1, steps=4))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama"])
def test_a_rank_without_an_image_waits_for_nobody(folder, family, two):  # noqa: F811
    """Rows hold one chat or two, and four of the ten chats have no image."""
    model = load(folder / family)
    given = {"length": 80, "progress": False, "cache_dir": folder, "ranks": 2}
    shares = [PackedDataset(folder / "train.jsonl", model.processor, rank=rank, **given) for rank in (0, 1)]
    found = [["pixel_values" in batch for batch in islice(share, 4)] for share in shares]
    assert any(one != other for one, other in zip(*found, strict=True))
    two(train_on_a_rank, folder, family)
    names = changed(model, load(folder / family / "ranks" / "model"))
    assert any(name.startswith("visual.") for name in names)
