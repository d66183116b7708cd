"""The checkpoint format of a family, which describes its config.json and the layout of its tensors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.convert.weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """The names of the parameters and settings of a family in a Hugging Face checkpoint.

    Attributes:
        model_type: ``model_type`` in config.json.
        aliases: further values of ``model_type`` in released files. Such files are read, but not written.
        hf_class: name of the class in transformers, for ``architectures`` in config.json.
        weight_map: function that takes a config and returns the `WeightMap` of the layout that is written, and
            preferred in reading.
        other_maps: function that takes a config and returns the `WeightMap` of each further layout. These layouts are
            read but never written.
        quantized_maps: maps each supported ``quant_method`` in config.json to a function that takes a config and
            returns the `WeightMap` of a quantized checkpoint. The weights are dequantized when they are read.
        from_json: function that renames the keys of a config.json to the fields of the config class.
        to_json: the inverse of ``from_json``.
        ignored_keys: keys of released config.json files that do not change the model.
        module: name of a module of the transformers model in memory. The layout of the modules in memory is the first
            layout that contains the weight of this module.
    """

    model_type: str
    hf_class: str
    weight_map: Callable[[Any], WeightMap]
    other_maps: Callable[[Any], list[WeightMap]] = lambda config: []
    quantized_maps: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)
    from_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    to_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    ignored_keys: Collection[str] = ()
    aliases: Collection[str] = ()
    module: str = "model.language_model.norm"

    def weight_maps(self, config: Any) -> list[WeightMap]:
        """Return the `WeightMap` of each layout that checkpoints may have. The first layout is the written one."""
        return [self.weight_map(config), *self.other_maps(config)]

    def file_maps(self, config: Any) -> list[WeightMap]:
        """Return the layouts of `weight_maps` and the layouts of quantized checkpoints, which exist only in files."""
        return [*self.weight_maps(config), *(quantized(config) for quantized in self.quantized_maps.values())]

    def module_map(self, config: Any) -> WeightMap:
        """Return the `WeightMap` with the names of transformers' modules in memory.

        Saved adapters use these names. In older checkpoints of vision-language models, the tensors have different
        names.
        """
        return self._module_maps(config)[0]

    def expert_map(self, config: Any) -> WeightMap:
        """Return a map like `module_map`, in which a layer's experts are in as few tensors as in transformers 5."""
        return min(self._module_maps(config), key=lambda weights: len(_names(weights)))

    def _module_maps(self, config: Any) -> list[WeightMap]:
        maps = self.weight_maps(config)
        return [weights for weights in maps if f"{self.module}.weight" in _names(weights)] or maps


def _names(weights: WeightMap) -> list[str]:
    """Return the names of all tensors of a layout."""
    return [name for expression in weights.entries.values() for name in expression.names()]


FORMATS: dict[type, CheckpointFormat] = {}
"""Maps a model class or config class to the format of its checkpoints."""


def format_of(cls: type) -> CheckpointFormat:
    """Return the checkpoint format of a model class or config class, or of its nearest registered base class.

    Raises:
        ValueError: neither the class nor a base class is registered.
    """
    registered = next((FORMATS[base] for base in cls.__mro__ if base in FORMATS), None)
    if registered is None:
        raise ValueError(
            f"{cls.__name__}: must be registered, or derive from a registered class, so that the format of its "
            f"checkpoints is known, got module {cls.__module__!r}. Call liger_models.register with a name for it."
        )
    return registered
