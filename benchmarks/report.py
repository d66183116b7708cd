"""Fill the pages with tables and plots of the results: ``python -m benchmarks report``.

A page has the markers ``<!-- begin: NAME -->`` and ``<!-- end -->``. The text between two markers is generated only
from the JSON lines. To correct a number, measure again.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import (
    ROOT,
    curves,
    decode,
    embed,
    families,
    fsdp,
    grpo,
    headline,
    images,
    load,
    longest,
    paths,
    plots,
    profile,
    rollout,
    soak,
    task,
    train,
    weights,
)
from .ops import benchmark as ops
from .rows import RESULTS, Rows, distinct, grouped, read

PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
IMAGES = ROOT / "docs" / "images"
MARKED = re.compile(r"(<!-- begin: ([a-z-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Part(NamedTuple):
    """The content between two markers.

    Args:
        benchmarks: the benchmarks whose rows are shown.
        table: function that makes a table from rows.
        whole: whether there is a line with versions, commits and dates above the table, and a plot below it.
        summary: whether only the device with the most rows is shown.
    """

    benchmarks: tuple[str, ...]
    table: Callable[[Rows], str]
    whole: bool
    summary: bool = False


PARTS = {
    "headline": Part(("train", "families", "paths"), headline.table, False, summary=True),
    "paths": Part(("paths",), paths.table, False),
    "train-short": Part(("train",), train.short_table, False, summary=True),
    "train": Part(("train",), train.table, True),
    "families": Part(("families",), families.table, True),
    "profile": Part(("profile",), profile.table, False),
    "fsdp": Part(("fsdp",), fsdp.table, False),
    "load": Part(("load",), load.table, False),
    "weights": Part(("weights",), weights.table, False),
    "longest": Part(("longest",), longest.table, False),
    "images": Part(("images",), images.table, False),
    "embed": Part(("embed",), embed.table, False),
    "decode": Part(("decode",), decode.table, False),
    "rollout": Part(("rollout",), rollout.table, False),
    "grpo": Part(("grpo",), grpo.table, False),
    "soak": Part(("soak",), soak.table, False),
    "task": Part(("task",), task.table, False),
    "curves": Part(("curves",), curves.table, True),
    "ops": Part(("ops",), ops.best_table, True),
    "ops-all": Part(("ops",), ops.table, False),
}
"""Maps the name in a marker to the content between the markers."""


ALTERNATIVES = {
    "train": "Bar chart of tokens per second in each training step of transformers, Liger Kernel and liger_models",
    "families": "Bar chart of family speeds, relative to the faster of transformers and transformers + Liger Kernel",
    "curves": "Loss curves of transformers and of liger_models over the steps; the curves coincide",
    "ops": "Bar chart of each op's speed, relative to its fastest peer, on a logarithmic axis",
}
"""Maps the name of a plot to the alternative text for readers who can't see the plot."""


def origin(rows: Rows) -> str:
    """A text with versions, commits and dates."""
    versions: dict[str, set[str]] = {}
    for row in rows:
        for package, version in row["versions"].items():
            versions.setdefault(package, set()).add(version)
    packages = ", ".join(f"{package} {distinct(numbers)}" for package, numbers in versions.items())
    return f"{packages}; commit {distinct(row['commit'] for row in rows)}; {distinct(row['date'] for row in rows)}."


def part(name: str, rows: Rows) -> str:
    """The text between the markers with this name."""
    if name not in PARTS:
        raise ValueError(f"report: the parts are {', '.join(PARTS)}, a page asks for {name!r}.")

    # One table for each device.
    benchmarks, table, whole, summary = PARTS[name]
    pieces = []
    devices = grouped([row for row in rows if row["benchmark"] in benchmarks], "device")
    if summary and devices:
        main = max(devices, key=lambda device: len(devices[device]))
        devices = {main: devices[main]}
    for (device,), group in sorted(devices.items()):
        if whole:
            pieces.append(f"{device}; {origin(group)}")
        elif len(devices) > 1:
            pieces.append(f"{device}:")
        pieces.append(table(group))
    if whole and pieces:
        pieces.append(f"![{ALTERNATIVES[name]}](images/{name}.svg)")
    return "\n\n".join(pieces or ["Not measured yet."])


def fill(text: str, rows: Rows) -> str:
    """Replace the text between all markers of a page."""
    return MARKED.sub(lambda match: f"{match[1]}\n{part(match[2], rows)}\n\n", text)


def write(results: Path = RESULTS) -> None:
    """Write all pages and, if matplotlib is installed, all plots."""
    rows = read(results)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = fill(text, rows)
        if filled != text:
            page.write_text(filled, encoding="utf-8")

    # A plot shows all rows of its benchmark.
    for name, (benchmarks, _, whole, _) in PARTS.items():
        group = [row for row in rows if row["benchmark"] in benchmarks]
        if whole and group:
            try:
                plots.plot(name, group, IMAGES)
            except ImportError:
                print("report: matplotlib (extra bench) is not installed, the plots are not written", file=sys.stderr)
                return
