"""Tables and plots of the results, written between the markers of the pages: ``python -m benchmarks report``.

A page holds ``<!-- begin: NAME -->`` and ``<!-- end -->``; what stands between them comes from the JSON lines alone, so
that a measurement is corrected by measuring again. Of each mode the latest row counts, of training steps the last run.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMES = "\N{MULTIPLICATION SIGN}"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
IMAGES = ROOT / "docs" / "images"
MARKED = re.compile(r"(<!-- begin: ([a-z-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)

SHORT_MODES = """
hf hf+liger hf+liger+ac ours ours+adamw ours+adamw+offload10+selective12
ours+adamw+inbackward+moments16+offload12+selective5 ours+adamw+fp8+blocks
"""
SHORT = ("llama-3-8b", tuple(SHORT_MODES.split()))
"""Model and modes of the short table."""

TITLES = {
    "hf": "transformers", "ours": "liger_models", "liger": " + Liger Kernel", "ac": ", activation checkpointing",
    "selective": ', policy "selective"', "full": ', policy "full"', "compile": ", torch.compile",
    "graph": ", CUDA graphs",
    "adamw": ", LigerAdamW", "inbackward": ", step in the backward", "offload": ", offload",
    "moments": ", host memory for the moments", "warm": ", warmed up",
    "fp8": ", float8", "fp8rowwise": ", float8 by rows", "blocks": ", blocks compiled",
    "cp": ", context parallel", "lora": ", LoRA", "nf4": " on 4 bits",
}  # fmt: skip

LABEL_WIDTH = 45
"""Of a plot, in characters."""

RUNS = ("train", "fsdp", "curves")
"""The benchmarks that compare rows of one run: training steps, and curves, whose start each run makes anew."""

NEEDED = {"benchmark", "mode", "date", "commit", "versions"}
"""What every row has."""

Row = dict[str, Any]
Rows = list[Row]


def parse(file: Path, number: int, line: str) -> Row:
    try:
        row: Row = json.loads(line)
        missing = NEEDED - row.keys()
    except (ValueError, AttributeError):
        missing = NEEDED
    if missing:
        raise ValueError(
            f"report: {file}, line {number}: must be a JSON object with {distinct(NEEDED)}, "
            f"it lacks {distinct(missing)}: {line[:60]!r}. Delete the line, and measure again what it was."
        )
    return row


def key_of(row: Row) -> tuple[str, ...]:
    """What tells a measurement from others."""
    names = ("benchmark", "model", "op", "gpus", "batch", "shape", "mode", "device")
    return (*(row.get(name, "") for name in names), row["commit"] if row["benchmark"] in RUNS else "")


def read(folder: Path) -> Rows:
    """The latest row of each measurement, and of training steps, which are compared with each other, the last run's.

    Runs differ by their commits; the last is that of the last row of transformers that is no error. An old row that
    failed early has no device: it ran where the row before it did.
    """
    latest: dict[tuple[str, ...], Row] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = [
            parse(file, number, line) for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        ]
        device = next((row["device"] for row in rows if "device" in row), "unknown device")
        for row in rows:
            device = row.setdefault("device", device)
            key = key_of(row)
            if row.get("shape"):  # it came further than one that failed before
                latest.pop(key_of(row | {"shape": ""}), None)
            if key not in latest or row["date"] >= latest[key]["date"]:
                if row["benchmark"] in RUNS:  # behind those of other runs of the day, if it is measured again
                    latest.pop(key, None)
                latest[key] = row
    shown = [row for row in latest.values() if row["benchmark"] not in RUNS]
    of_runs = [row for row in latest.values() if row["benchmark"] in RUNS]
    for group in grouped(of_runs, "benchmark", "model", "gpus", "batch", "device").values():
        peers = [row for row in group if of_transformers(row) and "error" not in row] or group
        last = sorted(peers, key=lambda row: row["date"])[-1]["commit"]
        shown += [row for row in group if row["commit"] == last]
    return shown


def table(head: str, lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table; ``head`` names the columns, separated by bars."""
    columns = [column.strip() for column in head.split("|")]
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows)


def grouped(rows: Rows, *names: str) -> dict[tuple[str, ...], Rows]:
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in names), []).append(row)
    return groups


def distinct(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def title(mode: str) -> str:
    """A mode of the training benchmark in words; a number behind an extra is one of blocks."""
    named = ""
    for part in mode.split("+"):
        word = part if part in TITLES else part.rstrip("0123456789")
        named += TITLES.get(word, f", {word}") + (f" of {part[len(word) :]} blocks" if part != word else "")
    return named


def tokens(batch: str) -> str:
    return batch.replace("x", f" {TIMES} ")


def fastest(rows: Rows, key: str) -> Row:
    """Of the rows that have the key, the one with the least."""
    return min((row for row in rows if key in row), key=lambda row: row[key], default={})


def ratio(over: Any, under: Any) -> str:
    return f"{over / under:.3f}" if over and under else ""


def mfu(row: Row) -> str:
    return f"{row['mfu']:.3f}" if "mfu" in row else ""  # not counted with images or adapters


def trained(row: Row) -> set[str]:
    """What tells a mode that trains adapters from others."""
    return {"lora", "nf4"} & {*row["mode"].split("+")}


def of_transformers(row: Row) -> bool:
    return bool(row["mode"].startswith("hf"))


def ratios(row: Row, rows: Rows) -> tuple[str, str]:
    """Speed and memory against the fastest mode of transformers that trains as much."""
    best = fastest([other for other in rows if of_transformers(other) and trained(other) == trained(row)], "step_ms")
    return ratio(best.get("step_ms"), row["step_ms"]), ratio(row["peak_gib"], best.get("peak_gib"))


def train_table(rows: Rows) -> str:
    lines = []
    for (model, batch), group in sorted(grouped(rows, "model", "batch").items()):
        for row in sorted(group, key=lambda row: row["mode"]):
            names = (model, tokens(batch), row["commit"], title(row["mode"]))
            if "error" in row:
                lines.append((*names, row["error"], "", "", "", "", "", ""))
                continue
            losses = " → ".join(f"{row['losses'][at]:.3f}" for at in (0, -1))
            lines.append((
                *names, f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.1f}", f"{row['peak_gib']:.1f}",
                mfu(row), *ratios(row, group), losses,
            ))  # fmt: skip
    return table(
        "model|tokens/step|run||tokens/s|ms/step|peak GiB|MFU|speed ratio|memory ratio|loss, steps 1 → 5", lines
    )


def short_table(rows: Rows) -> str:
    model, modes = SHORT
    lines = []
    for (batch,), group in sorted(grouped([row for row in rows if row["model"] == model], "batch").items()):
        by_mode = {row["mode"]: row for row in group if "error" not in row}
        for index, row in enumerate(by_mode[mode] for mode in modes if mode in by_mode):
            where = "" if index else tokens(batch)
            rate, speed, memory = f"{row['tokens_per_s']:,.0f}", *ratios(row, group)
            lines.append((where, title(row["mode"]), rate, speed, f"{row['peak_gib']:.1f}", memory))
    return table("tokens/step||tokens/s|speed ratio|peak GiB|memory ratio", lines)


def families(rows: Rows) -> dict[str, Rows]:
    """By name; with the batch where there are several."""
    groups = grouped(rows, "model", "batch")
    several = len({batch for _, batch in groups}) > 1
    return {f"{model}, {tokens(batch)}" if several else model: group for (model, batch), group in groups.items()}


def family_table(rows: Rows) -> str:
    """One row per family; ratios to the faster and to the smaller of the two peers. What was not measured is empty."""
    lines = []
    for family, group in families(rows).items():
        by_mode = {row["mode"]: row for row in group}
        peers = [row for row in group if of_transformers(row) and "error" not in row]
        ours, error, warm = by_mode.get("ours", {}), by_mode.get("error"), by_mode.get("ours+warm")
        warmed = f" ({warm.get('first_step_s', 'failed')})" if warm else ""

        def show(key: str, by_mode: dict[str, Row] = by_mode) -> list[str]:
            modes = [by_mode.get(mode) for mode in ("hf", "hf+liger", "ours")]
            return ["" if row is None else str(row.get(key, "failed")) for row in modes]

        def pair(what: str, error: Row | None = error) -> str:
            found = [error.get(f"{who}_{what}") for who in ("hf", "ours")] if error else []
            return " / ".join("failed" if value is None else f"{value:.2e}" for value in found)

        lines.append((
            family, *show("step_ms"), ratio(fastest(peers, "step_ms").get("step_ms"), ours.get("step_ms")),
            *show("peak_gib"), ratio(ours.get("peak_gib"), fastest(peers, "peak_gib").get("peak_gib")),
            " / ".join(show("first_step_s")) + warmed, pair("logits"), pair("gradients"),
        ))  # fmt: skip
    return table(
        "family|HF ms|HF + Liger ms|ours ms|speed ratio|HF GiB|HF + Liger GiB|ours GiB|memory ratio"
        "|first step s, HF / HF + Liger / ours (after warm_up)|logits error, HF / ours|gradients error, HF / ours",
        lines,
    )


def profile_table(rows: Rows) -> str:
    """One row per mode: milliseconds of each class of kernel, and the share of matrix products and attention."""
    classes = list(dict.fromkeys(name for row in rows for name in row.get("class_ms", {})))
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], *[""] * (len(classes) + 1)))
            continue
        spent = row["class_ms"]
        share = (spent["matmul"] + spent["attention"]) / row["step_ms"]
        found = [f"{spent.get(name, 0.0):.1f}" for name in classes]
        lines.append((*names, f"{row['step_ms']:.1f}", *found, f"{share:.3f}"))
    return table("|".join(["model|tokens/step||ms/step", *classes, "matmul and attention"]), lines)


LOADED = ("checkpoint_gib", "load_s", "host_gib", "mapped_gib", "peak_gib")


def fsdp_table(rows: Rows) -> str:
    """One row per mode, of each GPU."""
    lines = []
    for (model, gpus, batch), group in sorted(grouped(rows, "model", "gpus", "batch").items()):
        for row in sorted(group, key=lambda row: row["mode"]):
            names = (model, gpus, tokens(batch), title(row["mode"]))
            if "error" in row:
                lines.append((*names, row["error"], "", "", "", ""))
                continue
            lines.append((
                *names, f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}", mfu(row), *ratios(row, group),
            ))  # fmt: skip
    return table("model|GPUs|tokens/step||tokens/s|peak GiB|MFU|speed ratio|memory ratio", lines)


def load_table(rows: Rows) -> str:
    """One row per mode; host memory is that of one process, GPU memory the most while it loads."""
    lines = [
        (row["model"], row["gpus"], title(row["mode"]), *(row.get(key, row.get("error", "")) for key in LOADED))
        for row in rows
    ]
    return table("model|GPUs||checkpoint GiB|seconds|host GiB|mapped files GiB|GPU GiB", lines)


def longest_table(rows: Rows) -> str:
    """One row per mode: the longest sequence that was trained on, and the next, with the reason unless it is memory."""
    lines = []
    for (model, mode, gpus), group in grouped([{"gpus": 1} | row for row in rows], "model", "mode", "gpus").items():
        length = lambda row: int(row["batch"].rpartition("x")[2])
        fit = max((row for row in group if "error" not in row), key=length, default={})
        failed = min((row for row in group if "error" in row), key=length, default={})
        shown = [f"{length(row):,}" if row else "" for row in (fit, failed)]
        error = failed.get("error", "")
        if error and "OutOfMemory" not in error and "out of memory" not in error:
            shown[1] += f": {error}"
        lines.append((model, gpus, title(mode), shown[0], fit.get("peak_gib", ""), shown[1]))
    return table("model|GPUs||longest sequence|peak GiB|too long", lines)


def curve_table(rows: Rows) -> str:
    """One row per mode. Noise is what two ways of rounding make of one run: the distance to transformers' losses."""
    lines = []
    for (model, batch), group in sorted(grouped(rows, "model", "batch").items()):
        by_mode = {row["mode"]: row.get("losses") for row in group}
        base = by_mode.get("hf")
        for row in group:
            losses = row.get("losses")
            if not losses:
                lines.append((model, tokens(batch), title(row["mode"]), row["error"], "", "", ""))
                continue
            tail = losses[-20:]
            gaps = [abs(a - b) for a, b in zip(losses, base or [], strict=False)]
            lines.append((
                model, tokens(batch), title(row["mode"]), f"{losses[0]:.4f}", f"{sum(tail) / len(tail):.4f}",
                f"{sum(gaps) / len(gaps):.4f}" if gaps else "", f"{max(gaps):.4f}" if gaps else "",
            ))  # fmt: skip
    return table(
        "model|tokens/step||first loss|mean of the last 20|mean distance to transformers|largest distance", lines
    )


def total(row: Row) -> float | None:
    return row.get("ms", {}).get("total")


def best_peer(rows: Rows) -> Row:
    """The fastest that is neither ours nor a bound."""
    peers = [row for row in rows if total(row) and not row["mode"].startswith(("ours", "skeleton"))]
    return min(peers, key=lambda row: row["ms"]["total"], default={})


def of_limit(row: Row, name: str) -> str:
    found = row.get("fraction", {}).get(name)
    return "" if found is None else f"{found:.2f}"


def op_table(rows: Rows) -> str:
    """One row per op and shape: ours and the fastest peer, forward and backward together."""
    lines = []
    for (op, shape), group in grouped([row for row in rows if row.get("shape")], "op", "shape").items():
        ours: Row = next((row for row in group if row["mode"] == "ours"), {})
        best = best_peer(group)
        limit = {"bytes": " of copy", "flops": " of matmul"}[ours["limit"]] if "fraction" in ours else ""
        lines.append((
            op, shape, total(ours) or ours.get("error", "not measured"), of_limit(ours, "total") + limit,
            best.get("mode", ""), total(best) or "", ratio(total(best), total(ours)),
            ours.get("peak_mib", ""), best.get("peak_mib", ""),
        ))  # fmt: skip
    return table("op|shape|ours ms|of its limit|fastest peer|its ms|speed ratio|ours MiB|its MiB", lines)


def error_ratios(row: Row) -> str:
    """Error over that of plain torch, where that is more than rounding noise of a scalar."""
    return ", ".join(f"{n} {mine / torch:.2f}" for n, (mine, torch) in row.get("errors", {}).items() if torch > 1e-4)


def every_op_table(rows: Rows) -> str:
    lines = []
    for (op, shape), group in grouped([row for row in rows if "op" in row], "op", "shape").items():
        best = best_peer(group)
        for row in group:
            names = (op, shape, row["mode"])
            if op == "ceilings" and "copy_gbs" in row:
                found = f"copy {row['copy_gbs']:,.0f} GB/s, matmul {row['matmul_tflops']:,.0f} TFLOP/s"
                lines.append((*names, found, *[""] * 7))
            elif "error" in row:
                lines.append((*names, row["error"], *[""] * 7))
            else:
                passes = [name for name in ("forward", "backward", "total") if name in row["ms"]]
                times = [row["ms"].get(name, "") for name in ("forward", "backward", "total")]
                # Of an optimizer's many results one stands for all.
                errors = error_ratios(row if op != "adamw" else {"errors": dict([*row["errors"].items()][:1])})
                lines.append((
                    *names, *times, " / ".join(of_limit(row, name) for name in passes),
                    ratio(total(best), total(row)), row.get("peak_mib", ""), row.get("above_gradients_mib", ""), errors,
                ))  # fmt: skip
    return table(
        "op|shape|peer|forward ms|backward ms|total ms|of its limit|speed ratio|peak MiB|above gradients MiB"
        "|error over torch's",
        lines,
    )


def origin(rows: Rows) -> str:
    versions: dict[str, set[str]] = {}
    for row in rows:
        for package, version in row["versions"].items():
            versions.setdefault(package, set()).add(version)
    packages = ", ".join(f"{package} {distinct(found)}" for package, found in versions.items())
    return f"{packages}; commit {distinct(row['commit'] for row in rows)}; {distinct(row['date'] for row in rows)}."


PARTS: dict[str, tuple[str, Callable[[Rows], str], bool]] = {
    "train-short": ("train", short_table, False),
    "train": ("train", train_table, True),
    "families": ("families", family_table, True),
    "profile": ("profile", profile_table, False),
    "fsdp": ("fsdp", fsdp_table, False),
    "load": ("load", load_table, False),
    "longest": ("longest", longest_table, False),
    "curves": ("curves", curve_table, True),
    "ops": ("ops", op_table, True),
    "ops-all": ("ops", every_op_table, False),
}
"""By the name in the marker: benchmark, table, and whether origin and plot stand with it."""


def part(name: str, rows: Rows) -> str:
    """What stands between the markers of this name."""
    if name not in PARTS:
        raise ValueError(f"report: the parts are {', '.join(PARTS)}, a page asks for {name!r}.")
    benchmark, make, whole = PARTS[name]
    pieces = []
    devices = grouped([row for row in rows if row["benchmark"] == benchmark], "device")
    for (device,), group in sorted(devices.items()):
        if whole:
            pieces.append(f"{device}; {origin(group)}")
        elif len(devices) > 1:
            pieces.append(f"{device}:")
        pieces.append(make(group))
    if whole and pieces:
        pieces.append(f"![{name}](images/{name}.svg)")
    return "\n\n".join(pieces or ["Not measured yet."])


def fill(text: str, rows: Rows) -> str:
    """The page with all its marked parts made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{part(found[2], rows)}\n\n", text)


def bars(name: str, rows: Rows) -> list[tuple[str, float, str]]:
    """What a plot shows: label, length, text."""
    found = []
    if name == "train":
        for (model, batch), group in sorted(grouped(rows, "model", "batch").items()):
            for row in sorted((row for row in group if "error" not in row), key=lambda row: row["mode"]):
                text = f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.0f} GiB"
                found.append((f"{model} {tokens(batch)}, {title(row['mode'])}", row["tokens_per_s"], text))
        return found
    if name == "families":
        groups, named = families([row | {"ms": {"total": row.get("step_ms")}} for row in rows]), title
    else:
        groups = {f"{op} {shape}": group for (op, shape), group in grouped(rows, "op", "shape").items()}
        named = str
    for label, group in groups.items():
        times = [row for row in group if total(row)]
        ours: Row = next((row for row in times if row["mode"] == "ours"), {})
        best = best_peer(times)
        if ours and best:
            speed = best["ms"]["total"] / ours["ms"]["total"]
            found.append((label, speed, f"{speed:.2f} {TIMES} {named(best['mode'])}"))
    return found


def plot(name: str, rows: Rows, folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    if name == "curves":
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        several = len(grouped(rows, "device")) > 1
        for row in rows:
            if "losses" in row:
                label = f"{row['device']}: " * several + f"{row['model']}, {title(row['mode'])}"
                axes.plot(row["losses"], label=label, linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
        save(figure, name, folder)
        return
    devices = grouped(rows, "device")
    found = [
        (label if len(devices) == 1 else f"{device}: {label}", length, text)
        for (device,), group in sorted(devices.items())
        for label, length, text in bars(name, group)
    ]
    found = [(textwrap.fill(label, LABEL_WIDTH), length, text) for label, length, text in found]
    height = 0.6 + 0.13 * sum(2 + label.count("\n") for label, _, _ in found)
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    colours = ["tab:green" if name != "train" or "liger_models" in label else "tab:gray" for label, _, _ in found]
    drawn = axes.barh([label for label, _, _ in found], [length for _, length, _ in found], color=colours)
    axes.bar_label(drawn, [text for _, _, text in found], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.55)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens/s" if name == "train" else "speed against the fastest peer")
    if name != "train":
        axes.axvline(1.0, color="black", linewidth=0.8)
    save(figure, name, folder)


def save(figure: Any, name: str, folder: Path) -> None:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def write(results: Path = RESULTS) -> None:
    """All pages, and where matplotlib is installed all plots."""
    rows = read(results)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = fill(text, rows)
        if filled != text:
            page.write_text(filled, encoding="utf-8")
    for name, (benchmark, _, whole) in PARTS.items():
        group = [row for row in rows if row["benchmark"] == benchmark]
        if whole and group:
            try:
                plot(name, group, IMAGES)
            except ImportError:
                print("report: no matplotlib (extra bench), the plots are left as they are", file=sys.stderr)
                return
