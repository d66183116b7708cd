"""Checkpoints: Hugging Face's config.json and safetensors, in and out.

Each architecture has one file here, named as in ``arch/``, that says where its weights stand in a checkpoint:
``weight_map(config)`` and the Hugging Face class name ``HF_CLASS``; where checkpoints have other layouts as well, which
are read and never written, ``other_maps(config)``; where released config.json files have keys that change nothing,
``IGNORED_KEYS``; and where config.json does not spell the settings as the config class does, two functions from dict to
dict: ``from_json``, which gives a config.json's settings the names and shape that ``config_map.read_config`` reads, and
``to_json``, which turns the keys that ``config_map.write_config`` writes into those that transformers reads.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from liger_models.convert.weight_map import WeightMap


def model_type_of(cls: type) -> str:
    """The registry key of a model class or a config class: the name of the file in ``arch/`` that it comes from.

    Raises:
        ValueError: neither the class nor one of its bases is defined in ``liger_models.arch``.
    """
    for base in cls.__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "liger_models.arch":
            return name
    raise ValueError(
        f"{cls.__name__}: must come from a file in liger_models/arch or derive from a class there, which says how its "
        f"checkpoints are laid out, got module {cls.__module__!r}. Derive from the architecture that it is closest to."
    )


def _family(model_type: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{model_type}")


def get_map(model_type: str) -> "Callable[[Any], WeightMap]":
    """The function config -> ``WeightMap`` of an architecture."""
    return cast("Callable[[Any], WeightMap]", _family(model_type).weight_map)


def get_other_maps(model_type: str) -> "Callable[[Any], list[WeightMap]]":
    """The function config -> the ``WeightMap`` of each further layout that an architecture's checkpoints may have."""
    return cast("Callable[[Any], list[WeightMap]]", getattr(_family(model_type), "other_maps", lambda config: []))


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
