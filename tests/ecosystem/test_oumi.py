"""oumi's command on a checkpoint that asks for this package."""

import yaml

from .tools import assert_trained_alike, make_files, run, settings

TINY = {
    "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "logging_steps": 1, "enable_tensorboard": False,
}  # fmt: skip


def test_fine_tunes(tmp_path):
    make_files(tmp_path)
    printed = {}
    for model in ("theirs", "portable"):
        given = settings("oumi")
        given["model"] |= {"model_name": model, "trust_remote_code": model == "portable", "device_map": "cpu"}
        given["model"] |= {"torch_dtype_str": "float32", "chat_template": "default", "model_max_length": 64}
        given["data"] = {"train": {"datasets": [{"dataset_name": "text_sft_jsonl", "dataset_path": "rows.jsonl"}]}}
        given["training"] |= TINY | {"output_dir": f"out-{model}"}
        given["training"]["trainer_kwargs"] |= {"use_cpu": True}
        (tmp_path / f"{model}.yaml").write_text(yaml.safe_dump(given))
        printed[model] = run(tmp_path, "oumi", "train", "-c", f"{model}.yaml")
    assert_trained_alike(tmp_path, printed["theirs"], printed["portable"], "out-portable")
