"""The numbers at the top of the README: LoRA, full fine-tuning, and the median over families."""

import statistics

from . import families
from .rows import Row, Rows, grouped, of_transformers
from .tables import TIMES, markdown, smallest, step_ms, tokens

MODEL = "llama-3-8b"
STEPS = {
    "LoRA (rank 16, all linear layers)": ("4x2048", "hf+liger+lora", "ours+lora"),
    "full fine-tuning": ("1x8192", "hf+liger", "ours+adamw"),
}
"""Name of a step -> its batch, the peer's mode, and our mode."""


def table(rows: Rows) -> str:
    """One line for each of `STEPS`, and one for the medians over families."""
    steps = {
        (row["batch"], row.get("run"), row["mode"]): row
        for row in rows
        if row.get("model") == MODEL and "batch" in row and "error" not in row
    }

    # Our last run of each step, beside the peer of the same run.
    lines = []
    for name, (batch, *modes) in STEPS.items():
        # The last run that has our mode; its peer must be in the same run.
        runs = [run for at, run, mode in steps if (at, mode) == (batch, modes[1])]
        peer, ours = (steps.get((batch, runs[-1] if runs else "", mode)) for mode in modes)
        if peer and ours:
            shown = (f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB" for row in (peer, ours))
            speed, memory = peer["step_ms"] / ours["step_ms"], ours["peak_gib"] / peer["peak_gib"]
            lines.append((f"Llama-3-8B, {name}, {tokens(batch)} tokens", *shown, times(speed), times(memory)))

    # The medians over the families with both numbers.
    pairs = [family_ratios(group) for group in families.by_family(of_families(rows)).values()]
    if medians := [statistics.median(values) for values in zip(*filter(None, pairs), strict=True)]:
        count = sum(map(bool, pairs))
        lines.append((f"median of {count} models, a few layers of each", "", "", *map(times, medians)))
    (device,) = grouped(rows, "device")
    return markdown(f"one {device[0]}|transformers + Liger Kernel|liger_models|speed|memory", lines)


def of_families(rows: Rows) -> Rows:
    return [row for row in rows if row["benchmark"] == "families"]


def family_ratios(group: Rows) -> tuple[float, float] | None:
    """Speed and memory relative to transformers, with or without Liger Kernel; None if not measured."""
    ours: Row = next((row for row in group if row["mode"] == "ours" and step_ms(row)), {})
    peers = [row for row in group if of_transformers(row) and "error" not in row]
    if not (ours and peers):
        return None
    least = smallest(peers, lambda row: row.get("peak_gib"))["peak_gib"]
    return smallest(peers, step_ms)["step_ms"] / ours["step_ms"], ours["peak_gib"] / least


def times(ratio: float) -> str:
    return f"**{ratio:.2f} {TIMES}**"
