"""Run a benchmark (all but ``report``), or put all results into the pages (``report``)."""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from . import measure, ops, report, train

ERRORS_AT_ONCE = 3
REASON = re.compile(r"(?P<rank>\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b")
"""Last line of a traceback; other lines may stand behind it."""
PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "quack-kernels",
    "torchao", "peft", "bitsandbytes",
)  # fmt: skip


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the code measured: from $COMMIT where the tree travels without its repository, else from git.

    "-dirty" says that this code was changed; results and pages are, too, by every run, and don't count.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    git = ["git", "-C", str(report.ROOT)]
    try:
        found = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    code = ["benchmarks", "liger_models", "tests/data", ":!benchmarks/results"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code]).returncode
    return found.stdout.strip() + ("-dirty" if changed else "")


@functools.cache
def device() -> str:
    """The GPU's name, by a process that ends: this one takes none of its memory."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Plan:
    """What a process measures: the beginning of its rows, its command, the file that the rows go to."""

    row: dict
    command: tuple[str, ...]
    file: Path


class Measurement:
    """One mode in a process of its own, which is started at once and touches the GPU when it is told to.

    Its caches of compiled kernels are its own and empty, so that ``first_step_s`` is that of a first use.
    """

    def __init__(self, plan: Plan) -> None:
        date = datetime.date.today().isoformat()
        self.file = plan.file
        self.row = plan.row | {"date": date, "commit": commit(), "versions": versions(), "device": device()}
        self.folder = tempfile.TemporaryDirectory()
        caches = {name: f"{self.folder.name}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *plan.command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | caches,
        )  # fmt: skip

    def finish(self) -> list[dict]:
        """Let it run; each line of JSON that it prints is a result."""
        out, err = self.process.communicate("go\n")
        self.folder.cleanup()
        rows = [self.row | json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if self.process.returncode:
            lines, status = err.strip().splitlines(), self.process.returncode
            reasons = [reason for line in lines if (reason := REASON.match(line))]
            # The first rank that fails says why; others follow it, and torchrun has the last word.
            said = [reason.string for reason in reasons if reason["rank"]][:1] or [each.string for each in reasons]
            if not said and status > 0:  # below 0 it was killed
                said = lines
            rows.append(self.row | {"error": (said or [f"exit status {status}"])[-1]})
        print(self.row.get("model") or self.row["op"], self.row["mode"], file=sys.stderr, flush=True)
        return rows


def measure_all(planned: list[Plan], complete: Callable[[dict], dict] = lambda row: row) -> list[dict]:
    """The timed ones one after the other, each started while the one before it runs; then the errors, some at once.

    Every row goes through ``complete`` and into its file as soon as it is there.
    """

    def finish(measurement: Measurement) -> list[dict]:
        rows = [complete(row) for row in measurement.finish()]
        with measurement.file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        return rows

    timed = [plan for plan in planned if plan.row["mode"] != "error"]
    rows, waiting = [], [Measurement(plan) for plan in timed[:1]]
    for following in [*timed[1:], None]:
        if following is not None:
            waiting.append(Measurement(following))
        if waiting:
            rows += finish(waiting.pop(0))
    errors = [plan for plan in planned if plan.row["mode"] == "error"]
    with ThreadPoolExecutor(ERRORS_AT_ONCE) as pool:
        return rows + [row for found in pool.map(lambda plan: finish(Measurement(plan)), errors) for row in found]


def plan_steps(benchmark: str, models: list[str], modes: list[str], batch: str, steps: int, file: Path) -> list[Plan]:
    return [
        Plan(
            {"benchmark": benchmark, "model": model, "batch": batch, "mode": mode},
            ("benchmarks.train", benchmark, mode, model, batch, str(steps)),
            file,
        )
        for model in models
        for mode in modes
    ]


def on_gpus(plan: Plan, gpus: int) -> Plan:
    """The plan by as many processes, each with a GPU."""
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m")
    return Plan(plan.row | {"gpus": gpus}, start + plan.command, plan.file)


@contextmanager
def common_start(kind: str, model: str, batch: str) -> Iterator[None]:
    """A checkpoint in $START that a process of this kind makes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.train", kind, "ours+adamw", model, batch, "600"]
        subprocess.run(command, input="go\n", text=True, check=True, env=os.environ | {"SAVE": folder})
        os.environ["START"] = folder
        try:
            yield
        finally:
            del os.environ["START"]


def plan_ops(names: list[str], peers: list[str] | None, file: Path) -> list[Plan]:
    """The ceilings, then every op with each of its peers that is installed (and named, if some are)."""
    pairs = [(name, peer) for name in names for peer in ops.OPS[name].available() if peers is None or peer in peers]
    return [
        Plan({"benchmark": "ops", "op": op, "mode": peer}, ("benchmarks.ops", op, peer), file)
        for op, peer in [("ceilings", "torch"), *pairs]
    ]


def with_fractions() -> Callable[[dict], dict]:
    """Completes the rows of a run, whose ceilings come first."""
    ceiling: dict = {}

    def complete(row: dict) -> dict:
        if row["op"] == "ceilings":
            ceiling.update(row)
        elif "ms" in row and "copy_gbs" in ceiling:
            row["fraction"] = measure.fraction(row, ceiling)
        return row

    return complete


def matching(pattern: str, what: str = "") -> Callable[[str], str]:
    """The type of an argument: what the regular expression matches as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must be {what or pattern}, got {text!r}")
        return text

    return parse


def several(pattern: str) -> Callable[[str], list[str]]:
    """The type of a comma-separated argument."""
    return lambda text: [matching(pattern)(part) for part in text.split(",")]


def count(text: str) -> int:
    return int(matching("0*[1-9][0-9]*", "a number above 0")(text))


def main(arguments: list[str] | None = None) -> None:
    modes = several(train.MODE)
    batch = matching("[1-9][0-9]*x[1-9][0-9]*", "rows x tokens per row, as 8x2048")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="a full fine-tuning step: tokens/s, peak memory, losses")
    one.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    one.add_argument(
        "--modes", type=modes, default="hf,hf+liger,ours", help=f"comma-separated, of {', '.join(train.MODES)}"
    )
    every = commands.add_parser("families", help="a few layers of each family: speed, memory, error against fp32")
    every.add_argument(
        "--families", type=several("|".join(train.FAMILIES)), default=",".join(train.FAMILIES),
        help="comma-separated",
    )  # fmt: skip
    every.add_argument(
        "--modes", type=several(f"{train.MODE}|error"), default="hf,hf+liger,ours,error",
        help='comma-separated, as of train, and "error"',
    )  # fmt: skip
    for command in (one, every):
        command.add_argument("--batch", type=batch, default="1x8192", help="rows x tokens per row")
        command.add_argument("--steps", type=count, default=10, help="timed steps, after 5 whose losses are kept")
    where = commands.add_parser("profile", help="where a training step's time goes, by class of kernel")
    where.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    where.add_argument("--modes", type=modes, default="hf+liger,ours", help="comma-separated, as of train")
    where.add_argument("--batch", type=batch, default="1x8192", help="rows x tokens per row")
    where.add_argument("--steps", type=count, default=8, help="timed steps, of which two are repeated and profiled")
    most = commands.add_parser("longest", help="sequences of growing length, until one has no room")
    most.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    most.add_argument(
        "--modes", type=modes, default="hf+liger+ac,ours+adamw+inbackward+full+offload", help="as of train"
    )
    lengths = "65536,98304,131072,163840,196608,262144,327680,393216"
    most.add_argument("--lengths", type=several("[1-9][0-9]*"), default=lengths, help="tokens")
    most.add_argument("--gpus", type=count, default=1, help="on several as fsdp; with +cp they share a sequence")
    many = commands.add_parser("fsdp", help="training on all GPUs of this machine, with weights in fp32")
    many.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    many.add_argument("--modes", type=modes, default="hf+liger,hf+liger+ac,ours,ours+selective", help="as of train")
    many.add_argument("--batch", type=batch, default="1x8192", help="rows x tokens per row, of each GPU")
    many.add_argument("--steps", type=count, default=10)
    many.add_argument("--gpus", type=count, default=torch.cuda.device_count())
    whole = commands.add_parser("load", help="a checkpoint onto all GPUs of this machine: seconds, host memory")
    whole.add_argument("--model", default="llama-3-8b", choices=[*train.MODELS, *train.FAMILIES])
    whole.add_argument("--modes", type=several("hf|ours"), default="hf,ours", help="of these")
    whole.add_argument("--gpus", type=count, default=torch.cuda.device_count())
    long = commands.add_parser("curves", help="the loss of every step, from the same weights and data")
    long.add_argument("--model", default="llama-3.2-1b", choices=[*train.MODELS, *train.FAMILIES])
    long.add_argument(
        "--modes", type=modes, default="hf,hf+compile,hf+liger,ours,ours+fp8+blocks",
        help="comma-separated, as of train",
    )  # fmt: skip
    long.add_argument("--batch", type=batch, default="8x2048", help="rows x tokens per row")
    long.add_argument("--steps", type=count, default=200)
    each = commands.add_parser("ops", help="each op against its peers: errors, times, memory, fraction of the limits")
    each.add_argument("--ops", type=several("|".join(ops.OPS)), default=",".join(ops.OPS), help="comma-separated")
    peers = dict.fromkeys(peer for op in ops.OPS.values() for peer in ("compile", *op.peers))
    each.add_argument(
        "--peers", type=several("|".join(peers)), help="comma-separated; without it all that are installed"
    )
    for command in (one, every, where, most, many, whole, long, each):
        command.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON lines")
    tables = commands.add_parser("report", help="tables and plots of all results into the pages")
    tables.add_argument("--results", type=Path, default=report.RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(arguments)

    if options.command == "report":
        if not any(options.results.glob("*.jsonl")):
            parser.error(f"--results must be a folder with JSON lines, {options.results} has none")
        try:
            report.write(options.results)
        except ValueError as error:
            parser.error(str(error))
        return
    for mode in getattr(options, "modes", ()):
        extras = train.count_blocks(mode.split("+"), 0)
        if "moments" in extras and not {"adamw", "inbackward"} & extras.keys():
            parser.error(f"--modes: moments are LigerAdamW's, add +adamw or +inbackward, got {mode!r}")
        if "cp" in extras and (options.command != "longest" or options.gpus == 1):
            parser.error(f"--modes: cp is for longest with --gpus of 2 and more, got {mode!r} for {options.command}")
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error(f"{options.command} needs a GPU, and torch {torch.__version__} finds none")
    if getattr(options, "gpus", 1) > gpus:
        parser.error(f"--gpus must be at most {gpus}, which this machine has, got {options.gpus}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"--out must be a folder to write to, got {options.out}: {error}")
    if options.command == "ops":
        planned = plan_ops(options.ops, options.peers, options.out / "ops.jsonl")
        if len(planned) == 1:
            parser.error(f"--peers: {','.join(options.ops)} cannot be measured with {','.join(options.peers)} here")
        print(report.every_op_table(measure_all(planned, with_fractions())))
    elif options.command in ("fsdp", "load"):
        name, loads = options.command, options.command == "load"
        size, steps = ("", 0) if loads else (options.batch, options.steps)
        file = options.out / ("-".join(filter(None, (name, options.model, size))) + ".jsonl")
        rows = []
        with common_start("save", options.model, "") if loads else nullcontext():
            for plan in plan_steps(name, [options.model], options.modes, size, steps, file):
                rows += measure_all([on_gpus(plan, options.gpus)])
        print(report.PARTS[name][1](rows))
    elif options.command == "longest":
        # What PyTorch's message advises when there is no room: memory that is free in pieces then counts as free.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        rows = []
        for mode in options.modes:
            for length in options.lengths:
                file = options.out / f"longest-{options.model}.jsonl"
                (plan,) = plan_steps("longest", [options.model], [mode], f"1x{length}", 1, file)
                rows += measure_all([on_gpus(plan, options.gpus) if options.gpus > 1 else plan])
                if "error" in rows[-1]:
                    break
        print(report.longest_table(rows))
    elif options.command in ("train", "curves", "profile"):
        name = options.command
        file = options.out / f"{name}-{options.model}-{options.batch}.jsonl"
        plans = plan_steps(name, [options.model], options.modes, options.batch, options.steps, file)
        with common_start("start", options.model, options.batch) if name == "curves" else nullcontext():
            rows = measure_all(plans)
        print(report.PARTS[name][1](rows))
    else:
        file = options.out / f"families-{options.batch}.jsonl"
        planned = plan_steps("families", options.families, options.modes, options.batch, options.steps, file)
        print(report.family_table(measure_all(planned)))


if __name__ == "__main__":
    main()
