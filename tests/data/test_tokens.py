"""A source is tokenized once, whoever else runs or has died."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from liger_models.data import tokens
from liger_models.data.tokens import TokenFile

from ..processes import environment, run
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


def test_what_a_run_that_died_has_left_is_in_nobodys_way(make, tmp_path):
    """In containers every run has the same process id."""
    make(texts(3))
    (made,) = (tmp_path / "cache").iterdir()
    made.rename(made.with_name(f".{made.name}.{os.getpid()}.tmp"))
    make(texts(3))
    assert made.is_dir()


def test_two_runs_tokenize_at_the_same_time(make, tmp_path, monkeypatch):
    write_tokens = TokenFile.write

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(TokenFile, "write", write_tokens)
        write_tokens(*arguments)
        make(texts(3))  # the other one, which is done first

    monkeypatch.setattr(TokenFile, "write", slow)
    expected = signature(make(texts(3)))
    assert signature(make(texts(3))) == expected
    assert len(list((tmp_path / "cache").iterdir())) == 1


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
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    script = """
import sys, time
from liger_models import PackedDataset, Tokenizer
from liger_models.data.encoding import Encoder
def hang(*_):
    print("now", flush=True)
    time.sleep(1000)
Encoder._tokenize = hang
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
PackedDataset([{"text": "a"}], tokenizer, length=32, cache_dir=sys.argv[1] + "/cache", progress=False)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    assert process.stdout.readline() == "now\n"
    make(texts(3))
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert len(names) == 3, "what the living process writes is left to it"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
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
