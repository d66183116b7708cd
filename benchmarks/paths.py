"""Paths of a user, from files on disk: the training command, TRL's trainers, generation, and an evaluation.

The other benchmarks measure components. In this benchmark, a mode is a command or a few lines of a script, with the
defaults of the library. All modes of a path have the same checkpoint, data, rows and precision.
"""

import argparse
import functools
import operator
from collections.abc import Callable

from .options import add_batch, add_model, count, several
from .processes import Plan, common_start, measure_all, plan_modes
from .rows import Row, Rows, of_transformers
from .tables import markdown, ratio, tokens
from .training.job import Job
from .training.modes import Mode
from .user import files
from .user.command import measure_command
from .user.inference import measure_first, measure_generate, measure_lmeval
from .user.path import MODES, PATHS, title
from .user.start import measure_start
from .user.trainers import WARM_UP, measure_grpo, measure_trainer

HELP = "what a user types: the training command, TRL's trainers, generate, lm-evaluation-harness"
DEFAULT = "full,lora,generate"
VISION = ("qwen2.5-vl-3b", "qwen3-vl-8b")
"""The models of the path ``vision``. The first one is the default."""

save, save_vision = files.save, files.save_vision


def modes_of(text: str) -> list[str]:
    """An argument type: comma-separated modes, or names of paths, each of which stands for all modes of the path."""
    modes = several(MODES)(text)
    return [
        name for mode in modes for name in ([f"{mode}+{way}" for way in PATHS[mode].modes] if mode in PATHS else [mode])
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-1b")
    paths = ", ".join(f"{name} ({path.name})" for name, path in PATHS.items())
    parser.add_argument(
        "--modes", type=modes_of, default=modes_of(DEFAULT),
        help=f"comma-separated paths, or single modes such as full+train; default: {DEFAULT}; paths: {paths}",
    )  # fmt: skip
    sizes = ", ".join(f"{name} {path.batch}" for name, path in PATHS.items() if path.batch)
    add_batch(parser, None, f"rows x tokens of all paths; default: {sizes}; generate has prompts of 1/8 of the tokens")
    parser.add_argument(
        "--steps", type=count, help="training steps, of which the first are not timed, or new tokens; default: by path"
    )


def run(options: argparse.Namespace) -> Rows:
    paths = {Mode.parse(mode).library for mode in options.modes}
    trained = paths & {"full", "lora", "dpo", "vision"}
    if options.steps and trained and options.steps <= WARM_UP + 1:
        raise argparse.ArgumentError(None, f"--steps must be more than {WARM_UP + 1}, got {options.steps}")

    # Text paths and image paths start from different checkpoints.
    rows: Rows = []
    is_vision = options.model in VISION
    if is_vision and paths != {"vision"}:
        raise argparse.ArgumentError(None, f"--modes must be vision for --model {options.model}")
    for kind, model in (("save", options.model), ("save_vision", options.model if is_vision else VISION[0])):
        modes = [mode for mode in options.modes if mode.startswith("vision") == (kind == "save_vision")]
        plans = [plan(options, model, mode) for mode in modes]
        if plans:
            with common_start(f"paths:{kind}", model, options.batch or "", options.steps or 0):
                rows += measure_all(plans)
    return rows


def plan(options: argparse.Namespace, model: str, mode: str) -> Plan:
    path = PATHS[Mode.parse(mode).library]
    batch = path.batch and (options.batch or path.batch)  # a path without a batch has fixed sizes
    file = options.out / ("-".join(filter(None, ("paths", model, batch))) + ".jsonl")
    (planned,) = plan_modes("paths", [model], [mode], batch, options.steps or path.steps, file)
    return planned


MEASURES: dict[str, Callable[[Job], Row]] = {
    "generate": measure_generate,
    "first": measure_first,
    "lmeval": measure_lmeval,
    "start": measure_start,
}
"""Maps each path whose modes do not train to the function that measures these modes."""


def measure(job: Job) -> Row:
    path = job.mode.library
    if path in MEASURES:
        return MEASURES[path](job)
    if "train" in job.mode:
        return measure_command(job)
    return measure_grpo(job) if path == "grpo" else measure_trainer(job)


def rate(row: Row) -> float:
    """Images or tokens per second, or the inverse of the time of a token; 0 for an error."""
    trained = row.get("images_per_s") or row.get("tokens_per_s")
    return float(trained or (1e3 / row["step_ms"] if "step_ms" in row else 0))


def peers(row: Row, rows: Rows) -> Rows:
    """The rows of modes with transformers that have the path, model, batch and run of ``row``."""
    path = Mode.parse(row["mode"]).library
    return [
        peer for peer in rows
        if of_transformers(peer) and "error" not in peer and Mode.parse(peer["mode"]).library == path
        and all(peer.get(name) == row.get(name) for name in ("model", "batch", "run"))
    ]  # fmt: skip


def best_peer(row: Row, rows: Rows) -> Row:
    """The fastest of `peers`; {} if there is none."""
    return max(peers(row, rows), key=rate, default={})


def ratio_to_least(row: Row, rows: Rows, *keys: str) -> str:
    """The smallest time of `peers`, divided by the time of ``row``. The keys lead to the time in nested dicts."""

    def time_of(row: Row) -> float:
        return functools.reduce(operator.getitem, keys, row)  # type: ignore[arg-type, return-value]

    return ratio(min(map(time_of, peers(row, rows)), default=None), time_of(row))


Line = tuple[object, ...]


def training_lines(row: Row, rows: Rows) -> list[Line]:
    best = best_peer(row, rows)
    images = f"{row['images_per_s']:,.1f}" if "images_per_s" in row else ""
    ratios = ratio(rate(row), best and rate(best)), ratio(row["peak_gib"], best.get("peak_gib"))
    return [(f"{row['tokens_per_s']:,.0f}", images, row["peak_gib"], *ratios)]


def generate_lines(row: Row, rows: Rows) -> list[Line]:
    best = best_peer(row, rows)
    ratios = ratio(rate(row), best and rate(best)), ratio(row["peak_gib"], best.get("peak_gib"))
    return [(row["first_ms"], row["step_ms"], row["peak_gib"], *ratios)]


def first_lines(row: Row, rows: Rows) -> list[Line]:
    keys = ("forward_ms", "generate_ms")
    return [
        (
            tokens(prompt),
            *(times[key] for key in keys),
            *(ratio_to_least(row, rows, "prompts", prompt, key) for key in keys),
        )
        for prompt, times in row["prompts"].items()
    ]


def by_keys(*keys: str) -> Callable[[Row, Rows], list[Line]]:
    """A function that returns a row's line of a table: the times under ``keys``, in seconds, and their speed ratios."""

    def lines(row: Row, rows: Rows) -> list[Line]:
        return [(*(row[key] for key in keys), *(ratio_to_least(row, rows, key) for key in keys))]

    return lines


TABLES: dict[str, tuple[tuple[str, ...], str, Callable[[Row, Rows], list[Line]]]] = {
    "Training": (
        ("full", "lora", "dpo", "grpo", "vision"),
        "tokens/s|images/s|peak GiB|speed ratio|memory ratio",
        training_lines,
    ),
    "Generation": (
        ("generate",), "first token ms|ms/token|peak GiB|speed ratio|memory ratio", generate_lines,
    ),
    "Time to the first token, for a single forward and for `generate`": (
        ("first",), "prompts|forward ms|generate ms|speed ratio, forward|speed ratio, generate", first_lines,
    ),
    "Requests of lm-evaluation-harness": (
        ("lmeval",),
        "generate_until s|loglikelihood s|speed ratio, generate_until|speed ratio, loglikelihood",
        by_keys("generate_until_s", "loglikelihood_s"),
    ),
    "Time from the start of the process to the end of the first step": (
        ("start",),
        "empty caches s|full caches s|speed ratio, empty|speed ratio, full",
        by_keys("cold_s", "warm_s"),
    ),
}  # fmt: skip
"""Maps the title of a table to three values: its paths, its columns after the names, and a function that returns
cells.
"""


def table(rows: Rows) -> str:
    """A table for each kind of path. Ratios are to the fastest mode with transformers, Liger Kernel and TRL."""
    tables = []
    for name, (paths, columns, cells) in TABLES.items():
        of_kind = [row for row in rows if Mode.parse(row["mode"]).library in paths]
        lines: list[Line] = []
        for row in of_kind:
            names = (row["model"], tokens(row["batch"]), row["commit"], title(row["mode"]))
            if "error" in row:
                lines.append((*names, row["error"], *[""] * columns.count("|")))
            else:
                lines += [(*names, *line) for line in cells(row, rows)]
        if lines:
            tables.append(f"{name}:\n\n" + markdown(f"model|rows|run||{columns}", lines))
    return "\n\n".join(tables)
