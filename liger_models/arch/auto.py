"""Auto classes, which choose the model class by the ``model_type`` in config.json."""

import difflib
import importlib
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from liger_models.arch.registry import ALIASES, LANGUAGE_MODELS, MODEL_CLASSES, built_in, built_in_modules
from liger_models.base.causal_lm import CausalLM, check_config
from liger_models.base.processor import Processor
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.convert.config_map import is_causal, read_config
from liger_models.convert.files import read_json_config, read_model_type
from liger_models.convert.format import format_of
from liger_models.convert.load import read_assets
from liger_models.kernels.options import KernelOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ENTRY_POINTS = "liger_models.architectures"
"""Entry-point group in which installed packages list the modules that call `liger_models.register`."""


def list_archs() -> list[str]:
    """Return the sorted model types of all architectures that are built in, registered, or provided by a plugin."""
    return sorted({*built_in(), *MODEL_CLASSES, *_plugins().names} - LANGUAGE_MODELS.keys())


def list_model_types() -> list[str]:
    """Return the sorted model types of `list_archs`, and of further models that load without their vision or audio
    towers."""
    return sorted([*list_archs(), *LANGUAGE_MODELS])


def get_arch(model_type: str) -> type[CausalLM]:
    """Return the model class of ``model_type``.

    Raises:
        ValueError: the architecture does not exist, or the module of its entry point does not register it.
    """
    # Built-in families and plugins are imported on first use.
    if model_type not in MODEL_CLASSES:
        model_type = ALIASES.get(model_type, model_type)
    if model_type not in MODEL_CLASSES and model_type in built_in():
        importlib.import_module(built_in_modules()[model_type])
    if model_type not in MODEL_CLASSES and model_type in LANGUAGE_MODELS:
        importlib.import_module(LANGUAGE_MODELS[model_type])
    if model_type not in MODEL_CLASSES:
        for plugin in _plugins().select(name=model_type):
            plugin.load()
            if model_type not in MODEL_CLASSES:
                raise ValueError(
                    f"{plugin.value}: must call liger_models.register({model_type!r}, ...), as its entry point says, "
                    "got no such call. Use the same name in both."
                )
    if model_type not in MODEL_CLASSES:
        # Neither a built-in family nor a plugin has this model type: suggest the nearest name.
        known = list_model_types()
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"model_type {model_type!r} is not supported.{hint} Known: {', '.join(known)}. If it is an architecture of "
            f"your own, first import the module that calls liger_models.register({model_type!r}, ...), or install it "
            f"with an entry point in the group {ENTRY_POINTS!r}."
        )
    return MODEL_CLASSES[model_type]


def load_by_name(name: str, **options: Any) -> CausalLM:
    """Load a model from a local folder if ``name`` is the path of a folder, and otherwise from the hub.

    Args:
        name: path of a folder, or name of a repository on the hub, with or without its owner.
        options: arguments of `CausalLM.from_pretrained` and `CausalLM.from_hub`.
    """
    load = AutoLigerModel.from_pretrained if Path(name).exists() else AutoLigerModel.from_hub
    return load(name, **options)


def _plugins() -> EntryPoints:
    return entry_points(group=ENTRY_POINTS)


class _AnyFamily(CausalLM):
    """Methods that load a model and choose its class by config.json. This class has no instances."""

    @classmethod
    def _class_for(cls, hf_config: Mapping[str, Any]) -> type[CausalLM]:  # type: ignore[override]
        return get_arch(read_model_type(hf_config))

    @classmethod
    def _class_at(cls, folder: str | os.PathLike[str]) -> type[CausalLM]:  # type: ignore[override]
        return cls._class_for(read_json_config(Path(folder)))


class AutoLigerModel:
    """Loads or builds a model. The ``model_type`` in config.json selects the model class."""

    def __init__(self) -> None:
        raise TypeError("AutoLigerModel: has no instances. Use from_hub, from_pretrained or from_config.")

    from_hub = _AnyFamily.from_hub
    """Load a model from the Hugging Face hub. The arguments are the same as for `CausalLM.from_hub`."""
    from_pretrained = _AnyFamily.from_pretrained
    """Load a model from a local folder, or from the hub if there is no such folder.

    The arguments are the same as for `CausalLM.from_pretrained`.
    """

    @classmethod
    def from_config(
        cls,
        config: "Mapping[str, Any] | DataclassInstance",
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        kernels: KernelOptions | None = None,
        strict: bool = False,
    ) -> CausalLM:
        """Build a model with newly initialized weights.

        Args:
            config: an instance of an architecture's config class, or the content of a config.json.
            dtype: dtype of the parameters, or its name.
            device: device of the parameters.
            kernels: which parts of the model run on fused kernels.
            strict: whether an unknown key of config.json is an error instead of a warning.

        Raises:
            TypeError: ``config`` is neither an instance of a config class nor the content of a config.json.
        """
        if not isinstance(config, Mapping):
            check_config(config, " or the content of a config.json")
        if isinstance(config, Mapping):
            # The content of a config.json determines the family by its model_type, and a config instance by its class.
            model_class = get_arch(read_model_type(config))
            parsed: Any = read_config(model_class.config_class, config, strict=strict)
        else:
            model_class = get_arch(format_of(type(config)).model_type)
            parsed = config
        model = model_class.from_config(parsed, dtype=dtype, device=device, kernels=kernels)
        if isinstance(config, Mapping) and not is_causal(config):
            model.set_bidirectional()
        return model


class AutoLigerProcessor:
    """Loads only the processor of a vision-language model. The processor turns texts and images into model inputs."""

    def __init__(self) -> None:
        raise TypeError("AutoLigerProcessor: has no instances. Use from_pretrained.")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Processor:
        """Load the processor from the folder of a checkpoint, or from a folder written by `Processor.save_pretrained`.

        The result equals ``model.processor``. The folder must contain config.json, the tokenizer's files and the image
        settings.

        Raises:
            FileNotFoundError: the folder does not exist or has no config.json.
            ValueError: the model takes no images, a file is missing, or the files are inconsistent with each other.
        """
        hf_config = read_json_config(Path(folder))
        model_class = get_arch(read_model_type(hf_config))
        if not issubclass(model_class, VisionLanguageModel):
            raise ValueError(
                f"AutoLigerProcessor: {folder} must be a model with images, got {model_class.__name__}, which takes "
                "text only. Use Tokenizer.from_pretrained."
            )
        # The model is on the meta device, because the processor needs only its config and files.
        with torch.device("meta"):
            model: Any = model_class(read_config(model_class.config_class, hf_config))
        model.hf_config, model.assets = hf_config, read_assets(Path(folder), hf_config)
        processor: Processor = model.processor
        return processor
