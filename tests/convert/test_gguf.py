"""What llama.cpp's convert_hf_to_gguf.py reads from a folder: files, keys, and names of tensors that it knows."""

import json
import re
from pathlib import Path

import pytest
import torch

from liger_models import AutoLigerModel, Tokenizer
from liger_models.arch.registry import built_in
from liger_models.convert.files import read_headers

from ..arch.families import tiny
from ..text.folders import SPECIAL, byte_level

GGUF = {
    "cohere2": "COHERE2",
    "ernie4_5": "ERNIE4_5",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "exaone4": "EXAONE4",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "gemma4_text": "GEMMA4",
    "gemma4_unified_text": "GEMMA4",
    "glm": "CHATGLM",
    "glm4": "GLM4",
    "granite": "GRANITE",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "llama": "LLAMA",
    "ministral": "LLAMA",
    "ministral3": "MISTRAL3",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "nemotron": "NEMOTRON",
    "olmo2": "OLMO2",
    "olmo3": "OLMO2",
    "phi3": "PHI3",
    "phimoe": "PHIMOE",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_5_text": "QWEN35",
    "qwen3_moe": "QWEN3MOE",
    "qwen3_next": "QWEN3NEXT",
    "seed_oss": "SEED_OSS",
    "smollm3": "SMOLLM3",
    "starcoder2": "STARCODER2",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "falcon_h1": "FALCON_H1",
    "glm4_moe": "GLM4_MOE",
    "glm4_moe_lite": "DEEPSEEK2",
    "lfm2": "LFM2",
    "minimax_m2": "MINIMAXM2",
    "mistral4": "MISTRAL4",
    "olmoe": "OLMOE",
    "qwen2_moe": "QWEN2MOE",
}
"""Family -> its name among `gguf.MODEL_ARCH`."""

VISION = {
    "gemma3", "gemma4", "gemma4_unified", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe", "glm4v", "glm4v_moe", "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "llava_next", "mistral3",
    "muse_glimmer", "paligemma", "smolvlm",
}  # fmt: skip

TAKEN_APART = {
    "apertus", "bamba", "gemma3n_text", "gpt_oss", "granitemoehybrid", "kimi_linear", "lfm2_moe", "llama4_text",
    "mamba2", "nemotron_h",
}  # fmt: skip
"""Families some of whose tensors or keys the converter splits, renames or moves before it looks up a name."""

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_every_text_family_has_a_name_in_gguf():
    assert GGUF.keys() == set(built_in()) - VISION - TAKEN_APART


def as_stacked(name: str) -> str:
    """The name under which the converter looks up a tensor: it stacks the experts of a layer first, and renames."""
    name = name.replace(".dt_bias", ".dt_proj.bias").replace("model.language_model.", "model.")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.\d+\.", r"\1.feed_forward.experts.", name)
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


@pytest.fixture
def save(tmp_path):
    """Write a tiny checkpoint of a family, with a tokenizer, as a folder that was loaded and saved."""

    def write(family: str, variant: str, max_shard_size: str = "5GB") -> Path:
        torch.manual_seed(0)
        config = {**tiny(family)[variant], "model_type": family}
        model = AutoLigerModel.from_config(config, dtype=torch.bfloat16)
        Tokenizer(byte_level(), {**SPECIAL, "chat_template": TEMPLATE}).save_pretrained(tmp_path / "tokenizer")
        model.assets = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
        model.assets |= {"generation_config.json": b'{"temperature": 0.6}', "tokenizer.model": b"sentencepiece"}
        model.save_pretrained(tmp_path / "first")
        again = AutoLigerModel.from_pretrained(tmp_path / "first", progress=False)
        again.save_pretrained(tmp_path / "folder", max_shard_size=max_shard_size)
        return tmp_path / "folder"

    return write


@pytest.mark.cases(20)
@pytest.mark.parametrize("family", GGUF)
def test_every_tensor_has_a_name_in_gguf(save, family):
    gguf = pytest.importorskip("gguf", reason="the names are those of the package gguf: pip install gguf")
    folder = save(family, next(iter(tiny(family))))
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[GGUF[family]], config["num_hidden_layers"])
    stored = read_headers(folder)
    found = {name: names.get_name(as_stacked(name), try_suffixes=(".weight", ".bias")) for name in stored}
    assert not [name for name, theirs in found.items() if theirs is None]
    # Different tensors have different names, except experts of a layer, which are stacked.
    assert len(set(found.values())) == len({as_stacked(name) for name in stored})


@pytest.mark.cases(20)
@pytest.mark.parametrize("family", GGUF)
def test_config_has_the_keys_that_the_converter_reads(save, family):
    config = json.loads((save(family, next(iter(tiny(family)))) / "config.json").read_text())
    (architecture,) = config["architectures"]
    assert architecture.endswith("ForCausalLM")
    keys = {
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    }
    width = "moe_intermediate_size" if family == "qwen3_5_moe_text" else "intermediate_size"  # it has no dense MLP
    assert keys | {width, "max_position_embeddings"} <= config.keys()
    assert {"rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"} & config.keys()
    # The base of the rotary embedding is at the top, or with its scaling, as in transformers 5.
    rope = config.get("rope_parameters") or config
    assert "rope_theta" in rope or "rope_theta" in rope["full_attention"]


def test_the_folder_has_the_files_that_the_converter_reads(save):
    folder = save("llama", "gqa", max_shard_size="20KB")
    names = {path.name for path in folder.iterdir()}
    own = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert own | {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"} <= names
    shards = {name for name in names if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == shards
    assert len(shards) > 1
    assert index.keys() == read_headers(folder).keys()
    kept = json.loads((folder / "tokenizer_config.json").read_text())
    assert {**SPECIAL, "chat_template": TEMPLATE}.items() <= kept.items()
    assert json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert (folder / "tokenizer.model").read_bytes() == b"sentencepiece"
