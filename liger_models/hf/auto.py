"""The classes of `liger_models.hf`, one for each model type, and their registration in transformers' auto classes."""

import contextlib
import functools
import inspect
import json
from collections.abc import Iterator
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from liger_models.arch.auto import get_arch, list_archs
from liger_models.arch.registry import built_in
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import write_config
from liger_models.convert.format import format_of
from liger_models.convert.save import AUTO_CLASSES as AUTO_CLASSES_OF
from liger_models.hf.checkpoint import GENERATION_CONFIG
from liger_models.hf.classification import LigerForSequenceClassification
from liger_models.hf.config import class_name, config_class
from liger_models.hf.model import LigerForCausalLM

CLASSIFIER = "AutoModelForSequenceClassification"
AUTO_CLASSES = (*(name for names in AUTO_CLASSES_OF.values() for name in names), CLASSIFIER)
"""The names of transformers' auto classes that `register` changes."""


def model_class(model_type: str) -> type[LigerForCausalLM]:
    """Return the class of a model type.

    It has the name of transformers' class, because Trainer and other tools read the name.

    Raises:
        ValueError: there is no such architecture.
    """
    arch: Any = get_arch(model_type)
    return _class_of(arch, model_type)


@functools.cache
def _class_of(arch: type[CausalLM], model_type: str) -> type[LigerForCausalLM]:
    members: dict[str, Any] = {
        "__doc__": f"`{arch.__name__}` as a model of transformers; see `LigerForCausalLM`.",
        "__module__": "liger_models.hf",
        "config_class": config_class(model_type),
    }
    # For families with images, the signature of the forward names their inputs, and the towers can be called alone.
    if arch.prompt_inputs:
        members["forward"] = _forward_with(arch.prompt_inputs)
        members["input_modalities"] = ("image", "text")
    if hasattr(arch, "image_features"):
        members["get_image_features"] = _features_of
    if "pixel_values_videos" in arch.prompt_inputs and hasattr(arch, "image_features"):
        members["get_video_features"] = _features_of
    # Transformers looks for GenerationMixin among the bases themselves.
    return type(_name_of(arch), (LigerForCausalLM, GenerationMixin), members)


def classifier_class(model_type: str) -> type[LigerForSequenceClassification] | None:
    """Return the class of a model type with a classification head.

    The result is None if transformers has no such class for the model type, or if the model type takes images.
    """
    arch: Any = get_arch(model_type)
    name = class_name(getattr(transformers, CLASSIFIER), model_type)
    return None if name is None or arch.prompt_inputs else _classifier_of(arch, model_type, name)


@functools.cache
def _classifier_of(arch: type[CausalLM], model_type: str, name: str) -> type[LigerForSequenceClassification]:
    members = {
        "__doc__": f"`{arch.__name__}` with a head for classification; see `LigerForSequenceClassification`.",
        "__module__": "liger_models.hf",
        "config_class": config_class(model_type),
    }
    return type(name, (LigerForSequenceClassification,), members)


def _classes_of(model_type: str) -> list[Any]:
    classes = model_class(model_type), classifier_class(model_type)
    return [hf_class for hf_class in classes if hf_class is not None]


def _name_of(arch: type[CausalLM]) -> str:
    name = format_of(arch).hf_class
    # A user's architecture has a class name without a known ending, such as "MyModel".
    return name if name.endswith(tuple(AUTO_CLASSES_OF)) else f"{name}ForCausalLM"


def _forward_with(names: tuple[str, ...]) -> Any:
    """Return `LigerForCausalLM.forward` with a family's inputs in its signature, which generate and Trainer read."""

    @functools.wraps(LigerForCausalLM.forward)
    def forward(self: LigerForCausalLM, *args: Any, **inputs: Any) -> Any:
        return LigerForCausalLM.forward(self, *args, **inputs)

    # The new parameters come after the usual ones and before **inputs.
    signature = inspect.signature(LigerForCausalLM.forward)
    *usual, others = signature.parameters.values()
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    forward.__signature__ = signature.replace(parameters=[*usual, *named, others])  # type: ignore[attr-defined]
    return forward


def _features_of(self: LigerForCausalLM, *inputs: Tensor, **named: Tensor) -> BaseModelOutputWithPooling:
    """Return an output whose ``pooler_output`` contains the image tokens of each image or of each video.

    Args:
        inputs, named: the pixels and the tensors that describe them, such as grid sizes, as in the forward.
    """
    decoder: Any = self.model.decoder
    # Videos are images of several frames, under names of their own.
    names = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
    tokens = decoder.image_features(*inputs, **{names.get(name, name): value for name, value in named.items()})
    return BaseModelOutputWithPooling(pooler_output=tokens)


def find_class(name: str) -> Any:
    """Return the class called ``name``.

    Raises:
        AttributeError: no model type has such a class.
    """
    for model_type in (*built_in(), *list_archs()):
        for hf_class in _classes_of(model_type):
            if name == hf_class.__name__:
                return hf_class
    raise AttributeError(
        f"module 'liger_models.hf' has no attribute {name!r}. It has a class for each of list_archs()."
    )


def wrap(model: CausalLM) -> LigerForCausalLM:
    """Wrap a model of this package as a model of transformers. Both share all weights."""
    checkpoint = format_of(type(model))
    hf_class = model_class(checkpoint.model_type)
    # The configuration of transformers, as a saved checkpoint would have it.
    content = write_config(model.config, model.hf_config, model.dtype)
    config: PreTrainedConfig = hf_class.config_class.from_dict(content)
    wrapped = hf_class(config, model)
    if GENERATION_CONFIG in model.assets:
        defaults = json.loads(model.assets[GENERATION_CONFIG])
        wrapped.generation_config = transformers.GenerationConfig.from_dict(defaults)
    return wrapped


def register() -> None:
    """Make transformers' auto classes return models of this package for every model type that this package has.

    Afterwards ``AutoModelForCausalLM``, ``AutoModelForImageTextToText``, ``AutoModelForMultimodalLM`` and
    ``AutoModelForSequenceClassification`` return these models from ``from_pretrained`` and ``from_config``. For other
    model types they still return transformers' models. transformers' own classes, such as
    ``transformers.LlamaForCausalLM``, do not change. A second call changes nothing.

    Raises:
        ValueError: another class has been registered for one of the model types.
    """
    # All entries are checked before the first one changes.
    entries = _entries()
    for auto_class, config, ours in entries:
        other = _registrations(auto_class).get(config, ours)
        if other.__module__ != ours.__module__ and not other.__module__.startswith("transformers."):
            raise ValueError(
                f"register: {auto_class.__name__} must have transformers' own class for {config.__name__}, got "
                f"{other.__module__}.{other.__qualname__}. Do not register both, or use "
                f"liger_models.hf.{ours.__name__}.from_pretrained."
            )
    # AutoConfig does not know the model types of a user's architectures yet.
    for model_type in set(list_archs()) - set(built_in()):
        AutoConfig.register(model_type, config_class(model_type), exist_ok=True)
    for auto_class, config, ours in entries:
        auto_class._model_mapping.register(config, ours, exist_ok=True)
        if auto_class._model_mapping.get(config, None) is not ours:
            raise ValueError(
                f"register: transformers must be 5.20 or later, got {transformers.__version__}, which takes no other "
                f"class for {config.__name__}. Upgrade it, or use liger_models.hf.{ours.__name__}.from_pretrained."
            )


def unregister() -> None:
    """Make transformers' auto classes return transformers' own models again."""
    for auto_class, config, ours in _entries():
        if _registrations(auto_class).get(config) is ours:
            del _registrations(auto_class)[config]


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Context manager that registers the models of this package, and restores the auto classes at its end."""
    places = [(_registrations(auto_class), config) for auto_class, config, _ in _entries()]
    before = [(place, config, place.get(config)) for place, config in places]
    register()
    try:
        yield
    finally:
        for place, config, hf_class in before:
            if hf_class is None:
                place.pop(config, None)
            else:
                place[config] = hf_class


def _registrations(auto_class: Any) -> dict[type[PreTrainedConfig], Any]:
    """Return the classes that have been registered in an auto class, besides transformers' own.

    The lookup of a class of transformers would import its module, which takes a second for all model types.
    """
    registrations: dict[type[PreTrainedConfig], Any] = auto_class._model_mapping._extra_content
    return registrations


def _entries() -> list[tuple[Any, type[PreTrainedConfig], Any]]:
    """Return (auto class, configuration class, our class) for each model type and auto class."""
    entries: list[tuple[Any, type[PreTrainedConfig], Any]] = []
    for model_type, ours in ((name, ours) for name in list_archs() for ours in _classes_of(name)):
        added = ours.config_class.__module__ == config_class.__module__  # transformers has no such model type
        for auto_name in AUTO_CLASSES:
            auto_class: Any = getattr(transformers, auto_name, None)
            if auto_class is None:
                continue
            # A model type of transformers is registered in the auto classes that have a class of the same name. A new
            # model type, or a language model that transformers lists only as a part of other models, is registered as a
            # causal language model.
            listed = class_name(auto_class, model_type)
            unlisted = added or (listed is None and ours.__name__.endswith("ForCausalLM"))
            if (unlisted and auto_name == AUTO_CLASSES[0]) or listed == ours.__name__:
                entries.append((auto_class, ours.config_class, ours))
            # A text model can be read from checkpoints with images, whose configuration contains its own.
            for outer in format_of(get_arch(model_type)).contained_in:
                if class_name(auto_class, outer) == ours.__name__:
                    entries.append((auto_class, config_class(outer), ours))
    return entries
