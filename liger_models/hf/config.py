"""Configurations: transformers' class for each model type, and conversion to this package's class."""

import functools
import json
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from liger_models.arch.auto import get_arch
from liger_models.convert.config_map import read_config
from liger_models.convert.format import format_of


@functools.cache
def config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return the configuration class of a model type: transformers' class or, for custom architectures, a new class."""
    try:
        return type(AutoConfig.for_model(model_type))
    except ValueError:
        name = format_of(get_arch(model_type)).hf_class
        return type(f"{name}Config", (PreTrainedConfig,), {"model_type": model_type, "__module__": __name__})


def to_json(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the content of the config.json that transformers writes for a configuration."""
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content


def to_liger(config: PreTrainedConfig) -> Any:
    """Convert a configuration of transformers to this package's class.

    Raises:
        ValueError: a value of the configuration is not supported.
    """
    return read_config(get_arch(config.model_type).config_class, to_json(config))


def class_name(auto_class: Any, model_type: str) -> str | None:
    """Return the name of the class that a transformers auto class has for a model type.

    The result is None if the auto class has no class or several classes for this type.
    """
    # This mapping holds the names of classes, so reading it imports nothing. For a model type with several classes, it
    # holds a tuple instead of a name.
    names = auto_class._model_mapping._model_mapping
    return names.get(model_type) if isinstance(names.get(model_type), str) else None
