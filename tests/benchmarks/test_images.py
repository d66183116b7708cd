"""The files, the processor and the loader of the benchmark of images, without a GPU."""

import pytest

from benchmarks.images import (
    MODELS,
    images_of,
    loader_rate,
    make_processor,
    table,
    whole_config,
    write_chats,
    write_photos,
)
from liger_models import PackedDataset


def test_photographs_become_batches(tmp_path):
    config = whole_config("qwen2_5_vl")
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


@pytest.mark.parametrize("family", MODELS)
def test_every_family_has_a_processor_of_its_release(family, tmp_path):
    config = whole_config(family)
    write_chats(tmp_path / "train.jsonl", write_photos(tmp_path, 1, (160, 120)), 2)
    processor = make_processor(config)
    data = PackedDataset(tmp_path / "train.jsonl", processor, length=8192, cache_dir=tmp_path, progress=False)
    batch = next(iter(data))
    assert images_of(batch) in (1, 2)
    assert (batch["labels"] != -100).any()
    token = processor.tokenizer.backend.token_to_id(processor.media_tokens[0])
    assert token == config.get("image_token_id", config.get("image_token_index", token))
    assert (batch["input_ids"] == token).sum() % images_of(batch) == 0
    assert batch["pixel_values"].isfinite().all()
