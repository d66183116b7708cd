"""The command line, and the processes that it starts."""

import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import grpo, processes, report, worker
from benchmarks.ops.benchmark import with_fractions
from benchmarks.training.modes import MODE, MODES, Mode


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
    before_ranks = "ModuleNotFoundError: no peer\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    (tmp_path / "import_process.py").write_text(code + f"sys.stderr.write({before_ranks!r})\nraise SystemExit(1)\n")
    (tmp_path / "ended_process.py").write_text(code + "raise SystemExit('out of memory')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(processes, "device", lambda: "X")
    file = tmp_path / "ops.jsonl"
    planned = [
        processes.Plan({"benchmark": "ops", "op": op, "mode": "torch"}, (module,), file)
        for op, module in (
            ("ceilings", "ceiling_process"),
            ("rms_norm", "op_process"),
            ("swiglu", "killed_process"),
            ("geglu", "ended_process"),
            ("rope", "ranks_process"),
            ("layer_norm", "import_process"),
        )
    ]
    rows = processes.measure_all(planned, with_fractions())
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert rows[1]["fraction"] == {"total": 0.5}
    reasons = ["MemoryError: none left", "exit status -9", "out of memory", "[rank1]: MemoryError: on one"]
    assert [row["error"] for row in rows[2:]] == [*reasons, "ModuleNotFoundError: no peer"]
    assert all(row["commit"] == "abc" and row["versions"]["torch"] and row["date"] for row in rows)
    # Rows of failures have a device, too: a failure on one GPU must not replace the row of another.
    assert {row["device"] for row in rows} == {"X"}


def test_ranks_wait_while_the_previous_plan_is_measured(tmp_path, monkeypatch):
    """Each rank takes one line of the standard input that they share."""
    rank = "import os, sys; sys.exit(os.read(0, 3) != b'go\\n')"
    code = f"""import json, pathlib, subprocess, sys
pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch()
ranks = [subprocess.Popen([sys.executable, "-c", {rank!r}]) for _ in range(2)]
assert not any(rank.wait() for rank in ranks)
print(json.dumps({{"started": sorted(path.name for path in pathlib.Path({str(tmp_path)!r}).glob("plan*"))}}))
"""
    (tmp_path / "ranks_process.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "device", lambda: "X")
    monkeypatch.setattr(processes, "on_gpus", lambda plan, gpus: replace(plan, row=plan.row | {"gpus": gpus}))
    finish = processes.Measurement.finish

    def finish_after_the_next_start(self):
        while not (tmp_path / "plan1").exists():
            time.sleep(0.01)
        return finish(self)

    monkeypatch.setattr(processes.Measurement, "finish", finish_after_the_next_start)
    planned = [
        processes.Plan({"op": "x", "mode": name}, ("ranks_process", name), tmp_path / "rows.jsonl")
        for name in ("plan0", "plan1")
    ]
    rows = processes.measure_on_gpus(planned, 2)
    assert [row.get("error", row.get("started")) for row in rows] == [["plan0", "plan1"]] * 2


def test_the_first_measurement_starts_before_the_checkpoint_is_saved(tmp_path, monkeypatch):
    """And measures afterwards, unless saving fails."""
    (tmp_path / "save_process.py").write_text(
        "import os, pathlib, sys, time\n"
        "assert sys.stdin.readline() == 'go\\n'\n"
        f"while not pathlib.Path({str(tmp_path)!r}, 'started').exists():\n    time.sleep(0.01)\n"
        "time.sleep(0.1)\n"
        "pathlib.Path(os.environ['SAVE'], 'saved').touch()\n"
        "sys.exit(os.environ['STATUS'] == '1')\n"
    )
    (tmp_path / "op_process.py").write_text(
        "import json, os, pathlib, sys\n"
        f"pathlib.Path({str(tmp_path)!r}, 'started').touch()\n"
        "if sys.stdin.readline():\n"
        "    print(json.dumps({'saved': os.listdir(os.environ['START'])}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "device", lambda: "X")
    monkeypatch.setattr(processes, "worker_command", lambda *_: ("save_process",))
    plan = processes.Plan({"op": "x", "mode": "ours"}, ("op_process",), tmp_path / "rows.jsonl")
    monkeypatch.setenv("STATUS", "0")
    with processes.common_start("a:save", "tiny"):
        assert processes.measure_all([plan])[0]["saved"] == ["saved"]
    assert "START" not in os.environ
    monkeypatch.setenv("STATUS", "1")
    with pytest.raises(subprocess.CalledProcessError, match="save_process"), processes.common_start("a:save", "tiny"):
        processes.measure_all([plan])
    assert processes.STARTS == []


def test_processes_import_what_they_measure_before_they_touch_the_device():
    code = """import sys, torch
from benchmarks.training.modes import Mode
from benchmarks.worker import import_libraries
touched = []
torch.cuda._lazy_init = lambda: touched.append(True)
import_libraries(Mode.parse("full+trl+door"))
assert not touched
assert {"liger_models.layers.attention", "transformers.modeling_layers", "trl.trainer.sft_trainer"} <= {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=processes.ROOT)

    # A process of transformers has nothing of this package, and the other way around.
    of_hf, of_ours = (worker.libraries(Mode.parse(mode)) for mode in ("full+trl+liger+ac", "lora+train"))
    assert "trl:SFTTrainer" in of_hf
    assert "liger_kernel.transformers" in of_hf
    assert "liger_models.cli.commands" in of_ours
    assert not {*of_hf} & {*of_ours}


def test_arguments_that_say_nothing_measurable_are_refused(tmp_path, monkeypatch, capsys):
    """They fail at once and write nothing: an error row would replace the latest measured one."""
    for arguments, message in {
        "train --modes ours+selektive": "--modes: must be hf.*, got 'ours.selektive'",
        "train --batch 8by2048": "--batch: must be rows x tokens per row, as 8x2048, got '8by2048'",
        "train --steps 0": "--steps: must be a number above 0, got '0'",
        "families --families gemma,nope": "--families: must be llama.*, got 'nope'",
        "ops --peers nobody": "--peers: must be compile.*, got 'nobody'",
        "train --modes ours+8bit": "--modes: moments are LigerAdamW's.*, got 'ours.8bit'",
        "train --modes hf,ours+moments8": "--modes: moments are LigerAdamW's.*, got 'ours.moments8'",
        "longest --modes ours+cp": "--modes: cp is for longest with --gpus of 2.*, got 'ours.cp' for longest",
        "fsdp --gpus 2 --modes ours+cp": "--modes: cp is for longest .*, got 'ours.cp' for fsdp",
        "fsdp --gpus 8 --modes ours+ep3": "--modes: ep, hsdp and tp are for fsdp.*, got 'ours.ep3' for fsdp",
        "fsdp --gpus 8 --modes ours+ep2+tp2": "--modes: ep, hsdp and tp .*, got 'ours.ep2.tp2' for fsdp",
        "train --modes hf+bf16": "--modes: bf16 is for fsdp, got 'hf.bf16' for train",
        "train --modes ours+hsdp2": "--modes: ep, hsdp and tp are for fsdp.*, got 'ours.hsdp2' for train",
        "decode --modes ours+ep2": "--modes: must be hf.*, got 'ours.ep2'",
        "fsdp --gpus 2 --modes unsloth+lora": "--modes: unsloth is for train and longest, got 'unsloth.lora' for fsdp",
        "profile --modes titan+compile": "--modes: titan is for train and fsdp, got 'titan.compile' for profile",
        "train --modes unsloth": "--modes: must be hf.*, got 'unsloth'",
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
    assert all(re.fullmatch(MODE, mode) for mode in MODES)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_measure(page, capsys, monkeypatch):
    """Their arguments are valid: the only complaint is the missing GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = re.findall(r'make bench(?: ARGS="([^"]*)")?|python -m benchmarks (.+)', page.read_text(encoding="utf-8"))
    for arguments in {"".join(pair) for pair in found} - {"report"}:
        with pytest.raises(SystemExit):
            command.main(arguments.split())
        assert "needs a GPU" in capsys.readouterr().err, arguments


def test_commit_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert processes.commit() == "unknown"


def test_a_run_that_writes_results_and_pages_keeps_its_commit(tmp_path, monkeypatch):
    """A run is named by its commit, so the rows that it writes into the repository must not change that."""

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
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    before = processes.commit()
    for file in files[:2]:
        file.write_text("b\n")
    assert processes.commit() == before
    files[2].write_text("b\n")
    assert processes.commit() == before + "-dirty"


def test_workers_find_what_they_measure():
    """Their command names the function as text."""
    functions = [f"{name}:measure" for name in command.BENCHMARKS if name != "ops"]
    assert all(
        callable(pkgutil.resolve_name(f"benchmarks.{name}")) for name in [*functions, "load:save", "curves:start"]
    )


def test_a_worker_prints_its_row_and_nothing_else(monkeypatch, capsys):
    """transformers' trainers print their logs, which begin like a row."""

    def measure(job):
        print({"train_runtime": "0.2"})
        return {"rows": job.shape[0], "new_tokens": job.steps}

    monkeypatch.setattr(grpo, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    read, write = os.pipe()
    os.write(write, worker.GO)
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        worker.main("grpo:measure", "ours", "llama-3.2-3b", "16x8", "4")
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"device": "X", "rows": 16, "new_tokens": 4}]
    assert "train_runtime" in err
