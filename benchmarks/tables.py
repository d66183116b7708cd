"""Markdown tables, and the ratios in them."""

from collections.abc import Callable, Iterable
from typing import Any

from .rows import Row, Rows, of_transformers

TIMES = "\N{MULTIPLICATION SIGN}"

Bar = tuple[str, float, str]
"""A bar in a plot: its label, its length, and the text at its end."""


def markdown(head: str, lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table. ``head`` contains the names of the columns, separated by vertical bars."""
    # Escape vertical bars, because a bar would end the cell.
    columns = [column.strip() for column in head.split("|")]
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows)


def tokens(batch: str) -> str:
    return batch.replace("x", f" {TIMES} ")


def smallest(rows: Rows, value: Callable[[Row], Any]) -> Row:
    """The row with the smallest value. Rows without a value are ignored. If no row has a value, the result is {}."""
    return min((row for row in rows if value(row)), key=value, default={})


def step_ms(row: Row) -> Any:
    return row.get("step_ms")


def ratio(over: Any, under: Any) -> str:
    return f"{over / under:.3f}" if over and under else ""


def mfu(row: Row) -> str:
    return f"{row['mfu']:.3f}" if "mfu" in row else ""  # counted for dense models without images or adapters


def adapters(row: Row) -> set[str]:
    """The words of a mode that determine which parameters are trained. Only modes with equal words are compared."""
    return {"lora", "medusa", "nf4"} & {*row["mode"].split("+")}


def ratios(row: Row, rows: Rows) -> tuple[str, str]:
    """Speed and memory relative to the fastest mode of transformers that trains the same parameters."""
    best = smallest([peer for peer in rows if of_transformers(peer) and adapters(peer) == adapters(row)], step_ms)
    return ratio(best.get("step_ms"), row["step_ms"]), ratio(row["peak_gib"], best.get("peak_gib"))


def speed_bars(groups: dict[str, Rows], ms: Callable[[Row], Any], name_of: Callable[[str], str]) -> list[Bar]:
    """A bar for each group with measurements of this package and a peer: the speed relative to the fastest peer."""
    bars = []
    for label, group in groups.items():
        ours: Row = next((row for row in group if row["mode"] == "ours" and ms(row)), {})
        best = smallest(peers_of(group), ms)
        if ours and best:
            speed = ms(best) / ms(ours)
            bars.append((label, speed, f"{speed:.2f} {TIMES} {name_of(best['mode'])}"))
    return bars


def peers_of(rows: Rows) -> Rows:
    """The rows of other implementations, without skeletons, which are bounds instead of implementations."""
    return [row for row in rows if not row["mode"].startswith(("ours", "skeleton"))]
