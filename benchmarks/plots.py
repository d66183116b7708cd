"""The plots of the pages, as SVG."""

import textwrap
from pathlib import Path
from typing import Any

from . import families, train
from .ops import benchmark as ops
from .rows import Rows, grouped
from .tables import TIMES
from .training.modes import title

BARS = {"train": train.bars, "families": families.bars, "ops": ops.bars}
LABEL_WIDTH = 50
"""Maximum number of characters in a line of a label."""
STYLE = {"svg.fonttype": "none", "font.size": 8}
"""Settings of matplotlib for all plots."""
LINE = 0.14
"""Height of a line of a label, in inches."""


def plot(name: str, rows: Rows, folder: Path) -> None:
    """Write ``folder/NAME.svg``, which shows curves for "curves", and bars for a benchmark in `BARS`."""
    import matplotlib  # an optional extra

    matplotlib.use("svg")
    from matplotlib import pyplot

    # With a fixed salt and without a date, equal results give equal files.
    with pyplot.rc_context(STYLE | {"svg.hashsalt": name}):
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
    """Draw bars from the top down, with separate axes for each device.

    A bar shows tokens/s or, on a logarithmic axis, a speed relative to a peer.
    """
    from matplotlib import pyplot

    drawn = {device: BARS[name](group) for (device,), group in grouped(rows, "device").items()}
    devices = sorted((device for device, bars in drawn.items() if bars), key=lambda device: -len(drawn[device]))

    # The height of a bar in lines, with room for its label.
    labels = {device: [textwrap.fill(label, LABEL_WIDTH) for label, _, _ in drawn[device]] for device in devices}
    spaces = {device: [1.5 + label.count("\n") for label in labels[device]] for device in devices}
    heights = [0.6 + LINE * sum(spaces[device]) for device in devices]
    figure, columns = pyplot.subplots(
        len(devices), figsize=(8, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for device, axes in zip(devices, columns[:, 0], strict=True):
        _, lengths, texts = zip(*drawn[device], strict=True)
        ends = [sum(spaces[device][: index + 1]) for index in range(len(lengths))]
        centers = [end - space / 2 for end, space in zip(ends, spaces[device], strict=True)]
        colors = ["tab:green" if name != "train" or "liger_models" in label else "tab:gray" for label in labels[device]]
        if name == "train":
            axes.barh(centers, lengths, height=1.1, color=colors)
            axes.set_xlim(0, 1.8 * max(lengths))  # room at the right for the texts
            axes.locator_params(axis="x", nbins=5)
            axes.set_xlabel("tokens/s")
        else:  # a bar starts at the peer's speed, and extends to the left if it is slower
            axes.barh(centers, [length - 1 for length in lengths], left=1, height=1.1, color=colors)
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_xlim(min(1.0, *lengths) * 0.9, max(1.0, *lengths) * 6)
            axes.xaxis.set_major_formatter(f"{{x:g}} {TIMES}")
            axes.set_xlabel("speed relative to the fastest peer, logarithmic")
        for center, length, text in zip(centers, lengths, texts, strict=True):
            end = length if name == "train" else max(length, 1.0)
            axes.annotate(text, (end, center), (3, 0), textcoords="offset points", va="center")
        axes.set_title(device)
        axes.set_yticks(centers, labels[device])
        axes.set_ylim(ends[-1], 0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
