"""The table of model classes, in which built-in families and custom architectures are registered."""

import dataclasses
import functools
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import FORMATS, CheckpointFormat
from liger_models.convert.weight_map import WeightMap

MODEL_CLASSES: dict[str, type[CausalLM]] = {}
"""Maps ``model_type`` to the model class, for each imported family and each architecture given to `register`."""

NOT_FAMILIES = ("auto", "registry")
"""Modules of this package that define no family, besides modules whose names begin with an underscore.

A family's file is named after its ``model_type``. The ``__init__.py`` of a family's folder has a table ``MODEL_TYPES``,
which maps each ``model_type`` to the file that registers it.
"""

LANGUAGE_MODELS = {
    "gemma3n": f"{__package__}.gemma3n.model",
    "kimi_k25": f"{__package__}.deepseek_v3.kimi_k25",
}
"""Maps the ``model_type`` of multimodal models to their modules, which implement only the language model.

`built_in_modules` does not list these models.
"""

ALIASES = {"kimi_k2": "deepseek_v3", "lfm2-vl": "lfm2_vl"}
"""Maps other values of ``model_type`` in released files to the ``model_type`` of the family that reads the files."""

_NEEDED = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
"""Fields that `CausalLM` reads and `save_pretrained` writes."""


@functools.cache
def built_in_modules() -> dict[str, str]:
    """Map the ``model_type`` of every built-in family to the full name of its module, without importing any family."""
    modules = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name in NOT_FAMILIES or module.name.startswith("_"):
            continue
        path = f"{__package__}.{module.name}"
        if module.ispkg:
            # A folder has several model types, and its table lists their files without importing them.
            files = importlib.import_module(path).MODEL_TYPES
            modules.update({model_type: f"{path}.{file}" for model_type, file in files.items()})
        else:
            modules[module.name] = path
    return modules


def built_in() -> list[str]:
    """The ``model_type`` of every built-in family, sorted."""
    return sorted(built_in_modules())


def add_family(
    model_class: type[CausalLM],
    *,
    model_type: str,
    hf_class: str,
    weight_map: Callable[[Any], WeightMap],
    **more: Any,
) -> None:
    """Add a model class to `MODEL_CLASSES`, and the format of its checkpoints to `FORMATS`.

    The arguments after ``model_class`` are the fields of `CheckpointFormat`.
    """
    checkpoint = CheckpointFormat(model_type=model_type, hf_class=hf_class, weight_map=weight_map, **more)
    MODEL_CLASSES[model_type] = model_class
    FORMATS[model_class] = FORMATS[model_class.config_class] = checkpoint


def register(
    model_type: str,
    model_class: type[CausalLM],
    weight_map: Callable[[Any], WeightMap] | None = None,
    *,
    other_maps: Callable[[Any], list[WeightMap]] | None = None,
    from_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    to_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    hf_class: str | None = None,
) -> None:
    """Register a custom architecture. Its models can then be saved, and `AutoLigerModel` finds the class by the
    ``model_type`` in config.json.

    Call this function after the class definition, in the same module. If the class is defined and registered again, for
    example by rerunning a notebook cell, the new class replaces the earlier one.

    Args:
        model_type: ``model_type`` in config.json, which must not be in `list_archs` yet.
        model_class: class derived from `CausalLM`. Its ``config_class`` must be a dataclass that no other model uses,
            and JSON must be able to represent its fields; `DecoderConfig` has the usual fields.
        weight_map: function from a config to the `WeightMap` of its checkpoints. By default parameters are stored under
            their own names.
        other_maps: function from a config to a list with one `WeightMap` for each further naming scheme of tensors.
            These schemes are read but never written.
        from_json: function that renames the keys of a config.json to the fields of the config class.
        to_json: the inverse of ``from_json``.
        hf_class: name of the class in transformers, for ``architectures`` in config.json; by default the name of
            ``model_class``.

    Raises:
        ValueError: the name or the class is already registered, or models of the class could not be saved and loaded.
    """
    if not isinstance(model_type, str) or model_type == "":
        raise ValueError(f"register: model_type must be a non-empty string, as in config.json, got {model_type!r}.")
    if not isinstance(model_class, type) or not issubclass(model_class, CausalLM) or model_class is CausalLM:
        raise ValueError(
            f"register: model_class must be a class that derives from liger_models.base.CausalLM, got {model_class!r}."
        )
    config_class = getattr(model_class, "config_class", None)
    if not isinstance(config_class, type) or "__dataclass_fields__" not in vars(config_class):
        raise ValueError(
            f"register: {model_class.__name__}.config_class must be a dataclass, got {config_class!r}. Derive it from "
            "liger_models.layers.DecoderConfig, with @dataclass(frozen=True, kw_only=True) above it."
        )
    assert config_class is not None

    # The model type must be unused, or belong to an earlier definition of the same class.
    before = MODEL_CLASSES.get(model_type)
    ours = model_type in built_in()
    if ours or (before is not None and _path(before) != _path(model_class)):
        raise ValueError(
            f"register: model_type must be a name that is free, got {model_type!r}, which is taken by "
            f"{'an architecture of liger_models' if ours or before is None else _path(before)}. Choose another."
        )
    # The class determines the format that is written, so a class has only one model type.
    for cls in (model_class, config_class):
        registered = FORMATS[cls].model_type if cls in FORMATS else None
        if registered not in (None, model_type):
            raise ValueError(
                f"register: {model_class.__name__} and its config_class must be classes of their own, got "
                f"{cls.__name__}, registered as {registered!r}. Derive a class from it; a derived config_class is a "
                "dataclass too."
            )
    _check_fields(config_class)
    add_family(
        model_class,
        model_type=model_type,
        hf_class=hf_class or model_class.__name__,
        weight_map=weight_map or (lambda config: _own_names(model_class, config)),
        from_json=from_json,
        to_json=to_json,
        **({} if other_maps is None else {"other_maps": other_maps}),
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


RESERVED = ("model_type", "rope_parameters", "quantization_config", "compression_config", "text_config")
"""Keys of config.json that have a special meaning in loading. Plain fields of a config class can't have these names."""


def _check_fields(config_class: type) -> None:
    """Raise ValueError if a config of this class could not be saved by `save_pretrained` and loaded again."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name in RESERVED and not (field.name == "text_config" and dataclasses.is_dataclass(hints[field.name])):
            raise ValueError(
                f"register: {config_class.__name__} must not have the field {field.name}, which has a meaning of its "
                "own in config.json. Rename it."
            )
    missing = [field for field in _NEEDED if field not in hints]
    if missing:
        raise ValueError(
            f"register: {config_class.__name__} must have the fields {', '.join(_NEEDED)}, but lacks "
            f"{', '.join(missing)}. Derive it from liger_models.layers.DecoderConfig."
        )
    for field in dataclasses.fields(config_class):
        if field.name != "rope_scaling" and not _fits_json(hints[field.name]):
            raise ValueError(
                f"register: {config_class.__name__}.{field.name} must have a type that config.json can hold (int, "
                f"float, str, bool, None, lists of these, or a dataclass of such fields), got {hints[field.name]}."
            )


def _fits_json(hint: Any) -> bool:
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return all(_fits_json(hints[field.name]) for field in dataclasses.fields(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list):
        return all(not dataclasses.is_dataclass(option) and _fits_json(option) for option in typing.get_args(hint))
    return hint in (int, float, str, bool, type(None))


def _own_names(model_class: type[CausalLM], config: Any) -> WeightMap:
    """The weight map of a checkpoint whose tensors have the names of the model's parameters."""
    with torch.device("meta"):
        model = model_class(config)
    return WeightMap({name: name for name, _ in model.named_parameters()}, over={})
