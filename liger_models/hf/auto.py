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

MODULE = "liger_models.hf"
"""The ``__module__`` of the classes in `liger_models.hf`."""
CLASSIFIER = "AutoModelForSequenceClassification"
AUTO_CLASSES = (*(name for names in AUTO_CLASSES_OF.values() for name in names), CLASSIFIER)
"""The names of transformers' auto classes that `register` changes."""


def model_class(model_type: str) -> type[LigerForCausalLM]:
    """Return this package's class for a model type.

    The class has the same name as transformers' class, because Trainer and other tools read the name.

    Raises:
        ValueError: there is no such architecture.
    """
    arch: Any = get_arch(model_type)
    return _class_of(arch, model_type)


@functools.cache
def _class_of(arch: type[CausalLM], model_type: str) -> type[LigerForCausalLM]:
    members: dict[str, Any] = {
        "__doc__": f"`{arch.__name__}` as a model of transformers; see `LigerForCausalLM`.",
        "__module__": MODULE,
        "config_class": config_class(model_type),
    }
    # In families with images, the signature of the forward has the image inputs. The methods ``get_image_features`` and
    # ``get_video_features`` run only the vision tower.
    if arch.prompt_inputs:
        members["forward"] = _forward_with(arch.prompt_inputs)
        members["input_modalities"] = ("image", "text")
    if hasattr(arch, "image_features"):
        members["get_image_features"] = _features_of
    if "pixel_values_videos" in arch.prompt_inputs and hasattr(arch, "image_features"):
        members["get_video_features"] = _features_of
    # GenerationMixin must be a direct base, because transformers checks only the direct bases.
    return type(_name_of(arch), (LigerForCausalLM, GenerationMixin), members)


def classifier_class(model_type: str) -> type[LigerForSequenceClassification] | None:
    """Return this package's class with a classification head for a model type.

    The result is None if transformers has no such class for the model type, or if the model type takes images.
    """
    arch: Any = get_arch(model_type)
    name = class_name(getattr(transformers, CLASSIFIER), model_type)
    return None if name is None or arch.prompt_inputs else _classifier_of(arch, model_type, name)


@functools.cache
def _classifier_of(arch: type[CausalLM], model_type: str, name: str) -> type[LigerForSequenceClassification]:
    members = {
        "__doc__": f"`{arch.__name__}` with a head for classification; see `LigerForSequenceClassification`.",
        "__module__": MODULE,
        "config_class": config_class(model_type),
    }
    return type(name, (LigerForSequenceClassification,), members)


def _classes_of(model_type: str) -> list[Any]:
    classes = model_class(model_type), classifier_class(model_type)
    return [hf_class for hf_class in classes if hf_class is not None]


def _name_of(arch: type[CausalLM]) -> str:
    name = format_of(arch).hf_class
    # The `hf_class` of a custom architecture may be a name without a known ending, such as "MyModel".
    return name if name.endswith(tuple(AUTO_CLASSES_OF)) else f"{name}ForCausalLM"


def _forward_with(names: tuple[str, ...]) -> Any:
    """Return a copy of `LigerForCausalLM.forward` with a family's inputs in its signature.

    ``generate`` and Trainer read the signature.
    """

    @functools.wraps(LigerForCausalLM.forward)
    def forward(self: LigerForCausalLM, *args: Any, **inputs: Any) -> Any:
        return LigerForCausalLM.forward(self, *args, **inputs)

    # The new parameters come after the usual parameters and before **inputs.
    signature = inspect.signature(LigerForCausalLM.forward)
    *usual, others = signature.parameters.values()
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    forward.__signature__ = signature.replace(parameters=[*usual, *named, others])  # type: ignore[attr-defined]
    return forward


def _features_of(self: LigerForCausalLM, *inputs: Tensor, **named: Tensor) -> BaseModelOutputWithPooling:
    """Return an output whose ``pooler_output`` contains the image tokens of each image or of each video.

    Args:
        inputs, named: the pixels, and the tensors that describe them, such as grid sizes; the same as in the forward.
    """
    decoder: Any = self.model.decoder
    # A video is an image with several frames, but videos have other input names than images.
    names = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
    tokens = decoder.image_features(*inputs, **{names.get(name, name): value for name, value in named.items()})
    return BaseModelOutputWithPooling(pooler_output=tokens)


def find_class(name: str) -> Any:
    """Return the class of `liger_models.hf` that is called ``name``.

    Raises:
        AttributeError: no model type has such a class.
    """
    # First check the model types for which transformers has a class of this name. Checking a model type imports its
    # family, so this order imports few families.
    autos = _auto_classes()
    model_types = dict.fromkeys((*built_in(), *list_archs()))
    for model_type in sorted(model_types, key=lambda each: all(class_name(auto, each) != name for auto in autos)):
        for hf_class in _classes_of(model_type):
            if name == hf_class.__name__:
                return hf_class
    raise AttributeError(
        f"module 'liger_models.hf' has no attribute {name!r}. It has a class for each of list_archs()."
    )


def wrap(model: CausalLM) -> LigerForCausalLM:
    """Return an object with the interface of transformers for a model of this package.

    The object shares all weights with the model.
    """
    checkpoint = format_of(type(model))
    hf_class = model_class(checkpoint.model_type)
    # Build the transformers configuration that a saved checkpoint would have.
    content = write_config(model.config, model.hf_config, model.dtype)
    config: PreTrainedConfig = hf_class.config_class.from_dict(content)
    wrapped = hf_class(config, model)
    if GENERATION_CONFIG in model.assets:
        defaults = json.loads(model.assets[GENERATION_CONFIG])
        wrapped.generation_config = transformers.GenerationConfig.from_dict(defaults)
    return wrapped


def register() -> None:
    """Make transformers' auto classes return this package's models for every model type that this package supports.

    Afterwards, the methods ``from_pretrained`` and ``from_config`` of ``AutoModelForCausalLM``,
    ``AutoModelForImageTextToText``, ``AutoModelForMultimodalLM`` and ``AutoModelForSequenceClassification`` return
    models of this package. For unsupported model types, they still return transformers' models. transformers' own
    classes, such as ``transformers.LlamaForCausalLM``, do not change. A second call changes nothing.

    Raises:
        ValueError: another class has been registered for one of the model types.
    """
    # All auto classes are checked before the first one changes.
    for auto_class in _auto_classes():
        for config, other in _foreign(auto_class).items():
            ours = _find(auto_class, config)
            if ours is not None:
                raise ValueError(
                    f"register: {auto_class.__name__} must have transformers' own class for {config.__name__}, got "
                    f"{other.__module__}.{other.__qualname__}. Do not register both, or use "
                    f"liger_models.hf.{ours.__name__}.from_pretrained."
                )
    # AutoConfig does not yet know the model types of custom architectures, and pipelines do not know their classes.
    new = [config_class(model_type) for model_type in set(list_archs()) - set(built_in())]
    for config in new:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_class in _auto_classes():
        registrations = _Registrations(auto_class, _foreign(auto_class))
        for config in new:
            registrations.add(config)
        auto_class._model_mapping._extra_content = registrations


def unregister() -> None:
    """Make transformers' auto classes return transformers' own models again."""
    for auto_class in _auto_classes():
        auto_class._model_mapping._extra_content = _foreign(auto_class)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Context manager that registers the models of this package, and restores the auto classes on exit."""
    before = [(auto_class._model_mapping, auto_class._model_mapping._extra_content) for auto_class in _auto_classes()]
    register()
    try:
        yield
    finally:
        for mapping, registrations in before:
            mapping._extra_content = registrations


class _Registrations(dict[type[PreTrainedConfig], Any]):
    """Maps configuration classes to the model classes that are registered in an auto class.

    A class of this package is created only when transformers looks for it. Creating all classes at once would import
    all model families, which takes longer than loading a small model.

    Args:
        auto_class: the auto class.
        others: the classes that neither transformers nor this package has registered.
    """

    def __init__(self, auto_class: Any, others: dict[type[PreTrainedConfig], Any]) -> None:
        super().__init__(others)
        self.auto_class = auto_class

    def add(self, config: Any) -> bool:
        """Add this package's class for a configuration class. Return whether this package has such a class."""
        ours = _find(self.auto_class, config)
        if ours is not None:
            self[config] = ours
        return ours is not None

    def __contains__(self, config: Any) -> bool:
        return super().__contains__(config) or self.add(config)

    def __missing__(self, config: Any) -> Any:
        if self.add(config):
            return self[config]
        raise KeyError(config)


def _auto_classes() -> list[Any]:
    """Return the auto classes that this version of transformers has."""
    found = (getattr(transformers, name, None) for name in AUTO_CLASSES)
    return [auto_class for auto_class in found if auto_class is not None]


def _foreign(auto_class: Any) -> dict[type[PreTrainedConfig], Any]:
    """Return the classes in an auto class that come neither from transformers nor from this package."""
    registrations: dict[type[PreTrainedConfig], Any] = auto_class._model_mapping._extra_content
    return {
        config: other
        for config, other in registrations.items()
        if not other.__module__.startswith("transformers.") and other.__module__ != MODULE
    }


def _find(auto_class: Any, config: Any) -> Any:
    """Return the class of this package that an auto class should return for a configuration class, or None.

    If transformers knows the model type, our class appears in the same auto classes as the transformers class with the
    same name. In two cases, our class appears in the auto class for causal language models: transformers does not know
    the model type, or transformers uses the language model only as a part of other models.
    """
    outer = getattr(config, "model_type", None)
    listed = class_name(auto_class, outer) if isinstance(outer, str) else None
    for model_type in list_archs():
        if model_type != outer and (listed is None or class_name(auto_class, model_type) != listed):
            continue
        for ours in _classes_of(model_type):
            if config is ours.config_class:
                is_new = config.__module__ == config_class.__module__  # transformers has no such model type
                unlisted = is_new or (listed is None and ours.__name__.endswith("ForCausalLM"))
                if listed == ours.__name__ or (unlisted and auto_class.__name__ == AUTO_CLASSES[0]):
                    return ours
            # A text model can also be read from image-text checkpoints, whose configuration contains the text
            # model's configuration.
            is_contained = listed == ours.__name__ and outer in format_of(get_arch(model_type)).contained_in
            if is_contained and config is config_class(outer):
                return ours
    return None
