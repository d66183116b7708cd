"""Defaults of a run that is given only a model and data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_models import LigerLlama
from liger_models.convert import load as convert_load
from liger_models.data.formats import recognized_format
from liger_models.train.loop import main, train
from liger_models.train.train_options import TrainOptions

from .runs import log, no_group_is_left, on_the_cpu  # noqa: F401
from .test_loop import folder  # noqa: F401

PAIR = {"prompt": "1 times 2 is", "chosen": " 2.", "rejected": " 3."}
LABELED = {"prompt": "1 times 2 is", "completion": " 2.", "label": True}


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_a_model_and_data_alone(folder, tmp_path, monkeypatch, capfd):  # noqa: F811
    """Two runs of the same words do not share a folder, and a run resumes if its folder is named."""
    monkeypatch.chdir(tmp_path)
    words = [str(folder / "checkpoint"), str(folder / "train.jsonl")]
    main(words)
    shown = capfd.readouterr().out
    assert "objective   sft (default)" in shown
    assert "training    all weights in float32 (default)" in shown
    assert "optimizer   adamw, lr 2e-05 (default)" in shown
    assert "output      runs/checkpoint-train (default; to resume the run, name it with --output)" in shown
    assert "sequences of 4,096 tokens takes" in shown
    assert "So few updates often learn little: lower length (4096), or raise epochs (1)." in shown
    main([*words, "--steps", "2"])
    main([*words, "--steps", "3", "--output", "runs/checkpoint-train-2"])
    assert [line["step"] for line in log(tmp_path / "runs" / "checkpoint-train-2")] == [2, 3]
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"checkpoint-train", "checkpoint-train-2"}
    assert LigerLlama.from_pretrained("runs/checkpoint-train/model", progress=False).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_weights_under_adapters_have_the_dtype_of_the_checkpoint(folder, tmp_path, capfd):  # noqa: F811
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    model.save_pretrained(tmp_path / "bf16", dtype="bfloat16")
    given: dict[str, Any] = {"data": [str(folder / "train.jsonl")], "length": 64, "workers": 0, "lora_r": 4, "steps": 1}
    for name, dtype in {folder / "checkpoint": "float32", tmp_path / "bf16": "bfloat16"}.items():
        output = tmp_path / f"run-{dtype}"
        train(TrainOptions(model=str(name), output=str(output), **given))
        assert f"training    adapters of rank 4 on weights in {dtype} (the checkpoint's)" in capfd.readouterr().out
        assert json.loads((output / "options.json").read_text())["dtype"] == dtype
    # A run that began with another dtype resumes with it.
    train(TrainOptions(model=str(tmp_path / "bf16"), output=str(tmp_path / "begun"), dtype="float32", **given))
    train(TrainOptions(model=str(tmp_path / "bf16"), output=str(tmp_path / "begun"), **{**given, "steps": 2}))
    assert "weights in float32" in capfd.readouterr().out


def test_a_checkpoint_that_declares_no_dtype():
    assert convert_load.declared_dtype({"torch_dtype": "float16"}) == torch.float16
    assert convert_load.declared_dtype({"text_config": {"dtype": "bfloat16"}}) == torch.bfloat16
    assert convert_load.declared_dtype({"dtype": "auto"}) is None


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("example", "objective"), [(PAIR, "dpo"), (LABELED, "kto")])
def test_data_choose_the_objective(folder, tmp_path, capfd, example, objective):  # noqa: F811
    (tmp_path / "data.jsonl").write_text(2 * (json.dumps(example) + "\n"))
    given: dict[str, Any] = {"model": str(folder / "checkpoint"), "data": [str(tmp_path / "data.jsonl")], "steps": 1}
    given |= {"length": 64, "workers": 0}
    train(TrainOptions(**given, output=str(tmp_path / "run")))
    shown = capfd.readouterr().out
    assert f"objective   {objective} (recognized by the columns of the data)" in shown
    assert "optimizer   adamw, lr 1e-06 (default)" in shown
    with pytest.raises(ValueError, match=r"(Pairs|Labeled answers) train with"):
        train(TrainOptions(**given, output=str(tmp_path / "named"), objective="sft"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": []}, "chat"),
        ({"text": "a", "chosen": "b", "rejected": "c"}, "text"),
        (PAIR, "preference"),
        (LABELED, "kto"),
        ({"prompt": "a"}, "prompt"),
        ({"other": "a"}, None),
        ("a text", None),
    ],
)
def test_formats_are_recognized(record, expected):
    assert recognized_format([record]) == expected
    assert recognized_format([]) is None
    assert recognized_format((Path("missing.jsonl"),)) is None
