"""Conversion between config.json and config dataclasses.

This module reads the formats of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5
(``rope_parameters``, ``dtype``), and writes a format that both versions can read. An unsupported value raises an
error. Unknown keys are listed in a warning.
"""

import contextlib
import dataclasses
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from liger_models.convert.encodings import check_quantization, quantization_of
from liger_models.convert.format import format_of
from liger_models.layers.config import LAYER_TYPES, check_numbers
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
    is_causal finetuning_task task_specific_params problem_type num_labels id2label label2id tokenizer_class prefix
    sep_token_id decoder_start_token_id
"""
_GENERATION = """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
IGNORED_KEYS = frozenset(f"{_ORIGIN} {_IN_EVERY_CONFIG} {_GENERATION}".split())
"""Keys of config.json that do not describe the architecture.

Some of these keys describe the origin of the file or how to run the model. Other keys are in every config that
transformers writes, or are generation settings in old files. The keys ``is_llama_config`` and ``rope_interleaved``
occur only in SmolLM's files, and transformers does not read them.
"""

MOST = {
    **dict.fromkeys(("num_hidden_layers", "depth", "num_global_layers"), 1000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4096),
}
"""Limits for the numbers of layers and experts in a config.json.

For a checkpoint with more tensors than such a limit, the number of tensors is the limit instead. Without limits, a
config.json of a few bytes could make this package build an arbitrary number of modules.
"""

MOST_EXPERTS = 100_000
"""Limit for the number of layers times the number of experts.

For a checkpoint with more tensors than this limit, the number of tensors is the limit instead.
"""

_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")


_ANYWHERE = ("bos_token_id", "eos_token_id", "initializer_range")
"""Keys that are read both at the top level and in ``text_config``."""


def check_counts(hf: Mapping[str, Any], tensors: int = 0) -> None:
    """Check that a config.json has plausible numbers of layers and experts.

    Args:
        hf: the content of config.json.
        tensors: number of tensors in the checkpoint, or 0 if unknown. The limits are raised to at least this number.

    Raises:
        ValueError: a number exceeds both its limit (`MOST` or `MOST_EXPERTS`) and the number of tensors.
    """
    # Find the largest value of each key in the file and in its nested objects.
    counts = dict.fromkeys(MOST, 0)
    nested = [hf]
    while nested:
        for key, value in nested.pop().items():
            if isinstance(value, Mapping):
                nested.append(value)
            elif key in MOST and isinstance(value, int):
                limit = max(MOST[key], tensors)
                if not value <= limit:
                    raise ValueError(
                        f"config.json: {key} must be at most {limit}, got {value}. A checkpoint with more tensors may "
                        "have more: load it from a folder."
                    )
                counts[key] = max(value, counts[key])

    # The worst case is that every layer has all experts.
    experts = max(count for name, count in counts.items() if "experts" in name) * counts["num_hidden_layers"]
    if not experts <= max(MOST_EXPERTS, tensors):
        raise ValueError(
            f"config.json: num_hidden_layers times the number of experts must be at most {max(MOST_EXPERTS, tensors)}, "
            f"got {experts}. A checkpoint with more tensors may have more: load it from a folder."
        )


def is_causal(hf: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a causal model. As in transformers, null and 0 count as false."""
    return all(level.get("is_causal", True) for level in (hf, hf.get("text_config") or {}))


@contextlib.contextmanager
def blaming(where: object) -> Iterator[None]:
    """Context manager that turns the errors that an invalid file causes (KeyError, for example) into a ValueError.

    Args:
        where: name of the file, for the error message.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"{where}: must describe a model that can be built, got {type(error).__name__}: {first}. Check its values, "
            "or download it again."
        ) from error


def read_config(
    config_class: "type[Config]", hf: Mapping[str, Any], *, strict: bool = False, tensors: int = 0
) -> "Config":
    """Build a config from the content of a config.json.

    Args:
        config_class: dataclass whose fields have the names of keys in config.json.
        hf: the content of config.json.
        strict: whether unknown keys are an error instead of a warning.
        tensors: number of tensors in the checkpoint, or 0 if unknown; see `check_counts`.

    Raises:
        ValueError: the quantization, a rope type or a value is not supported; a required key is missing; a number is
            out of range; or a key is unknown and ``strict`` is True.
    """
    check_counts(hf, tensors)
    with blaming("config.json"):
        return _read_config(config_class, hf, strict)


def _read_config(config_class: "type[Config]", hf: Mapping[str, Any], strict: bool) -> "Config":
    # A quantized checkpoint is supported only if its weights can be dequantized while they are read.
    checkpoint = format_of(config_class)
    quantization = quantization_of(hf)
    if quantization:
        check_quantization(quantization)
        if quantization["quant_method"] == "mxfp4" and "mxfp4" not in checkpoint.quantized_maps:
            raise ValueError(
                f"config.json: a checkpoint in MXFP4 must be of GPT-OSS, got model_type {checkpoint.model_type!r}. "
                "Load the original checkpoint instead."
            )
        hf = {key: value for key, value in hf.items() if key not in ("quantization_config", "compression_config")}

    # Rename the keys to the names of the class's fields, and read the fields. `_read_rope` reads the rope settings.
    hf = checkpoint.from_json(hf)
    ignored = IGNORED_KEYS | frozenset(checkpoint.ignored_keys)
    rope_keys = _ROPE_KEYS if "rope_scaling" in typing.get_type_hints(config_class) else ()
    values, unknown = _read_rope(config_class, hf) if rope_keys else ({}, [])
    rest = {key: value for key, value in hf.items() if key not in rope_keys}
    values = _read_fields(config_class, rest, ignored, "", unknown) | values

    if unknown:
        message = (
            f"config.json: {config_class.__name__} does not know the keys {', '.join(sorted(unknown))}. "
            "Check that they do not change the architecture, and "
        )
        if strict:
            raise ValueError(f"{message}remove them, or load with strict=False.")
        warnings.warn(f"{message}ignore this warning; strict=True makes it an error.", stacklevel=4)

    return _build(config_class, values)


def _read_fields(
    config_class: "type[DataclassInstance]",
    hf: Mapping[str, Any],
    ignored: frozenset[str],
    where: str,
    unknown: list[str],
) -> dict[str, Any]:
    """Read the fields of a class from a config.json or from a nested object. Unknown keys are appended to ``unknown``.

    ``where`` is the path of the nested object, such as "vision_config."; empty for the top level.
    """
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for key, value in hf.items():
        if key in hints:
            hint = hints[key]
            if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
                values[key] = _build(hint, _read_fields(hint, value, ignored, f"{where}{key}.", unknown))
            elif value is not None or type(None) in _options(hint):
                values[key] = _typed(f"{where}{key}", value, hint)
            elif hint is bool:  # as in transformers, null means false; for other types, null means a missing key
                values[key] = False
        elif key not in ignored and value is not None:
            unknown.append(f"{where}{key}")
    return values


def _build(config_class: "type[Config]", values: Mapping[str, Any]) -> "Config":
    """Build a config from the values of its fields. Raise ValueError if a value is missing or out of range."""
    fields = dataclasses.fields(config_class)
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"config.json: must have {', '.join(missing)}, which {config_class.__name__} requires.")
    check_numbers(config_class.__name__, values)
    return config_class(**values)


def _read_rope(config_class: "type[DataclassInstance]", hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``. Return the fields and the unknown keys."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    stored = hf.get(where) or {}
    if not isinstance(stored, Mapping):
        raise ValueError(f"config.json: {where} must be an object of values, got {stored!r}.")
    rope = {key: value for key, value in stored.items() if value is not None}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: {where} must be the same for all layers, got one object for each of {', '.join(rope)}."
        )

    # Read the values that are fields of the config rather than of the scaling.
    fields: dict[str, Any] = {}
    theta = rope.pop("rope_theta", hf.get("rope_theta"))
    if theta is not None:
        fields["rope_theta"] = _typed("rope_theta", theta, float)
    if any(field.name == "partial_rotary_factor" for field in dataclasses.fields(config_class)):
        partial = rope.pop("partial_rotary_factor", None)
        if partial is not None:
            fields["partial_rotary_factor"] = _typed("partial_rotary_factor", partial, float)

    # Read the rope type from the key `rope_type` or its older name `type`, and the original length from the top level.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    rope_type = getattr(config_class, "rope_aliases", {}).get(rope_type, rope_type)
    original_length = getattr(config_class, "original_length", None)
    top_level = hf.get("original_max_position_embeddings") or original_length
    if rope_type not in ("default", *ROPE_TYPES):
        raise ValueError(
            f"config.json: {where} must have one of the types default, {', '.join(ROPE_TYPES)}, got {rope_type!r}."
        )

    # Read the values of the scaling.
    scaling = ROPE_TYPES.get(rope_type)
    hints = {} if scaling is None else typing.get_type_hints(scaling)
    if "truncate" in hints and stored.get("truncate", True) is None:  # null means false, as in transformers
        rope["truncate"] = False
    if "original_max_position_embeddings" in hints:
        rope["original_max_position_embeddings"] = (
            top_level
            or rope.get("original_max_position_embeddings")
            or hf.get("max_position_embeddings")
            or getattr(config_class, "max_position_embeddings", None)
        )
    values = {key: _typed(f"{where}.{key}", value, hints[key]) for key, value in rope.items() if key in hints}
    if scaling is None:
        fields["rope_scaling"] = None
    else:
        required = {field.name for field in dataclasses.fields(scaling) if field.default is dataclasses.MISSING}
        if required - values.keys():
            raise ValueError(
                f"config.json: {where} of type {rope_type!r} must have {', '.join(sorted(required))}, "
                f"got {', '.join(sorted(values)) or 'none of them'}."
            )
        fields["rope_scaling"] = scaling(**values)

    # Collect the keys that were not read.
    unknown = [f"{where}.{key}" for key in rope if key not in hints]
    if top_level is not None and original_length is None and "original_max_position_embeddings" not in hints:
        unknown.append("original_max_position_embeddings")
    return fields, unknown


def flat_rope(hf: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Convert a config.json in which ``rope_parameters`` has one object per layer type to the older format.

    The object for full attention, including its ``rope_theta``, becomes ``rope_scaling``. The base of sliding attention
    becomes ``rope_local_base_freq``. The key ``original_max_position_embeddings`` at the top level is dropped. If
    ``rope_parameters`` is a single object for all layers, transformers ignores this object. Such an object is therefore
    accepted only if its values are the defaults of full attention.

    Args:
        hf: the content of config.json.
        theta: rotary base for full attention if the file has no base.

    Raises:
        ValueError: ``rope_parameters`` has an unknown layer type, or is a single object without the default values; or
            sliding attention has a rope parameter besides its base.
    """
    flat = {
        key: value for key, value in hf.items() if key not in ("rope_parameters", "original_max_position_embeddings")
    }
    nested = hf.get("rope_parameters") or {}
    default = {"rope_type": "default", "type": "default", "rope_theta": hf.get("rope_theta") or theta}
    if all(value is None or default.get(key) == value for key, value in nested.items()):
        nested = {}
    if nested.keys() - set(LAYER_TYPES):
        raise ValueError(
            f"config.json: rope_parameters must hold one object for each of {', '.join(LAYER_TYPES)}, got {nested}."
        )

    # Read the scaling for full attention, and the base for sliding attention.
    full, sliding = (dict(nested.get(layer_type) or {}) for layer_type in LAYER_TYPES)
    if full:
        flat["rope_scaling"] = full | (hf.get("rope_scaling") or {})  # this includes rope_theta
    theta, rope_type = sliding.pop("rope_theta", None), sliding.pop("rope_type", "default")
    if theta is not None:
        flat["rope_local_base_freq"] = theta
    if rope_type != "default" or any(value is not None for value in sliding.values()):
        raise ValueError(
            "config.json: rope_parameters.sliding_attention must be of type default, "
            f"got {nested['sliding_attention']}. The architecture scales the rotation of full attention only."
        )
    return flat


def renaming(names: Mapping[str, str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that renames keys of a config.json, for ``from_json`` or ``to_json`` of `CheckpointFormat`.

    ``names`` maps old keys to new keys.
    """
    return lambda settings: {names.get(key, key): value for key, value in settings.items()}


def of_text(
    config_class: "type[DataclassInstance]", hf: Mapping[str, Any], text: Mapping[str, Any], top: Collection[str]
) -> dict[str, Any]:
    """Merge a config.json and its ``text_config`` into one flat object.

    If a key occurs at both levels, the result has the value that transformers would read.

    Args:
        config_class: the config class. Keys with the names of its fields are read from ``text`` instead of the top
            level.
        hf: the content of config.json.
        text: the content of ``text_config`` in config.json.
        top: fields that are read from the top level instead of ``text``.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}.difference(_ANYWHERE)
    others = {key: value for key, value in hf.items() if key not in ("text_config", *_ROPE_KEYS, *fields)}
    nested = {key: value for key, value in text.items() if key not in top or key in _ANYWHERE}
    return others | nested | {key: hf[key] for key in top if key in hf}


def write_config(config: "DataclassInstance", hf: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Convert a config to a config.json that transformers 4 and 5 both read.

    Args:
        config: the config to write.
        hf: the content of the config.json that the config was read from, or an empty mapping. Keys of ``hf`` that
            correspond to no field are kept.
        dtype: the dtype of the weights in the checkpoint.

    Returns:
        The content of config.json, from which `read_config` restores ``config``.
    """
    checkpoint = format_of(type(config))

    # Keep the other keys of the file, but drop keys that are alternative names of keys that are written below.
    out = dict(hf) | {
        "architectures": [checkpoint.hf_class],
        "model_type": checkpoint.model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    for key in (
        "dtype",
        "rope_parameters",
        "text_config",
        "quantization_config",
        "compression_config",
    ):  # weights were dequantized
        out.pop(key, None)
    original_length = getattr(config, "original_length", None)
    if original_length is None:
        out.pop("original_max_position_embeddings", None)

    # Write the fields. None is written only if the file had the key or if the field's default is not None.
    keys: dict[str, Any] = {}
    present = out.keys() | (hf.get("text_config") or {}).keys()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "rope_scaling":
            keys |= _write_scaling(value, original_length)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            keys[field.name] = dataclasses.asdict(value)
        elif value is not None or field.default is not None or field.name in present:
            keys[field.name] = value

    # Unknown keys of nested objects are also kept.
    written = checkpoint.to_json(keys)
    # A key that is read at both levels stays at the level where the file has it.
    for key in _ANYWHERE:
        if key in written and key not in hf and key in (hf.get("text_config") or {}) and "text_config" in written:
            written["text_config"] = {**written["text_config"], key: written.pop(key)}
    stale = ("dtype", "torch_dtype", "rope_parameters")
    for key in [key for key, value in written.items() if key.endswith("_config") and isinstance(value, Mapping)]:
        kept = {name: value for name, value in (hf.get(key) or {}).items() if name not in stale}
        written[key] = kept | written[key]
    return out | written


def _write_scaling(scaling: RopeScaling | None, original_length: int | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_scaling": None}
    (rope_type,) = (name for name, scaling_class in ROPE_TYPES.items() if scaling_class is type(scaling))
    values = {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    if not isinstance(scaling, LongRopeScaling):
        return {"rope_scaling": {"rope_type": rope_type, **values}}

    # transformers 4 reads the original length at the top level. Phi-3 in transformers 4 rejects an original length or a
    # "rope_type" in `rope_scaling`.
    length = scaling.original_max_position_embeddings
    if original_length is None:
        return {"rope_scaling": {"rope_type": rope_type, **values}, "original_max_position_embeddings": length}
    del values["original_max_position_embeddings"]
    return {"rope_scaling": {"type": rope_type, **values}, "original_max_position_embeddings": length}


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


LONGEST_LIST = 65_536
"""Largest length of a list in config.json. Real lists have one value for each layer, frequency or special token."""


def _typed(key: str, value: Any, hint: Any) -> Any:
    """Convert ``value`` to the declared type of the field. 1 is accepted as 1.0, and 16.0 is accepted as 16."""
    options = _options(hint)
    if type(value) in options:
        return value
    if type(value) is int and float in options:
        return float(value)
    if type(value) is float and int in options and value.is_integer():
        return int(value)
    for option in options:
        if typing.get_origin(option) is list and isinstance(value, list):
            if len(value) > LONGEST_LIST:
                raise ValueError(
                    f"config.json: {key} must be a list of at most {LONGEST_LIST:,} values, got {len(value):,}. "
                    "Download it again."
                )
            (element,) = typing.get_args(option)
            return [_typed(f"{key}[{index}]", item, element) for index, item in enumerate(value)]
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"config.json: {key} must be {names}, got {value!r}.")
