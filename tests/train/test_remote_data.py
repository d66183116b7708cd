"""Data sets by their names on the hub, which a server on this machine plays, and on ModelScope."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from liger_models.train import remote_data
from liger_models.train.loop import train
from liger_models.train.remote_data import Name, fetch_data, select_files
from liger_models.train.train_options import TrainOptions

from ..convert.hub_server import HubServer, Repo
from ..convert.test_hub import hub  # noqa: F401
from .runs import log, no_group_is_left, on_the_cpu  # noqa: F401
from .test_loop import folder  # noqa: F401

TEXTS = [{"text": f"{n} times {m} is {n * m}."} for n in range(10) for m in range(10)]


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(records: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def upload(server: HubServer, files: dict[str, bytes], branch: str = "main") -> str:
    return server.repos.setdefault("datasets/someone/sums", Repo()).commit(branch, files)


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_train_on_a_data_set_of_the_hub(folder, hub, tmp_path, capfd):  # noqa: F811
    """A run that resumes reads the revision with which it began."""
    pytest.importorskip("pyarrow.parquet")
    files = {f"data/train-0000{part}-of-00002.parquet": parquet(TEXTS[part::2]) for part in range(2)}
    upload(hub, {**files, "data/test-00000-of-00001.parquet": parquet(TEXTS[:9]), "README.md": b"# Sums"})
    given: dict[str, Any] = {"model": str(folder / "checkpoint"), "length": 64, "workers": 0, "log_every": 1}
    given |= {"data": ["hub:someone/sums"], "eval_data": ["hub:someone/sums:test"]}
    train(TrainOptions(**given, output=str(tmp_path / "run"), steps=2))
    assert "data        100 examples, format text: " in capfd.readouterr().out
    assert len(json.loads((tmp_path / "run" / "data.json").read_text())["someone/sums"]) == 40
    assert hub.downloaded() == {*files, "data/test-00000-of-00001.parquet", "README.md"}

    upload(hub, {"train.jsonl": lines(TEXTS[:50])})
    train(TrainOptions(**given, output=str(tmp_path / "run"), steps=4))
    train(
        TrainOptions(**{**given, "data": ["hub:someone/sums"], "eval_data": []}, output=str(tmp_path / "new"), steps=1)
    )
    assert "data        50 examples, format text: " in capfd.readouterr().out
    assert [line["step"] for line in log(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4]


def test_revisions_and_what_was_downloaded(hub, tmp_path, monkeypatch):  # noqa: F811
    first = upload(hub, {"train.jsonl": lines(TEXTS[:5]), "dataset_infos.json": b"{}"})
    upload(hub, {"train.jsonl": lines(TEXTS[:7])})
    upload(hub, {"train.jsonl": lines(TEXTS[:9])}, "newer")

    def count(name: str) -> int:
        (file,) = fetch_data([name], tmp_path, resumes=False)
        return len(Path(file).read_text().splitlines())

    assert count("hub:someone/sums") == 7
    assert count(f"hub:someone/sums@{first}") == 5
    assert count("hub:someone/sums:train@newer") == 9
    with pytest.raises(RepositoryNotFoundError):
        count("hub:someone/nothing")
    with pytest.raises(ValueError, match=r"sums: the data set must have the split dev, got train. Name one"):
        count("hub:someone/sums:dev")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert count("hub:someone/sums") == 7


def test_a_data_set_that_the_hub_has_converted(hub, tmp_path):  # noqa: F811
    upload(hub, {"sums.csv": b"text\n"})
    with pytest.raises(FileNotFoundError, match=r"someone/sums: must hold files that end in one of"):
        fetch_data(["hub:someone/sums"], tmp_path, resumes=False)
    upload(hub, {"default/train/0000.parquet": b"PAR1"}, remote_data.CONVERTED)
    (file,) = fetch_data(["hub:someone/sums"], tmp_path, resumes=False)
    assert Path(file).read_bytes() == b"PAR1"


def test_splits_of_modelscope(tmp_path, monkeypatch):
    (tmp_path / "sums").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / "sums" / name).write_bytes(lines(TEXTS[:3]))
    asked = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(tmp_path / "sums")

    monkeypatch.setattr(remote_data.modelscope, "fetch", fetch)
    names = ["modelscope:someone/sums", "modelscope:someone/sums:test@v1", "other"]
    found = fetch_data(names, tmp_path, resumes=False)
    assert found == [str(tmp_path / "sums" / "train.jsonl"), str(tmp_path / "sums" / "test.jsonl"), "other"]
    assert asked == [("modelscope:someone/sums", None), ("modelscope:someone/sums", "v1")]


TRAIN = {"split": "train", "path": "main/a-*"}
CARD = {
    "configs": [
        {
            "config_name": "main",
            "data_files": [{"split": "train", "path": "main/a-*"}, {"split": "dev", "path": "main/b"}],
        },
        {"config_name": "other", "data_files": "other/*.jsonl"},
    ]
}
DEFAULT = {"configs": [{**config, "default": config["config_name"] == "main"} for config in CARD["configs"]]}
OF_CARD = ["main/a-1.jsonl", "main/a-2.jsonl", "other/c.jsonl", "main/a-3.md"]


@pytest.mark.parametrize(
    ("part", "files", "card", "expected"),
    [
        ("", ["a.jsonl", "b.jsonl"], {}, ["a.jsonl", "b.jsonl"]),
        ("", ["train.jsonl", "valid.jsonl"], {}, ["train.jsonl"]),
        ("validation", ["train.jsonl", "valid.jsonl"], {}, ["valid.jsonl"]),
        ("", ["data/test.txt", "notes.txt"], {}, ["data/test.txt"]),  # the only split
        (
            "train_sft",
            ["data/train_sft-00000-of-00001-a1.parquet", "data/test-00000-of-00001.parquet"],
            {},
            ["data/train_sft-00000-of-00001-a1.parquet"],
        ),
        (
            "",
            ["train/1.json", "train/2.json", "eval/1.json", "dataset_infos.json"],
            {},
            ["train/1.json", "train/2.json"],
        ),
        ("", ["train.jsonl", "train.parquet"], {}, ["train.parquet"]),
        ("", OF_CARD, DEFAULT, ["main/a-1.jsonl", "main/a-2.jsonl"]),
        ("other", OF_CARD, CARD, ["other/c.jsonl"]),
        ("main/train", OF_CARD, CARD, ["main/a-1.jsonl", "main/a-2.jsonl"]),
    ],
)
def test_files_of_a_split(part, files, card, expected):
    assert select_files(Name("hub:", "someone/sums", part, ""), files, card) == expected


@pytest.mark.parametrize(
    ("part", "files", "card", "message"),
    [
        ("", OF_CARD, CARD, "must have the split train, got main/train, other/train. Name one: hub:a/b:main/train"),
        ("main/test", OF_CARD, CARD, "must have the split main/test, got main/train, other/train"),
        ("", ["dev.jsonl", "test.jsonl"], {}, "must have the split train, got validation, test"),
        ("none/train", ["train.jsonl"], {}, "must have the split none/train, got train"),
    ],
)
def test_splits_that_do_not_exist(part, files, card, message):
    with pytest.raises(ValueError, match="hub:a/b: the data set ") as error:
        select_files(Name("hub:", "a/b", part, ""), files, card)
    assert message in str(error.value)


def test_names():
    assert Name.parse("hub:a/b") == ("hub:", "a/b", "", "")
    assert Name.parse("hub:squad:main/train@refs/pr/1") == ("hub:", "squad", "main/train", "refs/pr/1")
    for name in ("hub:", "hub:a/b/c", "hub:a/b:", "hub:a b"):
        with pytest.raises(ValueError, match="train: data must be files, folders or names such as hub:owner/name"):
            train(TrainOptions(model="no/model", data=[name]))
