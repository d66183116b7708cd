"""Checkpoints: Hugging Face's config.json and safetensors, in and out.

Each architecture has one file here, named as in ``arch/``, that says where its weights stand in a checkpoint:
``weight_map(config)`` and the Hugging Face class name ``HF_CLASS``; where checkpoints have other layouts as well, which
are read and never written, ``other_maps(config)``; where released config.json files have keys that change nothing,
``IGNORED_KEYS``; and where config.json does not spell the settings as the config class does, two functions from dict to
dict: ``from_json``, which gives a config.json's settings the names and shape that ``config_map.read_config`` reads, and
``to_json``, which turns the keys that ``config_map.write_config`` writes into those that transformers reads.
"""

import dataclasses
import importlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from liger_models.arch import CUSTOM, built_in

if TYPE_CHECKING:
    from liger_models.convert.weight_map import WeightMap
    from liger_models.layers.causal_lm import CausalLM

_FAMILIES: dict[str, types.SimpleNamespace] = {}
"""What a file of this package has, of each architecture in `CUSTOM`."""

_TYPES: dict[type, str] = {}
"""Model and config classes that were registered -> ``model_type``."""

_NEEDED = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
"""Fields that the shell reads and `save_pretrained` writes."""


def register(
    model_type: str,
    model_class: "type[CausalLM]",
    weight_map: "Callable[[Any], WeightMap] | None" = None,
    *,
    other_maps: "Callable[[Any], list[WeightMap]] | None" = None,
    from_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    to_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    hf_class: str | None = None,
) -> None:
    """Make an architecture of one's own known: its checkpoints are saved, and found by the name in config.json.

    Call it below the class, in the module that defines it. A class that is defined again (a cell of a notebook that
    runs a second time) takes the place of the one before.

    Args:
        model_type: stands in config.json; a name that `list_archs` does not have yet.
        model_class: derives from `CausalLM`. Its ``config_class`` is a dataclass of its own, with fields that JSON can
            hold; `DecoderConfig` has the usual ones.
        weight_map: config -> where each parameter stands in a checkpoint. Default: all under their own names.
        other_maps: config -> further layouts, which are read and never written.
        from_json: gives a config.json's settings the names of the config's fields.
        to_json: the way back.
        hf_class: the class in transformers, for ``architectures`` in config.json. Default: the name of ``model_class``.

    Raises:
        ValueError: the name or the class is taken, or a class that could not be built, saved or loaded.
    """
    from liger_models.kernels.dispatch import check
    from liger_models.layers.causal_lm import CausalLM

    check(
        isinstance(model_type, str) and model_type != "",
        f"register: model_type must be a name, as it stands in config.json, got {model_type!r}.",
    )
    check(
        isinstance(model_class, type) and issubclass(model_class, CausalLM) and model_class is not CausalLM,
        "register: model_class must be a class that derives from liger_models.layers.causal_lm.CausalLM, got "
        f"{model_class!r}.",
    )
    config_class = getattr(model_class, "config_class", None)
    check(
        isinstance(config_class, type) and "__dataclass_fields__" in vars(config_class),
        f"register: {model_class.__name__}.config_class must be a dataclass, got {config_class!r}. Derive it from "
        "liger_models.layers.config.DecoderConfig, with @dataclass(frozen=True, kw_only=True) above it.",
    )
    assert config_class is not None
    before = CUSTOM.get(model_type)
    check(
        model_type not in built_in() and (before is None or _path(before) == _path(model_class)),
        f"register: model_type must be a name that is free, got {model_type!r}, which is "
        f"{'an architecture of liger_models' if before is None else _path(before)}. Choose another.",
    )
    for cls in (model_class, config_class):
        check(
            _type_of(cls) in (None, model_type),
            f"register: {model_class.__name__} and its config_class must be classes of their own, got {cls.__name__}, "
            f"which is that of {_type_of(cls)!r}. Derive a class from it; a config_class is a dataclass again.",
        )
    _check_fields(config_class)
    CUSTOM[model_type] = model_class
    _TYPES[model_class] = _TYPES[config_class] = model_type
    _FAMILIES[model_type] = types.SimpleNamespace(
        HF_CLASS=hf_class or model_class.__name__,
        weight_map=weight_map or (lambda config: _own_names(model_class, config)),
        other_maps=other_maps or (lambda config: []),
        from_json=from_json,
        to_json=to_json,
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_fields(config_class: type) -> None:
    """Refuse a config that `save_pretrained` could not write, or whose config.json could not be read."""
    from liger_models.kernels.dispatch import check

    hints = typing.get_type_hints(config_class)
    missing = [field for field in _NEEDED if field not in hints]
    check(
        not missing,
        f"register: {config_class.__name__} must have the fields {', '.join(_NEEDED)}, got none of the name "
        f"{', '.join(missing)}. Derive it from liger_models.layers.config.DecoderConfig.",
    )
    for field in dataclasses.fields(config_class):
        check(
            field.name == "rope_scaling" or _fits_json(hints[field.name]),
            f"register: {config_class.__name__}.{field.name} must be of a type that config.json can hold (int, float, "
            f"str, bool, None, lists of these, or a dataclass of such fields), got {hints[field.name]}. Change it.",
        )


def _fits_json(hint: Any) -> bool:
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return all(_fits_json(hints[field.name]) for field in dataclasses.fields(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(not dataclasses.is_dataclass(option) and _fits_json(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return all(not dataclasses.is_dataclass(option) and _fits_json(option) for option in typing.get_args(hint))
    return hint in (int, float, str, bool, type(None))


def _own_names(model_class: "type[CausalLM]", config: Any) -> "WeightMap":
    """The map of a checkpoint that has the parameters under their own names."""
    import torch

    from liger_models.convert.weight_map import WeightMap

    with torch.device("meta"):
        model = model_class(config)
    return WeightMap({name: name for name, _ in model.named_parameters()}, over={})


def model_type_of(cls: type) -> str:
    """The registry key of a model class or a config class: what it, or a base, was registered as.

    Of the architectures of this package it is the name of the file in ``arch/`` that the class comes from.

    Raises:
        ValueError: neither the class nor one of its bases is known.
    """
    found = next(filter(None, map(_type_of, cls.__mro__)), None)
    if found is None:
        raise ValueError(
            f"{cls.__name__}: must be registered, or derive from a class in liger_models/arch, to say how its "
            f"checkpoints are laid out, got module {cls.__module__!r}. Call liger_models.register with a name for it."
        )
    return found


def _type_of(cls: type) -> str | None:
    """As `model_type_of`, of exactly this class; None if it is not known."""
    package, _, name = cls.__module__.rpartition(".")
    return _TYPES.get(cls, name if package == "liger_models.arch" else None)


def _family(model_type: str) -> Any:
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    return importlib.import_module(f"{__name__}.{model_type}")


def get_map(model_type: str) -> "Callable[[Any], WeightMap]":
    """The function config -> ``WeightMap`` of an architecture."""
    return cast("Callable[[Any], WeightMap]", _family(model_type).weight_map)


def get_maps(model_type: str) -> "Callable[[Any], list[WeightMap]]":
    """The function config -> the ``WeightMap`` of each layout that checkpoints may have; the first is `get_map`'s."""
    family = _family(model_type)

    def maps(config: Any) -> "list[WeightMap]":
        others = family.other_maps(config) if hasattr(family, "other_maps") else []
        return [family.weight_map(config), *others]

    return maps


def get_module_map(model_type: str) -> "Callable[[Any], WeightMap]":
    """The function config -> the ``WeightMap`` with the names that the modules of transformers have in memory.

    Those of vision-language models are not the names of their older checkpoints; of others it is `get_map`'s.
    """
    inside = "model.language_model.norm.weight"

    def module_map(config: Any) -> "WeightMap":
        maps = get_maps(model_type)(config)
        named = (each for each in maps if any(inside in entry.names() for entry in each.entries.values()))
        return next(named, maps[0])

    return module_map


def get_hf_class(model_type: str) -> str:
    """The name of an architecture's class in transformers, for ``architectures`` in config.json."""
    return cast(str, _family(model_type).HF_CLASS)


def from_json(model_type: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in the spelling of the architecture's config class."""
    return cast("dict[str, Any]", getattr(_family(model_type), "from_json", dict)(hf))


def to_json(model_type: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What a config's fields are in config.json."""
    return cast("dict[str, Any]", getattr(_family(model_type), "to_json", dict)(keys))


def get_ignored_keys(model_type: str) -> frozenset[str]:
    """Keys of an architecture's config.json files that change nothing."""
    return frozenset(getattr(_family(model_type), "IGNORED_KEYS", ()))
