"""Batches with images, in tiny models of the sizes' structure: both libraries take them and have the same loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training import build
from benchmarks.training.batches import draw
from benchmarks.training.models import read_config
from benchmarks.training.modes import Mode
from liger_models import AutoLigerModel

IMAGE_TOKENS = {
    "llava": 7 * 576, "llava_next": 2340 + 1368, "pixtral": 1200 + 2304 + 130, "mistral3": 414 + 1705 + 48,
    "paligemma": 15 * 256, "paligemma2": 15 * 256, "internvl": 3328, "smolvlm": 3 * 1053, "idefics3": 2197,
    "glm4v": 391 + 2691 + 35, "glm4v_moe": 391 + 2691 + 35, "lfm2_vl": 234 + 2300 + 70,
}  # fmt: skip
"""Family -> image tokens among 8192 tokens: of photos of 480 x 640, 1080 x 1920 and 150 x 200 pixels that fit."""
TEXTS = (
    "apertus", "ernie4_5_moe", "gemma3n_text", "hunyuan_v1_moe", "kimi_linear", "lfm2_moe", "olmoe", "qwen2_moe",
)  # fmt: skip

SMALL: dict[str, Any] = {
    # Widths.
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "head_dim": 16, "query_pre_attn_scalar": 16, "block_ff_dim": 96, "block_multiple_of": 8, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "projection_dim": 32, "projector_hidden_size": 40, "out_hidden_size": 32,
    # Numbers of heads and experts, the vocabulary, and rotated dimensions of each axis.
    "num_attention_heads": 2, "num_heads": 2, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "vocab_size": 128,
    "vocab_size_per_layer_input": 128, "mrope_section": [1, 1, 2],
    # Tokens.
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "image_token_index": 120, "image_token_id": 120,
    "image_start_token_id": 121, "image_end_token_id": 122, "video_token_id": 123, "video_start_token_id": 124,
    "video_end_token_id": 125,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 24,
    "num_patches": 9,
}


def shrunk(config: Any, small: dict[str, Any]) -> Any:
    """A config with tiny sizes of the same structure."""
    if not isinstance(config, dict):
        return config
    result = {key: small.get(key, shrunk(value, small)) for key, value in config.items()}
    for key, value in config.items():
        if isinstance(value, list) and key in small and not isinstance(small[key], list):  # one for each layer or side
            result[key] = [small[key]] * len(value)
    return result


def tiny(family: str) -> dict[str, Any]:
    config = read_config(family)
    result: dict[str, Any] = shrunk(config, SMALL)
    text = result.get("text_config", result)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads"):  # not in all files
        if not isinstance(text.get(key), list):
            text[key] = SMALL[key]
    if text["model_type"].startswith("gemma"):
        text["head_dim"] = 16
    if "num_key_value_heads" in text:
        source = config.get("text_config", config)
        text["num_key_value_heads"] = 2 if source["num_key_value_heads"] == source.get("num_attention_heads") else 1
    if "vision_config" in config:
        result["vision_config"] = shrunk(result["vision_config"], TOWER)
        if config["vision_config"]["model_type"] == "siglip_vision_model":  # not in PaliGemma's files
            result["vision_config"]["image_size"] = 24
    if "image_grid_pinpoints" in config:  # as many tiles as in the release
        canvases = config["image_grid_pinpoints"]
        result["image_grid_pinpoints"] = [[24 * side // 336 for side in size] for size in canvases]
    return result


@pytest.mark.cases(6)
@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")  # a key of Kimi Linear's file
@pytest.mark.parametrize("family", [*TEXTS, *IMAGE_TOKENS])
def test_both_libraries_take_the_same_batch(family, monkeypatch, tmp_path):
    """In bf16 as they are measured, and in fp32 with the same weights, where the losses are equal."""
    monkeypatch.setattr(build, "DEVICE", "cpu")
    config = tiny(family)
    batch = draw(config, 2, 4736 if family == "lfm2_vl" else 320, torch.Generator().manual_seed(0))
    assert all(tensor.device.type == "cpu" for tensor in batch.values())
    theirs, drawn = (build.build(config, Mode.parse(library)) for library in ("hf", "ours"))
    for model in (theirs, drawn):
        assert model(**batch).loss.isfinite()

    # In fp32, with weights that are large enough for the loss to depend on the images.
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    theirs.save_pretrained(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    ours = AutoLigerModel.from_pretrained(tmp_path, dtype=torch.float32, progress=False)
    with torch.no_grad():
        loss = theirs(**batch).loss
        torch.testing.assert_close(ours(**batch).loss, loss, rtol=1e-6, atol=0)
        if family in IMAGE_TOKENS:
            others = batch | {"pixel_values": -batch["pixel_values"]}
            assert (theirs(**others).loss / loss - 1).abs() > 2e-5


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", IMAGE_TOKENS)
def test_the_first_half_has_the_images_that_fit(family):
    config = read_config(family)
    batch = draw(config, 1, 8192, torch.Generator().manual_seed(0))
    token = config.get("image_token_id", config.get("image_token_index"))
    places: Tensor = batch["input_ids"] == token
    assert places.sum() == IMAGE_TOKENS[family]
    assert not places[:, 4096:].any()
    assert (batch["labels"][places] == -100).all()
