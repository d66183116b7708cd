"""The training command and the real client of Weights & Biases, which writes to a file instead of its server."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from liger_models.train.loop import TrainOptions, train

from ..train.runs import log, on_the_cpu  # noqa: F401
from ..train.test_loop import folder  # noqa: F401

BLOCK = 2**15
"""Bytes of a block of LevelDB's log format, in which an offline run is stored after 7 bytes of its own."""
FULL, LAST = 1, 4


def records(file: Path) -> Iterator[Record]:
    content, at, joined = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # no room for a header
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        joined += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            yield Record.FromString(joined)
            joined = b""


@pytest.mark.usefixtures("on_the_cpu")
def test_two_runs_are_one_and_hold_the_log(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WANDB_MODE", "offline")
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
    given |= {"output": str(tmp_path / "run"), "log_every": 1, "report_to": ["wandb"]}
    for steps in (2, 3):
        train(TrainOptions(**given, steps=steps, sample_prompt="3 times" if steps == 3 else None))
    name = (tmp_path / "run" / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    found, samples = {}, []
    for file in files:
        every = [*records(file)]
        (run,) = (record.run for record in every if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.display_name) == (name, "run")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["length"] == 64
        for record in every:
            if record.WhichOneof("record_type") == "history":
                keys = (".".join(item.nested_key) or item.key for item in record.history.item)
                values = dict(zip(keys, (json.loads(item.value_json) for item in record.history.item), strict=True))
                samples += [values["sample"]] if "sample" in values else []
                found |= {record.history.step.num: values} if "loss" in values else {}
    lines = log(tmp_path / "run")
    assert sorted(found) == [1, 2, 3]
    for line in lines:
        if "loss" in line:
            assert found[line["step"]]["loss"] == pytest.approx(line["loss"])
    assert samples == [line["sample"] for line in lines if "sample" in line]
