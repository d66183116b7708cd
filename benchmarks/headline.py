"""The numbers at the top of the README: commands of a user, LoRA, full fine-tuning, and medians over families."""

import statistics
from collections.abc import Sequence

from . import families, paths
from .rows import Row, Rows, grouped, of_transformers
from .tables import TIMES, markdown, smallest, step_ms, tokens

MODEL = "llama-3-8b"
STEPS = {
    "LoRA (rank 16, all linear layers)": ("4x2048", "hf+liger+lora", "ours+lora"),
    "full fine-tuning": ("1x8192", "hf+liger", "ours+adamw"),
}
"""Maps the name of a step to three values: the batch, the peer's mode, and our mode."""

PATHS = {
    "full+train": "`liger-models train`, full fine-tuning, {tokens} tokens, compared with TRL",
    "lora+train": "`liger-models train`, LoRA, {tokens} tokens, compared with TRL and PEFT",
    "dpo+train": "`liger-models train`, DPO, LoRA, {rows} pairs of {length}-token rows, compared with TRL and PEFT",
    "full+trl+door": "TRL's SFTTrainer, full fine-tuning, {tokens} tokens",
    "lora+trl+door": "TRL's SFTTrainer with PEFT's LoRA, {tokens} tokens",
    "grpo+door": "TRL's GRPOTrainer with PEFT's LoRA, {tokens} tokens",
    "generate+ours": "`generate`, {rows} rows, time per token",
}
"""Maps our mode of a path to the path's name in the table."""


def table(rows: Rows) -> str:
    """One line for each of `STEPS` and each measured path of `PATHS`, and one for the medians over families.

    Raises:
        ValueError: no run has both modes of a step, or no family has both numbers.
    """
    lines = []
    for name, (batch, *modes) in STEPS.items():
        peer, ours = newest_run(rows, batch, modes)
        shown = (f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB" for row in (peer, ours))
        speed, memory = peer["step_ms"] / ours["step_ms"], ours["peak_gib"] / peer["peak_gib"]
        lines.append((f"Llama-3-8B, {name}, {tokens(batch)} tokens", *shown, times(speed), times(memory)))

    # The paths of a user.
    typed = [row for row in rows if row["benchmark"] == "paths" and "error" not in row]
    for mode, name in PATHS.items():
        for row in (row for row in typed if row["mode"] == mode and paths.best_peer(row, typed)):
            peer = paths.best_peer(row, typed)
            shown = (f"{_rate(one)}, {one['peak_gib']:.1f} GiB" for one in (peer, row))
            speed, memory = paths.rate(row) / paths.rate(peer), row["peak_gib"] / peer["peak_gib"]
            count, length = row["batch"].split("x")
            title = name.format(tokens=tokens(row["batch"]), rows=count, length=length)
            lines.append((f"{row['model'].title()}, {title}", *shown, times(speed), times(memory)))

    # The medians over all families with both numbers.
    pairs = [family_ratios(group) for group in families.by_family(of_families(rows)).values()]
    measured = [pair for pair in pairs if pair is not None]
    if not measured:
        raise ValueError(
            "report: the headline needs a family with rows of transformers and ours, got none. Measure it."
        )
    medians = [statistics.median(values) for values in zip(*measured, strict=True)]
    lines.append((f"median of {len(measured)} models, a few layers of each", "", "", *map(times, medians)))
    (device,) = grouped(rows, "device")
    return markdown(f"one {device[0]}|transformers + Liger Kernel|liger_models|speed|memory", lines)


def newest_run(rows: Rows, batch: str, modes: Sequence[str]) -> Rows:
    """The rows of these modes in `MODEL`'s newest run that has all of them. A ratio needs rows of a single run."""
    of_step = [row for row in rows if (row.get("model"), row.get("batch")) == (MODEL, batch) and "error" not in row]
    runs = [{row["mode"]: row for row in run} for run in grouped(of_step, "run").values()]
    complete = [run for run in runs if run.keys() >= {*modes}]
    if not complete:
        raise ValueError(
            f"report: the headline needs a run of {MODEL} {batch} with {' and '.join(modes)}, got none. Measure both."
        )
    newest = max(complete, key=lambda run: max(row["date"] for row in run.values()))
    return [newest[mode] for mode in modes]


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


def _rate(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else f"{row['step_ms']:.2f} ms"


def times(ratio: float) -> str:
    return f"**{ratio:.2f} {TIMES}**"
