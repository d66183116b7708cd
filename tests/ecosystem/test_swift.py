"""ms-swift's command on a checkpoint that asks for this package."""

import shlex

from .tools import ROOT, assert_trained_alike, make_files, run

TINY = (
    "--model_type llama --template default --dataset rows.jsonl --max_length 64 --max_steps 3 --save_steps 3 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-2 --logging_steps 1 "
    "--report_to none --use_cpu true --torch_dtype float32 --add_version false"
)


def test_fine_tunes(tmp_path):
    """With the command that the page shows."""
    make_files(tmp_path)
    page = (ROOT / "docs" / "in-your-tools.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("swift sft ")]
    printed = {}
    for model in ("theirs", "portable"):
        given = shlex.split(line.removeprefix("swift sft "))
        given[given.index("--model") + 1] = model
        printed[model] = run(tmp_path, "swift.cli.sft", *given, *TINY.split(), "--output_dir", f"out-{model}")
    assert_trained_alike(tmp_path, printed["theirs"], printed["portable"], "out-portable/checkpoint-3")
