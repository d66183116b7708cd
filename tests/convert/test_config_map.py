import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_models.arch import get_arch
from liger_models.arch.cohere2 import Cohere2Config
from liger_models.arch.gemma import GemmaConfig
from liger_models.arch.gemma2 import Gemma2Config
from liger_models.arch.gemma3.text import Gemma3TextConfig
from liger_models.arch.granite import GraniteConfig
from liger_models.arch.llama import LlamaConfig
from liger_models.arch.ministral3 import Ministral3Config
from liger_models.arch.olmo2.olmo3 import Olmo3Config
from liger_models.arch.phi3 import Phi3Config
from liger_models.convert import format_of
from liger_models.convert.config_map import flat_rope, read_config, write_config
from liger_models.layers.config import DecoderConfig
from liger_models.layers.layer import layers_of
from liger_models.layers.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

from ..arch.families import CASES, VISION_CASES, tiny
from ..late import transformers
from .conftest import TINY

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
SCALINGS = {
    "linear": ({"factor": 2.0}, LinearScaling(factor=2.0)),
    "dynamic": ({"factor": 4}, DynamicScaling(factor=4.0)),
    "llama3": (LLAMA3, Llama3Scaling(**LLAMA3)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24, "mscale": 0.7, "truncate": False},
        YarnScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=24.0, mscale=0.7, truncate=False),
    ),
    "longrope": (LONGROPE, LongRopeScaling(**LONGROPE)),
}


KIMI_LINEAR = (
    "first_k_dense_replace", "mla_use_nope", "moe_layer_freq", "moe_router_activation_func", "num_nextn_predict_layers"
)  # fmt: skip
"""Keys of released files of Kimi Linear that transformers replaces, or does not read."""


def read(**changes: Any) -> LlamaConfig:
    return read_config(LlamaConfig, {"model_type": "llama", **TINY, **changes}, strict=True)


def their_config(hf: dict[str, Any]) -> Any:
    """transformers' configuration. Mistral Small 3's head is its own, though the class takes a missing key for tied.

    The class of Kimi Linear, which rotates nothing, warns of the key for the scaling of a rotation. No head has the
    size ``head_dim`` of its files.
    """
    if hf["model_type"] == "kimi_linear":
        hf = {key: value for key, value in hf.items() if key not in ("rope_scaling", "head_dim")}
    return transformers.AutoConfig.for_model(
        **({"tie_word_embeddings": False} if hf["model_type"] == "mistral3" else {}) | hf
    )


def test_reads_what_transformers_reads(config_file: Path) -> None:
    hf = json.loads(config_file.read_text())
    config = read_config(get_arch(config_file.parent.name).config_class, hf, strict=True)
    theirs = their_config(hf)
    again = read_config(type(config), json.loads(json.dumps(theirs.to_dict())), strict=True)
    rope = [[getattr(each, key, None) for key in ("rope_theta", "rope_scaling")] for each in (again, config)]
    assert rope[0] == rope[1]

    whole, theirs = theirs, theirs.get_text_config()
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ in size
    sizes = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim or config.head_size}
    for field in dataclasses.fields(config):
        if field.name == "vision_config":
            assert_same_tower(config.vision_config, whole.vision_config)
            continue
        if field.name == "tie_word_embeddings":
            assert getattr(whole, field.name, False) == config.tie_word_embeddings
            continue
        if field.name == "pad_token_id" and theirs is not whole:  # beside the text's it means nothing
            assert getattr(theirs, field.name) == config.pad_token_id
            continue
        if field.name.endswith("token_id") and theirs is not whole and hasattr(whole, field.name):
            assert getattr(whole, field.name) == getattr(config, field.name)
            continue
        # transformers overwrites what describes the layers with what follows from it, and Gemma's "gelu".
        derived = ("sliding_window", "layer_types", "no_rope_layers", "moe_layers", "hidden_act")
        if not field.name.startswith("rope_") and field.name not in derived:
            value = sizes.get(field.name, getattr(config, field.name))
            if (field.name, value) == ("time_step_limit", None):
                value = (0.0, math.inf)
            assert getattr(theirs, field.name, None) in (value, None), field.name
    rope = dict(getattr(theirs, "rope_parameters", None) or {"rope_type": "default"})
    if hasattr(config, "mrope_section"):
        assert rope.pop("mrope_section") == config.mrope_section
        assert rope.pop("mrope_interleaved", False) == config_file.parent.name.startswith(("qwen3_vl", "qwen3_5"))
    if "sliding_attention" in rope:
        assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        rope = rope["full_attention"]
    if hasattr(theirs, "rope_parameters") or not hasattr(config, "kv_lora_rank"):  # Kimi Linear rotates nothing
        assert getattr(config, "rope_theta", None) == rope.pop("rope_theta", None)
    rope_type = rope.pop("rope_type")
    assert rope.pop("type", rope_type) in ([rope_type, "mrope"] if hasattr(config, "mrope_section") else [rope_type])
    assert rope.pop("partial_rotary_factor", 1.0) == (getattr(config, "partial_rotary_factor", None) or 1.0)
    assert rope.pop("llama_4_scaling_beta", None) == getattr(config, "llama_4_scaling_beta", None)
    if getattr(config, "rope_scaling", None) is None:
        assert rope_type in ("default", "proportional")
        assert rope == {}
    else:
        assert rope == {key: value for key, value in dataclasses.asdict(config.rope_scaling).items() if key in rope}


@pytest.mark.cases(24)
def test_every_layer_has_the_window_of_transformers(config_file: Path) -> None:
    hf = json.loads(config_file.read_text())
    model_class = get_arch(config_file.parent.name)
    with torch.device("meta"):
        model = model_class(read_config(model_class.config_class, hf))
    ours = [spec.window for spec in (layer.attention for layer in layers_of(model.layers)) if spec is not None]
    theirs = their_config(hf).get_text_config()
    crossing = getattr(theirs, "cross_attention_layers", ())
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * (theirs.num_hidden_layers - len(crossing))
    types = [each for each in types if each not in ("linear_attention", "mlp", "moe")]
    window = getattr(theirs, "sliding_window", None)
    assert ours == [window if each == "sliding_attention" else None for each in types]


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in CASES} - {arch for arch, _ in VISION_CASES}))
def test_the_defaults_are_those_of_transformers(arch: str) -> None:
    written = write_config(get_arch(arch).config_class(), {}, torch.float32)
    changes = {key: value for key, value in json.loads(json.dumps(written)).items() if key != "model_type"}
    ours, theirs = (transformers.AutoConfig.for_model(arch, **each).to_dict() for each in (changes, {}))
    ours_rope, their_rope = (each.pop("rope_parameters", {}) for each in (ours, theirs))
    for key in ours_rope.keys() & their_rope:
        assert ours_rope[key] == their_rope[key]
    # sliding_window_pattern and, in Kimi Linear, linear_attn_config are layer_types in other words.
    for key in ("architectures", "dtype", "sliding_window_pattern", "linear_attn_config", *KIMI_LINEAR):
        ours.pop(key, None)
        theirs.pop(key, None)
    if "head_dim" not in theirs:  # the class of GLM-4.5 has no such field, and reads it from files
        ours.pop("head_dim", None)
    assert ours == theirs


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in CASES} - {arch for arch, _ in VISION_CASES}))
def test_other_names_that_transformers_reads_are_read(arch: str) -> None:
    """A file may have either name of a setting that has two in transformers' class."""
    theirs = transformers.AutoConfig.for_model(arch, **next(iter(tiny(arch).values())))
    hf, config_class = theirs.to_dict(), get_arch(arch).config_class
    hf.pop("head_dim" if "qk_rope_head_dim" in hf else "", None)  # which transformers computes
    want = read_config(config_class, hf, strict=True)
    for name, other in {*theirs.attribute_map.items(), *((b, a) for a, b in theirs.attribute_map.items())}:
        if name in hf and other != "head_dim":
            renamed = {other if key == name else key: value for key, value in hf.items() if key != other}
            assert read_config(config_class, renamed, strict=True) == want, (name, other)


@pytest.mark.parametrize(
    ("arch", "name"),
    [("deepseek_v3", "norm_topk_prob"), ("deepseek_v3", "rope_interleave"), ("bamba", "mamba_conv_bias")],
)
def test_a_null_switch_is_off(arch: str, name: str) -> None:
    """The default of each is true; transformers takes null for false."""
    model_class, hf = get_arch(arch), {**next(iter(tiny(arch).values())), name: None}
    assert not getattr(transformers.AutoConfig.for_model(arch, **hf), name)
    config = read_config(model_class.config_class, hf)
    assert getattr(config, name) is False
    assert write_config(config, hf, torch.float32)[name] is False


def assert_same_tower(config: Any, theirs: Any) -> None:
    for field in dataclasses.fields(config):
        if field.name == "rope_theta" and theirs.model_type == "clip_vision_model":  # which rotates nothing
            continue
        if field.name == "rope_theta":
            assert theirs.rope_parameters.pop("rope_type") in ("axial", "default")
            assert theirs.rope_parameters == {"rope_theta": config.rope_theta}
        else:
            assert getattr(theirs, field.name) == getattr(config, field.name), field.name


@pytest.mark.cases(24)
def test_written_config_reads_the_same(config_file: Path) -> None:
    hf = json.loads(config_file.read_text())
    config_class = get_arch(config_file.parent.name).config_class
    config = read_config(config_class, hf)
    written = json.loads(json.dumps(write_config(config, hf, torch.float16)))

    assert read_config(config_class, written, strict=True) == config
    assert written["torch_dtype"] == "float16"
    assert hf.items() - {("torch_dtype", hf["torch_dtype"])} <= written.items() if _flat(hf) else True
    ours, theirs = (their_config(c).to_dict() for c in (written, hf))
    assert ours.pop("dtype") == "float16"
    theirs.pop("quantization_config", None)  # read dequantized
    for config in (theirs, theirs.get("text_config", {}), theirs.get("vision_config", {})):
        config.pop("dtype", None)
    assert _changed(theirs, ours) == {}


def _flat(hf: dict[str, Any]) -> bool:
    return not any(isinstance(value, (dict, list)) for value in hf.values())


@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
def test_rope_of_both_transformers_versions(rope_type: str, style: str) -> None:
    values, expected = SCALINGS[rope_type]
    if style == "rope_parameters":
        config = read(rope_parameters={"rope_type": rope_type, "rope_theta": 5e5, **values})
    else:
        config = read(rope_theta=500000, rope_scaling={style: rope_type, **values})
    assert config.rope_scaling == expected
    assert config.rope_theta == 5e5
    assert type(config.rope_theta) is float

    written = write_config(config, {}, torch.float32)
    assert "rope_parameters" not in written
    assert read_config(LlamaConfig, json.loads(json.dumps(written)), strict=True) == config
    theirs = transformers.LlamaConfig(**written)
    assert theirs.rope_parameters["rope_type"] == rope_type
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert {key: theirs.rope_parameters[key] for key in values} == values


def test_everything_that_transformers_writes_is_known() -> None:
    theirs = transformers.LlamaConfig(**TINY, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3})
    config = read_config(LlamaConfig, json.loads(json.dumps(theirs.to_dict())), strict=True)
    assert (config.rope_theta, config.rope_scaling) == (7e3, LinearScaling(factor=2.0))


@pytest.mark.parametrize(("arch", "variant"), CASES, ids=str)
def test_reads_what_transformers_5_writes_and_writes_what_it_reads(arch: str, variant: str) -> None:
    config_class = get_arch(arch).config_class
    theirs = json.loads(json.dumps(transformers.AutoConfig.for_model(arch, **tiny(arch)[variant]).to_dict()))
    config = read_config(config_class, theirs, strict=True)
    for source in (theirs, {}):
        written = json.loads(json.dumps(write_config(config, source, torch.float32)))
        assert read_config(config_class, written, strict=True) == config
        again = json.loads(json.dumps(transformers.AutoConfig.for_model(**written).to_dict()))
        inert = {"architectures", "dtype", *format_of(get_arch(arch)).ignored_keys}
        theirs.get("text_config", {}).pop("dtype", None)
        assert _changed({key: value for key, value in theirs.items() if key not in inert}, again) == {}


def _changed(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The keys whose value in ``whole`` is another, each with both values; ``whole`` may have more keys."""
    changed = {}
    for key, value in part.items():
        other = whole.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            changed |= {f"{key}.{inner}": pair for inner, pair in _changed(value, other).items()}
        elif value != other:
            changed[key] = (value, other)
    return changed


@pytest.mark.parametrize("arch", ["gemma3_text", "olmo3"])
def test_one_object_for_all_layers_that_says_what_holds_anyway(arch: str) -> None:
    """transformers reads nothing from it."""
    base = {"model_type": arch, **TINY, "layer_types": ["sliding_attention", "full_attention"]}
    default = get_arch(arch).config_class.rope_theta
    for changes in (
        {"rope_parameters": {"rope_type": "default", "rope_theta": default}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": default, "factor": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "rope_theta": 5e3},
    ):
        config = read_config(get_arch(arch).config_class, base | changes, strict=True)
        theirs = transformers.AutoConfig.for_model(**copy.deepcopy(base | changes)).rope_parameters
        assert config.rope_scaling is None
        assert config.rope_theta == theirs["full_attention"]["rope_theta"]
        assert config.rope_local_base_freq == theirs["sliding_attention"]["rope_theta"]
    for rope in ({"rope_type": "default", "rope_theta": 777.0}, {"rope_type": "linear", "factor": 2.0}):
        with pytest.raises(ValueError, match="rope_parameters must hold one object for each of"):
            read_config(get_arch(arch).config_class, base | {"rope_parameters": rope})


def test_keys_stay_at_the_level_where_the_file_has_them(config_file: Path) -> None:
    hf = json.loads(config_file.read_text())
    if "text_config" not in hf:
        return
    written = write_config(read_config(get_arch(config_file.parent.name).config_class, hf), hf, torch.float32)
    for key in ("bos_token_id", "eos_token_id", "initializer_range"):
        if key in hf["text_config"]:
            assert written["text_config"][key] == hf["text_config"][key]
            assert written.get(key) == hf.get(key)


def test_rope_of_each_layer_type_in_the_older_spelling() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0}
    full, sliding = {**yarn, "rope_theta": 7e3}, {"rope_type": "default", "rope_theta": 3.0}
    nested = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, "vocab_size": 7}
    assert flat_rope(nested, 9.0) == {"vocab_size": 7, "rope_scaling": full, "rope_local_base_freq": 3.0}
    assert flat_rope({**nested, "rope_scaling": {"factor": 4.0}}, 9.0)["rope_scaling"] == full | {"factor": 4.0}
    old = {"rope_theta": 5.0, "rope_scaling": yarn, "rope_local_base_freq": 4.0}
    assert flat_rope(old, 9.0) == flat_rope({**old, "rope_parameters": {"full_attention": None}}, 9.0) == old
    with pytest.raises(ValueError, match=r"each of full_attention, sliding_attention, got \{.*\}\."):
        flat_rope({"rope_parameters": sliding}, 9.0)
    for bad in (full, {**sliding, "factor": 2.0}):
        with pytest.raises(ValueError, match=r"rope_parameters\.sliding_attention must be of type default, got"):
            flat_rope({"rope_parameters": {"full_attention": full, "sliding_attention": bad}}, 9.0)


def test_original_length_comes_from_the_top_level_then_the_rope_dict_then_the_length() -> None:
    values = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    cases = [({"original_max_position_embeddings": 8}, 16, 8), ({}, 16, 16), ({}, None, 64)]
    for top_level, inner, expected in cases:
        rope = {"rope_type": "llama3", **values, "original_max_position_embeddings": inner}
        config = read(rope_scaling=rope, **top_level)
        assert isinstance(config.rope_scaling, Llama3Scaling)
        assert config.rope_scaling.original_max_position_embeddings == expected
        assert read_config(LlamaConfig, write_config(config, top_level, torch.float32)) == config
    bare = {"rope_scaling": {"rope_type": "llama3", **values}}
    theirs = transformers.LlamaConfig(**copy.deepcopy(bare)).rope_parameters
    assert theirs["original_max_position_embeddings"] == 2048
    assert read_config(LlamaConfig, bare).rope_scaling == Llama3Scaling(**values, original_max_position_embeddings=2048)


@pytest.mark.parametrize("arch", ["gemma3_text", "olmo3"])
def test_rope_of_the_layers_without_a_window(arch: str) -> None:
    """Where layer types have rope parameters of their own, the original length at the top level means nothing."""
    config_class = get_arch(arch).config_class
    hf = {**TINY, "model_type": arch, "layer_types": ["sliding_attention", "full_attention"]}
    for original, length in ({}, 64), ({"original_max_position_embeddings": 24}, 24):
        scaled = {"rope_type": "longrope", **LONGROPE} | original
        if not original:
            del scaled["original_max_position_embeddings"]
        old = {"rope_theta": 7e3, "rope_scaling": scaled, "original_max_position_embeddings": 8}
        new = {
            "rope_parameters": {"full_attention": {"rope_theta": 7e3, **scaled}},
            "original_max_position_embeddings": 8,
        }
        for rope in (old, new):
            config = read_config(config_class, hf | rope)
            assert config.rope_theta == 7e3
            assert config.rope_scaling == LongRopeScaling(**LONGROPE | {"original_max_position_embeddings": length})
            for same in (
                hf | rope,
                write_config(config, hf | rope, torch.float32),
                write_config(config, {}, torch.float32),
            ):
                theirs = transformers.AutoConfig.for_model(**copy.deepcopy(same)).rope_parameters["full_attention"]
                kept = {"rope_type": "longrope", "rope_theta": 7e3, **LONGROPE} | {
                    "original_max_position_embeddings": length
                }
                assert theirs == kept
                assert read_config(config_class, same) == config


def test_the_base_of_olmo3s_layers_with_a_window_is_in_its_rope_parameters_only() -> None:
    theirs = transformers.Olmo3Config(rope_theta=7e3, rope_local_base_freq=50.0).rope_parameters
    assert theirs["sliding_attention"]["rope_theta"] == 5e5
    config = read_config(Olmo3Config, {"rope_theta": 7e3, "rope_local_base_freq": 50.0})
    assert (config.rope_theta, config.rope_local_base_freq) == (7e3, 5e5)


def test_other_names_of_an_activation() -> None:
    assert read(hidden_act="swish").hidden_act == "swish"
    assert read_config(GemmaConfig, {"hidden_act": "gelu_new"}).hidden_act == "gelu_new"
    for config_class in (Gemma2Config, Gemma3TextConfig):
        config = read_config(config_class, {"hidden_activation": "gelu_new"})
        assert write_config(config, {}, torch.float32)["hidden_activation"] == "gelu_new"


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
def test_longrope_of_phi3(name: str, style: str) -> None:
    """Its old names, the length at the top level of config.json, and the spelling that transformers 4 insists on."""
    factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    if style == "rope_parameters":  # transformers 5 writes the length in both places
        hf = {style: {"rope_type": name, "rope_theta": 7e3, "partial_rotary_factor": 0.5, **LONGROPE}}
    else:
        hf = {"rope_scaling": {style: name, **factors}, "rope_theta": 7e3, "partial_rotary_factor": 0.5}
    hf |= {**TINY, "head_dim": 32, "hidden_size": 128, "original_max_position_embeddings": 24}
    config = read_config(Phi3Config, hf, strict=True)
    assert config.rope_scaling == LongRopeScaling(**factors, original_max_position_embeddings=24)
    assert (config.rope_theta, config.partial_rotary_factor) == (7e3, 0.5)
    del hf["original_max_position_embeddings"]
    assert read_config(Phi3Config, hf).rope_scaling == LongRopeScaling(**factors, original_max_position_embeddings=4096)

    written = write_config(config, hf, torch.float32)
    assert read_config(Phi3Config, json.loads(json.dumps(written)), strict=True) == config
    assert written["rope_scaling"] == {"type": "longrope", **factors}
    assert (written["original_max_position_embeddings"], written["partial_rotary_factor"]) == (24, 0.5)
    rope = transformers.Phi3Config(**written).rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 24)
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (7e3, 0.5)


def test_rope_of_ministral3() -> None:
    """One more parameter; the class's own where config.json has none, the base of all of transformers in others."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for hf, theta, beta in [
        ({}, 1e6, 0.1),
        ({"rope_theta": 7e3}, 1e6, 0.1),
        ({"rope_parameters": {**yarn, "llama_4_scaling_beta": 0.2}}, 1e4, 0.2),
        ({"rope_scaling": {**yarn, "llama_4_scaling_beta": 0.2}, "rope_theta": 7e3}, 7e3, 0.2),
        ({"rope_parameters": {**yarn, "rope_theta": 7e3}}, 7e3, 0.0),
    ]:
        config = read_config(Ministral3Config, hf, strict=True)
        assert (config.rope_theta, config.llama_4_scaling_beta) == (theta, beta)
        assert config.rope_scaling.factor == (4.0 if hf.keys() - {"rope_theta"} else 16.0)
        theirs = transformers.Ministral3Config(**json.loads(json.dumps(hf)))
        rope = theirs.rope_parameters
        assert (rope["rope_theta"], rope.get("llama_4_scaling_beta", 0.0)) == (theta, beta)
        for same in (theirs.to_dict(), write_config(config, hf, torch.float32)):
            assert read_config(Ministral3Config, same, strict=True) == config
    with pytest.raises(ValueError, match="rope_scaling must be of type yarn, got None"):
        read_config(Ministral3Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}})


def test_rope_scaling_replaces_rope_parameters() -> None:
    config = read(
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1.0},
    )
    assert (config.rope_scaling, config.rope_theta) == (LinearScaling(factor=2.0), 10000.0)


def test_missing_and_null_values_are_the_defaults() -> None:
    assert read_config(LlamaConfig, {}) == LlamaConfig()
    nulls = dict.fromkeys(["num_key_value_heads", "head_dim", "rope_scaling", "rope_theta", "attention_dropout"])
    assert read_config(LlamaConfig, {**nulls, "quantization_config": None, "sliding_window": None}) == LlamaConfig()
    assert read(bos_token_id=None).bos_token_id is None
    written = write_config(read(bos_token_id=None), {}, torch.float32)
    assert read_config(LlamaConfig, written).bos_token_id is None


def test_keys_of_the_source_are_kept() -> None:
    source = {
        **TINY,
        "model_type": "llama",
        "dtype": "float32",
        "_name_or_path": "x/y",
        "mine": [1],
        "rope_parameters": {},
    }
    with pytest.warns(UserWarning, match="mine"):
        config = read_config(LlamaConfig, source)
    written = write_config(dataclasses.replace(config, vocab_size=97), source, torch.bfloat16)
    assert (written["_name_or_path"], written["mine"], written["vocab_size"]) == ("x/y", [1], 97)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["torch_dtype"] == "bfloat16"
    assert "dtype" not in written
    assert source["vocab_size"] == 96


def test_an_unknown_key_is_named() -> None:
    with pytest.warns(UserWarning, match=r"LlamaConfig does not know the keys head_gain, rope_scaling\.alpha\."):
        read_config(LlamaConfig, {"head_gain": 2, "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}})
    with pytest.raises(ValueError, match="does not know the keys head_gain"):
        read(head_gain=2)
    with pytest.raises(ValueError, match="does not know the keys original_max_position_embeddings"):
        read(original_max_position_embeddings=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "su"}}, r"rope_scaling must have one of the types .*llama3.*got 'su'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, r"rope_parameters must have one of the types .*got 'mrope'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"must have factor, high_freq_factor, low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor must be float, got '2'"),
        ({"rope_parameters": {"full": {}, "sliding": {}}}, r"must be the same for all layers, got .*full, sliding"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 70_000}},
            r"rope_scaling\.short_factor must be a list of at most 65,536 values, got 70,000\. Download it again",
        ),
        ({"eos_token_id": [1] * 70_000}, r"eos_token_id must be a list of at most 65,536 values, got 70,000"),
        ({"rope_scaling": ["linear", 2.0]}, r"rope_scaling must be an object of values, got \['linear', 2\.0\]"),
        ({"hidden_act": "gelu_new"}, r"hidden_act must be 'silu' or 'swish', got 'gelu_new'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            r"must not be quantized, got .*bitsandbytes with type fp4.*original.* and call quantize_base",
        ),
        ({"hidden_size": "32"}, r"hidden_size must be int, got '32'"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings must be bool, got 1"),
        ({"vocab_size": True}, r"vocab_size must be int, got True"),
        ({"vocab_size": 96.5}, r"vocab_size must be int, got 96.5"),
        ({"vocab_size": float("inf")}, r"vocab_size must be int, got inf"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id\[1\] must be int, got '2'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("arch", "name", "key"),
    [
        ("mixtral", "num_experts", "num_local_experts"),
        ("gemma3", "image_token_id", "image_token_index"),
        ("gemma3", "boi_token_id", "boi_token_index"),
        ("gemma3", "eoi_token_id", "eoi_token_index"),
    ],
)
def test_other_names_of_keys(arch: str, name: str, key: str) -> None:
    hf = {name: 5} | ({"vision_config": {"image_size": 64}, "mm_tokens_per_image": 4} if arch == "gemma3" else {})
    theirs = transformers.AutoConfig.for_model(arch, **copy.deepcopy(hf))
    config = read_config(get_arch(arch).config_class, hf, strict=True)
    assert getattr(config, key) == getattr(theirs, key) == 5
    assert read_config(type(config), write_config(config, hf, torch.float32)) == config


@pytest.mark.parametrize("arch", ["glm", "glm4"])
def test_null_for_the_share_that_turns_means_all(arch: str) -> None:
    for hf, share in ({}, 0.5), ({"partial_rotary_factor": None}, 1.0):
        theirs = transformers.AutoConfig.for_model(arch, **hf).rope_parameters
        assert theirs.get("partial_rotary_factor", 1.0) == share
        config = read_config(get_arch(arch).config_class, hf)
        assert config.rotary_width == 128 * share
        written = write_config(config, hf, torch.float32)
        assert read_config(type(config), written) == config
        assert transformers.AutoConfig.for_model(**written).rope_parameters == theirs


def test_attention_without_a_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_multiplier must be positive, got 0"):
        read_config(GraniteConfig, {"attention_multiplier": 0.0})


def test_a_required_key_is_asked_for() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Sized(LlamaConfig):
        num_experts: int

    assert read_config(Sized, {"num_experts": 3}) == Sized(num_experts=3)
    with pytest.raises(ValueError, match="must have num_experts, which Sized requires"):
        read_config(Sized, {})


def test_a_model_without_rms_norms_has_no_rms_norm_eps() -> None:
    assert "rms_norm_eps" not in {field.name for field in dataclasses.fields(DecoderConfig)}
    config = read_config(Cohere2Config, {"layer_norm_eps": 1e-6}, strict=True)
    assert "rms_norm_eps" not in write_config(config, {}, torch.float32)
    with pytest.raises(ValueError, match="Cohere2Config does not know the keys rms_norm_eps"):
        read_config(Cohere2Config, {"rms_norm_eps": 1e-6}, strict=True)
