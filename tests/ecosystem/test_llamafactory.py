"""LLaMA-Factory's command on a checkpoint that asks for this package."""

import json

import yaml

from .tools import assert_trained_alike, make_files, run, settings

TINY = {
    "dataset_dir": ".", "dataset": "rows", "template": "default", "cutoff_len": 64, "use_cpu": True,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1,
    "learning_rate": 1e-2, "report_to": "none",
}  # fmt: skip


def test_fine_tunes(tmp_path):
    """With its recomputation of activations, which is on by default."""
    make_files(tmp_path)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    printed = {}
    for model in ("theirs", "portable"):
        given = settings("LLaMA-Factory") | TINY | {"model_name_or_path": model, "output_dir": f"out-{model}"}
        given["trust_remote_code"] = model == "portable"
        (tmp_path / f"{model}.yaml").write_text(yaml.safe_dump(given))
        printed[model] = run(tmp_path, "llamafactory.cli", "train", f"{model}.yaml")
    assert_trained_alike(tmp_path, printed["theirs"], printed["portable"], "out-portable")
