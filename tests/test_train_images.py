"""The training command on files with images: each family, whole, with adapters, and on ranks of which one has none."""

import json
import os
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from liger_models import AutoLigerModel, PackedDataset
from liger_models.adapters import load_adapter
from liger_models.train import TrainOptions, train

from .packing.vision import chat, make_model, save_pictures
from .parallel.conftest import two  # noqa: F401

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "mllama")


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints with random weights, chats about images and without them."""
    folder = tmp_path_factory.mktemp("images")
    for family in FAMILIES:
        make_model(family).save_pretrained(folder / family)
    paths = [path.name for path in save_pictures(folder)]
    chats = [chat(*paths[n % 5 : n % 5 + n % 3], question="?" * (n % 7), answer=f"{n} a.") for n in range(10)]
    for name, share in (("train", chats), ("texts", chats[::3]), ("eval", chats[:2])):
        lines = [json.dumps({"messages": messages}) + "\n" for messages in share]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def options(folder: Path, family: str, name: str, **given) -> TrainOptions:
    small = {"length": 128, "batch_size": 2, "steps": 2, "lr": 1e-2, "log_every": 1, "workers": 0}
    whole = {"data": [str(folder / "train.jsonl")], "output": str(folder / family / name), **small, **given}
    return TrainOptions(model=str(folder / family), export_dtype="float32", **whole)


def load(folder: Path):
    return AutoLigerModel.from_pretrained(folder, progress=False)


def changed(before, after) -> set[str]:
    others = dict(after.named_parameters())
    return {name for name, parameter in before.named_parameters() if not torch.equal(parameter, others[name])}


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
    assert (folder / family / "whole" / "model" / "preprocessor_config.json").is_file()


def test_texts_leave_the_tower_as_it_is(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    lines = [json.dumps({"messages": chat(question="?" * n)}) + "\n" for n in range(8)]
    (folder / "plain.jsonl").write_text("".join(lines))
    for family in ("gemma3", "mllama"):
        train(options(folder, family, "texts", data=[str(folder / "plain.jsonl")]))
        names = changed(load(folder / family), load(folder / family / "texts" / "model"))
        assert names
        assert not any(name.startswith("visual.") or "cross_attn" in name for name in names)


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


def test_options_of_images(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with pytest.raises(ValueError, match="broken_media must be one of error, skip, got 'x'"):
        options(folder, "gemma3", "bad", broken_media="x")
    with pytest.raises(ValueError, match="lora_tower needs lora_r"):
        options(folder, "gemma3", "bad", lora_tower=True)
    with pytest.raises(ValueError, match=r"max_pixels is a bound on images of Qwen-VL, got Gemma3Config"):
        train(options(folder, "gemma3", "bad", max_pixels=64))
    dist.destroy_process_group()
    (folder / "missing.jsonl").write_text(json.dumps({"messages": chat("nowhere.png")}) + "\n")
    with pytest.raises(ValueError, match=r"missing.jsonl, line 1: an image must be a file .*nowhere\.png"):
        train(options(folder, "gemma3", "bad", data=[str(folder / "missing.jsonl")]))


def train_on_a_rank(folder: Path, family: str) -> None:
    place = {"XDG_CACHE_HOME": str(folder)}
    with mock.patch.dict(os.environ, place), mock.patch("torch.accelerator.current_accelerator", return_value=None):
        train(options(folder, family, "ranks", length=80, batch_size=1, steps=4))


@pytest.mark.slow
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
