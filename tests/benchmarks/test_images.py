"""The files, the processor and the loader of the benchmark of images, without a GPU."""

import json

from benchmarks.images import images_of, loader_rate, make_processor, table, write_chats, write_photos
from benchmarks.training.models import CONFIGS, FAMILIES
from liger_models import PackedDataset


def test_photographs_become_batches(tmp_path):
    config = json.loads((CONFIGS / FAMILIES["qwen2_5_vl"][0]).read_text())
    paths = write_photos(tmp_path, 3, (160, 120))
    write_chats(tmp_path / "train.jsonl", paths, 12)
    processor = make_processor(config, 112 * 84)
    data = PackedDataset(tmp_path / "train.jsonl", processor, length=256, cache_dir=tmp_path, progress=False)
    batch = max(data, key=images_of)
    assert images_of(batch) > 1
    assert (batch["input_ids"] == config["image_token_id"]).sum() * 4 == len(batch["pixel_values"])
    assert (batch["labels"] != -100).any()
    rates = loader_rate(data, 1, 2)
    assert rates["images_per_s"] > 0
    row = {"model": "qwen2_5_vl", "batch": "1x256", "mode": "ours", "loader": {"1": rates}}
    assert "loader, workers: 1" in table([row | {"model_alone": rates, "together": rates}])
    assert "out of memory" in table([row | {"error": "out of memory"}])
