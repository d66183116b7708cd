"""Folders that are written in one step."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from liger_models import LigerLlama, LlamaConfig
from liger_models.convert import folder as module
from liger_models.convert.folder import NEW, write_folder
from tests.convert.kills import LAST, content, save

TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, bos_token_id=None
)


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_or_the_new_files(tmp_path: Path) -> None:
    code = [sys.executable, "-m", "tests.convert.kills", str(tmp_path), "100"]
    done = subprocess.run(code, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    kills = int(done.stdout.split()[0])
    assert kills > 300
    assert done.stdout.splitlines()[1:] == ["100 kills at random times", "2 writers, 200 saves"]


def test_other_files_are_kept_as_they_are(tmp_path: Path) -> None:
    save(tmp_path / "out", "a", 2)
    (tmp_path / "out" / "log").write_text("before ")
    (tmp_path / "out" / "link").symlink_to("nowhere")
    with (tmp_path / "out" / "log").open("a") as log:
        save(tmp_path / "out", "b", 1)
        log.write("after")
    assert (tmp_path / "out" / "log").read_text() == "before after"
    assert os.readlink(tmp_path / "out" / "link") == "nowhere"
    assert content(tmp_path / "out") == ("b", 1)


def test_a_link_to_a_folder_goes_on_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    for tag in ("a", "b"):
        save(tmp_path / "link", tag, 1)
        assert (tmp_path / "link").is_symlink()
        assert content(tmp_path / "there" / "out") == (tag, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"link", "there"}


def test_the_working_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "out", "a", 2)
    monkeypatch.chdir(tmp_path / "out")
    save(Path(), "b", 1)
    assert content(Path()) == ("b", 1)
    assert os.path.samestat(os.stat(Path()), os.stat(tmp_path / "out"))
    assert not list(Path().glob(".*"))


@pytest.mark.parametrize("links", [True, False])
def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("not supported")

    save(tmp_path / "out", "a", 8)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    save(tmp_path / "out", "b", 1)
    assert content(tmp_path / "out") == ("b", 1)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.rglob(".*"))


def test_a_reader_is_told_of_a_save_that_was_killed_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LigerLlama.from_config(TINY)
    (tmp_path / "out" / "runs").mkdir(parents=True)
    model.save_pretrained(tmp_path / "out")

    def kill(*arguments: object, follow_symlinks: bool = True) -> None:
        raise KeyboardInterrupt if follow_symlinks else OSError("a folder has no links")

    changed = LigerLlama.from_config(TINY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", kill)
        with pytest.raises(KeyboardInterrupt):
            changed.save_pretrained(tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"a save that was killed .* whole in .*\.new: load them from there"):
        LigerLlama.from_pretrained(tmp_path / "out")
    whole = LigerLlama.from_pretrained(tmp_path / "out" / NEW, progress=False)
    assert torch.equal(whole.lm_head.weight, changed.lm_head.weight)
    model.save_pretrained(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "runs"}


def test_without_locks_and_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.setattr(module, "fcntl", None)
    for tag, shards in (("a", 8), ("b", 1)):
        save(tmp_path / "out", tag, shards)
        assert content(tmp_path / "out") == (tag, shards)
    assert not list(tmp_path.rglob(".*"))


def test_a_second_writer_waits(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    def slowly(place: Path) -> None:
        (place / LAST).write_text("first")
        entered.set()
        assert go.wait(60)

    first = threading.Thread(target=write_folder, args=(tmp_path / "out", slowly), kwargs={"last": LAST})
    first.start()
    assert entered.wait(60)
    waiting = threading.Event()

    def second() -> None:
        with pytest.warns(UserWarning, match="out: another process is writing to it. Waiting for its end"):
            save(tmp_path / "out", "b", 1)

    with pytest.MonkeyPatch.context() as patch:
        flock = module.fcntl.flock

        def noticed(*arguments: int) -> None:
            try:
                flock(*arguments)
            except BlockingIOError:
                waiting.set()
                raise

        patch.setattr(module.fcntl, "flock", noticed)
        other = threading.Thread(target=second)
        other.start()
        assert waiting.wait(60)
        assert not (tmp_path / "out").exists()
        go.set()
        first.join()
        other.join()
    assert content(tmp_path / "out") == ("b", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
