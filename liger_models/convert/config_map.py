"""config.json in and out of a config dataclass.

Reads what transformers 4 wrote (``rope_theta`` and ``rope_scaling``, ``torch_dtype``) and what transformers 5 writes
(``rope_parameters``, ``dtype``), and writes what both read. A value that cannot be honoured is an error; a key that is
not known is named in a warning.
"""

import dataclasses
import types
import typing
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from liger_models.convert import from_json, get_hf_class, get_ignored_keys, model_type_of, to_json
from liger_models.kernels.dispatch import check
from liger_models.layers.config import LAYER_TYPES
from liger_models.layers.rope import ROPE_TYPES, LongRopeScaling, RopeScaling

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

_ORIGIN = """
    architectures model_type transformers_version _name_or_path _commit_hash torch_dtype dtype use_cache pretraining_tp
    _attn_implementation _attn_implementation_autoset attn_implementation unsloth_version unsloth_fixed auto_map
    is_llama_config rope_interleaved
"""
_IN_EVERY_CONFIG = """
    output_attentions output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads
    finetuning_task task_specific_params problem_type num_labels id2label label2id tokenizer_class prefix
    sep_token_id decoder_start_token_id
"""
_GENERATION = """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
IGNORED_KEYS = frozenset(f"{_ORIGIN} {_IN_EVERY_CONFIG} {_GENERATION}".split())
"""Keys that carry no architecture: where the file comes from and how to run it (with two keys of SmolLM's, which
transformers does not read either), what transformers writes into every config, generation settings of old files."""

_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")


def read_config(config_class: "type[Config]", hf: Mapping[str, Any], *, strict: bool = False) -> "Config":
    """The config that a config.json describes.

    Args:
        config_class: dataclass whose fields have config.json's spelling.
        hf: the content of config.json.
        strict: an unknown key is an error and not a warning.

    Raises:
        ValueError: a quantised checkpoint, a rope type or a value that is not supported, a required key that is
            missing; with ``strict``, an unknown key.
    """
    quantization = hf.get("quantization_config") or hf.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"config.json: the checkpoint must not be quantised, got quantization_config ({method}). "
            "Load the original checkpoint that it was made from."
        )

    model_type = model_type_of(config_class)
    hf = from_json(model_type, hf)
    ignored = IGNORED_KEYS | get_ignored_keys(model_type)
    rope_keys = _ROPE_KEYS if "rope_scaling" in typing.get_type_hints(config_class) else ()
    values, unknown = _read_rope(config_class, hf) if rope_keys else ({}, [])
    rest = {key: value for key, value in hf.items() if key not in rope_keys}
    values = _read_fields(config_class, rest, ignored, "", unknown) | values

    if unknown:
        message = (
            f"config.json: keys that {config_class.__name__} does not know: {', '.join(sorted(unknown))}. "
            "Check that they do not change the architecture, and "
        )
        if strict:
            raise ValueError(f"{message}remove them, or load with strict=False.")
        warnings.warn(f"{message}ignore this warning; strict=True makes it an error.", stacklevel=2)

    return _made(config_class, values)


def _read_fields(
    config_class: "type[DataclassInstance]",
    hf: Mapping[str, Any],
    ignored: frozenset[str],
    where: str,
    unknown: list[str],
) -> dict[str, Any]:
    """Values of the fields that a config.json, or a part of it, has; adds to the keys not understood."""
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for key, value in hf.items():
        if key in hints:
            part = hints[key]
            if dataclasses.is_dataclass(part) and isinstance(part, type) and isinstance(value, Mapping):
                values[key] = _made(part, _read_fields(part, value, ignored, f"{where}{key}.", unknown))
            elif value is not None or _takes_none(part):  # a null elsewhere means that the key is not set
                values[key] = _typed(f"{where}{key}", value, part)
        elif key not in ignored and value is not None:
            unknown.append(f"{where}{key}")
    return values


def _made(config_class: "type[Config]", values: Mapping[str, Any]) -> "Config":
    fields = dataclasses.fields(config_class)
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"config.json: must have {', '.join(missing)}, which {config_class.__name__} needs.")
    return config_class(**values)


def _read_rope(config_class: "type[DataclassInstance]", hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` of a config, and the keys not understood."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = hf.get(where) or {}
    check(isinstance(given, Mapping), f"config.json: {where} must be an object of values, got {given!r}.")
    rope = {key: value for key, value in given.items() if value is not None}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: {where} must be one set of values for all layers, got one for each of {', '.join(rope)}."
        )
    theta = rope.pop("rope_theta", hf.get("rope_theta"))
    fields: dict[str, Any] = {} if theta is None else {"rope_theta": _typed("rope_theta", theta, float)}
    if any(field.name == "partial_rotary_factor" for field in dataclasses.fields(config_class)):
        partial = rope.pop("partial_rotary_factor", None)
        fields |= {} if partial is None else {"partial_rotary_factor": _typed("partial_rotary_factor", partial, float)}
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    rope_type = getattr(config_class, "rope_aliases", {}).get(rope_type, rope_type)
    original_length = getattr(config_class, "original_length", None)
    top_level = hf.get("original_max_position_embeddings") or original_length
    if rope_type == "default":
        fields["rope_scaling"] = None
        accepted: set[str] = set()
    elif rope_type in ROPE_TYPES:
        scaling = ROPE_TYPES[rope_type]
        hints = typing.get_type_hints(scaling)
        accepted = set(hints)
        if "original_max_position_embeddings" in accepted:
            rope["original_max_position_embeddings"] = (
                top_level or rope.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
            )
        values = {key: _typed(f"{where}.{key}", value, hints[key]) for key, value in rope.items() if key in accepted}
        required = {field.name for field in dataclasses.fields(scaling) if field.default is dataclasses.MISSING}
        if required - values.keys():
            raise ValueError(
                f"config.json: {where} of type {rope_type!r} must have {', '.join(sorted(required))}, "
                f"got {', '.join(sorted(values)) or 'none of them'}."
            )
        fields["rope_scaling"] = scaling(**values)
    else:
        raise ValueError(
            f"config.json: {where} must have one of the types default, {', '.join(ROPE_TYPES)}, got {rope_type!r}."
        )

    unknown = [f"{where}.{key}" for key in rope if key not in accepted]
    if top_level is not None and original_length is None and "original_max_position_embeddings" not in accepted:
        unknown.append("original_max_position_embeddings")
    return fields, unknown


def flat_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose ``rope_parameters`` hold a set of values for each layer type, in the older spelling.

    Those of full attention become ``rope_theta`` and ``rope_scaling``, those of sliding attention
    ``rope_local_base_freq``.

    Raises:
        ValueError: other layer types, or anything but a base for sliding attention.
    """
    flat = {key: value for key, value in hf.items() if key != "rope_parameters"}
    nested = hf.get("rope_parameters") or {}
    if nested.keys() - set(LAYER_TYPES):
        raise ValueError(
            f"config.json: rope_parameters must hold a set of values for each of {', '.join(LAYER_TYPES)}, "
            f"got {', '.join(nested)}."
        )
    full, sliding = (dict(nested.get(layer_type) or {}) for layer_type in LAYER_TYPES)
    if full:
        flat["rope_scaling"] = full | (hf.get("rope_scaling") or {})  # with rope_theta in it
    theta, rope_type = sliding.pop("rope_theta", None), sliding.pop("rope_type", "default")
    if theta is not None:
        flat["rope_local_base_freq"] = theta
    if rope_type != "default" or any(value is not None for value in sliding.values()):
        raise ValueError(
            "config.json: rope_parameters.sliding_attention must be of type default, "
            f"got {nested['sliding_attention']}. The architecture scales full attention only."
        )
    return flat


def read_multimodal(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of a Qwen vision-language model in the spelling of its class.

    The text's keys stand at the top, the sections of the rotary frequencies beside the rope parameters, the base of the
    tower's frequencies in ``vision_config``.

    Raises:
        ValueError: rope parameters that the architectures do not have.
    """
    text, vision = (dict(hf.get(part) or {}) for part in ("text_config", "vision_config"))
    tied = bool(hf.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    flat: dict[str, Any] = dict(hf) | text | {"tie_word_embeddings": tied, "model_type": hf.get("model_type")}
    flat.pop("text_config", None)
    where = "rope_scaling" if flat.get("rope_scaling") else "rope_parameters"
    rope, axial = dict(flat.get(where) or {}), dict(vision.pop("rope_parameters", None) or {})
    interleaved, axial_type = rope.pop("mrope_interleaved", None), axial.pop("rope_type", "axial")
    check(
        interleaved in (None, flat["model_type"] in ("qwen3_vl", "qwen3_vl_moe")) and axial_type == "axial",
        f"config.json: {where}.mrope_interleaved must be left out or be that of the architecture, and the tower's "
        f"rope_type 'axial', got {interleaved} and {axial_type!r}.",
    )
    if rope.get("mrope_section"):
        flat["mrope_section"] = rope["mrope_section"]
    rope.pop("mrope_section", None)
    return flat | {where: rope, "vision_config": vision | axial}


def write_multimodal(keys: Mapping[str, Any], *, interleaved: bool = False) -> dict[str, Any]:
    """What `read_multimodal` reads, of the text's keys at the top; see `write_config`."""
    out, vision = dict(keys), dict(keys["vision_config"])
    theta = vision.pop("rope_theta")
    if theta != 10000.0:
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": theta}
    rope = out["rope_scaling"] or {"rope_type": "default"} | ({} if interleaved else {"type": "mrope"})
    sections = {"mrope_section": out.pop("mrope_section")} | ({"mrope_interleaved": True} if interleaved else {})
    return out | {"rope_scaling": rope | sections, "vision_config": vision}


def write_config(config: "DataclassInstance", hf: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a config, in the keys that transformers 4 and 5 both read.

    Args:
        config: the config to write.
        hf: the config.json that it was read from, whose other keys are kept; empty if there is none.
        dtype: the dtype of the weights that stand beside it.

    Returns:
        The content of config.json; ``read_config`` gives ``config`` again.
    """
    model_type = model_type_of(type(config))
    out = dict(hf) | {
        "architectures": [get_hf_class(model_type)],
        "model_type": model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    for key in ("dtype", "rope_parameters", "text_config"):
        out.pop(key, None)
    original_length = getattr(config, "original_length", None)
    if original_length is None:
        out.pop("original_max_position_embeddings", None)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "rope_scaling":
            keys |= _write_scaling(value, original_length)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            keys[field.name] = dataclasses.asdict(value)
        elif value is not None or field.default is not None or field.name in out:
            keys[field.name] = value
    written = to_json(model_type, keys)
    for key in [key for key in written if key.endswith("_config")]:  # a part keeps its unknown keys, as the whole does
        part = {name: value for name, value in (hf.get(key) or {}).items() if name not in ("dtype", "torch_dtype")}
        written[key] = part | written[key]
    return out | written


def _write_scaling(scaling: RopeScaling | None, original_length: int | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_scaling": None}
    (rope_type,) = (name for name, kind in ROPE_TYPES.items() if kind is type(scaling))
    values = {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    if not isinstance(scaling, LongRopeScaling):
        return {"rope_scaling": {"rope_type": rope_type, **values}}
    # transformers 4 looks for the length beside the dict, and its Phi-3 refuses other keys and spellings in the dict.
    length = scaling.original_max_position_embeddings
    if original_length is not None:
        del values["original_max_position_embeddings"]
    return {"rope_scaling": {"type": rope_type, **values}, "original_max_position_embeddings": length}


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _takes_none(hint: Any) -> bool:
    return type(None) in _options(hint)


def _typed(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the type that its field declares; a whole number may stand for a float."""
    options = _options(hint)
    if type(value) in options:
        return value
    if type(value) is int and float in options:
        return float(value)
    for option in options:
        if typing.get_origin(option) is list and isinstance(value, list):
            (element,) = typing.get_args(option)
            return [_typed(f"{key}[{index}]", item, element) for index, item in enumerate(value)]
    kinds = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"config.json: {key} must be {kinds}, got {value!r}.")
