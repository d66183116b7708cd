"""The checkpoint format of a model family: its config.json and the layout of its tensors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.convert.weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class MTPFormat:
    """Where a checkpoint stores the multi-token prediction block, which `liger_models.adapters.LigerMTP` trains.

    Attributes:
        sizes: values for fields of the model's config, such as the number of layers, with which the config describes
            a model that consists of only this block.
        prefix: prefix of all tensors.
        block: prefix of the tensors in the block's decoder layers. ``{}`` stands for the index of a decoder layer
            within the block.
        names: maps the modules ``fc``, ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden`` and ``norm`` of `LigerMTP` to
            their names in the checkpoint.
        copies: maps the name of each remaining tensor, which is a copy of a parameter of the model, to the name of this
            parameter.
    """

    sizes: Mapping[str, Any]
    prefix: str
    block: str
    names: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)


DEEPSEEK_IGNORED_KEYS = (
    "aux_loss_alpha", "ep_size", "moe_layer_freq", "qk_head_dim", "scoring_func", "seq_aux",
    "output_router_logits",  # there is no load-balancing loss
)  # fmt: skip
"""Keys that no DeepSeek model in transformers reads: they are for DeepSeek's own code or for training the router."""


def deepseek_mtp(config: Any, **sizes: Any) -> MTPFormat:
    """Return the `MTPFormat` of DeepSeek V3 and of related models, whose checkpoints store the multi-token prediction
    block as an additional layer.

    Args:
        config: config of the model.
        sizes: further entries of `MTPFormat.sizes`.
    """
    block = f"model.layers.{config.num_hidden_layers}."
    return MTPFormat(
        sizes={"num_hidden_layers": 1, **sizes},
        prefix=block,
        block=block,
        names={
            "fc": f"{block}eh_proj",
            "pre_fc_norm_embedding": f"{block}enorm",
            "pre_fc_norm_hidden": f"{block}hnorm",
            "norm": f"{block}shared_head.norm",
        },
        copies={
            f"{block}embed_tokens.weight": "embed_tokens.weight",
            f"{block}shared_head.head.weight": "lm_head.weight",
        },
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """The names that a family's Hugging Face checkpoints use for parameters and settings.

    Attributes:
        model_type: ``model_type`` in config.json.
        aliases: other values of ``model_type`` in released files. These values are read, but not written.
        hf_class: name of the class in transformers, for ``architectures`` in config.json.
        weight_map: function that takes a config and returns the `WeightMap` of the main layout, that is, of the usual
            names and shapes of the tensors. Checkpoints are written in this layout. When a checkpoint is read, this
            layout is preferred.
        other_maps: function that takes a config and returns the `WeightMap` of each other layout. These layouts are
            read but never written.
        quantized_maps: maps each supported ``quant_method`` in config.json to a function that takes a config and
            returns the `WeightMap` of a quantized checkpoint. The weights are dequantized when they are read.
        from_json: function that renames the keys of a config.json to the fields of the config class.
        to_json: the inverse of ``from_json``.
        ignored_keys: keys of released config.json files that do not change the model.
        contained_in: values of ``model_type`` in checkpoints that contain a model of this family as a part. The
            ``text_config`` of such a checkpoint is the configuration of the contained model, and one of ``other_maps``
            has the names of the contained model's tensors.
        peft_exchanges: whether A and B of the experts are exchanged in PEFT's files. In transformers, the experts'
            matrices have the shape [X, in, out], but the experts' module does not declare that they are transposed.
            PEFT therefore assumes the shape [X, out, in].
        mtp: function that takes a config and returns the `MTPFormat` of the multi-token prediction block; None for
            families without such a block.
        module: name, or end of the name, of a module in the transformers model. The first layout that contains this
            module's weight is the layout with the names of transformers' modules in memory.
    """

    model_type: str
    hf_class: str
    weight_map: Callable[[Any], WeightMap]
    other_maps: Callable[[Any], list[WeightMap]] = lambda config: []
    quantized_maps: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)
    from_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    to_json: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    ignored_keys: Collection[str] = ()
    mtp: Callable[[Any], MTPFormat] | None = None
    contained_in: Collection[str] = ()
    peft_exchanges: bool = False
    aliases: Collection[str] = ()
    module: str = "model.language_model.norm"

    def weight_maps(self, config: Any) -> list[WeightMap]:
        """Return the `WeightMap` of each layout that checkpoints may have.

        Models are saved in the first layout.
        """
        return [self.weight_map(config), *self.other_maps(config)]

    def file_maps(self, config: Any) -> list[WeightMap]:
        """Return the weight maps of all layouts in files: first `weight_maps`, then those of quantized checkpoints."""
        return [*self.weight_maps(config), *(quantized(config) for quantized in self.quantized_maps.values())]

    def module_map(self, config: Any) -> WeightMap:
        """Return the `WeightMap` with the names of transformers' modules in memory.

        The files of adapters use these names. In older checkpoints of vision-language models, the tensors have other
        names.
        """
        return self._module_maps(config)[0]

    def expert_map(self, config: Any) -> WeightMap:
        """Return a map like `module_map`, except that experts are stacked in a few tensors, as in transformers 5."""
        return min(self._module_maps(config), key=lambda weights: len(_names(weights)))

    def _module_maps(self, config: Any) -> list[WeightMap]:
        maps = self.weight_maps(config)
        weight = f"{self.module}.weight"
        return [weights for weights in maps if any(name.endswith(weight) for name in _names(weights))] or maps


def _names(weights: WeightMap) -> list[str]:
    """Return the names of all checkpoint tensors in a weight map."""
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
