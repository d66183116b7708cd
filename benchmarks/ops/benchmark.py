"""Every op against its peers: errors, times, memory, and fractions of the device's limits."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import several
from benchmarks.processes import Plan, measure_all
from benchmarks.rows import Row, Rows, grouped
from benchmarks.tables import Bar, markdown, peers_of, ratio, smallest, speed_bars

from . import adamw, attention, head, linear_attention, losses, mlp, moe, norm, rope
from .measure import fraction
from .op import Op

HELP = "each op against its peers: errors, times, memory, fraction of the limits"
FILES = losses, norm, rope, attention, linear_attention, mlp, head, moe, adamw
OPS: dict[str, Op] = {op.name: op for file in FILES for op in file.OPS}
"""Maps names to ops. The ops are measured in this order."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=several("|".join(OPS)), default=",".join(OPS), help="comma-separated")
    peers = dict.fromkeys(peer for op in OPS.values() for peer in ("compile", *op.peers))
    parser.add_argument(
        "--peers", type=several("|".join(peers)), help="comma-separated; default: all that are installed"
    )


def plan_ops(names: Sequence[str], peers: Sequence[str] | None, file: Path) -> list[Plan]:
    """Plans for the ceilings, and for every op with each of ``peers`` (default: all peers) that is installed."""
    installed = {name: OPS[name].available() for name in names}
    pairs = [(name, peer) for name in names for peer in peers or installed[name] if peer in installed[name]]
    return [
        Plan({"benchmark": "ops", "op": op, "mode": peer}, ("benchmarks.ops", op, peer), file)
        for op, peer in [("ceilings", "torch"), *pairs]
    ]


def with_fractions() -> Callable[[Row], Row]:
    """A function that adds to each row the fractions of the ceilings (the device's limits) that its op reaches.

    The first row of a run contains the ceilings.
    """
    ceiling: Row = {}

    def complete(row: Row) -> Row:
        if row["op"] == "ceilings":
            ceiling.update(row)
        elif "ms" in row and "copy_gbs" in ceiling:
            row["fraction"] = fraction(row, ceiling)
        return row

    return complete


def run(options: argparse.Namespace) -> Rows:
    plans = plan_ops(options.ops, options.peers, options.out / "ops.jsonl")
    if len(plans) == 1:
        ops, peers = ",".join(options.ops), ",".join(options.peers)
        raise argparse.ArgumentError(None, f"--peers: {ops} cannot be measured with {peers} here")
    return measure_all(plans, with_fractions())


def total(row: Row) -> Any:
    return row.get("ms", {}).get("total")


def of_limit(row: Row, name: str) -> str:
    share = row.get("fraction", {}).get(name)
    return "" if share is None else f"{share:.2f}"


def best_table(rows: Rows) -> str:
    """One line per op and shape: this package and the fastest peer, for forward and backward together."""
    lines = []
    for (op, shape), group in grouped([row for row in rows if row.get("shape")], "op", "shape").items():
        ours: Row = next((row for row in group if row["mode"] == "ours"), {})
        best = smallest(peers_of(group), total)
        limit = {"bytes": " of copy", "flops": " of matmul"}[ours["limit"]] if "fraction" in ours else ""
        lines.append((
            op, shape, total(ours) or ours.get("error", "not measured"), of_limit(ours, "total") + limit,
            best.get("mode", ""), total(best) or "", ratio(total(best), total(ours)),
            ours.get("peak_mib", ""), best.get("peak_mib", ""),
        ))  # fmt: skip
    return markdown("op|shape|ours ms|share of the limit|fastest peer|peer ms|speed ratio|ours MiB|peer MiB", lines)


def error_ratios(row: Row) -> str:
    """Ratios of errors to plain torch's errors.

    Errors of plain torch up to 1e-4 are rounding noise, and have no ratio.
    """
    return ", ".join(f"{n} {mine / torch:.2f}" for n, (mine, torch) in row.get("errors", {}).items() if torch > 1e-4)


def table(rows: Rows) -> str:
    """One line per op, shape and peer."""
    lines = []
    for (op, shape), group in grouped([row for row in rows if "op" in row], "op", "shape").items():
        best = smallest(peers_of(group), total)
        for row in group:
            names = (op, shape, row["mode"])
            if op == "ceilings" and "copy_gbs" in row:
                text = f"copy {row['copy_gbs']:,.0f} GB/s, matmul {row['matmul_tflops']:,.0f} TFLOP/s"
                lines.append((*names, text, *[""] * 7))
            elif "error" in row:
                lines.append((*names, row["error"], *[""] * 7))
            else:
                passes = [name for name in ("forward", "backward", "total") if name in row["ms"]]
                times = [row["ms"].get(name, "") for name in ("forward", "backward", "total")]
                # An optimizer has many results, so only the first result is shown.
                errors = error_ratios(row if op != "adamw" else {"errors": dict([*row["errors"].items()][:1])})
                lines.append((
                    *names, *times, " / ".join(of_limit(row, name) for name in passes),
                    ratio(total(best), total(row)), row.get("peak_mib", ""), row.get("above_gradients_mib", ""), errors,
                ))  # fmt: skip
    return markdown(
        "op|shape|peer|forward ms|backward ms|total ms|share of the limit|speed ratio|peak MiB|MiB above gradients"
        "|error relative to torch's",
        lines,
    )


def bars(rows: Rows) -> list[Bar]:
    peers = [row for row in rows if row["mode"] != "loop"]  # "loop" appears only in the tables
    groups = {f"{op} {shape}": group for (op, shape), group in grouped(peers, "op", "shape").items()}
    return speed_bars(groups, total, str)
