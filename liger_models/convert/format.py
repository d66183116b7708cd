"""The checkpoint format of a family: how its config.json and its tensors are laid out."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.convert.weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """The names of a family's parameters and settings in a Hugging Face checkpoint.

    Attributes:
        model_type: ``model_type`` in config.json.
        hf_class: name of the class in transformers, for ``architectures`` in config.json.
        weight_map: maps a config to the `WeightMap` of the layout that is written, and read first.
        other_maps: maps a config to the `WeightMap` of each further layout. These are read and never written.
        quantized_maps: maps the ``quant_method`` in config.json of a quantized checkpoint to what maps a config to the
            `WeightMap` of its layout. The weights are read dequantized.
        from_json: renames the keys of a config.json to the fields of the config class.
        to_json: the inverse of ``from_json``.
        ignored_keys: keys of released config.json files that do not change the model.
        module: a module in transformers, by its name in memory. The first layout that has its weight has the names of
            all modules.
    """

    model_type: str
    hf_class: str
    weight_map: Callable[[Any], WeightMap]
    other_maps: Callable[[Any], list[WeightMap]] = lambda config: []
    quantized_maps: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)
    from_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    to_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    ignored_keys: Collection[str] = ()
    module: str = "model.language_model.norm"

    def weight_maps(self, config: Any) -> list[WeightMap]:
        """The `WeightMap` of each layout that checkpoints may have, the written one first."""
        return [self.weight_map(config), *self.other_maps(config)]

    def file_maps(self, config: Any) -> list[WeightMap]:
        """As `weight_maps`, and the layouts of quantized checkpoints, which exist only in files."""
        return [*self.weight_maps(config), *(quantized(config) for quantized in self.quantized_maps.values())]

    def module_map(self, config: Any) -> WeightMap:
        """The `WeightMap` under the names of transformers' modules in memory, which adapters are saved by.

        These names differ from those in the older checkpoints of vision-language models.
        """
        return self._module_maps(config)[0]

    def expert_map(self, config: Any) -> WeightMap:
        """As `module_map`, with the experts of a layer in as few tensors as possible, as transformers 5 holds them."""
        return min(self._module_maps(config), key=lambda weights: len(_names(weights)))

    def _module_maps(self, config: Any) -> list[WeightMap]:
        maps = self.weight_maps(config)
        return [weights for weights in maps if f"{self.module}.weight" in _names(weights)] or maps


def _names(weights: WeightMap) -> list[str]:
    """The names of all tensors of a layout."""
    return [name for expression in weights.entries.values() for name in expression.names()]


FORMATS: dict[type, CheckpointFormat] = {}
"""Model and config classes -> the format of their checkpoints."""


def format_of(cls: type) -> CheckpointFormat:
    """The checkpoint format of a model class or a config class, or of its nearest base class that has one.

    Raises:
        ValueError: neither the class nor one of its bases is registered.
    """
    registered = next((FORMATS[base] for base in cls.__mro__ if base in FORMATS), None)
    if registered is None:
        raise ValueError(
            f"{cls.__name__}: must be registered, or derive from a registered class, so that the format of its "
            f"checkpoints is known, got module {cls.__module__!r}. Call liger_models.register with a name for it."
        )
    return registered
