"""The plots of the pages, as SVG."""

import textwrap
from pathlib import Path
from typing import Any

from . import families, train
from .ops import benchmark as ops
from .rows import Rows, grouped
from .training.modes import title

BARS = {"train": train.bars, "families": families.bars, "ops": ops.bars}
LABEL_WIDTH = 45
"""Characters in a line of a label."""


def plot(name: str, rows: Rows, folder: Path) -> None:
    """Write ``folder/NAME.svg``: curves for "curves", and bars for a benchmark in `BARS`."""
    import matplotlib  # an optional extra

    # Without salt and date, equal results give equal files.
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    figure = draw_curves(rows) if name == "curves" else draw_bars(name, rows)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def draw_curves(rows: Rows) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    several_devices = len(grouped(rows, "device")) > 1
    for row in rows:
        if "losses" in row:
            label = f"{row['device']}: " * several_devices + f"{row['model']}, {title(row['mode'])}"
            axes.plot(row["losses"], label=label, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return figure


def draw_bars(name: str, rows: Rows) -> Any:
    from matplotlib import pyplot

    devices = grouped(rows, "device")
    bars = [
        (textwrap.fill(label if len(devices) == 1 else f"{device}: {label}", LABEL_WIDTH), length, text)
        for (device,), group in sorted(devices.items())
        for label, length, text in BARS[name](group)
    ]
    labels, lengths, texts = ([bar[i] for bar in bars] for i in range(3))

    # The height of a bar in lines, with room for its label, and its center.
    spaces = [2 + label.count("\n") for label in labels]
    centers = [sum(spaces[:i]) + space / 2 for i, space in enumerate(spaces)]

    # Bars from the top down, with room at the right for their texts.
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.14 * sum(spaces)), layout="constrained")
    colors = ["tab:green" if name != "train" or "liger_models" in label else "tab:gray" for label in labels]
    drawn = axes.barh(centers, lengths, height=1.6, color=colors)
    axes.bar_label(drawn, texts, padding=3)
    axes.set_yticks(centers, labels)
    axes.set_ylim(sum(spaces), 0)
    axes.margins(x=0.55)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens/s" if name == "train" else "speed against the fastest peer")
    if name != "train":  # a line at the speed of the peer
        axes.axvline(1.0, color="black", linewidth=0.8)
    return figure
