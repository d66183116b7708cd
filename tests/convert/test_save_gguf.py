"""GGUF files: the tensors and metadata that llama.cpp's converter writes, read back with the package gguf."""

import hashlib
import json
import shutil
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch

from liger_models import AutoLigerModel, LoRAConfig, Tokenizer, apply_lora
from liger_models.convert import gguf as written
from liger_models.convert.gguf import ARCHITECTURES, pre_tokenizer, save_gguf

from ..arch.families import tiny
from ..late import transformers
from ..text.folders import SPECIAL, byte_fallback, byte_level

gguf = pytest.importorskip("gguf", reason="pip install 'liger_models[gguf]'")

ROWS, TEMPLATE = 448, "{% for m in messages %}{{ m.content }}{% endfor %}"
SETTINGS = {
    "gemma2": {"query_pre_attn_scalar": 16, "head_dim": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "head_dim": 16, "layer_types": None, "sliding_window_pattern": 6},
    "mistral": {"sliding_window": 4096},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
"""Settings with which llama.cpp computes the same as transformers."""

KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""The keys that llama.cpp's converter writes for every family; below, those for one family."""
OWN_KEYS = {
    "llama": {"vocab_size", "rope.dimension_count", "rope.freq_base"},
    "mistral": {"vocab_size", "rope.dimension_count", "rope.freq_base"},
    "qwen2": {"rope.freq_base"},
    "qwen3": {"rope.freq_base", "attention.key_length", "attention.value_length"},
    "gemma": {"attention.key_length", "attention.value_length"},
    "gemma2": {
        "attention.key_length", "attention.value_length", "attention.sliding_window", "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    "gemma3_text": {
        "attention.key_length", "attention.value_length", "attention.sliding_window", "rope.freq_base",
        "rope.freq_base_swa",
    },
    "phi3": {
        "rope.scaling.original_context_length", "rope.dimension_count", "rope.freq_base", "attention.sliding_window",
    },
}  # fmt: skip
GENERAL = {"architecture", "type", "name", "size_label", "file_type", "quantization_version"}
TOKENIZER = {"model", "pre", "tokens", "token_type", "bos_token_id", "eos_token_id", "add_bos_token"}


def assets(tokenizer, folder) -> None:
    keys = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    Tokenizer(tokenizer, {**SPECIAL, **keys}).save_pretrained(folder)


def sizes(family: str) -> dict:
    config = {**next(iter(tiny(family).values())), **SETTINGS.get(family, {}), "vocab_size": ROWS}
    return {key: value for key, value in config.items() if value is not None}


@pytest.fixture
def make(tmp_path):
    """Write a tiny checkpoint with transformers, and load it."""

    def write(family: str, tokenizer=None, **changes):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**sizes(family), **changes})
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        theirs.save_pretrained(tmp_path / "model")
        assets(tokenizer or byte_level(), tmp_path / "model")
        return AutoLigerModel.from_pretrained(tmp_path / "model", progress=False), theirs

    return write


def read(path) -> tuple[dict, dict]:
    """Return the metadata and the tensors of a file."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def expected(family: str, theirs) -> dict[str, torch.Tensor]:
    """The tensors of a model of transformers, by llama.cpp's names and with llama.cpp's values."""
    config = theirs.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[family]], config.num_hidden_layers)
    tensors = {}
    for name, values in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = values.float()
        if "norm" in name and family.startswith("gemma"):
            values = values + 1
        if ARCHITECTURES[family] == "LLAMA" and (".q_proj." in name or ".k_proj." in name):
            rows = values.shape[0] // (config.num_attention_heads if ".q_" in name else config.num_key_value_heads)
            # Rows 0, D/2, 1, D/2 + 1, ... of each head.
            order = torch.arange(rows).view(2, -1).T.flatten()
            values = values.view(-1, rows, *values.shape[1:])[:, order].reshape(values.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


@pytest.mark.cases(11)
@pytest.mark.parametrize("quantization", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_file_has_every_tensor_and_all_metadata(make, tmp_path, family, quantization):
    model, theirs = make(family)
    save_gguf(model, tmp_path / "out.gguf", quantization, name="tiny")
    fields, tensors = read(tmp_path / "out.gguf")
    wanted = expected(family, theirs)
    assert tensors.keys() == wanted.keys()
    for name, values in wanted.items():
        tensor = tensors[name]
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert found.shape == values.shape
        if values.dim() < 2:
            assert tensor.tensor_type.name == "F32"
            assert found.equal(values), name
        elif quantization == "q8_0" and values.shape[-1] % 32 == 0:
            assert tensor.tensor_type.name == "Q8_0"
            # 32 values share a scale, which is in float16, and are rounded to its multiples.
            blocks = values.view(-1, 32)
            step = blocks.abs().amax(-1, keepdim=True) / 127
            assert ((found.view(-1, 32) - blocks).abs() <= step * (0.5 + 128 * 2**-11)).all(), name
        else:
            assert tensor.tensor_type.name == ("BF16" if quantization == "bf16" else "F16")
            assert found.equal(values if quantization == "bf16" else values.half().float()), name

    # The metadata has at least the keys of the converter. The others are defaults of llama.cpp.
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[family]]]
    keys = {f"{arch}.{key}" for key in KEYS | OWN_KEYS[family]}
    keys |= {f"general.{key}" for key in GENERAL} | {f"tokenizer.ggml.{key}" for key in TOKENIZER}
    keys |= {"tokenizer.ggml.merges", "tokenizer.chat_template"}
    assert keys <= fields.keys()
    defaults = {"vocab_size", "rope.dimension_count", "rope.freq_base", "attention.key_length"}
    defaults |= {"attention.value_length"}
    optional = {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.padding_token_id"}
    assert fields.keys() - keys <= {f"{arch}.{key}" for key in defaults} | optional
    config = theirs.config
    assert fields["general.architecture"] == arch
    assert fields["general.name"] == "tiny"
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{quantization.upper()}"]
    assert fields[f"{arch}.block_count"] == config.num_hidden_layers
    assert fields[f"{arch}.attention.head_count_kv"] == config.num_key_value_heads
    assert fields[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert fields["tokenizer.ggml.add_bos_token"] is True


def test_a_byte_level_tokenizer(make, tmp_path):
    model, _ = make("qwen2")
    save_gguf(model, tmp_path / "out.gguf", "f16")
    fields, _ = read(tmp_path / "out.gguf")
    content = json.loads(model.assets["tokenizer.json"])["model"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokens = fields["tokenizer.ggml.tokens"]
    assert {token: index for index, token in enumerate(tokens[: len(model.tokenizer)])} == content["vocab"]
    assert tokens[len(model.tokenizer) :] == [f"[PAD{i}]" for i in range(len(model.tokenizer), ROWS)]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in content["merges"]]
    types = fields["tokenizer.ggml.token_type"]
    assert (types[0], types[10], types[-1]) == (3, 1, 5)  # control, normal, unused


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """The tokens of a text as llama.cpp finds them: the neighbors with the highest score are merged first."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


def test_scores_of_a_sentencepiece_tokenizer_give_the_same_tokens(make, tmp_path):
    model, _ = make("llama", byte_fallback())
    save_gguf(model, tmp_path / "out.gguf", "f16")
    fields, _ = read(tmp_path / "out.gguf")
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("llama", "default")
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    assert (fields["tokenizer.ggml.add_bos_token"], fields["tokenizer.ggml.add_eos_token"]) == (True, True)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert types[tokens.index("<unk>")] == 2
    assert types[tokens.index("<0x41>")] == 6
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    normal = {token: scores[token] for token, kind in zip(tokens, types, strict=True) if kind == 1}
    for text in ["the", "the thin thread", "other weather the"]:
        found = model.tokenizer.backend.encode(text, add_special_tokens=False).tokens
        assert merge_by_score("▁" + text.replace(" ", "▁"), normal) == found


LLAMA3 = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def test_the_pre_tokenizer_is_recognized_by_its_steps_and_by_tokens(monkeypatch):
    content = json.loads(byte_level().to_str())
    tokenizer = Tokenizer(byte_level())
    assert pre_tokenizer(tokenizer, content) == "gpt-2"
    assert pre_tokenizer(tokenizer, {**content, "pre_tokenizer": LLAMA3}) == "dbrx"
    ignoring = {**content["model"], "ignore_merges": True}
    assert pre_tokenizer(tokenizer, {"model": ignoring, "pre_tokenizer": LLAMA3}) == "llama-bpe"
    with pytest.raises(ValueError, match=r"pre_tokenizer of tokenizer.json must be one of .*qwen2.*, got \['Whitespac"):
        pre_tokenizer(tokenizer, {**content, "pre_tokenizer": {"type": "Whitespace"}})
    digest = hashlib.sha256(str(tokenizer.encode(written.PROBE)).encode()).hexdigest()
    monkeypatch.setitem(written.RELEASED, digest, "smaug-bpe")
    assert pre_tokenizer(tokenizer, content) == "smaug-bpe"


def test_rotary_scaling(make, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
    model, theirs = make("llama", rope_parameters=scaling)
    save_gguf(model, tmp_path / "out.gguf", "bf16")
    _, tensors = read(tmp_path / "out.gguf")
    plain = 1 / 1e4 ** (np.arange(0, 2 * len(tensors["rope_freqs.weight"].data), 2) / theirs.config.head_dim)
    scaled = theirs.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(plain / tensors["rope_freqs.weight"].data, scaled, rtol=1e-5)

    pairs = sizes("phi3")["hidden_size"] // sizes("phi3")["num_attention_heads"] // 2
    short, long = [1.0] * pairs, [2.0 + i for i in range(pairs)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 1e4}
    scaling |= {"original_max_position_embeddings": 64}
    model, theirs = make(
        "phi3", rope_parameters=scaling, max_position_embeddings=256, original_max_position_embeddings=64
    )
    save_gguf(model, tmp_path / "out.gguf", "bf16")
    fields, tensors = read(tmp_path / "out.gguf")
    assert tensors["rope_factors_long.weight"].data.tolist() == long
    assert tensors["rope_factors_short.weight"].data.tolist() == short
    assert fields["phi3.rope.scaling.original_context_length"] == 64
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx(theirs.model.rotary_emb.attention_scaling)


def own(family: str, **changes):
    """A tiny model without a checkpoint, with a tokenizer."""
    model = AutoLigerModel.from_config({**sizes(family), "model_type": family, **changes})
    tokenizer = Tokenizer(byte_level(), SPECIAL)
    model.assets = {"tokenizer.json": tokenizer.backend.to_str().encode(), **tokenizer._files}
    return model


def test_wrong_arguments_and_models(tmp_path):
    out = tmp_path / "out.gguf"
    model = own("llama")
    with pytest.raises(ValueError, match="quantization must be one of q8_0, f16, bf16, got 'q4_k'"):
        save_gguf(model, out, "q4_k")
    with pytest.raises(ValueError, match=r"file must be a file whose name ends in \.gguf, got .*out\.bin"):
        save_gguf(model, tmp_path / "out.bin", "f16")
    with pytest.raises(ValueError, match=r"model must be one of gemma, .*, got olmo2"):
        save_gguf(AutoLigerModel.from_config({**next(iter(tiny("olmo2").values())), "model_type": "olmo2"}), out, "f16")
    with pytest.raises(ValueError, match="model must not have adapters"):
        save_gguf(apply_lora(own("llama"), LoRAConfig(r=2)), out, "f16")
    model.assets.pop("tokenizer.json")
    with pytest.raises(ValueError, match=r"model must have a tokenizer\.json, got none"):
        save_gguf(model, out, "f16")
    with pytest.raises(ValueError, match=r"tokenizer must have at most 300 tokens, .* got the id"):
        save_gguf(own("llama", vocab_size=300), out, "f16")
    with pytest.raises(ValueError, match="query_pre_attn_scalar must be 16 for gemma2"):
        save_gguf(own("gemma2", query_pre_attn_scalar=7), out, "f16")
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match=r"rope_scaling must be null or LinearScaling .* for qwen2"):
        save_gguf(own("qwen2", rope_scaling=dynamic), out, "f16")
    with pytest.warns(UserWarning, match=r"no sliding window for mistral: .* longer than 8 tokens"):
        save_gguf(own("mistral", sliding_window=8), out, "f16")
    with pytest.warns(UserWarning, match=r"no sliding window for phi3: .* longer than 9 tokens"):
        save_gguf(own("phi3", sliding_window=9), out, "f16")


def test_a_failed_write_keeps_the_old_file(tmp_path):
    model = own("llama")
    (tmp_path / "out.gguf").write_bytes(b"old")
    with torch.no_grad():
        model.embed_tokens.weight[3, 3] = 1e5
    with pytest.raises(ValueError, match="quantization must be bf16 or q8_0 for weights beyond ±65504, got 'f16'"):
        save_gguf(model, tmp_path / "out.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert (tmp_path / "out.gguf").read_bytes() == b"old"
    with pytest.raises(OSError, match=r"out.gguf: must be writable and have room for the files, got: .*Nothing was"):
        save_gguf(model, tmp_path / "out.gguf" / "below.out.gguf", "bf16")
    save_gguf(model, tmp_path / "out.gguf", "bf16")
    assert read(tmp_path / "out.gguf")[0]["general.architecture"] == "llama"


def test_the_files_of_a_killed_process_are_removed(tmp_path):
    def die(*_, **__):
        raise KeyboardInterrupt

    model = own("llama")
    with (
        mock.patch.object(shutil, "rmtree"),
        mock.patch.object(written, "_write", die),
        pytest.raises(KeyboardInterrupt),
    ):
        save_gguf(model, tmp_path / "out.gguf", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == [".out.gguf.saving"]
    save_gguf(model, tmp_path / "out.gguf", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_the_text_that_recognizes_pre_tokenizers_is_that_of_the_converter():
    digest = "a36179c1e2b1cfcfbfad1dc779addad2ffc778201e4cf0d538bddeafa2c526da"
    assert hashlib.sha256(written.PROBE.encode()).hexdigest() == digest
