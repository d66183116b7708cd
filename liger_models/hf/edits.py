"""Changes to a model's configuration, embedding and head after the model was built.

The layers of this package copy settings from the configuration when they are built. Before every forward and every
save, `Edits` compares the configuration with an earlier copy. If a field was edited, `Edits` builds two models on
the meta device, one from the old configuration and one from the edited configuration. Attributes that differ between
the layers of these two models are copied into the layers of the actual model. An edit that would need other parameters
raises an error.
"""

import copy
import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from liger_models.arch.auto import get_arch
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.tensors import is_tied
from liger_models.hf.config import to_liger
from liger_models.layers.layer import Layer

INERT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
"""Fields that no layer reads after the model has been built. Editing them does not affect an existing model."""


class Edits:
    """The two configurations (transformers' and this package's) for which a model's layers were last built or updated.

    Args:
        config: the configuration of transformers.
        decoder: the model.
    """

    def __init__(self, config: PreTrainedConfig, decoder: CausalLM) -> None:
        self.record(config, decoder)

    def record(self, config: PreTrainedConfig, decoder: CausalLM) -> None:
        """Record the configurations that the layers now use."""
        self.built, self.ours = copy.deepcopy(config), decoder.config

    def apply(self, config: PreTrainedConfig, decoder: CausalLM) -> None:
        """If the model or its configuration has changed, make the layers and both configurations consistent again.

        Args:
            config: the configuration of transformers, whose fields may have been edited.
            decoder: the model, which may have been resized, tied, untied or merged.

        Raises:
            ValueError: an edited field of ``config`` would need other parameters, or has a value that is not supported.
        """
        # First apply changes of the model, because they are newer than any copy of a configuration.
        tied = _is_tied(decoder)
        if tied is not None and tied != decoder.config.tie_word_embeddings:
            decoder.config = dataclasses.replace(decoder.config, tie_word_embeddings=tied)
        if decoder.config is not self.ours:
            self._follow(config, decoder)
        if not _equal(config, self.built):
            self._apply_fields(config, decoder)

    def _follow(self, config: PreTrainedConfig, decoder: CausalLM) -> None:
        """Write changes of the model to ``config`` and to `built`, the earlier copy of ``config``."""
        before, after = self.ours, decoder.config
        for theirs in (config, self.built):
            text = theirs.get_text_config()
            if after.vocab_size != before.vocab_size:
                text.vocab_size = after.vocab_size
            if after.tie_word_embeddings != before.tie_word_embeddings:
                theirs.tie_word_embeddings = text.tie_word_embeddings = after.tie_word_embeddings
        self.ours = after

    def _apply_fields(self, config: PreTrainedConfig, decoder: CausalLM) -> None:
        """Update the layers after edits of the configuration."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown fields already caused a warning when the model was built
            old, new = to_liger(self.built), to_liger(config)
        fields = [
            field.name for field in dataclasses.fields(new) if getattr(old, field.name) != getattr(new, field.name)
        ]
        # The field for tied weights affects only weights, and inert fields affect no layer. All other fields may affect
        # layers.
        tied = "tie_word_embeddings" in fields and _is_tied(decoder) is not None
        edited = [name for name in fields if name not in ("tie_word_embeddings", *INERT)]
        if edited:
            target = dataclasses.replace(old, **{name: getattr(new, name) for name in edited})
            _rebuild(get_arch(config.model_type), edited, old, target, decoder)

        # Fields that were not edited keep the model's values, because the model may have been resized.
        values = {name: getattr(new, name) for name in fields if name != "tie_word_embeddings"}
        decoder.config = dataclasses.replace(decoder.config, **values)
        if tied:
            _tie(decoder, new.tie_word_embeddings)
        self.record(config, decoder)


def replace_layer(decoder: CausalLM, name: str, module: nn.Module, where: str) -> None:
    """Replace the embedding or the head.

    If the new module is a plain PyTorch layer, it is converted in place to a layer of this package, and gets the
    constants of the old layer. Other modules are not converted.

    Args:
        decoder: the model. Its ``vocab_size`` changes once the embedding and the head both have a new number of rows.
        name: "embed_tokens" or "lm_head".
        module: the new embedding or head.
        where: name of the method, for errors.

    Raises:
        ValueError: the old layer has adapters; or the new layer is plain, and its width differs from the old layer's,
            or only one of the two layers has a bias.
    """
    old: Any = getattr(decoder, name)
    plain: type[nn.Module] = nn.Embedding if name == "embed_tokens" else nn.Linear
    if isinstance(old, Layer) and any(True for _ in old.children()):
        raise ValueError(f"{where}: the layer must have no adapters, got {type(old).__name__}. Call merge_lora first.")
    # If the layer is plain, change the class of the caller's object, so that other references to it stay valid.
    new: Any = module
    if type(module) is plain and isinstance(old, Layer):
        layer: Any = old
        width, own = layer.weight.shape[1], new.weight.shape[1]
        needed, biased = (" and a bias" if getattr(x, "bias", None) is not None else "" for x in (layer, module))
        if own != width or needed != biased:
            raise ValueError(
                f"{where}: must have {width} columns, the model's hidden_size,{needed or ' and no bias'}, got {own} "
                f"columns{biased}. Pass a layer of that size."
            )
        constants = {name: value for name, value in vars(old).items() if name not in vars(module)}
        new.__class__ = type(old)
        vars(module).update(constants)
    setattr(decoder, name, module)

    # After the first of two calls (for embedding and head), the numbers of rows may differ. The second call then
    # changes the configuration.
    layers: list[Any] = [layer for layer in (decoder.embed_tokens, decoder.lm_head) if isinstance(layer, Layer)]
    rows = {len(layer.weight) for layer in layers}
    if len(layers) == 2 and len(rows) == 1 and rows != {decoder.config.vocab_size}:
        decoder.config = dataclasses.replace(decoder.config, vocab_size=rows.pop())


def _is_tied(decoder: CausalLM) -> bool | None:
    """Return whether the head is tied to the embedding.

    The result is None if PEFT has replaced the head or the embedding, or if the head is an `UnusedHead`.
    """
    head, embedding = decoder.lm_head, decoder.embed_tokens
    if "weight" not in head._parameters or "weight" not in embedding._parameters:
        return None
    return is_tied(head.weight, embedding.weight)


def _tie(decoder: CausalLM, tied: bool) -> None:
    """Make the head share the embedding's weight or, if ``tied`` is False, give the head a copy of the weight."""
    weight: Any = decoder.embed_tokens.weight
    if not tied:
        weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    decoder.lm_head.weight = weight
    decoder.config = dataclasses.replace(decoder.config, tie_word_embeddings=tied)


def _rebuild(arch: Any, fields: list[str], old: Any, new: Any, decoder: CausalLM) -> None:
    """Find the layers' attributes that differ between the old and the new configuration, and copy them into the model.

    Args:
        arch: the class of the model.
        fields: names of the fields that differ, for errors.
        old, new: configurations of this package.
        decoder: the model, which may be sharded or have adapters.

    Raises:
        ValueError: the new configuration needs other parameters or other layers.
    """
    # Build both models on the meta device. They must have the same modules, with parameters of the same shapes.
    with torch.device("meta"):
        before, after = (arch(config, decoder.kernels) for config in (old, new))
    twins, layers = dict(before.named_modules()), dict(decoder.named_modules())
    fits = _shapes(before) == _shapes(after) and twins.keys() == dict(after.named_modules()).keys()

    # Find the attributes that differ. An adapted or wrapped layer may have no counterpart in the model.
    changes: list[tuple[nn.Module, str, Any]] = []
    for path, module in after.named_modules() if fits else ():
        twin, layer = twins[path], layers.get(path)
        members = {name: value for name, value in vars(module).items() if name not in _INTERNALS}
        other = {name: value for name, value in members.items() if not _same(value, vars(twin).get(name))}
        other.pop("config", None)
        fits = fits and type(module) is type(twin) and (layer is not None or not other)
        changes += [(layer, name, value) for name, value in other.items() if layer is not None]
    if not fits:
        todo = "Edit it first: pass it to from_pretrained(folder, config=config), or build the model from it."
        if "vocab_size" in fields:
            todo = "Call resize_token_embeddings, which changes the configuration, too."
        values = ", ".join(f"{name} = {getattr(new, name)!r} (built with {getattr(old, name)!r})" for name in fields)
        raise ValueError(
            f"{type(decoder).__name__}: after the model was built, a configuration may only have edits that leave the "
            f"parameters unchanged, got {values}. {todo}"
        )
    # The model changes only here, so an edit that raises an error leaves the model unchanged.
    for layer, name, value in changes:
        setattr(layer, name, value)


_INTERNALS = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _equal(one: Any, other: Any) -> bool:
    """Return whether configurations, or values in them, are equal in all fields. The operator ``==`` of configurations
    may ignore fields."""
    if isinstance(one, PreTrainedConfig) and type(one) is type(other):
        return _equal(vars(one), vars(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool(one == other)


def _same(one: Any, other: Any) -> bool:
    """Return whether attributes of two layers are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
