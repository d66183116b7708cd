"""The committed results, and the selection of rows that the pages show."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ROOT

RESULTS = ROOT / "benchmarks" / "results"

RUNS = ("train", "fsdp", "curves", "families", "paths")
"""Benchmarks in which a row is compared only with rows of the same run. In curves, even the initial weights differ
between runs.
"""

BY_MODE = ("train", "fsdp", "paths")
"""Benchmarks in `RUNS` whose pages show the last run of each mode, instead of one last run for all modes."""

NEEDED = {"benchmark", "mode", "date", "commit", "versions"}
"""Keys that every row must have."""

Row = dict[str, Any]
Rows = list[Row]


def distinct(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def grouped(rows: Rows, *names: str) -> dict[tuple[str, ...], Rows]:
    """Map the values of the keys ``names`` to the rows with these values. A missing key has the value ""."""
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in names), []).append(row)
    return groups


def of_transformers(row: Row) -> bool:
    """Whether the row is a measurement of transformers' models."""
    library, *words = row["mode"].split("+")
    if row.get("benchmark") == "paths":  # the first word is the path
        return "door" not in words and bool({"trl", "hf"} & {*words})
    return bool(library == "hf")


def of_ours(row: Row) -> bool:
    if row.get("benchmark") == "paths":
        return not of_transformers(row)
    return bool(row["mode"].startswith("ours"))


def of_a_run(row: Row) -> bool:
    """Whether the row is compared only within its run. A row of mode "error" is not: it is a complete comparison."""
    return row["benchmark"] in RUNS and row["mode"] != "error"


def parse(file: Path, number: int, line: str) -> Row:
    try:
        row: Row = json.loads(line)
        missing = NEEDED - row.keys()
    except (ValueError, AttributeError):
        missing = NEEDED
    if missing:
        raise ValueError(
            f"report: {file}, line {number}: must be a JSON object with {distinct(NEEDED)}, "
            f"it lacks {distinct(missing)}: {line[:60]!r}. Delete the line and repeat the measurement."
        )
    if row["benchmark"] == "paths":
        row["path"] = row["mode"].partition("+")[0]
    row["run"] = json.dumps([row["commit"], row["date"], row["versions"]], sort_keys=True)
    return row


def key_of(row: Row) -> tuple[str, ...]:
    """The key of a row. Rows with equal keys are repetitions of the same measurement."""
    names = ("benchmark", "model", "op", "gpus", "memory_gb", "layers", "batch", "shape", "mode", "device")
    return (*(row.get(name, "") for name in names), row["run"] if of_a_run(row) else "")


def read(folder: Path) -> Rows:
    """Read the latest row of each measurement and, for benchmarks in `RUNS`, only the rows of the last run.

    Rows of a run have the same commit, date, versions and device. The last run is the run with the latest row of
    transformers that is not an error. For benchmarks in `BY_MODE`, the last run of each mode is shown, because a run
    may measure only a few modes and their peer. Runs with a peer are preferred to runs without a peer. The last run
    of a peer's mode is shown completely. If the last run of a family has only `LigerAdamW`, the last run with torch's
    AdamW is shown, too. Old rows of early failures have no device. They count for the device of the row before them.
    """
    # The latest row of each key.
    latest: dict[tuple[str, ...], Row] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = [
            parse(file, number, line) for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        ]
        device = next((row["device"] for row in rows if "device" in row), "unknown device")
        for row in rows:
            device = row.setdefault("device", device)
            key = key_of(row)
            if row.get("shape"):  # replaces an earlier row that failed before its first shape
                latest.pop(key_of(row | {"shape": ""}), None)
            if key not in latest or row["date"] >= latest[key]["date"]:
                if of_a_run(row):  # a repetition moves behind the day's other runs
                    latest.pop(key, None)
                latest[key] = row

    # Show only the last runs.
    shown = [row for row in latest.values() if not of_a_run(row)]
    of_runs = [row for row in latest.values() if of_a_run(row)]
    for (benchmark, *_), group in grouped(of_runs, "benchmark", "model", "gpus", "batch", "device", "path").items():
        peers = [row for row in group if of_transformers(row) and "error" not in row] or group
        runs_of_peers = [row["run"] for row in sorted(peers, key=lambda row: row["date"])]
        last = runs_of_peers[-1]
        runs = {last}
        with_torch, with_liger = ({row["run"] for row in group if row["mode"] == f"ours{x}"} for x in ("", "+adamw"))
        if benchmark == "families" and last in with_liger - with_torch:
            runs |= {*[run for run in runs_of_peers if run in with_torch][-1:]}
        if benchmark in BY_MODE:
            with_peer = {row["run"] for row in peers}
            in_order = sorted(group, key=lambda row: (row["run"] in with_peer, row["date"]))
            modes = {row["mode"]: row for row in in_order}
            of_peers = {row["run"] for row in modes.values() if not (of_ours(row) or "error" in row)}
            runs |= of_peers | {row["run"] for row in modes.values() if of_ours(row)}
            group = [row for row in group if not of_ours(row) or row["run"] in of_peers or row is modes[row["mode"]]]
        shown += [row for row in group if row["run"] in runs]
    return shown
