"""The report: which rows count, the tables and plots of them, the pages."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import ROOT, curves, families, fsdp, headline, load, longest, paths, plots, profile, report, train
from benchmarks import __main__ as command
from benchmarks.ops import benchmark as ops
from benchmarks.rows import RESULTS, read
from benchmarks.tables import TIMES
from benchmarks.training.modes import title


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
    assert {row["mode"]: row["tokens_per_s"] for row in read(tmp_path)} == {
        "hf": 2.0,
        "ours": 4.0,
        "hf+liger": 5.0,
    }


def test_an_op_that_failed_before_its_first_shape_is_measured_again(tmp_path):
    failed = {name: value for name, value in op_row("quack", 1.0).items() if name not in ("shape", "ms")}
    rows = [failed | {"error": "ModuleNotFoundError"}, op_row("quack", 2.0), op_row("quack", 3.0, shape="N=2")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, failed | {"error": "late"}]))
    assert [row.get("error") for row in read(tmp_path)] == [None, None, "late"]


def test_train_table_compares_with_the_fastest_peer():
    rows = [
        train_row("hf", 5000.0),
        train_row("hf+liger", 8000.0, peak_gib=40.0),
        train_row("ours", 10000.0, peak_gib=30.0),
    ]
    failed = {name: rows[0][name] for name in ("model", "batch", "date", "commit")}
    rows.append(failed | {"mode": "hf+ac", "error": "out | of memory"})
    by_mode = {line[3]: line for line in cells(train.table(rows))}
    assert by_mode["liger_models"][-3:-1] == ["1.250", "0.750"]
    assert by_mode["transformers + Liger Kernel"][-3:-1] == ["1.000", "1.000"]
    assert by_mode["transformers, activation checkpointing"][4] == "out / of memory"
    assert cells(train.short_table(rows))[-1] == ["", "liger_models", "10,000", "1.250", "30.0", "0.750"]


def headline_rows() -> list[dict]:
    lora = {"batch": "4x2048"}
    rows = [
        train_row("hf+liger+lora", 90.0, **lora, peak_gib=70.0, run="1"),
        train_row("ours+lora", 90.0, **lora, peak_gib=70.0, run="1"),
        train_row("hf+liger+lora", 100.0, **lora, peak_gib=80.0, run="2", date="2026-01-02"),
        train_row("ours+lora", 150.0, **lora, peak_gib=40.0, run="2", date="2026-01-02"),
        train_row("ours+lora", 170.0, **lora, peak_gib=30.0, run="3", date="2026-01-03"),  # beside another peer
        train_row("hf+liger", 100.0, peak_gib=40.0, run="2"),
        train_row("ours+adamw", 110.0, peak_gib=30.0, run="2"),
        {"benchmark": "train", "model": "llama-3-8b", "batch": "1x8192", "mode": "ours+adamw", "error": "none"},
    ]
    for model, ms, gib in (("gemma", 2.0, 10.0), ("glm", 4.0, 20.0), ("phi3", 5.0, 40.0)):
        family = {"benchmark": "families", "model": model}
        rows += [train_row("hf", 1.0, step_ms=8.0, peak_gib=40.0, **family)]
        rows += [train_row("ours", 1.0, step_ms=ms, peak_gib=gib, **family)]
    path = {"benchmark": "paths", "model": "llama-3.2-1b", "batch": "8x2048"}
    for mode, speed, gib in (("liger", 100, 20.0), ("liger+ac", 80, 10.0), ("door", 110, 15.0)):
        rows.append(path | {"mode": f"full+trl+{mode}", "tokens_per_s": speed, "peak_gib": gib})
    rows += [path | {"mode": f"lora+trl+{mode}", "error": "none"} for mode in ("liger", "door")]
    for mode, ms in (("hf", 12.0), ("ours", 1.5)):
        rows.append(path | {"mode": f"generate+{mode}", "step_ms": ms, "peak_gib": 2.0})
    return [{"device": "X"} | row for row in rows]


def test_the_headline():
    rows = headline_rows()
    lora, full, typed, generate, medians = cells(headline.table(rows))
    assert lora[1:3] == ["100 tokens/s, 80.0 GiB", "150 tokens/s, 40.0 GiB"]  # of the newest run with both
    assert [cell.split()[0] for cell in lora[3:]] == ["**1.50", "**0.50"]
    assert full[1:3] == ["100 tokens/s, 40.0 GiB", "110 tokens/s, 30.0 GiB"]
    assert typed[0] == f"Llama-3.2-1B, TRL's SFTTrainer, full fine-tuning, 8 {TIMES} 2048 tokens"
    assert typed[1:3] == ["100 tokens/s, 20.0 GiB", "110 tokens/s, 15.0 GiB"]  # beside the fastest peer
    assert [cell.split()[0] for cell in typed[3:]] == ["**1.10", "**0.75"]
    assert generate[:3] == ["Llama-3.2-1B, `generate`, 8 rows, time per token", "12.00 ms, 2.0 GiB", "1.50 ms, 2.0 GiB"]
    assert generate[3].split()[0] == "**8.00"
    assert medians[0].startswith("median of 3 models")
    assert [cell.split()[0] for cell in medians[3:]] == ["**2.00", "**0.50"]
    assert report.part("headline", rows).startswith("| one X |")


def test_what_users_type_is_compared_within_a_run(tmp_path):
    """The table shows the last run of each mode, and the peers of that run."""
    path = {"benchmark": "paths", "model": "m", "batch": "1x8", "peak_gib": 1.0}
    runs = (("2026-01-01", "trl+door", 90), ("2026-01-02", "trl+door", 110), ("2026-01-02", "trl+liger", 100))
    runs += (("2026-01-03", "train", 160), ("2026-01-03", "trl+liger", 80))
    rows = [train_row(f"full+{way}", speed, date=date, commit=date, **path) for date, way, speed in runs]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(line[2], line[-2]) for line in cells(paths.table(read(tmp_path)))[2:]]
    assert found == [("2026-01-02", "1.100"), ("2026-01-02", "1.000"), ("2026-01-03", "2.000"), ("2026-01-03", "1.000")]


@pytest.mark.parametrize("mode", ["hf+liger+lora", "ours+lora", "hf+liger", "ours+adamw"])
def test_a_headline_without_one_of_its_lines(mode):
    with pytest.raises(ValueError, match=rf"needs a run of llama-3-8b .* with .*{re.escape(mode)}.*Measure both"):
        headline.table([row for row in headline_rows() if row["mode"] != mode])


def test_a_headline_without_families():
    with pytest.raises(ValueError, match="needs a family"):
        headline.table([row for row in headline_rows() if row["benchmark"] != "families"])


def test_the_last_run_of_a_peer_stays_whole(tmp_path):
    """Its ratios would be lost with the rows that they compare."""
    rows = [
        train_row("hf", 1.0, commit="one"),
        train_row("titan", 2.0, commit="one"),
        train_row("ours", 3.0, commit="one"),
    ]
    rows += [train_row("ours+adamw", 4.0, commit="old"), train_row("hf", 1.0, commit="old")]
    later = {"date": "2026-01-02", "commit": "two"}
    rows += [train_row(mode, 5.0, **later) for mode in ("hf", "ours", "ours+adamw")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = {(row["commit"], row["mode"]) for row in read(tmp_path)}
    assert shown == {("one", mode) for mode in ("hf", "titan", "ours")} | {
        ("two", mode) for mode in ("hf", "ours", "ours+adamw")
    }


@pytest.mark.parametrize("benchmark", ["train", "fsdp"])
def test_a_run_in_which_transformers_only_fail_is_not_the_last(tmp_path, benchmark):
    rows = [train_row("hf", 1.0), train_row("ours", 2.0)]
    failed = {"date": "2026-01-02", "commit": "def", "error": "out of memory"}
    rows.append({name: value for name, value in rows[0].items() if name != "tokens_per_s"} | failed)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"benchmark": benchmark}) + "\n" for row in rows))
    assert [row["commit"] for row in read(tmp_path)] == ["abc", "abc"]


def test_curves_are_of_one_run(tmp_path):
    rows = [train_row("hf", 1.0), train_row("ours", 1.0), train_row("hf", 1.0, commit="def", date="2026-01-02")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"benchmark": "curves"}) + "\n" for row in rows))
    assert [(row["mode"], row["commit"]) for row in read(tmp_path)] == [("hf", "def")]


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
    rows = [{**row, "benchmark": "fsdp", "gpus": 2} for row in rows]
    assert [line for line in report.part("fsdp", rows).splitlines() if line.endswith(":")] == ["X:", "Y:"]
    assert not report.part("fsdp", rows[:1]).startswith("X:")


def test_summaries_are_of_the_device_with_the_most_rows():
    rows = [train_row("hf", 1.0), train_row("hf", 2.0, device="Y"), train_row("ours", 3.0, device="Y")]
    assert report.part("train-short", rows) == report.part("train-short", rows[1:])
    assert report.part("train-short", rows[:1]).startswith("| tokens/step")


def test_families_are_compared_on_one_batch():
    rows = [
        train_row(mode, 1.0, model="gemma", batch=batch, step_ms=ms, first_step_s=3.0)
        for mode, batch, ms in (
            ("hf", "1x8", 4.0), ("ours", "1x8", 2.0), ("ours+adamw", "1x8", 1.6), ("ours", "1x4", 1.0)
        )
    ]  # fmt: skip
    found = {line[0]: line[4:7] for line in cells(families.table(rows))}
    first, second = (f"gemma, 1 \N{MULTIPLICATION SIGN} {length}" for length in (8, 4))
    assert found == {first: ["2.000", "1.6", "2.500"], second: ["", "", ""]}
    assert [label for label, _, _ in families.bars(rows)] == ["gemma, 1 \N{MULTIPLICATION SIGN} 8"]
    assert [line[0] for line in cells(families.table(rows[:2]))] == ["gemma"]


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
    shown = read(tmp_path)
    assert {row["tokens_per_s"] for row in shown} == {1.0, 50.0, 130.0, 100.0, 120.0}
    table = {"train": train.table, "fsdp": fsdp.table}[benchmark](shown)
    found = [line[-3 if benchmark == "train" else -2] for line in cells(table)]
    assert found == ["1.000", "2.600", "1.000", "1.200", ""]


@pytest.mark.parametrize("benchmark", ["train", "fsdp"])
def test_a_mode_that_was_never_measured_beside_a_peer_is_shown(tmp_path, benchmark):
    rows = [train_row("hf+liger", 50.0), train_row("ours", 60.0)]
    rows += [train_row("ours+adamw", rate, commit=commit) for rate, commit in ((2.0, "def"), (3.0, "ghi"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"benchmark": benchmark}) + "\n" for row in rows))
    assert sorted(row["tokens_per_s"] for row in read(tmp_path)) == [3.0, 50.0, 60.0]


def test_each_mode_is_compared_within_its_last_run(tmp_path):
    later = {"commit": "def", "date": "2026-01-02"}
    rows = [
        train_row("hf+liger", 100.0),
        train_row("ours", 110.0),
        train_row("ours+fp8+blocks", 130.0),
        train_row("hf+liger", 50.0, **later),
        train_row("ours", 60.0, **later),
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = read(tmp_path)
    shown = {(line[2], line[3]): line[8] for line in cells(train.table(rows))}
    later = {("def", "transformers + Liger Kernel"): "1.000", ("def", "liger_models"): "1.200"}
    earlier = {("abc", "transformers + Liger Kernel"): "1.000", ("abc", title("ours+fp8+blocks")): "1.300"}
    assert shown == later | earlier
    short = [line[1:4:2] for line in cells(train.short_table(rows))]
    assert short == [["transformers + Liger Kernel", "1.000"], ["liger_models", "1.200"]]
    assert [length for _, length, _ in train.bars(rows)] == [50.0, 60.0]  # of one run, so that they can be compared


@pytest.mark.parametrize("other", [{"commit": "def"}, {"date": "2026-01-02"}, {"versions": {"torch": "2.12.0"}}])
def test_families_have_no_ratio_to_another_run(tmp_path, other):
    family = {"benchmark": "families", "model": "gemma", "first_step_s": 3.0}
    peer, ours, *later = (
        train_row("hf", 1.0, step_ms=8.0, **family),
        train_row("ours", 1.0, step_ms=4.0, **family),
        train_row("ours", 1.0, step_ms=2.0, **family | other),
        train_row("error", 1.0, step_ms=None, ours_logits=1e-2, **family | other),  # compares within itself
    )
    for rows, ratios in (([peer, ours, *later], ["2.000"]), ([peer, *later], [])):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = read(tmp_path)
        (line,) = cells(families.table(rows))
        assert [cell for cell in (line[4],) if cell] == ratios
        assert line[-2] == "failed / 1.00e-02"
        assert [f"{length:.3f}" for _, length, _ in families.bars(rows)] == ratios
        assert bool(headline.family_ratios(rows)) == bool(ratios)


def test_a_run_with_liger_adamw_alone_stands_beside_that_of_torch(tmp_path):
    """Each line has the times, the memory and the first step of its own run."""
    runs = (
        ("2026-01-01", {"hf": 8.0, "ours": 4.0, "ours+adamw": 3.2}),
        ("2026-01-02", {"hf": 9.0, "ours+adamw": 3.0}),
    )
    rows = [
        train_row(mode, 1.0, step_ms=ms, peak_gib=ms, first_step_s=ms, date=date, benchmark="families", model="gemma")
        for date, modes in runs
        for mode, ms in modes.items()
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = read(tmp_path)
    torchs, ligers = cells(families.table(rows))
    assert torchs[:7] == ["gemma", "8.0", "", "4.0", "2.000", "3.2", "2.500"]
    assert ligers[:7] == ["gemma, LigerAdamW", "9.0", "", "", "", "3.0", "3.000"]
    assert torchs[9:14] == ["8.0", "", "4.0", "0.500", "8.0 /  / 4.0"]
    assert ligers[9:14] == ["9.0", "", "3.0", "0.333", "9.0 /  / 3.0"]
    assert [label for label, *_ in families.bars(rows)] == ["gemma"]


def test_a_run_of_the_same_day_that_is_measured_again_is_the_last(tmp_path):
    rows = [train_row("ours", rate, commit=commit) for rate, commit in ((1.0, "abc"), (2.0, "def"), (3.0, "abc"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["tokens_per_s"] for row in read(tmp_path)] == [3.0]


def test_op_tables_compare_with_the_fastest_peer():
    rows = [op_row("torch", 4.0), op_row("liger", 3.0), op_row("skeleton-2048", 1.0), op_row("ours", 2.0)]
    rows.append({name: rows[0][name] for name in ("op", "shape")} | {"mode": "cce", "error": "wrong: d x"})
    assert cells(ops.best_table(rows)) == [
        ["rms_norm", "N=1", "2.0", "0.50 of copy", "liger", "3.0", "1.500", "10.0", "10.0"]
    ]
    by_mode = {line[2]: line for line in cells(ops.table(rows))}
    assert by_mode["torch"][7] == "0.750"
    assert by_mode["ours"][-1] == "out 0 2.00"
    assert by_mode["cce"][3] == "wrong: d x"


def test_family_table_says_what_failed_and_what_was_not_measured():
    steps = {"hf": 2.0, "ours": 1.0}
    rows = [train_row(mode, 1.0, step_ms=ms, first_step_s=3.0, model="gemma") for mode, ms in steps.items()]
    failed = {"model": "gemma", "batch": "1x8192", "error": "none"}
    rows.append(failed | {"mode": "hf+liger"})
    (line,) = cells(families.table(rows))
    assert line[:5] == ["gemma", "2.0", "failed", "1.0", "2.000"]
    assert line[-3] == "3.0 / failed / 3.0"
    warm = train_row("ours+warm", 1.0, first_step_s=2.5, model="gemma")
    assert cells(families.table([*rows, warm]))[0][-3] == "3.0 / failed / 3.0 (2.5)"
    assert line[-2:] == ["", ""]
    (line,) = cells(families.table([*rows[1:2], failed | {"mode": "error"}]))
    assert line[:4] == ["gemma", "", "", "1.0"]
    assert line[-2:] == ["failed / failed"] * 2


def test_family_table_has_the_share_of_the_floor():
    rows = [train_row("ours", 1.0, step_ms=4.0, first_step_s=3.0, model="gemma")]
    assert cells(families.table(rows))[0][7:9] == ["", ""]
    rows.append({name: rows[0][name] for name in ("model", "batch")} | {"mode": "floor", "floor_ms": 3.0})
    assert cells(families.table(rows))[0][3:9] == ["4.0", "", "", "", "3.0", "0.750"]
    assert families.bars(rows) == []


def test_a_part_that_is_unknown_or_not_measured():
    page = "a\n<!-- begin: ops -->\nold\n<!-- end -->\nb\n"
    assert report.fill(page, []) == "a\n<!-- begin: ops -->\n\nNot measured yet.\n\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="asks for 'opps'"):
        report.fill(page.replace("ops", "opps"), [])


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_pages_show_what_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    assert report.fill(text, read(RESULTS)) == text, "run: python -m benchmarks report"


def test_every_plot_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for name, rows in (
        ("train", [train_row("hf", 1.0), train_row("ours", 2.0)]),
        ("families", [train_row("hf", 1.0, model="gemma"), train_row("ours", 2.0, model="gemma")]),
        ("ops", [op_row("torch", 4.0), op_row("ours", 2.0)]),
    ):
        plots.plot(name, rows, tmp_path)
        assert (tmp_path / f"{name}.svg").stat().st_size < 100_000


@pytest.mark.parametrize("name", plots.BARS)
def test_no_label_of_a_bar_lies_over_another(name):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.draw_bars(name, [row for row in read(RESULTS) if row["benchmark"] == name])
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) > 5
    assert figure.get_size_inches()[1] < 16
    labels = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert len({*labels}) > 0.9 * len(labels)
    assert all(below.y1 <= above.y0 for above, below in itertools.pairwise(boxes))


def test_bars_of_speeds_that_differ_a_hundredfold_can_be_seen():
    pytest.importorskip("matplotlib").use("svg")
    rows = [op_row("ours", 1.0, shape=shape) for shape in ("a", "b", "c")]
    rows += [op_row("torch", ms, shape=shape) for shape, ms in (("a", 200.0), ("b", 2.0), ("c", 0.5))]
    figure = plots.draw_bars("ops", rows)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    widths = [patch.get_window_extent().width / axes.bbox.width for patch in axes.patches]
    assert all(width > 0.05 for width in widths), widths
    left, right = (axes.patches[2].get_window_extent().x0, axes.patches[1].get_window_extent().x0)
    assert left < right  # slower than the peer


def test_plots_have_a_text_for_readers_who_do_not_see_them():
    for name in plots.BARS:
        assert len(report.ALTERNATIVES[name].split()) > 8
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    texts = [text for page in pages for text in re.findall(r"!\[(.*?)\]\(", page)]
    assert all(len(text.split()) > 5 for text in texts), texts


def test_results_are_json_lines():
    for file in Path(RESULTS).glob("*.jsonl"):
        for line in file.read_text().splitlines():
            assert {"benchmark", "mode", "date", "commit", "versions"} <= json.loads(line).keys()


def test_curves():
    losses = {"hf": [3.0, 2.0], "hf+liger": [3.0, 2.01], "ours": [3.0, 1.98]}
    rows = [
        {"benchmark": "curves", "model": "m", "batch": "1x8", "mode": m, "losses": found} for m, found in losses.items()
    ]
    rows.append({"benchmark": "curves", "model": "m", "batch": "1x8", "mode": "ours+fp8", "error": "no GPU"})
    lines = curves.table(rows).splitlines()
    assert lines[2].endswith("| 3.0000 | 2.5000 | 0.0000 | 0.0000 |")
    assert lines[4].endswith("| 3.0000 | 2.4900 | 0.0100 | 0.0200 |")
    assert "no GPU" in lines[5]


def test_profile_table():
    row = {"model": "m", "batch": "1x8", "mode": "ours", "step_ms": 10.0, "class_ms": {"matmul": 6.0, "attention": 3.0}}
    failed = {"model": "m", "batch": "1x8", "mode": "hf", "error": "out of memory"}
    lines = cells(profile.table([row, failed]))
    assert lines[0] == ["m", "1 \N{MULTIPLICATION SIGN} 8", "liger_models", "10.0", "6.0", "3.0", "0.900"]
    assert lines[1][3:] == ["out of memory", "", "", ""]


def test_fsdp_table_compares_on_as_many_gpus():
    rows = [
        train_row(mode, rate, gpus=gpus) for gpus in (1, 2) for mode, rate in (("hf", 100.0), ("ours", 100.0 * gpus))
    ]
    del rows[-1]["mfu"]  # as with images
    lines = cells(fsdp.table(rows))
    assert [line[-2] for line in lines] == ["1.000", "1.000", "1.000", "2.000"]
    assert [line[-3] for line in lines] == ["0.500", "0.500", "0.500", ""]


def test_longest_table():
    row = {"model": "m", "mode": "ours", "peak_gib": 100.0}
    rows = [row | {"batch": "1x8192"}, row | {"batch": "1x16384"}, row | {"batch": "1x32768", "error": "out of memory"}]
    rows.append(row | {"batch": "1x65536", "mode": "ours+cp", "gpus": 4})
    rows.append(row | {"batch": "1x8", "mode": "hf", "error": "ImportError: none"})
    assert cells(longest.table(rows)) == [
        ["m", "1", "all", "liger_models", "16,384", "100.0", "32,768"],
        ["m", "4", "all", "liger_models, context parallel", "65,536", "100.0", ""],
        ["m", "1", "all", "transformers", "", "", "8: ImportError: none"],
    ]


def test_load_table():
    row = {"model": "m", "gpus": 4, "checkpoint_gib": 1.5, "load_s": 2.0, "host_gib": 0.5, "mapped_gib": 1.0}
    rows = [row | {"mode": "ours", "peak_gib": 3.0}, {"model": "m", "gpus": 4, "mode": "hf", "error": "no"}]
    lines = cells(load.table(rows))
    assert lines[0] == ["m", "4", "liger_models", "1.5", "2.0", "0.5", "1.0", "3.0"]
    assert lines[1][:4] == ["m", "4", "transformers", "no"]


def test_rows_of_images_reach_the_page(tmp_path):
    page = "<!-- begin: images -->\n<!-- end -->\n"
    assert "Not measured yet." in report.fill(page, [])
    rates = {"images_per_s": 12.34, "tokens_per_s": 5678.9}
    row = train_row("ours+adamw", 1.0, benchmark="images", loader={"8": rates}, model_alone=rates, together=rates)
    (tmp_path / "images.jsonl").write_text(json.dumps(row) + "\n")
    filled = report.fill(page, read(tmp_path))
    assert "| loader, workers: 8 | 12.3 | 5,679 |" in filled
    assert "Not measured" not in filled
    assert "<!-- begin: images -->" in report.PAGES[0].read_text(encoding="utf-8")


def test_adapters_are_compared_with_adapters():
    run = {"commit": "abc", "date": "2026-01-01"}
    row = run | {"model": "m", "batch": "1x8", "tokens_per_s": 1.0, "peak_gib": 1.0, "losses": [1.0]}
    speeds = {"hf": 1.0, "hf+liger+lora": 3.0, "ours+lora": 2.0, "ours": 0.5}
    lines = cells(train.table([row | {"mode": mode, "step_ms": ms} for mode, ms in speeds.items()]))
    assert [line[8] for line in lines] == ["1.000", "1.000", "2.000", "1.500"]
