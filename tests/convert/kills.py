"""Kill `write_folder` at file operations and at random times, and check the files that each kill leaves.

Run as ``python -m tests.convert.kills FOLDER [RANDOM]``. It forks its writers, so it must not import torch.
"""

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from liger_models.convert.folder import NEW, write_folder

LAST = "config.json"


def shard_names(shards: int) -> list[str]:
    return [f"model-{i}-of-{shards}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]


def save(folder: Path, tag: str, shards: int) -> None:
    """Write a checkpoint of small files that all hold ``tag``, as `save_pretrained` does."""

    def write(place: Path) -> None:
        for name in [LAST, "tokenizer.json", *shard_names(shards)]:
            (place / name).write_text(tag * 1000)

    write_folder(folder, write, last=LAST, stale=("model.safetensors", "model-*-of-*.safetensors"))


def content(folder: Path) -> tuple[str, int]:
    """The tag and the number of shards of a checkpoint. Fails if the checkpoint is not complete."""
    files = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    tags = set(files.values())
    assert len(tags) == 1, f"mixed: { ({name: text[:1] for name, text in files.items()}) }"
    (text,) = tags
    shards = len(files) - 2
    assert len(text) == 1000
    assert {LAST, "tokenizer.json", *shard_names(shards)} == files.keys()
    return text[0], shards


def killed(action: Callable[[], None], point: int | None, after: float = 0.0) -> bool:
    """Run ``action`` in a process that is killed before a file operation or after a time. False if it ends first."""
    process = os.fork()
    if process == 0:
        count = 0

        def hook(event: str, arguments: object) -> None:
            nonlocal count
            if event.partition(".")[0] in ("os", "open", "shutil", "ctypes", "fcntl"):
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        if point is not None:
            sys.addaudithook(hook)
        action()
        os._exit(0)
    if point is None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1] != 0


def check(folder: Path, old: tuple[str, int] | None, new: tuple[str, int], in_place: bool) -> None:
    """Check that a folder holds the old or the new checkpoint after a kill."""
    if not folder.exists():
        assert old is None
    elif in_place and not (folder / LAST).exists():
        assert content(folder / NEW) == new
    else:
        assert content(folder) in (old, new)


def prepare(folder: Path, kind: str, shards: int) -> None:
    if kind != "new":
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        if kind == "subfolder":
            (folder / "runs").mkdir()
        save(folder, "a", shards)


def main(root: Path, random_kills: int) -> None:
    kills = 0
    for kind in ("new", "existing", "subfolder"):
        for before, after in ((1, 1), (8, 8), (8, 1), (1, 8)):
            old = None if kind == "new" else ("a", before)
            point = 0
            while True:
                point += 1
                folder = root / f"{kind}-{before}-{after}-{point}" / "out"
                folder.parent.mkdir()
                prepare(folder, kind, before)
                if not killed(lambda: save(folder, "b", after), point):  # noqa: B023
                    break
                kills += 1
                check(folder, old, ("b", after), kind == "subfolder")
                save(folder, "c", 2)
                assert content(folder) == ("c", 2)
                assert [path.name for path in folder.parent.iterdir()] == ["out"]
                assert kind == "new" or (folder / "notes.txt").read_text() == "mine"
                assert not list(folder.glob(".*"))
    print(f"{kills} kills at file operations")

    folder = root / "random"
    save(folder, "0", 1)
    for turn in range(random_kills):
        old, new = content(folder), (str(turn % 10), random.choice((1, 8)))
        killed(lambda: save(folder, *new), None, random.uniform(0, 0.004))  # noqa: B023
        assert content(folder) in (old, new)
    save(folder, "0", 1)
    assert not list(root.glob(".*"))
    print(f"{random_kills} kills at random times")

    folder = root / "several"
    writers = {}
    for tag, shards in (("x", 1), ("y", 8)):
        process = os.fork()
        if process == 0:
            warnings.simplefilter("ignore")
            for _ in range(100):
                save(folder, tag, shards)
            os._exit(0)
        writers[process] = (tag, shards)
    for process in writers:
        assert os.waitpid(process, 0)[1] == 0
    assert content(folder) in writers.values()
    assert not list(root.glob(".*"))
    print("2 writers, 200 saves")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
