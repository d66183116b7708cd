"""The benchmarks' logic, without a GPU: comparison with fp64, refusal, processes and their rows, tables and pages."""

import itertools
import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import measure, ops, report, train
from liger_models.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rms_norm import rms_norm
from liger_models.kernels.rope import rope_qkv, rope_qkv_reference

HEADS = {"H": 4, "G": 2, "D": 16}
HEAD_OPS = (
    ops.heads_op("rope", rope_qkv, rope_qkv_reference, **HEADS),
    ops.heads_op("qk_norm_rope", qk_norm_rope, qk_norm_rope_reference, norm=1, **HEADS),
    ops.heads_op("qk_norm_rope_whole", qk_norm_rope, qk_norm_rope_reference, norm=1, whole=1, **HEADS),
)
TINY = {
    **{op.name: op.shapes[0] | {"B": 2, "T": 5} for op in HEAD_OPS},
    "rms_norm": {"N": 37, "C": 64},
    "add_rms_norm": {"N": 37, "C": 64},
    "swiglu": {"N": 33, "F": 48},
    "geglu": {"N": 33, "F": 48},
    "gated_mlp": {"N": 32, "C": 64, "F": 96},
    "cross_entropy": {"N": 16, "V": 300},
    "linear_cross_entropy": {"N": 48, "C": 32, "V": 320},
    "moe_mlp": {"N": 32, "C": 32, "F": 48, "X": 4, "K": 2},
    **{name: {"P": 2, "T": 16, "C": 32, "V": 300} for name in ("dpo", "orpo", "cpo", "simpo")},
    **{name: {"B": 4, "T": 16, "C": 32, "V": 300} for name in ("kto", "grpo")},
    **{name: {"N": 48, "C": 32, "V": 300} for name in ("jsd", "forward_kl", "tvd", "cosine")},
    "medusa": {"N": 48, "C": 32, "V": 300, "K": 5},
    "adamw": {"L": 1, "C": 48, "F": 64, "V": 100},
}


def tiny(name: str) -> measure.Op:
    op = next((op for op in HEAD_OPS if op.name == name), ops.OPS[name])
    return replace(op, shapes=(TINY[name],), check={})


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(measure, "REPEATS", 2)
    monkeypatch.setattr(measure, "WARM_UP", 1)


PAIRS = [
    (name, peer) for name in ops.OPS for peer in ops.OPS[name].available() if peer.startswith(("torch", "ours", "skel"))
]


@pytest.mark.parametrize(("name", "peer"), [pair for pair in PAIRS if pair[1] != "torch_linear_cross_entropy"])
def test_what_runs_on_the_cpu_is_right_and_measured(name, peer):
    op = tiny(name)
    row = measure.measure(op, peer, op.shapes[0], "cpu")
    assert "error" not in row
    assert row["work"].keys() == row["ms"].keys() == row["ms_range"].keys()
    assert all(time > 0 for time in row["ms"].values())
    assert all(work > 0 for work in row["work"].values())
    json.dumps(row)


def test_a_pass_counts_as_much_work_as_its_formula_says():
    assert tiny("rms_norm").ideal({"N": 10, "C": 8}) == {"forward": 320, "backward": 480, "total": 800}
    assert tiny("cross_entropy").ideal({"N": 10, "V": 8}) == {"total": 320}
    numel = sum(t.numel() for name, t in ops.make_parameters(**TINY["adamw"]).items() if name.startswith("p"))
    assert tiny("adamw").ideal(TINY["adamw"]) == {"total": 14 * numel}


def test_skeleton_takes_the_rows_in_chunks():
    op = tiny("linear_cross_entropy")
    peer = ops.skeleton(20)
    inputs = op.make(**op.shapes[0])
    found = measure.errors(op, peer, inputs)
    assert {"d x", "d weight"} < found.keys()
    assert measure.verdict(found) is None


@pytest.mark.parametrize("factor", [1.05, math.nan])
def test_wrong_outputs_are_refused(factor):
    op = tiny("rms_norm")
    op = replace(op, peers=op.peers | {"other": measure.Peer(lambda x, weight: rms_norm(x, weight) * factor)})
    row = measure.measure(op, "other", op.shapes[0], "cpu")
    assert row["error"].startswith("wrong: out 0 errs by")
    assert "ms" not in row


def test_wrong_gradients_are_refused():
    op = tiny("rms_norm")
    forgets = measure.Peer(lambda x, weight: rms_norm(x.detach(), weight) + 0 * x)
    row = measure.measure(replace(op, peers={"other": forgets}), "other", op.shapes[0], "cpu")
    assert row["error"].startswith("wrong: d x errs by")


def test_a_peer_that_writes_into_its_inputs_gets_fresh_ones():
    op = tiny("swiglu")
    seen = []

    def destroys(gate, up):
        seen.append(gate.detach().clone())
        out = ops.silu_mul(gate.clone(), up.clone())
        gate.data.zero_()
        return out

    op = replace(op, peers={"other": measure.Peer(destroys, ops.gate_and_up)})
    assert "error" not in measure.measure(op, "other", op.shapes[0], "cpu")
    assert len(seen) > 3
    assert all(torch.equal(gate, seen[-1]) for gate in seen)


def test_a_peer_that_is_not_installed_is_left_out():
    op = tiny("rms_norm")
    for needs in ("no_such_package", "no_such.package", "torch:no_such_name"):
        assert (
            op.available() == replace(op, peers=op.peers | {"other": measure.Peer(rms_norm, needs=needs)}).available()
        )
    assert {"torch", "compile", "ours"} <= {*op.available()}


def test_ceilings_and_fractions():
    found = measure.ceilings("cpu", copied=1000, width=8)
    assert found.keys() == {"copy_gbs", "matmul_tflops"}
    ceiling = {"copy_gbs": 4000.0, "matmul_tflops": 700.0}
    assert measure.fraction({"limit": "bytes", "work": {"total": 8e9}, "ms": {"total": 4.0}}, ceiling) == {"total": 0.5}
    assert measure.fraction({"limit": "flops", "work": {"total": 7e12}, "ms": {"total": 20.0}}, ceiling) == {
        "total": 0.5
    }


def test_processes_run_in_turn_and_their_rows_are_kept(tmp_path, monkeypatch):
    code = "import json, sys\nsys.stdin.readline()\nprint('noise')\n"
    (tmp_path / "ceiling_process.py").write_text(code + "print(json.dumps({'copy_gbs': 1e3, 'matmul_tflops': 1.0}))\n")
    result = {"shape": "N=1", "limit": "bytes", "work": {"total": 1e9}, "ms": {"total": 2.0}}
    failure = (
        "import atexit\natexit.register(lambda: print('more noise', file=sys.stderr))\nraise MemoryError('none left')\n"
    )
    (tmp_path / "op_process.py").write_text(code + f"print(json.dumps({result}))\n" + failure)
    (tmp_path / "killed_process.py").write_text(code + "import os\nos.kill(os.getpid(), 9)\n")
    of_ranks = "[rank1]: MemoryError: on one\n[rank0]: ConnectionError: to the other\nChildFailedError: \n"
    (tmp_path / "ranks_process.py").write_text(code + f"sys.stderr.write({of_ranks!r})\nraise SystemExit(1)\n")
    (tmp_path / "ended_process.py").write_text(code + "raise SystemExit('out of memory')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(command, "device", lambda: "X")
    file = tmp_path / "ops.jsonl"
    planned = [
        command.Plan({"benchmark": "ops", "op": op, "mode": "torch"}, (module,), file)
        for op, module in (
            ("ceilings", "ceiling_process"),
            ("rms_norm", "op_process"),
            ("swiglu", "killed_process"),
            ("geglu", "ended_process"),
            ("rope", "ranks_process"),
        )
    ]
    rows = command.measure_all(planned, command.with_fractions())
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert rows[1]["fraction"] == {"total": 0.5}
    reasons = ["MemoryError: none left", "exit status -9", "out of memory", "[rank1]: MemoryError: on one"]
    assert [row["error"] for row in rows[2:]] == reasons
    assert all(row["commit"] == "abc" and row["versions"]["torch"] and row["date"] for row in rows)
    # Without it, a mode that fails on one GPU would take the place of its row of another.
    assert {row["device"] for row in rows} == {"X"}


def test_ops_are_planned_behind_the_ceilings(tmp_path):
    planned = command.plan_ops(["rms_norm", "swiglu"], ["ours", "torch"], tmp_path / "ops.jsonl")
    assert [(plan.row["op"], plan.row["mode"]) for plan in planned] == [
        ("ceilings", "torch"), ("rms_norm", "torch"), ("rms_norm", "ours"), ("swiglu", "torch"), ("swiglu", "ours"),
    ]  # fmt: skip


def test_arguments_that_say_nothing_measurable_are_refused(tmp_path, monkeypatch, capsys):
    """At once, and nothing is written: the latest row of a mode counts, be it an error."""
    for arguments, message in {
        "train --modes ours+selektive": "--modes: must be hf.*, got 'ours.selektive'",
        "train --batch 8by2048": "--batch: must be rows x tokens per row, as 8x2048, got '8by2048'",
        "train --steps 0": "--steps: must be a number above 0, got '0'",
        "families --families gemma,nope": "--families: must be llama.*, got 'nope'",
        "ops --peers nobody": "--peers: must be compile.*, got 'nobody'",
        "train --modes hf,ours+moments8": "--modes: moments are LigerAdamW's.*, got 'ours.moments8'",
        "longest --modes ours+cp": "--modes: cp is for longest with --gpus of 2.*, got 'ours.cp' for longest",
        "fsdp --gpus 2 --modes ours+cp": "--modes: cp is for longest .*, got 'ours.cp' for fsdp",
        "longest --lengths 128,abc": "--lengths: must be .*, got 'abc'",
        "fsdp --gpus 2 --modes ours,ours+offload10+adamw": "fsdp needs a GPU, and torch .* finds none",
        "ops --ops rms_norm": "ops needs a GPU",
        f"report --results {tmp_path}": "--results must be a folder with JSON lines",
    }.items():
        folder = [] if "report" in arguments else ["--out", str(tmp_path)]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit, match="2"):
            command.main([*arguments.split(), *folder])
        assert re.search(message, capsys.readouterr().err)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        command.main(["load", "--gpus", "3", "--out", str(tmp_path)])
    assert "--gpus must be at most 2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["load", "--out", __file__])
    assert f"--out must be a folder to write to, got {__file__}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["ops", "--ops", "swiglu", "--peers", "cce", "--out", str(tmp_path)])
    assert "--peers: swiglu cannot be measured with cce here" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    assert all(re.fullmatch(train.MODE, mode) for mode in train.MODES)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_measure(page, capsys, monkeypatch):
    """They are understood; without arguments nothing would be measured."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = re.findall(r'make bench(?: ARGS="([^"]*)")?|python -m benchmarks (.+)', page.read_text(encoding="utf-8"))
    for arguments in {"".join(pair) for pair in found} - {"report"}:
        with pytest.raises(SystemExit):
            command.main(arguments.split())
        assert "needs a GPU" in capsys.readouterr().err, arguments


def test_commit_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert command.commit() == "unknown"


def test_a_run_that_writes_results_and_pages_keeps_its_commit(tmp_path, monkeypatch):
    """Tables are of one run by its commit, which was another as soon as a row was in a file of the repository."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    files = [tmp_path / name for name in ("README.md", "benchmarks/results/a.jsonl", "liger_models/a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    before = command.commit()
    for file in files[:2]:
        file.write_text("b\n")
    assert command.commit() == before
    files[2].write_text("b\n")
    assert command.commit() == before + "-dirty"


# The report


def op_row(mode: str, total: float, **rest: object) -> dict:
    return {
        "benchmark": "ops", "op": "rms_norm", "shape": "N=1", "mode": mode, "device": "X", "date": "2026-01-01",
        "commit": "abc", "versions": {"torch": "2.11.0"}, "limit": "bytes", "ms": {"total": total},
        "fraction": {"total": 0.5}, "peak_mib": 10.0, "above_gradients_mib": 1.0, "errors": {"out 0": [2e-3, 1e-3]},
    } | rest  # fmt: skip


def train_row(mode: str, rate: float, **rest: object) -> dict:
    return {
        "benchmark": "train", "model": "llama-3-8b", "batch": "1x8192", "mode": mode, "device": "X", "commit": "abc",
        "date": "2026-01-01", "versions": {"torch": "2.11.0"}, "tokens_per_s": rate, "step_ms": 1e6 / rate,
        "peak_gib": 50.0, "mfu": 0.5, "losses": [2.0, 1.0],
    } | rest  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_latest_row_counts(tmp_path):
    rows = [
        train_row("hf", 1.0),
        train_row("hf", 2.0),
        train_row("ours", 3.0, date="2025-12-31"),
        train_row("ours", 4.0),
    ]
    failed = {name: rows[0][name] for name in ("benchmark", "model", "batch", "date", "commit", "versions")}
    rows += [failed | {"mode": "hf+liger", "error": "none"}, train_row("hf+liger", 5.0)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(train_row("hf", 9.0, date="2025-12-31")) + "\n")
    assert {row["mode"]: row["tokens_per_s"] for row in report.read(tmp_path)} == {
        "hf": 2.0,
        "ours": 4.0,
        "hf+liger": 5.0,
    }


def test_an_op_that_failed_before_its_first_shape_is_measured_again(tmp_path):
    failed = {name: value for name, value in op_row("quack", 1.0).items() if name not in ("shape", "ms")}
    rows = [failed | {"error": "ModuleNotFoundError"}, op_row("quack", 2.0), op_row("quack", 3.0, shape="N=2")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, failed | {"error": "late"}]))
    assert [row.get("error") for row in report.read(tmp_path)] == [None, None, "late"]


def test_train_table_compares_with_the_fastest_peer():
    rows = [
        train_row("hf", 5000.0),
        train_row("hf+liger", 8000.0, peak_gib=40.0),
        train_row("ours", 10000.0, peak_gib=30.0),
    ]
    failed = {name: rows[0][name] for name in ("model", "batch", "date", "commit")}
    rows.append(failed | {"mode": "hf+ac", "error": "out | of memory"})
    by_mode = {line[3]: line for line in cells(report.train_table(rows))}
    assert by_mode["liger_models"][-3:-1] == ["1.250", "0.750"]
    assert by_mode["transformers + Liger Kernel"][-3:-1] == ["1.000", "1.000"]
    assert by_mode["transformers, activation checkpointing"][4] == "out / of memory"
    assert cells(report.short_table(rows))[-1] == ["", "liger_models", "10,000", "1.250", "30.0", "0.750"]


@pytest.mark.parametrize("benchmark", ["train", "fsdp"])
def test_a_run_in_which_transformers_only_fail_is_not_the_last(tmp_path, benchmark):
    rows = [train_row("hf", 1.0), train_row("ours", 2.0)]
    failed = {"date": "2026-01-02", "commit": "def", "error": "out of memory"}
    rows.append({name: value for name, value in rows[0].items() if name != "tokens_per_s"} | failed)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"benchmark": benchmark}) + "\n" for row in rows))
    assert [row["commit"] for row in report.read(tmp_path)] == ["abc", "abc"]


def test_curves_are_of_one_run(tmp_path):
    rows = [train_row("hf", 1.0), train_row("ours", 1.0), train_row("hf", 1.0, commit="def", date="2026-01-02")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"benchmark": "curves"}) + "\n" for row in rows))
    assert [(row["mode"], row["commit"]) for row in report.read(tmp_path)] == [("hf", "def")]


@pytest.mark.parametrize("line", ['{"benchmark": "train", "mo', "", "3", '{"benchmark": "train", "mode": "hf"}'])
def test_a_damaged_line_is_named(tmp_path, capsys, line):
    (tmp_path / "a.jsonl").write_text(json.dumps(train_row("hf", 1.0)) + f"\n{line}\n")
    with pytest.raises(SystemExit, match="2"):
        command.main(["report", "--results", str(tmp_path)])
    assert re.search(
        "a.jsonl, line 2: must be a JSON object with benchmark.* it lacks .*commit", capsys.readouterr().err
    )


def test_tables_of_two_devices_name_them():
    rows = [train_row("hf", 1.0), train_row("hf", 2.0, device="Y")]
    assert [line for line in report.part("train-short", rows).splitlines() if line.endswith(":")] == ["X:", "Y:"]
    assert report.part("train-short", rows[:1]).startswith("| tokens/step")


def test_families_are_compared_on_one_batch():
    rows = [
        train_row(mode, 1.0, model="gemma", batch=batch, step_ms=ms, first_step_s=3.0)
        for mode, batch, ms in (("hf", "1x8", 4.0), ("ours", "1x8", 2.0), ("ours", "1x4", 1.0))
    ]
    found = {line[0]: line[4] for line in cells(report.family_table(rows))}
    assert found == {"gemma, 1 \N{MULTIPLICATION SIGN} 8": "2.000", "gemma, 1 \N{MULTIPLICATION SIGN} 4": ""}
    assert [label for label, _, _ in report.bars("families", rows)] == ["gemma, 1 \N{MULTIPLICATION SIGN} 8"]
    assert [line[0] for line in cells(report.family_table(rows[:2]))] == ["gemma"]


@pytest.mark.parametrize("benchmark", ["train", "fsdp"])
def test_steps_are_those_of_the_last_run_with_transformers(tmp_path, benchmark):
    later = {"commit": "def", "date": "2026-01-02"}
    rows = [
        train_row("ours", 1.0, batch="8x8"),
        train_row("hf+liger", 50.0),
        train_row("ours+fp8+blocks", 130.0),
        train_row("hf+liger", 100.0, **later),
        train_row("ours", 120.0, **later),
        train_row("ours", 300.0, commit="ghi", date="2026-01-03"),
    ]
    lines = [json.dumps(row | {"benchmark": benchmark}) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    shown = report.read(tmp_path)
    assert {row["tokens_per_s"] for row in shown} == {1.0, 100.0, 120.0}
    table = {"train": report.train_table, "fsdp": report.fsdp_table}[benchmark](shown)
    assert [line[-3 if benchmark == "train" else -2] for line in cells(table)] == ["1.000", "1.200", ""]


def test_all_of_a_page_is_of_one_run(tmp_path):
    later = {"commit": "def", "date": "2026-01-02"}
    rows = [
        train_row("hf+liger", 100.0),
        train_row("ours", 110.0),
        train_row("ours+fp8+blocks", 130.0),
        train_row("hf+liger", 50.0, **later),
        train_row("ours", 60.0, **later),
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = report.read(tmp_path)
    shown = {(line[2], line[3]): line[8] for line in cells(report.train_table(rows))}
    assert shown == {("def", "transformers + Liger Kernel"): "1.000", ("def", "liger_models"): "1.200"}
    short = {line[1]: line[3] for line in cells(report.short_table(rows))}
    assert short == {"transformers + Liger Kernel": "1.000", "liger_models": "1.200"}
    assert [length for _, length, _ in report.bars("train", rows)] == [50.0, 60.0]


def test_a_run_of_the_same_day_that_is_measured_again_is_the_last(tmp_path):
    rows = [train_row("ours", rate, commit=commit) for rate, commit in ((1.0, "abc"), (2.0, "def"), (3.0, "abc"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["tokens_per_s"] for row in report.read(tmp_path)] == [3.0]


@pytest.mark.parametrize("mode", ["ours+graph", "ours+compile+graph"])
def test_graphs_are_of_what_the_mode_names(monkeypatch, mode):
    recorded, compiled = [], torch.nn.Identity()
    monkeypatch.setattr(train, "build_ours", lambda config, extras: torch.nn.Linear(1, 1))
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: compiled)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda loss, sample: recorded.append(loss) or print)
    train.make_step(mode, {}, lr=0.1).forward(torch.ones(1), torch.ones(1))
    assert (recorded[0].model is compiled) == ("compile" in mode)


def test_modes_have_names():
    assert report.title("hf+liger+ac") == "transformers + Liger Kernel, activation checkpointing"
    assert report.title("ours+offload20+new") == "liger_models, offload of 20 blocks, new"
    assert report.title("ours+fp8+blocks") == "liger_models, float8, blocks compiled"


def test_op_tables_compare_with_the_fastest_peer():
    rows = [op_row("torch", 4.0), op_row("liger", 3.0), op_row("skeleton-2048", 1.0), op_row("ours", 2.0)]
    rows.append({name: rows[0][name] for name in ("op", "shape")} | {"mode": "cce", "error": "wrong: d x"})
    assert cells(report.op_table(rows)) == [
        ["rms_norm", "N=1", "2.0", "0.50 of copy", "liger", "3.0", "1.500", "10.0", "10.0"]
    ]
    by_mode = {line[2]: line for line in cells(report.every_op_table(rows))}
    assert by_mode["torch"][7] == "0.750"
    assert by_mode["ours"][-1] == "out 0 2.00"
    assert by_mode["cce"][3] == "wrong: d x"


def test_family_table_says_what_failed_and_what_was_not_measured():
    steps = {"hf": 2.0, "ours": 1.0}
    rows = [train_row(mode, 1.0, step_ms=ms, first_step_s=3.0, model="gemma") for mode, ms in steps.items()]
    failed = {"model": "gemma", "batch": "1x8192", "error": "none"}
    rows.append(failed | {"mode": "hf+liger"})
    (line,) = cells(report.family_table(rows))
    assert line[:5] == ["gemma", "2.0", "failed", "1.0", "2.000"]
    assert line[-3] == "3.0 / failed / 3.0"
    warm = train_row("ours+warm", 1.0, first_step_s=2.5, model="gemma")
    assert cells(report.family_table([*rows, warm]))[0][-3] == "3.0 / failed / 3.0 (2.5)"
    assert line[-2:] == ["", ""]
    (line,) = cells(report.family_table([*rows[1:2], failed | {"mode": "error"}]))
    assert line[:4] == ["gemma", "", "", "1.0"]
    assert line[-2:] == ["failed / failed"] * 2


def test_a_part_that_is_unknown_or_not_measured():
    page = "a\n<!-- begin: ops -->\nold\n<!-- end -->\nb\n"
    assert report.fill(page, []) == "a\n<!-- begin: ops -->\n\nNot measured yet.\n\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="asks for 'opps'"):
        report.fill(page.replace("ops", "opps"), [])


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_pages_show_what_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    assert report.fill(text, report.read(report.RESULTS)) == text, "run: python -m benchmarks report"


def test_every_plot_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for name, rows in (
        ("train", [train_row("hf", 1.0), train_row("ours", 2.0)]),
        ("families", [train_row("hf", 1.0, model="gemma"), train_row("ours", 2.0, model="gemma")]),
        ("ops", [op_row("torch", 4.0), op_row("ours", 2.0)]),
    ):
        report.plot(name, rows, tmp_path)
        assert (tmp_path / f"{name}.svg").stat().st_size < 100_000


def test_results_are_json_lines():
    for file in Path(report.RESULTS).glob("*.jsonl"):
        for line in file.read_text().splitlines():
            assert {"benchmark", "mode", "date", "commit", "versions"} <= json.loads(line).keys()


def test_curves():
    losses = {"hf": [3.0, 2.0], "hf+liger": [3.0, 2.01], "ours": [3.0, 1.98]}
    rows = [
        {"benchmark": "curves", "model": "m", "batch": "1x8", "mode": m, "losses": found} for m, found in losses.items()
    ]
    rows.append({"benchmark": "curves", "model": "m", "batch": "1x8", "mode": "ours+fp8", "error": "no GPU"})
    lines = report.curve_table(rows).splitlines()
    assert lines[2].endswith("| 3.0000 | 2.5000 | 0.0000 | 0.0000 |")
    assert lines[4].endswith("| 3.0000 | 2.4900 | 0.0100 | 0.0200 |")
    assert "no GPU" in lines[5]


def test_kernels_have_classes():
    names = {
        "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": "attention",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizer>": "optimizer",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)": "attention",
        "_adamw_kernel": "optimizer",
        "liger_cross_entropy_kernel": "loss",
        "_qk_norm_rope_backward_kernel": "rope",
        "_swiglu_forward_kernel": "gated activation",
        "_rms_norm_backward_kernel": "norm",
        "Memcpy DtoH (Device -> Pinned)": "copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    }
    assert {name: train.kernel_class(name) for name in names} == names


def test_profile_table():
    row = {"model": "m", "batch": "1x8", "mode": "ours", "step_ms": 10.0, "class_ms": {"matmul": 6.0, "attention": 3.0}}
    failed = {"model": "m", "batch": "1x8", "mode": "hf", "error": "out of memory"}
    lines = cells(report.profile_table([row, failed]))
    assert lines[0] == ["m", "1 \N{MULTIPLICATION SIGN} 8", "liger_models", "10.0", "6.0", "3.0", "0.900"]
    assert lines[1][3:] == ["out of memory", "", "", ""]


def test_fsdp_table_compares_on_as_many_gpus():
    rows = [
        train_row(mode, rate, gpus=gpus) for gpus in (1, 2) for mode, rate in (("hf", 100.0), ("ours", 100.0 * gpus))
    ]
    del rows[-1]["mfu"]  # as with images
    lines = cells(report.fsdp_table(rows))
    assert [line[-2] for line in lines] == ["1.000", "1.000", "1.000", "2.000"]
    assert [line[-3] for line in lines] == ["0.500", "0.500", "0.500", ""]


def test_longest_table():
    row = {"model": "m", "mode": "ours", "peak_gib": 100.0}
    rows = [row | {"batch": "1x8192"}, row | {"batch": "1x16384"}, row | {"batch": "1x32768", "error": "out of memory"}]
    rows.append(row | {"batch": "1x65536", "mode": "ours+cp", "gpus": 4})
    rows.append(row | {"batch": "1x8", "mode": "hf", "error": "ImportError: none"})
    assert cells(report.longest_table(rows)) == [
        ["m", "1", "liger_models", "16,384", "100.0", "32,768"],
        ["m", "4", "liger_models, context parallel", "65,536", "100.0", ""],
        ["m", "1", "transformers", "", "", "8: ImportError: none"],
    ]


def test_load_table():
    row = {"model": "m", "gpus": 4, "checkpoint_gib": 1.5, "load_s": 2.0, "host_gib": 0.5, "mapped_gib": 1.0}
    rows = [row | {"mode": "ours", "peak_gib": 3.0}, {"model": "m", "gpus": 4, "mode": "hf", "error": "no"}]
    lines = cells(report.load_table(rows))
    assert lines[0] == ["m", "4", "liger_models", "1.5", "2.0", "0.5", "1.0", "3.0"]
    assert lines[1][:4] == ["m", "4", "transformers", "no"]


def test_adapters_are_compared_with_adapters():
    run = {"commit": "abc", "date": "2026-01-01"}
    row = run | {"model": "m", "batch": "1x8", "tokens_per_s": 1.0, "peak_gib": 1.0, "losses": [1.0]}
    speeds = {"hf": 1.0, "hf+liger+lora": 3.0, "ours+lora": 2.0, "ours": 0.5}
    lines = cells(report.train_table([row | {"mode": mode, "step_ms": ms} for mode, ms in speeds.items()]))
    assert [line[8] for line in lines] == ["1.000", "1.000", "2.000", "1.500"]


def test_the_chain_can_be_learned():
    data = train.chain(1000, 2, 64, 200, seed=1)
    assert data.shape == (200, 2, 64)
    pairs = {(a, b) for row in data.flatten(0, 1).tolist() for a, b in itertools.pairwise(row)}
    assert len({a for a, _ in pairs}) > 500
    assert len(pairs) <= 512 * 4
    assert torch.equal(data, train.chain(1000, 2, 64, 200, seed=1))
