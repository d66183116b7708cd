"""A source is tokenized once, whoever else runs or has died."""

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from liger_models import PackedDataset, Tokenizer
from liger_models.data import tokens
from liger_models.data.encoding import Encoder
from liger_models.data.tokens import TokenFile, document_sizes

from ..processes import FORKSERVER, run, start_forkserver
from .examples import signature, texts, write

ROOT = Path(__file__).parents[2]


def test_tokens_are_made_once(make, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts(30))
    expected = signature(make(path))
    with monkeypatch.context() as patch:
        patch.setattr("liger_models.data.tokens.TokenFile.write", None)
        assert signature(make(path)) == expected
        make(path, length=64)
    write(path, texts(31))
    make(path)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    make(path, cache_dir=None)
    assert len(list((tmp_path / "home" / "liger_models").iterdir())) == 1


def test_the_sizes_of_documents(make):
    tokens = make([{"text": "w1 w2 w3"}, {"text": ""}, {"text": "w1"}]).rows.tokens
    starts = [0, *tokens.ends.tolist()]
    sizes = [end - start for start, end in pairwise(starts)]
    found = document_sizes(tokens.ends)
    assert found.tolist() == sizes
    assert found.dtype == torch.int64
    assert len({*sizes}) > 1


def test_what_a_run_that_died_has_left_is_in_nobodys_way(make, tmp_path):
    """In containers every run has the same process id."""
    make(texts(3))
    (made,) = (tmp_path / "cache").iterdir()
    made.rename(made.with_name(f".{made.name}.{os.getpid()}.tmp"))
    make(texts(3))
    assert made.is_dir()


def tokenize_and_wait(folder: Path, pipe: Any) -> None:
    """Wait for a message, and then tokenize. Another process runs this function."""
    tokenize = Encoder._tokenize

    def wait_and_tokenize(*arguments: Any) -> Any:
        pipe.send("now")
        pipe.recv()
        return tokenize(*arguments)

    Encoder._tokenize = wait_and_tokenize
    tokenizer = Tokenizer.from_pretrained(folder)
    PackedDataset([{"text": "a"}], tokenizer, length=32, cache_dir=folder / "cache", progress=False)


@contextmanager
def waiting_process(folder: Path, tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    """Start a process that waits before it tokenizes. Yield the process, and the pipe for the message to go on."""
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": tokenizer.chat_template, **tokenizer.special_tokens})
    )
    start_forkserver()
    pipe, other = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=tokenize_and_wait, args=(folder, other))
    process.start()
    try:
        assert pipe.poll(60)
        assert pipe.recv() == "now"
        yield process, pipe
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_hosts_that_share_a_cache_tokenize_once(make, tmp_path, tokenizer, monkeypatch):
    with waiting_process(tmp_path, tokenizer) as (process, pipe), ThreadPoolExecutor() as pool:
        monkeypatch.setattr(TokenFile, "write", None)
        here = pool.submit(lambda: make([{"text": "a"}]))
        assert not wait([here], timeout=0.5).done, "the lock of the other one is held"
        pipe.send("go on")
        assert len(here.result()) == 1
        process.join()
        assert process.exitcode == 0
    assert len(list((tmp_path / "cache").iterdir())) == 1


def tokenize_parts(make: Any, count: int, source: Any, **options: Any) -> None:
    """A run that is killed when it has finished some parts of an example each."""
    write_tokens, parts = TokenFile.write, []

    def write_part(*arguments: Any) -> None:
        parts.append(arguments[0])
        if len(parts) > count:
            raise KeyboardInterrupt
        write_tokens(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "PART_SECONDS", 0.0)
        patch.setattr(TokenFile, "write", write_part)
        with pytest.raises(KeyboardInterrupt):
            make(source, **options)


@pytest.mark.parametrize("source", ["file", "list"])
def test_a_killed_tokenization_goes_on_where_it_stopped(make, tmp_path, monkeypatch, source):
    """Also of files whose first records decide on their format; the tokens are those of an undisturbed run."""
    examples = texts(20)
    data = write(tmp_path / "a.jsonl", examples) if source == "file" else examples
    undisturbed = make(data, cache_dir=tmp_path / "other", max_samples=15)
    tokenize_parts(make, 8, data, max_samples=15)
    tokenized, tokenize = [], Encoder._tokenize
    monkeypatch.setattr(Encoder, "_tokenize", lambda *given: tokenized.extend(given[1]) or tokenize(*given))
    resumed = make(data, max_samples=15)
    assert len(tokenized) == 15 - 8
    assert signature(resumed) == signature(undisturbed)
    assert resumed.state_dict() == undisturbed.state_dict()
    (folder,) = (tmp_path / "cache").iterdir()
    (other,) = (tmp_path / "other").iterdir()
    for name in ("sizes.json", "ids.bin", "ends.bin"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_the_first_record_decides_on_the_format_of_a_continued_file(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"prompt": "c", "completion": "d"}])
    tokenize_parts(make, 1, path)
    with pytest.raises(ValueError, match=r"line 2: all examples of a file must have one format, got prompt-completion"):
        make(path)
    assert not list((tmp_path / "cache").iterdir()), "a corrected file is another source"


def test_parts_that_no_run_continues_are_deleted(make, tmp_path, monkeypatch):
    tokenize_parts(make, 2, texts(5))
    make(texts(6))
    assert len(list((tmp_path / "cache").iterdir())) == 3, "parts and their lock, and the tokens of the other source"
    monkeypatch.setattr(tokens, "KEPT_SECONDS", -1.0)
    make(texts(7))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_part_is_noticed(make, tmp_path):
    tokenize_parts(make, 2, texts(5))
    (ids,) = (tmp_path / "cache").glob(".*/1/ids.bin")
    ids.write_bytes(bytes(ids.stat().st_size))
    with pytest.raises(ValueError, match=r"must be as it was written, got ids\.bin with other bytes"):
        make(texts(5))
    assert len(make(texts(5))) > 0


def test_memory_does_not_grow_with_the_file(make, tmp_path, monkeypatch):
    monkeypatch.setattr("liger_models.data.encoding.GROUP_CHARACTERS", 1 << 16)
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(1000):
            file.write(json.dumps({"text": f"{number} " + "x" * 5000}) + "\n")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        data = make(path, length=8192)
        for _ in islice(data, 20):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_of_a_process_group_tokenize_once(tmp_path, tokenizer):
    script = """
import sys
from pathlib import Path
import torch.distributed as dist
from liger_models import PackedDataset, Tokenizer
from liger_models.data import TokenFile
dist.init_process_group("gloo")
if dist.get_rank():
    TokenFile.write = None
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
options = {"length": 32, "cache_dir": sys.argv[1] + "/cache", "progress": False}
data = PackedDataset(sys.argv[1] + "/train.jsonl", tokenizer, **options)
said = f"batches {len(list(data))} {len(data)}\\n"
try:
    PackedDataset(sys.argv[1] + "/bad.jsonl", tokenizer, **options)
except ValueError as error:
    said += "error " + str(error)[-60:]
Path(sys.argv[1], f"said-{dist.get_rank()}").write_text(said)
dist.destroy_process_group()
"""
    write(tmp_path / "train.jsonl", texts(50))
    (tmp_path / "bad.jsonl").write_text("x")
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "run.py").write_text(script)
    run("run.py", str(tmp_path), cwd=tmp_path, ranks=2)
    batches, error = (tmp_path / "said-0").read_text().splitlines()
    assert (tmp_path / "said-1").read_text().splitlines() == [batches, error]
    assert batches.startswith("batches")
    assert error.startswith("error")


DAMAGES = {
    "zeroed": lambda folder: (folder / "ids.bin").write_bytes(bytes((folder / "ids.bin").stat().st_size)),
    "ends": lambda folder: (folder / "ends.bin").write_bytes(bytes((folder / "ends.bin").stat().st_size)),
    "short": lambda folder: os.truncate(folder / "ids.bin", 4),
    "empty": lambda folder: (folder / "ends.bin").write_bytes(b""),
    "missing": lambda folder: (folder / "ids.bin").unlink(),
    "no JSON": lambda folder: (folder / "sizes.json").write_text("[3, "),
    "no list": lambda folder: (folder / "sizes.json").write_text("7"),
    "other values": lambda folder: (folder / "sizes.json").write_text('["a", null, 1, 2]'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_says_what_to_delete(make, tmp_path, damage):
    expected = signature(make(texts(30)))
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder)
    with pytest.raises(
        ValueError, match=rf"token cache {folder} must be as it was written.*Delete this folder"
    ) as error:
        make(texts(30))
    assert "\n" not in str(error.value)
    shutil.rmtree(folder)
    assert signature(make(texts(30))) == expected


@pytest.mark.slow
def test_what_killed_tokenization_has_left_is_removed(make, tmp_path, tokenizer):
    with waiting_process(tmp_path, tokenizer) as (process, _):
        make(texts(3))
        names = {path.name for path in (tmp_path / "cache").iterdir()}
        assert len(names) == 3, "what the living process writes is left to it"
        process.kill()
        process.join()
    make(texts(4))
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_full_disk_is_named(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenFile, "write", full)
    with pytest.raises(OSError, match=r"the token cache .*cache must have room for the tokens, got: .*No space left"):
        make(write(tmp_path / "a.jsonl", texts(3)))
    assert not list((tmp_path / "cache").iterdir())


def test_an_error_begins_below_the_progress_bar(make, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nno JSON\n')
    with pytest.raises(ValueError, match="line 2") as error:
        make(tmp_path / "a.jsonl", progress=True)
    shown = capsys.readouterr().err
    assert "Tokenizing" in shown
    assert shown.endswith("\n"), error


def test_a_cache_that_cannot_be_written_is_named(make, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"the token cache .*file/cache must be a folder that can be written, got: .*Not a"
    ):
        make(texts(3), cache_dir=tmp_path / "file" / "cache")
    monkeypatch.setattr(tokens.tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only")))
    with pytest.raises(
        OSError, match=r"the token cache .*cache must be a folder that can be written, got: .*Read-only"
    ):
        make(texts(3))


def test_unchanged_tokens_are_verified_once(make, tmp_path, monkeypatch):
    """Not by later runs, nor by other hosts that share the cache; changed ones are read again."""
    reads, crc32 = [], tokens.zlib.crc32
    monkeypatch.setattr(tokens.zlib, "crc32", lambda *given: reads.append(1) or crc32(*given))
    path = write(tmp_path / "a.jsonl", texts(3))
    make(path)
    counts = []
    for _ in range(3):
        reads.clear()
        make(path)
        counts.append(len(reads))
    assert counts[0] > 0 == counts[1] == counts[2]
    (folder,) = (tmp_path / "cache").iterdir()
    content = bytearray((folder / "ids.bin").read_bytes())
    content[0] ^= 1
    (folder / "ids.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"ids\.bin with other bytes"):
        make(path)
