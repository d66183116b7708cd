"""A run resumes only as what it was: the weights under adapters, the reference model, the objective, the dtype."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from liger_models import LigerLlama
from liger_models.adapters import load_adapter, merge_lora
from liger_models.train.folder import lock_folder, replace_json
from liger_models.train.resume import read_options

from ..data.conftest import tokenizer  # noqa: F401
from .runs import no_group_is_left  # noqa: F401
from .test_objectives import folder, result, train_on  # noqa: F401

pytestmark = pytest.mark.slow


def resume(folder: Path, run: str, objective: str, data: str, **options: Any) -> None:  # noqa: F811
    try:
        train_on(folder, run, objective, data, **options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_adapters_do_not_resume_on_their_merged_model(folder, tmp_path):  # noqa: F811
    given = {"lora_r": 4, "lr": 3e-2}
    train_on(folder, str(tmp_path / "run"), "sft", "text", steps=2, **given)
    base = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    merge_lora(load_adapter(base, tmp_path / "run" / "adapter")).save_pretrained(tmp_path / "merged")
    with pytest.raises(ValueError, match=r"got checksum of the weights under the adapters \w+ instead of \w+\. Resume"):
        resume(folder, str(tmp_path / "run"), "sft", "text", model=str(tmp_path / "merged"), **given)
    shutil.copytree(folder / "checkpoint", tmp_path / "moved")
    resume(folder, str(tmp_path / "run"), "sft", "text", model=str(tmp_path / "moved"), **given)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("objective", "data", "begun", "other"),
    [
        ("dpo", "pairs", {}, {"ref_model": "other", "reference model": ""}),
        ("dpo", "pairs", {"lora_r": 4}, {"ref_model": "other", "reference model": ""}),
        ("dpo", "pairs", {}, {"beta": 0.3}),
        ("dpo", "pairs", {}, {"loss_type": "apo_zero"}),
        ("sft", "text", {}, {"dtype": "bfloat16"}),
        ("distill", "text", {"teacher": "teacher"}, {"temperature": 2.0}),
        ("grpo", "prompts", {}, {"max_new_tokens": 4}),
    ],
)
def test_another_loss_is_refused(folder, tmp_path, objective, data, begun, other):  # noqa: F811
    from .runs import save_llama

    if not (folder / "other").exists():
        save_llama(folder / "other", (folder / "checkpoint" / "tokenizer.json").read_text(), seed=9)
    train_on(folder, str(tmp_path / "run"), objective, data, steps=1, **begun)
    name = [*other][-1]
    options = {option: value for option, value in other.items() if option != "reference model"}
    if "ref_model" in options:
        options["ref_model"] = str(folder / "other")
    with pytest.raises(ValueError, match=f"load_state: the run must be that of .*, got {name} .* instead of .* Resume"):
        resume(folder, str(tmp_path / "run"), objective, data, **begun, **options)


def test_another_objective_on_the_same_data_is_refused(folder, tmp_path):  # noqa: F811
    train_on(folder, str(tmp_path / "run"), "dpo", "pairs", steps=1)
    with pytest.raises(ValueError, match="got objective orpo instead of dpo"):
        resume(folder, str(tmp_path / "run"), "orpo", "pairs")


def test_what_may_change_is_said(folder, tmp_path, capfd):  # noqa: F811
    train_on(folder, str(tmp_path / "run"), "dpo", "pairs", steps=1)
    assert "changed" not in capfd.readouterr().out
    shutil.copytree(folder / "checkpoint", tmp_path / "moved")
    resume(folder, str(tmp_path / "run"), "dpo", "pairs", steps=2, lr=1e-3, ref_model=str(tmp_path / "moved"))
    shown = capfd.readouterr().out
    changes = next(line for line in shown.splitlines() if line.startswith("changed "))
    assert "lr 0.001 instead of 0.003" in changes
    assert f"ref_model {tmp_path}/moved instead of None" in changes


def test_one_run_at_a_time_in_a_folder(folder, tmp_path):  # noqa: F811
    refused = pytest.raises(ValueError, match="output must be a folder in which no other process trains, got")
    with lock_folder(tmp_path), refused:
        train_on(folder, str(tmp_path), "sft", "text", steps=1)
    resume(folder, str(tmp_path), "sft", "text", steps=1)  # the file is left, and nobody holds it
    assert (tmp_path / ".lock").exists()


def test_a_lock_ends_with_its_process(tmp_path):
    """Also with one that is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with lock_folder(tmp_path):
            os.write(writer, b".")
            os.kill(os.getpid(), 9)
    os.read(reader, 1)
    os.waitpid(child, 0)
    with lock_folder(tmp_path):
        pass


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path):
    (tmp_path / "options.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"options\.json: must be writable and have room for the files"):
        replace_json(tmp_path / "options.json", {"lr": 1e-5})


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\x00\x00"])
def test_options_that_cannot_be_read_count_as_missing(tmp_path, content):
    if content is not None:
        (tmp_path / "options.json").write_bytes(content)
    assert read_options(tmp_path) == {}


def test_a_finished_run_is_exported_again(folder, tmp_path):  # noqa: F811
    train_on(folder, str(tmp_path / "run"), "sft", "text", steps=2)
    before = result(tmp_path / "run")
    resume(folder, str(tmp_path / "run"), "sft", "text", steps=2)
    assert result(tmp_path / "run") == before
