"""Axolotl's command on a checkpoint that asks for this package."""

import pytest
import yaml

from .tools import assert_trained_alike, make_files, run, settings

TINY = {
    "datasets": [{"path": "rows.jsonl", "type": "alpaca", "ds_type": "json"}], "shuffle_merged_datasets": False,
    "sequence_len": 64, "gradient_accumulation_steps": 2, "max_steps": 3, "num_epochs": 1, "learning_rate": 1e-2,
    "optimizer": "adamw_torch", "lr_scheduler": "constant", "logging_steps": 1, "val_set_size": 0, "bf16": False,
    "fp16": False, "tf32": False, "save_strategy": "no", "device_map": "cpu", "use_cpu": True,
    "attn_implementation": "sdpa",
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_fine_tunes(tmp_path, packed):
    make_files(tmp_path)
    printed = {}
    for model in ("theirs", "portable"):
        given = settings("Axolotl") | TINY | {"sample_packing": packed, "micro_batch_size": 1 if packed else 2}
        given |= {"base_model": model, "trust_remote_code": model == "portable"}
        given |= {"output_dir": f"out-{model}", "dataset_prepared_path": f"prepared-{model}"}
        (tmp_path / f"{model}.yaml").write_text(yaml.safe_dump(given))
        printed[model] = run(tmp_path, "axolotl.cli.train", f"{model}.yaml")
    assert_trained_alike(tmp_path, printed["theirs"], printed["portable"], "out-portable")
